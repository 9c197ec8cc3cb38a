"""Arguments of :func:`~dist_sparse.sparsify`, checked and resolved, alone and for the tables of a
model.

Names are case-insensitive (``"l2"``, ``"cubic"``, ``"row"``), and an unknown one raises an error
that lists the known.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias

from torch import nn

from dist_sparse import checks
from dist_sparse.enforcer.optimizers import same_storage
from dist_sparse.rotation.rotate import Rotate, rotation_groups
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
from dist_sparse.sparsifiers.score import SCOPES, BlockShape, Norm, Scope
from dist_sparse.tables.shards import COL, ROW, Rect, ShardedData, grid_of, resolve_block
from dist_sparse.training.budget import budget_levels, parse_budget

__all__ = [
    "BlockShape",
    "Levels",
    "Norm",
    "OptimizerState",
    "Plan",
    "Schedule",
    "ScheduleName",
    "Scope",
    "Score",
    "final_levels",
    "left_dense",
    "protected",
    "table_floors",
]

Levels: TypeAlias = float | Mapping[str, float]
OptimizerState: TypeAlias = Literal["keep", "reset"]
ScheduleName: TypeAlias = Literal[
    "constant", "cosine", "cubic", "exponential", "linear", "one_shot"
]
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
        budget: bytes, or a fraction of them as a float.
        block: ``(rows, columns)`` of ints, ``(int, ROW)`` or ``(COL, int)``.
        every: cut to ``end - begin``, so that ``level`` is reached in at least two mask updates.
        norm, optimizer_state: as the parts spell them; ``norm`` None is "L2".
        score: None tries ``"norm_accumulator"`` first, and then the norm.
        schedule: makes the scheduler.
        decay: None is 1.

    Raises:
        ValueError: an argument is invalid.
    """

    level: Levels | None
    budget: Any
    scope: Any
    floor: Levels | None
    protect: Any
    end: int | None
    begin: int
    every: int
    block: Any
    norm: Any
    score: Any
    schedule: Any
    optimizer_state: Any
    min_rows: int
    decay: Any = None

    def __post_init__(self) -> None:
        if (self.level is None) == (self.budget is None):
            raise ValueError(
                f"Invalid level={self.level!r}, budget={self.budget!r}: exactly one must be given."
            )
        window = Window(begin=self.begin, end=self.end, every=self.every)
        every = (
            window.every
            if window.end is None
            else min(window.every, max(window.end - window.begin, 1))
        )
        resolved = {
            "level": _given("level", self.level, _levels),
            "budget": _given("budget", self.budget, lambda _, budget: parse_budget(budget)),
            "scope": checks.choice("scope", self.scope, SCOPES),
            "floor": _given("floor", self.floor, _levels),
            "protect": checks.name_list("protect", self.protect),
            **{"begin": window.begin, "end": window.end, "every": every},
            "block": _block(self.block),
            "norm": _given(
                "norm", self.norm, lambda name, norm: checks.choice(name, norm, ("L1", "L2"))
            ),
            "score": _given(
                "score", self.score, lambda name, score: checks.choice(name, score, SCORES)
            ),
            "schedule": (
                self.schedule if callable(self.schedule) else _schedule(self.schedule, self.end)
            ),
            "optimizer_state": checks.choice(
                "optimizer_state", self.optimizer_state, ("keep", "reset")
            ),
            "min_rows": checks.integer("min_rows", self.min_rows, least=0),
            "decay": _given("decay", self.decay, checks.level),
        }
        if self.decay is not None and resolved["score"] != "frequency":
            raise ValueError(
                f"Invalid decay={self.decay} with score={self.score!r}: 'frequency' alone counts"
                " lookups."
            )
        if resolved["score"] is None and (self.norm is not None or resolved["block"] != (1, ROW)):
            resolved["score"] = "norm"
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def facts(self) -> dict[str, Any]:
        """Return the arguments by name, as JSON can hold them, for ranks to compare."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in found.items():
            if isinstance(value, Mapping):
                # In order: of several globs that match, the last counts.
                found[name] = list(value.items())
        found["protect"] = sorted(self.protect)
        found["schedule"] = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        return found


def _given(argument: str, value: Any, check: Callable[[str, Any], Any]) -> Any:
    return None if value is None else check(argument, value)


def _schedule(name: object, end: int | None) -> Callable[..., ReadyDataScheduler]:
    """The schedule of a name; None is a curve that ends at ``end``, or the final level for good."""
    name = ("constant" if end is None else "cubic") if name is None else name
    return _SCHEDULES[
        checks.choice("schedule", name, _SCHEDULES, " or the class of a ready scheduler")
    ]


def _levels(argument: str, given: object) -> Levels:
    if not isinstance(given, Mapping):
        return checks.level(argument, given)
    if not given:
        raise ValueError(
            f"Invalid {argument}={given!r}: must be a number in [0, 1], or such numbers by name or"
            " glob."
        )
    return {str(name): checks.level(f"{argument}[{name!r}]", each) for name, each in given.items()}


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
        rule = (
            'must be "row", "col", text such as "1x4", or (rows, columns): ints >= 1, (int, ROW) or'
            " (COL, int)"
        )
        raise ValueError(f"Invalid {block=}: {rule}.") from None


def left_dense(
    model: nn.Module,
    located: Sequence[ShardedData],
    plan: Plan,
    rotate: Rotate | None = None,
    include: Sequence[str] = (),
) -> dict[str, str]:
    """Return the tables that are not pruned, with the reason: protected ones, frozen ones, those
    with fewer than ``min_rows`` rows, position embeddings that no glob of ``include`` matches, and,
    if groups of tables are rotated, those in no group: nothing could make them narrower.

    Raises:
        ValueError: none is pruned, a glob of ``plan.protect`` matches no table, or a table to
            rotate is left dense.
    """
    names = [data.name for data in located]
    rotated = (
        names
        if rotate is None
        else [name for group in rotation_groups(rotate, names) for name in group]
    )
    reason_of = _reasons(model, located, plan, include)
    reasons = {}
    for data in located:
        reason = reason_of(data)
        if reason is None and data.name not in rotated:
            reason = "in no group of rotate"
        if reason is not None:
            reasons[data.name] = reason
    refused = {name: reasons[name] for name in rotated if name in reasons}
    if rotate not in (None, "table") and refused:
        raise ValueError(f"Invalid {rotate=}: these tables are left dense: {_listed(refused)}.")
    if len(reasons) == len(located):
        raise ValueError(f"Nothing can be pruned, every table is left dense: {_listed(reasons)}.")
    return reasons


def _reasons(
    model: nn.Module, located: Sequence[ShardedData], plan: Plan, include: Sequence[str]
) -> Callable[[ShardedData], str | None]:
    """Return a function that says why a table is not pruned, whatever is rotated; None if it is
    pruned."""
    guarded = protected(located, plan.protect)
    modules = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    tables = same_storage(
        [weight.data for module in modules for weight in module.parameters(recurse=False)]
    )
    frozen = same_storage(
        [parameter.data for parameter in model.parameters() if not parameter.requires_grad]
    )

    def reason(data: ShardedData) -> str | None:
        whole = [shard.tensor for shard in data.shards] if data.sharding == "replicated" else []
        if data.name in guarded:
            return "protected"
        if any(map(frozen, whole)):
            return "frozen (requires_grad=False)"
        if whole and not any(map(tables, whole)):
            return None  # a parameter that dense= selects, no table
        if data.shape[0] < plan.min_rows:
            return f"{data.shape[0]} rows, fewer than min_rows={plan.min_rows}"
        if _is_of_positions(data) and not any(_matches(data, pattern) for pattern in include):
            return "position embeddings; include= prunes them"
        return None

    return reason


_POSITIONS: Final = {"pos", "posemb", "posembedding", "position", "positions", "positional", "wpe"}
"""Words in the names of position embeddings; ``wpe`` is GPT-2's."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _is_of_positions(data: ShardedData) -> bool:
    """Whether a whole word of its names says so: ``_pos_emb`` and ``PositionEmbedding`` do,
    ``composer`` does not.

    Every sequence reads all positions up to its length, so that no row of such a table can go
    unnoticed.
    """
    words = _WORD.findall(f"{data.name} {data.fqn or ''}")
    return not _POSITIONS.isdisjoint(word.lower() for word in words)


