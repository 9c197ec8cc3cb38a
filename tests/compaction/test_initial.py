"""Initial rows: the same wherever they are drawn, and of the distribution that was asked for."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from dist_sparse.compaction.tables import initial_rows

_WORD = (1 << 64) - 1


def mixed(value: int) -> int:
    """SplitMix64 in Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _WORD
    return value ^ value >> 31


def drawn(seed: int, table: str, row: int, column: int) -> float:
    key = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    first = mixed((row + int.from_bytes(key, "little")) & _WORD)
    return ((mixed((first + column * 0x9E3779B97F4A7C15) & _WORD) >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 7])
def test_slow_loop(seed: int) -> None:
    ids, columns = torch.tensor([5, 0, 2**40, 2**31 - 1]), range(3, 6)
    found = initial_rows(seed, "item", ids, columns, bounds=(-0.5, 0.25))
    for row, values in zip(ids.tolist(), found.tolist(), strict=True):
        expected = [-0.5 + 0.75 * drawn(seed, "item", row, column) for column in columns]
        assert values == torch.tensor(expected, dtype=torch.float32).tolist()


def test_distributions() -> None:
    ids = torch.arange(20_000)
    uniform = initial_rows(1, "item", ids, range(8), bounds=(-2.0, 2.0))
    assert float(uniform.min()) > -2 and float(uniform.max()) < 2
    assert float(uniform.std()) == pytest.approx(4 / math.sqrt(12), rel=0.01)
    normal = initial_rows(1, "item", ids, range(8))
    assert float(normal.mean()) == pytest.approx(0, abs=0.01)
    assert float(normal.std()) == pytest.approx(1, rel=0.01)
    related = torch.corrcoef(torch.cat([normal, normal.roll(1, 0)], dim=1).T).fill_diagonal_(0)
    assert float(related.abs().max()) < 0.03


def test_tables_and_seeds_differ() -> None:
    ids = torch.arange(100)
    item = initial_rows(0, "item", ids, range(4))
    for other in (initial_rows(1, "item", ids, range(4)), initial_rows(0, "user", ids, range(4))):
        assert not (item == other).any()
    assert initial_rows(0, "item", ids[:0], range(4)).shape == (0, 4)
