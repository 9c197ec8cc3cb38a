"""Each check of the self-test reports what is broken, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchrec")

from dist_sparse import ImportanceSparsifier
from dist_sparse.checkpoint.checkpoints import Checkpoints
from dist_sparse.extras.device import selftest, trials, use_checks
from dist_sparse.extras.device.trials import MaskedModel, Sizes
from dist_sparse.masking.masks import BlockMask
from tests.dist.enforcing import kernels
from tests.enforcer.test_unified_memory import Cache

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


def has_a_cache(patch: Patch) -> None:
    """Tables have a cache of rows, as on a GPU."""
    trial_model = trials.trial_model

    def cached(trial: Any, device: Any) -> Any:
        model = trial_model(trial, device)
        for each in kernels(model):
            Cache(each.emb_module)
        return model

    patch.setattr(trials, "trial_model", cached)


def cache_keeps_removed_rows(patch: Patch) -> None:
    """Neither a mask update nor a check writes the cache back and empties it."""
    has_a_cache(patch)
    patch.setattr(Cache, "flush", lambda cache: None)
    patch.setattr(Cache, "reset", lambda cache: None)


def has_streams(patch: Patch) -> None:
    """Stand-ins for streams, on which a CPU works in the order of the calls."""
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: mock.Mock())


def trains_otherwise_with_streams(patch: Patch) -> None:
    has_streams(patch)
    trains_otherwise(patch)


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


def samples_too_often(patch: Patch) -> None:
    patch.setattr("dist_sparse.enforcer.rows.EVERY", 8)


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
    "sampled lookups": (samples_too_often, "lookups of 'one', and of its removed rows"),
    "TrainPipelineSparseDist": (trains_otherwise, DIFFER),
    "TrainPipelineFusedSparseDist": (trains_otherwise_with_streams, DIFFER),
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
    "fused_uvm_caching": (cache_keeps_removed_rows, NOT_ZERO),
    "compact": (compacts_wrongly, "compact model differ"),
    "export": (exports_other_weights, "served outputs"),
    "checkpoints": (loads_wrong_weights, "weights, 0 steps after"),
    "guard": (undoes_wrongly, "weights after an undone update"),
    "codes": (writes_other_tables, "books differ"),
    # A CPU's world is bound to no device.
    "device_id=": (lambda patch: None, "the world is bound to None"),
}

# Of these, one for each kind of fault runs in every run.
QUICK = {"mean", "compact", "checkpoints", "device_id="}


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
def test_decoded_lookups_are_compared_too(monkeypatch: Patch) -> None:
    hooks = pytest.importorskip("dist_sparse.extras.codes.decoding").DecodingHooks
    entries_of = hooks.entries_of

    def twice_as_large(these: Any, books: Any) -> Any:
        """Of the sharded model alone."""
        return [each * (1 + ("coded" in books)) for each in entries_of(these, books)]

    monkeypatch.setattr(hooks, "entries_of", twice_as_large)
    with pytest.raises(trials.Difference, match="decoded lookups differ"):
        selftest.CHECKS["codes"](torch.device("cpu"), SIZES)


STAND_INS = {"TrainPipelineFusedSparseDist": has_streams, "fused_uvm_caching": has_a_cache}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAND_INS)
def test_with_stand_ins_nothing_is_broken(monkeypatch: Patch, name: str) -> None:
    STAND_INS[name](monkeypatch)
    assert selftest.CHECKS[name](torch.device("cpu"), SIZES)


@pytest.mark.slow
def test_expanding_is_compared_too(monkeypatch: Patch) -> None:
    expands_wrongly(monkeypatch)
    with pytest.raises(trials.Difference, match="expanded model differ"):
        selftest.CHECKS["compact"](torch.device("cpu"), SIZES)


def test_every_check_has_been_broken() -> None:
    """Here or on the simulated device."""
    simulated = {"ordinary steps", "mask updates", "streams", "bfloat16"}
    assert selftest.CHECKS.keys() == BROKEN.keys() | simulated


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
