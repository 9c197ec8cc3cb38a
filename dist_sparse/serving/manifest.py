"""The manifests of artifacts and deltas. An artifact's manifest lists its tables and the
collections that look them up; a delta's manifest lists what leads from one artifact to the next.

The layout of the file of tables follows from the manifest: names, dtypes, shapes and order of its
tensors. The text is canonical and holds its own CRC32: it is read exactly as written, or refused.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from dist_sparse.checks import choice, integer, sealed, unsealed
from dist_sparse.serving.books import ENTRIES
from dist_sparse.serving.encodings import ENCODINGS, Dtype
from dist_sparse.text import count, percent, size, table_lines

FORMAT = "dist_sparse.serving"
VERSION = 4
TABLES = "tables.safetensors"

CollectionKind = Literal["bag", "sequence", "embedding_bag", "embedding"]
Pooling = Literal["sum", "mean", "none"]
Scale = Literal["row", "column"]
# The dtype and the shape of a tensor.
TensorType = tuple[torch.dtype, tuple[int, ...]]
Layout = Mapping[str, TensorType]

# Tensors with an entry for each stored row. A delta contains only the changed rows of these
# tensors, and all of any other tensor that has changed.
PER_ROW = frozenset({"rows", "scale_bias"})

_MOST_COLUMNS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of a collection, and the table that its ids look up."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A module that looks tables up.

    Args:
        path: the path of the module in the model; ``""`` is the model itself.
        kind: ``"bag"`` and ``"sequence"`` are TorchRec's collections, ``"embedding_bag"`` and
            ``"embedding"`` torch's modules.
        weighted: whether each id comes with a weight (``"bag"``): True if the collection is
            weighted; ``"optional"`` if not, but TorchRec sharded it: training reads the weights of
            a batch that has some; otherwise False.
        include_last_offset: the option of a ``torch.nn.EmbeddingBag``.
        tables: the names of its tables, in the order of the module.
        features: its features, in the order of the module's outputs; empty for torch's modules.
    """

    path: str
    kind: CollectionKind
    weighted: bool | Literal["optional"] = False
    include_last_offset: bool = False
    tables: tuple[str, ...]
    features: tuple[Feature, ...] = ()

    @property
    def looked_up(self) -> tuple[str, ...]:
        """The table of each feature, or the table of a torch module."""
        return tuple(feature.table for feature in self.features) or self.tables

    @property
    def outputs(self) -> tuple[str, ...]:
        """The key of each feature's output, as TorchRec names it: ``feature``, or ``feature@table``
        for a feature that looks up several tables."""
        times = Counter(feature.name for feature in self.features)
        return tuple(f"{f.name}@{f.table}" if times[f.name] > 1 else f.name for f in self.features)


