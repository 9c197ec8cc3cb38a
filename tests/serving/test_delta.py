"""Deltas: base and deltas are the full export of the same moment, and others are refused."""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dist_sparse import (
    Advanced,
    DataNormSparsifier,
    SparseTraining,
    export,
    load_served,
    remove_untouched,
    sparsify,
)
from dist_sparse.cli.main import main
from dist_sparse.serving import chain, sources
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.chain import check_artifact, merge
from dist_sparse.serving.manifest import delta_summary
from dist_sparse.serving.served import ServedLookup
from dist_sparse.serving.sources import ServedTable
from tests.dist.cells import batch, build
from tests.dist.copies import build_copies, copied_cells
from tests.dist.enforcing import loss_of, optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_copies import _optimizer
from tests.dist.test_importance import learn
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
        self.sparse: Any = self.sparsifier
        self.last: Any = None
        self.folders: list[Path] = []

    def day(self, level: float, written: int = 20) -> Path:
        number = len(self.folders)
        with torch.no_grad():
            self.model[0].weight[torch.randint(ROWS, (written,))] = torch.randn(written, DIM)
        self.sparsifier.data_groups["0"]["sparsity_level"] = level
        self.sparsifier.step()
        if self.sparse is not self.sparsifier:
            self.sparse.step()
        self.last = export(
            self.model, self.sparse, self.path / f"{number}", *self.kind, since=self.last
        )
        export(self.model, self.sparse, self.path / f"full{number}", *self.kind)
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


@pytest.mark.slow
@pytest.mark.parametrize("fbgemm", [True, False])
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_a_chain_is_the_full_export(dtype: str, scale: str, fbgemm: bool, tmp_path: Path) -> None:
    """Merged byte for byte, loaded and applied bit for bit; rows come, go, and outgrow their
    place."""
    days = Days(tmp_path, dtype, scale)
    days.day(0.5)
    live = load_served(days.last, fbgemm=fbgemm)  # what export() returned is a path
    before = kept(days.folders[0])
    for number, level in enumerate([0.5, 0.7, 0.0, 0.9, 1.0, 0.4], 1):
        days.day(level)
        full = tmp_path / f"full{number}"
        after = kept(full)
        entry = days.last.delta.tables["0"]
        assert (entry.came, entry.gone) == (len(after - before), len(before - after))
        merged = tmp_path / f"merged{number}"
        assert merge(*days.folders, out=merged) == days.last.manifest
        assert crcs(merged) == crcs(full)
        assert check_artifact(*days.folders).manifest == days.last.manifest
        expected = looked_up(load_served(full, fbgemm=fbgemm))
        assert torch.equal(looked_up(live.apply_delta(days.last)), expected)
        # Any iterable of folders will do.
        assert torch.equal(looked_up(load_served(iter(days.folders), fbgemm=fbgemm)), expected)
        before = after


@pytest.mark.parametrize("fbgemm", [True, False])
def test_a_growing_delta_finds_room(fbgemm: bool, tmp_path: Path) -> None:
    """A sixteenth more rows are written where there is place; what is saved has none."""
    days = Days(tmp_path)
    served: Any = load_served(days.day(0.5), fbgemm=fbgemm)
    with pytest.raises(ValueError, match="Invalid delta=5: must be the path of a folder"):
        served.apply_delta(5)
    held = served.lookup.row_lookup
    served.apply_delta(days.day(0.48))
    assert served.lookup.row_lookup is held
    assert torch.equal(looked_up(served), looked_up(load_served(tmp_path / "full1")))
    kept = ROWS - round(0.48 * ROWS)
    assert len(served.lookup.row_lookup.stored("0")["rows"]) > kept
    served.to_pt2(tmp_path / "served.pt2")
    saved = torch.export.load(tmp_path / "served.pt2").state_dict
    if not fbgemm:
        # The last row is of zeros.
        assert len(saved["row_lookup.groups.0.rows"]) == kept + 1
    served.apply_delta(days.day(0.1))
    assert served.lookup.row_lookup is not held