def protected(located: Sequence[ShardedData], protect: Sequence[str]) -> set[str]:
    """Return the names of the tables that globs match.

    Raises:
        ValueError: a glob matches no table.
    """
    for pattern in protect:
        if not any(_matches(data, pattern) for data in located):
            raise ValueError(
                f"Invalid protect: {pattern!r} matches none of {[data.name for data in located]}."
            )
    return {data.name for data in located if any(_matches(data, pattern) for pattern in protect)}


def final_levels(
    plan: Plan,
    located: Sequence[ShardedData],
    left_dense: Mapping[str, str],
    rotate: Rotate | None = None,
) -> float | dict[str, float]:
    """Return the final level by escaped name, or one number where all tables have the same.

    Levels below 1 are capped so that one block of each table stays.

    Raises:
        ValueError: a glob of ``plan.level`` matches nothing that is pruned, or a budget can't be
            met.
    """
    if plan.budget is not None:
        floors = table_floors(plan, located, left_dense)
        finals = budget_levels(
            plan.budget, located, left_dense, plan.block, floors, plan.scope == "global", rotate
        )
        return {glob.escape(name): level for name, level in finals.items()}
    assert plan.level is not None
    blocks = {data.name: _blocks(data, plan.block) for data in located}
    given = _by_name("level", plan.level, located, left_dense)
    finals = {name: _capped(level, blocks[name]) for name, level in given.items()}
    if not isinstance(plan.level, Mapping) and set(finals.values()) == {plan.level}:
        return plan.level
    return {glob.escape(name): level for name, level in finals.items()}


