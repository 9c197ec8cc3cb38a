"""Rows that training has never or hardly read, as the state of optimizers or counts of lookups
tell: :func:`rows_by_reads`. Removing rows that were never read changes no prediction on training
ids; :func:`unread_share` tells what share of other lookups would then read zeros.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.compaction.moving import gather_rows, on_all_ranks
from dist_sparse.groups import world_group
from dist_sparse.ids.share import Share, share_of
from dist_sparse.optimizers import NOT_STEPPED, LookupRecord, read_rows
from dist_sparse.remove import COUNTED, known_rows
from dist_sparse.tables.initial import Unread, doubt_about, trained_text
from dist_sparse.tables.shards import Rect, ShardedData

_NO_GRADIENT = "no row has a gradient: it was not trained, or the optimizer's state was not loaded"
_NOT_COVERED = "the record does not cover its training"
# Reasons that the optimizer's state would remove.
WITHOUT_STATE = (NOT_STEPPED, _NO_GRADIENT, _NOT_COVERED)
_NO_LOOKUP = {COUNTED: "the record has no lookup of it"}
_ALL_GRADIENTS = (
    "every row has a gradient: all were looked up, or a loss term reads the whole table, such as an"
    " L2 of its weight"
)


@dataclass(frozen=True, kw_only=True)
class RowsByReads:
    """Numbers of rows that no gradient, or hardly any, has reached, by table. Of counts of lookups:
    rows without a lookup.

    Args:
        never: numbers of rows that no gradient has reached.
        hardly: numbers of rows that gradients have hardly reached; only Adagrad's sums tell.
        unknown: why both are unknown. Tables without rows are in none of the three.
        records: what tells of the tables in ``never``, and which steps that covers, as text.
        doubts: why nothing shows that the record covers the training, for tables in ``never`` with
            rows that it has not seen.
        read: which rows were read, bool ``(rows,)``, of the tables in ``never`` that
            this rank holds.
    """

    never: dict[str, int] = field(default_factory=dict)
    hardly: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)


# What a rank knows about the rows of a table: the reason why they are unknown; or whether their
# state is a sum, whether only lookups make gradients, the total of the sums, the number of rows
# that have one, and the record as text. None where it holds no rows.
_Local = str | tuple[bool, bool, float, int, str] | None

# Which rows of each of this rank's shards of a table were read.
ReadFlags = Mapping[Rect, Tensor]


def rows_by_reads(
    model: nn.Module,
    located: Sequence[ShardedData],
    optimizer: Any = None,
    counts: Mapping[str, Tensor] | None = None,
) -> RowsByReads:
    """Return how many rows no gradient, or hardly any, has reached, by table, as the state of
    optimizers tells, or how many have no lookup (:func:`~dist_sparse.remove.known_rows`).
    Collective over the world.

    Args:
        model: holds the tables, and the optimizers of fused ones.
        located: the tables.
        optimizer: the optimizer that steps the other tables, or a sequence of several.
        counts: lookups of rows, the same on all ranks; they tell instead of optimizers.

    Raises:
        ValueError: something in ``optimizer`` is not an optimizer, or the counts do not fit.
    """
    world = world_group()
    with world.agreeing("plan()"):
        found = known_rows(model, located, optimizer, counts)
        read = _read_of_known(located, found)
        totals = [_local_reads(data, found[data.name], read) for data in located]
    # A table is known only if each rank knows all its shards.
    by_table = dict(zip(found, zip(*world.all_gather_json(totals), strict=True), strict=True))
    result = RowsByReads()
    by_ranks: dict[tuple[int, ...], list[ShardedData]] = defaultdict(list)
    for data in located:
        reasons = [part for part in by_table[data.name] if isinstance(part, str)]
        ranks = data.ranks or (world.rank,)
        if reasons:
            result.unknown[data.name] = reasons[0]
        # Only the ranks that hold a table take part in its gather.
        elif world.rank in ranks and any(by_table[data.name]):
            by_ranks[ranks].append(data)
    # Over the world, because a table of a few ranks reports errors to these alone.
    with world.jointly("plan()"):
        # All ranks use one order, or groups that overlap would wait for each other.
        for ranks in sorted(by_ranks):
            _count_rows(by_ranks[ranks], found, read, by_table, result)
    # Ranks that share a table have counted the same. If the model is not wrapped, each rank has
    # counted its own copy: take the first one's counts. All but the flags, which each rank keeps
    # for itself.
    counted = {**vars(result), "read": {}}
    merged = RowsByReads(read=result.read)
    for of_rank in reversed(world.all_gather_json(counted)):
        for name, values in of_rank.items():
            getattr(merged, name).update(values)
    return merged


def unread_share(
    located: Sequence[ShardedData], reads: RowsByReads, batches: Iterable[Any]
) -> Share:
    """Return which lookups of ``batches`` would read zeros if the rows never read were removed.
    Collective over the world.

    Args:
        located: the tables.
        reads: what :func:`rows_by_reads` has returned for them.
        batches: as in :func:`~dist_sparse.count_lookups`.

    Raises:
        ValueError: see :func:`~dist_sparse.count_lookups`; on every rank.
    """
    # If the model is not wrapped, a rank may know its own copy where another does not.
    known = reads.never.keys() - reads.unknown.keys()
    tables = {data.name: data for data in located if data.name in known}
    return share_of("plan()", located, on_all_ranks(tables, reads.read), batches, True)


def _read_of_known(
    located: Sequence[ShardedData], found: Mapping[str, list[LookupRecord] | str]
) -> dict[str, ReadFlags]:
    """Return which rows of this rank's shards were read, for the tables of which it knows that."""
    read: dict[str, ReadFlags] = {}
    for data in located:
        known = found[data.name]
        if not isinstance(known, str):
            read[data.name] = read_rows(data, known)
    return read


