"""Bytes of what finds the kept parts of a table, and the columns of narrow ones: the formulas of
budgets and plans."""

from __future__ import annotations


def index_bytes(rows: int) -> int:
    """Return the bytes in memory that find the kept rows of a table of so many: a bit each, and a
    count for each 32.

    Example::

        >>> from dist_sparse.tables.sizes import index_bytes
        >>> index_bytes(1000)  # 0.25 byte a row
        256
    """
    return 8 * -(-rows // 32)


def narrow_width(kept: int, columns: int) -> int:
    """Return the columns of a table that has lost all but ``kept``: a multiple of 4, as FBGEMM
    needs, or all."""
    return min(columns, max(4, -(-kept // 4) * 4))


def basis_bytes(columns: int, width: int) -> int:
    """Return the bytes of the float32 matrix that turns ``width`` rotated columns back into
    ``columns``."""
    return 4 * columns * width
