"""Examples with labels from plain (user, item) interactions.

Reads the ``.npz`` of a standard split (Gowalla and its kin): train_user, train_item, test_user,
test_item, num_users, num_items. Each interaction is a positive example; for each, one item that the
user has not interacted with is drawn, with a seed, as a negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlrm.batches import DataError, Dataset, SparseFeature
from dlrm.hashing import hashed_cross

Ints = npt.NDArray[np.int64]

_KEYS = ("train_user", "train_item", "test_user", "test_item", "num_users", "num_items")
_UNSPLIT = ("user", "item", "num_users", "num_items")
_HELD_OUT = 0.2
_CROSS_ROWS = 100_000
_ITEM_BUCKETS = 16
_DRAWS = 50


def load(path: Path, seed: int) -> Dataset:
    """Return the file's own split, with one negative for each positive.

    Features: user, item, a hashed cross of the user and a bucket of items; dense: how active the
    user and how popular the item is in the training part, never counting the interaction itself
    (else a training positive would betray its label).

    Raises:
        DataError: the file is not such an .npz; says what is wrong with it.
    """
    users, items, (train_user, train_item), (test_user, test_item) = read(path)
    rng = np.random.default_rng(seed)
    known_train = np.unique(train_user * items + train_item)
    known = np.union1d(known_train, test_user * items + test_item)
    # Training may not know the test's positives: its negatives avoid the training part only.
    train_negative = _draw(train_user, items, known_train, rng)
    test_negative = _draw(test_user, items, known, rng)

    user = np.concatenate([train_user, train_user, test_user, test_user])
    item = np.concatenate([train_item, train_negative, test_item, test_negative])
    n, m = len(train_user), len(test_user)
    label = np.concatenate([np.ones(n), np.zeros(n), np.ones(m), np.zeros(m)]).astype(np.float32)

    itself = np.zeros(len(user), dtype=np.int64)
    itself[:n] = 1
    activity = np.bincount(train_user, minlength=users)[user]
    popularity = np.bincount(train_item, minlength=items)[item] - itself
    dense = np.log1p(np.stack([activity, popularity], axis=1)).astype(np.float32)

    bucket = hashed_cross(item, np.zeros_like(item), _ITEM_BUCKETS)
    ids = {
        "user_id": (users, user),
        "item_id": (items, item),
        "user_x_item": (_CROSS_ROWS, hashed_cross(user, bucket, _CROSS_ROWS)),
    }
    return Dataset(
        name=path.name,
        sparse=tuple(
            SparseFeature(name=name, rows=rows, ids=torch.from_numpy(values))
            for name, (rows, values) in ids.items()
        ),
        dense_names=("log of the user's interactions", "log of the item's other interactions"),
        dense=torch.from_numpy(dense),
        labels=torch.from_numpy(label),
        train=torch.arange(2 * n),
        test=torch.arange(2 * n, 2 * (n + m)),
    )


def split_of(path: Path, seed: int) -> str:
    """Return in words how :func:`read` gets the test part of a file."""
    with np.load(path, allow_pickle=False) as stored:
        if "test_user" in stored:
            return "the file's own test part"
    return f"{_HELD_OUT:.0%} of the interactions, drawn with seed {seed}: the file holds no split"


def read(
    path: Path, split_seed: int | None = None
) -> tuple[int, int, tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return the number of users, of items, and the (user, item) pairs of the two parts, int64.

    Args:
        split_seed: draws the test part of a file that holds no split: user, item, num_users,
            num_items. None refuses such a file.

    Raises:
        DataError: the file is not such an .npz; says what is wrong with it.
    """
    if not path.is_file():
        raise DataError(f"Invalid --data {path}: no such file.")
    try:
        with np.load(path, allow_pickle=False) as stored:
            if split_seed is None or "test_user" in stored:
                arrays = _integers(stored, _KEYS)
            else:
                arrays = _integers(stored, _UNSPLIT)
                arrays |= _split(arrays["user"], arrays["item"], split_seed)
        users, items = int(arrays["num_users"]), int(arrays["num_items"])
        for part in ("train", "test"):
            user, item = arrays[f"{part}_user"], arrays[f"{part}_item"]
            if user.ndim != 1 or user.shape != item.shape or not len(user):
                raise ValueError(
                    f"{part}_user {user.shape} and {part}_item {item.shape} must be lists of one"
                    " length, not empty"
                )
            for name, ids, bound in ((f"{part}_user", user, users), (f"{part}_item", item, items)):
                if ids.min() < 0 or ids.max() >= bound:
                    raise ValueError(
                        f"{name} must lie in [0, {bound}), found {ids.min()} to {ids.max()}"
                    )
    except Exception as error:  # numpy raises half a dozen types for a file that is not an .npz
        raise DataError(
            f"Invalid --data {path}: not an interactions .npz ({error}). It needs"
            f" {', '.join(_KEYS)}"
            f"{'' if split_seed is None else ', or without a split ' + ', '.join(_UNSPLIT)}."
        ) from error
    return (
        users,
        items,
        (arrays["train_user"], arrays["train_item"]),
        (arrays["test_user"], arrays["test_item"]),
    )


def _integers(stored: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Ints]:
    missing = [key for key in keys if key not in stored]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    return {key: np.asarray(stored[key]).astype(np.int64, casting="safe") for key in keys}


def _split(user: Ints, item: Ints, seed: int) -> dict[str, Ints]:
    """Return the arrays of both parts, by key."""
    if user.ndim != 1 or user.shape != item.shape:
        raise ValueError(f"user {user.shape} and item {item.shape} must be lists of one length")
    order = np.random.default_rng(seed).permutation(len(user))
    tested = round(_HELD_OUT * len(user))
    test, train = order[:tested], np.sort(order[tested:])
    return {
        "train_user": user[train],
        "train_item": item[train],
        "test_user": user[test],
        "test_item": item[test],
    }


def _draw(user: Ints, items: int, known: Ints, rng: np.random.Generator) -> Ints:
    """Return, for every user in the list, an item that is not among the ``known`` pairs (sorted
    ``user * items + item``)."""
    drawn = rng.integers(items, size=len(user))
    for _ in range(_DRAWS):
        pairs = user * items + drawn
        place = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
        again = np.flatnonzero(known[place] == pairs)
        if not len(again):
            return drawn
        drawn[again] = rng.integers(items, size=len(again))
    raise DataError(
        f"No negative found for user {user[again[0]]} in {_DRAWS} draws: "
        f"it has interacted with nearly all of the {items} items."
    )
