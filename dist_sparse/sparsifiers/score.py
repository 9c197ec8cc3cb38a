"""Sparsifiers that remove the blocks with the smallest scores.

A subclass defines how much an element matters (:meth:`ScoreSparsifier.score`); the frame computes
block means, the exact k smallest over all ranks, ties, edge blocks, and the elements inside a
block. Plain data runs the same code as a world of one.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dist_sparse.checks import choice, integer, number
from dist_sparse.groups import Facts, Group, Rider, rank_in
from dist_sparse.masking.block_masks import MadeMasks, new_masks
from dist_sparse.masking.block_scores import Goal, ScoredTable, cuts_of, score_table, score_tables
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.scores import Measure
from dist_sparse.records import TableStats
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.configs import area_of, as_scored_matrix, shape_of
from dist_sparse.sparsifiers.keeping import Keeper, Scored, check_kept
from dist_sparse.sparsifiers.stats import counts_of, plain_stats, stats_of
from dist_sparse.sparsifiers.step import make_masks
from dist_sparse.tables.shards import COL, Block, Rect, Shard, ShardedData, grid_of, resolve_block

__all__ = [
    "SCOPES",
    "BlockShape",
    "DataNormSparsifier",
    "Norm",
    "Preview",
    "Scope",
    "ScoreSparsifier",
]

BlockShape: TypeAlias = tuple[int | str, int | str] | Literal["row", "col", "1x4"] | str
Norm: TypeAlias = Literal["L1", "L2", "l1", "l2"]
Scope: TypeAlias = Literal["table", "global"]
SCOPES = ("table", "global")


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a mask update would remove, the same on every rank but for ``located`` and ``masks``.

    Args:
        stats: as ``table_stats()`` would return them after it, in the order of ``data_groups``;
            squashed names are left out.
        thresholds: by name the largest score that would be removed; None where nothing or
            everything would be.
        located: the sharded tables as they are stored now.
        masks: their new masks, of this rank's shards.
    """

    stats: list[TableStats]
    thresholds: dict[str, float | None]
    located: Mapping[str, ShardedData]
    masks: dict[str, list[BlockMask]]


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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "score" in cls.__dict__ and "measure" not in cls.__dict__:
            # Not the norm of a parent.
            cls.measure = None  # type: ignore[assignment, method-assign]
        if "score" in cls.__dict__ and "row_measure" not in cls.__dict__:
            cls.row_measure = ScoreSparsifier.row_measure  # type: ignore[method-assign]

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: BlockShape = (1, 4),
        zeros_per_block: int | None = None,
        **defaults: Any,
    ) -> None:
        sparse_block_shape = shape_of(sparse_block_shape)
        self._keeper: Keeper | None = None
        self._whole_blocks = zeros_per_block is None
        if zeros_per_block is None:
            zeros_per_block = area_of(sparse_block_shape)
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
            NotImplementedError: integer data. ValueError: more than two real dimensions, non-finite
                scores, or an impossible config.
        """
        made = self._plain_masks(name, data, config)
        self.get_mask(name).data = made.masks[0].mask.dense().view(data.shape)

    @torch.no_grad()
    def preview(self, level: float | Mapping[str, float] | None = None) -> Preview:
        """Return what a mask update at ``level`` would remove; change no mask, weight or
        configuration. Collective if sharded tables are registered.

        Args:
            level: a ``sparsity_level`` for all, or by name; None is as configured, also for names
                that are left out.

        Raises:
            ValueError: a name is unknown, or as :meth:`step`; on every rank.

        Example::

            >>> import torch
            >>> from dist_sparse import DataNormSparsifier
            >>> sparsifier = DataNormSparsifier(sparse_block_shape="row", norm="L2")
            >>> names = sparsifier.add_model(torch.nn.EmbeddingBag(100, 16))
            >>> sparsifier.preview(0.9).stats[0].removed_blocks
            90
        """
        levels = (
            level
            if isinstance(level, Mapping)
            else dict.fromkeys(() if level is None else self.data_groups, level)
        )
        configs = {
            name: {**config, "sparsity_level": levels.get(name, config.get("sparsity_level"))}
            for name, config in self.data_groups.items()
        }
        found: dict[str, TableStats] = {}
        thresholds: dict[str, float | None] = {}

        def preview_plain() -> None:
            if unknown := [name for name in levels if name not in configs]:
                raise ValueError(
                    f"Invalid level of unknown names {unknown}; known are {list(configs)}."
                )
            self._check_update_mask()
            self._settle()
            for name in filter(self.dense_store.is_masked, self.dense_store.names):
                weight = self.dense_store.weight(name)
                made = self._plain_masks(name, weight, configs[name])
                mask = made.masks[0].mask.dense()
                found[name] = plain_stats(name, mask, weight.dtype, configs[name])
                thresholds[name] = None if made.threshold is None else made.threshold.score

        located, made = make_masks(self, configs, "preview()", preview_plain)
        masks = {name: [mask for mask, _ in new.masks] for name, new in made.items()}
        found |= stats_of(
            located,
            counts_of(located, masks),
            {name: new.block for name, new in made.items()},
            configs,
        )
        thresholds |= {
            name: None if new.threshold is None else new.threshold.score
            for name, new in made.items()
        }
        return Preview(
            stats=[found[name] for name in configs if name in found],
            thresholds={name: thresholds[name] for name in configs if name in thresholds},
            located=located,
            masks=masks,
        )

    @property
    def measure(self) -> Literal["L1", "L2"] | None:
        return None

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        super().note(facts, located)
        facts["sparsifier.measure"] = self.measure
        facts["sparsifier.scope"] = self.scope
        facts["sparsifier.floors"] = dict(self.floors)

    @property
    def reads_masks(self) -> bool:
        """Whether ``update_mask`` is a user's own, which may edit masks in place."""
        return type(self).update_mask is not ScoreSparsifier.update_mask

    def score_tables(
        self, located: Mapping[str, ShardedData], configs: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, ScoredTable]:
        """Score this rank's shards: the local half of a mask update."""
        if located:
            self._check_update_mask()
        goals = {name: self._goal(data, configs[name]) for name, data in located.items()}
        self._check_pool(goals)
        if self.enforcer is None:
            self._keeper = None
        elif integer("full_every", self.full_every, least=1) > 1:
            self._keeper = self._keeper or Keeper()
            written, masks = self.enforcer.written(), self.packed_store.masks
            goals = self._keeper.goals(goals, written, self.row_measure, masks, self.full_every)
        scored = score_tables(
            list(goals.values()), [rank_in(goal.data.ranks) for goal in goals.values()]
        )
        return dict(zip(goals, scored, strict=True))

    def row_measure(self, name: str, shard: Shard) -> Scored | None:
        """Return how rows of a shard are scored that are not neighbours, and what else decides
        about their scores; None if only whole shards can be scored: then no scores are kept."""
        return None if self.measure is None else (self.measure, self.measure)

    def select_masks(
        self, scored: Mapping[str, ScoredTable], names: list[str], group: Group, rider: Rider | None
    ) -> dict[str, MadeMasks]:
        """Return the new masks of ``names``: the collective half of a mask update."""
        tables = [scored[name] for name in names]
        made = new_masks(tables, group, rider, pooled=self.scope == "global")
        return dict(zip(names, made, strict=True))

    def audit(self) -> dict[str, str]:
        """Like :meth:`BaseDataSparsifier.audit`; also compare the kept scores with fresh scores of
        all rows, bit for bit.

        Raises:
            ValueError: on every rank; names table and row, even if a weight was written in a way
                that torch does not count, such as through ``.data``.
        """
        if self.enforcer is not None:
            with self.packed_store.agreeing("audit()"):
                self.enforcer.settle()
                located = self.packed_store.locate()
                kept = self.score_tables(located, self.data_groups)
                goals = [replace(table.goal, keeping=None) for table in kept.values()]
                fresh = score_tables(goals, [rank_in(goal.data.ranks) for goal in goals])
                for one, other in zip(kept.values(), fresh, strict=True):
                    check_kept(one, other)
        return super().audit()

    def apply_masks(self, to: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        super().apply_masks(to)
        self._keeper = None  # it is called after writes that torch does not count

    def check_config(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        """Return what one bit of a new table's masks stands for: a sparse block, or an element.

        Raises:
            ValueError: no mask update could follow the configuration, or ``update_mask`` is a
                user's own.
        """
        self._check_update_mask()
        goal = self._goal(data, config)
        cuts_of(goal)
        return (1, 1) if goal.by_element else goal.block

    def _check_update_mask(self) -> None:
        if self.reads_masks:
            raise ValueError(
                f"{type(self).__name__} defines update_mask() below ScoreSparsifier, which would"
                " choose blocks of each shard by itself: override score(), or inherit"
                " BaseDataSparsifier."
            )

    def check_levels(self, levels: Mapping[str, float]) -> None:
        """Refuse levels, by the name of each sharded table, that no mask update could reach. Local.

        Raises:
            ValueError: with the scope ``"global"``; names what is in the way.
        """
        configs = {
            name: {**self.data_groups[name], "sparsity_level": level}
            for name, level in levels.items()
        }
        goals = {
            name: self._goal(self.packed_store.find(name), config)
            for name, config in configs.items()
        }
        self._check_pool(goals)

    def _check_pool(self, goals: Mapping[str, Goal]) -> None:
        """Refuse tables that can't be selected from together. The same on every rank."""
        if self.scope != "global":
            return
        if len(self.packed_store.groups) > 1:
            groups = list(self.packed_store.groups.values())
            raise ValueError(
                f"scope='global' needs tables over the same ranks; these are apart: {groups}."
            )
        need = sum(goal.k * goal.price for goal in goals.values())
        most = sum(goal.most * goal.price for goal in goals.values())
        if need > most:
            raise ValueError(
                f"The levels remove {need} bytes in total, but at most {most} may be removed: each"
                f" table keeps one block, and its floor in {dict(self.floors)}."
            )
        if self.rotation is not None:
            raise ValueError(
                "scope='global' can't compare rotated columns, which are removed by position."
            )

    def _plain_masks(self, name: str, data: Tensor, config: Mapping[str, Any]) -> MadeMasks:
        """The new mask of plain data, as a table of a single shard."""
        if not data.dtype.is_floating_point:
            raise NotImplementedError(
                f"Data {name!r} of dtype {data.dtype}: only real floating dtypes can be scored."
            )
        matrix = as_scored_matrix(name, data.detach())
        rect = Rect(0, 0, *matrix.shape)
        table = ShardedData(
            name=name,
            shape=(rect.rows, rect.cols),
            dtype=data.dtype,
            sharding="plain",
            ranks=None,
            tiling=((rect,),),
            shards=(Shard(rect, matrix),),
        )
        [made] = new_masks([score_table(self._goal(table, config), 0)], Group(None, None))
        return made

    def _goal(self, data: ShardedData, config: Mapping[str, Any]) -> Goal:
        block = resolve_block(data.name, config["sparse_block_shape"], data.shape)
        whole_columns, area = config["sparse_block_shape"][0] == COL, block[0] * block[1]
        zeros = area if config["zeros_per_block"] is None else config["zeros_per_block"]
        zeros = integer(
            "zeros_per_block", zeros, least=area if whole_columns else 0, most=area, of=data.name
        )
        level = number("sparsity_level", config["sparsity_level"], of=data.name)
        grid = grid_of(Rect(0, 0, *data.shape), block)
        level = min(max(level, 0.0), 1.0)
        floor = number("floor", self.floors.get(data.name, 0.0), least=0, most=1, of=data.name)
        k = round(level * grid.blocks) if zeros else 0
        most = grid.blocks - math.ceil(floor * grid.blocks - 1e-9) if zeros else 0
        if choice("scope", self.scope, SCOPES) == "global":
            _check_pooled(data, block)
            most = min(most, grid.blocks - (level < 1)) if level else 0
        else:
            k = min(k, most)
        measure = self.measure or self.element_measure(data.name, config)
        if self.rotation is not None and data.name in self.rotation.names:
            measure = partial(_places, data.shape[1])
        return Goal(
            data=data,
            block=block,
            k=k,
            most=most,
            zeros=max(zeros, 1),
            measure=measure,
            whole_columns=whole_columns,
        )

    def element_measure(self, name: str, config: Mapping[str, Any]) -> Measure:
        """Return how the elements of a table are scored if :attr:`measure` is None: by
        :meth:`score`."""
        return partial(self._scored, name, config)

    def _scored(
        self, name: str, config: Mapping[str, Any], data: Tensor, offset: tuple[int, int]
    ) -> Tensor:
        return self.score(name, data, offset=offset, **config)

    def _overlaid(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Whole blocks stay whole when another block is given without zeros_per_block."""
        group = super()._overlaid(config, given)
        group["sparse_block_shape"] = shape_of(group["sparse_block_shape"])
        whole = self._whole_blocks and config["zeros_per_block"] == area_of(
            config["sparse_block_shape"]
        )
        if whole and "zeros_per_block" not in given:
            group["zeros_per_block"] = area_of(group["sparse_block_shape"])
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
        sparse_block_shape: BlockShape = (1, 4),
        zeros_per_block: int | None = None,
        norm: Norm = "L1",
    ) -> None:
        if norm not in ("L1", "L2", "l1", "l2"):
            raise AssertionError(f"only L1 and L2 norm supported at the moment, got {norm!r}")
        self.norm = norm.upper()
        super().__init__(data_list, sparsity_level, sparse_block_shape, zeros_per_block)

    @property
    def measure(self) -> Literal["L1", "L2"]:
        return "L1" if self.norm == "L1" else "L2"

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """Return ``|x|`` or ``x * x``, float64."""
        exact = data.double()
        return exact.abs() if self.norm == "L1" else exact * exact


def _places(columns: int, data: Tensor, offset: tuple[int, int]) -> Tensor:
    """Scores by which the last columns of a rotated table are removed, never equal ones."""
    first = columns - offset[1]
    return torch.arange(first, first - data.shape[1], -1, device=data.device).expand(data.shape)


def _check_pooled(data: ShardedData, block: Block) -> None:
    """Refuse tables whose blocks can't be compared with those of others.

    Raises:
        ValueError: plain data, or blocks that differ in their bytes.
    """
    if data.sharding == "plain":
        raise ValueError(
            f"Data {data.name!r}: scope='global' is for the tables of models, from add_model()."
        )
    if any(size % side for size, side in zip(data.shape, block, strict=True)):
        raise ValueError(
            f"Table {data.name!r}: scope='global' needs blocks that divide tables, as rows do;"
            f" {block} does not divide {data.shape}."
        )
