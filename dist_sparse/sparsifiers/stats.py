"""Counts, hashes and gathered masks over all ranks, for people, reports and tests.

Nothing here changes a mask or a weight. What is collective first checks that all ranks make the
same call.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels, group_over
from dist_sparse.masking.masks import BlockMask, count_bits, pack, unpack
from dist_sparse.records import TableStats
from dist_sparse.sparsifiers.dense_store import DenseStore, as_matrix
from dist_sparse.sparsifiers.digest import element_counts, mask_hash, shape_hash, shared_bits
from dist_sparse.sparsifiers.moving import mask_bytes
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of
from dist_sparse.text import block_shape_text, block_text, shape_text, table_lines

__all__ = [
    "audit",
    "count_removed",
    "count_revived",
    "counts_of",
    "dead_flags",
    "dead_rows",
    "describe",
    "fingerprints",
    "full_mask",
    "plain_stats",
    "stats_of",
    "table_stats",
    "target_of",
]

Located = Mapping[str, ShardedData]
Masks = Mapping[str, Sequence[BlockMask]]


class Settles(Protocol):
    """The method of an attached enforcer that counts need."""

    def settle(self) -> None:
        """Zero what optimizers have revived."""
        ...


class Registered(Protocol):
    """The attributes of a sparsifier that its counts need."""

    data_groups: dict[str, dict[str, Any]]
    dense_store: DenseStore
    packed_store: PackedStore

    @property
    def enforcer(self) -> Settles | None: ...


def table_stats(sparsifier: Registered) -> list[TableStats]:
    """See :meth:`dist_sparse.BaseDataSparsifier.table_stats`."""
    packed, dense, configs = sparsifier.packed_store, sparsifier.dense_store, sparsifier.data_groups
    located = packed.current("table_stats()")
    # A rank that runs out of memory here would leave the others waiting.
    with packed.agreeing("table_stats()"):
        counts = counts_of(located, packed.all_masks())
    found = stats_of(located, counts, {name: packed.block(name) for name in located}, configs)
    for name in dense.names:
        found[name] = plain_stats(name, dense.mask(name), dense.held(name).dtype, configs[name])
    return [found[name] for name in configs]


def counts_of(located: Located, masks: Masks) -> dict[str, list[int]]:
    """Return removed blocks, removed elements and mask bytes of this rank's shards, by table.
    Local.

    Args:
        located: the tables as they are stored now.
        masks: this rank's, of each table in the order of its shards.
    """
    return {name: _count(masks[name], data) for name, data in located.items()}


def stats_of(
    located: Located,
    counts: Mapping[str, list[int]],
    blocks: Mapping[str, Block],
    configs: Mapping[str, Mapping[str, Any]],
) -> dict[str, TableStats]:
    """Return the statistics of sharded tables. Collective over their groups: one all-reduce each.

    Args:
        located: the tables as they are stored now.
        counts: this rank's, from :func:`counts_of`.
        blocks: what one bit of them stands for.
        configs: name -> configuration.
    """
    sums = _summed(counts, located, 3)
    found = {}
    for name, data in located.items():
        grid = grid_of(Rect(0, 0, *data.shape), blocks[name])
        removed, elements, size = sums[name]
        found[name] = TableStats(
            name=name,
            shape=data.shape,
            dtype=data.dtype,
            sharding=data.sharding,
            shards=len(data.rects),
            sparse_block_shape=configs[name].get("sparse_block_shape"),
            target=target_of(configs[name]),
            blocks=grid.rows * grid.cols,
            removed_blocks=removed,
            mask_bytes=size,
            table_bytes=data.shape[0] * data.shape[1] * data.dtype.itemsize,
            kept_bytes=(data.shape[0] * data.shape[1] - elements) * data.dtype.itemsize,
        )
    return found


def plain_stats(
    name: str, mask: Tensor, dtype: torch.dtype, config: Mapping[str, Any]
) -> TableStats:
    """Return the counts of plain data with this dense mask, element by element."""
    mask = as_matrix(mask)
    removed = int((mask == 0).sum())
    return TableStats(
        name=name,
        shape=(mask.shape[0], mask.shape[1]),
        dtype=dtype,
        sharding="plain",
        shards=1,
        sparse_block_shape=config.get("sparse_block_shape"),
        target=target_of(config),
        blocks=mask.numel(),
        removed_blocks=removed,
        mask_bytes=mask.numel() * mask.element_size(),
        table_bytes=mask.numel() * dtype.itemsize,
        kept_bytes=(mask.numel() - removed) * dtype.itemsize,
    )


def target_of(config: Mapping[str, Any]) -> float | None:
    """Return the configured sparsity_level, where there is one and a float can hold it."""
    level = config.get("sparsity_level")
    try:
        return float(level) if isinstance(level, numbers.Real) else None
    except OverflowError:
        return None


def count_removed(located: Located, masks: Masks) -> dict[str, int]:
    """Return the removed blocks of each table. Collective over the tables' groups: one all-reduce
    each."""
    counts = _summed(
        {name: _count(masks[name], data)[:1] for name, data in located.items()}, located, 1
    )
    return {name: count for name, [count] in counts.items()}


def count_revived(sparsifier: Registered, located: Located | None = None) -> dict[str, int]:
    """See :meth:`dist_sparse.BaseDataSparsifier.count_revived`; ``located`` spares a walk."""
    if located is None:
        located = sparsifier.packed_store.current("count_revived()")
    revived = _revived(sparsifier.packed_store, located) | _revived_plain(sparsifier.dense_store)
    return {name: revived[name] for name in sparsifier.data_groups if name in revived}


def _revived(packed: PackedStore, located: Located) -> dict[str, int]:
    """Removed weights of each table that are not zero. Collective over the tables' groups: one
    all-reduce each."""
    counts = {}
    for name, data in located.items():
        counts[name] = [0]
        for mask, shard in zip(packed.masks(name), data.shards, strict=True):
            for rows, kept in mask.element_chunks():
                counts[name][0] += int(((shard.tensor[rows] != 0) & ~kept).sum())
    return {name: count for name, [count] in _summed(counts, located, 1).items()}


def _revived_plain(dense: DenseStore) -> dict[str, int]:
    masked = filter(dense.is_masked, dense.names)
    return {
        name: int(((dense.mask(name) == 0) & (dense.weight(name) != 0)).sum()) for name in masked
    }


def full_mask(packed: PackedStore, name: str, max_bytes: int) -> Tensor:
    """See :meth:`dist_sparse.BaseDataSparsifier.full_mask`; of a sharded table."""
    data = packed.find(name)
    group = group_over(data.ranks)
    with group.agreeing("full_mask()") as facts:
        facts["name"] = name
        if (need := data.shape[0] * data.shape[1]) > max_bytes:
            raise ValueError(
                f"The mask of table {name!r} takes {need} bytes: more than {max_bytes=}."
            )
    packed.reshard({name: data})
    block = packed.block(name)
    held = dict(zip(data.tiling[group.rank], packed.masks(name), strict=True))
    mine = [held[rect].bits.cpu() for rect in data.owned(group.rank)]
    sizes = [
        sum(mask_bytes(rect, block) for rect in data.owned(rank)) for rank in range(group.size)
    ]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    if mine:
        padded[: sizes[group.rank]] = torch.cat(mine)
    gathered = group.all_gather(padded)
    full = torch.zeros(data.shape, dtype=torch.int8)
    for rank in range(group.size):
        start = 0
        for rect in data.owned(rank):
            stop = start + mask_bytes(rect, block)
            piece = BlockMask(rect, block, gathered[rank, start:stop]).dense()
            full[rect.row : rect.row_end, rect.col : rect.col_end] = piece
            start = stop
    return full


def fingerprints(sparsifier: Registered, action: str) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.fingerprint`; ``action`` is the public call, for
    messages."""
    packed, dense = sparsifier.packed_store, sparsifier.dense_store
    located = packed.current(action)
    hashes = {}
    for name, data in located.items():
        owned = set(data.owned(group_over(data.ranks).rank))
        distinct = {mask.rect: mask for mask in packed.masks(name)}
        hashes[name] = [sum(mask_hash(mask) for rect, mask in distinct.items() if rect in owned)]
    found = {
        name: (located[name].shape, value) for name, [value] in _summed(hashes, located, 1).items()
    }
    for name in dense.names:
        mask = as_matrix(dense.mask(name))
        shape = (mask.shape[0], mask.shape[1])
        found[name] = shape, mask_hash(BlockMask.of_elements(Rect(0, 0, *shape), mask))
    prints = {
        name: f"{(value + shape_hash(shape)) % (1 << 64):016x}"
        for name, (shape, value) in found.items()
    }
    return {name: prints[name] for name in sparsifier.data_groups}


