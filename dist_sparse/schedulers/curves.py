"""Curves of a schedule, and the window of steps at which masks are updated.

Pure functions: no state, no tensors, the same value for the same arguments on every rank and after
every restart. Before ``begin`` a curve is exactly ``initial``, from ``end`` on exactly ``final``,
in between it never leaves the interval between the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dist_sparse.checks import integer

# `curve(step, initial, final, begin, end) -> value`.
Curve = Callable[[int, float, float, int, int | None], float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps at which masks are updated: ``begin``, every ``every`` steps after it, and ``end``
    (None: without end).

    Raises:
        ValueError: ``begin`` is not an int >= 0, ``end`` is neither None nor an int >= ``begin``,
            ``every`` is not an int >= 1.

    Example::

        >>> from dist_sparse.schedulers import Window
        >>> window = Window(begin=10, end=25, every=10)
        >>> [step for step in range(40) if window.updates(step)]
        [10, 20, 25]
        >>> window.last_update(19), window.last_update(9)
        (10, None)
    """

    begin: int
    end: int | None
    every: int

    def __post_init__(self) -> None:
        # object.__setattr__, because the dataclass is frozen. NumPy integers become Python's, which
        # states can hold.
        object.__setattr__(self, "begin", integer("begin", self.begin, least=0))
        if self.end is not None:
            object.__setattr__(self, "end", integer("end", self.end))
            if self.end < self.begin:
                raise ValueError(f"Invalid end={self.end}: must be an int >= begin={self.begin}.")
        object.__setattr__(self, "every", integer("every", self.every, least=1))

    @property
    def last(self) -> float:
        """The last step at which masks may be updated."""
        return math.inf if self.end is None else self.end

    def updates(self, step: int) -> bool:
        """Return whether masks are updated at ``step``."""
        # The end is an update even off the grid of every: there the final level is reached.
        on_grid = (step - self.begin) % self.every == 0 or step == self.end
        return on_grid and self.begin <= step <= self.last

    def last_update(self, step: int) -> int | None:
        """Return the latest update not after ``step``, whose value is in force at ``step``; None
        before ``begin``."""
        if step < self.begin:
            return None
        if step >= self.last:
            return self.end
        # The grid begins at ``begin``, not at 0.
        return step - (step - self.begin) % self.every


def fraction_done(step: int, begin: int, end: int | None) -> float:
    """Return the fraction of the window that has passed at ``step``. A window of one step is done
    at once."""
    assert end is not None, "a curve that grows needs an end; its class has checked that"
    # max(..., 1): at the only step of a window of one step, `step >= end` holds already.
    return 1.0 if step >= end else max(step - begin, 0) / max(end - begin, 1)


def constant(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Return ``final`` from ``begin`` on. ``end`` is when mask updates stop."""
    return final if step >= begin else initial


def linear(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Return ``initial + (final - initial) * fraction_done``: equal amounts at equal distances."""
    return _mix(initial, final, fraction_done(step, begin, end))


def cubic(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Return ``final + (initial - final) * (1 - (step - begin) / (end - begin))**3``.

    Fast at first, slow near the end. Source: Zhu & Gupta 2017, "To prune, or not to prune",
    equation 1, with ``end - begin`` for their ``n * delta_t``.
    """
    return _mix(initial, final, 1.0 - (1.0 - fraction_done(step, begin, end)) ** 3)


def cosine(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Return half a cosine wave: slow at both ends, fastest in the middle."""
    return _mix(initial, final, (1.0 - math.cos(math.pi * fraction_done(step, begin, end))) / 2.0)


def exponential(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """Return a value whose density ``1 - value`` decays geometrically: each step removes the same
    fraction of the rest.

    Needs ``initial < 1`` and ``final < 1``: equal fractions never remove everything.
    """
    fraction = fraction_done(step, begin, end)
    # The density is the geometric mean of its two ends, with weights that sum to 1.
    density = (1.0 - initial) ** (1.0 - fraction) * (1.0 - final) ** fraction
    return _clip(1.0 - density, initial, final, fraction)


def _mix(initial: float, final: float, fraction: float) -> float:
    return _clip(initial + (final - initial) * fraction, initial, final, fraction)


def _clip(value: float, initial: float, final: float, fraction: float) -> float:
    """Undo the rounding of a curve's value at a fraction of its way."""
    # Exactly the ends, as the module promises.
    if fraction in (0.0, 1.0):
        return final if fraction else initial
    # A curve may descend: `final` may be the lower end of the interval.
    return min(max(value, min(initial, final)), max(initial, final))
