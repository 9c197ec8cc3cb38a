"""Which rows of a table are kept, and moving them between ranks.

Rows that are kept are numbered in order: *kept coordinates* are a rectangle's rows in that
numbering, and its columns. Rows travel chunk by chunk, so that no rank ever holds more of a table
than its own shards and one chunk for each rank that wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.groups import Parcels, group_over
from dist_sparse.masking.masks import BlockMask, pack, unpack
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.dense_store import as_matrix
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.training.sparsify import SparseTraining

_SPAN = 4096
"""Rows that are counted together to cut a table into chunks."""


def sparsifier_of(sparse: Any) -> BaseDataSparsifier:
    """Return the sparsifier of what the user has: a SparseTraining, or the sparsifier itself."""
    sparsifier = sparse.sparsifier if isinstance(sparse, SparseTraining) else sparse
    if not isinstance(sparsifier, BaseDataSparsifier):
        raise ValueError(
            f"Invalid sparse of type {type(sparse).__name__}: must be what sparsify() returned, or"
            " a sparsifier."
        )
    return sparsifier


def kept_rows(
    sparsifier: BaseDataSparsifier, located: Mapping[str, ShardedData] | None = None
) -> dict[str, Tensor]:
    """Return which rows of each registered table the masks keep any element of: bool ``(rows,)`` on
    the CPU, the same on every rank. Collective over the tables' groups: one all-gather each, of one
    bit a row.

    Args:
        located: the registered tables as they are stored now; None locates them.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.compaction.kept_rows import kept_rows
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).view(4, 2))
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
        >>> names = sparsifier.add_model(table)
        >>> sparsifier.step()
        >>> kept_rows(sparsifier)
        {'weight': tensor([False, False,  True,  True])}
    """
    packed, dense = sparsifier.masks.tables, sparsifier.masks.plain
    if located is None:
        located = packed.current("kept_rows()")
    kept: dict[str, Tensor] = {}
    for ranks, names in packed.groups.items():
        # Tiling and masks are in the order of this rank's shards.
        rank = group_over(ranks).rank
        masks = {}
        for name in names:
            masks[name] = dict(zip(located[name].tiling[rank], packed.masks(name), strict=True))
        kept |= gather_rows([located[name] for name in names], partial(_kept, masks))
    for name in dense.names:
        kept[name] = (as_matrix(dense.mask(name)) != 0).any(1).cpu()
    return {name: kept[name] for name in sparsifier.data_groups}


def _kept(masks: Mapping[str, Mapping[Rect, BlockMask]], data: ShardedData, rect: Rect) -> Tensor:
    return ~masks[data.name][rect].dead_rows().cpu()


def gather_rows(
    tables: Sequence[ShardedData],
    flags: Callable[[ShardedData, Rect], Tensor],
    held: Callable[[ShardedData, int], Sequence[Rect]] = ShardedData.owned,
) -> dict[str, Tensor]:
    """Return which rows of each table any shard flags: bool ``(rows,)`` on the CPU, the same on
    every rank. Collective over the ranks of the tables, which must be the same: one all-gather of
    one bit a row and shard.

    Args:
        flags: of the rows of a shard of this rank, bool ``(rect.rows,)``.
        held: the shards of a group rank that are asked; of several replicas the first by default.
    """
    group = group_over(tables[0].ranks)
    shards: list[list[tuple[ShardedData, Rect]]] = []
    for rank in range(group.size):
        shards.append([(data, rect) for data in tables for rect in held(data, rank)])
    # An all-gather takes messages of one length.
    most = max(map(_num_bytes, shards))
    # A rank that runs out of memory here would leave the others waiting.
    with group.agreeing("counting rows"):
        packed = [pack(flags(data, rect)) for data, rect in shards[group.rank]]
        padding = most - _num_bytes(shards[group.rank])
        sent = torch.cat([*packed, torch.zeros(padding, dtype=torch.uint8)])
    found = {data.name: torch.zeros(data.shape[0], dtype=torch.bool) for data in tables}
    for received, of_rank in zip(group.all_gather(sent), shards, strict=True):
        start = 0
        for shard in of_rank:
            data, rect = shard
            stop = start + _num_bytes([shard])
            # Shards of the same rows have other columns: a row is flagged if any of them flags it.
            rows = found[data.name][rect.row : rect.row_end]
            rows |= unpack(received[start:stop], rect.rows)
            start = stop
    return found


def _num_bytes(shards: Iterable[tuple[ShardedData, Rect]]) -> int:
    """Of a bit for each row, in whole bytes for each shard."""
    return sum(-(-rect.rows // 8) for _, rect in shards)


def move_rows(
    source: ShardedData,
    tensors: Sequence[Tensor],
    kept: Tensor,
    wanted: Sequence[Sequence[Rect]],
    *,
    dtype: torch.dtype | None = None,
    rowwise: bool = False,
    chunk_bytes: int = 8 << 20,
) -> Iterator[tuple[Rect, Tensor]]:
    """Yield the kept rows that this rank wants, chunk by chunk, bit for bit. Collective over the
    ranks of ``source``: one all-to-all a chunk, in each ``next()``, so all ranks must exhaust it.
    Replicas: the first holder sends.

    Args:
        source: the table as it is stored now.
        tensors: of this rank, one for each of ``source.shards``, with the same rows: the weights
            themselves or any optimizer state of their shape; with ``rowwise`` one value per row,
            ``(rows,)`` or ``(rows, 1)``.
        kept: bool ``(source.shape[0],)`` on the CPU, the same on every rank.
        wanted: for each group rank the rectangles that it wants, in kept coordinates.
        dtype: of ``tensors``, on all ranks; None is that of the weights.
        rowwise: whether the tensors hold one value per row and shard. What is wanted must then have
            the columns of shards: values of shards of other widths can't be derived from them.
        chunk_bytes: of a chunk, of the whole width of the table.

    Yields:
        A rectangle in kept coordinates within one that this rank wants, with all its columns, and
        what is in it: ``(rows, columns)``, with ``rowwise`` ``(rows,)``. It may be a view of a
        message. Rows ascend.

    Raises:
        ValueError: one value per row is wanted of columns that are of no shard.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.kept_rows import move_rows
        >>> from dist_sparse.tables.modules import model_source
        >>> from dist_sparse.tables.shards import Rect
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).view(4, 2))
        >>> [source] = model_source(table).locate()
        >>> kept, wanted = torch.tensor([False, True, False, True]), [[Rect(0, 1, 2, 1)]]
        >>> [
        ...     (str(rect), rows.tolist())
        ...     for rect, rows in move_rows(source, [table.weight.data], kept, wanted)
        ... ]
        [('rows [0, 2) x columns [1, 2)', [[3.0], [7.0]])]
    """
    if rowwise:
        yield from _move_rowwise(source, tensors, kept, wanted, dtype, chunk_bytes)
        return
    dtype = source.dtype if dtype is None else dtype
    group = group_over(source.ranks)
    held = dict(zip(source.tiling[group.rank], tensors, strict=True))
    for chunk in _chunks(kept, max(1, chunk_bytes // max(1, source.shape[1] * dtype.itemsize))):
        parcels = Parcels(group)
        # A rank out of memory ends it on all.
        with group.agreeing(f"moving rows of {source.name!r}"):
            for part in _parts(source.owned(group.rank), kept, chunk):
                # A shard may be on a GPU, and the flags are on the CPU.
                top = part.shard.row
                local = held[part.shard][part.rows.start - top : part.rows.stop - top]
                local = local[kept[part.rows].to(local.device)].view(part.kept.rows, -1)
                _send(parcels, part.kept, local, wanted)
            arriving = _expected(parcels, source, kept, chunk, wanted[group.rank], dtype)
        parcels.exchange(group.device)
        # Read from the message only now, a rectangle at a time.
        for want, pieces in arriving.items():
            yield _put_together(want, [(common, read()) for common, read in pieces])


def _move_rowwise(
    source: ShardedData,
    tensors: Sequence[Tensor],
    kept: Tensor,
    wanted: Sequence[Sequence[Rect]],
    dtype: torch.dtype | None,
    chunk_bytes: int,
) -> Iterator[tuple[Rect, Tensor]]:
    """Move one value per row and shard: as a table with one column for each span of columns."""
    spans = sorted({(rect.col, rect.cols) for rect in source.rects})

    def column(rect: Rect) -> Rect:
        # An empty shard of a rank has nothing to send, whatever its columns.
        if not rect.numel:
            return rect
        # Every rank knows all that is wanted, so all of them raise.
        if (rect.col, rect.cols) not in spans:
            raise ValueError(
                f"Table {source.name!r}: row-wise optimizer state of {rect} is wanted, but the"
                f" table is cut into the columns {spans} (first, count): the state of other"
                " columns can't be derived from theirs."
            )
        return Rect(rect.row, spans.index((rect.col, rect.cols)), rect.rows, 1)

    tiling = tuple(tuple(map(column, rects)) for rects in source.tiling)
    table = replace(source, shape=(source.shape[0], len(spans)), tiling=tiling)
    columns = [list(map(column, rects)) for rects in wanted]
    for rect, values in move_rows(
        table, tensors, kept, columns, dtype=dtype, chunk_bytes=chunk_bytes
    ):
        first, count = spans[rect.col]
        yield rect._replace(col=first, cols=count), values.view(-1)


def _send(parcels: Parcels, there: Rect, local: Tensor, wanted: Sequence[Sequence[Rect]]) -> None:
    """Pack for each rank what it wants of ``local``, this rank's kept rows at ``there``."""
    for receiver, rects in enumerate(wanted):
        for part in filter(None, map(there.intersect, rects)):
            rows = slice(part.row - there.row, part.row_end - there.row)
            columns = slice(part.col - there.col, part.col_end - there.col)
            parcels.send(receiver, local[rows, columns].contiguous())


