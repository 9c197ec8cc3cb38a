"""Modules that look rows up: by FBGEMM's operator, or in pure torch. Outputs of rotated tables are
rotated back to the columns of the model.

Ids have been converted to rows before:
:class:`~dist_sparse.ids.row_index.RowIndexes` returns the row of each id, -1 for a removed
one, which counts as zeros. The modules hold only tensors and numbers, and no module of FBGEMM:
``torch.export`` refuses those.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.ids.row_index import RowIndex, RowIndexes
from dist_sparse.serving.books import ENTRIES, gather_entries
from dist_sparse.serving.encodings import Tensors, books_of, decode
from dist_sparse.serving.manifest import Collection, Pooling, Table
from dist_sparse.tables.jagged import check_lengths, check_weights
from dist_sparse.torchrec.kernels import HOST, SPARSE_TYPES, look_up_stored

# Tables begin at multiples of 128 bytes, as in FBGEMM's own modules.
_ALIGNMENT = 128

# A row of 8 or 4 bits begins with its scale and bias, each float16.
_SCALE_BIAS_BYTES = 4

# Row numbers are int32, and the last row is followed by one more row of zeros.
_MOST_ROWS = 2**31 - 2


@dataclass(frozen=True)
class StoredTable:
    """A table as it is served.

    Args:
        entry: its entry in the manifest.
        rows: the stored rows, and their scales and biases, named as in :meth:`Table.layout`.
        whole: its other tensors, likewise.
        index: finds the rows of ids.
        spare_capacity: how many more rows to allocate, for rows that deltas add.
    """

    entry: Table
    rows: Tensors
    whole: Tensors
    index: RowIndex
    spare_capacity: int = 0

    @property
    def has_books(self) -> bool:
        """Whether books decode its bytes."""
        return not {"books", "scales"}.isdisjoint(self.whole)

    @property
    def has_kernel(self) -> bool:
        """Whether FBGEMM's operator supports it: not with books, nor with 4-bit rows that end with
        half a byte."""
        is_odd = self.entry.dtype == "int4" and self.entry.dim % 2 == 1
        return not (is_odd or self.has_books)

    @property
    def capacity(self) -> int:
        """The number of rows to allocate."""
        return self.entry.stored + self.spare_capacity


# The tables of a lookup, by name.
TablesByName = Mapping[str, StoredTable]


class JaggedRows(NamedTuple):
    """The rows of a batch of ids, and the bags that they belong to.

    Args:
        rows: int32 ``(n,)``, feature after feature, and within a feature bag after bag.
        offsets: int32 ``(features * bags + 1,)``: where each bag starts.
        counts: ``(features,)``, how many ids each feature has.
        weights: float32 ``(n,)``, a factor for each id.
    """

    rows: Tensor
    offsets: Tensor
    counts: Tensor
    weights: Tensor | None = None


class LookupCall(Protocol):
    """The type of a call of a served module, which torch types as Any for every module."""

    @overload
    def __call__(
        self, ids: Tensor, lengths: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def __call__(self, ids: Any) -> Any: ...


class WeightsRule(NamedTuple):
    """Whether the ids of a batch have weights.

    Args:
        is_needed: a batch without weights is refused.
        refusal: why a batch with weights is refused; empty if it is not.
    """

    is_needed: bool
    refusal: str

    def check(self, ids: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the weights of ids, contiguous float32, or None.

        Raises:
            ValueError: they are missing or refused, are not floating-point, or do not have the
                shape of the ids.
        """
        return check_weights(ids, weights, self.is_needed, self.refusal)


def weights_rule(collection: Collection, tables: TablesByName) -> WeightsRule:
    """Return what a collection does with weights: what training did, or a refusal."""
    refusal = ""
    was = f"Collection {collection.path!r} takes no weights:"
    # A torch.nn.EmbeddingBag takes weights if it sums, and its entry does not list that.
    is_read = collection.weighted or collection.kind == "embedding_bag"
    if not is_read:
        refusal = (
            f"{was} training did not read them, or its artifact is older than weights. Look up the"
            " batch without weights, or export the sharded model."
        )
    elif "mean" in {table.entry.pooling for table in tables.values()}:
        refusal = (
            f"{was} it has means, and TorchRec divides weighted means by the sum of the weights or"
            " by the number of ids, which depends on the sharding. Use weighted sums."
        )
    return WeightsRule(collection.weighted is True, refusal)