def audit(sparsifier: Registered) -> dict[str, str]:
    """See :meth:`dist_sparse.BaseDataSparsifier.audit`."""
    packed, enforcer = sparsifier.packed_store, sparsifier.enforcer

    def refuse(drifted: Mapping[str, list[int]]) -> None:
        wrong = "; ".join(
            f"{place}: ranks {ranks} differ from the first holder"
            for place, ranks in drifted.items()
        )
        raise ValueError(f"Masks differ between their holders. {wrong}")

    located = packed.current("audit()")
    with packed.agreeing("audit()") as noted:
        for facts, names in noted:
            facts.on_drift = refuse
            for name in names:
                rank = group_over(located[name].ranks).rank
                facts.replicas |= shared_bits(
                    located[name], packed.block(name), packed.masks(name), rank
                )
        if enforcer is not None:
            # Dirty rows are zeroed before a forward reads them: they are no errors.
            enforcer.settle()
    revived = _revived(packed, located)
    if enforcer is not None:
        # Without one, plain data keeps the weights that it removes.
        revived |= _revived_plain(sparsifier.dense_store)
    # Of all groups: ranks that hold none of a table must not go on alone.
    with packed.agreeing("audit()"):
        _report_revived(
            {name: count for name, count in revived.items() if count}, enforced=enforcer is not None
        )
    return fingerprints(sparsifier, "audit()")


