"""What an artifact serves, compared with the model before it gets its name, and checked on its own
at any later time.

Every removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within
half a step of their row's grid, or at the nearest step of their column's, where zeros are exactly
0. Lookups read the mapped
file in pure torch: no table is loaded.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.artifact import VerifiedArtifact, open_artifact
from dist_sparse.serving.codes import BITS, Rows, chunks, decode, encode
from dist_sparse.serving.manifest import Table

__all__ = ["MappedTable", "TableCheck", "check_artifact"]

# Ids that are looked up together.
_SPAN = 1 << 18

# Of the float64 arithmetic that finds the nearest code.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact, read where it is mapped.

    Args:
        artifact: verified.
        name: of the table.
    """

    def __init__(self, artifact: VerifiedArtifact, name: str) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        self.index = RowIndex(tensors["kept"], self.entry.rows) if "kept" in tensors else None
        self.rotation = tensors.get("rotation")
        self.scales, self.books = tensors.get("scales"), tensors.get("books")
        self._stored, self._scale_bias = tensors["rows"], tensors.get("scale_bias")

    def rows(self, first: int, last: int) -> Rows:
        """Return the stored rows ``[first, last)`` as they are stored."""
        tail = self._scale_bias
        part = None if tail is None else tail[first:last]
        return Rows(self._stored[first:last], part, self.scales, self.books)


class TableCheck:
    """The check of one table: its kept rows come in order, chunk by chunk.

    Args:
        artifact: before it has its name.
        name: of the table.
        kept: of the model: bool ``(rows,)``.
        rotation: what the model's outputs are turned back by.
        books: of the model; rows are codes then.

    Raises:
        ValueError: the bitmap keeps other rows, or rotation or books are others; names table and
            id.
    """

    def __init__(
        self,
        artifact: VerifiedArtifact,
        name: str,
        kept: Tensor,
        rotation: Tensor | None = None,
        books: Tensor | None = None,
    ) -> None:
        self._name = name
        self._table = MappedTable(artifact, name)
        self._at = 0
        self._error = self._step = 0.0
        self._kept = int(kept.count_nonzero())
        self._removed = len(kept) - self._kept
        if not _is_same(self._table.rotation, rotation):
            raise ValueError(
                f"Table {name!r}: its outputs are turned back by another matrix than the model's."
            )
        if not _is_same(self._table.books, books):
            raise ValueError(f"Table {name!r}: its codes have other books than the model's.")
        self._compare_ids(kept)

    def _compare_ids(self, kept: Tensor) -> None:
        """Compare the row that serves each id with the number of kept ids before it."""
        before = 0
        for start, part in zip(range(0, len(kept), _SPAN), torch.split(kept, _SPAN), strict=True):
            ids = torch.arange(start, start + len(part))
            found = ids if self._table.index is None else self._table.index(ids)
            expected = torch.where(part, part.cumsum(0) + (before - 1), -1)
            if len(wrong := (found != expected).nonzero()):
                at = int(wrong[0])
                raise ValueError(
                    f"Table {self._name!r}: id {start + at} is served by row {int(found[at])}, and"
                    f" should be by {int(expected[at])} (-1: none)."
                )
            before += int(part.count_nonzero())

    def add(self, weight: Tensor) -> None:
        """Compare the next kept rows of the model with the stored ones.

        Raises:
            ValueError: names table, row and values.
        """
        # Rows come in the order in which they are stored.
        first, self._at = self._at, self._at + len(weight)
        stored = self._table.rows(first, self._at)
        dim, dtype = self._table.entry.dim, self._table.entry.dtype
        if stored.books is not None:
            self._compare_codes(first, stored.rows, weight.cpu())
            return
        found, weight = decode(stored, dim), weight.cpu()
        error = (found.double() - weight.double()).abs()
        if stored.scale_bias is not None:
            step = stored.scale_bias[:, :1].double()
            wrong = (error > step / 2 * _ROUNDING) | ((weight == 0) & (found != 0))
            self._note(error, step)
        elif stored.scales is not None:
            # The grid of a column need not reach its largest weights: codes are compared.
            exact = decode(encode(weight, dtype, stored.scales), dim)
            wrong = found != exact
            self._note(error, stored.scales)
        else:
            # Bytes are compared: -0.0 is not 0.0.
            bits = encode(weight, dtype).rows
            wrong = stored.rows.view(torch.uint8) != bits.view(torch.uint8)
            wrong = wrong.view(len(weight), dim, bits.element_size()).any(2)
        if len(places := wrong.nonzero()):
            row, column = places[0].tolist()
            raise ValueError(
                f"Table {self._name!r}: the kept row {first + row} serves"
                f" {float(found[row, column])} in column {column}, and the model has"
                f" {float(weight[row, column])}."
            )

    def _compare_codes(self, first: int, stored: Tensor, codes: Tensor) -> None:
        if len(places := (stored != codes).nonzero()):
            row, group = places[0].tolist()
            raise ValueError(
                f"Table {self._name!r}: the kept row {first + row} has the code"
                f" {int(stored[row, group])} in group {group}, and lookups of the model"
                f" {int(codes[row, group])}."
            )

    def _note(self, error: Tensor, step: Tensor) -> None:
        self._error = max(self._error, float(error.max()))
        self._step = max(self._step, float(step.max()))

    def result(self) -> dict[str, int | float]:
        """Return how many rows were compared and how many ids serve 0; of 8 and 4 bits the largest
        error and step.

        Raises:
            ValueError: not all kept rows came.
        """
        stored = self._table.entry.stored
        if self._at != stored:
            raise ValueError(
                f"Table {self._name!r}: {self._at} rows were compared, and {stored} are stored."
            )
        return {
            "kept": self._kept,
            "removed": self._removed,
            "largest_error": self._error,
            "largest_step": self._step,
        }


