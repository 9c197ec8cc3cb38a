"""`FollowingTables` gives the slots of following tables to the most looked-up ids.

Steps between updates are local: ids are recorded as they are looked up. An update has four phases.
All ranks finish one before any begins the next:

1. Count: each rank sends the recorded lookups to the ranks that own the ids.
2. Select: find the hottest ids of each table, exactly, over all ranks.
3. Hand over: ids that lost free their slots, ids that won reserve them.
4. Admit: write the rows of the reserved slots, let their ids be found, and empty the nursery. This
   waits until every batch that was translated before the hand-over has been trained: such a batch
   still reads and writes the slots of the ids that lost.
"""

import math
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.compaction.collections import initial_bounds, least_rows, stored_rows
from dist_sparse.compaction.moving import Steppers
from dist_sparse.extras.following.followed import FollowedTable, protected_ids
from dist_sparse.extras.following.selection import (
    MOST,
    CandidateCounts,
    LookupCounts,
    admission_counts,
    exchange,
    gather_parts,
    lookups_of,
    ranking_keys,
    select_winners,
)
from dist_sparse.extras.following.slotted import (
    FollowingCollection,
    LookupStats,
)
from dist_sparse.groups import Group, world_group
from dist_sparse.optimizers import Optimizers
from dist_sparse.records import SlotChange, SlotUpdate
from dist_sparse.tables.modules import check_module, collection_of
from dist_sparse.text import percent, short, table_lines

