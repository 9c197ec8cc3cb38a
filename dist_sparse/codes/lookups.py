"""Lookups that return decoded rows, with gradients straight through to the table of floats.

A forward hook on what looks the table up, one of TorchRec's kernels or a module of torch's, puts
the pooled decoded rows in the place of the pooled weights. The backward passes their gradient
on to the output that the lookup computed, so that a fused optimizer steps as before. At the kernel,
ids are local to the shard, whatever the sharding. Nothing waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from dist_sparse.codes.books import ENTRIES, Books
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.tables import (
    CompactEmbedding,
    CompactEmbeddingBag,
    CompactTable,
    padding_id_of,
)
from dist_sparse.enforcer.hooks import Hook
from dist_sparse.tables.protocols import LookupKernel

_MODULES = (nn.Embedding, nn.EmbeddingBag, CompactEmbedding, CompactEmbeddingBag)


class CodedShard(NamedTuple):
    """The codes of a shard, live: its table, its number there, uint8 ``(rows, groups)``, and the
    first of its table's groups."""

    name: str
    number: int
    codes: Tensor
    first: int


@dataclass(frozen=True)
class Cut:
    """The groups of a table that a shard has: ``[first, last)``, each of ``width`` columns."""

    name: str
    number: int
    rows: int
    first: int
    last: int
    width: int


