"""Do the benchmarks still run? Small cases; no figure is judged."""

from __future__ import annotations

import pytest

from benchmarks.mask_update import GATHER, table
from benchmarks.measure import fresh


@pytest.mark.parametrize(
    ("ranks", "sharding", "block", "peers"),
    [
        (1, "one process", "rows", ["norm_pass", "ancestor"]),
        (2, "row_wise", [1, 4], GATHER),
        (2, "column_wise", "rows", GATHER),
    ],
)
def test_a_small_case_runs(ranks: int, sharding: str, block: str | list[int], peers: list[str]) -> None:
    case = {"block": block, "norm": "L2", "rows": 2048, "dim": 64, "ranks": ranks, "sharding": sharding, "peers": peers}
    found = fresh("benchmarks.mask_update_case", case, ranks, 1)
    times = [value for key, value in found.items() if key.endswith("_s")]
    assert len(times) == 3 + len(peers) and all(time > 0 for time in times)
    assert found["shard_bytes"] == 2048 * 64 * 4 // ranks
    assert found["collectives"] == (
        0 if ranks == 1 else 4 if block == "rows" else 2
    )  # steady: zeros settle in one round
    assert ("torch.ao" if ranks == 1 else f"{sharding} on {ranks}") in table([found])
