"""Removed weights stay zero in tables that a fused optimizer writes inside the backward.

The ids of a lookup are taken where they arrive at the kernel, behind the input distribution, so
they are local to the shard whatever the sharding. Where rows are added up, ids of removed rows are
dropped there (:mod:`~dist_sparse.enforcer.drop`). Of the rows that are read, the dirty ones are
cleaned just before. A backward flags the rows that it writes, if the masks remove anything of them;
they stay dirty until the weights are next scored, saved or read.

TorchRec and FBGEMM are behind :class:`~dist_sparse.tables.protocols.TableBatch`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.drop import KeptIds, kept_row_flags
from dist_sparse.enforcer.hooks import Clock, Hook, Wrapped, timed
from dist_sparse.enforcer.optimizers import State, reset_state
from dist_sparse.enforcer.rows import (
    DirtyRows,
    RowCleaner,
    Slot,
    TorchRowCleaner,
    count_lookups,
    zero_rows,
)
from dist_sparse.enforcer.sampled import SampledLookups
from dist_sparse.enforcer.written import WrittenRows
from dist_sparse.masking.cached.kept_scores import KeptScores, Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.port import collection_of, torchrec_port
from dist_sparse.tables.protocols import TableBatch, WholeRowWriter
from dist_sparse.tables.shards import ShardedData

__all__ = [
    "Place",
    "TableBatchHooks",
    "averages",
    "collections_of",
    "fused_sums",
    "lookups_of",
    "places_in",
    "places_of",
    "row_cleaner_on",
]


class Place(NamedTuple):
    """The mask of a shard: the name under which its table is registered, and its number there."""

    name: str
    number: int


Places = Mapping[tuple[int, tuple[int, ...]], Place]
"""Masks by the address and the shape of the weights."""


class TableBatchHooks:
    """The hooks on one of FBGEMM's batches of tables, inside TorchRec's module.

    Args:
        batch: FBGEMM's batch; its module is called with a KeyedJaggedTensor of ids that are local
            to the shards.
        collection: the sharded collection that it belongs to.
        store: the masks, lookup counts and sampled lookups of the shards, live.
        clock: to which the time of the hooks is added.

    Attributes:
        places: the masks of its registered tables, by their number in the batch.
        drops: whether ids of removed rows are dropped where that changes no output; otherwise the
            rows are zeroed. Set between forwards.
    """

    def __init__(
        self, batch: TableBatch, collection: nn.Module, store: PackedStore, clock: Clock
    ) -> None:
        self.module, self.collection = batch.module, collection
        self.places: dict[int, Place] = {}
        self.drops = False
        self.clock = clock
        self._batch = batch
        self._store = store
        self._counted: dict[int, Tensor] = {}
        self._room = 0  # lookups until counts must be clamped, so that none exceeds its integers
        self._features = list(batch.features)
        self._sampled = SampledLookups(self._features)
        # Masks' version, drops, addresses of weights: the key of everything made by _look_up().
        self._known: tuple[int, ...] = ()
        self._ids: KeptIds | None = None
        self._only_kept = False
        self._last: tuple[Any, Any] = (None, None)
        self._in_sync = self._storage()
        self._slots: dict[int, Slot] = {}
        views = self._batch.weights()
        self._on_cpu = views[0].is_cpu
        self._dirty = DirtyRows([len(view) for view in views], self._features, views[0].device)
        self._cleaner: RowCleaner = TorchRowCleaner([], self._dirty)
        # With an empty table beside others of another width, FBGEMM's CPU backward writes other
        # rows than it was given.
        widths = {view.shape[1] for view in views}
        self._strays = self._on_cpu and min(map(len, views)) == 0 and len(widths) > 1
        # Only a sum can do without rows of zeros: a mean counts them, a sequence has a place for
        # each.
        self._adds = self._on_cpu and not self._strays and batch.adds_rows
        self._written: WrittenRows | None = None
        self._handles: list[RemovableHandle | Wrapped] = []

    def hook(self) -> None:
        """Attach the hooks on lookups, on their backwards, and on FBGEMM's methods that write whole
        tables, unless they are attached."""
        if self._handles:
            return
        self._handles = [
            self.module.register_forward_pre_hook(Hook(self._before_lookup)),
            self.module.register_forward_hook(Hook(self._after_lookup)),
        ]
        # They run in the middle of a forward, after the hook that cleans the rows to be read.
        for writer in self._batch.whole_row_writers():
            write = partial(self._write_whole, writer)
            self._handles.append(Wrapped(writer.owner, writer.method, write))

    def unhook(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def moved_to(self, places: dict[int, Place]) -> None:
        """Take the masks of other places; dirty rows stay dirty."""
        self.places = places
        self._known = ()

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        slots = self._current()
        if not self._dirty:
            return
        for table, slot in slots.items():
            if slot.mask.removes:
                for rows in self._dirty.rows(table):
                    zero_rows(slot.weight, slot.mask, rows)
        self._dirty.clear()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        for slot in self._current().values():
            if slot.mask.removes:
                slot.mask.apply_(slot.weight)
        self._dirty.clear()
        if self._written is not None:
            self._written.add_all()

    def mark_all(self) -> None:
        """Mark every row as dirty, after weights were written outside of a backward."""
        self.mark_in_sync()
        for table in self._slots:
            self._dirty.add_all(table)
        if self._written is not None:
            self._written.add_all()

    def mark_in_sync(self) -> None:
        """Mark the current storage as in sync with the dirty rows."""
        self._in_sync = self._storage()

    def written(self) -> Iterator[tuple[int, Written]]:
        """Yield the address of the weights and the possibly written rows, live, of each registered
        table on a CPU whose scores are worth keeping. The first call starts the record, with all
        rows in it."""
        # On a device, the host does not know the ids; the rows of stray writes are unknown too.
        if not self._on_cpu or self._strays:
            return
        worth = {
            table: slot
            for table, slot in self._current().items()
            if KeptScores.fits(slot.mask.rect, slot.mask.block)
        }
        if self._written is None or self._written.tables.keys() != worth.keys():
            rows = {table: slot.mask.rect.rows for table, slot in worth.items()}
            self._written = WrittenRows(rows, self._features) if worth else None
        if self._written is not None:
            for table, slot in worth.items():
                yield slot.weight.data_ptr(), self._written.tables[table]

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the registered names and their live shards."""
        slots = self._current().items()
        return [(self.places[table].name, slot.weight) for table, slot in slots]

    def masks(self) -> dict[int, BlockMask]:
        """Return the current masks. A mask update replaces them, it does not edit them."""
        return {table: slot.mask for table, slot in self._current().items()}

    def accumulators(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the live shards of registered tables, each with the sums of its Adagrad:
        ``(rows,)``, or as the shard; nothing for other optimizers."""
        if sums := adagrad_sums(self._batch):
            for table, slot in self._current().items():
                yield slot.weight, sums[table]

    def reset(self, masks: Mapping[int, BlockMask]) -> None:
        """Set the optimizer state of weights removed by ``masks`` to its initial value, zero."""
        for table, states in self._states().items():
            reset_state(masks[table], states)

    def element_states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield the names of tables that have optimizer state for each element, and that state."""
        slots = self._current()
        for table, states in self._states().items():
            shape = slots[table].weight.shape
            if found := [each for each in states if each[0].shape == shape]:
                yield self.places[table].name, found

    def _states(self) -> dict[int, list[State]]:
        """Return the optimizer state of registered tables; FBGEMM starts all of it at 0."""
        states = self._batch.states()
        return {table: [(state, 0.0) for state in states[table]] for table in self.places}

    def _storage(self) -> list[tuple[int, int]]:
        """Return the addresses of the weights, and the writes that torch has counted: all but those
        through ``.data`` and by FBGEMM's backward, which a hook announces."""
        return [(each.data_ptr(), each._version) for each in self._batch.storage()]

    def _masks_known(self) -> tuple[int, bool]:
        """Return a key that changes with the masks, and with their use."""
        return self._store.version, self.drops

    def _current(self) -> dict[int, Slot]:
        """Return the live weights and masks of registered tables: looked up again when either was
        replaced."""
        storage = self._storage()
        known = *self._masks_known(), *(address for address, _ in storage)
        if known != self._known:
            with torch.no_grad():
                self._look_up()
            self._known = known
        # Torch has counted a write of its own (a load, copy_): it may be in any row.
        if storage != self._in_sync:
            self.mark_all()
        return self._slots

    def _look_up(self) -> None:
        """Take new masks, counts and addresses of weights."""
        views = self._batch.weights()
        before, self._slots = self._slots, {}
        counted: dict[int, Tensor] = {}
        samples: dict[int, Tensor] = {}
        for table, (name, number) in self.places.items():
            self._slots[table] = Slot(views[table].data, self._store.masks(name)[number])
            samples[table] = self._store.samples(name)[number]
            if (counts := self._store.counts(name)) is not None:
                counted[table] = counts[number]
        # The update has zeroed newly removed rows: their scores have changed.
        if self._written is not None:
            self._written.add_removed(before, self._slots)
        # Counts that were loaded or moved may be as large as they get.
        if [*map(id, counted.values())] != [*map(id, self._counted.values())]:
            self._room = 0
        self._counted = counted
        self._sampled.begin(self._slots, samples)
        self._sort_rows()
        slots = [self._slots.get(table) for table in self._features]
        self._cleaner = row_cleaner_on(views[0].device, slots, self._dirty)

    def _sort_rows(self) -> None:
        """Choose the rows whose ids are dropped, and the rows that get dirty when a backward writes
        them."""
        drops = self.drops and self._adds
        passed: dict[int, Tensor] = {}
        self._only_kept = True
        for table, slot in self._slots.items():
            self._dirty.leave_out(table, None)
            if not slot.mask.removes:
                continue  # nothing to drop or to clean: its ids pass unchanged
            # A kept row of a mask of whole rows has no removed weight: a write leaves it clean.
            never_dirty = slot.whole_rows and self._on_cpu
            kept = kept_row_flags(slot.mask) if drops or never_dirty else None
            if never_dirty:
                self._dirty.leave_out(table, kept)
            if drops and kept is not None:
                passed[table] = kept
            # Unless the ids of all removed rows are dropped, lookups read rows that need cleaning.
            self._only_kept &= slot.whole_rows and drops
        of_features = [passed.get(table) for table in self._features]
        self._ids = KeptIds(of_features) if passed else None

    @timed
    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._current()
        requested = args[0]
        # Evaluation is no traffic.
        if torch.is_grad_enabled() and self._sampled.due():
            with torch.no_grad():
                self._sampled.add(requested.values(), _ends(requested))
        passed = requested if self._ids is None else self._ids.among(requested)
        # If the ids of all removed rows were dropped, no row that is read can be dirty.
        if self._cleaner.needed and not (passed is not requested and self._only_kept):
            with torch.no_grad():
                self._cleaner(passed.values(), _ends(passed))
        self._last = requested, passed
        return passed, *args[1:]

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        requested, passed = self._last
        # Not to keep the ids alive until the next lookup.
        self._last = None, None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        known = self._known[:2]
        # Another hook may have replaced the ids since: then the kernel was called with args[0].
        if passed is not requested and passed is args[0]:
            # Dropped ids are needed to count lookups, and for nothing else.
            every = _ids_of(requested) if self._counted else None
            before_update = partial(self._before_update, every, passed, known)
        else:
            before_update = partial(self._before_update, _ids_of(args[0]), None, known)
        output.register_hook(before_update)  # type: ignore[no-untyped-call]

    @timed
    def _before_update(
        self,
        every: tuple[Tensor, Sequence[int] | Tensor] | None,
        passed: Any,
        known: tuple[int, ...],
        grad: Tensor,
    ) -> None:
        """In a backward, just before the fused optimizer writes the rows. Not at the lookup:
        between the two, all rows may be cleaned, and another lookup may read.

        Args:
            every: all ids, where they are needed.
            passed: the features after dropping ids; None if none were dropped.
            known: the key of the masks at the lookup.
            grad: of the output.
        """
        dropped_all = passed is not None and self._only_kept
        # With other masks than at the lookup, kept rows of then may be removed by now.
        may_revive = not dropped_all or known != self._masks_known()
        if not may_revive and every is None and self._written is None:
            return
        with torch.no_grad():
            self._current()  # masks may have been updated since the lookup
            if self._strays:
                self.mark_all()
            else:
                self._note_writes(every, passed, may_revive)
            if every is not None and self._counted:
                self._count(*every)

    def _note_writes(
        self, every: tuple[Tensor, Sequence[int] | Tensor] | None, passed: Any, may_revive: bool
    ) -> None:
        """Flag the rows that a backward is about to write."""
        if not may_revive and self._written is None:
            return
        rows = every if passed is None else _ids_of(passed)
        assert rows is not None
        if may_revive:
            self._dirty.add(*rows)
        if self._written is not None:
            self._written.add(*rows)

    def _count(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Count lookups. Counts are clamped once in 2**30 of them, not checked each time."""
        self._room -= ids.numel()
        # No count grows by more than the number of ids: with room left, none can overflow.
        if self._room < 0:
            for count in self._counted.values():
                count.clamp_(max=MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        count_lookups(self._counted, self._features, ids, ends)

    def _write_whole(
        self, writer: WholeRowWriter, write: Callable[[Any], None], mode: Mapping[str, float]
    ) -> None:
        """Call a method of FBGEMM's that may write all rows, in the middle of a forward, and clean
        them all."""
        write(mode)
        if writer.wrote(mode):
            self.clean_all()


def row_cleaner_on(
    device: torch.device, slots: Sequence[Slot | None], dirty: DirtyRows
) -> RowCleaner:
    """Return the row cleaner for a device: on CUDA Triton's, if it is installed (as it is with
    torch's CUDA builds)."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        triton_rows = importlib.import_module("dist_sparse.enforcer.rows_triton")
        # One launch for all ids, dirty or not, costs less than to find the dirty ones.
        cleaner: RowCleaner = triton_rows.TritonRowCleaner(slots)
        return cleaner
    return TorchRowCleaner(slots, dirty)


def places_of(located: Mapping[str, ShardedData]) -> Places:
    """Return where the masks of this rank's shards are."""
    found = {}
    for name, data in located.items():
        for number, shard in enumerate(data.shards):
            found[shard.tensor.data_ptr(), tuple(shard.tensor.shape)] = Place(name, number)
    return found


def places_in(batch: TableBatch, places: Places) -> dict[int, Place]:
    """Return the places of the masks of a batch's registered tables, by number."""
    found = {}
    for table, view in enumerate(batch.weights()):
        place = places.get((view.data_ptr(), tuple(view.shape)))
        if place is not None:
            found[table] = place
    return found


def fused_sums(models: Iterable[nn.Module]) -> dict[int, tuple[Tensor, float]]:
    """Return the sums of the fused Adagrad optimizers of some models, and their initial value, by
    the address of the shard; nothing for other optimizers."""
    found: dict[int, tuple[Tensor, float]] = {}
    for collection in collections_of(module for model in models for module in model.modules()):
        for batch in collection_of(collection).batches():
            for weight, sums in zip(batch.weights(), adagrad_sums(batch), strict=False):
                found[weight.data_ptr()] = sums, 0.0
    return found


def adagrad_sums(batch: TableBatch) -> list[Tensor]:
    """Return the sums of each table's fused Adagrad; nothing for other optimizers."""
    if not batch.is_adagrad:
        return []
    return [states[0] for states in batch.states()]


def collections_of(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the sharded collections among some modules, each once."""
    torchrec = torchrec_port()
    if torchrec is not None:
        yield from (module for module in dict.fromkeys(modules) if torchrec.is_sharded(module))


def lookups_of(collection: nn.Module) -> list[nn.Module]:
    """Return the lookups of a sharded collection. A reshard makes new ones on every rank, with or
    without shards."""
    torchrec = torchrec_port()
    return [] if torchrec is None else torchrec.lookups(collection)


def averages(module: nn.Module) -> bool:
    """Whether a module averages copies of its tables now and then, by its method ``sync``."""
    torchrec = torchrec_port()
    return torchrec is not None and torchrec.averages(module)


def _ids_of(features: Any) -> tuple[Tensor, Sequence[int] | Tensor]:
    """The ids of a KeyedJaggedTensor, and where those of each feature begin and end. int32 ids are
    copied, as FBGEMM does: the caller may refill their memory before the backward."""
    return features.values().long(), _ends(features)


def _ends(features: Any) -> Sequence[int] | Tensor:
    """Where the ids of each feature of a KeyedJaggedTensor begin and end; on a device without
    waiting for it."""
    values = features.values()
    if values.is_cpu or features.variable_stride_per_key() or not features.stride():
        ends: list[int] = features.offset_per_key()
        return ends
    offsets: Tensor = features.offsets()[:: features.stride()]
    return offsets
