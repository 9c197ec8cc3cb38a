"""Gram matrices of sharded tables, and turning or changing their rows, in place and chunk by chunk.

Shards that hold whole rows send nothing but their part of ``G``. Rows that column borders cut are
put together chunk by chunk, by one all-to-all each, from metadata that every rank has: no rank
holds more than a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels
from dist_sparse.tables.shards import Rect, ShardedData

# Elements taken at a time: 8 MiB of float64.
_CHUNK = 1 << 20

# The first row, and the one behind the last.
Span = tuple[int, int]


def cut_by_columns(data: ShardedData) -> bool:
    """Return whether some shard does not hold whole rows."""
    return any(rect.cols != data.shape[1] for rect in data.rects)


def gram_matrices(
    tables: Sequence[ShardedData],
    group: Group,
    lookups: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return ``W^T W`` of each table, float64 ``(columns, columns)`` on the CPU. Collective over
    ``group``: an all-reduce of all matrices, and as much as :func:`turn_`
    sends of rows that are cut.

    Args:
        lookups: by table, how often each row of this rank's shards was looked up: rows weigh as
            much, and 1 more, so that a table without lookups has a matrix too. None weighs all
            alike.
    """
    found: list[Tensor] = []
    for data in tables:
        gram = torch.zeros(data.shape[1], data.shape[1], dtype=torch.float64)
        readers = []
        for rank in range(group.size):
            # Each row is read by one rank: the owner of its first element.
            firsts = [rect for rect in data.owned(rank) if rect.col == 0]
            readers.append(_spans(firsts))
        for span, rows in _whole_rows(data, group, readers):
            exact = weighted = rows.double()
            if lookups is not None:
                weighted = exact * _weights(data, lookups[data.name], span)
            gram += (exact.T @ weighted).cpu()
        found.append(gram)
    _together(found, group.all_reduce)
    return found


def share_(matrices: Sequence[Tensor], group: Group) -> None:
    """Overwrite matrices by those of the group's first rank. Collective over ``group``: one
    broadcast."""

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
    readers = [_spans(rects) for rects in data.tiling]
    for (start, stop), rows in _whole_rows(data, group, readers):
        changed = change(rows)
        # Column cuts of a rank may be several shards of the same rows.
        for rect, weight in data.shards:
            if rect.row <= start and stop <= rect.row_end:
                own = changed[:, rect.col : rect.col_end]
                weight.data[start - rect.row : stop - rect.row] = own.to(weight.dtype)


def _spans(rects: Iterable[Rect]) -> list[Span]:
    """Return the rows of some shards, each span once."""
    return list(dict.fromkeys((rect.row, rect.row_end) for rect in rects))


def _together(matrices: Sequence[Tensor], send: Callable[[Tensor], Tensor]) -> None:
    """Replace matrices by what ``send`` returns for them, all in one message."""
    if matrices:
        sent = send(torch.cat([matrix.flatten() for matrix in matrices]))
        parts = torch.split(sent, [matrix.numel() for matrix in matrices])
        for matrix, part in zip(matrices, parts, strict=True):
            matrix.copy_(part.view_as(matrix))


def _weights(data: ShardedData, lookups: Sequence[Tensor], span: Span) -> Tensor:
    """Return the weights of rows of this rank: float64 ``(rows, 1)``."""
    start, stop = span
    for (rect, _), counts in zip(data.shards, lookups, strict=True):
        if rect.col == 0 and rect.row <= start and stop <= rect.row_end:
            return 1 + counts[start - rect.row : stop - rect.row].double().unsqueeze(1)
    raise AssertionError(f"{data.name}: rows {span} are not on this rank")


def _whole_rows(
    data: ShardedData, group: Group, readers: Sequence[Sequence[Span]]
) -> Iterator[tuple[Span, Tensor]]:
    """Yield the rows that this rank reads, chunk by chunk: global first and last,
    ``(rows, columns)``, possibly a view. Collective over ``group`` if column borders cut the table.

    Args:
        readers: for each group rank the rows that it reads, each once, all of one shard each.
    """
    # A table of very many columns still moves by a row.
    step = max(1, _CHUNK // data.shape[1])
    if cut_by_columns(data):
        for top in range(0, data.shape[0], step):
            yield from _exchanged(data, group, readers, (top, top + step))
        return
    # A reader reads its own shards: nothing is sent.
    held = {(rect.row, rect.row_end): weight for rect, weight in data.shards}
    for first, last in readers[group.rank]:
        weight = held[first, last].data
        for start in range(first, last, step):
            stop = min(start + step, last)
            yield (start, stop), weight[start - first : stop - first]


def _exchanged(
    data: ShardedData, group: Group, readers: Sequence[Sequence[Span]], chunk: Span
) -> Iterator[tuple[Span, Tensor]]:
    """Yield the rows of a chunk that this rank reads, put together. Collective over ``group``: one
    all-to-all."""
    wanted = [_clipped(spans, chunk) for spans in readers]
    # A rank without a shard sends nothing, but takes part.
    device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
    found: dict[Span, Tensor] = {}
    for start, stop in wanted[group.rank]:
        whole = torch.empty(stop - start, data.shape[1], dtype=data.dtype, device=device)
        found[start, stop] = whole
    parcels = Parcels(group)
    arriving: list[tuple[Tensor, Callable[[], Tensor]]] = []
    # Both sides loop in the same order: parcels have no names.
    for sender, reader in product(range(group.size), repeat=2):
        for rect, span in product(data.owned(sender), wanted[reader]):
            for start, stop in _clipped([span], (rect.row, rect.row_end)):
                if sender == group.rank:
                    rows = _weight_at(data, rect)[start - rect.row : stop - rect.row]
                    parcels.send(reader, rows.contiguous())
                if reader == group.rank:
                    rows = found[span][start - span[0] : stop - span[0], rect.col : rect.col_end]
                    arriving.append((rows, parcels.expect(sender, rows.shape, data.dtype)))
    parcels.exchange(device)
    for rows, read in arriving:
        rows.copy_(read())
    yield from found.items()


def _weight_at(data: ShardedData, rect: Rect) -> Tensor:
    return next(weight.data for held, weight in data.shards if held == rect)


def _clipped(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the parts of spans that lie within another one."""
    parts = [(max(start, within[0]), min(stop, within[1])) for start, stop in spans]
    return [(start, stop) for start, stop in parts if start < stop]
