"""Dry run: what a sparsity level, or a budget of bytes, would prune from a model, and how many lookups it would hit.

- Masks are those of a mask update of :class:`~dist_sparse.DataNormSparsifier`, over all ranks. No weight is written,
  nothing of the user's is registered, and no table is copied.
- Ids are counted per table and matched with the masks a stretch of rows at a time: nothing as large as a table is
  allocated. A row is *dead* when all of its elements are pruned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.masking.masks import BlockMask
from dist_sparse.report.summary import table_json
from dist_sparse.sparsifiers.score import BlockShape, DataNormSparsifier, Norm
from dist_sparse.sparsifiers.stats import TableStats
from dist_sparse.tables.shards import ROW, Rect, ShardedData, resolve_block
from dist_sparse.text import block_shape_text, mib, number_of, shape_text, table_lines

__all__ = ["Plan", "TablePlan", "plan"]

_STEPS = 10**6
"""A level for a budget is a multiple of one millionth."""

_PENDING = 1 << 20
"""Ids to collect before they are counted."""

_ROWS = 1 << 20
"""Rows whose kept elements are summed over ranks at a time: 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class TablePlan:
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
class Plan:
    """Result of a dry run, the same on every rank.

    Args:
        level: the sparsity level that was given, or found for the budget.
        byte_budget, block, norm: as given.
        batches: number of batches over all ranks; None without batches.
        tables: in the order of the model.
    """

    level: float
    byte_budget: int | None
    block: tuple[int | str, int | str]
    norm: str
    batches: int | None
    tables: tuple[TablePlan, ...]

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
        """Return the plan as JSON-able values; sizes in bytes."""
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
        title = f"sparsity level {self.level!r}"
        if self.byte_budget is not None:
            title += f", the lowest that keeps at most {mib(self.byte_budget)} MiB"
        head = ["table", "shape", "sharding", "blocks", "pruned", "sparsity", "MiB", "kept MiB", "mask MiB"]
        known = self.batches is not None
        head += ["lookups", "dead rows", "dead weights"] if known else []
        rows = [_cells(table, known) for table in self.tables]
        total = ["all", "", "", *_sums(self, known)]
        lines = [f"{title}, blocks {block_shape_text(self.block)}, {self.norm}; a dry run, nothing was changed", ""]
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


def plan(
    model: nn.Module,
    *,
    level: float | None = None,
    byte_budget: int | None = None,
    batches: Iterable[Any] | None = None,
    block: BlockShape = (1, ROW),
    norm: Norm = "L2",
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
) -> Plan:
    """Compute what a level or a budget would prune, table by table, and change nothing. Collective over all ranks.

    Weights are scored as stored: with a MaskEnforcer attached, call its ``settle()`` first. Memory: that of a mask
    update, 4 bytes per local row, and 16 bytes per distinct id in the batches.

    Args:
        model: as for ``add_model``.
        level: ``sparsity_level`` of every table, in [0, 1]. Give either this or ``byte_budget``.
        byte_budget: bytes, >= 0, that the kept weights of all tables together may take; masks, and tables that are
            left out, are not counted. The result has the lowest common level (a multiple of one millionth) within it,
            by bisection over exact counts. Where blocks do not divide a table, that takes the time of up to 20 mask
            updates.
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
        >>> from dist_sparse.report import plan
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).reshape(4, 2))
        >>> model = torch.nn.ModuleDict({"item": table})
        >>> answer = plan(model, level=0.5, batches=[{"item": torch.tensor([0, 2, 3])}])
        >>> answer.kept_bytes, answer.tables[0].dead_lookups, answer.tables[0].lookups
        (16, 1, 3)
    """
    world = group_over(world_ranks())
    with world.agreeing("plan()") as facts:
        level, byte_budget = _checked(level, byte_budget, norm)
        sparsifier = DataNormSparsifier(sparsity_level=level or 0.0, sparse_block_shape=block, norm=norm)
        shape = sparsifier.defaults["sparse_block_shape"]
        facts.update(
            level=level, byte_budget=byte_budget, block=shape, norm=sparsifier.norm, batches=batches is not None
        )
    sparsifier.add_model(model, include=include, exclude=exclude)
    located = sparsifier.packed_store.locate()
    with world.agreeing("plan()"):
        count, ids = _read_ids(batches or (), located)
    level = _lowest(sparsifier, located, byte_budget) if byte_budget is not None else level
    assert level is not None
    preview = sparsifier.preview(level)
    found: dict[str, _Hits] = {}
    if batches is not None:
        found = _hits(located, preview.masks, ids)
        count = int(world.all_reduce(torch.tensor(count)))
    return Plan(
        level=level,
        byte_budget=byte_budget,
        block=shape,
        norm=sparsifier.norm,
        batches=None if batches is None else count,
        tables=tuple(TablePlan(stats=table, **_named(found.get(table.name))) for table in preview.stats),
    )


def _checked(level: float | None, byte_budget: int | None, norm: str) -> tuple[float | None, int | None]:
    checks.choice("norm", norm, ("L1", "L2"))
    if (level is None) == (byte_budget is None):
        raise ValueError(f"Invalid {level=}, {byte_budget=}: exactly one of the two must be given.")
    if byte_budget is None:
        return checks.level("level", level), None
    return None, checks.integer("byte_budget", byte_budget, least=0)


def _lowest(sparsifier: DataNormSparsifier, located: dict[str, ShardedData], byte_budget: int) -> float:
    """Return the lowest level that keeps at most ``byte_budget`` bytes: fewer are kept as the level grows. Collective
    unless all blocks have one size."""
    low, high = 0, _STEPS
    while low < high:
        middle = (low + high) // 2
        if _kept(sparsifier, located, middle / _STEPS) <= byte_budget:
            high = middle
        else:
            low = middle + 1
    return low / _STEPS


