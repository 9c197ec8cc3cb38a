"""Interactions, with seeded draws from them: negatives for training, and pairs for validation and
tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlrm import interactions
from dlrm.batches import DataError

__all__ = ["NEGATIVES", "Interactions", "Test", "load"]

NEGATIVES = 3
"""Items drawn for each interaction to train with."""

_TESTED, _TEST_NEGATIVES = 60_000, 10
_RECALL_USERS = 3_000

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Test:
    """Held-out interactions, and the drawn items that a model should rank below them.

    Args:
        user, item: (n,) int64, held-out interactions.
        uniform, popular: (n, 10) int64, items drawn uniformly, and in proportion to their
            interactions; none that the user has interacted with.
        ranked_users: users whose held-out items are to be ranked first among all items.
        all_pairs: users and items of the whole part, both (interactions,) int64.
    """

    user: Tensor
    item: Tensor
    uniform: Tensor
    popular: Tensor
    ranked_users: Tensor
    all_pairs: tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Pairs of user and item for training, and held-out ones for validation and test."""

    users: int
    items: int
    user: Tensor
    item: Tensor
    held_out: dict[str, tuple[Tensor, Tensor]]
    known: Ints  # sorted user * items + item, of all parts

    def epoch(
        self, seed: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each global batch of one pass: users ``(b,)`` and items
        ``(b, 1 + NEGATIVES)``, the interaction first. Negatives are uniform, so a few are
        interactions."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.user), generator=generator)
        local = batch_size // world
        for step in range(self.steps(batch_size)):
            negatives = torch.randint(self.items, (batch_size, NEGATIVES), generator=generator)
            mine = slice(rank * local, (rank + 1) * local)
            index = order[step * batch_size : (step + 1) * batch_size][mine]
            yield self.user[index], torch.cat([self.item[index][:, None], negatives[mine]], dim=1)

    def steps(self, batch_size: int) -> int:
        """Return the number of batches in one pass; an incomplete last one is dropped.

        Raises:
            DataError: the interactions do not fill a batch.
        """
        if batch_size > len(self.user):
            raise DataError(
                f"Invalid {batch_size=}: there are only {len(self.user)} interactions to train"
                " with."
            )
        return len(self.user) // batch_size

    def test(self, part: str) -> Test:
        """Return the samples of a part, ``"validation"`` or ``"test"``: the same at every call."""
        user, item = (held.numpy() for held in self.held_out[part])
        rng = np.random.default_rng(0)
        chosen = rng.permutation(len(user))[:_TESTED]
        repeated = user[chosen].repeat(_TEST_NEGATIVES)

        def drawn(items: Ints) -> Tensor:
            return torch.from_numpy(
                self._unknown(repeated, items, rng).reshape(-1, _TEST_NEGATIVES)
            )

        return Test(
            user=torch.from_numpy(user[chosen]),
            item=torch.from_numpy(item[chosen]),
            uniform=drawn(np.arange(self.items)),
            popular=drawn(self.item.numpy()),  # an item occurs once for each interaction
            ranked_users=torch.from_numpy(rng.permutation(np.unique(user))[:_RECALL_USERS]),
            all_pairs=self.held_out[part],
        )

    def _unknown(self, user: Ints, items: Ints, rng: np.random.Generator) -> Ints:
        """Return, for every user, one of ``items`` that they have not interacted with."""
        found = rng.choice(items, len(user))
        for _ in range(50):
            pairs = user * self.items + found
            place = np.minimum(np.searchsorted(self.known, pairs), len(self.known) - 1)
            again = np.flatnonzero(self.known[place] == pairs)
            if not len(again):
                break
            found[again] = rng.choice(items, len(again))
        return found


def load(path: Path, split_seed: int | None = None) -> Interactions:
    """Read an interactions ``.npz``. Of its test part, the interactions of half of the users, drawn
    with a seed, are for validation: both parts are alike, so a choice made on one is tested on
    the other.

    Args:
        split_seed: draws the test part of a file that holds none; None refuses it.

    Raises:
        DataError: the file is not such an .npz, or too small; says what is wrong with it.
    """
    users, items, (user, item), (test_user, test_item) = interactions.read(path, split_seed)
    validates = np.random.default_rng(0).permutation(users)[test_user] < users // 2
    if validates.all() or not validates.any():
        raise DataError(
            f"Invalid --data {path}: its test part has too few users for validation and test."
        )

    def tensors(user: Ints, item: Ints) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(user), torch.from_numpy(item)

    train_user, train_item = tensors(user, item)
    pairs = np.concatenate([user * items + item, test_user * items + test_item])
    return Interactions(
        users=users,
        items=items,
        user=train_user,
        item=train_item,
        held_out={
            "validation": tensors(test_user[validates], test_item[validates]),
            "test": tensors(test_user[~validates], test_item[~validates]),
        },
        known=np.unique(pairs),
    )
