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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class EntryError(ValueError):
    """There is no such function, it failed or returns something else. The message is for users."""

    def __init__(self, entry: str, why: str) -> None:
        super().__init__(f"Invalid FUNCTION={entry!r}: {why}")


def model_from(entry: str) -> Any:
    """Call the function that ``entry`` names, without arguments, and return its model.

    The function returns the model, or ``(model, evaluate)`` as for :func:`model_and_evaluate`.

    Args:
        entry: ``package.module:function`` or ``file.py:function``.

    Raises:
        EntryError: there is no such file, module or function, it takes arguments, it failed, or it
            returns something else.
    """
    function = _function(entry)
    with _users_code(entry):
        returned = function()
    # What `plan` and `frontier` read: one function serves both.
    model = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if not hasattr(model, "named_modules"):  # torch need not be there to say so
        kind = type(returned).__name__
        why = f"returned {kind}; must return a torch.nn.Module, or (model, evaluate)."
        raise EntryError(entry, why)
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
        # Only the call: what is wrong with its result is said below.
        with _users_code(entry):
            returned = function(**columns)
        if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
            raise EntryError(entry, "must return (model, evaluate), where evaluate is a function.")
        model, evaluate = returned

        def evaluated(model: Any) -> Any:
            with _users_code(entry):
                return evaluate(model)

        return model, evaluated

    def smaller(columns: float) -> tuple[Any, Any]:
        return called(columns=columns)

    return *called(), smaller if "columns" in _parameters(entry, function) else None


def parse_budget(text: str) -> int | str:
    """Return ``512MiB`` or ``4096`` as bytes; ``10%`` as it is, to be checked where it is used.

    Raises:
        ArgumentTypeError: not a size.
    """
    # The share is of a model that is not loaded yet.
    if text.endswith("%"):
        return text
    # ASCII: \d would take digits of other scripts.
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[KMGT]iB)", text, re.ASCII)
    if match is None:
        raise ArgumentTypeError(
            f"Invalid size {text!r}: must be a share such as 10%, or bytes such as 4096 or 512MiB."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str) -> int:
    """Return a whole number, at least 1.

    Raises:
        ArgumentTypeError: not one.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"Invalid {text!r}: must be a whole number, at least 1.")
    return int(text)


def parse_share(text: str) -> float:
    """Return ``10%`` as 0.1.

    Raises:
        ArgumentTypeError: not a percentage.
    """
    if re.fullmatch(r"\d+(\.\d+)?%", text, re.ASCII) is None:
        raise ArgumentTypeError(f"Invalid share {text!r}: must be a percentage such as 10%.")
    return float(text.removesuffix("%")) / 100


def _function(entry: str) -> Callable[..., Any]:
    """Import the function that ``entry`` names. The file's folder, or the current one, comes first
    on ``sys.path``, as for a script.

    Raises:
        EntryError: there is no such file, module or function, the module failed, or the function
            takes arguments.
    """
    where, _, name = entry.rpartition(":")
    if not where or not name:
        raise EntryError(entry, "must be package.module:function or file.py:function.")
    with _users_code(entry):
        names = _names_of_file(entry, where) if where.endswith(".py") else _names_of(entry, where)
    function: Callable[..., Any] | None = names.get(name)
    if not callable(function):
        raise EntryError(entry, f"{where} has no function {name!r}.")
    _parameters(entry, function)
    return function


def _names_of_file(entry: str, where: str) -> dict[str, Any]:
    file = Path(where)
    if not file.is_file():
        raise EntryError(entry, f"there is no file {where}.")
    sys.path.insert(0, str(file.resolve().parent))
    # Not `__main__`: a training script would start to train.
    return runpy.run_path(where, run_name=file.stem)


def _names_of(entry: str, where: str) -> dict[str, Any]:
    # A console script does not have the current folder there.
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(where))
    except ModuleNotFoundError as error:
        # A module that the user's own module imports, and does not find, is another failure.
        missing = error.name
        if missing is None or not f"{where}.".startswith(f"{missing}."):
            raise
        raise EntryError(entry, f"there is no module {missing!r} here.") from error


def _parameters(entry: str, function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters.

    Raises:
        EntryError: one of them is required.
    """
    signature = inspect.signature(function)
    # Parameters with defaults are fine.
    try:
        signature.bind()
    except TypeError as error:
        raise EntryError(entry, f"{error}; must take no arguments.") from None
    return list(signature.parameters)


@contextmanager
def _users_code(entry: str) -> Iterator[None]:
    """Turn an exception of the user's code into an EntryError that says where it was raised."""
    try:
        yield
    except EntryError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise  # `dist-sparse` says how to install it
        # One line: messages of torch have many.
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise EntryError(entry, f"it failed{_place(error)} with {what}") from error


def _place(error: BaseException) -> str:
    """Return `` at FILE:LINE`` of the last line in the user's file, "" if none ran (a syntax
    error)."""
    # The callers of the user's code come first in the traceback, its callees (torch) last.
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    inside = [frame for frame in users if frame.filename == users[0].filename]
    return f" at {os.path.relpath(inside[-1].filename)}:{inside[-1].lineno}" if inside else ""


_MACHINERY: Final = (__file__, importlib.__file__, "<frozen ")
"""Files that import and call the user's code; runpy is frozen."""
