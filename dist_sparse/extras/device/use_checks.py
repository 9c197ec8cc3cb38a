"""Checks of the self-test on what a masked model is used for: compact tables, artifacts,
checkpoints, updates that a guard undoes, and codes."""

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.checkpoint.checkpoints import Checkpoints
from dist_sparse.compaction.compact import compact, expand
from dist_sparse.extras.device.trials import (
    Difference,
    MaskedModel,
    NotRun,
    Sizes,
    random_tables,
    require_equal_masks,
)
from dist_sparse.groups import world_group
from dist_sparse.serving.books import LEAST_ROWS
from dist_sparse.serving.export import export
from dist_sparse.serving.served import load_served
from dist_sparse.torchrec.trial import TrialTables, trial_batch


def trained(device: torch.device, sizes: Sizes) -> MaskedModel:
    """Return a model of the default mode, after five steps."""
    trial = TrialTables(sizes.shapes, optimizer="EXACT_ROWWISE_ADAGRAD")
    model = MaskedModel(trial, device, "row", score="norm_accumulator")
    model.write(random_tables(trial))
    model.update(0.6)
    batches = model.batches()
    for _ in range(5):
        model.train(batches)
    return model


def _outputs(model: nn.Module, trial: TrialTables, device: torch.device) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(trial_batch(trial, 99).to(device))[1]
    return found.cpu()


def _require_equal(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        most = float((found - expected).abs().max())
        raise Difference(f"{what} differ by up to {most:.2g}")


def _require_close(what: str, found: Tensor, expected: Tensor) -> None:
    """Compare outputs: ranks that store other rows add up their parts of a bag in another order."""
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
        most = float((found - expected).abs().max())
        raise Difference(f"{what} differ by up to {most:.2g}")


def compact_model(device: torch.device, sizes: Sizes) -> str:
    """Compare a compact model's outputs with the masked one's, train it, and expand it."""
    masked = trained(device, sizes)
    expected = _outputs(masked.model, masked.trial, device)
    model = compact(masked.model, masked.sparsifier)
    _require_close("outputs of the compact model", _outputs(model, masked.trial, device), expected)
    loss, _ = model(trial_batch(masked.trial, 5).to(device))
    loss.backward()
    expected = _outputs(model, masked.trial, device)
    model = expand(model)
    _require_close("outputs of the expanded model", _outputs(model, masked.trial, device), expected)
    return "equal outputs, before and after a step, and expanded"


def _shared_folder(made: str | None) -> Path:
    """Return rank 0's folder on every rank."""
    return Path(world_group().all_gather_json(made)[0])


def exported(device: torch.device, sizes: Sizes) -> str:
    """Compare lookups of a written artifact with the model's tables."""
    masked = trained(device, sizes)
    group = world_group()
    with tempfile.TemporaryDirectory() as own:
        folder = _shared_folder(own)
        export(masked.model, masked.sparsifier, folder / "served")
        served: Any = load_served(folder / "served")
        features = trial_batch(masked.trial, 99)
        with torch.no_grad():
            found = served(features).to_dict()
            looked_up = _tables_of(masked.model)(features.to(device)).to_dict()
        for name, values in looked_up.items():
            _require_close(f"served outputs of {name}", found[name], values.cpu())
        # Rank 0 removes its folder once all have read it.
        group.all_gather_json(None)
    return "served lookups equal the model's"


def _tables_of(model: Any) -> Any:
    return model.module.tables


def checkpointed(device: torch.device, sizes: Sizes) -> str:
    """Save a trained model, load it into a new one, and compare both, also after another step."""
    saved = trained(device, sizes)
    fresh = MaskedModel(saved.trial, device, "row", score="norm_accumulator")
    fresh.update(0.1)
    group = world_group()
    with tempfile.TemporaryDirectory() as own:
        checkpoints = Checkpoints(_shared_folder(own))
        for model, act in ((saved, checkpoints.save_async), (fresh, _resume(checkpoints))):
            act(
                5,
                model=model.model,
                optimizer=[model.model.fused_optimizer, model.optimizer],
                sparse=model.sparsifier,
            )
        group.all_gather_json(None)
    for step in range(2):
        what = f"{step} steps after the checkpoint"
        require_equal_masks(what, fresh.sparsifier.audit(), saved.sparsifier.audit())
        for found, expected in zip(fresh.weights(), saved.weights(), strict=True):
            _require_equal(f"weights, {what},", found, expected)
        for model in (saved, fresh):
            batches = model.batches()
            model.train(batches)
    return "masks, weights and the next step bit for bit"


def _resume(checkpoints: Checkpoints) -> Any:
    def resume(step: int, **parts: Any) -> None:
        found = checkpoints.resume_latest(**parts)
        if found is None or found.step != step:
            raise Difference(f"found {found} instead of step {step}")

    return resume


def _module_of(extra: str, name: str = "") -> Any:
    """Return a module of another extra.

    Raises:
        NotRun: the extra was deleted.
    """
    if find_spec(f"dist_sparse.extras.{extra}") is None:
        raise NotRun(f"needs the extra {extra}")
    return import_module(f"dist_sparse.extras.{extra}{name}")


def undone(device: torch.device, sizes: Sizes) -> str:
    """Undo a mask update, as a guard does, and compare masks and weights with those before it."""
    undo = _module_of("guard", ".undo")
    for block in ("row", "1x4"):
        trial = TrialTables(sizes.shapes, optimizer="EXACT_ROWWISE_ADAGRAD")
        model = MaskedModel(trial, device, block)
        model.write(random_tables(trial))
        model.update(0.3)
        model.train(model.batches())
        masks = model.sparsifier.masks
        masks.undo = last = undo.LastUpdate()
        kept, before = model.sparsifier.audit(), model.weights()
        model.update(0.6)
        if model.sparsifier.audit() == kept:
            raise Difference(f"{block}: the update that is undone removed nothing")
        last.undo(masks, masks.tables.locate())
        require_equal_masks(f"{block}, after an undone update", model.sparsifier.audit(), kept)
        for found, expected in zip(model.weights(), before, strict=True):
            _require_equal(f"{block}: weights after an undone update", found, expected)
    return "2 blocks, bit for bit"


def coded(device: torch.device, sizes: Sizes) -> str:
    """Compare books, codes and lookups with those of the same table in one process on the CPU."""
    quantize = _module_of("codes").quantize
    shape = max(LEAST_ROWS, sizes.small), 64
    trial = TrialTables({"coded": shape})
    model = MaskedModel(trial, device, "row", attach=False)
    tables = random_tables(trial)
    model.write(tables)
    alone = nn.EmbeddingBag(*shape, _weight=tables["coded"], mode="sum")
    with (
        quantize(model.model, [], codes=16, begin=0) as there,
        quantize(alone, [], codes=16, begin=0) as here,
    ):
        for handle in (there, here):
            handle.step()
        _require_equal("books", there.books["coded"].float(), here.books["weight"].float())
        [expected] = here.coded()["weight"].shards
        for rect, codes in there.coded()["coded"].shards:
            own = expected.tensor[rect.row : rect.row_end]
            _require_equal("codes", codes.cpu().float(), own.float())
        features = trial_batch(trial, 99)
        with torch.no_grad():
            looked_up = _tables_of(model.model)(features.to(device)).values().cpu()
            decoded = alone(features.values(), features.offsets()[:-1])
        _require_close("decoded lookups", looked_up, decoded)
    return f"{shape[0]} x {shape[1]}, 16 codes a row: codes bit for bit, equal lookups"
