"""The frame of a chart in HTML: axes, round numbers beside them, tooltips.

Lines keep their width (``non-scaling-stroke``) and text its size at every width of the page. Tooltips need no script.
Everything from the log passes through :func:`escape`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from dist_sparse.text import printable

__all__ = ["HEIGHT", "WIDTH", "escape", "frame", "log_ticks", "short", "ticks", "tip"]

WIDTH, HEIGHT = 1000, 400


def escape(text: str) -> str:
    """Return text for HTML, attributes included: no markup, no control characters."""
    return html.escape(printable(text))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most ``most + 1``."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def log_ticks(left: float, right: float, most: int = 6) -> list[float]:
    """Return round numbers from ``10**left`` to ``10**right``: powers of ten, with 2 and 5 times those where there is
    room; those of :func:`ticks` where that gives fewer than three."""
    powers = range(math.floor(left), math.ceil(right) + 1)
    for times in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{n}e{p}") for p in powers for n in times if left - 1e-9 <= math.log10(n) + p <= right + 1e-9]
        if len(found) <= most:
            return found if len(found) > 2 else ticks(10**left, 10**right, 4)
    return found[:: -(-len(found) // most)]


def frame(
    caption: str,
    shapes: str,
    marks: Sequence[tuple[float, str]],
    below: Sequence[tuple[float, str]],
    label: str,
    over: str,
) -> str:
    """Return shapes with axes. ``marks`` and ``below``: positions in percent, and their labels."""
    grid = "".join(f'<path class="grid" d="M0 {y * HEIGHT / 100:.1f}H{WIDTH}"/>' for y, _ in marks)
    widest = max((text for _, text in marks), key=len, default="")
    left = "".join(f'<span style="top:{y:.2f}%">{escape(text)}</span>' for y, text in marks)
    under = "".join(f'<span style="left:{x:.2f}%">{escape(text)}</span>' for x, text in below)
    return (
        f'<div class="plot" role="img" aria-label="{escape(caption)}"><div class="y" aria-hidden="true"><b>{widest}</b>'
        f'{left}</div><div class="area" aria-hidden="true">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{grid}{shapes}</svg>{over}</div>'
        f'<div class="x" aria-hidden="true">{under}</div>'
        f'<div class="label" aria-hidden="true">{label}</div></div>'
    )


def tip(left: float, wide: float, text: Sequence[str], at: float | None = None) -> str:
    line = "" if at is None else f'<u style="left:{100 * (at - left) / max(wide, 1e-9):.1f}%"></u>'
    side = "l" if left + wide / 2 < 50 else "r"
    inside = "<br>".join(escape(part) for part in text)
    return f'<div class="tip {side}" style="left:{left:.2f}%;width:{wide:.2f}%">{line}<span>{inside}</span></div>'


def short(value: float) -> str:
    """Return ``625``, ``1.5M``."""
    for prefix, unit in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= unit:
            return f"{value / (1e3 if prefix == 'k' else unit):g}{prefix}"
    return f"{value:g}"
