"""Lookups of rows that have been found, as modules: by FBGEMM's operator, in pure torch, and turned
back to the columns that the model had.

They take the rows of all ids of all features as
:class:`~dist_sparse.compaction.row_index.RowIndexes` returns them, -1 for removed rows, which count
as zeros. They hold tensors and numbers alone, no module of FBGEMM, which ``torch.export`` refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.codes.books import ENTRIES, entries_at
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.codes import Rows, decode
from dist_sparse.serving.column_grid import books_of
from dist_sparse.serving.manifest import Pooling, Table
from dist_sparse.serving.rows import PER_ROW
from dist_sparse.torchrec.kernels import HOST, SPARSE_TYPES, look_up_stored

# Bytes at whose multiples tables begin, as in FBGEMM's own modules.
_ALIGNMENT: Final = 128

_HEAD: Final = 4  # bytes of a row's scale and bias

# Of tables of one width without FBGEMM: rows are int32, and one more is of zeros.
_MOST_ROWS: Final = 2**31 - 2


@dataclass(frozen=True)
class StoredTable:
    """A table as it is served.

    Args:
        entry: of the manifest.
        rows: stored rows, and their scales and biases, named as in :meth:`Table.layout`.
        whole: its other tensors, likewise.
        index: of the rows, None where all ids have one.
        room: how many rows it may come to have in the place where it is stored.
    """

    entry: Table
    rows: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    index: RowIndex | None
    room: int = 0

    @property
    def places(self) -> int:
        """Return the rows that there is room for."""
        return max(self.room, self.entry.stored)


class _Ids(NamedTuple):
    """The arguments of :meth:`RowLookup.forward`."""

    rows: Tensor
    offsets: Tensor
    counts: Tensor
    weights: Tensor | None


class RowLookup(nn.Module):
    """Kept rows of several tables, and how each feature pools them: base class.

    Args:
        tables: by name.
        features: for each feature, the name of its table.
    """

    mean_columns: Tensor

    def __init__(self, tables: Mapping[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__()
        entries = [tables[name].entry for name in features]
        self.dims = [entry.dim for entry in entries]
        self.pooling = entries[0].pooling
        means = torch.tensor([entry.pooling == "mean" for entry in entries])
        self.mixed = bool(means.any() and not means.all())
        self.register_buffer("mean_columns", means.repeat_interleave(torch.tensor(self.dims)))

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled rows of each bag, float32 ``(bags, columns of all features)``, or in
        sequences the row of each id, ``(n, columns)``.

        Args:
            rows: int32 ``(n,)``, feature after feature, in each of them bag after bag.
            offsets: int32 ``(features * bags + 1,)``: where each bag starts.
            counts: ``(features,)``, how many ids each feature has.
            weights: float32 ``(n,)``, a factor for each id.
        """
        ids = _Ids(rows, offsets, counts, weights)
        if not self.mixed:
            return self._pooled(ids, self.pooling)
        # A lookup pools in one way, so both are computed, and each column takes its own.
        mean, total = self._pooled(ids, "mean"), self._pooled(ids, "sum")
        return torch.where(self.mean_columns, mean, total)

    def _pooled(self, ids: _Ids, pooling: Pooling) -> Tensor:
        raise NotImplementedError

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return where the rows of a table are, by the names of :meth:`Table.layout`: views with
        all of its places."""
        raise NotImplementedError

    def _fill(self, tables: Mapping[str, StoredTable]) -> None:
        """Write the rows of tables in their places."""
        for name, table in tables.items():
            for key, places in self.stored(name).items():
                places[: table.entry.stored] = table.rows[key].view(places.dtype)


class FbgemmLookup(RowLookup):
    """``fbgemm::int_nbit_split_embedding_codegen_lookup_function`` over the kept rows of several
    tables."""

    weights: Tensor
    no_weights: Tensor
    placements: Tensor
    starts: Tensor
    types: Tensor
    columns: Tensor

    def __init__(self, tables: Mapping[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__(tables, features)
        starts, end = {}, 0
        self._shapes: dict[str, tuple[int, int, int]] = {}
        for name, table in tables.items():
            width = sum(part.shape[1] * part.itemsize for part in table.rows.values())
            starts[name], self._shapes[name] = end, (end, table.places, width)
            end += -(-table.places * width // _ALIGNMENT) * _ALIGNMENT
        dtype, count = tables[features[0]].entry.dtype, len(features)
        self._has_grids = dtype in ("int8", "int4")
        columns = F.pad(torch.tensor(self.dims).cumsum(0), (1, 0)).int()
        # FBGEMM reads all tables from one buffer.
        self.register_buffer("weights", torch.zeros(end, dtype=torch.uint8))
        self.register_buffer("no_weights", torch.zeros(0, dtype=torch.uint8))
        # The operator takes these for each feature, not for each table.
        self.register_buffer("placements", torch.full((count,), HOST, dtype=torch.int32))
        self.register_buffer("starts", torch.tensor([starts[name] for name in features]))
        self.register_buffer("types", torch.full((count,), SPARSE_TYPES[dtype], dtype=torch.uint8))
        self.register_buffer("columns", columns)
        self._fill(tables)
        self.total = sum(self.dims)
        # The operator picks its code by the widest table of each dtype; 0: there is none.
        self.widest = dict.fromkeys(SPARSE_TYPES, 0) | {dtype: max(self.dims)}

    def _pooled(self, ids: _Ids, pooling: Pooling) -> Tensor:
        return look_up_stored(self, ids.rows, ids.offsets, pooling, ids.weights)

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return the bytes of rows, and of their scales and biases."""
        start, places, width = self._shapes[table]
        whole = self.weights[start : start + places * width].view(places, width)
        if not self._has_grids:
            return {"rows": whole}
        return {"scale_bias": whole[:, :_HEAD], "rows": whole[:, _HEAD:]}


