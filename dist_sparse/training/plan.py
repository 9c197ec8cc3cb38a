"""Arguments of :func:`~dist_sparse.sparsify`, checked and resolved, alone and for the tables of a model.

Names are case-insensitive (``"l2"``, ``"cubic"``, ``"row"``), and an unknown one raises an error that lists the known.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from torch import nn

from dist_sparse import checks
from dist_sparse.enforcer.optimizers import same_storage
from dist_sparse.schedulers.curves import Window
from dist_sparse.schedulers.ready import (
    ConstantDataScheduler,
    CosineDataScheduler,
    CubicDataScheduler,
    ExponentialDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
    ReadyDataScheduler,
)
from dist_sparse.sparsifiers.importance import SCORES, Score
from dist_sparse.sparsifiers.score import BlockShape, Norm
from dist_sparse.tables.shards import COL, ROW, Rect, ShardedData, grid_of, resolve_block

__all__ = [
    "BlockShape",
    "Levels",
    "Norm",
    "OptimizerState",
    "Plan",
    "Schedule",
    "ScheduleName",
    "Score",
    "final_levels",
    "left_dense",
]

Levels: TypeAlias = float | Mapping[str, float]
OptimizerState: TypeAlias = Literal["keep", "reset"]
ScheduleName: TypeAlias = Literal["constant", "cosine", "cubic", "exponential", "linear", "one_shot"]
Schedule: TypeAlias = ScheduleName | Callable[..., ReadyDataScheduler]


def _one_shot(*args: Any, end: int, every: int, **kwargs: Any) -> ReadyDataScheduler:
    return OneShotDataScheduler(*args, **kwargs)  # at begin: it has neither end nor every


_SCHEDULES: dict[str, Callable[..., ReadyDataScheduler]] = {
    "constant": ConstantDataScheduler,
    "cosine": CosineDataScheduler,
    "cubic": CubicDataScheduler,
    "exponential": ExponentialDataScheduler,
    "linear": LinearDataScheduler,
    "one_shot": _one_shot,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arguments of :func:`~dist_sparse.sparsify` that need no model, checked and resolved.

    Attributes:
        block: ``(rows, columns)`` of ints, ``(int, ROW)`` or ``(COL, int)``.
        every: cut to ``end - begin``, so that ``level`` is reached in at least two mask updates.
        norm, optimizer_state: as the parts spell them.
        score: None tries ``"norm_accumulator"`` first, and then the norm.
        schedule: makes the scheduler.

    Raises:
        ValueError: an argument is invalid.
    """

    level: Levels
    end: int
    begin: int
    every: int
    block: Any
    norm: Any
    score: Any
    schedule: Any
    optimizer_state: Any
    min_rows: int

    def __post_init__(self) -> None:
        window = Window(begin=self.begin, end=self.end, every=self.every)
        every = window.every if window.end is None else min(window.every, max(window.end - window.begin, 1))
        resolved = {
            "level": _levels(self.level),
            **{"begin": window.begin, "end": window.end, "every": every},
            "block": _block(self.block),
            "norm": "L2" if self.norm is None else checks.choice("norm", self.norm, ("L1", "L2")),
            "score": None if self.score is None else checks.choice("score", self.score, SCORES),
            "schedule": self.schedule
            if callable(self.schedule)
            else _SCHEDULES[checks.choice("schedule", self.schedule, _SCHEDULES, " or the class of a ready scheduler")],
            "optimizer_state": checks.choice("optimizer_state", self.optimizer_state, ("keep", "reset")),
            "min_rows": checks.integer("min_rows", self.min_rows, least=0),
        }
        if resolved["score"] is None and (self.norm is not None or resolved["block"] != (1, ROW)):
            resolved["score"] = "norm"
        for name, value in resolved.items():
            object.__setattr__(self, name, value)