# Optimizers that step as far with a gradient as with a multiple of it, apart from their eps:
# FBGEMM's fused ones, and classes of torch and TorchRec.
_SCALE_FREE = {"EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM"}
_SCALE_FREE |= {"Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "SparseAdam", "RMSprop"}

# Optimizers whose steps are proportional to the gradient.
_LINEAR = {"EXACT_SGD", "SGD"}

# The FollowingTables of each collection, while it exists. A second one would take a part of the
# lookups, and move slots by them.
_owner_of: Any = weakref.WeakValueDictionary()


class FollowingTables:
    """The following tables of a sharded model, and the lookup counts that decide which ids hold
    slots.

    Each id has a count of one byte on the rank that owns it: up to 15 lookups, halved every
    ``half_life`` steps, and the updates since the last one, up to 15. Its score is lookups /
    (1 + updates since the last one). A table with more than 2,147,483,645 ids counts only the ids
    with the highest scores, then the smaller ids; any other id starts from 0 when it is next looked
    up.

    Every ``every`` steps the slots are given to the hottest ids. An id that was looked up since the
    last update is admitted if it has ``admit_after`` lookups, and a higher score than another id
    that holds a slot. It gets the weights that it has read from the nursery, or, if no gradient has
    reached that row, initial weights, drawn by seed, table and id; and new optimizer state. A slot
    stays where it is stored. With equal scores, holders stay, then smaller ids win: slots are the
    same on every sharding and number of ranks.

    Then the nursery is emptied: its rows become 0, with new optimizer state. They learn at
    ``nursery_lr`` times the learning rate of the table. A fused optimizer has one learning rate, so
    a lookup multiplies the stored row by a number, and the gradient with it: by ``nursery_lr`` if
    the optimizer divides gradients by their size (Adagrad, Adam, RMSprop), by its square root for
    SGD.

    A train pipeline translates batches ahead. Ids that lose their slots are not found from the
    update on; new holders are found once the batches in flight have been trained, so that a slot is
    never trained for two ids.

    Collective: every rank of the world must construct it, and call ``step()`` equally often.

    Args:
        model: a DistributedModelParallel with collections of
            :func:`~dist_sparse.extras.following.following`.
        optimizer: one or all optimizers that step tables without a fused optimizer; ``()`` if there
            is none. New rows get fresh state.
        every: steps between updates.
        admit_after: lookups that an id needs before it gets a slot, in [1, 15].
        half_life: steps after which a lookup counts half. Counts are halved at the first update
            after every ``half_life`` steps, rounding down.
        nursery_lr: the learning rate of nursery rows, as a share of the table's, in (0, 1].
        protect_ids: ids of each table that hold a slot from the first update on, whatever is looked
            up.
        candidates: ids with a count per slot, for tables with more than 2,147,483,645 ids; 9 bytes
            each, over all ranks.
        seed: the seed of initial weights.

    Attributes:
        steps: calls of :meth:`step`.
        moved: how many slots each table has handed over.
        updates: a list to which each update appends what it changed, over all ranks; None without a
            log.

    Raises:
        ValueError: an argument is invalid, missing, or differs between ranks; the model has no
            following tables, or two of one name, or already has another FollowingTables. On every
            rank. If a rank runs out of memory, lookups that compact() has carried over may be lost.

    Example::

        >>> from dist_sparse.extras.following import FollowingTables, following
        >>> # model = DistributedModelParallel(Net(following(bags, rows={"item": 1_000_000})))
        >>> # slots = FollowingTables(model, every=100, admit_after=2)
        >>> # after each optimizer step: slots.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        every: int = 100,
        admit_after: int = 1,
        half_life: int = 80,
        nursery_lr: float = 0.3,
        protect_ids: Mapping[str, Sequence[int] | Tensor] | None = None,
        candidates: int = 4,
        seed: int = 0,
    ) -> None:
        self._group = world_group()
        with self._group.agreeing("FollowingTables()") as facts:
            self.every = checks.integer("every", every, least=1)
            # No count has more lookups.
            self.admit_after = checks.integer("admit_after", admit_after, least=1, most=MOST)
            self.half_life = checks.integer("half_life", half_life, least=1)
            self.nursery_lr = float(checks.number("nursery_lr", nursery_lr, least=1e-3, most=1))
            self.seed = checks.integer("seed", seed)
            checks.integer("candidates", candidates, least=1, most=2**31)
            self._steppers = Steppers(optimizer)
            check_module(model)
            modules = model.modules()
            collections = [module for module in modules if isinstance(module, FollowingCollection)]
            protect_ids = protect_ids or {}
            _require_dict("protect_ids", protect_ids)
            self._tables = _find_tables(collections, protect_ids, candidates, self._group)
            # This raises now for tables that write() could not initialize later.
            for table in self._tables:
                stored = table.stored(self._steppers)
                # A table with hyperparameters here has a fused optimizer.
                if not stored.weights(table.name) or table.name in stored.hyperparameters:
                    continue
                # () and [] say that nothing steps it.
                is_frozen = optimizer is not None and not self._steppers.kinds
                if not (is_frozen or self._steppers.kind_of(stored.parameters[table.name])):
                    raise ValueError(
                        f"Table {table.name!r}: no fused optimizer steps it; pass optimizer= with"
                        " the one that does."
                    )
            facts.update(
                every=every,
                admit_after=admit_after,
                half_life=half_life,
                nursery_lr=nursery_lr,
                seed=seed,
                protect_ids=[table.protected.tolist() for table in self._tables],
                **self._sizes(),
            )
        self.steps = 0
        self.moved = {table.name: 0 for table in self._tables}
        self.updates: list[SlotUpdate] | None = None
        # The step of the last update.
        self._updated = 0
        # The step that admits the reserved ids; -1 if no slot is reserved.
        self._admits_at = -1
        # Lookups from before, which compact() has carried over, decide on slots, and belong to no
        # interval between updates.
        with self._group.jointly("FollowingTables()"):
            scales = self._nursery_scales()
            self._exchange_lookups()
        for table, scale in zip(self._tables, scales, strict=True):
            table.reset_stats()
            table.start_nursery(scale, self._steppers)
        _owner_of.update(dict.fromkeys(collections, self))

    def _nursery_scales(self) -> list[float]:
        """Return what lookups multiply the nursery rows of each table by. Collective.

        Raises:
            ValueError: the optimizer of a table with a nursery is not known to follow the scale.
        """
        here = {}
        for table in self._tables:
            stored = table.stored(self._steppers)
            # A rank without a shard does not know the optimizer.
            if stored.weights(table.name):
                rule = stored.update_rules.get(table.name)
                here[table.name] = rule or self._steppers.kind_of(stored.parameters[table.name])
        kinds: dict[str, str] = {}
        for of_rank in self._group.all_gather_json(here):
            kinds |= of_rank
        scales = []
        for table in self._tables:
            kind = kinds[table.name]
            if kind in _SCALE_FREE or self.nursery_lr == 1:
                scales.append(self.nursery_lr)
            elif kind in _LINEAR:
                scales.append(math.sqrt(self.nursery_lr))
            elif not (table.index.nursery and kind):
                # No nursery, or one that nothing trains: its rows stay zeros.
                scales.append(0.0)
            else:
                raise ValueError(
                    f"Table {table.name!r}: nursery_lr={self.nursery_lr} can't be kept with the"
                    f" optimizer {kind}. Use one of"
                    f" {sorted(_SCALE_FREE | _LINEAR)}, nursery_lr=1, or following(nursery=0)."
                )
        return scales

    def step(self) -> None:
        """Call after each optimizer step. Collective in steps with an update, and in the step that
        admits new holders if a table has a nursery; otherwise local.

        Raises:
            ValueError: ranks update at different steps; or an update is due while batches of the
                one before are in flight: ``every`` is too small for this pipeline. On every rank.
                Or a rank ran out of memory in an update, which may have counted some lookups, or
                moved some slots: resume from a checkpoint.
        """
        self.steps += 1
        if 0 <= self._admits_at <= self.steps:
            with self._group.jointly("step()"):
                self._admit()
        if self.steps % self.every == 0:
            with self._group.jointly("step()"):
                self._update()

    def _update(self) -> None:
        """Give the slots to the hottest ids. Collective."""
        started = time.perf_counter()
        with self._group.agreeing("step()") as facts:
            # A load may have given ranks different holders.
            facts.update(steps=self.steps, holders=self._holders())
            if self._admits_at >= 0:
                raise ValueError(
                    f"Step {self.steps} needs an update, but batches of the previous update are"
                    f" still in flight: use every >= {self._admits_at - self.steps + self.every}."
                )
            # Before any count is sent: if a rank runs out of memory here, no lookup is lost.
            for table in self._tables:
                table.ids.count_batches()
        # A model's state has reservations if it was saved with batches in flight. Without the state
        # of the slots no step admits them.
        if any(len(table.index.reserved()[0]) for table in self._tables):
            self._admit()
        # All ranks admit in the same step: that of the rank whose pipeline is furthest ahead.
        ahead = max(table.ids.ahead for table in self._tables)
        ahead = int(self._group.all_gather(torch.tensor([ahead])).max())
        self._exchange_lookups()
        self._drop_candidates()
        changes = self._select()
        halvings = self.steps // self.half_life - self._updated // self.half_life
        for table, (leaving, coming) in zip(self._tables, changes, strict=True):
            device = table.index.id_of_slot.device
            table.index.hand_over(leaving.to(device), coming.to(device))
            # Nothing is left of 15 lookups after 4 halvings.
            table.counts.pass_update(min(halvings, 4))
            self.moved[table.name] += len(coming)
        self._updated = self.steps
        self._admits_at = self.steps + ahead
        if not ahead:
            self._admit()
        self._record(changes, started)

    def _holders(self) -> list[int]:
        """Return a checksum of the holders of each table's slots, admitted or not."""
        sums = []
        for table in self._tables:
            state = table.index.id_of_slot.cpu()
            # A reserved slot is -2 - id: its admission changes no checksum.
            ids = torch.where(state < -1, -2 - state, state)
            sums.append(zlib.crc32(ids.numpy().data))
        return sums

    def _record(self, changes: Sequence[tuple[Tensor, Tensor]], started: float) -> None:
        """Sum the lookup statistics over all ranks, reset them for the next interval, and append
        the update to the log. Collective."""
        slot_changes = []
        sums = self._group.all_reduce(torch.stack([table.lookup_stats for table in self._tables]))
        for table, row, (leaving, coming) in zip(self._tables, sums, changes, strict=True):
            table.reset_stats()
            table.totals.add_(row)
            stats = LookupStats(*row.tolist())
            slot_changes.append(
                SlotChange(
                    name=table.name,
                    lookups=stats.lookups,
                    removed=stats.missed - stats.unseen,
                    unseen=stats.unseen,
                    out_of_range=stats.out_of_range,
                    came=len(coming),
                    went=len(leaving),
                )
            )
        if self.updates is not None:
            seconds = time.perf_counter() - started
            self.updates.append(SlotUpdate(seconds=seconds, tables=tuple(slot_changes)))

    def _exchange_lookups(self) -> None:
        """Send the recorded lookups to the ranks that own the ids. Collective."""
        # Each owner gets the ids and times of the first table, then of the second, and so on.
        outgoing: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        # Without the agreement, a rank that runs out of memory here leaves the others waiting.
        with self._group.agreeing("counting lookups"):
            for table in self._tables:
                ids, times = table.ids.take_counts(table.name)
                # Ids ascend, so the ids of one owner are one slice.
                cuts = torch.searchsorted(ids, torch.tensor(table.starts[1:-1], dtype=ids.dtype))
                parts = zip(ids.long().tensor_split(cuts), times.tensor_split(cuts), strict=True)
                for to_owner, ids_and_times in zip(outgoing, parts, strict=True):
                    to_owner += ids_and_times
        arrived = exchange(outgoing, self._group)
        for number, table in enumerate(self._tables):
            pairs = [(parts[2 * number], parts[2 * number + 1]) for parts in arrived]
            table.add_lookups(pairs)

    def _drop_candidates(self) -> None:
        """Keep the counts of the hottest ids, in tables with too many ids to count each.
        Collective."""
        hashed = [table for table in self._tables if table.index.hashed]
        if not hashed:
            return
        keys = [ranking_keys(table.counts.counts) for table in hashed]
        ids = [cast(CandidateCounts, table.counts).ids for table in hashed]
        flags = select_winners([table.candidates for table in hashed], keys, ids, self._group)
        for table, wins in zip(hashed, flags, strict=True):
            counts = cast(CandidateCounts, table.counts)
            # Halving has left some ids without lookups, as any id that is not listed.
            counts.keep(wins & (lookups_of(counts.counts) > 0))

    def _select(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each table the ids that lose their slots, and the ids that win one, over all
        ranks: ascending, int64. Collective."""
        slots, holders, keys = [], [], []
        for table in self._tables:
            ids = table.owned_holders()
            slots.append(table.index.slots)
            holders.append(ids)
            keys.append(table.ranking_keys(ids, True))
        # Newcomers below this bound can't win. Leaving them out keeps the selection small.
        bounds = admission_counts(slots, keys, self._group)
        contests = []
        parts = zip(self._tables, holders, bounds, strict=True)
        for number, (table, ids, bound) in enumerate(parts):
            coming = table.newcomers(max(self.admit_after, bound))
            keys[number] = torch.cat([keys[number], table.ranking_keys(coming, False)])
            contests.append(torch.cat([ids, coming]))
        won = select_winners(slots, keys, contests, self._group)
        changes = []
        for ids, both, wins in zip(holders, contests, won, strict=True):
            count = len(ids)
            changes += [ids[~wins[:count]].sort().values, both[count:][wins[count:]]]
        all_changes = gather_parts(changes, self._group)
        return list(zip(all_changes[::2], all_changes[1::2], strict=True))

    def _admit(self) -> None:
        """Write the reserved rows, let their ids be found, and empty the nurseries. Collective if a
        table has a nursery."""
        self._admits_at = -1
        for table in self._tables:
            table.admit(self._steppers, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return counts and steps, for torch.save and torch.distributed.checkpoint, which loads
        them on any number of ranks. The model's state has the ids that hold slots. Collective.

        Raises:
            ValueError: a rank ran out of memory; on every rank. Some lookups may not be counted.
        """
        with self._group.jointly("state_dict()"):
            return self._saved()

    def _saved(self) -> dict[str, Any]:
        self._exchange_lookups()
        # A state has a fixed number of candidates. Dropping the others here too makes this run
        # continue exactly as a run that resumes from the state.
        self._drop_candidates()
        return {
            "step": self.steps,
            "admits_at": self._admits_at,
            "updated": self._updated,
            "nursery_lr": self.nursery_lr,
            "seed": self.seed,
            "tables": self._sizes(),
            "counts": {
                table.name: table.counts.saved(table.candidates, self._group)
                for table in self._tables
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; the arguments ``every``, ``admit_after``, ``half_life`` and
        ``protect_ids`` stay. Load the model's state first. Collective.

        Raises:
            ValueError: the state is of other tables, ``nursery_lr`` or ``seed``, or of other ranks
                and not loaded by torch.distributed.checkpoint; a value of it or of the model's
                ``id_of_slot`` is invalid. On every rank, and nothing has changed.
        """
        with self._group.agreeing("load_state_dict()") as facts:
            _require_dict("state", state_dict)
            saved_counts: Any = state_dict.get("counts")
            _require_dict("counts", saved_counts)
            expected = {
                "nursery_lr": self.nursery_lr,
                "seed": self.seed,
                "tables": self._sizes(),
            }
            rules: dict[str, Any] = {
                "The state has counts of 4 bytes with a decay, of an earlier version: they can't be"
                " continued. Without them, ids are counted from 0.": "decay" in state_dict
            }
            for key, value in expected.items():
                saved = state_dict.get(key)
                rules[f"The state has {key}={saved}, and here it is {value}."] = saved != value
            absent = set(self.moved) - set(saved_counts)
            rules[f"The state has no counts of the tables {sorted(absent)}."] = absent
            checks.refuse(rules)
            step = checks.integer("step", state_dict.get("step"), least=0)
            # A later admission would come after the next update.
            last = step - step % self.every + self.every
            admits_at = checks.integer(
                "admits_at", state_dict.get("admits_at"), least=-1, most=last
            )
            updated = checks.integer("updated", state_dict.get("updated"), least=0, most=step)
            counts = []
            for table in self._tables:
                # torch.distributed.checkpoint has loaded it in place, where nothing checks it.
                table.index.refuse_invalid(table.index.id_of_slot)
                counts.append(table.counts.part(table.name, saved_counts[table.name]))
            facts.update(step=step, admits_at=admits_at, updated=updated)
        self.steps = step
        self._admits_at = admits_at
        self._updated = updated
        for table, loaded in zip(self._tables, counts, strict=True):
            # Lookups that were recorded before belong to the state that is replaced.
            table.ids.drop_counts(table.name)
            table.reset_stats()
            table.counts.load(*loaded)

    def summary(self) -> str:
        """Return a text table of the slots, the ids without one, and the outcomes of the training
        lookups on all ranks. Collective; raises as :meth:`state_dict`."""
        with self._group.jointly("summary()"):
            self._exchange_lookups()
            here = [
                torch.cat([torch.tensor(table.count_without_slot()), table.lookup_stats])
                for table in self._tables
            ]
            sums = self._group.all_reduce(torch.stack(here))
            held = [len(table.index.holders()[0]) for table in self._tables]
            totals = [
                LookupStats(*(row[2:] + table.totals).tolist())
                for table, row in zip(self._tables, sums, strict=True)
            ]
        # Heads are narrow and numbers short, so that a table fits on a line of 80 columns.
        head = ["table", "ids", "slots", "held", "seen, no slot", "never seen", "moved"]
        head += ["lookups", "missed", "of new ids", "out of range"]
        lines = []
        for table, row, holders, stats in zip(self._tables, sums, held, totals, strict=True):
            index = table.index
            waiting, never = row[:2].tolist()
            cells = [index.rows, index.slots, holders, waiting, never]
            cells += [self.moved[table.name], stats.lookups]
            missed = (stats.missed - stats.unseen, stats.unseen)
            shares = [percent(part / max(stats.lookups, 1)) for part in missed]
            lines.append((table.name, *map(short, cells), *shares, short(stats.out_of_range)))
        return "\n".join([repr(self), *table_lines(head, lines, right=set(range(1, 11)))])

    def __repr__(self) -> str:
        names = ", ".join(self.moved)
        return f"{type(self).__name__}(step {self.steps}, every {self.every}: {names})"

    def _sizes(self) -> dict[str, list[int]]:
        """Return the number of ids, of slots, of nursery rows and of ids with a count, by table."""
        return {
            table.name: [
                table.index.rows,
                table.index.slots,
                table.index.nursery,
                table.candidates,
            ]
            for table in self._tables
        }


def _find_tables(
    collections: Sequence[FollowingCollection],
    protect_ids: Mapping[str, Sequence[int] | Tensor],
    candidates: int,
    group: Group,
) -> list[FollowedTable]:
    """Return the following tables of collections."""
    tables: dict[str, FollowedTable] = {}
    for collection in collections:
        inner = collection_of(collection.inner)
        rows = stored_rows(collection.inner)
        least = least_rows(collection.inner, rows)
        for name, index in collection.following_ids.slots.items():
            checks.refuse(
                {
                    "The collection is not sharded: use DistributedModelParallel first.": (
                        not inner.is_sharded
                    ),
                    "Another FollowingTables has this model: delete it first.": (
                        collection in _owner_of
                    ),
                    f"Two following tables have the name {name!r}.": name in tables,
                    f"Table {name!r} has {rows[name]} rows, too few for all of its ranks to have"
                    f" some: create it with rows={least[name]}, or shard it by columns.": (
                        rows[name] < least[name]
                    ),
                }
            )
            block = -(-index.rows // group.size)
            starts = [min(rank * block, index.rows) for rank in range(group.size + 1)]
            counts: type[CandidateCounts | LookupCounts] = LookupCounts
            most = index.rows
            if index.hashed:
                counts = CandidateCounts
                most = candidates * index.slots
            tables[name] = FollowedTable(
                name=name,
                collection=collection,
                bounds=initial_bounds(collection, name),
                starts=starts,
                counts=counts(starts[group.rank], starts[group.rank + 1]),
                protected=protected_ids(index, protect_ids.get(name, ())),
                candidates=most,
                totals=torch.tensor(LookupStats()),
                new_ids=torch.zeros(0, dtype=torch.int64),
            )
    unknown = sorted(set(protect_ids) - set(tables))
    checks.refuse(
        {
            "The model has no tables of following() or follow_kept_rows().": not tables,
            f"Invalid protect_ids: {unknown} are not among the tables {sorted(tables)}.": unknown,
        }
    )
    return list(tables.values())


def _require_dict(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"Invalid {name} of type {type(value).__name__}: must be a dict.")
