"""A block has the same score wherever it is stored and however it is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dist_sparse.masking import device
from dist_sparse.masking.scores import block_sums, block_widths, row_chunks, to_scores
from dist_sparse.tables.shards import Rect, grid_of
from tests.oracle import oracle_scores

BLOCKS = [(1, 1), (1, 4), (4, 1), (3, 5), (1, 37), (8, 8), (20, 2), (2, 20), (50, 50)]


def score(
    weight: torch.Tensor, rect: Rect, shape: tuple[int, int], block: tuple[int, int], norm: str
) -> torch.Tensor:
    grid = grid_of(rect, block)
    widths = block_widths(shape, block, torch.arange(grid.col, grid.col + grid.cols))
    parts = [
        to_scores(sums.clone(), grid.row + first, widths, shape, block)
        for first, sums in block_sums(weight, rect, block, norm)  # type: ignore[arg-type]
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_scores_equal_the_oracle_bit_for_bit(
    block: tuple[int, int], norm: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(23, 37).to(dtype)
    got = score(weight, Rect(0, 0, 23, 37), (23, 37), block, norm)
    assert got.flatten().tolist() == oracle_scores(weight, block, norm)


@pytest.mark.parametrize("block", BLOCKS)
def test_neither_chunks_nor_threads_nor_neighbours_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(160, 37)
    whole = score(weight, Rect(0, 0, 160, 37), (160, 37), block, "L2")
    threads = torch.get_num_threads()
    for chunk, count in ((1, 1), (500, 2), (1 << 20, threads + 1)):
        monkeypatch.setattr(device, "ON_CPU", replace(device.ON_CPU, elements=chunk))
        torch.set_num_threads(count)
        assert torch.equal(score(weight, Rect(0, 0, 160, 37), (160, 37), block, "L2"), whole)
    torch.set_num_threads(threads)
    top = 2 * block[0]  # a shard that starts at a block's corner and holds whole blocks
    if top < 160:
        part = score(weight[top:], Rect(top, 0, 160 - top, 37), (160, 37), block, "L2")
        assert torch.equal(part, whole[2:])
    left = 2 * block[1]
    if left < 37:
        part = score(weight[:, left:], Rect(0, left, 160, 37 - left), (160, 37), block, "L2")
        assert torch.equal(part, whole[:, 2:])


def test_one_long_row_does_not_depend_on_threads() -> None:
    torch.manual_seed(2)
    weight = torch.randn(1, 300_001)
    seen = set()
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        seen.add(score(weight, Rect(0, 0, 1, 300_001), (1, 300_001), (1, 300_001), "L1").item())
    torch.set_num_threads(threads)
    assert len(seen) == 1


def test_row_chunks_cover_the_shard_in_whole_block_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ON_CPU", replace(device.ON_CPU, elements=40))
    chunks = list(row_chunks(Rect(5, 0, 30, 4), (3, 2), torch.device("cpu")))
    # Row 5 ends block row 1; rows 33 and 34 begin block row 11.
    assert chunks[0] == (0, 1) and chunks[-1] == (
        28,
        30,
    )
    assert [start for start, _ in chunks[1:]] == [stop for _, stop in chunks[:-1]]
    assert all((5 + start) % 3 == 0 for start, _ in chunks[1:])
    assert list(row_chunks(Rect(5, 0, 0, 4), (3, 2), torch.device("cpu"))) == []


def test_tall_blocks_are_summed_in_an_order_of_their_own() -> None:
    """Whole columns of more rows than are summed at a time: neither the other columns nor how they
    are read counts."""
    torch.manual_seed(0)
    weights = torch.randn(20_011, 24)
    whole = Rect(0, 0, *weights.shape)
    [(first, sums)] = block_sums(weights, whole, (len(weights), 1), "L2")
    torch.testing.assert_close(sums[0], weights.double().square().sum(0), rtol=1e-12, atol=0)
    assert first == 0 and sums.shape == (1, 24)
    for start, stop in ((0, 1), (3, 11), (8, 24)):
        part = weights[:, start:stop].contiguous()
        [(_, found)] = block_sums(
            part, Rect(0, start, len(part), stop - start), (len(part), 1), "L2"
        )
        assert torch.equal(found[0], sums[0, start:stop])
    uneven = dict(block_sums(weights, whole, (9_000, 5), "L1"))
    assert list(uneven) == [0, 1, 2]
    for i, found in uneven.items():
        rows = weights[i * 9_000 : (i + 1) * 9_000].double().abs()
        torch.testing.assert_close(
            found[0], torch.stack([part.sum() for part in rows.split(5, dim=1)])
        )
