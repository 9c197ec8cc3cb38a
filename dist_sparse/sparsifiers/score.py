"""How do scores become masks, for plain data and for sharded tables alike?

A subclass says how much an element matters (:meth:`ScoreSparsifier.score`); the frame does the rest: block means, the
exact k smallest over all ranks, ties, edge blocks, and the elements inside a block. Plain data goes through the same
code as a world of one.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dist_sparse.checks import integer, number
from dist_sparse.groups import Group, Rider, rank_in
from dist_sparse.masking.block_masks import Goal, MadeMasks, ScoredTable, cuts_of, new_masks, score_table
from dist_sparse.masking.scores import Measure
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of, resolve_block

__all__ = ["ScoreSparsifier"]


class ScoreSparsifier(BaseDataSparsifier):
    """Removes the blocks with the smallest mean score. Subclasses write :meth:`score`, nothing else.

    Args:
        data_list: as in :class:`BaseDataSparsifier`.
        sparsity_level: fraction of blocks to hit, 0 to 1 (clipped): exactly ``round(sparsity_level * blocks)`` of them,
            half to even.
        sparse_block_shape: ``(rows, columns)`` of a block; ``(1, ROW)`` is whole rows.
        zeros_per_block: elements to remove in a block that is hit, those with the smallest score; None is the whole
            block.
        **defaults: further configuration that :meth:`score` receives.
    """

    def __init__(
        self,
        data_list: Any = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int | str] = (1, 4),
        zeros_per_block: int | None = None,
        **defaults: Any,
    ) -> None:
        self._whole_blocks = zeros_per_block is None
        if zeros_per_block is None:
            zeros_per_block = _area(sparse_block_shape)
        super().__init__(
            data_list,
            sparsity_level=sparsity_level,
            sparse_block_shape=sparse_block_shape,
            zeros_per_block=zeros_per_block,
            **defaults,
        )

    @abc.abstractmethod
    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """How much each element matters: finite, not negative, any floating dtype, the shape of ``data``.

        Args:
            name: of the table.
            data: a few whole rows of a local shard, ``(rows, columns)``. A score must not depend on how rows are
                grouped into calls.
            offset: the global (row, column) of ``data[0, 0]``.
            **config: the table's configuration at this moment.
        """

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        """Sets ``get_mask(name)`` to the int8 mask of ``data``, made from scratch.

        Raises:
            NotImplementedError: integer data. ValueError: more than two real dimensions, non-finite scores, or an
                impossible config.
        """
        if not data.dtype.is_floating_point:
            raise NotImplementedError(f"Data {name!r} of dtype {data.dtype}: only real floating dtypes can be scored.")
        matrix = _matrix(name, data.detach())
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
        scored = score_table(self._goal(table, config), 0)
        [made] = new_masks([scored], Group(None, None))
        [(mask, _)] = made.masks
        self.get_mask(name).data = mask.dense().view(data.shape)

    def _measure(self, name: str, config: Mapping[str, Any]) -> Measure:
        return lambda data, offset: self.score(name, data, offset=offset, **config)

    def _goal(self, data: ShardedData, config: Mapping[str, Any]) -> Goal:
        block = resolve_block(data.name, config["sparse_block_shape"], data.shape)
        area = block[0] * block[1]
        zeros = config["zeros_per_block"]
        if zeros is None:
            zeros = area
        zeros = integer("zeros_per_block", zeros, least=0, most=area, of=data.name)
        level = number("sparsity_level", config["sparsity_level"], of=data.name)
        grid = grid_of(Rect(0, 0, *data.shape), block)
        blocks = grid.rows * grid.cols
        k = round(min(max(level, 0.0), 1.0) * blocks) if zeros else 0
        return Goal(data=data, block=block, k=k, zeros=max(zeros, 1), measure=self._measure(data.name, config))

    def _overlaid(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Whole blocks stay whole when a user gives another block and says nothing of zeros_per_block."""
        group = super()._overlaid(config, given)
        whole = self._whole_blocks and config["zeros_per_block"] == _area(config["sparse_block_shape"])
        if whole and "zeros_per_block" not in given:
            group["zeros_per_block"] = _area(group["sparse_block_shape"])
        return group

    def _check_config(self, data: ShardedData, config: Mapping[str, Any]) -> None:
        cuts_of(self._goal(data, config))

    def _bit_block(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        goal = self._goal(data, config)
        return (1, 1) if goal.by_element else goal.block

    def _keep(self, mask: Tensor) -> Tensor:
        return mask.data if type(self).update_mask is ScoreSparsifier.update_mask else super()._keep(mask)

    def _rule(self) -> Any:
        return _ByScore(self) if type(self).update_mask is ScoreSparsifier.update_mask else super()._rule()


class _ByScore:
    """Scores of all tables, the exact thresholds over all ranks, and masks from both."""

    edits_masks = False

    def __init__(self, sparsifier: ScoreSparsifier) -> None:
        self._sparsifier = sparsifier

    def prepare(self, located: Mapping[str, ShardedData]) -> dict[str, ScoredTable]:
        user = self._sparsifier
        goals = {name: user._goal(data, user.data_groups[name]) for name, data in located.items()}
        return {name: score_table(goal, rank_in(goal.data.ranks)) for name, goal in goals.items()}

    def facts(self, name: str) -> Any:
        return [self._sparsifier.data_groups[name], getattr(self._sparsifier, "norm", None)]

    def target(self, name: str) -> float | None:
        return float(self._sparsifier.data_groups[name]["sparsity_level"])

    def finish(
        self, prepared: dict[str, ScoredTable], names: list[str], group: Group, rider: Rider | None
    ) -> dict[str, MadeMasks]:
        return dict(zip(names, new_masks([prepared[name] for name in names], group, rider), strict=True))


def _area(block: Any) -> int | None:
    """Elements of a block; None where the width of the table decides, or if it is no block (refused when resolved)."""
    if not isinstance(block, Sequence) or not all(isinstance(size, int) for size in block):
        return None
    return math.prod(block)


def _matrix(name: str, data: Tensor) -> Tensor:
    """``data`` as a matrix: 2-D as it is, otherwise without its singleton dimensions, one real dimension as a row.

    Raises:
        ValueError: more than two real dimensions.
    """
    if data.dim() == 2:
        return data
    real = [size for size in data.shape if size != 1]
    if len(real) > 2:
        raise ValueError(f"Data {name!r} of shape {tuple(data.shape)}: only supports 2-D at the moment.")
    return data.reshape(real if len(real) == 2 else (1, data.numel()))