class _StraightThrough(torch.autograd.Function):
    """The decoded rows forward, the gradient unchanged backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, decoded: Tensor) -> Tensor:
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _through(output: Tensor, decoded: Tensor) -> Tensor:
    decoded = decoded.to(output.dtype)
    found: Tensor = _StraightThrough.apply(output, decoded)  # type: ignore[no-untyped-call]
    return found


class _Rows:
    """Codes of shards with as many groups of as many columns, behind one another, and their books.

    Behind the last row is one of codes 0, which decode to zeros.

    Args:
        cuts: by the number of the shard.
        device: of the tables.
    """

    def __init__(self, cuts: Mapping[int, Cut], device: torch.device) -> None:
        self.cuts = dict(cuts)
        any_cut = next(iter(self.cuts.values()))
        self.groups, self.width = any_cut.last - any_cut.first, any_cut.width
        self.starts: dict[int, int] = {}
        self.total = 0
        for table, cut in self.cuts.items():
            self.starts[table] = self.total
            self.total += cut.rows
        self.codes = torch.zeros(self.total + 1, self.groups, dtype=torch.uint8, device=device)
        self._group_starts = torch.arange(
            0, self.groups * ENTRIES, ENTRIES, dtype=torch.int32, device=device
        )
        self._books = torch.zeros(0, self.width, device=device)

    @property
    def shards(self) -> list[CodedShard]:
        found = []
        for table, cut in self.cuts.items():
            start = self.starts[table]
            part = self.codes[start : start + cut.rows]
            found.append(CodedShard(cut.name, cut.number, part, cut.first))
        return found

    def use(self, books: Mapping[str, Books]) -> None:
        """Decode by these books from now on, by table."""
        parts = [books[cut.name].entries[cut.first : cut.last] for cut in self.cuts.values()]
        # In float32, which adds a fourth of a MiB a table and spares a pass over what was decoded.
        self._books = torch.cat(parts).flatten(0, 1).float().to(self.codes.device)

    def vectors(self, rows: Tensor, of: Tensor | None = None) -> Tensor:
        """Return decoded rows, float32 ``(n, columns)``.

        Args:
            rows: their numbers in :attr:`codes`.
            of: the number of each row's shard among :attr:`cuts`; None of one shard.
        """
        places = self.codes.index_select(0, rows) + self._group_starts
        if of is not None:
            places += (of * (self.groups * ENTRIES)).unsqueeze(1)
        return F.embedding(places, self._books).flatten(1)


class KernelLookups:
    """The lookups of one of TorchRec's kernels.

    Args:
        kernel: with the tables of ``cuts``.
        cuts: by the number of the shard in the kernel.
        ready: called in each lookup; returns whether rows are decoded.
    """

    def __init__(
        self, kernel: LookupKernel, cuts: Mapping[int, Cut], ready: Callable[[], bool]
    ) -> None:
        weights = kernel.weights()
        device = weights[0].device
        self._kernel, self._ready = kernel, ready
        self._widths = [weights[table].shape[1] for table in kernel.features]
        by_shape: dict[tuple[int, int], dict[int, Cut]] = {}
        for table, cut in cuts.items():
            by_shape.setdefault((cut.last - cut.first, cut.width), {})[table] = cut
        self._parts = [_KernelPart(part, kernel.features, device) for part in by_shape.values()]
        self._handle: RemovableHandle = kernel.module.register_forward_hook(Hook(self._decoded))

    @property
    def shards(self) -> list[CodedShard]:
        """The codes of its shards."""
        return [shard for part in self._parts for shard in part.rows.shards]

    def use(self, books: Mapping[str, Books]) -> None:
        """Decode by these books from now on."""
        for part in self._parts:
            part.rows.use(books)

    def remove(self) -> None:
        """Return the weights again."""
        self._handle.remove()

    def _decoded(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        ids = args[0]
        if not ids.variable_stride_per_key() and not ids.stride():
            return None
        if not self._ready():
            return None
        if ids.variable_stride_per_key():
            raise ValueError(
                f"Tables {list(self._names())} have codes, which do not support batches of another"
                " size for each feature."
            )
        with torch.no_grad():
            found = [part(ids, self._kernel.pooling) for part in self._parts]
            if self._kernel.pooling == "none":
                decoded = self._sequence(ids, found, output)
            else:
                decoded = self._bags(found, output)
        return _through(output, decoded)

    def _names(self) -> list[str]:
        return sorted({shard.name for shard in self.shards})

    def _bags(self, found: Sequence[Tensor], output: Tensor) -> Tensor:
        """Put the bags of all features side by side; of tables without codes the weights."""
        if len(found) == 1 and self._parts[0].has_all:
            # From feature after feature to bag after bag.
            return found[0].transpose(0, 1).flatten(1)
        columns = list(torch.split(output, self._widths, 1))
        for part, bags in zip(self._parts, found, strict=True):
            for feature in part.mine:
                columns[feature] = bags[feature]
        return torch.cat(columns, 1)

    def _sequence(self, ids: Any, found: Sequence[Tensor], output: Tensor) -> Tensor:
        """Put together the rows of all ids; of tables without codes the weights."""
        decoded = output
        for part, vectors in zip(self._parts, found, strict=True):
            if part.has_all:
                return vectors
            here = part.is_mine.index_select(0, _features_of(ids)).unsqueeze(1)
            decoded = torch.where(here, vectors, decoded)
        return decoded


class _KernelPart:
    """The shards of a kernel that have as many groups of as many columns.

    Attributes:
        mine: the features that look them up.
        has_all: whether these are all features.
        is_mine: the same as ``mine``, bool ``(features,)``.
    """

    def __init__(
        self, cuts: Mapping[int, Cut], features: Sequence[int], device: torch.device
    ) -> None:
        self.rows = _Rows(cuts, device)
        self.mine = [at for at, table in enumerate(features) if table in cuts]
        self.has_all = len(self.mine) == len(features)
        numbers = {table: number for number, table in enumerate(cuts)}
        self.is_mine = torch.tensor([table in cuts for table in features], device=device)
        # Ids of other tables read the row of zeros, in any book.
        sizes = [cuts[table].rows if table in cuts else 0 for table in features]
        starts = [self.rows.starts.get(table, self.rows.total) for table in features]
        of = [numbers.get(table, 0) for table in features]
        self._sizes = torch.tensor(sizes, device=device)
        self._starts = torch.tensor(starts, device=device)
        self._of = torch.tensor(of, dtype=torch.int32, device=device)

    def __call__(self, ids: Any, pooling: str) -> Tensor:
        """Return the bags of all features, ``(features, bags, columns)``, or the row of each id,
        ``(n, columns)``."""
        feature = _features_of(ids)
        rows = ids.values().long()
        # FBGEMM reads row 0 for an id out of range, unless it has raised an error.
        outside = (rows < 0) | (rows >= self._sizes.index_select(0, feature))
        rows = rows.masked_fill(outside, 0) + self._starts.index_select(0, feature)
        vectors = self.rows.vectors(rows, self._of.index_select(0, feature))
        if pooling == "none":
            return vectors
        weights = ids.weights_or_none()
        if weights is not None and not weights.is_floating_point():
            # TorchRec's kernels ignore them.
            weights = None
        bags = _pooled(vectors, ids.offsets(), pooling, weights)
        return bags.view(len(self._starts), -1, bags.shape[1])


def _features_of(ids: Any) -> Tensor:
    """Return the feature of each id of a KeyedJaggedTensor."""
    counts = ids.offsets()[:: ids.stride()].diff()
    # The number of ids is known: without it a device would be waited for.
    return torch.repeat_interleave(counts, output_size=ids.values().numel())


class ModuleLookups:
    """The lookups of an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not.

    Args:
        module: one that :func:`refusal_of` allows.
        cut: of its weight.
        ready: as of :class:`KernelLookups`.
    """

    def __init__(
        self, module: nn.Embedding | nn.EmbeddingBag, cut: Cut, ready: Callable[[], bool]
    ) -> None:
        self._ready = ready
        self._rows = _Rows({0: cut}, module.get_parameter("weight").device)
        self._handle: RemovableHandle = module.register_forward_hook(
            # Before the hook that turns outputs of rotated tables back.
            Hook(self._decoded),
            with_kwargs=True,
            prepend=True,
        )

    @property
    def shards(self) -> list[CodedShard]:
        """The codes of its weight."""
        return self._rows.shards

    def use(self, books: Mapping[str, Books]) -> None:
        """Decode by these books from now on."""
        self._rows.use(books)

    def remove(self) -> None:
        """Return the weights again."""
        self._handle.remove()

    def _decoded(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if not self._ready():
            return None
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        ids = given["input"]
        with torch.no_grad():
            rows = self._numbers(module, ids.reshape(-1).long())
            vectors = self._rows.vectors(rows)
            if isinstance(module, nn.EmbeddingBag):
                ends = _ends(ids, given.get("offsets"), module.include_last_offset)
                weights = given.get("per_sample_weights")
                weights = None if weights is None else weights.reshape(-1)
                decoded = _pooled(vectors, ends, module.mode, weights)
            else:
                decoded = vectors.view(output.shape)
        return _through(output, decoded)

    def _numbers(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return the row of each id; of a compact table the row of zeros for removed ids."""
        if not isinstance(module, CompactTable):
            return ids
        index: RowIndex = module.index
        rows = index(ids).long()
        return torch.where(rows < 0, self._rows.total, rows)


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
    # Most bags of real models have one id. A device would have to be waited for.
    has_single = offsets.is_cpu and weights is None and len(vectors) == len(offsets) - 1
    if has_single and bool((offsets.diff() == 1).all()):
        return vectors
    bags = F.embedding_bag(
        torch.arange(len(vectors), device=vectors.device),
        vectors,
        offsets.long(),
        mode=pooling if weights is None else "sum",
        per_sample_weights=None if weights is None else weights.to(vectors.dtype),
        include_last_offset=True,
    )
    if pooling == "mean" and weights is not None:
        bags /= offsets.diff().clamp(min=1).unsqueeze(1)
    return bags


def refusal_of(module: nn.Module) -> str | None:
    """Return why a module of torch's can't return decoded rows, as the rest of a sentence; None if
    it can."""
    # By exact class: a subclass may do more in its forward.
    if type(module) not in _MODULES:
        return f"{type(module).__name__} looks it up, and nn.Embedding and nn.EmbeddingBag can"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm changes rows when they are looked up"
    if isinstance(module, nn.EmbeddingBag):
        if module.mode == "max":
            return "its rows are pooled by their maximum"
        if padding_id_of(module) is not None:
            return "an EmbeddingBag with padding_idx leaves ids out of its bags"
    return None