def _report_revived(revived: Mapping[str, int], *, enforced: bool) -> None:
    """Raise for removed weights that an enforcer would not have left nonzero; warn of others."""
    if not revived:
        return
    counts = "; ".join(
        f"table {name!r}: {count} removed weights are not zero" for name, count in revived.items()
    )
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


def dead_rows(sparsifier: Registered) -> dict[str, int]:
    """See :meth:`dist_sparse.BaseDataSparsifier.dead_rows`.

    No rank sees a whole row of a table that is cut by columns: the bits of a row are sent to the
    rank that counts it, an equal share of a table's rows each.
    """
    packed, dense = sparsifier.packed_store, sparsifier.dense_store
    located = packed.current("dead_rows()")
    counts: dict[str, list[int]] = {}
    for ranks, names in packed.groups.items():
        group = group_over(ranks)
        flags = {
            name: _owned_flags(located[name], packed.masks(name), group.rank) for name in names
        }
        counts |= {name: [sum(int(part.sum()) for part in flags[name].values())] for name in names}
        if cut := [
            name
            for name in names
            if any(rect.cols != located[name].shape[1] for rect in located[name].rects)
        ]:
            counts |= _counted_by_share([located[name] for name in cut], flags, group)
    dead = {name: count for name, [count] in _summed(counts, located, 1).items()}
    dead |= {name: int((as_matrix(dense.mask(name)) == 0).all(1).sum()) for name in dense.names}
    return {name: dead[name] for name in sparsifier.data_groups}


def dead_flags(mask: BlockMask) -> Tensor:
    """Return which rows of a shard have nothing left in it: bool ``(mask.rect.rows,)``, on the
    CPU."""
    grid, height = mask.grid, mask.block[0]
    if not mask.blocks:
        return torch.ones(mask.rect.rows, dtype=torch.bool)
    if grid.cols % 8 == 0:  # block rows begin at bytes, which need not be unpacked
        size = grid.cols // 8
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
        dead = (mask.bits.view(word) if word is not None else mask.bits.view(-1, size).amax(1)) == 0
    else:
        dead = torch.cat([~mask.flags(first, last).any(1) for first, last in mask.row_chunks()])
    if height == 1:
        return dead.cpu()
    edges = (torch.arange(grid.row, grid.row + grid.rows + 1) * height).clamp(
        mask.rect.row, mask.rect.row_end
    )
    return dead.cpu().repeat_interleave(edges.diff())


_HEAD = (
    "name",
    "shape",
    "dtype",
    "sharding",
    "shards (here)",
    "block",
    "zeros/block",
    "level",
    "mask bytes (here)",
)


def describe(sparsifier: Registered) -> str:
    """Return a text table of everything registered: name, shape, dtype, sharding, shards,
    configuration, level, mask bytes. Local.

    "here" counts what this rank holds; :meth:`~dist_sparse.BaseDataSparsifier.table_stats` counts
    over all ranks.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, describe
        >>> sparsifier = DataNormSparsifier(
        ...     [("user", torch.ones(100, 16))], sparse_block_shape=(1, 4)
        ... )
        >>> print(describe(sparsifier))
        DataNormSparsifier: 1 registered, over 1 rank
        name  shape     dtype    sharding  shards (here)  block  zeros/block  level  mask bytes
        (here)
        ----  --------  -------  --------  -------------  -----  -----------  -----
        ----------------- user  100 x 16  float32  plain     1 (1)          1x4    all          0.5
        6,400
    """
    dense, packed, configs = sparsifier.dense_store, sparsifier.packed_store, sparsifier.data_groups
    located = packed.locate()
    rows: list[tuple[str, ...]] = []
    size: tuple[int, ...]
    for name, config in configs.items():
        if name in located:
            data = located[name]
            size, dtype, sharding = tuple(data.shape), data.dtype, data.sharding
            shards = f"{len(data.rects)} ({len(data.shards)})"
            mask_size = sum(mask.bits.numel() for mask in packed.masks(name))
        else:
            weight, mask = dense.held(name), dense.mask(name)
            size, dtype, sharding, shards = tuple(weight.shape), weight.dtype, "plain", "1 (1)"
            mask_size = mask.numel() * mask.element_size()
        block, zeros, level = (
            config.get(key) for key in ("sparse_block_shape", "zeros_per_block", "sparsity_level")
        )
        rows.append(
            (
                name,
                shape_text(size),
                str(dtype).removeprefix("torch."),
                sharding,
                shards,
                block_shape_text(block),
                block_text(block, zeros),
                "-" if level is None else f"{level:.4g}",
                f"{mask_size:,}",
            )
        )
    ranks = max((len(data.ranks or (0,)) for data in located.values()), default=1)
    over = f"{ranks} rank{'s' if ranks > 1 else ''}"
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {over}"
    return "\n".join([title, *table_lines(_HEAD, rows)])


