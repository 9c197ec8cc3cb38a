"""Rows of tables by how often training looked them up: how much of the traffic the kept rows get.

Known of tables whose sparsifier counts lookups (``counts_lookups``), if rows are on one rank or
removed as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.report.run import Traffic
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.lookups import counted_rows

__all__ = ["traffic"]

_OCTAVES = 33
"""Rows of no lookup, of 1, of 2 and 3, of 4 to 7 and so on up to int32's largest."""


def traffic(sparsifier: BaseDataSparsifier) -> dict[str, Traffic]:
    """Return the traffic of each table of which it is known. Collective: one small all-reduce per
    table."""
    packed = sparsifier.packed_store
    if not sparsifier.counts_lookups:
        return {}
    found = {}
    for name, data in packed.current("RunLog.close()").items():
        rows = counted_rows(data, packed.block(name), packed.masks(name), packed.counts(name))
        if rows is None:
            continue
        sums = torch.zeros(2, _OCTAVES + 1, dtype=torch.int64)
        for dead, lookups in rows:
            _add_rows(sums, dead, lookups)
        found[name] = _traffic_of(group_over(data.ranks).all_reduce(sums))
    return found


def _add_rows(sums: Tensor, dead: Tensor, lookups: Tensor) -> None:
    """Add the rows of a shard to ``sums``: of kept and of removed rows, how many by octave, and all
    their lookups."""
    # The exponent of 1 is 1, of 2 and 3 it is 2: rows without a lookup are octave 0. A count that
    # has decayed below 1 is in the first octave.
    octaves = torch.frexp(lookups).exponent.long().clamp(min=1).where(lookups > 0, 0)
    for kind, rows in enumerate((~dead, dead)):
        sums[kind, :_OCTAVES] += torch.bincount(octaves[rows], minlength=_OCTAVES)
        sums[kind, _OCTAVES] += lookups[rows].sum().round().long()


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
