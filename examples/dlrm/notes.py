"""How is a run written down while it trains? A folder with a log, of which a report can be made.

All runs are noted alike, so that their times compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dist_sparse import DataNormSparsifier, MaskEnforcer, RunLog
from dist_sparse.report.quality import Quality

__all__ = ["Notes"]

_LOSS_EVERY = 10
"""Steps; on a device each one read would wait for it."""

_QUALITY_EVERY = 50


class Notes:
    """The notes of one run: rank 0's loss, and AUC and NE of what was predicted since the last time, before it was
    learned. Collective, as is :meth:`close`; :meth:`step` is every so often, so every rank must call it."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        sparsifier: DataNormSparsifier | None = None,
        enforcer: MaskEnforcer | None = None,
    ) -> None:
        self._log = RunLog(folder, sparsifier, enforcer=enforcer, config=config)
        self._quality = Quality(_QUALITY_EVERY)
        self._steps = 0

    def step(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """One training step, after the masks have moved."""
        noted = loss if self._steps % _LOSS_EVERY == 0 else None
        self._log.step(self._steps, loss=noted, **self._quality.update(logits, labels))
        self._steps += 1

    def close(self, **values: float) -> None:
        """Notes what the run came to."""
        self._log.step(self._steps, **values)
        self._log.close()
