"""Whole rows of sharded tables, read and changed in place, chunk by chunk.

Rows that column borders cut are assembled by one all-to-all per chunk: no rank holds more than one
chunk of other ranks' rows. Every rank derives the messages from metadata that all have.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.device import with_one_retry
from dist_sparse.parcels import Parcels, Read
from dist_sparse.tables.shards import Rect, ShardedData

# Elements of a chunk: 8 MiB of float64.
_CHUNK = 1 << 20


def refuse_cut_copies(data: ShardedData, action: str) -> None:
    """Refuse a table whose columns are on several ranks, in several copies."""
    if data.copied and not data.has_whole_rows:
        raise ValueError(
            f"Table {data.name!r} can't be {action}: its columns are on several ranks, and 2-D"
            " parallelism trains copies of them; shard it by rows or by table."
        )


def change_rows_(data: ShardedData, change: Callable[[Tensor], Tensor], group: Group) -> None:
    """Replace rows in place by ``change`` of them. Collective over ``group`` if column borders cut
    the table: one all-to-all per chunk of about a million elements. A rank that runs out of memory
    in such a message leaves the table partly changed.

    Args:
        change: takes some whole rows, ``(n, columns)``, and returns as many, in any floating dtype.
    """
    readers = [list(dict.fromkeys(map(row_span, rects))) for rects in data.tiling]
    for span, rows in whole_rows(data, group, readers):
        # All that takes memory comes before the writes of a chunk, and may be done twice.
        for place, changed in with_one_retry(partial(_changed_parts, data, change, span, rows)):
            place.copy_(changed)


def _changed_parts(
    data: ShardedData, change: Callable[[Tensor], Tensor], span: range, rows: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the places of some rows in this rank's shards, each with its new values."""
    changed = change(rows)
    parts = []
    # A rank may hold several shards of the same rows.
    for rect, weight in data.shards:
        if _overlap(span, row_span(rect)) == span:
            # A copy: the last part of a result may be a view of what is written first.
            own = changed[:, rect.col : rect.col_end].to(weight.dtype, copy=True)
            parts.append((weight.data[within(span, rect.row)], own))
    return parts


def whole_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]]
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows that this rank reads, chunk by chunk: their global numbers, and their values,
    ``(rows, columns)``, possibly a view. Collective over ``group`` if column borders cut the table.

    Args:
        readers: for each group rank the rows that it reads, without repeats. Each range is the rows
            of one shard.
    """
    # At least one row, however many columns it has.
    step = max(1, _CHUNK // data.shape[1])
    if not data.has_whole_rows:
        for top in range(0, data.shape[0], step):
            yield from _assembled_rows(data, group, readers, range(top, top + step))
        return
    # Readers have their rows whole: nothing is sent.
    held = {row_span(rect): weight.data for rect, weight in data.shards}
    for rows in readers[group.rank]:
        for start in range(0, len(rows), step):
            # A slice of a range is a range.
            chunk = rows[start : start + step]
            yield chunk, held[rows][within(chunk, rows.start)]


def _assembled_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]], chunk: range
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of a chunk that this rank reads, assembled from the shards of all ranks.
    Collective over ``group``: one all-to-all, in which ranks without shards take part too."""
    held = dict(data.shards)
    found: dict[range, Tensor] = {}
    for wanted in readers[group.rank]:
        if rows := _overlap(wanted, chunk):
            found[rows] = torch.empty(
                len(rows), data.shape[1], dtype=data.dtype, device=data.device
            )
    parcels = Parcels(group)
    arriving: list[tuple[Tensor, Read]] = []
    # Parcels are told apart by their order only: all ranks run the same loop.
    for sender, reader in product(range(group.size), repeat=2):
        for rect, wanted in product(data.owned(sender), readers[reader]):
            span = _overlap(wanted, chunk)
            rows = _overlap(span, row_span(rect))
            if not rows:
                continue
            if sender == group.rank:
                parcels.send(reader, held[rect].data[within(rows, rect.row)].contiguous())
            if reader == group.rank:
                place = found[span][within(rows, span.start), rect.col : rect.col_end]
                arriving.append((place, parcels.expect(sender, place.shape, data.dtype)))
    parcels.exchange(data.device)
    for place, read in arriving:
        place.copy_(read())
    yield from found.items()


def row_span(rect: Rect) -> range:
    return range(rect.row, rect.row_end)


def _overlap(rows: range, others: range) -> range:
    """Return the rows in both ranges, empty if there are none."""
    return range(max(rows.start, others.start), min(rows.stop, others.stop))


def within(rows: range, first: int) -> slice:
    """Return the slice of rows in a tensor that begins with the row ``first``."""
    return slice(rows.start - first, rows.stop - first)
