"""`frontier()`: metrics of a trained model at a few sizes, on the user's own data.

From the top: :class:`Trial`, one measurement; :class:`Frontier`, the result, which prints itself;
:func:`frontier`; :func:`trials_of`, which lists what to measure within a budget; and the
measurements. Each is written as a line of JSON, so that an interrupted run continues.
"""

import hashlib
import json
import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from torch import nn

from dist_sparse import checks
from dist_sparse.checks import refuse_special, refusing, write_whole
from dist_sparse.extras.frontier.methods import BUDGETS, METHODS
from dist_sparse.extras.frontier.trials import check_candidate, refuse_infinite, serving
from dist_sparse.groups import rank_in, world_group
from dist_sparse.planning.candidates import (
    BY_COLUMN,
    CODED,
    Candidate,
    Choice,
    Choices,
    shape_of,
)
from dist_sparse.planning.reads import rows_by_reads
from dist_sparse.serving.encodings import UNCODED
from dist_sparse.sparsifiers.pieces import hash_tensor
from dist_sparse.tables.bases import TableGroups, rotation_groups
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Located, ShardedData
from dist_sparse.text import percent, progress, table_lines
from dist_sparse.training.arguments import (
    budget_bytes,
    dense_bytes,
    fewest_removed,
    protected,
)

_METHOD_OF_KIND = {"full": "bits", "small": "small", "columns": "rotated"}

# Methods named after their dtype, whatever columns their trials keep.
_METHOD_OF_DTYPE = {BY_COLUMN: "column", **dict.fromkeys(CODED, "codes")}

_FILE, _RESULT = "trials.jsonl", "frontier.json"

# Notes below the table, and the methods that they are about.
_NOTES = {
    "Columns and rows were removed from the trained model, which was not trained on: removed while "
    "it trains, they lose less, rotated columns above all.": {"rotated", "rows"},
    "Codes were fitted to the trained weights: training through them with quantize() usually "
    "gains more.": {"codes"},
}

# The kept part of a trial that removes neither rows nor columns.
_ALL = "everything"

_FOUR_DIGITS = "{:.4f}".format

# Returns the metrics of a model by name, the same on all ranks, and does not change the model.
Evaluate = Callable[[nn.Module], Mapping[str, float]]