def test_a_merged_chain_goes_on(tmp_path: Path) -> None:
    days = Days(tmp_path)
    for level in (0.5, 0.6, 0.3):
        days.day(level)
    merge(*days.folders[:2], out=tmp_path / "merged")
    served = load_served([tmp_path / "merged", days.folders[2]])
    assert torch.equal(looked_up(served), looked_up(load_served(tmp_path / "full2")))


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        (base, "it is an artifact: an artifact comes first, then its deltas in order"),
    ]:
        with pytest.raises(ValueError, match=why):
            served.apply_delta(delta)
        assert torch.equal(looked_up(served), was)
        with pytest.raises(ValueError, match=why):
            load_served([base, delta])
    served.apply_delta(first)
    with pytest.raises(ValueError, match="out of order"):
        served.apply_delta(first)
    assert main(["serve-check", str(base), str(second)]) == 1
    assert main(["serve-check", str(first), str(base)]) == 1
    assert "is refused: it is a delta: " in " ".join(capsys.readouterr().err.split())
    assert main(["serve-check", *map(str, days.folders)]) == 0
    takes = re.findall(r"^(?:delta|total): .*?(on disk|once merged)", capsys.readouterr().out, re.M)
    assert takes == ["on disk", "on disk", "once merged"]
    assert main(["merge", *map(str, days.folders), "--out", str(tmp_path / "m")]) == 0
    assert crcs(tmp_path / "m") == crcs(tmp_path / "a" / "full2")


def test_half_an_update_is_not_served(tmp_path: Path) -> None:
    days = Days(tmp_path)
    served = load_served(days.day(0.5))
    ids = torch.tensor(sorted(kept(days.folders[0])))
    was = served(ids, torch.arange(len(ids)))
    delta = days.day(0.55)
    # 3 calls find the index after the delta, 2 move rows to lower places.
    effects = [*[mock.DEFAULT] * 5, MemoryError]
    moved = mock.patch.object(chain, "rows_of", wraps=chain.rows_of, side_effect=effects)
    with moved, pytest.raises(MemoryError):
        served.apply_delta(delta)
    # Lookups would return rows of other ids.
    lookup: Any = served.lookup
    assert not torch.equal(lookup(ids, torch.arange(len(ids))), was)
    for one in (served, copy.deepcopy(served)):
        with pytest.raises(RuntimeError, match="applied in part: load the artifact again"):
            looked_up(one)
        with pytest.raises(RuntimeError, match="applied in part: load the artifact again"):
            one.apply_delta(delta)


def test_a_delta_that_is_overwritten_after_its_verification(tmp_path: Path) -> None:
    days = Days(tmp_path)
    served = load_served(days.day(0.5))
    file = days.day(0.55) / "tables.safetensors"
    prepare = ServedLookup.prepare_update

    def overwrite(lookup: Any, delta: Any) -> Any:
        with open(file, "r+b") as opened:
            opened.seek(-200, os.SEEK_END)
            opened.write(bytes(200))
        return prepare(lookup, delta)

    with mock.patch.object(ServedLookup, "prepare_update", overwrite):
        served.apply_delta(file.parent)
    assert torch.equal(looked_up(served), looked_up(load_served(tmp_path / "full1")))


