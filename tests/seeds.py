"""Seeds of tests: each test and each fixture draws from its own name, whatever ran before it.

``TEST_SEED=7 make test`` shifts them all. A test that then fails has passed by luck.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from typing import Final

__all__ = ["SHIFT", "current", "seed", "seed_by"]

SHIFT: Final = int(os.environ.get("TEST_SEED", "0"))

_current = 0


def seed_by(name: str) -> None:
    """Seed everything that draws without a generator of its own, by the name of a test or a
    fixture."""
    seed(zlib.crc32(f"{name} {SHIFT}".encode()))


def seed(value: int) -> None:
    """Seed ``random`` with 32 bits, and NumPy and torch where they are imported: not in tests of
    the launcher."""
    global _current
    _current = value
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)


def current() -> int:
    """Return the last seed, which ranks take over."""
    return _current
