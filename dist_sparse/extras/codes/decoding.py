"""Forward hooks that return decoded rows from the lookups of a model.

A hook on a TorchRec kernel or on a torch embedding module returns pooled decoded rows instead of
pooled weights. Its backward passes their gradient on to the output that the lookup computed, so a
fused optimizer steps as it would without the hook. A kernel gets ids that are local to its shards,
in every sharding type. No hook synchronizes with an accelerator.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.compaction import tables as compact
from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.fused import lookups_of
from dist_sparse.enforcer.rows import outside_as_0
from dist_sparse.masking.device import kernels_on
from dist_sparse.serving.books import ENTRIES, gather_entries
from dist_sparse.serving.sources import refuse_lookup
from dist_sparse.tables.memory import ByMemory
from dist_sparse.tables.modules import collection_of, collections_of
from dist_sparse.tables.protocols import LookupKernel, TableCollection
from dist_sparse.tables.shards import Rect, Shard, ShardedData

_MODULES = (nn.Embedding, nn.EmbeddingBag, compact.CompactEmbedding, compact.CompactEmbeddingBag)


class CodedShard:
    """The codes of a shard, and the book entries that they select.

    Args:
        name: the name of the table.
        rect: the rectangle of the shard in the table.
        weight: the weight of the shard, where it is stored now.
        width: the number of columns of a group.

    Attributes:
        groups: the groups of columns that the shard holds, among all groups of the table.
        codes: live, uint8 ``(rows, groups)``; zeros at first.
        entries: the books of its groups one after the other, float32 ``(groups * 256, width)``;
            None while lookups return floats.
    """

    def __init__(self, name: str, rect: Rect, weight: Tensor, width: int) -> None:
        self.name, self.rect, self.weight = name, rect, weight
        self.groups = slice(rect.col // width, rect.col_end // width)
        groups, device = rect.cols // width, weight.device
        # There is one row more than in the shard: code 0 selects zeros in every book, so the last
        # row decodes to zeros. Removed ids of a compact table read it.
        self._padded_codes = torch.zeros(rect.rows + 1, groups, dtype=torch.uint8, device=device)
        self.codes = self._padded_codes[:-1]
        self._book_starts = torch.arange(groups, dtype=torch.int32, device=device) * ENTRIES
        self.entries: Tensor | None = None

    @property
    def stored(self) -> tuple[Tensor, Tensor | None, int]:
        """Codes, entries and rows, for kernels. There is a row more of codes than rows."""
        return self._padded_codes, self.entries, self.rect.rows

    def decode(self, rows: Tensor) -> Tensor:
        """Return the decoded rows of some row numbers: float32 ``(n, columns)``."""
        assert self.entries is not None
        codes = self._padded_codes.index_select(0, rows)
        return gather_entries(codes + self._book_starts, self.entries)


_ByWeight = ByMemory[CodedShard]

# A function that gets a module's args, kwargs and output of floats, and returns its output of
# decoded rows.
_Decode = Callable[..., Tensor]


class DecodingHooks:
    """Codes for tables as they are sharded now, and hooks on their lookups until :meth:`remove`.

    Lookups return floats until :meth:`use` is called.

    Args:
        groups: the number of codes of a row, by table.
        on_reshard: called before the first forward after a reshard, which replaces the hooked
            modules.

    Attributes:
        shards: the shards of this rank.
        coded: the live codes, by table.

    Raises:
        ValueError: shards cut a group of columns, or a module that codes do not support reads a
            table; no hook is left.
    """

    def __init__(
        self,
        model: nn.Module,
        located: Sequence[ShardedData],
        groups: Mapping[str, int],
        commitment: float,
        on_reshard: Callable[[], object],
    ) -> None:
        self._commitment, self._on_reshard = commitment, on_reshard
        found: list[tuple[Tensor, CodedShard]] = []
        self.coded: dict[str, ShardedData] = {}
        for data in located:
            rows, columns = data.shape
            width = columns // groups[data.name]
            for rect in data.rects:
                if rect.col % width or rect.cols % width:
                    raise ValueError(
                        f"Table {data.name!r}: the shard {rect} cuts a group of {width} columns."
                        f" Shards of {divisors(columns, width)} columns fit {columns // width}"
                        " codes."
                    )
            in_groups = partial(_in_groups, width)
            codes = []
            for rect, weight in data.shards:
                shard = CodedShard(data.name, rect, weight, width)
                found.append((weight, shard))
                codes.append(Shard(in_groups(rect), shard.codes))
            self.coded[data.name] = replace(
                data,
                shape=(rows, groups[data.name]),
                dtype=torch.uint8,
                tiling=tuple(tuple(map(in_groups, rects)) for rects in data.tiling),
                shards=tuple(codes),
            )
        by_weight = ByMemory(found)
        self.shards = [*by_weight.values()]
        self._unhooked = {*self.shards}
        self._handles = ExitStack()
        self._hooked: dict[nn.Module, list[nn.Module]] = {}
        # If an error is raised, the stack removes the hooks; otherwise pop_all() keeps them.
        with self._handles:
            for collection in collections_of(model.modules()):
                self._hooked[collection] = lookups_of(collection)
                handle = collection.register_forward_pre_hook(Hook(self.check_reshard))
                self._handles.enter_context(handle)
                tables = collection_of(collection)
                for kernel in tables.kernels():
                    self._hook_kernel(tables, kernel, by_weight)
            for path, module in model.named_modules():
                self._hook_module(path, module, by_weight)
            self._refuse_unhooked()
            self._handles = self._handles.pop_all()

    def _refuse_unhooked(self) -> None:
        # In the order of the model: a set has another order on each rank.
        for shard in self.shards:
            if shard in self._unhooked:
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: no torch module and no sharded"
                    f" TorchRec collection looks up its shard {shard.rect}."
                )

    def use(self, books: Mapping[str, Tensor]) -> None:
        """Decode by these books from now on, by table."""
        self.use_entries(self.entries_of(books))

    def entries_of(self, books: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the entries of books, by table, for :meth:`use_entries`."""
        found = []
        for shard in self.shards:
            entries = books[shard.name][shard.groups].flatten(0, 1)
            found.append(entries.to(shard.codes.device, torch.float32))
        return found

    def use_entries(self, entries: Sequence[Tensor]) -> None:
        """Decode by these entries from now on. Can't fail."""
        for shard, of_shard in zip(self.shards, entries, strict=True):
            shard.entries = of_shard

    def check_reshard(self, *_: Any) -> None:
        """Call ``on_reshard`` if a collection has new lookup modules: a reshard replaces them on
        every rank, so every rank notices."""
        if any(lookups_of(owner) != hooked for owner, hooked in self._hooked.items()):
            self._on_reshard()

    def remove(self) -> None:
        """Remove the hooks."""
        self._handles.close()

    def _hook_kernel(
        self, tables: TableCollection, kernel: LookupKernel, by_weight: _ByWeight
    ) -> None:
        weights = kernel.weights()
        shards = [*map(by_weight.get, weights)]
        coded = [shard for shard in shards if shard is not None]
        if coded:
            if self._commitment:
                _refuse_commitment(coded[0].name, tables, kernel)
            by_feature = [(shards[table], weights[table].shape[1]) for table in kernel.features]
            decode = partial(_decode_kernel, by_feature, kernel.pooling)
            # The gradient of the loss arrives here with the share of this rank: so does the pull.
            self._hook(kernel.module, coded, decode, self._commitment * kernel.loss_share)

    def _hook_module(self, path: str, module: nn.Module, by_weight: _ByWeight) -> None:
        # A sharded collection shows the weights of its kernels as parameters of plain nn.Modules,
        # which look nothing up.
        weights = [] if type(module) is nn.Module else module.parameters(recurse=False)
        for weight in weights:
            shard = by_weight.get(weight)
            if shard is None:
                continue
            # Classes are compared exactly: a subclass may do more in its forward.
            if type(module) not in _MODULES or weight.itemsize < 4:
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: the module at {path!r} is a"
                    f" {type(module).__name__} in {weight.dtype}; only nn.Embedding and"
                    " nn.EmbeddingBag in float32 or float64 can use codes."
                )
            refuse_lookup(shard.name, module)
            decode = partial(_decode_module, shard, module)
            self._hook(module, [shard], decode, self._commitment)

    def _hook(
        self, module: nn.Module, shards: Sequence[CodedShard], decode: _Decode, commitment: float
    ) -> None:
        self._unhooked.difference_update(shards)
        hook = Hook(partial(_replace_output, shards[0], decode, commitment))
        # Prepend it: the hook that rotates outputs back must get decoded rows.
        handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
        self._handles.enter_context(handle)


