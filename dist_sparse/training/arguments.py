"""Arguments of :func:`~dist_sparse.sparsify`, checked and resolved in three parts: without a model
(:class:`SparsifyArgs`), by table of a model, and from a budget of bytes to levels.

Names are case-insensitive (``"l2"``, ``"cubic"``, ``"row"``), and an unknown one raises an error
that lists the known.
"""

import fnmatch
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

from torch import nn

from dist_sparse import checks, schedulers
from dist_sparse.enforcer.dense import same_storage
from dist_sparse.groups import cut
from dist_sparse.rotation.rotate import rotation_groups
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.importance import SCORES
from dist_sparse.sparsifiers.score import SCOPES
from dist_sparse.tables.shards import (
    ROW,
    Block,
    Located,
    ShardedData,
    basis_bytes,
    index_bytes,
    narrow_width,
    resolve_block,
)

Level = float | Literal["untouched", "auto"]
Levels = Level | Mapping[str, Level]
OptimizerState = Literal["keep", "reset"]
MakeScheduler = Callable[..., schedulers.ReadyDataScheduler]
Schedule = (
    Literal["constant", "cosine", "cubic", "exponential", "linear", "one_shot"] | MakeScheduler
)


def _one_shot(*args: Any, end: int, every: int, **kwargs: Any) -> schedulers.ReadyDataScheduler:
    # The class takes neither: its only update is at begin.
    return schedulers.OneShotDataScheduler(*args, **kwargs)


_SCHEDULES: dict[str, MakeScheduler] = {
    "constant": schedulers.ConstantDataScheduler,
    "cosine": schedulers.CosineDataScheduler,
    "cubic": schedulers.CubicDataScheduler,
    "exponential": schedulers.ExponentialDataScheduler,
    "linear": schedulers.LinearDataScheduler,
    "one_shot": _one_shot,
}