def _local_reads(
    data: ShardedData, known: list[LookupRecord] | str, read: Mapping[str, ReadFlags]
) -> _Local:
    """Return what this rank knows of the rows of its shards of a table."""
    if isinstance(known, str):
        return known
    if not known:
        return None
    for record, shard in zip(known, data.shards, strict=True):
        unread = Unread(data, shard.tensor, ~read[data.name][shard.rect], record.text())
        # This happens after weights were loaded without their optimizer state.
        if reason := trained_text(unread):
            return f"{_NOT_COVERED}: {reason} (the record: {unread.record})"
    is_sum = all(record.is_sum for record in known)
    total, touched = 0.0, 0
    for record in known if is_sum else ():
        rows = record.row_sums()
        # One sum that overflowed would be more than all others.
        rows = rows[rows.isfinite()]
        total += float(rows.sum(dtype=torch.float64))
        touched += int(rows.count_nonzero())
    lookups_only = all(record.lookups_only for record in known)
    return is_sum, lookups_only, total, touched, known[0].text()


def _count_rows(
    tables: Sequence[ShardedData],
    found: Mapping[str, list[LookupRecord] | str],
    read: Mapping[str, ReadFlags],
    by_table: Mapping[str, Sequence[Any]],
    result: RowsByReads,
) -> None:
    """Add the counts of tables over the same ranks to ``result``. Collective over these.

    Args:
        found: what :func:`~dist_sparse.optimizers.records` returned.
        read: which rows of this rank's shards were read.
        by_table: what :func:`_local_reads` returned on each rank.
    """
    floors: dict[str, float] = {}
    dense: list[ShardedData] = []
    of_record: dict[str, str] = {}
    for data in tables:
        known = zip(*filter(None, by_table[data.name]), strict=True)
        sums, lookups, totals, touched, texts = known
        if all(sums):
            # A tenth of the mean.
            floors[data.name] = sum(totals) / 10 / max(sum(touched), 1)
        if not all(lookups):
            dense.append(data)
        of_record[data.name] = texts[0]
    with_sums = [data for data in tables if data.name in floors]
    read_by_any = _gather(tables, partial(_read_here, read))
    often = _gather(with_sums, partial(_often, found, floors))
    nonzero = _gather(dense, _nonzero)
    for name, rows in read_by_any.items():
        # An L2 has no gradient for a row of zeros, such as the row of a padding_idx.
        unread = ~rows & nonzero.get(name, ~rows)
        if not rows.any():
            result.unknown[name] = _NO_LOOKUP.get(of_record[name], _NO_GRADIENT)
        elif name in nonzero and not unread.any():
            result.unknown[name] = _ALL_GRADIENTS
        else:
            result.never[name] = int((~rows).sum())
            result.records[name] = of_record[name]
            result.read[name] = rows
    result.doubts.update(_doubts(tables, result.never))
    for name in often.keys() & result.never.keys():
        result.hardly[name] = int((~often[name]).sum()) - result.never[name]


def _doubts(tables: Iterable[ShardedData], never: Mapping[str, int]) -> dict[str, str]:
    """Return why nothing shows that a record covers the training, by table.

    Args:
        never: numbers of rows that no record has seen, by table.
    """
    doubts = {}
    for data in tables:
        doubt = doubt_about(data)
        if doubt and never.get(data.name):
            doubts[data.name] = doubt
    return doubts


def _gather(
    tables: Sequence[ShardedData], flags: Callable[[ShardedData, Rect], Tensor]
) -> dict[str, Tensor]:
    """Return :func:`~dist_sparse.compaction.moving.gather_rows` of tables, perhaps of none."""
    return gather_rows(tables, flags, _reported_rects) if tables else {}


def _reported_rects(data: ShardedData, rank: int) -> Sequence[Rect]:
    """Return the rectangles that a rank reports: all of a copy that trains apart, since each copy
    sees different batches; otherwise the ones that it owns, so that one replica reports for all."""
    return data.tiling[rank] if data.copied else data.owned(rank)


def _shard_at(data: ShardedData, rect: Rect) -> int | None:
    """Return the number of the shard at ``rect``; None if it is empty."""
    places = [shard.rect for shard in data.shards]
    return places.index(rect) if rect.numel else None


def _read_here(read: Mapping[str, ReadFlags], data: ShardedData, rect: Rect) -> Tensor:
    """Return which rows of a shard were read: bool ``(rect.rows,)`` on the CPU."""
    # A rank may have no shard at an empty rectangle.
    if not rect.numel:
        return torch.zeros(rect.rows, dtype=torch.bool)
    return read[data.name][rect].cpu()


def _often(
    found: Mapping[str, Any], floors: Mapping[str, float], data: ShardedData, rect: Rect
) -> Tensor:
    """Return which rows of a shard were touched, and have a sum of squares that is not below the
    floor of the table: bool ``(rect.rows,)`` on the CPU."""
    shard = _shard_at(data, rect)
    if shard is None:
        return torch.zeros(rect.rows, dtype=torch.bool)
    rows = found[data.name][shard].row_sums()
    # Not `rows >= floor`, which is False for NaN: a row that diverged was read.
    flags: Tensor = (rows != 0) & ~(rows < floors[data.name])
    return flags.cpu()


def _nonzero(data: ShardedData, rect: Rect) -> Tensor:
    """Return which rows of a shard have a weight other than 0: bool ``(rect.rows,)`` on the CPU."""
    shard = _shard_at(data, rect)
    if shard is None:
        return torch.zeros(rect.rows, dtype=torch.bool)
    return data.shards[shard].tensor.any(1).cpu()
