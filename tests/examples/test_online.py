"""The online job: what is published each day is served, and equals a whole artifact of that day."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("dist_sparse.extras.guard")
pytest.importorskip("dist_sparse.extras.report")

from dist_sparse import load_served
from dlrm import movielens
from dlrm.batches import DataError
from online import main
from tests.warm import run_ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.dist]

DAYS = 3


def test_a_day_at_a_time(tmp_path: Path) -> None:
    try:
        movielens.fetch()
    except DataError as error:
        pytest.skip(f"OFFLINE, MovieLens-100K is not tested: {error}")
    out = tmp_path / "online"
    options = ["--days", str(DAYS), "--batch-size", "512", "--out", str(out)]
    done, other = run_ranks_of(Path(main.__file__), options, world=2, cwd=tmp_path)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr[-4000:] + other.stderr[-4000:]
    assert other.stdout == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("day 1 of 3: published ")
    table = [line.split() for line in lines if re.match(r" *\d+ +0\.", line)]
    assert len(table) == DAYS
    for _, trained, served, *_ in table:
        assert float(served) == pytest.approx(float(trained), abs=0.01)  # int8 against float32
    assert re.search(r"^The server answered [1-9][\d,]* requests meanwhile", done.stdout, re.M)

    published = [out / "published" / f"day-{day:02d}" for day in range(DAYS + 1)]
    chain = load_served(published)
    whole = load_served(out / "full" / f"day-{DAYS:02d}")
    generator = torch.Generator().manual_seed(0)
    rows = (943, 1_682, 50_000)
    ids = torch.cat([torch.randint(each, (200,), generator=generator) for each in rows])
    served = chain(ids, torch.ones_like(ids))
    assert torch.equal(served, whole(ids, torch.ones_like(ids)))
    assert served.any()
