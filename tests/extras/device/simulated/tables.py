"""A stand-in for FBGEMM's kernels and TorchRec's sharded collection around them, on the CPU or on
the device that is not there: what :mod:`dist_sparse.tables.protocols` asks of the two.

A lookup adds up rows and its backward writes them, as a fused kernel does, in the order of the ids,
so that both devices compute the same bits. Its output is on the CPU: torch's autograd engine ends
the process at a tensor of a device that it has no driver for, and the enforcer reads no value of
outputs. In sequences, hooks on the output's gradient run in the lookup's own backward, with a
gradient on the device, which they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse.tables.protocols import TableConfig, WeightsOf
from dist_sparse.tables.shards import CACHED, Rect, Shard, ShardedData
from dist_sparse.torchrec import port
from tests.extras.device.simulated.fake import STREAMS, cuda, inner

__all__ = [
    "CachingKernel",
    "Collection",
    "Kernel",
    "Layout",
    "SequenceKernel",
    "one_rank",
    "standing_in",
]

RATE = 0.05
EPS = 1e-8


@dataclass(frozen=True)
class Layout:
    """Where a table is stored.

    Args:
        shape: the global rows and columns.
        tiling: the rectangle of each rank.
        ranks: global ranks; None is a world of one.
    """

    shape: tuple[int, int]
    tiling: tuple[Rect, ...]
    ranks: tuple[int, ...] | None = None

    def shard(self, table: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a table."""
        rect = self.tiling[rank]
        return table[rect.row : rect.row_end, rect.col : rect.col_end]


def one_rank(rows: int, cols: int) -> Layout:
    """Return the layout of a table in a world of one."""
    return Layout((rows, cols), (Rect(0, 0, rows, cols),))


class Kernel(nn.Module):
    """A batch of tables with a row-wise Adagrad, and TorchRec's module around it: a
    :class:`~dist_sparse.tables.protocols.TableBatch`. Feature i looks up table i.

    Args:
        tables: this rank's shards, copied.
        on_device: whether the tables say ``cuda``.
        names: of the tables; by default ``t0``, ``t1``, ...
    """

    pooling: Literal["sum", "none"] = "sum"
    keeps_zeros = True
    is_adagrad = True
    cached: Set[int] = frozenset()

    def __init__(
        self, tables: Sequence[Tensor], on_device: bool, names: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.tables = list(names) or [f"t{number}" for number in range(len(tables))]
        self.put: Callable[[Tensor], Tensor] = cuda if on_device else lambda tensor: tensor
        self.shapes = [(table.shape[0], table.shape[1]) for table in tables]
        self.memory = torch.cat([table.flatten() for table in tables])
        """The weights of all tables, in CPU memory."""
        self.sums = [torch.zeros(rows) for rows, _ in self.shapes]
        # No buffers: FBGEMM's weights are no parameters of TorchRec's module either.
        object.__setattr__(self, "_stored", self.put(self.memory))
        self._states = [[self.put(sums)] for sums in self.sums]
        # Gradients flow through it to the backward, which updates the rows.
        self._anchor = torch.zeros((), requires_grad=True)
        self._no_gradients: Tensor | None = None
        self.kernel = Batch(self)
        self.pending: MutableSet[object] = WeakSet()

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def features(self) -> list[int]:
        return list(range(len(self.shapes)))

    def weights(self) -> list[Tensor]:
        views, start = [], 0
        for rows, cols in self.shapes:
            views.append(self._stored.detach()[start : start + rows * cols].view(rows, cols))
            start += rows * cols
        return views

    def states(self) -> list[Sequence[Tensor]]:
        return list(self._states)

    def storage(self) -> list[Tensor]:
        return [self._stored]

    def hyperparameters(self) -> dict[str, float]:
        return {"lr": RATE, "eps": EPS}

    def mask_weights(self, call: dict[str, Any], weights_of: WeightsOf) -> dict[str, Any]:
        ends = call["offsets"][:: call["bags"]]
        ends = ends if ends.is_cuda else ends.tolist()
        weights = weights_of(call["indices"], ends, call["per_sample_weights"])
        # FBGEMM computes no gradients of weights then.
        if self._no_gradients is None:
            none = torch.zeros(len(self.features), dtype=torch.int32, device=weights.device)
            self._no_gradients = none
        return {**call, "per_sample_weights": weights, "feature_requires_grad": self._no_gradients}

    def restore_pooling(self, *_: object) -> None: ...

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.kernel(
            indices=features.values(),
            offsets=features.offsets(),
            per_sample_weights=features.weights_or_none(),
            bags=features.stride(),
        )
        return out

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int) -> Tensor:
        hooks: list[Callable[[Tensor], Tensor | None]] = []
        out: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self, self._anchor, ids, offsets, weights, bags, hooks
        )
        if self.pooling == "none":
            out.register_hook = hooks.append  # type: ignore[method-assign]
        return out

    def freeze(self) -> None:
        """From now on lookups have no backward."""
        self._anchor.requires_grad_(False)

    def rows(self) -> list[Tensor]:
        """The tables in CPU memory."""
        return [inner(view) for view in self.weights()]

    def fetched(self, batch: Sequence[_Bags]) -> list[Tensor]:
        """The tables as a lookup reads them, and its backward writes them."""
        return self.rows()

    def write_back(self) -> None: ...


