"""`frontier()`: what a trained model is worth at a few sizes, every method measured on the user's own data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.planning.candidates import Candidate
from dist_sparse.planning.measure import Evaluate, Measurements, Train
from dist_sparse.planning.methods import METHODS, Attempt, attempts
from dist_sparse.planning.pages import write_pages
from dist_sparse.planning.results import Frontier, Point
from dist_sparse.planning.trials import check_candidate
from dist_sparse.rotation.rotate import Rotate
from dist_sparse.serving.codes import BITS
from dist_sparse.serving.manifest import Dtype
from dist_sparse.tables.modules import model_source

__all__ = ["BUDGETS", "frontier"]

BUDGETS = (0.5, 0.2, 0.1, 0.05)
"""Fractions of the tables' bytes."""


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
    lower_is_better: Sequence[str] = ("ne", "loss"),
    tolerance: float = 0.002,
    out: str | os.PathLike[str] | None = None,
) -> Frontier:
    """Measure what a trained model is worth at a few sizes of its tables. Collective: every rank of the world must call
    it.

    For each budget and method, what fits is written into the tables, measured and taken back; the model is not trained
    on. Bytes are those of :class:`~dist_sparse.planning.candidates.ServedBytes`: scales, indexes, bitmasks and bases
    are counted.

    Args:
        model: trained: a DistributedModelParallel, a DDP module or any module. Afterwards its weights are what they
            were.
        evaluate: called with the model, returns metrics by name, the same on all ranks. Take data that the model was
            not trained on.
        train: by ``"columns"`` and ``"rows"`` what is called with a fraction and returns ``(model, evaluate)``: a model
            that was trained as this one, with that fraction of the columns of its tables, or with ids hashed into that
            fraction of their rows.
        budgets: fractions of the tables' bytes.
        methods: of ``"bits"``, ``"small"``, ``"columns"``, ``"rotated"``, ``"rows"``, ``"blocks"``, ``"elements"``,
            ``"mix"`` and ``"hashed"``; None is all for which there is what ``"small"`` and ``"hashed"`` need of
            ``train``.
        dtypes: to store what is left in.
        rotate: as in :func:`~dist_sparse.rotate`: ``"table"``, or groups of tables that nothing but dot products
            between them read.
        protect: globs of tables that keep all rows.
        min_rows: tables with fewer keep all rows.
        metric: by which methods are compared; None is the first that ``evaluate`` returns.
        lower_is_better: metrics of which less is better.
        tolerance: a smaller difference of the metric does not count.
        out: a folder for ``trials.jsonl``, ``frontier.json``, ``frontier.md`` and, with matplotlib, ``frontier.png``. A
            run that is interrupted goes on from ``trials.jsonl``.

    Raises:
        ValueError: an argument or a metric is invalid, the tables can't be served, or ranks disagree; on every rank.
        OSError: the folder can't be written. On several ranks it is a ValueError that quotes it.

    Example::

        >>> import torch
        >>> from dist_sparse.planning.frontier import frontier
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.randn(100, 4) @ torch.randn(4, 16))
        >>> ids = torch.arange(100).view(20, 5)
        >>> means = table(ids)
        >>> found = frontier(table, lambda model: {"loss": float((model(ids) - means).abs().mean())}, budgets=[0.3])
        >>> found.points[0].method  # four columns hold all
        'rotated'
    """
    world = group_over(world_ranks())
    with world.agreeing("frontier()") as facts:
        chosen = _methods(methods, train)
        shares = sorted({checks.level("budgets", each) for each in budgets}, reverse=True)
        kinds: Any = [checks.choice("dtypes", each, BITS) for each in dtypes]
        tolerance = checks.number("tolerance", tolerance, least=0)
        kept = checks.name_list("protect", protect)
        located = model_source(model).locate()
        guarded = {data.name for data in model_source(model, include=kept).locate()} if kept else set()
        pruned = [d.name for d in located if d.shape[0] >= min_rows and d.name not in guarded]
        groups = () if rotate == "table" else tuple(map(tuple, rotate))
        check_candidate(Candidate(groups=groups), {data.name: data for data in located})
        facts.update(methods=chosen, budgets=shares, dtypes=kinds, pruned=pruned, rotate=rotate)
        facts["metric, lower_is_better, tolerance"] = [metric, *lower_is_better, tolerance]
        folder = None if out is None else Path(out)
        if folder is not None and world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
    measurements = Measurements(model, evaluate, train, None if folder is None else folder / "trials.jsonl")
    if metric is None:
        metric = next(iter(measurements.full))
    checks.choice("metric", metric, measurements.full)
    by_budget: dict[float, list[Attempt]] = {}
    for share in shares:
        bytes_ = round(share * measurements.table_bytes)
        by_budget[share] = [*attempts(located, bytes_, methods=chosen, dtypes=kinds, rotate=rotate, pruned=pruned)]
    everything = [attempt for some in by_budget.values() for attempt in some]
    measured = measurements(everything, "frontier")
    whole = Frontier(
        table_bytes=measurements.table_bytes,
        full=measurements.full,
        metric=metric,
        lower_is_better=tuple(lower_is_better),
        tolerance=tolerance,
        points=(),
        trials=tuple(measured),
    )
    found, points = iter(measured), []
    for share, some in by_budget.items():
        here = [Point(budget=share, measured=next(found)) for _ in some]
        best = [_best(whole, [point for point in here if point.method == method]) for method in chosen]
        points += sorted(filter(None, best), key=lambda point: whole.loss(point.measured))
    result = replace(whole, points=tuple(points))
    if folder is not None:
        with world.agreeing("frontier()"):
            if world.rank == 0:
                write_pages(result, folder)
    return result


def _best(result: Frontier, points: Sequence[Point]) -> Point | None:
    """The one that takes the least of those that are as good as the best."""
    if not points:
        return None
    best = min(result.loss(point.measured) for point in points)
    good = [point for point in points if result.loss(point.measured) <= best + result.tolerance / 2]
    return min(good, key=lambda point: (point.measured.bytes, result.loss(point.measured)))


def _methods(methods: Sequence[str] | None, train: Train) -> list[str]:
    """The names of the methods, checked."""
    needs = {"small": "columns", "hashed": "rows"}
    if unknown := sorted(set(train) - {*needs.values()}):
        raise ValueError(f"Invalid train of {unknown}: must be of 'columns', 'rows' or both.")
    if methods is None:
        return [each for each in METHODS if needs.get(each) in (None, *train)]
    chosen = [checks.choice("methods", each, METHODS) for each in methods]
    for each in chosen:
        if needs.get(each) not in (None, *train):
            raise ValueError(f"Invalid {methods=}: {each!r} needs train={{{needs[each]!r}: ...}}.")
    return chosen
