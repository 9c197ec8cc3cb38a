"""Atomic checkpoints: written whole or not at all.

All of the state is replicated (DDP), so rank 0 writes it alone, and every rank reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm.batches import DataError

__all__ = ["load", "save"]


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a new file beside ``path`` and rename it: an interrupted write leaves the last
    checkpoint.

    Raises:
        DataError: it can't be written (disk full, no such folder, no permission).
    """
    new = path.with_name(f".{path.name}.new")
    kept = ", and is as it was" if path.is_file() else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("wb") as file:
                torch.save(dict(state), file)
                file.flush()
                # Otherwise a power failure may leave an empty file under the name.
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        # With a full disk, torch raises an error of its own while it handles the OSError.
        why = error if isinstance(error, OSError) else error.__context__
        if not isinstance(why, OSError):
            raise
        raise DataError(f"{path} can't be written{kept}: {why}") from error


def load(path: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state, if it is of the same plan. Nothing in the file is executed.

    Args:
        path: of the file.
        plan: what must be unchanged for an exact resume.

    Raises:
        DataError: there is no such file, it is not a checkpoint of this example, or its plan is
            another one.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"There is no checkpoint to resume from: {path} does not exist.") from error
    except Exception as error:  # torch.load raises a different error for each kind of wrong file
        raise DataError(
            f"{path} is not a checkpoint: {type(error).__name__}: {error}".splitlines()[0]
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("plan"), dict):
        raise DataError(f"{path} is not a checkpoint of this example: it holds no plan.")
    saved = state["plan"]
    if wrong := [name for name, value in plan.items() if saved.get(name) != value]:
        differs = "; ".join(f"{name} was {saved.get(name)}, is {plan[name]}" for name in wrong)
        raise DataError(f"{path} is of another run: {differs}.")
    loaded: dict[str, Any] = state
    return loaded
