"""Streams of examples in the order of time, for tables that follow their traffic.

``half`` and ``fast``: bags of ids by Zipf's law, whose hot ids are replaced. ``movielens``: the
ratings of MovieLens-100K, with the user x genre cross as the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from dlrm.movielens import fetch, load

__all__ = ["Example", "Stream", "stream"]

ZIPF = 1.05
HOT = 10_000
"""Ids that count as hot: 70% of the lookups."""

IDS_A_BAG = 4
BATCH = 512
STEPS = 2_000
CHANGES = 8
"""How often hot ids are replaced in a run."""

MOVIELENS_BATCH = 100


@dataclass(frozen=True)
class Example:
    """A batch.

    Args:
        ids: of the table, one bag after the other.
        lengths: of each bag.
        others: ids of small tables, ``(batch, tables)``.
        labels: float32 ``(batch,)``, 0 or 1.
    """

    ids: Tensor
    lengths: Tensor
    others: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Stream:
    """A table, small tables beside it, and the batches that look them up.

    Args:
        rows: ids of the table.
        dim: of all tables.
        other_rows: rows of each small table.
        steps: batches.
        warmup: batches before the progressive validation begins.
        batches: yields them, in the order of time.
    """

    rows: int
    dim: int
    other_rows: tuple[int, ...]
    steps: int
    warmup: int
    batches: Iterator[Example]


def stream(name: str, seed: int) -> Stream:
    """Return ``half``, ``fast`` or ``movielens``.

    In ``half``, half of the hot ids are replaced over the run; in ``fast``, half of them each time.

    Raises:
        DataError: MovieLens-100K can't be reached.
    """
    if name == "movielens":
        return _movielens()
    rows = 1_000_000
    share = 0.5 if name == "fast" else 0.5 / CHANGES
    drifting = _drifting(rows, share, seed)
    return Stream(rows, 32, (), STEPS, STEPS // CHANGES, drifting)


def _drifting(rows: int, share: float, seed: int) -> Iterator[Example]:
    draw = torch.Generator().manual_seed(seed)
    # The id of each rank; ids in the order of their rank would be easy to hash apart.
    id_of_rank = torch.randperm(rows, generator=draw)
    effect = torch.randn(rows, generator=draw)
    until = torch.arange(1, rows + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    until /= until[-1].item()
    for step in range(STEPS):
        if step and step % (STEPS // CHANGES) == 0:
            # Some hot ids change places with cold ones.
            leaving = torch.randperm(HOT, generator=draw)[: round(share * HOT)]
            coming = HOT + torch.randperm(rows - HOT, generator=draw)[: len(leaving)]
            id_of_rank[leaving], id_of_rank[coming] = id_of_rank[coming], id_of_rank[leaving]
        uniform = torch.rand(BATCH * IDS_A_BAG, dtype=torch.float64, generator=draw)
        ranks = torch.searchsorted(until, uniform).clamp_(max=rows - 1)
        ids = id_of_rank[ranks]
        logits = effect[ids].view(BATCH, IDS_A_BAG).sum(1) / IDS_A_BAG**0.5
        labels = torch.bernoulli(torch.sigmoid(1.5 * logits), generator=draw)
        lengths = torch.full((BATCH,), IDS_A_BAG)
        yield Example(ids, lengths, torch.empty(BATCH, 0, dtype=torch.int64), labels)


def _movielens() -> Stream:
    data = load(fetch())
    by_name = {feature.name: feature for feature in data.sparse}
    cross, small = by_name["user_x_genre"], [by_name["user_id"], by_name["movie_id"]]
    steps = len(data.labels) // MOVIELENS_BATCH

    def batches() -> Iterator[Example]:
        for step in range(steps):
            index = torch.arange(step * MOVIELENS_BATCH, (step + 1) * MOVIELENS_BATCH)
            ids, lengths = cross.take(index)
            others = torch.stack([feature.ids[index] for feature in small], dim=1)
            yield Example(ids, lengths, others, data.labels[index])

    other_rows = tuple(feature.rows for feature in small)
    return Stream(cross.rows, 16, other_rows, steps, steps // 8, batches())
