"""`frontier()` and `measure_plan()`: metrics of a trained model at a few sizes, on the user's own
data."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.planning.candidates import Candidate
from dist_sparse.planning.choices import Choice
from dist_sparse.planning.measure import Evaluate, Measurements, Train
from dist_sparse.planning.methods import METHODS, Attempt, Search
from dist_sparse.planning.plan import Plan
from dist_sparse.planning.results import Frontier, Point, write_pages
from dist_sparse.planning.traffic import untouched_rows
from dist_sparse.planning.trials import check_candidate
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.codes import BITS
from dist_sparse.serving.manifest import Dtype
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ShardedData
from dist_sparse.training.arguments import protected

__all__ = ["BUDGETS", "LOWER_IS_BETTER", "TOLERANCE", "frontier", "measure_plan"]

BUDGETS = (0.5, 0.2, 0.1, 0.05)
"""Fractions of the tables' bytes."""

LOWER_IS_BETTER = ("ne", "loss")
TOLERANCE = 0.002


def frontier(
    model: nn.Module,
    evaluate: Evaluate,
    train: Train = MappingProxyType({}),
    *,
    budgets: Sequence[float] = BUDGETS,
    methods: Sequence[str] | None = None,
    dtypes: Sequence[Dtype] = ("fp32", "int8", "int4"),
    rotate: Rotate = "table",
    protect: str | list[str] | None = None,
    min_rows: int = 16,
    metric: str | None = None,
    lower_is_better: Sequence[str] = LOWER_IS_BETTER,
    tolerance: float = TOLERANCE,
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
        train: functions by ``"columns"`` and ``"rows"``. Each is called with a fraction and returns
            ``(model, evaluate)``: a model trained like this one, with that fraction of the columns
            of its tables, or with ids hashed into that fraction of their rows.
        budgets: fractions of the tables' bytes.
        methods: of those in :data:`~dist_sparse.planning.methods.METHODS`: ``"bits"``,
            ``"untouched"``, ``"small"``, ``"rotated"``, ``"rows"``, ``"mix"`` and ``"hashed"``.
            None is all of them, without those for which ``train`` has nothing: ``"small"`` and
            ``"hashed"``.
        dtypes: dtypes of the stored weights.
        rotate: as in :func:`~dist_sparse.rotate`: ``"table"``, or groups of tables that are read
            only by dot products between them.
        protect: globs of tables that keep all rows.
        min_rows: tables with fewer keep all rows.
        metric: by which methods are compared; None is the first that ``evaluate`` returns.
        lower_is_better: metrics for which less is better.
        tolerance: a smaller difference of the metric does not count.
        out: a folder for ``trials.jsonl``, ``frontier.json``, ``frontier.md`` and ``frontier.svg``.
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
    with world.agreeing("frontier()") as facts:
        chosen = _methods(methods, train)
        shares = sorted({checks.level("budgets", each) for each in budgets}, reverse=True)
        if not shares:
            raise ValueError(f"Invalid {budgets=}: must be fractions of the tables' bytes.")
        kinds: Any = [checks.choice("dtypes", each, BITS) for each in dtypes]
        checks.number("tolerance", tolerance, least=0)
        located = model_source(model).locate()
        pruned = _prunable(located, checks.name_list("protect", protect), min_rows)
        groups = tuple(map(tuple, rotation_groups(rotate, [data.name for data in located])))
        # Before hours of evaluation: the rotated candidates are tried last.
        check_candidate(model, Candidate(groups=groups), {data.name: data for data in located})
        facts.update(methods=chosen, budgets=shares, dtypes=kinds, pruned=pruned, rotate=rotate)
        facts["metric, lower_is_better, tolerance"] = [metric, *lower_is_better, tolerance]
    # Fused optimizers only: frontier() is called without an optimizer.
    untouched = untouched_rows(model, located, None)
    measurements = _measurements(model, evaluate, train, out)
    by_budget: list[tuple[float, Attempt]] = []
    for share in shares:
        search = Search(
            tables=measurements.tables,
            budget=math.floor(share * measurements.table_bytes),
            methods=chosen,
            dtypes=kinds,
            groups=groups,
            pruned=pruned,
            untouched=untouched,
        )
        by_budget += [(share, attempt) for attempt in search.attempts()]
    whole = _frontier(measurements, metric, lower_is_better, tolerance)
    # All budgets at once: an attempt of several is measured once.
    measured = measurements([attempt for _, attempt in by_budget], "frontier")
    tried: dict[float, list[Point]] = {share: [] for share in shares}
    for (share, _), each in zip(by_budget, measured, strict=True):
        tried[share].append(Point(budget=share, measured=each))
    points: list[Point] = []
    for some in tried.values():
        best = _best_of_methods(whole, chosen, some)
        points += sorted(best, key=lambda point: whole.loss(point.measured))
    return _written(replace(whole, points=tuple(points), trials=tuple(measured)), out)


def measure_plan(
    model: nn.Module,
    evaluate: Evaluate,
    planned: Plan,
    *,
    metric: str | None = None,
    lower_is_better: Sequence[str] = LOWER_IS_BETTER,
    tolerance: float = TOLERANCE,
    out: str | os.PathLike[str] | None = None,
) -> Frontier:
    """Measure what fits the budget of a plan, on the model as it was trained, and recommend by
    that. Collective: every rank of the world must call it.

    Smaller dense tables are left out: they have to be trained, see :func:`frontier`.

    Args:
        model: whose tables were planned for. Afterwards its weights are what they were.
        evaluate, metric, lower_is_better, tolerance, out: as in :func:`frontier`.
        planned: what :func:`~dist_sparse.plan` returned.

    Raises:
        ValueError: as :func:`frontier`.

    Example::

        >>> import torch
        >>> from dist_sparse import plan
        >>> from dist_sparse.planning.frontier import measure_plan
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.randn(1000, 4) @ torch.randn(4, 16))
        >>> ids = torch.arange(1000).view(200, 5)
        >>> means = table(ids)
        >>> planned = plan(table, "20%", rotate="table")
        >>> found = measure_plan(
        ...     table, lambda model: {"loss": float((model(ids) - means).abs().mean())}, planned
        ... )
        >>> found.points[0].method  # four columns hold all
        'rotated'
    """
    tried = []
    for choice in planned.choices:
        # Smaller dense tables have to be trained.
        if choice.fits and choice.kind != "small":
            tried.append(Attempt(method=_method(choice), candidate=choice.candidate))
    measurements = _measurements(model, evaluate, MappingProxyType({}), out)
    left_out = {each.name for each in measurements.tables} ^ {each.name for each in planned.tables}
    if left_out:
        raise ValueError(
            "Invalid planned: it must be of all tables of the model;"
            f" {sorted(left_out)} are in one of them only."
        )
    whole = _frontier(measurements, metric, lower_is_better, tolerance)
    measured = measurements(tried, "plan")
    # A budget above the dense bytes is shown as all of them.
    budget = min(planned.budget / planned.dense_bytes, 1.0)
    points = [Point(budget=budget, measured=each) for each in sorted(measured, key=whole.loss)]
    return _written(replace(whole, points=tuple(points), trials=tuple(measured)), out)


def _method(choice: Choice) -> str:
    """Return the method of :data:`~dist_sparse.planning.methods.METHODS` that a choice uses."""
    if choice.kind == "full" and choice.candidate.levels:
        return "untouched"
    return {"full": "bits", "columns": "rotated", "rows": "mix"}[choice.kind]


def _prunable(located: Sequence[ShardedData], protect: Sequence[str], min_rows: int) -> list[str]:
    """Return the names of the tables that may lose rows."""
    guarded = protected(located, protect)
    large = [data.name for data in located if data.shape[0] >= min_rows]
    return [name for name in large if name not in guarded]


def _measurements(
    model: nn.Module, evaluate: Evaluate, train: Train, out: str | os.PathLike[str] | None
) -> Measurements:
    """Measurements with their file in a folder, which is made. Collective."""
    world = group_over(world_ranks())
    with world.agreeing("the folder of a frontier"):
        if out is not None and world.rank == 0:
            Path(out).mkdir(parents=True, exist_ok=True)
    return Measurements(model, evaluate, train, None if out is None else Path(out, "trials.jsonl"))


def _frontier(
    measurements: Measurements, metric: str | None, lower_is_better: Sequence[str], tolerance: float
) -> Frontier:
    """A frontier without points."""
    # By default the first metric that evaluate() returns.
    metric = next(iter(measurements.full)) if metric is None else metric
    return Frontier(
        table_bytes=measurements.table_bytes,
        full=measurements.full,
        metric=checks.choice("metric", metric, measurements.full),
        lower_is_better=tuple(lower_is_better),
        tolerance=checks.number("tolerance", tolerance, least=0),
        points=(),
        trials=(),
    )


def _written(result: Frontier, out: str | os.PathLike[str] | None) -> Frontier:
    """Write the pages on rank 0. Collective."""
    world = group_over(world_ranks())
    with world.agreeing("the pages of a frontier"):
        if out is not None and world.rank == 0:
            write_pages(result, Path(out))
    return result


def _best_of_methods(
    result: Frontier, methods: Sequence[str], points: Sequence[Point]
) -> list[Point]:
    """Return for each method its smallest point within tolerance of its best."""
    best = []
    for method in methods:
        some = [point for point in points if point.method == method]
        if some:
            near = result.near_best(some)
            best.append(min(near, key=lambda p: (p.measured.bytes, result.loss(p.measured))))
    return best


_TRAINED: Final = {"small": "columns", "hashed": "rows"}
"""Part of the tables that ``train`` has to make smaller, by method."""


def _methods(methods: Sequence[str] | None, train: Train) -> list[str]:
    """Return the names of the methods, checked."""
    if unknown := sorted(set(train) - {*_TRAINED.values()}):
        raise ValueError(f"Invalid train of {unknown}: must be of 'columns', 'rows' or both.")
    possible = [each for each in METHODS if _TRAINED.get(each) in (None, *train)]
    if methods is None:
        return possible
    chosen = [checks.choice("methods", each, METHODS) for each in methods]
    for each in chosen:
        if each not in possible:
            raise ValueError(
                f"Invalid {methods=}: {each!r} needs train={{{_TRAINED[each]!r}: ...}}."
            )
    return chosen
