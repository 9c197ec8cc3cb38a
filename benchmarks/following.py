"""Tables of equal bytes whose rows follow the traffic, and their alternatives.

On a stream whose hot ids drift, with ``--movielens FOLDER`` on MovieLens-100K and with ``--lastfm
FILE`` on the taggings of Last.FM, both in the order of time; every batch is predicted before it is
trained on. Each method that has settings is tuned with four of them on another seed, or on the first
part of a log, before the reported runs. Besides, other streams with no method tuned. Results are
written to ``benchmarks/results/`` as JSON and markdown. Half an hour, or an hour with ``--intervals
1 5 40``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["PARTS", "main", "report", "tune"]

Run = dict[str, Any]

EVERY = 10
"""Batches between two updates, where methods are tuned and compared."""

SEEDS, TUNING_SEEDS = (0, 1, 2), (7,)

DEFAULTS: dict[str, dict[str, Any]] = {
    "following": {"half_life": 80, "nursery": 0.1},
    "lfu": {"least": 1},
    "distance lfu": {"exponent": 1.0},
}
"""Settings of methods that have some."""

GRIDS: dict[str, list[dict[str, Any]]] = {
    "following": [
        {"half_life": steps, "nursery": share} for steps, share in product((80, 320), (0.05, 0.1))
    ],
    "lfu": [{"least": lookups} for lookups in (1, 2, 3, 4)],
    "distance lfu": [{"exponent": power} for power in (0.5, 1.0, 1.5, 2.0)],
}
"""Four for each: ``half_life`` of lookups in batches, and the share of ``nursery`` rows; the
``least`` lookups in an interval that are not ignored; the ``exponent`` of the time since the last
lookup."""

DRIFTING = {
    **{"what": "stream", "ids": 1_000_000, "dim": 64, "steps": 1_000, "budgets": [0.05]},
    **{"changes": 8, "share": 0.5, "shared": 0.0},
}

OTHERS: dict[str, dict[str, Any]] = {
    "half of the hot ids change 7 times": {},
    "no id changes": {"share": 0.0},
    "all hot ids change 7 times": {"share": 1.0},
    "half change 39 times": {"changes": 40},
    "half change 7 times, ids of a group share half of their effect": {"shared": 0.5},
    "budget of 2%": {"budgets": [0.02]},
    "budget of 25%": {"budgets": [0.25]},
}
"""What differs from :data:`DRIFTING`."""

MOVIELENS = {
    **{"what": "movielens", "ids": 2_625, "dim": 64, "steps": 391, "budgets": [0.1, 0.25]},
}

LASTFM = {
    **{"what": "lastfm", "ids": 200_000, "dim": 64, "steps": 729, "budgets": [0.05]},
    "small": {"user": 1_892, "artist": 12_523, "tag": 9_748},
}

CASE = "benchmarks.following_case"


def main() -> int:
    """Run the parts, print the tables, write the dated results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--movielens", type=Path, help="folder with ml-100k.inter")
    parser.add_argument(
        "--lastfm",
        type=Path,
        help="HetRec 2011: the folder with user_taggedartists.dat; or an .npz of it",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--intervals", type=int, nargs="+", default=[], help="beside 10: 1 5 40")
    options = parser.parse_args()
    for part in options.only:
        path = getattr(options, part, None)
        if part in ("movielens", "lastfm") and path is None:
            print(f"Skipped: {part}, for which --{part} names no path.", file=sys.stderr)
            continue
        found = PARTS[part](str(path), options.intervals)
        text = report(found)
        print(text)
        keep(options.out, f"following-{part}", found, text)
    return 0


def _compared(stream: Run, path: str, intervals: Sequence[int]) -> list[Run]:
    """Tune on some seeds, then report others: all methods, and other intervals."""
    case = {**stream, "path": path}
    tuning = [
        {**case, "seed": seed, "tuning": True, "runs": _grid(stream["budgets"], method)}
        for method, seed in product(GRIDS, TUNING_SEEDS)
    ]
    tried = _measured(tuning)
    best = tune(tried)
    runs = [
        *_runs([1.0], "full"),
        *_runs(stream["budgets"], "hash"),
        *_runs(stream["budgets"], "frozen"),
    ]
    for budget, method in product(stream["budgets"], GRIDS):
        runs += _runs([budget], method, best[budget, method])
        if best[budget, method] != DEFAULTS[method]:
            runs += _runs([budget], method, DEFAULTS[method])
    others = [
        {**run, "every": every}
        for budget, method, every in product(stream["budgets"], GRIDS, intervals)
        for run in _runs([budget], method, best[budget, method])
    ]
    final = [
        {**case, "seed": seed, "tuning": False, "runs": some}
        for some, seed in product([runs, *([others] if others else [])], SEEDS)
    ]
    return tried + _measured(final)


def _grid(budgets: Sequence[float], method: str) -> list[Run]:
    return [run for settings in GRIDS[method] for run in _runs(budgets, method, settings)]


def _runs(budgets: Sequence[float], method: str, settings: Run | None = None) -> list[Run]:
    shared = {"method": method, "every": EVERY, "settings": settings or {}}
    return [{**shared, "budget": budget} for budget in budgets]


def _untuned(*_: Any) -> list[Run]:
    cases = []
    for (name, differs), seed in product(OTHERS.items(), SEEDS):
        case = {**DRIFTING, **differs, "what": "others", "name": name}
        runs = _runs([1.0], "full") + _runs(case["budgets"], "hash")
        for method, settings in DEFAULTS.items():
            runs += _runs(case["budgets"], method, settings)
        cases.append({**case, "seed": seed, "tuning": False, "runs": runs})
    return _measured(cases)


def _measured(cases: Sequence[Run]) -> list[Run]:
    found = []
    for case in tqdm(cases, disable=not sys.stderr.isatty()):
        found.append(fresh(CASE, case, 1, 1))
        found[-1].pop("path", None)
    return found


def tune(tried: Sequence[Run]) -> dict[tuple[float, str], Run]:
    """Return the settings with the highest mean AUC, for each budget and method."""
    best: dict[tuple[float, str], tuple[float, Run]] = {}
    for (budget, method, _), runs in _groups(tried, "budget", "method").items():
        quality = statistics.mean(run["auc"] for run in runs)
        if quality > best.get((budget, method), (0.0, {}))[0]:
            best[budget, method] = (quality, runs[0]["settings"])
    return {key: settings for key, (_, settings) in best.items()}


PARTS: dict[str, Callable[[str, Sequence[int]], list[Run]]] = {
    "stream": partial(_compared, DRIFTING),
    "movielens": partial(_compared, MOVIELENS),
    "lastfm": partial(_compared, LASTFM),
    "others": _untuned,
}


def report(found: Sequence[Run]) -> str:
    """The figures of a part as markdown tables with what they mean."""
    cases = [case for case in found if not case["tuning"]]
    if found[0]["what"] == "others":
        notes = f"{_NOTES['stream']} {_UNTUNED} {_SHARED}"
        names = dict.fromkeys(case["name"] for case in cases)
        some = [[case for case in cases if case["name"] == name] for name in names]
        tables = [f"{name}:\n\n{_table(each)}" for name, each in zip(names, some, strict=True)]
        return "\n\n".join([notes, *tables])
    what = found[0]["what"]
    parts = [f"{_NOTES[what]} {_TUNED[what == 'stream']} {_SHARED}", _table(cases)]
    if any(run["every"] != EVERY for case in cases for run in case["runs"]):
        parts += [_INTERVALS, _intervals(cases)]
    parts += [_TRIED, _tried([case for case in found if case["tuning"]])]
    return "\n\n".join(parts)


_NOTES = {
    "stream": (
        "Bags of 4 ids of 1,000,000, Zipf's law with exponent 1.05; half of the hottest 10,000 ids"
        " change places with cold ones at each of 7 moments. 1,000 batches of 256."
    ),
    "movielens": (
        "MovieLens-100K in the order of time: bags of the user and the item, of 2,625 ids in one"
        " table, and whether the rating is 4 or 5. 391 batches of 256. Seeds draw initial weights"
        " alone."
    ),
    "lastfm": (
        "Taggings of Last.FM (HetRec 2011) in the order of their month: user, artist, tag, and the"
        " pair of user and tag, hashed into 200,000 ids; this large table has the budget, the three"
        " small ones have a row for each id. Each tagging is followed by two examples with the same"
        " user and tag and an artist of an earlier tagging: is it the tagging? 729 batches of 768."
        " Seeds draw the order within a month, these artists, the hash and initial weights."
    ),
}

_TUNED = {
    True: ("Settings of following tables, LFU and distance LFU: the best of four on seed 7."),
    False: (
        "Settings of following tables, LFU and distance LFU: the best of four on the first 40% of"
        " the log. Later: the AUC of the remaining 60%, which chose nothing."
    ),
}

_UNTUNED = "Variations of this stream; no method is tuned."

_SHARED = (
    "AUC and normalized entropy of all batches but the first eighth, each batch predicted before it"
    " was trained on: mean of seeds 0, 1 and 2, and half their range. Over distance LFU: the least"
    " and the greatest difference in AUC to it, with its settings of the first row, on the same"
    " seed. Budget: the share of the bytes of the full table, 64 columns and row-wise Adagrad's"
    " sum, that rows, sums, indexes and counts may take: 1 byte an id and 16 a row for following"
    " tables, nursery rows included, 0.25 an id for frozen masks (which hold the full table for"
    " the first eighth), 24 or 32 a row for TorchRec's managed collisions. Updates every 10"
    " batches. Milliseconds: the median CPU time of a step, and the mean, which includes updates."
    " FBGEMM resets the state of evicted rows on CUDA alone: here the benchmark does."
)

_INTERVALS = (
    "AUC by the batches between two updates, with the settings above. Managed collisions update"
    " before the lookups of the batch, so with 1 a new id has a row at its first lookup."
)

_TRIED = "What tuning tried: mean AUC of its seeds, on the data that chooses settings."

Groups = dict[tuple[Any, ...], list[Run]]


def _groups(cases: Sequence[Run], *keys: str) -> Groups:
    """The runs of all seeds, by these keys and their settings."""
    groups: Groups = {}
    for case in cases:
        for run in case["runs"]:
            key = (*(run[each] for each in keys), _named(run["settings"]))
            groups.setdefault(key, []).append(run)
    return groups


def _named(settings: Run) -> str:
    names = {"half_life": "half-life", "nursery": "nursery", "least": "least"}
    each = [f"{names.get(key, key)} {value:g}" for key, value in settings.items()]
    return ", ".join(each) or "-"


def _table(cases: Sequence[Run]) -> str:
    later = cases[0]["what"] in ("movielens", "lastfm")
    lines = [
        "| budget | method | settings | rows | AUC | over distance LFU | normalized entropy |"
        + (" later |" if later else "")
        + " ms | mean ms |",
        "|" + "---|" * (9 + later),
    ]
    groups = _groups(cases, "every", "budget", "method")
    rivals: dict[float, list[Run]] = {}
    for (every, budget, method, _), runs in groups.items():
        if every == EVERY and method == "distance lfu":
            rivals.setdefault(budget, runs)
    for (every, budget, method, settings), runs in groups.items():
        if every != EVERY:
            continue
        row = [
            f"{budget:.0%}",
            method,
            settings,
            f"{runs[0]['rows']:,}",
            _spread([run["auc"] for run in runs]),
            _over(runs, rivals.get(budget, runs)),
            _spread([run["ne"] for run in runs]),
            *([_spread([run["later_auc"] for run in runs])] if later else []),
            f"{statistics.median(run['ms'] for run in runs):.2f}",
            f"{statistics.median(run['mean_ms'] for run in runs):.2f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _over(runs: Sequence[Run], rivals: Sequence[Run]) -> str:
    if runs is rivals:
        return "-"
    over = [run["auc"] - rival["auc"] for run, rival in zip(runs, rivals, strict=True)]
    return f"{min(over):+.4f} to {max(over):+.4f}"


def _intervals(cases: Sequence[Run]) -> str:
    intervals = sorted({run["every"] for case in cases for run in case["runs"]})
    groups = _groups(cases, "budget", "method", "every")
    lines = [
        "| budget | method | settings | " + " | ".join(map(str, intervals)) + " |",
        "|" + "---|" * (3 + len(intervals)),
    ]
    compared = dict.fromkeys((*key[:2], key[3]) for key in groups if key[2] != EVERY)
    for budget, method, settings in compared:
        row = [f"{budget:.0%}", method, settings]
        row += [
            _spread([run["auc"] for run in groups[budget, method, each, settings]])
            for each in intervals
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _tried(cases: Sequence[Run]) -> str:
    lines = ["| budget | method | AUC |", "|---|---|---|"]
    found: dict[tuple[float, str], list[str]] = {}
    for (budget, method, settings), runs in _groups(cases, "budget", "method").items():
        quality = statistics.mean(run["auc"] for run in runs)
        found.setdefault((budget, method), []).append(f"{settings}: {quality:.4f}")
    for (budget, method), each in found.items():
        lines.append(f"| {budget:.0%} | {method} | {'; '.join(each)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


if __name__ == "__main__":
    sys.exit(main())
