"""Count the lookups of each row, for scores that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dist_sparse.enforcer.rows import count_lookups
from dist_sparse.sparsifiers.pieces import MOST_COUNTED


class LookupCounts:
    """Counts lookups of the tables of one batch.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = list(features)
        self._counts: Mapping[int, Tensor] = {}
        # Lookups until counts must be clamped, so that no integer overflows.
        self._room = 0

    def __bool__(self) -> bool:
        """Whether any table is counted."""
        return bool(self._counts)

    def use(self, counts: Mapping[int, Tensor]) -> None:
        """Take the counts to add to, live, by the number of the table."""
        # New tensors, loaded or moved, may hold the largest count already.
        if [*map(id, counts.values())] != [*map(id, self._counts.values())]:
            self._room = 0
        self._counts = counts

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Count the lookups of one forward; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        # No count grows by more than the number of ids: with room left, none can overflow. So
        # counts are clamped once in 2**30 lookups, not checked each time.
        self._room -= ids.numel()
        if self._room < 0:
            for count in self._counts.values():
                count.clamp_(max=MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        count_lookups(self._counts, self._features, ids, ends)
