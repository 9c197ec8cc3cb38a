"""Orders of calls between a forward, its backward and the next forward that might revive removed
weights.

One process, real TorchRec models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from torchrec import KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer, sparsify
from dist_sparse.enforcer import Wrapped
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import batch, build, cells
from tests.dist.enforcing import read_as_zeros

Block = tuple[int, Any]
BLOCKS: tuple[Block, ...] = ((1, ROW), (1, 4))


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Case:
    """A sharded model with half of its blocks removed, and zeroed: dropped rows are never
    revived."""

    def __init__(
        self, block: Block, cell: str = "mixed", dense: bool = False, exclude: str | None = None
    ) -> None:
        self.cell = cells(1)[cell]
        self.model = build(self.cell, RowWiseAdagrad)
        self.optimizer = torch.optim.SGD(
            [p for n, p in self.model.named_parameters() if "over" in n], lr=0.1
        )
        tables = [p for n, p in self.model.named_parameters() if "tiny" in n]  # data-parallel
        self.tables = torch.optim.SGD(tables, lr=0.1)
        self.sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block)
        self.exclude = exclude
        self.dense = ["*over.weight"] if dense else None
        self.sparsifier.add_model(self.model, exclude=exclude, dense=self.dense)
        self.sparsifier.step()
        read_as_zeros(self.sparsifier)
        self.enforcer = MaskEnforcer(self.sparsifier)

    def attach(self) -> Case:
        self.enforcer.attach(self.optimizer, self.tables)
        return self

    def loss(self, seed: int = 0) -> Tensor:
        return self.model(batch(self.cell, seed=seed, size=40)).square().mean()

    def train(self, seed: int = 0) -> None:
        self.loss(seed).backward()
        for optimizer in (self.optimizer, self.tables):
            optimizer.step()
            optimizer.zero_grad()

    def level(self, level: float) -> None:
        for group in self.sparsifier.data_groups.values():
            group["sparsity_level"] = level
        self.sparsifier.step()

    def alive(self) -> int:
        """Removed weights that are not 0."""
        return sum(int((weight[mask == 0] != 0).sum()) for weight, mask in self.shards())

    def shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The live shards and their masks."""
        for data in ModelTables(self.model, exclude=self.exclude, dense=self.dense).locate():
            for (_, mask), shard in zip(
                self.sparsifier.local_masks(data.name), data.shards, strict=True
            ):
                yield shard.tensor, mask

    def kept(self) -> list[Tensor]:
        return [torch.where(mask != 0, weight, 0.0) for weight, mask in self.shards()]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("level", [0.75, 0.1])
def test_masks_move_between_forward_and_backward(block: Block, level: float) -> None:
    """The backward flags what is newly removed, and what has come back is not zeroed."""
    case = Case(block).attach()
    case.train()
    loss = case.loss()
    case.level(level)
    loss.backward()
    assert case.alive() > 0  # the backward revives something, or nothing is tested
    before = case.kept()
    with torch.no_grad():
        case.loss()
    assert all(torch.equal(now, was) for now, was in zip(case.kept(), before, strict=True))
    case.enforcer.settle()
    assert case.alive() == 0


@pytest.mark.parametrize("block", BLOCKS)
def test_a_load_between_forward_and_backward(block: Block) -> None:
    """Everything is looked up again; the hooks still flag the rows of that backward."""
    case = Case(block).attach()
    case.train()
    state = case.sparsifier.state_dict()
    loss = case.loss()
    case.sparsifier.load_state_dict(state)
    loss.backward()
    assert case.alive() > 0
    case.enforcer.settle()
    assert case.alive() == 0


def test_a_replaced_layer_does_not_keep_tables_dirty() -> None:
    case = Case((1, 4), dense=True).attach()
    case.train()
    case.loss().backward()
    assert case.alive() > 0
    over = case.model.module.over
    over.weight = nn.Parameter(over.weight.detach().clone())  # no optimizer knows it
    case.model.state_dict()
    assert case.alive() == 0
    found = case.model.module.sparse.tables(batch(case.cell, seed=1, size=40))
    sum(pooled.sum() for pooled in found.to_dict().values()).backward()
    assert case.alive() > 0
    case.enforcer.detach()
    assert case.alive() == 0


