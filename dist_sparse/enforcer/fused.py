"""Keep removed weights at zero in tables that a fused optimizer writes inside the backward.

Hooks read the ids of a lookup at FBGEMM's kernel, after the input distribution: there, ids are
local to the shard, whatever the sharding. A table is masked in one of two ways:

- *by its ids*, if its mask keeps or removes whole rows: ids of removed rows are dropped or get the
  weight 0 (:mod:`~dist_sparse.enforcer.rows`). Such a row gets no gradient and stays zero.
- *by zeroing*, for finer masks, for scores that need the gradients of removed rows, and for
  optimizers that move a row at gradient 0. The rows that a backward writes are flagged as dirty.
  They are cleaned before a lookup reads them, and before weights are scored, saved or read.

One training step of a batch of tables runs these hooks:

1. before the lookup: read new masks, drop ids of removed rows, clean the dirty rows that it reads;
2. before FBGEMM's kernel: give the ids of removed rows the weight 0, if they were not dropped;
3. after the lookup: keep its ids for the backward;
4. in the backward, just before the fused optimizer writes: flag the rows of these ids as dirty, and
   zero the gradients of removed rows of sequences, whose ids have no weights.

TorchRec and FBGEMM are behind :class:`~dist_sparse.tables.protocols.TableBatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from dist_sparse.enforcer import Clock, Hook, Hooks, timed
from dist_sparse.enforcer.dense import MaskPlace, WeightState
from dist_sparse.enforcer.rows import (
    CountedLookups,
    Ends,
    KeptIds,
    MaskedShard,
    RowFlags,
    SampledLookups,
    ZeroedRows,
    add_pruned,
    flag_rows,
)
from dist_sparse.masking.kept_scores import Written
from dist_sparse.masking.masks import Held
from dist_sparse.masking.scores import worth_keeping
from dist_sparse.optimizers import Known, State, fused_records
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import collection_of, loaded_torchrec
from dist_sparse.tables.protocols import TableBatch, WeightsOf
from dist_sparse.tables.shards import CACHED

# The ids of a lookup, feature after feature, and the offsets of the features.
Ids = tuple[Tensor, Ends]


@dataclass(frozen=True, eq=False)
class _PendingLookup:
    """The ids of a lookup whose backward has not run yet.

    Attributes:
        requested: all ids, dropped ones too.
        written: the ids whose rows the backward writes.
        masks_key: identifies the masks that removed ids, or their weights, from this lookup; empty
            if another hook has replaced the ids since.
        kept: which ids keep their rows, bool ``(n,)``, by these masks; None if not known.
    """

    requested: Ids
    written: Ids
    masks_key: tuple[int, ...]
    kept: Tensor | None


class StreamOrder:
    """Order of lookups and writes of some tables across CUDA streams: training pipelines look up
    on a stream of their own. Never blocks the host.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.cuda; or torch.cpu, which has the same functions, whose streams do nothing.
        self._streams = torch.get_device_module(device)
        # Every stream that has looked up. A program has a few: none is ever removed.
        self._readers: set[Any] = set()
        # Sets the stream of the last write, and the event at its end.
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
        """Have later lookups on other streams wait for all work of the current one so far."""
        self._writer = self._streams.current_stream(self._device)
        self._write_done = self._writer.record_event()

    def _after_last_write(self) -> Any:
        """Have the current stream wait for the last write, and return the stream."""
        stream = self._streams.current_stream(self._device)
        # For the event, not for all work of the other stream: the two would no longer overlap.
        if stream != self._writer:
            stream.wait_event(self._write_done)
        return stream


# The attached hooks of each kernel: enforcers of different tables may share one.
_hooks_of: WeakKeyDictionary[nn.Module, WeakSet[TableBatchHooks]] = WeakKeyDictionary()