def _kept(sparsifier: DataNormSparsifier, located: dict[str, ShardedData], level: float) -> int:
    """Return the bytes kept at a level. Which blocks are pruned matters only where those at the edges are smaller."""
    kept = 0
    for name, data in located.items():
        block = resolve_block(name, sparsifier.data_groups[name]["sparse_block_shape"], data.shape)
        if any(size % side for size, side in zip(data.shape, block, strict=True)):
            return sum(table.kept_bytes for table in sparsifier.preview(level).stats)
        blocks = math.prod(data.shape) // math.prod(block)
        kept += (blocks - round(level * blocks)) * math.prod(block) * data.dtype.itemsize
    return kept


def _named(found: _Hits | None) -> dict[str, int]:
    if found is None:
        return {}
    return {"lookups": found.lookups, "dead_lookups": found.dead, "removed_reads": found.removed}


def _cells(table: TablePlan, known: bool) -> list[str]:
    stats = table.stats
    cells = [stats.name, shape_text(stats.shape), stats.sharding]
    cells += [f"{stats.blocks:,}", f"{stats.removed_blocks:,}", f"{stats.sparsity:.4f}"]
    cells += [mib(stats.table_bytes), mib(stats.kept_bytes), mib(stats.mask_bytes)]
    return cells + ([f"{table.lookups:,}", _percent(table.dead_share), _percent(table.removed_share)] if known else [])


def _sums(answer: Plan, known: bool) -> list[str]:
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


class _TableIds:
    """Ids for one table of ``rows`` rows, and how often each occurs."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._waiting: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        """Count ``ids``, integers of any shape."""
        self._waiting.append(ids.detach().flatten().to("cpu", torch.int64, copy=True))
        if sum(part.numel() for part in self._waiting) >= _PENDING:
            self._merge()

    def counted(self) -> tuple[Tensor, Tensor]:
        """Return the distinct ids, ascending, and how often each occurs; int64."""
        self._merge()
        return self._ids, self._counts

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, times = torch.unique(torch.cat(self._waiting), return_counts=True)
        self._waiting = []
        self._ids, place = torch.unique(torch.cat([self._ids, new]), return_inverse=True)
        counts = torch.cat([self._counts, times])
        self._counts = torch.zeros(self._ids.numel(), dtype=torch.int64).index_add_(0, place, counts)


def _read_ids(batches: Iterable[Any], located: Mapping[str, ShardedData]) -> tuple[int, dict[str, _TableIds]]:
    """Return the number of batches and their ids by table. Local.

    Args:
        batches: as for :func:`plan`.
        located: the tables, with the features that look them up; a table without features has its own name as one.

    Raises:
        ValueError: a batch has no ids for any of the tables, or a feature twice, or ids that are not integers or not in
            their table.
    """
    tables = {name: _TableIds(data.shape[0]) for name, data in located.items()}
    of: dict[str, list[str]] = {}
    for name, data in located.items():
        for feature in data.features:
            of.setdefault(feature, []).append(name)
    of = {name: [name] for name in located} | of
    number = 0
    for number, batch in enumerate(batches, start=1):
        seen: set[str] = set()
        for key, ids in _ids_in(batch):
            if key not in of:
                continue
            if key in seen:
                raise ValueError(
                    f"Batch {number} has ids of {key!r} twice: use a mapping from table names to ids instead."
                )
            seen.add(key)
            for name in of[key]:
                _check_ids(number, key, ids, name, tables[name].rows)
                tables[name].add(ids)
        if not seen:
            raise ValueError(
                f"Batch {number}, of type {type(batch).__name__}, has no ids for any of the tables: must hold "
                f"KeyedJaggedTensors or mappings with some of the keys {sorted(of)}."
            )
    return number, tables


def _hits(
    located: Mapping[str, ShardedData], masks: Mapping[str, list[BlockMask]], ids: Mapping[str, _TableIds]
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


def _check_ids(number: int, key: str, ids: Tensor, name: str, rows: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"Batch {number}: {key!r} has ids of type {ids.dtype}; they must be integers.")
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= rows:
            raise ValueError(
                f"Batch {number}: {key!r} has ids from {int(low)} to {int(high)}; must be in [0, {rows}), "
                f"the rows of table {name!r}."
            )


def _ids_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and ids of the KeyedJaggedTensors and mappings in a batch."""
    if _is_keyed(batch) or isinstance(batch, Mapping):
        yield from _keyed(batch)
        return
    parts = batch if isinstance(batch, (tuple, list)) else vars(batch).values() if hasattr(batch, "__dict__") else ()
    for part in parts:
        if _is_keyed(part) or isinstance(part, Mapping):
            yield from _keyed(part)


def _is_keyed(thing: Any) -> bool:
    """Return whether it has the interface of a KeyedJaggedTensor: torchrec may not be installed."""
    return hasattr(thing, "offset_per_key") and hasattr(thing, "keys") and hasattr(thing, "values")


def _keyed(holder: Any) -> Iterator[tuple[str, Tensor]]:
    if _is_keyed(holder):
        ends, values = holder.offset_per_key(), holder.values()
        for place, key in enumerate(holder.keys()):
            yield key, values[ends[place] : ends[place + 1]]
        return
    for key, ids in holder.items():
        if isinstance(ids, Tensor):
            yield key, ids
        elif callable(getattr(ids, "values", None)) and isinstance(ids.values(), Tensor):
            yield key, ids.values()
