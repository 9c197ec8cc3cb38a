"""The example of a training that goes on where it was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from tests.warm import run_ranks_of, run_script

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"


@pytest.mark.dist
def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run_script(EXAMPLE, [tmp_path / "whole"], cwd=tmp_path)
    killed = run_script(EXAMPLE, [tmp_path / "killed", "--kill-at", 70], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL and whole.returncode == 0, whole.stderr
    resumed = run_script(EXAMPLE, [tmp_path / "killed"], cwd=tmp_path)
    assert "starts at step 50" in resumed.stdout, resumed.stderr
    assert resumed.stdout.splitlines()[1:] == whole.stdout.splitlines()[1:]
    two = run_ranks_of(EXAMPLE, [tmp_path / "killed"], world=2, cwd=tmp_path)[0]
    assert "starts at step 100" in two.stdout, two.stderr
    assert two.stdout.splitlines()[-1].startswith("sum of the table's weights: "), two.stdout