class SequenceKernel(Kernel):
    """A kernel that returns a row for each id. All tables are equally wide."""

    pooling = "none"


class CachingKernel(Kernel):
    """A kernel whose lookups and backwards read and write copies of rows, as FBGEMM's cache on the
    device holds them. Tables have their latest values after a :meth:`write_back` alone."""

    def __init__(
        self, tables: Sequence[Tensor], on_device: bool, names: Sequence[str] = ()
    ) -> None:
        super().__init__(tables, on_device, names)
        self._copies = [torch.full(shape, torch.nan) for shape in self.shapes]
        self.cached = set(range(len(tables)))
        self._cached = [torch.zeros(rows, dtype=torch.bool) for rows, _ in self.shapes]

    def fetched(self, batch: Sequence[_Bags]) -> list[Tensor]:
        # Uncounted too.
        for table, copies, cached, some in zip(
            self.rows(), self._copies, self._cached, batch, strict=True
        ):
            # Full: all other rows make way.
            if int(cached.sum()) + len(some.ids) > len(cached) // 20:
                table[cached] = copies[cached]
                cached[:] = False
            new = some.ids[~cached[some.ids]]
            copies[new] = table[new]
            cached[new] = True
        return self._copies

    def write_back(self) -> None:
        if self.pending:
            raise ValueError("a lookup waits for its backward")
        for table, copies, cached in zip(self.rows(), self._copies, self._cached, strict=True):
            table[cached] = copies[cached]
            cached[:] = False
            # So that no lookup reads a row that is not cached any more.
            copies[:] = torch.nan


