"""Lookups of rows that have been found, as modules: by FBGEMM's operator, in pure torch, and turned
back to the columns that the model had.

They take the rows of all ids of all features as
:class:`~dist_sparse.compaction.row_index.RowIndexes` returns them, -1 for removed rows, which count
as zeros. They hold tensors and numbers alone, no module of FBGEMM, which ``torch.export`` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.checks import refuse
from dist_sparse.codes.books import ENTRIES, entries_at
from dist_sparse.compaction.row_index import RowIndex, RowIndexes
from dist_sparse.serving.encodings import books_of, decode
from dist_sparse.serving.manifest import Collection, Pooling, Table
from dist_sparse.torchrec.kernels import HOST, SPARSE_TYPES, look_up_stored

# Bytes at whose multiples tables begin, as in FBGEMM's own modules.
_ALIGNMENT = 128

_HEAD = 4  # bytes of a row's scale and bias

# Rows of all tables of one width, looked up without FBGEMM: their numbers are int32, and one more
# row is of zeros.
_MOST_ROWS = 2**31 - 2


@dataclass(frozen=True)
class StoredTable:
    """A table as it is served.

    Args:
        entry: of the manifest.
        rows: stored rows, and their scales and biases, named as in :meth:`Table.layout`.
        whole: its other tensors, likewise.
        index: of the rows.
        room: how many rows it may come to have in the place where it is stored.
    """

    entry: Table
    rows: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    index: RowIndex
    room: int = 0

    @property
    def has_books(self) -> bool:
        """Whether books say what its bytes stand for."""
        return not {"books", "scales"}.isdisjoint(self.whole)

    @property
    def has_kernel(self) -> bool:
        """Whether FBGEMM has one: neither for books nor for rows of half a byte."""
        is_odd = self.entry.dtype == "int4" and self.entry.dim % 2 == 1
        return not (is_odd or self.has_books)

    @property
    def needed_index(self) -> RowIndex | None:
        """The index; None where all ids have a row: without removed rows, ids are rows."""
        return self.index if self.entry.kept < self.entry.rows else None

    @property
    def places(self) -> int:
        """Return the rows that there is room for."""
        return max(self.room, self.entry.stored)


class Found(NamedTuple):
    """The rows of ids that are looked up, and how they are pooled.

    Args:
        rows: int32 ``(n,)``, feature after feature, in each of them bag after bag.
        offsets: int32 ``(features * bags + 1,)``: where each bag starts.
        counts: ``(features,)``, how many ids each feature has.
        weights: float32 ``(n,)``, a factor for each id.
    """

    rows: Tensor
    offsets: Tensor
    counts: Tensor
    weights: Tensor | None = None


class RowLookup(nn.Module):
    """Kept rows of several tables, how each feature pools them, and the ``rotation`` that turns
    results of a table back if it has one: base class.

    Args:
        tables: by name.
        features: for each feature, the name of its table.
    """

    mean_columns: Tensor

    def __init__(self, tables: Mapping[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__()
        entries = [tables[name].entry for name in features]
        self.dims = [entry.dim for entry in entries]
        poolings = [entry.pooling for entry in entries]
        self.pooling, self.mixed = poolings[0], len(set(poolings)) > 1
        means = torch.tensor([pooling == "mean" for pooling in poolings])
        self.register_buffer("mean_columns", means.repeat_interleave(torch.tensor(self.dims)))
        # The features whose results are turned back.
        self.turned: list[int] = []
        for feature, name in enumerate(features):
            if "rotation" in tables[name].whole:
                self.turned.append(feature)
                self.register_buffer(f"rotation_{feature}", tables[name].whole["rotation"])

    def forward(self, ids: Found) -> Tensor:
        """Return the pooled rows of each bag, float32 ``(bags, columns of all features)``, or in
        sequences the row of each id, ``(n, columns)``; columns are the ones of the original
        tables."""
        if self.mixed:
            # A lookup pools in one way, so both are computed, and each column takes its own.
            mean, total = self._pooled(ids, "mean"), self._pooled(ids, "sum")
            found = torch.where(self.mean_columns, mean, total)
        else:
            found = self._pooled(ids, self.pooling)
        return self._turned(found, ids.counts) if self.turned else found

    def _turned(self, found: Tensor, counts: Tensor) -> Tensor:
        if self.pooling == "none":
            return self._turned_rows(found, counts)
        parts = list(torch.split(found, self.dims, 1))
        for feature in self.turned:
            parts[feature] = parts[feature] @ self.get_buffer(f"rotation_{feature}")
        return torch.cat(parts, 1)

    def _turned_rows(self, found: Tensor, counts: Tensor) -> Tensor:
        # Every row is turned by every matrix: a graph can't split rows by counts.
        features = torch.arange(len(self.dims), device=counts.device)
        of = torch.repeat_interleave(features, counts, output_size=found.size(0)).unsqueeze(1)
        columns = self.get_buffer(f"rotation_{self.turned[0]}").size(1)
        out = F.pad(found, (0, columns - found.size(1)))
        for feature in self.turned:
            turned = found @ self.get_buffer(f"rotation_{feature}")
            out = torch.where(of == feature, turned, out)
        return out

    def _pooled(self, ids: Found, pooling: Pooling) -> Tensor:
        raise NotImplementedError

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return where the rows of a table are, by the names of :meth:`Table.layout`: views with
        all of its places."""
        raise NotImplementedError

    def _fill(self, tables: Mapping[str, StoredTable]) -> None:
        """Write the rows of tables in their places."""
        for name, table in tables.items():
            for key, places in self.stored(name).items():
                rows = table.rows[key].view(places.dtype)
                places[: len(rows)] = rows


