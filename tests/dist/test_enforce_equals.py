"""An enforced model trains as one process with masks would; after ``detach()`` as a model without
enforcer.

The one process is :class:`Reference`: plain tables, the optimizers written out, masks of the
oracle. Then what FBGEMM writes behind all hooks, and what becomes of the optimizers' state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW
from tests.dist.cells import Cell, batch, build, gathered, plain, set_weights
from tests.dist.enforcing import (
    Run,
    cut,
    kernels,
    loss_of,
    optimizer_of,
    pieces,
    total,
    trained_cells,
)
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask

FUSED = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)
LR = 0.02
IN_FOUR = (
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "mixed",
    "ec_row_wise",
    "grid_shard",
)
"""Cells that a world of 4 compares with one process; a world of 2 compares all."""


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


class Reference:
    """One process: an unsharded model, a few lines for each optimizer, and masks multiplied in
    after every step.

    Args:
        cell: whose tables it has.
        fused: the optimizer of the tables in ``slices``; all else has SGD.

    Attributes:
        slices: the widths of a table's column slices: row-wise Adagrad keeps one sum for each row
            of a slice.
    """

    def __init__(self, cell: Cell, fused: type[torch.optim.Optimizer]) -> None:
        self.net = plain(cell)
        self.fused = fused
        self.slices: dict[str, list[int]] = {}
        collection = self.net.sparse.tables
        modules = collection.embedding_bags if cell.bags else collection.embeddings
        self.tables: dict[str, Tensor] = {name: module.weight for name, module in modules.items()}
        self.masks = {name: torch.ones_like(weight) for name, weight in self.tables.items()}
        self.sums = {name: torch.zeros_like(weight) for name, weight in self.tables.items()}

    def train(self, batches: list[Any]) -> Tensor:
        """One step on the batches of all ranks. Returns the loss."""
        self.net.zero_grad()
        loss = torch.stack([loss_of(self.net(features)) for features in batches]).mean()
        loss.backward()
        with torch.no_grad():
            for name, weight in self.tables.items():
                weight -= LR * self._direction(name, weight.grad)
                weight[self.masks[name] == 0] = 0
            for parameter in self.net.over.parameters():
                parameter -= LR * parameter.grad
        return loss.detach()

    def _direction(self, name: str, grad: Tensor) -> Tensor:
        widths = self.slices.get(name)
        if widths is None or self.fused is torch.optim.SGD:
            return grad
        squares = grad**2
        if self.fused is RowWiseAdagrad:
            parts = torch.split(squares, widths, dim=1)
            squares = torch.cat(
                [part.mean(1, keepdim=True).expand_as(part) for part in parts], dim=1
            )
        self.sums[name] += squares
        return grad / (self.sums[name].sqrt() + 1e-8)

    def step(self, level: float, block: tuple[int, Any], norm: str) -> None:
        for name, weight in self.tables.items():
            self.masks[name] = oracle_mask(weight.detach(), level, block, None, norm)
            weight.data[self.masks[name] == 0] = 0


def slices_of(run: Run) -> dict[str, list[int]]:
    """The widths of the column slices of every table with a fused optimizer, from TorchRec's
    plan."""
    found = {}
    for name, sharding in run.model.module.sparse.tables.module_sharding_plan.items():
        if sharding.sharding_type != "data_parallel":
            columns = {s.shard_offsets[1]: s.shard_sizes[1] for s in sharding.sharding_spec.shards}
            found[name] = [columns[start] for start in sorted(columns)]
    return found


def compared() -> list[tuple[int, str, int]]:
    """World, cell and a number that draws optimizer, block and norm."""
    found = []
    for world in (2, 4):
        for i, (name, cell) in enumerate(trained_cells(world).items()):
            # Column slices are trained by row-wise Adagrad, to which they matter.
            sliced = "column" in name or "two_shards" in name or name == "grid_shard"
            if cell.data_type is DataType.FP32 and (world == 2 or name in IN_FOUR):
                found.append((world, name, (2 + 3 * i) if sliced else i + world))
    return found


@on_ranks()
@pytest.mark.parametrize(("world", "name", "turn"), compared())
def test_as_one_process(world: int, name: str, turn: int) -> None:
    """20 steps with a mask update every 3; then one rank trains the reference, and compares."""
    cell, rank = trained_cells(world)[name], dist.get_rank()
    fused = FUSED[turn % 3] if cell.fused else torch.optim.SGD
    block, norm = ((1, ROW), (1, 4), (2, 3))[turn // 3 % 3], ("L1", "L2")[turn % 2]
    model = build(cell, fused, {"lr": LR})
    torch.manual_seed(0)
    alone = Reference(cell, fused)
    for mine, theirs in zip(
        model.module.over.parameters(), alone.net.over.parameters(), strict=True
    ):
        mine.data.copy_(theirs)
    zeroed = turn % 2 == 0
    of_all = optimizer_of(model, sgd, sgd)
    run = Run(model, block, norm, every=3, steps=15, optimizer=of_all, zeroed=zeroed)
    if cell.fused:
        alone.slices = slices_of(run)
    losses, masks = [], []
    for step in range(20):
        losses.append(run.train(batch(cell, seed=step * world + rank)))
        due = run.sparsifier.enable_mask_update
        level = run.sparsifier.data_groups[run.names[0]]["sparsity_level"]
        run.step()
        masks.append((level, run.reads.masks) if due else None)
    run.check_reads(revived=cell.fused, dropped=block[1] == ROW and not zeroed)
    world_losses = torch.stack(losses)
    dist.all_reduce(world_losses)
    trained = gathered(model)
    if turn % world != rank:
        return
    for step, moved in enumerate(masks):
        loss = alone.train([batch(cell, seed=step * world + each) for each in range(world)])
        torch.testing.assert_close(world_losses[step] / world, loss, rtol=1e-5, atol=1e-5)
        if moved is not None:
            alone.step(moved[0], block, norm)
            assert all(torch.equal(mask, moved[1][table]) for table, mask in alone.masks.items()), (
                f"{step=}"
            )
    assert sum(moved is not None for moved in masks) == 6
    for table, weight in trained.items():
        torch.testing.assert_close(weight, alone.tables[table].detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        model.module.over.parameters(), alone.net.over.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def same(one: nn.Module, other: nn.Module) -> None:
    """Tables and layers, bit for bit. Collective."""
    mine, theirs = gathered(one), gathered(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(torch.equal(a, b) for a, b in zip(layers(one), layers(other), strict=True))


def layers(model: nn.Module) -> list[Tensor]:
    return [parameter.data for parameter in model.module.over.parameters()]


def hooks(run: Run) -> list[Any]:
    """How many hooks there are, of every kind, on every module and optimizer, and what is replaced
    in FBGEMM's."""
    lookups = [
        lookup for module in run.model.modules() for lookup in getattr(module, "_lookups", ())
    ]
    modules = [*run.model.modules(), *(module for lookup in lookups for module in lookup.modules())]
    optimizers = [getattr(part, "_optimizer", part) for _, part in run.optimizer._optims]
    found: list[Any] = [
        [
            (key, len(value))
            for key, value in vars(each).items()
            if key.endswith("_hooks") and value is not None
        ]
        for each in (*modules, *optimizers)
    ]
    batches = [vars(kernel.emb_module) for kernel in kernels(run.model)]
    return found + [
        sorted(key for key, value in attributes.items() if callable(value))
        for attributes in batches
    ]


