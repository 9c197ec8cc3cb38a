"""How do numbers read, for people?

Short, without a locale: powers of 1000, at most four digits, and the same number always reads the same.
"""

from __future__ import annotations

__all__ = ["amount", "count", "duration", "percent", "size"]

_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount(value: float) -> str:
    """Four significant digits, of whole numbers all: ``0.6990``, ``-1.235e-07``, ``1,385,728``."""
    if float(value).is_integer() and abs(value) < 1e15:
        return count(int(value))
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def count(value: int) -> str:
    """All digits, in groups of three: ``53,562``."""
    return f"{value:,}"


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
    """Of bytes: ``1.37 MB``."""
    for prefix in _PREFIXES[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}B" if prefix else f"{value:.0f} B"
        value /= 1000
    return f"{value:.3g} {_PREFIXES[-1]}B"


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