_Arriving = dict[Rect, list[tuple[Rect, Callable[[], Tensor]]]]
"""By rectangle that this rank wants, the pieces of it that arrive: where they are, and how to read
them."""


def _expected(
    parcels: Parcels,
    source: ShardedData,
    kept: Tensor,
    chunk: _Chunk,
    wanted: Sequence[Rect],
    dtype: torch.dtype,
) -> _Arriving:
    """What this rank gets of a chunk."""
    arriving: _Arriving = defaultdict(list)
    # In the order in which each sender packs it.
    for sender in range(len(source.tiling)):
        for part in _parts(source.owned(sender), kept, chunk):
            for want in wanted:
                common = part.kept.intersect(want)
                if common is not None:
                    read = parcels.expect(sender, (common.rows, common.cols), dtype)
                    arriving[want].append((common, read))
    return arriving


class _Chunk(NamedTuple):
    """Rows ``[first, last)`` of a table, of which the first that is kept has the number
    ``start``."""

    first: int
    last: int
    start: int


def _chunks(kept: Tensor, most: int) -> Iterator[_Chunk]:
    """Yield consecutive chunks of at most ``most`` kept rows each; none where nothing is kept."""
    span = min(_SPAN, most)
    # Kept rows up to the end of each span: a chunk ends where the next span would not fit.
    flags = nn.functional.pad(kept, (0, -len(kept) % span)).view(torch.uint8)
    ends = flags.view(-1, span).sum(1, dtype=torch.int32).cumsum(0)
    at = start = 0
    while at < len(ends):
        # At least one span fits: it has no more rows than a chunk may.
        after = int(torch.searchsorted(ends, start + most, right=True))
        end = int(ends[after - 1])
        if end > start:
            yield _Chunk(at * span, min(after * span, len(kept)), start)
        at, start = after, end


