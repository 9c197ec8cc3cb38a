"""Rows of tables by how often training looked them up: how much of the traffic the kept rows get.

Known of tables whose sparsifier counts lookups (``counts_lookups``), if rows are on one rank or removed as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.report.run import Traffic
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.stats import dead_flags

__all__ = ["traffic"]

_OCTAVES = 33
"""Rows of no lookup, of 1, of 2 and 3, of 4 to 7 and so on up to int32's largest."""


def traffic(sparsifier: BaseDataSparsifier) -> dict[str, Traffic]:
    """Return the traffic of each table of which it is known. Collective: one small all-reduce per table."""
    packed = sparsifier.packed_store
    if not sparsifier.counts_lookups:
        return {}
    found = {}
    for name, data in packed.current("RunLog.close()").items():
        # A row that is cut by columns may be dead on one rank and alive on another, unless it is removed as a whole.
        counts = packed.counts(name)
        whole = all(rect.cols == data.shape[1] for rect in data.rects) or packed.block(name)[1] >= data.shape[1]
        if counts is None or not whole:
            continue
        group = group_over(data.ranks)
        owned = set(data.owned(group.rank))
        sums = torch.zeros(2, _OCTAVES + 1, dtype=torch.int64)
        for mask, rows in zip(packed.masks(name), counts, strict=True):
            # Other column shards of a row have the same lookups.
            if mask.rect.col == 0 and mask.rect in owned:
                _add_rows(sums, mask, rows.cpu().long())
        found[name] = _traffic_of(group.all_reduce(sums))
    return found


def _add_rows(sums: Tensor, mask: BlockMask, lookups: Tensor) -> None:
    """Add the rows of a shard to ``sums``: of kept and of removed rows, how many by octave, and all their lookups."""
    # The exponent of 1 is 1, of 2 and 3 it is 2: rows without a lookup are octave 0.
    octaves = torch.frexp(lookups.double()).exponent.long().where(lookups > 0, 0)
    dead = dead_flags(mask)
    for kind, rows in enumerate((~dead, dead)):
        sums[kind, :_OCTAVES] += torch.bincount(octaves[rows], minlength=_OCTAVES)
        sums[kind, _OCTAVES] += lookups[rows].sum()


def _traffic_of(sums: Tensor) -> Traffic:
    (*kept, kept_lookups), (*removed, removed_lookups) = sums.tolist()
    while kept and not kept[-1] and not removed[-1]:
        kept.pop()
        removed.pop()
    return Traffic(
        kept=tuple(kept),
        removed=tuple(removed),
        kept_lookups=kept_lookups,
        removed_lookups=removed_lookups,
    )
