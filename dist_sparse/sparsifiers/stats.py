"""Counts, hashes and gathered masks over all ranks, for people, reports and tests.

Nothing here changes a mask or a weight. Collective functions first check that all ranks make the
same call.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.records import TableStats
from dist_sparse.sparsifiers.dense_store import DenseStore, as_matrix, as_sharded
from dist_sparse.sparsifiers.digest import mask_hash, shape_hash
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import assembled, exchange, move_of_masks, removed_blocks
from dist_sparse.sparsifiers.recorder import configured_level, knows_removed_rows
from dist_sparse.sparsifiers.step import MaskMaker, Masks
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of
from dist_sparse.text import (
    block_shape_text,
    block_text,
    level_text,
    number_of,
    shape_text,
    table_lines,
)

Configs = Mapping[str, Mapping[str, Any]]


_HEAD = (
    *("name", "shape", "dtype", "sharding", "shards (here)"),
    *("block", "zeros per block", "level", "mask bytes (here)"),
)


class _Handle(Protocol):
    """What :func:`~dist_sparse.sparsify` returns."""

    @property
    def sparsifier(self) -> MaskMaker: ...


def describe(sparsifier: MaskMaker | _Handle) -> str:
    """Return a text table of everything registered: name, shape, dtype, sharding, shards,
    configuration, level, mask bytes. Local.

    Takes a sparsifier, or what :func:`~dist_sparse.sparsify` returned.

    "here" counts what this rank holds; :meth:`~dist_sparse.BaseDataSparsifier.table_stats` counts
    over all ranks.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, describe
        >>> data = [("user", torch.ones(10, 4))]
        >>> print(describe(DataNormSparsifier(data, sparse_block_shape=(1, 4))))
        DataNormSparsifier: 1 registered, over 1 rank
        name  shape   dtype    sharding  shards     block  zeros per   level  mask bytes
                                         (here)            block              (here)
        ----  ------  -------  --------  ---------  -----  ----------  -----  ----------
        user  10 x 4  float32  plain     1 (1)      1x4    all         0.5    160
    """
    given, sparsifier = sparsifier, getattr(sparsifier, "sparsifier", sparsifier)
    if not isinstance(sparsifier, MaskMaker):
        raise TypeError(
            f"Invalid sparsifier of type {type(given).__name__}: must be a sparsifier, or what"
            " sparsify() returned."
        )
    packed = sparsifier.masks.tables
    rows = []
    held = _all_held(sparsifier.masks, packed.locate())
    for name, config in sparsifier.data_groups.items():
        data, size = held[name].data, held[name].nbytes
        dtype = str(data.dtype).removeprefix("torch.")
        shards = f"{len(data.rects)} ({len(data.shards)})"
        block, level = config.get("sparse_block_shape"), config.get("sparsity_level")
        zeros = block_text(block, config.get("zeros_per_block"))
        shown = "-" if level is None else level_text(level)
        stored = shape_text(data.shape), dtype, data.sharding, shards
        rows.append((name, *stored, block_shape_text(block), zeros, shown, f"{size:,}"))
    ranks = number_of(max((len(ranks or (0,)) for ranks in packed.groups), default=1), "rank")
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {ranks}"
    return "\n".join([title, *table_lines(_HEAD, rows)])


class _Held(NamedTuple):
    """The masks of one name on this rank that it owns, the blocks that they remove, and the bytes
    of all masks here; of plain data element by element."""

    data: ShardedData
    block: Block
    owned: list[BlockMask]
    removed: int
    nbytes: int


def _all_held(masks: Masks, located: Mapping[str, ShardedData]) -> dict[str, _Held]:
    packed, dense = masks.tables, masks.plain
    found = {}
    for name, data in located.items():
        table = packed.table(name)
        owned, nbytes = (
            [held.mask for held in table.owned],
            sum(m.bits.numel() for m in table.masks),
        )
        found[name] = _Held(data, table.block, owned, table.removed_here, nbytes)
    for name in dense.names:
        # Masks of plain data may have any shape inside a block, and any dtype.
        mask, matrix = dense.mask(name), as_matrix(dense.mask(name))
        data = replace(as_sharded(name, matrix), dtype=dense.held(name).dtype)
        elements = BlockMask.of_elements(data.shards[0].rect, matrix)
        owned = [elements] if elements.blocks else []
        found[name] = _Held(data, (1, 1), owned, removed_blocks(elements), mask.nbytes)
    return found


def table_stats(masks: Masks, configs: Configs) -> dict[str, TableStats]:
    """See :meth:`dist_sparse.BaseDataSparsifier.table_stats`."""
    packed = masks.tables
    located = packed.current("table_stats()")
    # A rank that runs out of memory here would leave the others waiting.
    with packed.agreeing("table_stats()"):
        held = _all_held(masks, located)
        counts = {name: _count(one) for name, one in held.items()}
    # One all-reduce for all three counts of all tables of a group.
    sums = packed.summed(counts)
    found = {}
    for name, (data, block, *_) in held.items():
        removed, removed_elements, mask_bytes = sums[name]
        elements = data.shape[0] * data.shape[1]
        found[name] = TableStats(
            name=name,
            shape=data.shape,
            dtype=data.dtype,
            sharding=data.sharding,
            shards=len(data.rects),
            sparse_block_shape=configs[name].get("sparse_block_shape"),
            target=configured_level(configs[name]),
            blocks=grid_of(Rect(0, 0, *data.shape), block).blocks,
            removed_blocks=removed,
            mask_bytes=mask_bytes,
            table_bytes=elements * data.dtype.itemsize,
            kept_bytes=(elements - removed_elements) * data.dtype.itemsize,
        )
    return found


def count_revived(masks: Masks, located: Mapping[str, ShardedData] | None = None) -> dict[str, int]:
    """See :meth:`dist_sparse.BaseDataSparsifier.count_revived`; ``located`` spares a walk."""
    if located is None:
        located = masks.tables.current("count_revived()")
    return _revived(masks.tables, located) | _revived_plain(masks.plain)


def _revived(packed: PackedStore, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Count removed weights that are not zero. Collective: one all-reduce a group."""
    counts = dict.fromkeys(located, 0)
    for data in located.values():
        for shard, mask in packed.shards({data.name: data}):
            # In chunks: the mask of elements may be as large as the weights.
            for rows, kept in mask.element_chunks(only_removing=True):
                counts[data.name] += int(((shard.tensor[rows] != 0) & ~kept).sum())
    return _sum(packed, counts)