def table_floors(
    plan: Plan, located: Sequence[ShardedData], left_dense: Mapping[str, str]
) -> dict[str, float]:
    """Return the fraction that each table keeps at least, by name, where there is one.

    Raises:
        ValueError: a glob of ``plan.floor`` matches nothing that is pruned.
    """
    return {} if plan.floor is None else _by_name("floor", plan.floor, located, left_dense)


def _by_name(
    argument: str, given: Levels, located: Sequence[ShardedData], left_dense: Mapping[str, str]
) -> dict[str, float]:
    """The numbers of the tables that are pruned, from one for all or by glob: of several that
    match, the last."""
    pruned = [data for data in located if data.name not in left_dense]
    found: dict[str, float] = {}
    for pattern, value in given.items() if isinstance(given, Mapping) else (("*", given),):
        matching = [data for data in located if _matches(data, pattern)]
        if not any(data in pruned for data in matching):
            reasons = {data.name: left_dense[data.name] for data in matching}
            why = (
                f"matches tables that are left dense: {_listed(reasons)}"
                if reasons
                else "matches no table"
            )
            raise ValueError(
                f"Invalid {argument}: {pattern!r} {why}; pruned are"
                f" {[data.name for data in pruned]}."
            )
        found |= {data.name: value for data in matching if data in pruned}
    return found


def _matches(data: ShardedData, pattern: str) -> bool:
    return fnmatchcase(data.name, pattern) or (
        data.fqn is not None and fnmatchcase(data.fqn, pattern)
    )


def _blocks(data: ShardedData, block: tuple[int | str, int | str]) -> int:
    return grid_of(Rect(0, 0, *data.shape), resolve_block(data.name, block, data.shape)).blocks


def _capped(level: float, blocks: int) -> float:
    return (
        (blocks - 1) / blocks if level < 1 and blocks and round(level * blocks) == blocks else level
    )


def _listed(reasons: Mapping[str, str]) -> str:
    shown = [f"{name!r} ({reason})" for name, reason in list(reasons.items())[:20]]
    return ", ".join(shown) + (f", and {len(reasons) - 20} more" if len(reasons) > 20 else "")
