"""Recorded changes equal those of the gathered masks, at one small all-reduce each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.records import MaskChange
from dist_sparse.sparsifiers.masks import Recorder
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import build, cells, gathered, set_weights, weights
from tests.dist.pieces import by_rows, sharded, write
from tests.dist.plugin import on_ranks

BLOCKS: dict[str, tuple[int, int | str]] = {
    "rows": (1, ROW),
    "small": (1, 4),
    "tall": (3, 4),
    "elements": (1, 1),
}
LEVELS = (0.5, 0.8, 0.3, 0.0, 1.0, 0.6)


def expected(
    name: str, before: Tensor, after: Tensor, block: tuple[int, int], cut: bool
) -> dict[str, Any]:
    """From gathered element masks: a block is removed where its first element is."""
    old, new = before[:: block[0], :: block[1]] == 0, after[:: block[0], :: block[1]] == 0
    return {
        "blocks": new.numel(),
        "removed_blocks": int(new.sum()),
        "flipped_blocks": int((old != new).sum()),
        "regrown_blocks": int((old & ~new).sum()),
        "dead_rows": None if cut else int((after == 0).all(1).sum()),
    }


def said(change: MaskChange) -> dict[str, Any]:
    names = ("blocks", "removed_blocks", "flipped_blocks", "regrown_blocks", "dead_rows")
    return {name: getattr(change, name) for name in names}


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name", "block"),
    [
        (world, name, block)
        for world, (names, blocks) in {
            2: (("table_wise", "row_wise", "column_wise", "mixed", "data_parallel"), BLOCKS),
            4: (("grid_shard", "table_row_wise", "row_wise"), ("rows", "tall")),
        }.items()
        for name in names
        for block in blocks
    ],
)
def test_records(world: int, name: str, block: str) -> None:
    """Levels rise and fall over weights that change in between, so that blocks come back."""
    cell = cells(world)[name]
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=BLOCKS[block], norm="L1")
    sparsifier.add_model(model)
    recorder = sparsifier.record()
    assert sparsifier.record() is recorder
    names = list(sparsifier.data_groups)
    masks = {name: sparsifier.full_mask(name) for name in names}
    wanted: list[dict[str, dict[str, Any]]] = []
    records = []
    for i, level in enumerate(LEVELS):
        set_weights(model, weights(cell, seed=i))
        for name in names:
            sparsifier.data_groups[name]["sparsity_level"] = level
        sparsifier.step()
        records += recorder.take()
        after = {name: sparsifier.full_mask(name) for name in names}
        located = {data.name: data for data in ModelTables(model).locate()}
        wanted.append({})
        for name in names:
            shape = located[name].shape
            high, wide = BLOCKS[block]
            size = (high, shape[1] if wide == ROW else int(wide))
            cut = any(rect.cols != shape[1] for rect in located[name].rects)
            wanted[-1][name] = expected(name, masks[name], after[name], size, cut)
        masks = after
    assert recorder.take() == []
    assert [record.number for record in records] == list(range(1, len(LEVELS) + 1))
    for record, of_step, level in zip(records, wanted, LEVELS, strict=True):
        assert {change.name: said(change) for change in record.tables} == of_step
        assert all(change.target == level for change in record.tables)
        assert record.seconds > 0 and (record.collectives > 0) == (world > 1)
        for change in record.tables:
            assert (change.threshold is None) == (change.removed_blocks in (0, change.blocks))


def stepped(model: torch.nn.Module) -> tuple[DataNormSparsifier, Recorder]:
    """Half of the rows, after one mask update."""
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(model)
    recorder = sparsifier.record()
    sparsifier.step()
    return sparsifier, recorder


@on_ranks(2)
def test_one_message_an_update() -> None:
    """One small all-reduce more with a recorder than without; none if masks are not updated."""
    spent = {}
    for recorded in (False, True):
        cell = cells(2)["mixed"]
        model = build(cell)
        sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
        sparsifier.add_model(model)
        if recorded:
            sparsifier.record()
        counts = []
        for i in range(4):
            set_weights(model, weights(cell, seed=i))
            reset_traffic()
            sparsifier.step()
            counts.append(traffic())
        sparsifier.enable_mask_update = False
        reset_traffic()
        sparsifier.step()
        assert traffic().collectives == 0
        spent[recorded] = counts
    for recorded, plain in zip(spent[True], spent[False], strict=True):
        assert recorded.collectives == plain.collectives + 1
        # Four tables, six counts of 8 bytes.
        assert recorded.bytes == plain.bytes + 4 * 6 * 8


class Alternate(BaseDataSparsifier):
    """Masks of a user's own: every other row, then the others."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        mask = self.get_mask(name)
        mask.copy_(1 - mask)


