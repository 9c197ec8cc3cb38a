"""The component: run by torchx on this machine, and what torchx would give to Slurm and Kubernetes.

`make setup` installs torchx. In an environment without it these tests are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import read

from .jobs import ROOT, finish, job, script

pytestmark = pytest.mark.skipif(
    find_spec("torchx") is None, reason="NO TORCHX: `make setup` installs it"
)

GOLDEN = Path(__file__).with_name("golden")
TORCHX = (sys.executable, "-c", "from torchx.cli.main import main; main()")
COMPONENT = "dist_sparse/launch/components.py:train"
NASTY = ("a b", "$HOME", '"', "'", "--no", "$$", "`id`", "")
# The commands of the documentation that only print what torchx would submit.
SHOWN = [
    shlex.split(block.code.replace("\\\n", " "))
    for block in read(ROOT / "docs" / "launching.md")
    if "--dryrun" in block.code
]
TALK = """
import json
say(f"result{rank}", json.dumps([sys.argv[1:], os.environ["NOTE"], os.environ["WORLD_SIZE"]]))
print("hello")
"""


def without_torchrun() -> str:
    """A PATH without torchrun, with which torchx's own dist.ddp would not start anything."""
    return os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not Path(folder, "torchrun").exists()
    )


@pytest.mark.slow
def test_a_real_job(tmp_path: Path) -> None:
    words = [
        "run",
        "-s",
        "local_cwd",
        f"{ROOT}/{COMPONENT}",
        "--script",
        script(tmp_path, TALK),
        "--nproc",
        "2",
    ]
    words += ["--env", "NOTE=x$$y", "--", *NASTY]
    with job(
        tmp_path, words, command=TORCHX, PYTHONPATH=str(ROOT), PATH=without_torchrun()
    ) as running:
        status, _, err = finish(running)
    assert status == 0, err
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == [list(NASTY), "x$$y", "2"]
    assert "[0] hello" in err and "[1] hello" in err


@pytest.mark.slow
def test_a_failure_is_one_of_torchx(tmp_path: Path) -> None:
    words = [
        "run",
        "-s",
        "local_cwd",
        f"{ROOT}/{COMPONENT}",
        "--script",
        script(tmp_path, "sys.exit(3)\n"),
    ]
    with job(
        tmp_path, words, command=TORCHX, PYTHONPATH=str(ROOT), PATH=without_torchrun()
    ) as running:
        status, _, err = finish(running)
    assert status != 0
    assert "FAILED" in err


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [("slurm", []), ("kubernetes", ["-cfg", "queue=default"])],
    ids=["slurm", "kubernetes"],
)
def test_dryruns_are_the_golden_ones(scheduler: str, options: list[str]) -> None:
    words = [
        "run",
        "--dryrun",
        "--workspace",
        "",
        "-s",
        scheduler,
        *options,
        COMPONENT,
        "--script",
        "train.py",
    ]
    words += [
        "--name",
        "dlrm",
        "--nnodes",
        "2",
        "--nproc",
        "8",
        "--gpu",
        "8",
        "--cpu",
        "64",
        "--memMB",
        "65536",
    ]
    words += [
        "--python",
        "python",
        "--image",
        "registry.example/t:1",
        "--env",
        "NOTE=x$y",
        "--max_restarts",
        "3",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*TORCHX, *words, "--", *NASTY],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    request = done.stdout.split("=== SCHEDULER REQUEST ===\n", 1)[1].rstrip("\n") + "\n"
    request = re.sub(r"dlrm-[a-z0-9]{10,}", "dlrm-ID", request)
    assert request == (GOLDEN / f"torchx.{scheduler}").read_text()


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: words[words.index("-s") + 1])
def test_dryruns_of_the_documentation_work(words: list[str]) -> None:
    assert words[0] == "torchx"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*TORCHX, *words[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    request = done.stdout.split("=== SCHEDULER REQUEST ===\n", 1)[1]
    assert "torchrun" in request and words[words.index("--script") + 1] in request


def test_the_documentation_shows_slurm_and_kubernetes() -> None:
    assert [words[words.index("-s") + 1] for words in SHOWN] == ["slurm", "kubernetes"]
