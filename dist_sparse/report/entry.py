"""Which function does `package.module:function` or `file.py:function` name?"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["EntryError", "model_and_batches"]


class EntryError(ValueError):
    """There is no such function, or it returns something else; the message is for the user."""


def model_and_batches(entry: str) -> tuple[Any, Any]:
    """What the function that ``entry`` names returns, called without arguments: ``(model, batches)``.

    Raises:
        EntryError: there is no such file, module or function, or it returns something else. What the user's code raises
            comes out as it is.
    """
    made = _function(entry)()
    if not isinstance(made, tuple) or len(made) != 2:
        said = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise EntryError(f"Invalid {entry=}: returned {said}; must return (model, batches).")
    return made


def _function(entry: str) -> Callable[[], Any]:
    """Imports what ``entry`` names. As Python does it for a script or a module, the file's folder, or the current one,
    comes first on ``sys.path``.

    Raises:
        EntryError: there is no such file, module or function. What the module itself raises comes out as it is.
    """
    where, separator, name = entry.rpartition(":")
    if not separator or not where or not name or where.startswith("."):
        raise EntryError(f"Invalid {entry=}: must be package.module:function or file.py:function.")
    if where.endswith(".py"):
        file = Path(where)
        if not file.is_file():
            raise EntryError(f"Invalid {entry=}: there is no file {where}.")
        sys.path.insert(0, str(file.resolve().parent))
        found = runpy.run_path(where, run_name=file.stem).get(name)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise EntryError(f"Invalid {entry=}: there is no module {error.name!r} here.") from error
        found = getattr(module, name, None)
    if not callable(found):
        raise EntryError(f"Invalid {entry=}: {where} has no function {name!r}.")
    function: Callable[[], Any] = found
    return function