class LibtorchLookup(RowLookup):
    """Lookups in pure torch: in processes without FBGEMM, and for widths that it has no rows for.

    Sums of float32 rows equal the ones of ``torch.nn.EmbeddingBag``.
    """

    def __init__(self, tables: Mapping[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__(tables, features)
        # Tables whose rows have one shape: by their columns and codes.
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, table in tables.items():
            by_shape.setdefault(_shape(table), []).append(name)
        self.groups = nn.ModuleList()
        for names in by_shape.values():
            self.groups.append(_Group(tables, names, features))
        self._fill(tables)
        self.group_of = [list(by_shape).index(_shape(tables[name])) for name in features]

    def _pooled(self, ids: _Ids, pooling: Pooling) -> Tensor:
        # Each group looks up all features, and has zeros for the ones of other groups.
        found: list[Tensor] = [group(ids, pooling) for group in self.groups]
        if pooling == "none":
            return torch.stack(found).sum(0) if len(found) > 1 else found[0]
        if len(found) == 1:
            # From feature after feature to bag after bag.
            return found[0].transpose(0, 1).flatten(1)
        return torch.cat([found[at][feature] for feature, at in enumerate(self.group_of)], 1)

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return the rows, and their scales and biases."""
        groups = cast(Iterable[_Group], self.groups)
        return next(group for group in groups if table in group.places).stored(table)


def _shape(table: StoredTable) -> tuple[int, int]:
    # Beside tables with codes there may be others.
    return table.entry.dim, table.entry.groups or 0


def _books(table: StoredTable) -> Tensor | None:
    """The books of a table whose rows are bytes; of scales of columns they are made."""
    if table.entry.scale == "column":
        return books_of(table.whole["scales"])
    return table.whole.get("books")


class _Group(nn.Module):
    """Tables of one width in one tensor, with a row of zeros behind the last: for removed ids, and
    for ids of tables in another group. Bytes 0 are zeros in all books.

    Args:
        tables: by name.
        mine: names of the tables in the group.
        features: for each feature, the name of its table.
    """

    rows: Tensor
    scale_bias: Tensor | None
    firsts: Tensor
    books: Tensor | None
    group_starts: Tensor
    book_starts: Tensor

    def __init__(
        self, tables: Mapping[str, StoredTable], mine: Sequence[str], features: Sequence[str]
    ) -> None:
        super().__init__()
        self.count = 0
        self.places: dict[str, slice] = {}
        for name in mine:
            self.places[name] = slice(self.count, self.count + tables[name].places)
            self.count += tables[name].places
        one = tables[mine[0]]
        self.dtype, self.width = one.entry.dtype, one.entry.dim
        assert self.count <= _MOST_ROWS, f"{self.count} rows: more need FBGEMM"
        for key in PER_ROW:
            like = one.rows.get(key)
            # Weights have no scales.
            whole = None if like is None else like.new_zeros(self.count + 1, like.shape[1])
            self.register_buffer(key, whole)
        # For each feature, where its table's rows start; -1: they are in another group.
        firsts = {name: place.start for name, place in self.places.items()}
        self.register_buffer("firsts", _of_features(firsts, features, -1))
        self.register_buffer("books", None)
        if _books(one) is not None:
            self._add_books([cast(Tensor, _books(tables[name])) for name in mine], features)

    def _add_books(self, books: Sequence[Tensor], features: Sequence[str]) -> None:
        """Hold all books one behind the other: where each group of columns starts, and each
        table."""
        size = books[0].shape[0] * ENTRIES
        self.register_buffer("books", torch.cat(list(books)).flatten(0, 1))
        self.register_buffer("group_starts", torch.arange(0, size, ENTRIES, dtype=torch.int32))
        # Ids of tables in another group read zeros, in any book.
        at = {name: size * number for number, name in enumerate(self.places)}
        self.register_buffer("book_starts", _of_features(at, features, 0))

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return where the rows of a table are."""
        found = {"rows": self.rows[self.places[table]]}
        if self.scale_bias is not None:
            found["scale_bias"] = self.scale_bias[self.places[table]]
        return found

    def forward(self, ids: _Ids, pooling: Pooling) -> Tensor:
        """Return the bags of all features, ``(features, bags, width)``, or each id's row,
        ``(n, width)``."""
        rows = ids.rows
        features, feature = self.firsts.size(0), None
        if features > 1:
            feature = torch.repeat_interleave(ids.counts, output_size=rows.size(0))
            first = self.firsts.index_select(0, feature)
            here = torch.where((rows < 0) | (first < 0), self.count, rows + first)
        else:
            # A graph of one feature is spared the counts.
            here = torch.where(rows < 0, self.count, rows)
        if pooling == "none":
            return self._vectors(here, feature)
        matrix = self.rows
        if self.dtype != "fp32":
            # The rows of these ids alone are decoded.
            matrix = self._vectors(here, feature)
            here = torch.arange(here.size(0), dtype=torch.int32, device=here.device)
        bags = F.embedding_bag(
            here,
            matrix,
            ids.offsets,
            mode=pooling,
            per_sample_weights=ids.weights,
            include_last_offset=True,
        )
        return bags.view(features, -1, self.width)

    def _vectors(self, here: Tensor, feature: Tensor | None) -> Tensor:
        """The rows at ``here``, float32 ``(n, width)``; ``feature`` is of each id, None of one."""
        rows = self.rows.index_select(0, here)
        if self.books is None:
            tail = None if self.scale_bias is None else self.scale_bias.index_select(0, here)
            return decode(Rows(rows, tail), self.width)
        entries = rows + self.group_starts
        if feature is not None:
            entries = entries + self.book_starts.index_select(0, feature).unsqueeze(1)
        return entries_at(entries, self.books)[:, : self.width].float()


def _of_features(values: Mapping[str, int], features: Sequence[str], rest: int) -> Tensor:
    """The value of each feature's table, ``rest`` where it has none: int32."""
    return torch.tensor([values.get(name, rest) for name in features], dtype=torch.int32)


class TurnedLookup(nn.Module):
    """Results of ``rows``, times the ``rotation`` of each feature's table if it has one.

    Args:
        rows: looks up the stored columns.
        tables: by name.
        features: for each feature, the name of its table.
    """

    def __init__(
        self, rows: RowLookup, tables: Mapping[str, StoredTable], features: Sequence[str]
    ) -> None:
        super().__init__()
        self.rows = rows
        turns: dict[str, nn.Module] = {}
        for name, table in tables.items():
            rotation = table.whole.get("rotation")
            turns[name] = nn.Identity() if rotation is None else _Turn(rotation)
        self.turns = nn.ModuleList(turns[name] for name in features)
        self.dims = [tables[name].entry.dim for name in features]
        self.sequences = tables[features[0]].entry.pooling == "none"

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """As :meth:`RowLookup.forward`; columns are the ones of the original tables."""
        found: Tensor = self.rows(rows, offsets, counts, weights)
        if not self.sequences:
            parts = torch.split(found, self.dims, 1)
            return torch.cat([turn(part) for turn, part in zip(self.turns, parts, strict=True)], 1)
        out: Tensor = self.turns[0](found)
        if len(self.turns) > 1:
            features = torch.arange(len(self.turns), device=counts.device)
            of = torch.repeat_interleave(features, counts, output_size=rows.size(0)).unsqueeze(1)
            # Every row is turned by every matrix: a graph can't split them by counts.
            for feature in range(1, len(self.turns)):
                out = torch.where(of == feature, self.turns[feature](found), out)
        return out

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return where the rows of a table are."""
        return self.rows.stored(table)


class _Turn(nn.Module):
    """Multiplies by a matrix."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.clone())

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.matrix
