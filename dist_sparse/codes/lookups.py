"""Lookups that return decoded rows, with gradients straight through to the table of floats.

A forward hook on what looks the table up, one of TorchRec's kernels or a module of torch's, puts
the pooled decoded rows in the place of the pooled weights. The backward passes their gradient
on to the output that the lookup computed, so that a fused optimizer steps as before. At the kernel,
ids are local to the shard, whatever the sharding. Nothing waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from dist_sparse.codes.books import ENTRIES, entries_at
from dist_sparse.compaction import tables as compact
from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.fused import collections_of, lookups_of
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.protocols import LookupKernel
from dist_sparse.tables.shards import Rect, ShardedData

_MODULES = (nn.Embedding, nn.EmbeddingBag, compact.CompactEmbedding, compact.CompactEmbeddingBag)


class CodedShard:
    """The codes of a shard, zeros at first, and the entries that they stand for.

    Args:
        name: of the table.
        rect: of the shard.
        width: columns of a group.
        device: of the weights.
    """

    def __init__(self, name: str, rect: Rect, width: int, device: torch.device) -> None:
        self.name, self.rect = name, rect
        self.groups = slice(rect.col // width, rect.col_end // width)
        groups = rect.cols // width
        # The last row, of codes 0, decodes to zeros.
        self._codes = torch.zeros(rect.rows + 1, groups, dtype=torch.uint8, device=device)
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
            self._entries = books[self.name][self.groups].flatten(0, 1).to(self._codes.device)

    def decoded(self, rows: Tensor) -> Tensor:
        """Return decoded rows, float16 ``(n, columns)``, by their numbers."""
        assert self._entries is not None
        return entries_at(self._codes.index_select(0, rows) + self._starts, self._entries)


class Attached:
    """The hooks on lookups of a model as it is stored now, until :meth:`remove`.

    Args:
        groups: codes of a row, by table.
        moved: called before a forward after a reshard, which leaves the hooks behind.

    Attributes:
        shards: of this rank.

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
        self._by_weight: dict[tuple[int, torch.Size], CodedShard] = {}
        for data in located:
            width = data.shape[1] // groups[data.name]
            _refuse_cut_groups(data, width)
            for rect, weight in data.shards:
                shard = CodedShard(data.name, rect, width, weight.device)
                self._by_weight[weight.data_ptr(), weight.shape] = shard
        self.shards = [*self._by_weight.values()]
        self._unread = {*self.shards}
        self._handles: list[RemovableHandle] = []
        self._known: dict[nn.Module, list[nn.Module]] = {}
        try:
            for collection in collections_of(model.modules()):
                self._known[collection] = lookups_of(collection)
                self._handles.append(collection.register_forward_pre_hook(Hook(self.follow)))
                for kernel in collection_of(collection).kernels():
                    self._hook_kernel(kernel)
            for path, module in model.named_modules():
                self._hook_module(path, module)
            for shard in self._unread:
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: neither a module of torch's nor a"
                    f" sharded collection of TorchRec's looks up its shard {shard.rect}."
                )
        except BaseException:
            self.remove()
            raise

    def use(self, books: Mapping[str, Tensor] | None) -> None:
        """Decode by these books from now on; None for not at all."""
        for shard in self.shards:
            shard.use(books)

    def codes(self, name: str) -> dict[Rect, Tensor]:
        """Return the live codes of a table, by rectangle of the weights."""
        return {shard.rect: shard.codes for shard in self.shards if shard.name == name}

    def follow(self, *_: Any) -> None:
        """Report a reshard, which makes new lookups on every rank."""
        if any(lookups_of(each) != known for each, known in self._known.items()):
            self._moved()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook_kernel(self, kernel: LookupKernel) -> None:
        weights = kernel.weights()
        shards = [self._by_weight.get((each.data_ptr(), each.shape)) for each in weights]
        if any(shards):
            by_feature = [shards[number] for number in kernel.features]
            widths = [weights[number].shape[1] for number in kernel.features]
            decode = partial(_decode_features, by_feature, widths, kernel.pooling)
            self._hook(kernel.module, [shard for shard in shards if shard], decode)

    def _hook_module(self, path: str, module: nn.Module) -> None:
        # Not the parameters that a sharded collection shows: its kernels read them.
        weights = [] if type(module) is nn.Module else module.parameters(recurse=False)
        for weight in weights:
            shard = self._by_weight.get((weight.data_ptr(), weight.shape))
            if shard is None:
                continue
            if not _has_plain_rows(module):
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: what looks it up, the"
                    f" {type(module).__name__} at {path!r}, must be an nn.Embedding, or an"
                    " nn.EmbeddingBag without padding_idx and mode='max', and without max_norm."
                )
            self._hook(module, [shard], partial(_decode_module, shard))

    def _hook(self, module: nn.Module, shards: Sequence[CodedShard], decode: _Decode) -> None:
        self._unread.difference_update(shards)
        hook = Hook(partial(_through, shards[0], decode, self._commitment))
        # Before the hook that turns outputs of rotated tables back.
        handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
        self._handles.append(handle)


