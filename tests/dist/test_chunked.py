"""Masks saved by torch.distributed.checkpoint load on any other world and sharding, bit for bit.
(C8)"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.sharding_plan import row_wise, table_wise

from dist_sparse import (
    COL,
    ROW,
    DataNormSparsifier,
    MaskEnforcer,
    SparseTraining,
    compact,
    sparsify,
)
from dist_sparse.schedulers import LinearDataScheduler
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import Cell, batch, build, cells, gathered, set_weights, weights
from tests.dist.copies import build_copies, copied_cells, first_copy
from tests.dist.enforcing import loss_of, optimizer_of
from tests.dist.harness import run_ranks
from tests.dist.plugin import on_ranks
from tests.keywords import nested

TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "two_shards",
    "data_parallel",
    "table_row_wise",
    "mixed",
)
BLOCKS = {
    "user": (1, ROW),
    "item": (1, 4),
    "tiny": (COL, 1),
    "word": (3, 5),
    "wide": (2, 5),
    "flat": (1, 16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masks as 1, 2 and 4 ranks have saved them, on every sharding."""
    made = tmp_path_factory.mktemp("saved")
    for world in (1, 2, 4):
        run_ranks(world, save_all, world, made)
    return made


def made(model: nn.Module, level: float) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(None, level, norm="L2")
    tables = {data.name for data in ModelTables(model).locate()}
    config = {
        name: {"sparse_block_shape": block} for name, block in BLOCKS.items() if name in tables
    }
    sparsifier.add_model(model, config=config)
    return sparsifier


def save_all(world: int, folder: Path) -> None:
    """Save on every sharding, half of them in the background."""
    for i, name in enumerate(TYPES):
        sparsifier = made(build(cells(world)[name]), 0.6)
        scheduler = LinearDataScheduler(
            sparsifier, final={"user": 0.6, "w*": 0.7}, initial=0.6, end=9
        )
        sparsifier.step()
        target: Any = {"checkpoint_id": folder / f"{world}-{name}"}
        if i % 2:
            dcp.async_save({"sparse": sparsifier, "scheduler": scheduler}, **target).result()
        else:
            dcp.save({"sparse": sparsifier, "scheduler": scheduler}, **target)
        prints = sparsifier.fingerprint()
        if dist.get_rank() == 0:
            known = folder / "fingerprint"
            assert not known.exists() or known.read_text() == str(prints), name
            known.write_text(str(prints))


@pytest.mark.slow
@on_ranks(1, 2, 4)
def test_load(world: int, folder: Path) -> None:
    """Every sharding of this world reads every world's, each pair of shardings on one pair of
    worlds."""
    worlds = (1, 2, 4)
    for i, name in enumerate(TYPES):
        target = made(build(cells(world)[name]), 0.1)
        for j, other in enumerate(TYPES):
            saved = worlds[(worlds.index(world) + i + j) % 3]
            if (i + 2 * j) % 3 != worlds.index(world):
                continue
            dcp.load({"sparse": target}, checkpoint_id=folder / f"{saved}-{other}")
            assert str(target.audit()) == (folder / "fingerprint").read_text(), (name, saved, other)
            assert target.data_groups["user"]["sparsity_level"] == 0.6
        scheduler = LinearDataScheduler(target, final={"item": 0.3}, end=2)
        dcp.load({"scheduler": scheduler}, checkpoint_id=folder / f"{world}-{name}")
        assert scheduler.final == {"user": 0.6, "w*": 0.7} and scheduler.end == 9
        target.step()


@pytest.mark.slow  # as a whole: the second case loads what the first has saved
@on_ranks(4, 2)
def test_grids(world: int, folder: Path) -> None:
    """Of blocks that the borders of a grid cut, on four ranks and then on two, by rows and in whole
    tables."""
    first = cells(4)["grid_shard"]
    plan = {"wide": row_wise(), "flat": table_wise(rank=1)}
    sparsifier = made(build(first if world == 4 else replace(first, world=2, plan=plan)), 0.3)
    if world == 4:
        sparsifier.step()
        dcp.save({"sparse": sparsifier}, checkpoint_id=folder / "grid")
        torch.save(sparsifier.audit(), folder / "grid.pt")
    else:
        dcp.load({"sparse": sparsifier}, checkpoint_id=folder / "grid")
        assert sparsifier.audit() == torch.load(folder / "grid.pt")


