"""Small files in the format of published click-through data.

Criteo's and Avazu's have the statistics that matter to tables: ids by Zipf's law, missing fields,
about a quarter and a sixth of clicks, and in Avazu's file new ids as hours pass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
GENRES = ("Action", "Comedy", "Drama", "Children's")


def write_criteo(path: Path, examples: int, seed: int = 0) -> Path:
    """Write Criteo's train.txt: a label, 13 counts and 26 hashes, any of them empty."""
    draw = np.random.default_rng(seed)
    lines = []
    for _ in range(examples):
        counts = [str(int(value)) for value in draw.lognormal(1, 2, 13) - 2]
        ids = [f"{value * 2654435761 % 2**32:08x}" for value in draw.zipf(1.3, 26).tolist()]
        fields = [text if draw.random() > 0.05 else "" for text in counts + ids]
        lines.append("\t".join([str(int(draw.random() < 0.25)), *fields]))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_avazu(path: Path, examples: int, seed: int = 0) -> Path:
    """Write Avazu's train: a CSV by hours, of which there are 40."""
    draw = np.random.default_rng(seed)
    lines = [AVAZU]
    for number in range(examples):
        hour = number * 40 // examples
        stamp = f"1410{21 + hour // 24}{hour % 24:02d}"
        ids = [
            f"{(value + 10 * hour) * 2654435761 % 2**32:08x}"
            for value in draw.zipf(1.3, 9).tolist()
        ]
        ints = draw.integers(0, 50, 10).tolist()
        click = int(draw.random() < 1 / 6)
        first, last = [1005, int(ints[0] % 2)], [1, 0, *map(int, ints[2:])]
        lines.append(",".join(map(str, [number, click, stamp, *first, *ids, *last])))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_movielens_1m(folder: Path, ratings: int, users: int = 300, movies: int = 400) -> Path:
    """Write ratings.dat, users.dat and movies.dat."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    titles = [
        f"{movie}::Film {movie}: the ñ ({1960 + movie % 40})::{'|'.join(GENRES[: 1 + movie % 3])}"
        for movie in range(1, movies + 1)
    ]
    (folder / "movies.dat").write_text("\n".join(titles) + "\n", encoding="latin-1")
    people = [
        f"{user}::{'FM'[user % 2]}::25::{user % 20}::{10000 + user}" for user in _up_to(users)
    ]
    (folder / "users.dat").write_text("\n".join(people) + "\n")
    lines = [f"{user}::{movie}::{stars}::{time}" for user, movie, stars, time in _rated(draw, ratings, users, movies)]  # fmt: skip
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    return folder


def write_movielens_20m(folder: Path, ratings: int, users: int = 300, movies: int = 400) -> Path:
    """Write ratings.csv and movies.csv."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    titles = [
        f'{movie},"Film {movie}, The ({1960 + movie % 40})",{"|".join(GENRES[: 1 + movie % 3])}'
        for movie in range(1, movies + 1)
    ]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *titles]) + "\n")
    lines = [f"{user},{movie},{stars - 0.5},{time}" for user, movie, stars, time in _rated(draw, ratings, users, movies)]  # fmt: skip
    (folder / "ratings.csv").write_text(
        "\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n"
    )
    return folder


def write_lastfm(folder: Path, events: int = 200) -> Path:
    """Write HetRec's user_taggedartists.dat, in the order of users, with gaps between ids, and one
    tagging dated long before Last.FM began."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    lines = ["userID\tartistID\ttagID\tday\tmonth\tyear", "2\t7\t9\t1\t6\t1956"]
    users = np.sort(draw.integers(0, 40, events)).tolist()
    for number, user in enumerate(users):
        artist, tag, month = draw.integers(0, 40, 3).tolist()
        when = f"1\t{1 + month % 12}\t{2005 + number % 6}"
        lines.append(f"{2 + 3 * user}\t{51 + 2 * artist}\t{1 + tag}\t{when}")
    (folder / "user_taggedartists.dat").write_text("\n".join(lines) + "\n")
    return folder


def _up_to(count: int) -> range:
    return range(1, count + 1)


def _rated(
    draw: np.random.Generator, ratings: int, users: int, movies: int
) -> list[tuple[int, int, int, int]]:
    """User, movie, stars and time; not in the order of time. Late users are new ones."""
    found = []
    for number in draw.permutation(ratings).tolist():
        user = 1 + int(draw.integers(0, users) * (0.5 + 0.5 * number / ratings))
        movie = 1 + int(movies * draw.random() ** 2)
        found.append((user, movie, int(draw.integers(1, 6)), 10**9 + 60 * (number // 2)))
    return found
