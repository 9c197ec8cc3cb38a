"""The script of the quick start prints under torchrun what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart.py"
PAGE = ROOT / "docs" / "quickstart.md"


def test_the_page_shows_the_script() -> None:
    assert f"```python\n{SCRIPT.read_text()}```\n" in PAGE.read_text()


@pytest.mark.dist
def test_two_processes_print_what_one_does() -> None:
    pytest.importorskip("torchrec")
    after = PAGE.read_text().split(SCRIPT.read_text())[1]
    said = after.split("```text\n")[1].split("```")[0]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--local-addr", "127.0.0.1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [*torchrun, *rendezvous, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == said
