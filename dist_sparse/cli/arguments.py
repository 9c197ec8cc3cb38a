"""Values of command-line arguments: budgets, paths, and functions by name.

Types for argparse state their rule in the error message. Needs no torch.
"""

import importlib
import inspect
import os
import runpy
import sys
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dist_sparse import checks
from dist_sparse.launch.__main__ import closest
from dist_sparse.launch.child import relative


class UsageError(ValueError):
    """The command line has to be changed, or code that it names fails. The message is for users.

    Args:
        message: for users.
        status: the exit status: 2, or 1 if the user's code raises.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class EntryError(UsageError):
    """A function does not exist, has failed or returned a wrong type. The message leaves out which
    argument named it."""


def model_and_optimizer(entry: str) -> tuple[Any, Any]:
    """Call the function that ``entry`` names, without arguments; return ``(model, optimizer)``.

    The function returns the model, ``(model, optimizer)``, or ``(model, evaluate)`` as for
    :func:`model_and_evaluate`. The optimizer is None if it returned none.

    Args:
        entry: of :func:`entry_argument`.

    Raises:
        EntryError: the module or function does not exist, takes arguments, fails, or returns a
            wrong type.
    """
    returned = _call_user_code(_import_function(entry))
    model, second = _split(returned)
    # Not isinstance(): this module does not import torch.
    if not hasattr(model, "named_modules"):
        kind = type(returned).__name__
        raise EntryError(f"returned {kind}; must return a torch.nn.Module, or (model, optimizer).")
    # `plan` ignores evaluate, so that it takes the functions of `frontier` too.
    return model, None if callable(second) else second


def user_batches(entry: str | None) -> Iterable[Any] | None:
    """Call the function that ``--batches`` names, without arguments; return its batches, or None if
    it names no function.

    Args:
        entry: as for :func:`model_and_optimizer`.

    Raises:
        UsageError: as :func:`model_and_optimizer` raises an EntryError. Reading the batches raises
            it too.
        ValueError: the function returned a single batch.
    """
    if entry is None:
        return None
    from dist_sparse.ids.counts import each_batch

    with _naming_batches(entry):
        returned = _call_user_code(_import_function(entry))
        if not isinstance(returned, Iterable):
            raise EntryError(f"returned {type(returned).__name__}; must return batches.")
    # Here, since it refuses a single batch by its type.
    return _read(each_batch(returned), entry)


def _read(batches: Iterable[Any], entry: str) -> Iterator[Any]:
    """Yield batches. A generator is the user's code, which runs only now."""
    end = object()
    with _naming_batches(entry):
        iterator = _call_user_code(iter, batches)
        while (batch := _call_user_code(next, iterator, end)) is not end:
            yield batch


@contextmanager
def _naming_batches(entry: str) -> Iterator[None]:
    """Turn an EntryError, which is about FUNCTION, into an error about ``--batches``."""
    try:
        yield
    except EntryError as error:
        raise UsageError(f"Invalid --batches={entry!r}: {error}", error.status) from error


def model_and_evaluate(entry: str) -> tuple[Any, Any, Callable[[float], tuple[Any, Any]] | None]:
    """Call the function that ``entry`` names; return ``(model, evaluate, train)``.

    ``train(columns)`` calls the function again, for a model with that fraction of the columns. It
    is None if the function does not take ``columns``.

    Args:
        entry: as for :func:`model_and_optimizer`.

    Raises:
        EntryError: as for :func:`model_and_optimizer`. ``evaluate`` and ``train`` raise it too.
    """
    function = _import_function(entry)

    def build(**columns: float) -> tuple[Any, Any]:
        model, evaluate = _split(_call_user_code(function, **columns))
        if not callable(evaluate):
            raise EntryError("must return (model, evaluate), where evaluate is a function.")
        return model, partial(_call_user_code, evaluate)

    def train(columns: float) -> tuple[Any, Any]:
        return build(columns=columns)

    has_columns = "columns" in inspect.signature(function).parameters
    return *build(), train if has_columns else None


def _split(returned: Any) -> tuple[Any, Any]:
    """Return the two values that the function returned, or the model and None."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    return returned, None


def budget_argument(text: str) -> float:
    """Return :func:`~dist_sparse.checks.parse_budget` of a text.

    Raises:
        ArgumentTypeError: it is not a budget.
    """
    try:
        return checks.parse_budget(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def existing_path(text: str) -> Path:
    """Return the path of a file or folder.

    Raises:
        ArgumentTypeError: it does not exist.
    """
    # A link that leads nowhere exists: what reads it says more.
    if not os.path.lexists(text):
        raise ArgumentTypeError(f"{text!r} does not exist.")
    return Path(text)


def entry_argument(text: str) -> str:
    """Return the name of a function, ``package.module:function`` or ``file.py:function``.

    A file is looked up here, so that a missing one is named before other arguments that are
    missing.

    Raises:
        ArgumentTypeError: it has another form, or the file does not exist.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ArgumentTypeError(f"{text!r} must be package.module:function or file.py:function.")
    if where.endswith(".py") and not os.path.isfile(where):
        raise ArgumentTypeError(f"there is no file {where!r}.")
    return text


def _import_function(entry: str) -> Callable[..., Any]:
    """Import the function that ``entry`` names. The file's folder, or the current one, comes first
    on ``sys.path``, as for a script.

    Raises:
        EntryError: the module or function does not exist, the module fails, or the function takes
            arguments.
    """
    where, _, name = entry.rpartition(":")
    try:
        names = _call_user_code(_load_names, where)
    except EntryError as error:
        # A module that can't be imported has no function: the command line is wrong.
        error.status = 2
        raise
    function: Callable[..., Any] | None = names.get(name)
    if not callable(function):
        functions = [known for known, value in names.items() if callable(value)]
        raise EntryError(f"{where} has no function {name!r}{closest(name, functions) or '.'}")
    # bind() accepts parameters that have defaults.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise EntryError(f"{error}; must take no arguments.") from None
    return function


def _load_names(where: str) -> dict[str, Any]:
    """Run a file, or import a module, and return its names."""
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        # Not `__main__`: a training script would start to train.
        return runpy.run_path(where, run_name=Path(where).stem)
    # The current folder, which a console script does not have on its path.
    sys.path.insert(0, "")
    return vars(importlib.import_module(where))


def _call_user_code(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the user's code, and turn its exception into an EntryError that says where it was
    raised."""
    try:
        return function(*args, **options)
    except EntryError:
        raise
    except (Exception, SystemExit) as error:
        # A traceback begins with the caller of the user's code and ends inside its callees, such as
        # torch. So the first file that is not ours is the user's, and its last line in the
        # traceback is the most precise one. The traceback of a syntax error has no such file.
        frames = traceback.extract_tb(error.__traceback__)
        lines = {
            frame.filename: frame.lineno
            for frame in frames
            if not frame.filename.startswith(_MACHINERY)
        }
        place = ""
        if lines:
            file = next(iter(lines))
            place = f" at {relative(file)}:{lines[file]}"
        # The first line: torch's messages have many.
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise EntryError(f"it failed{place} with {what}", status=1) from error


# Files that import and call the user's code; runpy is frozen.
_MACHINERY = (__file__, importlib.__file__, "<frozen ")