def _revived_plain(dense: DenseStore) -> dict[str, int]:
    return {
        name: int(((dense.mask(name) == 0) & (dense.weight(name) != 0)).sum())
        for name in filter(dense.is_masked, dense.names)
    }


def full_mask(packed: PackedStore, name: str) -> Tensor:
    """See :meth:`dist_sparse.BaseDataSparsifier.full_mask`; of a sharded table."""
    data, block = packed.find(name), packed.block(name)
    group, whole = group_over(data.ranks), Rect(0, 0, *data.shape)
    with group.agreeing("full_mask()") as facts:
        facts["name"] = name
    packed.reshard({name: data})
    # As if every rank held all of the table.
    everywhere = ((whole,),) * group.size
    move = move_of_masks(packed.masks(name), block, data.tiling, everywhere)
    [bits] = exchange(group, [move])
    return assembled(whole, block, bits, torch.device("cpu")).dense()


def fingerprints(masks: Masks, action: str) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.fingerprint`; ``action`` is the public call, for
    messages."""
    held = _all_held(masks, masks.tables.current(action))
    hashes = {name: sum(map(mask_hash, one.owned)) for name, one in held.items()}
    found = {}
    # A hash is a sum over elements: over ranks it is that of the whole mask.
    for name, value in _sum(masks.tables, hashes).items():
        found[name] = f"{(value + shape_hash(held[name].data.shape)) % (1 << 64):016x}"
    return found


def audit(masks: Masks) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.audit`."""
    packed, enforced = masks.tables, masks.enforcer is not None
    located = packed.current("audit()")
    with packed.agreeing("audit()"):
        # Dirty rows are zeroed before a forward reads them: they are no errors.
        masks.hooks.settle()
    refusal = "Masks differ between their holders."
    packed.compare_holders("audit()", located, packed.snapshot(), refusal)
    revived = _revived(packed, located)
    if enforced:
        # Without an enforcer, plain data keeps the weights that it removes.
        revived |= _revived_plain(masks.plain)
    # Of all groups: ranks that hold none of a table must not go on alone.
    with packed.agreeing("audit()"):
        _report_revived(revived, enforced=enforced)
    return fingerprints(masks, "audit()")


def _report_revived(revived: Mapping[str, int], *, enforced: bool) -> None:
    """Raise for removed weights that an enforcer would not have left nonzero; warn of others."""
    counts = "; ".join(
        f"table {name!r}: {count} removed weights are not zero"
        for name, count in revived.items()
        if count
    )
    if not counts:
        return
    if enforced:
        raise ValueError(
            f"Masks and weights differ, although an enforcer is attached. {counts}. They were"
            " written in a way that torch does not count, such as through .data;"
            " sparsifier.apply_masks() zeroes them."
        )
    warnings.warn(
        f"Masks and weights differ. {counts}: no enforcer is attached, so what optimizers revive"
        " stays until sparsifier.apply_masks().",
        stacklevel=4,
    )


def dead_rows(masks: Masks) -> dict[str, int]:
    """See :meth:`dist_sparse.BaseDataSparsifier.dead_rows`."""
    packed, counts = masks.tables, {}
    for name, one in _all_held(masks, packed.current("dead_rows()")).items():
        # No rank sees a whole row of other tables.
        if knows_removed_rows(one.data, one.block):
            rows = [mask.dead_rows().sum() for mask in one.owned if mask.rect.col == 0]
            counts[name] = sum(map(int, rows))
    return _sum(packed, counts)


def _count(held: _Held) -> list[int]:
    """Return removed blocks, removed elements and mask bytes of this rank's shards."""
    elements = 0
    for mask in held.owned:
        for _, kept in mask.element_chunks(only_removing=True):
            elements += int((~kept).sum())
    return [held.removed, elements, held.nbytes]


def _sum(packed: PackedStore, values: Mapping[str, int]) -> dict[str, int]:
    sums = packed.summed({name: [value] for name, value in values.items()})
    return {name: value for name, [value] in sums.items()}
