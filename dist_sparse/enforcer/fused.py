"""Keep removed weights at zero in tables that a fused optimizer writes inside the backward.

Hooks read the ids of a lookup at the kernel, after the input distribution: there they are local to
the shard, whatever the sharding. A table is masked in one of two ways:

- *by its ids*, if it keeps or removes whole rows: the ids of removed rows are dropped or weigh
  nothing (:mod:`~dist_sparse.enforcer.ids`), so that these rows stay zero by themselves.
- *by zeroing*, for all other blocks, for scores that need the gradients of removed rows, and for
  optimizers that move a row at gradient 0. Rows that a backward writes are flagged as dirty. They
  are cleaned before a lookup reads them, or before weights are scored, saved or read.

TorchRec and FBGEMM are behind :class:`~dist_sparse.tables.protocols.TableBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.counts import LookupCounts
from dist_sparse.enforcer.hooks import Clock, Hook, Wrapped, timed
from dist_sparse.enforcer.ids import MaskedIds, worth_dropping
from dist_sparse.enforcer.optimizers import State, reset_state
from dist_sparse.enforcer.rows import Slot
from dist_sparse.enforcer.sampled import SampledLookups
from dist_sparse.enforcer.streams import StreamOrder
from dist_sparse.enforcer.written import WrittenRows
from dist_sparse.enforcer.zeroed import ZeroedRows
from dist_sparse.masking.cached.kept_scores import KeptScores, Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.port import collection_of, torchrec_port
from dist_sparse.tables.protocols import TableBatch, WholeRowWriter
from dist_sparse.tables.shards import CACHED, ShardedData


class Place(NamedTuple):
    """The mask of a shard: the registered name of its table, and the shard's number in it."""

    name: str
    number: int


Places = Mapping[tuple[int, tuple[int, ...]], Place]
"""Masks by the address and the shape of the weights."""


Ends = Sequence[int] | Tensor
"""Where the ids of each feature begin and end, as in
:class:`~dist_sparse.enforcer.rows.RowCleaner`."""

Ids = tuple[Tensor, Ends]
"""The ids of a lookup."""


