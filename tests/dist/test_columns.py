"""Whole columns, ``(COL, n)``: blocks that every row border cuts, on every sharding and world.
(C1-C3, C5)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import row_wise

from dist_sparse import COL, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import Cell, TableSpec, batch, build, cells, every_cell, gathered, set_weights
from tests.dist.enforcing import Run, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import moves, reshard
from tests.oracle import oracle_mask

BLOCKS: tuple[tuple[Any, int], ...] = ((COL, 1), (COL, 3))


@on_ranks()
@pytest.mark.parametrize(("world", "name"), every_cell())
def test_masks_equal_the_oracle(world: int, name: str) -> None:
    cell = cells(world)[name]
    model = build(cell)
    original = gathered(model)
    for turn, block in enumerate(BLOCKS):
        norm = ("L1", "L2")[turn]
        sparsifier = DataNormSparsifier(sparse_block_shape=block, norm=norm)  # type: ignore[arg-type]
        names = sparsifier.add_model(model)
        for level, weights in (
            (0.4, original),
            (0.7, {table: w.abs().ceil() for table, w in original.items()}),  # ties
            (1.0, original),
        ):
            set_weights(model, weights)
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = level
            sparsifier.step()
            after = gathered(model)
            for table, full in weights.items():
                want = oracle_mask(full, level, block, None, norm)
                assert torch.equal(sparsifier.full_mask(table), want), (
                    f"{table}, {block=}, {level=}"
                )
                assert torch.equal(
                    after[table], torch.where(want != 0, full, torch.zeros_like(full))
                )
        alone = DataNormSparsifier(list(weights.items()), 1.0, block, None, norm)  # type: ignore[arg-type]
        alone.step()
        assert sparsifier.audit() == {table: alone.fingerprint()[table] for table in names}
        dead = sparsifier.dead_rows()
        assert dead == {table: len(weights[table]) for table in dead}


@on_ranks(4)
def test_a_mask_update_sends_no_elements() -> None:
    """One float64 of each column and shard, unlike the elements of other blocks that a row border
    cuts."""
    sent = []
    for rows in (100, 30_000):
        model = build(
            Cell("rows", 4, {"user": row_wise()}, (TableSpec("user", rows, 8, ("user_id",)),))
        )
        sparsifier = DataNormSparsifier(sparse_block_shape="col")
        sparsifier.add_model(model)
        reset_traffic()
        sparsifier.step()
        assert traffic().collectives <= 10
        sent.append(traffic().bytes)
    # Histograms; the elements of a rank's rows take 8 bytes each.
    assert max(sent) < 30_000 * 8 / 4, sent


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("row_wise", 0), ("mixed", 1), ("ec_column_wise", 0), ("data_parallel", 1)],
)
def test_removed_columns_stay_zero_while_training(name: str, optimizer: int) -> None:
    cell = trained_cells(2)[name]
    model = build(cell, (torch.optim.SGD, torch.optim.Adagrad)[optimizer], {"lr": 0.1})
    run = Run(model, (COL, 1), every=3, steps=12)  # type: ignore[arg-type]
    for step in range(15):
        run.train(batch(cell, seed=2 * step + dist.get_rank()))
        run.step()
        if step % 4 == 3:
            run.check_given_out()
    run.check_reads(revived=cell.fused)
    assert run.moves == 5


@on_ranks(2)
def test_masks_follow_their_shards_and_load() -> None:
    cell, moved = moves(2)["column_wise"]
    model = build(cell)
    sparsifier, other = (DataNormSparsifier(sparse_block_shape="col") for _ in range(2))
    sparsifier.add_model(model)
    sparsifier.step()
    before = sparsifier.fingerprint()
    reshard(model, moved, 2)
    assert sparsifier.fingerprint() == before
    other.add_model(model)
    other.load_state_dict(sparsifier.state_dict())
    assert other.audit() == before