def test_two_enforcers_of_one_model() -> None:
    """Each with its own tables, of one kernel; detaching one takes nothing from the other."""
    case = Case((1, 4), exclude="word")
    other = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    other.add_model(case.model, include=["word"])
    other.step()
    first, second = case.attach().enforcer, MaskEnforcer(other).attach(case.tables)
    case.train()
    first.detach()
    case.train(1)
    second.settle()
    weight = other.get_data("word")
    assert bool((weight[other.get_mask("word") == 0] == 0).all())
    second.detach()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_wrappers_are_removed_in_any_order(order: tuple[int, int]) -> None:
    class Owner:
        def method(self) -> list[str]:
            return ["method"]

    owner = Owner()

    def around(name: str) -> Callable[..., list[str]]:
        return lambda method: [name, *method()]

    wrappers = [Wrapped(owner, "method", around("a")), Wrapped(owner, "method", around("b"))]
    assert owner.method() == ["b", "a", "method"]
    copied = copy.deepcopy(owner)
    assert copied.method() == ["method"]
    wrappers[order[0]].remove()
    assert owner.method() == (["b", "method"] if order[0] == 0 else ["a", "method"])
    wrappers[order[1]].remove()
    assert owner.method() == ["method"] and "method" not in vars(owner)


def test_ids_in_memory_that_is_used_again() -> None:
    case = Case((1, ROW), "table_wise")
    values = torch.arange(20, dtype=torch.int32)
    features = KeyedJaggedTensor(
        keys=["user_id", "item_id", "last_item_id", "genre", "query"],
        values=values,
        lengths=torch.tensor([20, 0, 0, 0, 0], dtype=torch.int32),
    )
    case.enforcer.attach(case.optimizer)
    loss = case.model(features).sum()
    values.zero_()
    loss.backward()
    assert case.alive() > 0
    case.enforcer.settle()
    assert case.alive() == 0


def test_shards_of_a_model_that_is_not_known_are_refused() -> None:
    """No hook sees FBGEMM's writes to them."""
    case = Case((1, 4), "row_wise")
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4))
    sparsifier.add_data("user", case.model.state_dict()["sparse.tables.embedding_bags.user.weight"])
    with pytest.raises(ValueError, match=r"Can't tell what writes 'user'.*add_model"):
        MaskEnforcer(sparsifier).attach(case.optimizer)


def test_a_forward_that_renormalizes_is_no_false_alarm() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, max_norm=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_model(model)
    sparsifier.step()
    with MaskEnforcer(sparsifier).attach(optimizer):
        ids = torch.arange(10).view(5, 2)
        for _ in range(3):
            model(ids).sum().backward()
        optimizer.step()
        assert bool((model[0].weight[sparsifier.get_mask("0") == 0] == 0).all())


def test_a_refused_step_leaves_optimizer_state_alone() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4))
    optimizer = torch.optim.Adam(model.parameters())
    sparsifier = DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_model(model)
    sparsifier.step()
    MaskEnforcer(sparsifier, "reset").attach(optimizer)
    model(torch.arange(10).view(5, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    kept = sparsifier.get_mask("0") != 0
    model[0].weight.data[kept.nonzero()[0][0], kept.nonzero()[0][1]] = torch.nan
    with pytest.raises(ValueError, match="scores nan"):
        sparsifier.step()
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], before)


def test_rprops_step_size_begins_at_the_learning_rate() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4))
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.03)
    sparsifier = DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_model(model)
    sparsifier.step()
    MaskEnforcer(sparsifier, "reset").attach(optimizer)
    for _ in range(3):
        model(torch.arange(10).view(5, 2)).sum().backward()
        optimizer.step()
    sparsifier.step()
    gone = sparsifier.get_mask("0") == 0
    assert bool((optimizer.state[model[0].weight]["step_size"][gone] == 0.03).all()) and bool(
        gone.any()
    )


def test_a_sparse_gradient_of_a_strided_weight() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 16, sparse=True))
    model[0].weight = nn.Parameter(torch.randn(10, 18)[:, :16])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_model(model)
    sparsifier.step()
    with MaskEnforcer(sparsifier).attach(optimizer):
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        assert bool((model[0].weight[sparsifier.get_mask("0") == 0] == 0).all())


def test_seconds_only_grow_and_leave_the_step_out() -> None:
    case = Case((1, 4)).attach()
    case.train()
    spent = case.enforcer.seconds
    assert spent > 0
    case.level(0.6)
    assert case.enforcer.seconds == spent
    case.enforcer.detach()
    assert case.enforcer.seconds >= spent


def test_a_state_that_lacks_the_schedule_changes_nothing() -> None:
    case = Case((1, 4))
    training = sparsify(case.model, [case.optimizer, case.tables], level=0.5, end=4, every=2)
    state = training.state_dict()
    for _ in range(5):
        training.step()
    before = training.sparsifier.fingerprint()
    for bad in (
        {**state, "schedule": '{"scheduler": {"bad": 1}}'},
        {"schedule": state["schedule"]},
    ):
        with pytest.raises(ValueError, match="state lacks"):
            training.load_state_dict(bad)
        assert training.sparsifier.fingerprint() == before
    training.load_state_dict(state)
    assert training.sparsifier.fingerprint() != before