def _is_same(stored: Tensor | None, expected: Tensor | None) -> bool:
    if stored is None or expected is None:
        return stored is expected
    return torch.equal(stored, expected)


def check_artifact(path: str | os.PathLike[str]) -> VerifiedArtifact:
    """Check an artifact with nothing but its own files, and return it: CRC32s, sizes and bitmaps,
    that every weight is finite, and that the grid of every row of 8 or 4 bits holds zero exactly.

    Raises:
        ValueError: names the file, or the table and the row.
        OSError: a file can't be read.
        ImportError: safetensors is not installed.
    """
    artifact = open_artifact(path)
    for name, entry in artifact.manifest.tables.items():
        compared = entry.check.get("kept"), entry.check.get("removed")
        if compared != (entry.kept, entry.rows - entry.kept):
            raise ValueError(f"{artifact.path}: table {name!r} was not compared with its model.")
        table = MappedTable(artifact, name)
        if table.rotation is not None and not bool(table.rotation.isfinite().all()):
            raise ValueError(f"{artifact.path}: the rotation of table {name!r} is not finite.")
        if table.scales is not None and not bool(
            (table.scales.isfinite() & (table.scales > 0)).all()
        ):
            raise ValueError(f"{artifact.path}: a scale of table {name!r} is not positive.")
        if table.books is not None and bool(table.books[:, 0].any()):
            raise ValueError(
                f"{artifact.path}: a book of table {name!r} has other entries 0 than zeros."
            )
        for some in chunks(entry.stored, entry.dim):
            wrong = _invalid(table.rows(some.start, some.stop), entry)
            if len(places := wrong.nonzero()):
                row = some.start + int(places[0])
                raise ValueError(
                    f"{artifact.path}: the kept row {row} of table {name!r} has no valid weights."
                )
    return artifact


def _invalid(stored: Rows, entry: Table) -> Tensor:
    """Which rows have a weight that is not finite, or a grid that does not hold 0: bool
    ``(rows,)``."""
    wrong = ~decode(stored, entry.dim).isfinite().all(1)
    if stored.scale_bias is not None:
        scale, bias = stored.scale_bias.double().unbind(1)
        # The code of 0 must be one of the codes.
        zero = -bias / scale
        wrong |= (zero != zero.round()) | (zero < 0) | (zero > 2 ** BITS[entry.dtype] - 1)
    return wrong
