"""What ranks send: no more for larger tables, nothing between mask updates. (C3)

Collectives are counted twice: by the library, and by spies on torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_sparse import ROW, CubicDataScheduler, DataNormSparsifier, describe
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import build, cells
from tests.dist.pieces import Sent, by_cols, by_rows, move, sharded, watched, write
from tests.dist.plugin import on_ranks

# Bytes a table of the three histograms: 2048 buckets, one for zeros, and the size of a sample's
# shard; 1024; 1024.
ROUNDS = 8 * (2050 + 1024 + 1024)
STATUS = 32


def three_rounds(rows: int, cols: int) -> Tensor:
    """Weights whose threshold at level 0.5 needs all bits of a row's score, and ties nowhere."""
    full = torch.full((rows, cols), 2.0)
    full[: rows // 2 - 1] = 0.5
    full[rows // 2 - 1], full[rows // 2] = torch.tensor(
        [0x3F800001, 0x3F800002], dtype=torch.int32
    ).view(torch.float32)
    return full


def due(sparsifier: DataNormSparsifier) -> Sent:
    """A mask update after one that has made the process groups; the library's own count must be
    right."""
    with watched() as sent:
        sparsifier.step()
    assert (sent.counted, sent.counted_bytes) == (len(sent.calls), sent.bytes), sent
    return sent


def nothing(call: Callable[[], Any]) -> None:
    with watched() as sent:
        call()
    assert sent.calls == [] and (sent.counted, sent.counted_bytes) == (0, 0), sent


def rows_of(rows: int, level: float = 0.5, cols: int = 8) -> Sent:
    full = three_rounds(rows, cols)
    sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=(1, ROW))
    table = sharded(full, by_rows(rows, cols, rows // 3))
    sparsifier.add_data("table", table)
    sparsifier.step()
    write(table, full)
    sent = due(sparsifier)
    assert int((sparsifier.full_mask("table")[:, 0] == 0).sum()) == round(level * rows)
    return sent


@on_ranks(2)
def test_one_table() -> None:
    sent = rows_of(100)
    assert [name for name, _ in sent.calls] == [
        "all_gather",
        "all_reduce",
        "all_reduce",
        "all_reduce",
    ]
    assert sent.bytes == STATUS + ROUNDS


@on_ranks(2)
def test_more_rows_are_not_more_bytes() -> None:
    assert rows_of(100_000).calls == rows_of(100).calls


@on_ranks(2)
def test_nothing_to_select() -> None:
    for level in (0.0, 1.0):
        assert len(rows_of(100, level).calls) == 1


@pytest.mark.slow
@on_ranks(2)
def test_many_tables() -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    generator = torch.Generator().manual_seed(0)
    full = {}
    for i in range(200):
        rows = 4 + i % 5
        full[f"t{i}"] = sharded(
            torch.randn(rows, 4, generator=generator),
            [by_rows(rows, 4, 2), [[(0, 0, rows, 4)], []], [[], [(0, 0, rows, 4)]]][i % 3],
        )
    nothing(lambda: [sparsifier.add_data(name, table) for name, table in full.items()])
    sparsifier.step()
    generator.manual_seed(1)
    for table in full.values():
        write(table, torch.randn(tuple(table.shape), generator=generator))
    sent = due(sparsifier)
    assert 2 <= len(sent.calls) <= 4
    assert sent.bytes <= STATUS + 200 * ROUNDS
    assert all(
        stats.removed_blocks == round(stats.blocks / 2) for stats in sparsifier.table_stats()
    )


@on_ranks(2)
def test_cut_columns() -> None:
    """Two messages more; partial scores grow with the rows, not with the columns."""
    sizes = {}
    for rows, cols in ((64, 8), (64, 4096), (640, 8)):
        full = three_rounds(rows, cols)
        sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
        table = sharded(full, by_cols(rows, cols, cols // 4))
        sparsifier.add_data("table", table)
        sparsifier.step()
        write(table, full)
        sent = due(sparsifier)
        assert (
            sorted(name for name, _ in sent.calls)
            == ["all_gather"] + ["all_reduce"] * 3 + ["all_to_all_single"] * 2
        )
        sizes[rows, cols] = sent.bytes
    assert sizes[64, 8] == sizes[64, 4096] == STATUS + ROUNDS + 64 * 8 + 64 // 8
    assert sizes[640, 8] == STATUS + ROUNDS + 640 * 8 + 640 // 8


@on_ranks(2)
def test_the_worst_step() -> None:
    """Everything at once: blocks cut by rows and by columns, ties over ranks among millions, shards
    that have moved."""
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 1))
    ones = torch.ones(2049, 2049)  # 23 bits of block index
    tied = sharded(ones, by_rows(2049, 2049, 1000))
    grid = torch.ones(9, 12)
    quarters = [[(0, 0, 5, 7), (5, 7, 4, 5)], [(0, 7, 5, 5), (5, 0, 4, 7)]]
    tables = {name: sharded(grid, quarters) for name in ("by_row", "by_block", "moved")}
    sparsifier.add_data("tied", tied)
    sparsifier.add_data("by_row", tables["by_row"], sparse_block_shape=(1, ROW))
    sparsifier.add_data("by_block", tables["by_block"], sparse_block_shape=(4, 5))
    sparsifier.add_data("moved", tables["moved"], sparse_block_shape=(2, ROW))
    sparsifier.step()
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = 0.75
    write(tied, ones)
    move(tables["moved"], grid, quarters[::-1])
    sent = due(sparsifier)
    assert 8 < len(sent.calls) <= 10, sent.calls
    assert sent.bytes < 64 * 1024 * 4
    for stats in sparsifier.table_stats():
        assert stats.removed_blocks == round(0.75 * stats.blocks), stats
    sparsifier.audit()


@on_ranks(2)
def test_replicas() -> None:
    """Data-parallel tables: their hashes fit in the first message."""
    cell = cells(2)["data_parallel"]
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    model = build(cell)
    sparsifier.add_model(model)
    sparsifier.step()
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = 0.7
    sent = due(sparsifier)
    assert 1 < len(sent.calls) <= 4
    assert sent.bytes <= STATUS + len(cell.tables) * ROUNDS


@on_ranks(2)
def test_not_due() -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    table = sharded(three_rounds(10, 8), by_rows(10, 8, 5))
    sparsifier.add_data("table", table)
    sparsifier.step()
    before = sparsifier.fingerprint()
    sparsifier.enable_mask_update = False
    write(table, torch.full((10, 8), torch.nan))  # a step that read it would say so
    nothing(sparsifier.step)
    assert sparsifier.fingerprint() == before
    sparsifier.enable_mask_update = True
    with pytest.raises(ValueError, match="nan"):
        sparsifier.step()


@on_ranks(2)
def test_between_due_steps() -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    sparsifier.add_data("table", sharded(torch.randn(20, 8), by_rows(20, 8, 5)))
    scheduler = CubicDataScheduler(sparsifier, "sparsity_level", final=0.8, begin=2, end=8, every=3)
    spoke = []
    for step in range(12):
        with watched() as sent:
            sparsifier.step()
            scheduler.step()
        assert sent.counted == len(sent.calls)
        if sent.calls:
            spoke.append(step)
    assert spoke == [2, 5, 8]
    assert sparsifier.table_stats()[0].removed_blocks == 16


@on_ranks(2)
def test_local_calls() -> None:
    full = torch.randn(10, 8)
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    table = sharded(full, by_rows(10, 8, 5))
    nothing(lambda: sparsifier.add_data("table", table))
    sparsifier.step()
    write(table, torch.ones(10, 8))
    nothing(sparsifier.apply_masks)
    [(_, mask)] = sparsifier.local_masks("table")
    assert torch.equal(table.local_shards()[0].tensor, mask.float())
    for call in (
        lambda: sparsifier.local_masks("table"),
        lambda: sparsifier.get_mask("table"),
        lambda: sparsifier.get_data("table", return_original=False),
        sparsifier.state_dict,
        lambda: describe(sparsifier),
        lambda: repr(sparsifier),
        lambda: sparsifier.squash_mask(),
    ):
        nothing(call)


def test_one_process_sends_nothing() -> None:
    reset_traffic()
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(torch.nn.Embedding(8, 4))
    sparsifier.step()
    sparsifier.audit()
    assert (traffic().collectives, traffic().bytes) == (0, 0)
