"""Sparsifiers that remove the blocks with the smallest scores.

A subclass defines how much an element matters (:meth:`ScoreSparsifier.score`). The base class
computes block means and selects exactly the k smallest over all ranks, with ties, edge blocks and
single elements of blocks. Plain data runs the same code in a group of one rank.
"""

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dist_sparse.checks import UNTOUCHED, integer, number, parse_block
from dist_sparse.groups import Facts, Group
from dist_sparse.masking.block_masks import (
    NewMasks,
    ScoredTable,
    find_cuts,
    masks_of,
    new_masks,
    score_tables,
    select,
)
from dist_sparse.masking.goal import Goal
from dist_sparse.masking.kept_scores import Caching, RowMeasure, ScoreCache
from dist_sparse.masking.scores import Measure, worth_keeping
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.dense_store import Configs
from dist_sparse.sparsifiers.masks import NO_ENFORCER
from dist_sparse.tables.shards import (
    COL,
    Block,
    Located,
    Rect,
    Shard,
    ShardedData,
    check_cached,
    matrix_shape,
    resolve_block,
    whole,
)

# sparsify() takes text such as "1x4" too, but no type tells it from a typo.
BlockShape = tuple[int | str, int | str] | Literal["row", "col"]
Norm = Literal["L1", "L2", "l1", "l2"]
Scope = Literal["table", "global"]
SCOPES = get_args(Scope)

# How elements of a shard are scored, and a version of everything else that their scores depend on:
# if it differs from the last time, kept scores are out of date.
RowScoring = tuple[RowMeasure, object]