@on_ranks(2)
def test_a_user_s_own_masks() -> None:
    model = build(cells(2)["row_wise"])
    sparsifier = Alternate()
    sparsifier.add_model(model)
    recorder = sparsifier.record()
    sparsifier.step()
    [first] = recorder.take()
    sparsifier.step()
    [second] = recorder.take()
    assert recorder.count == 2
    for change in first.tables:
        assert (
            change.flipped_blocks == change.removed_blocks == change.blocks
            and change.regrown_blocks == 0
        )
        assert change.threshold is None and change.target is None
    for change in second.tables:
        assert (
            change.flipped_blocks == change.regrown_blocks == change.blocks
            and change.removed_blocks == 0
        )


@on_ranks(2)
def test_another_block() -> None:
    """Between masks of different blocks nothing can be said to have flipped, on any rank: one has
    no shard."""
    cell = cells(2)["table_wise"]
    model = build(cell)
    sparsifier, recorder = stepped(model)
    for config in sparsifier.data_groups.values():
        config.update(sparse_block_shape=(1, 4), zeros_per_block=None)
    set_weights(model, weights(cell, seed=1))
    sparsifier.step()
    for name, weight in gathered(model).items():
        assert not weight[sparsifier.full_mask(name) == 0].any()
    _, second = recorder.take()
    assert [(c.flipped_blocks, c.regrown_blocks, c.churn) for c in second.tables] == [
        (None, None, None)
    ] * 4
    assert all(c.removed_blocks == round(c.blocks / 2) for c in second.tables)


@on_ranks(2)
def test_one_rank_records() -> None:
    model = build(cells(2)["row_wise"])
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    if torch.distributed.get_rank() == 1:
        sparsifier.record()
    before = {name: sparsifier.full_mask(name) for name in sparsifier.data_groups}
    with pytest.raises(
        ValueError, match="whether steps are recorded is True on rank 1 and False on rank 0"
    ):
        sparsifier.step()
    assert all(torch.equal(sparsifier.full_mask(name), mask) for name, mask in before.items())


@on_ranks(2)
def test_a_failed_step() -> None:
    """It leaves no record, and the records before it are not lost."""
    cell = cells(2)["row_wise"]
    model = build(cell)
    sparsifier, recorder = stepped(model)
    set_weights(
        model, {name: torch.full_like(w, float("nan")) for name, w in weights(cell).items()}
    )
    with pytest.raises(ValueError, match="finite"):
        sparsifier.step()
    set_weights(model, weights(cell, seed=3))
    sparsifier.step()
    assert [record.number for record in recorder.take()] == [1, 2]


@pytest.mark.slow
@on_ranks(3)
def test_overlapping_groups() -> None:
    """A table over two ranks beside one over three."""
    rank = torch.distributed.get_rank()
    pair = torch.distributed.new_group([0, 1])
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    if rank < 2:
        sparsifier.add_data(
            "a", sharded(torch.randn(8, 4), by_rows(8, 4, 4), pair), sparsity_level=0.0
        )
    whole = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    pieces = [[(0, 0, 3, 4)], [(3, 0, 3, 4)], [(6, 0, 3, 4)]]
    table = sharded(whole, pieces)
    sparsifier.add_data("b", table)
    recorder = sparsifier.record()
    for seed in range(5):
        write(table, torch.randn(9, 4, generator=torch.Generator().manual_seed(seed)))
        sparsifier.step()
    records = recorder.take()
    assert [record.number for record in records] == [1, 2, 3, 4, 5]
    assert all(
        c.removed_blocks == (0 if c.name == "a" else 4) for record in records for c in record.tables
    )


def test_one_process() -> None:
    """No group: records are complete at once."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 8), torch.nn.Embedding(7, 4))
    _, recorder = stepped(model)
    [record] = recorder.take()
    assert [change.removed_blocks for change in record.tables] == [5, round(3.5)]
    assert [change.dead_rows for change in record.tables] == [5, 4]
    assert record.collectives == 0 and [change.churn for change in record.tables] == [0.5, 4 / 7]
    assert [round(change.sparsity, 3) for change in record.tables] == [0.5, 0.571]
