"""Deltas: base and deltas are the full export of the same moment, and others are refused."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_sparse import DataNormSparsifier, export, load_served
from dist_sparse.cli.main import main
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.check import check_artifact, merge
from tests.dist.cells import build, cells
from tests.dist.plugin import on_ranks
from tests.serving.stored import crcs

KINDS = [
    ("fp32", "row"),
    ("fp16", "row"),
    ("int8", "row"),
    ("int4", "row"),
    ("int4", "column"),
]
ROWS, DIM = 300, 6


class Days:
    """A table that changes: each day writes some rows, and keeps another share."""

    def __init__(self, path: Path, dtype: Any = "fp32", scale: Any = "row") -> None:
        torch.manual_seed(0)
        self.path, self.kind = path, (dtype, scale)
        self.model = torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, DIM, mode="sum"))
        self.sparsifier = DataNormSparsifier(sparse_block_shape="row", norm="L2")
        self.sparsifier.add_model(self.model)
        self.last: Any = None
        self.folders: list[Path] = []

    def day(self, level: float, written: int = 20) -> Path:
        number = len(self.folders)
        with torch.no_grad():
            self.model[0].weight[torch.randint(ROWS, (written,))] = torch.randn(written, DIM)
        self.sparsifier.data_groups["0"]["sparsity_level"] = level
        self.sparsifier.step()
        self.last = export(
            self.model, self.sparsifier, self.path / f"{number}", *self.kind, since=self.last
        )
        export(self.model, self.sparsifier, self.path / f"full{number}", *self.kind)
        self.folders.append(self.last.path)
        return self.last.path


def kept(path: Path) -> set[int]:
    """The ids that have rows, bit by bit."""
    words = open_artifact(path).tensors("0").get("kept")
    if words is None:
        return set(range(ROWS))
    return {id for id in range(ROWS) if int(words[id // 32]) >> (id % 32) & 1}


def looked_up(served: Any) -> torch.Tensor:
    ids = torch.arange(-1, ROWS + 1)
    return served(ids, torch.arange(len(ids)))


@pytest.mark.parametrize("fbgemm", [True, False])
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_a_chain_is_the_full_export(dtype: str, scale: str, fbgemm: bool, tmp_path: Path) -> None:
    """Merged byte for byte, loaded and applied bit for bit; rows come, go, and outgrow their
    place."""
    days = Days(tmp_path, dtype, scale)
    live = load_served(days.day(0.5), fbgemm=fbgemm)
    before = kept(days.folders[0])
    for number, level in enumerate([0.5, 0.7, 0.0, 0.9, 1.0, 0.4], 1):
        delta = days.day(level)
        full = tmp_path / f"full{number}"
        after = kept(full)
        entry = days.last.delta.tables["0"]
        assert (entry.came, entry.gone) == (len(after - before), len(before - after))
        merged = tmp_path / f"merged{number}"
        assert merge(*days.folders, out=merged) == days.last.manifest
        assert crcs(merged) == crcs(full)
        assert check_artifact(*days.folders).manifest == days.last.manifest
        expected = looked_up(load_served(full, fbgemm=fbgemm))
        assert torch.equal(looked_up(live.apply(delta)), expected)
        assert torch.equal(looked_up(load_served(days.folders, fbgemm=fbgemm)), expected)
        before = after


def test_a_merged_chain_goes_on(tmp_path: Path) -> None:
    days = Days(tmp_path)
    for level in (0.5, 0.6, 0.3):
        days.day(level)
    merge(*days.folders[:2], out=tmp_path / "merged")
    served = load_served([tmp_path / "merged", days.folders[2]])
    assert torch.equal(looked_up(served), looked_up(load_served(tmp_path / "full2")))


def test_refusals(tmp_path: Path) -> None:
    """What was served stays."""
    days = Days(tmp_path / "a")
    for level in (0.5, 0.6, 0.3):
        days.day(level)
    base, first, second = days.folders
    other = Days(tmp_path / "b")
    other.day(0.4)
    stranger = other.day(0.5)
    served = load_served(base)
    was = looked_up(served)
    cut = tmp_path / "cut"
    shutil.copytree(first, cut)
    tables = cut / "tables.safetensors"
    tables.write_bytes(tables.read_bytes()[:-1])
    flipped = tmp_path / "flipped"
    shutil.copytree(first, flipped)
    raw = bytearray((flipped / "tables.safetensors").read_bytes())
    raw[-1] ^= 1
    (flipped / "tables.safetensors").write_bytes(raw)
    for delta, why in [
        (second, "out of order"),
        (stranger, "another base"),
        (cut, "damaged"),
        (flipped, "damaged"),
        (base, "refused"),
    ]:
        with pytest.raises(ValueError, match=why):
            served.apply(delta)
        assert torch.equal(looked_up(served), was)
        with pytest.raises(ValueError, match=why):
            load_served([base, delta])
    served.apply(first)
    with pytest.raises(ValueError, match="out of order"):
        served.apply(first)
    assert main(["serve-check", str(base), str(second)]) == 1
    assert main(["serve-check", *map(str, days.folders)]) == 0
    assert main(["merge", *map(str, days.folders), "--out", str(tmp_path / "m")]) == 0
    assert crcs(tmp_path / "m") == crcs(tmp_path / "a" / "full2")


def test_export_refuses_other_dtypes(tmp_path: Path) -> None:
    days = Days(tmp_path)
    days.day(0.5)
    with pytest.raises(ValueError, match="export a new base"):
        export(days.model, days.sparsifier, tmp_path / "x", "int8", since=days.last)
    assert not (tmp_path / "x").exists()


def test_a_lookup_sees_no_half(tmp_path: Path) -> None:
    """A thread looks up while deltas are applied: each result is that of one artifact."""
    days = Days(tmp_path)
    served = load_served(days.day(0.5))
    for level in (0.2, 0.7, 0.4, 0.6):
        days.day(level, written=ROWS)
    expected = [looked_up(load_served(tmp_path / f"full{day}")) for day in range(5)]
    found: list[torch.Tensor] = []
    is_over = threading.Event()

    def look_up() -> None:
        while not is_over.is_set():
            found.append(looked_up(served))

    thread = threading.Thread(target=look_up)
    thread.start()
    for delta in days.folders[1:]:
        served.apply(delta)
    is_over.set()
    thread.join()
    found.append(looked_up(served))
    assert all(any(torch.equal(one, each) for each in expected) for one in found)
    assert torch.equal(found[-1], expected[-1])


@on_ranks(2)
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise_uneven", "mixed"])
def test_ranks(world: int, name: str, tmp_path: Path) -> None:
    """On every sharding the chain is the full export."""
    model = build(cells(world)[name])
    sparsifier = DataNormSparsifier(sparsity_level=0.7, sparse_block_shape="row", norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    last = export(model, sparsifier, tmp_path / "base", "int8")
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = 0.9
    sparsifier.step()
    last = export(model, sparsifier, tmp_path / "delta", "int8", since=last)
    export(model, sparsifier, tmp_path / "full", "int8")
    if dist.get_rank() == 0:
        merge(tmp_path / "base", tmp_path / "delta", out=tmp_path / "merged")
        assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    with pytest.raises(ValueError, match="refused"):
        export(model, sparsifier, tmp_path / "x", "int8", since=[tmp_path / "delta"])