class Batch(nn.Module):
    """In the place of FBGEMM's module, which TorchRec's calls with keywords."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        # No submodule: it holds this one.
        self._look_up = kernel.look_up

    def forward(
        self,
        *,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        bags: int,
        feature_requires_grad: Tensor | None = None,
    ) -> Tensor:
        return self._look_up(indices, offsets, per_sample_weights, bags)


@dataclass(frozen=True)
class _Bags:
    """The ids of one table in a batch, on the CPU: the bag and the weight of each."""

    ids: Tensor
    bags: Tensor
    count: int
    weights: Tensor | None


class _Lookup(torch.autograd.Function):
    """Adds up the rows of bags; the backward steps the optimizer. In a sequence each id is a bag,
    and the tables' outputs lie below each other, not side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bags: int,
        hooks: Sequence[Callable[[Tensor], Tensor | None]],
    ) -> Tensor:
        ctx.hooks = hooks
        # Uncounted, on the memory behind the device: it is FBGEMM's work.
        ctx.kernel = kernel
        ctx.joined = 1 if kernel.pooling == "sum" else 0
        ctx.batch = _split(inner(ids), inner(offsets), inner(weights), bags)
        if kernel.pooling == "none":
            ctx.batch = [_each_alone(some) for some in ctx.batch]
        ctx.tables = kernel.fetched(ctx.batch)
        shapes = [
            (some.count, cols) for some, (_, cols) in zip(ctx.batch, kernel.shapes, strict=True)
        ]
        out = torch.cat([torch.empty(shape) for shape in shapes], ctx.joined)

        def look_up() -> None:
            found = []
            for table, some in zip(ctx.tables, ctx.batch, strict=True):
                rows = table[some.ids].float()
                if some.weights is not None:
                    rows = rows * some.weights.unsqueeze(1)
                zeros = torch.zeros(some.count, table.shape[1])
                found.append(zeros.index_add_(0, some.bags, rows))
            torch.cat(found, ctx.joined, out=out)

        # Later, on a stream that sleeps.
        STREAMS.now.do(look_up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        kernel: Kernel = ctx.kernel
        for hook in ctx.hooks:
            changed = hook(kernel.put(grad))
            grad = grad if changed is None else inner(changed)
        widths = [cols for _, cols in kernel.shapes]
        parts = torch.split(
            grad, widths if ctx.joined else [some.count for some in ctx.batch], ctx.joined
        )
        for table, sums, some, part in zip(ctx.tables, kernel.sums, ctx.batch, parts, strict=True):
            of_each = part[some.bags]
            if some.weights is not None:
                of_each = of_each * some.weights.unsqueeze(1)
            touched, place = torch.unique(some.ids, return_inverse=True)
            step = torch.zeros(len(touched), table.shape[1]).index_add_(0, place, of_each)
            sums[touched] += step.square().mean(1)
            table[touched] -= RATE * step / (sums[touched].sqrt() + EPS).unsqueeze(1)
        return (None,) * 7


def _split(ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int) -> list[_Bags]:
    found = []
    for first in range(0, len(offsets) - 1, bags):
        start, stop = int(offsets[first]), int(offsets[first + bags])
        lengths = offsets[first : first + bags + 1].diff()
        bag = torch.arange(bags).repeat_interleave(lengths)
        some = None if weights is None else weights[start:stop]
        found.append(_Bags(ids[start:stop].long(), bag, bags, some))
    return found


def _each_alone(some: _Bags) -> _Bags:
    return _Bags(some.ids, torch.arange(len(some.ids)), len(some.ids), some.weights)


class Collection(nn.Module):
    """A sharded collection of one kernel: a :class:`~dist_sparse.tables.protocols.TableCollection`.

    Args:
        layouts: of the tables.
        tables: this rank's shards.
        rank: of this process.
        on_device: whether the tables say ``cuda``.
        kind: of kernel.
        names: of the tables; by default ``t0``, ``t1``, ...
    """

    is_sharded = True
    weighted = False
    needs_indices = False
    merges_ids = False
    attribute = "embedding_bags"

    def __init__(
        self,
        layouts: Sequence[Layout],
        tables: Sequence[Tensor],
        rank: int,
        on_device: bool,
        kind: type[Kernel] = Kernel,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._rank, self._on_device, self._names = rank, on_device, names
        self._kind = kind
        self.pooled = kind.pooling == "sum"
        self.store(layouts, tables)

    def store(self, layouts: Sequence[Layout], tables: Sequence[Tensor]) -> None:
        """Store other shards, as a reshard does, with new optimizer state."""
        self.kernel = self._kind(tables, self._on_device, self._names)
        self._layouts = list(layouts)

    @property
    def tables(self) -> list[TableConfig]:
        return [
            TableConfig(name, (f"f{number}",), layout.shape[0], self._kind.pooling)
            for number, (name, layout) in enumerate(
                zip(self.kernel.tables, self._layouts, strict=True)
            )
        ]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.kernel(features)
        return out

    def fqn(self, path: str, table: str) -> str:
        return ".".join(filter(None, (path, self.attribute, table, "weight")))

    def outputs(self) -> dict[str, str]:
        return {f"f{number}": name for number, name in enumerate(self.kernel.tables)}

    def embeddings(self) -> dict[str, nn.Module]:
        return {}

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        number = self.kernel.tables.index(table)
        layout = self._layouts[number]
        self.kernel.write_back()
        view = self.kernel.weights()[number]
        return ShardedData(
            name=name,
            shape=layout.shape,
            dtype=view.dtype,
            sharding="table_wise" if layout.ranks is None else "grid_shard",
            ranks=layout.ranks,
            tiling=tuple((rect,) for rect in layout.tiling),
            shards=(Shard(layout.tiling[self._rank], view.data),),
            kernel=CACHED if self.kernel.cached else "fused",
            fqn=fqn,
            features=(f"f{number}",),
        )

    def batches(self) -> Iterator[Kernel]:
        yield self.kernel

    def set_hyperparameters(self, values: Mapping[str, Mapping[str, float]]) -> None: ...

    def bounds_checks(self) -> dict[str, str]:
        return {config.name: "NONE" for config in self.tables}

    # Not `parameters`, which is nn.Module's.
    def optimizers(self) -> list[Any]:
        return []


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, Collection)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Have the package find these collections as it finds TorchRec's."""
    known = port.collection

    def collection(module: nn.Module) -> Any:
        return module if isinstance(module, Collection) else known(module)

    def lookups(module: nn.Module) -> list[nn.Module]:
        return [module.kernel] if isinstance(module, Collection) else []

    with (
        mock.patch.object(port, "collection", collection),
        mock.patch.object(port, "is_sharded", _is_sharded),
        mock.patch.object(port, "lookups", lookups),
    ):
        yield