def _replace_output(
    shard: CodedShard,
    decode: _Decode,
    commitment: float,
    _: nn.Module,
    args: Any,
    kwargs: Any,
    output: Any,
) -> Any:
    """Forward hook: return decoded rows instead of ``output``, which still gets the gradient."""
    # use() sets the entries of all shards, so one shard of the module answers for all.
    if shard.entries is None:
        return None
    with torch.no_grad():
        decoded = decode(args, kwargs, output).view(output.shape).to(output.dtype)
    # torch 2.13 has no types for it.
    function = cast(Any, _StraightThrough)
    return function.apply(output, decoded, commitment)


def _refuse_commitment(name: str, tables: TableCollection, kernel: LookupKernel) -> None:
    """Refuse lookups whose L2 in a loss is not the L2 of a kernel's output.

    Raises:
        ValueError: names the table.
    """
    start = f"Table {name!r} can't have a commitment:"
    if tables.merges_ids:
        raise ValueError(
            f"{start} use_index_dedup=True looks equal ids of a rank up once, and a loss has the L2"
            " of each. Turn it off, or pass commitment=0."
        )
    if kernel.divides_later:
        raise ValueError(
            f"{start} TorchRec divides the means of row-wise tables after the lookup. Use sums, or"
            " another sharding."
        )