@on_ranks(2)
@pytest.mark.parametrize(
    "name", ["row_wise", "two_shards", "mixed", "ec_row_wise", "data_parallel"]
)
def test_detach(name: str) -> None:
    """Before anything is removed, an attached model trains as any; after detach() too, whatever was
    removed."""
    cell, rank = trained_cells(2)[name], dist.get_rank()
    batches = [batch(cell, seed=2 * step + rank) for step in range(6)]
    fused = FUSED[len(name) % 2 + 1]
    free, held = (build(cell, fused, {"lr": LR}) for _ in range(2))
    ours, theirs = Run(held, attach=False), Run(free, attach=False)
    before = hooks(ours)
    ours.enforcer.attach(ours.optimizer)
    assert hooks(ours) != before
    for step, features in enumerate(batches):
        ours.train(features)
        theirs.train(features)
        if step == 2:
            ours.step()
            same(held, free)
            ours.enforcer.detach()
            assert hooks(ours) == before
    same(held, free)

    free, held = (build(cell, torch.optim.SGD, {"lr": LR}) for _ in range(2))
    ours = Run(held, optimizer=optimizer_of(held, sgd, sgd))
    ours.move(0.6)
    for features in batches[:2]:
        ours.train(features)
    ours.check_reads(revived=False)
    ours.enforcer.detach()
    for table, weight in ours.raw().items():
        assert not weight[ours.reads.masks[table] == 0].any(), table
    set_weights(free, gathered(held))
    for mine, theirs_ in zip(layers(held), layers(free), strict=True):
        theirs_.copy_(mine)
    theirs = Run(free, optimizer=optimizer_of(free, sgd, sgd), attach=False)
    for features in batches:
        ours.train(features)
        theirs.train(features)
    same(held, free)
    assert total(ours.reads.wrong) > 0  # what was removed has come back


