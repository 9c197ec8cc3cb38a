"""A trained model's artifacts, served by a process that knows nothing of the training.

The folder holds an artifact of the tables in each dtype, the layers above them as a ``torch.export`` program, and the
test part as tensors; ``serve.py`` reads all three.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dist_sparse
from dist_sparse import DataNormSparsifier
from dlrm.batches import Dataset
from dlrm.model import ShardedModel
from dlrm.predictions import Predictions

__all__ = ["DTYPES", "Served", "serve"]

DTYPES = ("fp32", "int8")

_SERVE = Path(__file__).with_name("serve.py")


@dataclass(frozen=True, kw_only=True)
class Served:
    """One artifact: its bytes on disk and its quality.

    ``difference``: the largest between a logit that it served and the trained model's.
    """

    dtype: str
    folder: Path
    file_bytes: int
    auc: float
    difference: float


class Layers(nn.Module):
    """DLRM above its tables: dense features (B, features) and embeddings (B, tables, dim) to logits (B,)."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        logits: Tensor = self.over_arch(self.inter_arch(self.dense_arch(dense), embedded))
        return logits.squeeze(-1)


def serve(
    sharded: ShardedModel, sparsifier: DataNormSparsifier, dataset: Dataset, trained: Predictions, folder: Path
) -> list[Served]:
    """Export the model to ``folder``, and predict what it was tested on from there, in a process of its own.

    Collective; rank 0 gets the results, the others none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in DTYPES:
        dist_sparse.export(sharded.model, sparsifier, folder / dtype, dtype=dtype)
    results = []
    if dist.get_rank() == 0:
        _save_test(dataset, len(trained.logits), folder)
        _save_layers(sharded, dataset, folder)
        subprocess.run([sys.executable, str(_SERVE), str(folder), *DTYPES], check=True)
        results = [_served(folder, dtype, trained) for dtype in DTYPES]
    dist.barrier()
    return results


def _save_test(dataset: Dataset, examples: int, folder: Path) -> None:
    batch = dataset.batch(dataset.test[:examples])
    ids = batch.sparse_features
    tensors = {"dense": batch.dense_features, "values": ids.values(), "lengths": ids.lengths()}
    save_file(tensors, folder / "test.safetensors")


def _save_layers(sharded: ShardedModel, dataset: Dataset, folder: Path) -> None:
    dims = {dim for _, dim in sharded.tables.values()}
    example = (torch.zeros(2, len(dataset.dense_names)), torch.zeros(2, len(sharded.tables), dims.pop()))
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        Layers(sharded.model.module.model).eval(), example, dynamic_shapes=({0: batch}, {0: batch})
    )
    torch.export.save(program, folder / "layers.pt2")


def _served(folder: Path, dtype: str, trained: Predictions) -> Served:
    logits = load_file(folder / f"{dtype}-logits.safetensors")["logits"]
    return Served(
        dtype=dtype,
        folder=folder / dtype,
        file_bytes=sum(file.stat().st_size for file in (folder / dtype).iterdir()),
        auc=Predictions(logits, trained.labels).auc,
        difference=float((logits - trained.logits).abs().max()),
    )
