"""Keep removed weights at zero in tables that a fused optimizer writes inside the backward.

Hooks read the ids of a lookup at the kernel, after the input distribution: there they are local to
the shard, whatever the sharding. A table is masked in one of two ways:

- *by its ids*, if it keeps or removes whole rows: the ids of removed rows are dropped or weigh
  nothing (:mod:`~dist_sparse.enforcer.rows`), so that these rows stay zero by themselves.
- *by zeroing*, for all other blocks, for scores that need the gradients of removed rows, and for
  optimizers that move a row at gradient 0. Rows that a backward writes are flagged as dirty. They
  are cleaned before a lookup reads them, or before weights are scored, saved or read.

TorchRec and FBGEMM are behind :class:`~dist_sparse.tables.protocols.TableBatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.enforcer import Clock, Hook, Hooks, timed
from dist_sparse.enforcer.dense import Place, State, WeightState
from dist_sparse.enforcer.rows import (
    CountedLookups,
    Ends,
    KeptIds,
    RowFlags,
    SampledLookups,
    Slot,
    ZeroedRows,
    add_pruned,
    flag,
)
from dist_sparse.masking.kept_scores import Written
from dist_sparse.masking.masks import Held
from dist_sparse.masking.scores import worth_keeping
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import collection_of, torchrec_port
from dist_sparse.tables.protocols import TableBatch
from dist_sparse.tables.shards import CACHED

# The ids of a lookup, and where those of each feature begin and end.
Ids = tuple[Tensor, Ends]


@dataclass(frozen=True, eq=False)
class _PendingLookup:
    """A lookup whose backward is still to come.

    Attributes:
        every: all ids, dropped ones too.
        written: the ids whose rows the backward writes.
        masks_key: identifies the masks by which ids of removed rows were dropped or weigh nothing;
            empty if another hook has replaced the ids since.
    """

    every: Ids
    written: Ids
    masks_key: tuple[int, ...]


class StreamOrder:
    """Orders lookups and writes of a set of tables across CUDA streams, for training pipelines with
    a stream of their own for lookups. Never blocks the host.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.cuda, or torch.cpu, whose streams do nothing.
        self._streams = torch.get_device_module(device)
        self._readers: set[Any] = set()
        # Sets the stream of the last write, and an event after it.
        self.after_write()

    def before_read(self) -> None:
        """Have the current stream wait for the last write."""
        self._readers.add(self._after_last_write())

    def before_write(self) -> None:
        """Have the current stream wait for all lookups, their backwards, and the last write."""
        stream = self._after_last_write()
        for reader in self._readers - {stream}:
            stream.wait_stream(reader)

    def after_write(self) -> None:
        """Have later lookups on other streams wait for the current one, up to here."""
        self._writer = self._streams.current_stream(self._device)
        self._written = self._writer.record_event()

    def _after_last_write(self) -> Any:
        """Return the current stream once it waits for the last write."""
        stream = self._streams.current_stream(self._device)
        # An event: waiting for all work of the other stream would end the overlap of the two.
        if stream != self._writer:
            stream.wait_event(self._written)
        return stream


