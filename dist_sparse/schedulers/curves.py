"""Which value has a schedule at a given step, and does the mask move there?

Pure functions: no state, no tensors, the same answer for the same arguments on every rank and after every restart. A
window is ``begin``, ``end`` and ``every``: before ``begin`` a curve is at ``initial``, from ``end`` on at ``final``,
both exactly, in between it never leaves the interval of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dist_sparse.checks import integer

__all__ = [
    "Curve",
    "check_window",
    "constant",
    "cosine",
    "cubic",
    "exponential",
    "is_due",
    "last_due",
    "linear",
    "one_shot",
    "progress",
]

Curve = Callable[[int, float, float, int, int | None], float]
"""``curve(step, initial, final, begin, end) -> value``."""


def check_window(begin: object, end: object, every: object) -> tuple[int, int | None, int]:
    """Return the window as ints of Python.

    Raises:
        ValueError: ``begin`` is not an int >= 0, ``end`` is neither None nor an int >= ``begin``, ``every`` is not an
            int >= 1.
    """
    first = integer("begin", begin, least=0)
    last = None if end is None else integer("end", end)
    if last is not None and last < first:
        raise ValueError(f"Invalid {end=}: must be an int >= {begin=}, or None where a schedule may go on for ever.")
    return first, last, integer("every", every, least=1)


def is_due(step: int, begin: int, end: int | None, every: int) -> bool:
    """Whether the mask moves at ``step``: at ``begin``, every ``every`` steps from it, and at ``end`` (None: none)."""
    if step < begin or (end is not None and step > end):
        return False
    return (step - begin) % every == 0 or step == end


def last_due(step: int, begin: int, end: int | None, every: int) -> int | None:
    """The latest due step that is not after ``step``: where the value in force comes from. None before ``begin``."""
    if step < begin:
        return None
    if end is not None and step >= end:
        return end
    return step - (step - begin) % every


def progress(step: int, begin: int, end: int) -> float:
    """How far ``step`` is through the window, in [0, 1]. A window of one step (``begin == end``) is done at once."""
    if step < begin:
        return 0.0
    return 1.0 if step >= end else (step - begin) / (end - begin)


def constant(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """``final`` from ``begin`` on. ``end`` only says when the mask stops moving."""
    return final if step >= begin else initial


def one_shot(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """``final`` from ``begin`` on, as :func:`constant`; the class that uses it is due at ``begin`` alone."""
    return constant(step, initial, final, begin, end)


def linear(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Equal amounts at equal distances."""
    return _mix(initial, final, progress(step, begin, _finite(end)))


def cubic(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """``final + (initial - final) * (1 - (step - begin) / (end - begin))**3``: fast at first, slow near the end.

    Zhu & Gupta 2017, "To prune, or not to prune", equation 1, with ``end - begin`` for their ``n * delta_t``.
    """
    return _mix(initial, final, 1.0 - (1.0 - progress(step, begin, _finite(end))) ** 3)


def cosine(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Half a cosine wave: slow at both ends, fastest in the middle."""
    return _mix(initial, final, (1.0 - math.cos(math.pi * progress(step, begin, _finite(end)))) / 2.0)


def exponential(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """The density ``1 - value`` decays geometrically: every step removes the same fraction of what is left.

    Needs ``initial < 1`` and ``final < 1``: no number of equal fractions ever removes everything.
    """
    done = progress(step, begin, _finite(end))
    kept = (1.0 - initial) ** (1.0 - done) * (1.0 - final) ** done
    return _clip(1.0 - kept, initial, final, done)


def _mix(initial: float, final: float, share: float) -> float:
    return _clip(initial + (final - initial) * share, initial, final, share)


def _clip(value: float, initial: float, final: float, share: float) -> float:
    """Exactly ``initial`` at 0 and ``final`` at 1: rounding must not move the two numbers that the user wrote."""
    if share in (0.0, 1.0):
        return final if share else initial
    return min(max(value, min(initial, final)), max(initial, final))


def _finite(end: int | None) -> int:
    assert end is not None, "a curve that grows needs an end; its class has checked that"
    return end
