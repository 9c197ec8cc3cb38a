"""Examples in the order of time for the benchmark of tables that follow the traffic: two logs and a generator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.tables_data import lastfm_log

__all__ = ["BATCH", "Example", "batches", "drifting", "hashed", "lastfm", "movielens"]

BATCH = 256

ZIPF = 1.05
HOT = 0.01
"""Share of the ids that count as hot: 70% of the lookups."""

IDS_A_BAG = 4
GROUPS = 1_000

USERS = 943

NEGATIVES = 2
"""Artists with the user and the tag of a tagging that is in the log."""


class Example(NamedTuple):
    """A batch.

    Args:
        ids: of the large table, one bag after the other.
        labels: 0 or 1 for each bag.
        others: one id of each small table, for each bag; None if the large table is alone.
    """

    ids: Tensor
    labels: Tensor
    others: Tensor | None = None


def batches(case: dict[str, Any]) -> list[Example]:
    """Return the batches of a case, in order."""
    if case["what"] == "movielens":
        return list(movielens(Path(case["path"])))
    if case["what"] == "lastfm":
        return list(lastfm(Path(case["path"]), case["ids"], case["seed"]))
    keys = ("ids", "steps", "changes", "share", "shared", "seed")
    return list(drifting(**{key: case[key] for key in keys}))


def drifting(
    ids: int, steps: int, changes: int, share: float, shared: float, seed: int
) -> Iterator[Example]:
    """Yield batches by Zipf's law.

    Args:
        ids, steps: of the stream.
        changes: parts of the stream; hot ids change between two.
        share: of the hot ids that change places with cold ones each time.
        shared: share of the variance of an id's effect that it shares with its group, one of 1,000.
        seed: of all draws.
    """
    draw = torch.Generator().manual_seed(seed)
    # The id of each rank; ids in the order of their rank would be easy to hash apart.
    id_of_rank = torch.randperm(ids, generator=draw)
    effect = torch.randn(ids, generator=draw)
    if shared:
        # Drawn apart: the ids of the stream are the same with and without groups.
        apart = torch.Generator().manual_seed(seed + 1_000)
        group = torch.randint(GROUPS, (ids,), generator=apart)
        of_group = torch.randn(GROUPS, generator=apart)[group]
        effect = (1 - shared) ** 0.5 * effect + shared**0.5 * of_group
    until = torch.arange(1, ids + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    until /= until[-1].item()
    hot = round(HOT * ids)
    for step in range(steps):
        if step and step % (steps // changes) == 0:
            leaving = torch.randperm(hot, generator=draw)[: round(share * hot)]
            coming = hot + torch.randperm(ids - hot, generator=draw)[: len(leaving)]
            id_of_rank[leaving], id_of_rank[coming] = id_of_rank[coming], id_of_rank[leaving]
        uniform = torch.rand(BATCH * IDS_A_BAG, dtype=torch.float64, generator=draw)
        drawn = id_of_rank[torch.searchsorted(until, uniform).clamp_(max=ids - 1)]
        logits = effect[drawn].view(BATCH, IDS_A_BAG).sum(1) / IDS_A_BAG**0.5
        yield Example(drawn, torch.bernoulli(torch.sigmoid(1.5 * logits), generator=draw))


def movielens(folder: Path) -> Iterator[Example]:
    """Yield the ratings of MovieLens-100K in the order of time: a bag has the user and the item,
    and the label is whether the rating is 4 or 5."""
    lines = (folder / "ml-100k.inter").read_text().splitlines()[1:]
    ratings = torch.tensor([[float(field) for field in line.split("\t")] for line in lines])
    users, items, rating, _ = ratings.double()[ratings[:, 3].argsort(stable=True)].unbind(1)
    ids = torch.stack([users - 1, USERS + items - 1], dim=1).long()
    labels = (rating >= 4).float()
    for some, truth in zip(ids.split(BATCH), labels.split(BATCH), strict=True):
        yield Example(some.reshape(-1), truth)


def lastfm(file: Path, ids: int, seed: int) -> Iterator[Example]:
    """Yield the taggings of Last.FM by date: 1 for a tagging; 0 for two with its user and its tag
    and the artists of earlier taggings, so artists are drawn by their frequency so far.

    A date is a month; the order within it is drawn. The large table has the pair of user and tag,
    hashed; the small tables have user, artist and tag.
    """
    user, artist, tag, date = map(torch.from_numpy, lastfm_log(file).values())
    draw = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(date), generator=draw)
    order = shuffled[date[shuffled].argsort(stable=True)]
    user, artist, tag = user[order], artist[order], tag[order]
    earlier = torch.rand(len(user), NEGATIVES, dtype=torch.float64, generator=draw)
    earlier = (earlier * torch.arange(len(user))[:, None]).long()
    artists = torch.cat([artist[:, None], artist[earlier]], dim=1)
    cross = hashed(user * (int(tag.max()) + 1) + tag, seed) % ids
    labels = torch.zeros(artists.shape)
    labels[:, 0] = 1
    for some in torch.arange(len(user)).split(BATCH):
        repeated = [each[some, None].expand(-1, 1 + NEGATIVES) for each in (user, tag, cross)]
        others = torch.stack([repeated[0], artists[some], repeated[1]], dim=-1)
        yield Example(repeated[2].reshape(-1), labels[some].reshape(-1), others.view(-1, 3))


def hashed(ids: Tensor, seed: int = 0) -> Tensor:
    """Return 62 mixed bits of each id: the finalizer of SplitMix64 (Steele et al., 2014)."""
    mixed = ids + _wrapped((seed + 1) * 0x9E3779B97F4A7C15)
    mixed = _folded(mixed, 30) * _wrapped(0xBF58476D1CE4E5B9)
    mixed = _folded(mixed, 27) * _wrapped(0x94D049BB133111EB)
    return _folded(mixed, 31) & (1 << 62) - 1


def _folded(bits: Tensor, shift: int) -> Tensor:
    # torch shifts copies of the sign in; SplitMix64 shifts zeros in.
    return bits ^ (bits >> shift & (1 << 64 - shift) - 1)


def _wrapped(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