class _StraightThrough(torch.autograd.Function):
    """Forward: the decoded rows. Backward: the gradient unchanged, plus the gradient of
    ``commitment`` times half the squared distance between floats and decoded rows."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, decoded: Tensor, commitment: float) -> Tensor:
        if commitment:
            ctx.save_for_backward((output - decoded).mul_(commitment))
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pulls = ctx.saved_tensors
        return (grads[0] + pulls[0] if pulls else grads[0]), None, None


def _decode_kernel(
    by_feature: Sequence[tuple[CodedShard | None, int]],
    pooling: str,
    args: Any,
    _: Any,
    output: Any,
) -> Tensor:
    """Return the output of a TorchRec kernel with decoded rows.

    Args:
        by_feature: the shard of each feature and its columns; None leaves the feature's output as
            it is.
    """
    ids = args[0]
    if ids.variable_stride_per_key():
        raise ValueError("Codes do not support batch sizes that differ between features.")
    # TorchRec cached these when it distributed the ids: reading them does not synchronize.
    starts, stride = ids.offset_per_key(), ids.stride()
    kernels = kernels_on(ids.values().device)
    if kernels is not None:
        features = [(shard and shard.stored, columns) for shard, columns in by_feature]
        decoded: Tensor = output.clone(memory_format=torch.contiguous_format)
        weights = _factors(ids.weights_or_none())
        kernels.decode_lookups(
            features, ids.values(), ids.offsets(), stride, weights, pooling, decoded
        )
        return decoded
    # Pooled outputs of features are side by side, sequences one below the other.
    is_pooled = pooling != "none"
    sizes = [columns for _, columns in by_feature] if is_pooled else ids.length_per_key()
    decoded = torch.empty_like(output)
    parts = torch.split(decoded, sizes, int(is_pooled))
    outputs = torch.split(output, sizes, int(is_pooled))
    for feature, (part, floats) in enumerate(zip(parts, outputs, strict=True)):
        shard = by_feature[feature][0]
        if shard is None:
            part.copy_(floats)
            continue
        span = slice(starts[feature], starts[feature + 1])
        # FBGEMM reads row 0 for an id out of range, unless it raises an error: so does this.
        decoded_rows = shard.decode(outside_as_0(ids.values()[span].long(), shard.rect.rows))
        if is_pooled:
            ends = ids.offsets()[feature * stride : (feature + 1) * stride + 1] - span.start
            decoded_rows = _pool(decoded_rows, ends, pooling, ids.weights_or_none(), span)
        part.copy_(decoded_rows)
    return decoded


def _pool(
    rows: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None, span: slice
) -> Tensor:
    """Return the sums or means of the rows of each bag, ``(bags, columns)``.

    Args:
        offsets: where each bag begins, and where the last one ends.
        weights: a factor for each id of all features; the factors of the rows are at ``span``. A
            weighted mean divides by the number of rows.
    """
    factors = None
    weights = _factors(weights)
    if weights is not None:
        factors = weights[span].float()
        # embedding_bag() rounds sums of products as the lookups of an artifact do, but has no
        # weighted means.
        if pooling == "mean":
            rows, factors = rows * factors.unsqueeze(1), None
    # Most bags of real models have one id, which needs no pooling. On an accelerator the test
    # itself would synchronize.
    if (
        factors is None
        and offsets.is_cpu
        and len(rows) == len(offsets) - 1
        and bool((offsets.diff() == 1).all())
    ):
        return rows
    places = torch.arange(len(rows), device=rows.device)
    return F.embedding_bag(
        places,
        rows,
        offsets.long(),
        mode=pooling,
        per_sample_weights=factors,
        include_last_offset=True,
    )


def _factors(weights: Tensor | None) -> Tensor | None:
    """Return weights of ids, if they are read: TorchRec's kernels ignore integer ones."""
    return weights if weights is not None and weights.is_floating_point() else None


def _decode_module(shard: CodedShard, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Tensor:
    """Return the output of an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not, with decoded
    rows."""
    names = ("input", "offsets", "per_sample_weights")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    ids = arguments.pop("input")
    row_ids = ids.reshape(-1).long()
    if isinstance(module, compact.CompactTable):
        row_ids = module.index(row_ids).long()
        # Removed ids read the row of zeros after the last row.
        row_ids = torch.where(row_ids < 0, shard.rect.rows, row_ids)
    rows = shard.decode(row_ids)
    if isinstance(module, nn.EmbeddingBag):
        arguments.update(mode=module.mode, include_last_offset=module.include_last_offset)
        places = torch.arange(len(rows), device=rows.device).view(ids.shape)
        if (weights := arguments.get("per_sample_weights")) is not None:
            # A float64 table has float64 weights; decoded rows are float32.
            arguments["per_sample_weights"] = weights.to(rows.dtype)
        rows = F.embedding_bag(places, rows, **arguments)
    return rows


def _in_groups(width: int, rect: Rect) -> Rect:
    """Return the rectangle of a shard's codes: its columns are groups."""
    return rect._replace(col=rect.col // width, cols=rect.cols // width)


def divisors(columns: int, step: int = 1) -> list[int]:
    """Return the multiples of ``step`` that divide ``columns``."""
    return [size for size in range(step, columns + 1, step) if columns % size == 0]
