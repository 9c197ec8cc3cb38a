"""SplitMix64 over tensors: the same pseudo-random int64 numbers on every device.

Constants of uint64 are written as int64, by subtracting 2**64: both wrap around alike. Source:
Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from torch import Tensor

# The generator adds this to its state for each number: 2**64 / golden ratio, as int64.
STEP = 0x9E3779B97F4A7C15 - 2**64


def mix64(values: Tensor) -> Tensor:
    """Return SplitMix64's output for each state, int64: a change of one bit of the state changes
    about half of the bits of the output."""
    values = (values ^ logical_shift(values, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    values = (values ^ logical_shift(values, 27)) * (0x94D049BB133111EB - 2**64)
    return values ^ logical_shift(values, 31)


def logical_shift(values: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right without copies of the sign, which torch shifts in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
