"""Sinks of a :class:`~dist_sparse.RunLog`: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardSink:
    """Writes event files for TensorBoard.

    Args:
        folder: of the files.

    Raises:
        ImportError: tensorboard is not installed.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import TensorBoardSink
        >>> with RunLog(tempfile.mkdtemp(), sinks=[TensorBoardSink(tempfile.mkdtemp())]) as log:
        ...     log.step(0, loss=0.5)
    """

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # tensorboard has no types.
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered and close the files."""
        self._writer.close()


class WandbSink:
    """Logs to a run of Weights & Biases.

    Args:
        run: returned by ``wandb.init()``; the caller finishes it.

    Example::

        >>> from dist_sparse.report import WandbSink
        >>> class Run:  # stands for wandb.init()
        ...     def log(self, values):
        ...         print(values)
        >>> WandbSink(Run()).scalars(7, {"loss": 0.5})
        {'step': 7, 'loss': 0.5}
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log once per step. The step is a value: W&B ignores steps that decrease, and a mask
        update is logged late."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Do nothing: the caller finishes the run."""