@on_ranks(2)
@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
@pytest.mark.parametrize(
    ("name", "fused", "block"),
    [
        ("row_wise", torch.optim.Adagrad, (1, 4)),
        ("two_shards", torch.optim.Adagrad, (2, 3)),
        ("column_wise", RowWiseAdagrad, (1, 4)),
        ("two_shards", RowWiseAdagrad, (1, 4)),
        ("mixed", RowWiseAdagrad, (1, ROW)),
    ],
)
def test_states(
    name: str, fused: type[torch.optim.Optimizer], block: tuple[int, Any], optimizer_state: str
) -> None:
    """The fused optimizers' state over mask updates."""
    cell = trained_cells(2)[name]
    model = build(cell, fused, {"lr": LR})
    run = Run(model, block, optimizer_state=optimizer_state)
    of_tables = next(part for _, part in run.optimizer._optims if hasattr(part, "_optimizer"))
    cleared = kept = 0

    def states() -> list[tuple[str, tuple[int, int], Tensor, list[Tensor]]]:
        found = []
        for kernel in kernels(model):
            if hasattr(kernel.emb_module, "split_optimizer_states"):
                of_kernel = kernel.emb_module.split_optimizer_states()
            else:  # data-parallel: Adam's
                of_kernel = [
                    [of_tables._optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")]
                    for _, p in sorted(of_tables.params.items())
                ]
            found += [(*p, list(s)) for p, s in zip(pieces(kernel), of_kernel, strict=True)]
        return found

    for level in (0.4, 0.7):
        for step in range(3):
            run.train(batch(cell, seed=2 * step + dist.get_rank(), size=20))
        before = [[state.clone() for state in each] for *_, each in states()]
        run.move(level)
        for (table, at, weight, after), old in zip(states(), before, strict=True):
            gone = cut(run.reads.masks[table], at, weight) == 0
            for now, was in zip(after, old, strict=True):
                away = gone if now.shape == gone.shape else gone.all(1).view(now.shape)
                expected = was.masked_fill(away, 0) if optimizer_state == "reset" else was
                if not torch.equal(now, expected):
                    run.faults.append(
                        f"{table} at {at}, {level=}: {int((now != expected).sum())} states are"
                        " wrong"
                    )
                cleared += int((was[away] != 0).sum())
                kept += int((was[~away] != 0).sum())
    run.check_reads(revived=False)
    assert total(cleared) > 0 and total(kept) > 0
