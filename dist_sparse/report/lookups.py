"""How often do batches look up rows of which masks leave nothing, or only a part?

Ids are gathered per table, each with how often it came, and matched with the masks a stretch of rows at a time, so that
nothing of the size of a table is made. A row is *dead* when every one of its elements is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["Hits", "TableIds", "hits", "read_ids"]

_PENDING = 1 << 20
"""Ids that wait before they are counted."""

_FLAGS = 1 << 20
"""Flags of a mask that are unpacked at a time: 8 MiB."""

_ROWS = 1 << 20
"""Rows whose kept elements are summed over ranks at a time: 4 MiB."""


class Hits(NamedTuple):
    """Of one table, over all ranks: ids looked up, those whose row is dead, and removed weights among those read."""

    lookups: int
    dead: int
    removed: int


class TableIds:
    """The ids that look up one table of ``rows`` rows, and how often each came."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._waiting: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        """Counts ``ids``, integers of any shape."""
        self._waiting.append(ids.detach().flatten().to("cpu", torch.int64, copy=True))
        if sum(part.numel() for part in self._waiting) >= _PENDING:
            self._merge()

    def counted(self) -> tuple[Tensor, Tensor]:
        """Distinct ids, ascending, and how often each came; int64."""
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


def read_ids(batches: Iterable[Any], located: Mapping[str, ShardedData]) -> tuple[int, dict[str, TableIds]]:
    """The ids of batches by table, and how many batches there were. Local.

    Args:
        batches: each holds KeyedJaggedTensors, or mappings from features (or tables) to integer tensors or
            JaggedTensors: such a thing itself, or among the items of a tuple or list or the attributes of an object.
            Other things in it are left alone.
        located: the tables; their features say whose ids look them up. A table without features goes by its name.

    Raises:
        ValueError: a batch has no ids for any of the tables, or a feature twice; or ids that are no integers or lie
            outside their table.
    """
    tables = {name: TableIds(data.shape[0]) for name, data in located.items()}
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
                    f"Batch {number} has ids of {key!r} twice: give a mapping from table names to ids instead."
                )
            seen.add(key)
            for name in of[key]:
                _check(number, key, ids, name, tables[name].rows)
                tables[name].add(ids)
        if not seen:
            raise ValueError(
                f"Batch {number}, of type {type(batch).__name__}, has no ids for any of the tables; wanted are "
                f"KeyedJaggedTensors or mappings with some of the keys {sorted(of)}."
            )
    return number, tables


def hits(
    located: Mapping[str, ShardedData], masks: Mapping[str, list[BlockMask]], ids: Mapping[str, TableIds]
) -> dict[str, Hits]:
    """Matches ids with masks: :class:`Hits` by table, over all ranks. Collective over the tables' groups: 4 bytes for
    each row of a table, and one small message.

    Args:
        located: the tables.
        masks: of this rank's shards, in their order.
        ids: what this rank looks up.
    """
    return {name: _hits(data, masks[name], *ids[name].counted()) for name, data in located.items()}


def _hits(data: ShardedData, masks: list[BlockMask], ids: Tensor, counts: Tensor) -> Hits:
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
    return Hits(*group.all_reduce(sums).tolist())


def _kept_by_row(mask: BlockMask) -> Tensor:
    """How many elements each row of a shard keeps, int32 ``(rect.rows,)`` on the CPU."""
    rect, grid, (height, width) = mask.rect, mask.grid, mask.block
    device = mask.bits.device
    columns = torch.arange(grid.col, grid.col + grid.cols + 1, device=device) * width
    widths = columns.clamp(rect.col, rect.col_end).diff().double()
    rows = (torch.arange(grid.row, grid.row + grid.rows + 1) * height).clamp(rect.row, rect.row_end).diff()
    step = max(8, _FLAGS // max(1, grid.cols) // 8 * 8)
    kept = torch.empty(grid.rows, dtype=torch.int32)
    for first in range(0, grid.rows, step):
        last = min(first + step, grid.rows)
        kept[first:last] = mask.flags(first, last).double() @ widths
    return kept if height == 1 else kept.repeat_interleave(rows)


def _stretch(mine: Sequence[tuple[Rect, Tensor]], start: int, stop: int) -> Tensor:
    """What this rank's shards keep of the global rows ``[start, stop)``, int32."""
    kept = torch.zeros(stop - start, dtype=torch.int32)
    for rect, of_row in mine:
        low, high = max(start, rect.row), min(stop, rect.row_end)
        if low < high:
            kept[low - start : high - start] += of_row[low - rect.row : high - rect.row]
    return kept


def _check(number: int, key: str, ids: Tensor, name: str, rows: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"Batch {number}: {key!r} has ids of type {ids.dtype}; they must be integers.")
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= rows:
            raise ValueError(
                f"Batch {number}: {key!r} has ids from {int(low)} to {int(high)}; those of table {name!r} must lie in "
                f"[0, {rows})."
            )


def _ids_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Keys and ids of the KeyedJaggedTensors and mappings in a batch."""
    if _is_keyed(batch) or isinstance(batch, Mapping):
        yield from _keyed(batch)
        return
    parts = batch if isinstance(batch, (tuple, list)) else vars(batch).values() if hasattr(batch, "__dict__") else ()
    for part in parts:
        if _is_keyed(part) or isinstance(part, Mapping):
            yield from _keyed(part)


def _is_keyed(thing: Any) -> bool:
    """Whether it is a KeyedJaggedTensor, by what it can do: torchrec need not be here."""
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
