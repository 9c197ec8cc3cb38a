"""What the kernels cost by instruction: ceilings, which may only fall.

Counted in machine code, which is compiled here by the release of Triton that the tests pin. So a
kernel that moves few bytes and takes long over them is seen without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

import pytest

from tests.extras.device.machine_code import Counts

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only"),
    pytest.mark.slow,
]

# The release whose code the ceilings count.
TRITON: Final = "3.7.1"

# By compute capability and kernel.
CEILINGS: Final[dict[int, dict[str, Counts]]] = {
    90: {
        "1x4 sample": Counts(52, 426, 0, 0, 0, 15, 128),
        "1x4": Counts(80, 439, 0, 0, 0, 10, 128),
        "1x4 sums": Counts(80, 503, 0, 0, 0, 18, 128),
        "1x4 sums, odd": Counts(72, 714, 0, 0, 0, 19, 128),
        "1x4 sums of elements": Counts(103, 570, 0, 0, 0, 29, 128),
        "1x1 sums": Counts(168, 679, 0, 0, 0, 20, 128),
        "1x4 again": Counts(32, 149, 0, 0, 0, 6, 128),
        "rows": Counts(68, 199, 0, 0, 0, 7, 128),
        "rows sums": Counts(80, 266, 0, 0, 0, 12, 128),
        "rows sums of elements": Counts(124, 381, 0, 0, 0, 26, 128),
        "rows counts": Counts(78, 280, 0, 0, 0, 8, 64),
        "rows decayed counts": Counts(70, 344, 0, 0, 0, 8, 64),
        "rows of 100, sums": Counts(96, 419, 0, 0, 0, 17, 128),
        "rows of 10, sums": Counts(32, 148, 0, 0, 0, 18, 64),
        "count held": Counts(32, 173, 0, 0, 0, 10, 64),
        "count listed": Counts(32, 176, 0, 0, 0, 10, 64),
        "ties listed": Counts(56, 463, 2, 0, 0, 21, 64),
        "pack held": Counts(72, 372, 0, 0, 0, 11, 64),
        "pack listed": Counts(38, 220, 0, 0, 0, 20, 64),
        "parts of rows": Counts(68, 204, 0, 0, 0, 5, 128),
        "parts of rows, sums": Counts(72, 277, 0, 0, 0, 10, 128),
        "prune 1x4": Counts(32, 138, 0, 0, 0, 18, 64),
        "prune rows": Counts(32, 161, 0, 0, 0, 18, 64),
        "prune rows of 100": Counts(45, 161, 0, 0, 0, 18, 64),
        "zero 1x4": Counts(27, 86, 0, 0, 0, 6, 64),
        "flags": Counts(48, 782, 0, 0, 0, 74, 64),
        "weights": Counts(48, 773, 0, 0, 0, 74, 64),
        "given weights": Counts(48, 826, 0, 0, 0, 82, 64),
        "weights, sampled": Counts(120, 1484, 0, 0, 0, 106, 64),
        "sample": Counts(92, 1348, 0, 0, 0, 98, 64),
        "count": Counts(40, 697, 0, 0, 0, 66, 64),
        "clean read": Counts(72, 554, 0, 0, 0, 41, 64),
        "clean read, sampled": Counts(72, 761, 1, 0, 0, 52, 64),
        "clean read, odd": Counts(72, 531, 0, 0, 0, 36, 64),
        "flag": Counts(32, 268, 0, 0, 0, 17, 64),
        "clean all": Counts(80, 607, 0, 0, 0, 38, 64),
        "assign codes": Counts(166, 678, 0, 0, 0, 6, 64),
        "sum by code": Counts(58, 232, 0, 0, 0, 12, 64),
        "decode sums": Counts(72, 152, 0, 0, 0, 6, 64),
        "decode weighted means": Counts(86, 195, 0, 0, 0, 8, 64),
        "decode sequences": Counts(64, 146, 0, 0, 0, 6, 64),
    },
    100: {
        "1x4 sample": Counts(48, 422, 0, 0, 0, 15, 128),
        "1x4": Counts(90, 435, 0, 0, 0, 10, 128),
        "1x4 sums": Counts(96, 489, 0, 0, 0, 18, 128),
        "1x4 sums, odd": Counts(88, 710, 0, 0, 0, 19, 128),
        "1x4 sums of elements": Counts(96, 577, 0, 0, 0, 29, 128),
        "1x1 sums": Counts(154, 710, 0, 0, 0, 20, 128),
        "1x4 again": Counts(32, 148, 0, 0, 0, 6, 128),
        "rows": Counts(62, 203, 0, 0, 0, 7, 128),
        "rows sums": Counts(80, 270, 0, 0, 0, 12, 128),
        "rows sums of elements": Counts(125, 392, 0, 0, 0, 26, 128),
        "rows counts": Counts(78, 280, 0, 0, 0, 8, 64),
        "rows decayed counts": Counts(64, 358, 0, 0, 0, 8, 64),
        "rows of 100, sums": Counts(96, 429, 0, 0, 0, 17, 128),
        "rows of 10, sums": Counts(32, 139, 0, 0, 0, 18, 64),
        "count held": Counts(32, 174, 0, 0, 0, 10, 64),
        "count listed": Counts(32, 175, 0, 0, 0, 10, 64),
        "ties listed": Counts(56, 463, 2, 0, 0, 21, 64),
        "pack held": Counts(85, 374, 0, 0, 0, 11, 64),
        "pack listed": Counts(38, 219, 0, 0, 0, 20, 64),
        "parts of rows": Counts(68, 202, 0, 0, 0, 5, 128),
        "parts of rows, sums": Counts(72, 276, 0, 0, 0, 10, 128),
        "prune 1x4": Counts(32, 139, 0, 0, 0, 18, 64),
        "prune rows": Counts(32, 162, 0, 0, 0, 18, 64),
        "prune rows of 100": Counts(44, 162, 0, 0, 0, 18, 64),
        "zero 1x4": Counts(27, 87, 0, 0, 0, 6, 64),
        "flags": Counts(52, 764, 0, 0, 0, 74, 64),
        "weights": Counts(48, 767, 0, 0, 0, 74, 64),
        "given weights": Counts(48, 819, 0, 0, 0, 82, 64),
        "weights, sampled": Counts(100, 1516, 0, 0, 0, 106, 64),
        "sample": Counts(90, 1347, 0, 0, 0, 98, 64),
        "count": Counts(40, 697, 0, 0, 0, 66, 64),
        "clean read": Counts(72, 560, 0, 0, 0, 41, 64),
        "clean read, sampled": Counts(80, 757, 1, 0, 0, 52, 64),
        "clean read, odd": Counts(72, 537, 0, 0, 0, 36, 64),
        "flag": Counts(40, 262, 0, 0, 0, 17, 64),
        "clean all": Counts(96, 598, 0, 0, 0, 38, 64),
        "assign codes": Counts(163, 669, 0, 0, 0, 6, 64),
        "sum by code": Counts(58, 235, 0, 0, 0, 12, 64),
        "decode sums": Counts(72, 153, 0, 0, 0, 6, 64),
        "decode weighted means": Counts(84, 196, 0, 0, 0, 8, 64),
        "decode sequences": Counts(64, 147, 0, 0, 0, 6, 64),
    },
}


@lru_cache
def found(capability: int, cache: Path) -> dict[str, Counts]:
    """What each kernel consists of, from a process of its own."""
    import triton

    if triton.__version__ != TRITON:
        pytest.skip(f"CEILINGS ARE OF TRITON {TRITON}, NOT OF {triton.__version__}")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((tools / name).exists() for name in ("nvdisasm", "cuobjdump")):
        pytest.skip(f"TRITON HAS NO nvdisasm OR cuobjdump IN {tools}")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.extras.device.machine_code", str(capability)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {name: Counts(*counts) for name, counts in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize("capability", CEILINGS)
def test_instructions_are_at_most_their_ceilings(capability: int, cache: Path) -> None:
    counts, most = found(capability, cache), CEILINGS[capability]
    assert counts.keys() == most.keys()
    wrong = []
    for name, one in counts.items():
        *at_most, load = most[name]
        above = [
            f"{field}: {is_} instead of {limit}"
            for field, is_, limit in zip(Counts._fields, one, at_most, strict=False)
            if is_ > limit
        ]
        if one.load < load:
            above.append(f"load: {one.load} bits instead of {load}")
        wrong += [f"{name}: {each}" for each in above]
    assert not wrong, "\n".join(wrong)


def test_no_kernel_waits_for_memory_or_counts_in_shared_memory(cache: Path) -> None:
    """Atomic operations are relaxed, and histograms are in global memory."""
    for capability in CEILINGS:
        for name, one in found(capability, cache).items():
            assert (one.shared_atomics, one.fences) == (0, 0), name