@dataclass(frozen=True, kw_only=True)
class TableBytes:
    """Bytes of a table: of the dense table, of the exported table, and of the parts that are not
    weights.

    Args:
        before: bytes of the dense table, in the dtype that it was trained in.
        after: bytes of all of its tensors in the file.
        index: bytes of the bitmap of kept rows.
        scales: bytes of the rows' scales and biases, or of the columns' scales.
        rotation: bytes of the matrix that rotates outputs back.
        books: bytes of the books that decode codes.
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
        rows: the number of rows of the trained table; its ids are ``[0, rows)``.
        kept: the number of ids whose rows are stored.
        dim: the number of stored columns.
        pooling: the pooling of the collection that looks it up; ``"none"`` in sequences.
        dtype: how its rows are stored.
        scale: whether each row or each column has a grid, for 8 and 4 bits.
        groups: the number of codes of a row, each for ``dim / groups`` columns; None unless
            ``dtype`` is ``"codes"``.
        default_row: whether removed ids share a row, stored after the kept ones.
        turned: columns of its outputs, if they are rotated back from ``dim`` columns; otherwise
            None.
        before: bytes of the dense table, in the dtype that it was trained in.
        checksums: the checksum of each of its tensors, named as in :meth:`layout`. Rows have
            :func:`~dist_sparse.serving.artifact.sum_of_rows`, other tensors a CRC32.
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
        """The number of stored rows."""
        return self.kept + self.default_row

    @property
    def columns(self) -> int:
        """The columns of its outputs."""
        return self.turned or self.dim

    @property
    def bytes(self) -> TableBytes:
        """Its bytes in the model and in the file."""
        sizes = {name: size_of(*tensor) for name, tensor in self.layout().items()}
        return TableBytes(
            before=self.before,
            after=sum(sizes.values()),
            index=sizes.get("kept", 0),
            scales=sizes.get("scale_bias", sizes.get("scales", 0)),
            rotation=sizes.get("rotation", 0),
            books=sizes.get("books", 0),
        )

    def layout(self) -> Layout:
        """Return dtype and shape of each of its tensors.

        - ``kept``: the bitmap of kept rows; absent if all rows are kept.
        - ``rows``: the stored rows. A byte holds an 8-bit code, two 4-bit codes (the lower half
          first), or the code of a group of columns.
        - ``scale_bias``: each row's scale and bias. ``scales``: each column's scale.
        - ``books``: the weights that each code of a group selects.
        - ``rotation``: the matrix that outputs are multiplied by to rotate them back.
        """
        found: dict[str, TensorType] = {}
        if self.kept < self.rows:
            found["kept"] = torch.int32, (-(-self.rows // 32),)
        if self.scale == "column":
            found["scales"] = torch.float16, (self.dim,)
        elif self.dtype in ("int8", "int4"):
            found["scale_bias"] = torch.float16, (self.stored, 2)
        encoding = ENCODINGS[self.dtype]
        # Two 4-bit codes share a byte, and an odd last one has a byte of its own.
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
        dtype: the dtype of all tables. If it is ``"codes"``, tables without codes have another one.
        collections: the collections, sorted by path.
        tables: the tables, by name.
        bytes: the size of ``tables.safetensors``.
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
        """The SHA-256 of its text, which includes the checksum of every tensor. Deltas identify
        artifacts by it."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Return what :meth:`to_text` wrote.

        Raises:
            ValueError: the text is not exactly that, or of another version.
            LookupError, TypeError, AttributeError: an entry is missing or of another type.
        """
        entries = _unsealed(text, FORMAT, VERSION)
        tables = {name: _table(name, entry) for name, entry in entries["tables"].items()}
        strange = {table.dtype for table in tables.values()} - {entries["dtype"]}
        if strange and entries["dtype"] != "codes":
            raise ValueError(f"not all of its tables are {entries['dtype']!r}")
        return Manifest(
            dist_sparse=str(entries["dist_sparse"]),
            dtype=entries["dtype"],
            collections=tuple(_collection(entry, tables) for entry in entries["collections"]),
            tables=tables,
            bytes=entries["bytes"],
        )


def _sealed(form: str, version: int, fields: dict[str, Any]) -> str:
    # The key is the fixed name of the file: no name from a manifest is ever used as a path.
    files = {TABLES: {"bytes": fields.pop("bytes")}}
    return sealed({"format": form, "version": version, **fields, "files": files})


def _unsealed(text: str, form: str, version: int) -> dict[str, Any]:
    other, what = _OTHERS[form]
    # The format is the first entry.
    if text.startswith(f'{{\n "format": "{other}"'):
        raise ValueError(f"it is {what}: an artifact comes first, then its deltas in order")
    entries = unsealed(text, form, version)
    size = integer("bytes", entries["files"][TABLES]["bytes"], least=0)
    return {**entries, "bytes": size}


def layout_of(tables: Mapping[str, Any]) -> Layout:
    """Return dtype and shape of every tensor, by ``<table>.<tensor>``, in the order of the file.

    Tensors of wide elements come first, which aligns all of them: safetensors allows no gaps.

    Args:
        tables: each a :class:`Table` or a :class:`TableDelta`.
    """
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
    choices = {"pooling": get_args(Pooling), "dtype": ENCODINGS, "scale": get_args(Scale)}
    for key, known in choices.items():
        choice(f"{key} of {name!r}", entry[key], known)
    is_coded = found.dtype == "codes"
    groups = integer("groups", found.groups, least=1, of=name) if is_coded else 1
    if found.turned is not None:
        integer("turned", found.turned, least=found.dim, most=_MOST_COLUMNS, of=name)
    beside = f"of {name!r} beside the other entries"
    if not isinstance(found.default_row, bool):
        raise ValueError(f"Invalid default_row {beside}")
    if found.scale == "column" and found.dtype != "int4":
        raise ValueError(f"Invalid scale {beside}")
    if found.dim % groups != 0 or (found.groups is None) == is_coded:
        raise ValueError(f"Invalid groups {beside}")
    return found


def _collection(entry: Mapping[str, Any], tables: Mapping[str, Table]) -> Collection:
    features = tuple(Feature(**feature) for feature in entry["features"])
    found = Collection(**{**entry, "tables": tuple(entry["tables"]), "features": features})
    choice("kind", found.kind, get_args(CollectionKind))
    if not isinstance(found.weighted, bool) and found.weighted != "optional":
        raise ValueError(f"Invalid weighted={found.weighted!r} of {found.path!r}")
    # A lookup is built from the tables of its own collection only.
    looked_up = {feature.table for feature in features}
    strange = looked_up.difference(found.tables) | set(found.tables).difference(tables)
    if strange:
        raise ValueError(
            f"collection {found.path!r} has features of {sorted(strange)}, none of its tables"
        )
    return found


def artifact_summary(manifest: Manifest, where: str = f"in {TABLES}") -> str:
    """Return a text table of the tables' bytes, and their total, which they take ``where``."""
    last = "books" if manifest.dtype == "codes" else "scales"
    head = ("table", "rows", "kept", "dim", "dtype", "served", "of dense", "index", last)
    rows, before = [], 0
    for name, table in manifest.tables.items():
        sizes = table.bytes
        before += table.before
        shape = count(table.rows), count(table.kept), count(table.dim)
        served = size(sizes.after), percent(sizes.after / table.before)
        parts = size(sizes.index), size(getattr(sizes, last))
        rows.append((name, *shape, table.dtype, *served, *parts))
    total = (
        f"total: {size(manifest.bytes)} {where}, {percent(manifest.bytes / max(before, 1))} of"
        f" {size(before)} dense"
    )
    if all(table.kept == table.rows for table in manifest.tables.values()):
        total += "; no row was removed"
    return "\n".join([*table_lines(head, rows, right={1, 2, 3, 5, 6, 7, 8}), total])


