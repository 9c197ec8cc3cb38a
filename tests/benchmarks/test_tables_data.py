"""Readers of published data: what they make of a file, and what they say of one that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks.tables_data import (
    Problem,
    avazu,
    criteo,
    grouplens,
    lastfm_crossed,
    lastfm_log,
)
from dlrm.batches import DataError, SparseFeature
from tests.benchmarks.files import (
    write_avazu,
    write_criteo,
    write_lastfm,
    write_movielens_1m,
    write_movielens_20m,
)

LIMIT = 10**6


def feature(problem: Problem, name: str) -> SparseFeature:
    [found] = [each for each in problem.data.sparse if each.name == name]
    return found


def check(problem: Problem) -> None:
    """Ids have rows, and each part is whole."""
    data = problem.data
    examples = len(data.labels)
    assert torch.equal(torch.cat([data.train, data.test]), torch.arange(examples))
    assert data.dense.shape == (examples, len(data.dense_names)) and data.dense.isfinite().all()
    assert set(data.labels.tolist()) == {0.0, 1.0}
    for each in data.sparse:
        assert int(each.ids.min()) >= 0 and int(each.ids.max()) < each.rows
        assert each.offsets is None or int(each.offsets[-1]) == len(each.ids)
    batch = data.batch(data.train[:8])
    assert batch.sparse_features.keys() == [each.name for each in data.sparse]


@pytest.mark.parametrize("write", [write_movielens_1m, write_movielens_20m])
def test_movielens_is_split_by_time(write: Callable[..., Path], tmp_path: Path) -> None:
    problem = grouplens(write(tmp_path / "ml", 600))
    check(problem)
    cross = feature(problem, "user_x_genre")
    assert cross.rows & (cross.rows - 1) == 0, "a power of two"
    lines = (tmp_path / "ml").glob("ratings.*")
    text = next(lines).read_text().splitlines()
    fields = [line.replace("::", ",").split(",") for line in text if line[0].isdigit()]
    time = sorted(int(line[3]) for line in fields)
    cut = len(problem.data.train)
    assert time[cut - 1] < time[cut] and cut >= 0.8 * len(time)
    liked = sum(float(line[2]) >= 4 for line in fields)
    assert int(problem.data.labels.sum()) == liked


def test_movielens_joins_users_and_movies(tmp_path: Path) -> None:
    folder = tmp_path / "ml"
    write_movielens_1m(folder, 3)
    (folder / "ratings.dat").write_text("2::3::5::30\n1::3::3::10\n2::1::4::20\n")
    problem = grouplens(folder)
    assert feature(problem, "user_id").ids.tolist() == [0, 1, 1]  # in the order of time
    assert feature(problem, "movie_id").ids.tolist() == [1, 0, 1]
    assert problem.data.labels.tolist() == [0, 1, 1]
    genres = feature(problem, "genres")
    assert genres.offsets is not None and genres.offsets.diff().tolist() == [1, 2, 1]
    assert feature(problem, "zip_code").ids.tolist() == [0, 1, 1]
    # Hours since the user's first rating, the year, ratings so far.
    assert problem.data.dense[:, 2].tolist() == pytest.approx([0, 0, np.log(2)])


def test_a_cross_has_a_row_for_each_pair_that_training_reads(tmp_path: Path) -> None:
    problem = grouplens(write_movielens_20m(tmp_path / "ml", 600))
    users, genres = feature(problem, "user_id"), feature(problem, "genres")
    taken, lengths = genres.take(problem.data.train)
    pairs = {
        *zip(
            users.ids[problem.data.train].repeat_interleave(lengths).tolist(),
            taken.tolist(),
            strict=True,
        )
    }
    rows = feature(problem, "user_x_genre").rows
    assert rows // 2 < len(pairs) <= rows


def test_criteo_is_hashed_in_the_order_of_the_file(tmp_path: Path) -> None:
    problem = criteo(write_criteo(tmp_path / "train.txt", 500), LIMIT)
    check(problem)
    assert len(problem.data.sparse) == 26 and len(problem.data.dense_names) == 13
    assert len(problem.data.train) == 400
    for each in problem.data.sparse:
        read = len(each.ids[problem.data.train].unique())
        assert read <= each.rows, "hashed ids collide, so that fewer rows are read"
    assert len(criteo(tmp_path / "train.txt", 100).data.labels) == 100


def test_equal_values_of_criteo_are_equal_ids(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    row = ["1", *[""] * 13, *[""] * 26]
    other = ["0", "7", *[""] * 12, "0000000a", *[""] * 25]
    path.write_text("\n".join("\t".join(each) for each in (row, other, row, other, other)) + "\n")
    problem = criteo(path, LIMIT)
    first = feature(problem, "C1").ids.tolist()
    assert first[0] == first[2] and first[1] == first[3] == first[4]
    assert problem.data.dense[:, 0].tolist() == pytest.approx([0, np.log(8)] * 2 + [np.log(8)])


def test_the_test_of_avazu_begins_with_an_hour(tmp_path: Path) -> None:
    path = write_avazu(tmp_path / "train", 410)
    problem = avazu(path, LIMIT)
    check(problem)
    hours = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
    cut = len(problem.data.train)
    assert hours[cut - 1] < hours[cut]
    assert feature(problem, "hour_of_day").ids.tolist() == [int(hour[-2:]) for hour in hours]
    assert any(each.name == "device_model_x_site" for each in problem.data.sparse)


def test_the_folder_of_lastfm_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    folder = write_lastfm(tmp_path / "hetrec")
    log = lastfm_log(folder)
    lines = (folder / "user_taggedartists.dat").read_text().splitlines()[2:]  # not that of 1956
    rows = [tuple(map(int, line.split("\t"))) for line in lines]
    when = [date(year, month, day) for *_, day, month, year in rows]
    order = sorted(range(len(rows)), key=lambda at: when[at])  # stable
    assert log["date"].tolist() == [(when[at] - date(1970, 1, 1)).days for at in order]
    for place, name in enumerate(("user", "artist", "tag")):
        known = sorted({row[place] for row in rows})
        assert log[name].tolist() == [known.index(rows[at][place]) for at in order]


@pytest.mark.parametrize("stored", [False, True])
def test_events_of_lastfm_keep_their_negatives(stored: bool, tmp_path: Path) -> None:
    path = write_lastfm(tmp_path / "hetrec")
    if stored:
        np.savez(tmp_path / "lastfm.npz", **lastfm_log(path))
        assert (
            lastfm_crossed(path).fingerprint == lastfm_crossed(tmp_path / "lastfm.npz").fingerprint
        )
        path = tmp_path / "lastfm.npz"
    problem = lastfm_crossed(path)
    check(problem)
    assert problem.group == 2
    assert problem.data.labels.view(-1, 2).sum(1).tolist() == [1.0] * 200
    assert len(problem.data.train) == 320


def test_tuning_uses_the_training_part_alone(tmp_path: Path) -> None:
    problem = lastfm_crossed(write_lastfm(tmp_path / "hetrec"))
    earlier = problem.earlier().data
    assert torch.equal(torch.cat([earlier.train, earlier.test]), problem.data.train)
    assert len(earlier.train) == 256
    assert problem.fingerprint != problem.earlier().fingerprint


RATING, USER, MOVIE = "1::1::5::10", "1::F::25::3::10000", "1::A film (1990)::Drama"
AVAZU_ROW = "1,0,14102100," + ",".join(["1"] * 21)


@pytest.mark.parametrize(
    ("what", "files", "message"),
    [
        ("movielens", {}, "has neither ratings.dat (MovieLens-1M) nor ratings.csv"),
        ("movielens", {"ratings.dat": RATING}, "movies.dat can't be read: No such file"),
        (
            "movielens",
            {"ratings.dat": f"{RATING}\n1::1::5", "movies.dat": MOVIE, "users.dat": USER},
            "ratings.dat, line 2: it does not have 4 fields",
        ),
        (
            "movielens",
            {"ratings.dat": f"{RATING}\n1::1::good::10"},
            "ratings.dat, line 2: the rating is 'good', not a number",
        ),
        (
            "movielens",
            {"ratings.dat": "x::1::5::10"},
            "ratings.dat, line 1: user is 'x', not a whole number",
        ),
        ("movielens", {"ratings.dat": ""}, "ratings.dat has no examples"),
        (
            "movielens",
            {"ratings.dat": f"{RATING}\n2::1::3::20", "movies.dat": MOVIE, "users.dat": USER},
            "user 2 has ratings, and is not in users.dat",
        ),
        (
            "movielens",
            {"ratings.dat": "1::9::5::10", "movies.dat": MOVIE, "users.dat": USER},
            "movie 9 has ratings, and is not in the file of movies",
        ),
        (
            "movielens",
            {"ratings.dat": "\n".join([RATING] * 9), "movies.dat": MOVIE, "users.dat": USER},
            "the last fifth has one time only",
        ),
        (
            "movielens",
            {"ratings.csv": "userId,movieId,timestamp\n1,1,10"},
            "ratings.csv, line 1: no column rating",
        ),
        (
            "movielens",
            {"ratings.csv": "userId,movieId,rating,timestamp\n1,1,4.5,10\n1,1,4.5"},
            "ratings.csv, line 3: it does not have 4 fields",
        ),
        ("criteo", {}, "data can't be read"),
        ("criteo", {"data": "1\t2"}, "data, line 1: it does not have 40 fields"),
        ("criteo", {"data": "2" + "\t" * 39}, "data, line 1: the label is '2', not 0 or 1"),
        (
            "criteo",
            {"data": "1" + "\t" * 39 + "\n1\tmany" + "\t" * 38},
            "data, line 2: I1 is 'many', not a whole number",
        ),
        ("criteo", {"data": "1" + "\t" * 39 + "zz"}, "C26 is 'zz', not a number in base 16"),
        ("criteo", {"data": "1" + "\t" * 39}, "has 1 examples: too few"),
        ("avazu", {"data": "id,click\n1,0"}, "data, line 1: no column hour, C1"),
        (
            "avazu",
            {"data": f"AVAZU\n{AVAZU_ROW},1"},
            "data, line 2: it does not have 24 fields",
        ),
        (
            "avazu",
            {"data": "AVAZU\n" + AVAZU_ROW.replace("1,0,", "1,yes,", 1)},
            "data, line 2: the label is 'yes', not 0 or 1",
        ),
        ("lastfm", {}, "data is missing"),
        ("hetrec", {}, "user_taggedartists.dat can't be read: No such file"),
        (
            "hetrec",
            {"user_taggedartists.dat": "userID\n1\t2\t3\t1\t13\t2009"},
            "user_taggedartists.dat, line 2: month must be in 1..12",
        ),
        (
            "hetrec",
            {"user_taggedartists.dat": "userID\n1\t2\t3\t1\t4"},
            "user_taggedartists.dat, line 2: it does not have 6 fields",
        ),
        ("lastfm", {"data": "text"}, "data is not an .npz of whole numbers"),
        ("lastfm", {"npz": "user"}, "data has no array artist, tag, date"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(
    what: str, files: dict[str, str], message: str, tmp_path: Path
) -> None:
    from tests.benchmarks.files import AVAZU

    for name, text in files.items():
        if name == "npz":
            with (tmp_path / "data").open("wb") as stream:
                np.savez(stream, user=np.arange(5))
        else:
            (tmp_path / name).write_text(text.replace("AVAZU", AVAZU))
    readers: dict[str, Callable[[], Problem]] = {
        "movielens": lambda: grouplens(tmp_path),
        "criteo": lambda: criteo(tmp_path / "data", LIMIT),
        "avazu": lambda: avazu(tmp_path / "data", LIMIT),
        "lastfm": lambda: lastfm_crossed(tmp_path / "data"),
        "hetrec": lambda: lastfm_crossed(tmp_path),
    }
    with pytest.raises(DataError) as error:
        readers[what]()
    assert message in str(error.value) and str(tmp_path) in str(error.value)
