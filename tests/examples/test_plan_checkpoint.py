"""The example of a plan under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from tests.warm import run_ranks_of, run_script

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_checkpoint.py"
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.dist
def test_rank_0_prints_the_plan_of_the_page(tmp_path: Path) -> None:
    """When the model has been trained, and when it was loaded, on any number of ranks."""
    first, other = run_ranks_of(EXAMPLE, [tmp_path / "saved"], world=2, cwd=tmp_path)
    assert first.returncode == other.returncode == 0, first.stderr
    assert not other.stdout
    alone = run_script(EXAMPLE, [tmp_path / "saved"], cwd=tmp_path)
    assert alone.stdout == first.stdout, alone.stderr
    assert first.stdout in PAGE.read_text()
