"""Artifacts of trained models, served by a process without the training code.

A run's folder ``served`` holds an artifact of the tables in each dtype, the layers above them as a
``torch.export`` program, and the test part as tensors; ``serve.py`` reads all three.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dist_sparse
from dist_sparse import BaseDataSparsifier
from dist_sparse.extras.report import add_artifact
from dist_sparse.serving.encodings import Dtype
from dlrm.batches import Dataset
from dlrm.model import ShardedModel
from dlrm.predictions import Predictions

DTYPES: tuple[Dtype, ...] = ("fp32", "int8", "int4")

_SERVE = Path(__file__).with_name("serve.py")


@dataclass(frozen=True, kw_only=True)
class Artifacts:
    """The folder with one run's artifacts, and the trained model's predictions of the test
    part."""

    run: str
    folder: Path
    trained: Predictions


@dataclass(frozen=True, kw_only=True)
class Served:
    """One artifact: its bytes on disk and its quality.

    ``difference``: the largest between a logit that it served and the trained model's.
    """

    run: str
    dtype: str
    folder: Path
    file_bytes: int
    auc: float
    difference: float


class Layers(nn.Module):
    """DLRM above its tables: dense features (B, features) and embeddings (B, tables, dim) to logits
    (B,)."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = (
            dlrm.dense_arch,
            dlrm.inter_arch,
            dlrm.over_arch,
        )

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        logits: Tensor = self.over_arch(self.inter_arch(self.dense_arch(dense), embedded))
        return logits.squeeze(-1)


def export(
    sharded: ShardedModel,
    sparsifier: BaseDataSparsifier | None,
    dataset: Dataset,
    examples: int,
    folder: Path,
) -> None:
    """Write the artifacts of a trained model, its layers and the first ``examples`` of the test
    part. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in DTYPES:
        dist_sparse.export(sharded.model, sparsifier, folder / dtype, dtype=dtype)
    if dist.get_rank() == 0:
        _save_test(dataset, examples, folder)
        _save_layers(sharded, dataset, folder)


def serve(exported: Sequence[Artifacts]) -> list[Served]:
    """Predict from all artifacts in one process of their own, and add them to their runs' reports.
    Local."""
    subprocess.run(
        [sys.executable, str(_SERVE), *(str(run.folder) for run in exported)], check=True
    )
    served = [_served(run, dtype) for run in exported for dtype in DTYPES]
    for one in served:
        add_artifact(one.folder.parents[1], one.folder, auc=one.auc)
    return served


def _save_test(dataset: Dataset, examples: int, folder: Path) -> None:
    batch = dataset.batch(dataset.test[:examples])
    ids = batch.sparse_features
    tensors = {"dense": batch.dense_features, "values": ids.values(), "lengths": ids.lengths()}
    save_file(tensors, folder / "test.safetensors")


def _save_layers(sharded: ShardedModel, dataset: Dataset, folder: Path) -> None:
    dims = {dim for _, dim in sharded.tables.values()}
    example = (
        torch.zeros(2, len(dataset.dense_names)),
        torch.zeros(2, len(sharded.tables), dims.pop()),
    )
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        Layers(sharded.model.module.model).eval(), example, dynamic_shapes=({0: batch}, {0: batch})
    )
    torch.export.save(program, folder / "layers.pt2")


def _served(run: Artifacts, dtype: str) -> Served:
    logits = load_file(run.folder / f"{dtype}-logits.safetensors")["logits"]
    return Served(
        run=run.run,
        dtype=dtype,
        folder=run.folder / dtype,
        file_bytes=sum(file.stat().st_size for file in (run.folder / dtype).iterdir()),
        auc=Predictions(logits, run.trained.labels).auc,
        difference=float((logits - run.trained.logits).abs().max()),
    )