class ScoreSparsifier(BaseDataSparsifier):
    """Removes the blocks with the smallest mean score. Subclasses define :meth:`score`, nothing
    else.

    Args:
        data_list: as in :class:`BaseDataSparsifier`.
        sparsity_level: fraction of blocks to select, 0 to 1 (clipped): exactly
            ``round(sparsity_level * blocks)`` of them, half to even.
        sparse_block_shape: ``(rows, columns)`` of a block; ``(1, ROW)`` is whole rows, ``(COL, 1)``
            whole columns. ``"1x4"``, ``"row"`` and ``"col"`` are accepted too.
        zeros_per_block: elements to remove in a selected block, those with the smallest scores;
            None is the whole block.
        **defaults: further configuration that :meth:`score` receives.

    Attributes:
        scope: ``"table"`` removes ``sparsity_level`` of each table; ``"global"`` removes the same
            total bytes over all tables of a model, wherever scores are smallest, exactly and under
            any sharding. Blocks are compared by their mean score, so by score per byte, and must
            divide the tables. Of equal scores, the table whose name sorts first loses its blocks
            first. A table at level 0 loses nothing, and below level 1 at least one block of each
            table stays. Settable, with the same value on every rank.
        floors: by registered name, the smallest fraction of blocks that is kept, whatever the
            level.
        full_every: with a :class:`~dist_sparse.MaskEnforcer`, scores of blocks that are one row
            high and at least 32 columns wide are kept between mask updates, 4 bytes per block, in
            large tables of a fused optimizer on a CPU. Only rows that training has written are
            scored again; at least one of ``full_every`` updates scores all rows. 1 keeps no scores.
        measure: how elements are scored: ``"L1"`` (``|x|``) or ``"L2"`` (``x * x``), which are
            fast, or None for :meth:`score`. A class that defines ``score`` without ``measure`` gets
            None.

    Example::

        >>> import torch
        >>> from dist_sparse.extend import ScoreSparsifier
        >>> class LeastRead(ScoreSparsifier):
        ...     reads = torch.tensor([5, 0, 7, 1])
        ...     def score(self, name, data, *, offset, **config):
        ...         first = offset[0]
        ...         return self.reads[first : first + len(data), None].expand(data.shape).float()
        >>> sparsifier = LeastRead(sparsity_level=0.5, sparse_block_shape="row")
        >>> names = sparsifier.add_model(torch.nn.EmbeddingBag(4, 8))
        >>> sparsifier.step()
        >>> sparsifier.full_mask("weight")[:, 0]
        tensor([1, 0, 1, 0], dtype=torch.int8)
    """

    scope: Scope = "table"
    floors: Mapping[str, float] = MappingProxyType({})
    full_every: int = 100

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: BlockShape | str = (1, 4),
        zeros_per_block: int | None = None,
        **defaults: Any,
    ) -> None:
        sparse_block_shape = _shape_of(sparse_block_shape)
        # The score caches of shards whose writes an enforcer tracks.
        self._caches: dict[tuple[str, Rect], ScoreCache] = {}
        self._whole_blocks = zeros_per_block is None
        # A number in the configuration, as in the ancestor's.
        if zeros_per_block is None:
            zeros_per_block = _area_of(sparse_block_shape)
        super().__init__(
            data_list,
            sparsity_level=sparsity_level,
            sparse_block_shape=sparse_block_shape,
            zeros_per_block=zeros_per_block,
            **defaults,
        )

    @abc.abstractmethod
    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """Return how much each element matters: finite, not negative, any floating dtype, the shape
        of ``data``.

        Args:
            name: of the table.
            data: a few whole rows of a local shard, ``(rows, columns)``. A score must not depend on
                how rows are grouped into calls.
            offset: the global (row, column) of ``data[0, 0]``.
            **config: the table's configuration at this moment.
        """

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        """Set ``get_mask(name)`` to a new int8 mask of ``data``.

        Raises:
            NotImplementedError: integer data.
            ValueError: more than two real dimensions, non-finite scores, or an impossible config.
        """
        if not data.dtype.is_floating_point:
            raise NotImplementedError(
                f"Data {name!r} of dtype {data.dtype}: only real floating dtypes can be scored."
            )
        # 2-D data as it is, other data without singleton dimensions; one dimension is a row.
        matrix = data.detach() if data.dim() == 2 else data.detach().squeeze()
        if matrix.dim() > 2:
            raise ValueError(
                f"Data {name!r} of shape {tuple(data.shape)}: only supports 2-D at the moment."
            )
        matrix = matrix.reshape(matrix_shape(matrix.shape))
        table = whole(name, matrix, sharding="plain")
        [made] = new_masks(score_tables([self._goal(table, config)]), Group())
        # Data without elements has no shard, and so no new mask. Its mask gets the same dtype.
        dense = torch.ones(data.shape, dtype=torch.int8, device=data.device)
        for new in made.masks:
            dense = new.mask.dense().view(data.shape)
        self.get_mask(name).data = dense

    @property
    def measure(self) -> Literal["L1", "L2"] | None:
        return None

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        super().note(facts, located)
        facts["sparsifier.measure"] = self.measure
        facts["sparsifier.scope"] = self.scope
        facts["sparsifier.floors"] = dict(self.floors)

    def score_tables(self, located: Located, configs: Configs) -> dict[str, ScoredTable]:
        """Score this rank's shards: the local half of a mask update."""
        goals = {name: self._goal(data, configs[name]) for name, data in located.items()}
        self._check_pool(goals)
        goals = self._with_caches(goals)
        return dict(zip(goals, score_tables(goals.values()), strict=True))

    def _with_caches(self, goals: Mapping[str, Goal]) -> dict[str, Goal]:
        """Return the goals of a mask update, with kept scores where they can be used."""
        if integer("full_every", self.full_every, least=1) == 1:
            return dict(goals)
        # Starts empty: what is not carried over below is forgotten. Without an enforcer, that is
        # everything.
        before = self._caches
        self._caches = {}
        # Of shards whose every write is tracked.
        written = self.masks.enforcer.written()
        kept = dict(goals)
        for name, goal in goals.items():
            # A mask by element reads the weights of every row anyway. Replicas must score alike,
            # whatever their ranks have kept.
            if goal.by_element or goal.data.replicated:
                continue
            caches: dict[Rect, Caching] = {}
            masks = {mask.rect: mask for mask in self.masks.tables.masks(name)}
            for shard in goal.data.shards:
                rect = shard.rect
                tracked = written.get(shard.tensor)
                if tracked is None or not worth_keeping(rect, goal.block):
                    continue
                scoring = self.row_measure(name, shard)
                if scoring is None:
                    continue
                scores = before.get((name, rect), ScoreCache(tracked))
                if scores.written is not tracked:
                    # Rows written before this tracking began are unknown: the kept scores are void.
                    scores = ScoreCache(tracked)
                self._caches[name, rect] = scores
                caches[rect] = Caching(
                    scores, *scoring, goal.data.shape, goal.block, masks, self.full_every
                )
            kept[name] = replace(goal, caches=caches)
        return kept

    def row_measure(self, name: str, shard: Shard) -> RowScoring | None:
        """Return how any selection of a shard's rows is scored, and the version of these scores.
        None if only whole shards can be scored: then no scores are kept."""
        return None if self.measure is None else (self.measure, self.measure)

    def select(self, scored: Mapping[str, ScoredTable], names: list[str], group: Group) -> None:
        """See :meth:`MaskUpdater.select`."""
        select([scored[name] for name in names], group, pooled=self.scope == "global")

    def selected_masks(self, scored: Mapping[str, ScoredTable]) -> dict[str, NewMasks]:
        """See :meth:`MaskUpdater.selected_masks`."""
        return dict(zip(scored, masks_of([*scored.values()]), strict=True))

    def audit(self) -> dict[str, str]:
        """Like :meth:`BaseDataSparsifier.audit`; also compare the kept scores with fresh scores of
        all rows, bit for bit.

        Raises:
            ValueError: on every rank; names table and row, even if a weight was written in a way
                that torch does not count, such as through ``.data``.
        """
        if self.masks.enforcer is not NO_ENFORCER:
            with self.masks.tables.agreeing("audit()"):
                self.masks.enforcer.settle()
                located = self.masks.tables.locate()
                kept = self.score_tables(located, self.data_groups).values()
                fresh = score_tables(replace(table.goal, caches={}) for table in kept)
                for one, other in zip(kept, fresh, strict=True):
                    _check_kept(one, other)
        return super().audit()

    def apply_masks(self) -> None:
        # Users call it after writes that torch does not count, which no tracking sees.
        self._caches = {}
        super().apply_masks()

    def check_config(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        """Return what one bit of a new table's masks stands for: a sparse block, or an element.

        Raises:
            ValueError: no mask update could follow the configuration, or ``update_mask`` is a
                user's own.
        """
        # Plain data may have a user's own update_mask, as in the ancestor.
        if type(self).update_mask is not ScoreSparsifier.update_mask:
            raise ValueError(
                f"{type(self).__name__} defines update_mask() below ScoreSparsifier, which would"
                " choose blocks of each shard by itself: override score(), or inherit"
                " BaseDataSparsifier."
            )
        goal = self._goal(data, config)
        # Raises for blocks that lose only some elements and are cut by a border.
        find_cuts(goal)
        return check_cached(data, (1, 1) if goal.by_element else goal.block)

    def check_levels(self, levels: Mapping[str, float | str], located: Located) -> None:
        """Refuse levels, by the name of each sharded table, that no mask update could reach. Local.

        Args:
            levels: of the tables.
            located: the tables as they are stored now.

        Raises:
            ValueError: with the scope ``"global"``; names what is in the way.
        """
        goals = {}
        for name, level in levels.items():
            config = {**self.data_groups[name], "sparsity_level": level}
            goals[name] = self._goal(located[name], config)
        self._check_pool(goals)

    def _check_pool(self, goals: Mapping[str, Goal]) -> None:
        """Refuse tables that can't be selected from together. The same on every rank."""
        if self.scope != "global":
            return
        groups = list(self.masks.tables.groups.values())
        # Count bytes, because tables differ in width and dtype.
        need = most = 0
        for goal in goals.values():
            need += goal.k * goal.bytes_per_block
            most += goal.max_blocks * goal.bytes_per_block
        if len(groups) > 1:
            raise ValueError(
                f"scope='global' needs tables over the same ranks; these are apart: {groups}."
            )
        if need > most:
            raise ValueError(
                f"The levels remove {need} bytes, but at most {most} may be removed: each table"
                f" keeps one block, and its floor in {dict(self.floors)}."
            )
        if self.masks.rotation:
            raise ValueError(
                "scope='global' can't compare rotated columns, which are removed by position."
            )

    def _goal(self, data: ShardedData, config: Mapping[str, Any]) -> Goal:
        block = resolve_block(data.name, config["sparse_block_shape"], data.shape)
        whole_columns = config["sparse_block_shape"][0] == COL
        area = math.prod(block)
        zeros = config["zeros_per_block"]
        least = area if whole_columns else 0
        if zeros is None:
            zeros = area
        zeros = integer("zeros_per_block", zeros, least=least, most=area, of=data.name)
        level = config["sparsity_level"]
        only_zeros = level == UNTOUCHED
        if only_zeros:
            self._check_untouched(data, block)
            # No limit: the selection counts the blocks that score 0.
            level = 1.0
        level = min(max(number("sparsity_level", level, of=data.name), 0.0), 1.0)
        if zeros == 0:
            # Nothing is removed from a selected block.
            level = 0.0
        blocks = data.grid(block).blocks
        k = round(level * blocks)
        measure = self.element_measure(data.name, config)
        rotation = self.masks.rotation
        if rotation is not None and data.name in chain(*rotation.groups):
            # A rotation sorts the columns by norm, so the last ones hold the least.
            measure = partial(_places, data.shape[1])
        floor = number("floor", self.floors.get(data.name, 0.0), least=0, most=1, of=data.name)
        most = blocks - blocks_kept(floor, blocks)
        # A user may have assigned it.
        if self.scope not in SCOPES:
            raise ValueError(f"Invalid scope={self.scope!r}: must be one of {SCOPES}.")
        is_pooled = self.scope == "global"
        if is_pooled:
            _check_pooled(data, block)
            # Below level 1, at least one block stays, however small its scores; a level that rounds
            # to all blocks asks for one less.
            if level < 1:
                stays = max(blocks - 1, 0)
                k = min(k, stays)
                most = min(most, stays)
            # A table at level 0 stays dense.
            if level == 0:
                most = 0
        return Goal(
            data=data,
            block=block,
            # In a pool, ``k`` is an average over the tables, and ``max_blocks`` limits this one.
            k=k if is_pooled else min(k, most),
            max_blocks=most,
            zeros_per_block=max(zeros, 1),
            measure=measure,
            whole_columns=whole_columns,
            only_zeros=only_zeros,
        )

    def _check_untouched(self, data: ShardedData, block: Block) -> None:
        """Refuse the level ``"untouched"`` where no record tells which rows were looked up.

        Raises:
            ValueError: names the table and the rule.
        """
        raise ValueError(
            f"Table {data.name!r}: the level 'untouched' needs an ImportanceSparsifier with"
            " score='accumulator' or 'frequency'."
        )

    def element_measure(self, name: str, config: Mapping[str, Any]) -> Measure:
        """Return how the elements of a table are scored: by :attr:`measure`, or by
        :meth:`score`."""
        return self.measure or (
            lambda data, offset: self.score(name, data, offset=offset, **config)
        )

    def _overlaid(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``config``, changed to what the caller passed. Whole blocks stay whole
        if the caller passes another block without ``zeros_per_block``."""
        # Shapes as text are parsed here, since add_data() and add_model() both call this.
        group = super()._overlaid(config, given)
        group["sparse_block_shape"] = _shape_of(group["sparse_block_shape"])
        whole = config["zeros_per_block"] == _area_of(config["sparse_block_shape"])
        if whole and self._whole_blocks and "zeros_per_block" not in given:
            group["zeros_per_block"] = _area_of(group["sparse_block_shape"])
        return group


class DataNormSparsifier(ScoreSparsifier):
    """Removes the blocks whose elements are smallest, by the mean of ``|x|`` (L1) or of ``x * x``
    (L2) over the block.

    The masks of a sharded table are the same, bit for bit, for every sharding and any number of
    ranks. Among equal norms the block with the smaller global row-major index is removed first.

    Args:
        data_list: ``(name, data)`` pairs to register at once.
        sparsity_level: fraction of blocks to hit: exactly ``round(sparsity_level * blocks)``, half
            to even.
        sparse_block_shape: ``(rows, columns)``, the grid anchored at the tensor's corner;
            ``(1, ROW)`` is whole rows, ``(COL, 1)`` whole columns. ``"1x4"``, ``"row"`` and
            ``"col"`` are accepted too.
        zeros_per_block: elements to remove in a hit block, the smallest first; None is the whole
            block.
        norm: ``"L1"`` or ``"L2"``, in either case.

    All but ``norm`` can be overridden by name, in ``add_data`` or ``add_model``.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> weight = torch.tensor([[1.0, -1.0], [0.1, 0.2], [3.0, 0.0], [0.0, 0.3]])
        >>> sparsifier = DataNormSparsifier(
        ...     [("user", weight)], 0.5, sparse_block_shape="row", norm="L2"
        ... )
        >>> sparsifier.step()
        >>> sparsifier.get_data("user", return_original=False)
        tensor([[ 1., -1.],
                [ 0.,  0.],
                [ 3.,  0.],
                [ 0.,  0.]])
    """

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: BlockShape | str = (1, 4),
        zeros_per_block: int | None = None,
        norm: Norm = "L1",
    ) -> None:
        if norm not in ("L1", "L2", "l1", "l2"):
            raise AssertionError(f"only L1 and L2 norm supported at the moment, got {norm!r}")
        self.norm: Any = norm.upper()
        super().__init__(data_list, sparsity_level, sparse_block_shape, zeros_per_block)

    @property
    def measure(self) -> Literal["L1", "L2"] | None:
        # A subclass with its own score() must not be scored by the fast measure of this class.
        return self.norm if type(self).score is DataNormSparsifier.score else None

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """Return ``|x|`` or ``x * x``, float64."""
        # In float64, squares of bfloat16 and float16 neither overflow nor round.
        exact = data.double()
        return exact.abs() if self.norm == "L1" else exact * exact


def _check_kept(table: ScoredTable, fresh: ScoredTable) -> None:
    """Compare kept scores of a table with fresh scores of all rows.

    Raises:
        ValueError: they differ; names table and row.
    """
    for rect in fresh.segments:
        if (kept := table.score_cache(rect)) is None:
            continue
        # Bit for bit: scores are float32 as int32.
        expected = torch.cat([bits for _, bits in fresh.segments[rect].chunks()])
        wrong = (kept.scores.bits.view(-1) != expected).nonzero()
        if len(wrong):
            row = rect.row + int(wrong[0]) // kept.scores.bits.shape[1]
            raise ValueError(
                f"Table {table.goal.data.name!r}: {len(wrong)} kept scores differ from the scores"
                f" of the weights, first in row {row}: torch missed a write. apply_masks()"
                " scores every row again."
            )


def _places(columns: int, data: Tensor, offset: tuple[int, int]) -> Tensor:
    """Score the columns of a rotated table by their position, all different, so that the last ones
    are removed first."""
    # The first column of the table scores highest, ``columns``; the last one scores 1.
    first = columns - offset[1]
    return torch.arange(first, first - data.shape[1], -1, device=data.device).expand(data.shape)


def _check_pooled(data: ShardedData, block: Block) -> None:
    """Refuse tables whose blocks can't be compared with blocks of others.

    Raises:
        ValueError: plain data, or blocks that differ in their bytes.
    """
    if data.sharding == "plain":
        raise ValueError(
            f"Data {data.name!r}: scope='global' is for the tables of models, from add_model()."
        )
    # A smaller block at the edge would be compared by its mean score, but remove fewer bytes.
    if data.shape[0] % block[0] or data.shape[1] % block[1]:
        raise ValueError(
            f"Table {data.name!r}: scope='global' needs blocks that divide tables, as rows do;"
            f" {block} does not divide {data.shape}."
        )


def blocks_kept(floor: float, blocks: int) -> int:
    """Return the fewest of a table's blocks that a floor, a share of them, lets a mask keep."""
    # A floor of 0.07 keeps 7 of 100 blocks, although 0.07 * 100 is 7.000000000000001.
    return math.ceil(floor * blocks - 1e-9)


def _shape_of(block: Any) -> Any:
    """Return a block shape given as text, parsed; anything else as it is, to be refused once a
    table is known."""
    return parse_block(block) if isinstance(block, str) else block


def _area_of(block: Any) -> int | None:
    """Return the number of elements of a block; None where the width of the table decides, or if it
    is not a block (refused when resolved)."""
    is_known = isinstance(block, Sequence) and [*map(type, block)] == [int, int]
    return math.prod(block) if is_known else None
