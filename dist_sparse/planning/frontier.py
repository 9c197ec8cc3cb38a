"""`frontier()`: metrics of a trained model at a few sizes, on the user's own data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.planning.candidates import Candidate
from dist_sparse.planning.choices import METHODS, Attempt, Choices, attempts_of
from dist_sparse.planning.measure import Evaluate, Measured, Measurements, Train
from dist_sparse.planning.results import Frontier, Point
from dist_sparse.planning.traffic import untouched_rows
from dist_sparse.planning.trials import check_candidate
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.encodings import BITS
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ShardedData
from dist_sparse.training.arguments import protected

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
        methods: of those in :data:`~dist_sparse.planning.choices.METHODS`: ``"bits"``,
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
