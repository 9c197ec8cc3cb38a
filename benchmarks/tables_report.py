"""The tables, the verdicts and the plot of `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.sweep_plot import INK
from benchmarks.tables_methods import ALL_FORMS, FULL, METHODS, TOUCHED

__all__ = ["Line", "lines_of", "plot", "report", "verdict"]

Row = dict[str, Any]
Key = tuple[str, str]
"""Data set and network."""

_LOOKS = dict(
    zip(
        METHODS,
        (
            ("#44AA99", "o"),
            ("#0072B2", "s"),
            ("#999933", "v"),
            ("#56B4E9", "v"),
            ("#E69F00", "^"),
            ("#D55E00", "D"),
            ("#CC79A7", "*"),
            ("#882255", "P"),
        ),
        strict=True,
    )
)
"""Color and marker of a method."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A method at a number of bytes, over all seeds.

    Args:
        method: its name.
        served: how its tables are served.
        budget: what it was tuned for; 100% for the full table and what is made of it.
        rows: its trainings, in the order of seeds.
        full: the AUC of the full table in float32, in the same order.
    """

    method: str
    served: str
    budget: str
    rows: Sequence[Row]
    full: Sequence[float]

    @property
    def name(self) -> str:
        """With the dtype, if it comes from the full table."""
        if self.budget != "100%":
            return self.method
        return self.served if _removes(self) else f"{FULL}, {self.served}"

    def values(self, figure: str) -> list[float]:
        """A figure of each seed."""
        return [row["served_as"][self.served][figure] for row in self.rows]

    @property
    def share(self) -> float:
        """Of the bytes of the full table in float32."""
        return max(self.values("bytes")) / self.rows[0]["dense_bytes"]

    @property
    def cold(self) -> float | None:
        """The share of the test's lookups that hit rows never read, or zeros."""
        quality = self.rows[0]["served_as"][self.served]
        return mean(self.values("cold")) if "cold" in quality else None

    def over(self, others: Sequence[float]) -> float:
        """The mean difference in AUC, seed by seed."""
        return mean(self.differences(others))

    def differences(self, others: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(self.values("auc"), others, strict=True)]

    def beyond(self, others: Sequence[float]) -> int:
        """1 or -1 if its AUC is above or below by more than noise, else 0: half the range over
        seeds of either AUC, or of their difference, whichever is largest."""
        spreads = map(_spread, (others, self.values("auc"), self.differences(others)))
        difference = self.over(others)
        if abs(difference) <= max(spreads):
            return 0
        return 1 if difference > 0 else -1

    @cached_property
    def against_full(self) -> int:
        """As :meth:`beyond`, against the full table in float32."""
        return self.beyond(self.full)


