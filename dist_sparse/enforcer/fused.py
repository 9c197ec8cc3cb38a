"""How do removed weights stay zero in tables that a fused optimizer writes inside the backward?

Just before a lookup reads them, the rows that its batch names are made true to the mask. The ids are taken where they
arrive at the kernel, behind the input distribution, so they are local to the shard whatever the sharding. A backward
notes the rows that it writes: they are *unsettled* until the weights are next scored, saved or given out.

With :mod:`dist_sparse.tables.torchrec`, this knows TorchRec and FBGEMM from the inside; it imports neither.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.hooks import Hook, Wrapped
from dist_sparse.enforcer.optimizers import reset_state
from dist_sparse.enforcer.rows import Lookup, Slot, TorchLookup, UnsettledRows, lookup_on, settle_rows
from dist_sparse.masking.masks import BlockMask, unpack
from dist_sparse.tables.shards import ShardedData

__all__ = ["Kernel", "Place", "averages", "collections_of", "fused_kernels", "lookups_of", "places_in", "places_of"]


class Place(NamedTuple):
    """Where the mask of a shard is: the name under which its table is registered, and its number there."""

    name: str
    number: int


class Kernel:
    """The hooks on one kernel: FBGEMM's batch of tables with what TorchRec puts around it.

    Args:
        module: TorchRec's; it is called with a KeyedJaggedTensor of ids that are local to the shards.
        collection: the sharded collection that it belongs to.
        places: where the mask of each of its tables is; None for a table that is not registered.
        mask: looks one up.
        version: a number that changes whenever masks do.
    """

    def __init__(
        self,
        module: Any,
        collection: Any,
        places: Sequence[Place | None],
        mask: Callable[[Place], BlockMask],
        version: Callable[[], int],
    ) -> None:
        self.module, self.collection = module, collection
        self.places = list(places)
        self.seconds = 0.0
        self._batch: Any = module.emb_module
        self._mask, self._version = mask, version
        self._features: list[int] = list(self._batch.feature_table_map)
        self._known: tuple[int, ...] = ()
        self._written = self._writes()
        self._addresses = self._where()
        self._slots: list[Slot | None] = []
        self._lookup: Lookup = TorchLookup([])
        views = self._batch.split_embedding_weights()
        self._unsettled = UnsettledRows([len(view) for view in views], self._features, views[0].device)
        # With an empty table beside others of another width, FBGEMM's CPU backward writes other rows than it was given.
        self._strays = views[0].is_cpu and min(map(len, views)) == 0 and len({view.shape[1] for view in views}) > 1
        self._handles: list[RemovableHandle | Wrapped] = []

    def hook(self) -> None:
        """Begins to follow lookups, backwards, and what FBGEMM writes beside them, if it does not yet."""
        if self._handles:
            return
        self._handles = [
            self.module.register_forward_pre_hook(Hook(self._before_lookup)),
            self.module.register_forward_hook(Hook(self._after_lookup)),
        ]
        for method, optimizer in _WHOLE_WRITERS.items():
            if self._batch.optimizer.name == optimizer:
                self._handles.append(Wrapped(self._batch, method, self._write_whole))

    def unhook(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def moved_to(self, places: Sequence[Place | None]) -> None:
        """Takes other places for its masks; what is unsettled stays so."""
        self.places = list(places)
        self._known = ()

    def settle(self) -> None:
        """Makes all unsettled rows true to their masks."""
        slots = self._current()
        if not self._unsettled:
            return
        for table, slot in enumerate(slots):
            for rows in self._unsettled.take(table):
                if slot is not None and slot.mask.removes:
                    settle_rows(slot.weight, slot.mask, rows)
        self._unsettled.none_left()

    def settle_all(self) -> None:
        """Makes every row true, whoever has written it."""
        for slot in self._current():
            if slot is not None and slot.mask.removes:
                slot.mask.apply_(slot.weight)
        for table in range(len(self.places)):
            self._unsettled.forget(table)
        self._unsettled.none_left()

    def unsettle(self) -> None:
        """Takes every row for unsettled, after someone has written weights."""
        self.note_writes()
        for table in range(len(self.places)):
            self._unsettled.add_all(table)

    def note_writes(self) -> None:
        """Takes the weights for true to what is noted, whoever has written them."""
        self._written, self._addresses = self._writes(), self._where()

    def _where(self) -> tuple[int, ...]:
        return tuple(storage.data_ptr() for storage in self._storages())

    def _storages(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._batch.weights_dev, self._batch.weights_host, self._batch.weights_uvm

    def _writes(self) -> tuple[int, ...]:
        """Counts the writes that torch has seen: all but FBGEMM's own, which its backward announces, and those through
        ``.data``."""
        return tuple(storage._version for storage in self._storages())

    def masks(self) -> list[BlockMask | None]:
        """Those of this moment, one for each table. They are replaced, not edited, when masks move."""
        return [None if slot is None else slot.mask for slot in self._current()]

    def reset(self, masks: Sequence[BlockMask | None]) -> None:
        """Sets the optimizer state of what ``masks`` remove to its initial value, zero."""
        states = self._batch.split_optimizer_states()
        for mask, of_table in zip(masks, states or [()] * len(self.places), strict=True):
            if mask is not None:
                reset_state(mask, [(state, 0.0) for state in of_table])

    def _current(self) -> list[Slot | None]:
        """The live weights and masks of this moment, one for each table. Both are replaced now and then."""
        batch, addresses = self._batch, self._where()
        known = self._version(), *addresses
        if known != self._known:
            views = batch.split_embedding_weights()
            self._slots = [
                None if place is None else Slot(view.data, self._mask(place))
                for place, view in zip(self.places, views, strict=True)
            ]
            for table, slot in enumerate(self._slots):
                self._unsettled.keep_to(table, None if slot is None else _removed_rows(slot.mask))
            slots = [self._slots[table] for table in self._features]
            self._lookup = lookup_on(views[0].device, slots, self._unsettled)
            self._known = known
        if self._writes() != self._written or addresses != self._addresses:
            self.unsettle()
        return self._slots

    def _before_lookup(self, module: Any, args: tuple[Any, ...]) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            self._current()
            if self._lookup.needed:
                self._lookup(args[0].values(), _ends(args[0]))
        self.seconds += time.perf_counter() - started

    def _after_lookup(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            # int32 ids are copied, as FBGEMM does: the caller may refill their memory before the backward.
            note = partial(self._before_update, args[0].values().long(), _ends(args[0]))
            output.register_hook(note)  # type: ignore[no-untyped-call]

    def _before_update(self, ids: Tensor, ends: Sequence[int] | Tensor, grad: Tensor) -> None:
        """In a backward, just before the fused optimizer writes the rows. Not at the lookup: between the two, all may
        be settled, and another lookup may read."""
        started = time.perf_counter()
        with torch.no_grad():
            self._current()  # masks may have moved since the lookup
            if self._strays:
                self.unsettle()
            else:
                self._unsettled.add(ids, ends)
        self.seconds += time.perf_counter() - started

    def _write_whole(self, write: Callable[[Any], None], mode: Any) -> None:
        """Calls a method of FBGEMM's that may write all rows, in the middle of a forward, and settles them all."""
        write(mode)
        if _writes_now(self._batch, mode):
            self.settle_all()


