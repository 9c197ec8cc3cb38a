"""Gram matrices of sharded tables, and turning or changing their rows, in place and chunk by chunk.

Shards that hold whole rows send nothing but their part of ``G``. Rows that column borders cut are
put together chunk by chunk, by one all-to-all each, from metadata that every rank has: no rank
holds more than a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels
from dist_sparse.tables.shards import Rect, ShardedData

# Elements taken at a time: 8 MiB of float64.
_CHUNK = 1 << 20


def cut_by_columns(data: ShardedData) -> bool:
    """Return whether some shard does not hold whole rows."""
    return any(rect.cols != data.shape[1] for rect in data.rects)


def gram_matrices(
    tables: Sequence[ShardedData],
    group: Group,
    lookups: Callable[[str], Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return ``W^T W`` of each table, float64 ``(columns, columns)`` on the CPU. Collective over
    ``group``: an all-reduce of all matrices, and as much as :func:`turn_`
    sends of rows that are cut.

    Args:
        lookups: returns how often each row of this rank's shards of a table was looked up: rows
            weigh as much, and 1 more, so that a table without lookups has a matrix too. None weighs
            all alike.
    """
    found = [torch.zeros(data.shape[1], data.shape[1], dtype=torch.float64) for data in tables]
    for data, gram in zip(tables, found, strict=True):
        # Each row is read by one rank: the owner of its first element.
        readers = [_first_columns(data.owned(rank)) for rank in range(group.size)]
        for span, rows in _whole_rows(data, group, readers):
            exact = weighted = rows.double()
            if lookups is not None:
                weighted = exact * _weights(data, lookups(data.name), span)
            gram += (exact.T @ weighted).cpu()
    _add_up_(found, group)
    return found


def share_(matrices: Sequence[Tensor], group: Group) -> None:
    """Overwrite matrices by those of the group's first rank. Collective over ``group``: one
    all-reduce."""
    if group.rank:
        for matrix in matrices:
            matrix.zero_()
    _add_up_(matrices, group)


def turn_(data: ShardedData, basis: Tensor, group: Group) -> None:
    """Replace ``W`` by ``W @ basis`` in place, computed in float64. Collective as
    :func:`change_rows_`."""
    change_rows_(data, lambda rows: rows.double() @ basis.to(rows.device), group)


def change_rows_(data: ShardedData, change: Callable[[Tensor], Tensor], group: Group) -> None:
    """Replace whole rows in place by what ``change`` makes of some of them, ``(n, columns)``, in
    any floating dtype. Collective over ``group`` if column borders cut the table: an all-to-all for
    about a million elements."""
    readers = [list(dict.fromkeys(map(_rows_of, rects))) for rects in data.tiling]
    for span, rows in _whole_rows(data, group, readers):
        changed = change(rows)
        # Column cuts of a rank may be several shards of the same rows.
        for rect, weight in data.shards:
            if _common(span, _rows_of(rect)) == span:
                own = changed[:, rect.col : rect.col_end]
                weight.data[_within(span, rect.row)] = own.to(weight.dtype)


def _add_up_(matrices: Sequence[Tensor], group: Group) -> None:
    """Replace matrices by their sums over ranks, all in one message."""
    if matrices:
        summed = group.all_reduce(torch.cat([matrix.flatten() for matrix in matrices]))
        parts = torch.split(summed, [matrix.numel() for matrix in matrices])
        for matrix, part in zip(matrices, parts, strict=True):
            matrix.copy_(part.view_as(matrix))


def _weights(data: ShardedData, lookups: Sequence[Tensor], span: range) -> Tensor:
    """Return the weights of rows whose first elements this rank has: float64 ``(rows, 1)``."""
    for (rect, _), counts in zip(data.shards, lookups, strict=True):
        if rect.col == 0 and _common(span, _rows_of(rect)) == span:
            return 1 + counts[_within(span, rect.row)].double().unsqueeze(1)
    raise AssertionError(f"{data.name}: rows {span} are not on this rank")


def _whole_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]]
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows that this rank reads, chunk by chunk: their global numbers, and
    ``(rows, columns)``, possibly a view. Collective over ``group`` if column borders cut the table.

    Args:
        readers: for each group rank the rows that it reads, each once, all of one shard each.
    """
    # A table of very many columns still moves by a row.
    step = max(1, _CHUNK // data.shape[1])
    if cut_by_columns(data):
        for top in range(0, data.shape[0], step):
            yield from _exchanged(data, group, readers, range(top, top + step))
        return
    # A reader reads its own shards: nothing is sent.
    held = {_rows_of(rect): weight.data for rect, weight in data.shards}
    for rows in readers[group.rank]:
        for start in range(0, len(rows), step):
            # Numbers of a range are sliced without being made.
            chunk = rows[start : start + step]
            yield chunk, held[rows][_within(chunk, rows.start)]


def _exchanged(
    data: ShardedData, group: Group, readers: Sequence[Sequence[range]], chunk: range
) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of a chunk that this rank reads, put together. Collective over ``group``: one
    all-to-all."""
    # A rank without a shard sends nothing, but takes part.
    device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
    held = {rect: weight.data for rect, weight in data.shards}
    found: dict[range, Tensor] = {}
    for wanted in readers[group.rank]:
        if rows := _common(wanted, chunk):
            found[rows] = torch.empty(len(rows), data.shape[1], dtype=data.dtype, device=device)
    parcels = Parcels(group)
    arriving: list[tuple[Tensor, Callable[[], Tensor]]] = []
    # Both sides loop in the same order: parcels have no names.
    for sender, reader in product(range(group.size), repeat=2):
        for rect, wanted in product(data.owned(sender), readers[reader]):
            span = _common(wanted, chunk)
            rows = _common(span, _rows_of(rect))
            if not rows:
                continue
            if sender == group.rank:
                parcels.send(reader, held[rect][_within(rows, rect.row)].contiguous())
            if reader == group.rank:
                place = found[span][_within(rows, span.start), rect.col : rect.col_end]
                arriving.append((place, parcels.expect(sender, place.shape, data.dtype)))
    parcels.exchange(device)
    for place, read in arriving:
        place.copy_(read())
    yield from found.items()


def _first_columns(rects: Iterable[Rect]) -> list[range]:
    """Return the rows of those shards that hold the first elements of rows."""
    return [_rows_of(rect) for rect in rects if rect.col == 0]


def _rows_of(rect: Rect) -> range:
    return range(rect.row, rect.row_end)


def _common(rows: range, others: range) -> range:
    """Return the rows in both ranges, empty if there are none."""
    return range(max(rows.start, others.start), min(rows.stop, others.stop))


def _within(rows: range, first: int) -> slice:
    """Return the place of rows in a tensor that begins with the row ``first``."""
    return slice(rows.start - first, rows.stop - first)
