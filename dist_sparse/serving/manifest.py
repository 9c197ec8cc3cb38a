"""The manifest of an artifact: its tables, and the collections that look them up.

Everything in the file of tables follows from the manifest: names, dtypes, shapes and order of the
tensors. The text is canonical and holds its own CRC32, so that it is read as it was written or
refused.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, get_args

import torch

from dist_sparse.checks import choice, integer, sealed, unsealed
from dist_sparse.codes.books import ENTRIES
from dist_sparse.text import count, percent, size, table_lines

FORMAT: Final = "dist_sparse.serving"
VERSION: Final = 4
TABLES: Final = "tables.safetensors"

Dtype = Literal["fp32", "fp16", "int8", "int4", "codes"]
Kind = Literal["bag", "sequence", "embedding_bag", "embedding"]
Pooling = Literal["sum", "mean", "none"]
Scale = Literal["row", "column"]
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

ROW_DTYPES: Final[dict[str, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "int8": torch.uint8,
    "int4": torch.uint8,
    "codes": torch.uint8,
}
_MOST_COLUMNS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of a collection, and the table that its ids look up."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A module that looked tables up, and how.

    Args:
        path: of the module in the model; ``""`` is the model itself.
        kind: ``"bag"`` and ``"sequence"`` are TorchRec's collections, ``"embedding_bag"`` and
            ``"embedding"`` torch's modules.
        weighted: whether ids have weights of their own (``"bag"``).
        include_last_offset: of a ``torch.nn.EmbeddingBag``.
        tables: by name, in the order of the module.
        features: in the order of the module's output; none of torch's modules.
    """

    path: str
    kind: Kind
    weighted: bool = False
    include_last_offset: bool = False
    tables: tuple[str, ...]
    features: tuple[Feature, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The key of each feature's output, as TorchRec names it: ``feature``, or ``feature@table``
        of one that looks up several tables."""
        times = Counter(feature.name for feature in self.features)
        return tuple(f"{f.name}@{f.table}" if times[f.name] > 1 else f.name for f in self.features)


@dataclass(frozen=True, kw_only=True)
class TableBytes:
    """Bytes of a table: dense in the model, in the file altogether, and in the file beside its
    weights.

    Args:
        before: of the dense table, in the dtype that it was trained in.
        after: of all of its tensors in the file.
        index: of the bitmap of kept rows.
        scales: of the rows' scales and biases, or of the columns' scales.
        rotation: of the matrix that turns outputs back.
        books: of what codes stand for.
    """

    before: int
    after: int
    index: int
    scales: int
    rotation: int
    books: int = 0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of an artifact.

    Args:
        rows: of the table that was trained, and the ids that it has.
        kept: how many of them are stored.
        dim: columns that are stored.
        pooling: of the collection that looks it up; ``"none"`` in sequences.
        dtype: of the stored rows.
        scale: of 8 and 4 bits: whether each row or each column has a grid.
        groups: codes of a row, each of ``dim / groups`` columns, of ``"codes"``; otherwise None.
        default_row: whether removed ids share a row, stored behind the kept ones.
        turned: columns of its outputs, if they are turned back from ``dim`` rotated ones; otherwise
            None.
        before: bytes of the dense table, in the dtype that it was trained in.
        checksums: of each of its tensors, named as in :meth:`layout`: CRC32s, and of rows what
            :func:`~dist_sparse.serving.rows.sum_of_rows` returns.
    """

    rows: int
    kept: int
    dim: int
    pooling: Pooling
    dtype: Dtype
    scale: Scale = "row"
    groups: int | None = None
    default_row: bool = False
    turned: int | None = None
    before: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Rows that are stored."""
        return self.kept + self.default_row

    @property
    def bytes(self) -> TableBytes:
        """What it takes."""
        taken = {name: size_of(*each) for name, each in self.layout().items()}
        return TableBytes(
            before=self.before,
            after=sum(taken.values()),
            index=taken.get("kept", 0),
            scales=taken.get("scale_bias", taken.get("scales", 0)),
            rotation=taken.get("rotation", 0),
            books=taken.get("books", 0),
        )

    def layout(self) -> Layout:
        """Return dtype and shape of each of its tensors, by their names without the table's.

        ``kept`` is the bitmap of kept rows, absent when all are. ``rows`` are the stored rows:
        weights, 8-bit codes, two 4-bit codes a byte, the lower half first, or a byte for each group
        of columns. ``scale_bias`` holds each row's factor of the codes and summand, ``scales`` each
        column's factor, ``books`` the columns that each byte of a group stands for, ``rotation``
        the matrix that outputs of rotated tables are multiplied by.
        """
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.kept < self.rows:
            found["kept"] = torch.int32, (-(-self.rows // 32),)
        if self.scale == "column":
            found["scales"] = torch.float16, (self.dim,)
        elif self.dtype in ("int8", "int4"):
            found["scale_bias"] = torch.float16, (self.stored, 2)
        columns = self.dim
        if self.dtype == "int4":
            # 4-bit codes share bytes in pairs, the last one alone if the number is odd.
            columns = -(-self.dim // 2)
        if self.groups is not None:
            columns = self.groups
            found["books"] = torch.float16, (columns, ENTRIES, self.dim // columns)
        found["rows"] = ROW_DTYPES[self.dtype], (self.stored, columns)
        if self.turned is not None:
            found["rotation"] = torch.float32, (self.dim, self.turned)
        return found


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The entries of ``manifest.json``.

    Args:
        dist_sparse: version of the package that wrote it.
        dtype: of all tables; beside ``"codes"`` others may have another.
        collections: by path.
        tables: by name.
        bytes: of ``tables.safetensors``.
    """

    dist_sparse: str
    dtype: Dtype
    collections: tuple[Collection, ...]
    tables: Mapping[str, Table]
    bytes: int

    def to_text(self) -> str:
        """Return the text of ``manifest.json``, which ends with the CRC32 of the text without
        it."""
        fields = asdict(self)
        files = {TABLES: {"bytes": fields.pop("bytes")}}
        return sealed({"format": FORMAT, "version": VERSION, **fields, "files": files})

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of its text, which covers the checksum of every tensor: the name of an
        artifact in deltas."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Return what :meth:`to_text` wrote.

        Raises:
            ValueError: the text is not exactly that, or of another version.
            LookupError, TypeError, AttributeError: an entry is missing or of another type.
        """
        entries = unsealed(text, FORMAT, VERSION)
        tables = {}
        for name, entry in entries["tables"].items():
            try:
                tables[name] = _table(entry)
            except ValueError as error:
                raise ValueError(f"table {name!r}: {error}") from None
        # Tables without codes may be beside those that have some.
        strange = {table.dtype for table in tables.values()} - {entries["dtype"]}
        if strange and entries["dtype"] != "codes":
            raise ValueError(f"not all of its tables are {entries['dtype']!r}")
        return Manifest(
            dist_sparse=str(entries["dist_sparse"]),
            dtype=entries["dtype"],
            collections=tuple(_collection(entry, tables) for entry in entries["collections"]),
            tables=tables,
            # No other name in a manifest is used as a path.
            bytes=integer("bytes", entries["files"][TABLES]["bytes"], least=0),
        )


def layout_of(tables: Mapping[str, Any]) -> Layout:
    """Return dtype and shape of every tensor, by ``<table>.<tensor>``, in the order of the file.
    Tables are described whole, or by their parts in a delta: both have a ``layout()``.

    Tensors of wide elements first, so that all are aligned without gaps, which the format has none
    of."""
    found = {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in table.layout().items()
    }
    # sorted() is stable: tensors of one width keep the order of the tables.
    return dict(sorted(found.items(), key=lambda item: -item[1][0].itemsize))


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def _table(entry: Mapping[str, Any]) -> Table:
    rows = integer("rows", entry["rows"], least=1)
    dim = integer("dim", entry["dim"], least=1, most=_MOST_COLUMNS)
    fields: dict[str, Any] = {
        **entry,
        "kept": integer("kept", entry["kept"], least=0, most=rows),
        "pooling": choice("pooling", entry["pooling"], get_args(Pooling)),
        "dtype": choice("dtype", entry["dtype"], ROW_DTYPES),
        "scale": choice("scale", entry["scale"], get_args(Scale)),
        "before": integer("before", entry["before"], least=0),
        "checksums": dict(entry["checksums"]),
    }
    groups = entry["groups"]
    if groups is not None:
        integer("groups", groups, least=1, most=dim)
    if entry["turned"] is not None:
        integer("turned", entry["turned"], least=dim, most=_MOST_COLUMNS)
    if not isinstance(entry["default_row"], bool):
        raise ValueError("its default_row is neither true nor false")
    if fields["scale"] == "column" and fields["dtype"] != "int4":
        raise ValueError(f"its scale is 'column', and its dtype {fields['dtype']!r}")
    if (groups is None) == (fields["dtype"] == "codes") or dim % (groups or 1):
        raise ValueError(f"it has dtype {fields['dtype']!r} and groups {groups}")
    return Table(**fields)


def _collection(entry: Mapping[str, Any], tables: Mapping[str, Table]) -> Collection:
    features = tuple(Feature(**feature) for feature in entry["features"])
    found = Collection(**{**entry, "tables": tuple(entry["tables"]), "features": features})
    choice("kind", found.kind, get_args(Kind))
    # A lookup holds the tables of its own collection alone.
    looked_up = {feature.table for feature in features}
    strange = looked_up.difference(found.tables) | set(found.tables).difference(tables)
    if strange:
        raise ValueError(
            f"collection {found.path!r} has features of {sorted(strange)}, which are none of its"
            " tables"
        )
    return found


def summary(manifest: Manifest) -> str:
    """Return a table of the tables' bytes, and what to know about them."""
    last = "books" if manifest.dtype == "codes" else "scales"
    head = ("table", "rows", "kept", "dim", "dtype", "dense", "served", "", "index", last)
    rows, before = [], 0
    for name, table in manifest.tables.items():
        taken = table.bytes
        before += table.before
        numbers = map(count, (table.rows, table.kept, table.dim))
        share = percent(taken.after / table.before if table.before else None)
        rest = taken.books if last == "books" else taken.scales
        sizes = size(table.before), size(taken.after), share, size(taken.index), size(rest)
        rows.append((name, *numbers, table.dtype, *sizes))
    whole = (
        f"total: {size(manifest.bytes)} on disk, {percent(manifest.bytes / max(before, 1))} of"
        f" {size(before)} dense"
    )
    if all(table.kept == table.rows for table in manifest.tables.values()):
        whole += "; no row was removed"
    return "\n".join([*table_lines(head, rows, right={1, 2, 3, 5, 6, 7, 8, 9}), whole])