def _removed_rows(mask: BlockMask) -> Tensor | None:
    """The rows that a mask of whole rows removes: uint8 ``(rect.rows,)``, 1 = removed. None for other masks, where
    nearly every row loses something, and on a device, where nobody asks."""
    if mask.grid.cols != 1 or mask.block[0] != 1 or not mask.bits.is_cpu:
        return None
    return unpack(~mask.bits, mask.rect.rows).view(torch.uint8)


_WHOLE_WRITERS = {"ema_inplace": "EMAINPLACE_ROWWISE_ADAGRAD", "ensemble_and_swap": "ENSEMBLE_ROWWISE_ADAGRAD"}
"""Methods of FBGEMM's table batches that write rows which no batch has touched, and the optimizers that call them."""


def _writes_now(batch: Any, mode: Any) -> bool:
    """Whether such a method has just written, by FBGEMM's rule: every ``step_ema`` or ``step_swap`` iterations."""
    now = int(batch.iter_cpu.item())
    return any(now % int(mode[key]) == 0 for key in ("step_ema", "step_swap") if key in mode)


def _ends(features: Any) -> Sequence[int] | Tensor:
    """Where the ids of each feature of a KeyedJaggedTensor begin and end; on a device without waiting for it."""
    values = features.values()
    if values.is_cpu or features.variable_stride_per_key() or not features.stride():
        ends: list[int] = features.offset_per_key()
        return ends
    offsets: Tensor = features.offsets()[:: features.stride()]
    return offsets


Places = Mapping[tuple[int, tuple[int, ...]], Place]
"""Where masks are, by the address and the shape of the weights."""


def places_of(located: Mapping[str, ShardedData]) -> Places:
    """Where the masks of this rank's shards are."""
    return {
        (shard.tensor.data_ptr(), tuple(shard.tensor.shape)): Place(name, number)
        for name, data in located.items()
        for number, shard in enumerate(data.shards)
    }


def averages(module: nn.Module) -> bool:
    """Whether a module averages copies of its tables now and then, by its method ``sync``."""
    return bool(_torchrec() and _torchrec().averages(module))


def fused_kernels(collection: nn.Module) -> Iterator[Any]:
    """The kernels of a sharded collection on this rank that hold batches of tables with a fused optimizer."""
    yield from _torchrec().fused_kernels(collection)


def collections_of(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The sharded collections in some models, each once."""
    if _torchrec() is not None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        yield from (module for module in modules if _torchrec().shards_tables(module))


def lookups_of(collection: Any) -> list[Any]:
    """The lookups of a sharded collection. A reshard makes new ones on every rank, also where no shard was or is."""
    return list(collection._lookups)


def places_in(kernel: Any, places: Places) -> list[Place | None]:
    """For each table of a kernel, where its mask is."""
    views = kernel.emb_module.split_embedding_weights()
    return [places.get((view.data_ptr(), tuple(view.shape))) for view in views]


def _torchrec() -> Any:
    return importlib.import_module("dist_sparse.tables.torchrec") if "torchrec" in sys.modules else None
