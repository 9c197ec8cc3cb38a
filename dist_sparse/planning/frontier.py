"""`frontier()`: metrics of a trained model at a few sizes, on the user's own data.

What fits is measured with a line of JSON for each trial, so that an interrupted run continues.
"""

from __future__ import annotations

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
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import rank_in, world_group
from dist_sparse.planning.candidates import (
    BY_COLUMN,
    CODED,
    Candidate,
    Choice,
    Choices,
    dense_bytes,
    shape_of,
)
from dist_sparse.planning.plan import untouched_rows
from dist_sparse.planning.trials import check_candidate, serving
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.encodings import BITS
from dist_sparse.serving.sources import check_range
from dist_sparse.sparsifiers.pieces import hash_tensor
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import percent, progress, table_lines
from dist_sparse.training.arguments import protected

# Fractions of the tables' bytes.
BUDGETS = (0.5, 0.2, 0.1, 0.05)

# Name of each method in tables, the simplest first.
METHODS = {
    "bits": "bits alone",
    "untouched": "touched rows",
    "small": "small dense",
    "rotated": "rotated columns",
    "rows": "rows",
    "mix": "rotated columns and rows",
    "column": "int4 by column",
    "codes": "codes",
}

_METHOD_OF_KIND = {"full": "bits", "small": "small", "columns": "rotated"}

# The method of all trials in a dtype, of any columns.
_METHOD_OF_DTYPE = {BY_COLUMN: "column", **dict.fromkeys(CODED, "codes")}

_FILE = "trials.jsonl"

_UNTRAINED = (
    "Columns and rows were removed from the trained model, which was not trained on: removed while "
    "it trains, they lose less, rotated columns above all."
)

# What to know of a method's measurements.
_NOTES = {
    **dict.fromkeys(("rotated", "rows", "mix"), _UNTRAINED),
    "codes": (
        "Codes were fitted to the trained weights: training through them with quantize() usually "
        "gains more."
    ),
}

# Returns metrics of a model by name, the same on all ranks; does not change the model.
Evaluate = Callable[[nn.Module], Mapping[str, float]]

