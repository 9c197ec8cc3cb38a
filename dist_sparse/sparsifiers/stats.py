"""Counts, hashes and gathered masks over all ranks, for people, reports and tests.

Nothing here changes a mask or a weight. Collective functions first check that all ranks make the
same call.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_sparse.groups import Facts, Parcels, group_over
from dist_sparse.masking.masks import BlockMask, count_bits, pack
from dist_sparse.records import TableStats
from dist_sparse.sparsifiers.dense_store import DenseStore, as_matrix
from dist_sparse.sparsifiers.digest import element_counts, mask_hash, shape_hash, shared_bits
from dist_sparse.sparsifiers.masks import Masks
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import Tiling, assembled, send_masks
from dist_sparse.sparsifiers.recorder import configured_level
from dist_sparse.tables.shards import Rect, ShardedData, grid_of

Configs = Mapping[str, Mapping[str, Any]]


def table_stats(masks: Masks, configs: Configs) -> dict[str, TableStats]:
    """See :meth:`dist_sparse.BaseDataSparsifier.table_stats`."""
    packed, dense = masks.tables, masks.plain
    located = packed.current("table_stats()")
    # A rank that runs out of memory here would leave the others waiting.
    with packed.agreeing("table_stats()"):
        counts = {name: _count(packed.masks(name), data) for name, data in located.items()}
    # One all-reduce for all three counts of all tables of a group.
    sums = _summed(packed, counts)
    found = {}
    for name, data in located.items():
        grid = grid_of(Rect(0, 0, *data.shape), packed.block(name))
        removed, elements, size = sums[name]
        found[name] = TableStats(
            name=name,
            shape=data.shape,
            dtype=data.dtype,
            sharding=data.sharding,
            shards=len(data.rects),
            sparse_block_shape=configs[name].get("sparse_block_shape"),
            target=configured_level(configs[name]),
            blocks=grid.blocks,
            removed_blocks=removed,
            mask_bytes=size,
            table_bytes=data.shape[0] * data.shape[1] * data.dtype.itemsize,
            kept_bytes=(data.shape[0] * data.shape[1] - elements) * data.dtype.itemsize,
        )
    for name in dense.names:
        found[name] = _plain_stats(name, dense, configs[name])
    return found


def _plain_stats(name: str, dense: DenseStore, config: Mapping[str, Any]) -> TableStats:
    """Count plain data element by element: its masks may have any shape inside a block."""
    mask, dtype = as_matrix(dense.mask(name)), dense.held(name).dtype
    removed = int((mask == 0).sum())
    return TableStats(
        name=name,
        shape=(mask.shape[0], mask.shape[1]),
        dtype=dtype,
        sharding="plain",
        shards=1,
        sparse_block_shape=config.get("sparse_block_shape"),
        target=configured_level(config),
        blocks=mask.numel(),
        removed_blocks=removed,
        # As stored: a mask of the ancestor's may be float32.
        mask_bytes=mask.numel() * mask.element_size(),
        table_bytes=mask.numel() * dtype.itemsize,
        kept_bytes=(mask.numel() - removed) * dtype.itemsize,
    )


def count_removed(
    packed: PackedStore, tables: Mapping[str, tuple[ShardedData, Sequence[BlockMask]]]
) -> dict[str, int]:
    """Return how many blocks these masks remove from each table. Collective over the tables'
    groups: one all-reduce each."""
    return _sum(packed, {name: _count(masks, data)[0] for name, (data, masks) in tables.items()})


def count_revived(masks: Masks, located: Mapping[str, ShardedData] | None = None) -> dict[str, int]:
    """See :meth:`dist_sparse.BaseDataSparsifier.count_revived`; ``located`` spares a walk."""
    if located is None:
        located = masks.tables.current("count_revived()")
    return _revived(masks.tables, located) | _revived_plain(masks.plain)


def _revived(packed: PackedStore, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Count removed weights that are not zero. Collective: one all-reduce a group."""
    counts = dict.fromkeys(located, 0)
    for name, data in located.items():
        for mask, shard in zip(packed.masks(name), data.shards, strict=True):
            # In chunks: the mask of elements may be as large as the weights.
            for rows, kept in mask.element_chunks():
                counts[name] += int(((shard.tensor[rows] != 0) & ~kept).sum())
    return _sum(packed, counts)


