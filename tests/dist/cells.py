"""The sharded models of the tests: one real DistributedModelParallel for each sharding cell.

A cell is a set of tables, a plan for a world and a kind of collection. The same global weights can
be put under every cell, so that results can be compared over shardings and with one process. A
world of 4 is two "hosts" of two ranks (``LOCAL[4]``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse.tables.shards import ShardedData
from tests.dist.harness import LOCAL

__all__ = [
    "LOCAL",
    "Cell",
    "Net",
    "TableSpec",
    "batch",
    "build",
    "cells",
    "gathered",
    "plain",
    "set_weights",
    "weights",
]

Generator = Callable[..., Any]


@dataclass(frozen=True)
class TableSpec:
    """A table of a cell."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]


# Row counts that no world divides, a table that is smaller than a world of 4 (row-wise: 1, 1, 1 and
# 0 rows), one that two features share.
TABLES: Final = (
    TableSpec("user", 37, 8, ("user_id",)),
    TableSpec("item", 10, 16, ("item_id", "last_item_id")),
    TableSpec("tiny", 3, 8, ("genre",)),
    TableSpec("word", 29, 12, ("query",)),
)
# An EmbeddingCollection has one dim.
SEQUENCES: Final = tuple(replace(table, dim=16) for table in TABLES)
WIDE: Final = (TableSpec("wide", 11, 256, ("wide_id",)), TableSpec("flat", 3, 256, ("flat_id",)))


@dataclass(frozen=True)
class Cell:
    """How the tables of a model are sharded over a world.

    Args:
        plan: for each table a generator of TorchRec's sharding plans.
        bags: an EmbeddingBagCollection, or an EmbeddingCollection.
        fused: optimizers run inside the backward (data-parallel tables never).
        trains: whether a CPU has a forward for it.
    """

    name: str
    world: int
    plan: Mapping[str, Generator] = field(repr=False)
    tables: tuple[TableSpec, ...] = TABLES
    bags: bool = True
    data_type: DataType = DataType.FP32
    fused: bool = True
    trains: bool = True