def test_the_collections_of_a_load_read_a_delta_once(tmp_path: Path) -> None:
    """Verified, and whatever becomes of the file: but a file of another delta is read."""
    model = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(50, 4, mode="sum") for name in "abc"})
    folders = [export(model, None, tmp_path / "0")]
    for number in (1, 2):
        with torch.no_grad():
            for module in model.values():
                module.weight[number] += 1
        folders.append(export(model, None, tmp_path / str(number), since=folders[-1]))
    served = load_served(folders[0], by_path=True)
    ids = torch.arange(50).view(10, 5)
    whole = load_served(folders, by_path=True)
    assert all(torch.equal(whole[name](ids), model[name](ids)) for name in "abc")
    file = tmp_path / "1" / "tables.safetensors"
    raw = file.read_bytes()
    served["a"].apply_delta(tmp_path / "1")
    file.write_bytes(bytes(len(raw)))
    expected = load_served(folders[0], by_path=True)["c"]
    # A copy opens it on its own.
    with pytest.raises(ValueError, match="damaged"):
        copy.deepcopy(served["b"]).apply_delta(tmp_path / "1")
    served["b"].apply_delta(tmp_path / "1")
    with pytest.raises(ValueError, match="out of order"):
        served["b"].apply_delta(tmp_path / "1")
    # Another load has no part in it.
    with pytest.raises(ValueError, match="damaged"):
        expected.apply_delta(tmp_path / "1")
    # The next delta, in another folder and then in the folder of the first one.
    served["a"].apply_delta(tmp_path / "2")
    (tmp_path / "1").rename(tmp_path / "old")
    (tmp_path / "2").rename(tmp_path / "1")
    served["b"].apply_delta(tmp_path / "1")
    assert torch.equal(served["a"](ids), model["a"](ids))
    assert torch.equal(served["b"](ids), model["b"](ids))
    # The first delta was dropped for the second one, and c has not got it: it is read again.
    with pytest.raises(ValueError, match="damaged"):
        served["c"].apply_delta(tmp_path / "old")
    (tmp_path / "old" / "tables.safetensors").write_bytes(raw)
    served["c"].apply_delta(tmp_path / "old").apply_delta(tmp_path / "1")
    assert torch.equal(served["c"](ids), model["c"](ids))


@pytest.mark.parametrize("since", [b"", b"0", "", 5, [None]])
def test_export_refuses_what_names_no_predecessor(since: Any, tmp_path: Path) -> None:
    days = Days(tmp_path)
    days.last = since
    with pytest.raises(ValueError, match=r"Invalid since=.*must be the path of a folder"):
        days.day(0.5)
    days.last = []
    days.day(0.5)
    assert days.last.delta is None


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
        served.apply_delta(delta)
    is_over.set()
    thread.join()
    found.append(looked_up(served))
    assert all(any(torch.equal(one, each) for each in expected) for one in found)
    assert torch.equal(found[-1], expected[-1])


CHANGES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
        st.lists(st.integers(0, ROWS - 1), max_size=8),
        st.floats(-3, 3, width=16),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(changes=CHANGES)