def _revived_plain(dense: DenseStore) -> dict[str, int]:
    return {
        name: int(((dense.mask(name) == 0) & (dense.weight(name) != 0)).sum())
        for name in filter(dense.is_masked, dense.names)
    }


def full_mask(packed: PackedStore, name: str, max_bytes: int) -> Tensor:
    """See :meth:`dist_sparse.BaseDataSparsifier.full_mask`; of a sharded table."""
    data, block = packed.find(name), packed.block(name)
    group, whole = group_over(data.ranks), Rect(0, 0, *data.shape)
    with group.agreeing("full_mask()") as facts:
        facts["name"] = name
        if whole.numel > max_bytes:
            raise ValueError(
                f"The mask of table {name!r} takes {whole.numel} bytes: more than {max_bytes=}."
            )
    packed.reshard({name: data})
    # As if every rank held all of the table.
    parcels, everywhere = Parcels(group), ((whole,),) * group.size
    read = send_masks(parcels, group.rank, packed.masks(name), block, data.tiling, everywhere)
    cpu = torch.device("cpu")
    parcels.exchange(cpu)
    return assembled(whole, block, read(), cpu).dense()


def fingerprints(masks: Masks, action: str) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.fingerprint`; ``action`` is the public call, for
    messages."""
    packed, dense = masks.tables, masks.plain
    located = packed.current(action)
    shapes = {name: data.shape for name, data in located.items()}
    hashes = {name: 0 for name in located}
    for name, data in located.items():
        for mask in _owned(packed.masks(name), data):
            hashes[name] += mask_hash(mask)
    # A hash is a sum over elements: over ranks it is that of the whole mask.
    hashes = _sum(packed, hashes)
    for name in dense.names:
        matrix = as_matrix(dense.mask(name))
        rect = Rect(0, 0, *matrix.shape)
        shapes[name] = rect.rows, rect.cols
        hashes[name] = mask_hash(BlockMask.of_elements(rect, matrix))
    return {
        name: f"{(value + shape_hash(shapes[name])) % (1 << 64):016x}"
        for name, value in hashes.items()
    }


def audit(masks: Masks) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.audit`."""
    packed, enforcer = masks.tables, masks.enforcer
    located = packed.current("audit()")
    with packed.agreeing("audit()") as noted:
        for facts, names in noted:
            _note_shared_bits(facts, packed, [located[name] for name in names])
        if enforcer is not None:
            # Dirty rows are zeroed before a forward reads them: they are no errors.
            enforcer.settle()
    revived = _revived(packed, located)
    if enforcer is not None:
        # Without an enforcer, plain data keeps the weights that it removes.
        revived |= _revived_plain(masks.plain)
    # Of all groups: ranks that hold none of a table must not go on alone.
    with packed.agreeing("audit()"):
        _report_revived(revived, enforced=enforcer is not None)
    return fingerprints(masks, "audit()")


def _note_shared_bits(facts: Facts, packed: PackedStore, tables: Sequence[ShardedData]) -> None:
    facts.on_drift = _refuse_differing_masks
    for data in tables:
        rank = group_over(data.ranks).rank
        facts.replicas |= shared_bits(data, packed.block(data.name), packed.masks(data.name), rank)


def _refuse_differing_masks(drifted: Mapping[str, list[int]]) -> None:
    wrong = "; ".join(
        f"{place}: ranks {ranks} differ from the first holder" for place, ranks in drifted.items()
    )
    raise ValueError(f"Masks differ between their holders. {wrong}")


def _report_revived(revived: Mapping[str, int], *, enforced: bool) -> None:
    """Raise for removed weights that an enforcer would not have left nonzero; warn of others."""
    found = [
        f"table {name!r}: {count} removed weights are not zero"
        for name, count in revived.items()
        if count
    ]
    if not found:
        return
    counts = "; ".join(found)
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
    packed, dense = masks.tables, masks.plain
    located = packed.current("dead_rows()")
    counts = {}
    for ranks, names in packed.groups.items():
        # One all-to-all for the tables of a group that are cut by columns; none without them.
        parcels, arriving = Parcels(group_over(ranks)), {}
        for name in names:
            data, mine = located[name], packed.masks(name)
            if all(rect.cols == data.shape[1] for rect in data.rects):
                counts[name] = sum(int(mask.dead_rows().sum()) for mask in _owned(mine, data))
            else:
                arriving[name] = _send_kept_rows(parcels, data, mine)
        if arriving:
            parcels.exchange(torch.device("cpu"))
        for name, count in arriving.items():
            counts[name] = count()
    dead = _sum(packed, counts)
    for name in dense.names:
        dead[name] = int((as_matrix(dense.mask(name)) == 0).all(1).sum())
    return dead


def _send_kept_rows(
    parcels: Parcels, data: ShardedData, masks: Sequence[BlockMask]
) -> Callable[[], int]:
    """Pack one bit a row: whether a shard keeps any of it. Return a function that counts the dead
    rows of this rank's share, once the parcels have been exchanged.

    No rank sees a whole row of a table that is cut by columns: each counts an equal share of the
    rows, and gets the bits of these rows from all shards.
    """
    group, (rows, cols) = group_over(data.ranks), data.shape
    edges = [rows * rank // group.size for rank in range(group.size + 1)]
    shares: Tiling = tuple(
        (Rect(first, 0, last - first, cols),) for first, last in itertools.pairwise(edges)
    )
    whole_row = (1, cols)
    kept = []
    for mask in masks:
        bits = pack(~mask.dead_rows().cpu()) if mask.blocks else mask.bits.cpu()
        kept.append(BlockMask(mask.rect, whole_row, bits))
    read = send_masks(parcels, group.rank, kept, whole_row, data.tiling, shares)

    def count() -> int:
        [share] = shares[group.rank]
        dead = torch.ones(share.rows, dtype=torch.bool)
        # A row is dead if no shard keeps any of it.
        for piece in read():
            first = piece.rect.row - share.row
            dead[first : first + piece.rect.rows] &= ~piece.flags().flatten()
        return int(dead.sum())

    return count


def _sum(packed: PackedStore, values: Mapping[str, int]) -> dict[str, int]:
    sums = _summed(packed, {name: [value] for name, value in values.items()})
    return {name: value for name, [value] in sums.items()}


def _summed(packed: PackedStore, values: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Sum integers of every table over its ranks, modulo 2**64: one all-reduce a group."""
    summed: dict[str, list[int]] = {}
    for ranks, names in packed.groups.items():
        # Hashes have 64 bits and no sign; collectives sum int64.
        rows = [list(map(_signed, values[name])) for name in names]
        total = group_over(ranks).all_reduce(torch.tensor(rows, dtype=torch.int64))
        summed.update(zip(names, total.tolist(), strict=True))
    return summed


def _signed(value: int) -> int:
    """Return the int64 with the bits of a hash, which has no sign."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _count(masks: Sequence[BlockMask], data: ShardedData) -> list[int]:
    """Return removed blocks, removed elements and mask bytes of this rank's shards. Replicas and
    cut blocks count for their first holder only."""
    removed = elements = 0
    for mask in _owned(masks, data):
        top, left = mask.rect.row % mask.block[0] > 0, mask.rect.col % mask.block[1] > 0
        if top or left:
            # The first row or column of blocks begins in another shard, which counts it.
            removed += int((~mask.flags()[int(top) :, int(left) :]).sum())
        else:
            removed += mask.blocks - count_bits(mask.bits)
        elements += element_counts(mask)
    return [removed, elements, sum(mask.bits.numel() for mask in masks)]


def _owned(masks: Sequence[BlockMask], data: ShardedData) -> list[BlockMask]:
    """Return the masks of the shards that this rank owns, without empty ones."""
    owned = set(data.owned(group_over(data.ranks).rank))
    distinct = {mask.rect: mask for mask in masks if mask.blocks}
    return [mask for rect, mask in distinct.items() if rect in owned]
