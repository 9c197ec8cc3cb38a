"""Compact tables of fewer columns, sharded: they give what the rotated model gave, and train on as
it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import LazyAwaitable
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced, compact, export, load_served, sparsify
from dist_sparse.extras.rotation import Rotation
from dist_sparse.tables.modules import modules_by_path
from tests.dist.cells import batch, build, cells, gathered
from tests.dist.enforcing import loss_of, optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.extras.rotation.test_rotate_ranks import states

CUT = ("column_wise", "ec_column_wise")
KINDS = ("table_wise", "row_wise", "data_parallel", "ec_table_wise", "ec_row_wise", *CUT)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name", "optimizer"),
    [(1, "row_wise", RowWiseAdagrad), *((2, name, kind) for name in KINDS for kind in OPTIMIZERS)],
)
def test_narrow_equals_masked_and_trains_on(world: int, name: str, optimizer: Any) -> None:
    cell = trained_cells(world)[name]
    if (not cell.fused and optimizer is not torch.optim.SGD) or (
        name in CUT and optimizer is torch.optim.SGD
    ):
        return
    found = []
    for narrows in (False, True):
        model: Any = build(cell, optimizer, {"lr": 0.05})
        optim = optimizer_of(model, _sgd, _sgd)
        sparse = sparsify(
            model,
            optim,
            level={"*": 0.5, "word": 1 / 3} if cell.bags else 0.5,
            block="col",
            schedule="one_shot",
            begin=2,
            end=3,
            advanced=Advanced(min_rows=0, optimizer_state="reset", rotate=Rotation("table")),
        )
        outputs = []
        for step in range(12):
            if step == 6 and narrows:
                before = sorted(float(state.sum()) for state in states(model) if state.dim() == 1)
                model = compact(model, sparse)
                after = sorted(float(state.sum()) for state in states(model) if state.dim() == 1)
                if name in CUT:  # the numbers of columns that are left
                    assert all(
                        any(each == pytest.approx(known) for known in before) for each in after
                    )
                else:
                    assert before == pytest.approx(after)
                assert world != 1 or bool(after) is (optimizer is RowWiseAdagrad and cell.fused)
                optim = optimizer_of(model, _sgd, _sgd)
                widths = {table: full.shape[1] for table, full in gathered(model).items()}
                assert widths == {t.name: -(-t.dim // 8) * 4 for t in cell.tables}
            optim.zero_grad()
            out = model(batch(cell, seed=world * step + dist.get_rank()))
            loss_of(out).backward()
            optim.step()
            outputs.append(out.detach())
            if step < 6:
                sparse.step()
        found.append(torch.cat([out.flatten() for out in outputs]))
    # A row-wise optimizer takes the mean of a gradient's squares over fewer columns from now on.
    same = len(found[0]) * 7 // 12 if optimizer is RowWiseAdagrad else None
    torch.testing.assert_close(found[1][:same], found[0][:same], rtol=1e-4, atol=1e-4)


@on_ranks(4)
@pytest.mark.parametrize(
    "name", ["row_wise", "column_wise_uneven", "table_row_wise", "grid_shard", "ec_two_shards"]
)
def test_four_ranks(name: str) -> None:
    """A table smaller than the world, ranks that keep no columns, blocks of both."""
    cell = cells(4)[name]
    model: Any = build(cell)
    sparse = sparsify(
        model,
        optimizer_of(model),
        level=0.9,
        block="col",
        end=0,
        advanced=Advanced(min_rows=0, rotate=Rotation("table"), optimizer_state="reset"),
    )
    sparse.step()
    features = batch(cell, seed=dist.get_rank())
    wanted = model(features).detach()
    model = compact(model, sparse)
    torch.testing.assert_close(model(features).detach(), wanted, rtol=1e-5, atol=1e-5)
    widths = {table: full.shape[1] for table, full in gathered(model).items()}
    assert widths == {t.name: max(4, -(-round(t.dim * 0.1) // 4) * 4) for t in cell.tables}


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "ec_table_wise"])
def test_an_artifact_turns_back_what_it_serves(name: str, tmp_path: Path) -> None:
    cell = cells(2)[name]
    model: Any = build(cell)
    sparse = sparsify(
        model,
        optimizer_of(model),
        level=0.5,
        block="col",
        end=0,
        advanced=Advanced(min_rows=0, rotate=Rotation("table")),
    )
    sparse.step()
    features = batch(cell, seed=dist.get_rank())
    model = compact(model, sparse)
    want = modules_by_path(model)["sparse.tables"](features)
    want = want.wait() if isinstance(want, LazyAwaitable) else want
    got: Any = load_served(export(model, None, tmp_path / "served").path)(features)
    for key in got.keys():  # noqa: SIM118  (a KeyedTensor is no mapping)
        found, wanted = (
            (got[key], want[key]) if cell.bags else (got[key].values(), want[key].values())
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_a_collection_of_several_widths_is_refused() -> None:
    """TorchRec's EmbeddingCollection has one width for all of its tables."""
    cell = trained_cells(2)["ec_row_wise"]
    model: Any = build(cell, torch.optim.SGD, {"lr": 0.05})
    first, *others = cell.tables
    assert others
    sparse = sparsify(
        model,
        optimizer_of(model, _sgd, _sgd),
        level=0.5,
        block="col",
        end=0,
        advanced=Advanced(min_rows=0, rotate=Rotation("table")),
        include=first.name,
    )
    sparse.step()
    with pytest.raises(ValueError, match="its tables must have one width"):
        compact(model, sparse)
    model(batch(cell, seed=0))
