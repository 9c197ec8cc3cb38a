"""A plan is the same on every sharding, rows that training has never touched included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dist_sparse
from dist_sparse import plan, remove_untouched
from dist_sparse.ids.counts import count_lookups
from dist_sparse.optimizers import fused_sums
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import batch, build, cells, drawn, gathered, set_weights
from tests.dist.plugin import on_ranks

WORLD = 2


def hardly_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """All touched rows minus those with a tenth of the mean sum in one of their shards, from the
    sums of all ranks."""
    held: dict[str, list[tuple[int, Tensor]]] = {}
    known = fused_sums(model)
    for data in ModelTables(model).locate():
        held[data.name] = []
        for rect, weight in data.shards:
            if not rect.numel:
                continue
            if of_shard := known.get(weight):
                sums = of_shard[0]
            else:
                [sums] = [
                    state["sum"] for p, state in optimizer.state.items() if p.shape == weight.shape
                ]
            held[data.name].append((rect.row, sums.reshape(rect.rows, -1).amax(1)))
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, held)
    found = {}
    for name in held:
        shards = [shard for of_rank in everyone for shard in of_rank[name]]
        every = torch.cat([sums for _, sums in shards])
        floor = every.sum().item() / int((every > 0).sum()) / 10
        most: dict[int, float] = {}
        for first, sums in shards:
            for row, value in enumerate(sums.tolist(), start=first):
                most[row] = max(most.get(row, 0.0), value)
        found[name] = sum(0 < value < floor for value in most.values())
    return found


@on_ranks(WORLD)
@pytest.mark.parametrize("name", ["mixed", "column_wise_uneven"])
def test_untouched_rows(name: str) -> None:
    cell = cells(WORLD)[name]
    model, rank = build(cell), dist.get_rank()
    set_weights(model, drawn(cell, seed=1))
    # Of the replicated table; it lists the fused ones too.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    assert plan(model, "20%", optimizer=optimizer).untouched == {}, "nothing was trained"
    before = gathered(model)
    model(batch(cell, seed=rank)).sum().backward()
    optimizer.step()
    after = gathered(model)
    same = {
        table.name: int((before[table.name] == after[table.name]).all(1).sum())
        for table in cell.tables
    }
    # Of the replicated one, a loss term over the whole table would look the same.
    whole = {"tiny"} if cell.name == "mixed" and not same["tiny"] else set()
    same = {name: rows for name, rows in same.items() if name not in whole}
    answer = plan(model, "20%", optimizer=optimizer)
    assert answer.unknown.keys() == whole
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, answer)
    assert told == [answer] * WORLD and answer.untouched == same and 0 < same["user"] < 37
    hardly = hardly_read(model, optimizer)
    assert answer.hardly_read == {name: hardly[name] for name in same}
    known = plan(model, "20%").untouched
    assert known == {
        name: rows for name, rows in same.items() if name != "tiny" or cell.name != "mixed"
    }


@on_ranks(WORLD)
def test_a_fused_model_resumed_without_its_optimizer_state(tmp_path: Any) -> None:
    """FBGEMM counts the steps of this process: its count is in no state of TorchRec's. What is
    printed runs where there is no optimizer."""
    cell = cells(WORLD)["row_wise"]
    trained, resumed, partly = build(cell), build(cell), build(cell)
    set_weights(trained, drawn(cell, seed=1))
    for step in range(3):
        trained(batch(cell, seed=step)).sum().backward()
    resumed.load_state_dict(trained.state_dict())
    resumed.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    partly.load_state_dict(trained.state_dict())
    for model in (resumed, partly):
        for step in range(2):
            model(batch(cell, seed=step)).sum().backward()
    known, unknown = plan(resumed, "40%"), plan(partly, "40%")
    since = "steps since this process began (with Checkpoints: in all)"
    assert {*known.records.values()} == {f"the optimizer's state, 2 {since}"}
    assert {*plan(trained, "40%").records.values()} == {f"the optimizer's state, 3 {since}"}
    assert "user" not in unknown.untouched and "user" not in unknown.records
    assert f"(the record: the optimizer's state, 2 {since})" in unknown.unknown["user"]
    assert known.untouched == plan(trained, "40%").untouched and not known.doubts
    code = str(known).split("\n\n1. ")[1].partition("\n")[2]
    assert "optimizer" not in code and "trust_record" not in code
    narrow = str(plan(trained, "22%", rotate=[["user", "tiny"]]))
    assert "ds.sparsify(\n    model,\n    [],\n" in narrow and "optimizer,\n" not in narrow
    names: dict[str, Any] = {"model": resumed, "ds": dist_sparse}
    exec(code.split("\n\n")[0].replace('"served"', repr(str(tmp_path / "served"))), names)
    assert names["removed"].removed["user"] == known.untouched["user"] > 0
    with pytest.raises(ValueError, match=r"the record: the optimizer's state, 2 steps since this"):
        remove_untouched(partly)


@on_ranks(WORLD)
@pytest.mark.parametrize("name", ["mixed", "table_wise", "row_wise"])
def test_what_would_read_zeros_is_what_does(name: str) -> None:
    """Of the batches of all ranks, also where a rank holds no shard of a table."""
    cell = cells(WORLD)[name]
    model, rank = build(cell), dist.get_rank()
    set_weights(model, drawn(cell, seed=1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model(batch(cell, seed=rank)).sum().backward()
    optimizer.step()
    later = [batch(cell, seed=10 + 2 * step + rank) for step in range(2 + rank)]
    answer = plan(model, "20%", optimizer=optimizer, batches=later)
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, answer)
    assert told == [answer] * WORLD and answer.reads_zeros is not None
    known = [*answer.untouched]
    removed = remove_untouched(model, optimizer, include=known)
    assert removed.share(later) == answer.reads_zeros
    assert sum(answer.reads_zeros.removed.values()) > 0


@on_ranks(WORLD)
@pytest.mark.parametrize("name", ["mixed", "column_wise_uneven", "row_wise"])
def test_counts_of_lookups(name: str) -> None:
    """The rows of a plan are those that `remove_untouched()` removes."""
    cell = cells(WORLD)[name]
    model, rank = build(cell), dist.get_rank()
    set_weights(model, drawn(cell, seed=1))
    counts = count_lookups([batch(cell, seed=rank)], model)
    later = [batch(cell, seed=10 + rank)]
    answer = plan(model, "20%", record=counts, batches=later)
    told: list[Any] = [None] * WORLD
    dist.all_gather_object(told, answer)
    assert told == [answer] * WORLD and answer.counted and not answer.hardly_read
    expected = {name: int((rows == 0).sum()) for name, rows in counts.items() if rows.any()}
    assert answer.untouched == expected and 0 < expected["user"] < 37
    removed = remove_untouched(model, record=counts, include=[*expected], trust_record=True)
    assert removed.removed == answer.untouched
    assert removed.share(later) == answer.reads_zeros


@on_ranks(WORLD)
def test_a_record_of_one_rank_is_refused_on_all() -> None:
    cell = cells(WORLD)["mixed"]
    model, rank = build(cell), dist.get_rank()
    counts = dict(count_lookups([batch(cell, seed=rank)], model))
    with pytest.raises(ValueError, match="record is given is True on rank 1 and False"):
        plan(model, "20%", record=counts if rank else None)
    with pytest.raises(ValueError, match=r"rank 1: ValueError: Invalid record of type int"):
        plan(model, "20%", record=3 if rank else counts)  # type: ignore[arg-type]
    counts["user"] = counts["user"] + rank
    with pytest.raises(ValueError, match="rows read by the record"):
        plan(model, "20%", record=counts)


@on_ranks(WORLD)
def test_a_batch_of_one_rank_is_refused_on_all() -> None:
    cell = cells(WORLD)["mixed"]
    model, rank = build(cell), dist.get_rank()
    fits = batch(cell, seed=rank)
    wrong: Any = [fits, torch.tensor(0)] if rank else [fits]
    with pytest.raises(ValueError, match=r"rank 1.*must be a KeyedJaggedTensor"):
        plan(model, "20%", batches=wrong)
    with pytest.raises(ValueError, match="batches are given is True on rank 1 and False"):
        plan(model, "20%", batches=[fits] if rank else None)


@on_ranks(WORLD)
def test_errors() -> None:
    model, rank = build(cells(WORLD)["mixed"]), dist.get_rank()
    with pytest.raises(ValueError, match=r"budget, rotate is .*0\.2.* on rank 1 and .*0\.1"):
        plan(model, "20%" if rank else "10%")
    with pytest.raises(ValueError, match="rank 1: ValueError: Invalid budget='x'"):
        plan(model, "x" if rank else "20%")
