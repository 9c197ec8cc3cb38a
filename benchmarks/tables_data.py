"""Click-through data for `benchmarks.tables`: MovieLens, Last.FM, Criteo and Avazu as published.

Every reader returns a :class:`Problem`: examples in the order of time, of which the first 80% train
and the rest test. No feature of an example is made from a later one. Strings and pairs of ids
(crosses) are hashed, as a job does that can't know all ids beforehand: into the next power of two
above the number of distinct values in the training part. A file that does not fit is refused, with
its name and line.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import re
import sys
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import numpy as np
import numpy.typing as npt
import torch

from dlrm import movielens
from dlrm.batches import DataError, Dataset, SparseFeature
from dlrm.hashing import hashed_cross
from two_tower.data import NEGATIVES

__all__ = [
    "TRAINED",
    "Problem",
    "arrays_of",
    "avazu",
    "criteo",
    "grouplens",
    "lastfm",
    "lastfm_crossed",
    "lastfm_log",
    "movielens_100k",
    "with_negatives",
]

Ints = npt.NDArray[np.int64]

TRAINED = 0.8
"""The part of a log that trains: the earliest."""

_TAGGINGS = "user_taggedartists.dat"
_FIRST_YEAR = 2005
"""Of Last.FM's tags. HetRec's file has five taggings that are dated decades earlier."""

_EPOCH = datetime.date(1970, 1, 1).toordinal()
_MISSING = -1
"""Stands for an empty field, before it is hashed."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Examples with a training and a test part.

    Args:
        data: the examples.
        group: consecutive examples that are shuffled as one: an event and its negatives.
    """

    data: Dataset
    group: int = 1

    def earlier(self) -> Problem:
        """Return the training part alone, split in the same way: for tuning."""
        train = self.data.train
        cut = int(TRAINED * len(train)) // self.group * self.group
        return replace(self, data=replace(self.data, train=train[:cut], test=train[cut:]))

    @property
    def fingerprint(self) -> str:
        """A hash of all examples, and of the split."""
        digest = hashlib.sha256()
        for each in self.data.sparse:
            digest.update(f"{each.name} {each.rows}".encode())
            digest.update(each.ids.numpy().tobytes())
            if each.offsets is not None:
                digest.update(each.offsets.numpy().tobytes())
        for tensor in (self.data.dense, self.data.labels, self.data.train, self.data.test):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


def movielens_100k(folder: Path | None = None) -> Problem:
    """Return the ratings that ``make train`` uses, with a cross of its own size."""
    data = movielens.load(movielens.fetch() if folder is None else folder)
    # The demo's own cross has a fixed number of rows.
    sparse = [each for each in data.sparse if each.name != "user_x_genre"]
    data = replace(data, sparse=tuple(sparse))
    return Problem(data=_crossed(data, ("user_id", "genres")))


def grouplens(folder: Path) -> Problem:
    """Return MovieLens-1M (``ratings.dat``) or MovieLens-20M (``ratings.csv``) in GroupLens' format.

    The label is whether the rating is 4 or more.
    """
    if (folder / "ratings.dat").is_file():
        ratings = _ratings(folder / "ratings.dat", _dat(folder / "ratings.dat"), first=1)
        movies = _movies(folder / "movies.dat", _dat(folder / "movies.dat"), first=1)
        users = _users(folder / "users.dat")
        name = "MovieLens-1M"
    elif (folder / "ratings.csv").is_file():
        columns = ("userId", "movieId", "rating", "timestamp")
        ratings = _ratings(folder / "ratings.csv", _csv(folder / "ratings.csv", columns), first=2)
        columns = ("movieId", "title", "genres")
        movies = _movies(folder / "movies.csv", _csv(folder / "movies.csv", columns), first=2)
        users, name = None, "MovieLens-20M"
    else:
        raise DataError(
            f"{folder} has neither ratings.dat (MovieLens-1M) nor ratings.csv (MovieLens-20M). Unpack"
            " GroupLens' archive, and give the folder with this file."
        )
    return _rated(name, ratings, movies, users, folder)


def criteo(path: Path, limit: int) -> Problem:
    """Return the first examples of Criteo's ``train.txt`` (Kaggle, 2014): a label, 13 counts and 26
    categories, separated by tabs; the file is in the order of time."""
    counts = [array("d") for _ in range(13)]
    categories = [array("q") for _ in range(26)]
    labels = array("b")

    def parse(fields: Sequence[str]) -> None:
        labels.append(_label(fields[0]))
        for number, (column, text) in enumerate(zip(counts, fields[1:14], strict=True), 1):
            column.append(max(0, _integer(f"I{number}", text)) if text else 0)
        for number, (column, text) in enumerate(zip(categories, fields[14:], strict=True), 1):
            column.append(_integer(f"C{number}", text, 16) if text else _MISSING)

    _each(path, islice(_separated(path, "\t"), limit), 40, parse)
    names = [f"C{number}" for number in range(1, 27)]
    cut = _cut(len(labels), path)
    hashed = {
        name: _hashed(np.array(values), cut) for name, values in zip(names, categories, strict=True)
    }
    dense = {f"I{number}": np.log1p(np.array(values)) for number, values in enumerate(counts, 1)}
    return Problem(data=_dataset("Criteo", hashed, dense, np.array(labels), cut))


def avazu(path: Path, limit: int) -> Problem:
    """Return the first examples of Avazu's ``train`` (Kaggle, 2014): a CSV in the order of hours.
    The test begins with an hour of its own."""
    names = (
        *("C1", "banner_pos", "site_id", "site_domain", "site_category"),
        *("app_id", "app_domain", "app_category"),
        *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
        *(f"C{number}" for number in range(14, 22)),
    )
    columns = ("id", "click", "hour", *names)
    categories = [array("q") for _ in names]
    labels, hours = array("b"), array("q")

    def parse(fields: Sequence[str]) -> None:
        labels.append(_label(fields[1]))
        hours.append(_integer("hour", fields[2]))
        for name, column, text in zip(names, categories, fields[3:], strict=True):
            # All are numbers in base 16, or are hashed as if they were.
            column.append(_integer(name, text, 16) if text else _MISSING)

    _each(path, islice(_csv(path, columns), limit), len(columns), parse, first=2)
    hour = np.array(hours)
    cut = _later(hour, _cut(len(labels), path), path)
    hashed = {
        name: _hashed(np.array(values), cut) for name, values in zip(names, categories, strict=True)
    }
    hashed["hour_of_day"] = 100, hour % 100
    dense = {"hour of the day": (hour % 100 - 12) / 12}
    data = _dataset("Avazu", hashed, dense, np.array(labels), cut)
    return Problem(data=_crossed(data, ("device_model", "site_id")))


def lastfm(path: Path, part: float = 1.0, negatives: int = NEGATIVES) -> Dataset:
    """Return the taggings of Last.FM (HetRec 2011) by date, each with negatives: the user and the
    tag with another artist.

    Args:
        path: as for :func:`lastfm_log`.
        part: of the log, the earliest.
        negatives: for each tagging.
    """
    log = lastfm_log(path)
    log = {name: each[: int(part * len(each))] for name, each in log.items()}
    user, date = log["user"], log["date"]
    past, hours = movielens.past_of_user(user, date * 86_400)
    ids = {"user": user, "artist": log["artist"], "tag": log["tag"]}
    train = np.arange(len(user)) < int(TRAINED * len(user))
    return with_negatives("Last.FM", ids, "artist", train, np.log1p([past, hours]), negatives)


def lastfm_crossed(path: Path) -> Problem:
    """Return Last.FM with a negative for each tagging, and a cross of user and tag."""
    return Problem(data=_crossed(lastfm(path, negatives=1), ("user", "tag")), group=2)


def lastfm_log(path: Path) -> dict[str, Ints]:
    """Return user, artist, tag and date in days of the taggings of Last.FM, in the order of the
    date.

    Args:
        path: the folder that HetRec 2011 published, or an .npz with these arrays.
    """
    names = ("user", "artist", "tag", "date")
    if not path.is_dir():
        return arrays_of(path, names)
    found = {name: array("q") for name in names}

    def parse(fields: Sequence[str]) -> None:
        ids = [_integer(name, text) for name, text in zip(names[:3], fields[:3], strict=True)]
        day, month, year = (
            _integer(name, text)
            for name, text in zip(("day", "month", "year"), fields[3:], strict=True)
        )
        if year >= _FIRST_YEAR:
            days = datetime.date(year, month, day).toordinal() - _EPOCH
            for column, value in zip(found.values(), (*ids, days), strict=True):
                column.append(value)

    file = path / _TAGGINGS
    _each(file, islice(_separated(file, "\t"), 1, None), 6, parse, first=2)
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.items()}
    for name in names[:3]:
        columns[name] = np.unique(columns[name], return_inverse=True)[1]
    order = np.argsort(columns["date"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def arrays_of(path: Path, names: Sequence[str]) -> dict[str, Ints]:
    """Return the arrays of an .npz, as int64."""
    if not path.is_file():
        raise DataError(f"{path} is missing.")
    try:
        with np.load(path, allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored]
            if missing:
                raise DataError(f"{path} has no array {', '.join(missing)}.")
            found = {name: stored[name].astype(np.int64, casting="safe") for name in names}
    except (ValueError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not an .npz of whole numbers: {error}") from error
    return found


def with_negatives(
    name: str, ids: Mapping[str, Ints], drawn: str, train: Any, dense: Any, count: int = NEGATIVES
) -> Dataset:
    """Return each example of a log, followed by some with another id of ``drawn``: one of the
    training part while training, of the whole log in the test. A few are positives."""
    draw, size = np.random.default_rng(0), 1 + count
    known = {True: np.unique(ids[drawn][train]), False: np.unique(ids[drawn])}
    repeated = {key: values.repeat(size) for key, values in ids.items()}
    negatives = repeated[drawn].reshape(-1, size)[:, 1:]
    for part, candidates in known.items():
        inside = train == part
        negatives[inside] = draw.choice(candidates, (inside.sum(), count))
    index = torch.arange(len(train) * size)
    labels, in_train = index % size == 0, torch.from_numpy(train.repeat(size))
    sparse = [
        SparseFeature(name=key, rows=int(values.max()) + 1, ids=torch.from_numpy(values))
        for key, values in repeated.items()
    ]
    return Dataset(
        name=name,
        sparse=tuple(sparse),
        dense_names=tuple(map(str, range(len(dense)))),
        dense=torch.from_numpy(dense.T.repeat(size, 0)).float(),
        labels=labels.float(),
        train=index[in_train],
        test=index[~in_train],
    )


# Files of text.


def _separated(path: Path, separator: str, encoding: str = "utf-8") -> Iterator[list[str]]:
    try:
        with path.open(encoding=encoding, errors="replace") as stream:
            for line in stream:
                yield line.rstrip("\r\n").split(separator)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from error


def _dat(path: Path) -> Iterator[list[str]]:
    return _separated(path, "::", "latin-1")


def _csv(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yield these columns of a CSV with a header, in this order."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            lines = csv.reader(stream)
            header = next(lines, [])
            missing = [name for name in columns if name not in header]
            if missing:
                raise DataError(f"{path}, line 1: no column {', '.join(missing)}.")
            places = [header.index(name) for name in columns]
            for fields in lines:
                # A line of another length is refused where it is counted.
                yield [fields[at] for at in places] if len(fields) == len(header) else fields[:1]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from error


def _each(
    path: Path,
    rows: Iterable[list[str]],
    columns: int,
    parse: Callable[[Sequence[str]], None],
    first: int = 1,
) -> None:
    """Parse each line; what is wrong with one is an error that names it."""
    number = first - 1
    for number, fields in enumerate(rows, first):
        try:
            if len(fields) != columns:
                raise ValueError(f"it does not have {columns} fields")
            parse(fields)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}.") from error
    if number < first:
        raise DataError(f"{path} has no examples.")


def _integer(name: str, text: str, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError:
        kind = "a whole number" if base == 10 else f"a number in base {base}"
        raise ValueError(f"{name} is {text!r}, not {kind}") from None


def _label(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError(f"the label is {text!r}, not 0 or 1")
    return int(text)


# MovieLens in GroupLens' format.


def _ratings(path: Path, rows: Iterable[list[str]], first: int) -> dict[str, Ints]:
    """Return user, movie, whether the rating is at least 4, and time, in the order of time."""
    found = {name: array("q") for name in ("user", "movie", "liked", "time")}

    def parse(fields: Sequence[str]) -> None:
        user, movie, rating, time = fields
        try:
            liked = float(rating) >= 4
        except ValueError:
            raise ValueError(f"the rating is {rating!r}, not a number") from None
        values = (_integer("user", user), _integer("movie", movie), liked, _integer("time", time))
        for column, value in zip(found.values(), values, strict=True):
            column.append(value)

    _each(path, rows, 4, parse, first)
    columns = {name: np.array(values, dtype=np.int64) for name, values in found.items()}
    order = np.argsort(columns["time"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _movies(
    path: Path, rows: Iterable[list[str]], first: int
) -> dict[int, tuple[float, list[str]]]:
    """Return year and genres of each movie; without a year it is 1990, which scales to 0."""
    found: dict[int, tuple[float, list[str]]] = {}

    def parse(fields: Sequence[str]) -> None:
        movie, title, genres = fields
        year = re.findall(r"\((\d{4})\)", title)
        found[_integer("movie", movie)] = float(year[-1]) if year else 1990.0, genres.split("|")

    _each(path, rows, 3, parse, first)
    return found


def _users(path: Path) -> dict[int, list[str]]:
    """Return gender, age, occupation and zip code of each user."""
    found: dict[int, list[str]] = {}

    def parse(fields: Sequence[str]) -> None:
        found[_integer("user", fields[0])] = list(fields[1:])

    _each(path, _dat(path), 5, parse)
    return found


def _rated(
    name: str,
    ratings: Mapping[str, Ints],
    movies: Mapping[int, tuple[float, list[str]]],
    users: Mapping[int, list[str]] | None,
    folder: Path,
) -> Problem:
    """Join ratings, movies and users."""
    user_ids, user = np.unique(ratings["user"], return_inverse=True)
    movie_ids, movie = np.unique(ratings["movie"], return_inverse=True)
    absent = [each for each in movie_ids.tolist() if each not in movies]
    if absent:
        raise DataError(
            f"{folder}: movie {absent[0]} has ratings, and is not in the file of movies."
        )
    about = [movies[each] for each in movie_ids.tolist()]
    genre_names = sorted({genre for _, genres in about for genre in genres})
    place = {genre: number for number, genre in enumerate(genre_names)}
    of_movie = [np.array([place[genre] for genre in genres], dtype=np.int64) for _, genres in about]
    lengths = np.array([len(genres) for genres in of_movie])
    # As one array, of which a rating takes the part of its movie: there are 20 million.
    all_genres = SparseFeature(
        name="genres",
        rows=len(genre_names),
        ids=torch.from_numpy(np.concatenate(of_movie)),
        offsets=torch.from_numpy(np.r_[0, lengths.cumsum()]),
    )
    genres, taken = all_genres.take(torch.from_numpy(movie))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), taken.cumsum(0)])

    ids = {"user_id": (len(user_ids), user), "movie_id": (len(movie_ids), movie)}
    if users is not None:
        absent = [each for each in user_ids.tolist() if each not in users]
        if absent:
            raise DataError(f"{folder}: user {absent[0]} has ratings, and is not in users.dat.")
        columns = zip(*(users[each] for each in user_ids.tolist()), strict=True)
        for feature, values in zip(
            ("gender", "age", "occupation", "zip_code"), columns, strict=True
        ):
            known, codes = np.unique(np.array(values), return_inverse=True)
            ids[feature] = len(known), codes[user]
    past, hours = movielens.past_of_user(user, ratings["time"])
    year = np.array([released for released, _ in about])
    dense = {
        "log hours since the user's first rating": np.log1p(hours),
        "movie year": (year[movie] - 1990) / 10,
        "log of the user's ratings so far": np.log1p(past),
    }
    cut = _later(ratings["time"], _cut(len(user), folder), folder)
    data = _dataset(name, ids, dense, ratings["liked"], cut)
    data = replace(data, sparse=(*data.sparse, replace(all_genres, ids=genres, offsets=offsets)))
    return Problem(data=_crossed(data, ("user_id", "genres")))


# Splits, hashes, crosses.


def _cut(examples: int, path: Path) -> int:
    cut = int(TRAINED * examples)
    if cut in (0, examples):
        raise DataError(f"{path} has {examples} examples: too few for a training and a test part.")
    return cut


def _later(time: Ints, cut: int, path: Path) -> int:
    """Return the first example from ``cut`` on that is later than the one before."""
    later = np.flatnonzero(time[cut:] > time[cut - 1])
    if not len(later):
        raise DataError(f"{path}: the last fifth has one time only, so it can't be the test part.")
    return cut + int(later[0])


def _hashed(values: Ints, cut: int) -> tuple[int, Ints]:
    """Return the rows of a table for hashed values, and the ids."""
    rows = _rows_for(values[:cut])
    return rows, hashed_cross(values, 0 * values, rows)


def _rows_for(trained: Ints) -> int:
    """Return the next power of two: what a job takes that has counted a day's distinct values."""
    return max(2, 1 << (len(np.unique(trained)) - 1).bit_length())


