"""A delta: what turns one artifact into the next one.

Its folder has the files of an artifact. ``tables.safetensors`` holds, for each table, the rows that
changed or came and their ids, and the ids that went (tombstones). ``manifest.json`` names the
artifact that the delta follows by the hash of its manifest, and holds the whole manifest of the
artifact that it leads to: the checksum of each tensor there says what a chain of deltas must add up
to, and an artifact merged from a chain goes on with the deltas that follow the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from dist_sparse.checks import integer, sealed, unsealed
from dist_sparse.serving.manifest import TABLES, Layout, Manifest, Table
from dist_sparse.serving.rows import PER_ROW
from dist_sparse.text import count, percent, size

FORMAT: Final = "dist_sparse.serving.delta"
VERSION: Final = 3


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
        files = {TABLES: {"bytes": fields.pop("bytes")}}
        return sealed({"format": FORMAT, "version": VERSION, **fields, "files": files})

    @staticmethod
    def from_text(text: str) -> Delta:
        """Return what :meth:`to_text` wrote.

        Raises:
            ValueError: the text is not exactly that, or of another version.
            LookupError, TypeError, AttributeError: an entry is missing or of another type.
        """
        entries = unsealed(text, FORMAT, VERSION)
        artifact = Manifest.from_text(entries["artifact"])
        if list(entries["tables"]) != list(artifact.tables):
            raise ValueError(f"its tables are {sorted(entries['tables'])}")
        tables = {}
        for name, entry in entries["tables"].items():
            tables[name] = _table(name, artifact.tables[name], entry)
        return Delta(
            base=str(entries["base"]),
            previous=str(entries["previous"]),
            artifact=artifact,
            tables=tables,
            bytes=integer("bytes", entries["files"][TABLES]["bytes"], least=0),
        )

    def refuse_other(self, before: Manifest, base: str) -> None:
        """Refuse to follow another artifact than the one that this delta was exported from.

        Args:
            before: of what is served.
            base: hash of the artifact that its chain began with.

        Raises:
            ValueError: names both by the first digits of their hashes.
        """
        found = before.hash
        if self.previous != found:
            kind = "out of order" if self.base == base else "of another base"
            raise ValueError(
                f"the delta is {kind}: it follows artifact {self.previous[:12]} of base"
                f" {self.base[:12]}, and this is artifact {found[:12]} of base {base[:12]}"
            )
        # Written by export(), the two differ in rows alone.
        refuse_changed(before, self.artifact)


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


def _table(name: str, after: Table, entry: Mapping[str, Any]) -> TableDelta:
    return TableDelta(
        after=after,
        rows=integer("rows", entry["rows"], least=0, most=after.stored, of=name),
        came=integer("came", entry["came"], least=0, most=after.stored, of=name),
        gone=integer("gone", entry["gone"], least=0, most=after.rows, of=name),
        whole=tuple(key for key in after.layout() if key in entry["whole"]),
        checksums=dict(entry["checksums"]),
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