class TableBatchHooks:
    """The hooks on one of FBGEMM's batches of tables, inside TorchRec's module.

    Args:
        batch: FBGEMM's batch; its module is called with a KeyedJaggedTensor of ids that are local
            to the shards.
        collection: the sharded collection that it belongs to.
        sparsifier: of the tables.
        clock: to which the time of the hooks is added.
    """

    def __init__(
        self, batch: TableBatch, collection: nn.Module, sparsifier: BaseDataSparsifier, clock: Clock
    ) -> None:
        self.module, self.collection = batch.module, collection
        self.clock = clock
        self._batch = batch
        self._sparsifier = sparsifier
        self._store = sparsifier.masks.tables
        # The masks of registered tables, by their number in the batch.
        self._places: Mapping[int, Place] = {}
        # Identifies the state that _refresh() read: _masks_key(), then the addresses of weights.
        self._key: tuple[int, ...] = ()
        self._in_sync = self._storage()
        self._slots: dict[int, Slot] = {}
        views = self._batch.weights()
        device = views[0].device
        on_cpu = device.type == "cpu"
        # FBGEMM's CPU backward writes wrong rows if a table is empty and widths differ.
        has_empty = min(map(len, views)) == 0
        widths = {view.shape[1] for view in views}
        self._strays = on_cpu and has_empty and len(widths) > 1
        # On a device the host does not know the ids; it never knows the rows of stray writes.
        self._knows_writes = on_cpu and not self._strays
        self._pooled = self._batch.pooling != "none"
        # Only a sum can do without rows of zeros. On a device the host would wait for the number of
        # remaining ids.
        self._drops = on_cpu and self._batch.pooling == "sum"
        self._features = list(batch.features)
        self._order = StreamOrder(device)
        # Of tables that are masked by their ids, if they have removed rows.
        self._kept = KeptIds({}, self._features)
        # Whether ids of removed rows are to weigh nothing in the kernel's next call.
        self._to_weigh = False
        self._rows = ZeroedRows(self._features, device)
        self._counts = CountedLookups(self._features)
        self._sampled = SampledLookups(self._features)
        # Rows written since they were read, by what reads and clears the record.
        self._written: dict[str, dict[int, RowFlags]] = {}
        # Whether rows of registered tables are cached.
        self._caches = False
        # All ids of the last forward, and those that were passed on to the kernel.
        self._last: tuple[Any, Any] = (None, None)
        self._hooks = Hooks()

    def hook(self) -> None:
        """Attach the hooks on lookups and on their backwards."""
        self._hooks.add(
            self.module.register_forward_pre_hook(Hook(self._before_lookup)),
            self.module.register_forward_hook(Hook(self._after_lookup)),
        )
        if self._pooled:
            weigh = Hook(self._weigh)
            restore = Hook(lambda *_: self._batch.restore_pooling())
            self._hooks.add(
                self._batch.kernel.register_forward_pre_hook(weigh, with_kwargs=True),
                self._batch.kernel.register_forward_hook(restore, always_call=True),
            )

    def unhook(self) -> None:
        """Remove the hooks. Backwards of lookups before are still recorded."""
        self._hooks.remove()

    def moved_to(self, places: Mapping[int, Place]) -> None:
        """Use the masks at other places; dirty rows stay dirty."""
        self._places = places
        self._key = ()
        self._written.clear()

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
        self._written.clear()

    def masks_updated(self) -> None:
        """Have lookups on other streams wait for the mask update that ends here."""
        self._order.after_write()

    def mark_all(self) -> None:
        """Mark every row as dirty, after weights were written outside of a backward."""
        self.mark_in_sync()
        self._rows.revived = True

    def mark_in_sync(self) -> None:
        """Mark the current storage as in sync with the dirty rows, after a write that revived none:
        it may have been in any row."""
        self._in_sync = self._storage()
        # Readers begin again, with all rows.
        self._written.clear()

    def written(self, reader: str) -> Iterator[tuple[int, Written]]:
        """Yield the address of the weights and the possibly written rows (live) of each registered
        CPU table; for ``"scores"`` of those whose scores are worth keeping. The first call of a
        reader starts its record, with all rows in it, and so does the first one after a write of
        unknown rows."""
        if not self._knows_writes:
            return
        slots = self._current()
        tracked = {
            table
            for table, slot in slots.items()
            if reader != "scores" or worth_keeping(slot.mask.rect, slot.mask.block)
        }
        record = self._written.get(reader, {})
        if record.keys() != tracked:
            record = {table: RowFlags(len(slots[table].weight)).add_all() for table in tracked}
            self._written[reader] = record
        for table, rows in record.items():
            yield slots[table].weight.data_ptr(), rows

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the registered shards by name."""
        for table, slot in self._current().items():
            yield self._places[table].name, slot.weight

    def states(self) -> Iterator[WeightState]:
        """Yield the registered shards and their optimizer state; FBGEMM starts all of it at 0."""
        by_table = self._batch.states()
        for table, slot in self._current().items():
            states: list[State] = [(state, 0.0) for state in by_table[table]]
            sums = states[0] if self._batch.is_adagrad else None
            by_element = any(state.shape == slot.weight.shape for state, _ in states)
            yield WeightState(self._places[table].name, *slot, states, sums, by_element)

    def _begin_write(self) -> None:
        """Wait for lookups on other streams, and have the weights of this moment in place."""
        self._order.before_write()
        self._current()
        if self._caches:
            self._batch.write_back()

    def _storage(self) -> dict[int, int]:
        """Return torch's counts of writes by the address of the weights. It counts all but writes
        through ``.data`` and by FBGEMM's backward, before which a hook runs."""
        return {each.data_ptr(): each._version for each in self._batch.storage()}

    def _masks_key(self) -> tuple[int, bool]:
        """Return a key that changes with the masks and with their use."""
        return self._store.version, self._sparsifier.trains_removed

    def _current(self) -> dict[int, Slot]:
        """Return the live weights and masks of registered tables, read again after either was
        replaced."""
        storage = self._storage()
        key = *self._masks_key(), *storage
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
        held: dict[int, Held] = {}
        for table, (name, number) in self._places.items():
            held[table] = self._store.table(name).shards[number]
            self._slots[table] = Slot(views[table].data, held[table].mask)
        # The mask update has zeroed newly removed rows: their scores have changed.
        for record in self._written.values():
            add_pruned(record, before, self._slots)
        self._counts.use(held)
        self._sampled.use(held)
        self._choose()

    def _choose(self) -> None:
        """Choose the tables that are masked by their ids, and those that are zeroed."""
        whole = {table for table, slot in self._slots.items() if slot.whole_rows}
        if self._sparsifier.trains_removed or self._strays:
            # Removed rows that are to be trained, or that the backward of another table writes, are
            # read.
            whole = set()
        stay_zero = whole if self._batch.keeps_zeros else set()
        self._refuse_cached(stay_zero)
        self._rows.use(self._slots, self._slots.keys() - stay_zero)
        # The ids of all others pass unchanged.
        by_ids = self._rows.removing.keys() & (whole if self._drops else stay_zero)
        kept = {table: ~self._slots[table].mask.dead_rows() for table in by_ids}
        self._kept = KeptIds(kept, self._features)

    def _refuse_cached(self, stay_zero: set[int]) -> None:
        """Refuse cached tables whose removed rows do not stay zero by themselves.

        Raises:
            ValueError: names them.
        """
        cached = self._batch.cached & self._slots.keys()
        self._caches = bool(cached)
        if rest := sorted(self._places[table].name for table in cached - stay_zero):
            raise ValueError(
                f"The tables {rest} have the compute kernel {CACHED!r}: rows in its cache can't be"
                " zeroed after each backward, so that removed rows must stay zero by themselves."
                " They do if masks are of whole rows, the score is not 'accumulator', and the fused"
                " optimizer is SGD or Adagrad with eps > 0."
            )

    @timed
    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._order.before_read()
        self._current()
        requested = passed = args[0]
        if self._drops and self._kept:
            passed = self._kept.among(requested)
        # Weight 0 keeps gradients from removed rows. A forward alone may read their zeros.
        self._to_weigh = passed is requested and torch.is_grad_enabled()
        sampled = self._sampled.due()
        with torch.no_grad():
            if sampled:
                self._sampled.add(*_local_ids(requested))
            if self._rows.revived:
                self.clean()
            if self._rows.any_dirty:
                self._rows.clean_read(*_local_ids(passed))
        self._last = requested, passed
        return passed, *args[1:]

    def _weigh(self, kernel: Any, args: Any, call: dict[str, Any]) -> Any:
        """Forward pre-hook of FBGEMM's module: let ids of removed rows weigh nothing, unless they
        were dropped."""
        if self._to_weigh and self._kept:
            return args, self._batch.weighed(call, self._kept.flags) or call
        return None

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        requested, passed = self._last
        # Free the ids now, not at the next lookup.
        self._last = None, None
        if not output.requires_grad:
            return
        written = _copied_ids(args[0])
        lookup = _PendingLookup(
            every=_copied_ids(requested) if self._counts else written,
            written=written,
            # The key begins with _masks_key(). Another hook may have replaced the ids.
            masks_key=self._key[:2] if passed is args[0] else (),
        )
        self._batch.pending.add(lookup)
        before_update = partial(self._before_update, lookup)
        output.register_hook(before_update)  # type: ignore[no-untyped-call]

    @timed
    def _before_update(self, lookup: _PendingLookup, grad: Tensor) -> Tensor | None:
        """Record a lookup in its backward, just before the fused optimizer writes the rows; return
        the gradient of the output, or None for no change."""
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
            return self._without_removed(grad, *lookup.written)

    def _without_removed(self, grad: Tensor, ids: Tensor, ends: Ends) -> Tensor | None:
        """Return the gradient of a sequence with zeros for removed rows; None for no change."""
        if self._pooled or not self._kept:
            return None
        removed = self._kept.flags(ids, ends).logical_not_()
        if not grad.is_cpu:
            return grad.masked_fill(removed.unsqueeze(1), 0)
        # Takes half the time of masked_fill(), but the host would wait for a device.
        copied = grad.clone(memory_format=torch.contiguous_format)
        return copied.index_fill_(0, removed.nonzero().view(-1), 0)

    def _record_writes(self, lookup: _PendingLookup) -> None:
        """Record the rows that a backward is about to write."""
        self._rows.add(*lookup.written)
        for record in self._written.values():
            flag(record, self._features, *lookup.written)
        # Sequences are masked now, by _without_removed(). Bags were masked in the forward: rows
        # that they kept may have been removed since.
        if self._pooled and lookup.masks_key != self._masks_key():
            self._rows.revived |= bool(self._kept)


