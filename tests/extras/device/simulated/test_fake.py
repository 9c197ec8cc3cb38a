"""The device that is not there refuses and counts what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.extras.device.simulated.fake import CUDA, DeviceMix, counting, cuda, fake_cuda, inner

MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda there, here: there + here,
    "cat": lambda there, here: torch.cat([there, here]),
    "index of the host's": lambda there, here: here[there],
    "index_select": lambda there, here: there.index_select(0, here),
    "written by index": lambda there, here: there.__setitem__(there, here),
    "numpy": lambda there, here: there.numpy(),
}


@pytest.mark.parametrize("name", MIXES)
def test_it_refuses_to_mix_devices(name: str) -> None:
    with fake_cuda(), pytest.raises((DeviceMix, TypeError)):
        MIXES[name](torch.arange(3, device="cuda"), torch.arange(3))


WAITS: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "arithmetic": (0, lambda there: (there * 2 + 1).sum()),
    "a scalar of the host": (0, lambda there: there + torch.tensor(2)),
    "views": (0, lambda there: there[1:].view(-1, 1).t()),
    "where": (0, lambda there: torch.where(there > 1, 0, there)),
    "factories": (0, lambda there: torch.zeros(3, device=there.device) + there),
    "if": (1, lambda there: bool((there > 1).any())),
    "item": (1, lambda there: there[0].item()),
    "list": (1, lambda there: there.tolist()),
    "to the host": (1, lambda there: there.cpu()),
    "to the device": (1, lambda there: torch.arange(3).to(there.device)),
    "from pinned memory": (
        0,
        lambda there: torch.tensor([1], pin_memory=True).to(there.device, non_blocking=True),
    ),
    "by flags": (1, lambda there: there[there > 1]),
    "nonzero": (1, lambda there: there.nonzero()),
    "bincount": (2, lambda there: there.bincount(minlength=3)),
}


@pytest.mark.parametrize("name", WAITS)
def test_it_counts_waits(name: str) -> None:
    expected, call = WAITS[name]
    with fake_cuda():
        there = torch.arange(3, device="cuda")
        with counting() as meter:
            call(there)
    assert meter.spent.waits == expected, meter.spent.lines


def test_it_counts_launches_bytes_and_memory() -> None:
    with fake_cuda():
        one = torch.zeros(1000, device="cuda")
        with counting() as meter:
            two = torch.empty(1000, device="cuda")  # no launch
            torch.add(one, 1, out=two)
            two[:10].view(-1, 2)
            del two
            one.mul_(2)
    # 4,000 bytes are read and written by add; mul_ touches one tensor once.
    assert (meter.spent.launches, meter.spent.moved, meter.spent.peak) == (2, 12_000, 4_000)


def test_values_are_those_of_the_memory_behind_it() -> None:
    memory = torch.arange(4.0)
    with fake_cuda():
        there = cuda(memory)
        assert there.device == CUDA and there.is_cuda
        there[1:3].mul_(10)
        there.index_fill_(0, torch.tensor([0], device="cuda"), 7)
        assert inner(there.data) is not memory
    assert memory.tolist() == [7, 10, 20, 3]