class RowLookup(nn.Module):
    """Base class: the kept rows of several tables, the pooling of each feature, and the
    ``rotation`` of tables whose results are rotated back.

    Args:
        tables: the tables, by name.
        features: the name of each feature's table.
    """

    mean_columns: Tensor

    def __init__(self, tables: TablesByName, features: Sequence[str]) -> None:
        super().__init__()
        entries = [tables[name].entry for name in features]
        self.dims = [entry.dim for entry in entries]
        poolings = [entry.pooling for entry in entries]
        self.pooling, self.mixed = poolings[0], len(set(poolings)) > 1
        means = torch.tensor([pooling == "mean" for pooling in poolings])
        self.register_buffer("mean_columns", means.repeat_interleave(torch.tensor(self.dims)))
        # Features whose results are rotated back.
        self.rotated: list[int] = []
        for feature, name in enumerate(features):
            if "rotation" in tables[name].whole:
                self.rotated.append(feature)
                self.register_buffer(f"rotation_{feature}", tables[name].whole["rotation"])

    def forward(self, batch: JaggedRows) -> Tensor:
        """Return the pooled rows of each bag, float32 ``(bags, columns of all features)``, or for
        sequences the row of each id, ``(n, columns)``, in the columns of the original tables."""
        if self.mixed:
            # One call pools all features alike, so both poolings are computed, and each column
            # takes its own.
            mean, total = self._pool(batch, "mean"), self._pool(batch, "sum")
            out = torch.where(self.mean_columns, mean, total)
        else:
            out = self._pool(batch, self.pooling)
        return self._rotate_back(out, batch.counts) if self.rotated else out

    def _rotate_back(self, out: Tensor, counts: Tensor) -> Tensor:
        rotations = {number: self.get_buffer(f"rotation_{number}") for number in self.rotated}
        if self.pooling != "none":
            parts = list(torch.split(out, self.dims, 1))
            for feature, rotation in rotations.items():
                parts[feature] = parts[feature] @ rotation
            return torch.cat(parts, 1)
        # An exported graph can't split the rows of a sequence by counts, which are values. So every
        # matrix rotates all rows, and each row takes the result of its feature.
        features = torch.arange(len(self.dims), device=counts.device)
        feature_of = torch.repeat_interleave(features, counts, output_size=out.size(0)).unsqueeze(1)
        columns = rotations[self.rotated[0]].size(1)
        rotated = F.pad(out, (0, columns - out.size(1)))
        for feature, rotation in rotations.items():
            rotated = torch.where(feature_of == feature, out @ rotation, rotated)
        return rotated

    def _pool(self, batch: JaggedRows, pooling: Pooling) -> Tensor:
        raise NotImplementedError

    def stored(self, table: str) -> Tensors:
        """Return live views of the rows of a table and of its spare capacity, by the names of
        :meth:`Table.layout`."""
        raise NotImplementedError

    def _fill(self, tables: TablesByName) -> None:
        """Copy the rows of the tables into the buffers."""
        for name, table in tables.items():
            for key, target in self.stored(name).items():
                rows = table.rows[key].view(target.dtype)
                target[: len(rows)] = rows


