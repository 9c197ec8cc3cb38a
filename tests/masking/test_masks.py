"""Packed masks equal dense ones."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_sparse.masking.masks import BlockMask, count_bits, pack, places_of, positions, unpack
from dist_sparse.tables.shards import Rect, grid_of

pytestmark = pytest.mark.whole  # the masks of contract C1

CPU = torch.device("cpu")


@st.composite
def masks(draw: st.DrawFn) -> BlockMask:
    rect = Rect(
        *(draw(st.integers(0, 20)) for _ in range(2)), *(draw(st.integers(1, 40)) for _ in range(2))
    )
    block = draw(st.sampled_from([(1, 1), (1, 4), (4, 1), (3, 5), (1, 64), (64, 1), (8, 8)]))
    grid = grid_of(rect, block)
    seed = draw(st.integers(0, 2**30))
    kept = torch.rand(grid.rows * grid.cols, generator=torch.Generator().manual_seed(seed)) < 0.5
    return BlockMask(rect, block, pack(kept))


def dense(mask: BlockMask) -> torch.Tensor:
    """By the definition: each element asks for the bit of its block."""
    flags = unpack(mask.bits, mask.blocks).view(mask.grid.rows, mask.grid.cols)
    rect, (height, width) = mask.rect, mask.block
    return torch.tensor(
        [
            [
                bool(flags[r // height - mask.grid.row, c // width - mask.grid.col])
                for c in range(rect.col, rect.col_end)
            ]
            for r in range(rect.row, rect.row_end)
        ]
    )


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
def test_pack_and_unpack_are_inverse(count: int) -> None:
    flags = torch.rand(count) < 0.3
    packed = pack(flags)
    assert packed.numel() == -(-count // 8)
    assert torch.equal(unpack(packed, count), flags)
    assert count_bits(packed) == int(flags.sum())
    assert torch.equal(positions(packed), flags.nonzero().flatten())
    assert [int(byte) >> bit & 1 for byte in packed for bit in range(8)][
        :count
    ] == flags.int().tolist()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("first", [0, 3, 8])
def test_places_of_few_and_of_many(count: int, share: float, first: int) -> None:
    flags = (torch.rand(first + count) < share)[first:]
    expected = flags.nonzero().flatten()
    assert torch.equal(places_of(flags), expected)
    assert torch.equal(places_of(flags.to(torch.uint8)), expected)


@settings(max_examples=100, deadline=None)
@given(masks(), st.integers(0, 2000))
def test_chunks_of_block_rows_cover_the_mask_and_begin_at_bytes(mask: BlockMask, most: int) -> None:
    chunks = list(mask.row_chunks(most))
    assert [row for chunk in chunks for row in range(*chunk)] == list(range(mask.grid.rows))
    assert all(
        (last - first) * mask.grid.cols <= max(most, 8 * mask.grid.cols) for first, last in chunks
    )
    assert torch.equal(torch.cat([mask.flags(*chunk) for chunk in chunks]), mask.flags())


def test_masks_are_frozen() -> None:
    mask = BlockMask.full(Rect(0, 0, 4, 4), (1, 4), CPU)
    with pytest.raises(FrozenInstanceError):
        mask.bits = torch.zeros(1, dtype=torch.uint8)  # type: ignore[misc]
    assert not mask.removes and mask == mask and mask != BlockMask.full(mask.rect, mask.block, CPU)


@settings(max_examples=100, deadline=None)
@given(masks())
def test_dense_is_by_definition(mask: BlockMask) -> None:
    assert torch.equal(mask.dense().bool(), dense(mask))
    full = BlockMask.full(mask.rect, mask.block, CPU)
    assert torch.equal(full.bits, pack(torch.ones(mask.blocks, dtype=torch.bool)))


@settings(max_examples=100, deadline=None)
@given(masks(), masks(), st.booleans())
def test_zeros_are_written_where_removed_and_nowhere_else(
    mask: BlockMask, other: BlockMask, contiguous: bool
) -> None:
    rect = mask.rect
    weight = torch.rand(rect.rows, rect.cols) + 1
    weight = weight if contiguous else torch.cat([weight, weight], 1)[:, : rect.cols]
    weight[0, 0] = torch.nan
    was, kept = weight.clone(), dense(mask)
    mask.apply_(weight)
    torch.testing.assert_close(weight, torch.where(kept, was, 0.0), equal_nan=True, rtol=0, atol=0)

    weight.copy_(was)
    before = BlockMask(rect, mask.block, pack(torch.rand(mask.blocks) < 0.5))
    BlockMask.apply_all_changed_([(mask, weight, before, None)])
    torch.testing.assert_close(
        weight, torch.where(kept | ~dense(before), was, 0.0), equal_nan=True, rtol=0, atol=0
    )


@settings(max_examples=100, deadline=None)
@given(masks(), st.data())
def test_a_mask_survives_being_cut_and_put_together(mask: BlockMask, data: st.DataObject) -> None:
    rect = mask.rect
    row, col = data.draw(st.integers(0, rect.rows)), data.draw(st.integers(0, rect.cols))
    parts = [
        Rect(rect.row, rect.col, row, col),
        Rect(rect.row, rect.col + col, row, rect.cols - col),
        Rect(rect.row + row, rect.col, rect.rows - row, rect.cols),
    ]
    pieces = [mask.cut(part) for part in parts if part.numel]
    again = BlockMask.assemble(rect, mask.block, pieces, CPU)
    assert torch.equal(again.bits, mask.bits)
    if len(pieces) > 1 and sum(p.blocks for p in pieces) == mask.blocks:
        with pytest.raises(ValueError, match="do not cover"):
            BlockMask.assemble(rect, mask.block, pieces[1:], CPU)


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 bytes"):
        BlockMask(Rect(0, 0, 9, 4), (1, 4), torch.zeros(1, dtype=torch.uint8))


def test_bits_behind_the_last_block_write_nothing() -> None:
    """Of many blocks whose number 8 does not divide: some bits of the last byte are of none."""
    rows = 2403
    flags = torch.rand(rows, 3) < 0.5
    mask = BlockMask(Rect(0, 0, rows, 12), (1, 4), pack(flags.flatten()))
    weight = torch.ones(rows, 12)
    mask.apply_(weight)
    assert torch.equal(weight, flags.repeat_interleave(4, 1).float())
