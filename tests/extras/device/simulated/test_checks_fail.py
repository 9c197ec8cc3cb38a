"""Checks of the self-test report what is broken: a wrong or slow kernel, a wait, memory, a missing
event. On the device that is not there, with stand-ins for TorchRec's collections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor, nn

from dist_sparse import MaskEnforcer
from dist_sparse.enforcer.fused import StreamOrder
from dist_sparse.extras.device import (
    kernels,
    selftest,
    training_checks,
    trials,
    update_checks,
)
from dist_sparse.extras.device.trials import Difference, Sizes
from dist_sparse.torchrec.trial import TrialTables
from tests.extras.device.simulated.fake import CUDA, inner
from tests.extras.device.simulated.runs import on_device
from tests.extras.device.simulated.tables import Collection, Kernel, one_rank


@dataclass(frozen=True)
class Small(Sizes):
    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {"t0": (301, 32), "t1": (37, 32)}

    @property
    def small_tables(self) -> dict[str, tuple[int, int]]:
        return {f"t{number}": (100 + number, 16) for number in range(1, 3)}


# Large enough for what does not grow with a table.
SIZES = Small(301, 10_000, 301, tables=2, steps=3, sleep=1)


class Net(nn.Module):
    """A model of tables alone."""

    def __init__(self, tables: Collection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        out = self.tables(features)
        return out.square().mean(), out.detach()


class NoLayers(tuple[()]):
    """In the place of the optimizer of a model's layers, of which there are none."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def stand_in(trial: TrialTables, device: torch.device) -> Net:
    random = torch.Generator().manual_seed(0)
    layouts = [one_rank(*shape) for shape in trial.shapes.values()]
    tables = [
        torch.randn(shape, generator=random).to(DTYPES[trial.data_type])
        for shape in trial.shapes.values()
    ]
    return Net(Collection(layouts, tables, 0, True, names=list(trial.shapes)))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trials, "trial_model", stand_in)
    monkeypatch.setattr(trials, "layers_optimizer", lambda model: NoLayers())
    # torch's profiler sees no kernel here, and torch adds nothing up at a bandwidth.
    monkeypatch.setattr(update_checks, "kernel_seconds", lambda model: {"sweep": 1e-9})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with on_device():
        yield
    dist.destroy_process_group()


def waits_in_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Kernel.forward

    def slow(kernel: Kernel, features: Any) -> Tensor:
        bool(features.values().any())
        return forward(kernel, features)

    monkeypatch.setattr(Kernel, "forward", slow)


def at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    end_step = MaskEnforcer.end_step

    def also(enforcer: Any) -> None:
        end_step(enforcer)
        act(enforcer)

    monkeypatch.setattr(MaskEnforcer, "end_step", also)


def waits_often(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = torch.zeros(1, device=CUDA)
    at_the_end_of_a_step(monkeypatch, lambda enforcer: [flag.item() for _ in range(8)])


def takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_end_of_a_step(monkeypatch, lambda enforcer: torch.zeros(2_000, 128, device=CUDA))


def is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_checks, "kernel_seconds", lambda model: {"sweep": 100.0})


def kernel_scores_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    score_bits = kernels.score_bits
    monkeypatch.setattr(kernels, "score_bits", lambda mean: score_bits(tl.abs(mean - 1.0)))


def update_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamOrder, "before_write", lambda order: None)


def lookup_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before_read = StreamOrder.before_read

    def forgets(order: Any) -> None:
        # The stream is known to later updates, but waits for none.
        stream = torch.cuda.current_stream()
        wait, stream.wait_event = stream.wait_event, lambda event: None  # type: ignore[method-assign]
        before_read(order)
        stream.wait_event = wait  # type: ignore[method-assign]

    monkeypatch.setattr(StreamOrder, "before_read", forgets)


class NoEnforcer:
    def __init__(self, sparsifier: Any) -> None: ...

    def attach(self, optimizer: Any) -> None: ...


def nothing_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MaskEnforcer", NoEnforcer)


def is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's world, whose group is the only one here, says that it is bound to the device."""
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", CUDA)


def is_bound_and_enforces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    is_bound(monkeypatch)
    nothing_is_enforced(monkeypatch)


CASES = [
    (
        training_checks.masks_equal_the_cpus,
        kernel_scores_otherwise,
        "row by norm at 0.5: the masks",
    ),
    (training_checks.ordinary_steps_never_wait, waits_in_a_hook, "the host waits"),
    (update_checks.mask_updates, waits_often, r"1\d waits instead of 5"),
    (update_checks.mask_updates, takes_memory, "more memory instead of"),
    (update_checks.mask_updates, is_slow, "sweep: .* GB/s instead of"),
    (training_checks.streams_are_ordered, update_does_not_wait, "update did not wait"),
    (training_checks.streams_are_ordered, lookup_does_not_wait, "lookup did not wait"),
    (selftest.CHECKS["bfloat16"], nothing_is_enforced, "weights differ by"),
    (training_checks.bound_to_devices, is_bound_and_enforces_nothing, "weights differ by"),
]


@pytest.mark.parametrize(("check", "broken", "says"), CASES)
def test_a_check_reports_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, check: Any, broken: Any, says: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(Difference, match=says):
        check(CUDA, SIZES)


@pytest.mark.parametrize(
    "check",
    [
        training_checks.masks_equal_the_cpus,
        training_checks.ordinary_steps_never_wait,
        training_checks.streams_are_ordered,
        update_checks.mask_updates,
        selftest.CHECKS["bfloat16"],
    ],
)
def test_nothing_is_broken(check: Any) -> None:
    assert check(CUDA, SIZES)


def test_a_world_bound_to_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    is_bound(monkeypatch)
    assert training_checks.bound_to_devices(CUDA, SIZES)


def test_a_sleeping_stream_is_late() -> None:
    """The stand-in can fail: its lookup reads what was written after it."""
    kernel = Kernel([torch.ones(3, 4)], on_device=True)
    side = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    ids, offsets = torch.tensor([1]), torch.tensor([0, 1])
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        found = kernel.look_up(ids, offsets, None, 1)
    inner(kernel.weights()[0]).zero_()
    side.synchronize()
    assert not found.any()
