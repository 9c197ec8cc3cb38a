"""Compact collections under DistributedModelParallel: what they give and how they train on, beside a masked model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import DataNormSparsifier, MaskEnforcer, compact
from dist_sparse.serving.kept_rows import kept_rows
from tests.dist.cells import Cell, batch, build, cells, gathered
from tests.dist.plugin import on_ranks

CELLS = {
    1: ("column_wise", "ec_row_wise"),
    2: ("table_wise", "row_wise", "row_wise_dense_kernel", "column_wise_fp16", "two_shards", "data_parallel", "mixed"),
    4: ("row_wise", "table_row_wise", "table_column_wise", "grid_shard", "ec_column_wise", "mixed"),
}
EVERY = [(world, name) for world, names in CELLS.items() for name in names]


ROWS_ARE_CUT = ("row_wise", "table_row_wise", "grid_shard", "mixed", "ec_row_wise", "row_wise_dense_kernel")
"""Where kept rows are cut into blocks again, the ranks that add up a bag have other parts of it: other roundings."""

OTHER_ORDER = (*ROWS_ARE_CUT, "table_column_wise")
"""FBGEMM adds the gradients of an id that a batch has three times in an order that depends on the ids beside it."""


def check_equal(mine: Tensor, other: Tensor, exact: bool) -> None:
    tolerance = 0.0 if exact or dist.get_world_size() == 1 else 2e-6
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def cell_of(world: int, name: str) -> Cell:
    """A cell whose tables give every rank a row: with an empty table beside others of another width, FBGEMM's CPU
    backward writes other rows than it was given, in the masked model."""
    cell = cells(world)[name]
    return replace(cell, tables=tuple(replace(table, rows=max(table.rows, 8)) for table in cell.tables))


class Run:
    """A model in training, with removed rows."""

    def __init__(self, cell: Cell, optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad, level: float = 0.6) -> None:
        self.cell, self.steps = cell, 0
        self.model = build(cell, optimizer, {"lr": 0.1})
        plain = [p for p in self.model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        self.optimizer = torch.optim.Adagrad(plain, lr=0.1)
        self.prune(level)

    def prune(self, level: float) -> None:
        self.sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=(1, "ROW"), norm="L2")
        self.names = self.sparsifier.add_model(self.model)
        self.sparsifier.step()
        self.enforcer = MaskEnforcer(self.sparsifier).attach(self.optimizer, self.model.fused_optimizer)

    def train(self, steps: int) -> list[Tensor]:
        found = []
        for _ in range(steps):
            self.steps += 1
            self.optimizer.zero_grad()
            found.append(self.model(batch(self.cell, seed=100 * self.steps + dist.get_rank())))
            found[-1].square().mean().backward()
            self.optimizer.step()
        return [each.detach() for each in found]

    def compact(self, **how: Any) -> None:
        self.model = compact(self.model, self.sparsifier, **how)


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_gives_and_trains_as_before(world: int, name: str) -> None:
    cell = cell_of(world, name)
    masked, small = Run(cell), Run(cell)
    for run in (masked, small):
        run.train(3)
        for group in run.model.fused_optimizer.param_groups:
            group["lr"] = 0.05
        run.model.fused_optimizer.step()
    kept = kept_rows(small.sparsifier)
    features = batch(cell, seed=dist.get_rank())
    dense = dict(small.model.module.over.named_parameters())
    before = small.model(features)
    small.compact()
    check_equal(small.model(features), before, name not in ROWS_ARE_CUT)
    assert not small.enforcer.attached and not small.sparsifier.data_groups
    assert all(parameter is dense[key] for key, parameter in small.model.module.over.named_parameters())
    for mine, other in zip(small.train(20), masked.train(20), strict=True):
        check_equal(mine, other, name not in OTHER_ORDER)
    masked.enforcer.settle()
    whole, rows = gathered(masked.model), gathered(small.model)
    for table, flags in kept.items():
        count = int(flags.sum())
        assert 0 < count < len(flags)
        check_equal(rows[table][:count], whole[table][flags], name not in OTHER_ORDER)
        assert len(rows[table]) < count + world and not rows[table][count:].any()


@on_ranks(1, 2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers(world: int, optimizer: type[torch.optim.Optimizer]) -> None:
    masked, small = (Run(cell_of(world, "row_wise"), optimizer) for _ in range(2))
    assert masked.train(3) and small.train(3)
    small.compact()
    for mine, other in zip(small.train(5), masked.train(5), strict=True):
        check_equal(mine, other, False)
