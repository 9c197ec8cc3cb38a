"""Dry run: what a sparsity level would prune from a model, and how many lookups it would hit.

- Masks are those of a mask update of :class:`~dist_sparse.DataNormSparsifier`, over all ranks. No weight is written,
  nothing of the user's is registered, and no table is copied.
- Ids are counted per table and matched with the masks a stretch of rows at a time: nothing as large as a table is
  allocated. A row is *dead* when all of its elements are pruned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.masking.masks import BlockMask
from dist_sparse.planning.lookups import TableIds, read_ids
from dist_sparse.records import TableStats
from dist_sparse.report.summary import table_json
from dist_sparse.sparsifiers.score import BlockShape, DataNormSparsifier, Norm
from dist_sparse.tables.shards import ROW, Rect, ShardedData
from dist_sparse.text import block_shape_text, mib, number_of, shape_text, table_lines

__all__ = ["DryRun", "TableDryRun", "dry_run"]

_ROWS = 1 << 20
"""Rows whose kept elements are summed over ranks at a time: 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class TableDryRun:
    """Dry run of one table, over all ranks.

    Args:
        stats: as ``table_stats()`` would return them after a mask update at that level.
        lookups: ids in the batches for this table; None without batches.
        dead_lookups: how many of them hit a dead row (with whole-row blocks: a pruned one).
        removed_reads: how many of the ``lookups * columns`` weights that they read are pruned.
    """

    stats: TableStats
    lookups: int | None = None
    dead_lookups: int | None = None
    removed_reads: int | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights that would be pruned; masks are not counted."""
        return self.stats.table_bytes - self.stats.kept_bytes

    @property
    def dead_share(self) -> float | None:
        """Share of the lookups that would hit a dead row; None without lookups."""
        return None if not self.lookups or self.dead_lookups is None else self.dead_lookups / self.lookups

    @property
    def removed_share(self) -> float | None:
        """Share of the weights read that would be pruned; None without lookups."""
        if not self.lookups or self.removed_reads is None:
            return None
        return self.removed_reads / (self.lookups * self.stats.shape[1])


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run, the same on every rank.

    Args:
        level, block, norm: as given.
        batches: number of batches over all ranks; None without batches.
        tables: in the order of the model.
    """

    level: float
    block: tuple[int | str, int | str]
    norm: str
    batches: int | None
    tables: tuple[TableDryRun, ...]

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables, dense; a replicated table counts once."""
        return sum(table.stats.table_bytes for table in self.tables)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that would be kept in all tables; masks are not counted."""
        return sum(table.stats.kept_bytes for table in self.tables)

    @property
    def mask_bytes(self) -> int:
        """Bytes of all masks over all ranks."""
        return sum(table.stats.mask_bytes for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values; sizes in bytes."""
        tables = [
            {
                **table_json(table.stats),
                "saved_bytes": table.saved_bytes,
                "lookups": table.lookups,
                "dead_lookups": table.dead_lookups,
                "dead_share": table.dead_share,
                "removed_share": table.removed_share,
            }
            for table in self.tables
        ]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sums = {name: getattr(self, name) for name in ("table_bytes", "kept_bytes", "mask_bytes")}
        return fields | {"block": list(self.block), "tables": tables} | sums

    def __str__(self) -> str:
        """Return a text table."""
        head = ["table", "shape", "sharding", "blocks", "pruned", "sparsity", "MiB", "kept MiB", "mask MiB"]
        known = self.batches is not None
        head += ["lookups", "dead rows", "dead weights"] if known else []
        rows = [_cells(table, known) for table in self.tables]
        total = ["all", "", "", *_sums(self, known)]
        how = f"sparsity level {self.level!r}, blocks {block_shape_text(self.block)}, {self.norm}"
        lines = [f"{how}; a dry run, nothing was changed", ""]
        lines += table_lines(head, rows, right=range(3, len(head)), total=total)
        saved = self.table_bytes - self.kept_bytes
        lines += [
            "",
            f"{mib(self.kept_bytes)} of {mib(self.table_bytes)} MiB of weights are kept, {mib(saved)} MiB are pruned.",
        ]
        if known:
            of = number_of(self.batches or 0, "batch", "batches")
            lines.append(
                f"Of the lookups in {of}, dead rows: share that would hit a row with all weights pruned; dead weights: "
                "pruned share of the weights read."
            )
        return "\n".join(lines)


def dry_run(
    model: nn.Module,
    *,
    level: float,
    batches: Iterable[Any] | None = None,
    block: BlockShape = (1, ROW),
    norm: Norm = "L2",
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
) -> DryRun:
    """Compute what a level would prune, table by table, and change nothing. Collective over all ranks.

    Weights are scored as stored: with a MaskEnforcer attached, call its ``settle()`` first. Memory: that of a mask
    update, 4 bytes per local row, and 16 bytes per distinct id in the batches.

    Args:
        model: as for ``add_model``.
        level: ``sparsity_level`` of every table, in [0, 1].
        batches: of this rank, read once. Each holds KeyedJaggedTensors, or mappings from features (or tables) to
            integer tensors or JaggedTensors: itself, among the items of a tuple or list, or among the attributes of an
            object. Everything else in it is ignored.
        block: ``sparse_block_shape``, as in :class:`~dist_sparse.DataNormSparsifier`.
        norm: ``"L1"`` or ``"L2"``.
        include, exclude: globs over tables, as for ``add_model``.

    Raises:
        ValueError: an argument is invalid or differs between ranks, a table can't be sparsified, or the batches do not
            fit the model; on every rank.

    Example::

        >>> import torch
        >>> from dist_sparse.planning.dry_run import dry_run
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).reshape(4, 2))
        >>> model = torch.nn.ModuleDict({"item": table})
        >>> answer = dry_run(model, level=0.5, batches=[{"item": torch.tensor([0, 2, 3])}])
        >>> answer.kept_bytes, answer.tables[0].dead_lookups, answer.tables[0].lookups
        (16, 1, 3)
    """
    world = group_over(world_ranks())
    with world.agreeing("dry_run()") as facts:
        level = checks.level("level", level)
        checks.choice("norm", norm, ("L1", "L2"))
        sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=block, norm=norm)
        shape = sparsifier.defaults["sparse_block_shape"]
        facts.update(level=level, block=shape, norm=sparsifier.norm, batches=batches is not None)
    sparsifier.add_model(model, include=include, exclude=exclude)
    located = sparsifier.packed_store.locate()
    with world.agreeing("dry_run()"):
        count, ids = read_ids(batches or (), located)
    preview = sparsifier.preview(level)
    found: dict[str, _Hits] = {}
    if batches is not None:
        found = _hits(located, preview.masks, ids)
        count = int(world.all_reduce(torch.tensor(count)))
    return DryRun(
        level=level,
        block=shape,
        norm=sparsifier.norm,
        batches=None if batches is None else count,
        tables=tuple(TableDryRun(stats=table, **_named(found.get(table.name))) for table in preview.stats),
    )


def _named(found: _Hits | None) -> dict[str, int]:
    if found is None:
        return {}
    return {"lookups": found.lookups, "dead_lookups": found.dead, "removed_reads": found.removed}


def _cells(table: TableDryRun, known: bool) -> list[str]:
    stats = table.stats
    cells = [stats.name, shape_text(stats.shape), stats.sharding]
    cells += [f"{stats.blocks:,}", f"{stats.removed_blocks:,}", f"{stats.sparsity:.4f}"]
    cells += [mib(stats.table_bytes), mib(stats.kept_bytes), mib(stats.mask_bytes)]
    return cells + ([f"{table.lookups:,}", _percent(table.dead_share), _percent(table.removed_share)] if known else [])


def _sums(answer: DryRun, known: bool) -> list[str]:
    stats = [table.stats for table in answer.tables]
    blocks, removed = sum(each.blocks for each in stats), sum(each.removed_blocks for each in stats)
    cells = [f"{blocks:,}", f"{removed:,}", f"{removed / blocks:.4f}" if blocks else "-"]
    cells += [mib(answer.table_bytes), mib(answer.kept_bytes), mib(answer.mask_bytes)]
    if not known:
        return cells
    lookups = sum(table.lookups or 0 for table in answer.tables)
    dead = sum(table.dead_lookups or 0 for table in answer.tables)
    read = sum((table.lookups or 0) * table.stats.shape[1] for table in answer.tables)
    pruned = sum(table.removed_reads or 0 for table in answer.tables)
    dead_share, pruned_share = dead / lookups if lookups else None, pruned / read if read else None
    return [*cells, f"{lookups:,}", _percent(dead_share), _percent(pruned_share)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}%"


class _Hits(NamedTuple):
    """Counts of one table over all ranks: ids, ids of dead rows, and pruned weights among those read."""

    lookups: int
    dead: int
    removed: int


def _hits(
    located: Mapping[str, ShardedData], masks: Mapping[str, list[BlockMask]], ids: Mapping[str, TableIds]
) -> dict[str, _Hits]:
    """Match the ids of this rank with the masks of its shards; return counts by table, over all ranks.

    Collective over the tables' groups: 4 bytes per row of a table, and one small message.
    """
    return {name: _hits_of(data, masks[name], *ids[name].counted()) for name, data in located.items()}


def _hits_of(data: ShardedData, masks: list[BlockMask], ids: Tensor, counts: Tensor) -> _Hits:
    group = group_over(data.ranks)
    rows, columns = data.shape
    of = {mask.rect: mask for mask in masks}
    mine = [(rect, _kept_by_row(of[rect])) for rect in data.owned(group.rank) if rect.numel]
    sums = torch.tensor([int(counts.sum()), 0, 0])
    for start in range(0, rows, _ROWS):
        stop = min(start + _ROWS, rows)
        kept = group.all_reduce(_stretch(mine, start, stop))
        first, last = torch.searchsorted(ids, torch.tensor([start, stop])).tolist()
        of_row, times = kept[ids[first:last] - start].to(torch.int64), counts[first:last]
        sums[1] += times[of_row == 0].sum()
        sums[2] += (times * (columns - of_row)).sum()
    return _Hits(*group.all_reduce(sums).tolist())


def _kept_by_row(mask: BlockMask) -> Tensor:
    """Return how many elements each row of a shard keeps, int32 ``(rect.rows,)`` on the CPU."""
    rect, grid, (height, width) = mask.rect, mask.grid, mask.block
    device = mask.bits.device
    columns = torch.arange(grid.col, grid.col + grid.cols + 1, device=device) * width
    widths = columns.clamp(rect.col, rect.col_end).diff().double()
    rows = (torch.arange(grid.row, grid.row + grid.rows + 1) * height).clamp(rect.row, rect.row_end).diff()
    kept = torch.empty(grid.rows, dtype=torch.int32)
    for first, last in mask.row_chunks():
        kept[first:last] = mask.flags(first, last).double() @ widths
    return kept if height == 1 else kept.repeat_interleave(rows)


def _stretch(mine: Sequence[tuple[Rect, Tensor]], start: int, stop: int) -> Tensor:
    """Return how many elements this rank's shards keep of the global rows ``[start, stop)``, int32."""
    kept = torch.zeros(stop - start, dtype=torch.int32)
    for rect, of_row in mine:
        low, high = max(start, rect.row), min(stop, rect.row_end)
        if low < high:
            kept[low - start : high - start] += of_row[low - rect.row : high - rect.row]
    return kept
