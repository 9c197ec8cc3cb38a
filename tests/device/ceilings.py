"""What training costs on the device, at most: host waits, launches, bytes moved, peak memory.

All numbers are counted with two tables of 3,000 x 128 float32 (3.07 MB) in one rank, the masks at
50% and updated to 60%. They may only fall: a change that lowers one lowers its ceiling here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.device.account import Spent

__all__ = ["FIRST_STEP", "GROWS", "ORDINARY_STEP", "UPDATE", "Ceiling", "above"]


class Ceiling(NamedTuple):
    """The most that something may cost, as in :class:`~tests.device.account.Spent`.

    Args:
        moved: in kilobytes, as ``peak``.
    """

    waits: int
    launches: int
    moved: int
    peak: int


# By block. No score but the frequency, which counts lookups, costs an ordinary step more.
ORDINARY_STEP: Final = {
    "row": Ceiling(0, 18, 58, 3),
    "1x4": Ceiling(0, 18, 58, 3),
    "2x2": Ceiling(0, 18, 58, 3),
    "1x1": Ceiling(0, 18, 58, 3),
    "frequency": Ceiling(0, 40, 94, 3),
}

# The first step after a mask update takes the new masks.
FIRST_STEP: Final = {
    "row": Ceiling(7, 77, 157, 4),
    "1x4": Ceiling(7, 65, 204, 7),
    "2x2": Ceiling(7, 65, 194, 7),
    "1x1": Ceiling(7, 67, 504, 43),
}

UPDATE: Final = {
    "row": Ceiling(30, 199, 37_400, 2_230),
    "1x4": Ceiling(34, 236, 67_900, 4_260),
    "2x2": Ceiling(30, 242, 73_900, 5_010),
    "1x1": Ceiling(54, 344, 183_700, 6_630),
}

# Blocks whose mask updates wait, or launch, more often for a larger table.
GROWS: Final = {"waits": {"row", "1x4", "2x2", "1x1"}, "launches": {"row", "1x4", "2x2", "1x1"}}


def above(spent: Spent, most: Ceiling) -> str:
    """Return what is above its ceiling, "" if nothing is."""
    found = Ceiling(spent.waits, spent.launches, -(-spent.moved // 1000), -(-spent.peak // 1000))
    pairs = zip(Ceiling._fields, found, most, strict=True)
    wrong = [f"{name}: {count} instead of {limit}" for name, count, limit in pairs if count > limit]
    return "\n".join([*wrong, spent.lines] if wrong else [])
