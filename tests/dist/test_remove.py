"""`remove_untouched()` of sharded models: the rows of an oracle, and no trained row, whatever part
of a record is lost. (C23)"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import export, load_served, remove_untouched
from dist_sparse.ids.counts import count_lookups
from tests.dist.cells import Cell, batch, build, drawn, gathered, set_weights
from tests.dist.enforcing import kernels, loss_of, optimizer_of, total, trained_cells
from tests.dist.one_rank import short_timeout
from tests.dist.plugin import on_ranks

CELLS = [
    *((1, "two_shards"), (1, "data_parallel"), (2, "row_wise"), (2, "column_wise"), (2, "mixed")),
    *((2, "ec_row_wise"), (2, "table_wise"), (4, "row_wise"), (4, "grid_shard"), (4, "mixed")),
]


def started(world: int, name: str, seed: int) -> tuple[Cell, nn.Module, Any, dict[str, Tensor]]:
    """A cell, its model and optimizer, and its initial weights."""
    cell = trained_cells(world)[name]
    model = build(cell)
    initial = drawn(cell, seed)
    set_weights(model, initial)
    optimizer = optimizer_of(model, tables=lambda params: RowWiseAdagrad(params, lr=0.1))
    return cell, model, optimizer, initial


def train(cell: Cell, model: nn.Module, optimizer: Any, steps: range) -> list[Any]:
    batches = []
    for step in steps:
        batches.append(batch(cell, seed=100 * step + dist.get_rank(), size=2))
        optimizer.zero_grad()
        loss_of(model(batches[-1])).backward()
        optimizer.step()
    return batches


def lose_sums(model: nn.Module, optimizer: Any, share: float) -> None:
    """Set the sums of the first rows of each shard to 0, as if they had not been loaded."""
    for kernel in kernels(model):
        if hasattr(kernel.emb_module, "split_optimizer_states"):
            for states in kernel.emb_module.split_optimizer_states():
                states[0][: round(share * len(states[0]))] = 0
    for _, part in optimizer._optims[1:]:
        for state in part.state.values():
            if "sum" in state:
                state["sum"][: round(share * len(state["sum"]))] = 0


@on_ranks()
@pytest.mark.whole
@pytest.mark.parametrize(("world", "name"), CELLS)
def test_removed_are_the_rows_of_an_oracle(world: int, name: str, tmp_path: Any) -> None:
    cell, model, optimizer, initial = started(world, name, seed=1)
    batches = train(cell, model, optimizer, range(3))
    before = gathered(model)
    counts = count_lookups(batches, model)
    outputs = [model(each).detach() for each in batches]
    removed = remove_untouched(model, optimizer)
    assert all(map(torch.equal, outputs, [model(each).detach() for each in batches]))
    after = gathered(model)
    for table in cell.tables:
        never = counts[table.name] == 0
        assert torch.equal((before[table.name] == initial[table.name]).all(1), never)
        assert not after[table.name][never].any()
        assert torch.equal(after[table.name][~never], before[table.name][~never])
        # A table of which no row was read stays whole: its record may be missing.
        assert removed.removed[table.name] == int(never.sum())
    share = removed.share(batches)
    assert not any(share.removed.values()) and share.examples == total(2 * len(batches))
    later = [batch(cell, seed=7 + dist.get_rank(), size=5)]
    of_later = count_lookups(later, model)
    for name_, lookups in removed.share(later).removed.items():
        assert lookups == int(of_later[name_][counts[name_] == 0].sum())
    export(model, removed, tmp_path / "served")
    load_served(tmp_path / "served")


@on_ranks()
@pytest.mark.parametrize(("world", "name"), CELLS)
@pytest.mark.parametrize("seed", range(4))
def test_a_trained_row_is_never_removed(world: int, name: str, seed: int) -> None:
    """Sums lost before the last steps, of all rows or of some."""
    rng = random.Random(f"{world} {name} {seed}")
    cell, model, optimizer, initial = started(world, name, seed)
    steps = rng.choice([1, 4])
    train(cell, model, optimizer, range(steps))
    lost = rng.choice([0.0, 0.3, 1.0])
    lose_sums(model, optimizer, lost)
    train(cell, model, optimizer, range(steps, steps + rng.choice([1, 2])))
    before = gathered(model)
    refused = None
    try:
        remove_untouched(model, optimizer)
    except ValueError as error:
        refused = str(error)
    assert refused is None or lost > 0, refused
    for table, weights in gathered(model).items():
        trained = (before[table] != initial[table]).any(1)
        expected = before[table] if refused else torch.where(trained[:, None], before[table], 0.0)
        if not (trained.any() or refused):
            expected = before[table]
        assert torch.equal(weights, expected), table


@on_ranks(2)
class TestRefusals:
    """On every rank, although one alone is wrong; nothing has changed."""

    def test_a_record_of_one_rank(self) -> None:
        cell, model, optimizer, _ = started(2, "row_wise", seed=1)
        batches = train(cell, model, optimizer, range(2))
        record = count_lookups(batches, model)
        before = gathered(model)
        with pytest.raises(ValueError, match="rank"):
            remove_untouched(model, record=record if dist.get_rank() else None)
        record["user"] = record["user"] + dist.get_rank()
        with pytest.raises(ValueError, match="rows read by the record"):
            remove_untouched(model, record=record)
        with pytest.raises(ValueError, match="trust_record"):
            remove_untouched(model, optimizer, trust_record=bool(dist.get_rank()))
        assert all(torch.equal(before[name], each) for name, each in gathered(model).items())

    def test_a_trained_row_of_one_rank(self) -> None:
        cell, model, optimizer, _ = started(2, "row_wise", seed=1)
        train(cell, model, optimizer, range(2))
        for kernel in kernels(model):
            for states in kernel.emb_module.split_optimizer_states():
                if dist.get_rank() == 1:
                    states[0].zero_()
        before = gathered(model)
        with pytest.raises(ValueError, match="Nothing shows that the record covers"):
            remove_untouched(model, optimizer)
        assert all(torch.equal(before[name], each) for name, each in gathered(model).items())

    def test_a_trained_row_of_the_copy_of_one_rank(self) -> None:
        """A model that is not wrapped: each rank has tables of its own."""
        model = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="user", num_embeddings=100, embedding_dim=8, feature_names=["user_id"]
                )
            ]
        )
        optimizer = torch.optim.Adam(model.parameters())
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.embedding_bags["user"].weight[3] -= 1e-4
        lengths = torch.ones(8, dtype=torch.int64)
        ids = KeyedJaggedTensor(["user_id"], torch.arange(20, 28), lengths=lengths)
        model(ids).values().sum().backward()
        optimizer.step()
        before = model.embedding_bags["user"].weight.detach().clone()
        with (
            short_timeout(),
            pytest.raises(ValueError, match=r"rank 1: .*1 of the 92 rows that .* hold"),
        ):
            remove_untouched(model, optimizer)
        assert torch.equal(model.embedding_bags["user"].weight, before)

    def test_a_bad_batch_of_one_rank(self) -> None:
        _, model, _, _ = started(2, "row_wise", seed=1)
        ids = torch.tensor([0, 99 if dist.get_rank() else 1])
        with pytest.raises(ValueError, match=r"rank 1.*the id 99 is out of range"):
            count_lookups([{"user_id": ids}], model)
