"""A plan is the same on every sharding, rows that training has never touched included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import plan
from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import batch, build, cells, gathered
from tests.dist.plugin import on_ranks

WORLD = 2


def hardly_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """All touched rows minus those with a tenth of the mean sum in one of their shards, from the
    sums of all ranks."""
    held: dict[str, list[tuple[int, Tensor]]] = {}
    known = fused_sums(model)
    for data in ModelTables(model).locate():
        held[data.name] = []
        for rect, weight in data.shards:
            if not rect.numel:
                continue
            if weight.data_ptr() in known:
                sums = known[weight.data_ptr()][0]
            else:
                [sums] = [
                    state["sum"] for p, state in optimizer.state.items() if p.shape == weight.shape
                ]
            held[data.name].append((rect.row, sums.reshape(rect.rows, -1).amax(1)))
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, held)
    found = {}
    for name in held:
        shards = [shard for of_rank in everyone for shard in of_rank[name]]
        every = torch.cat([sums for _, sums in shards])
        floor = every.sum().item() / int((every > 0).sum()) / 10
        most: dict[int, float] = {}
        for first, sums in shards:
            for row, value in enumerate(sums.tolist(), start=first):
                most[row] = max(most.get(row, 0.0), value)
        found[name] = sum(0 < value < floor for value in most.values())
    return found


@on_ranks(WORLD)
@pytest.mark.parametrize("name", ["mixed", "column_wise_uneven"])
def test_untouched_rows(name: str) -> None:
    cell = cells(WORLD)[name]
    model, rank = build(cell), dist.get_rank()
    # Of the replicated table; it lists the fused ones too.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    assert plan(model, "20%", optimizer=optimizer).untouched == {}, "nothing was trained"
    before = gathered(model)
    model(batch(cell, seed=rank)).sum().backward()
    optimizer.step()
    after = gathered(model)
    same = {
        table.name: int((before[table.name] == after[table.name]).all(1).sum())
        for table in cell.tables
    }
    answer = plan(model, "20%", optimizer=optimizer)
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, answer)
    assert told == [answer] * WORLD and answer.untouched == same and 0 < same["user"] < 37
    assert answer.hardly_read == hardly_read(model, optimizer)
    known = plan(model, "20%").untouched
    assert known == {
        name: rows for name, rows in same.items() if name != "tiny" or cell.name != "mixed"
    }


@on_ranks(WORLD)
def test_errors() -> None:
    model, rank = build(cells(WORLD)["mixed"]), dist.get_rank()
    with pytest.raises(ValueError, match=r"budget, rotate is .*0\.2.* on rank 1 and .*0\.1"):
        plan(model, "20%" if rank else "10%")
    with pytest.raises(ValueError, match="rank 1: ValueError: Invalid budget='x'"):
        plan(model, "x" if rank else "20%")