# The folder of a delta has the files of an artifact. `tables.safetensors` holds, for each table,
# changed and added rows with their ids, and removed ids (tombstones). `manifest.json` has the hash
# of the manifest of the artifact that the delta follows, and the whole manifest of the artifact
# that it leads to. The checksums there are the checksums of a full export: a chain of deltas must
# add up to them, and an artifact that was merged from a chain has the hash that the next delta
# expects.

_DELTA_FORMAT = "dist_sparse.serving.delta"
_DELTA_VERSION = 3

# By format, the other one and what it is: their folders are mistaken for each other.
_OTHERS = {FORMAT: (_DELTA_FORMAT, "a delta"), _DELTA_FORMAT: (FORMAT, "an artifact")}


@dataclass(frozen=True, kw_only=True)
class TableDelta:
    """What changes in a table.

    Args:
        after: the table after the delta.
        rows: the number of rows in the delta: changed rows, and rows of added ids.
        came: the number of added ids.
        gone: the number of removed ids.
        whole: names of the changed tensors that are not rows, such as ``scales``.
        checksums: CRC32s of the delta's tensors, named as in :meth:`layout`.
    """

    after: Table
    rows: int
    came: int
    gone: int
    whole: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)

    def layout(self) -> Layout:
        """Return dtype and shape of each of its tensors: the tensors of the table, the ``ids`` of
        the rows, and the removed ids, ``gone``. Ids ascend in both. A default row counts as the row
        of the id after the last one."""
        found: dict[str, TensorType] = {
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
        previous: hash of the artifact that the delta follows: the base with all deltas before it.
        artifact: the manifest of the artifact after the delta.
        tables: the tables, by name.
        bytes: the size of ``tables.safetensors``.
    """

    base: str
    previous: str
    artifact: Manifest
    tables: Mapping[str, TableDelta]
    bytes: int = 0

    def to_text(self) -> str:
        """Return the text of ``manifest.json``, which ends with the CRC32 of the text without
        it."""
        # The artifact is stored as text, whose hash the next delta names.
        fields = {**asdict(self), "artifact": self.artifact.to_text()}
        # The artifact's manifest has this entry already.
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
        entries = _unsealed(text, _DELTA_FORMAT, _DELTA_VERSION)
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
            bytes=entries["bytes"],
        )


def refuse_changed(before: Manifest, after: Manifest) -> None:
    """Refuse a delta between artifacts that differ in more than rows, and the tensors that decode
    them.

    Raises:
        ValueError: names the table.
    """
    if before.collections != after.collections or list(before.tables) != list(after.tables):
        raise ValueError(
            "a delta can't change which tables and lookups there are: export a new base"
        )
    for name, table in after.tables.items():
        was, now = vars(before.tables[name]), vars(table)
        for key in now:
            if key not in ("kept", "checksums", "before") and now[key] != was[key]:
                raise ValueError(
                    f"table {name!r} has {key}={now[key]!r}, and had {was[key]!r} in the artifact"
                    " before: a delta can change only rows; export a new base"
                )


def delta_summary(delta: Delta) -> str:
    """Return a line with the number of changed rows, and the size compared with the whole
    artifact's."""
    tables = delta.tables.values()
    came, gone = sum(table.came for table in tables), sum(table.gone for table in tables)
    changed = sum(table.rows for table in tables) - came
    share = percent(delta.bytes / delta.artifact.bytes)
    text = (
        f"delta: {count(changed)} rows changed, {count(came)} came, {count(gone)} went;"
        f" {size(delta.bytes)} on disk, {share} of {size(delta.artifact.bytes)}"
    )
    return textwrap.fill(text, 80, subsequent_indent="  ")
