"""`dist-sparse plan` takes the main job's model, as its guide says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from tests.examples.test_dlrm import ITEMS, USERS, npz  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]


def test_a_trained_model_is_planned(npz: Path, tmp_path: Path) -> None:  # noqa: F811
    """In a process of its own, which ends cleanly under gloo and DDP."""
    entry = tmp_path / "entry.py"
    entry.write_text(
        "from pathlib import Path\nfrom dlrm.planned import trained_model\n\n"
        f"def small():\n    return trained_model(Path({str(npz)!r}))\n"
    )
    words = [sys.executable, "-m", "dist_sparse", "plan", f"{entry}:small", "--level", "0.75", "--json"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    tables = {table["name"]: table for table in said["tables"]}
    assert tables["user_id"]["shape"] == [USERS, 32] and tables["item_id"]["shape"] == [ITEMS, 32]
    assert tables["user_id"]["removed_blocks"] == USERS * 3 // 4
    assert said["batches"] > 0
    for table in tables.values():
        # Rows that are never looked up keep their small first weights, so they go first.
        assert table["lookups"] > 0 and 0 <= table["dead_share"] == table["removed_share"] < 1