def fused_sums(model: nn.Module) -> dict[int, State]:
    """Return the sums of a model's fused Adagrad optimizers and their initial value, by the address
    of the shard; nothing for other optimizers."""
    found: dict[int, State] = {}
    for _, batch in batches_of(collections_of(model.modules())):
        if batch.is_adagrad:
            for weight, states in zip(batch.weights(), batch.states(), strict=True):
                found[weight.data_ptr()] = states[0], 0.0
    return found


def collections_of(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the sharded collections among some modules, each once."""
    torchrec = torchrec_port()
    if torchrec is not None:
        yield from filter(torchrec.is_sharded, dict.fromkeys(modules))


def batches_of(collections: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, TableBatch]]:
    """Yield this rank's table batches with a fused optimizer, each with its collection."""
    for collection in collections:
        for batch in collection_of(collection).batches():
            yield collection, batch


def lookups_of(collection: nn.Module) -> list[nn.Module]:
    """Return the lookups of a sharded collection. A reshard makes new ones on every rank, with or
    without shards."""
    torchrec = torchrec_port()
    # It has made the collection.
    assert torchrec is not None
    return torchrec.lookups(collection)


def _local_ids(features: Any) -> Ids:
    """Return the ids of a KeyedJaggedTensor, and where those of each feature begin and end."""
    ids = features.values()
    if ids.is_cpu or features.variable_stride_per_key():
        return ids, features.offset_per_key()
    # With one batch size for all features, the host need not wait for the device. An empty batch
    # has no ids to find.
    return ids, features.offsets()[:: max(1, features.stride())]


def _copied_ids(features: Any) -> Ids:
    """Return :func:`_local_ids` with ids of int64, to be kept until the backward."""
    ids, ends = _local_ids(features)
    # long() copies int32 ids, as FBGEMM does: the caller may refill their memory before the
    # backward.
    return ids.long(), ends
