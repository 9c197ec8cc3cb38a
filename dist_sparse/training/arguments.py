"""Arguments of :func:`~dist_sparse.sparsify`, checked and resolved in three parts: without a model
(:class:`SparsifyArgs`), by table of a model, and from a budget of bytes to levels.

Names are case-insensitive (``"l2"``, ``"cubic"``, ``"row"``), and an unknown one raises an error
that lists the known ones.
"""

import fnmatch
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from dist_sparse import checks, schedulers
from dist_sparse.messages import cut
from dist_sparse.records import GuardCheck
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.importance import SCORES, ImportanceSparsifier, Score
from dist_sparse.sparsifiers.score import SCOPES, Norm, Scope, blocks_kept
from dist_sparse.tables.bases import TableGroups, rotation_groups
from dist_sparse.tables.memory import same_storage
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

Level = float | Literal["untouched"]
Levels = Level | Mapping[str, Level]
StateChoice = Literal["keep", "reset"]
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


@runtime_checkable
class TableRotation(Protocol):
    """Rotates tables before each mask update, such as ``dist_sparse.extras.rotation.Rotation``."""

    @property
    def tables(self) -> TableGroups:
        """``"table"``, for each table that loses blocks, or groups of names. Other tables stay
        dense."""

    def rotate(self, sparsifier: BaseDataSparsifier) -> None:
        """Set the ``masks.rotation`` of a sparsifier whose enforcer is attached. Collective."""


