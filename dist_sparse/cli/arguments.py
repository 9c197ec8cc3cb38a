"""Values of command-line arguments: sizes, counts, levels, block shapes, and functions by name.

Each ``parse_*`` is a type for argparse: its error message states the rule. Needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import sys
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class EntryError(ValueError):
    """There is no such function, it failed or returns something else. The message is for users."""


def model_from(entry: str) -> Any:
    """Call the function that ``entry`` names, without arguments, and return its model.

    The function returns the model, or ``(model, evaluate)`` as for :func:`model_and_evaluate`.

    Args:
        entry: ``package.module:function`` or ``file.py:function``.

    Raises:
        EntryError: there is no such file, module or function, it takes arguments, it failed, or it
            returns something else.
    """
    returned = _called(_function(entry))
    # What `plan` and `frontier` read: one function serves both.
    model = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if not hasattr(model, "named_modules"):  # torch need not be there to say so
        kind = type(returned).__name__
        raise EntryError(f"returned {kind}; must return a torch.nn.Module, or (model, evaluate).")
    return model


def model_and_evaluate(entry: str) -> tuple[Any, Any, Callable[[float], tuple[Any, Any]] | None]:
    """Call the function that ``entry`` names, and return its ``(model, evaluate)``, and what calls
    it with its parameter ``columns``, if it has one.

    Args:
        entry: as for :func:`model_from`.

    Raises:
        EntryError: likewise; and where ``evaluate`` fails.
    """
    function = _function(entry)

    def called(**columns: float) -> tuple[Any, Any]:
        returned = _called(function, **columns)
        if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
            raise EntryError("must return (model, evaluate), where evaluate is a function.")
        return returned[0], partial(_called, returned[1])

    def smaller(columns: float) -> tuple[Any, Any]:
        return called(columns=columns)

    has_columns = "columns" in inspect.signature(function).parameters
    return *called(), smaller if has_columns else None


def parse_budget(text: str) -> int | str:
    """Return ``512MiB`` or ``4096`` as bytes; ``10%`` as it is, to be checked where it is used.

    Raises:
        ArgumentTypeError: not a size.
    """
    # The share is of a model that is not loaded yet.
    if text.endswith("%"):
        parse_share(text)
        return text
    # ASCII: \d would take digits of other scripts.
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) ?(|[KMGT]iB)", text, re.ASCII)
    if match is None:
        raise ArgumentTypeError(
            f"Invalid size {text!r}: must be a share such as 10%, or bytes such as 4096 or 512MiB."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_share(text: str) -> float:
    """Return ``10%`` as 0.1.

    Raises:
        ArgumentTypeError: not a percentage.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text, re.ASCII)
    if match is None or float(match[1]) > 100:
        raise ArgumentTypeError(
            f"Invalid share {text!r}: must be a percentage such as 10%, at most 100%."
        )
    return float(match[1]) / 100


def parse_count(text: str) -> int:
    """Return a number of processes.

    Raises:
        ArgumentTypeError: not a whole number of at least 1.
    """
    if re.fullmatch(r"[1-9]\d*", text, re.ASCII) is None:
        raise ArgumentTypeError(f"Invalid {text!r}: must be a whole number, at least 1.")
    return int(text)


def _function(entry: str) -> Callable[..., Any]:
    """Import the function that ``entry`` names. The file's folder, or the current one, comes first
    on ``sys.path``, as for a script.

    Raises:
        EntryError: there is no such file, module or function, the module failed, or the function
            takes arguments.
    """
    where, _, name = entry.rpartition(":")
    if not where or not name:
        raise EntryError("must be package.module:function or file.py:function.")
    function: Callable[..., Any] | None = _called(_names_in, where).get(name)
    if not callable(function):
        raise EntryError(f"{where} has no function {name!r}.")
    # Parameters with defaults are fine.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise EntryError(f"{error}; must take no arguments.") from None
    return function


def _names_in(where: str) -> dict[str, Any]:
    """Run a file, or import a module, and return its names."""
    if where.endswith(".py"):
        file = Path(where)
        if not file.is_file():
            raise EntryError(f"there is no file {where}.")
        sys.path.insert(0, str(file.resolve().parent))
        # Not `__main__`: a training script would start to train.
        return runpy.run_path(where, run_name=file.stem)
    # A console script does not have the current folder there.
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(where))
    except ModuleNotFoundError as error:
        # A module that the user's own module imports, and does not find, is another failure.
        if not f"{where}.".startswith(f"{error.name}."):
            raise
        raise EntryError(f"there is no module {error.name!r} here.") from error


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the user's code, and turn its exception into an EntryError that says where it was
    raised."""
    try:
        return function(*args, **options)
    except EntryError:
        raise
    except (Exception, SystemExit) as error:
        # The callers of the user's code come first in the traceback, its callees (torch) last.
        # A syntax error has no line that ran.
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
        inside = [frame for frame in users if frame.filename == users[0].filename]
        place = f" at {os.path.relpath(inside[-1].filename)}:{inside[-1].lineno}" if inside else ""
        # One line: messages of torch have many.
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise EntryError(f"it failed{place} with {what}") from error


_MACHINERY: Final = (__file__, importlib.__file__, "<frozen ")
"""Files that import and call the user's code; runpy is frozen."""
