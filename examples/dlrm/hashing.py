"""Hashed ids: of pairs, and of tables with fewer rows than ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from dlrm.batches import Dataset, SparseFeature

Ints = npt.NDArray[np.int64]


def folded(dataset: Dataset, rows: Mapping[str, int]) -> Dataset:
    """Return the data set with the ids of some features hashed into fewer rows, by name."""

    def fold(feature: SparseFeature) -> SparseFeature:
        count = rows.get(feature.name, feature.rows)
        if count == feature.rows:
            return feature
        ids = feature.ids.numpy()
        return replace(feature, rows=count, ids=torch.from_numpy(hashed_cross(ids, 0 * ids, count)))

    return replace(dataset, sparse=tuple(map(fold, dataset.sparse)))


def hashed_cross(left: Ints, right: Ints, rows: int) -> Ints:
    """Return an id in [0, rows) for every pair, by splitmix64's mixer: the same in every process,
    unlike Python's hash()."""
    mixed = left.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + right.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(rows)).astype(np.int64)