class Net(nn.Module):
    """A small model: a collection of tables below ``sparse``, and a dense layer over the sum of
    what it gives."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.bags = cell.bags
        self.sparse = nn.Module()
        self.sparse.tables = _collection(cell)
        width = (
            sum(table.dim * len(table.features) for table in cell.tables)
            if cell.bags
            else SEQUENCES[0].dim
        )
        self.over = nn.Linear(width, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """One number per sample (bags) or in all (sequences)."""
        found = self.sparse.tables(features)
        if self.bags:
            return self.over(
                torch.cat([found[key] for key in sorted(found.keys())], dim=1).float()
            ).squeeze(1)
        return self.over(
            torch.stack([found[key].values().float().sum(0) for key in sorted(found.keys())]).sum(0)
        )


def every_cell() -> list[tuple[int, str]]:
    """Parameters ``("world", "name")``: every cell of 1, 2 and 4 ranks."""
    return [(world, name) for world in (1, 2, 4) for name in cells(world)]


def cells(world: int) -> dict[str, Cell]:
    """Every cell that exists in this world, by name. To be run with
    ``local_world_size=LOCAL[world]``."""
    last, ranks = world - 1, list(range(world))
    halves = [0, last]
    by_columns = {"user": halves, "item": ranks, "tiny": halves, "word": [last, 0, last]}
    made = [
        Cell(
            "table_wise",
            world,
            {t.name: table_wise(rank=(last - i) % world) for i, t in enumerate(TABLES)},
        ),
        Cell("table_wise_one_rank", world, _each(lambda t: table_wise(rank=last))),
        Cell("row_wise", world, _each(lambda t: row_wise())),
        Cell("row_wise_dense_kernel", world, _each(lambda t: row_wise()), fused=False),
        Cell("row_wise_fp16", world, _each(lambda t: row_wise()), data_type=DataType.FP16),
        Cell(
            "row_wise_bf16",
            world,
            _each(lambda t: row_wise()),
            data_type=DataType.BF16,
            trains=False,
        ),
        Cell(
            "column_wise",
            world,
            {name: column_wise(ranks=over) for name, over in by_columns.items()},
        ),
        Cell(
            "column_wise_fp16",
            world,
            {name: column_wise(ranks=over) for name, over in by_columns.items()},
            data_type=DataType.FP16,
        ),
        Cell("two_shards", world, _each(lambda t: column_wise(ranks=[last, last]))),
        Cell(
            "table_row_wise",
            world,
            {t.name: table_row_wise(host_index=i % _hosts(world)) for i, t in enumerate(TABLES)},
        ),
        Cell("table_column_wise", world, _each(lambda t: _table_column_wise(_host(world)))),
        Cell("data_parallel", world, _each(lambda t: data_parallel()), fused=False),
        Cell(
            "data_parallel_fp16",
            world,
            _each(lambda t: data_parallel()),
            fused=False,
            data_type=DataType.FP16,
        ),
        Cell(
            "mixed",
            world,
            {
                "user": row_wise(),
                "item": column_wise(ranks=ranks),
                "tiny": data_parallel(),
                "word": table_wise(rank=last),
            },
        ),
        Cell(
            "ec_table_wise",
            world,
            {t.name: table_wise(rank=i % world) for i, t in enumerate(TABLES)},
            SEQUENCES,
            bags=False,
        ),
        Cell("ec_row_wise", world, _each(lambda t: row_wise()), SEQUENCES, bags=False),
        Cell(
            "ec_column_wise",
            world,
            _each(lambda t: column_wise(ranks=halves)),
            SEQUENCES,
            bags=False,
        ),
        Cell(
            "ec_two_shards",
            world,
            _each(lambda t: column_wise(ranks=[last, last])),
            SEQUENCES,
            bags=False,
        ),
        Cell(
            "ec_data_parallel",
            world,
            _each(lambda t: data_parallel()),
            SEQUENCES,
            bags=False,
            fused=False,
            trains=False,
        ),
    ]
    if world > 1:
        # Shards of different widths, on ranks 0 and 1.
        widths = {"user": [4, 4], "item": [4, 12], "tiny": [4, 4], "word": [8, 4]}
        made.append(
            Cell(
                "column_wise_uneven",
                world,
                {name: column_wise(size_per_rank=each) for name, each in widths.items()},
            )
        )
    if _hosts(world) > 1:
        hosts = list(range(_hosts(world)))
        made.append(
            Cell(
                "grid_shard",
                world,
                {"wide": grid_shard(hosts), "flat": grid_shard(hosts[::-1])},
                WIDE,
            )
        )
    return {cell.name: cell for cell in made}


def plain(cell: Cell) -> Net:
    """The model of a cell, unsharded: all of it in this process, with the weights of
    :func:`weights`."""
    net = Net(cell)
    set_weights(net, weights(cell))
    return net


def build(
    cell: Cell,
    optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
    optimizer_args: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    layers: DataParallelWrapper | None = None,
    initial: bool = False,
) -> DistributedModelParallel:
    """The model of a cell, sharded, with the weights of :func:`weights`. Collective.

    Args:
        optimizer: of the fused tables. A CPU has SGD, Adagrad and RowWiseAdagrad.
        optimizer_args: ``{"lr": 0.1}`` at first.
        layers: how TorchRec puts them under DDP.
        initial: keep the weights that TorchRec's shards draw.
    """
    torch.manual_seed(0)
    net = Net(cell)
    collection = net.sparse.tables
    tables = collection.embedding_bags if cell.bags else collection.embeddings
    if cell.fused:
        # Data-parallel tables have no fused optimizer in TorchRec; they are told by the helper that
        # made their plan.
        fused = [
            tables[t.name].weight
            for t in cell.tables
            if "data_parallel" not in cell.plan[t.name].__qualname__
        ]
        apply_optimizer_in_backward(optimizer, fused, dict(optimizer_args or {"lr": 0.1}))
    sharder = EmbeddingBagCollectionSharder() if cell.bags else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        dict(cell.plan),
        sharder=sharder,
        local_size=LOCAL[cell.world],
        world_size=cell.world,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(process_group or dist.group.WORLD)
    model = DistributedModelParallel(
        net,
        env=env,
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse.tables": plan}),
        sharders=[sharder],
        data_parallel_wrapper=layers,
    )
    if not initial:
        set_weights(model, weights(cell))
    return model


def weights(cell: Cell, seed: int = 0) -> dict[str, Tensor]:
    """Global weights by table name: the same for the same name, shape and seed, whatever the
    cell."""
    made = {}
    for table in cell.tables:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(table.name.encode()))
        made[table.name] = torch.randn(table.rows, table.dim, generator=generator)
    return made


def batch(cell: Cell, seed: int = 0, size: int = 6) -> KeyedJaggedTensor:
    """A batch with 0 to 3 ids per sample and feature; another one for each seed (give every rank
    its own)."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = [], []
    for table in cell.tables:
        for _ in table.features:
            length = torch.randint(0, 4, (size,), generator=generator)
            lengths.append(length)
            ids.append(torch.randint(0, table.rows, (int(length.sum()),), generator=generator))
    keys = [feature for table in cell.tables for feature in table.features]
    return KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=torch.cat(lengths))


