"""The benchmark of what codes cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")


@pytest.mark.slow
def test_a_small_benchmark_of_codes(tmp_path: Path) -> None:
    sizes = {"tables": 1, "rows": 20_000, "dim": 4, "codes": 1, "batch-size": 16, "rounds": 1}
    options = [f"--{name}={value}" for name, value in (*sizes.items(), ("out", tmp_path))]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.codes", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [kept] = tmp_path.glob("*.json")
    rows = json.loads(kept.read_text())["cases"]
    assert [row["unit"] for row in rows] == ["ms", "ms", "", "s", *["ns an id"] * 3]
    assert all(row["time"] > 0 for row in rows)
    assert all(row["what"] in done.stdout for row in rows)