def _groups(located: Located) -> dict[tuple[int, ...] | None, list[str]]:
    """The tables' names by the ranks that hold them, in an order that all ranks share; larger
    groups come later."""
    groups: dict[tuple[int, ...] | None, list[str]] = {}
    for name in sorted(located):
        groups.setdefault(located[name].ranks, []).append(name)
    return dict(sorted(groups.items(), key=lambda entry: (len(entry[0] or ()), entry[0] or ())))


def _summed(values: Mapping[str, list[int]], located: Located, width: int) -> dict[str, list[int]]:
    """Integers per table, summed over its ranks modulo 2**64: one all-reduce a group."""
    summed: dict[str, list[int]] = {}
    for ranks, names in _groups(located).items():
        rows = [[_signed(v) for v in values[name]] for name in names]
        total = group_over(ranks).all_reduce(torch.tensor(rows, dtype=torch.int64).view(-1, width))
        summed.update(zip(names, total.tolist(), strict=True))
    return summed


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _count(masks: Sequence[BlockMask], data: ShardedData) -> list[int]:
    """Removed blocks, removed elements and mask bytes of this rank's shards. Replicas and cut
    blocks count for their first holder only."""
    owned = set(data.owned(group_over(data.ranks).rank))
    removed = elements = 0
    for mask in {mask.rect: mask for mask in masks}.values():
        if mask.rect in owned and mask.blocks:
            top, left = mask.rect.row % mask.block[0] > 0, mask.rect.col % mask.block[1] > 0
            if top or left:  # blocks that begin in another shard
                removed += int((~mask.flags()[int(top) :, int(left) :]).sum())
            else:
                removed += mask.blocks - count_bits(mask.bits)
            elements += element_counts(mask)
    return [removed, elements, sum(mask.bits.numel() for mask in masks)]


def _owned_flags(data: ShardedData, masks: Sequence[BlockMask], rank: int) -> dict[Rect, Tensor]:
    held = dict(zip(data.tiling[rank], masks, strict=True))
    return {rect: dead_flags(held[rect]) for rect in data.owned(rank) if rect.numel}


def _counted_by_share(
    tables: Sequence[ShardedData], flags: Mapping[str, Mapping[Rect, Tensor]], group: Group
) -> dict[str, list[int]]:
    """Of each table the dead rows among those that this rank counts. Collective: one all-to-all."""
    parcels = Parcels(group)
    for data in tables:
        for reader in range(group.size):
            for rect, i, j in _parts(data, group.rank, reader, group.size):
                parcels.send(reader, pack(flags[data.name][rect][i - rect.row : j - rect.row]))
    parts = [
        (data, i, j, parcels.expect(sender, (-(-(j - i) // 8),)))
        for data in tables
        for sender in range(group.size)
        for _, i, j in _parts(data, sender, group.rank, group.size)
    ]
    parcels.exchange(torch.device("cpu"))
    shares = {data.name: _share(data, group.rank, group.size) for data in tables}
    dead = {
        name: torch.ones(end - start, dtype=torch.bool) for name, (start, end) in shares.items()
    }
    for data, i, j, read in parts:
        start = shares[data.name][0]
        dead[data.name][i - start : j - start] &= unpack(read(), j - i)
    return {name: [int(rows.sum())] for name, rows in dead.items()}


def _share(data: ShardedData, rank: int, size: int) -> tuple[int, int]:
    """The rows that a rank counts."""
    rows = data.shape[0]
    return rows * rank // size, rows * (rank + 1) // size


def _parts(data: ShardedData, writer: int, reader: int, size: int) -> list[tuple[Rect, int, int]]:
    """What one rank's shards have of the rows that another counts:
    ``(shard, first row, last row)``, from metadata."""
    start, end = _share(data, reader, size)
    cuts = [
        (rect, max(rect.row, start), min(rect.row_end, end))
        for rect in data.owned(writer)
        if rect.numel
    ]
    return [(rect, i, j) for rect, i, j in cuts if i < j]
