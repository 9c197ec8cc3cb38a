"""A real DMPCollection, TorchRec's 2-D parallelism, on a CPU.

TorchRec builds it for CUDA or MTIA only. Two of its names are patched while it is built, not
longer: the device that it asserts, and the placement of shards on ``cpu:0``, which torch holds for
another device than ``cpu``. What is built is an ordinary DMPCollection that trains and averages
over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import model_parallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import SEQUENCES, TABLES, Cell, Net, weights

__all__ = ["COPIES", "SHARE", "build_copies", "copied_cells", "first_copy"]

SHARE = 2
"""Ranks that share one copy of the model; a world of 4 holds two."""

COPIES = 2


def copied_cells() -> dict[str, Cell]:
    """The cells that can be copied; their world is that of one copy."""
    mixed = {
        "user": row_wise(),
        "item": column_wise(ranks=[1, 0]),
        "tiny": data_parallel(),
        "word": table_wise(rank=1),
    }
    made = [
        Cell(
            "table_wise", SHARE, {t.name: table_wise(rank=i % SHARE) for i, t in enumerate(TABLES)}
        ),
        Cell("row_wise", SHARE, {t.name: row_wise() for t in TABLES}),
        Cell("column_wise", SHARE, {t.name: column_wise(ranks=[0, 1]) for t in TABLES}),
        Cell("mixed", SHARE, mixed),
        Cell("ec_row_wise", SHARE, {t.name: row_wise() for t in SEQUENCES}, SEQUENCES, bags=False),
    ]
    return {cell.name: cell for cell in made}


def build_copies(
    cell: Cell,
    optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
    optimizer_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> DMPCollection:
    """The model of a cell, twice over a world of 4, both copies with the weights of
    :func:`weights`. Collective."""
    torch.manual_seed(0)
    net = Net(cell)
    collection = net.sparse.tables
    tables = collection.embedding_bags if cell.bags else collection.embeddings
    if cell.fused:
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
        local_size=SHARE,
        world_size=SHARE,
        device_type="cpu",
    )
    with _on_cpu():
        model = DMPCollection(
            module=net,
            device=torch.device("cuda"),
            plan=ShardingPlan({"sparse.tables": plan}),
            world_size=SHARE * COPIES,
            sharding_group_size=SHARE,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
            **options,
        )
    full = weights(cell)
    for data in ModelTables(model).locate():
        for (row, col, rows, cols), tensor in data.shards:
            tensor.copy_(full[data.name][row : row + rows, col : col + cols])
    return model


def first_copy(model: DMPCollection) -> dict[str, Tensor]:
    """The global weights of the first copy, by table name, on every rank. Collective."""
    mine = [
        (data.name, data.shape, data.owned(dist.get_rank()), data.shards)
        for data in ModelTables(model).locate()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, [(n, s, [x for x in shards if x.rect in owned]) for n, s, owned, shards in mine]
    )
    full: dict[str, Tensor] = {}
    for name, shape, shards in (entry for entries in everyone for entry in entries):
        for rect, tensor in shards:
            whole = full.setdefault(name, torch.full(shape, torch.nan))
            whole[rect.row : rect.row_end, rect.col : rect.col_end] = tensor
    return full


@contextmanager
def _on_cpu() -> Iterator[None]:
    with (
        mock.patch.multiple(
            DMPCollection, create=True, _device=_always_cpu("_device"), device=_always_cpu("device")
        ),
        mock.patch.object(
            model_parallel, "_remote_device", lambda text: _remote_device(text.rsplit(":", 1)[0])
        ),
    ):
        yield


def _always_cpu(name: str) -> property:
    """An attribute that holds the CPU whatever is written; in the object's own dictionary, so that
    it outlives this."""

    def write(owner: Any, value: object) -> None:
        owner.__dict__[name] = torch.device("cpu")

    return property(lambda owner: owner.__dict__[name], write)
