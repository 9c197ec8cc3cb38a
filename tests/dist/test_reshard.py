"""Masks follow tables that DMP.reshard moves between two steps: by global index, bit for bit.
(C11)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import LOCAL, Cell, batch, build, cells, gathered, set_weights, weights
from tests.dist.pieces import move as move_tensor
from tests.dist.pieces import sharded, watched
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask

pytestmark = pytest.mark.dist


def moves(world: int) -> dict[str, tuple[Cell, dict[str, Any]]]:
    """By sharding type the model before, and what moves where.

    TorchRec 1.8 can do this on gloo: the type stays, every shard of a changed table moves, no rank
    holds two of them.
    """
    every = cells(world)
    columns = every["column_wise"]
    # Forwards are right after a reshard only if the features were not in the order of the ranks
    # before.
    return {
        "table_wise": (
            every["table_wise"],
            {"user": table_wise(rank=0), "tiny": table_wise(rank=2 % world)},
        ),
        "column_wise": (
            replace(columns, plan={**columns.plan, "tiny": column_wise(ranks=[0, world - 1])}),
            {
                "item": column_wise(ranks=list(range(world))[::-1]),
                "tiny": column_wise(ranks=[1, 2 % world]),
            },
        ),
    }


def reshard(model: DistributedModelParallel, move: Mapping[str, Any], world: int) -> None:
    """Collective."""
    tables = model.module.sparse.tables
    plan = construct_module_sharding_plan(
        EmbeddingBagCollection(tables=[c for c in tables._embedding_bag_configs if c.name in move]),
        dict(move),
        sharder=EmbeddingBagCollectionSharder(),
        local_size=LOCAL[world],
        world_size=world,
        device_type="cpu",
    )
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    model.reshard(
        sharded_module_fqn="sparse.tables",
        changed_shard_to_params={"sparse.tables": (0.0, EmbeddingModuleShardingPlan(plan))},
    )


class Accumulate(BaseDataSparsifier):
    """A user's own: removes what is negative, and what was removed before."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        mask = self.get_mask(name)
        mask &= (data >= 0).to(mask.dtype)


def made(kind: str) -> BaseDataSparsifier:
    if kind == "own":
        return Accumulate()
    block, zeros = {"rows": ((1, ROW), None), "blocks": ((2, 3), None), "elements": ((4, 4), 5)}[
        kind
    ]
    return DataNormSparsifier(sparse_block_shape=block, zeros_per_block=zeros, norm="L2")


def check_pieces(
    sparsifier: BaseDataSparsifier, model: nn.Module, full: Mapping[str, Tensor]
) -> None:
    """This rank's masks are those of what it holds now."""
    for data in ModelTables(model).locate():
        name = data.name
        want = [((s.rect.row, s.rect.col), cut(full[name], s.rect)) for s in data.shards]
        got = sparsifier.local_masks(name)
        assert [at for at, _ in got] == [at for at, _ in want], name
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, want, strict=True)), name
        if len(want) == 1:
            assert torch.equal(sparsifier.get_mask(name), want[0][1])
        else:
            with pytest.raises(ValueError, match="local_masks"):
                sparsifier.get_mask(name)


def cut(full: Tensor, rect: Any) -> Tensor:
    return full[rect.row : rect.row_end, rect.col : rect.col_end]


def wanted(sparsifier: BaseDataSparsifier, name: str, before: Tensor, weight: Tensor) -> Tensor:
    """The mask of a step on ``weight`` after the mask ``before``, in one process."""
    if isinstance(sparsifier, Accumulate):
        return before & (weight >= 0).to(before.dtype)
    assert isinstance(sparsifier, DataNormSparsifier)
    config = sparsifier.data_groups[name]
    level, block, zeros = (
        config[key] for key in ("sparsity_level", "sparse_block_shape", "zeros_per_block")
    )
    return oracle_mask(weight, level, block, zeros, sparsifier.norm)


