"""Logs and quality over ranks: one rank writes, numbers are of all ranks, refusals come on every
rank."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dist_sparse.extras.report import RunLog
from dist_sparse.extras.report.folder import LINES, read_lines
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.run_log import Quality
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import batch, build, cells, set_weights, weights
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.one_rank import short_timeout
from tests.dist.pieces import shared_folder
from tests.dist.plugin import on_ranks
from tests.dist.test_importance import learn
from tests.extras.report.folders import full_disk


def written(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 wrote; the others must not look before it is there."""
    dist.barrier()
    return [line for _, line in read_lines(folder / LINES)]


@on_ranks(2)
def test_a_log() -> None:
    folder = shared_folder()
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(model)
    with RunLog(folder, sparsifier) as log:
        for step in range(4):
            set_weights(model, weights(cell, seed=step))
            sparsifier.enable_mask_update = step != 1
            sparsifier.step()
            reset_traffic()
            log.step(step, loss=float(dist.get_rank()))
            assert traffic().collectives == 0, "a step of the log sends nothing"
    lines = written(folder)
    assert [line["values"]["loss"] for line in lines if line["kind"] == "values"] == [0.0] * 4
    masks = [line for line in lines if line["kind"] == "masks"]
    assert [line["step"] for line in masks] == [0, 2, 3]
    rows = {table.name: table.rows for table in cell.tables}
    for line in masks:
        assert {t["name"]: t["removed_blocks"] for t in line["tables"]} == {
            n: round(r / 2) for n, r in rows.items()
        }
        assert {t["name"] for t in line["tables"] if t["dead_rows"] is None} == {"item"}, (
            "cut by columns"
        )
    assert lines[-1]["kind"] == "end"
    dead = {t["name"]: t["dead_rows"] for t in lines[-1]["tables"]}
    assert dead == {name: round(count / 2) for name, count in rows.items()}, (
        "of the one that is cut by columns too"
    )
    assert sparsifier.record().count == 0, "no longer recorded"


@on_ranks(2)
def test_bad_values() -> None:
    """Refused by every rank, where rank 0 alone writes; the ranks go on together."""
    folder = shared_folder()
    with RunLog(folder) as log:
        for bad in (torch.ones(2), "low", 10**400, torch.tensor(1j)):
            with pytest.raises(ValueError, match="Invalid loss="):
                log.step(0, loss=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"Invalid step=0\.5"):
            log.step(0.5)  # type: ignore[arg-type]
        log.step(0, loss=1.0)
    assert [line["kind"] for line in written(folder)] == ["values", "end"]


@on_ranks(2)
def test_a_full_disk() -> None:
    """Rank 0 can't write any more; both ranks train on and close."""
    folder = shared_folder()
    cell = cells(2)["mixed"]
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(build(cell))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with RunLog(folder, sparsifier) as log, full_disk(100):
            for step in range(3):
                sparsifier.step()
                log.step(step, loss=1.0)
    assert sum("could not be written" in str(one.message) for one in said) == (dist.get_rank() == 0)


@on_ranks(2)
def test_several_due_steps_wait() -> None:
    """Where nothing is to be chosen, no message takes counts along, so they wait; each has the step
    of its own."""
    folder = shared_folder()
    cell = cells(2)["row_wise"]
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, ROW))
    sparsifier.add_model(build(cell))
    with RunLog(folder, sparsifier) as log:
        for step in range(8):
            sparsifier.step()
            if step % 3 == 2:
                log.step(step)
    masks = [(line["step"], line["number"]) for line in written(folder) if line["kind"] == "masks"]
    assert masks == [(2, 1), (2, 2), (2, 3), (5, 4), (5, 5), (5, 6), (5, 7), (5, 8)]


@on_ranks(2)
def test_refused_on_every_rank() -> None:
    folder = shared_folder()
    with pytest.raises(ValueError, match=r"rank 0: TypeError: .*NoneType"):
        RunLog(folder, sinks=None if dist.get_rank() == 0 else ())  # type: ignore[arg-type]
    RunLog(folder).close()
    with pytest.raises(ValueError, match=r"rank 0: ValueError: .* holds the log of a run"):
        RunLog(folder)


@on_ranks(2)
def test_one_rank_is_wrong() -> None:
    """It does not write, and yet the one that does leaves everything as it was."""
    folder, rank = shared_folder(), dist.get_rank()
    wrongs: tuple[dict[str, Any], ...] = (
        *(
            {"sinks": None},
            {"folder": 3},
            {"config": {"model": object()}},
        ),
        {"config": [1]},
    )
    for resume in (False, True):
        good: dict[str, Any] = {"folder": folder / "run", "resume": resume}
        before = everything_in(folder)
        for wrong in wrongs:
            with pytest.raises(
                ValueError,
                match=r"refused on every rank, nothing was changed\. rank 1: (Type|Value)Error: ",
            ):
                RunLog(**good | wrong if rank == 1 else good)
            assert everything_in(folder) == before, wrong
        RunLog(**good).close()
    assert [line["kind"] for line in written(folder / "run")] == ["end", "resumed", "end"]


