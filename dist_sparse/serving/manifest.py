"""The manifest of an artifact: its tables, and the collections that look them up; and of a delta,
what turns one artifact into the next one.

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
from typing import Any, Literal, get_args

import torch

from dist_sparse.checks import choice, integer, refuse, sealed, unsealed
from dist_sparse.codes.books import ENTRIES
from dist_sparse.serving.encodings import ENCODINGS, Dtype
from dist_sparse.text import count, percent, size, table_lines

FORMAT = "dist_sparse.serving"
VERSION = 4
TABLES = "tables.safetensors"

Kind = Literal["bag", "sequence", "embedding_bag", "embedding"]
Pooling = Literal["sum", "mean", "none"]
Scale = Literal["row", "column"]
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

# Tensors with an entry for each stored row. Others are carried whole if they have changed.
PER_ROW = frozenset({"rows", "scale_bias"})

_MOST_COLUMNS = 1 << 16


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
    def looked_up(self) -> tuple[str, ...]:
        """The table of each feature, or of a module of torch's."""
        return tuple(feature.table for feature in self.features) or self.tables

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
            :func:`~dist_sparse.serving.artifact.sum_of_rows` returns.
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
    before: int
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Rows that are stored."""
        return self.kept + self.default_row

    @property
    def columns(self) -> int:
        """Columns of its outputs."""
        return self.turned or self.dim

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
        encoding = ENCODINGS[self.dtype]
        # 4-bit codes share bytes in pairs, the last one alone if the number is odd.
        columns = -(-self.dim * encoding.bits // (8 * encoding.stored.itemsize))
        if self.groups is not None:
            columns = self.groups
            found["books"] = torch.float16, (columns, ENTRIES, self.dim // columns)
        found["rows"] = encoding.stored, (self.stored, columns)
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
        return _sealed(FORMAT, VERSION, asdict(self))

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
        tables = {name: _table(name, entry) for name, entry in entries["tables"].items()}
        # Tables without codes may be beside those that have some.
        strange = {table.dtype for table in tables.values()} - {entries["dtype"]}
        if strange and entries["dtype"] != "codes":
            raise ValueError(f"not all of its tables are {entries['dtype']!r}")
        return Manifest(
            dist_sparse=str(entries["dist_sparse"]),
            dtype=entries["dtype"],
            collections=tuple(_collection(entry, tables) for entry in entries["collections"]),
            tables=tables,
            bytes=integer("bytes", entries["files"][TABLES]["bytes"], least=0),
        )


def _sealed(form: str, version: int, fields: dict[str, Any]) -> str:
    # No other name in a manifest is used as a path.
    files = {TABLES: {"bytes": fields.pop("bytes")}}
    return sealed({"format": form, "version": version, **fields, "files": files})


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


def _table(name: str, entry: Mapping[str, Any]) -> Table:
    found = Table(**{**entry, "checksums": dict(entry["checksums"])})
    integer("rows", found.rows, least=1, of=name)
    integer("kept", found.kept, least=0, most=found.rows, of=name)
    integer("dim", found.dim, least=1, most=_MOST_COLUMNS, of=name)
    integer("before", found.before, least=1, of=name)
    known = {"pooling": get_args(Pooling), "dtype": ENCODINGS, "scale": get_args(Scale)}
    for key, names in known.items():
        choice(f"{key} of {name!r}", entry[key], names)
    is_coded, is_by_column = found.dtype == "codes", found.scale == "column"
    groups = integer("groups", found.groups, least=1, of=name) if is_coded else 1
    if found.turned is not None:
        integer("turned", found.turned, least=found.dim, most=_MOST_COLUMNS, of=name)
    wrong = {
        "default_row": not isinstance(found.default_row, bool),
        "scale": is_by_column and found.dtype != "int4",
        "groups": found.dim % groups != 0 or (found.groups is None) == is_coded,
    }
    refuse({f"Invalid {key} of {name!r} beside the other entries": wrong[key] for key in wrong})
    return found


def _collection(entry: Mapping[str, Any], tables: Mapping[str, Table]) -> Collection:
    features = tuple(Feature(**feature) for feature in entry["features"])
    found = Collection(**{**entry, "tables": tuple(entry["tables"]), "features": features})
    choice("kind", found.kind, get_args(Kind))
    # A lookup holds the tables of its own collection alone.
    looked_up = {feature.table for feature in features}
    strange = looked_up.difference(found.tables) | set(found.tables).difference(tables)
    if strange:
        raise ValueError(
            f"collection {found.path!r} has features of {sorted(strange)}, none of its tables"
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
        share = percent(taken.after / table.before)
        rest = getattr(taken, last)
        sizes = size(table.before), size(taken.after), share, size(taken.index), size(rest)
        rows.append((name, *numbers, table.dtype, *sizes))
    whole = (
        f"total: {size(manifest.bytes)} on disk, {percent(manifest.bytes / max(before, 1))} of"
        f" {size(before)} dense"
    )
    if all(table.kept == table.rows for table in manifest.tables.values()):
        whole += "; no row was removed"
    return "\n".join([*table_lines(head, rows, right={1, 2, 3, 5, 6, 7, 8, 9}), whole])


# Deltas: their folders have the files of an artifact. `tables.safetensors` holds, for each table,
# the rows that changed or came and their ids, and the ids that went (tombstones). `manifest.json`
# names the artifact that the delta follows by the hash of its manifest, and holds the whole
# manifest of the artifact that it leads to: the checksum of each tensor there says what a chain of
# deltas must add up to, and an artifact merged from a chain goes on with the deltas that follow the
# chain.

_DELTA_FORMAT = "dist_sparse.serving.delta"
_DELTA_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class TableDelta:
    """What changes in a table.

    Args:
        after: the table of the artifact that the delta leads to.
        rows: in the delta: rows that changed, and rows of ids that came.
        came: how many of them came.
        gone: ids that went.
        whole: tensors that are no rows, and changed: scales of columns, or a rotation.
        checksums: CRC32s of the delta's tensors, named as in :meth:`layout`.
    """

    after: Table
    rows: int
    came: int
    gone: int
    whole: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)

    def layout(self) -> Layout:
        """Return dtype and shape of each of its tensors: ``ids`` of the rows and ids that are
        ``gone``, ascending; a default row has the id behind the last."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ids": (torch.int32, (self.rows,)),
            "gone": (torch.int32, (self.gone,)),
        }
        for key, (dtype, shape) in self.after.layout().items():
            if key in PER_ROW:
                found[key] = dtype, (self.rows, *shape[1:])
            elif key in self.whole:
                found[key] = dtype, shape
        return found


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The entries of a delta's ``manifest.json``.

    Args:
        base: hash of the artifact that begins the chain.
        previous: hash of the artifact that the delta follows, which base and deltas before it make.
        artifact: the manifest of the one that it leads to.
        tables: by name.
        bytes: of ``tables.safetensors``.
    """

    base: str
    previous: str
    artifact: Manifest
    tables: Mapping[str, TableDelta]
    bytes: int = 0

    def to_text(self) -> str:
        """Return the text of ``manifest.json``, which ends with the CRC32 of the text without
        it."""
        fields = {**asdict(self), "artifact": self.artifact.to_text()}
        for table in fields["tables"].values():
            del table["after"]
        return _sealed(_DELTA_FORMAT, _DELTA_VERSION, fields)

    @staticmethod
    def from_text(text: str) -> Delta:
        """Return what :meth:`to_text` wrote.

        Raises:
            ValueError: the text is not exactly that, or of another version.
            LookupError, TypeError, AttributeError: an entry is missing or of another type.
        """
        entries = unsealed(text, _DELTA_FORMAT, _DELTA_VERSION)
        artifact = Manifest.from_text(entries["artifact"])
        if list(entries["tables"]) != list(artifact.tables):
            raise ValueError(f"its tables are {sorted(entries['tables'])}")
        tables = {}
        for name, entry in entries["tables"].items():
            after = artifact.tables[name]
            most = {"rows": after.stored, "came": after.stored, "gone": after.rows}
            for key, largest in most.items():
                integer(key, entry[key], least=0, most=largest, of=name)
            whole = tuple(sorted(after.layout().keys() & entry["whole"]))
            fields = {**entry, "whole": whole, "checksums": dict(entry["checksums"])}
            tables[name] = TableDelta(after=after, **fields)
        return Delta(
            base=str(entries["base"]),
            previous=str(entries["previous"]),
            artifact=artifact,
            tables=tables,
            bytes=integer("bytes", entries["files"][TABLES]["bytes"], least=0),
        )


def refuse_changed(before: Manifest, after: Manifest) -> None:
    """Refuse artifacts between which more has changed than rows and what decodes them.

    Raises:
        ValueError: names the table.
    """
    if before.collections != after.collections or list(before.tables) != list(after.tables):
        raise ValueError(
            "a delta is of the same tables and lookups as the artifact that it follows:"
            " export a new base"
        )
    for name, table in after.tables.items():
        was = vars(before.tables[name])
        for key in vars(table).keys() - {"kept", "checksums", "before"}:
            if getattr(table, key) != was[key]:
                raise ValueError(
                    f"table {name!r} has {key}={getattr(table, key)!r}, and had {was[key]!r} in the"
                    " artifact that the delta follows: a delta changes rows alone; export a new"
                    " base"
                )


def delta_summary(delta: Delta) -> str:
    """Return how many rows the delta changes, and its bytes beside the whole artifact's."""
    tables = delta.tables.values()
    came, gone = sum(table.came for table in tables), sum(table.gone for table in tables)
    changed = sum(table.rows for table in tables) - came
    share = percent(delta.bytes / delta.artifact.bytes)
    return (
        f"delta: {count(changed)} rows changed, {count(came)} came, {count(gone)} went;"
        f" {size(delta.bytes)} on disk, {share} of {size(delta.artifact.bytes)}"
    )
