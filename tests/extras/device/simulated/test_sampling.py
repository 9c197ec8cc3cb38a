"""Mask updates of narrow blocks read the weights once, whatever a sample has said of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_sparse.extras.device import flat_scores, kernels
from dist_sparse.extras.device.flat_scores import FlatScores
from dist_sparse.groups import Group
from dist_sparse.masking import selection
from dist_sparse.masking.block_masks import new_masks, score_tables
from dist_sparse.masking.device import warn_of_torch
from dist_sparse.masking.goal import Goal
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Block, Rect, Shard, whole
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.fake import CUDA, counting, cuda, inner
from tests.extras.device.simulated.runs import on_device, small_programs

ROWS, COLUMNS = 240, 128
BLOCK = (1, 4)
BLOCKS = ROWS * COLUMNS // 4


@pytest.fixture(autouse=True)
def _small_tables_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_scores, "_SMALL", BLOCKS)


def masks_of(
    weights: Sequence[Tensor], removed: int, block: Block = BLOCK, pooled: bool = False
) -> list[Tensor]:
    """The bits of the masks."""
    goals = []
    for number, table in enumerate(weights):
        data = whole(f"t{number}", table)
        blocks = data.grid(block).blocks
        goals.append(
            Goal(
                data=data,
                block=block,
                k=removed,
                max_blocks=blocks * 4 // 5,
                zeros_per_block=math.prod(block),
                measure="L2",
            )
        )
    made = new_masks(score_tables(goals), Group(), pooled)
    return [inner(new.mask.bits) for table in made for new in table.masks]


def on_both(weights: Sequence[Tensor], removed: int, **options: Any) -> Spent:
    """Check that the masks are the CPU's; return what they cost."""
    expected = masks_of(weights, removed, **options)
    with on_device():
        there = [cuda(table) for table in weights]
        with counting() as meter:
            found = masks_of(there, removed, **options)
    assert all(map(torch.equal, expected, found))
    return meter.spent


