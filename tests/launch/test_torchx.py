"""The component: run by torchx on this machine, and what torchx would give to Slurm and Kubernetes.

torchx is in no development set, because it pins old versions of common packages: it is installed beside, once, from a
package index. Without an index these tests are skipped, and say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .jobs import ROOT, finish, job, script

pytestmark = pytest.mark.network

PINS = ROOT / "requirements" / "torchx.txt"
GOLDEN = Path(__file__).with_name("golden")
TORCHX = (sys.executable, "-c", "from torchx.cli.main import main; main()")
COMPONENT = "launch/components.py:train"
NASTY = ("a b", "$HOME", '"', "'", "--no", "$$", "`id`", "")
TALK = """
import json
say(f"result{rank}", json.dumps([sys.argv[1:], os.environ["NOTE"], os.environ["WORLD_SIZE"]]))
print("hello")
"""


@pytest.fixture(scope="module")
def torchx(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with which there is torchx; kept in pytest's cache for as long as the pins are the same."""
    kept = getattr(pytestconfig, "cache", None)
    cache: Path = kept.mkdir("torchx") if kept is not None else tmp_path_factory.mktemp("torchx")
    folder = cache / hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]
    if not folder.exists():
        fresh = tempfile.mkdtemp(dir=cache)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        words = [sys.executable, *install, "--target", fresh, "-r", str(PINS)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=250)
        if done.returncode:
            pytest.skip(f"OFFLINE, torchx is not tested: {done.stderr.strip().splitlines()[-1]}")
        with contextlib.suppress(OSError):  # somebody else was faster
            os.rename(fresh, folder)
    return f"{folder}:{ROOT}"


def without_torchrun() -> str:
    """A PATH without torchrun, with which torchx's own dist.ddp would not start anything."""
    return os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "torchrun").exists()
    )


def test_a_real_job(torchx: str, tmp_path: Path) -> None:
    words = ["run", "-s", "local_cwd", f"{ROOT}/{COMPONENT}", "--script", script(tmp_path, TALK), "--nproc", "2"]
    words += ["--env", "NOTE=x$$y", "--", *NASTY]
    with job(tmp_path, words, command=TORCHX, PYTHONPATH=torchx, PATH=without_torchrun()) as running:
        status, _, err = finish(running)
    assert status == 0, err
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == [list(NASTY), "x$$y", "2"]
    assert "[0] hello" in err and "[1] hello" in err


def test_a_failure_is_one_of_torchx(torchx: str, tmp_path: Path) -> None:
    words = ["run", "-s", "local_cwd", f"{ROOT}/{COMPONENT}", "--script", script(tmp_path, "sys.exit(3)\n")]
    with job(tmp_path, words, command=TORCHX, PYTHONPATH=torchx, PATH=without_torchrun()) as running:
        status, _, err = finish(running)
    assert status != 0
    assert "FAILED" in err


@pytest.mark.parametrize(
    ("scheduler", "options"), [("slurm", []), ("kubernetes", ["-cfg", "queue=default"])], ids=["slurm", "kubernetes"]
)
def test_dryruns_are_the_golden_ones(torchx: str, scheduler: str, options: list[str]) -> None:
    words = ["run", "--dryrun", "--workspace", "", "-s", scheduler, *options, COMPONENT, "--script", "train.py"]
    words += ["--name", "dlrm", "--nnodes", "2", "--nproc", "8", "--gpu", "8", "--cpu", "64", "--memMB", "65536"]
    words += ["--python", "python", "--image", "registry.example/t:1", "--env", "NOTE=x$y", "--max_restarts", "3"]
    environ = {**os.environ, "PYTHONPATH": torchx}
    done = subprocess.run(
        [*TORCHX, *words, "--", *NASTY], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    request = done.stdout.split("=== SCHEDULER REQUEST ===\n", 1)[1].rstrip("\n") + "\n"
    request = re.sub(r"dlrm-[a-z0-9]{10,}", "dlrm-ID", request)
    assert request == (GOLDEN / f"torchx.{scheduler}").read_text()