def lines_of(rows: Iterable[Row]) -> dict[Key, list[Line]]:
    """Return the lines of each data set and network. A method that does not fit has none."""
    groups: dict[Key, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        cell = groups.setdefault((row["data"], row["network"]), {})
        if row["served_as"]:
            cell.setdefault((row["method"], row["budget"]), []).append(row)
    found: dict[Key, list[Line]] = {}
    for key, cells in groups.items():
        dense = [row["served_as"]["fp32"]["auc"] for row in cells[FULL, "100%"]]
        found[key] = [
            Line(method=method, served=served, budget=budget, rows=some, full=dense)
            for (method, budget), some in cells.items()
            for served in some[0]["served_as"]
        ]
    return found


def verdict(lines: Sequence[Line]) -> str:
    """Say what to use: the smallest form of the trained table whose AUC is within noise of float32,
    and what is smaller at the same AUC, if anything is."""
    plain = [line for line in lines if line.budget == "100%"]
    as_good = [line for line in plain if line.against_full >= 0]
    smallest = min(as_good, key=lambda line: line.share)
    full = min((line for line in as_good if line.method == FULL and not _removes(line)),
               key=lambda line: line.share)  # fmt: skip
    smaller = sorted(
        (
            line
            for line in lines
            if line.budget != "100%" and line.against_full >= 0 and line.share < smallest.share
        ),
        key=lambda line: line.share,
    )
    said = f"**All rows in {full.served}** ({full.share:.1%} of the bytes): as good as float32."
    if smallest is not full:
        said += f" **{_capital(smallest.name)}** ({smallest.share:.1%}): as good, without a second training."
    if smaller:
        others = ", ".join(f"{line.name} ({line.share:.1%})" for line in smaller)
        return f"{said} Smaller and as good, with a second training: {others}."
    return f"{said} Nothing smaller is: use {smallest.name} and stop."


def _removes(line: Line) -> bool:
    return line.served.startswith(TOUCHED)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def report(
    rows: Sequence[Row], about: Mapping[str, str], settings: int, notes: Sequence[str] = ()
) -> str:
    """Return the result as markdown.

    Args:
        rows: of the tested cases, and of those that don't fit.
        about: describes each data set.
        settings: of each method, in each case, at most.
        notes: paragraphs about the run.
    """
    found = lines_of(rows)
    seeds = sorted({row["seed"] for row in rows if "seed" in row})
    parts = [
        (
            "One pass over the earliest 80% of the examples, tested on the rest. Row-wise Adagrad"
            f" for tables, Adam for layers. Each method: up to {settings} settings for each number of"
            " bytes, the full table twice as many, each as near as possible to the best so far; the"
            " best is chosen on the last fifth"
            " of the training part with a seed of its own, then trained with seeds"
            f" {', '.join(map(str, seeds))}. Bytes: of an artifact that `dist_sparse.export`"
            " wrote, against all rows in float32 at the tuned columns, with scales, bitmaps, books,"
            " and what finds a row; layers are not counted. Touched rows: those that training read; the"
            " others are removed. Touched rows, retrained: the same after a training with columns and"
            " learning rate for these bytes. Quality is measured with the values"
            " that the artifact serves. Tables with fewer than 256 rows stay whole."
        ),
        (
            "Noise: half the range over seeds of either AUC, or of their difference, whichever is"
            " largest. Differences are seed by seed. Cold: lookups of the test that hit a row that"
            " training never read, or zeros. CPU: seconds of a training, on one thread of a shared"
            " machine."
        ),
        *notes,
        _summary(found, rows),
        _everywhere(found, rows),
        "## Verdicts",
        "\n".join(
            f"- {data}, {network}: {verdict(lines)}" for (data, network), lines in found.items()
        ),
        _losers(found),
    ]
    for (data, network), lines in found.items():
        parts += [f"## {data}, {network}", about[data], _details(lines)]
    return "\n\n".join(part for part in parts if part)


def _summary(found: Mapping[Key, Sequence[Line]], rows: Sequence[Row]) -> str:
    """The table: AUC over that of the full table in float32."""
    cases = list(found)
    head = [f"{data}, {network}" for data, network in cases]
    out = [
        "AUC of the full table in float32, and differences to it. Bold: beyond noise.",
        "",
        "| at most | method | " + " | ".join(head) + " |",
        "|---" * (2 + len(head)) + "|",
    ]
    budgets = dict.fromkeys(row["budget"] for row in rows)
    for budget in budgets:
        for name in _names(rows, budget):
            cells = []
            for case in cases:
                mine = [
                    line
                    for line in found[case]
                    if line.budget == budget
                    and (line.served if budget == "100%" else line.method) == name
                ]
                cells.append(_difference(mine[0]) if mine else "does not fit")
            label = name if budget != "100%" or name.startswith(TOUCHED) else f"{FULL}, {name}"
            out.append(f"| {budget} | {label} | {' | '.join(cells)} |")
    return "\n".join(out)


def _names(rows: Sequence[Row], budget: str) -> list[str]:
    """Return what was tried at a number of bytes: forms of the full table, or methods."""
    mine = [row for row in rows if row["budget"] == budget]
    if budget == "100%":
        return [name for name in ALL_FORMS if any(name in row["served_as"] for row in mine)]
    return [name for name in METHODS if any(row["method"] == name for row in mine)]


def _everywhere(found: Mapping[Key, Sequence[Line]], rows: Sequence[Row]) -> str:
    """Say which methods hold: they fit in all cases, and are never below float32 beyond noise."""
    said = []
    for budget in dict.fromkeys(row["budget"] for row in rows if row["budget"] != "100%"):
        good = []
        for name in _names(rows, budget):
            lines = [
                line
                for some in found.values()
                for line in some
                if line.budget == budget and line.method == name
            ]
            if len(lines) == len(found) and all(line.against_full >= 0 for line in lines):
                good.append(name)
        said.append(f"at {budget}, {', '.join(good) or 'none'}")
    if not said:
        return ""
    return f"With a new training, never below float32 by more than the noise: {'; '.join(said)}."


def _difference(line: Line) -> str:
    if line.name == f"{FULL}, fp32":
        return f"{mean(line.full):.4f} ± {_spread(line.full):.4f}"
    text = f"{line.over(line.full):+.4f}"
    text = f"**{text}**" if line.against_full else text
    return f"{text} ({line.share:.1%})"


def _losers(found: Mapping[Key, Sequence[Line]]) -> str:
    """Say for each method how often it is the best of its bytes, or within noise of it."""
    out = [
        "## At equal bytes",
        "",
        "Cases in which a method has the best AUC of its bytes, is within noise of the best, or is below.",
        "",
        "| method | best | within noise | below | difference to the best |",
        "|---" * 5 + "|",
    ]
    for method in METHODS:
        counts, differences = {"best": 0, "noise": 0, "below": 0}, []
        for lines in found.values():
            for line in (each for each in lines if each.method == method):
                rivals = [each for each in lines if each.budget == line.budget]
                best = max(rivals, key=lambda each: mean(each.values("auc")))
                differences.append(line.over(best.values("auc")))
                below = line.beyond(best.values("auc")) < 0
                counts["best" if line is best else "below" if below else "noise"] += 1
        if differences:
            spread = f"{min(differences):+.4f} to {max(differences):+.4f}"
            out.append(f"| {method} | {' | '.join(map(str, counts.values()))} | {spread} |")
    return "\n".join(out) if len(out) > 6 else ""


def _details(lines: Sequence[Line]) -> str:
    head = "at most | method | columns | learning rate | rows | served | bytes | AUC | over float32 | NE | log loss | cold | CPU"
    out = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for line in lines:
        one = line.rows[0]
        over = f"{line.over(line.full):+.4f}" + ("" if line.against_full else " (noise)")
        where = " of the largest table" if one["largest"] else ""
        kept = "all" if one["share"] == 1 else f"{one['share']:.0%}{where}"
        if _removes(line):
            kept = "touched"
        if one.get("interval"):
            kept += f", updates every {one['interval']}"
        served = f"{one['dim'] // one['group']} codes" if one["group"] else line.served
        cells = [
            line.budget,
            line.name,
            one["dim"],
            f"{one['lr']:g}",
            kept,
            served.removeprefix(f"{TOUCHED}, "),
            f"{line.share:.1%}",
            _figure(line, "auc"),
            over,
            _figure(line, "ne"),
            _figure(line, "log_loss"),
            "-" if line.cold is None else f"{line.cold:.1%}",
            f"{mean(row['cpu_seconds'] for row in line.rows):.1f} s",
        ]
        out.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(out)


def _figure(line: Line, figure: str) -> str:
    values = line.values(figure)
    return f"{mean(values):.4f} ± {_spread(values):.4f}"


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def plot(rows: Sequence[Row], file: Path) -> None:
    """Write the AUC against the bytes: a panel for each data set and network, with a band for the
    seeds of the full table."""
    found = lines_of(rows)
    with plt.rc_context(INK):
        figure, panels = plt.subplots(
            1,
            len(found),
            figsize=(1 + 4.2 * len(found), 4.6),
            dpi=110,
            layout="constrained",
            squeeze=False,
        )
        for axes, (key, lines) in zip(panels[0], found.items(), strict=True):
            _panel(axes, ", ".join(key), lines)
        handles: dict[str, Any] = {}
        for axes in panels[0]:
            handles |= {each.get_label(): each for each in axes.containers}
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(5, len(handles)),
            frameon=False,
            fontsize=8,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    plt.close(figure)


def _panel(axes: Any, title: str, lines: Sequence[Line]) -> None:
    full = lines[0].full
    axes.axhspan(min(full), max(full), color="#808080", alpha=0.2, lw=0)
    plain = [line for line in lines if line.budget == "100%"]
    groups = {
        "all rows, any dtype": [line for line in plain if not _removes(line)],
        "touched rows, any dtype": [line for line in plain if _removes(line)],
    }
    looks = {"all rows, any dtype": ("#808080", "s"), "touched rows, any dtype": ("#009E73", "s")}
    for method, look in _LOOKS.items():
        groups[method] = [line for line in lines if line.method == method]
        looks[method] = look
    for name, some in groups.items():
        if some:
            some = sorted(some, key=lambda line: line.share)
            color, marker = looks[name]
            axes.errorbar(
                [100 * line.share for line in some],
                [mean(line.values("auc")) for line in some],
                [_spread(line.values("auc")) for line in some],
                color=color,
                marker=marker,
                ms=5,
                lw=1.2,
                capsize=2,
                label=name,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([5, 10, 20, 50, 100]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(["5%", "10%", "20%", "50%", "100%"])
    axes.set_xlabel("bytes of the full table in float32")
    axes.set_title(f"AUC: {title}", loc="left", fontsize=11, fontweight="bold")