@dataclass(kw_only=True)
class SparsifyArgs:
    """Arguments of :func:`~dist_sparse.sparsify` beside model and optimizers, checked and resolved
    as far as they need no model.

    Attributes:
        level: ``"auto"`` has become the largest number below 1.
        budget: bytes as an int, or a fraction of them as a float.
        block: ``(rows, columns)``, text parsed; checked for each table later.
        every: at most ``end - begin``, so that ``level`` is reached in at least two mask updates.
        norm, optimizer_state: in the case that the parts use.
        score: None is ``"norm_accumulator"`` if its sums are known of all tables, else the norm.
        schedule: a callable that constructs the scheduler.
        auto: ``level`` was ``"auto"``.

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
    include: Any
    exclude: Any
    dense: Any
    schedule: Any
    optimizer_state: Any
    min_rows: int
    auto_step: bool
    rotate: Any
    decay: Any
    auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Python's ints, checked.
        vars(self).update(vars(Window(begin=self.begin, end=self.end, every=self.every)))
        if self.end is not None:
            # Otherwise a schedule shorter than `every` would have one update, at its first level.
            self.every = min(self.every, max(self.end - self.begin, 1))
        one = f"Invalid level={self.level!r}, budget={self.budget!r}: exactly one must be given."
        checks.refuse({one: (self.level is None) == (self.budget is None)})
        self.auto = self.level == "auto"
        if self.auto:
            # Up to one block of each table in equal steps. final_levels() caps the level where the
            # number of blocks is known; 1.0 would mean all blocks.
            self.level = math.nextafter(1.0, 0.0)
            self.schedule = self.schedule or "linear"
        for argument, check in _CHECKS.items():
            value = getattr(self, argument)
            # Arguments that may not be None are refused where they are used.
            if value is not None:
                setattr(self, argument, check(argument, value))
        self.min_rows = checks.integer("min_rows", self.min_rows, least=0)
        if checks.UNTOUCHED in _by_glob(self.level).values():
            self._take_untouched()
        self._refuse_conflicts()
        self._take_defaults()

    def _take_defaults(self) -> None:
        if self.schedule is None:
            # A curve that rises needs an end.
            self.schedule = _SCHEDULES["constant" if self.end is None else "cubic"]
        # "norm_accumulator", the default elsewhere, reads an optimizer's sums of whole rows, and
        # would ignore a norm.
        rows = (1, ROW), [1, ROW]
        if self.score is None and (self.norm is not None or self.block not in rows):
            self.score = "norm"
        for argument, default in {"norm": "L2", "rotate": [], "decay": 1.0}.items():
            if getattr(self, argument) is None:
                setattr(self, argument, default)

    def _refuse_conflicts(self) -> None:
        decay = f"Invalid decay={self.decay} with score={self.score!r}: 'frequency' alone counts"
        auto = "Invalid level='auto' with rotate or decay: guard() can't undo such updates."
        rotated = "Invalid scope='global' with rotate: rotated columns are removed by position."
        checks.refuse(
            {
                f"{decay} lookups.": self.decay is not None and self.score != "frequency",
                auto: self.auto and (self.rotate or self.decay not in (None, 1)),
                rotated: self.scope == "global" and self.rotate,
            }
        )

    def _take_untouched(self) -> None:
        """Set the defaults of the level ``"untouched"``: Adagrad's sums, and one mask update."""
        self.score = self.score or "accumulator"
        if self.schedule is None and self.end is not None:
            if self.begin:
                raise ValueError(
                    f"Invalid begin={self.begin} with level='untouched': there is one mask update,"
                    " at end; schedule='constant' updates masks from begin to end."
                )
            # Once, at the end: earlier, rows that are looked up later would be removed.
            self.begin = self.end
            self.every = 1
            self.schedule = _one_shot

    def facts(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the arguments by name, JSON-able, for ranks to compare.

        Args:
            names: the names of all tables.
        """
        # As text, which keeps the order of the globs: the last that matches counts.
        text = {"level": str(self.level), "floor": str(self.floor)}
        # A class can't be sent: its name is compared.
        schedule = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        rotate = rotation_groups(self.rotate, names)
        return {**vars(self), **text, "schedule": schedule, "rotate": rotate}


def _by_glob(given: Levels | Mapping[str, None] | None) -> Mapping[str, Any]:
    """Return a value for all tables as a mapping by globs; None is empty."""
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {"*": given}


def _levels(
    argument: str, given: object, check: Callable[[str, object], Any] = checks.scheduled_level
) -> Levels:
    if not isinstance(given, Mapping):
        level: Level = check(argument, given)
        return level
    if not given:
        raise ValueError(f"Invalid {argument}={given!r}: must have a name or glob.")
    # Globs are read in the order of the mapping: the last one that matches counts.
    return {str(name): check(f"{argument}[{name!r}]", level) for name, level in given.items()}


def _schedule(argument: str, given: Any) -> Any:
    # The class of a scheduler.
    if callable(given):
        return given
    more = " or the class of a ready scheduler"
    return _SCHEDULES[checks.choice(argument, given, _SCHEDULES, more)]


def _glob_list(argument: str, given: object) -> bool | list[str]:
    # Sorted: ranks are compared, and a set has another order on each. "dense" may be a bool.
    return given if isinstance(given, bool) else sorted(checks.name_list(argument, given))


# The check of each argument: takes its name and value, and returns the value resolved.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "level": _levels,
    "budget": lambda _, given: parse_budget(given),
    "scope": partial(checks.choice, known=SCOPES),
    "floor": partial(_levels, check=checks.level),
    "protect": _glob_list,
    "include": _glob_list,
    "exclude": _glob_list,
    "dense": _glob_list,
    "block": lambda _, given: checks.parse_block(given) if isinstance(given, str) else given,
    "norm": partial(checks.choice, known=("L1", "L2")),
    "score": partial(checks.choice, known=SCORES),
    "schedule": _schedule,
    "optimizer_state": partial(checks.choice, known=("keep", "reset")),
    "decay": checks.level,
}


def left_dense(
    model: nn.Module,
    modules: Iterable[nn.Module],
    located: Located,
    args: SparsifyArgs,
) -> dict[str, str]:
    """Return the tables that are not pruned, with the reason: protected ones, frozen ones, those
    with fewer than ``min_rows`` rows, position embeddings that no glob of ``include`` matches, and,
    if groups of tables are rotated, tables in no group: nothing could make them narrower.

    Raises:
        ValueError: none is pruned, a glob of ``args.protect`` matches no table, or a table to
            rotate is left dense.
    """
    reasons = _dense_reasons(model, modules, located, args)
    # "table" is each table that is pruned. Groups name tables, which a user expects to be rotated.
    if args.rotate and args.rotate != "table":
        rotated = set(chain(*rotation_groups(args.rotate, located)))
        if rotated & reasons.keys():
            raise ValueError(
                f"Invalid rotate={args.rotate}: these tables are left dense: {_listed(reasons)}."
            )
        others = [name for name in located if name not in rotated]
        reasons = dict.fromkeys(others, "in no group of rotate") | reasons
    if len(reasons) == len(located):
        raise ValueError(f"Nothing can be pruned, every table is left dense: {_listed(reasons)}.")
    return reasons


def _dense_reasons(
    model: nn.Module,
    modules: Iterable[nn.Module],
    located: Located,
    args: SparsifyArgs,
) -> dict[str, str]:
    """Return why tables stay dense, by name, rotation not considered."""
    guarded = protected(located, checks.name_list("protect", args.protect))
    included = dict.fromkeys(checks.name_list("include", args.include))
    # Shards are views of parameters. Whether a parameter is frozen, or an embedding, is known of
    # itself alone, and only the memory of a shard shows to which one it belongs.
    is_frozen = same_storage([p for p in model.parameters() if not p.requires_grad])
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    is_embedding = same_storage(list(nn.ModuleList(embeddings).parameters()))
    reasons = {}
    for name, data in located.items():
        # Empty for tables of sharded collections, which are embeddings, and trained.
        whole = [shard.tensor for shard in data.shards if data.sharding == "replicated"]
        # The others were selected by dense=: a small one, or any name, is no reason.
        is_table = not whole or any(map(is_embedding, whole))
        # If several rules hold, the last is reported.
        rules = {
            "position embeddings; include= prunes them": (
                is_table and _is_of_positions(data, included)
            ),
            f"{data.shape[0]} rows, fewer than min_rows={args.min_rows}": (
                is_table and data.shape[0] < args.min_rows
            ),
            "frozen (requires_grad=False)": any(map(is_frozen, whole)),
            "protected": name in guarded,
        }
        for reason, holds in rules.items():
            if holds:
                reasons[name] = reason
    return reasons


# Words in the names of position embeddings; `wpe` is GPT-2's.
_POSITIONS = {"pos", "posemb", "posembedding", "position", "positions", "positional", "wpe"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _is_of_positions(data: ShardedData, included: Mapping[str, None]) -> bool:
    """Whether a whole word of its names says so (``_pos_emb`` and ``PositionEmbedding`` do,
    ``composer`` does not), and no glob includes it.

    Every sequence reads all positions up to its length: each row that is removed is missed.
    """
    # Words are split at underscores, dots, digits and capitals.
    words = _WORD.findall(f"{data.name} {data.fqn}")
    return not (_POSITIONS.isdisjoint(map(str.lower, words)) or _matching(data, included))


def protected(located: Located, protect: Sequence[str]) -> set[str]:
    """Return the names of the tables that globs match.

    Raises:
        ValueError: a glob matches no table.
    """
    return set(by_table("protect", dict.fromkeys(protect), located, {}))


def by_table(
    argument: str,
    given: Levels | Mapping[str, None] | None,
    pruned: Located,
    left_dense: Mapping[str, str],
) -> dict[str, Any]:
    """Return the value of each pruned table that a glob matches, by name; the last match counts.

    Raises:
        ValueError: a glob matches no table that is pruned.
    """
    globs = _by_glob(given)
    matching = {name: _matching(data, globs) for name, data in pruned.items()}
    # A glob may match dense tables too, but not them alone: it would have no effect.
    unused = sorted(globs.keys() - set(chain(*matching.values())))
    if unused:
        known = f"{list(pruned)}; left dense: {_listed(left_dense)}"
        raise ValueError(f"Invalid {argument}: {unused} match none of {known}.")
    return {name: globs[matches[-1]] for name, matches in matching.items() if matches}


def _matching(data: ShardedData, globs: Mapping[str, Any]) -> list[str]:
    """Return the globs that match the name of a table, or its fully qualified one."""
    names = [data.name, str(data.fqn)]
    return [glob for glob in globs if fnmatch.filter(names, glob)]


def _listed(reasons: Mapping[str, str]) -> str:
    return cut(", ".join(f"{name!r} ({reason})" for name, reason in reasons.items())) or "none"


def final_levels(
    args: SparsifyArgs,
    located: Located,
    pruned: Located,
    left_dense: Mapping[str, str],
    floors: Mapping[str, float],
) -> dict[str, Level]:
    """Return the final level of each table that has one, by name. Levels below 1 are capped so that
    one block of the table stays.

    Raises:
        ValueError: a glob of ``args.level`` matches nothing that is pruned, or a budget can't be
            met.
    """
    if args.level is None:
        return dict(budget_levels(args, located, pruned, floors))
    finals = by_table("level", args.level, pruned, left_dense)
    for name, level in finals.items():
        data = pruned[name]
        blocks = data.grid(resolve_block(name, args.block, data.shape)).blocks
        # A level below 1 that rounds to all blocks leaves one.
        if level not in (1, checks.UNTOUCHED) and round(level * blocks) >= max(blocks, 1):
            finals[name] = (blocks - 1) / blocks
    return finals


# Turning a budget of bytes into levels.
#
# A budget counts the bytes that are served in the dtype of training, as
# `planning.candidates.Candidate` does: kept weights, the index that finds them, the bases that turn
# rotated tables back, and the tables that stay dense.


def parse_budget(budget: object) -> float:
    """Return ``budget``, a number of bytes, a fraction, or text such as ``"20%"``, as bytes or as a
    fraction.

    Raises:
        ValueError: it is neither.

    Example::

        >>> from dist_sparse.training.arguments import parse_budget
        >>> parse_budget("20%"), parse_budget(1 << 20)
        (0.2, 1048576)
    """
    value: Any = budget
    if percent := re.fullmatch(r"(\d+(?:\.\d*)?) ?%", str(budget), re.ASCII):
        value = float(percent[1]) / 100
    # The type tells: 1 is one byte, 1.0 all of them. type(), because a bool is an int too.
    most = {int: math.inf, float: 1.0}
    if type(value) not in most or not 0 <= value <= most[type(value)]:
        raise ValueError(
            f"Invalid {budget=}: must be bytes (an int >= 0), a fraction (a float up to 1.0), or"
            " text such as '20%', up to 100%."
        )
    parsed: float = value
    return parsed


def budget_levels(
    args: SparsifyArgs,
    located: Located,
    pruned: Located,
    floors: Mapping[str, float],
) -> dict[str, float]:
    """Return the lowest common level of the tables that are pruned, by name, each a whole number of
    blocks.

    Args:
        args: with a budget.
        located: all tables that the budget is for.
        pruned: those that lose blocks.
        floors: the least fraction that a table keeps, by name. Where blocks are removed wherever
            scores are smallest, a table's level need not keep it.

    Raises:
        ValueError: the budget is less than can be reached, or holds all tables as they are; blocks
            do not divide a table, or are finer than rows of a table that is not rotated, which
            saves no bytes; or tables of one group of ``rotate``, which are as wide as the widest,
            have different floors.
    """
    # Number of tables in the group of each rotated table.
    sizes: dict[str, int] = {}
    for group in rotation_groups(args.rotate, pruned):
        kept = {name: floors.get(name, 0.0) for name in group}
        if len(set(kept.values())) > 1:
            raise ValueError(
                "Invalid floor for a budget: tables rotated together keep as many columns, not"
                f" {kept}."
            )
        sizes |= dict.fromkeys(group, len(group))
    tables = []
    for name, data in pruned.items():
        shape = resolve_block(name, args.block, data.shape)
        floor = floors.get(name, 0.0)
        tables.append(_PrunedTable(data, shape, floor, sizes.get(name, 0)))
    total = dense_bytes(located.values())
    dense = total - dense_bytes(pruned.values())
    is_global = args.scope == "global"

    def served(step: int, is_global: bool) -> int:
        return dense + sum(
            table.served_bytes(table.removed_at(step, is_global)) for table in tables
        )

    room = args.budget if isinstance(args.budget, int) else round(args.budget * total)
    # What no scope can go below: floors hold over all tables together too.
    least = served(_STEPS, is_global=False)
    most = f"all tables take {total}, so that nothing would be removed."
    few = (
        f"{least} are the least. Tables that are left dense take {dense} of them, and of each other"
        " table its floor or one block stays."
    )
    of = f"Invalid budget of {room} bytes"
    checks.refuse({f"{of}: {most}": room >= total, f"{of}: {few}": room < least})
    # Bytes never grow with the level: a binary search finds the lowest level that fits.
    lowest = bisect_left(range(_STEPS), True, key=lambda step: served(step, is_global) <= room)
    return {t.data.name: t.removed_at(lowest, is_global) / max(t.blocks, 1) for t in tables}


# The search is over multiples of 1 / _STEPS: float64 holds all of them exactly.
_STEPS = 2**53


@dataclass(frozen=True)
class _PrunedTable:
    """A table that loses blocks.

    Args:
        floor: least fraction of blocks that it keeps.
        group: number of tables in its rotated group; 0 if it is not rotated.
    """

    data: ShardedData
    block: Block
    floor: float
    group: int

    def __post_init__(self) -> None:
        shape = self.data.shape
        block = self.block
        needs = f"Table {self.data.name!r}: a budget needs"
        checks.refuse(
            {
                f"{needs} blocks that divide {shape}; {block} do not.": (
                    shape[0] % block[0] or shape[1] % block[1]
                ),
                # An artifact stores zeros within kept rows; only compact() makes a rotated table
                # narrower.
                f"{needs} whole rows, or columns that are rotated; blocks of {block} are served as"
                " zeros, and save no bytes. Give a level instead.": block[1] < shape[1]
                and not self.group,
            }
        )

    @cached_property
    def blocks(self) -> int:
        return self.data.grid(self.block).blocks

    def removed_at(self, step: int, is_global: bool) -> int:
        """Return the number of blocks removed at the level ``step / _STEPS``."""
        removed = math.ceil(step / _STEPS * self.blocks)
        # At least one block stays: level 1 would lift that limit.
        stays = min(self.blocks, 1)
        # With scope="global" the sparsifier removes elsewhere the blocks that a floor keeps.
        if not is_global:
            # - 1e-9: products such as 0.1 * 30 are a rounding error above an integer.
            stays = max(stays, math.ceil(self.floor * self.blocks - 1e-9))
        return min(removed, self.blocks - stays)

    def served_bytes(self, removed: int) -> int:
        """Return the bytes of the table without so many blocks."""
        rows, columns = self.data.shape
        itemsize = self.data.dtype.itemsize
        kept = self.blocks - removed
        # Whole rows: the kept ones are stored in sequence, and an index finds them.
        if not self.group:
            return kept * math.prod(self.block) * itemsize + index_bytes(rows)
        width = narrow_width(kept * self.block[1], columns)
        # Only a table that is rotated alone is rotated back, by a basis that is served too.
        basis = basis_bytes(columns, width) if self.group == 1 else 0
        return rows * width * itemsize + basis


def dense_bytes(tables: Iterable[Any]) -> int:
    """Return the bytes of tables, anything with a shape and a dtype, as they are trained."""
    return sum(math.prod(table.shape) * table.dtype.itemsize for table in tables)
