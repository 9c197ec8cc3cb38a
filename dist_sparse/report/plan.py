"""What would a sparsity level, or a budget of bytes, remove from a model? A dry run.

Masks are made by the functions that a due step makes them with, over all ranks, and put into a sparsifier that nobody
else sees. No weight is written, nothing of the user's is registered, and a table is never copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dist_sparse import checks
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.report.lookups import Hits, TableIds, hits, read_ids
from dist_sparse.report.run_log import table_json
from dist_sparse.report.words import number_of
from dist_sparse.sparsifiers.inspection import TableStats
from dist_sparse.sparsifiers.norm import DataNormSparsifier
from dist_sparse.sparsifiers.step import make_masks
from dist_sparse.tables.shards import ROW, ShardedData, resolve_block
from dist_sparse.text import mib, shape_text, table_lines

__all__ = ["Plan", "TablePlan", "plan"]

_STEPS = 10**6
"""A level for a budget is a multiple of one millionth."""


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """What would become of one table, over all ranks.

    Args:
        stats: as ``table_stats()`` would give them after a due step at that level.
        lookups: ids in the batches that look the table up; None without batches.
        dead_lookups: how many of them hit a row of which nothing is left (with whole-row blocks: a removed one).
        removed_reads: how many of the ``lookups * columns`` weights that they read are removed.
    """

    stats: TableStats
    lookups: int | None = None
    dead_lookups: int | None = None
    removed_reads: int | None = None

    @property
    def saved_bytes(self) -> int:
        """Of the weights that would go; masks are not counted."""
        return self.stats.table_bytes - self.stats.kept_bytes

    @property
    def dead_share(self) -> float | None:
        """Share of lookups that would hit a dead row; None without lookups."""
        return None if not self.lookups or self.dead_lookups is None else self.dead_lookups / self.lookups

    @property
    def removed_share(self) -> float | None:
        """Share of the weights read that would be removed; None without lookups."""
        if not self.lookups or self.removed_reads is None:
            return None
        return self.removed_reads / (self.lookups * self.stats.shape[1])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A dry run's answer, the same on every rank.

    Args:
        level: the sparsity level: that asked for, or the one found for the budget.
        byte_budget: as asked for.
        block: as asked for.
        norm: as asked for.
        batches: number of batches over all ranks; None without batches.
        tables: in the order of the model.
    """

    level: float
    byte_budget: int | None
    block: tuple[int, int | str]
    norm: str
    batches: int | None
    tables: tuple[TablePlan, ...]

    @property
    def table_bytes(self) -> int:
        """Of all tables planned, dense; a replicated one counted once."""
        return sum(table.stats.table_bytes for table in self.tables)

    @property
    def kept_bytes(self) -> int:
        """Of the weights that would be left in all tables; masks are not counted."""
        return sum(table.stats.kept_bytes for table in self.tables)

    @property
    def mask_bytes(self) -> int:
        """Of all masks over all ranks."""
        return sum(table.stats.mask_bytes for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-able values; bytes, not MiB."""
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
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sums = {name: getattr(self, name) for name in ("table_bytes", "kept_bytes", "mask_bytes")}
        return said | {"block": list(self.block), "tables": tables} | sums

    def __str__(self) -> str:
        """A text table for people."""
        asked = f"sparsity level {self.level!r}"
        if self.byte_budget is not None:
            asked += f", the lowest that keeps at most {mib(self.byte_budget)} MiB"
        head = ["table", "shape", "sharding", "blocks", "removed", "sparsity", "MiB", "kept MiB", "mask MiB"]
        known = self.batches is not None
        head += ["lookups", "dead rows", "dead weights"] if known else []
        rows = [_cells(table, known) for table in self.tables]
        total = ["all", "", "", *_sums(self, known)]
        lines = [f"{asked}, blocks {shape_text(self.block)}, {self.norm}; a dry run, nothing was changed", ""]
        lines += table_lines(head, rows, right=range(3, len(head)), total=total)
        saved = self.table_bytes - self.kept_bytes
        lines += ["", f"{mib(self.kept_bytes)} of {mib(self.table_bytes)} MiB of weights are kept, {mib(saved)} go."]
        if known:
            of = number_of(self.batches or 0, "batch", "batches")
            lines.append(
                f"Of the lookups in {of}, dead rows: those whose row would have nothing left; dead weights: of what "
                "they read."
            )
        return "\n".join(lines)


def plan(
    model: nn.Module,
    *,
    level: float | None = None,
    byte_budget: int | None = None,
    batches: Iterable[Any] | None = None,
    block: tuple[int, int | str] = (1, ROW),
    norm: str = "L2",
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
) -> Plan:
    """What a level or a budget would remove, table by table; changes nothing. Collective: every rank of the world must
    call it.

    Weights are scored as they lie: with a MaskEnforcer attached, call its ``settle()`` first. It takes the memory of a
    due step, 4 bytes for each local row and 16 for each id that the batches look up.

    Args:
        model: as for ``add_model``.
        level: ``sparsity_level`` of every table, in [0, 1]. Either this or
        byte_budget: bytes that the kept weights of all tables together may take, >= 0; masks, and tables that are left
            out, are not counted. The answer is the lowest common level (a multiple of one millionth) that keeps to it,
            found by bisection over exact counts. Where blocks do not divide a table, that takes up to 20 due steps'
            time.
        batches: this rank's, read once: see :func:`dist_sparse.report.lookups.read_ids`.
        block: ``sparse_block_shape``.
        norm: ``"L1"`` or ``"L2"``.
        include, exclude: globs over tables, as for ``add_model``.

    Raises:
        ValueError: an argument is wrong or differs between ranks, a table can't be sparsified, or the batches do not
            fit the model; on every rank.
    """
    error: Exception | None = None
    try:
        _check(level, byte_budget, norm)
    except ValueError as fault:
        error = fault
    facts = {"level": level, "byte_budget": byte_budget, "block": block, "norm": norm, "batches": batches is not None}
    world = group_over(world_ranks())
    world.agree("plan()", facts, error)
    sparsifier = DataNormSparsifier(sparsity_level=level or 0.0, sparse_block_shape=block, norm=norm)
    sparsifier.add_model(model, include=include, exclude=exclude)
    located = sparsifier._tables.locate()
    count, ids = 0, dict[str, TableIds]()
    try:
        count, ids = read_ids(batches or (), located)
    except Exception as fault:
        error = fault
    world.agree("plan()", {}, error)
    level = _lowest(sparsifier, located, byte_budget) if byte_budget is not None else level
    assert level is not None
    stats = _at(sparsifier, level)
    found: dict[str, Hits] = {}
    if batches is not None:
        found = hits(located, {name: sparsifier._tables.masks(name) for name in located}, ids)
        count = int(world.all_reduce(torch.tensor(count)))
    return Plan(
        level=level,
        byte_budget=byte_budget,
        block=block,
        norm=norm,
        batches=None if batches is None else count,
        tables=tuple(TablePlan(stats=table, **_named(found.get(table.name))) for table in stats),
    )


def _check(level: float | None, byte_budget: int | None, norm: str) -> None:
    if (level is None) == (byte_budget is None):
        raise ValueError(f"Invalid {level=}, {byte_budget=}: exactly one of the two must be given.")
    if level is not None:
        checks.level("level", level)
    if byte_budget is not None:
        checks.integer("byte_budget", byte_budget, least=0)
    if norm not in ("L1", "L2"):
        raise ValueError(f"Invalid {norm=}: must be 'L1' or 'L2'.")


def _at(sparsifier: DataNormSparsifier, level: float) -> list[TableStats]:
    """How the tables would stand at a level: the masks of a due step, put where nobody else looks. Collective."""
    for config in sparsifier.data_groups.values():
        config["sparsity_level"] = level
    tables = sparsifier._tables
    with torch.no_grad():
        located, made = make_masks(tables, sparsifier._rule(), None, "raise", action="plan()")
    for name, new in made.items():
        tables.commit(located[name], [mask for mask, _ in new.masks], new.block)
    return sparsifier.table_stats()


def _lowest(sparsifier: DataNormSparsifier, located: dict[str, ShardedData], byte_budget: int) -> float:
    """The lowest level that keeps at most ``byte_budget`` bytes; what is kept shrinks as the level grows. Collective,
    unless all blocks are of one size."""
    low, high = 0, _STEPS
    while low < high:
        middle = (low + high) // 2
        if _kept(sparsifier, located, middle / _STEPS) <= byte_budget:
            high = middle
        else:
            low = middle + 1
    return low / _STEPS


def _kept(sparsifier: DataNormSparsifier, located: dict[str, ShardedData], level: float) -> int:
    """Bytes kept at a level. Which blocks go matters only where those at the edges are smaller."""
    kept = 0
    for name, data in located.items():
        block = resolve_block(name, sparsifier.data_groups[name]["sparse_block_shape"], data.shape)
        if any(size % side for size, side in zip(data.shape, block, strict=True)):
            return sum(table.kept_bytes for table in _at(sparsifier, level))
        blocks = math.prod(data.shape) // math.prod(block)
        kept += (blocks - round(level * blocks)) * math.prod(block) * data.dtype.itemsize
    return kept


def _named(found: Hits | None) -> dict[str, int]:
    if found is None:
        return {}
    return {"lookups": found.lookups, "dead_lookups": found.dead, "removed_reads": found.removed}


def _cells(table: TablePlan, known: bool) -> list[str]:
    stats = table.stats
    cells = [stats.name, shape_text(stats.shape), stats.sharding]
    cells += [f"{stats.blocks:,}", f"{stats.removed_blocks:,}", f"{stats.sparsity:.4f}"]
    cells += [mib(stats.table_bytes), mib(stats.kept_bytes), mib(stats.mask_bytes)]
    return cells + ([f"{table.lookups:,}", _share(table.dead_share), _share(table.removed_share)] if known else [])


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
    gone = sum(table.removed_reads or 0 for table in answer.tables)
    return [*cells, f"{lookups:,}", _share(dead / lookups if lookups else None), _share(gone / read if read else None)]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
