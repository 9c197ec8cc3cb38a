"""Every pruned weight that a forward reads is exactly 0, for every sharding, optimizer and kind of
batch. (C5)

Read inside the lookups, below all hooks, in models that really train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW
from tests.dist.cells import (
    Cell,
    TableSpec,
    batch,
    build,
    cells,
    set_weights,
    weights,
)
from tests.dist.enforcing import (
    SMALL,
    Run,
    cut,
    features_of,
    kernels,
    loss_of,
    pieces,
    small,
    total,
    trained_cells,
)
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import moves, reshard

FUSED = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)
KINDS = ("row_wise", "column_wise", "two_shards", "table_wise_one_rank", "mixed", "ec_row_wise")
FEW = ("table_wise", "row_wise", "column_wise")
GENERATORS: dict[str, Any] = {"row_wise": row_wise(), "column_wise": column_wise(ranks=[0, 1])}
BLOCKS: tuple[tuple[int, Any], ...] = ((1, ROW), (1, 4), (2, 3))
STEPS, EVERY = 20, 4


def trainings() -> list[tuple[int, str, int]]:
    """World, cell and a number that draws optimizer, block and norm: every optimizer of a cell,
    each in one world."""
    return [
        (world, name, i + j)
        for j, world in enumerate((1, 2, 4))
        for i, name in enumerate(trained_cells(world))
    ]


@on_ranks()
@pytest.mark.parametrize(("world", "name", "turn"), trainings())
def test_training(world: int, name: str, turn: int) -> None:
    """Five mask updates; in the second half weights are read from outside after every step, before
    it never."""
    cell = trained_cells(world)[name]
    half = cell.data_type is not DataType.FP32
    fused = torch.optim.SGD if half else FUSED[turn % 3]
    model = build(cell, fused, {"lr": 0.02 if half else 0.1})
    block, zeroed = BLOCKS[turn // 3 % 3], turn % 2 == 0
    run = Run(
        model,
        block,
        ("L1", "L2")[turn % 2],
        every=EVERY,
        steps=STEPS - EVERY,
        zeroed=zeroed,
    )
    dropped = block[1] == ROW and not zeroed
    for step in range(STEPS):
        run.train(batch(cell, seed=step * world + dist.get_rank()))
        run.step()
        if step >= STEPS // 2:
            run.check_given_out()
        elif step == STEPS // 2 - 1:
            run.check_reads(revived=cell.fused, dropped=dropped)
    run.check_reads(revived=cell.fused, dropped=dropped)
    assert run.moves == 5
    assert (
        run.sparsifier.data_groups["wide" if "wide" in run.names else "user"]["sparsity_level"]
        == 0.8
    )


def everything(tables: Sequence[TableSpec]) -> KeyedJaggedTensor:
    """A batch with every row of every table, three times."""
    ids = {f: [list(range(t.rows))] * 3 for t in tables for f in t.features}
    return features_of(tables, ids)


def hard_batches(tables: Sequence[TableSpec], rank: int) -> dict[str, KeyedJaggedTensor]:
    none = features_of(tables, {})
    some = {f: [[1, 2], [], [0]] for t in tables for f in t.features}
    shared = next(t for t in tables if len(t.features) == 2)
    return {
        "no ids on any rank": none,
        "no ids on rank 0": none if rank == 0 else features_of(tables, some),
        "ids of one feature": features_of(tables, {shared.features[1]: [[1], [2, 3]]}),
        "one id often": features_of(tables, {t.features[0]: [[1] * 10_000] for t in tables}),
        "more ids than rows": everything(tables),
        "the same ids for both features": features_of(
            tables, {key: [[2, 1], [2], [4, 2]] for key in shared.features}
        ),
    }


@on_ranks(2)
@pytest.mark.parametrize("name", KINDS)
def test_batches(name: str) -> None:
    cell = trained_cells(2)[name]
    run = Run(build(cell, FUSED[len(name) % 3]), (1, 4))
    run.train(everything(cell.tables))
    for level in (0.4, 0.7):
        run.move(level)
        for each in hard_batches(cell.tables, dist.get_rank()).values():
            run.train(each)
            run.train(each)
        run.check_given_out()
        run.train(everything(cell.tables))
    run.check_reads(revived=cell.fused)


@on_ranks(2)
def test_a_validation_in_inference_mode_sees_new_masks_first() -> None:
    """What is made for them must not be inference tensors: the next backward writes it."""
    cell = trained_cells(2)["row_wise"]
    run = Run(build(cell, FUSED[0]), (1, 4))
    batch = everything(cell.tables)
    run.train(batch)
    run.move(0.5)
    # FBGEMM's CPU kernel has no inference mode; the masks are read before it is called.
    with torch.inference_mode(), pytest.raises(NotImplementedError):
        run.model(batch)
    for _ in range(2):
        run.train(batch)
    run.check_reads(revived=True)


@on_ranks(2)
@pytest.mark.parametrize("name", FEW)
def test_ids_outside(name: str) -> None:
    """Ids that no table has: FBGEMM warns and reads row 0, in which something is removed. (-1 is an
    error to it.)"""
    cell = trained_cells(2)[name]
    full = weights(cell)
    for weight in full.values():
        weight[0, :4] = 1e-3
    model = build(cell, torch.optim.SGD, {"lr": 0.1})
    set_weights(model, full)
    run = Run(model, (1, 4))
    run.move(0.3)
    for outside in (999, -7, 10**12):
        run.train(
            features_of(cell.tables, {t.features[0]: [[outside, 1], [2]] for t in cell.tables})
        )
        run.train(
            features_of(cell.tables, {t.features[0]: [[outside], [outside]] for t in cell.tables})
        )
    run.check_given_out()
    run.check_reads()


@on_ranks(2)
@pytest.mark.parametrize("name", KINDS)
def test_orders(name: str) -> None:
    """Forwards and backwards in many orders, with mask updates and reads of weights between
    them."""
    cell = trained_cells(2)[name]
    model = build(cell, FUSED[len(name) % 3])
    run = Run(model, (1, 4), "L1")
    first, second = (batch(cell, seed=2 * i + dist.get_rank()) for i in (0, 1))

    def forward(features: KeyedJaggedTensor) -> Tensor:
        return loss_of(model(features))

    run.train(everything(cell.tables))
    for level in (0.3, 0.6):
        run.move(level)
        for _ in range(2):  # gradients accumulate
            forward(first).backward()
            forward(second).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        one, other = forward(first), forward(second)
        other.backward()
        one.backward()
        one, other = forward(first), forward(second)
        one.backward()
        run.check_given_out()
        other.backward()
        run.check_given_out()
        one, other = forward(first), forward(second)
        (one + other).backward()
        one = forward(first)
        one.backward(retain_graph=True)
        run.check_given_out()
        one.backward()
        run.check_given_out()
        one = forward(first)
        run.check_given_out()
        with torch.no_grad():
            forward(second)
        model.eval()
        forward(everything(cell.tables))
        model.train()
        one.backward()
        with torch.no_grad():
            forward(everything(cell.tables))
        one = forward(first)
        run.move(level + 0.2)
        one.backward()
        run.check_given_out()
        run.train(first)
        run.enforcer.settle()
        for kernel in kernels(model) if cell.fused else ():
            for table, at, weight in pieces(kernel):
                assert not weight[cut(run.reads.masks[table], at, weight) == 0].any()
        run.train(everything(cell.tables))
    run.check_reads(revived=cell.fused)


@on_ranks(2)
@pytest.mark.parametrize("name", FEW)
def test_loads(name: str) -> None:
    """Loaded weights, of which pruned ones are not 0."""
    cell = trained_cells(2)[name]
    model = build(cell, FUSED[len(name) % 3])
    run = Run(model, (2, 3))
    run.move(0.5)
    for settled in (False, True):
        run.train(batch(cell, seed=dist.get_rank()))
        run.enforcer.settle()
        model.load_state_dict(build(cell).state_dict())
        if settled:
            run.check_given_out()
        run.train(everything(cell.tables))
    run.check_reads()


@on_ranks(2)
@pytest.mark.parametrize("name", FEW)
def test_scores(name: str) -> None:
    """Pruned weights that came back, larger than all others, do not count in a mask update."""
    cell = trained_cells(2)[name]
    run = Run(build(cell, torch.optim.SGD, {"lr": 1e4}), (1, 4))
    run.move(0.5)
    for level in (0.5, 0.6):
        run.train(everything(cell.tables))
        run.train(everything(cell.tables))
        run.move(level)
    run.check_reads()


@on_ranks(2)
@pytest.mark.parametrize("name", GENERATORS)
def test_weighted(name: str) -> None:
    generator = GENERATORS[name]
    run = Run(small({"a": generator, "b": generator}, weighted=True), (1, 4))
    ids = everything(SMALL)
    for level in (0.0, 0.5, 0.7):
        run.move(level)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            given = torch.randn(ids.values().numel(), generator=generator)
            given[::5] = 0
            run.train(KeyedJaggedTensor(ids.keys(), ids.values(), given, ids.lengths()))
    run.check_given_out()
    run.check_reads()


@on_ranks(2)
@pytest.mark.parametrize("name", GENERATORS)
def test_pipeline(name: str) -> None:
    """TorchRec's pipeline sends ids of the next batches while it trains this one."""
    run = Run(small({"a": GENERATORS[name], "b": table_wise(rank=1)}), (1, 4), every=2, steps=10)
    pipeline = TrainPipelineSparseDist(run.model, run.optimizer, torch.device("cpu"))
    steps = 14
    cell = Cell("small", 2, {}, SMALL)
    batches = iter([batch(cell, seed=2 * step + dist.get_rank()) for step in range(steps + 2)])
    for step in range(steps):
        pipeline.progress(batches)
        run.step()
        if step % 3 == 2:
            run.check_given_out()
    run.check_reads()
    assert run.moves == 6


