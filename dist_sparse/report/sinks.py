"""Where else do the numbers of a run go? TensorBoard and Weights & Biases, each behind a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardSink", "WandbSink"]


class TensorBoardSink:
    """Event files for TensorBoard.

    Args:
        folder: for the files.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoardSink needs tensorboard: pip install "dist_sparse[report]".') from error
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is buffered."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases.

    Args:
        run: what ``wandb.init()`` gave; it stays the caller's, who finishes it.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise ValueError(f"Invalid run of type {type(run).__name__}: must be what wandb.init() returns.")
        self._run = run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One ``log`` a step. The step goes along as a value: W&B refuses steps that go back, and the line of a due
        step comes one due step late."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Nothing: the run is the caller's."""
