"""Weights and optimizer state of kept rows, from a sharded collection to the compact one in its
place.

One table at a time, its weights and then each of its states; a rank holds its shards and chunks of
a few MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import move_rows
from dist_sparse.compaction.sites import cut
from dist_sparse.compaction.steppers import Stepped, Steppers
from dist_sparse.groups import group_over
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.protocols import Collection
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["move_collection"]


class _Fused(NamedTuple):
    """One shard of a table with a fused optimizer: what the optimizer keeps of it, live, and its
    hyperparameters."""

    states: Sequence[Tensor]
    hyperparameters: dict[str, float]


class _Kind(NamedTuple):
    """Of optimizer state: its dtype, whether it has one value per row, and its dimensions."""

    dtype: str
    rowwise: bool
    dims: int


@torch.no_grad()
def move_collection(
    old: nn.Module, new: nn.Module, kept: Mapping[str, Tensor], steppers: Steppers
) -> list[Stepped]:
    """Fill a sharded collection of kept rows from the sharded collection of all. Collective over
    its ranks.

    Args:
        kept: by table, which rows of ``old`` are kept.
        steppers: the optimizers that step what is not fused. They are not changed.

    Returns:
        What they step.

    Raises:
        ValueError: row-wise optimizer state of a table whose columns are cut otherwise in ``new``.
    """
    source_of, target_of = collection_of(old), collection_of(new)
    group = group_over(_located(source_of, next(iter(kept))).ranks)
    with group.agreeing("moving tables"):
        tables = {name: (_located(source_of, name), _located(target_of, name)) for name in kept}
        fused, into = _fused_shards(source_of), _fused_shards(target_of)
        plain, plain_into = source_of.parameters(), target_of.parameters()
        mine = {**_fused_kinds(fused), **_plain_kinds(plain, steppers)}
    known: dict[str, Any] = {}
    for told in group.all_gather_json(mine):
        known = {**told, **known}
    target_of.set_hyperparameters(
        {
            name: entry["hyperparameters"]
            for name, entry in known.items()
            if "hyperparameters" in entry
        }
    )
    stepped = []
    for name, (source, target) in tables.items():
        _move(
            source,
            [s.tensor for s in source.shards],
            kept[name],
            target,
            [s.tensor for s in target.shards],
        )
        made: dict[str, Tensor] = {}
        for key, kind in known[name]["states"].items():
            dtype, rowwise, dims = _Kind(*kind)
            if "hyperparameters" in known[name]:
                held = [shard.states[int(key)] for shard in fused.get(name, ())]
                wanted = [shard.states[int(key)] for shard in into.get(name, ())]
            else:
                made[key] = plain_into[name].new_zeros(
                    (len(plain_into[name]), *([1] if rowwise else plain_into[name].shape[1:]))[
                        :dims
                    ],
                    dtype=getattr(torch, dtype),
                )
                held = _by_shard(steppers.states(plain[name]).get(key), source)
                wanted = _by_shard(made[key], target)
            _move(source, held, kept[name], target, wanted, getattr(torch, dtype), rowwise)
        if name in plain:
            stepped.append(Stepped(plain[name], plain_into[name], made))
    return stepped


def _located(collection: Collection, table: str) -> ShardedData:
    return collection.locate(table, collection.fqn("", table), table)


def _fused_shards(collection: Collection) -> dict[str, list[_Fused]]:
    """This rank's shards of tables with a fused optimizer, in the order of ``ShardedData.shards``:
    without empty ones."""
    found: dict[str, list[_Fused]] = {}
    for batch in collection.batches():
        values = batch.hyperparameters()
        for table, view, states in zip(batch.tables, batch.weights(), batch.states(), strict=True):
            if view.numel():
                found.setdefault(table, []).append(_Fused(states, values))
    return found


def _fused_kinds(fused: Mapping[str, Sequence[_Fused]]) -> dict[str, Any]:
    """The optimizer state of fused tables, and the optimizers' hyperparameters."""
    kinds: dict[str, Any] = {}
    for name, shards in fused.items():
        states = {
            str(i): _Kind(_dtype(s), s.dim() == 1, s.dim()) for i, s in enumerate(shards[0].states)
        }
        kinds[name] = {"hyperparameters": shards[0].hyperparameters, "states": states}
    return kinds


def _plain_kinds(plain: Mapping[str, nn.Parameter], steppers: Steppers) -> dict[str, Any]:
    """The optimizer state of tables that plain optimizers step."""
    kinds: dict[str, Any] = {}
    for name, parameter in plain.items():
        if parameter.numel():
            states = steppers.states(parameter).items()
            kinds[name] = {
                "states": {
                    key: _Kind(_dtype(s), s.shape != parameter.shape, s.dim()) for key, s in states
                }
            }
    return kinds


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _by_shard(tensor: Tensor | None, data: ShardedData) -> list[Tensor]:
    """Optimizer state of a rank's shards, which TorchRec concatenates by rows, apart."""
    return (
        list(torch.split(tensor, [shard.rect.rows for shard in data.shards]))
        if tensor is not None and data.shards
        else []
    )


def _move(
    source: ShardedData,
    held: Sequence[Tensor],
    kept: Tensor,
    target: ShardedData,
    into: Sequence[Tensor],
    dtype: torch.dtype | None = None,
    rowwise: bool = False,
) -> None:
    """Fill the shards ``into`` of ``target`` from the shards ``held`` of ``source``, which may have
    more columns; rows behind the kept ones are 0."""
    rows = int(kept.count_nonzero())
    for tensor in into:
        tensor.zero_()
    if source.replicated and target.replicated and not source.copied:  # each rank has it all
        into[0][:rows] = cut(held[0], kept, rows, target.shape[1])
        return
    whole = Rect(0, 0, rows, target.shape[1])
    wanted = [
        [common for rect in rects if (common := rect.intersect(whole))] for rects in target.tiling
    ]
    # One value per row of a shard, which may lose columns.
    if rowwise and target.shape[1] < source.shape[1]:
        columns = {rect.col: rect.cols for rect in source.rects}
        wanted = [
            [rect._replace(cols=columns.get(rect.col, rect.cols)) for rect in rects]
            for rects in wanted
        ]
    for rect, part in move_rows(source, held, kept, wanted, dtype=dtype, rowwise=rowwise):
        for shard, tensor in zip(target.shards, into, strict=True):
            if rect.intersect(shard.rect) == rect._replace(cols=min(rect.cols, shard.rect.cols)):
                place = tensor[rect.row - shard.rect.row : rect.row_end - shard.rect.row]
                place.copy_(part.view_as(place))
