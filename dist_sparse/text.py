"""Numbers, shapes and tables as text for a terminal or a page.

Plain standard library: ``dist-sparse doctor`` prints its table where torch is missing. Numbers have
no locale and at most four significant digits, so that the same number always reads the same; bytes
are in powers of 1024. Names come from models and logs: control characters in them are escaped
(:func:`printable`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    r"""Escape everything that could control a terminal or reorder the text around it.

    Control and format characters (``\x1b``, ``\n``, ``\u202e``), lone surrogates and unassigned
    code points are written as Python's ``repr`` writes them.
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shortened(value: object, most: int = 80) -> str:
    """Return ``repr(value)``, with the middle left out where it is longer than ``most``
    characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


def table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    total: Sequence[str] | None = None,
) -> list[str]:
    """Return the lines of a table: head, rule, rows and, below another rule, the total.

    Args:
        head: names of the columns.
        rows: cells, as many as ``head`` has; made :func:`printable`.
        right: columns to align right.
        total: last row.
    """
    rows = [list(map(printable, row)) for row in rows]
    foot = [] if total is None else [total]
    columns = zip(head, *rows, *foot, strict=True)
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    sides = [">" if i in right else "<" for i in range(len(head))]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [head, rule, *rows, *([rule] if foot else []), *foot]
    return [line.format(*row).rstrip() for row in lines]


def shape_text(shape: Sequence[int | str] | None) -> str:
    """Return ``(1000, 64)`` as ``1000 x 64``, None as a dash."""
    return "-" if shape is None else " x ".join(map(str, shape))


def block_shape_text(block: Sequence[int | str] | None) -> str:
    """Return a sparse block shape as the command line takes it: ``1x4``, ``row`` for ``(1, ROW)``,
    ``col`` for ``(COL, 1)``; None as a dash."""
    if block is None:
        return "-"
    rows, columns = block
    shape = f"{rows}x{columns}".lower()
    return {"1xrow": "row", "colx1": "col"}.get(shape, shape)


def block_text(block: Sequence[int | str] | None, zeros: int | None = None) -> str:
    """Return how many elements a pruned block loses: a number, ``all``, or a dash without a
    block."""
    if block is None:
        return "-"
    # ROW and COL are as large as the table: no number is known to be all of it.
    sizes = [size for size in block if not isinstance(size, str)]
    whole = zeros is None or (len(sizes) == len(block) and zeros == math.prod(sizes))
    return "all" if whole else str(zeros)


def mib(count: int) -> str:
    """Return bytes as MiB with three decimals, without the unit."""
    return f"{count / 2**20:,.3f}"


def amount(value: float) -> str:
    """Return four significant digits, all digits of whole numbers: ``0.6990``, ``-1.235e-07``,
    ``1,385,728``."""
    if float(value).is_integer() and abs(value) < 1e15:
        return count(int(value))
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def count(value: int) -> str:
    """Return all digits in groups of three: ``53,562``."""
    return f"{value:,}"


def number_of(value: int, noun: str, nouns: str | None = None) -> str:
    """Return ``1 table`` or ``1,200 tables``; ``nouns`` is an irregular plural."""
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def level_text(level: float | str) -> str:
    """Return a level for people: four digits; of rows without a lookup the word."""
    return level if isinstance(level, str) else f"{level:.4g}"


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as ``79.9%``, a dash for None; more digits where one would read as
    nothing or all."""
    if share is None:
        return "-"
    value = 100 * share
    rounded = f"{value:.1f}%"
    # One decimal, unless it would round to nothing or all.
    if value in (0, 100) or rounded not in ("0.0%", "-0.0%", "100.0%"):
        return rounded
    return f"{value:.3g}%" if abs(value) < 1 else f"{value:.4f}%"


def size(value: float) -> str:
    """Return bytes as ``1.30 MiB`` or ``160 B``."""
    units = list(_UNITS)
    # Not 1024: "1,010 KiB" has a digit too many.
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    exact = units[0] == "B" or abs(value) >= 99.95
    return f"{value:{'.0f' if exact else '#.3g'}} {units[0]}"


def duration(seconds: float) -> str:
    """Return ``850 ms``, ``12.3 s``, ``4 min 05 s`` or ``3 h 20 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    # From here on it would round to 60.0.
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
