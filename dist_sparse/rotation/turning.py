"""Gram matrices of sharded tables, and turning or changing their rows, in place and chunk by chunk.

Shards that hold whole rows send nothing but their part of ``G``. Rows that column borders cut are
put together chunk by chunk, by one all-to-all each, from metadata that every rank has: no rank
holds more than a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels
from dist_sparse.tables.shards import ShardedData

__all__ = ["change_rows_", "cut_by_columns", "gram_matrices", "share_", "turn_"]

_CHUNK = 1 << 20
"""Elements taken at a time: 8 MiB of float64."""

_BUFFER = 1 << 22
"""Elements of matrices in one message: 32 MiB."""

Span = tuple[int, int]
"""The first row, and the one behind the last."""


def cut_by_columns(data: ShardedData) -> bool:
    """Return whether some shard does not hold whole rows."""
    return any(rect.cols != data.shape[1] for rect in data.rects)


def gram_matrices(
    tables: Sequence[ShardedData],
    group: Group,
    lookups: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return ``W^T W`` of each table, float64 ``(columns, columns)`` on the CPU. Collective over
    ``group``: an all-reduce for about 4 million of their elements, and as much as :func:`turn_`
    sends of rows that are cut.

    Args:
        lookups: by table, how often each row of this rank's shards was looked up: rows weigh as
            much, and 1 more, so that a table without lookups has a matrix too. None weighs all
            alike.
    """
    found: list[Tensor] = []
    for data in tables:
        gram = torch.zeros(data.shape[1], data.shape[1], dtype=torch.float64)
        # Each row is read by one rank: the owner of its first element.
        firsts = [
            [(rect.row, rect.row_end) for rect in data.owned(rank) if rect.col == 0]
            for rank in range(group.size)
        ]
        for span, rows in _whole_rows(data, group, firsts):
            exact = rows.double()
            weighted = (
                exact if lookups is None else exact * _weights(data, lookups[data.name], span)
            )
            gram += (exact.T @ weighted).cpu()
        found.append(gram)
    _together(found, group.all_reduce)
    return found


def share_(matrices: Sequence[Tensor], group: Group) -> None:
    """Overwrite matrices by those of the group's first rank. Collective over ``group``: a broadcast
    for about 4 million of their elements."""

    def first(values: Tensor) -> Tensor:
        group.broadcast_(values)
        return values

    _together(matrices, first)


def turn_(data: ShardedData, basis: Tensor, group: Group) -> None:
    """Replace ``W`` by ``W @ basis`` in place, computed in float64. Collective as
    :func:`change_rows_`."""
    change_rows_(data, lambda rows: rows.double() @ basis.to(rows.device), group)


def change_rows_(data: ShardedData, change: Callable[[Tensor], Tensor], group: Group) -> None:
    """Replace whole rows in place by what ``change`` makes of some of them, ``(n, columns)``, in
    any floating dtype. Collective over ``group`` if column borders cut the table: an all-to-all for
    about a million elements."""
    held = [[(rect.row, rect.row_end) for rect in rects] for rects in data.tiling]
    for (start, stop), rows in _whole_rows(data, group, held):
        changed = change(rows)
        for rect, weight in data.shards:
            if rect.row <= start and stop <= rect.row_end:
                weight.data[start - rect.row : stop - rect.row] = changed[
                    :, rect.col : rect.col_end
                ].to(weight.dtype)


def _together(matrices: Sequence[Tensor], send: Callable[[Tensor], Tensor]) -> None:
    """Replace matrices by what ``send`` returns for them, many in one message."""
    waiting: list[Tensor] = []
    for i, matrix in enumerate(matrices):
        waiting.append(matrix)
        if i == len(matrices) - 1 or sum(each.numel() for each in waiting) >= _BUFFER:
            sent = send(torch.cat([each.flatten() for each in waiting]))
            for each, part in zip(
                waiting, torch.split(sent, [each.numel() for each in waiting]), strict=True
            ):
                each.copy_(part.view_as(each))
            waiting = []


def _weights(data: ShardedData, lookups: Sequence[Tensor], span: Span) -> Tensor:
    """What rows of this rank weigh: float64 ``(rows, 1)``."""
    for (rect, _), counts in zip(data.shards, lookups, strict=True):
        if rect.col == 0 and rect.row <= span[0] and span[1] <= rect.row_end:
            return 1 + counts[span[0] - rect.row : span[1] - rect.row].double().unsqueeze(1)
    raise AssertionError(f"{data.name}: rows {span} are not on this rank")


def _whole_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[Span]]
) -> Iterator[tuple[Span, Tensor]]:
    """Yield the rows that this rank reads, chunk by chunk: global first and last,
    ``(rows, columns)``, possibly a view. Collective over ``group`` if column borders cut the table.

    Args:
        readers: for each group rank the rows that it reads, all of one shard each.
    """
    columns = data.shape[1]
    step = max(1, _CHUNK // columns)
    if not cut_by_columns(data):
        held = {(rect.row, rect.row_end): weight for rect, weight in data.shards}
        for first, last in dict.fromkeys(readers[group.rank]):
            for start in range(first, last, step):
                stop = min(start + step, last)
                yield (start, stop), held[first, last].data[start - first : stop - first]
        return
    for top in range(0, data.shape[0], step):
        wanted = [
            [_clipped(span, top, top + step) for span in dict.fromkeys(spans)] for spans in readers
        ]
        yield from _exchanged(
            data, group, [[span for span in spans if span[0] < span[1]] for spans in wanted]
        )


def _exchanged(
    data: ShardedData, group: Group, wanted: Sequence[Sequence[Span]]
) -> Iterator[tuple[Span, Tensor]]:
    """Yield the rows that this rank wants, put together. Collective over ``group``: one
    all-to-all."""
    parcels, mine = Parcels(group), {rect: weight.data for rect, weight in data.shards}
    device = next((weight.device for weight in mine.values()), torch.device("cpu"))
    places: list[tuple[Span, list[tuple[int, int, int, Callable[[], Tensor]]]]] = [
        (span, []) for span in wanted[group.rank]
    ]
    for sender in range(group.size):
        for rect in data.owned(sender):
            for reader, spans in enumerate(wanted):
                for number, span in enumerate(spans):
                    start, stop = _clipped(span, rect.row, rect.row_end)
                    if start >= stop:
                        continue
                    if sender == group.rank:
                        parcels.send(
                            reader, mine[rect][start - rect.row : stop - rect.row].contiguous()
                        )
                    if reader == group.rank:
                        read = parcels.expect(sender, (stop - start, rect.cols), data.dtype)
                        places[number][1].append((start - span[0], rect.col, rect.cols, read))
    parcels.exchange(device)
    for (first, last), parts in places:
        rows = torch.empty(last - first, data.shape[1], dtype=data.dtype, device=device)
        for top, col, cols, read in parts:
            part = read()
            rows[top : top + len(part), col : col + cols] = part
        yield (first, last), rows


def _clipped(span: Span, start: int, stop: int) -> Span:
    return max(span[0], start), min(span[1], stop)
