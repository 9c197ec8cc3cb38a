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
from typing import Any

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


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
    # What `plan` and `frontier` read: one function serves both.
    returned = _called(_function(entry))
    model, _ = _pair(returned)
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
        model, evaluate = _pair(_called(function, **columns))
        if not callable(evaluate):
            raise EntryError("must return (model, evaluate), where evaluate is a function.")
        return model, partial(_called, evaluate)

    def smaller(columns: float) -> tuple[Any, Any]:
        return called(columns=columns)

    has_columns = "columns" in inspect.signature(function).parameters
    return *called(), smaller if has_columns else None


def _pair(returned: Any) -> tuple[Any, Any]:
    """Return a model and its evaluate, which is None if the model alone was returned."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    return returned, None


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
    if re.fullmatch(r"[1-9]\d?", text, re.ASCII):
        raise ArgumentTypeError(f"No table fits in {text} bytes. Did you mean {text}%?")
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
    match = re.fullmatch(r"(100|\d?\d(?:\.\d+)?) ?%", text, re.ASCII)
    if match is None:
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
    parts = re.fullmatch("(.+):(.+)", entry)
    if parts is None:
        raise EntryError("must be package.module:function or file.py:function.")
    where, name = parts.groups()
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
        sys.path.insert(0, str(Path(where).resolve().parent))
        # Not `__main__`: a training script would start to train.
        return runpy.run_path(where, run_name=Path(where).stem)
    # A console script does not have the current folder there.
    sys.path.insert(0, "")
    return vars(importlib.import_module(where))


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
        users = [(frame.filename, frame.lineno) for frame in frames]
        # The line of each file that ran last, the user's own file first.
        lines = {file: line for file, line in users if not file.startswith(_MACHINERY)}
        place = ""
        if lines:
            file = next(iter(lines))
            place = f" at {os.path.relpath(file)}:{lines[file]}"
        # One line: messages of torch have many.
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise EntryError(f"it failed{place} with {what}") from error


# Files that import and call the user's code; runpy is frozen.
_MACHINERY = (__file__, importlib.__file__, "<frozen ")
