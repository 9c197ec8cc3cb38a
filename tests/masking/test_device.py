"""The counts of accelerators, taken on a CPU: the same integers as a CPU's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dist_sparse.groups import Group
from dist_sparse.masking import device
from dist_sparse.masking.device import count_each, count_within, on_host
from dist_sparse.masking.scores import Segment
from dist_sparse.masking.selection import Candidates, select_smallest
from dist_sparse.tables.shards import sent


@pytest.mark.parametrize("n", [0, 1, 255, 256, 1000, 4096])
def test_counts_are_those_of_bincount(n: int) -> None:
    numbers = torch.randint(40, (n,), dtype=torch.int32)
    assert torch.equal(count_each(numbers.clone(), 40), torch.bincount(numbers, minlength=40))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_outside_the_buckets_do_not_count(dtype: torch.dtype) -> None:
    numbers = torch.randint(-1000, 1 << 30, (5000,), dtype=dtype)
    numbers[:4000] %= 3000
    inside = numbers[(numbers >= 512) & (numbers < 512 + 16 * 64)]
    expected = torch.bincount((inside - 512) >> 6, minlength=16)
    assert torch.equal(count_within(numbers, 512, 6, 16), expected)


def test_small_copies_keep_order_and_shape() -> None:
    tensors = [torch.arange(4).view(2, 2), torch.tensor(7), torch.zeros(0, dtype=torch.int64)]
    assert all(map(torch.equal, on_host(tensors), tensors))
    assert sent([1, 2], torch.device("cpu")).tolist() == [1, 2]


@pytest.mark.parametrize("values", [1 << 29, 50, 3])
@pytest.mark.parametrize("k", [1, 700, 1900])
def test_thresholds_and_masks_do_not_depend_on_the_device(
    values: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties and zeros included: few values tie often."""
    generator = torch.Generator().manual_seed(k)
    pieces = [torch.randint(values, (20, 50), generator=generator) for _ in range(2)]

    def removed() -> torch.Tensor:
        segment = Segment(3, range(5, 55), 70)
        for piece in pieces:
            segment.add((piece * 2).to(torch.int32))
        candidates = Candidates("table", k, 43 * 70, [segment])
        [threshold] = select_smallest([candidates], Group())
        return torch.cat([threshold.removes(segment, *chunk) for chunk in segment.chunks()])

    expected = removed()
    assert int(expected.sum()) == k
    monkeypatch.setattr(Segment, "on_cpu", False)
    assert torch.equal(removed(), expected)


def test_sizes_are_found_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ON_CPU", replace(device.ON_CPU, flags=8))
    assert device.pieces_on(torch.device("cpu")).flags == 8
    assert device.pieces_on(torch.device("cuda")) is device.ON_ACCELERATOR
