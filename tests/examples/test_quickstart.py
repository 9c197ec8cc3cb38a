"""The script of the quick start prints on two ranks what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import run_ranks_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart.py"
PAGE = ROOT / "docs" / "quickstart.md"


def test_the_page_shows_the_script() -> None:
    assert f"```python\n{SCRIPT.read_text()}```\n" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_print_what_one_does(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    after = PAGE.read_text().split(SCRIPT.read_text())[1]
    said = after.split("```text\n")[1].split("```")[0]
    done, other = run_ranks_of(SCRIPT, world=2, cwd=tmp_path)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr[-4000:] + other.stderr[-4000:]
    assert other.stdout == ""
    assert done.stdout == said