_Decode = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], Tensor]
"""Returns a module's output of decoded rows: from the module, its arguments, and its output of
floats."""


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


def _through(
    shard: CodedShard,
    decode: _Decode,
    commitment: float,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Any:
    """Return decoded rows in the place of a module's output, to which their gradient goes: a
    forward hook.

    Args:
        shard: one of the module's; all have entries, or none has.
    """
    if not shard.is_used:
        return None
    with torch.no_grad():
        decoded = decode(module, args, kwargs, output)
    decoded = decoded.view(output.shape).to(output.dtype)
    return _StraightThrough.apply(output, decoded, commitment)  # type: ignore[no-untyped-call]


def _decode_features(
    by_feature: Sequence[CodedShard | None],
    widths: Sequence[int],
    pooling: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor:
    """Decode the output of one of TorchRec's kernels.

    Args:
        by_feature: the shard of each feature; None leaves its output as it is.
        widths: columns of each feature.
    """
    ids = args[0]
    if ids.variable_stride_per_key():
        raise ValueError("Codes do not support batches of another size for each feature.")
    # TorchRec has counted each feature's ids as it distributed them.
    starts, stride = ids.offset_per_key(), ids.stride()
    # Bags of features are side by side, sequences below each other.
    dim, sizes = (0, ids.length_per_key()) if pooling == "none" else (1, [*widths])
    decoded = torch.empty_like(output)
    parts = zip(torch.split(decoded, sizes, dim), torch.split(output, sizes, dim), strict=True)
    for feature, (part, rows) in enumerate(parts):
        shard, mine = by_feature[feature], slice(starts[feature], starts[feature + 1])
        if shard is not None:
            numbers = ids.values()[mine].long()
            # FBGEMM reads row 0 for an id out of range, unless it has raised an error.
            outside = (numbers < 0) | (numbers >= shard.rect.rows)
            rows = shard.decoded(numbers.masked_fill(outside, 0))
            if pooling != "none":
                ends = ids.offsets()[feature * stride : (feature + 1) * stride + 1] - mine.start
                rows = _pooled(rows, ends, pooling, ids.weights_or_none(), mine)
        part.copy_(rows)
    return decoded


def _pooled(
    rows: Tensor, ends: Tensor, pooling: str, weights: Tensor | None, mine: slice
) -> Tensor:
    """Return the sums or means of the rows of each bag, ``(bags, columns)``.

    Args:
        ends: where bags begin, and the last one ends.
        weights: a factor for each row, at ``mine``. A weighted mean is over the number of rows.
    """
    # TorchRec's kernels ignore whole numbers.
    if weights is not None and weights.is_floating_point():
        rows = rows * weights[mine].unsqueeze(1)
    # Most bags of real models have one id. A device would have to be waited for.
    if ends.is_cpu and len(rows) == len(ends) - 1 and bool((ends.diff() == 1).all()):
        return rows
    places = torch.arange(len(rows), device=rows.device)
    return F.embedding_bag(
        places, rows.float(), ends.long(), mode=pooling, include_last_offset=True
    )


def _decode_module(
    shard: CodedShard,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor:
    """Decode the output of an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not."""
    given = {**dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)), **kwargs}
    ids = given.pop("input")
    numbers = ids.reshape(-1).long()
    if isinstance(module, compact.CompactTable):
        numbers = module.index(numbers).long()
        # Removed ids read the row of zeros.
        numbers = torch.where(numbers < 0, shard.rect.rows, numbers)
    rows = shard.decoded(numbers).float()
    if isinstance(module, nn.EmbeddingBag):
        given.update(mode=module.mode, include_last_offset=module.include_last_offset)
        places = torch.arange(len(rows), device=rows.device).view(ids.shape)
        rows = F.embedding_bag(places, rows, **given)
    return rows


def _has_plain_rows(module: nn.Module) -> bool:
    """Whether a module of torch's returns rows, or their sums or means."""
    # By exact class: a subclass may do more in its forward.
    if type(module) not in _MODULES or getattr(module, "max_norm", None) is not None:
        return False
    if isinstance(module, nn.EmbeddingBag):
        # Padding leaves ids out of bags.
        return module.mode != "max" and compact.padding_id_of(module) is None
    return True