def _levels(level: object) -> Levels:
    if not isinstance(level, Mapping):
        return checks.level("level", level)
    if not level:
        raise ValueError(f"Invalid {level=}: must be a number in [0, 1], or such numbers by name or glob.")
    return {str(name): checks.level(f"level[{name!r}]", each) for name, each in level.items()}


def _block(block: Any) -> tuple[int | str, int | str]:
    try:
        rows, columns = checks.parse_block(block) if isinstance(block, str) else block
        whole_rows = isinstance(columns, str) and columns == ROW
        whole_columns = isinstance(rows, str) and rows == COL and not whole_rows
        return (
            COL if whole_columns else checks.integer("rows", rows, least=1),
            ROW if whole_rows else checks.integer("columns", columns, least=1),
        )
    except (TypeError, ValueError):
        rule = 'must be "row", "col", text such as "1x4", or (rows, columns): ints >= 1, (int, ROW) or (COL, int)'
        raise ValueError(f"Invalid {block=}: {rule}.") from None


def left_dense(model: nn.Module, located: Sequence[ShardedData], min_rows: int) -> dict[str, str]:
    """Return the tables that are not pruned, with the reason: frozen ones, and those with fewer than ``min_rows`` rows.

    Raises:
        ValueError: none is pruned.
    """
    tables = same_storage([m.weight.data for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))])
    frozen = same_storage([parameter.data for parameter in model.parameters() if not parameter.requires_grad])
    reasons = {}
    for data in located:
        whole = [shard.tensor for shard in data.shards] if data.sharding == "replicated" else []
        if any(frozen(tensor) for tensor in whole):
            reasons[data.name] = "frozen (requires_grad=False)"
        elif data.shape[0] < min_rows and (not whole or any(tables(tensor) for tensor in whole)):
            reasons[data.name] = f"{data.shape[0]} rows, fewer than min_rows={min_rows}"
    if len(reasons) == len(located):
        raise ValueError(f"Nothing can be pruned, every table is left dense: {_listed(reasons)}.")
    return reasons


def final_levels(plan: Plan, located: Sequence[ShardedData], left_dense: Mapping[str, str]) -> float | dict[str, float]:
    """Return the final level by escaped name, or one number where all tables have the same.

    Levels below 1 are capped so that one block of each table stays.

    Raises:
        ValueError: a glob of ``plan.level`` matches nothing that is pruned.
    """
    pruned = [data for data in located if data.name not in left_dense]
    levels = plan.level if isinstance(plan.level, Mapping) else {"*": plan.level}
    finals: dict[str, float] = {}
    for pattern, level in levels.items():
        matching = [data for data in located if _matches(data, pattern)]
        if not any(data in pruned for data in matching):
            reasons = {data.name: left_dense[data.name] for data in matching}
            why = f"matches tables that are left dense: {_listed(reasons)}" if reasons else "matches no table"
            raise ValueError(f"Invalid level: {pattern!r} {why}; pruned are {[data.name for data in pruned]}.")
        finals |= {data.name: _capped(level, data, plan.block) for data in matching if data in pruned}
    if not isinstance(plan.level, Mapping) and set(finals.values()) == {plan.level}:
        return plan.level
    return {glob.escape(name): level for name, level in finals.items()}


def _matches(data: ShardedData, pattern: str) -> bool:
    return fnmatchcase(data.name, pattern) or (data.fqn is not None and fnmatchcase(data.fqn, pattern))


def _capped(level: float, data: ShardedData, block: tuple[int | str, int | str]) -> float:
    grid = grid_of(Rect(0, 0, *data.shape), resolve_block(data.name, block, data.shape))
    blocks = grid.rows * grid.cols
    return (blocks - 1) / blocks if level < 1 and blocks and round(level * blocks) == blocks else level


def _listed(reasons: Mapping[str, str]) -> str:
    shown = [f"{name!r} ({reason})" for name, reason in list(reasons.items())[:20]]
    return ", ".join(shown) + (f", and {len(reasons) - 20} more" if len(reasons) > 20 else "")