# Trains a model whose tables have a fraction of their columns, and returns it with its evaluation.
Train = Callable[[float], tuple[nn.Module, Evaluate]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A form in which the model may be served, and what it measured.

    Args:
        budget: fraction of the tables' bytes that it was chosen for.
        method: one of :data:`METHODS`.
        candidate: the form.
        trained: fraction of the columns that its model was trained with; 1.0 is the model itself.
        bytes: the bytes of the served tables.
        metrics: the metrics by name.
    """

    budget: float
    method: str
    candidate: Candidate
    trained: float = 1.0
    bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that is equal for trials of equal weights, whatever their budget and method."""
        return _key(asdict(self))

    @property
    def left(self) -> str:
        """The kept part of the tables, in a few words."""
        parts = []
        columns = self.trained * self.candidate.columns
        if columns < 1:
            parts.append(f"{percent(columns)} of columns")
        if self.method == "untouched":
            parts.append("rows ever read")
        elif self.candidate.levels:
            parts.append(f"{percent(1 - max(self.candidate.levels.values()))} of rows")
        return ", ".join(parts) or _ALL


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The best of each method within each budget. ``print()``, a REPL and a notebook show the
    table and the recommendation.

    Args:
        table_bytes: the bytes of the model's tables as they are.
        full: its metrics.
        metric: the metric by which methods are compared.
        lower_is_better: metrics for which less is better.
        tolerance: a smaller difference of the metric does not count.
        trials: all that was measured.
    """

    table_bytes: int
    full: Mapping[str, float]
    metric: str
    lower_is_better: tuple[str, ...]
    tolerance: float
    trials: tuple[Trial, ...]

    @cached_property
    def points(self) -> tuple[Trial, ...]:
        """For each budget and method, the smallest trial within tolerance of the best; by budget,
        the largest first, then the best method first."""
        by_method: dict[tuple[float, str], list[Trial]] = defaultdict(list)
        for trial in self.trials:
            by_method[trial.budget, trial.method].append(trial)
        best = []
        for trials in by_method.values():
            # Within the tolerance fewer bytes count more than the metric.
            best.append(min(self._near_best(trials), key=lambda t: (t.bytes, self.loss(t))))
        return tuple(sorted(best, key=lambda t: (-t.budget, self.loss(t))))

    def loss(self, trial: Trial) -> float:
        """Return by how much the metric is worse than the metric of the model as it is."""
        worse = self.full[self.metric] - trial.metrics[self.metric]
        return -worse if self.metric in self.lower_is_better else worse

    @property
    def recommended(self) -> Trial | None:
        """The smallest budget within which a method loses no more than ``tolerance``, and there the
        simplest method within half of ``tolerance`` of the best one, in the fewest bytes. None if
        all methods lose more."""
        good = defaultdict(list)
        for point in self.points:
            if self.loss(point) <= self.tolerance:
                good[point.budget].append(point)
        # The smallest budget: at every budget in `good` the metric is within tolerance.
        near = self._near_best(good[min(good, default=0.0)])
        order = list(METHODS)
        return min(near, key=lambda t: (order.index(t.method), t.bytes), default=None)

    def _near_best(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that lose at most half of the tolerance more than the best one."""
        best = min(map(self.loss, trials), default=0.0)
        return [trial for trial in trials if self.loss(trial) <= best + self.tolerance / 2]

    @property
    def recommendation(self) -> str:
        """:attr:`recommended` as a sentence, or the nearest point if all lose more."""
        if not self.points:
            return (
                "Nothing fits the budgets that can be tried on this model; smaller dense tables"
                " have to be trained."
            )
        goal = (
            f"within {self.tolerance:g} of the {self.metric} {self.full[self.metric]:.4f} of the"
            " whole model"
        )
        best = self.recommended
        point = best or min(self.points, key=self.loss)
        how = f"{METHODS[point.method]} as {point.candidate.dtype} ({point.left})"
        share = percent(point.bytes / self.table_bytes)
        advice = f"{how}: {share} of the bytes at {self.metric} {point.metrics[self.metric]:.4f}"
        if best is None:
            return f"Nothing comes {goal}; nearest is this: {advice}."
        return f"Recommended: {advice}, {goal}."

    def __repr__(self) -> str:
        head = ("at", "method", "kept", "as", "bytes", *self.full)
        rows = [("", "the whole model", _ALL, "", "100.0%", *map(_FOUR_DIGITS, self.full.values()))]
        for point in self.points:
            names = percent(point.budget), METHODS[point.method], point.left, point.candidate.dtype
            share = percent(point.bytes / self.table_bytes)
            # A later evaluate() may return them in another order.
            metrics = map(point.metrics.__getitem__, self.full)
            rows.append((*names, share, *map(_FOUR_DIGITS, metrics)))
        lines = table_lines(head, rows, right={0, *range(4, len(head))})
        better = "less" if self.metric in self.lower_is_better else "more"
        shown = {point.method for point in self.points}
        notes = [note for note, methods in _NOTES.items() if shown & methods]
        texts = [f"Best first, by {self.metric}: {better} is better.", *notes, self.recommendation]
        fill = partial(textwrap.fill, width=79)
        return "\n\n".join(["\n".join(lines), *map(fill, texts)])

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; sizes in bytes."""
        points = [*map(asdict, self.points)]
        return {**asdict(self), "points": points, "recommendation": self.recommendation}


def frontier(
    model: nn.Module,
    evaluate: Evaluate,
    train: Train | None = None,
    *,
    budgets: Sequence[float | str] = BUDGETS,
    methods: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("fp32", "int8", "int4"),
    rotate: TableGroups = "table",
    protect: str | list[str] | None = None,
    metric: str | None = None,
    lower_is_better: Sequence[str] = ("ne", "loss"),
    tolerance: float = 0.002,
    out: str | os.PathLike[str] | None = None,
) -> Frontier:
    """Measure what a trained model is worth at a few sizes of its tables. Collective: every rank of
    the world must call it.

    For each budget and method, the weights that fit are written into the tables, measured, and
    restored; the model is not trained. Bytes are counted as in
    :class:`~dist_sparse.planning.candidates.ServedBytes`: scales, indexes and bases are counted.
    Masks finer than rows save none, so no method prunes them.

    Args:
        model: trained: a DistributedModelParallel, a DDP module or any module. Afterwards its
            weights are what they were.
        evaluate: called with the model, returns metrics by name, the same on all ranks. Take data
            that the model was not trained on.
        train: called with a fraction, returns ``(model, evaluate)``: a model trained like this one,
            with that fraction of the columns of its tables. For the method ``"small"``.
        budgets: shares of the tables' bytes: fractions, or text such as ``"10%"``.
        methods: some of :data:`~dist_sparse.extras.frontier.METHODS`: ``"bits"``, ``"untouched"``,
            ``"small"``, ``"rotated"``, ``"rows"``, ``"column"`` and ``"codes"``. None is all of
            them, without ``"small"`` if there is no ``train``, and without ``"rotated"`` and
            ``"codes"`` where these extras are missing. Codes are of all columns, or of as many as
            fit, 4 or 8 columns a code; they are fitted to the present weights, and training through
            them usually gains more (:func:`~dist_sparse.extras.codes.quantize`).
        dtypes: dtypes of the stored weights, for all methods except the last two.
        rotate: ``"table"``, or groups of tables that are read only by dot products between them, as
            in ``dist_sparse.extras.rotation``, without which no method ``"rotated"`` is known.
        protect: globs of tables that keep all rows, as tables of fewer than 16 do.
        metric: the one that compares methods; None is the first that ``evaluate`` returns.
        lower_is_better: metrics for which less is better.
        tolerance: a smaller difference of the metric does not count.
        out: a folder for ``trials.jsonl`` and ``frontier.json``, the result.
            An interrupted run continues from ``trials.jsonl``.

    Raises:
        ValueError: an argument or a metric is invalid, the tables can't be served, or ranks
            disagree; on every rank.
        OSError: the folder can't be written. On several ranks it is a ValueError that quotes it.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.frontier import frontier
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.randn(100, 4) @ torch.randn(4, 16))
        >>> ids = torch.arange(100).view(20, 5)
        >>> means = table(ids)
        >>> found = frontier(
        ...     table,
        ...     lambda model: {"loss": float((model(ids) - means).abs().mean())},
        ...     budgets=[0.3],
        ...     methods=["rows"],
        ... )
        >>> found.points[0].method, found.points[0].bytes <= 0.3 * 6400
        ('rows', True)
    """
    world = world_group()
    # Every argument is checked before the first evaluation, which may take hours.
    with world.agreeing("frontier()") as facts:
        known = _known_methods(trains=train is not None)
        chosen = sorted(checks.choice("methods", name, known) for name in methods or known)
        shares = _shares(budgets)
        dtypes = [checks.choice("dtypes", dtype, UNCODED) for dtype in dtypes]
        tolerance = checks.number("tolerance", tolerance, least=0)
        # metric= takes a name in any case, too.
        lower = [*map(str.lower, checks.name_list("lower_is_better", lower_is_better))]
        located = {data.name: data for data in ModelTables(model).locate()}
        prunable = _prunable(located, protect)
        groups = tuple(map(tuple, rotation_groups(rotate, located)))
        # Rotated candidates are measured last: refuse groups that can't be rotated now.
        narrow = Candidate(groups=groups if "rotated" in chosen else ())
        check_candidate(model, narrow, located)
        facts.update(methods=chosen, budgets=shares, dtypes=dtypes, pruned=prunable, rotate=rotate)
        facts["metric, lower_is_better, tolerance"] = [metric, *lower, tolerance]
    # Fused optimizers only: frontier() is called without an optimizer.
    untouched = rows_by_reads(model, [*located.values()]).never
    measurements = _Measurements(model, evaluate, out)
    full = measurements.full
    tables = tuple(map(shape_of, located.values()))
    # The default is the first metric that evaluate() returns.
    metric = checks.choice("metric", metric or next(iter(full)), full)
    table_bytes = dense_bytes(tables)
    choices = Choices(tables=tables, budget=0, groups=groups, untouched=untouched)
    trials = []
    for share in shares:
        within = replace(choices, budget=budget_bytes(share, table_bytes))
        trials += trials_of(
            within, share, chosen, dtypes, prunable=prunable, trains=train is not None
        )
    # All budgets in one call: a trial that several budgets share is measured once.
    result = Frontier(
        table_bytes=table_bytes,
        full=full,
        metric=metric,
        lower_is_better=tuple(filter(lambda name: name.lower() in lower, full)),
        tolerance=tolerance,
        trials=measurements(trials, train),
    )
    measurements.write(result.to_json())
    return result


def _known_methods(*, trains: bool) -> list[str]:
    """Return the methods that can be measured, in the order of their names."""
    known = {*METHODS}
    # Small dense tables have to be trained.
    if not trains:
        known.remove("small")
    # Extras of their own, which may have been deleted.
    if find_spec("dist_sparse.extras.rotation") is None:
        known.remove("rotated")
    if find_spec("dist_sparse.extras.codes") is None:
        known.remove("codes")
    return sorted(known)


def _prunable(located: Located, protect: object) -> tuple[str, ...]:
    """Return the tables that may lose rows: as in sparsify(), small ones keep all."""
    large = {name for name, data in located.items() if data.shape[0] >= 16}
    return tuple(sorted(large - protected(located, checks.name_list("protect", protect))))


def _shares(budgets: Any) -> list[float]:
    """Return budgets as fractions, checked, the largest first, each once: equal budgets have the
    same points."""
    if isinstance(budgets, (int, float, str)) or not budgets:
        raise ValueError(f"Invalid {budgets=}: must be a list of fractions.")
    return sorted({_share(budget) for budget in budgets}, reverse=True)


def _share(budget: Any) -> float:
    """Return a budget as a fraction, checked."""
    # A float may be one of NumPy's, which parse_budget() refuses.
    share = checks.parse_budget(budget) if isinstance(budget, (str, int)) else budget
    return checks.level("budgets", share)


def fewest_rows(choices: Choices, candidate: Candidate, prunable: Sequence[str]) -> Choice:
    """Return a candidate with its ``prunable`` tables at the lowest common level at which all
    tables fit, or at the highest below 1 if none fits."""
    pruned = [table for table in choices.tables if table.name in prunable]
    # Outside the search, which changes only pruned tables.
    fixed = candidate.served_bytes(choices.tables).total - candidate.served_bytes(pruned).total
    room = choices.budget - fixed
    rows = {table.name: table.shape[0] for table in pruned}

    def without(removed: Mapping[str, int]) -> Candidate:
        levels = {name: removed[name] / max(rows[name], 1) for name in rows}
        return replace(candidate, levels=levels)

    # As sparsify(budget=) does: a table keeps at least one row.
    removed = fewest_removed(
        rows,
        {name: max(count - 1, 0) for name, count in rows.items()},
        lambda removed: without(removed).served_bytes(pruned).total <= room,
    )
    return choices.priced("rows", without(removed))


def trials_of(
    choices: Choices,
    share: float,
    methods: Sequence[str],
    dtypes: Sequence[str],
    *,
    prunable: Sequence[str],
    trains: bool,
) -> list[Trial]:
    """Return what to try within a budget. Where a dtype alone meets it, nothing else is removed.

    Args:
        choices: the tables and the budget. Only a method of its own removes the untouched rows.
        share: the budget as a fraction of the tables' bytes.
        methods: some of :data:`METHODS`.
        dtypes: dtypes of the stored weights, for methods that are not named after a dtype.
        prunable: tables that may lose rows that training has touched, all the same fraction.
        trains: whether models with fewer columns can be trained.
    """
    # These methods keep untouched rows: "untouched" alone is credited for their bytes.
    all_rows = replace(choices, untouched={})
    by_method: list[tuple[str, Choice]] = []
    for choice in all_rows.all():
        dtype = choice.candidate.dtype
        by_method.append((_METHOD_OF_DTYPE.get(dtype, _METHOD_OF_KIND[choice.kind]), choice))
        if choice.kind == "full" and not choice.fits:
            # Tables of a dtype that fit by losing rows.
            by_method.append(("rows", fewest_rows(all_rows, choice.candidate, prunable)))
    by_method += [("untouched", choices.choice("full", dtype, 1.0)) for dtype in dtypes]
    # fp16 needs no scales and no calibration: it is measured whatever `dtypes` says.
    dtypes_of = {"bits": {*dtypes, "fp16"}, "column": {BY_COLUMN}, "codes": {*CODED}}
    trials = []
    for method, choice in by_method:
        candidate = choice.candidate
        if method not in methods or not _is_tried(choice, method, trains=trains):
            continue
        if candidate.dtype not in dtypes_of.get(method, dtypes):
            continue
        trained = 1.0
        if not candidate.groups:
            # Fewer columns without a rotation: another model, trained narrow, then served whole.
            trained = candidate.columns
            candidate = replace(candidate, columns=1.0)
        trials.append(Trial(budget=share, method=method, candidate=candidate, trained=trained))
    return trials


def _is_tried(choice: Choice, method: str, *, trains: bool) -> bool:
    """Return False for what does not fit, can't be trained, or is measured otherwise."""
    if not choice.fits:
        return False
    if choice.kind == "small" and not trains:
        return False
    # Without untouched rows, the candidate is the same as for "bits".
    if method == "untouched" and not choice.candidate.levels:
        return False
    # The model as it is was measured before any trial.
    return choice.candidate != Candidate()