def moved() -> list[tuple[int, str, str, str]]:
    """World, sharding, kind of sparsifier, what is read between the move and the next mask
    update."""
    looks = ["full", "stats", "apply", "state"]
    return [
        (world, sharding, kind, look)
        for world in (2, 4)
        for s, sharding in enumerate(("table_wise", "column_wise"))
        for k, kind in enumerate(("rows", "blocks", "elements", "own"))
        for look in ("step", looks[(s + k) % 4])
        if (sharding, kind, world) != ("column_wise", "elements", 4)  # borders every 4 columns
    ]


@on_ranks()
@pytest.mark.parametrize(("world", "sharding", "kind", "look"), moved())
def test_masks_follow(world: int, sharding: str, kind: str, look: str) -> None:
    """A mask update, a move, a look (or none), and another update."""
    cell, move = moves(world)[sharding]
    model = build(cell)
    features = batch(cell, seed=dist.get_rank())
    sparsifier = made(kind)
    names = sparsifier.add_model(model)
    sparsifier.step()
    before = {name: sparsifier.full_mask(name) for name in names}
    prints = sparsifier.fingerprint()
    stats = {each.name: (each.removed_blocks, each.kept_bytes) for each in sparsifier.table_stats()}
    assert all(int((mask == 0).sum()) for mask in before.values())
    tilings = {data.name: data.tiling for data in ModelTables(model).locate()}
    reshard(model, move, world)
    assert {d.name for d in ModelTables(model).locate() if d.tiling != tilings[d.name]} == set(move)
    for name in move:  # not yet those of what is held here, so not handed out
        with pytest.raises(ValueError, match=rf"{name}.*has moved.*step"):
            sparsifier.local_masks(name)
        with pytest.raises(ValueError, match=r"has moved|shards on this rank"):
            sparsifier.get_data(name, return_original=False)

    if look == "stats":
        assert {
            each.name: (each.removed_blocks, each.kept_bytes) for each in sparsifier.table_stats()
        } == stats
    elif look == "apply":
        set_weights(model, weights(cell, seed=5))
        sparsifier.apply_masks()
        for name, weight in gathered(model).items():
            assert torch.equal(weight, weights(cell, seed=5)[name] * before[name])
    elif look == "state":
        saved = sparsifier.state_dict()["sharded"]["masks"]
        for data in ModelTables(model).locate():
            assert [piece["rect"] for piece in saved[data.name].kept] == [
                tuple(s.rect) for s in data.shards
            ]
    if look != "step":
        for name in names:
            assert torch.equal(sparsifier.full_mask(name), before[name]), name
        with watched() as sent:
            check_pieces(sparsifier, model, before)
        assert not sent.calls
        assert sparsifier.audit() == prints

    full = weights(cell, seed=9)
    set_weights(model, full)
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = 0.7
    sparsifier.step()
    after = {name: wanted(sparsifier, name, before[name], full[name]) for name in names}
    for name, weight in gathered(model).items():
        assert torch.equal(sparsifier.full_mask(name), after[name]), name
        assert torch.equal(weight, full[name] * after[name]), name
    check_pieces(sparsifier, model, after)
    sparsifier.audit()
    model(features).sum().backward()


@on_ranks(2)
def test_load() -> None:
    """A state saved before a move fits again after the move back, whatever the current sharding of
    the masks."""
    full = torch.randn(8, 8)
    here, there = [[(0, 0, 4, 8)], [(4, 0, 4, 8)]], [[(0, 0, 6, 8)], [(6, 0, 2, 8)]]
    sparsifier = DataNormSparsifier()
    table = sharded(full, here)
    sparsifier.add_data("table", table)
    sparsifier.step()
    saved, before = sparsifier.state_dict(), sparsifier.full_mask("table")
    move_tensor(table, torch.randn(8, 8), there)
    # Rank 1 has all it needs.
    with pytest.raises(ValueError, match=r"rank 0: ValueError: Table 'table'.*do not cover"):
        sparsifier.load_state_dict(saved)
    sparsifier.step()
    move_tensor(table, full, here)
    sparsifier.load_state_dict(saved)
    assert torch.equal(sparsifier.full_mask("table"), before)
    sparsifier.audit()
