"""Hooks on everything that looks tables with codes up, and the codes of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.codes.books import Books, assign
from dist_sparse.codes.lookups import CodedShard, Cut, KernelLookups, ModuleLookups, refusal_of
from dist_sparse.enforcer.fused import Places, collections_of, lookups_of, places_of
from dist_sparse.enforcer.hooks import Hook
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.shards import ShardedData

Lookups = KernelLookups | ModuleLookups
Cuts = Mapping[tuple[str, int], Cut]


class Attached:
    """The hooks of a model as it is stored now, until :meth:`remove`.

    Args:
        model: with the tables.
        located: the tables.
        groups: codes of a row, by table.
        ready: called in each lookup; returns whether rows are decoded.
        moved: called in a forward after a reshard, which leaves the hooks behind.

    Raises:
        ValueError: shards cut a group of columns, or something else reads a table; no hook is left.
    """

    def __init__(
        self,
        model: nn.Module,
        located: Sequence[ShardedData],
        groups: Mapping[str, int],
        ready: Callable[[], bool],
        moved: Callable[[], object],
    ) -> None:
        for data in located:
            refuse_cut_groups(data, groups[data.name])
        places = places_of({data.name: data for data in located})
        cuts = _cuts(located, groups)
        self._held: list[Lookups] = []
        self._handles: list[RemovableHandle] = []
        self._moved = moved
        try:
            for collection in collections_of(model.modules()):
                self._held += _kernel_lookups(collection, places, cuts, ready)
                # A reshard replaces its kernels.
                check = partial(self._follow, collection, lookups_of(collection))
                self._handles.append(collection.register_forward_pre_hook(Hook(check)))
            self._held += _module_lookups(model, places, cuts, ready)
            _refuse_unread(located, self._shards())
        except BaseException:
            self.remove()
            raise

    def use(self, books: Mapping[str, Books]) -> None:
        """Decode by these books from now on."""
        for lookups in self._held:
            lookups.use(books)

    def assign(self, located: Sequence[ShardedData], books: Mapping[str, Books]) -> None:
        """Assign the codes of all rows of this rank's shards. Local."""
        weights = {data.name: data.shards for data in located}
        for name, number, codes, first in self._shards():
            part = books[name].part(first, first + codes.shape[1])
            assign(weights[name][number].tensor, part, codes)

    def codes(self) -> dict[str, list[Tensor]]:
        """Return the live codes of each shard, by table."""
        found: dict[str, dict[int, Tensor]] = {}
        for name, number, codes, _ in self._shards():
            found.setdefault(name, {})[number] = codes
        in_order: dict[str, list[Tensor]] = {}
        for name, parts in found.items():
            in_order[name] = [parts[at] for at in sorted(parts)]
        return in_order

    def remove(self) -> None:
        """Remove the hooks."""
        for held in (*self._held, *self._handles):
            held.remove()
        self._held, self._handles = [], []

    def _shards(self) -> Iterator[CodedShard]:
        for lookups in self._held:
            yield from lookups.shards

    def _follow(self, collection: nn.Module, known: Sequence[nn.Module], *_: Any) -> None:
        if lookups_of(collection) != known:
            self._moved()


def refuse_cut_groups(data: ShardedData, groups: int) -> None:
    """Refuse shards that cut a group of columns. Local; the same on every rank."""
    columns = data.shape[1]
    width = columns // groups
    for rect in data.rects:
        if rect.col % width or rect.cols % width:
            fits = [each for each in range(width, columns, width) if columns % each == 0]
            raise ValueError(
                f"Table {data.name!r}: the shard {rect} cuts a group of {width} columns, and"
                f" {groups} codes of {columns} columns need whole groups. Shards of"
                f" {fits or [columns]} columns fit."
            )


def _cuts(located: Sequence[ShardedData], groups: Mapping[str, int]) -> Cuts:
    """Return the groups that each of this rank's shards has, by table and number."""
    found = {}
    for data in located:
        width = data.shape[1] // groups[data.name]
        for number, (rect, _) in enumerate(data.shards):
            cut = Cut(data.name, number, rect.rows, rect.col // width, rect.col_end // width, width)
            found[data.name, number] = cut
    return found


def _kernel_lookups(
    collection: nn.Module, places: Places, cuts: Cuts, ready: Callable[[], bool]
) -> Iterator[KernelLookups]:
    """Yield the lookups of a sharded collection's kernels that have coded tables."""
    for kernel in collection_of(collection).kernels():
        mine = {}
        for table, view in enumerate(kernel.weights()):
            place = places.get((view.data_ptr(), tuple(view.shape)))
            if place is not None:
                mine[table] = cuts[place]
        if mine:
            yield KernelLookups(kernel, mine, ready)


def _module_lookups(
    model: nn.Module, places: Places, cuts: Cuts, ready: Callable[[], bool]
) -> Iterator[ModuleLookups]:
    """Yield the lookups of torch's modules that have coded tables."""
    for path, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            # Not the parameters that a sharded collection shows: their kernels read them.
            place = places.get((weight.data_ptr(), tuple(weight.shape)))
            if place is None or type(module) is nn.Module:
                continue
            if (reason := refusal_of(module)) is not None:
                raise ValueError(f"Table {place.name!r} at {path!r} can't have codes: {reason}.")
            yield ModuleLookups(module, cuts[place], ready)


def _refuse_unread(located: Sequence[ShardedData], shards: Iterator[CodedShard]) -> None:
    """Refuse tables that none of the hooked modules looks up."""
    read = {(name, number) for name, number, _, _ in shards}
    for data in located:
        for number, (rect, _) in enumerate(data.shards):
            if (data.name, number) not in read:
                raise ValueError(
                    f"Table {data.name!r} can't have codes: neither a module of torch's nor a"
                    f" sharded collection of TorchRec's looks up its shard {rect}."
                )
