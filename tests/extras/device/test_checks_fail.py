"""Each check of the self-test reports what is broken, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchrec")

from dist_sparse import ImportanceSparsifier
from dist_sparse.checkpoint.checkpoints import Checkpoints
from dist_sparse.extras.device import selftest, trials, use_checks
from dist_sparse.extras.device.trials import MaskedModel, Sizes
from dist_sparse.masking.masks import BlockMask

SIZES = Sizes(500, 500, 500, tables=3, steps=2, sleep=0)

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def masks_are_wrong(patch: Patch) -> None:
    """One bit of each mask is."""
    selected = ImportanceSparsifier.selected_masks

    def flipped(sparsifier: Any, scored: Any) -> Any:
        found = selected(sparsifier, scored)
        for new in found.values():
            for mask, _ in new.masks:
                mask.bits[0] ^= 1
        return found

    patch.setattr(ImportanceSparsifier, "selected_masks", flipped)


def nothing_is_zeroed(patch: Patch) -> None:
    """The kernel that writes zeros does not."""
    patch.setattr(BlockMask, "apply_all_changed_", lambda changes: None)


class NoEnforcer:
    def __init__(self, sparsifier: Any) -> None: ...

    def attach(self, optimizer: Any) -> None: ...


def nothing_is_enforced(patch: Patch) -> None:
    """Removed weights are read and trained."""
    patch.setattr(trials, "MaskEnforcer", NoEnforcer)


def trains_otherwise(patch: Patch) -> None:
    """The steps of one of two loops write other weights."""
    train = MaskedModel.train

    def also_writes(model: Any, batches: Any) -> None:
        train(model, batches)
        model.shards()[0].mul_(1.0001)

    patch.setattr(MaskedModel, "train", also_writes)


def changes(model: Any) -> Any:
    """Move a layer's weights."""
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "over" in n).add_(0.01)
    return model


def compacts_wrongly(patch: Patch) -> None:
    compact = use_checks.compact
    patch.setattr(use_checks, "compact", lambda *args, **kwargs: changes(compact(*args, **kwargs)))


def expands_wrongly(patch: Patch) -> None:
    expand = use_checks.expand
    patch.setattr(use_checks, "expand", lambda model: changes(expand(model)))


def exports_other_weights(patch: Patch) -> None:
    export = use_checks.export

    def then_writes(model: Any, sparsifier: Any, folder: Any) -> None:
        export(model, sparsifier, folder)
        for data in sparsifier.masks.tables.locate().values():
            for shard in data.shards:
                shard.tensor.mul_(1.1)

    patch.setattr(use_checks, "export", then_writes)


def loads_wrong_weights(patch: Patch) -> None:
    resume = Checkpoints.resume_latest

    def then_writes(checkpoints: Any, **parts: Any) -> Any:
        found = resume(checkpoints, **parts)
        for data in parts["sparse"].masks.tables.locate().values():
            for shard in data.shards:
                shard.tensor.mul_(1.1)
        return found

    patch.setattr(Checkpoints, "resume_latest", then_writes)


def undoes_wrongly(patch: Patch) -> None:
    kind = pytest.importorskip("dist_sparse.extras.guard.undo").LastUpdate
    undo = kind.undo

    def then_writes(last: Any, masks: Any, located: Any) -> None:
        undo(last, masks, located)
        for data in located.values():
            for shard in data.shards:
                shard.tensor.mul_(1.1)

    patch.setattr(kind, "undo", then_writes)


def writes_other_tables(patch: Patch) -> None:
    pytest.importorskip("dist_sparse.extras.codes")
    write = MaskedModel.write

    def doubled(model: Any, tables: Any) -> None:
        write(model, {name: 2 * table for name, table in tables.items()})

    patch.setattr(MaskedModel, "write", doubled)


DIFFER = "weights differ by"
MASKS = "masks of .* differ"
NOT_ZERO = "removed weights are not zero"
Case = tuple[Callable[[Patch], None], str]
BROKEN: dict[str, Case] = {
    "masks": (masks_are_wrong, MASKS),
    "large masks": (masks_are_wrong, MASKS),
    "beyond 2^31 elements": (nothing_is_zeroed, NOT_ZERO),
    "lookup counts": (masks_are_wrong, MASKS),
    "TrainPipelineSparseDist": (trains_otherwise, DIFFER),
    "fused optimizers": (nothing_is_enforced, DIFFER),
    "mean": (nothing_is_enforced, DIFFER),
    "sequence": (nothing_is_enforced, DIFFER),
    "weighted": (nothing_is_enforced, DIFFER),
    "int32 ids": (nothing_is_enforced, DIFFER),
    "float16": (nothing_is_enforced, DIFFER),
    "column-wise": (nothing_is_enforced, DIFFER),
    "data-parallel": (nothing_is_enforced, DIFFER),
    "VBE": (nothing_is_enforced, DIFFER),
    "fused_uvm": (nothing_is_enforced, DIFFER),
    "many tables": (nothing_is_enforced, DIFFER),
    "float16, rounded": (nothing_is_zeroed, NOT_ZERO),
    "compact": (compacts_wrongly, "compact model differ"),
    "export": (exports_other_weights, "served outputs"),
    "checkpoints": (loads_wrong_weights, "weights, 0 steps after"),
    "guard": (undoes_wrongly, "weights after an undone update"),
    "codes": (writes_other_tables, "books differ"),
}

# Of these, one for each kind of fault runs in every run.
QUICK = {"mean", "compact", "checkpoints"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in BROKEN]
)
@pytest.mark.filterwarnings("ignore:Masks and weights differ")
def test_a_check_reports_what_is_broken(monkeypatch: Patch, name: str) -> None:
    broken, says = BROKEN[name]
    broken(monkeypatch)
    with pytest.raises((trials.Difference, ValueError), match=says):
        selftest.CHECKS[name](torch.device("cpu"), SIZES)


@pytest.mark.slow
def test_expanding_is_compared_too(monkeypatch: Patch) -> None:
    expands_wrongly(monkeypatch)
    with pytest.raises(trials.Difference, match="expanded model differ"):
        selftest.CHECKS["compact"](torch.device("cpu"), SIZES)


def test_every_check_has_been_broken() -> None:
    """Here, on the simulated device, or, of the same code as another check's, on a GPU alone."""
    simulated = {"ordinary steps", "mask updates", "streams"}
    same_code = {"TrainPipelineFusedSparseDist", "bfloat16", "fused_uvm_caching"}
    assert selftest.CHECKS.keys() == BROKEN.keys() | simulated | same_code


def test_runs_that_differ_in_one_row() -> None:
    start = [torch.zeros(1000, 8)]
    expected = [torch.ones(1000, 8)]
    near = [torch.ones(1000, 8) + 1e-6]
    assert trials.compare_runs("x", near, expected, start).startswith("within")
    assert trials.compare_runs("x", expected, expected, start) == "bit for bit"
    wrong = [expected[0].clone()]
    wrong[0][7] = 0
    for found in (wrong, [expected[0] * torch.nan]):
        with pytest.raises(trials.Difference):
            trials.compare_runs("x", found, expected, start)
    with pytest.raises(trials.Difference, match="nothing was trained"):
        trials.compare_runs("x", start, start, start)
