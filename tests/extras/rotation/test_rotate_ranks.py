"""Rotated tables compute what they did before, on every sharding and world, and lose what a float64
oracle says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import DataNormSparsifier, ImportanceSparsifier, MaskEnforcer, sparsify
from dist_sparse.extras.rotation import Rotation, rotate
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.tables.modules import modules_by_path
from tests.dist.cells import Cell, batch, build, cells, every_cell, gathered, set_weights, weights
from tests.dist.enforcing import SMALL, kernels, loss_of, optimizer_of, pieces, small
from tests.dist.plugin import on_ranks
from tests.dist.test_enforce import GENERATORS
from tests.dist.test_reshard import moves, reshard
from tests.keywords import nested


def bases(model: nn.Module) -> dict[str, Tensor]:
    """By table the basis that its output is turned back by."""
    held = modules_by_path(model)[""].named_buffers(recurse=False)
    return {
        name.removeprefix("rotation_of_"): basis
        for name, basis in held
        if name.startswith("rotation_of_")
    }


def states(model: nn.Module) -> list[Tensor]:
    """Fused optimizer state on this rank."""
    batches = [
        kernel.emb_module
        for kernel in kernels(model)
        if hasattr(kernel.emb_module, "split_optimizer_states")
    ]
    return [
        state.clone()
        for each in batches
        for of_table in each.split_optimizer_states()
        for state in of_table
    ]


def prepared(model: nn.Module, tables: Any = "table") -> tuple[DataNormSparsifier, MaskEnforcer]:
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="col", norm="L2")
    sparsifier.add_model(model)
    enforcer = MaskEnforcer(sparsifier, "reset").attach(optimizer_of(model))
    rotate(sparsifier, tables)
    return sparsifier, enforcer


def step_to(sparsifier: DataNormSparsifier, level: float) -> None:
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level
    sparsifier.step()


def oracle(weight: Tensor, kept: int) -> Tensor:
    """The nearest matrix of rank ``kept``."""
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return u[:, :kept] * s[:kept] @ v[:kept]


def near(got: Mapping[str, Tensor], want: Mapping[str, Tensor], atol: float = 1e-5) -> None:
    for name, full in want.items():
        torch.testing.assert_close(
            got[name].double(),
            full.double(),
            rtol=1e-5,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@on_ranks()
@pytest.mark.parametrize(("world", "name"), every_cell())
def test_each_table_by_itself(world: int, name: str) -> None:
    cell = cells(world)[name]
    model = build(cell)
    exact = {"fp16": 4e-3, "bf16": 4e-2}.get(name.rpartition("_")[2], 1e-5)
    features = batch(cell, seed=dist.get_rank())
    original = gathered(model)
    outputs = model(features).detach() if cell.trains else torch.zeros(1)
    sparsifier, enforcer = prepared(model)
    before = states(model)
    step_to(sparsifier, 0.0)
    for old, new in zip(before, states(model), strict=True):
        assert torch.equal(old, new)  # a number a row

    # Turned back, weights and outputs are what they were; columns hold less and less; all ranks use
    # the same bytes.
    rotated, turns = gathered(model), bases(model)
    near(
        {table: rotated[table].double() @ turns[table].T.double() for table in rotated},
        original,
        exact,
    )
    if cell.trains:
        torch.testing.assert_close(model(features).detach(), outputs, rtol=1e-5, atol=exact)
    for table, full in rotated.items():
        held = full.double().square().sum(0)
        assert bool((held.diff() <= held[0] * exact).all()), table
    raw = {table: basis.numpy().tobytes() for table, basis in turns.items()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, raw)
    assert everyone == [raw] * world and set(raw) == set(original)

    # What is left after a cut is the best that so few columns can hold.
    step_to(sparsifier, 0.5)
    left, turns = gathered(model), bases(model)
    for table, full in left.items():
        columns = full.shape[1]
        assert torch.equal(
            sparsifier.full_mask(table)[0],
            (torch.arange(columns) < columns - columns // 2).to(torch.int8),
        )
        assert not full[:, columns - columns // 2 :].any()
    near(
        {table: full.double() @ turns[table].T.double() for table, full in left.items()},
        {
            table: oracle(original[table], full.shape[1] - full.shape[1] // 2)
            for table, full in left.items()
        },
        10 * exact,
    )
    enforcer.detach()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    "name", ["ec_row_wise", "ec_column_wise", "ec_table_wise", "ec_data_parallel"]
)
@pytest.mark.parametrize(
    "tables", [[["user", "item"]], [["user", "item", "word"], ["tiny"]]], ids=["pair", "three"]
)
def test_tables_that_meet_in_dot_products(world: int, name: str, tables: list[list[str]]) -> None:
    model = build(cells(world)[name])
    before = gathered(model)
    sparsifier, _ = prepared(model, tables)
    step_to(sparsifier, 0.0)
    after = gathered(model)
    group = tables[0]
    for i, one in enumerate(group):
        for other in group[i + 1 :]:
            torch.testing.assert_close(
                after[one] @ after[other].T, before[one] @ before[other].T, rtol=1e-5, atol=3e-5
            )
    assert list(bases(model)) == (["tiny"] if len(tables) > 1 else [])
    if len(group) == 2:  # both hold the same, which is what the scores have
        scores = torch.linalg.svdvals(before["user"].double() @ before["item"].double().T)
        for table in group:
            held = after[table].double().square().sum(0)[: len(scores)]
            torch.testing.assert_close(held, scores[: len(held)], rtol=1e-3, atol=1e-3)
    step_to(sparsifier, 0.75)
    masks = [sparsifier.full_mask(table)[0].tolist() for table in group]
    assert masks == [[1] * 4 + [0] * 12] * len(group)
    if len(group) == 2:
        left = gathered(model)
        torch.testing.assert_close(
            left["user"].double() @ left["item"].double().T,
            oracle(before["user"].double() @ before["item"].double().T, 4),
            rtol=1e-4,
            atol=1e-4,
        )
    if "word" not in group:
        torch.testing.assert_close(after["word"], before["word"], rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "mixed", "ec_table_wise"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad])
def test_training_goes_on_as_if_nothing_had_happened(name: str, optimizer: Any) -> None:
    """A row-wise optimizer's numbers of a shard of some columns would be those of others: SGD alone
    for these."""
    cell = cells(2)[name]
    if optimizer is RowWiseAdagrad and name in ("column_wise", "mixed"):
        return
    found = []
    for rotates in (False, True):
        model = build(cell, optimizer, {"lr": 0.5 if cell.bags else 0.1})
        set_weights(model, weights(cell))
        optim = optimizer_of(
            model, lambda p: torch.optim.SGD(p, lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)
        )
        sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="col", norm="L2")
        sparsifier.add_model(model)
        with MaskEnforcer(sparsifier).attach(optim):
            if rotates:
                rotate(sparsifier)
            for step in range(20):
                if step in (0, 7):
                    sparsifier.step()
                optim.zero_grad()
                loss_of(model(batch(cell, seed=2 * step + dist.get_rank()))).backward()
                optim.step()
        turns = bases(model)
        found.append(
            {
                t: w.double() @ turns[t].T.double() if rotates else w
                for t, w in gathered(model).items()
            }
        )
    near(found[1], found[0], 1e-4)
    assert not torch.allclose(found[0]["user"].double(), weights(cell)["user"].double(), atol=1e-2)


@on_ranks(2)
@pytest.mark.parametrize("name", GENERATORS)
def test_pipeline(name: str) -> None:
    """TorchRec's pipeline replaces the forwards of collections: their outputs are turned back all
    the same."""
    found, cell = [], Cell("small", 2, {}, SMALL)
    for level in (None, 0.0, 0.5):
        model = small({"a": GENERATORS[name], "b": table_wise(rank=1)})
        optim = optimizer_of(model, layers=lambda p: torch.optim.SGD(p, lr=0.1))
        pipeline = TrainPipelineSparseDist(model, optim, torch.device("cpu"))
        sparsifier = DataNormSparsifier(sparsity_level=level or 0.0, sparse_block_shape="col")
        sparsifier.add_model(model)
        enforcer = MaskEnforcer(sparsifier).attach(optim)
        if level is not None:
            rotate(sparsifier)
        batches = iter([batch(cell, seed=2 * step + dist.get_rank()) for step in range(10)])
        for step in range(8):
            pipeline.progress(batches)
            if step % 3 == 2:
                sparsifier.step()
        enforcer.settle()
        turns = bases(model)
        left = gathered(model)
        found.append(
            {
                table: full.double() @ turns[table].T.double() if turns else full
                for table, full in left.items()
            }
        )
    near(found[1], found[0], 1e-4)
    assert all(not full[:, full.shape[1] // 2 :].any() for full in left.values())


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "table_wise"])
def test_rows_weigh_what_they_were_looked_up(name: str) -> None:
    """The basis is that of the rows, each as often as lookups counted it and once more."""
    cell = cells(2)[name]
    model = build(cell, torch.optim.SGD, {"lr": 0.5})
    sparsifier = ImportanceSparsifier(
        sparsity_level=0.0, sparse_block_shape="col", score="frequency"
    )
    sparsifier.add_model(model)
    optim = optimizer_of(model)
    with MaskEnforcer(sparsifier).attach(optim):
        rotate(sparsifier)
        for step in range(3):
            loss_of(model(batch(cell, seed=2 * step + dist.get_rank()))).backward()
        ids = [batch(cell, seed=seed) for seed in range(6)]
        before = gathered(model)
        sparsifier.step()
        after = gathered(model)
    for table in cell.tables:
        looked_up = torch.cat(
            [features[feature].values() for features in ids for feature in table.features]
        )
        weight = 1 + torch.bincount(looked_up, minlength=table.rows).double().unsqueeze(1)
        values = torch.linalg.eigvalsh(
            (before[table.name] * weight).T.double() @ before[table.name].double()
        ).flip(0)
        held = (after[table.name].double().square() * weight).sum(0)
        torch.testing.assert_close(held, values, rtol=1e-4, atol=1e-4 * float(values[0]))


@on_ranks(2)
def test_tables_share_their_messages() -> None:
    """One all-reduce for all Gram matrices, one for all bases, beside what a mask update
    takes anyway."""
    taken = []
    for tables in (None, [["user"]], "table"):
        model = build(cells(2)["row_wise"])
        # No rounds of selection.
        sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="col")
        sparsifier.add_model(model)
        with MaskEnforcer(sparsifier, "reset").attach(optimizer_of(model)):
            if tables is not None:
                rotate(sparsifier, tables)
            reset_traffic()
            sparsifier.step()
            taken.append(traffic().collectives)
    assert taken[1] == taken[2] == taken[0] + 5, taken  # three of them say that all ranks go on


@on_ranks(2)
def test_bases_follow_reshards_and_states() -> None:
    """The bases are saved with the weights, and stay when TorchRec moves shards."""
    cell, moved = moves(2)["column_wise"]
    model, features = build(cell), batch(cell, seed=dist.get_rank())
    sparsifier, _ = prepared(model)
    step_to(sparsifier, 0.25)
    wanted = model(features).detach()
    reshard(model, moved, 2)
    torch.testing.assert_close(model(features).detach(), wanted)
    step_to(sparsifier, 0.25)
    torch.testing.assert_close(model(features).detach(), wanted, rtol=1e-5, atol=1e-5)

    other = build(cells(2)["row_wise"])
    prepared(other)
    other.load_state_dict(
        {
            **other.state_dict(),
            **{k: v for k, v in model.state_dict().items() if "rotation_of_" in k},
        }
    )
    assert all(torch.equal(basis, bases(model)[name]) for name, basis in bases(other).items())
    set_weights(other, gathered(model))
    torch.testing.assert_close(other(features).detach(), wanted, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_refused_on_every_rank() -> None:
    model = build(cells(2)["mixed"])
    sparsifier = DataNormSparsifier(sparse_block_shape="col")
    sparsifier.add_model(model)
    with pytest.raises(ValueError, match="widths 8 and 16"):
        rotate(sparsifier, [["user", "item"]])
    with pytest.raises(ValueError, match="tables"):
        rotate(sparsifier, [["user", "tiny"]] if dist.get_rank() else "table")
    rotate(sparsifier)
    with pytest.raises(ValueError, match="without an attached MaskEnforcer"):
        sparsifier.step()
    adam = MaskEnforcer(sparsifier).attach(optimizer_of(model))  # of the data-parallel table
    with pytest.raises(
        ValueError, match=r"\['tiny'\] can't be rotated: their optimizer keeps element-wise state"
    ):
        sparsifier.step()
    adam.detach()
    model = build(cells(2)["mixed"])
    for more in ({"rotate": Rotation("table")}, {"score": "accumulator"}, {"auto_step": True}):
        mine: dict[str, Any] = more if dist.get_rank() else {}
        with pytest.raises(ValueError, match=f"{next(iter(more))} is"):
            sparsify(model, optimizer_of(model), **nested(level=0.5, block="col", end=2, **mine))
    pair: dict[str, Any] = {
        "rotate": Rotation([["user", "tiny"]]),
        "optimizer_state": "reset",
        "min_rows": 0,
    }
    broken = sparsify(model, optimizer_of(model), **nested(level=0.5, block="col", end=2, **pair))
    for shard in broken.sparsifier.masks.tables.locate()["user"].shards:
        if dist.get_rank() == 1:
            shard.tensor[0, 0] = torch.inf
    before = gathered(model)
    with pytest.raises(ValueError, match="'user' can't be rotated: weights are not finite"):
        broken.step()
    near(gathered(model), before, 0)


@on_ranks(2)
def test_removed_columns_are_cleaned_before_they_would_be_spread() -> None:
    """A backward has written them, and nothing has read them since."""
    cell = cells(2)["row_wise"]
    model = build(cell, torch.optim.SGD, {"lr": 0.5})
    sparsifier, _ = prepared(model)
    step_to(sparsifier, 0.5)
    loss_of(model(batch(cell, seed=dist.get_rank()))).backward()
    held = [(name, rows) for kernel in kernels(model) for name, _, rows in pieces(kernel)]
    assert any(bool(rows[:, rows.shape[1] // 2 :].any()) for _, rows in held)
    kept = [
        torch.where(torch.arange(rows.shape[1]) < rows.shape[1] // 2, rows, 0) for _, rows in held
    ]
    before = [rows @ bases(model)[name].T for (name, _), rows in zip(held, kept, strict=True)]
    sparsifier.step()
    for (name, rows), wanted in zip(held, before, strict=True):
        torch.testing.assert_close(rows @ bases(model)[name].T, wanted, rtol=1e-5, atol=1e-5)
