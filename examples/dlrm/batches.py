"""Batches for every rank, as TorchRec's KeyedJaggedTensors.

A :class:`Dataset` holds all examples in memory, feature by feature. Batches are cut from one global
order, so a world of any size sees the same examples at the same step, and every rank gets the same
number of batches: no rank waits in a collective for one that has run out of data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class DataError(ValueError):
    """The data is unusable; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """One categorical feature: the ids of every example, and the size of the table that embeds
    them.

    Args:
        name: of the feature and of its table.
        rows: ids are in [0, rows).
        ids: (ids,) int64, the ids of all examples, concatenated.
        offsets: (examples + 1,) int64, where each example's ids begin; None when every example has
            exactly one.
    """

    name: str
    rows: int
    ids: Tensor
    offsets: Tensor | None = None

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the examples ``index``, concatenated, and the number of ids of each."""
        if self.offsets is None:
            return self.ids[index], torch.ones_like(index)
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        ends = lengths.cumsum(0)
        # An id's source is its place in the result, plus the distance its example has moved.
        shift = (starts - (ends - lengths)).repeat_interleave(lengths)
        return self.ids[torch.arange(len(shift)) + shift], lengths


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """All examples of a data set, split into a training and a test part.

    Args:
        name: shown in output.
        sparse: the categorical features.
        dense_names: names of the columns of ``dense``.
        dense: (examples, len(dense_names)) float32.
        labels: (examples,) float32, 0 or 1.
        train: indices of the training examples.
        test: indices of the test examples.
    """

    name: str
    sparse: tuple[SparseFeature, ...]
    dense_names: tuple[str, ...]
    dense: Tensor
    labels: Tensor
    train: Tensor
    test: Tensor

    def batch(self, index: Tensor) -> Batch:
        """Return the examples ``index`` as TorchRec's Batch."""
        taken = [feature.take(index) for feature in self.sparse]
        sparse = KeyedJaggedTensor.from_lengths_sync(
            keys=[feature.name for feature in self.sparse],
            values=torch.cat([ids for ids, _ in taken]),
            lengths=torch.cat([lengths for _, lengths in taken]),
        )
        return Batch(
            dense_features=self.dense[index], sparse_features=sparse, labels=self.labels[index]
        )


def steps_per_pass(examples: int, batch_size: int) -> int:
    """Return the number of global batches in one pass; an incomplete last one is dropped."""
    return examples // batch_size


def batches(
    dataset: Dataset,
    index: Tensor,
    *,
    batch_size: int,
    rank: int,
    world: int,
    shuffle_seed: int | None = None,
) -> Iterator[Batch]:
    """Yield this rank's part of every global batch of one pass over ``index``.

    Args:
        dataset: has the examples.
        index: the examples of the pass.
        batch_size: of the whole world; each rank gets ``batch_size // world`` of it.
        rank: of this process.
        world: number of processes.
        shuffle_seed: the order of the pass, the same on all ranks; None keeps the order of
            ``index``.

    Raises:
        DataError: the batch does not divide by the number of ranks, or there is not one whole
            batch.
    """
    if batch_size % world:
        raise DataError(
            f"Invalid {batch_size=}: must be divisible by the number of processes ({world})."
        )
    steps = steps_per_pass(len(index), batch_size)
    if steps == 0:
        raise DataError(
            f"Invalid {batch_size=}: there are only {len(index)} examples to take a batch from."
        )
    if shuffle_seed is not None:
        index = index[
            torch.randperm(len(index), generator=torch.Generator().manual_seed(shuffle_seed))
        ]
    local = batch_size // world
    for step in range(steps):
        start = step * batch_size + rank * local
        yield dataset.batch(index[start : start + local])
