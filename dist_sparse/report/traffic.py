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
    from dist_sparse.sparsifiers.lookups import counted_rows

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
            # A count that has decayed below 1 is in the first octave.
            octaves = torch.frexp(lookups).exponent.long().clamp(min=1).where(lookups > 0, 0)
            for kind, of in enumerate((~dead, dead)):
                sums[kind, :_OCTAVES] += torch.bincount(octaves[of], minlength=_OCTAVES)
                sums[kind, _OCTAVES] += lookups[of].sum().round().long()
        summed = group_over(data.ranks).all_reduce(sums).tolist()
        (*kept, kept_lookups), (*removed, removed_lookups) = summed
        last = max([i for i in range(_OCTAVES) if kept[i] or removed[i]], default=-1) + 1
        found[name] = Traffic(
            kept=tuple(kept[:last]),
            removed=tuple(removed[:last]),
            kept_lookups=kept_lookups,
            removed_lookups=removed_lookups,
        )
    return found
