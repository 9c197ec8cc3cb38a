"""Lookups, and those of removed ids and of ids out of range: counted by table, by any number of threads."""

from __future__ import annotations

import copy
import io
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_sparse import load_served
from dist_sparse.ids.row_index import Tally, UnknownLookups
from dist_sparse.serving.manifest import Table
from dist_sparse.serving.served import Served
from tests.serving.folders import Source, table, write
from tests.serving.test_delta import ROWS, Days, kept

FBGEMM = pytest.mark.parametrize("fbgemm", [True, False])


class WithDefaultRow(Source):
    """A table whose removed ids share a row of ones."""

    def stored(self) -> tuple[Table, dict[str, Tensor]]:
        entry, tensors = super().stored()
        rows = torch.cat([tensors["rows"], torch.ones(1, entry.dim)])
        return replace(entry, default_row=True), {**tensors, "rows": rows}


def one(path: Any, **choices: Any) -> Any:
    return load_served(path, **{"count": True, **choices})


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns after nearly every bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(call: Any, count: int = 8) -> None:
    """Call a function in several threads at once, and wait for all."""
    together = threading.Barrier(count)

    def started() -> None:
        together.wait()
        call()

    threads = [threading.Thread(target=started) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def three(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A collection with a table of two features, one without removed rows, and an empty one."""
    weights = {"t": table(60, 4, 0.5), "dense": table(60, 4, 1.0), "gone": table(60, 4, 0.0)}
    features = {"t": ["a", "b"], "dense": ["c"], "gone": ["d"]}
    of = [Source(name, weight, features[name]) for name, weight in weights.items()]
    return write(tmp_path / "served", ("", "bag", of)), weights


@FBGEMM
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("unknown", ["zero", "raise"])
def test_counts_of_a_collection(
    tmp_path: Path, fbgemm: bool, dtype: torch.dtype, unknown: str
) -> None:
    """In batches with and without ids out of range, and empty features."""
    path, weights = three(tmp_path)
    served = one(path, fbgemm=fbgemm, unknown=unknown)
    tables = ["t", "t", "dense", "gone"]
    nothing = dict.fromkeys(weights, 0)
    want = {"lookups": {**nothing}, "removed": {**nothing}, "unknown": {**nothing}}
    assert (served.removed, served.unknown) == (nothing, nothing)
    some = torch.Generator().manual_seed(0)
    for sizes in ([5, 0, 3, 9], [0, 0, 0, 0], [0, 7, 0, 0], [4, 2, 6, 1]):
        for least, most in ((0, 60), (-5, 70)):
            ids = [torch.randint(least, most, (size,), generator=some) for size in sizes]
            for name, part in zip(tables, ids, strict=True):
                inside = part[(part >= 0) & (part < 60)]
                want["lookups"][name] += len(part)
                want["unknown"][name] += len(part) - len(inside)
                want["removed"][name] += int((weights[name][inside] == 0).all(1).sum())
            refused = unknown == "raise" and any(((p < 0) | (p >= 60)).any() for p in ids)
            values, lengths = torch.cat(ids).to(dtype), torch.tensor(sizes)
            if refused:
                with pytest.raises(ValueError, match="Out of range"):
                    served(values, lengths)
            else:
                served(values, lengths)
            assert served.removed == want["removed"]
            assert served.unknown == want["unknown"]
    assert want["removed"]["t"] and want["removed"]["gone"] and want["unknown"]["t"]
    found = served.metrics()
    assert found["lookups_total"] == want["lookups"]
    assert found["removed_lookups_total"] == want["removed"]
    assert found["unknown_lookups_total"] == want["unknown"]
    assert found["deltas_applied"] == 0 and len(found["artifact_hash"]) == 64
    for name in ("lookups_total", "removed_lookups_total", "unknown_lookups_total"):
        assert {type(number) for number in found[name].values()} == {int}
    # What is returned is a copy.
    served.removed.clear()
    found["lookups_total"].clear()
    assert served.metrics()["lookups_total"] == want["lookups"]


@FBGEMM
def test_counts_of_modules_of_torch(tmp_path: Path, fbgemm: bool) -> None:
    weight = table(60, 4, 0.5)
    removed = int((weight == 0).all(1).sum())
    of = [Source("t", weight, pooling="none")]
    path = write(tmp_path / "both", ("ids", "embedding", of), ("bags", "embedding_bag", of))
    served = one(path, fbgemm=fbgemm)
    served["ids"](torch.arange(60).view(3, 4, 5))
    served["bags"](torch.arange(60).view(6, 10))
    for module in served.values():
        assert module.removed == {"t": removed} and module.metrics()["lookups_total"] == {"t": 60}


@FBGEMM
@pytest.mark.parametrize("features", [["a"], ["a", "b"]], ids=["one", "several"])
def test_ids_of_a_default_row_are_removed(
    tmp_path: Path, fbgemm: bool, features: list[str]
) -> None:
    """Beside a table without one; an id out of range never reads the default row."""
    weight = table(60, 4, 0.5)
    of: list[Source] = [WithDefaultRow("t", weight, features[:1])]
    if len(features) > 1:
        of += [Source("u", weight, features[1:])]
    served = one(write(tmp_path / "served", ("", "bag", of)), fbgemm=fbgemm)
    removed = int((weight == 0).all(1).sum())
    ids = torch.tensor([*range(60), -1, 60])
    count = len(features)
    served(ids.repeat(count), torch.full((count,), 62))
    assert served.removed == {"t": removed} | ({"u": removed} if count > 1 else {})
    assert set(served.unknown.values()) == {2}
    assert f"t: {60 - removed} of 60 rows and a default row, 4 columns, fp32" in repr(served)


@FBGEMM
def test_counts_go_on_through_deltas(tmp_path: Path, fbgemm: bool) -> None:
    """An id counts as removed as long as it is; counts and copies of the module are kept."""
    days = Days(tmp_path)
    served = one(days.day(0.5), fbgemm=fbgemm)
    hashes = {served.metrics()["artifact_hash"]}
    want = 0
    ids = torch.arange(-1, ROWS + 1)
    for number, level in enumerate((0.5, 0.9, 0.1, 0.0, 0.4)):
        if number:
            served.apply_delta(days.day(level))
        rows = len(kept(tmp_path / f"full{number}"))
        for _ in range(2):
            served(ids, torch.arange(len(ids)))
            want += ROWS - rows
            assert served.removed == {"0": want}
        hashes.add(served.metrics()["artifact_hash"])
        assert served.metrics()["deltas_applied"] == number
        assert f"0: {rows} of {ROWS} rows, 6 columns, fp32" in repr(served)
        assert f"deltas applied: {number}" in repr(served)
    assert served.metrics()["lookups_total"] == {"0": 10 * len(ids)}
    assert served.unknown == {"0": 20}
    assert len(hashes) == 5
    assert one(days.folders, fbgemm=fbgemm).metrics()["deltas_applied"] == 4


@FBGEMM
def test_no_lookup_of_a_thread_is_lost(tmp_path: Path, fbgemm: bool, eager_switches: None) -> None:
    path, weights = three(tmp_path)
    served = one(path, fbgemm=fbgemm)
    ids = torch.tensor([*range(60), -1, 99]).repeat(4)
    lengths = torch.full((4,), 62)
    in_threads(lambda: [served(ids, lengths) for _ in range(50)])
    removed = {name: int((weight == 0).all(1).sum()) for name, weight in weights.items()}
    assert served.unknown == {"t": 1600, "dense": 800, "gone": 800}
    assert served.removed == {"t": 800 * removed["t"], "dense": 0, "gone": 400 * 60}
    assert served.metrics()["lookups_total"] == {"t": 49600, "dense": 24800, "gone": 24800}


def test_no_unknown_lookup_of_a_thread_is_lost(eager_switches: None) -> None:
    """Of compact collections too."""
    unknown = UnknownLookups({"t": 3}, ["t"])
    ids, flags = torch.tensor([5]), torch.tensor([True])
    in_threads(lambda: [unknown.add(ids, flags, [1]) for _ in range(500)])
    assert unknown.tally.counts == {"t": 4000}


def test_counting_is_a_choice(tmp_path: Path) -> None:
    path, _ = three(tmp_path)
    served = load_served(path)
    assert isinstance(served, Served)
    served(torch.tensor([60] * 4), torch.ones(4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="Not counted: load the artifact with count=True"):
        _ = served.removed
    assert served.unknown == {"t": 2, "dense": 1, "gone": 1}
    assert set(served.metrics()) == {"unknown_lookups_total", "deltas_applied", "artifact_hash"}
    with pytest.raises(ValueError, match="Invalid count=2: must be True or False"):
        one(path, count=2)


class SlowNumber(int):
    """A number whose addition takes a call, in which another thread may run."""

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return int(self) + other


@pytest.mark.slow
def test_additions_of_threads_do_not_overlap() -> None:
    tally = Tally({"t": 0})
    in_threads(lambda: [tally.add(["t"], [SlowNumber(1)]) for _ in range(500)])
    assert tally.counts == {"t": 4000}


def test_copies_count_on_their_own(tmp_path: Path) -> None:
    """Copied and pickled modules begin with the counts of the original."""
    path, _ = three(tmp_path)
    served = one(path)
    batch = torch.tensor([60] * 4), torch.ones(4, dtype=torch.int64)
    served(*batch)
    file = io.BytesIO()
    torch.save(served, file)
    file.seek(0)
    for other in (copy.deepcopy(served), torch.load(file, weights_only=False)):
        other(*batch)
        assert other.unknown == {"t": 4, "dense": 2, "gone": 2}
    assert served.unknown == {"t": 2, "dense": 1, "gone": 1}


def test_a_saved_graph_does_not_count(tmp_path: Path) -> None:
    path, _ = three(tmp_path)
    served = one(path, fbgemm=False)
    served.to_pt2(tmp_path / "served.pt2")
    saved = torch.export.load(tmp_path / "served.pt2").module()
    ids, lengths = torch.arange(-1, 63).repeat(4), torch.full((4,), 64)
    assert torch.equal(saved(ids, lengths), served.lookup(ids, lengths))
    assert served.metrics()["lookups_total"] == {"t": 128, "dense": 64, "gone": 64}


def test_repr_escapes_names(tmp_path: Path) -> None:
    of = [Source("a\x1b", table(60, 4, 1.0), ["a"])]
    served = one(write(tmp_path / "served", ("", "bag", of)))
    assert repr(served) == (
        "Served(\n  a\\x1b: 60 of 60 rows, 4 columns, fp32\n  deltas applied: 0\n)"
    )