class FbgemmLookup(RowLookup):
    """``fbgemm::int_nbit_split_embedding_codegen_lookup_function`` over the kept rows of several
    tables."""

    weights: Tensor

    def __init__(self, tables: Mapping[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__(tables, features)
        # Where a table starts, its rows, and their bytes.
        self._shapes: dict[str, tuple[int, int, int]] = {}
        end = 0
        for name, table in tables.items():
            width = sum(part.shape[1] * part.itemsize for part in table.rows.values())
            self._shapes[name] = end, table.places, width
            end += -(-table.places * width // _ALIGNMENT) * _ALIGNMENT
        dtype, count = tables[features[0]].entry.dtype, len(features)
        self._has_grids = dtype in ("int8", "int4")
        columns = F.pad(torch.tensor(self.dims).cumsum(0), (1, 0)).int()
        # FBGEMM reads all tables from one buffer.
        self.register_buffer("weights", torch.zeros(end, dtype=torch.uint8))
        self.register_buffer("no_weights", torch.zeros(0, dtype=torch.uint8))
        # The operator takes these for each feature, not for each table.
        self.register_buffer("placements", torch.full((count,), HOST, dtype=torch.int32))
        starts = [self._shapes[name][0] for name in features]
        self.register_buffer("starts", torch.tensor(starts))
        self.register_buffer("types", torch.full((count,), SPARSE_TYPES[dtype], dtype=torch.uint8))
        self.register_buffer("columns", columns)
        self._fill(tables)
        self.total = sum(self.dims)
        # The operator picks its code by the widest table of each dtype; 0: there is none.
        self.widest = dict.fromkeys(SPARSE_TYPES, 0) | {dtype: max(self.dims)}

    def _pooled(self, ids: Found, pooling: Pooling) -> Tensor:
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
        by_shape: dict[tuple[int, int | None], list[str]] = {}
        for name, table in tables.items():
            by_shape.setdefault((table.entry.dim, table.entry.groups), []).append(name)
        self.groups, self._features = nn.ModuleList(), list(features)
        self._group_of: dict[str, int] = {}
        for at, names in enumerate(by_shape.values()):
            self.groups.append(_Group(tables, names, features))
            self._group_of.update(dict.fromkeys(names, at))
        self._fill(tables)

    def _pooled(self, ids: Found, pooling: Pooling) -> Tensor:
        # Each group looks up all features, and has zeros for the ones of other groups.
        found: list[Tensor] = [group(ids, pooling) for group in self.groups]
        if pooling == "none":
            first, *others = found
            return sum(others, first)
        groups = map(self._group_of.__getitem__, self._features)
        # From feature after feature to bag after bag.
        return torch.cat([found[group][feature] for feature, group in enumerate(groups)], 1)

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return the rows, and their scales and biases."""
        group = cast(_Group, self.groups[self._group_of[table]])
        return group.stored(table)


class _Group(nn.Module):
    """Tables of one width in one tensor, with a row of zeros behind the last: for removed ids, and
    for ids of tables in another group. Bytes 0 are zeros in all books.

    Args:
        tables: by name.
        mine: names of the tables in the group.
        features: for each feature, the name of its table.
    """

    rows: Tensor
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
        for key, like in one.rows.items():
            self.register_buffer(key, like.new_zeros(self.count + 1, like.shape[1]))
        self.keys = list(one.rows)
        # For each feature, where its table's rows start; -1: they are in another group.
        firsts = {name: place.start for name, place in self.places.items()}
        self.register_buffer("firsts", _of_features(firsts, features, -1))
        self.register_buffer("books", None)
        if one.has_books:
            self._add_books([books_of(tables[name].whole) for name in mine], features)

    def _add_books(self, books: list[Any], features: Sequence[str]) -> None:
        """Hold all books one behind the other: where each group of columns starts, and each
        table."""
        size = books[0].shape[0] * ENTRIES
        self.register_buffer("books", torch.cat(books).flatten(0, 1))
        self.register_buffer("group_starts", torch.arange(0, size, ENTRIES, dtype=torch.int32))
        # Ids of tables in another group read zeros, in any book.
        at = {name: size * number for number, name in enumerate(self.places)}
        self.register_buffer("book_starts", _of_features(at, features, 0))

    def stored(self, table: str) -> dict[str, Tensor]:
        """Return where the rows of a table are."""
        return {key: self.get_buffer(key)[self.places[table]] for key in self.keys}

    def forward(self, ids: Found, pooling: Pooling) -> Tensor:
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
        """Return the rows at ``here``, float32 ``(n, width)``; ``feature`` is of each id, None of
        one."""
        found = {key: self.get_buffer(key).index_select(0, here) for key in self.keys}
        if self.books is None:
            return decode(found, self.width)
        entries = found["rows"] + self.group_starts
        if feature is not None:
            entries = entries + self.book_starts.index_select(0, feature).unsqueeze(1)
        return entries_at(entries, self.books)[:, : self.width].float()


def _of_features(values: Mapping[str, int], features: Sequence[str], rest: int) -> Tensor:
    """Return the value of each feature's table, ``rest`` where it has none: int32."""
    return torch.tensor([values.get(name, rest) for name in features], dtype=torch.int32)


# Tables of an artifact in modules that others load: FBGEMM's table batch with its remap of ids, and
# TorchRec's quantized collection. Both hold rows of the artifact bit for bit, and removed ids are
# exactly 0. Columns with a scale each and codes are stored in float16, which holds their steps and
# the entries of books exactly.


def to_fbgemm(collection: Collection, tables: Mapping[str, StoredTable]) -> nn.Module:
    """See :meth:`dist_sparse.serving.served.Served.to_fbgemm`."""
    from dist_sparse.torchrec.kernels import table_batch

    if len({table.entry.pooling for table in tables.values()}) > 1:
        raise ValueError(
            f"Collection {collection.path!r} has tables of sums and of means, and FBGEMM's module"
            " pools in one way: use to_torchrec()."
        )
    # FBGEMM's remap counts tables where it should count features: a table with two features and a
    # remap serves other rows. So each feature has a table of its own.
    stored = []
    for place, name in enumerate(collection.looked_up):
        index = tables[name].index
        remap = index(torch.arange(index.rows)).int()
        alone = f"{name}.{place}"
        stored.append(replace(_stored(tables[name], alone, [alone]), remap=remap))
    return table_batch(stored)


def to_torchrec(
    collection: Collection, tables: Mapping[str, StoredTable], index: RowIndexes
) -> QuantizedCollection:
    """See :meth:`dist_sparse.serving.served.Served.to_torchrec`."""
    from dist_sparse.torchrec.kernels import bag_collection

    if collection.kind != "bag":
        raise ValueError(
            f"Collection {collection.path!r} is of the kind {collection.kind!r}, and TorchRec's"
            " EmbeddingBagCollection looks up bags: use to_fbgemm()."
        )
    # A feature of two tables has other rows in each: its outputs' names tell them apart.
    keys: dict[str, list[str]] = {name: [] for name in collection.tables}
    for name, key in zip(collection.looked_up, collection.outputs, strict=True):
        keys[name].append(key)
    stored = []
    for name in collection.tables:
        # Behind the last row one of zeros: for removed ids, and for ids out of range.
        stored.append(_stored(tables[name], name, keys[name], zeros=1))
    zeros = [tables[name].entry.stored for name in collection.looked_up]
    inner = bag_collection(stored, collection.weighted)
    return QuantizedCollection(collection, inner, index, zeros)


class QuantizedCollection(nn.Module):
    """TorchRec's quantized EmbeddingBagCollection behind an index from ids to rows.

    Args:
        looked_up: the collection of the manifest.
        collection: TorchRec's; takes rows.
        index: from ids to rows.
        zeros: the row of zeros of each feature's table.
    """

    zeros: Tensor

    def __init__(
        self, looked_up: Collection, collection: nn.Module, index: RowIndexes, zeros: Sequence[int]
    ) -> None:
        super().__init__()
        self.collection, self.index = collection, index
        self.features = [feature.name for feature in looked_up.features]
        self.keys, self.weighted = looked_up.outputs, looked_up.weighted
        self.register_buffer("zeros", torch.tensor(zeros, dtype=torch.int32), persistent=False)

    def forward(self, ids: Any) -> Any:
        """Return the pooled rows of a KeyedJaggedTensor as a KeyedTensor. Removed ids, and ids out
        of range, count as zeros."""
        from dist_sparse.torchrec import port

        values, lengths, weights = port.unpack_ids(ids, self.features, self.weighted)
        counts = lengths.view(len(self.features), -1).sum(1)
        rows = self.index(values, counts)
        zeros = torch.repeat_interleave(self.zeros, counts, output_size=len(values))
        rows = torch.where(rows < 0, zeros, rows)
        return self.collection(port.KeyedJaggedTensor(list(self.keys), rows, weights, lengths))


def _stored(table: StoredTable, name: str, features: Sequence[str], zeros: int = 0) -> Any:
    """Return a copy of the stored rows of a table in FBGEMM's format, and rows of zeros behind
    them."""
    from dist_sparse.torchrec.kernels import StoredRows

    entry = table.entry
    rotated = (
        f"Table {name!r} was rotated alone: its outputs are turned back by a matrix, for which"
        " other libraries have no place. Rotate its group instead, or serve it by this one."
    )
    odd = f"Table {name!r} has {entry.dim} columns: in 4 bits their number is even."
    refuse({rotated: entry.turned, odd: entry.dtype == "int4" and entry.dim % 2})
    dtype = entry.dtype
    rows = {key: part.cpu() for key, part in table.rows.items()}
    if table.has_books:
        dtype = "fp16"
        rows = {"rows": decode({**table.whole, **rows}, entry.dim).half()}
    raw = {key: F.pad(part.view(torch.uint8), (0, 0, 0, zeros)) for key, part in rows.items()}
    return StoredRows(
        name=name,
        features=tuple(features),
        columns=entry.dim,
        dtype=dtype,
        pooling=entry.pooling,
        rows=raw["rows"],
        scale_bias=raw.get("scale_bias"),
    )