class _Part(NamedTuple):
    """A shard's share of a chunk: which rows of the table, and its kept rows in kept
    coordinates."""

    shard: Rect
    rows: slice
    kept: Rect


def _parts(rects: Iterable[Rect], kept: Tensor, chunk: _Chunk) -> Iterator[_Part]:
    """Yield what shards have of a chunk."""
    for rect in rects:
        top, bottom = max(rect.row, chunk.first), min(rect.row_end, chunk.last)
        count = int(kept[top:bottom].count_nonzero()) if top < bottom else 0
        if count:
            # Kept rows of the chunk above the shard come from other shards.
            row = chunk.start + int(kept[chunk.first : top].count_nonzero())
            yield _Part(rect, slice(top, bottom), Rect(row, rect.col, count, rect.cols))


def _put_together(want: Rect, pieces: Sequence[tuple[Rect, Tensor]]) -> tuple[Rect, Tensor]:
    """The rectangle that the pieces cover, of all columns of ``want``, and what is in it."""
    # Nearly always, and without a copy.
    if len(pieces) == 1:
        return pieces[0]
    top, bottom = min(rect.row for rect, _ in pieces), max(rect.row_end for rect, _ in pieces)
    out = pieces[0][1].new_empty(bottom - top, want.cols)
    # Shards may have some of the columns each.
    for rect, piece in pieces:
        columns = slice(rect.col - want.col, rect.col_end - want.col)
        out[rect.row - top : rect.row_end - top, columns] = piece
    return Rect(top, want.col, bottom - top, want.cols), out
