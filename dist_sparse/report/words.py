"""How do numbers read, for people?

Short, without a locale: at most four digits, bytes in powers of 1024, and the same number always reads the same. And
names, for a page: nothing in them is markup, drives anything or turns the order of what stands beside it.
"""

from __future__ import annotations

import html

from dist_sparse.text import printable

__all__ = ["amount", "count", "duration", "escape", "number_of", "percent", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def amount(value: float) -> str:
    """Four significant digits, of whole numbers all: ``0.6990``, ``-1.235e-07``, ``1,385,728``."""
    if float(value).is_integer() and abs(value) < 1e15:
        return count(int(value))
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def count(value: int) -> str:
    """All digits, in groups of three: ``53,562``."""
    return f"{value:,}"


def number_of(value: int, noun: str, nouns: str | None = None) -> str:
    """``1 table``, ``1,200 tables``; ``nouns`` where an s is not enough."""
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def percent(share: float | None) -> str:
    """Of a share in [0, 1], one digit after the point, more where that would read as nothing or all: ``79.9 %``; a dash
    for None."""
    if share is None:
        return "-"
    value = 100 * share
    if value == 0 or 0.05 <= abs(value) < 99.95 or value == 100:
        return f"{value:.1f} %"
    return f"{value:.3g} %" if abs(value) < 1 else f"{value:.4f} %"


def size(value: float) -> str:
    """Of bytes: ``1.30 MiB``, ``160 B``."""
    for unit in _UNITS[:-1]:
        if abs(value) < 999.5:
            return _short(value, unit)
        value /= 1024
    return _short(value, _UNITS[-1])


def escape(text: str) -> str:
    """For HTML, attributes too."""
    return html.escape(printable(text))


def _short(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:#.3g} {unit}"


def duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 min 05 s``, ``3 h 20 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
