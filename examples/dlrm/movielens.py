"""MovieLens-100K: download and features.

The 100,000 ratings travel inside the ``recbole`` wheel, which is used as a data source only: it is
downloaded, never installed. Every feature of a rating is made from the rating's own time and
earlier: nothing of the future, and no label, reaches a feature.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dlrm.batches import DataError, Dataset, SparseFeature
from dlrm.hashing import hashed_cross

CACHE = Path(__file__).resolve().parents[2] / ".data"
CROSS_ROWS = 50_000
"""Rows of the hashed user x genre cross, by far the largest table."""

_WHEEL = "recbole==1.2.1"
_INSIDE = "recbole/dataset_example/ml-100k/"
_ROWS = {"ml-100k.inter": 100_000, "ml-100k.user": 943, "ml-100k.item": 1_682}
_TRAIN_PART = 0.8

Ints = npt.NDArray[np.int64]


def fetch(cache: Path = CACHE) -> Path:
    """Return the folder with the three files of MovieLens-100K; the first call downloads them.

    Raises:
        DataError: the package index can't be reached, or what came from it is not the expected
            data.
    """
    folder = cache / "ml-100k"
    if all((folder / name).is_file() for name in _ROWS):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--retries",
            "2",
        ]
        done = subprocess.run(
            [*pip, "--dest", scratch, _WHEEL], capture_output=True, text=True, check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise DataError(
                f"MovieLens-100K is not in {folder} and could not be downloaded: `pip download"
                f" {_WHEEL}` failed ({said}). Connect to a package index, or copy"
                f" {', '.join(_ROWS)} into that folder, or give --data PATH."
            )
        new = Path(scratch) / "ml-100k"
        new.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in _ROWS:
                (new / name).write_bytes(wheel.read(_INSIDE + name))
        for name, expected in _ROWS.items():
            _table(new / name, expected)
        folder.mkdir(exist_ok=True)
        # Files are moved last, one by one: a folder with all three is complete, even while another
        # process downloads.
        for name in _ROWS:
            os.replace(new / name, folder / name)
    return folder


def load(folder: Path) -> Dataset:
    """Return MovieLens-100K in order of time; the first 80% train, the rest test. The label is
    ``rating >= 4``.

    Raises:
        DataError: a file is damaged.
    """
    ratings = _table(folder / "ml-100k.inter", _ROWS["ml-100k.inter"])
    users = _table(folder / "ml-100k.user", _ROWS["ml-100k.user"])
    items = _table(folder / "ml-100k.item", _ROWS["ml-100k.item"])

    time = np.array(_column(ratings, 3), dtype=np.int64)
    order = np.argsort(time, kind="stable")
    time = time[order]
    user = np.array(_column(ratings, 0), dtype=np.int64)[order] - 1
    item = np.array(_column(ratings, 1), dtype=np.int64)[order] - 1
    rating = np.array(_column(ratings, 2), dtype=np.float32)[order]

    users.sort(key=lambda row: int(row[0]))
    items.sort(key=lambda row: int(row[0]))
    age = np.array(_column(users, 1), dtype=np.int64)
    gender = _codes(_column(users, 2))
    occupation = _codes(_column(users, 3))
    zip_code = _codes(_column(users, 4))
    year = np.array([_year(row) for row in items], dtype=np.float32)
    genre_names = sorted({genre for row in items for genre in row[3].split()})
    genres_of = [
        np.array([genre_names.index(genre) for genre in row[3].split()], dtype=np.int64)
        for row in items
    ]

    genres = np.concatenate([genres_of[i] for i in item])
    lengths = np.array([len(g) for g in genres_of], dtype=np.int64)[item]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    cross = hashed_cross(np.repeat(user, lengths), genres, CROSS_ROWS)

    past, hours = past_of_user(user, time)
    dense = np.stack([np.log1p(hours), (year[item] - 1990) / 10, np.log1p(past)], axis=1).astype(
        np.float32
    )

    cut = int(len(time) * _TRAIN_PART)
    while time[cut] == time[cut - 1]:  # a test rating is strictly later than every training rating
        cut += 1

    def single(name: str, rows: int, ids: Ints) -> SparseFeature:
        return SparseFeature(name=name, rows=rows, ids=torch.from_numpy(ids))

    return Dataset(
        name="MovieLens-100K",
        sparse=(
            single("user_id", len(users), user),
            single("movie_id", len(items), item),
            single("age", 100, age[user]),
            single("gender", int(gender.max()) + 1, gender[user]),
            single("occupation", int(occupation.max()) + 1, occupation[user]),
            single("zip_code", int(zip_code.max()) + 1, zip_code[user]),
            SparseFeature(
                name="genres", rows=len(genre_names), ids=torch.from_numpy(genres), offsets=offsets
            ),
            SparseFeature(
                name="user_x_genre", rows=CROSS_ROWS, ids=torch.from_numpy(cross), offsets=offsets
            ),
        ),
        dense_names=(
            "log hours since the user's first rating",
            "movie year",
            "log of the user's ratings so far",
        ),
        dense=torch.from_numpy(dense),
        labels=torch.from_numpy((rating >= 4).astype(np.float32)),
        train=torch.arange(cut),
        test=torch.arange(cut, len(time)),
    )


def past_of_user(user: Ints, time: Ints) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Return, for every rating, how many the same user gave strictly earlier, and the hours since
    that user's first one.

    People rate several movies in one second; those do not count each other, whatever their order in
    the file.
    """
    order = np.lexsort((time, user))
    u, t = user[order], time[order]
    place = np.arange(len(u))
    new_user = np.r_[True, u[1:] != u[:-1]]
    new_moment = new_user | np.r_[True, t[1:] != t[:-1]]
    first_of_user = np.maximum.accumulate(np.where(new_user, place, 0))
    first_of_moment = np.maximum.accumulate(np.where(new_moment, place, 0))
    past, hours = np.empty_like(user), np.empty(len(user))
    past[order] = first_of_moment - first_of_user
    hours[order] = (t - t[first_of_user]) / 3600
    return past, hours


def _table(path: Path, expected: int) -> list[list[str]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    if len(rows) != expected or any(len(row) < 4 for row in rows):
        raise DataError(
            f"{path} is not the file of MovieLens-100K: {len(rows)} rows, expected {expected}. "
            "Delete it and start again."
        )
    return rows


def _column(rows: list[list[str]], place: int) -> list[str]:
    return [row[place] for row in rows]


def _codes(values: list[str]) -> Ints:
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)


def _year(item: list[str]) -> float:
    """Return the year of release; one movie has it in its title only, one nowhere (it gets the year
    that scales to 0)."""
    written = item[2] if item[2].isdigit() else "".join(re.findall(r"\((\d{4})\)", item[1])[-1:])
    return float(written or 1990)
