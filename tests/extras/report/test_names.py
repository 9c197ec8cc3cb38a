"""Names of `dist_sparse.extras.report`: all importable from the package, none of which loads an optional
dependency."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dist_sparse.extras import report

ROOT = Path(__file__).resolve().parents[3]


def loaded(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_names_need_no_optional_dependency() -> None:
    within = loaded(f"from dist_sparse.extras.report import {', '.join(report.__all__)}")
    assert not within & {"jinja2", "matplotlib", "tensorboard", "torchrec", "fbgemm_gpu"}
    assert set(report.__all__) <= set(dir(report))


def test_reading_a_run_loads_neither_charts_nor_enforcers() -> None:
    within = loaded(
        "from dist_sparse.extras.report import read_run\nfrom dist_sparse.extras.report.summary import"
        " inspect_text"
    )
    assert not within & {
        "dist_sparse.extras.report.charts",
        "dist_sparse.extras.report.drawing",
        "dist_sparse.extras.report.run_log",
        "dist_sparse.enforcer",
    }


def test_the_page_has_its_parts() -> None:
    """They are data of the package, which setuptools leaves out unless it is told."""
    package = ROOT / "dist_sparse"
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["dist_sparse"]
    parts = {
        file
        for file in (package / "extras" / "report").iterdir()
        if file.is_file() and file.suffix != ".py"
    }
    assert len(parts) > 3 and parts <= {file for pattern in told for file in package.glob(pattern)}
