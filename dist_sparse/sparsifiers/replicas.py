"""What if several ranks hold the same piece of a table?

Replicas that are meant to be equal (DDP, data-parallel tables) are hashed and compared before masks move. Copies that
are trained apart and averaged now and then (2-D parallelism) differ in between: they take over the masks of the first
copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dist_sparse.groups import Group, Replica, group_over
from dist_sparse.masking.block_masks import MadeMasks, NewMask
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.sparsifiers.packed_store import ShardedTables
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["hashes_of", "restore", "take_over", "to_restore"]


def to_restore(
    drifted: Mapping[str, list[int]], names: list[str], located: Mapping[str, ShardedData], repair: str | None
) -> set[str]:
    """The tables that have drifted at the given places.

    Raises:
        ValueError: they are not to be restored, or can't be. On all ranks alike, which know the same of the drift.
    """
    places = "; ".join(f"{place} on ranks {ranks}" for place, ranks in drifted.items())
    found = {name for name in names if any(place.startswith(f"{name} rows [") for place in drifted)}
    if drifted and repair != "broadcast":
        raise ValueError(
            f"Replicas have drifted from their first holder's: {places}. Nothing was changed; "
            "sparsifier.repair = 'broadcast' restores them."
        )
    if any(held != located[name].tiling[0] for name in found for held in located[name].tiling):
        raise ValueError(f"Replicas have drifted: {places}. Only tables held whole by every rank can be repaired.")
    return found


def hashes_of(data: ShardedData, rank: int) -> dict[str, Replica]:
    """The hashes of what group rank ``rank`` holds of a table in common with others, by its place."""
    found = {}
    for shard in data.shards:
        holders = [r for r, held in enumerate(data.tiling) if shard.rect in held]
        if len(holders) > 1:
            found[f"{data.name} {shard.rect}"] = Replica(hash_tensor(shard.tensor), holders[0] == rank, len(holders))
    return found


def restore(tables: ShardedTables, located: Mapping[str, ShardedData], drifted: set[str]) -> None:
    """Overwrites all replicas by those of their group's first rank. Collective over the groups of what has drifted."""
    for ranks, names in tables.groups.items():
        for name in names:
            for shard in located[name].shards if name in drifted else ():
                group_over(ranks).broadcast_(shard.tensor)


def take_over(made: Mapping[str, MadeMasks], located: Mapping[str, ShardedData], group: Group) -> dict[str, MadeMasks]:
    """The new masks with those of copies replaced by the first copy's. Collective over ``group`` if there are copies:
    one all-to-all of packed bits."""
    copied = [name for name in made if located[name].copied]
    if not copied:
        return dict(made)
    pieces: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    sizes = [0] * group.size
    for name in copied:
        masks, block, _ = made[name]
        of = {mask.rect: mask for mask, _ in masks}
        data = located[name]
        owner = _owners(data, group)
        for receiver, held in enumerate(data.tiling):
            for rect in held:
                sender = owner[rect]
                if sender != receiver and sender == group.rank:
                    pieces[receiver].append(of[rect].bits)
                if sender != receiver and receiver == group.rank:
                    sizes[sender] += of[rect].bits.numel()
    received = group.all_to_all(pieces, sizes, torch.device("cpu"))
    at = [0] * group.size
    taken = dict(made)
    for name in copied:
        (masks, block, threshold), data = made[name], located[name]
        new: list[NewMask] = []
        for shard, mask in zip(data.shards, masks, strict=True):
            sender = _owners(data, group)[shard.rect]
            if sender != group.rank:
                count = mask.mask.bits.numel()
                bits = received[sender][at[sender] : at[sender] + count].to(shard.tensor.device, copy=True)
                at[sender] += count
                # What a score of this copy has said of zeros does not hold for the other's choice.
                mask = NewMask(BlockMask(shard.rect, block, bits), ~bits)
            new.append(mask)
        taken[name] = MadeMasks(new, block, threshold)
    return taken


def _owners(data: ShardedData, group: Group) -> dict[Rect, int]:
    """The group rank that speaks for each rectangle."""
    return {rect: rank for rank in range(group.size) for rect in data.owned(rank)}
