"""The ids of lookups: removed ones dropped or without weight, all of them counted.

A removed row is a row of zeros, and stays one if no optimizer moves it. So whole rows are masked by
their ids alone. In sums on a CPU, ids of removed rows are dropped before the lookup: they are not
read and get no gradient. All others keep their order, so that sums and updates are the same, bit
for bit. Elsewhere these ids weigh nothing: on a device the host would wait in every forward for the
number of remaining ids; a mean counts all ids; a sequence has a place for each.

Ids come feature after feature, int32 or int64 ``(n,)``, as local row numbers. An id outside of its
table counts as row 0, which FBGEMM's bounds check makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor

from dist_sparse.masking.device import sent
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.protocols import TableBatch

Ends = Sequence[int] | Tensor
"""Where the ids of each feature begin and, last, where they end: one more than there are features.
On a device a tensor, so that the host does not wait for it."""

EVERY: Final = 16
"""One forward in so many is sampled, beginning with the first after a mask update."""


def in_table(ids: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``ids`` as int64, with 0 for those outside ``[0, rows)``: of one table, or of the
    table of each id."""
    ids = ids.long()
    # Reading two numbers is quicker than three more passes, where that does not wait for a device.
    if isinstance(rows, int) and ids.is_cpu:
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def rows_by_feature(
    rows: Mapping[int, int], features: Sequence[int], ids: Tensor, ends: Ends
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the table of each feature, the rows that its ids name, int64 ``(n,)``, and which of
    them count, bool ``(n,)``.

    On a device, where slices would wait for ``ends``, all ids come with each feature, and count as
    none in row 0 if they belong to another one.

    Args:
        rows: of each table, by its number; ids of other tables are left out.
        features: for each feature the number of its table.
    """
    if isinstance(ends, Tensor):
        feature_of_each = _feature_of_each(ids, ends)
        for feature, table in enumerate(features):
            if table in rows:
                mine = feature_of_each == feature
                yield table, in_table(ids, rows[table]).masked_fill(~mine, 0), mine
        return
    for table, (start, stop) in zip(features, pairwise(ends), strict=True):
        if table in rows and start != stop:
            found = in_table(ids[start:stop], rows[table])
            yield table, found, torch.ones((), dtype=torch.bool).expand(found.shape)


def _feature_of_each(ids: Tensor, ends: Tensor) -> Tensor:
    """Return the number of each id's feature, int64 ``(n,)``, without waiting for the device. Ids
    before the first feature get -1, those behind the last the number of features."""
    places = torch.arange(ids.numel(), device=ids.device)
    return torch.bucketize(places, ends.long().contiguous(), right=True) - 1


class KeptIds:
    """Finds the ids of kept rows in a kernel's features.

    Args:
        kept: kept rows, bool ``(rows,)``, by the number of the table. Other tables keep all ids.
        features: the number of each feature's table.
    """

    def __init__(self, kept: Mapping[int, Tensor], features: Sequence[int]) -> None:
        self._kept = kept
        self._features = features

    def flags(self, ids: Tensor, ends: Ends, strict: bool = False) -> Tensor:
        """Return which ids are kept, bool ``(n,)``.

        Raises:
            IndexError: an id is outside of its table, if ``strict``.
        """
        if isinstance(ends, Tensor):
            return self._flags_on_device(ids, ends)
        found = torch.ones(ids.numel(), dtype=torch.bool)
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            kept = self._kept.get(table)
            if kept is not None and start != stop:
                named = ids[start:stop]
                # index_select() checks the range of every id.
                rows = named if strict else in_table(named, len(kept))
                torch.index_select(kept, 0, rows, out=found[start:stop])
        return found

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor of the kept ids in ``features`` and their weights, on a CPU.
        Gradients flow back to all weights, 0 to the weights of dropped ids.

        If an id is outside of its table, return ``features`` itself: FBGEMM raises an error, or
        warns and takes row 0.
        """
        try:
            chosen = self.flags(features.values(), features.offset_per_key(), strict=True)
        except IndexError:
            return features
        torchrec = torchrec_port()
        # It has made the features.
        assert torchrec is not None
        return torchrec.among(features, chosen)

    def _flags_on_device(self, ids: Tensor, ends: Tensor) -> Tensor:
        flags, starts, rows = self._flat
        # Ids before the first feature and behind the last one are of no table.
        feature = _feature_of_each(ids, ends) + 1
        return flags.index_select(0, starts[feature] + in_table(ids, rows[feature]))

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The flags of all tables in one tensor, as on a device each read is a launch; and where
        the table of each feature begins in it, and how many rows it has."""
        device = next(iter(self._kept.values())).device
        # The last flag is for the ids of all other tables, which so have one row.
        kept = [*self._kept.values(), torch.ones(1, dtype=torch.bool, device=device)]
        number = {table: i for i, table in enumerate(self._kept)}
        lengths = [*map(len, kept)]
        starts = [0, *accumulate(lengths)]
        # Of each feature, and of the ids before the first one and behind the last one.
        of = [number.get(table, len(kept) - 1) for table in (-1, *self._features, -1)]
        first, rows = [starts[i] for i in of], [lengths[i] for i in of]
        return torch.cat(kept), sent(first, device), sent(rows, device)


class MaskedIds:
    """Masks the lookups of one batch by their ids: those of removed rows are dropped, or weigh
    nothing.

    Args:
        batch: FBGEMM's batch.
        drops: ids are dropped, where all of a lookup are in range.

    Attributes:
        masked: whether ids of removed rows were dropped or weighed nothing in the last lookup.
    """

    def __init__(self, batch: TableBatch, drops: bool) -> None:
        self._batch = batch
        self._drops = drops
        self._kept: KeptIds | None = None
        self._to_weigh = False
        self.masked = False

    @property
    def any_removed(self) -> bool:
        """Whether a table masked by its ids has removed rows."""
        return self._kept is not None

    def use(self, kept: Mapping[int, Tensor]) -> None:
        """Take the kept rows, bool ``(rows,)``, of the tables masked by their ids."""
        self._kept = KeptIds(kept, self._batch.features) if kept else None

    def pass_on(self, requested: Any) -> Any:
        """Return the features of a lookup without the dropped ids."""
        passed = requested
        if self._drops and self._kept is not None:
            passed = self._kept.among(requested)
        self.masked = passed is not requested
        # Weight 0 keeps gradients from removed rows. A forward alone may read their zeros.
        self._to_weigh = not self.masked and torch.is_grad_enabled()
        return passed

    def before_kernel(self, kernel: Any, args: Any, call: dict[str, Any]) -> Any:
        """Forward pre-hook of FBGEMM's module: let ids of removed rows weigh nothing, unless they
        were dropped."""
        if not self._to_weigh:
            return None
        self.masked = True
        changed = None if self._kept is None else self._batch.weighed(call, self._kept.flags)
        return None if changed is None else (args, changed)

    def after_kernel(self, kernel: Any, args: Any, output: Any) -> None:
        """Forward hook of FBGEMM's module."""
        self._batch.restore_pooling()

    def without_removed(self, grad: Tensor, ids: Tensor, ends: Ends) -> Tensor | None:
        """Return the gradient of a sequence with zeros for removed rows; None for no change."""
        if self._kept is None or self._batch.pooling != "none":
            return None
        removed = self._kept.flags(ids, ends).logical_not_()
        if not grad.is_cpu:
            return grad.masked_fill(removed.unsqueeze(1), 0)
        # Takes half the time of masked_fill(), but the host would wait for a device.
        copied = grad.clone(memory_format=torch.contiguous_format)
        return copied.index_fill_(0, removed.nonzero().view(-1), 0)


class LookupCounts:
    """Counts the lookups of each row, for scores that ask for them.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = features
        self._counts: Mapping[int, Tensor] = {}
        # Lookups until counts must be clamped, so that no integer overflows.
        self._room = 0

    def __bool__(self) -> bool:
        """Whether any table is counted."""
        return bool(self._counts)

    def use(self, counts: Mapping[int, Tensor]) -> None:
        """Take the counts to add to, live, int32 or float64 ``(rows,)``, by the number of the
        table."""
        # New tensors, loaded or moved, may hold the largest count already.
        self._room = 0
        self._counts = counts

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count the lookups of one forward."""
        # No count grows by more than the number of ids: with room left, none can overflow. So
        # counts are clamped once in 2**30 lookups, not checked each time.
        self._room -= ids.numel()
        if self._room < 0:
            for count in self._counts.values():
                count.clamp_(max=MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        sizes = {table: count.numel() for table, count in self._counts.items()}
        for table, rows, mine in rows_by_feature(sizes, self._features, ids, ends):
            count = self._counts[table]
            count.index_add_(0, rows, mine.to(count.dtype))


class SampledLookups:
    """Counts lookups of tables, and lookups of removed rows, in one training forward of
    :data:`EVERY`: next to nothing, for any score.

    The sums are stored with the masks
    (:meth:`~dist_sparse.sparsifiers.packed_store.PackedStore.samples`) and start at 0 with new
    ones.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = features
        self._masks: Mapping[int, BlockMask] = {}
        self._sums: Mapping[int, Tensor] = {}
        self._removed: dict[int, Tensor] = {}
        self._forwards = 0

    def use(self, masks: Mapping[int, BlockMask], sums: Mapping[int, Tensor]) -> None:
        """Take new masks; both by the number of the table.

        Args:
            sums: int64 ``(2,)`` each, all lookups and those of removed rows, added to in place.
        """
        self._sums = sums
        if [*map(id, masks.values())] != [*map(id, self._masks.values())]:
            self._removed, self._forwards = {}, 0
        self._masks = masks

    def due(self) -> bool:
        """Whether this forward is counted."""
        # Lookups of an evaluation are no traffic.
        if not torch.is_grad_enabled():
            return False
        counted = self._forwards % EVERY == 0
        self._forwards += 1
        return counted

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count one forward."""
        sizes = {table: mask.rect.rows for table, mask in self._masks.items()}
        for table, rows, mine in rows_by_feature(sizes, self._features, ids, ends):
            sums, mask = self._sums[table], self._masks[table]
            sums[0] += mine.sum()
            if mask.removes:
                # Made once for each mask.
                if table not in self._removed:
                    self._removed[table] = mask.dead_rows()
                sums[1] += (self._removed[table].index_select(0, rows) & mine).sum()
