"""Kept rows and their way between ranks, against the gathered tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import DataNormSparsifier
from dist_sparse.compaction import moving
from dist_sparse.compaction.moving import kept_rows, move_rows, move_rowwise
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, ShardedData
from tests.dist.cells import build, cells, gathered
from tests.dist.plugin import on_ranks

CELLS = {
    1: ("row_wise", "column_wise"),
    2: ("table_wise", "row_wise_fp16", "column_wise_uneven", "two_shards", "mixed"),
    4: ("table_row_wise", "column_wise", "data_parallel", "grid_shard", "ec_row_wise"),
}
EVERY = [(world, name) for world, names in CELLS.items() for name in names]


def in_chunks(size: int, moves: Iterator[tuple[Rect, Tensor]]) -> Iterator[tuple[Rect, Tensor]]:
    """What is moved in chunks of this many bytes: the size is read once rows are asked for."""
    with mock.patch.object(moving, "CHUNK_BYTES", size):
        yield from moves


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_kept_rows(world: int, name: str) -> None:
    """A row is kept if any of its elements is, whatever the block and wherever the columns are."""
    model = build(cells(world)[name])
    for block in ((1, "ROW"), (1, 4), (3, 5)):
        sparsifier = DataNormSparsifier(sparsity_level=0.7, sparse_block_shape=block)
        names = sparsifier.add_model(model)
        sparsifier.step()
        kept = kept_rows(sparsifier, sparsifier.masks.tables.current())
        assert set(kept) == set(names)
        assert all(torch.equal(kept[table], sparsifier.full_mask(table).any(1)) for table in names)
        assert any(not bool(flags.all()) for flags in kept.values())


def test_kept_rows_of_plain_data_and_of_a_dense_table() -> None:
    sparsifier = DataNormSparsifier(
        [("plain", torch.arange(12.0).view(4, 3)), ("line", torch.ones(5))],
        sparse_block_shape=(1, 3),
    )
    sparsifier.add_model(torch.nn.EmbeddingBag(6, 3))
    sparsifier.data_groups["weight"]["sparsity_level"] = 0.0
    sparsifier.step()
    sparsifier.get_mask("line").zero_()
    assert {
        name: flags.tolist()
        for name, flags in kept_rows(sparsifier, sparsifier.masks.tables.current()).items()
    } == {
        "plain": [False, False, True, True],
        "line": [False],
        "weight": [True] * 6,
    }


def drawn(rows: int, share: float) -> Tensor:
    """The same flags on every rank."""
    return torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < share


def targets(source: ShardedData, rows: int) -> dict[str, list[list[Rect]]]:
    """What ranks may want, in kept coordinates."""
    world, cols = len(source.tiling), source.shape[1]
    cuts = [rows * i // world for i in range(world + 1)]
    return {
        "all on the first": [[Rect(0, 0, rows, cols)]] + [[]] * (world - 1),
        "all on every": [[Rect(0, 0, rows, cols)]] * world,
        "rows": [[Rect(cuts[r], 0, cuts[r + 1] - cuts[r], cols)] for r in range(world)],
        "columns, two pieces on the last": [[]] * (world - 1)
        + [[Rect(0, 3, rows, cols - 3), Rect(0, 0, rows, 3)]],
    }


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_weights_move(world: int, name: str) -> None:
    """Every wanted element arrives once and bit for bit, whatever the chunks."""
    model = build(cells(world)[name])
    full = gathered(model)
    for source in ModelTables(model).locate():
        cols = source.shape[1]
        for share in (0.0, 0.4, 1.0):
            kept = drawn(source.shape[0], share)
            for wanted in targets(source, int(kept.sum())).values():
                mine = wanted[dist.get_rank() if source.ranks else 0]
                for chunk_rows in (3, 1000):
                    found = torch.full((int(kept.sum()), cols), torch.nan, dtype=source.dtype)
                    tensors = [shard.tensor for shard in source.shards]
                    size = chunk_rows * cols * source.dtype.itemsize
                    for rect, rows in in_chunks(size, move_rows(source, tensors, kept, wanted)):
                        assert rows.shape == (rect.rows, rect.cols) and rect.rows <= chunk_rows
                        place = slice(rect.row, rect.row_end), slice(rect.col, rect.col_end)
                        assert found[place].isnan().all()
                        found[place] = rows
                    for rect in mine:
                        place = slice(rect.row, rect.row_end), slice(rect.col, rect.col_end)
                        assert torch.equal(found[place], full[source.name][kept][place])
                    assert int((~found.isnan()).sum()) == sum(rect.numel for rect in mine)


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_rowwise_state_moves(world: int, name: str) -> None:
    """One value for each row of a shard arrives for each row of what is wanted with the same
    columns."""
    for source in ModelTables(build(cells(world)[name])).locate():
        states = replace(source, dtype=torch.float64)
        kept = drawn(source.shape[0], 0.5)
        rows = int(kept.sum())
        state = [
            torch.arange(s.rect.row, s.rect.row_end).double() + s.rect.col * 1000
            for s in source.shards
        ]
        spans = sorted({(rect.col, rect.cols) for rect in source.rects})
        wanted = [[Rect(0, col, rows, width) for col, width in spans]] * len(source.tiling)
        found = {span: torch.full((rows,), torch.nan, dtype=torch.float64) for span in spans}
        for tensors in (state, [each.view(-1, 1) for each in state]):
            size = 8 * 3 * len(spans)
            for rect, values in in_chunks(size, move_rowwise(states, tensors, kept, wanted)):
                assert values.shape == (rect.rows,) and rect.rows <= 3
                found[rect.col, rect.cols][rect.row : rect.row_end] = values
            for (col, _), values in found.items():
                assert torch.equal(values, kept.nonzero().flatten().double() + col * 1000)
                values.fill_(torch.nan)


def test_refused() -> None:
    [source] = ModelTables(torch.nn.EmbeddingBag(6, 4)).locate()
    kept = torch.tensor([True, False] * 3)
    with pytest.raises(ValueError, match=r"row-wise optimizer state of .*the columns \[\(0, 4\)\]"):
        next(move_rowwise(source, [torch.ones(6)], kept, [[Rect(0, 0, 3, 2)]]))


def test_a_chunk_spans_many_removed_rows() -> None:
    """Chunks are cut by kept rows: few messages where few rows are kept."""
    kept = torch.zeros(50_000, dtype=torch.bool)
    kept[[0, 4095, 4096, 40_000, 49_999]] = True
    table = torch.nn.Embedding(50_000, 2)
    [source] = ModelTables(table).locate()
    pieces = list(
        in_chunks(4 * 8, move_rows(source, [table.weight.data], kept, [[Rect(0, 0, 5, 2)]]))
    )
    assert [rect.rows for rect, _ in pieces] == [4, 1]
    assert torch.equal(torch.cat([rows for _, rows in pieces]), table.weight.data[kept])