class TableBatchHooks:
    """Hooks on one FBGEMM kernel, which looks up a batch of tables.

    Tables are numbered as in the kernel. Unregistered ones have no mask: nothing here changes them.

    Args:
        batch: the tables; its module is called with a KeyedJaggedTensor of ids that are local to
            the shards.
        collection: the sharded collection that contains the kernel.
        sparsifier: stores the masks of the tables.
        clock: adds up the time of the hooks.
    """

    def __init__(
        self, batch: TableBatch, collection: nn.Module, sparsifier: BaseDataSparsifier, clock: Clock
    ) -> None:
        self.module, self.collection = batch.module, collection
        self.clock = clock
        self._batch = batch
        self._sparsifier = sparsifier
        self._store = sparsifier.masks.tables
        # Lookups whose backward has not run yet.
        self._pending = batch.pending
        # Where the store has the masks of registered tables.
        self._places: Mapping[int, MaskPlace] = {}
        # The weights and masks of registered tables, as _read_masks() found them, and what
        # identifies that state: a key of the masks, then the addresses of the weights.
        self._masked: dict[int, MaskedShard] = {}
        self._masked_key: tuple[Any, ...] = ()
        # Torch's counts of writes when unseen ones were last marked dirty.
        self._known_writes = self._count_writes()
        views = self._batch.weights()
        device = views[0].device
        on_cpu = device.type == "cpu"
        # FBGEMM's CPU backward writes wrong rows if a table is empty and widths differ.
        has_empty = min(map(len, views)) == 0
        widths = {view.shape[1] for view in views}
        self._writes_strays = on_cpu and has_empty and len(widths) > 1
        # On a device the host does not know the ids, and no id names the rows of a stray write.
        self._knows_writes = on_cpu and not self._writes_strays
        self._pooled = self._batch.pooling != "none"
        # A sum does not change without rows of zeros; a mean divides by the number of ids, and a
        # sequence has a row for each. On a device the host would have to wait for the number of
        # remaining ids.
        self._drops_ids = on_cpu and self._batch.pooling == "sum"
        self._features = batch.features
        self._order = StreamOrder(device)
        # The two ways to mask: by ids (KeptIds, or the kernel that takes its place on a device) and
        # by zeroing. _assign_tables() sets their tables.
        self._kept_ids: Any = None
        self._zeroed = ZeroedRows(self._features, device)
        # What gives ids of removed rows the weight 0 in the next call of FBGEMM's module.
        self._next_weights: WeightsOf | None = None
        self._counted: CountedLookups | None = None
        self._sampled = SampledLookups(self._features)
        # Ids that were merged before the lookup are not a sample of the traffic.
        self._sees_lookups = not collection_of(collection).merges_ids
        # For each reader, such as "scores", the rows written since it last cleared its record.
        self._records: dict[str, dict[int, RowFlags]] = {}
        self._siblings = _hooks_of.setdefault(self.module, WeakSet())
        self._has_cached = False
        # KeyedJaggedTensors of the last forward: as requested, and as passed on to the kernel.
        self._last_features: tuple[Any, Any] = (None, None)
        # Which ids of the last forward keep their rows, if the sample has found it out.
        self._last_kept: Tensor | None = None
        self._hooks = Hooks()

    def hook(self) -> None:
        """Attach the hooks on lookups and on their backwards."""
        self._siblings.add(self)
        self._hooks.add(
            self.module.register_forward_pre_hook(Hook(self._before_lookup)),
            self.module.register_forward_hook(Hook(self._after_lookup)),
        )
        if self._pooled:
            weigh = Hook(self._weigh_ids)
            restore = Hook(self._batch.restore_pooling)
            self._hooks.add(
                self._batch.kernel.register_forward_pre_hook(weigh, with_kwargs=True),
                self._batch.kernel.register_forward_hook(restore, always_call=True),
            )

    def unhook(self) -> None:
        """Remove the hooks. Backwards of earlier lookups are still recorded."""
        self._hooks.remove()
        self._siblings.discard(self)

    def moved_to(self, places: Mapping[int, MaskPlace]) -> None:
        """From now on read the masks from different places; dirty rows stay dirty."""
        self._places = places
        self._masked_key = ()
        self._records.clear()

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        self._begin_write()
        self._zeroed.clean()
        self._order.after_write()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        self._begin_write()
        self._zeroed.clean_all()
        self._order.after_write()
        # Other enforcers do not see what is written through `.data`.
        for hooks in self._siblings:
            hooks._records.clear()

    def masks_updated(self) -> None:
        """Have lookups on other streams wait for the mask update that ends here."""
        self._order.after_write()

    def mark_all(self) -> None:
        """Mark every row as dirty, after weights were written outside of a backward."""
        self.note_clean_write()
        self._zeroed.revived = True

    def note_clean_write(self) -> None:
        """Account for a write, to any rows, that has left removed weights at zero."""
        self._known_writes = self._count_writes()
        # Readers start new records, with all rows.
        self._records.clear()

    def written(self, reader: str) -> Iterator[tuple[Tensor, Written]]:
        """Yield the weights and the live set of possibly written rows of each CPU table; for
        ``"scores"``, only of registered tables whose scores are worth keeping. A reader's first
        call, or its first after an untracked write, starts with all rows."""
        if not self._knows_writes:
            return
        for hooks in self._siblings:
            hooks._refresh()
        if reader == "scores":
            weights = {
                table: shard.weight
                for table, shard in self._masked.items()
                if worth_keeping(shard.mask.rect, shard.mask.block)
            }
        else:
            weights = dict(enumerate(self._batch.weights()))
        record = self._records.get(reader, {})
        if record.keys() != weights.keys():
            record = {table: RowFlags(len(weight)).add_all() for table, weight in weights.items()}
            self._records[reader] = record
        for table, rows in record.items():
            yield weights[table], rows

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the registered shards by name."""
        self._refresh()
        for table, shard in self._masked.items():
            yield self._places[table].name, shard.weight

    def states(self) -> Iterator[WeightState]:
        """Yield the registered shards and their optimizer state; FBGEMM starts all of it at 0."""
        by_table = self._batch.states()
        self._refresh()
        for table, shard in self._masked.items():
            states: list[State] = [(state, 0.0) for state in by_table[table]]
            sums = states[0] if self._batch.is_adagrad else None
            by_element = any(state.shape == shard.weight.shape for state, _ in states)
            yield WeightState(self._places[table].name, *shard, states, sums, by_element)

    def records(self) -> list[tuple[Tensor, Known]]:
        """Return each shard with its record."""
        return fused_records(self._batch)

    def _begin_write(self) -> None:
        """Wait for lookups on other streams, then bring masks and weights up to date."""
        self._order.before_write()
        self._refresh()
        if self._has_cached:
            self._batch.write_back()

    def _count_writes(self) -> tuple[list[int], list[int]]:
        """Return the addresses of the weights and torch's counts of writes. Torch counts all writes
        except through ``.data`` and in FBGEMM's backward, before which a hook runs."""
        addresses, counts = [], []
        for weight in self._batch.storage():
            addresses.append(weight.data_ptr())
            counts.append(weight._version)
        return addresses, counts

    def _refresh(self) -> None:
        """Read masks and weights again if either was replaced. Mark all rows as dirty if weights
        were written outside of a backward."""
        writes = self._count_writes()
        # The first part changes with the masks and with their use.
        key = (self._store.version, self._sparsifier.trains_removed), writes[0]
        if key != self._masked_key:
            # A validation in inference mode may be the first to see new masks: what is made for
            # them must not be inference tensors, which a backward can't write.
            with torch.inference_mode(False), torch.no_grad():
                self._read_masks()
            self._masked_key = key
        # Torch has counted a write, such as a load or copy_(): it may be in any row.
        if writes != self._known_writes:
            self.mark_all()

    def _read_masks(self) -> None:
        """Read masks, counts and weights again, and decide how to mask each table."""
        views = self._batch.weights()
        before, self._masked = self._masked, {}
        held: dict[int, Held] = {}
        losing: dict[int, Held] = {}
        for table, (name, number) in self._places.items():
            if name not in self._store:
                # Squashed since the lookup whose backward this is: nothing is masked any more.
                continue
            masks = self._store.table(name)
            held[table] = masks.shards[number]
            # Over all ranks, so that they sample alike: shares of lookups are of whole tables.
            if masks.removed != 0:
                losing[table] = held[table]
            self._masked[table] = MaskedShard(views[table].data, held[table].mask)
        # The mask update has zeroed newly removed rows: their scores have changed.
        for record in chain(*(hooks._records.values() for hooks in self._siblings)):
            add_pruned(record, before, self._masked)
        counts = {table: shard.counts for table, shard in held.items() if shard.counts.numel()}
        self._counted = CountedLookups(counts, self._features) if counts else None
        weighed = self._assign_tables()
        # Records read the counts where there are some.
        is_sampled = self._sees_lookups and len(counts) < len(held)
        self._sampled.use(losing if is_sampled else {}, weighed)

    def _assign_tables(self) -> Set[int]:
        """Decide for each registered table whether it is masked by its ids, by zeroing, or both.
        Return the tables that lose ids.

        ===========================  ===============  =============================
        mask, optimizer              ids are dropped  ids stay, with the gradient 0
        ===========================  ===============  =============================
        whole rows, keeps zeros      by ids           by ids
        whole rows, others           both             by zeroing
        finer than rows              by zeroing       by zeroing
        ===========================  ===============  =============================

        *Both*, because a lookup with ids out of range drops none: its removed rows get the
        gradient 0, and such an optimizer moves them all the same.
        """
        whole_rows = {table for table, shard in self._masked.items() if shard.whole_rows}
        if self._sparsifier.trains_removed or self._writes_strays:
            # Scores need the gradients of removed rows, or FBGEMM writes rows that no id names.
            whole_rows = set()
        stay_zero = whole_rows if self._batch.keeps_zeros else set()
        cached = self._batch.cached & self._masked.keys()
        self._has_cached = bool(cached)
        self._refuse_cached(cached - stay_zero)
        self._zeroed.use(self._masked, self._masked.keys() - stay_zero)
        by_ids = whole_rows if self._drops_ids else stay_zero
        # A table that loses no rows needs no filter.
        filtered = self._zeroed.removing.keys() & by_ids
        kernels = self._zeroed.kernels
        if not filtered:
            self._kept_ids = None
        elif kernels is None:
            kept_rows = {table: ~self._masked[table].mask.dead_rows() for table in filtered}
            self._kept_ids = KeptIds(kept_rows, self._features)
        else:
            masks = {table: (self._masked[table].mask, None, True) for table in filtered}
            self._kept_ids = kernels.TritonLookups(list(map(masks.get, self._features)))
        return filtered

    def _refuse_cached(self, tables: set[int]) -> None:
        """Refuse cached tables whose removed rows do not stay zero by themselves.

        Args:
            tables: these tables.

        Raises:
            ValueError: there are some; names them.
        """
        if tables:
            names = sorted(self._places[table].name for table in tables)
            raise ValueError(
                f"The tables {names} have the compute kernel {CACHED!r}: their removed rows stay"
                " zero only with masks of whole rows, a score other than 'accumulator', and SGD or"
                " Adagrad with eps > 0."
            )

    @timed
    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._order.before_read()
        self._refresh()
        requested = passed = args[0]
        self._refuse_loose_ids(requested)
        if self._drops_ids and self._kept_ids:
            passed = self._kept_ids.select(requested)
        # The weight 0 keeps gradients from removed rows. Without a backward, a lookup may read
        # them: they are rows of zeros.
        self._next_weights = None
        if self._kept_ids and passed is requested and torch.is_grad_enabled():
            self._next_weights = self._kept_ids.weights
        self._last_kept = None
        # Outside of no_grad(): only training forwards are sampled.
        is_sampled = self._sampled.counts_forward()
        with torch.no_grad():
            if self._zeroed.revived:
                self.clean()
            sampled = None
            if is_sampled and self._zeroed.kernels is None:
                self._sampled.add(*_local_ids(requested))
            elif is_sampled:
                sampled = self._sample(requested)
            if self._zeroed.any_dirty:
                self._zeroed.clean_read(*_local_ids(passed), sampled)
        self._last_features = requested, passed
        return passed, *args[1:]

    def _sample(self, features: Any) -> Any:
        """Have a kernel add the lookups of this forward to the samples, in a launch that reads the
        ids anyway, if there is one: return the kernel if the launch is the one that cleans the
        rows, else None."""
        kernel = self._sampled.kernel_of(self._zeroed.kernels)
        if self._kept_ids is None:
            if self._zeroed.any_dirty:
                return kernel
            kernel.sample(*_local_ids(features))
        elif self._pooled:
            self._next_weights = kernel.weights
        else:
            # The backward of a sequence masks gradients by these flags. It does not sample itself:
            # masks may have changed by then.
            self._last_kept = kernel.flags(*_local_ids(features))
        return None

    def _refuse_loose_ids(self, features: Any) -> None:
        """Refuse ids that are in no bag, and bags without ids. FBGEMM reads and trains such ids in
        the last bag, and its operator that drops ids reads memory outside of them. Not on a device,
        where the host would wait.

        Raises:
            ValueError: names tables and numbers of ids.
        """
        ids, lengths = features.values(), features.lengths()
        if not ids.is_cpu:
            return
        in_bags = features.offset_per_key()[-1]
        if in_bags != ids.numel() or bool((lengths < 0).any()):
            raise ValueError(
                f"Tables {list(self._batch.tables)}: a lookup has {ids.numel()} ids, and bags of"
                f" {in_bags}: lengths must add up to the number of ids, and none may be negative."
            )

    def _weigh_ids(self, kernel: Any, args: Any, call: dict[str, Any]) -> Any:
        """Give ids of removed rows the weight 0, unless they were dropped. A forward pre-hook of
        FBGEMM's module."""
        if self._next_weights:
            return args, self._batch.mask_weights(call, self._next_weights)
        return None

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        requested, passed = self._last_features
        kept = self._last_kept
        # Free the ids now, not at the next lookup.
        self._last_features = None, None
        self._last_kept = None
        if not output.requires_grad:
            return
        written = _copied_ids(args[0])
        lookup = _PendingLookup(
            requested=_copied_ids(requested) if self._counted else written,
            written=written,
            # The masks that this lookup used; none if another hook has replaced the ids.
            masks_key=self._masked_key[0] if passed is args[0] else (),
            kept=kept,
        )
        self._pending.add(lookup)
        before_update = partial(self._before_update, lookup)
        output.register_hook(before_update)  # type: ignore[no-untyped-call]

    @timed
    def _before_update(self, lookup: _PendingLookup, grad: Tensor) -> Tensor | None:
        """Record a lookup in its backward, just before the fused optimizer writes the rows; return
        the gradient of the output, or None for no change."""
        self._pending.discard(lookup)
        # Recorded in the backward, not in the forward: rows may be cleaned or read in between.
        with torch.no_grad():
            # Masks may have been updated since the lookup.
            self._refresh()
            if self._writes_strays:
                self.mark_all()
            else:
                self._record_writes(lookup)
            if self._counted:
                self._counted.add(*lookup.requested)
            return self._without_removed(grad, lookup)

    def _without_removed(self, grad: Tensor, lookup: _PendingLookup) -> Tensor | None:
        """Return the gradient of a sequence with zeros for removed rows; None for no change."""
        if self._pooled or self._kept_ids is None:
            return None
        kept = lookup.kept
        if kept is None or lookup.masks_key != self._masked_key[0]:
            kept = self._kept_ids.flags(*lookup.written)
        removed = kept.logical_not()
        if not grad.is_cpu:
            return grad.masked_fill(removed.unsqueeze(1), 0)
        # Half the time of masked_fill(). On a device, nonzero() would have the host wait.
        copied = grad.clone(memory_format=torch.contiguous_format)
        return copied.index_fill_(0, removed.nonzero().view(-1), 0)

    def _record_writes(self, lookup: _PendingLookup) -> None:
        """Record the rows that a backward is about to write."""
        self._zeroed.add(*lookup.written)
        for record in self._records.values():
            flag_rows(record, self._features, *lookup.written)
        # The gradients of sequences are masked next, by _without_removed(). Bags were masked in the
        # forward: if masks have changed since, the backward may write rows that are removed by now.
        if self._pooled and self._kept_ids and lookup.masks_key != self._masked_key[0]:
            self._zeroed.revived = True


def lookups_of(collection: nn.Module) -> list[nn.Module]:
    """Return the lookups of a sharded collection. A reshard makes new ones on every rank, with or
    without shards."""
    return loaded_torchrec().lookups(collection)


def _local_ids(features: Any) -> Ids:
    """Return the ids of a KeyedJaggedTensor and the offsets of its features."""
    ids = features.values()
    if ids.is_cpu or features.variable_stride_per_key():
        return ids, features.offset_per_key()
    # With one batch size for all features, each stride-th offset begins a feature: the host need
    # not wait for the device. An empty batch has the stride 0, which is not a valid step.
    return ids, features.offsets()[:: max(1, features.stride())]


def _copied_ids(features: Any) -> Ids:
    """Return :func:`_local_ids` with ids of int64, to be kept until the backward."""
    ids, ends = _local_ids(features)
    # long() copies int32 ids, as FBGEMM does: the caller may refill their memory before the
    # backward.
    return ids.long(), ends
