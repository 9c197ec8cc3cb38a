"""Ids of removed rows are dropped just before a lookup that adds rows up: a row of zeros changes no
sum.

What is dropped is not read, has no gradient and is not written. The other ids keep their order, so
that sums and updates of kept rows are the same, bit for bit, as with all ids. For CPUs: on a device
the host would have to wait, in every forward, for the number of ids that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.stats import dead_flags
from dist_sparse.tables.port import torchrec_port

__all__ = ["KeptIds", "kept_rows"]

_WORTH: Final = 4
"""Where a mask removes parts of rows too, which are zeroed all the same, ids are dropped if it
removes one row in so many whole."""


def kept_rows(mask: BlockMask) -> Tensor | None:
    """Return which rows of a shard are not removed whole: bool ``(rect.rows,)``, on the CPU; None
    for a mask that removes parts of rows, and too few whole rows to drop their ids."""
    removed = dead_flags(mask)
    enough = mask.grid.cols == 1 or int(removed.sum()) * _WORTH >= len(removed)
    return removed.logical_not_() if enough else None


class KeptIds:
    """Which ids of a kernel's features name a row that is not removed.

    Args:
        kept: for each feature, in the order of the ids, which rows of its table are not removed:
            bool ``(rows,)``; None where all ids are handed on.
    """

    def __init__(self, kept: Sequence[Tensor | None]) -> None:
        self._kept = list(kept)

    def __call__(self, ids: Tensor, counts: list[int]) -> Tensor | None:
        """Return which ids to hand on: bool ``(n,)``; None if one is outside its table: all of them
        are then, since what they mean is FBGEMM's to say (an error, or a warning and row 0).

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers.
            counts: how many there are of each feature.
        """
        parts = zip(self._kept, torch.split(ids, counts), strict=True)
        try:  # index_select looks at the range of every id, so that no pass of its own has to
            return torch.cat(
                [
                    torch.ones(part.shape, dtype=torch.bool)
                    if kept is None
                    else kept.index_select(0, part)
                    for kept, part in parts
                ]
            )
        except IndexError:
            return None

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor like ``features`` with the ids to hand on, and their weights;
        itself if one is outside its table. Gradients of the weights flow back; those of dropped ids
        are 0."""
        chosen = self(features.values(), features.length_per_key())
        if chosen is None:
            return features
        torchrec = torchrec_port()
        assert torchrec is not None  # it has made the features
        return torchrec.among(features, chosen)