class FbgemmLookup(RowLookup):
    """``fbgemm::int_nbit_split_embedding_codegen_lookup_function`` over the kept rows of several
    tables."""

    weights: Tensor

    def __init__(self, tables: TablesByName, features: Sequence[str]) -> None:
        super().__init__(tables, features)
        # The first byte, the capacity, and the bytes of a row of each table.
        self._shapes: dict[str, tuple[int, int, int]] = {}
        end = 0
        for name, table in tables.items():
            width = sum(part.shape[1] * part.itemsize for part in table.rows.values())
            self._shapes[name] = end, table.capacity, width
            end += -(-table.capacity * width // _ALIGNMENT) * _ALIGNMENT
        dtype, count = tables[features[0]].entry.dtype, len(features)
        self._has_grids = dtype in ("int8", "int4")
        # The arguments of the operator: see look_up_stored(). It reads all tables from one buffer.
        # All other arguments are per feature, not per table.
        arguments = {
            "weights": torch.zeros(end, dtype=torch.uint8),
            "no_weights": torch.zeros(0, dtype=torch.uint8),
            "placements": torch.full((count,), HOST, dtype=torch.int32),
            "starts": torch.tensor([self._shapes[name][0] for name in features]),
            "types": torch.full((count,), SPARSE_TYPES[dtype], dtype=torch.uint8),
            "columns": F.pad(torch.tensor(self.dims).cumsum(0), (1, 0)).int(),
        }
        for name, argument in arguments.items():
            self.register_buffer(name, argument)
        self._fill(tables)
        self.total = sum(self.dims)
        # The operator selects a kernel by the widest table of each dtype; 0 for a dtype without
        # tables.
        self.widest = dict.fromkeys(SPARSE_TYPES, 0) | {dtype: max(self.dims)}

    def _pool(self, batch: JaggedRows, pooling: Pooling) -> Tensor:
        return look_up_stored(self, batch.rows, batch.offsets, pooling, batch.weights)

    def stored(self, table: str) -> Tensors:
        """Return live views of a table's bytes: uint8."""
        start, rows, width = self._shapes[table]
        whole = self.weights[start : start + rows * width].view(rows, width)
        if not self._has_grids:
            return {"rows": whole}
        return {"scale_bias": whole[:, :_SCALE_BIAS_BYTES], "rows": whole[:, _SCALE_BIAS_BYTES:]}


class LibtorchLookup(RowLookup):
    """Lookups in pure torch: without FBGEMM, and for tables that its operator does not support.

    Sums of float32 rows equal the sums of ``torch.nn.EmbeddingBag``.
    """

    def __init__(self, tables: TablesByName, features: Sequence[str]) -> None:
        super().__init__(tables, features)
        # Tables whose rows have the same columns and codes share a tensor.
        by_shape: dict[tuple[int, int | None], list[str]] = {}
        for name, table in tables.items():
            by_shape.setdefault((table.entry.dim, table.entry.groups), []).append(name)
        self.groups = nn.ModuleList()
        self._group_of: dict[str, int] = {}
        for number, names in enumerate(by_shape.values()):
            self.groups.append(_Group(tables, names, features))
            self._group_of.update(dict.fromkeys(names, number))
        self._group_of_feature = [self._group_of[name] for name in features]
        self._fill(tables)

    def _pool(self, batch: JaggedRows, pooling: Pooling) -> Tensor:
        # Each group returns results for all features, zeros for features of other groups.
        parts: list[Tensor] = [group(batch, pooling) for group in self.groups]
        if pooling == "none":
            return sum(parts[1:], parts[0])
        # Group results are (features, bags, columns); outputs are (bags, columns of all features).
        outputs = [parts[group][feature] for feature, group in enumerate(self._group_of_feature)]
        return torch.cat(outputs, 1)

    def stored(self, table: str) -> Tensors:
        """Return live views of a table's rows, and of their scales and biases."""
        group = cast(_Group, self.groups[self._group_of[table]])
        return group.stored(table)


class _Group(nn.Module):
    """Tables of one width in one tensor. The last row is followed by a row of zeros, which removed
    ids and ids of tables in other groups read. In books, the bytes 0 decode to zeros.

    Args:
        tables: the tables, by name.
        members: names of the tables in the group.
        features: the name of each feature's table.
    """

    rows: Tensor
    firsts: Tensor
    books: Tensor | None
    group_starts: Tensor
    book_starts: Tensor

    def __init__(
        self, tables: TablesByName, members: Sequence[str], features: Sequence[str]
    ) -> None:
        super().__init__()
        self.count = 0
        self.spans: dict[str, slice] = {}
        for name in members:
            first, self.count = self.count, self.count + tables[name].capacity
            self.spans[name] = slice(first, self.count)
        one = tables[members[0]]
        self.dtype, self.width = one.entry.dtype, one.entry.dim
        assert self.count <= _MOST_ROWS, f"{self.count} rows: more need FBGEMM"
        for key, like in one.rows.items():
            self.register_buffer(key, like.new_zeros(self.count + 1, like.shape[1]))
        self.keys = list(one.rows)
        # A feature has the first row of its table, or -1 if the table is in another group.
        firsts = {name: span.start for name, span in self.spans.items()}
        self.register_buffer("firsts", _of_features(firsts, features, -1))
        self.register_buffer("books", None)
        if not one.has_books:
            return
        # The books of all tables, one after the other, and where the entries of each group of
        # columns and of each table start.
        books: list[Any] = [books_of(tables[name].whole) for name in members]
        size = books[0].shape[0] * ENTRIES
        self.books = torch.cat(books).flatten(0, 1).float()
        self.register_buffer("group_starts", torch.arange(0, size, ENTRIES, dtype=torch.int32))
        # Ids of tables in other groups read entry 0, which is zeros in any book.
        starts = {name: size * number for number, name in enumerate(self.spans)}
        self.register_buffer("book_starts", _of_features(starts, features, 0))

    def stored(self, table: str) -> Tensors:
        """Return live views of a table's rows."""
        return {key: self.get_buffer(key)[self.spans[table]] for key in self.keys}

    def forward(self, batch: JaggedRows, pooling: Pooling) -> Tensor:
        """Return the bags of all features, ``(features, bags, width)``, or each id's row,
        ``(n, width)``."""
        rows = batch.rows
        features, feature = self.firsts.size(0), None
        if features > 1:
            # The number of ids of each feature tells the feature of each id.
            feature = torch.repeat_interleave(batch.counts, output_size=rows.size(0))
            first = self.firsts.index_select(0, feature)
            places = torch.where((rows < 0) | (first < 0), self.count, rows + first)
        else:
            # A single feature's table starts at 0.
            places = torch.where(rows < 0, self.count, rows)
        if pooling == "none":
            return self._decode(places, feature)
        matrix = self.rows
        if self.dtype != "fp32":
            # Only the rows of this batch are decoded, and looked up one after the other.
            matrix = self._decode(places, feature)
            places = torch.arange(places.size(0), dtype=torch.int32, device=places.device)
        bags = F.embedding_bag(
            places,
            matrix,
            batch.offsets,
            mode=pooling,
            per_sample_weights=batch.weights,
            include_last_offset=True,
        )
        return bags.view(features, -1, self.width)

    def _decode(self, places: Tensor, feature: Tensor | None) -> Tensor:
        """Return the rows at ``places``, float32 ``(n, width)``.

        Args:
            feature: the feature of each id; None if there is only one.
        """
        stored = {key: self.get_buffer(key).index_select(0, places) for key in self.keys}
        if self.books is None:
            return decode(stored, self.width)
        entries = stored["rows"] + self.group_starts
        if feature is not None:
            entries = entries + self.book_starts.index_select(0, feature).unsqueeze(1)
        return gather_entries(entries, self.books)[:, : self.width]


def _of_features(by_table: Mapping[str, int], features: Sequence[str], default: int) -> Tensor:
    """Return the value of each feature's table: int32."""
    return torch.tensor([by_table.get(name, default) for name in features], dtype=torch.int32)


# Tables of an artifact in modules of other libraries: FBGEMM's table batch with its remap of ids,
# and TorchRec's quantized collection. Both hold the rows of the artifact bit for bit, and removed
# ids are exactly 0. Tables with codes or with a scale per column are stored in float16, which holds
# the entries of books and the steps of a grid exactly.


def to_fbgemm(collection: Collection, tables: TablesByName) -> nn.Module:
    """See :meth:`dist_sparse.serving.served.Served.to_fbgemm`."""
    from dist_sparse.torchrec.kernels import table_batch

    if len({table.entry.pooling for table in tables.values()}) > 1:
        raise ValueError(
            f"Collection {collection.path!r} has sums and means, and FBGEMM's module pools in one"
            " way: use to_torchrec()."
        )
    # FBGEMM's remap uses the number of a table where it needs the number of a feature: if a table
    # has two features, lookups return wrong rows. So each feature has a copy of its table.
    stored = []
    for number, name in enumerate(collection.looked_up):
        index = tables[name].index
        remap = index(torch.arange(index.rows)).int()
        copy = f"{name}.{number}"
        stored.append(replace(_stored_rows(tables[name], copy, [copy]), remap=remap))
    return table_batch(stored, *weights_rule(collection, tables))


def to_torchrec(
    collection: Collection, tables: TablesByName, index: RowIndexes
) -> QuantizedCollection:
    """See :meth:`dist_sparse.serving.served.Served.to_torchrec`."""
    from dist_sparse.torchrec.kernels import bag_collection

    if collection.kind != "bag":
        raise ValueError(
            f"Collection {collection.path!r} has kind {collection.kind!r}, and to_torchrec() needs"
            " 'bag': use to_fbgemm()."
        )
    # A feature of two tables has different rows in each. So the features of TorchRec's collection
    # are the outputs of this one, which differ.
    keys: dict[str, list[str]] = {name: [] for name in collection.tables}
    for name, key in zip(collection.looked_up, collection.outputs, strict=True):
        keys[name].append(key)
    stored = []
    for name in collection.tables:
        # Removed ids and ids out of range read a row of zeros after the last one.
        rows = _stored_rows(tables[name], name, keys[name], zeros=1)
        # TorchRec reads the scale and bias after a row as float16.
        if rows.rows.shape[1] % 2:
            raise ValueError(
                f"Table {name!r}: to_torchrec() needs rows of an even number of bytes."
            )
        stored.append(rows)
    zeros = [tables[name].entry.stored for name in collection.looked_up]
    rule = weights_rule(collection, tables)
    inner = bag_collection(stored, not rule.refusal)
    # A copy: moving or loading one of the two must not change the other.
    return QuantizedCollection(collection, inner, copy.deepcopy(index).cpu(), zeros, rule)


class QuantizedCollection(nn.Module):
    """TorchRec's quantized EmbeddingBagCollection behind an index from ids to rows.

    Args:
        looked_up: the manifest's entry of the collection.
        collection: TorchRec's collection, which is called with rows for ids.
        index: finds the rows of ids.
        zeros: the row of zeros of each feature's table.
        rule: what to do with weights. TorchRec's collection must take them if this does.
    """

    zeros: Tensor

    def __init__(
        self,
        looked_up: Collection,
        collection: nn.Module,
        index: RowIndexes,
        zeros: Sequence[int],
        rule: WeightsRule,
    ) -> None:
        super().__init__()
        self.collection, self.index = collection, index
        self.features = [feature.name for feature in looked_up.features]
        self.keys, self.rule = looked_up.outputs, rule
        self.register_buffer("zeros", torch.tensor(zeros, dtype=torch.int32), persistent=False)

    def forward(self, ids: Any) -> Any:
        """Return the pooled rows of a KeyedJaggedTensor as a KeyedTensor. Removed ids, and ids out
        of range, count as zeros.

        Raises:
            ValueError: as in :meth:`dist_sparse.serving.served.Served.forward`.
        """
        from dist_sparse.torchrec import port

        values, lengths, weights = port.unpack_ids(ids, self.features, self.rule.check)
        counts = check_lengths(values, lengths, len(self.features))
        if weights is None and not self.rule.refusal:
            # TorchRec's collection takes weights in every batch or in none.
            weights = torch.ones(values.size(0), device=values.device)
        rows, known = self.index(values, counts)
        zeros = torch.repeat_interleave(self.zeros, counts, output_size=len(values))
        rows = torch.where(known & (rows >= 0), rows, zeros)
        return self.collection(port.KeyedJaggedTensor(list(self.keys), rows, weights, lengths))


def _stored_rows(table: StoredTable, name: str, features: Sequence[str], zeros: int = 0) -> Any:
    """Return a copy of a table in FBGEMM's format, with some rows of zeros after the last one."""
    from dist_sparse.torchrec.kernels import StoredRows

    entry = table.entry
    dtype = "fp16" if table.has_books else entry.dtype
    if entry.turned:
        raise ValueError(
            f"Table {name!r} was rotated alone, which other libraries can't undo: rotate its group,"
            " or serve it by dist_sparse."
        )
    if dtype == "int4" and entry.dim % 2:
        raise ValueError(
            f"Table {name!r} has {entry.dim} columns: in 4 bits their number must be even."
        )
    rows = {key: part.cpu() for key, part in table.rows.items()}
    if table.has_books:
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
