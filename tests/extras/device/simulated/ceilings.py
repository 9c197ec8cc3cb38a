"""What training costs on the device, at most: host waits, launches, bytes moved, peak memory.

All numbers are counted with two tables of 3,000 x 128 float32 (3.07 MB) in one rank, the masks at
50% and updated to 60%. They may only fall: a change that lowers one lowers its ceiling here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.extras.device.simulated.account import Spent

__all__ = [
    "FIRST_STEP",
    "GROWS",
    "ORDINARY_STEP",
    "SAMPLED_SEQUENCES",
    "SAMPLED_STEP",
    "SUMS_OF_PARTS",
    "UPDATE",
    "UPDATE_BY_TOTALS",
    "WAITS_OF_ALL_ROUNDS",
    "WAITS_OF_TWO_RANKS",
    "Ceiling",
    "above",
]


class Ceiling(NamedTuple):
    """The most that something may cost, as in :class:`~tests.extras.device.simulated.account.Spent`.

    Args:
        moved: in kilobytes, as ``peak``.
    """

    waits: int
    launches: int
    moved: int
    peak: int


# By block, and by block and score where a score costs more: the frequency counts lookups, and with
# scores that grow by gradients of removed rows, whole rows are flagged and cleaned as others are.
ORDINARY_STEP: Final = {
    "row": Ceiling(0, 1, 1, 1),
    "1x4": Ceiling(0, 2, 20, 1),
    "2x2": Ceiling(0, 2, 20, 1),
    "1x1": Ceiling(0, 2, 20, 1),
    "row, frequency": Ceiling(0, 2, 2, 1),
    "row, accumulator": Ceiling(0, 2, 2, 0),
    "1x4, frequency": Ceiling(0, 3, 3, 1),
    "2x2, frequency": Ceiling(0, 3, 3, 1),
    "1x1, frequency": Ceiling(0, 3, 3, 1),
}

# A step that samples its lookups for the records, one in 16: as many launches as in the others, if
# these read the ids in the forward or mask gradients. Counted lookups are not sampled too.
SAMPLED_STEP: Final = {
    "row": Ceiling(0, 1, 1, 1),
    "1x4": Ceiling(0, 2, 6, 0),
    "1x4, frequency": Ceiling(0, 3, 7, 0),
}

# The same with sequences. The peak has the 32 KiB of the gradient, which a stand-in for autograd
# allocates. The gradients of removed rows are masked: a launch tells which, and two of torch's zero
# them in a copy.
SAMPLED_SEQUENCES: Final = {
    "row": Ceiling(0, 3, 67, 66),
    "1x4": Ceiling(0, 2, 6, 33),
    "1x4, frequency": Ceiling(0, 3, 7, 33),
}

# The first step after a mask update takes the new masks, and does not wait either.
FIRST_STEP: Final = {
    "row": Ceiling(0, 5, 2, 1),
    "1x4": Ceiling(0, 8, 33, 1),
    "2x2": Ceiling(0, 22, 234, 11),
    "1x1": Ceiling(0, 10, 117, 1),
}

# By norms, and by norms times Adagrad's sums, the default of sparsify(). Kernels take all blocks
# within a row, and read the weights once; others are scored by torch, again in each round.
UPDATE: Final = {
    "row": Ceiling(4, 22, 3_670, 60),
    "1x4": Ceiling(4, 25, 5_200, 196),
    "2x2": Ceiling(4, 278, 210_100, 8_300),
    "1x1": Ceiling(4, 25, 7_810, 365),
}

# By lookups or sums alone, of which the blocks of a row have equal ones: where blocks are finer than
# rows, torch finds the ties at the threshold, with a wait more than before sampling.
UPDATE_BY_TOTALS: Final = {
    "row": Ceiling(3, 23, 2_360, 90),
    "1x4": Ceiling(4, 62, 25_340, 4_670),
    "2x2": Ceiling(3, 190, 103_200, 8_300),
    "1x1": Ceiling(4, 54, 26_600, 9_460),
}

# To score tables whose whole rows are cut in two by columns, both shards in one rank: the sums of the
# parts, which the owners of rows add up.
SUMS_OF_PARTS: Final = Ceiling(1, 6, 3_400, 178)

# Waits of an update of tables that are cut by rows over two ranks, over NCCL, however many tables:
# one update, and one that is recorded. The tables are so small that two rounds suffice.
WAITS_OF_TWO_RANKS: Final = {"row": (6, 8), "1x4": (6, 8)}

# The same of tables whose thresholds take all rounds, as those of millions of blocks do, and whose
# 1x4 blocks are sampled; and where scores tie at the thresholds too.
WAITS_OF_ALL_ROUNDS: Final = {"row": (8, 12), "1x4": (9, 13)}

# Blocks whose mask updates wait, or launch, more often for a larger table.
GROWS: Final[dict[str, set[str]]] = {"waits": set(), "launches": set()}


def above(spent: Spent, most: Ceiling) -> str:
    """Return what is above its ceiling, "" if nothing is."""
    found = Ceiling(spent.waits, spent.launches, -(-spent.moved // 1000), -(-spent.peak // 1000))
    pairs = zip(Ceiling._fields, found, most, strict=True)
    wrong = [f"{name}: {count} instead of {limit}" for name, count, limit in pairs if count > limit]
    return "\n".join([*wrong, spent.lines] if wrong else [])
