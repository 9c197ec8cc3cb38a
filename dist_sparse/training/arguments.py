"""Arguments of :func:`~dist_sparse.sparsify`, checked and resolved, alone and for the tables of a
model.

Names are case-insensitive (``"l2"``, ``"cubic"``, ``"row"``), and an unknown one raises an error
that lists the known.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.enforcer.optimizers import same_storage
from dist_sparse.rotation.rotate import rotation_groups
from dist_sparse.schedulers import (
    ConstantDataScheduler,
    CosineDataScheduler,
    CubicDataScheduler,
    ExponentialDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
    ReadyDataScheduler,
)
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.importance import SCORES
from dist_sparse.sparsifiers.score import SCOPES
from dist_sparse.tables.shards import ROW, ShardedData
from dist_sparse.training.budget import blocks_of, budget_levels, parse_budget

Level: TypeAlias = float | Literal["untouched", "auto"]
Levels: TypeAlias = Level | Mapping[str, Level]
OptimizerState: TypeAlias = Literal["keep", "reset"]
AUTO: Final = "auto"
"""In the place of a level: as much as a guard accepts."""

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


@dataclass(kw_only=True)
class SparsifyArgs:
    """Arguments of :func:`~dist_sparse.sparsify` that need no model, checked and resolved.

    Attributes:
        budget: bytes, or a fraction of them as a float.
        block: ``(rows, columns)``, text parsed; checked for each table.
        every: cut to ``end - begin``, so that ``level`` is reached in at least two mask updates.
        norm, optimizer_state: as the parts spell them; ``norm`` None is "L2".
        score: None tries ``"norm_accumulator"`` first, and then the norm.
        schedule: makes the scheduler.
        decay: None is 1.
        auto: ``level`` was ``"auto"``, and is now the largest that leaves something.

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
    rotate: Any = None
    decay: Any = None
    auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (self.level is None) == (self.budget is None):
            raise ValueError(
                f"Invalid level={self.level!r}, budget={self.budget!r}: exactly one must be given."
            )
        window = Window(begin=self.begin, end=self.end, every=self.every)
        self.begin, self.end, self.every = window.begin, window.end, window.every
        if self.end is not None:
            # Otherwise a short schedule would have a single update, at its first level.
            self.every = min(self.every, max(self.end - self.begin, 1))
        self.auto = self.level == AUTO
        if self.auto:
            # Equal steps, until one block is left: capped where the blocks of a table are known.
            self.level = math.nextafter(1.0, 0.0)
            self.schedule = self.schedule or "linear"
        for argument, check in _CHECKS.items():
            value = getattr(self, argument)
            if value is not None or argument not in _OPTIONAL:
                setattr(self, argument, check(argument, value))
        levels = self.level.values() if isinstance(self.level, Mapping) else [self.level]
        if checks.UNTOUCHED in levels:
            self._take_untouched()
        self.protect = checks.name_list("protect", self.protect)
        self._take_schedule()
        self._refuse_conflicts()
        if self.score is None and (self.norm is not None or self.block != (1, ROW)):
            # "norm_accumulator" reads an optimizer's sums of whole rows, and has no norm.
            self.score = "norm"

    def _take_untouched(self) -> None:
        """Set the defaults of the level ``"untouched"``: Adagrad's sums, and one mask update."""
        self.score = self.score or "accumulator"
        if self.schedule is None and self.end is not None:
            if self.begin:
                raise ValueError(
                    f"Invalid begin={self.begin} with level='untouched': there is one mask update,"
                    " at end; schedule='constant' updates masks from begin to end."
                )
            # Before the end, rows that are yet to be looked up would be removed.
            self.begin, self.every, self.schedule = self.end, 1, "one_shot"

    def _take_schedule(self) -> None:
        if self.schedule is None:
            self.schedule = "constant" if self.end is None else "cubic"
        # A callable is a scheduler's class, and is taken as it is.
        if not callable(self.schedule):
            more = " or the class of a ready scheduler"
            self.schedule = _SCHEDULES[checks.choice("schedule", self.schedule, _SCHEDULES, more)]

    def _refuse_conflicts(self) -> None:
        # The other scores count nothing that could decay.
        if self.decay is not None and self.score != "frequency":
            raise ValueError(
                f"Invalid decay={self.decay} with score={self.score!r}: 'frequency' alone counts"
                " lookups."
            )
        if self.scope == "global" and self.rotate is not None:
            raise ValueError(
                "Invalid scope='global' with rotate: rotated columns are removed by position."
            )

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the arguments by name, as JSON can hold them, for ranks to compare.

        Args:
            names: of all tables.
        """
        # Mappings in order: of several globs that match, the last counts.
        found = {
            name: list(value.items()) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
        }
        # A set of globs has another order on each rank.
        found["protect"] = sorted(self.protect)
        # Ranks compare text: a class crosses no rank.
        found["schedule"] = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        found["rotate"] = self.rotate and rotation_groups(self.rotate, names)
        return found


def _levels(
    argument: str, given: object, check: Callable[[str, object], Any] = checks.scheduled_level
) -> Levels:
    if not isinstance(given, Mapping):
        level: Level = check(argument, given)
        return level
    if not given:
        raise ValueError(f"Invalid {argument}={given!r}: must have a name or glob.")
    # In the order of the mapping, which decides where several globs match.
    return {str(name): check(f"{argument}[{name!r}]", each) for name, each in given.items()}


def _choice(known: Iterable[str]) -> Callable[[str, object], str]:
    return partial(checks.choice, known=known)


def _block(argument: str, given: Any) -> Any:
    return checks.parse_block(given) if isinstance(given, str) else given


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "level": _levels,
    "budget": lambda _, given: parse_budget(given),
    "scope": _choice(SCOPES),
    "floor": partial(_levels, check=checks.level),
    "block": _block,
    "norm": _choice(("L1", "L2")),
    "score": _choice(SCORES),
    "optimizer_state": _choice(("keep", "reset")),
    "min_rows": partial(checks.integer, least=0),
    "decay": checks.level,
}
"""By argument the check of its value: takes both, and returns what the value means."""

_OPTIONAL: Final = {"level", "budget", "floor", "norm", "score", "decay"}
"""Arguments that may be None."""


def left_dense(
    model: nn.Module,
    modules: Iterable[nn.Module],
    located: Sequence[ShardedData],
    args: SparsifyArgs,
    include: Sequence[str] = (),
) -> dict[str, str]:
    """Return the tables that are not pruned, with the reason: protected ones, frozen ones, those
    with fewer than ``min_rows`` rows, position embeddings that no glob of ``include`` matches, and,
    if groups of tables are rotated, tables in no group: nothing could make them narrower.

    Raises:
        ValueError: none is pruned, a glob of ``args.protect`` matches no table, or a table to
            rotate is left dense.
    """
    names, rotate = [data.name for data in located], args.rotate
    reasons = _reasons(model, modules, located, args, include)
    # "table" means each table that is pruned; groups are names that a user expects to be rotated.
    if rotate not in (None, "table"):
        rotated = set(chain.from_iterable(rotation_groups(rotate, names)))
        refused = {name: reason for name, reason in reasons.items() if name in rotated}
        if refused:
            raise ValueError(f"Invalid {rotate=}: these tables are left dense: {_listed(refused)}.")
        others = [name for name in names if name not in rotated]
        reasons = dict.fromkeys(others, "in no group of rotate") | reasons
    if len(reasons) == len(located):
        raise ValueError(f"Nothing can be pruned, every table is left dense: {_listed(reasons)}.")
    # In the order of the model, for summaries.
    return {name: reasons[name] for name in names if name in reasons}


def _reasons(
    model: nn.Module,
    modules: Iterable[nn.Module],
    located: Sequence[ShardedData],
    args: SparsifyArgs,
    include: Sequence[str],
) -> dict[str, str]:
    """Return why tables are not pruned, by name, whatever is rotated."""
    guarded = protected(located, args.protect)
    tables = _embedding_weights(modules)
    # Shards are views of parameters: only their memory tells which one they belong to.
    frozen = same_storage([p.data for p in model.parameters() if not p.requires_grad])
    reasons = {}
    for data in located:
        whole = _whole(data)
        included = any(_matches(data, pattern) for pattern in include)
        if data.name in guarded:
            reasons[data.name] = "protected"
        elif any(map(frozen, whole)):
            reasons[data.name] = "frozen (requires_grad=False)"
        elif whole and not any(map(tables, whole)):
            pass  # a parameter that dense= selects, no table
        elif data.shape[0] < args.min_rows:
            reasons[data.name] = f"{data.shape[0]} rows, fewer than min_rows={args.min_rows}"
        elif not included and _is_of_positions(data):
            reasons[data.name] = "position embeddings; include= prunes them"
    return reasons


def _whole(data: ShardedData) -> list[Tensor]:
    # A shard's tensor is not the parameter that knows whether it is trained.
    return [shard.tensor for shard in data.shards] if data.sharding == "replicated" else []


def _embedding_weights(modules: Iterable[nn.Module]) -> Callable[[Tensor], list[int]]:
    """Return a function that lists torch's embedding modules whose weights a tensor shares."""
    weights: list[Tensor] = []
    for module in modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            weights += (weight.data for weight in module.parameters(recurse=False))
    return same_storage(weights)


