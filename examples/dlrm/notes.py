"""The log of one run, in a folder. All runs log the same, so that their times are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dist_sparse import BaseDataSparsifier, MaskEnforcer
from dist_sparse.extras.report import RunLog
from dist_sparse.extras.report.run_log import Quality

_LOSS_EVERY = 10
"""Steps; on a GPU each read of the loss waits for the device."""

_QUALITY_EVERY = 50


class Notes:
    """Log rank 0's loss, and AUC and NE of the predictions since the last values. Each example is
    predicted before it is trained on.

    Collective, as are :meth:`step` and :meth:`close`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        model: nn.Module,
        config: Mapping[str, Any],
        sparsifier: BaseDataSparsifier | None = None,
        enforcer: MaskEnforcer | None = None,
        *,
        start: int | None = None,
    ) -> None:
        """``start``: steps before a resume, whose log is continued; None starts a log."""
        self._log = RunLog(
            folder,
            sparsifier,
            enforcer=enforcer,
            model=model,
            name=name,
            config=config,
            resume=start is not None,
        )
        self._quality = Quality(_QUALITY_EVERY)
        self._steps = start or 0

    def step(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Log one training step, after the mask update."""
        logged = loss if self._steps % _LOSS_EVERY == 0 else None
        self._log.step(self._steps, loss=logged, **self._quality.update(logits, labels))
        self._steps += 1

    def close(self, **values: float | None) -> None:
        """Log the results of the run."""
        self._log.step(self._steps, **values)
        self._log.close()
