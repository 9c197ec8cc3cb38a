"""`FollowingTables`: gives the slots of following tables to the ids that are looked up most.

A step between updates is local: ids are noted as they are translated. An update has these parts,
each on all ranks before the next:

1. Count: noted lookups go to the ranks that own the ids.
2. Select: the hottest ids of each table, exactly, over all ranks.
3. Hand over: ids that lost free their slots, ids that won get a reservation.
4. Admit: once no batch in flight was translated before the hand-over, the reserved rows are
   written, and their ids are found from then on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.compaction.collections import initial_bounds
from dist_sparse.compaction.moving import Steppers, StoredTables
from dist_sparse.compaction.tables import draw_rows
from dist_sparse.groups import Group, world_group
from dist_sparse.records import SlotChange, SlotUpdate
from dist_sparse.slots.collections import (
    FollowingCollection,
    FollowingIds,
    SlotIndex,
)
from dist_sparse.slots.selection import (
    PROTECTED,
    CandidateCounts,
    LookupCounts,
    Weight,
    bars,
    exchanged,
    gathered,
    winners,
)
from dist_sparse.tables.modules import collection_of
from dist_sparse.text import count, percent, table_lines


@dataclass(eq=False)
class _Table:
    """A following table.

    Args:
        name: of the table.
        collection: that it is in.
        bounds: of its initial weights.
        starts: where the range of each rank's ids begins and, last, where the ids end.
        counts: of this rank's range.
        protected: ids that always hold a slot, ascending, int64.
        candidates: how many ids have a count over all ranks, where there are too many ids.
        totals: lookups of all ranks until the last update, as :attr:`FollowingIds.fates`.
        new: ids of this rank's range that had no count at the last update, int64, in any order.
    """

    name: str
    collection: FollowingCollection
    bounds: tuple[float, float]
    starts: list[int]
    counts: LookupCounts | CandidateCounts
    protected: Tensor
    candidates: int
    totals: Tensor
    new: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))

    @property
    def ids(self) -> FollowingIds:
        return self.collection.following_ids

    @property
    def index(self) -> SlotIndex:
        return self.ids.slots[self.name]

    @property
    def fates(self) -> Tensor:
        """Lookups on this rank since the last update: int64 ``(4,)``."""
        return self.ids.fates[self.name]

    def stored(self, steppers: Steppers) -> StoredTables:
        """Return what this rank stores of the table."""
        return StoredTables(self.collection.inner, [self.name], steppers)

    @torch.no_grad()
    def write(self, ids: Tensor, slots: Tensor, steppers: Steppers, seed: int) -> None:
        """Write what this rank stores of rows that change hands: weights become the initial ones of
        the id that comes, optimizer state that of a new row. No other row is read or written.

        Args:
            ids, slots: which ids come into which slots, int64 ``(n,)``.
        """
        stored = self.stored(steppers)
        states = [
            (shards, stored.initial(self.name, key))
            for key, shards in stored.states(self.name).items()
        ]
        for number, (rect, weight) in enumerate(stored.located[self.name].shards):
            inside = (slots >= rect.row) & (slots < rect.row_end)
            places = slots[inside] - rect.row
            draw_rows(weight, rect, places, ids[inside], seed, self.name, self.bounds)
            for shards, initial in states:
                shards[number][places.to(weight.device)] = initial

    def held_here(self) -> Tensor:
        """Return the ids of this rank's range that hold a slot, int64."""
        ids = self.index.holders()[0].cpu()
        return ids[(ids >= self.counts.first) & (ids < self.counts.last)]

    def keys(self, ids: Tensor, holds: bool | Tensor) -> Tensor:
        """Return what orders ids of this rank's range, int64 ``(n,)``: larger wins.

        Args:
            holds: whether they hold slots.
        """
        keys = 2 * self.counts.of(ids) + holds
        return keys.masked_fill_(torch.isin(ids, self.protected), PROTECTED)

    def holds(self, ids: Tensor) -> Tensor:
        """Return which ids hold slots: bool ``(n,)``, on the CPU."""
        found: Tensor = self.index(ids.to(self.index.id_of_slot.device)).cpu() >= 0
        return found

    def count(self, arrived: Sequence[tuple[Tensor, Tensor]], weight: int) -> None:
        """Add lookups of this rank's ids: distinct ids and how often, from each rank."""
        added = [self.new]
        for ids, times in arrived:
            # Of an id that several ranks bring, or that a summary has counted since the last
            # update, all lookups are the first.
            first = (self.counts.of(ids.long()) == 0) | torch.isin(ids.long(), self.new)
            first &= ~self.holds(ids)
            self.fates[2] += times[first].sum()
            added.append(ids[first].long())
        self.new = torch.cat(added)
        for ids, times in arrived:
            self.counts.add(ids, times, weight)

    def forget_fates(self) -> None:
        """Begin the time after an update."""
        self.fates.zero_()
        self.new = self.new[:0]

    def seen(self) -> tuple[int, int]:
        """Return how many ids of this rank's range were looked up and hold no slot, and how many
        never were."""
        seen = int(self.counts.counts.count_nonzero())
        with_slot = int(self.counts.of(self.held_here()).count_nonzero())
        return seen - with_slot, self.counts.last - self.counts.first - seen

    def newcomers(self, least: int) -> Tensor:
        """Return the ids of this rank's range without a slot that may win one, ascending, int64.

        Args:
            least: count of an id that is not protected.
        """
        mine = (self.protected >= self.counts.first) & (self.protected < self.counts.last)
        ids = torch.unique(torch.cat([self.counts.looked_up(least), self.protected[mine]]))
        found: Tensor = ids[~self.holds(ids)]
        return found


