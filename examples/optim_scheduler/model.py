"""A small DLRM of torch's own modules: ``tables``, and the layers ``bottom`` and ``top``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlrm.batches import Batch, Dataset

__all__ = ["DIM", "LAYERS", "TABLES", "Ranker"]

DIM = 32
"""Of every table."""

TABLES = "tables"
LAYERS = ("bottom", "top")
"""The modules of each of the two optimizers."""


class Ranker(nn.Module):
    """The logit of a click from dense and categorical features, with all inner products of pairs of
    features.

    Args:
        dataset: names the tables and their rows.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                f.name: nn.EmbeddingBag(f.rows, DIM, mode="sum", include_last_offset=True)
                for f in dataset.sparse
            }
        )
        for table in self.tables.values():
            nn.init.uniform_(
                table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5
            )
        vectors = 1 + len(self.tables)
        self.bottom = nn.Sequential(
            nn.Linear(len(dataset.dense_names), 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer(
            "pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return logits, (examples,) float32, under any autocast."""
        dense = self.bottom(batch.dense_features)
        ids = batch.sparse_features.to_dict()
        bags = [
            table(ids[name].values(), ids[name].offsets()) for name, table in self.tables.items()
        ]
        vectors = torch.stack([dense, *(bag.to(dense.dtype) for bag in bags)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        both = torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1)
        return self.top(both).squeeze(1).float()
