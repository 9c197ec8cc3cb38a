"""Lookups that return decoded rows, with gradients straight through to the table of floats.

A forward hook on what looks the table up, one of TorchRec's kernels or a module of torch's, puts
the pooled decoded rows in the place of the pooled weights. The backward passes their gradient
on to the output that the lookup computed, so that a fused optimizer steps as before. At the kernel,
ids are local to the shard, whatever the sharding. Nothing waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from dist_sparse.codes.books import ENTRIES, entries_at
from dist_sparse.compaction.tables import (
    CompactEmbedding,
    CompactEmbeddingBag,
    CompactTable,
    padding_id_of,
)
from dist_sparse.enforcer.fused import collections_of, lookups_of
from dist_sparse.enforcer.hooks import Hook
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.protocols import LookupKernel
from dist_sparse.tables.shards import Rect, ShardedData

_MODULES = (nn.Embedding, nn.EmbeddingBag, CompactEmbedding, CompactEmbeddingBag)


class Cut(NamedTuple):
    """A shard of a table whose groups have ``width`` columns."""

    name: str
    rect: Rect
    width: int

    @property
    def groups(self) -> slice:
        """The groups of its columns among those of the table."""
        return slice(self.rect.col // self.width, self.rect.col_end // self.width)


class Attached:
    """The hooks on lookups of a model as it is stored now, until :meth:`remove`, and the codes of
    this rank's shards, zeros at first.

    Args:
        groups: codes of a row, by table.
        moved: called before a forward after a reshard, which leaves the hooks behind.

    Raises:
        ValueError: shards cut a group of columns, or something else reads a table; no hook is left.
    """

    def __init__(
        self,
        model: nn.Module,
        located: Sequence[ShardedData],
        groups: Mapping[str, int],
        commitment: float,
        moved: Callable[[], object],
    ) -> None:
        self._commitment, self._moved = commitment, moved
        self._held: list[CodedLookups] = []
        self._handles: list[RemovableHandle] = []
        self._known: dict[nn.Module, list[nn.Module]] = {}
        cuts = _cuts(located, groups)
        try:
            for collection in collections_of(model.modules()):
                self._known[collection] = lookups_of(collection)
                self._handles.append(collection.register_forward_pre_hook(Hook(self.follow)))
                for kernel in collection_of(collection).kernels():
                    self._hook_kernel(kernel, cuts)
            for path, module in model.named_modules():
                self._hook_module(path, module, cuts)
            read = {cut for cut, _ in self._coded()}
            for cut in cuts.values():
                if cut not in read:
                    raise ValueError(
                        f"Table {cut.name!r} can't have codes: neither a module of torch's nor a"
                        f" sharded collection of TorchRec's looks up its shard {cut.rect}."
                    )
        except BaseException:
            self.remove()
            raise

    def use(self, books: Mapping[str, Tensor] | None) -> None:
        """Decode by these books from now on; None for not at all."""
        for lookups in self._held:
            lookups.use(books)

    def codes(self) -> dict[str, dict[Rect, Tensor]]:
        """Return the live codes, uint8 ``(rows, groups)``, by table and rectangle of the
        weights."""
        found: dict[str, dict[Rect, Tensor]] = {}
        for cut, codes in self._coded():
            found.setdefault(cut.name, {})[cut.rect] = codes
        return found

    def shards(self, located: Sequence[ShardedData]) -> Iterator[tuple[Cut, Tensor, Tensor]]:
        """Yield each of this rank's shards, its live codes and its weights."""
        weights = {data.name: dict(data.shards) for data in located}
        for cut, codes in self._coded():
            yield cut, codes, weights[cut.name][cut.rect]

    def follow(self, *_: Any) -> None:
        """Report a reshard, which makes new lookups on every rank."""
        if any(lookups_of(each) != known for each, known in self._known.items()):
            self._moved()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _coded(self) -> Iterator[tuple[Cut, Tensor]]:
        for lookups in self._held:
            yield from lookups.shards()

    def _hook_kernel(self, kernel: LookupKernel, cuts: _Cuts) -> None:
        by_shape: dict[tuple[int, int], dict[int, Cut]] = {}
        for shard, view in enumerate(kernel.weights()):
            cut = cuts.get((view.data_ptr(), tuple(view.shape)))
            if cut is not None:
                by_shape.setdefault((cut.rect.cols, cut.width), {})[shard] = cut
        for alike in by_shape.values():
            lookups = KernelLookups(kernel, alike, self._commitment)
            self._held.append(lookups)
            self._handles.append(kernel.module.register_forward_hook(Hook(lookups)))

    def _hook_module(self, path: str, module: nn.Module, cuts: _Cuts) -> None:
        for weight in module.parameters(recurse=False):
            cut = cuts.get((weight.data_ptr(), tuple(weight.shape)))
            # Not the parameters that a sharded collection shows: its kernels read them.
            if cut is None or type(module) is nn.Module:
                continue
            if not _has_plain_rows(module):
                raise ValueError(
                    f"Table {cut.name!r} can't have codes: what looks it up, the"
                    f" {type(module).__name__} at {path!r}, must be an nn.Embedding, or an"
                    " nn.EmbeddingBag without padding_idx and mode='max', and without max_norm."
                )
            lookups = ModuleLookups({0: cut}, weight.device, self._commitment)
            self._held.append(lookups)
            # Before the hook that turns outputs of rotated tables back.
            handle = module.register_forward_hook(Hook(lookups), with_kwargs=True, prepend=True)
            self._handles.append(handle)