# -- what is refused, on every rank
# ------------------------------------------------------------------------------------


@on_ranks(2)
def test_refused(tmp_path: Path) -> None:
    """The same error on every rank, and nothing has changed."""
    model = build(cells(2)["mixed"])
    sparsifier = made(model, 0.5)
    sparsifier.step()
    dcp.save({"sparse": sparsifier}, checkpoint_id=tmp_path / "whole")
    dcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path / "dense")
    lone = DataNormSparsifier(None, 0.5)
    lone.add_model(model, include="item")
    dcp.save({"sparse": lone}, checkpoint_id=tmp_path / "lone")
    hole = Holes(tmp_path / "whole", "sparse.sharded.masks.item")

    def refused(target: DataNormSparsifier, match: str, **source: Any) -> None:
        before = target.audit()
        with pytest.raises((CheckpointException, ValueError)) as raised:
            dcp.load({"sparse": target}, **source)
        assert re.search(match, str(raised.value)), raised.value
        assert target.audit() == before

    refused(
        sparsifier,
        "Missing key in checkpoint state_dict: sparse.sharded",
        checkpoint_id=tmp_path / "dense",
    )
    refused(sparsifier, "Missing key.*sparse.sharded.masks", checkpoint_id=tmp_path / "lone")
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    refused(
        sparsifier,
        "are not the tables of the state",
        checkpoint_id=tmp_path / "lone",
        planner=partial,
    )
    refused(
        lone,
        r"registered tables \['item'\] are not the tables of the state.*'word'",
        checkpoint_id=tmp_path / "whole",
    )
    wider = DataNormSparsifier(None, 0.5, (1, 5))
    wider.add_model(model, include="item")
    refused(wider, "saved by blocks.*register it", checkpoint_id=tmp_path / "lone")
    refused(
        sparsifier, "'item': the masks remove .* blocks over all ranks, but", storage_reader=hole
    )
    before = sparsifier.audit()
    # DCP's flag for dense ones.
    dcp.load({"sparse": sparsifier}, checkpoint_id=tmp_path / "dense", planner=partial)
    assert sparsifier.audit() == before


