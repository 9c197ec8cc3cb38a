"""How do figures become a table that a person reads in a terminal?

Plain lines without a frame, cells padded to the width of their column; bytes as MiB. Names come from models and logs,
so what a terminal would obey is written as an escape. And back: what a person types as a size, a block or a level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Final

from dist_sparse.tables.shards import ROW

__all__ = [
    "block_text",
    "mib",
    "parse_block",
    "parse_bytes",
    "parse_count",
    "parse_level",
    "printable",
    "shape_text",
    "table_lines",
]

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def printable(text: str) -> str:
    r"""Text that neither drives a terminal nor turns the order of what stands beside it: control and format characters
    (``\x1b``, ``\n``, ``\u202e``), lone surrogates and what is unassigned are written as Python's ``repr`` does."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    total: Sequence[str] | None = None,
) -> list[str]:
    """The lines of a table: the head, a rule, the rows, and under another rule what they add up to.

    Args:
        head: names of the columns.
        rows: cells, as many as ``head`` has; made :func:`printable`.
        right: columns that are set flush right.
        total: a last row.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    everything = [head, *rows, *([] if total is None else [total])]
    widths = [max(len(row[i]) for row in everything) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    sums = [] if total is None else [rule, total]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, rule, *rows, *sums]
    ]


def shape_text(shape: Sequence[int | str] | None) -> str:
    """``(1000, 64)`` as ``1000 x 64``; None as a dash."""
    return "-" if shape is None else " x ".join(map(str, shape))


def block_text(block: Sequence[int | str] | None, zeros: int | None = None) -> str:
    """Elements that a block loses when it goes: ``all``, or how many; a dash without a block."""
    if block is None:
        return "-"
    whole = math.nan if any(isinstance(size, str) for size in block) else math.prod(int(size) for size in block)
    return "all" if zeros is None or zeros == whole else str(zeros)


def mib(count: int) -> str:
    """Bytes as MiB, with three decimals and without the unit."""
    return f"{count / 2**20:,.3f}"


def parse_bytes(text: str) -> int:
    """``512MiB``, ``1.5 GB`` or ``4096`` as bytes.

    Raises:
        ValueError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"Invalid size {text!r}: must be a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB.")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_block(text: str) -> tuple[int, int | str]:
    """``1x4``, or ``1xROW``, as a sparse block shape.

    Raises:
        ValueError: it is no such shape.
    """
    match = re.fullmatch(rf"([1-9]\d*) *x *([1-9]\d*|{ROW})", text.strip())
    if match is None:
        raise ValueError(f"Invalid block {text!r}: must be ROWSxCOLUMNS, such as 1x4, or 1x{ROW} for whole rows.")
    return int(match[1]), match[2] if match[2] == ROW else int(match[2])


def parse_count(text: str) -> int:
    """``20`` as a number of things.

    Raises:
        ValueError: it is no int >= 1.
    """
    if re.fullmatch(r"0*[1-9]\d*", text.strip()) is None:
        raise ValueError(f"Invalid number {text!r}: must be an int >= 1.")
    return int(text)


def parse_level(text: str) -> float:
    """``0.8`` as a sparsity level.

    Raises:
        ValueError: it is no number in [0, 1].
    """
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not 0 <= level <= 1:
        raise ValueError(f"Invalid level {text!r}: must be a number in [0, 1].")
    return level