_Cuts = Mapping[tuple[int, tuple[int, ...]], Cut]
"""By the address and the shape of the weights."""


def _cuts(located: Sequence[ShardedData], groups: Mapping[str, int]) -> _Cuts:
    """Return the groups that each of this rank's shards has."""
    found = {}
    for data in located:
        width = data.shape[1] // groups[data.name]
        _refuse_cut_groups(data, width)
        for rect, weight in data.shards:
            found[weight.data_ptr(), tuple(weight.shape)] = Cut(data.name, rect, width)
    return found


def _refuse_cut_groups(data: ShardedData, width: int) -> None:
    columns = data.shape[1]
    for rect in data.rects:
        if rect.col % width or rect.cols % width:
            fits = [each for each in range(width, columns + 1, width) if columns % each == 0]
            raise ValueError(
                f"Table {data.name!r}: the shard {rect} cuts a group of {width} columns. Shards of"
                f" {fits} columns fit {columns // width} codes."
            )


class _StraightThrough(torch.autograd.Function):
    """The decoded rows forward; backward the gradient, and that of ``commitment`` times half the
    squared distance between floats and decoded rows."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, decoded: Tensor, commitment: float) -> Tensor:
        if commitment:
            ctx.save_for_backward((output - decoded).mul_(commitment))
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pulls = ctx.saved_tensors
        return (grads[0] + pulls[0] if pulls else grads[0]), None, None


def _through(output: Tensor, decoded: Tensor, commitment: float) -> Tensor:
    """Return ``decoded``, whose gradient goes to ``output``."""
    found: Tensor = _StraightThrough.apply(output, decoded.to(output.dtype), commitment)  # type: ignore[no-untyped-call]
    return found


class CodedLookups:
    """Codes of shards with as many groups of as many columns, behind one another, and their books.

    Args:
        cuts: by the number of the shard in its kernel; 0 in a module of torch's.

    Attributes:
        codes: uint8 ``(rows + 1, groups)``; the last row, of codes 0, decodes to zeros.
        found: the rows of each shard, the first of them in ``codes``, and its place among ``cuts``.
        total: the last row.
        books: of all shards, float16 ``(entries, width)``; None for lookups of floats.
    """

    def __init__(self, cuts: Mapping[int, Cut], device: torch.device, commitment: float) -> None:
        self.commitment = commitment
        self._cuts = list(cuts.values())
        self.total = 0
        self.found: dict[int, tuple[int, int, int]] = {}
        for place, (shard, cut) in enumerate(cuts.items()):
            self.found[shard] = cut.rect.rows, self.total, place
            self.total += cut.rect.rows
        groups = self._cuts[0].rect.cols // self._cuts[0].width
        self.codes = torch.zeros(self.total + 1, groups, dtype=torch.uint8, device=device)
        self._group_starts = torch.arange(groups, dtype=torch.int32, device=device) * ENTRIES
        self.books: Tensor | None = None

    def shards(self) -> Iterator[tuple[Cut, Tensor]]:
        """Yield the live codes of each shard, uint8 ``(rows, groups)``."""
        parts = torch.split(self.codes[:-1], [cut.rect.rows for cut in self._cuts])
        yield from zip(self._cuts, parts, strict=True)

    def use(self, books: Mapping[str, Tensor] | None) -> None:
        """Decode by these books from now on, by table; None for not at all."""
        if books is None:
            self.books = None
            return
        parts = [books[cut.name][cut.groups] for cut in self._cuts]
        self.books = torch.cat(parts).flatten(0, 1).to(self.codes.device)

    def decoded(self, rows: Tensor, of: Tensor | None = None) -> Tensor:
        """Return decoded rows, float32 ``(n, columns)``.

        Args:
            rows: their numbers in :attr:`codes`.
            of: the place of each row's shard; None of one shard.
        """
        assert self.books is not None
        places = self.codes.index_select(0, rows) + self._group_starts
        if of is not None:
            places += (of.int() * (len(self._group_starts) * ENTRIES)).unsqueeze(1)
        return entries_at(places, self.books)


class KernelLookups(CodedLookups):
    """A forward hook on one of TorchRec's kernels, for its shards of one shape of codes."""

    def __init__(self, kernel: LookupKernel, cuts: Mapping[int, Cut], commitment: float) -> None:
        weights = kernel.weights()
        device = weights[0].device
        super().__init__(cuts, device, commitment)
        self._pooling = kernel.pooling
        self._widths = [weights[shard].shape[1] for shard in kernel.features]
        # For each feature the rows of its shard, the first of them, and the shard's place.
        # Ids of other shards read the row of zeros, in any book.
        columns = []
        for shard in kernel.features:
            columns.append(self.found.get(shard, (0, self.total, 0)))
        self._sizes, self._starts, self._places = torch.tensor(columns, device=device).unbind(1)
        self._is_mine = self._sizes > 0
        self._features = [at for at, shard in enumerate(kernel.features) if shard in cuts]

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        ids = args[0]
        if self.books is None:
            return None
        if ids.variable_stride_per_key():
            raise ValueError("Codes do not support batches of another size for each feature.")
        if not ids.stride():
            return None
        with torch.no_grad():
            feature = _features_of(ids)
            vectors = self._vectors(ids.values().long(), feature)
            if self._pooling == "none":
                here = self._is_mine.index_select(0, feature).unsqueeze(1)
                decoded = torch.where(here, vectors, output)
            else:
                bags = _pooled(vectors, ids.offsets(), self._pooling, ids.weights_or_none())
                decoded = self._side_by_side(bags, output)
        return _through(output, decoded, self.commitment)

    def _vectors(self, ids: Tensor, feature: Tensor) -> Tensor:
        # FBGEMM reads row 0 for an id out of range, unless it has raised an error.
        outside = (ids < 0) | (ids >= self._sizes.index_select(0, feature))
        rows = ids.masked_fill(outside, 0) + self._starts.index_select(0, feature)
        return self.decoded(rows, self._places.index_select(0, feature))

    def _side_by_side(self, bags: Tensor, output: Tensor) -> Tensor:
        """Return the bags of all features next to each other; of other shards the weights."""
        by_feature = bags.view(len(self._widths), -1, bags.shape[1])
        columns = list(torch.split(output, self._widths, 1))
        for feature in self._features:
            columns[feature] = by_feature[feature]
        return torch.cat(columns, 1)