@dataclass(frozen=True, eq=False)
class _Lookup:
    """A lookup whose backward is still to come.

    Attributes:
        every: all ids, dropped ones too.
        written: the ids whose rows the backward writes.
        masked: ids of removed rows, in tables masked by their ids, were dropped or weigh nothing.
        masks_key: identifies the masks that the lookup used.
    """

    every: Ids
    written: Ids
    masked: bool
    masks_key: tuple[int, ...]


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
        trains_removed: whether removed rows are read as zeros and trained, then zeroed again. Set
            it between forwards.
    """

    def __init__(
        self, batch: TableBatch, collection: nn.Module, store: PackedStore, clock: Clock
    ) -> None:
        self.module, self.collection = batch.module, collection
        self.places: dict[int, Place] = {}
        self.trains_removed = False
        self.clock = clock
        self._batch = batch
        self._store = store
        self._features = list(batch.features)
        # Identifies the state that _refresh() read: _masks_key(), then the addresses of weights.
        self._key: tuple[int, ...] = ()
        self._in_sync = self._storage()
        self._slots: dict[int, Slot] = {}
        views = self._batch.weights()
        device = views[0].device
        self._on_cpu = device.type == "cpu"
        self._order = StreamOrder(device)
        self._ids = MaskedIds(batch, device)
        self._rows = ZeroedRows(self._features, device)
        self._counts = LookupCounts(self._features)
        self._sampled = SampledLookups(self._features)
        # Whether rows of registered tables are cached.
        self._caches = False
        # All ids of the last forward, and those that were passed on to the kernel.
        self._last: tuple[Any, Any] = (None, None)
        # FBGEMM's CPU backward writes wrong rows if a table is empty and widths differ.
        has_empty = min(map(len, views)) == 0
        widths = {view.shape[1] for view in views}
        self._strays = self._on_cpu and has_empty and len(widths) > 1
        # By what reads and clears the record.
        self._written: dict[str, WrittenRows] = {}
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
        if self._batch.pooling != "none":
            weigh, restore = Hook(self._ids.before_kernel), Hook(self._ids.after_kernel)
            self._handles += [
                self._batch.kernel.register_forward_pre_hook(weigh, with_kwargs=True),
                self._batch.kernel.register_forward_hook(restore, always_call=True),
            ]
        # These methods run inside the forward, after _before_lookup() has cleaned rows.
        for writer in self._batch.whole_row_writers():
            write = partial(self._write_whole, writer)
            self._handles.append(Wrapped(writer.owner, writer.method, write))

    def unhook(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def moved_to(self, places: dict[int, Place]) -> None:
        """Use the masks at other places; dirty rows stay dirty."""
        self.places = places
        self._key = ()

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        self._begin_write()
        self._rows.clean()
        self._order.after_write()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        self._begin_write()
        self._rows.clean_all()
        self._order.after_write()
        for written in self._written.values():
            written.add_all()

    def masks_updated(self) -> None:
        """Have lookups on other streams wait for the mask update that ends here."""
        self._order.after_write()

    def mark_all(self) -> None:
        """Mark every row as dirty, after weights were written outside of a backward."""
        self.mark_in_sync()
        self._rows.revived = True
        for written in self._written.values():
            written.add_all()

    def mark_in_sync(self) -> None:
        """Mark the current storage as in sync with the dirty rows."""
        self._in_sync = self._storage()

    def written(self, reader: str) -> Iterator[tuple[int, Written]]:
        """Yield the address of the weights and the possibly written rows (live) of each registered
        CPU table; for ``"scores"`` of those whose scores are worth keeping. The first call of a
        reader starts its record, with all rows in it."""
        # On a device the host does not know the ids; it never knows the rows of stray writes.
        if not self._on_cpu or self._strays:
            return
        rows = {}
        for table, slot in self._current().items():
            if reader != "scores" or KeptScores.fits(slot.mask.rect, slot.mask.block):
                rows[table] = slot.mask.rect.rows
        record = self._written.get(reader)
        if record is None or record.tables.keys() != rows.keys():
            record = self._written[reader] = WrittenRows(rows, self._features)
        for table, written in record.tables.items():
            yield self._slots[table].weight.data_ptr(), written

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the registered names and their live shards."""
        slots = self._current().items()
        return [(self.places[table].name, slot.weight) for table, slot in slots]

    def masks(self) -> dict[int, BlockMask]:
        """Return the current masks. A mask update replaces them, it does not edit them."""
        return {table: slot.mask for table, slot in self._current().items()}

    def accumulators(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the live shards of registered tables, each with its Adagrad sums: ``(rows,)`` or of
        the shard's shape; nothing for other optimizers."""
        if sums := adagrad_sums(self._batch):
            for table, slot in self._current().items():
                yield slot.weight, sums[table]

    def states(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the live shards of registered tables, each with its optimizer state."""
        slots = self._current()
        for table, states in self._states().items():
            yield slots[table].weight, [state for state, _ in states]

    def reset(self, masks: Mapping[int, BlockMask]) -> None:
        """Set the optimizer state of weights removed by ``masks`` to its initial value, zero."""
        for table, states in self._states().items():
            reset_state(masks[table], states)

    def element_states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield the names of tables with element-wise optimizer state, and that state."""
        slots = self._current()
        for table, states in self._states().items():
            shape = slots[table].weight.shape
            if found := [each for each in states if each[0].shape == shape]:
                yield self.places[table].name, found

    def _states(self) -> dict[int, list[State]]:
        """Return the optimizer state of registered tables; FBGEMM starts all of it at 0."""
        states = self._batch.states()
        return {table: [(state, 0.0) for state in states[table]] for table in self.places}

    def _begin_write(self) -> None:
        """Wait for lookups on other streams, and have the weights of this moment in place."""
        self._order.before_write()
        self._current()
        if self._caches:
            self._batch.write_back()

    def _storage(self) -> list[tuple[int, int]]:
        """Return the addresses of the weights, and torch's counts of writes. It counts all but
        writes through ``.data`` and by FBGEMM's backward, before which a hook runs."""
        return [(each.data_ptr(), each._version) for each in self._batch.storage()]

    def _masks_key(self) -> tuple[int, bool]:
        """Return a key that changes with the masks and with their use."""
        return self._store.version, self.trains_removed

    def _current(self) -> dict[int, Slot]:
        """Return the live weights and masks of registered tables, read again after either was
        replaced."""
        storage = self._storage()
        key = *self._masks_key(), *(address for address, _ in storage)
        if key != self._key:
            with torch.no_grad():
                self._refresh()
            self._key = key
        # Torch has counted a write, such as a load or copy_(): it may be in any row.
        if storage != self._in_sync:
            self.mark_all()
        return self._slots

    def _refresh(self) -> None:
        """Read masks, counts and weights again, and decide how to mask each table."""
        views = self._batch.weights()
        before, self._slots = self._slots, {}
        counted: dict[int, Tensor] = {}
        samples: dict[int, Tensor] = {}
        for table, (name, number) in self.places.items():
            self._slots[table] = Slot(views[table].data, self._store.masks(name)[number])
            samples[table] = self._store.samples(name)[number]
            if (counts := self._store.counts(name)) is not None:
                counted[table] = counts[number]
        # The mask update has zeroed newly removed rows: their scores have changed.
        for written in self._written.values():
            written.add_removed(before, self._slots)
        self._counts.use(counted)
        self._sampled.begin(self._slots, samples)
        by_ids = self._masked_by_ids()
        self._rows.use(self._slots, self._slots.keys() - by_ids)
        self._choose_ids(by_ids)

    def _masked_by_ids(self) -> set[int]:
        """Return the tables whose removed rows stay zero if their ids weigh nothing.

        Raises:
            ValueError: rows of another table are cached, and can't be zeroed after each backward.
        """
        found: set[int] = set()
        if not self.trains_removed and not self._strays and self._batch.keeps_zeros:
            found = {table for table, slot in self._slots.items() if slot.whole_rows}
        cached = self._batch.cached & self._slots.keys()
        self._caches = bool(cached)
        if rest := sorted(self.places[table].name for table in cached - found):
            raise ValueError(
                f"The tables {rest} have the compute kernel {CACHED!r}: rows in its cache can't be"
                " zeroed after each backward, so that removed rows must stay zero by themselves."
                " They do if masks are of whole rows, the score is not 'accumulator', and the fused"
                " optimizer is SGD or Adagrad with eps > 0."
            )
        return found

    def _choose_ids(self, by_ids: Set[int]) -> None:
        """Choose the rows whose ids weigh nothing, and the rows whose ids are dropped."""
        # Only a sum can do without rows of zeros: a mean counts them, a sequence has a place for
        # each. On a device the host would wait for the number of remaining ids.
        drops = self._on_cpu and self._batch.pooling == "sum"
        # Rows that are to be trained, or that the backward of another table writes, are read.
        if self.trains_removed or self._strays:
            drops = False
        kept: dict[int, Tensor] = {}
        passed: dict[int, Tensor] = {}
        for table, slot in self._slots.items():
            if not slot.mask.removes:
                # Its ids pass unchanged.
                continue
            rows = slot.mask.dead_rows().logical_not_()
            if table in by_ids:
                kept[table] = rows
            if drops and (slot.whole_rows or worth_dropping(rows)):
                passed[table] = rows
        self._ids.use(kept, passed)

    @timed
    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._order.before_read()
        self._current()
        requested = args[0]
        # Lookups of an evaluation are not sampled.
        if torch.is_grad_enabled() and self._sampled.due():
            with torch.no_grad():
                self._sampled.add(*_local_ids(requested))
        passed = self._ids.pass_on(requested)
        with torch.no_grad():
            if self._rows.revived:
                self.clean()
            if self._rows.cleans_lookups:
                self._rows.clean_read(*_local_ids(passed))
        self._last = requested, passed
        return passed, *args[1:]

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        requested, passed = self._last
        # Free the ids now, not at the next lookup.
        self._last = None, None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        # The kernel was called with args[0]: another hook may have replaced the ids.
        dropped = passed is not requested and passed is args[0]
        written = _copied_ids(args[0])
        lookup = _Lookup(
            every=_copied_ids(requested) if dropped and self._counts else written,
            written=written,
            masked=dropped or self._ids.weighed,
            # The key begins with _masks_key().
            masks_key=self._key[:2],
        )
        if self._caches:
            self._batch.pending.add(lookup)
        before_update = partial(self._before_update, lookup)
        output.register_hook(before_update)  # type: ignore[no-untyped-call]

    @timed
    def _before_update(self, lookup: _Lookup, grad: Tensor) -> Tensor | None:
        """Record a lookup in its backward, just before the fused optimizer writes the rows; return
        the gradient of the output, or None for no change."""
        if self._caches:
            self._batch.pending.discard(lookup)
        # Not in the forward: until the backward, all rows may be cleaned, and other lookups read.
        with torch.no_grad():
            self._current()  # masks may have been updated since the lookup
            if self._strays:
                self.mark_all()
            else:
                self._record_writes(lookup)
            if self._counts:
                self._counts.add(*lookup.every)
            return self._ids.without_removed(grad, *lookup.written)

    def _record_writes(self, lookup: _Lookup) -> None:
        """Record the rows that a backward is about to write."""
        self._rows.add(*lookup.written)
        for written in self._written.values():
            written.add(*lookup.written)
        # Sequences are masked now, by without_removed(). Bags were masked in the forward: rows
        # that they kept may have been removed since.
        pooled = self._batch.pooling != "none"
        if pooled and (not lookup.masked or lookup.masks_key != self._masks_key()):
            self._rows.revived |= self._ids.any_removed

    def _write_whole(
        self, writer: WholeRowWriter, write: Callable[[Any], None], mode: Mapping[str, float]
    ) -> None:
        """Call a method of FBGEMM's that may write all rows in a forward; then clean them all."""
        write(mode)
        if writer.wrote(mode):
            self.clean_all()


def places_of(located: Mapping[str, ShardedData]) -> Places:
    """Return where the masks of this rank's shards are."""
    found = {}
    for name, data in located.items():
        for number, shard in enumerate(data.shards):
            found[shard.tensor.data_ptr(), tuple(shard.tensor.shape)] = Place(name, number)
    return found


def places_in(batch: TableBatch, places: Places) -> dict[int, Place]:
    """Return the places of a batch's registered tables, by their number in the batch."""
    found = {}
    for table, view in enumerate(batch.weights()):
        place = places.get((view.data_ptr(), tuple(view.shape)))
        if place is not None:
            found[table] = place
    return found


def fused_sums(models: Iterable[nn.Module]) -> dict[int, tuple[Tensor, float]]:
    """Return the sums of fused Adagrad optimizers and their initial value, by the address of the
    shard; nothing for other optimizers."""
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


def _local_ids(features: Any) -> Ids:
    """Return the ids of a KeyedJaggedTensor, and where those of each feature begin and end."""
    return features.values(), _ends(features)


def _copied_ids(features: Any) -> Ids:
    """Return the same as int64, to be kept until the backward."""
    # long() copies int32 ids, as FBGEMM does: the caller may refill their memory before the
    # backward.
    return features.values().long(), _ends(features)


def _ends(features: Any) -> Ends:
    """Return where the ids of each feature of a KeyedJaggedTensor begin and end."""
    if features.values().is_cpu or features.variable_stride_per_key() or not features.stride():
        ends: list[int] = features.offset_per_key()
        return ends
    # With one batch size for all features, the host need not wait for the device.
    offsets: Tensor = features.offsets()[:: features.stride()]
    return offsets