def normal(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def by_norm(table: Tensor) -> Tensor:
    """The blocks in the order of their norms, as in a table whose rows are sorted by use."""
    blocks = table.view(-1, 4)
    return blocks[blocks.square().sum(1).argsort()].view_as(table)


def half_zero() -> Tensor:
    table = normal()
    table.view(-1, 4)[::2] = 0
    return table


TABLES: dict[str, Callable[[], tuple[Tensor, int]]] = {
    "normal": lambda: (normal(), BLOCKS // 2),
    "sorted": lambda: (by_norm(normal()), BLOCKS // 3),
    "few values, so that most tie": lambda: ((normal() * 2).round(), BLOCKS // 2),
    "one value": lambda: (torch.ones(ROWS, COLUMNS), BLOCKS // 2),
    "a constant level": lambda: (half_zero(), BLOCKS // 2),
    "a level that falls": lambda: (half_zero(), BLOCKS // 2 - 3),
    "a level that rises by little": lambda: (half_zero(), BLOCKS // 2 + 3),
}


@pytest.mark.parametrize("name", TABLES)
def test_masks_are_the_cpus(name: str) -> None:
    weights, removed = TABLES[name]()
    on_both([weights], removed)


@pytest.mark.parametrize("width", [5, 10, 15])
def test_blocks_of_odd_widths(width: int) -> None:
    table = torch.randn(BLOCKS // 4, 4 * width, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        # That torch's operations run.
        warnings.simplefilter("error")
        on_both([table, (table * 2).round()], BLOCKS // 2, block=(1, width))


@pytest.mark.parametrize("name", ["normal", "few values, so that most tie", "a level that falls"])
def test_programs_of_several_tiles(name: str) -> None:
    """Each lists blocks of many tiles in its region, and counts in one of several copies."""
    weights, removed = TABLES[name]()
    expected = masks_of([weights, weights * 2], removed)
    with on_device(), small_programs():
        assert len(set(kernels.programs_for([BLOCKS, BLOCKS], 4))) == 1
        assert kernels.copies_for(2, BLOCKS) > 1
        found = masks_of([cuda(weights), cuda(weights * 2)], removed)
    assert all(map(torch.equal, expected, found))


def test_few_kernels_are_compiled() -> None:
    """Although each sample lists another number of blocks."""
    sizes: set[int] = set()
    compiled: set[Any] = set()
    kernel = kernels.sweep_kernel

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(table: Any, *arguments: Any, **constants: Any) -> None:
                if constants["LISTED"]:
                    # The second field of the first job: blocks.
                    sizes.add(int(inner(table)[1]))
                    compiled.add((constants["BUCKETS"], constants["COPIES"]))
                kernel[grid](table, *arguments, **constants)

            return launch

    with (
        on_device(),
        mock.patch.object(kernels, "sweep_kernel", Noted()),
        mock.patch.object(kernels, "_SHARED", 16),
    ):
        for seed in range(6):
            masks_of([cuda(normal(seed))], BLOCKS // 2)
    assert len({size // 16 for size in sizes}) > 3
    # Two numbers of copies for the counts, one kernel for the bits.
    assert len(compiled) <= 3
    assert {kernels.copies_for(1, blocks << 17) for blocks in range(300)} == {
        1 << power for power in range(9)
    }


def test_lists_without_room_are_read() -> None:
    """If no shard of a launch has any."""
    with on_device():
        lengths = torch.zeros(2, dtype=torch.int32, device=CUDA)
        job = kernels.Job(0, 0, lengths=lengths.data_ptr(), programs=2)
        swept = kernels.sweep([job, job], kernels.SCORES, CUDA, 1024, from_list=True)
        assert swept.tally is not None and not inner(swept.tally).any()
    assert kernels.programs_for([0, 0], 4) == [1, 1]


def test_a_pool_is_the_cpus() -> None:
    """Of tables whose scores differ so much that one reaches its own maximum."""
    on_both([normal(1), normal(2) * 3, normal(3) * 0.1], BLOCKS // 2, pooled=True)


def test_several_shards_of_a_table_are_the_cpus() -> None:
    """As a rank may hold of a table cut by columns: each is a job of its own."""
    weights = normal()
    left, right = Rect(0, 0, ROWS, 48), Rect(0, 48, ROWS, 80)
    pieces = weights[:, :48].contiguous(), weights[:, 48:].contiguous()
    expected = BlockMask(Rect(0, 0, ROWS, COLUMNS), BLOCK, masks_of([weights], BLOCKS // 2)[0])
    with on_device():
        shards = tuple(
            Shard(rect, cuda(it)) for rect, it in zip((left, right), pieces, strict=True)
        )
        data = replace(whole("t", cuda(weights)), tiling=((left, right),), shards=shards)
        goal = Goal(
            data=data,
            block=BLOCK,
            k=BLOCKS // 2,
            max_blocks=BLOCKS,
            zeros_per_block=4,
            measure="L2",
        )
        with counting() as meter:
            [made] = new_masks(score_tables([goal]), Group())
    found = [
        BlockMask(rect, BLOCK, inner(new.mask.bits)).dense()
        for rect, new in zip((left, right), made.masks, strict=True)
    ]
    assert torch.equal(expected.dense(), torch.cat(found, 1))
    assert meter.spent.launches <= 25


def test_tables_that_no_kernel_takes_warn_once() -> None:
    with on_device(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_torch.cache_clear()
        weights = cuda(normal().double())
        for _ in range(2):
            masks_of([weights], BLOCKS // 2)
    assert [str(each.message).partition(": ")[2] for each in caught] == [
        "its mask updates run hundreds of torch operations on the device, which read the table many"
        " times: blocks of (1, 4) of torch.float64 have no kernel."
    ]


def test_weights_are_read_once() -> None:
    """And a sample of at most a quarter, a few percent of listed blocks and bits, and histograms,
    which are as large for a small table."""
    weights = normal()
    scores = weights.view(-1, 4).double().square().mean(1).float().view(torch.int32).sort().values
    # Far from the border of a bucket, as the sample of a small table is small.
    away = ((scores & ((1 << 20) - 1)) - (1 << 19)).abs()
    first = BLOCKS // 4
    spent = on_both([weights], first + int(away[first : 2 * first].argmin()))
    assert spent.moved < 2.2 * weights.nbytes
    assert spent.waits <= 4, spent.lines


@pytest.mark.parametrize("error", [-1, 1, 40, -40])
def test_samples_that_mislead(error: int) -> None:
    """By a bucket, or by so many that only an exact histogram helps."""
    guesses = selection.guessed_buckets

    def wrong(*args: Any) -> dict[int, int]:
        return {row: max(1, bucket + error) for row, bucket in guesses(*args).items()}

    with mock.patch.object(selection, "guessed_buckets", wrong):
        on_both([normal(1), normal(2) * 2], BLOCKS // 2)


@pytest.mark.parametrize("error", [1, 40])
def test_samples_that_mislead_a_pool(error: int) -> None:
    guesses = selection.guessed_buckets

    def wrong(*args: Any) -> dict[int, int]:
        return {row: bucket + error for row, bucket in guesses(*args).items()}

    with mock.patch.object(selection, "guessed_buckets", wrong):
        on_both([normal(1), normal(2) * 2], BLOCKS // 2, pooled=True)


def test_lists_without_room() -> None:
    """Weights are read again."""
    with mock.patch.object(FlatScores, "list_capacity", lambda *_: 3):
        on_both([normal()], BLOCKS // 2)


def test_a_score_that_no_sample_has_seen_is_refused() -> None:
    weights = normal()
    weights[7, 5] = math.inf
    few = mock.patch.object(flat_scores, "_SPARSE", BLOCKS // 2)
    message = "'t0': the block at row 7, column 4 scores"
    with on_device(), few, pytest.raises(ValueError, match=message):
        masks_of([cuda(weights)], BLOCKS // 2)


def test_programs_are_shared_out_by_size() -> None:
    """One table of 10M rows beside 99 small ones has nearly all of them."""
    large, small = 10_000_000 * 32, 1_000 * 32
    programs = kernels.programs_for([large, *[small] * 99], 4)
    assert programs[0] > 0.95 * kernels.PROGRAMS
    assert min(programs) >= 1 and sum(programs) <= kernels.PROGRAMS + 99
