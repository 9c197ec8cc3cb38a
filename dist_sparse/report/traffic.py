"""Rows of tables by how often training looked them up: how much of the traffic the kept rows get.

Known of tables whose sparsifier counts lookups (``counts_lookups``), if rows are on one rank or removed as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dist_sparse.report.lines import count

if TYPE_CHECKING:
    from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["Traffic", "read_traffic", "traffic"]

_OCTAVES = 33
"""Rows of no lookup, of 1, of 2 and 3, of 4 to 7 and so on up to int32's largest."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows of a table by their lookups: of none, of 1, of 2 and 3, of 4 to 7 and so on; and the lookups of all of them.

    ``kept``: rows with a kept weight; ``removed``: all others.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    kept_lookups: int
    removed_lookups: int

    @property
    def share(self) -> float | None:
        """Share of the lookups that kept rows had; None without lookups."""
        lookups = self.kept_lookups + self.removed_lookups
        return self.kept_lookups / lookups if lookups else None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


def read_traffic(held: Mapping[str, Any]) -> Traffic:
    """Return what :meth:`Traffic.to_json` wrote, checked."""
    kept, removed = (tuple(count(rows) for rows in held[name]) for name in ("kept", "removed"))
    if not len(kept) == len(removed) <= _OCTAVES:
        raise ValueError(f"{len(kept)} and {len(removed)} groups of rows")
    lookups = {name: count(held[name]) for name in ("kept_lookups", "removed_lookups")}
    return Traffic(kept=kept, removed=removed, **lookups)


def traffic(sparsifier: BaseDataSparsifier) -> dict[str, Traffic]:
    """Return the traffic of each table of which it is known. Collective: one small all-reduce per table."""
    import torch  # a run is read without it

    from dist_sparse.groups import group_over
    from dist_sparse.sparsifiers.stats import dead_flags

    packed = sparsifier.packed_store
    if not sparsifier.counts_lookups:
        return {}
    found = {}
    for name, data in packed.current("RunLog.close()").items():
        counts = packed.counts(name)
        whole = all(rect.cols == data.shape[1] for rect in data.rects) or packed.block(name)[1] >= data.shape[1]
        if counts is None or not whole:
            continue
        group = group_over(data.ranks)
        owned = set(data.owned(group.rank))
        sums = torch.zeros(2, _OCTAVES + 1, dtype=torch.int64)
        for mask, rows in zip(packed.masks(name), counts, strict=True):
            if mask.rect.col or mask.rect not in owned:
                continue
            lookups = rows.cpu().long()
            octaves = torch.frexp(lookups.double()).exponent.long().where(lookups > 0, 0)
            for kind, dead in enumerate((False, True)):
                of = dead_flags(mask) == dead
                sums[kind, :_OCTAVES] += torch.bincount(octaves[of], minlength=_OCTAVES)
                sums[kind, _OCTAVES] += lookups[of].sum()
        (*kept, kept_lookups), (*removed, removed_lookups) = group.all_reduce(sums).tolist()
        last = max([i for i in range(_OCTAVES) if kept[i] or removed[i]], default=-1) + 1
        found[name] = Traffic(
            kept=tuple(kept[:last]),
            removed=tuple(removed[:last]),
            kept_lookups=kept_lookups,
            removed_lookups=removed_lookups,
        )
    return found