@on_ranks(2)
@pytest.mark.parametrize("name", FEW)
def test_without_an_enforcer(name: str) -> None:
    """The checks can fail: without an enforcer pruned weights come back, and are read."""
    cell = trained_cells(2)[name]
    run = Run(build(cell), attach=False)
    run.move(0.6)
    for step in range(3):
        run.train(batch(cell, seed=2 * step + dist.get_rank()))
    run.check_given_out()
    assert total(run.reads.wrong) > 0
    assert total(len(run.faults)) > 0


@on_ranks(2, 4)
@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
@pytest.mark.parametrize("then", ["forward", "step"])
def test_reshard(world: int, sharding: str, then: str) -> None:
    """Tables move between two steps; the next forward, or the next mask update, finds them."""
    cell, move = moves(world)[sharding]
    model = build(cell, torch.optim.SGD if then == "step" else RowWiseAdagrad, {"lr": 0.1})
    run = Run(model, (1, 4))
    run.move(0.5)
    batches = [batch(cell, seed=world * step + dist.get_rank(), size=20) for step in range(4)]
    run.train(batches[0])
    reshard(model, move, world)
    run.reads.follow(model)
    if then == "step":
        run.move(0.6)
    with torch.no_grad():
        model(batches[1])
    for table, weight in run.raw().items():
        assert not weight[run.reads.masks[table] == 0].any(), table
    for features in batches:
        run.train(features)
    run.move(0.7)
    run.train(batches[0])
    run.check_given_out()
    run.train(batches[1])
    run.check_reads(dropped=sharding == "column_wise")  # a shard may be as narrow as a block


@on_ranks(2, 4)
def test_reshard_between_two_of_the_ranks(world: int) -> None:
    """Tables move between two ranks of several; the others never hold any."""
    cell = cells(world)["table_wise_one_rank"]
    model = build(cell, torch.optim.SGD, {"lr": 0.1})
    run = Run(model, (1, 4))
    run.move(0.5)
    features = batch(cell, seed=dist.get_rank())
    run.train(features)
    reshard(model, {table.name: table_wise(rank=0) for table in cell.tables}, world)
    run.reads.follow(model)
    for _ in range(3):
        run.train(features)
    run.check_given_out()
    run.check_reads()


@on_ranks(2, 4)
def test_two_reshards_in_a_row(world: int) -> None:
    """Two moves with nothing between them."""
    cell, move = moves(world)["table_wise"]
    model = build(cell, torch.optim.SGD, {"lr": 0.1})
    run = Run(model, (1, 4))
    run.move(0.5)
    features = batch(cell, seed=dist.get_rank())
    run.train(features)
    for table, generator in move.items():
        reshard(model, {table: generator}, world)
    run.reads.follow(model)
    for _ in range(3):
        run.train(features)
    run.check_given_out()
    run.check_reads()
