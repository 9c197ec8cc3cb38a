"""SplitMix64 over tensors: the same pseudo-random int64 numbers on every device.

Int64 wraps around as uint64 does. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014.
"""

from __future__ import annotations

from torch import Tensor

# What the generator adds to its state for each number.
STEP = 0x9E3779B97F4A7C15 - 2**64


def finished(values: Tensor) -> Tensor:
    """Return SplitMix64's numbers for states: each bit of an int64 changes about half of the
    result's."""
    values = (values ^ logical_shift(values, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    values = (values ^ logical_shift(values, 27)) * (0x94D049BB133111EB - 2**64)
    return values ^ logical_shift(values, 31)


def logical_shift(values: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right without copies of the sign, which torch shifts in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
