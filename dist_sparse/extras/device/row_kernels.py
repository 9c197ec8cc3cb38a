"""Triton kernels of rows that ids name. One flags rows before a backward writes them, and zeroes
their removed weights before a lookup reads them; one gives ids their weights, and counts lookups.

Imported only where Triton can run, like :mod:`dist_sparse.extras.device.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.extras.device.kernels import WORDS
from dist_sparse.tables.shards import sent

# Elements that a program looks at together: 8 for each thread of its 4 warps.
_TILE = 1024

# Flags that a program looks at together where it cleans all rows: most are clean.
_FLAGS = 1024

# A tile has at most this many columns, one for each lane of a warp: wider rows take several turns.
_COLS = 32


class Fields(NamedTuple):
    """The kernel's parameters for one feature, in the order in which it reads them. The defaults
    are for a feature whose table is not masked: no columns, and blocks that it can divide by."""

    # Addresses of the weights and of the packed bits of the mask.
    weights: int = 0
    bits: int = 0
    row_stride: int = 0
    rows: int = 0
    cols: int = 0
    # How many rows of the shard's first block are in another shard.
    row_offset: int = 0
    # Rows of a block, or their binary logarithm if the kernel shifts.
    block_rows: int = 1
    col_offset: int = 0
    block_cols: int = 1
    blocks_per_row: int = 0
    # Address of the flags of the rows.
    flags: int = 0

    @classmethod
    def of(cls, weight: Tensor, mask: Any, flags: Tensor) -> Fields:
        rect, grid = mask.rect, mask.grid
        row_offset, block_rows = _axis(rect.row, rect.rows, mask.block[0], grid.rows)
        col_offset, block_cols = _axis(rect.col, rect.cols, mask.block[1], grid.cols)
        return cls(
            weight.data_ptr(),
            mask.bits.data_ptr(),
            weight.stride(0),
            rect.rows,
            rect.cols,
            row_offset,
            block_rows,
            col_offset,
            block_cols,
            grid.cols,
            flags.data_ptr(),
        )

    @property
    def shifts(self) -> bool:
        """Whether the sizes of its blocks are powers of two."""
        return self.block_rows.bit_count() == self.block_cols.bit_count() == 1

    def with_logarithms(self) -> Fields:
        """Return the feature with logarithms of its block sizes, by which the kernel shifts."""
        return self._replace(
            block_rows=self.block_rows.bit_length() - 1, block_cols=self.block_cols.bit_length() - 1
        )


class TritonRowCleaner:
    """Flags the rows that a backward is about to write, and cleans flagged rows: one launch for all
    features and tables.

    It knows the weights, bits and flags by their addresses, and keeps these tensors alive: create a
    new one when the storage or the mask of a table is replaced.

    Args:
        masked: a live shard, its mask and the flags of its rows, uint8 ``(rows,)``, for each
            feature, in the order of the ids; None where nothing is removed. All weights have one
            device and one dtype, as the tables of a batch have.
    """

    def __init__(self, masked: Sequence[tuple[Tensor, Any, Tensor] | None]) -> None:
        self._alive = list(filter(None, masked))
        self.needed, self._cols = bool(self._alive), 1
        if not self.needed:
            return
        features = [Fields() if shard is None else Fields.of(*shard) for shard in masked]
        # A division takes many more instructions than a shift, and block sizes are nearly always
        # powers of two. One kernel is launched for all features, so all must allow the shift.
        self._shifts = all(feature.shifts for feature in features)
        if self._shifts:
            features = [feature.with_logarithms() for feature in features]
        # Each once: several features may look up one table. Unmasked ones have no rows.
        tables = [table for table in dict.fromkeys(features) if table.rows]
        ends = [0, *accumulate(table.rows for table in tables)]
        self._rows = ends[-1]
        weight = self._alive[0][0]
        known = sent([*chain(*features, *tables), *ends], weight.device)
        sizes = [len(Fields._fields) * len(each) for each in (features, tables)]
        self._features, self._tables, self._ends = torch.split(known, [*sizes, len(ends)])
        self._word = WORDS[weight.element_size()]
        widest = max(table.cols for table in tables)
        self._cols = min(triton.next_power_of_2(widest), _COLS)

    def flag(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Flag the rows that a lookup names; arguments as in :meth:`clean_read`."""
        # A row has one flag: each element of a tile is an id.
        self._on_ids(ids, ends, cols=1, marks=True)

    def clean_read(
        self, ids: Tensor, ends: Sequence[int] | Tensor, sampled: TritonLookups | None = None
    ) -> None:
        """Clean the flagged rows that a lookup names, on the current stream.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Ids out of range
                count as row 0, as FBGEMM's bounds check replaces them by 0.
            ends: offsets of the features in the ids, ``features + 1`` numbers. An integer tensor on
                the device of ``ids`` is read in place, with any stride:
                ``offsets[::batch_size]`` of FBGEMM's offsets needs neither a copy nor a wait.
            sampled: of the same features, with samples: the lookup is added to them. The tables
                that it knows and this does not must remove nothing.
        """
        self._on_ids(ids, ends, cols=self._cols, marks=False, sampled=sampled)

    def clean(self) -> None:
        """Clean all flagged rows. They stay flagged."""
        if self.needed:
            # As for a lookup with one feature per table, whose ids are all of its rows.
            self._launch(self._ends, self._rows, self._ends, self._tables, self._cols, by_id=False)

    def _on_ids(
        self,
        ids: Tensor,
        ends: Sequence[int] | Tensor,
        *,
        cols: int,
        marks: bool,
        sampled: TritonLookups | None = None,
    ) -> None:
        count = ids.numel()
        if not self.needed or count == 0:
            return
        ends = ends if isinstance(ends, Tensor) else sent(ends, ids.device)
        ends = ends.to(ids.device, non_blocking=True)
        self._launch(
            ids.contiguous(), count, ends, self._features, cols, marks=marks, sampled=sampled
        )

    def _launch(
        self,
        ids: Tensor,
        count: int,
        ends: Tensor,
        table: Tensor,
        cols: int,
        *,
        marks: bool = False,
        by_id: bool = True,
        sampled: TritonLookups | None = None,
    ) -> None:
        ids_at_once = _TILE // cols
        per_program = ids_at_once if by_id else max(ids_at_once, _FLAGS)
        features = table.numel() // len(Fields._fields)
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device(ids.get_device()):
            visit_rows[(-(-count // per_program),)](
                ids,
                count,
                ends,
                ends.stride(0),
                table,
                features,
                sampled and sampled.table,
                FIELDS=len(Fields._fields),
                LOOKUP_FIELDS=len(LookupFields._fields),
                STEPS=(features - 1).bit_length(),
                SHIFTS=self._shifts,
                WORD=self._word,
                SPAN=per_program,
                IDS=ids_at_once,
                COLS=cols,
                MARKS=marks,
                BY_ID=by_id,
                PACKED=sampled is not None and sampled.packed,
                num_warps=4,
            )


class LookupFields(NamedTuple):
    """What :func:`visit_lookups` knows of one feature, in the order in which it reads it. The
    defaults are for a feature whose table has no mask and is not counted."""

    # Address of the counts of the rows, of bits of kept rows, or of flags of removed rows.
    address: int = 0
    rows: int = 0
    # Address of the numbers of all lookups and of lookups of removed rows.
    samples: int = 0
    # Whether ids of removed rows lose their weight.
    weighed: bool = False


class TritonCounts:
    """Counts the lookups of each row: one launch for all features.

    Args:
        counts: for each feature, in the order of the ids, the counts of its table's rows: all int32
            or all float64. None for a table that is not counted.
    """

    def __init__(self, counts: Sequence[Tensor | None]) -> None:
        # The kernel knows them by their addresses.
        self._alive = [each for each in counts if each is not None]
        features = [
            LookupFields() if each is None else LookupFields(each.data_ptr(), len(each))
            for each in counts
        ]
        self._table = sent([*chain(*features)], self._alive[0].device)

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Add 1 to the counts of the rows that ids name; arguments as of
        :meth:`TritonRowCleaner.clean_read`."""
        kind = tl.int32 if self._alive[0].dtype == torch.int32 else tl.float64
        _visit_lookups(ids, ends, self._table, TYPE=kind)


class TritonLookups:
    """Flags and weights of the ids of a lookup, and samples of lookups: one launch for all
    features. Arguments of the methods are as of :meth:`TritonRowCleaner.clean_read`.

    Args:
        features: for each feature, in the order of the ids, the mask of its table; int64 ``(2,)``,
            to which each launch adds the number of its lookups and of those of removed rows, for
            all tables or for none; and whether ids of removed rows lose their weight. None for a
            table without a mask.

    Attributes:
        table: the fields of each feature, one after the other.
        packed: rows have a bit, instead of a byte.
    """

    def __init__(self, features: Sequence[tuple[Any, Tensor | None, bool] | None]) -> None:
        given = [feature for feature in features if feature is not None]
        self._samples = any(samples is not None for _, samples, _ in given)
        # Nearly all masks of whole rows have a bit for each row. It stays in the cache, where a
        # byte for each row may not.
        self.packed = all(mask.grid.cols == mask.block[0] == 1 for mask, _, _ in given)
        self._alive = [samples for _, samples, _ in given if samples is not None]
        # Once for each table, which may have several features.
        rows: dict[int, Tensor] = {}
        for mask, _, _ in given:
            if id(mask) not in rows:
                rows[id(mask)] = mask.bits if self.packed else mask.dead_rows()
        self._alive += rows.values()
        known: list[int] = []
        for feature in features:
            fields = LookupFields()
            if feature is not None:
                mask, samples, weighed = feature
                address = 0 if samples is None else samples.data_ptr()
                of_rows = rows[id(mask)].data_ptr()
                fields = LookupFields(of_rows, mask.rect.rows, address, weighed)
            known += fields
        self.table = sent(known, self._alive[0].device)

    def flags(self, ids: Tensor, ends: Sequence[int] | Tensor) -> Tensor:
        """Return which ids keep their weight, bool ``(n,)``; True for ids of no feature."""
        found = torch.empty(ids.numel(), dtype=torch.bool, device=ids.device)
        self._launch(ids, ends, found.view(torch.uint8))
        return found

    def weights(self, ids: Tensor, ends: Sequence[int] | Tensor, given: Tensor | None) -> Tensor:
        """Return the weights of the ids, 0 for removed rows; gradients flow back to ``given``.

        Args:
            given: the weights so far, ``(n,)``; None for 1 in float32.
        """
        if given is not None and given.requires_grad:
            return torch.where(self.flags(ids, ends), given, 0)
        dtype = torch.float32 if given is None else given.dtype
        found = torch.empty(ids.numel(), dtype=dtype, device=ids.device)
        self._launch(ids, ends, found, given)
        return found

    def sample(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Add to the samples alone."""
        self._launch(ids, ends)

    def _launch(
        self,
        ids: Tensor,
        ends: Sequence[int] | Tensor,
        out: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        options = {"SAMPLES": self._samples, "PACKED": self.packed}
        _visit_lookups(ids, ends, self.table, out, given, **options)


def _visit_lookups(
    ids: Tensor,
    ends: Sequence[int] | Tensor,
    table: Tensor,
    out: Tensor | None = None,
    given: Tensor | None = None,
    *,
    TYPE: Any = None,
    SAMPLES: bool = False,
    PACKED: bool = False,
) -> None:
    count = ids.numel()
    if count == 0:
        return
    ends = ends if isinstance(ends, Tensor) else sent(ends, ids.device)
    features = table.numel() // len(LookupFields._fields)
    with torch.cuda.device(ids.get_device()):
        visit_lookups[(-(-count // _TILE),)](
            ids.contiguous(),
            count,
            ends,
            ends.stride(0),
            table,
            features,
            out,
            given if given is None else given.contiguous(),
            FIELDS=len(LookupFields._fields),
            STEPS=(features - 1).bit_length(),
            TYPE=TYPE,
            SAMPLES=SAMPLES,
            PACKED=PACKED,
            IDS=_TILE,
            num_warps=4,
        )


def _axis(start: int, size: int, block: int, blocks: int) -> tuple[int, int]:
    """Return how much of the first block is outside of the shard, and the size of a block. If there
    is only one block, any size that covers the shard will do: it gets a power of two."""
    return (0, triton.next_power_of_2(size)) if blocks == 1 else (start % block, block)


@triton.jit  # type: ignore[untyped-decorator]
def _keeps(flags: tl.tensor, row: tl.tensor, known: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """Return which rows are kept; rows that are not known are. A row has a bit, which is 1 if it is
    kept (PACKED), or a byte, which is 1 if it is removed."""
    if PACKED:
        byte = tl.load(flags + (row >> 3), mask=known, other=0xFF).to(tl.int32)
        kept = ((byte >> (row & 7).to(tl.int32)) & 1) != 0
    else:
        kept = tl.load(flags + row, mask=known, other=0) == 0
    return kept


# These numbers change from batch to batch: Triton would compile a kernel for each.
@triton.jit(do_not_specialize=["count", "stride", "features"])  # type: ignore[untyped-decorator]
def visit_rows(
    ids: tl.tensor,
    count: tl.tensor,
    ends: tl.tensor,
    stride: tl.tensor,
    table: tl.tensor,
    features: tl.tensor,
    lookups: tl.tensor,
    FIELDS: tl.constexpr,
    LOOKUP_FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WORD: tl.constexpr,
    SPAN: tl.constexpr,
    IDS: tl.constexpr,
    COLS: tl.constexpr,
    MARKS: tl.constexpr,
    BY_ID: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Flag the rows of ids (MARKS), or zero the removed weights of rows that are flagged, COLS
    columns at a time. Each program takes SPAN ids, feature by feature and IDS at a time. Without
    BY_ID, all rows of the tables take the place of the ids; SPAN is IDS with it. With ``lookups``,
    the fields that :func:`visit_lookups` has of the features, add to their samples.

    Tiles are flat, so that the lanes of a warp read neighbours in a row: Triton would lay out a
    matrix of addresses, about which it knows nothing, by columns. The numbers added to ``info`` are
    the positions of the fields of :class:`Fields`.
    """
    element = tl.arange(0, IDS * COLS)
    position = tl.program_id(0).to(tl.int64) * SPAN
    last = tl.minimum(
        tl.minimum(position + SPAN, count),
        tl.load(ends + features.to(tl.int64) * stride).to(tl.int64),
    )
    position = tl.maximum(position, tl.load(ends).to(tl.int64))
    while position < last:
        # By binary search, the last feature that begins here or before. Earlier features that begin
        # at the same position are empty.
        feature = tl.full([], 0, dtype=tl.int64)
        for step in tl.static_range(STEPS):
            later = feature + (1 << (STEPS - 1 - step))
            start = tl.load(ends + later * stride, mask=later < features, other=0)
            feature = tl.where((later < features) & (start <= position), later, feature)
        stop = tl.minimum(tl.load(ends + (feature + 1) * stride).to(tl.int64), last)

        info = table + feature * FIELDS
        weight = tl.load(info).to(tl.pointer_type(WORD))
        bits = tl.load(info + 1).to(tl.pointer_type(tl.uint8))
        # 0 where nothing is removed: then no turn is taken.
        cols = tl.load(info + 4).to(tl.int32)
        height, cut, width = (
            tl.load(info + 6),
            tl.load(info + 7).to(tl.int32),
            tl.load(info + 8).to(tl.int32),
        )

        flags = tl.load(info + 10).to(tl.pointer_type(tl.uint8))
        first_row = tl.full([], 0, dtype=tl.int64)
        if not BY_ID:
            # On to the first dirty row, if there is any.
            first_row = tl.load(ends + feature * stride).to(tl.int64)
            here = position + tl.arange(0, SPAN)
            dirty = tl.load(flags + (here - first_row), mask=here < stop, other=0).to(tl.int32)
            position = tl.min(tl.where(dirty > 0, here, stop), 0)
            stop = tl.minimum(stop, position + IDS)
            cols = tl.where(position < stop, cols, 0)

        # Offsets that grow with the table need 64 bits, once for each row; within a row 32 suffice.
        at = position + element // COLS
        # No columns: the table of the feature is not masked.
        inside = at < tl.where(cols > 0, stop, 0)
        if BY_ID:
            row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
            row = tl.where((row >= 0) & (row < tl.load(info + 3)), row, 0)
        else:
            row = at - first_row
        if lookups is not None:
            of_feature = lookups + feature * LOOKUP_FIELDS
            removal = tl.load(of_feature).to(tl.pointer_type(tl.uint8))
            # One lane for each id.
            counted = inside & (element % COLS == 0)
            kept = _keeps(removal, row, counted, PACKED)
            of_removed = tl.sum((counted & (kept == 0)).to(tl.int64), 0)
            samples = tl.load(of_feature + 2).to(tl.pointer_type(tl.int64))
            has_mask = tl.load(of_feature + 1) > 0
            tl.atomic_add(samples, stop - position, mask=has_mask, sem="relaxed")
            tl.atomic_add(samples + 1, of_removed, mask=has_mask, sem="relaxed")
        if MARKS:
            tl.store(flags + row, tl.full([IDS * COLS], 1, dtype=tl.uint8), mask=inside)
        else:
            inside = tl.load(flags + row, mask=inside, other=0) != 0
            block_row = row + tl.load(info + 5)
            block_row = block_row >> height if SHIFTS else block_row // height
            bit = block_row * tl.load(info + 9)
            weight += row * tl.load(info + 2)
            bits += bit >> 3
            before = (bit & 7).to(tl.int32)
            for first in range(0, cols, COLS):
                col = first + element % COLS
                block = (col + cut) >> width if SHIFTS else (col + cut) // width
                flag = before + block
                # Elements outside load a byte of ones: none of them is removed.
                byte = tl.load(bits + (flag >> 3), mask=inside & (col < cols), other=0xFF)
                removed = ((byte.to(tl.int32) >> (flag & 7)) & 1) == 0
                tl.store(weight + col, tl.zeros([IDS * COLS], dtype=WORD), mask=removed)
        # This ends, even if `ends` does not ascend: the search found that the next feature begins
        # after `position`.
        position = stop


@triton.jit(do_not_specialize=["count", "stride", "features"])  # type: ignore[untyped-decorator]
def visit_lookups(
    ids: tl.tensor,
    count: tl.tensor,
    ends: tl.tensor,
    stride: tl.tensor,
    table: tl.tensor,
    features: tl.tensor,
    out: tl.tensor,
    given: tl.tensor,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    TYPE: tl.constexpr,
    SAMPLES: tl.constexpr,
    PACKED: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """Add 1 to the counts of type TYPE of the rows that ids name. Without a TYPE, write to ``out``
    what each id weighs: 0 if it names a removed row of a table whose ids are weighed, else what it
    weighs in ``given``, or 1. ``out`` may be None, as ``given``. Add to the samples (SAMPLES).
    PACKED is as in :func:`_keeps`.

    The numbers added to ``info`` are the positions of the fields of :class:`LookupFields`.
    """
    first = tl.program_id(0).to(tl.int64) * IDS
    position = first + tl.arange(0, IDS)
    here = position < count
    last = tl.minimum(tl.load(ends + features.to(tl.int64) * stride).to(tl.int64), count)
    known = (position >= tl.load(ends)) & (position < last)
    # By binary search, as in visit_rows().
    feature = tl.zeros([IDS], dtype=tl.int32)
    for step in tl.static_range(STEPS):
        later = feature + (1 << (STEPS - 1 - step))
        start = tl.load(ends + later.to(tl.int64) * stride, mask=later < features, other=0)
        feature = tl.where((later < features) & (start <= position), later, feature)
    info = table + feature * FIELDS
    rows = tl.load(info + 1)
    known = known & (rows > 0)
    row = tl.load(ids + position, mask=known, other=0).to(tl.int64)
    row = tl.where((row >= 0) & (row < rows), row, 0)
    address = tl.load(info)
    if TYPE is not None:
        one = tl.full([IDS], 1, dtype=TYPE)
        tl.atomic_add(address.to(tl.pointer_type(TYPE)) + row, one, mask=known, sem="relaxed")
    else:
        flags = address.to(tl.pointer_type(tl.uint8))
        kept = _keeps(flags, row, known, PACKED)
        if SAMPLES:
            # Additions to one address wait for each other: there are two or three for each feature
            # of the tile, instead of one for each id. The last id of a feature adds what the tile
            # has removed so far; the first one takes away what the tile had removed before it.
            start = tl.load(ends + feature.to(tl.int64) * stride).to(tl.int64)
            stop = tl.load(ends + (feature + 1).to(tl.int64) * stride).to(tl.int64)
            stop = tl.minimum(tl.minimum(stop, first + IDS), count)
            is_first = known & (position == start)
            is_last = known & (position + 1 == stop)
            removed = (known & ~kept).to(tl.int32)
            so_far = tl.cumsum(removed, 0)
            before = (removed - so_far).to(tl.int64)
            samples = tl.load(info + 2).to(tl.pointer_type(tl.int64))
            ids_here = stop - tl.maximum(start, first)
            tl.atomic_add(samples, ids_here, mask=is_last, sem="relaxed")
            tl.atomic_add(samples + 1, so_far.to(tl.int64), mask=is_last, sem="relaxed")
            tl.atomic_add(samples + 1, before, mask=is_first, sem="relaxed")
            kept = kept | (tl.load(info + 3) == 0)
        if out is not None:
            weight = kept.to(out.dtype.element_ty)
            if given is not None:
                weight = tl.load(given + position, mask=here & kept, other=0)
            tl.store(out + position, weight, mask=here)
