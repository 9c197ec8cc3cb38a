"""The notebook runs from top to bottom, and its committed outputs are those of this code."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FILE = Path(__file__).parents[2] / "examples" / "single_process.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook with its outputs, from a kernel in an empty folder."""
    notebook = nbformat.read(FILE, as_version=4)
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place)
    return client.execute(env={**os.environ, "PYTHONPATH": str(FILE.parents[1])})


def text(notebook: Any, stream: str = "stdout") -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(
        output["text"]
        for output in outputs
        if output["output_type"] == "stream" and output["name"] == stream
    )


def test_is_committed_with_its_outputs() -> None:
    """The site shows them. Figures may differ in the last digit between machines, so the shape is
    compared."""
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    assert [
        cell["execution_count"] for cell in notebook.cells if cell["cell_type"] == "code"
    ] == list(range(1, 12))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert text(notebook, "stderr") == "" and "removed weights are 0" in text(notebook)


@pytest.mark.slow
def test_outputs_are_those_of_this_code(executed: Any) -> None:
    def without_figures(notebook: Any) -> list[str]:
        return re.sub(r"\d+", "0", text(notebook)).splitlines()

    assert without_figures(nbformat.read(FILE, as_version=4)) == without_figures(executed)


def test_ties_count_half() -> None:
    """Examples whose rows are all removed have equal scores."""
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    cell = next(
        cell for cell in nbformat.read(FILE, as_version=4).cells if "def auc(" in cell.source
    )
    for scores, expected in (
        ([0.0, 0.0, 0.0, 0.0], 0.5),
        ([1.0, 0.0, 0.0, 2.0], 0.625),
        ([0.0, 1.0, 2.0, 3.0], 1.0),
    ):
        names = {"torch": torch, "nn": torch.nn, "np": numpy, "ids": {}, "test": slice(None)}
        names["labels"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
        exec(cell.source, names)
        assert names["auc"](lambda _, scores=scores: torch.tensor(scores)) == expected


@pytest.mark.slow
def test_draws_and_warns_of_nothing(executed: Any) -> None:
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert text(executed, "stderr") == ""


@pytest.mark.slow
def test_removes_what_it_says(executed: Any) -> None:
    tables = re.findall(
        r"^(\w+) +(\d+) +(\d+) +80\.00% +(\d+) +(\d+) +\d+$", text(executed), re.MULTILINE
    )
    assert [name for name, *_ in tables] == ["user", "item", "pair"]
    for _, rows, removed, whole, kept in tables:
        assert int(removed) * 5 == int(rows) * 4
        assert int(kept) * 5 == int(whole)
    zeros = {"user": 38_400, "item": 25_600, "pair": 256_000}
    for name, count in zeros.items():
        assert f"{name}: all {count} removed weights are 0" in text(executed)


@pytest.mark.slow
def test_its_words_fit_its_figures(executed: Any) -> None:
    kept, removed = (int(n) for n in re.findall(r"rows: +seen (\d+) times", text(executed)))
    assert removed < kept
    auc = {
        name.strip(): float(value)
        for name, value in re.findall(r"^(.+?) AUC (0\.\d+)", text(executed), re.MULTILINE)
    }
    assert list(auc) == ["dense", "80% of rows", "80% of 1x4 blocks", "95% of the pairs"]
    assert 0.55 < auc["80% of rows"] < auc["80% of 1x4 blocks"] < 0.8
    assert auc["80% of rows"] < auc["dense"] < auc["95% of the pairs"]
