"""Lookups that return decoded rows, with gradients straight through to the table of floats.

A forward hook on what looks the table up, one of TorchRec's kernels or a module of torch's, puts
the pooled decoded rows in the place of the pooled weights. The backward passes their gradient
on to the output that the lookup computed, so that a fused optimizer steps as before. At the kernel,
ids are local to the shard, whatever the sharding. Nothing waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from dist_sparse.codes.books import ENTRIES, entries_at
from dist_sparse.compaction import tables as compact
from dist_sparse.enforcer.fused import collections_of, lookups_of
from dist_sparse.enforcer.hooks import Hook
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.protocols import LookupKernel
from dist_sparse.tables.shards import Rect, ShardedData

_MODULES = (nn.Embedding, nn.EmbeddingBag, compact.CompactEmbedding, compact.CompactEmbeddingBag)


class Cut(NamedTuple):
    """A shard of a table whose groups have ``width`` columns."""

    name: str
    rect: Rect
    width: int

    @property
    def groups(self) -> slice:
        """The groups of its columns among those of the table."""
        return slice(self.rect.col // self.width, self.rect.col_end // self.width)


class CodedShard:
    """The codes of a shard, and the entries that they stand for.

    Args:
        cut: the shard.
        device: of its weights.
        commitment: as of :func:`~dist_sparse.quantize`.
    """

    def __init__(self, cut: Cut, device: torch.device, commitment: float) -> None:
        self.cut, self.commitment = cut, commitment
        groups = cut.rect.cols // cut.width
        # The last row, of codes 0, decodes to zeros.
        self._codes = torch.zeros(cut.rect.rows + 1, groups, dtype=torch.uint8, device=device)
        self._starts = torch.arange(groups, dtype=torch.int32, device=device) * ENTRIES
        self._entries: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """The live codes, uint8 ``(rows, groups)``."""
        return self._codes[:-1]

    @property
    def is_used(self) -> bool:
        """Whether lookups return decoded rows."""
        return self._entries is not None

    def use(self, books: Mapping[str, Tensor] | None) -> None:
        """Decode by these books from now on, by table; None for not at all."""
        self._entries = None
        if books is not None:
            mine = books[self.cut.name][self.cut.groups]
            self._entries = mine.flatten(0, 1).to(self._codes.device)

    def decoded(self, rows: Tensor) -> Tensor:
        """Return decoded rows, float32 ``(n, columns)``, by their numbers."""
        assert self._entries is not None
        return entries_at(self._codes.index_select(0, rows) + self._starts, self._entries)


class Attached:
    """The hooks on lookups of a model as it is stored now, until :meth:`remove`.

    Args:
        groups: codes of a row, by table.
        moved: called before a forward after a reshard, which leaves the hooks behind.

    Attributes:
        shards: of this rank, with codes of zeros at first.

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
        self.shards: list[CodedShard] = []
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
            read = {shard.cut for shard in self.shards}
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
        for shard in self.shards:
            shard.use(books)

    def codes(self) -> dict[str, dict[Rect, Tensor]]:
        """Return the live codes, by table and rectangle of the weights."""
        found: dict[str, dict[Rect, Tensor]] = {}
        for shard in self.shards:
            found.setdefault(shard.cut.name, {})[shard.cut.rect] = shard.codes
        return found

    def follow(self, *_: Any) -> None:
        """Report a reshard, which makes new lookups on every rank."""
        if any(lookups_of(each) != known for each, known in self._known.items()):
            self._moved()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _shard(self, cuts: _Cuts, weight: Tensor) -> CodedShard | None:
        """Return new codes of a shard; None of a table without codes."""
        cut = cuts.get((weight.data_ptr(), tuple(weight.shape)))
        if cut is None:
            return None
        self.shards.append(CodedShard(cut, weight.device, self._commitment))
        return self.shards[-1]

    def _hook_kernel(self, kernel: LookupKernel, cuts: _Cuts) -> None:
        weights = kernel.weights()
        shards = [self._shard(cuts, weight) for weight in weights]
        by_feature = [shards[number] for number in kernel.features]
        if any(by_feature):
            widths = [weights[number].shape[1] for number in kernel.features]
            hook = partial(_through_kernel, kernel.pooling, by_feature, widths)
            self._handles.append(kernel.module.register_forward_hook(Hook(hook)))

    def _hook_module(self, path: str, module: nn.Module, cuts: _Cuts) -> None:
        # Not the parameters that a sharded collection shows: its kernels read them.
        weights = [] if type(module) is nn.Module else module.parameters(recurse=False)
        for weight in weights:
            shard = self._shard(cuts, weight)
            if shard is None:
                continue
            if not _has_plain_rows(module):
                raise ValueError(
                    f"Table {shard.cut.name!r} can't have codes: what looks it up, the"
                    f" {type(module).__name__} at {path!r}, must be an nn.Embedding, or an"
                    " nn.EmbeddingBag without padding_idx and mode='max', and without max_norm."
                )
            hook = Hook(partial(_through_module, shard))
            # Before the hook that turns outputs of rotated tables back.
            handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
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


