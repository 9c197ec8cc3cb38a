"""Drop the ids of removed rows just before a lookup that adds rows up: a row of zeros changes no
sum.

Dropped rows are not read, get no gradient and are not written. The other ids keep their order, so
that sums and updates of kept rows are the same, bit for bit, as with all ids. For CPUs: on a device
the host would have to wait, in every forward, for the number of remaining ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.port import torchrec_port

__all__ = ["KeptIds", "kept_row_flags"]

_WORTH: Final = 4
"""A mask that also removes parts of rows needs zeroing anyway: ids are dropped only if it removes
at least one row in so many whole."""


def kept_row_flags(mask: BlockMask) -> Tensor | None:
    """Return which rows of a shard are kept, in part at least: bool ``(rect.rows,)``, on the CPU;
    None for a mask that removes parts of rows, and too few whole rows to drop their ids."""
    removed = mask.dead_rows()
    enough = mask.grid.cols == 1 or int(removed.sum()) * _WORTH >= len(removed)
    return removed.logical_not_() if enough else None


class KeptIds:
    """Which ids of a kernel's features name a row that is not removed.

    Args:
        kept: for each feature, in the order of the ids, which rows of its table are not removed:
            bool ``(rows,)``; None where all ids are passed on.
    """

    def __init__(self, kept: Sequence[Tensor | None]) -> None:
        self._kept = list(kept)

    def __call__(self, ids: Tensor, counts: list[int]) -> Tensor | None:
        """Return which ids to pass on: bool ``(n,)``; None if one is outside its table: then all
        are passed on, since FBGEMM decides what they mean (an error, or a warning and row 0).

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers.
            counts: how many there are of each feature.
        """
        chosen = []
        try:
            for kept, part in zip(self._kept, torch.split(ids, counts), strict=True):
                if kept is None:
                    chosen.append(torch.ones(part.shape, dtype=torch.bool))
                else:
                    # index_select checks the range of every id: no pass of its own has to.
                    chosen.append(kept.index_select(0, part))
        except IndexError:
            return None
        return torch.cat(chosen)

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor like ``features`` with the ids to pass on, and their weights;
        itself if one is outside its table. Gradients flow back to the weights, 0 to those of
        dropped ids."""
        chosen = self(features.values(), features.length_per_key())
        if chosen is None:
            return features
        torchrec = torchrec_port()
        assert torchrec is not None  # it has made the features
        return torchrec.among(features, chosen)