class Holes(dcp.FileSystemReader):
    """A checkpoint that has lost a chunk, which DCP does not notice."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self.key = key

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.state_dict_metadata[self.key].chunks.pop()
        return metadata


# -- what else is saved
# ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_counts_and_schedules(tmp_path: Path) -> None:
    """Of a training: on other shards too, though it was called with other arguments."""
    every = cells(2)
    model, sparse = training(every["row_wise"], level=0.6, end=6)
    for step in range(4):
        learn(model, sparse, every["row_wise"], step)
    saved = {"sparse": sparse, "model": model.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path)
    sizes = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    masks = {
        key.rpartition(".")[2]: tuple(value.size)
        for key, value in sizes.items()
        if ".masks." in key
    }
    assert masks == {"user": (37, 1), "item": (10, 1), "tiny": (3, 1), "word": (29, 1)}, (
        "a row has up to 8 blocks: a byte"
    )
    before = [
        sparse.sparsifier.audit(),
        sparse.scheduler.state_dict(),
        counts(sparse),
        gathered(model),
    ]
    for name in ("column_wise", "two_shards", "table_wise"):
        other, resumed = training(every[name], level={"*": 0.3}, end=50)
        dcp.load({"sparse": resumed, "model": other.state_dict()}, checkpoint_id=tmp_path)
        now = [
            resumed.sparsifier.audit(),
            resumed.scheduler.state_dict(),
            counts(resumed),
            gathered(other),
        ]
        assert now[:2] == before[:2] and all(
            same(*pair) for pair in zip(now[2:], before[2:], strict=True)
        ), name
        resumed.detach()
    sparse.detach()


def training(cell: Cell, level: Any, end: int) -> tuple[nn.Module, SparseTraining]:
    model = build(cell)
    options: dict[str, Any] = {"score": "frequency", "block": (1, 4), "min_rows": 0, "every": 2}
    with warnings.catch_warnings():
        return model, sparsify(
            model, optimizer_of(model), **nested(level=level, end=end, **options)
        )


def learn(model: nn.Module, sparse: SparseTraining, cell: Cell, step: int) -> None:
    loss_of(model(batch(cell, seed=100 * step + dist.get_rank(), size=4))).backward()
    sparse.step()


def counts(sparse: SparseTraining) -> dict[str, Tensor]:
    """Lookups of every row, by table. Collective."""
    store = sparse.sparsifier.masks.tables
    mine = [
        (name, shard.rect.row, count.clone())
        for name, data in store.locate().items()
        for shard, count in zip(data.shards, store.table(name).counts.values(), strict=True)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {
        name: torch.zeros(data.shape[0], dtype=torch.int32) for name, data in store.locate().items()
    }
    for name, row, count in (piece for pieces in everyone for piece in pieces):
        found[name][row : row + len(count)] = count
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(one[name], other[name]) and bool(one[name].any()) for name in {*one, *other}
    )


@on_ranks(4, local_world_size=2)
def test_copies(tmp_path: Path) -> None:
    """2-D parallelism, saved after ``sync()``: the first copy's masks and weights, on any
    sharding."""
    cell = copied_cells()["mixed"]
    model = build_copies(cell)
    sparsifier = made(model, 0.6)
    optimizer = optimizer_of(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        for step in range(2):
            loss_of(model(batch(cell, seed=10 * step + dist.get_rank()))).backward()
        model.sync()
        sparsifier.step()
        dcp.save({"sparse": sparsifier, "model": model.state_dict()}, checkpoint_id=tmp_path)
        for other in (build(cells(4)["row_wise"]), build_copies(cell)):
            loaded = made(other, 0.1)
            dcp.load({"sparse": loaded, "model": other.state_dict()}, checkpoint_id=tmp_path)
            assert loaded.audit() == sparsifier.audit()
            assert same(
                first_copy(other) if isinstance(other, type(model)) else gathered(other),
                first_copy(model),
            )


@on_ranks(2)
def test_compact_models(tmp_path: Path) -> None:
    """The masks before compact() make a model that the checkpoint after it fits; another model is
    refused."""

    def built(name: str, seed: int) -> tuple[Cell, nn.Module, DataNormSparsifier]:
        cell = cells(2)[name]
        cell = replace(
            cell, tables=tuple(replace(table, rows=max(table.rows, 8)) for table in cell.tables)
        )
        model = build(cell)
        set_weights(model, weights(cell, seed=seed))
        sparsifier = DataNormSparsifier(None, 0.5, (1, ROW), norm="L2")
        sparsifier.add_model(model)
        sparsifier.step()
        return cell, model, sparsifier

    cell, model, sparsifier = built("row_wise", seed=0)
    dcp.save({"sparse": sparsifier}, checkpoint_id=tmp_path / "masks")
    model = compact(model, sparsifier)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "compact")
    _, other, resumed = built("table_wise", seed=1)
    dcp.load({"sparse": resumed}, checkpoint_id=tmp_path / "masks")
    other = compact(other, resumed)
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "compact")
    features = batch(cell, seed=dist.get_rank())
    torch.testing.assert_close(other(features), model(features), rtol=2e-6, atol=2e-6)
    _, wrong, dense = built("table_wise", seed=1)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"model": wrong.state_dict()}, checkpoint_id=tmp_path / "compact")
    dense.data_groups["user"]["sparsity_level"] = 0.2
    dense.step()
    wrong = compact(wrong, dense)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"model": wrong.state_dict()}, checkpoint_id=tmp_path / "compact")