def _features_of(ids: Any) -> Tensor:
    """Return the feature of each id of a KeyedJaggedTensor."""
    counts = ids.offsets()[:: ids.stride()].diff()
    # The number of ids is known: without it a device would be waited for.
    return torch.repeat_interleave(counts, output_size=ids.values().numel())


class ModuleLookups(CodedLookups):
    """A forward hook on an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if self.books is None:
            return None
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        ids = given["input"]
        with torch.no_grad():
            numbers = ids.reshape(-1).long()
            if isinstance(module, CompactTable):
                numbers = module.index(numbers).long()
                # Removed ids read the row of zeros.
                numbers = torch.where(numbers < 0, self.total, numbers)
            decoded = self.decoded(numbers)
            if isinstance(module, nn.EmbeddingBag):
                ends = _ends(ids, given.get("offsets"), module.include_last_offset)
                weights = given.get("per_sample_weights")
                decoded = _pooled(decoded, ends, module.mode, weights)
        return _through(output, decoded.view(output.shape), self.commitment)


def _ends(ids: Tensor, offsets: Tensor | None, has_last: bool) -> Tensor:
    """Return where the bags of an ``nn.EmbeddingBag`` begin, and where the last one ends."""
    if offsets is None:
        return torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]
    return offsets if has_last else F.pad(offsets, (0, 1), value=ids.numel())


def _pooled(vectors: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None) -> Tensor:
    """Return the sums or means of the vectors of each bag, ``(bags, columns)``.

    Args:
        offsets: ``(bags + 1,)``.
        weights: a factor for each vector. A weighted mean is over the number of vectors, as in
            FBGEMM.
    """
    # TorchRec's kernels ignore whole numbers.
    if weights is not None and weights.is_floating_point():
        vectors = vectors * weights.reshape(-1, 1)
    # Most bags of real models have one id. A device would have to be waited for.
    if offsets.is_cpu and len(vectors) == len(offsets) - 1 and bool((offsets.diff() == 1).all()):
        return vectors
    places = torch.arange(len(vectors), device=vectors.device)
    return F.embedding_bag(places, vectors, offsets.long(), mode=pooling, include_last_offset=True)


def _has_plain_rows(module: nn.Module) -> bool:
    """Whether a module of torch's returns rows, or their sums or means."""
    # By exact class: a subclass may do more in its forward.
    if type(module) not in _MODULES or getattr(module, "max_norm", None) is not None:
        return False
    if isinstance(module, nn.EmbeddingBag):
        # Padding leaves ids out of bags.
        return module.mode != "max" and padding_id_of(module) is None
    return True
