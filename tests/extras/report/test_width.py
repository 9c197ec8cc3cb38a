"""What `inspect` and `report` print fits a terminal of 80 columns, whatever the names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_sparse import export, sparsify
from dist_sparse.extras.report import RunLog, add_artifact
from tests.cli.test_width import LONG, check_command, tables


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs and an artifact."""
    place = tmp_path_factory.mktemp("width")
    for name, level in (("a run whose name is a sentence", 0.9), ("dense", None)):
        model = tables()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparse = level and sparsify(model, optimizer, level=level, end=0)
        config = {"lr": 0.1, "hidden layers": [*range(40)], "rows": {LONG: 100_000, "item": 50}}
        with RunLog(place / str(level), sparse, model=model, name=name, config=config) as log:
            for step in range(3):
                if sparse:
                    sparse.step()
                log.step(step, loss=0.5, test_auc=0.7, **{f"{LONG}/{i}": 1.0 for i in range(4)})
        if sparse:
            export(model, sparse, place / "served", dtype="int8")
            add_artifact(place / str(level), place / "served", auc=0.7)
            sparse.detach()
    return place


@pytest.mark.parametrize(
    "words",
    [
        "inspect --help",
        "report --help",
        "inspect 0.9",
        "inspect served",
        "report 0.9 None",
        "report 0.9 None --opne",
    ],
)
def test_a_command(
    words: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_command(words, place, capfd, monkeypatch)