def _crossed(data: Dataset, pair: tuple[str, str]) -> Dataset:
    """Return the data with a hashed cross of two features, of which the second may have several ids
    an example."""
    left, right = (next(each for each in data.sparse if each.name == name) for name in pair)
    first, second = left.ids.numpy(), right.ids.numpy()
    trained = data.train
    if right.offsets is not None:
        lengths = right.offsets.diff()
        first = first.repeat(lengths.numpy())
        trained = torch.arange(int(right.offsets[int(trained[-1]) + 1]))
    # Exact pairs: the number of rows must not depend on a hash.
    rows = _rows_for((first * right.rows + second)[trained.numpy()])
    ids = torch.from_numpy(hashed_cross(first, second, rows))
    name = "_x_".join(each.removesuffix("_id").removesuffix("s") for each in pair)
    cross = SparseFeature(name=name, rows=rows, ids=ids, offsets=right.offsets)
    return replace(data, sparse=(*data.sparse, cross))


def _dataset(
    name: str,
    ids: Mapping[str, tuple[int, Ints]],
    dense: Mapping[str, npt.NDArray[np.float64]],
    labels: Any,
    cut: int,
) -> Dataset:
    return Dataset(
        name=name,
        sparse=tuple(
            SparseFeature(name=key, rows=rows, ids=torch.from_numpy(values))
            for key, (rows, values) in ids.items()
        ),
        dense_names=tuple(dense),
        dense=torch.from_numpy(np.stack(list(dense.values()), axis=1)).float(),
        labels=torch.from_numpy(labels).float(),
        train=torch.arange(cut),
        test=torch.arange(cut, len(labels)),
    )