class FollowingTables:
    """The following tables of a sharded model, and the counts by which ids hold their slots.

    Every id of a table is counted, by the rank that owns its range: an int32. Of a table with more
    than 2,147,483,645 ids those with the highest counts are, then the smaller ids: any other id
    starts from 0 when it is next looked up. Every ``every`` steps
    the hottest ids hold the slots: an id comes if it has ``admit_after`` lookups, and more than
    another id that holds a slot. It gets the table's initial weights, drawn by seed, table and id,
    and new optimizer state; a slot stays where it is stored. With equal counts, holders stay, then
    smaller ids come first: slots are the same on every sharding and number of ranks.

    With a train pipeline, batches are translated ahead. Ids that lose their slots are not found
    from the update on; the ids that follow are found once the batches in flight have been trained,
    so that a slot is never trained for two ids.

    Collective: every rank of the world must make it, and call ``step()`` equally often.

    Args:
        model: a DistributedModelParallel with collections of :func:`~dist_sparse.following`.
        optimizer: what steps tables without a fused optimizer, one or a sequence.
        every: steps between updates.
        admit_after: lookups that an id needs before it gets a slot; with ``decay``, in today's
            weight.
        decay: what a lookup is worth after each update, in [0.01, 1].
        protect_ids: by table, ids that hold a slot from the first update on, whatever is looked up.
        candidates: of a table with more than 2,147,483,645 ids, how many have a count for each
            slot; 12 bytes each, over all ranks.
        seed: of initial weights.

    Attributes:
        steps: calls of :meth:`step`.
        moved: how many slots each table has handed over.
        updates: a list to which each update appends what it changed, over all ranks; None without a
            log.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; the model has no following
            tables, or two of one name. On every rank.

    Example::

        >>> from dist_sparse import FollowingTables, following
        >>> # model = DistributedModelParallel(Net(following(bags, rows={"item": 1_000_000})))
        >>> # slots = FollowingTables(model, every=100, admit_after=2)
        >>> # after each optimizer step: slots.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        every: int = 100,
        admit_after: int = 1,
        decay: float = 1.0,
        protect_ids: Mapping[str, Sequence[int] | Tensor] | None = None,
        candidates: int = 4,
        seed: int = 0,
    ) -> None:
        self._group = world_group()
        with self._group.agreeing("FollowingTables()") as facts:
            self.every = checks.integer("every", every, least=1)
            self.admit_after = checks.integer("admit_after", admit_after, least=1)
            checks.number("decay", decay, least=0.01, most=1)
            self.seed = checks.integer("seed", seed)
            checks.integer("candidates", candidates, least=1)
            self._weight = Weight(decay)
            self._steppers = Steppers(optimizer)
            modules = model.modules()
            collections = [each for each in modules if isinstance(each, FollowingCollection)]
            self._tables = _tables_of(collections, protect_ids or {}, candidates, self._group)
            # Refuses what an update could not write.
            for table in self._tables.values():
                table.stored(self._steppers)
            facts.update(
                every=every, admit_after=admit_after, decay=decay, seed=seed, **self._described()
            )
        self.steps = 0
        self.moved = dict.fromkeys(self._tables, 0)
        self.updates: list[SlotUpdate] | None = None
        # The step after which reserved slots are held; -1 where none is reserved.
        self._admits_at = -1

    def step(self) -> None:
        """Call after each optimizer step. Collective in steps with an update, otherwise local.

        Raises:
            ValueError: ranks are at different steps; on every rank.
            RuntimeError: an update is due while batches of the one before are in flight: ``every``
                is too small for this pipeline.
        """
        self.steps += 1
        if 0 <= self._admits_at <= self.steps:
            self._admit()
        if self.steps % self.every == 0:
            self._update()

    def _update(self) -> None:
        """Give the slots to the hottest ids. Collective."""
        started = time.perf_counter()
        ahead = max([each.ids.ahead for each in self._tables.values()], default=0)
        with self._group.agreeing("step()") as facts:
            facts["steps"] = self.steps
            if self._admits_at >= 0:
                raise RuntimeError(
                    f"Update {self.steps} is due while batches of the update before are in flight:"
                    f" every={self.every} must be larger than the {ahead} batches that the pipeline"
                    " is ahead."
                )
        ahead = int(self._group.all_gather(torch.tensor([ahead])).max())
        self._count()
        self._forget()
        changes = self._select()
        divisor = self._weight.next()
        for table, (leaving, coming) in zip(self._tables.values(), changes, strict=True):
            device = table.index.id_of_slot.device
            table.index.hand_over(leaving.to(device), coming.to(device))
            table.counts.seen_all()
            self.moved[table.name] += len(coming)
            if divisor is not None:
                table.counts.divide(divisor)
        self._admits_at = self.steps + ahead
        if not ahead:
            self._admit()
        self._record(changes, started)

    def _record(self, changes: Sequence[tuple[Tensor, Tensor]], started: float) -> None:
        """Sum up the lookups since the update before over all ranks. Collective."""
        tables, found = list(self._tables.values()), []
        sums = self._group.all_reduce(torch.stack([table.fates for table in tables]))
        for table, row, (leaving, coming) in zip(tables, sums, changes, strict=True):
            table.forget_fates()
            table.totals.add_(row)
            lookups, missed, unseen, out_of_range = row.tolist()
            found.append(
                SlotChange(
                    name=table.name,
                    lookups=lookups,
                    removed=missed - unseen,
                    unseen=unseen,
                    out_of_range=out_of_range,
                    came=len(coming),
                    went=len(leaving),
                )
            )
        if self.updates is not None:
            seconds = time.perf_counter() - started
            self.updates.append(SlotUpdate(seconds=seconds, tables=tuple(found)))

    def _count(self) -> None:
        """Bring the noted lookups to the ranks that own the ids. Collective."""
        tables = list(self._tables.values())
        outgoing: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for table in tables:
            ids, times = table.ids.take_noted(table.name)
            # Ids ascend: those of a rank's range are together.
            cuts = torch.searchsorted(ids, torch.tensor(table.starts[1:-1], dtype=ids.dtype))
            parts = zip(ids.long().tensor_split(cuts), times.tensor_split(cuts), strict=True)
            for of_owner, both in zip(outgoing, parts, strict=True):
                of_owner += both
        arrived = exchanged(outgoing, self._group)
        for number, table in enumerate(tables):
            pairs = [(each[2 * number], each[2 * number + 1]) for each in arrived]
            table.count(pairs, self._weight.now)

    def _forget(self) -> None:
        """Keep the counts of the hottest ids, of tables with too many to count each. Collective."""
        bounded = [table for table in self._tables.values() if table.index.hashed]
        if not bounded:
            return
        keys = [table.counts.counts.long() for table in bounded]
        flags = winners([table.candidates for table in bounded], keys, self._group)
        for table, kept in zip(bounded, flags, strict=True):
            counts = cast(CandidateCounts, table.counts)
            # Decay has brought some down to 0, which is that of any other id.
            counts.keep(kept & (counts.counts > 0))

    def _select(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each table the ids that lose their slots, and those that win one, over all
        ranks: ascending, int64. Collective."""
        tables, group = list(self._tables.values()), self._group
        slots, held, keys = [], [], []
        for table in tables:
            slots.append(table.index.stored)
            held.append(table.held_here())
            keys.append(table.keys(held[-1], True))
        least, contests = self.admit_after * self._weight.now, []
        for table, ids, bar in zip(tables, held, bars(slots, keys, group), strict=True):
            both, order = torch.cat([ids, table.newcomers(max(least, bar))]).sort()
            holds = order < len(ids)
            contests.append((both, holds, table.keys(both, holds)))
        won = winners(slots, [keys for *_, keys in contests], group)
        changes = []
        for (ids, holds, _), wins in zip(contests, won, strict=True):
            changes += [ids[holds & ~wins], ids[wins & ~holds]]
        all_changes = gathered(changes, group)
        return list(zip(all_changes[::2], all_changes[1::2], strict=True))

    def _admit(self) -> None:
        """Write the reserved rows, and let their ids be found. Local."""
        self._admits_at = -1
        for table in self._tables.values():
            # Lookups so far found no row.
            table.ids.sort_out()
            ids, slots = table.index.admit()
            table.write(ids.cpu(), slots.cpu(), self._steppers, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return counts and steps, for torch.save and torch.distributed.checkpoint, which loads
        them on any number of ranks. Who holds the slots is in the model's state. Collective."""
        self._count()
        # A state has room for so many: the run that saves goes on as the one that resumes.
        self._forget()
        return {
            "step": self.steps,
            "admits_at": self._admits_at,
            "decay": self._weight.decay,
            "age": self._weight.age,
            "seed": self.seed,
            "tables": self._described(),
            "counts": {
                name: table.counts.saved(table.candidates, self._group)
                for name, table in self._tables.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; the arguments ``every``, ``admit_after`` and ``protect_ids``
        stay. Load the model's state too. Collective.

        Raises:
            ValueError: the state is of other tables, ``decay`` or ``seed``, or of other ranks and
                not loaded by torch.distributed.checkpoint. On every rank, and nothing has changed.
        """
        with self._group.agreeing("load_state_dict()") as facts:
            mine = {
                "decay": self._weight.decay,
                "seed": self.seed,
                "tables": self._described(),
            }
            for key, value in mine.items():
                if (saved := state_dict.get(key)) != value:
                    raise ValueError(f"The state has {key}={saved}, and here it is {value}.")
            steps = {key: int(state_dict[key]) for key in ("step", "admits_at", "age")}
            counts = {
                name: table.counts.part(name, state_dict["counts"][name])
                for name, table in self._tables.items()
            }
            facts.update(steps)
        self.steps, self._admits_at = steps["step"], steps["admits_at"]
        self._weight = Weight(self._weight.decay, steps["age"])
        for name, table in self._tables.items():
            table.ids.take_noted(name)
            table.forget_fates()
            table.counts.load(*counts[name])

    def summary(self) -> str:
        """Return a text table of the slots, of the ids that hold none, and of what became of the
        lookups of training batches on all ranks. Collective."""
        self._count()
        tables = list(self._tables.values())
        here = [torch.cat([torch.tensor(table.seen()), table.fates]) for table in tables]
        both = self._group.all_reduce(torch.stack(here))
        # Narrow heads and short numbers: a table is one line in 80 columns.
        head = ["table", "ids", "slots", "held", "seen, no slot", "never seen", "moved"]
        head += ["lookups", "missed", "of new ids", "out of range"]
        lines = []
        for table, row in zip(tables, both, strict=True):
            index = table.index
            waiting, never = row[:2].tolist()
            lookups, missed, unseen, out = (row[2:] + table.totals).tolist()
            cells = [index.rows, index.stored, index.num_kept, waiting, never]
            cells += [self.moved[table.name], lookups]
            shares = [percent(part / max(lookups, 1)) for part in (missed - unseen, unseen)]
            lines.append((table.name, *map(_short, cells), *shares, _short(out)))
        return "\n".join([repr(self), *table_lines(head, lines, right=set(range(1, 11)))])

    def __repr__(self) -> str:
        names = ", ".join(self._tables)
        return f"{type(self).__name__}(step {self.steps}, every {self.every}: {names})"

    def _described(self) -> dict[str, list[int]]:
        """Return the ids and the slots of each table, and how many ids have a count."""
        return {
            name: [table.index.rows, table.index.stored, table.candidates]
            for name, table in self._tables.items()
        }


def _tables_of(
    collections: Sequence[FollowingCollection],
    protect_ids: Mapping[str, Sequence[int] | Tensor],
    candidates: int,
    group: Group,
) -> dict[str, _Table]:
    """Return the following tables of collections, by name."""
    found: dict[str, _Table] = {}
    for collection in collections:
        if not collection_of(collection.inner).is_sharded:
            raise ValueError(
                "The collection is not sharded yet: put the model under DistributedModelParallel"
                " first."
            )
        for name, index in collection.following_ids.slots.items():
            if name in found:
                raise ValueError(f"Two following tables have the name {name!r}.")
            block = -(-index.rows // group.size)
            starts = [min(rank * block, index.rows) for rank in range(group.size + 1)]
            counts: type[CandidateCounts | LookupCounts] = LookupCounts
            most = index.rows
            if index.hashed:
                # Too many ids to count each.
                counts, most = CandidateCounts, candidates * index.stored
            found[name] = _Table(
                name=name,
                collection=collection,
                bounds=initial_bounds(collection, name),
                starts=starts,
                counts=counts(starts[group.rank], starts[group.rank + 1]),
                protected=_protected(name, index, protect_ids.get(name, ())),
                candidates=most,
                totals=torch.zeros(4, dtype=torch.int64),
            )
    unknown = sorted(set(protect_ids) - set(found))
    rules = {
        "The model has no following tables: following() makes them.": not found,
        f"Invalid protect_ids: {unknown} are none of the tables {sorted(found)}.": unknown,
    }
    checks.refuse(rules)
    return found


def _protected(table: str, index: SlotIndex, ids: Sequence[int] | Tensor) -> Tensor:
    """Return protected ids: distinct, ascending, int64."""
    given = torch.as_tensor(ids)
    found: Tensor = torch.unique(given.long())
    fits = (given == given.long()).all() & (found >= 0).all() & (found < index.rows).all()
    if len(found) > index.stored or not fits:
        raise ValueError(
            f"Invalid protect_ids of table {table!r}: must be at most {index.stored} ids, which"
            f" have slots, in [0, {index.rows})."
        )
    return found


def _short(value: int) -> str:
    """Return a number in at most six characters: ``99,999``, ``1.1T``."""
    if value < 100_000:
        return count(value)
    thousands = (len(str(value)) - 1) // 3
    return f"{value / 1000**thousands:.4g}{'kMGTPE'[thousands - 1]}"