def _through_kernel(
    pooling: str,
    by_feature: Sequence[CodedShard | None],
    widths: Sequence[int],
    module: nn.Module,
    args: tuple[Any, ...],
    output: Tensor,
) -> Tensor | None:
    """Return the output of one of TorchRec's kernels, with decoded rows of the shards with codes:
    a forward hook."""
    ids = args[0]
    coded = {at: shard for at, shard in enumerate(by_feature) if shard and shard.is_used}
    if not coded:
        return None
    if ids.variable_stride_per_key():
        raise ValueError("Codes do not support batches of another size for each feature.")
    stride, commitment = ids.stride(), next(iter(coded.values())).commitment
    if not stride:
        return None
    # TorchRec has counted each feature's ids as it distributed them.
    starts = ids.offset_per_key()
    is_sequence = pooling == "none"
    # Bags of features are side by side, sequences below each other.
    sizes = ids.length_per_key() if is_sequence else widths
    with torch.no_grad():
        parts = list(torch.split(output, sizes, 0 if is_sequence else 1))
        for feature, shard in coded.items():
            mine = slice(starts[feature], starts[feature + 1])
            numbers = ids.values()[mine].long()
            # FBGEMM reads row 0 for an id out of range, unless it has raised an error.
            outside = (numbers < 0) | (numbers >= shard.cut.rect.rows)
            parts[feature] = shard.decoded(numbers.masked_fill(outside, 0))
            if not is_sequence:
                ends = ids.offsets()[feature * stride : (feature + 1) * stride + 1] - mine.start
                weights = ids.weights_or_none()
                weights = None if weights is None else weights[mine]
                parts[feature] = _pooled(parts[feature], ends, pooling, weights)
        decoded = torch.cat(parts, 0 if is_sequence else 1)
    return _through(output, decoded, commitment)


def _through_module(
    shard: CodedShard,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor | None:
    """Return the output of an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not, of decoded
    rows: a forward hook."""
    if not shard.is_used:
        return None
    names = ("input", "offsets", "per_sample_weights")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids = given["input"]
    with torch.no_grad():
        numbers = ids.reshape(-1).long()
        if isinstance(module, compact.CompactTable):
            numbers = module.index(numbers).long()
            # Removed ids read the row of zeros.
            numbers = torch.where(numbers < 0, shard.cut.rect.rows, numbers)
        decoded = shard.decoded(numbers)
        if isinstance(module, nn.EmbeddingBag):
            ends = _ends(ids, given.get("offsets"), module.include_last_offset)
            decoded = _pooled(decoded, ends, module.mode, given.get("per_sample_weights"))
    return _through(output, decoded.view(output.shape), shard.commitment)


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
        return module.mode != "max" and compact.padding_id_of(module) is None
    return True
