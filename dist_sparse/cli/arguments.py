"""Values of command-line arguments: sizes, counts, levels, block shapes, and functions by name.

Each ``parse_*`` is a type for argparse: its error message states the rule. Needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
import math
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

__all__ = [
    "EntryError",
    "model_and_evaluate",
    "model_from",
    "parse_budget",
    "parse_bytes",
    "parse_share",
]

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


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
    function = _function(entry)
    with _users_code(entry):
        returned = function()
    # What `plan` and `frontier` read: one function serves both.
    model = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if not hasattr(model, "named_modules"):  # torch need not be there to say so
        raise EntryError(
            f"Invalid {entry=}: returned {type(returned).__name__}; must return a torch.nn.Module,"
            " or (model, evaluate)."
        )
    return model


def model_and_evaluate(
    entry: str,
) -> tuple[Any, Any, dict[Any, Callable[[float], tuple[Any, Any]]]]:
    """Call the function that ``entry`` names, and return its ``(model, evaluate)``, and what calls
    it with one of its parameters ``columns`` and ``rows``, by name, if it has them.

    Args:
        entry: as for :func:`model_from`.

    Raises:
        EntryError: likewise.
    """
    function = _function(entry)

    def called(**part: float) -> tuple[Any, Any]:
        # Only the call: what is wrong with its result is said below.
        with _users_code(entry):
            returned = function(**part)
        if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
            raise EntryError(
                f"Invalid {entry=}: must return (model, evaluate), where evaluate is a function."
            )
        return returned

    smaller = {
        "columns": lambda share: called(columns=share),
        "rows": lambda share: called(rows=share),
    }
    parameters = _parameters(entry, function)
    return *called(), {part: smaller[part] for part in smaller if part in parameters}


def parse_bytes(text: str) -> int:
    """Return ``512MiB``, ``1.5 GB`` or ``4096`` as bytes.

    Raises:
        ArgumentTypeError: not a size.
    """
    # ASCII: \d would take digits of other scripts.
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        units = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        raise ArgumentTypeError(f"Invalid size {text!r}: must be a number and one of {units}.")
    size = float(match[1]) * _UNITS[match[2]]
    # Also where the number overflows to infinity.
    if not size < 2**63:
        raise ArgumentTypeError(f"Invalid size {text!r}: must be less than 2**63 bytes.")
    return int(size)


def parse_budget(text: str) -> int | str:
    """Return ``512MiB`` as bytes; ``10%`` as it is, to be checked where it is used.

    Raises:
        ArgumentTypeError: not a size.
    """
    # The share is of a model that is not loaded yet.
    return text.strip() if text.strip().endswith("%") else parse_bytes(text)


def parse_share(text: str) -> float:
    """Return ``10%`` as 0.1.

    Raises:
        ArgumentTypeError: not a percentage above 0% and up to 100%.
    """
    # NaN is in no range, so one check below refuses both.
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not text.strip().endswith("%") or not 0 < share <= 1:
        raise ArgumentTypeError(
            f"Invalid share {text!r}: must be a percentage such as 10%, above 0% and up to 100%."
        )
    return share


def _function(entry: str) -> Callable[..., Any]:
    """Import the function that ``entry`` names. The file's folder, or the current one, comes first
    on ``sys.path``, as for a script.

    Raises:
        EntryError: there is no such file, module or function, the module failed, or the function
            takes arguments.
    """
    where, separator, name = entry.rpartition(":")
    # A relative module has no package to be relative to.
    if not separator or not where or not name or where.startswith("."):
        raise EntryError(f"Invalid {entry=}: must be package.module:function or file.py:function.")
    with _users_code(entry):
        names = _names_of_file(entry, where) if where.endswith(".py") else _names_of(entry, where)
    function: Callable[..., Any] | None = names.get(name)
    if not callable(function):
        raise EntryError(f"Invalid {entry=}: {where} has no function {name!r}.")
    _parameters(entry, function)
    return function


def _names_of_file(entry: str, where: str) -> dict[str, Any]:
    file = Path(where)
    if not file.is_file():
        raise EntryError(f"Invalid {entry=}: there is no file {where}.")
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
        raise EntryError(f"Invalid {entry=}: there is no module {missing!r} here.") from error


def _parameters(entry: str, function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters.

    Raises:
        EntryError: one of them is required.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []  # some builtins have none that Python can read
    # Parameters with defaults are fine.
    try:
        signature.bind()
    except TypeError as error:
        raise EntryError(f"Invalid {entry=}: {error}; must take no arguments.") from None
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
        raise EntryError(f"Invalid {entry=}: it failed{_place(error)} with {what}") from error


def _place(error: BaseException) -> str:
    """Return `` at FILE:LINE`` of the last line in the user's file, "" if none ran (a syntax
    error)."""
    # The callers of the user's code come first in the traceback, its callees (torch) last.
    machinery = (__file__, runpy.run_path.__code__.co_filename, importlib.__file__)
    place, line = None, 0
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in machinery or frame.filename.startswith("<frozen "):
            continue
        place = place or frame.filename
        if frame.filename == place:
            line = frame.lineno or 0
    return f" at {os.path.relpath(place)}:{line}" if place else ""
