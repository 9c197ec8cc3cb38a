"""Training on the device: masks and weights equal the CPU's, and the costs stay below their
ceilings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_sparse.enforcer.rows import EVERY
from dist_sparse.extras.device import flat_scores, row_kernels
from dist_sparse.masking import device as device_module
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Rect
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.ceilings import (
    FIRST_STEP,
    GROWS,
    ORDINARY_STEP,
    SAMPLED_SEQUENCES,
    SAMPLED_STEP,
    UPDATE,
    UPDATE_BY_TOTALS,
    above,
)
from tests.extras.device.simulated.fake import counting, cuda, inner
from tests.extras.device.simulated.runs import BLOCKS, Run, on_device
from tests.extras.device.simulated.tables import Kernel, SequenceKernel, one_rank

SCORES = ["norm", "frequency", "accumulator", "norm_accumulator"]

# A quarter of what a device takes at a time, so that tables may be a quarter too.
PIECES = replace(device_module.ON_ACCELERATOR, elements=1 << 24, least=1 << 19, scores=1 << 20)
SMALL = {name: (1 << 14, 8) if name == "row" else (1 << 11, 128) for name in BLOCKS}


def trained(device: str, block: Any, **options: Any) -> tuple[Run, dict[str, Spent]]:
    """Two training steps between mask updates, and what the parts of training cost."""
    with on_device():
        run = Run(device, block, **options)
        run.update()
        run.train(2)
        spent = {"ordinary": run.ordinary_step(), "update": run.update(0.6)}
        spent["first"] = run.ordinary_step()
        run.train()
        run.enforcer.settle()
    return run, spent


@pytest.mark.parametrize(
    ("name", "score"),
    [
        # A score of finer blocks takes some ten seconds.
        pytest.param(name, score, marks=[pytest.mark.slow] if name != "row" else [])
        for name in BLOCKS
        for score in SCORES
    ],
)
def test_masks_and_weights_are_the_cpus(name: str, score: str) -> None:
    """And the costs are at most their ceilings."""
    expected, _ = trained("cpu", BLOCKS[name], score=score)
    found, spent = trained("cuda", BLOCKS[name], score=score)
    assert all(map(torch.equal, expected.masks(), found.masks()))
    assert all(map(torch.equal, expected.kernel.sums, found.kernel.sums))
    assert torch.equal(expected.kernel.memory, found.kernel.memory)
    stored = found.sparsifier.masks.tables
    assert all(mask.bits.is_cuda for table in stored.names for mask in stored.masks(table))
    most = ORDINARY_STEP.get(f"{name}, {score}", ORDINARY_STEP[name])
    assert not above(spent["ordinary"], most)
    with_norms = score in ("norm", "norm_accumulator")
    assert not above(spent["update"], (UPDATE if with_norms else UPDATE_BY_TOTALS)[name])
    if score == "norm":
        assert not above(spent["first"], FIRST_STEP[name])


@pytest.mark.parametrize("kind", [Kernel, SequenceKernel])
@pytest.mark.parametrize("name", SAMPLED_STEP)
def test_what_a_sampled_step_costs(name: str, kind: type[Kernel]) -> None:
    """What others cost, however many tables there are."""
    found = []
    block, _, score = name.partition(", ")
    with on_device():
        for layouts in (None, [one_rank(500, 128)] * 8):
            run = Run("cuda", BLOCKS[block], layouts, score=score or "norm", kind=kind)
            run.update()
            run.train(EVERY)
            found.append((run.ordinary_step(), run.ordinary_step()))
    (sampled, next_one), (of_many, _) = found
    most = (SAMPLED_SEQUENCES if kind is SequenceKernel else SAMPLED_STEP)[name]
    assert not above(sampled, most)
    assert not above(next_one, most)
    assert of_many.launches == sampled.launches == next_one.launches


@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_of_an_id(weighted: bool) -> None:
    """It is read, and its weight written: 12 bytes; 16 where it has a weight already. One more, of
    the mask, is read from the cache."""
    with on_device():
        run = Run("cuda", BLOCKS["row"], [one_rank(500, 4)] * 8)
        run.update()
        run.train()
        features = run.features(bags=512, each=4, weighted=weighted)
        with counting() as meter:
            run.model(features)
    ids = 8 * 512 * 4
    assert meter.spent.launches == 1
    # Kept ids alone read the weight that they have.
    assert 12 * ids < meter.spent.moved <= (16 if weighted else 12) * ids + ids + 5_000


def samples(device: str, name: str, kind: type[Kernel], finer: Any) -> list[Tensor]:
    """Weights and sampled lookups, with and without weighted ids."""
    widths = (8, 8, 8) if kind is SequenceKernel else (32, 8, 32)
    layouts = [one_rank(rows, cols) for rows, cols in zip((301, 40, 37), widths, strict=True)]
    with on_device():
        run = Run(device, BLOCKS[name], layouts, kind=kind, finer=finer)
        run.update(0.8)
        for weighted in (False, kind is not SequenceKernel):
            for _ in range(EVERY + 1):
                run.model(run.features(weighted=weighted)).square().sum().backward()
        tables = run.sparsifier.masks.tables
        shards = [held for name in tables.names for held in tables.table(name).shards]
        found = [inner(held.lookups) for held in shards]
        # All lookups of the sampled forwards, and not each of a removed row.
        assert all(int(total) == 3 * 32 and 0 < int(removed) < total for total, removed in found)
        return [*found, *run.weights(), *run.kernel.sums]


@pytest.mark.parametrize("kind", [Kernel, SequenceKernel])
@pytest.mark.parametrize("finer", [None, {"t1": BLOCKS["1x4"]}], ids=["equal", "finer"])
@pytest.mark.parametrize("name", ["row", "2x2"])
def test_samples_are_the_cpus(name: str, finer: Any, kind: type[Kernel]) -> None:
    """Where the blocks of tables differ too."""
    found = [samples(device, name, kind, finer) for device in ("cpu", "cuda")]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [Kernel, SequenceKernel])
def test_a_table_that_loses_nothing_is_not_sampled(kind: type[Kernel]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with on_device():
            run = Run(device, BLOCKS["1x4"], [one_rank(300, 32)] * 2, kind=kind)
            run.sparsifier.data_groups["t1"]["sparsity_level"] = 0.0
            run.sparsifier.step()
            run.train(EVERY + 1)
            tables = run.sparsifier.masks.tables
            found += [inner(tables.table(name).shards[0].lookups).tolist() for name in ("t0", "t1")]
    assert found[:2] == found[2:]
    assert found[1] == [0, 0] and found[0][0] == 64


@pytest.mark.parametrize(("level", "launches"), [(0.0, 0), (0.5, 1)])
def test_a_sample_where_no_row_is_dirty(level: float, launches: int) -> None:
    """In the first forward after all rows were cleaned, no other launch reads the ids: the sample
    takes one, as cleaning does in the others. Nothing is sampled before something is removed."""
    with on_device():
        run = Run("cuda", BLOCKS["1x4"], [one_rank(300, 32)] * 2)
        run.update(level)
        run.train(EVERY)
        found = []
        for _ in range(2):
            run.enforcer.settle()
            features = run.features()
            with counting() as meter:
                run.model(features)
            found.append(meter.spent.launches)
    assert found == [launches, 0]


def test_what_a_sample_keeps_without_a_backward() -> None:
    """Nothing: as where the tables are frozen."""
    with on_device():
        run = Run("cuda", BLOCKS["row"], [one_rank(60, 32)] * 2, kind=SequenceKernel)
        run.update()
        run.train(EVERY)
        features = run.features()
        run.kernel.freeze()
        before = torch.cuda.memory_allocated()
        run.model(features)
        assert torch.cuda.memory_allocated() == before


def test_masks_that_are_updated_before_the_backward_of_a_sampled_sequence() -> None:
    found = []
    for device in ("cpu", "cuda"):
        with on_device():
            run = Run(device, BLOCKS["row"], [one_rank(60, 32)] * 2, kind=SequenceKernel)
            run.update(0.2)
            # The first forward after an update is sampled.
            output = run.model(run.features())
            run.update(0.8)
            output.square().sum().backward()
            found.append([*run.weights(), *run.kernel.sums])
    assert all(map(torch.equal, *found))


def grows(what: str) -> list[Any]:
    """The blocks, those marked for which this is known to grow."""
    reason = f"a mask update needs more {what} for a larger table"
    mark = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
    return [pytest.param(name, marks=[mark] * (name in GROWS[what])) for name in BLOCKS]


def update_of(name: str, times: int) -> Spent:
    """A mask update of a table with this many times the rows."""
    rows, cols = SMALL[name]
    with on_device(), mock.patch.object(device_module, "ON_ACCELERATOR", PIECES):
        run = Run("cuda", BLOCKS[name], layouts=[one_rank(times * rows, cols)])
        run.update()
        run.train()
        return run.update(0.6)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_waits_do_not_grow_with_the_number_of_tables(name: str) -> None:
    with on_device():
        run = Run("cuda", BLOCKS[name], layouts=[one_rank(500, 128)] * 8)
        run.update()
        run.train()
        assert run.update(0.6).waits <= UPDATE[name].waits
        assert run.ordinary_step().waits <= FIRST_STEP[name].waits
        assert run.ordinary_step().waits == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", grows("waits"))
def test_waits_do_not_grow_with_the_table(name: str) -> None:
    small, large = update_of(name, 1), update_of(name, 2)
    assert large.waits <= small.waits, large.lines


@pytest.mark.slow
@pytest.mark.parametrize("name", grows("launches"))
def test_launches_do_not_grow_with_the_table(name: str) -> None:
    assert update_of(name, 2).launches <= update_of(name, 1).launches


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.3, 0.9])
@pytest.mark.parametrize("name", BLOCKS)
def test_ties_at_the_threshold_are_the_cpus(name: str, level: float) -> None:
    """Few different weights: the threshold has ties in every table, of blocks that score 0 too."""
    layouts = [one_rank(601, 32), one_rank(37, 32), one_rank(300, 32)]
    found = []
    with on_device():
        for device in ("cpu", "cuda"):
            run = Run(device, BLOCKS[name], layouts)
            for table in run.kernel.rows():
                # Rows of one value each, of which a sixth is 0.
                table.copy_((table[:, :1] * 2).round().expand_as(table) / 2)
            run.update(level)
            run.train(2)
            run.update(level + 0.05)
            found.append([*run.masks(), *run.weights()])
    assert all(map(torch.equal, *found))


def few_values(device: str, tables: int) -> tuple[Run, Spent]:
    """A mask update where all thresholds tie, in a few blocks of each table."""
    with on_device():
        run = Run(device, BLOCKS["1x4"], [one_rank(500, 128)] * tables)
        for table in run.kernel.rows():
            table.copy_((table * 64).round() / 64)
        run.update()
        run.train(2)
        spent = run.update(0.6)
        run.enforcer.settle()
    return run, spent


@pytest.mark.slow
def test_ties_are_read_at_once() -> None:
    """However many tables have some."""
    expected, _ = few_values("cpu", 8)
    found, spent = few_values("cuda", 8)
    assert all(map(torch.equal, expected.masks(), found.masks()))
    assert spent.waits <= UPDATE["1x4"].waits + 1, spent.lines
    assert spent.launches <= 32


def test_masks_without_lists_are_the_cpus() -> None:
    """Where too many blocks would be listed, rounds read the weights."""
    expected, _ = few_values("cpu", 2)
    with mock.patch.object(flat_scores, "_fits", lambda *_: False):
        found, _ = few_values("cuda", 2)
    assert all(map(torch.equal, expected.masks(), found.masks()))
    assert torch.equal(expected.kernel.memory, found.kernel.memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_levels_of_0_and_1_are_the_cpus(name: str) -> None:
    found = []
    with on_device():
        for device in ("cpu", "cuda"):
            run = Run(device, BLOCKS[name], [one_rank(301, 32)] * 2)
            for level in (0.0, 0.4, 1.0, 0.0, 0.7):
                run.train()
                run.update(level)
                found += [(level, mask.clone()) for mask in run.masks()]
            found += [(1.0, table) for table in run.weights()]
    half = len(found) // 2
    for (_, expected), (level, other) in zip(found[:half], found[half:], strict=True):
        assert torch.equal(expected, other), level


@pytest.mark.parametrize("bits", [0x7FC00000, -1, 0x7F800000], ids=["nan", "-nan", "inf"])
@pytest.mark.parametrize("name", BLOCKS)
def test_scores_that_are_not_finite_are_refused(name: str, bits: int) -> None:
    with on_device():
        run = Run("cuda", BLOCKS[name], [one_rank(301, 32)] * 2)
        run.update(0.5)
        before = [mask.clone() for mask in run.masks()]
        run.kernel.rows()[1].view(torch.int32)[7, 5] = bits
        with pytest.raises(ValueError, match=r"'t1': the block at row [67], column \d+ scores"):
            run.update(0.6)
        assert all(map(torch.equal, before, run.masks()))


def test_ids_of_features_with_batches_of_different_sizes() -> None:
    """The host knows where their ids end."""
    mask = BlockMask(Rect(0, 0, 3, 4), (1, 4), cuda(torch.tensor([0b101], dtype=torch.uint8)))
    with on_device():
        kept = row_kernels.TritonLookups([(mask, None, True), None])
        found = kept.flags(cuda(torch.tensor([1, 0, 2, 1])), [0, 3, 4])
        assert found.is_cuda
        assert inner(found).tolist() == [False, True, True, True]


@pytest.mark.parametrize("score", ["frequency", "accumulator"])
def test_lookups_tell_nothing_of_zeros(score: str) -> None:
    """What a lookup count removes is written in every update: a count of 0 does not say that the
    row is zero, as a norm of 0 does."""
    with on_device():
        run = Run("cuda", BLOCKS["row"], [one_rank(301, 32)], score=score)
        run.train()
        run.update(0.5)
        [mask] = run.sparsifier.masks.tables.masks("t0")
        removed = (inner(mask.dead_rows()) & (run.kernel.sums[0] == 0)).nonzero().flatten()
        # As a library that writes behind torch's back.
        run.kernel.rows()[0][removed[0]] = 1.0
        run.update(0.6)
        assert not run.kernel.rows()[0][removed[0]].any()