# Trains a model whose tables have a fraction of their columns, and returns it with its evaluation.
Train = Callable[[float], tuple[nn.Module, Evaluate]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A form in which the model may be served, and what it measured.

    Args:
        budget: fraction of the tables' bytes that it was chosen for.
        method: of :data:`METHODS`.
        candidate: the form.
        trained: fraction of the columns that its model was trained with; 1.0 is the model itself.
        bytes: of the served tables.
        metrics: by name.
    """

    budget: float
    method: str
    candidate: Candidate
    trained: float = 1.0
    bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that is equal for trials of equal weights."""
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
        return ", ".join(parts) or "everything"


def _texts(metrics: Mapping[str, float]) -> Iterable[str]:
    return map("{:.4f}".format, metrics.values())


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The best of each method within each budget. ``print()``, a REPL and a notebook show the
    table and the recommendation.

    Args:
        table_bytes: of the tables of the model as it is.
        full: its metrics.
        metric: by which methods are compared.
        lower_is_better: metrics of which less is better.
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
        """Of each budget and method the smallest trial within tolerance of the best; by budget, the
        largest first, then the best method first."""
        by_method: dict[tuple[float, str], list[Trial]] = defaultdict(list)
        for trial in self.trials:
            by_method[trial.budget, trial.method].append(trial)
        best = []
        for some in by_method.values():
            # Within the tolerance fewer bytes count more than the metric.
            best.append(min(self._near_best(some), key=lambda t: (t.bytes, self.loss(t))))
        return tuple(sorted(best, key=lambda t: (-t.budget, self.loss(t))))

    def loss(self, trial: Trial) -> float:
        """Return by how much the metric is worse than that of the model as it is."""
        worse = self.full[self.metric] - trial.metrics[self.metric]
        return -worse if self.metric in self.lower_is_better else worse

    @property
    def recommended(self) -> Trial | None:
        """The smallest budget within which a method loses no more than ``tolerance``, and the
        simplest method there that is as good as the best but for half of it, in the fewest bytes;
        None if all lose more."""
        good = defaultdict(list)
        for point in self.points:
            if self.loss(point) <= self.tolerance:
                good[point.budget].append(point)
        # Bytes count first: the quality is within tolerance in all of them.
        near = self._near_best(good[min(good, default=0.0)])
        # Methods are listed from the simplest on.
        simplest = [*METHODS]
        return min(near, key=lambda t: (simplest.index(t.method), t.bytes), default=None)

    def _near_best(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that lose no more than the best but for half of the tolerance."""
        best = min(map(self.loss, trials), default=0.0)
        return [trial for trial in trials if self.loss(trial) <= best + self.tolerance / 2]

    @property
    def recommendation(self) -> str:
        """One sentence."""
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
        rows = [("", "the whole model", "everything", "", "100.0%", *_texts(self.full))]
        for point in self.points:
            names = percent(point.budget), METHODS[point.method], point.left, point.candidate.dtype
            share = percent(point.bytes / self.table_bytes)
            rows.append((*names, share, *_texts(point.metrics)))
        lines = table_lines(head, rows, right={0, *range(4, len(head))})
        better = "less" if self.metric in self.lower_is_better else "more"
        # One of each, of the methods that are shown.
        notes = dict.fromkeys(_NOTES.get(point.method, "") for point in self.points)
        texts = [f"Best first, by {self.metric}: {better} is better.", *notes, self.recommendation]
        filled = map(partial(textwrap.fill, width=79), filter(None, texts))
        return "\n\n".join(["\n".join(lines), *filled])

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; sizes in bytes."""
        points = [*map(asdict, self.points)]
        return {**asdict(self), "points": points, "recommendation": self.recommendation}


def frontier(
    model: nn.Module,
    evaluate: Evaluate,
    train: Train | None = None,
    *,
    budgets: Sequence[float] = BUDGETS,
    methods: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("fp32", "int8", "int4"),
    rotate: Rotate = "table",
    protect: str | list[str] | None = None,
    metric: str | None = None,
    lower_is_better: Sequence[str] = ("ne", "loss"),
    tolerance: float = 0.002,
    out: str | os.PathLike[str] | None = None,
) -> Frontier:
    """Measure what a trained model is worth at a few sizes of its tables. Collective: every rank of
    the world must call it.

    For each budget and method, the weights that fit are written into the tables, measured, and
    restored; the model is not trained. Bytes are those of
    :class:`~dist_sparse.planning.candidates.ServedBytes`: scales, indexes and bases are counted.
    Masks finer than rows save none, so no method prunes them.

    Args:
        model: trained: a DistributedModelParallel, a DDP module or any module. Afterwards its
            weights are what they were.
        evaluate: called with the model, returns metrics by name, the same on all ranks. Take data
            that the model was not trained on.
        train: called with a fraction, returns ``(model, evaluate)``: a model trained like this one,
            with that fraction of the columns of its tables. For the method ``"small"``.
        budgets: fractions of the tables' bytes.
        methods: of those in :data:`~dist_sparse.planning.frontier.METHODS`: ``"bits"``,
            ``"untouched"``, ``"small"``, ``"rotated"``, ``"rows"``, ``"mix"``, ``"column"`` and
            ``"codes"``. None is all of them, without ``"small"`` if there is no ``train``. Codes
            are of all columns, or of as many as fit, 4 or 8 columns a code; they are fitted to the
            present weights, and training through :func:`~dist_sparse.quantize` usually gains more.
        dtypes: dtypes of the stored weights, of the other methods than the last two.
        rotate: as in :func:`~dist_sparse.rotate`: ``"table"``, or groups of tables that are read
            only by dot products between them.
        protect: globs of tables that keep all rows, as tables of fewer than 16 do.
        metric: by which methods are compared; None is the first that ``evaluate`` returns.
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
        >>> from dist_sparse.planning.frontier import frontier
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.randn(100, 4) @ torch.randn(4, 16))
        >>> ids = torch.arange(100).view(20, 5)
        >>> means = table(ids)
        >>> found = frontier(
        ...     table,
        ...     lambda model: {"loss": float((model(ids) - means).abs().mean())},
        ...     budgets=[0.3],
        ... )
        >>> found.points[0].method  # four columns hold all
        'rotated'
    """
    world = world_group()
    # Whatever would stop a rank later is checked here: an evaluation may take hours.
    with world.agreeing("frontier()") as facts:
        # Small dense tables have to be trained.
        known = METHODS.keys() - ({"small"} if train is None else set())
        chosen = sorted(map(partial(checks.choice, "methods", known=known), methods or known))
        # A set: equal budgets have the same points.
        shares = sorted({*map(partial(checks.level, "budgets"), budgets)}, reverse=True)
        if not shares:
            raise ValueError(f"Invalid {budgets=}: must be fractions of the tables' bytes.")
        kinds = [*map(partial(checks.choice, "dtypes", known=BITS), dtypes)]
        checks.number("tolerance", tolerance, least=0)
        located = {data.name: data for data in ModelTables(model).locate()}
        guarded = protected(located, checks.name_list("protect", protect))
        # As sparsify() does, small tables keep all rows.
        large = {name for name, data in located.items() if data.shape[0] >= 16}
        pruned = tuple(sorted(large - guarded))
        groups = tuple(map(tuple, rotation_groups(rotate, located)))
        # The rotated candidates are tried last.
        check_candidate(model, Candidate(groups=groups), located)
        facts.update(methods=chosen, budgets=shares, dtypes=kinds, pruned=pruned, rotate=rotate)
        facts["metric, lower_is_better, tolerance"] = [metric, *lower_is_better, tolerance]
    # Fused optimizers only: frontier() is called without an optimizer.
    untouched = untouched_rows(model, [*located.values()])
    measurements = _Measurements(model, evaluate, out)
    full = measurements.full
    tables = tuple(map(shape_of, located.values()))
    # By default the first metric that evaluate() returns.
    metric = checks.choice("metric", metric or next(iter(full)), full)
    taken, trials = dense_bytes(tables), list[Trial]()
    for share in shares:
        choices = Choices(
            tables=tables,
            budget=math.floor(share * taken),
            groups=groups,
            untouched=untouched,
            prunable=pruned,
        )
        trials += trials_of(choices, share, chosen, kinds, trains=train is not None)
    # All budgets at once: an equal trial of several is measured once.
    result = Frontier(
        table_bytes=taken,
        full=full,
        metric=metric,
        lower_is_better=tuple(lower_is_better),
        tolerance=tolerance,
        trials=measurements(trials, train),
    )
    measurements.write(result.to_json())
    return result


def trials_of(
    choices: Choices, share: float, methods: Sequence[str], dtypes: Sequence[str], *, trains: bool
) -> list[Trial]:
    """Return what to try within a budget. Where a dtype alone meets it, nothing else is removed.

    Args:
        choices: the tables and the budget. Of all ``prunable`` tables the same fraction of rows is
            removed; the untouched rows are removed by a method of their own alone.
        share: the budget as a fraction of the tables' bytes.
        methods: of :data:`METHODS`.
        dtypes: dtypes of the stored weights, of methods that are not named after theirs.
        trains: whether models with fewer columns can be trained.
    """
    # The gain of the other methods would not be theirs, were the untouched rows removed too.
    all_rows = replace(choices, untouched={})
    tried: list[tuple[str, Choice]] = []
    for choice in all_rows.all():
        dtype = choice.candidate.dtype
        tried.append((_METHOD_OF_DTYPE.get(dtype, _METHOD_OF_KIND[choice.kind]), choice))
        if choice.kind == "full" and not choice.fits:
            tried += _with_fewer_rows(all_rows, dtype)
    tried += [("untouched", choices.choice("full", dtype, 1.0)) for dtype in dtypes]
    # It costs nothing to try fp16.
    dtypes_of = {"bits": {*dtypes, "fp16"}, "column": {BY_COLUMN}, "codes": {*CODED}}
    found = []
    for method, choice in tried:
        candidate = choice.candidate
        rules = (
            choice.fits,
            trains or choice.kind != "small",
            method in methods,
            candidate.dtype in dtypes_of.get(method, dtypes),
            # The model as it is has been measured.
            candidate != Candidate(),
            method != "untouched" or candidate.levels,
        )
        if all(rules):
            found.append(Trial(budget=share, method=method, candidate=candidate))
    return [*map(_trained_narrow, found)]


def _trained_narrow(trial: Trial) -> Trial:
    """Return a trial of smaller dense tables as another model that is served whole."""
    candidate = trial.candidate
    if candidate.groups or candidate.columns == 1:
        return trial
    return replace(trial, candidate=replace(candidate, columns=1.0), trained=candidate.columns)


def _with_fewer_rows(choices: Choices, dtype: str) -> list[tuple[str, Choice]]:
    """Return tables of a dtype with fewer rows, each with its method."""
    # A little wider than fits, and the rest of the bytes out of rows.
    fractions, fitting = choices.widths("columns", dtype)
    pruned = [("rows", choices.choice("full", dtype, 1.0))]
    for each in fractions[fitting : fitting + 2]:
        pruned.append(("mix", choices.choice("columns", dtype, each)))
    return [(method, choices.fewest_rows(choice.candidate)) for method, choice in pruned]


def _key(trial: Mapping[str, Any]) -> str:
    return json.dumps([trial["candidate"], trial["trained"]], sort_keys=True)


class _Measurements:
    """Metrics of a trained model with the weights that trials would serve. Construction and calls
    are collective.

    Args:
        model: a DistributedModelParallel, a DDP module or any module; it is not changed.
        evaluate: called with ``model`` while its tables hold the served weights.
        folder: made if need be. A line is added to its ``trials.jsonl`` for each trial; those of an
            earlier run are not measured again, if the weights, and the metrics of the model as it
            is, were the same.

    Attributes:
        full: metrics of the model as it is.

    Raises:
        ValueError: weights or metrics are no finite numbers, metrics differ between ranks, or the
            file can't be read; on every rank.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate, folder: Any) -> None:
        self._world = world_group()
        self._whole = model, evaluate
        self._folder: Path | None = None
        with self._world.agreeing("measuring a model") as facts:
            # Rank 0 alone reads and writes.
            if self._world.rank == 0 and folder is not None:
                self._folder = Path(folder)
                self._folder.mkdir(parents=True, exist_ok=True)
            located = ModelTables(model).locate()
            # A metric would not name the weights that are not finite.
            check_range(located, "fp32")
            facts["tables"] = [[data.name, data.shape, str(data.dtype)] for data in located]
        self.full = self._metrics(model, evaluate)
        # Lines of other weights or other metrics are of another model.
        self._fingerprint = self._hash(located)
        self._done = self._read()

    def __call__(self, trials: Sequence[Trial], train: Train | None) -> tuple[Trial, ...]:
        """Return the trials measured, in their order."""
        new = {trial.key: trial for trial in trials if trial.key not in self._done}
        columns = attrgetter("trained")
        # In this order each model is trained once.
        in_order = sorted(new.values(), key=columns, reverse=True)
        with progress("frontier", len(new), "trials", shown=self._world.rank == 0) as bar:
            for trained, some in groupby(in_order, key=columns):
                # A function, so that a model is freed before the next: two may not fit into memory.
                self._measure(trained, some, train, bar)
        return tuple(replace(trial, **self._done[trial.key]) for trial in trials)

    def _measure(
        self,
        trained: float,
        trials: Iterable[Trial],
        train: Any,
        bar: Callable[[float], object],
    ) -> None:
        """Measure the trials of one model."""
        # Without train() there is no trial of a narrower model.
        model, evaluate = self._whole if trained == 1 else train(trained)
        tables = tuple(map(shape_of, ModelTables(model).locate()))
        for trial in trials:
            # The weights are restored on leaving, also after an error of evaluate().
            with serving(model, trial.candidate):
                metrics = self._metrics(model, evaluate)
            found = {"bytes": trial.candidate.served_bytes(tables).total, "metrics": metrics}
            self._done[trial.key] = found
            line = {"model": self._fingerprint, **asdict(trial), **found}
            # Opened for each line, so that a killed run has lost none.
            self._save(_FILE, "a", json.dumps(line))
            bar(1)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write a result beside the trials. Collective."""
        self._save("frontier.json", "w", json.dumps(result, indent=1, allow_nan=False))

    def _save(self, name: str, mode: str, text: str) -> None:
        with self._world.agreeing(f"writing {name}"):
            if self._folder is not None:
                with (self._folder / name).open(mode) as stream:
                    stream.write(f"{text}\n")

    def _metrics(self, model: nn.Module, evaluate: Evaluate) -> dict[str, float]:
        with self._world.agreeing("evaluate()") as facts:
            found = evaluate(model)
            try:
                # 0-D tensors and NumPy scalars are numbers too.
                metrics = {str(name): float(value) for name, value in found.items()}
            except (AttributeError, TypeError, ValueError):
                metrics = {}
            if not metrics or not all(map(math.isfinite, metrics.values())):
                raise ValueError(
                    f"evaluate() returned {found!r}; must return metrics by name, finite numbers."
                )
            facts["metrics"] = metrics
        return metrics

    def _hash(self, located: Sequence[ShardedData]) -> str:
        """Return a hash of the tables' weights and of the metrics."""
        mine = []
        for data in located:
            # Replicas count once, so that the hash is the same for any number of them.
            held = dict(data.shards)
            for rect in data.owned(rank_in(data.ranks)):
                mine.append(f"{data.name} {rect} {hash_tensor(held[rect])}")
        # Metrics rounded: the order of sums may differ from run to run.
        metrics = {name: f"{value:.5g}" for name, value in self.full.items()}
        known = [self._world.all_gather_json(mine), metrics]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the measurements of this model in the file, by key."""
        found = {}
        with self._world.agreeing(f"reading {_FILE}"), suppress(FileNotFoundError):
            if self._folder is not None:
                for text in (self._folder / _FILE).read_text().splitlines():
                    # A line that was cut off when the run was interrupted is measured again.
                    with suppress(json.JSONDecodeError):
                        line = json.loads(text)
                        if line["model"] == self._fingerprint:
                            found[_key(line)] = {"bytes": line["bytes"], "metrics": line["metrics"]}
        # All ranks must skip the same trials.
        of_rank_0: Any = self._world.all_gather_json(found)[0]
        return dict(of_rank_0)