def gathered(source: nn.Module | Sequence[ShardedData]) -> dict[str, Tensor]:
    """The global weights by table name, on every rank. Collective in a sharded world.

    From a model they come through its state_dict, so that what ``locate()`` says can be checked
    against them.
    """
    mine: list[tuple[str, tuple[int, ...], list[tuple[tuple[int, int], Tensor]]]] = []
    if isinstance(source, nn.Module):
        for name, value in _table_entries(source).items():
            pieces = (
                [
                    ((p.metadata.shard_offsets[0], p.metadata.shard_offsets[1]), p.tensor.clone())
                    for p in value.local_shards()
                ]
                if isinstance(value, ShardedTensor)
                else [((0, 0), value.clone())]
            )
            mine.append((name, tuple(value.shape), pieces))
    else:
        for data in source:
            mine.append(
                (
                    data.name,
                    data.shape,
                    [((s.rect.row, s.rect.col), s.tensor.clone()) for s in data.shards],
                )
            )
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    full: dict[str, Tensor] = {}
    for name, shape, pieces in (entry for entries in everyone for entry in entries):
        for (row, col), tensor in pieces:
            whole = full.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            whole[row : row + tensor.shape[0], col : col + tensor.shape[1]] = tensor
    return full


def drawn(cell: Cell, seed: int) -> dict[str, Tensor]:
    """Global weights, drawn as TorchRec draws them; the same on every rank."""
    found = {}
    generator = torch.Generator().manual_seed(seed)
    for table in cell.tables:
        bound = (1 / table.rows) ** 0.5
        found[table.name] = torch.empty(table.rows, table.dim)
        found[table.name].uniform_(-bound, bound, generator=generator)
    return found


def set_weights(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Writes these global weights into the model's tables, sharded or not. Each rank writes what it
    holds."""
    for name, value in _table_entries(model).items():
        if name not in full:
            continue
        if not isinstance(value, ShardedTensor):
            value.data.copy_(full[name])
            continue
        for piece in value.local_shards():
            (row, col), (rows, cols) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
            piece.tensor.data.copy_(full[name][row : row + rows, col : col + cols])


def _table_entries(model: nn.Module) -> dict[str, Any]:
    found = {}
    for fqn, value in model.state_dict().items():
        *path, table, parameter = ["", *fqn.split(".")]
        if parameter == "weight" and path and path[-1] in ("embedding_bags", "embeddings"):
            found[table] = value
    return found


def _collection(cell: Cell) -> nn.Module:
    if cell.bags:
        bags = [
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=list(t.features),
                data_type=cell.data_type,
            )
            for t in cell.tables
        ]
        return EmbeddingBagCollection(tables=bags, device=torch.device("cpu"))
    sequences = [
        EmbeddingConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=list(t.features),
            data_type=cell.data_type,
        )
        for t in cell.tables
    ]
    return EmbeddingCollection(tables=sequences, device=torch.device("cpu"))


def _each(generator: Callable[[TableSpec], Generator]) -> dict[str, Generator]:
    return {table.name: generator(table) for table in TABLES}


def _hosts(world: int) -> int:
    return world // LOCAL[world]


def _host(world: int) -> list[int]:
    """The ranks of the last host."""
    return list(range(world - LOCAL[world], world))


def _table_column_wise(ranks: list[int]) -> Generator:
    """TorchRec has no helper for this type: column-wise over the ranks of one host, under the other
    name."""
    columns = column_wise(ranks=ranks)

    def generate(*args: Any) -> Any:
        sharding = columns(*args)
        sharding.sharding_type = "table_column_wise"
        return sharding

    return generate
