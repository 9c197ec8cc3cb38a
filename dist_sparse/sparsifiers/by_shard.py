"""How does a user's own ``update_mask`` reach sharded tables?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.block_masks import MadeMasks, NewMask
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import ShardedData

if TYPE_CHECKING:
    from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["ByShard"]


class ByShard:
    """The user's own ``update_mask``, once per local shard, its mask packed element by element."""

    edits_masks = True

    def __init__(self, sparsifier: BaseDataSparsifier) -> None:
        self._sparsifier = sparsifier

    def prepare(self, located: Mapping[str, ShardedData]) -> dict[str, list[NewMask]]:
        user = self._sparsifier
        made: dict[str, list[NewMask]] = {}
        for name, data in located.items():
            made[name] = []
            for shard, before in zip(data.shards, user._tables.masks(name), strict=True):
                mask = before.dense()
                user._edited = (name, mask)
                try:
                    user.update_mask(name, shard.tensor, **user.data_groups[name])
                finally:
                    user._edited = None
                made_mask = BlockMask.of_elements(shard.rect, mask)
                made[name].append(NewMask(made_mask, ~made_mask.bits))
        return made

    def facts(self, name: str) -> Any:
        return self._sparsifier.data_groups[name]

    def target(self, name: str) -> float | None:
        level: float | None = self._sparsifier.data_groups[name].get("sparsity_level")
        return level

    def finish(
        self, prepared: dict[str, list[NewMask]], names: list[str], group: Group, rider: Rider | None
    ) -> dict[str, MadeMasks]:
        return {name: MadeMasks(prepared[name], (1, 1), None) for name in names}