@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_any_changes(dtype: Any, scale: Any, changes: Any) -> None:
    """Rows that change, go and return, in any order; some days nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        check_changes(Days(Path(name), dtype, scale), Path(name), changes)


def check_changes(days: Days, folder: Path, changes: Any) -> None:
    live = load_served(days.day(0.5))
    for number, (level, ids, value) in enumerate(changes, 1):
        with torch.no_grad():
            days.model[0].weight[ids] = value
        delta = days.day(level, written=0)
        full = folder / f"full{number}"
        merge(*days.folders, out=folder / f"merged{number}")
        assert crcs(folder / f"merged{number}") == crcs(full)
        assert torch.equal(looked_up(live.apply_delta(delta)), looked_up(load_served(full)))


TRAINED = [
    (1, "row_wise", "fp32", "row"),
    (1, "two_shards", "int8", (1, 4)),
    (2, "table_wise", "int8", "row"),
    (2, "row_wise", "fp32", "row"),
    (2, "column_wise_uneven", "int4", (1, 4)),
    (2, "mixed", "fp32", "row"),
    (2, "ec_row_wise", "fp16", "row"),
    (4, "grid_shard", "int8", "row"),
    (4, "data_parallel", "fp32", "row"),
    (4, "table_row_wise", "int4", (1, 4)),
]


@on_ranks()
@pytest.mark.parametrize(("world", "name", "dtype", "block"), TRAINED, ids=str)
def test_ranks(world: int, name: str, dtype: Any, block: Any, tmp_path: Path) -> None:
    """On every sharding, while it is trained and masks are updated, the chain is the full export;
    from the second delta on, rows that training has not written are not streamed."""
    cell = trained_cells(world)[name]
    torch.manual_seed(0)
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model,
        optimizer,
        level=0.6,
        block=block,
        end=6,
        every=2,
        schedule="linear",
        advanced=Advanced(min_rows=0),
    )
    last: Any = None
    folders = []
    for day in range(5):
        for step in range(2 if day < 4 else 0):
            learn(model, optimizer, cell, 2 * day + step)
            sparse.step()
        with streamed() as rows:
            last = export(model, sparse, tmp_path / str(day), dtype, since=last)
        export(model, sparse, tmp_path / f"full{day}", dtype)
        folders.append(last.path)
        if dist.get_rank() == 0:
            merge(*folders, out=tmp_path / f"merged{day}")
            assert crcs(tmp_path / f"merged{day}") == crcs(tmp_path / f"full{day}")
    if dist.get_rank() == 0:
        # Nothing was written on the last day. Of data-parallel tables nothing is noted.
        assert (sum(rows) == 0) == (name not in ("mixed", "data_parallel"))
    with pytest.raises(ValueError, match="refused"):
        export(model, sparse, tmp_path / "x", dtype, since=[tmp_path / "1"])
    sparse.detach()


def begun(world: int) -> tuple[Any, nn.Module, Any, SparseTraining]:
    """A cell, its model after a step, the optimizer, and a training that has removed nothing."""
    cell = trained_cells(world)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    options: Any = {"level": 0.6, "end": 6, "every": 2, "advanced": Advanced(min_rows=0)}
    sparse = sparsify(model, optimizer, **options)
    learn(model, optimizer, cell, 0)
    return cell, model, optimizer, sparse


@on_ranks(2)
def test_a_record_that_one_rank_lacks_is_not_used(tmp_path: Path) -> None:
    """An interrupt may end an export on one rank after the others have begun their records."""
    cell, model, optimizer, sparse = begun(2)
    noted = mock.patch("dist_sparse.serving.export.note_export")
    with noted if dist.get_rank() == 1 else nullcontext():
        base = export(model, sparse, tmp_path / "base")
    learn(model, optimizer, cell, 1)
    delta = export(model, sparse, tmp_path / "delta", since=base)
    export(model, sparse, tmp_path / "full")
    if dist.get_rank() == 0:
        merge(base.path, delta.path, out=tmp_path / "merged")
        assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    sparse.detach()


@on_ranks(1)
@pytest.mark.parametrize("how", ["remove_untouched", "step", "squash_mask"])
def test_rows_that_another_sparsifier_zeroes_are_in_the_delta(how: str, tmp_path: Path) -> None:
    """It has no enforcer, and writes where no optimizer does."""
    _, model, _, sparse = begun(1)
    base = export(model, sparse, tmp_path / "base")
    if how == "remove_untouched":
        remove_untouched(model, trust_record=True)
    else:
        other = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row")
        other.add_model(model)
        other.step()
        if how == "squash_mask":
            other.squash_mask()
    delta = export(model, sparse, tmp_path / "delta", since=base)
    export(model, sparse, tmp_path / "full")
    merge(base.path, delta.path, out=tmp_path / "merged")
    assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    sparse.detach()


@contextmanager
def streamed() -> Iterator[list[int]]:
    """Count the rows of each table that are streamed."""
    found: list[int] = []
    original = ServedTable.ids

    def ids(table: ServedTable) -> torch.Tensor:
        rows = original(table)
        found.append(len(rows))
        return rows

    with mock.patch.object(ServedTable, "ids", ids):
        yield found


@on_ranks()
@pytest.mark.parametrize("world", [1, 2])
def test_tables_that_are_not_sparsified(world: int, tmp_path: Path) -> None:
    """Rows of all tables of a batch are noted, from the full export on, and removed weights are not
    counted again. Full exports beside the chain do not end this."""
    cell = trained_cells(world)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model,
        optimizer,
        level=0.3,
        block="row",
        end=1,
        every=1,
        include="*user*",
        advanced=Advanced(min_rows=0),
    )
    folders: list[Path] = []
    for day in range(4):
        if 0 < day < 3:
            learn(model, optimizer, cell, day)
            sparse.step()
        last = export(model, sparse, tmp_path / f"full{day}")
        if day:
            masks = sparse.sparsifier.masks
            counting = mock.patch.object(masks, "count_revived", wraps=masks.count_revived)
            with counting as count, streamed() as rows:
                last = export(model, sparse, tmp_path / str(day), since=folders)
            count.assert_not_called()
        folders.append(last.path)
        if day and dist.get_rank() == 0:
            changed = sum(table.rows for table in last.delta.tables.values())
            assert changed <= sum(rows) < sum(table.kept for table in last.manifest.tables.values())
            assert sum(rows) == 0 or day < 3
            merge(*folders, out=tmp_path / f"merged{day}")
            assert crcs(tmp_path / f"merged{day}") == crcs(tmp_path / f"full{day}")
    sparse.detach()


def test_a_tensor_whose_zero_changes_its_sign(tmp_path: Path) -> None:
    """It is equal by value, and other bytes."""
    model = nn.Sequential(nn.EmbeddingBag(10, 3, mode="sum"))
    basis = torch.eye(3)
    with mock.patch.object(sources, "bases_of_outputs", lambda module: {None: basis}):
        export(model, None, tmp_path / "base")
        basis[0, 1] = -0.0
        export(model, None, tmp_path / "1", since=tmp_path / "base")
        export(model, None, tmp_path / "full")
    merge(tmp_path / "base", tmp_path / "1", out=tmp_path / "merged")
    assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")


@on_ranks(1)
def test_a_full_export_that_is_written_again(tmp_path: Path) -> None:
    """The next delta follows the second one."""
    cell = trained_cells(1)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model, optimizer, level=0.3, block="row", end=1, every=1, advanced=Advanced(min_rows=0)
    )
    for day in range(3):
        learn(model, optimizer, cell, day)
        sparse.step()
        if day < 2:
            shutil.rmtree(tmp_path / "0", ignore_errors=True)
            export(model, sparse, tmp_path / "0")
    export(model, sparse, tmp_path / "1", since=tmp_path / "0")
    export(model, sparse, tmp_path / "full")
    merge(tmp_path / "0", tmp_path / "1", out=tmp_path / "merged")
    assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    sparse.detach()


@on_ranks(1)
def test_writes_that_training_does_not_make(tmp_path: Path) -> None:
    """A load, a write in place, and rows that come back are noted too."""
    cell = trained_cells(1)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model, optimizer, level=0.6, block="row", end=6, every=1, advanced=Advanced(min_rows=0)
    )
    learn(model, optimizer, cell, 0)
    sparse.step()
    last = export(model, sparse, tmp_path / "0")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folders = [last.path]
    for day in range(1, 7):
        learn(model, optimizer, cell, day)
        sparse.step()
        if day == 2:
            model.load_state_dict(state)
        elif day == 4:
            with torch.no_grad():
                next(iter(model.module.sparse.parameters())).mul_(2)
        elif day > 4:
            for group in sparse.sparsifier.data_groups.values():
                group["sparsity_level"] = 0.8 if day == 5 else 0.1
            sparse.sparsifier.enable_mask_update = True
            sparse.sparsifier.step()
        last = export(model, sparse, tmp_path / str(day), since=last)
        export(model, sparse, tmp_path / f"full{day}")
        folders.append(last.path)
        merge(*folders, out=tmp_path / f"merged{day}")
        assert crcs(tmp_path / f"merged{day}") == crcs(tmp_path / f"full{day}"), day
        came = sum(table.came for table in last.delta.tables.values())
        assert day != 6 or came > 0
    sparse.detach()


@on_ranks(4)
def test_averages_of_copies_are_written_rows(tmp_path: Path) -> None:
    """A sync() changes rows that only the other copy has trained."""
    cell = copied_cells()["table_wise"]
    model = build_copies(cell)
    optimizer = _optimizer(model)
    sparse = sparsify(
        model, optimizer, level=0.3, block="row", end=1, every=1, advanced=Advanced(min_rows=0)
    )
    folders: list[Path] = []
    for day in range(4):
        optimizer.zero_grad()
        loss_of(model(batch(cell, seed=1000 * day + dist.get_rank(), size=1))).backward()
        optimizer.step()
        sparse.step()
        model.sync()
        folders.append(export(model, sparse, tmp_path / str(day), since=folders or None).path)
    export(model, sparse, tmp_path / "full")
    if dist.get_rank() == 0:
        merge(*folders, out=tmp_path / "merged")
        assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    sparse.detach()


@on_ranks(1)
@pytest.mark.parametrize("block", ["row", (1, 4)])
def test_writes_that_torch_does_not_count(block: Any, tmp_path: Path) -> None:
    cell = trained_cells(1)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model, optimizer, level=0.3, block=block, end=1, every=1, advanced=Advanced(min_rows=0)
    )
    folders: list[Path] = []
    for day in range(3):
        learn(model, optimizer, cell, 2 + day)
        sparse.step()
        folders.append(export(model, sparse, tmp_path / str(day), since=folders or None).path)
    for weight in model.parameters():
        weight.data.mul_(2)
    sparse.sparsifier.apply_masks()
    folders.append(export(model, sparse, tmp_path / "3", since=iter(folders)).path)
    export(model, sparse, tmp_path / "full")
    merge(*folders, out=tmp_path / "merged")
    assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    sparse.detach()


@on_ranks(1)
def test_a_damaged_bitmap_is_not_published(tmp_path: Path) -> None:
    """Of tables whose changes are noted no row of the base is read; its bitmap is."""
    cell = trained_cells(1)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model, optimizer, level=0.6, block="row", end=1, every=1, advanced=Advanced(min_rows=0)
    )
    folders: list[Path] = []
    for day in range(4):
        learn(model, optimizer, cell, day)
        sparse.step()
        if day > 1:
            folders.append(export(model, sparse, tmp_path / str(day), since=folders or None).path)
    opened = open_artifact(folders[0])
    name = next(name for name in opened.manifest.tables if "kept" in opened.tensors(name))
    # A copy on write: the file has to be found by its bytes.
    raw = opened.tensors(name)["kept"].numpy().tobytes()
    file = folders[0] / "tables.safetensors"
    whole = file.read_bytes()
    at = whole.index(raw)
    file.write_bytes(whole[:at] + bytes([raw[0] ^ 1]) + whole[at + 1 :])
    with streamed() as rows, pytest.raises(ValueError, match=rf"{file} is damaged.*'{name}.kept'"):
        export(model, sparse, tmp_path / "next", since=folders)
    assert not rows and not (tmp_path / "next").exists()
    file.write_bytes(whole)
    with streamed() as rows:
        export(model, sparse, tmp_path / "next", since=folders)
    assert rows and not any(rows)
    sparse.detach()


def test_revived_weights_of_plain_tables_are_refused(tmp_path: Path) -> None:
    model = torch.nn.EmbeddingBag(200, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.5, block=(1, 4), end=0)
    sparse.step()
    folders = [export(model, sparse, tmp_path / "0").path]
    folders.append(export(model, sparse, tmp_path / "1", since=folders).path)
    model.weight.data[model.weight == 0] = 1.0
    with pytest.raises(ValueError, match="removed weights that are not zero"):
        export(model, sparse, tmp_path / "2", since=folders)
    sparse.detach()


def test_a_line_about_a_large_delta_fits_80_columns() -> None:
    table = SimpleNamespace(rows=12_345_678, came=1_234_567, gone=123_456)
    sizes: Any = SimpleNamespace(
        tables={"t": table}, bytes=1 << 30, artifact=SimpleNamespace(bytes=9 << 30)
    )
    assert max(map(len, delta_summary(sizes).splitlines())) <= 80
