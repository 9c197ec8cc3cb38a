"""Tables in unified memory whose rows are cached on the device, by a stand-in for FBGEMM's cache."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from dist_sparse.tables.shards import ROW
from tests.extras.device.simulated.ceilings import ORDINARY_STEP, UPDATE
from tests.extras.device.simulated.runs import Run, on_device
from tests.extras.device.simulated.tables import CachingKernel, Kernel

ROWS = (1, ROW)


def trained(device: str, **options: Any) -> Run:
    with on_device():
        run = Run(device, ROWS, **options)
        for level in (0.3, 0.5, 0.6):
            run.train(2)
            run.update(level)
        run.train()
        run.enforcer.settle()
    return run


@pytest.mark.parametrize("score", ["norm", "frequency", "norm_accumulator"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_masks_and_weights_are_those_of_uncached_tables(device: str, score: str) -> None:
    expected = trained("cpu", score=score)
    found = trained(device, score=score, kind=CachingKernel)
    assert all(map(torch.equal, expected.masks(), found.masks()))
    assert all(map(torch.equal, expected.kernel.sums, found.kernel.sums))
    assert torch.equal(expected.kernel.memory, found.kernel.memory)


def test_the_stand_in_can_fail() -> None:
    """Without a write-back, old rows are scored, and removed ones come back."""
    expected = trained("cpu")
    with mock.patch.object(CachingKernel, "write_back", Kernel.write_back):
        found = trained("cuda", kind=CachingKernel)
    assert not torch.equal(expected.kernel.memory, found.kernel.memory)


def test_what_it_costs() -> None:
    """An ordinary step neither waits nor writes back; a mask update waits as for other tables."""
    with on_device():
        run = Run("cuda", ROWS, kind=CachingKernel)
        run.update()
        run.train(2)
        with mock.patch.object(CachingKernel, "write_back", side_effect=AssertionError):
            assert run.ordinary_step().waits == ORDINARY_STEP["row"].waits == 0
        assert run.update(0.6).waits <= UPDATE["row"].waits


def test_loaded_rows_are_masked() -> None:
    with on_device():
        # Torch counts writes of real tensors alone.
        run = Run("cpu", ROWS, kind=CachingKernel)
        run.update(0.5)
        run.train()
        with torch.no_grad():
            run.kernel.write_back()
            run.kernel.weights()[0].fill_(1.0)
        run.train()
        [first, _] = run.weights()
        mask = run.sparsifier.full_mask("t0")
    removed = mask.eq(0).all(1)
    assert removed.any() and not first[removed].any() and first[~removed].all()


@pytest.mark.parametrize("block", [(1, 4), (2, 2), (1, 1)])
def test_finer_blocks_are_refused(block: tuple[int, int]) -> None:
    with (
        on_device(),
        pytest.raises(
            ValueError, match=r"'t0': .* can't zero parts of cached rows, as blocks of . x . need"
        ),
    ):
        Run("cuda", block, kind=CachingKernel)


def test_a_block_that_gets_finer_is_refused() -> None:
    """On the mask update, before anything is changed."""
    with on_device():
        run = Run("cuda", ROWS, kind=CachingKernel)
        run.update(0.5)
        before = run.weights()
        run.sparsifier.data_groups["t1"].update(sparse_block_shape=(1, 4), zeros_per_block=None)
        with pytest.raises(ValueError, match=r"'t1': .* 'fused_uvm_caching' .* blocks of 1 x 4"):
            run.update(0.9)
        assert all(map(torch.equal, before, run.weights()))


def test_parts_of_blocks_are_refused() -> None:
    with on_device(), pytest.raises(ValueError, match=r"'t0': .* blocks of 1 x 1"):
        Run("cuda", ROWS, kind=CachingKernel, zeros_per_block=64)


def test_rows_that_would_need_zeroing_are_refused() -> None:
    wrong = r"\['t0', 't1'\] have the compute kernel 'fused_uvm_caching'.* eps > 0"
    with on_device(), pytest.raises(ValueError, match=wrong):
        Run("cuda", ROWS, score="accumulator", kind=CachingKernel)
    moves = mock.patch.object(CachingKernel, "keeps_zeros", False)
    with on_device(), moves, pytest.raises(ValueError, match=wrong):
        Run("cuda", ROWS, kind=CachingKernel)


def test_a_lookup_without_its_backward() -> None:
    """Its rows would be written to places that others have by then."""
    with on_device():
        run = Run("cuda", ROWS, kind=CachingKernel)
        out = run.model(run.features())
        with pytest.raises(ValueError, match="waits for its backward"):
            run.update(0.6)
        out.sum().backward()
        run.update(0.6)
        # An output that gets no backward counts until it is freed.
        out = run.model(run.features())
        del out
        run.update(0.7)
