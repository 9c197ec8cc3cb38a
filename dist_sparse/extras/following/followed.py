"""One following table on this rank: its counts, its slots, and the rows that it stores."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_sparse.compaction.moving import Steppers, StoredTables, move_rows
from dist_sparse.compaction.tables import draw_rows
from dist_sparse.extras.following.selection import (
    PROTECTED,
    CandidateCounts,
    LookupCounts,
    lookups_of,
    ranking_keys,
)
from dist_sparse.extras.following.slot_index import SlotIndex
from dist_sparse.extras.following.slotted import FollowingCollection, FollowingIds, LookupStats
from dist_sparse.groups import world_rank
from dist_sparse.tables.shards import Rect


@dataclass(eq=False)
class FollowedTable:
    """A following table. This rank *owns* one range of its ids: it counts their lookups.

    Args:
        name: the name of the table.
        collection: the collection that has the table.
        bounds: the bounds of the uniform distribution of initial weights.
        starts: the first id that each rank owns and, last, the number of ids.
        counts: how often each id that this rank owns was looked up.
        protected: ids that always hold a slot, ascending, int64.
        candidates: how many ids have a count, over all ranks.
        totals: the :class:`LookupStats` of all ranks until the last update, int64 ``(4,)``.
        new_ids: owned ids first looked up since the last update, int64, in any order.
    """

    name: str
    collection: FollowingCollection
    bounds: tuple[float, float]
    starts: list[int]
    counts: LookupCounts | CandidateCounts
    protected: Tensor
    candidates: int
    totals: Tensor
    new_ids: Tensor

    @property
    def ids(self) -> FollowingIds:
        return self.collection.following_ids

    @property
    def index(self) -> SlotIndex:
        return self.ids.slots[self.name]

    @property
    def lookup_stats(self) -> Tensor:
        """The :class:`LookupStats` of this table on this rank, int64 ``(4,)``."""
        return self.ids.lookup_stats[self.name]

    def stored(self, steppers: Steppers) -> StoredTables:
        """Return the shards that this rank stores of the table."""
        return StoredTables(self.collection.inner, [self.name], steppers)

    @torch.no_grad()
    def admit(self, steppers: Steppers, seed: int) -> None:
        """Write the reserved slots in this rank's shards, let their ids be found, and empty the
        nursery. Collective over the ranks of the table if it has a nursery.

        A new row is what its id has read from the nursery, or drawn for the id if no gradient has
        reached that row. Optimizer state is that of a new row."""
        # Lookups before now found no slot, so they are counted before the index has the ids.
        self.ids.count_batches()
        ids, slots = [each.cpu() for each in self.index.reserved()]
        stored = self.stored(steppers)
        is_fresh = ~self._inherit(stored, ids, slots)
        for rect, weight in stored.located[self.name].shards:
            inside = is_fresh & (slots >= rect.row) & (slots < rect.row_end)
            if inside.any():
                rows = slots[inside] - rect.row
                draw_rows(weight, rect, rows, ids[inside], seed, self.name, self.bounds)
        self._reset_state(stored, slots)
        self.index.admit()
        self._empty_nursery(stored)

    def _inherit(self, stored: StoredTables, ids: Tensor, slots: Tensor) -> Tensor:
        """Write what ids have read from the nursery to their slots. Return which ids have such a
        row, bool ``(n,)``. Collective over the ranks of the table, if it has a nursery."""
        data, scale = stored.located[self.name], self.index.nursery_scale
        has_read = torch.zeros(len(ids), dtype=torch.bool)
        if not (self.index.nursery and len(ids) and world_rank() in data.holders):
            return has_read
        shared, places = torch.unique(self.index.nursery_rows(ids), return_inverse=True)
        flags = torch.zeros(data.shape[0], dtype=torch.bool)
        flags[shared] = True
        # Every rank gets all of these rows, whole: whether one is zero must not depend on shards.
        wanted = [[Rect(0, 0, len(shared), data.shape[1])]] * len(data.tiling)
        for part, values in move_rows(data, stored.weights(self.name), flags, wanted):
            values = values.cpu()
            is_trained = values.any(1)
            values = values.float() * scale
            # The nursery row of each id among these rows.
            at = places - part.row
            heirs = (at >= 0) & (at < part.rows)
            heirs &= is_trained[at.clamp(0, part.rows - 1)]
            has_read |= heirs
            for rect, weight in data.shards:
                here = heirs & (slots >= rect.row) & (slots < rect.row_end)
                rows = (slots[here] - rect.row).to(weight.device)
                read = values[at[here]][:, rect.col : rect.col_end]
                weight[rows] = read.to(weight.device, weight.dtype)
        return has_read

    @torch.no_grad()
    def start_nursery(self, scale: float, steppers: Steppers) -> None:
        """Let ids without a slot read the nursery, multiplied by ``scale``."""
        self.index.nursery_scale = scale
        # TorchRec has drawn the rows of a new table.
        if not (self.index.id_of_slot >= 0).any():
            self._empty_nursery(self.stored(steppers))

    def _empty_nursery(self, stored: StoredTables) -> None:
        """Reset the nursery rows in this rank's shards: weights to 0, optimizer state to that of
        new rows."""
        if self.index.nursery:
            for rect, weight in stored.located[self.name].shards:
                weight[max(0, self.index.slots - rect.row) :] = 0
            self._reset_state(stored, torch.arange(self.index.slots, self.index.stored))

    def _reset_state(self, stored: StoredTables, rows: Tensor) -> None:
        """Reset the optimizer state of rows, int64 ``(n,)``, in this rank's shards."""
        data = stored.located[self.name]
        for key, shards in stored.states(self.name).items():
            initial = stored.initial(self.name, key)
            for (rect, _), state in zip(data.shards, shards, strict=True):
                inside = rows[(rows >= rect.row) & (rows < rect.row_end)] - rect.row
                state[inside.to(state.device)] = initial

    def owned_holders(self) -> Tensor:
        """Return the owned ids that hold a slot, int64, in the order of the slots."""
        ids = self.index.id_of_slot.cpu()
        is_owned = (ids >= self.counts.first) & (ids < self.counts.last)
        return ids[is_owned].long()

    def ranking_keys(self, ids: Tensor, holds: bool) -> Tensor:
        """Return the keys that rank owned ids, int64 ``(n,)``: the larger key wins.

        Args:
            holds: whether the ids hold slots.
        """
        # The lowest bit breaks ties in favour of holders.
        keys = ranking_keys(self.counts.of(ids)) + holds
        if len(self.protected):
            keys.masked_fill_(torch.isin(ids, self.protected), PROTECTED)
        return keys

    def have_slots(self, ids: Tensor) -> Tensor:
        """Return which ids hold slots: bool ``(n,)``, on the CPU."""
        return self.index.slots_of(ids.to(self.index.id_of_slot.device)).cpu() >= 0

    def add_lookups(self, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add lookups of owned ids.

        Args:
            arrived: from each rank, distinct ids and how often it has looked them up.
        """
        new_ids = [self.new_ids]
        for ids, times in arrived:
            # Compare the ids of all ranks with the old counts first: an id that several ranks send,
            # or that summary() has already counted, is new until the next update.
            is_new = lookups_of(self.counts.of(ids)) == 0
            if len(self.new_ids):
                is_new |= torch.isin(ids, self.new_ids)
            [places] = is_new.nonzero(as_tuple=True)
            places = places[~self.have_slots(ids[places])]
            self.lookup_stats.add_(torch.tensor(LookupStats(unseen=int(times[places].sum()))))
            new_ids.append(ids[places])
        self.new_ids = torch.cat(new_ids)
        for ids, times in arrived:
            self.counts.add(ids, times)

    def reset_stats(self) -> None:
        """Begin the interval after an update."""
        self.lookup_stats.zero_()
        self.new_ids = self.new_ids[:0]

    def count_without_slot(self) -> tuple[int, int]:
        """Return how many owned ids have a count but no slot, and how many have no count."""
        seen = self.counts.num_seen()
        with_slot = int(lookups_of(self.counts.of(self.owned_holders())).count_nonzero())
        return seen - with_slot, self.counts.last - self.counts.first - seen

    def newcomers(self, least: int) -> Tensor:
        """Return the owned ids without a slot that may win one, ascending, int64.

        Args:
            least: the fewest lookups with which an unprotected id may win.
        """
        ids = self.counts.looked_up(least)
        if len(self.protected):
            owned = (self.protected >= self.counts.first) & (self.protected < self.counts.last)
            ids = torch.unique(torch.cat([ids, self.protected[owned]]))
        return ids[~self.have_slots(ids)]


def protected_ids(index: SlotIndex, ids: Sequence[int] | Tensor) -> Tensor:
    """Return protected ids: distinct, ascending, int64.

    Raises:
        ValueError: an id is not in the table, or there are more ids than slots.
    """
    # torch raises one of these for None, a set, text or uneven lists.
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not len(ids):
            return torch.zeros(0, dtype=torch.int64)
        given = torch.as_tensor(ids)
        # A TypeError for float and bool: float32 would take 16,777,217 for 16,777,216.
        torch.iinfo(given.dtype)
        distinct = torch.unique(given)
        # A narrow dtype can't hold the bound.
        wide: Tensor = distinct.long()
        fits = (wide >= 0) & (wide < index.rows) & (wide == distinct)
        if fits.all() and len(wide) <= index.slots:
            return wide
    raise ValueError(
        f"Invalid protect_ids of table {index.table!r}: must be at most {index.slots} distinct ids"
        f" (one slot each) in [0, {index.rows})."
    )