_POSITIONS: Final = {"pos", "posemb", "posembedding", "position", "positions", "positional", "wpe"}
"""Words in the names of position embeddings; ``wpe`` is GPT-2's."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _is_of_positions(data: ShardedData) -> bool:
    """Whether a whole word of its names says so: ``_pos_emb`` and ``PositionEmbedding`` do,
    ``composer`` does not.

    Every sequence reads all positions up to its length, so that no row of such a table can go
    unnoticed.
    """
    # Whole words, split at underscores, dots, digits and humps.
    words = _WORD.findall(f"{data.name} {data.fqn or ''}")
    return not _POSITIONS.isdisjoint(word.lower() for word in words)


def protected(located: Sequence[ShardedData], protect: Sequence[str]) -> set[str]:
    """Return the names of the tables that globs match.

    Raises:
        ValueError: a glob matches no table.
    """
    found: set[str] = set()
    for pattern in protect:
        matching = {data.name for data in located if _matches(data, pattern)}
        if not matching:
            names = [data.name for data in located]
            raise ValueError(f"Invalid protect: {pattern!r} matches none of {names}.")
        found |= matching
    return found


def final_levels(
    args: SparsifyArgs,
    located: Sequence[ShardedData],
    left_dense: Mapping[str, str],
) -> Level | dict[str, Level]:
    """Return the final level by escaped name, or one number where all tables have the same.

    Levels below 1 are capped so that one block of each table stays.

    Raises:
        ValueError: a glob of ``args.level`` matches nothing that is pruned, or a budget can't be
            met.
    """
    if args.level is None:
        floors, together = table_floors(args, located, left_dense), args.scope == "global"
        budgeted = budget_levels(
            args.budget, located, left_dense, args.block, floors, together, args.rotate
        )
        return {glob.escape(name): level for name, level in budgeted.items()}
    given = _by_name("level", args.level, located, left_dense)
    # Each capped by its own number of blocks, so that equal levels may become unequal here.
    finals = {
        data.name: _capped(given[data.name], blocks_of(data, args.block))
        for data in located
        if data.name in given
    }
    # One number keeps the repr, the state and the facts short.
    if not isinstance(args.level, Mapping) and set(finals.values()) == {args.level}:
        return args.level
    return {glob.escape(name): level for name, level in finals.items()}


def _capped(level: Level, blocks: int) -> Level:
    """Return the level at which one block stays, where ``level`` is below 1 and would round to
    all."""
    if isinstance(level, str) or level == 1 or round(level * blocks) < max(blocks, 1):
        return level
    return (blocks - 1) / blocks


def table_floors(
    args: SparsifyArgs, located: Sequence[ShardedData], left_dense: Mapping[str, str]
) -> dict[str, float]:
    """Return the fraction that each table keeps at least, by name, where there is one.

    Raises:
        ValueError: a glob of ``args.floor`` matches nothing that is pruned.
    """
    return {} if args.floor is None else _by_name("floor", args.floor, located, left_dense)


def _by_name(
    argument: str, given: Levels, located: Sequence[ShardedData], left_dense: Mapping[str, str]
) -> dict[str, Any]:
    """Return the value of each pruned table: of several globs that match, the last counts."""
    found: dict[str, Any] = {}
    # A glob may match tables that stay dense, if it matches one that does not.
    pruned = [data for data in located if data.name not in left_dense]
    for pattern, value in given.items() if isinstance(given, Mapping) else [("*", given)]:
        matching = [data.name for data in pruned if _matches(data, pattern)]
        if not matching:
            names = [data.name for data in pruned]
            raise ValueError(
                f"Invalid {argument}: {pattern!r} matches no table that is pruned. Those are"
                f" {names}; left dense: {_listed(left_dense) or 'none'}."
            )
        found |= dict.fromkeys(matching, value)
    return found


def _matches(data: ShardedData, pattern: str) -> bool:
    # Plain tensors have no fully qualified name.
    names = [data.name] if data.fqn is None else [data.name, data.fqn]
    return any(fnmatchcase(name, pattern) for name in names)


def _listed(reasons: Mapping[str, str]) -> str:
    shown = [f"{name!r} ({reason})" for name, reason in list(reasons.items())[:20]]
    return ", ".join(shown + ["..."] * (len(reasons) > 20))