class UpdateGuard:
    """The methods of a guard that a :class:`~dist_sparse.SparseTraining` calls, none of them
    collective. This class allows every mask update. ``dist_sparse.extras.guard.Guard`` makes them
    wait for validations, and undoes some.

    Attributes:
        validations: the validations so far and their outcomes.
    """

    def __init__(self) -> None:
        self.validations: list[GuardCheck] = []

    def refuse_attached(self) -> None:
        """Raise a ValueError if the training that it guards is attached."""

    def attach(
        self, sparsifier: ImportanceSparsifier, scheduler: schedulers.ReadyDataScheduler
    ) -> None:
        """Guard the mask updates of these two from now on, with a new state. Can't fail."""

    @property
    def owed(self) -> bool:
        """Whether a mask update that the schedule called for is still to come."""
        return False

    def before_step(self) -> None:
        """Called before a step of the sparsifier, whose ``enable_mask_update`` it may change."""

    def after_step(self) -> None:
        """Called after this step."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state: JSON-able."""
        return None

    def prepare_load(self, state: Any) -> Callable[[], None]:
        """Check a state of :meth:`state_dict`, and return the function that restores it.

        Raises:
            ValueError: it does not fit.
        """
        if state is not None:
            raise ValueError(
                "The state is of a training with a guard: pass one, as Advanced(guard=...) of"
                " sparsify()."
            )
        return lambda: None


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Arguments of :func:`~dist_sparse.sparsify` that few jobs need.

    Args:
        scope: ``"table"``, or ``"global"``: the total bytes of all levels are removed wherever
            scores are smallest; see :class:`~dist_sparse.extend.ScoreSparsifier`.
        floor: the least fraction of blocks that a table keeps, for all or by globs as in ``level``.
        protect: globs of tables that stay dense but count towards ``budget`` (tables in ``exclude``
            do not).
        norm: ``"L1"`` or ``"L2"``, the mean of ``|x|`` or of ``x * x`` by which blocks are
            compared; None is L2.
        score: ``"norm"``, ``"frequency"``, ``"accumulator"`` or ``"norm_accumulator"``, by which
            blocks are compared; see :class:`~dist_sparse.ImportanceSparsifier`. None is
            ``"norm_accumulator"`` for whole rows if Adagrad steps all tables and no ``norm`` is
            given, and ``"norm"`` otherwise; ``summary()`` names it.
        dense: globs of other parameters to register too, True for all.
        optimizer_state: ``"keep"`` or ``"reset"``, as in :class:`~dist_sparse.MaskEnforcer`.
        min_rows: tables with fewer rows stay dense.
        auto_step: call ``step()`` after each step of the (last) optimizer, for training loops that
            can't be edited. With gradient accumulation, steps are optimizer steps.
        rotate: with ``block="col"``, rotates tables before each mask update, so that the removed
            columns hold the least information: ``dist_sparse.extras.rotation.Rotation``.
        guard: makes mask updates wait for validations, and undoes one that costs quality:
            ``dist_sparse.extras.guard.Guard``.
        decay: with ``score="frequency"``, the factor by which counts of lookups shrink at each mask
            update, in [0, 1]; None is 1, so that all traffic counts equally.
        trust_record: with ``level="untouched"``, remove rows without a proof that they were never
            trained; see :func:`~dist_sparse.remove_untouched`.

    They are checked by :func:`~dist_sparse.sparsify`.

    Example::

        >>> import torch
        >>> import dist_sparse as ds
        >>> model = torch.nn.EmbeddingBag(10, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> small = ds.Advanced(min_rows=0, norm="L1")
        >>> sparse = ds.sparsify(model, optimizer, level=0.5, end=0, block="row", advanced=small)
        >>> sparse.step()
        >>> sparse.sparsity
        0.5
        >>> sparse.detach()
    """

    scope: Scope = "table"
    floor: Levels | None = None
    protect: str | list[str] | None = None
    norm: Norm | None = None
    score: Score | None = None
    dense: bool | str | list[str] | None = None
    optimizer_state: StateChoice = "keep"
    min_rows: int = 16
    auto_step: bool = False
    rotate: TableRotation | None = None
    guard: UpdateGuard | None = None
    decay: float | None = None
    trust_record: bool = False


@dataclass(kw_only=True)
class SparsifyArgs:
    """Arguments of :func:`~dist_sparse.sparsify` beside model and optimizers, checked and resolved
    as far as they need no model.

    Attributes:
        budget: bytes as an int, or a fraction of them as a float.
        block: ``(rows, columns)``, text parsed; checked for each table later.
        every: at most ``end - begin``, so that ``level`` is reached in at least two mask updates.
        schedule: a callable that constructs the scheduler.
        advanced: text in the case that the parts use; ``score`` None is ``"norm_accumulator"`` if
            its sums are known for all tables, else the norm.

    Raises:
        ValueError: an argument is invalid.
    """

    level: Levels | None
    budget: Any
    end: int | None
    begin: int
    every: int
    block: Any
    include: Any
    exclude: Any
    schedule: Any
    advanced: Any

    def __post_init__(self) -> None:
        # Python's ints, checked.
        vars(self).update(vars(Window(begin=self.begin, end=self.end, every=self.every)))
        if self.end is not None:
            # Otherwise a schedule shorter than `every` would have one update, at its first level.
            self.every = min(self.every, max(self.end - self.begin, 1))
        if (self.level is None) == (self.budget is None):
            raise ValueError(
                f"Invalid level={self.level!r}, budget={self.budget!r}: exactly one must be given."
            )
        if self.advanced is None:
            self.advanced = Advanced()
        if not isinstance(self.advanced, Advanced):
            raise ValueError(
                f"Invalid advanced={self.advanced!r}: must be a dist_sparse.Advanced(...)."
            )
        advanced = dict(vars(self.advanced))
        for argument, check in _CHECKS.items():
            given = advanced if argument in advanced else vars(self)
            # Arguments that may not be None are refused where they are used.
            if given[argument] is not None:
                given[argument] = check(argument, given[argument])
        self.advanced = Advanced(**advanced)
        if checks.UNTOUCHED in _by_glob(self.level).values():
            self._take_untouched()
        self._refuse_conflicts()
        self._take_defaults()

    @property
    def rotated(self) -> TableGroups:
        """The tables that are rotated, as :func:`~dist_sparse.tables.bases.rotation_groups` takes
        them."""
        return [] if self.advanced.rotate is None else self.advanced.rotate.tables

    def _take_defaults(self) -> None:
        if self.schedule is None:
            # A curve that rises needs an end.
            self.schedule = _SCHEDULES["constant" if self.end is None else "cubic"]
        # "norm_accumulator", the default elsewhere, reads an optimizer's sums of whole rows, and
        # would ignore a norm.
        rows = (1, ROW), [1, ROW]
        given = self.advanced
        if given.score is None and (given.norm is not None or self.block not in rows):
            given = replace(given, score="norm")
        decay = 1.0 if given.decay is None else given.decay
        self.advanced = replace(given, norm=given.norm or "L2", decay=decay)

    def _refuse_conflicts(self) -> None:
        given = self.advanced
        if given.decay is not None and given.score != "frequency":
            raise ValueError(
                f"Invalid decay={given.decay} with score={given.score!r}: 'frequency' alone counts"
                " lookups."
            )
        if given.guard is not None:
            given.guard.refuse_attached()
            if given.rotate is not None or given.decay not in (None, 1):
                raise ValueError(
                    "Invalid guard with rotate or decay: no guard can undo such updates."
                )
        if given.scope == "global" and given.rotate is not None:
            raise ValueError(
                "Invalid scope='global' with rotate: rotated columns are removed by position."
            )

    def _take_untouched(self) -> None:
        """Set the defaults of the level ``"untouched"``: Adagrad's sums, and one mask update."""
        if self.advanced.score is None:
            self.advanced = replace(self.advanced, score="accumulator")
        if self.schedule is None and self.end is not None:
            if self.begin:
                raise ValueError(
                    f"Invalid begin={self.begin} with level='untouched': there is one mask update,"
                    " at end; schedule='constant' updates masks from begin to end."
                )
            # Once, at the end: earlier, it would remove rows that are looked up later.
            self.begin = self.end
            self.every = 1
            self.schedule = _one_shot

    def facts(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the arguments by name, JSON-able, for ranks to compare.

        Args:
            names: the names of all tables.
        """
        facts = {**vars(self), **vars(self.advanced)}
        del facts["advanced"]
        # As text, which keeps the order of the globs: the last that matches counts.
        facts |= {"level": str(self.level), "floor": str(self.advanced.floor)}
        # A class can't be sent: its name is compared.
        facts["schedule"] = getattr(self.schedule, "__name__", type(self.schedule).__name__)
        facts["rotate"] = rotation_groups(self.rotated, names)
        facts["guard"] = self.advanced.guard is not None
        return facts


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


def _of_type(argument: str, given: object, kind: type, example: str) -> object:
    if not isinstance(given, kind):
        raise ValueError(f"Invalid {argument}={given!r}: must be such as {example}.")
    return given


# The check of each argument: takes its name and value, and returns the value resolved.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "level": _levels,
    "budget": lambda _, given: checks.parse_budget(given),
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
    "min_rows": partial(checks.integer, least=0),
    "rotate": partial(
        _of_type, kind=TableRotation, example="dist_sparse.extras.rotation.Rotation('table')"
    ),
    "guard": partial(_of_type, kind=UpdateGuard, example="dist_sparse.extras.guard.Guard()"),
    "decay": checks.level,
    "trust_record": checks.flag,
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
        ValueError: none is pruned, a glob of ``protect`` matches no table, or a table to rotate is
            left dense.
    """
    reasons = _dense_reasons(model, modules, located, args)
    # "table" is each table that is pruned. Groups name tables, which a user expects to be rotated.
    if args.advanced.rotate is not None and args.rotated != "table":
        rotated = set(chain(*rotation_groups(args.rotated, located)))
        if rotated & reasons.keys():
            raise ValueError(
                f"Invalid rotate={args.rotated}: these tables are left dense: {_listed(reasons)}."
            )
        others = [name for name in located if name not in rotated]
        reasons = dict.fromkeys(others, "in no group of rotate") | reasons
    if len(reasons) == len(located):
        raise ValueError(f"Nothing can be removed, every table is left dense: {_listed(reasons)}.")
    return reasons


def _dense_reasons(
    model: nn.Module,
    modules: Iterable[nn.Module],
    located: Located,
    args: SparsifyArgs,
) -> dict[str, str]:
    """Return why tables stay dense, by name, rotation not considered."""
    guarded = protected(located, checks.name_list("protect", args.advanced.protect))
    included = dict.fromkeys(checks.name_list("include", args.include))
    # Shards are views of parameters. Whether a parameter is frozen, or an embedding, is known of
    # itself alone, and only the memory of a shard shows to which one it belongs.
    is_frozen = same_storage([p for p in model.parameters() if not p.requires_grad])
    is_embedding = same_storage(_embedding_weights(modules))
    reasons = {}
    for name, data in located.items():
        # Empty for tables of sharded collections, which are embeddings, and trained.
        whole = [shard.tensor for shard in data.shards if data.sharding == "replicated"]
        # The others were selected by dense=: neither a small size nor a name is a reason to leave
        # them dense.
        is_table = not whole or any(map(is_embedding, whole))
        if name in guarded:
            reasons[name] = "protected"
        elif any(map(is_frozen, whole)):
            reasons[name] = "frozen (requires_grad=False)"
        elif is_table:
            reason = _table_reason(data, included, args.advanced.min_rows)
            if reason:
                reasons[name] = reason
    return reasons


def _embedding_weights(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return list(nn.ModuleList(embeddings).parameters())


def _table_reason(data: ShardedData, included: Mapping[str, None], min_rows: int) -> str | None:
    """Return why a table that could be pruned stays dense, None if it is pruned."""
    if data.shape[0] < min_rows:
        return f"{data.shape[0]} rows, fewer than min_rows={min_rows}"
    if _is_of_positions(data, included):
        return "position embeddings; include= prunes them"
    return None


# Words in the names of position embeddings; `wpe` is GPT-2's.
_POSITIONS = {"pos", "posemb", "posembedding", "position", "positions", "positional", "wpe"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _is_of_positions(data: ShardedData, included: Mapping[str, None]) -> bool:
    """Whether a whole word of its names says so (as in ``_pos_emb`` and ``PositionEmbedding``, but
    not in ``composer``), and no glob includes it.

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
        ValueError: a glob matches none of the pruned tables.
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


def budget_bytes(budget: float, total: int) -> int:
    """Return the bytes of a budget for tables that take ``total``; a fraction, which
    :func:`~dist_sparse.checks.parse_budget` returns as a float, is rounded down."""
    return budget if isinstance(budget, int) else math.floor(budget * total)


def fewest_removed(
    blocks: Mapping[str, int], most: Mapping[str, int], fits: Callable[[dict[str, int]], bool]
) -> dict[str, int]:
    """Return the number of blocks that each table loses at the lowest common level that fits a
    budget, or at the highest level if none fits.

    A level removes ``level * blocks``, rounded up: each table loses at least one block.

    Args:
        blocks: number of blocks, by table.
        most: the most that a table may lose.
        fits: whether tables that lose this many blocks are within the budget. If they are, tables
            that lose more are too.
    """

    def removed(step: int) -> dict[str, int]:
        level = step / _STEPS
        return {name: min(math.ceil(level * blocks[name]), most[name]) for name in blocks}

    # Level 0 is left out: without an index, all blocks may take less than all but one.
    steps = range(1, _STEPS)
    return removed(1 + bisect_left(steps, True, key=lambda step: fits(removed(step))))


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
        pruned: the tables that lose blocks.
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
    for group in rotation_groups(args.rotated, pruned):
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
    is_global = args.advanced.scope == "global"

    def served(removed: Mapping[str, int]) -> int:
        return dense + sum(table.served_bytes(removed[table.data.name]) for table in tables)

    room = budget_bytes(args.budget, total)
    # What no scope can go below: floors hold over all tables together too.
    least = served({table.data.name: table.most_removed(is_global=False) for table in tables})
    if room >= total:
        raise ValueError(
            f"Invalid budget of {room} bytes: all tables take {total}, so that nothing would be"
            " removed."
        )
    if room < least:
        raise ValueError(
            f"Invalid budget of {room} bytes: {least} are the least. Tables that are left dense"
            f" take {dense} of them, and of each other table its floor or one block stays."
        )
    blocks = {table.data.name: table.blocks for table in tables}
    limits = {table.data.name: table.most_removed(is_global) for table in tables}
    removed = fewest_removed(blocks, limits, lambda removed: served(removed) <= room)
    return {name: removed[name] / max(blocks[name], 1) for name in blocks}


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
        if shape[0] % block[0] or shape[1] % block[1]:
            raise ValueError(f"{needs} blocks that divide {shape}; {block} do not.")
        # An artifact stores zeros within kept rows; only compact() makes a rotated table narrower.
        if block[1] < shape[1] and not self.group:
            raise ValueError(
                f"{needs} whole rows, or columns that are rotated; blocks of {block} are served as"
                " zeros, and save no bytes. Give a level instead."
            )

    @cached_property
    def blocks(self) -> int:
        return self.data.grid(self.block).blocks

    def most_removed(self, is_global: bool) -> int:
        """Return the most blocks that the table may lose."""
        # At least one block stays: level 1 would lift that limit.
        stays = min(self.blocks, 1)
        # With scope="global" the sparsifier removes elsewhere the blocks that a floor keeps.
        if not is_global:
            stays = max(stays, blocks_kept(self.floor, self.blocks))
        return self.blocks - stays

    def served_bytes(self, removed: int) -> int:
        """Return the bytes of the table without this many blocks."""
        rows, columns = self.data.shape
        itemsize = self.data.dtype.itemsize
        kept = self.blocks - removed
        # Whole rows: the kept ones are stored in sequence, and an index finds them.
        if not self.group:
            index = index_bytes(rows, kept * self.block[0])
            return kept * math.prod(self.block) * itemsize + index
        width = narrow_width(kept * self.block[1], columns)
        # Only a table that is rotated alone is rotated back, by a basis that is served too.
        basis = basis_bytes(columns, width) if self.group == 1 else 0
        return rows * width * itemsize + basis


def dense_bytes(tables: Iterable[Any]) -> int:
    """Return the bytes of tables, anything with a shape and a dtype, as they are trained."""
    return sum(math.prod(table.shape) * table.dtype.itemsize for table in tables)