def _key(trial: Mapping[str, Any]) -> str:
    return json.dumps([trial["candidate"], trial["trained"]], sort_keys=True)


class _Measurements:
    """Metrics of a trained model with the weights that trials would serve. Construction and calls
    are collective.

    Args:
        model: a DistributedModelParallel, a DDP module or any module; it is not changed.
        evaluate: called with ``model`` while its tables hold the served weights.
        folder: created if missing. Each trial adds a line to its ``trials.jsonl``. Trials of an
            earlier run are not measured again if its weights and its metrics of the whole model
            were the same.

    Attributes:
        full: metrics of the model as it is.

    Raises:
        ValueError: weights or metrics are not finite numbers, metrics differ between ranks, or the
            file can't be read; on every rank.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate, folder: Any) -> None:
        self._world = world_group()
        self._original = model, evaluate
        self._folder: Path | None = None
        with self._world.agreeing("measuring a model") as facts:
            # Rank 0 alone reads and writes.
            if self._world.rank == 0 and folder is not None:
                self._folder = Path(folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                # Before the first evaluation, which may take hours.
                refuse_special(self._folder / _FILE)
                refuse_special(self._folder / _RESULT, link=True)
            located = ModelTables(model).locate()
            # Names the table whose weights are not finite; a metric of NaN would not.
            refuse_infinite(located, "fp32")
            facts["tables"] = [[data.name, data.shape, str(data.dtype)] for data in located]
        self.full = self._metrics(model, evaluate)
        # Lines in the file with another fingerprint are of another model.
        self._fingerprint = self._hash(located)
        self._measured = self._read()

    def __call__(self, trials: Sequence[Trial], train: Train | None) -> tuple[Trial, ...]:
        """Return the trials measured, in their order."""
        new = {trial.key: trial for trial in trials if trial.key not in self._measured}
        # groupby() joins neighbours only: sorted, each model is trained once. The model itself is
        # first.
        in_order = sorted(new.values(), key=lambda trial: -trial.trained)
        with progress("frontier", len(new), "trials", shown=self._world.rank == 0) as bar:
            for columns, group in groupby(in_order, key=lambda trial: trial.trained):
                # A function, so that a model is freed before the next: two may not fit into memory.
                self._measure(columns, group, train, bar)
        return tuple(replace(trial, **self._measured[trial.key]) for trial in trials)

    def _measure(
        self,
        columns: float,
        trials: Iterable[Trial],
        train: Any,
        bar: Callable[[float], object],
    ) -> None:
        """Measure the trials of the model that was trained with a fraction of the columns."""
        model, evaluate = self._original
        with self._world.agreeing("train()"):
            if columns < 1:
                # trials_of() lists narrower models only where there is a train().
                model, evaluate = train(columns)
            tables = tuple(map(shape_of, ModelTables(model).locate()))
        for trial in trials:
            # The weights are restored on leaving, also after an error of evaluate().
            with serving(model, trial.candidate):
                metrics = self._metrics(model, evaluate)
            result = {"bytes": trial.candidate.served_bytes(tables).total, "metrics": metrics}
            self._measured[trial.key] = result
            line = {"model": self._fingerprint, **asdict(trial), **result}
            self._append(line)
            bar(1)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write a result beside the trials. Collective."""
        text = json.dumps(result, indent=1, allow_nan=False)
        with self._world.agreeing(f"writing {_RESULT}"):
            if self._folder is not None:
                write_whole(self._folder / _RESULT, f"{text}\n".encode(), shared=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._world.agreeing(f"writing {_FILE}"):
            if self._folder is not None:
                file = self._folder / _FILE
                refuse_special(file)
                # Opened and closed for each line, so that a killed run loses none.
                with file.open("a+b") as stream:
                    # A killed run may have cut its last line short. An empty file has no last byte.
                    stream.seek(max(stream.tell() - 1, 0))
                    start = b"" if stream.read() in (b"", b"\n") else b"\n"
                    stream.write(start + f"{json.dumps(line)}\n".encode())

    def _metrics(self, model: nn.Module, evaluate: Evaluate) -> dict[str, float]:
        with self._world.agreeing("evaluate()") as facts:
            returned = evaluate(model)
            try:
                # float() takes 0-D tensors and NumPy scalars too.
                metrics = {str(name): float(value) for name, value in returned.items()}
            except (AttributeError, TypeError, ValueError):
                metrics = {}
            if not metrics or not all(map(math.isfinite, metrics.values())):
                raise ValueError(
                    f"evaluate() returned {returned!r};"
                    " must return metrics by name, finite numbers."
                )
            facts["metrics"] = metrics
        return metrics

    def _hash(self, located: Sequence[ShardedData]) -> str:
        """Return a hash of the tables' weights and of the metrics."""
        hashes = []
        for data in located:
            # Only owned rectangles: replicas count once, so their number does not change the hash.
            shards = dict(data.shards)
            for rect in data.owned(rank_in(data.ranks)):
                hashes.append(f"{data.name} {rect} {hash_tensor(shards[rect])}")
        # Metrics are rounded: the order of sums may differ from run to run.
        metrics = {name: f"{value:.5g}" for name, value in self.full.items()}
        everywhere = sorted({*chain(*self._world.all_gather_json(hashes))})
        text = json.dumps([everywhere, metrics])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the measurements of this model that the file holds, by key."""
        measured = {}
        with self._world.agreeing(f"reading {_FILE}"), suppress(FileNotFoundError):
            if self._folder is not None:
                measured = _measured_in(self._folder / _FILE, self._fingerprint)
        # Rank 0 alone has read the file, and all ranks must skip the same trials.
        of_rank_0: Any = self._world.all_gather_json(measured)[0]
        return dict(of_rank_0)


def _measured_in(file: Path, model: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of a model that the file holds, by key."""
    measured = {}
    for number, text in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            # Cut off when the run was interrupted: it is measured again.
            continue
        # An editor may have changed it.
        with refusing(f"{file}, line {number}"):
            if line["model"] == model:
                found = line["metrics"].items()
                metrics = {name: checks.number(name, value) for name, value in found}
                checks.number("trained", line["trained"], least=0, most=1)
                taken = checks.integer("bytes", line["bytes"], least=0)
                measured[_key(line)] = {"bytes": taken, "metrics": metrics}
    return measured