def everything_in(folder: Path) -> dict[str, bytes | None]:
    dist.barrier()
    found = {
        str(file): file.read_bytes() if file.is_file() else None
        for file in sorted(folder.rglob("*"))
    }
    dist.barrier()
    return found


@on_ranks(2)
def test_rank_0_cannot_write() -> None:
    folder = shared_folder()
    if dist.get_rank() == 0:
        (folder / "file").touch()
    with pytest.raises(ValueError, match=r"refused on every rank.* rank 0: NotADirectoryError: "):
        RunLog(folder / "file" / "run")
    RunLog(folder / "run").close()


@on_ranks(2)
def test_one_rank_has_an_exception() -> None:
    """It leaves the log without waiting for the others, who are not there yet."""
    folder = shared_folder()
    log = RunLog(folder)
    for rank in (1, 0):
        if dist.get_rank() == rank:
            with pytest.raises(KeyError), log:
                raise KeyError
        dist.barrier()


@on_ranks(2)
def test_quality() -> None:
    """Ranks with unequal numbers of examples, one with none: as if one process had seen all."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(40, generator=generator),
        torch.randint(0, 2, (40,), generator=generator).float(),
    )
    mine = slice(0, 30) if rank == 0 else slice(30, 40)
    measure = Quality(every=2)
    reset_traffic()
    assert measure.update(logits[mine][:4], labels[mine][:4]) == {} and traffic().collectives == 0
    found = measure.update(logits[mine][4:], labels[mine][4:])
    assert traffic().collectives == 3
    pairs = (logits[labels == 1][:, None] - logits[labels == 0][None]).double()
    auc = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    mean = labels.double().mean()
    entropy = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
    assert found["auc"] == pytest.approx(float(auc), abs=1e-9)
    assert found["ne"] == pytest.approx(float(loss / entropy), abs=1e-9)
    assert measure.compute() == {}
    few = slice(0, 5) if rank == 0 else slice(0, 0)
    alone = Quality(every=1).update(logits[few], labels[few])
    assert set(alone) == {"auc", "ne"}
    with pytest.raises(ValueError, match="Invalid labels of shape"):
        measure.update(logits, labels[:3])


@on_ranks(2)
def test_quality_of_labels_that_are_wrong_on_one_rank() -> None:
    """Refused on both, where one would wait for the other; and the ranks go on together."""
    logits = torch.tensor([-1.0, 2.0])
    labels = torch.tensor([0.0, 1.0])
    measure = Quality(every=1)
    with short_timeout(), pytest.raises(ValueError, match=r"rank 1: .*Invalid labels of shape"):
        measure.update(logits, labels[: 2 - dist.get_rank()])
    assert measure.update(logits, labels)["auc"] == 1.0
    # Between two results nothing is sent: that rank alone raises, and is in step all the same.
    measure = Quality(every=2)
    with pytest.raises(ValueError, match=r"^Invalid labels") if dist.get_rank() else nullcontext():
        measure.update(logits, labels[: 2 - dist.get_rank()])
    assert measure.update(logits, labels)["auc"] == 1.0


def test_every_must_be_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="Invalid every=0"):
        Quality(0)


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_traffic(name: str) -> None:
    """Rows by their lookups equal a count over the batches of all ranks, of tables cut by rows and
    by columns."""
    folder, cell = shared_folder(), trained_cells(2)[name]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.counts_lookups = True
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optimizer), RunLog(folder, sparsifier, model=model) as log:
        for step in range(3):
            learn(model, optimizer, cell, step)
            sparsifier.step()
            log.step(step)
        kept = {table.name: sparsifier.full_mask(table.name).bool().any(1) for table in cell.tables}
    dist.barrier()
    run = read_run(folder)
    assert run.traffic.keys() == kept.keys() and not run.other_tables
    assert run.bytes_dense == sum(4 * table.rows * table.dim for table in cell.tables)
    seen = [batch(cell, seed=100 * step + rank, size=2) for step in range(3) for rank in range(2)]
    for table in cell.tables:
        ids = torch.cat([features[name].values() for features in seen for name in table.features])
        lookups = torch.bincount(ids, minlength=table.rows)
        octaves = [0 if n == 0 else n.bit_length() for n in lookups.tolist()]
        of = run.traffic[table.name]
        for rows, held, total in (
            (kept[table.name], of.kept, of.kept_lookups),
            (~kept[table.name], of.removed, of.removed_lookups),
        ):
            places = [place for place, is_one in zip(octaves, rows.tolist(), strict=True) if is_one]
            assert list(held) == [places.count(place) for place in range(33)], table.name
            assert total == int(lookups[rows].sum())
