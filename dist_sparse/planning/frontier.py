"""`frontier()`: metrics of a trained model at a few sizes, on the user's own data."""

from __future__ import annotations

import hashlib
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.planning.candidates import (
    METHODS,
    Attempt,
    Candidate,
    Choices,
    attempts_of,
    dense_bytes,
    shape_of,
)
from dist_sparse.planning.plan import untouched_rows
from dist_sparse.planning.trials import check_candidate, serving
from dist_sparse.progress import progress
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.codes import BITS
from dist_sparse.serving.sources import check_range
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import count, percent, table_lines
from dist_sparse.training.arguments import protected

# ------------------------------------------------------------------------------
# Results of a frontier: its table, the sentence that recommends, and its files.

NOTE = (
    "Columns and rows were removed from the trained model, which was not trained on: removed while "
    "it trains, they lose less, rotated columns above all."
)

CODES_NOTE = (
    "Codes were fitted to the trained weights: training through them with quantize() usually gains "
    "more."
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best of a method within a budget.

    Args:
        budget: fraction of the tables' bytes.
        measured: the attempt, its bytes and metrics.
    """

    budget: float
    measured: Measured

    @property
    def method(self) -> str:
        """As in :data:`~dist_sparse.planning.candidates.METHODS`."""
        return self.measured.attempt.method


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
        points: by budget, the largest first, and method, the best first.
        trials: all that was measured.
    """

    table_bytes: int
    full: Mapping[str, float]
    metric: str
    lower_is_better: tuple[str, ...]
    tolerance: float
    points: tuple[Point, ...]
    trials: tuple[Measured, ...]

    def loss(self, measured: Measured) -> float:
        """Return by how much the metric is worse than that of the model as it is."""
        worse = self.full[self.metric] - measured.metrics[self.metric]
        return -worse if self.metric in self.lower_is_better else worse

    @property
    def recommended(self) -> Point | None:
        """The smallest budget within which a method loses no more than ``tolerance``, and the
        simplest method there that is as good as the best but for half of it, in the fewest bytes;
        None if all lose more."""
        good = [point for point in self.points if self.loss(point.measured) <= self.tolerance]
        if not good:
            return None
        # Bytes count first: the quality is within tolerance in all of them.
        smallest = min(point.budget for point in good)
        near = self.near_best([point for point in good if point.budget == smallest])
        # Methods are listed from the simplest on.
        simplest = [*METHODS]
        return min(near, key=lambda p: (simplest.index(p.method), p.measured.bytes))

    def near_best(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that lose no more than the best but for half of the tolerance."""
        best = min(self.loss(point.measured) for point in points)
        return [p for p in points if self.loss(p.measured) <= best + self.tolerance / 2]

    @property
    def recommendation(self) -> str:
        """One sentence."""
        if not self.points:
            return (
                "Nothing fits the budgets that can be tried on this model; smaller dense tables"
                " have to be trained."
            )
        whole = f"{self.metric} {self.full[self.metric]:.4f} of the whole model"
        point = self.recommended
        if point is not None:
            return f"Recommended: {self._advice(point)}, within {self.tolerance:g} of the {whole}."
        nearest = min(self.points, key=lambda each: self.loss(each.measured))
        return (
            f"Nothing comes within {self.tolerance:g} of the {whole}; nearest is this: "
            f"{self._advice(nearest)}"
        )

    def _advice(self, point: Point) -> str:
        found = point.measured
        dtype, left = found.attempt.candidate.dtype, _left(found.attempt)
        share, metric = percent(found.bytes / self.table_bytes), found.metrics[self.metric]
        how = f"{METHODS[point.method]} as {dtype} ({left})"
        return f"{how}: {share} of the bytes at {self.metric} {metric:.4f}"

    def __repr__(self) -> str:
        head = ("budget", "method", "what is left", "as", "bytes", "of full", *self.full)
        whole = ("", "the model as it is", "", "", count(self.table_bytes), "100.0%")
        rows = [(*whole, *_numbers(self.full))]
        for point in self.points:
            found = point.measured
            share = percent(found.bytes / self.table_bytes)
            cells = (METHODS[point.method], _left(found.attempt), found.attempt.candidate.dtype)
            rows.append(
                (percent(point.budget), *cells, count(found.bytes), share, *_numbers(found.metrics))
            )
        lines = table_lines(head, rows, right={0, *range(4, len(head))})
        order = f"Best first, by {self.metric}: {self._better} is better."
        has_codes = any(point.method == "codes" for point in self.points)
        notes = [order, NOTE, *[CODES_NOTE] * has_codes, self.recommendation]
        return "\n\n".join(["\n".join(lines), *(textwrap.fill(note, 79) for note in notes)])

    @property
    def _better(self) -> str:
        return "less" if self.metric in self.lower_is_better else "more"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; sizes in bytes."""
        return {**asdict(self), "recommendation": self.recommendation}


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{value:.4f}" for value in metrics.values()]


def _left(attempt: Attempt) -> str:
    """Return the kept part of the tables, in a few words."""
    candidate, parts = attempt.candidate, []
    if attempt.trained is not None:
        parts.append(f"{percent(attempt.trained)} of the columns")
    if candidate.columns < 1:
        parts.append(f"{percent(candidate.columns)} of the columns")
    if attempt.method == "untouched":
        parts.append("the touched rows")
    elif candidate.levels:
        parts.append(f"{percent(1 - max(candidate.levels.values()))} of the rows")
    return ", ".join(parts) or "everything"


# ------------------------------------------------------------------------------
# Measuring candidates on a trained model, with a line of JSON for each, so that an interrupted run
# continues.

_FILE: Final = "trials.jsonl"

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Returns metrics of a model by name, the same on all ranks; does not change the model."""

Train = Callable[[float], tuple[nn.Module, Evaluate]]
"""Trains a model whose tables have a fraction of their columns, and returns it with its
evaluation."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of an attempt: the served bytes of its tables, and its metrics."""

    attempt: Attempt
    bytes: int
    metrics: Mapping[str, float]


class Measurements:
    """Metrics of a trained model with the weights that attempts would serve. Construction and calls
    are collective.

    Args:
        model: a DistributedModelParallel, a DDP module or any module; it is not changed.
        evaluate: called with ``model`` while its tables hold the served weights.
        train: trains the models of attempts that need another.
        folder: made if need be. A line is added to its ``trials.jsonl`` for each attempt; those of
            an earlier run are not measured again, if the weights, and the metrics of the model as
            it is, were the same.

    Attributes:
        folder: on rank 0, which alone reads and writes it; None on others.
        tables: of the model, their shapes.
        table_bytes: of them as they are.
        full: its metrics as it is.

    Raises:
        ValueError: weights or metrics are no finite numbers, metrics differ between ranks, or the
            file can't be read; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        train: Train | None,
        folder: Path | None,
    ) -> None:
        self._world = group_over(world_ranks())
        self._whole, self._train = (model, evaluate), train
        self.folder = folder if self._world.rank == 0 else None
        with self._world.agreeing("measuring a model") as facts:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            located = model_source(model).locate()
            self.tables = tuple(map(shape_of, located))
            # A metric would not name the weights that are not finite.
            check_range(located, "fp32")
            facts["tables"] = [[table.name, table.shape, str(table.dtype)] for table in self.tables]
        self.table_bytes = dense_bytes(self.tables)
        self.full = self._metrics(model, evaluate)
        # Lines of other weights or other metrics are of another model.
        self._fingerprint = self._hash(located)
        self._done = self._read()
        self._small: tuple[float, tuple[nn.Module, Evaluate]] | None = None

    def __call__(self, attempts: Sequence[Attempt]) -> list[Measured]:
        """Return the measurements of attempts, in their order."""
        new = {_key(attempt): attempt for attempt in attempts if _key(attempt) not in self._done}
        # In this order each model is trained once.
        in_order = sorted(new.values(), key=lambda attempt: attempt.trained or 0.0)
        with progress("frontier", len(new), "trials", shown=self._world.rank == 0) as bar:
            for attempt in in_order:
                self._measure(attempt)
                bar(1)
        return [Measured(attempt=attempt, **self._done[_key(attempt)]) for attempt in attempts]

    def _measure(self, attempt: Attempt) -> None:
        model, evaluate = self._whole
        tables = self.tables
        if attempt.trained is not None:
            model, evaluate = self._trained(attempt.trained)
            tables = tuple(map(shape_of, model_source(model).locate()))
        # The weights are restored on leaving, also after an error of evaluate().
        with serving(model, attempt.candidate):
            metrics = self._metrics(model, evaluate)
        found = {"bytes": attempt.candidate.served_bytes(tables).total, "metrics": metrics}
        self._done[_key(attempt)] = found
        with self._world.agreeing("writing the file of trials"):
            if self.folder is not None:
                line = json.dumps({"model": self._fingerprint, **asdict(attempt), **found})
                # Opened for each line, so that a killed run has lost none.
                with (self.folder / _FILE).open("a") as stream:
                    stream.write(line + "\n")

    def write(self, result: Mapping[str, Any]) -> None:
        """Write a result beside the trials. Collective."""
        with self._world.agreeing("writing a frontier"):
            if self.folder is not None:
                text = json.dumps(result, indent=1, allow_nan=False)
                (self.folder / "frontier.json").write_text(f"{text}\n")

    def _trained(self, columns: float) -> tuple[nn.Module, Evaluate]:
        """Return the model that was trained with a fraction of the columns; the last one is
        kept."""
        assert self._train is not None  # or there is no such attempt
        if self._small is None or self._small[0] != columns:
            # First freed: two models may not fit into memory.
            self._small = None
            self._small = columns, self._train(columns)
        return self._small[1]

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
            owned = data.owned(rank_in(data.ranks))
            for shard in data.shards:
                if shard.rect in owned:
                    mine.append(f"{data.name} {shard.rect} {hash_tensor(shard.tensor)}")
        # Metrics rounded: the order of sums may differ from run to run.
        metrics = {name: f"{value:.5g}" for name, value in self.full.items()}
        known = [self._world.all_gather_json(mine), metrics]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the measurements of this model in the file, by key."""
        found: dict[str, Any] = {}
        with self._world.agreeing("reading the file of trials"):
            if self.folder is not None and (self.folder / _FILE).exists():
                for text in (self.folder / _FILE).read_text().splitlines():
                    # A line that was cut off when the run was interrupted is measured again.
                    with suppress(json.JSONDecodeError):
                        line = json.loads(text)
                        if line["model"] == self._fingerprint:
                            found[_key(line)] = {name: line[name] for name in ("bytes", "metrics")}
        # All ranks must skip the same attempts.
        of_rank_0: Any = self._world.all_gather_json(found)[0]
        return dict(of_rank_0)


def _key(attempt: Attempt | Mapping[str, Any]) -> str:
    """Return text that is equal for equal attempts alone, whatever their method is called."""
    fields = asdict(attempt) if isinstance(attempt, Attempt) else attempt
    return json.dumps([fields["candidate"], fields["trained"]], sort_keys=True)


BUDGETS = (0.5, 0.2, 0.1, 0.05)
"""Fractions of the tables' bytes."""

_MIN_ROWS: Final = 16
"""Tables with fewer keep all rows, as in `sparsify()`."""


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
        methods: of those in :data:`~dist_sparse.planning.candidates.METHODS`: ``"bits"``,
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
    world = group_over(world_ranks())
    # Whatever would stop a rank later is checked here: an evaluation may take hours.
    with world.agreeing("frontier()") as facts:
        chosen = _methods(methods, train)
        # A set: equal budgets have the same points.
        shares = sorted({checks.level("budgets", each) for each in budgets}, reverse=True)
        if not shares:
            raise ValueError(f"Invalid {budgets=}: must be fractions of the tables' bytes.")
        kinds = [checks.choice("dtypes", each, BITS) for each in dtypes]
        checks.number("tolerance", tolerance, least=0)
        located = model_source(model).locate()
        pruned = _prunable(located, checks.name_list("protect", protect))
        groups = tuple(map(tuple, rotation_groups(rotate, [data.name for data in located])))
        # The rotated candidates are tried last.
        check_candidate(model, Candidate(groups=groups), {data.name: data for data in located})
        facts.update(methods=chosen, budgets=shares, dtypes=kinds, pruned=pruned, rotate=rotate)
        facts["metric, lower_is_better, tolerance"] = [metric, *lower_is_better, tolerance]
    # Fused optimizers only: frontier() is called without an optimizer.
    untouched = untouched_rows(model, located)
    measurements = Measurements(model, evaluate, train, None if out is None else Path(out))
    tried: dict[float, list[Attempt]] = {}
    for share in shares:
        choices = Choices(
            tables=measurements.tables,
            budget=math.floor(share * measurements.table_bytes),
            groups=groups,
            untouched=untouched,
            prunable=pruned,
        )
        tried[share] = attempts_of(choices, chosen, kinds, trains=train is not None)
    whole = Frontier(
        table_bytes=measurements.table_bytes,
        full=measurements.full,
        # By default the first metric that evaluate() returns.
        metric=checks.choice("metric", metric or next(iter(measurements.full)), measurements.full),
        lower_is_better=tuple(lower_is_better),
        tolerance=tolerance,
        points=(),
        trials=(),
    )
    # All budgets at once: an attempt of several is measured once.
    measured = measurements([attempt for some in tried.values() for attempt in some])
    points = _best_points(whole, tried, measured)
    result = replace(whole, points=points, trials=tuple(measured))
    measurements.write(result.to_json())
    return result


def _prunable(located: Sequence[ShardedData], protect: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tables that may lose rows."""
    guarded = protected(located, protect)
    large = [data.name for data in located if data.shape[0] >= _MIN_ROWS]
    return tuple(name for name in large if name not in guarded)


def _best_points(
    result: Frontier, tried: Mapping[float, Sequence[Attempt]], measured: Iterable[Measured]
) -> tuple[Point, ...]:
    """Return for each budget and method the smallest point within tolerance of the method's best;
    in each budget the best method first.

    Args:
        measured: of all attempts in turn.
    """
    found: list[Point] = []
    # Measurements are in the order of the attempts, one each.
    in_turn = iter(measured)
    for budget, attempts in tried.items():
        by_method: dict[str, list[Point]] = {}
        for attempt in attempts:
            point = Point(budget=budget, measured=next(in_turn))
            by_method.setdefault(attempt.method, []).append(point)
        best = []
        for some in by_method.values():
            # Within the tolerance fewer bytes count more than the metric.
            near = result.near_best(some)
            best.append(min(near, key=lambda p: (p.measured.bytes, result.loss(p.measured))))
        found += sorted(best, key=lambda point: result.loss(point.measured))
    return tuple(found)


def _methods(methods: Sequence[str] | None, train: Train | None) -> list[str]:
    """Return the names of the methods, checked."""
    possible = [*METHODS]
    if train is None:
        possible.remove("small")
    return possible if methods is None else [checks.choice("methods", m, possible) for m in methods]
