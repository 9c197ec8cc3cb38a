"""Removed weights stay zero in tables that a fused optimizer writes inside the backward.

The ids of a lookup are taken where they arrive at the kernel, behind the input distribution, so
they are local to the shard whatever the sharding. Where rows are added up, ids of removed rows are
dropped there (:mod:`~dist_sparse.enforcer.drop`). Of the rows that are read, the dirty ones are
cleaned just before. A backward flags the rows that it writes, if the masks remove anything of them;
they stay dirty until the weights are next scored, saved or read.

TorchRec and FBGEMM are behind :class:`~dist_sparse.tables.protocols.TableBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.drop import KeptIds, kept_rows
from dist_sparse.enforcer.hooks import Clock, Hook, Wrapped, timed
from dist_sparse.enforcer.optimizers import State, reset_state
from dist_sparse.enforcer.rows import (
    DirtyRows,
    Lookup,
    Slot,
    TorchLookup,
    count_lookups,
    lookup_on,
    zero_rows,
)
from dist_sparse.enforcer.sampled import SampledLookups
from dist_sparse.enforcer.written import WrittenRows
from dist_sparse.masking.cached.kept_scores import KeptScores, Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.port import collection_of, torchrec_port
from dist_sparse.tables.protocols import TableBatch, WholeRowWriter
from dist_sparse.tables.shards import ShardedData

__all__ = [
    "Kernel",
    "Place",
    "averages",
    "collections_of",
    "fused_sums",
    "lookups_of",
    "places_in",
    "places_of",
]


class Place(NamedTuple):
    """The mask of a shard: the name under which its table is registered, and its number there."""

    name: str
    number: int


Places = Mapping[tuple[int, tuple[int, ...]], Place]
"""Masks by the address and the shape of the weights."""


class Kernel:
    """The hooks on one kernel: FBGEMM's batch of tables inside TorchRec's module.

    Args:
        batch: FBGEMM's batch; its module is called with a KeyedJaggedTensor of ids that are local
            to the shards.
        collection: the sharded collection that it belongs to.
        places: the mask of each of its tables; None for a table that is not registered.
        mask: returns the mask at a place.
        counts: returns how often each row of the shard at a place was looked up, live; None if that
            is not counted.
        samples: returns the sums of sampled lookups of the shard at a place, live.
        version: returns a number that changes whenever masks do.
        drops: returns whether ids of removed rows are dropped where that changes no output;
            otherwise they are zeroed.
        clock: to which the time of the hooks is added.
    """

    def __init__(
        self,
        batch: TableBatch,
        collection: nn.Module,
        places: Sequence[Place | None],
        mask: Callable[[Place], BlockMask],
        counts: Callable[[Place], Tensor | None],
        samples: Callable[[Place], Tensor],
        version: Callable[[], int],
        drops: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self.module, self.collection = batch.module, collection
        self.places = list(places)
        self.clock = clock
        self._batch = batch
        self._mask, self._counts, self._samples = mask, counts, samples
        self._mask_version, self._drops = version, drops
        self._counted: list[Tensor | None] = []
        self._counts_any = False
        self._room = 0  # lookups until counts must be clamped, so that none exceeds its integers
        self._features = list(batch.features)
        self._sampled = SampledLookups(self._features)
        self._known: tuple[int, ...] = ()
        self._ids: KeptIds | None = None
        self._only_kept = False
        self._handed: tuple[Any, Any] = (None, None)
        self._in_sync = self._storage()
        self._slots: list[Slot | None] = []
        self._lookup: Lookup = TorchLookup([])
        views = batch.weights()
        self._on_cpu = views[0].is_cpu
        self._dirty = DirtyRows([len(view) for view in views], self._features, views[0].device)
        # With an empty table beside others of another width, FBGEMM's CPU backward writes other
        # rows than it was given.
        self._strays = (
            self._on_cpu
            and min(map(len, views)) == 0
            and len({view.shape[1] for view in views}) > 1
        )
        self._adds = self._on_cpu and not self._strays and batch.adds_rows
        self._written: WrittenRows | None = None
        self._handles: list[RemovableHandle | Wrapped] = []

    def hook(self) -> None:
        """Attach the hooks on lookups, on their backwards, and on what FBGEMM writes besides,
        unless they are."""
        if self._handles:
            return
        self._handles = [
            self.module.register_forward_pre_hook(Hook(self._before_lookup)),
            self.module.register_forward_hook(Hook(self._after_lookup)),
        ]
        for writer in self._batch.whole_row_writers():
            write = partial(self._write_whole, writer)
            self._handles.append(Wrapped(writer.owner, writer.method, write))

    def unhook(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def moved_to(self, places: Sequence[Place | None]) -> None:
        """Take the masks from other places; dirty rows stay dirty."""
        self.places = list(places)
        self._known = ()

    def clean(self) -> None:
        """Zero what is removed in the dirty rows."""
        slots = self._current()
        if self._dirty:
            for table, slot in enumerate(slots):
                if slot is not None and slot.mask.removes:
                    for rows in self._dirty.rows(table):
                        zero_rows(slot.weight, slot.mask, rows)
            self._dirty.clear()

    def written(self) -> Iterator[tuple[int, Written]]:
        """Yield for each registered table whose scores are worth keeping, on a CPU, the address of
        its weights and the rows that may have been written, live: all of them at the first call,
        since which writes are noted."""
        if not self._on_cpu or self._strays:
            return
        worth = {
            table: slot
            for table, slot in enumerate(self._current())
            if slot is not None and KeptScores.fits(slot.mask.rect, slot.mask.block)
        }
        if self._written is None or self._written.noted != [*worth]:
            rows = [
                worth[table].mask.rect.rows if table in worth else None
                for table in range(len(self.places))
            ]
            self._written = WrittenRows(rows, self._features) if worth else None
        if self._written is not None:
            for slot, of_table in zip(worth.values(), self._written.tables, strict=True):
                yield slot.weight.data_ptr(), of_table

    def clean_all(self) -> None:
        """Zero what is removed in every row, dirty or not."""
        for slot in self._current():
            if slot is not None and slot.mask.removes:
                slot.mask.apply_(slot.weight)
        self._dirty.clear()
        if self._written is not None:
            self._written.add_all()

    def mark_all(self) -> None:
        """Mark every row as dirty, after weights were written outside of a backward."""
        self.mark_in_sync()
        for table in range(len(self.places)):
            self._dirty.add_all(table)
        if self._written is not None:
            self._written.add_all()

    def mark_in_sync(self) -> None:
        """Mark the current storage as in sync with the dirty rows."""
        self._in_sync = self._storage()

    def weights(self) -> list[tuple[str, Tensor]]:
        """The registered names and their live shards."""
        slots = zip(self.places, self._current(), strict=True)
        return [
            (place.name, slot.weight)
            for place, slot in slots
            if place is not None and slot is not None
        ]

    def masks(self) -> list[BlockMask | None]:
        """The current masks, one for each table. A mask update replaces them, it does not edit
        them."""
        return [None if slot is None else slot.mask for slot in self._current()]

    def accumulators(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the live shards of registered tables, each with what its Adagrad has summed:
        ``(rows,)``, or as the shard; nothing for other optimizers."""
        if self._batch.is_adagrad:
            for slot, of_table in zip(self._current(), self._batch.states(), strict=True):
                if slot is not None:
                    yield slot.weight, of_table[0]

    def reset(self, masks: Sequence[BlockMask | None]) -> None:
        """Set the optimizer state of what ``masks`` remove to its initial value, zero."""
        for mask, of_table in zip(masks, self._batch.states(), strict=True):
            if mask is not None:
                reset_state(mask, [(state, 0.0) for state in of_table])

    def element_states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield the names of tables that have optimizer state for each element, and that state."""
        states = self._batch.states()
        for place, slot, of_table in zip(self.places, self._current(), states, strict=True):
            if place is not None and slot is not None:
                found = [(state, 0.0) for state in of_table if state.shape == slot.weight.shape]
                if found:
                    yield place.name, found

    def _storage(self) -> list[tuple[int, int]]:
        """The addresses of the weights, and the writes that torch has counted: all but those
        through ``.data`` and by FBGEMM's backward, which a hook announces."""
        return [(each.data_ptr(), each._version) for each in self._batch.storage()]

    def _masks_known(self) -> tuple[int, bool]:
        """What changes whenever masks do, or what is made of them."""
        return self._mask_version(), self._drops()

    def _current(self) -> list[Slot | None]:
        """The live weights and masks, one for each table: looked up again when either was
        replaced."""
        storage = self._storage()
        known = *self._masks_known(), *(address for address, _ in storage)
        if known != self._known:
            with torch.no_grad():
                self._look_up()
            self._known = known
        if storage != self._in_sync:
            self.mark_all()
        return self._slots

    def _look_up(self) -> None:
        views = self._batch.weights()
        before, self._slots = (
            self._slots,
            [
                None if place is None else Slot(view.data, self._mask(place))
                for place, view in zip(self.places, views, strict=True)
            ],
        )
        if self._written is not None:
            self._written.add_removed(before, self._slots)
        counted = [None if place is None else self._counts(place) for place in self.places]
        # Loaded or moved: they may be as large as they get.
        if [*map(id, counted)] != [*map(id, self._counted)]:
            self._room = 0
        self._counted, self._counts_any = counted, any(count is not None for count in counted)
        self._sampled.begin(
            self._slots, [None if place is None else self._samples(place) for place in self.places]
        )
        self._set_ids()
        slots = [self._slots[table] for table in self._features]
        self._lookup = lookup_on(views[0].device, slots, self._dirty)

    def _set_ids(self) -> None:
        """Note the rows whose ids are dropped, and those that get dirty when a backward writes
        them."""
        drops = self._adds and self._drops()
        handed: list[Tensor | None] = []
        self._only_kept = True
        for table, slot in enumerate(self._slots):
            # What is left of a row is all of it.
            whole = slot is not None and slot.mask.grid.cols == 1
            kept = (
                kept_rows(slot.mask)
                if slot is not None and self._on_cpu and (drops or whole)
                else None
            )
            self._dirty.leave_out(
                table, kept.view(torch.uint8) if kept is not None and whole else None
            )
            removes = slot is not None and slot.mask.removes
            handed.append(kept if drops and removes else None)
            self._only_kept &= not removes or (whole and drops)
        any_dropped = any(kept is not None for kept in handed)
        self._ids = KeptIds([handed[table] for table in self._features]) if any_dropped else None

    @timed
    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._current()
        asked = args[0]
        if torch.is_grad_enabled() and self._sampled.due():
            with torch.no_grad():
                self._sampled.add(asked.values(), _ends(asked))
        handed = asked if self._ids is None else self._ids.among(asked)
        if self._lookup.needed and not (handed is not asked and self._only_kept):
            with torch.no_grad():
                self._lookup(handed.values(), _ends(handed))
        self._handed = asked, handed
        return handed, *args[1:]

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        asked, handed = self._handed
        self._handed = None, None
        if isinstance(output, Tensor) and output.requires_grad:
            # Another hook may have changed them since.
            dropped = handed is not asked and handed is args[0]
            flag = partial(
                self._before_update,
                _ids_of(asked if dropped else args[0]) if self._counts_any or not dropped else None,
                handed if dropped else None,
                self._known[:2],
            )
            output.register_hook(flag)  # type: ignore[no-untyped-call]

    @timed
    def _before_update(
        self,
        asked: tuple[Tensor, Sequence[int] | Tensor] | None,
        handed: Any,
        known: tuple[int, ...],
        grad: Tensor,
    ) -> None:
        """In a backward, just before the fused optimizer writes the rows. Not at the lookup:
        between the two, all rows may be cleaned, and another lookup may read.

        Args:
            asked: all ids, where they are needed.
            handed: the features with those that the kernel was called with; None if it was with
                all.
            known: what was known of the masks at the lookup.
            grad: of the output.
        """
        may_revive = handed is None or not self._only_kept or known != self._masks_known()
        if not may_revive and asked is None and self._written is None:
            return
        with torch.no_grad():
            self._current()  # masks may have been updated since the lookup
            if self._strays:
                self.mark_all()
            elif may_revive or self._written is not None:
                rows = asked if handed is None else _ids_of(handed)
                assert rows is not None
                if may_revive:
                    self._dirty.add(*rows)
                if self._written is not None:
                    self._written.add(*rows)
            if asked is not None and self._counts_any:
                self._count(*asked)

    def _count(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Count lookups. Counts are clamped once in 2**30 of them, not checked each time."""
        self._room -= ids.numel()
        if self._room < 0:
            for count in self._counted:
                if count is not None:
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


def places_of(located: Mapping[str, ShardedData]) -> Places:
    """Return where the masks of this rank's shards are."""
    return {
        (shard.tensor.data_ptr(), tuple(shard.tensor.shape)): Place(name, number)
        for name, data in located.items()
        for number, shard in enumerate(data.shards)
    }


def places_in(batch: TableBatch, places: Places) -> list[Place | None]:
    """Return the place of the mask of each table of a batch."""
    return [places.get((view.data_ptr(), tuple(view.shape))) for view in batch.weights()]


def fused_sums(models: Iterable[nn.Module]) -> dict[int, tuple[Tensor, float]]:
    """Return what the fused Adagrad optimizers of some models have summed, and the value that it
    began with, by the address of the shard; nothing for other optimizers."""
    found: dict[int, tuple[Tensor, float]] = {}
    for collection in collections_of(models):
        for batch in collection_of(collection).batches():
            if batch.is_adagrad:
                for weight, of_table in zip(batch.weights(), batch.states(), strict=True):
                    found[weight.data_ptr()] = of_table[0], 0.0
    return found


def collections_of(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the sharded collections in some models, each once."""
    torchrec = torchrec_port()
    if torchrec is not None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        yield from (module for module in modules if torchrec.is_sharded(module))


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
