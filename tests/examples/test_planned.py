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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_a_trained_model_is_planned(npz: Path, tmp_path: Path) -> None:  # noqa: F811
    """In a process of its own, which ends cleanly under gloo and DDP."""
    entry = tmp_path / "entry.py"
    entry.write_text(
        "from pathlib import Path\nfrom dlrm.planned import trained_model\n\n"
        f"def small():\n    return trained_model(Path({str(npz)!r}))\n"
    )
    words = [
        sys.executable,
        "-m",
        "dist_sparse",
        "plan",
        f"{entry}:small",
        "--budget",
        "20%",
        "--json",
    ]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Training the DLRM" in done.stderr
    said = json.loads(done.stdout)
    shapes = {table["name"]: table["shape"] for table in said["tables"]}
    assert shapes["user_id"] == [USERS, 32] and shapes["item_id"] == [ITEMS, 32]
    assert said["recommended"]
