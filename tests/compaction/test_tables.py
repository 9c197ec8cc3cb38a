"""Weights of compact tables outside of their own forward: by id, never by row number."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.optim.swa_utils import AveragedModel

from dist_sparse import Advanced, DataNormSparsifier, compact, export, load_served, sparsify
from dist_sparse.compaction.tables import CompactEmbedding
from tests.dist.plugin import on_ranks

ITEMS = torch.arange(60)


class Towers(nn.Module):
    """Users and items that meet in dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(40, 8, mode="sum")
        self.item = nn.Embedding(60, 8)

    def forward(self, user: Tensor) -> Tensor:
        return self.user(user) @ self.item(ITEMS).T

    def top(self, user: Tensor) -> Tensor:
        """The retrieval idiom, which returns ids as long as rows are ids."""
        return (self.user(user) @ self.item.weight.T).topk(3).indices


USERS = torch.arange(40).view(20, 2)


def compacted(**how: Any) -> tuple[Any, torch.optim.Optimizer, Tensor]:
    """A compact model, its optimizer, and the items' table as it was."""
    model: Any = Towers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.8, end=0)
    sparse.step()
    whole = model.item.weight.detach().clone()
    return compact(model, sparse, **how), optimizer, whole


def test_num_embeddings_counts_ids() -> None:
    """The other retrieval idiom scores all ids, also those without a row."""
    model, _, whole = compacted()
    assert model.item.num_embeddings == 60
    torch.testing.assert_close(
        model.item(torch.arange(model.item.num_embeddings)), whole, rtol=0, atol=0
    )


def test_ids_are_integers() -> None:
    """7.9 would be cut to 7."""
    model, _, _ = compacted()
    for table in (model.user, model.item):
        with pytest.raises(ValueError, match=r"Invalid ids of dtype torch\.float32"):
            table(USERS.float())


def test_a_weight_with_a_row_for_each_id_is_refused() -> None:
    """As of a tied output layer, whose rows would be read by row number."""
    model, _, whole = compacted()
    with pytest.raises(
        AttributeError, match="Invalid weight: a CompactEmbedding stores 12 of 60 rows"
    ):
        model.item.weight = nn.Parameter(whole)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_reads_weight_raises(compiled: bool) -> None:
    model, _, whole = compacted()
    top = torch.compile(model.top, backend="eager") if compiled else model.top
    with pytest.raises(
        AttributeError,
        match=r"CompactEmbedding has no weight: it stores 12 of 60 rows.* Read full_weight\(\)",
    ):
        top(USERS)
    assert not hasattr(model.item, "weight")
    with pytest.raises(AttributeError, match=r"A CompactEmbeddingBag has no weight"):
        nn.functional.linear(torch.ones(1, 8), model.user.weight)
    scores = model.user(USERS) @ model.item.full_weight().T
    assert torch.equal(scores, model.user(USERS) @ whole.T)
    assert torch.equal(scores.topk(3).indices, (model.user(USERS) @ whole.T).topk(3).indices)


@pytest.mark.parametrize("sparse", [False, True])
def test_full_weight(sparse: bool) -> None:
    """Gradients reach the kept rows, for which the optimizer steps as it does for the whole
    table."""
    table, kept = nn.Embedding(50, 4, sparse=sparse), torch.rand(50) < 0.3
    table.weight.data[~kept] = 0
    model: Any = nn.Sequential(table)
    sparsifier = DataNormSparsifier(
        sparsity_level=float((~kept).float().mean()), sparse_block_shape=(1, "ROW")
    )
    sparsifier.add_model(model)
    sparsifier.step()
    weighted, weight = torch.randn(50, 4), table.weight.detach().clone().requires_grad_()
    compact(model, sparsifier, optimizer=())
    full = model[0].full_weight()
    assert torch.equal(full, weight) and full.dtype == torch.float32
    (full * weighted).sum().backward()
    (weight * weighted).sum().backward()
    assert weight.grad is not None and torch.equal(model[0].stored_weight.grad, weight.grad[kept])
    assert model[0].half().full_weight().dtype == torch.float16


def test_full_weight_with_a_default_row_and_with_nothing_left() -> None:
    model, _, whole = compacted(removed="default_row")
    model.item.stored_weight.data[-1] = 7.0
    removed = ~whole.any(1)
    full = model.item.full_weight()
    assert bool((full[removed] == 7).all()) and torch.equal(full[~removed], whole[~removed])
    full.sum().backward()
    assert model.item.stored_weight.grad[-1].tolist() == [float(removed.sum())] * 8
    empty: Any = nn.Sequential(nn.Embedding(20, 4))
    sparsifier = DataNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(empty)
    sparsifier.step()
    assert not compact(empty, sparsifier, optimizer=())[0].full_weight().any()  # type: ignore[index]


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def averaged(model: nn.Module) -> Any:
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    return average.module


def loaded(model: nn.Module, assign: bool = False) -> Any:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(model.state_dict(), assign=assign)
    return other


def through_dcp(model: nn.Module) -> Any:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    set_model_state_dict(other, get_model_state_dict(model))
    return other


def called(model: nn.Module) -> Any:
    return lambda users: torch.func.functional_call(model, dict(model.named_parameters()), (users,))


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "average": averaged,
    "state_dict": loaded,
    "state_dict, assigned": lambda model: loaded(model, assign=True),
    "torch.distributed.checkpoint": through_dcp,
    "functional_call": called,
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True, dynamic=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_torch_reads_it_by_name(name: str) -> None:
    model, _, _ = compacted()
    assert torch.equal(COPIES[name](model)(USERS), model(USERS))


def test_parameters_are_found_by_name(tmp_path: Path) -> None:
    model, optimizer, whole = compacted()
    named = dict(model.named_parameters())
    assert model.get_parameter("item.stored_weight") is named["item.stored_weight"]
    assert model.item.stored_weight.shape == (12, 8)
    state, of_optimizer = get_state_dict(model, optimizer)
    assert {"item.stored_weight", "user.stored_weight"} <= set(state)
    assert of_optimizer["state"]["item.stored_weight"]["sum"].shape == (12, 8)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    export(model, None, tmp_path / "served")
    served = load_served(tmp_path / "served")
    assert torch.equal(served["item"](ITEMS), whole)  # type: ignore[operator]


@on_ranks(2)
def test_under_ddp() -> None:
    torch.manual_seed(0)
    model, _, _ = compacted()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = model.item.stored_weight.detach().clone()
    loss = ddp(USERS[torch.distributed.get_rank() :: 2]).square().mean()
    (loss + model.item.full_weight().sum()).backward()
    optimizer.step()
    others = [torch.empty_like(before) for _ in range(2)]
    torch.distributed.all_gather(others, model.item.stored_weight.detach())
    assert torch.equal(others[0], others[1]) and not torch.equal(others[0], before)


def test_sparsified_again() -> None:
    model, optimizer, _ = compacted()
    sparse = sparsify(model, optimizer, level=0.5, end=0, advanced=Advanced(min_rows=1))
    sparse.step()
    wanted = model(USERS)
    compact(model, sparse)
    assert type(model.item) is CompactEmbedding and model.item.stored_weight.shape == (6, 8)
    assert torch.equal(model(USERS), wanted) and int(model.item.full_weight().any(1).sum()) == 6


def test_lists_of_old_parameters_raise() -> None:
    """What was made before compact(): a list for L2 and clipping, another optimizer, the old
    module."""
    model: Any = Towers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    listed, other, table = (
        list(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.item,
    )
    sparse = sparsify(model, optimizer, level=0.8, end=0)
    sparse.step()
    compact(model, sparse)
    stale: list[Callable[[], Any]] = [
        lambda: sum(parameter.square().sum() for parameter in listed),
        lambda: nn.utils.clip_grad_norm_(listed, 1.0),
        lambda: torch.norm(listed[0]),
        lambda: listed[1].data,
        lambda: listed[1].add_(1),
        lambda: torch._foreach_lerp_(listed, listed, 0.1),
        other.step,
        other.zero_grad,
        lambda: table(ITEMS),
        table.state_dict,
        lambda: copy.deepcopy(listed[0]),
    ]
    for use in stale:
        with pytest.raises(
            RuntimeError,
            match=r"The table (user|item)\.weight was compacted, and its memory released",
        ):
            use()
    assert (
        "was compacted" in repr(listed)
        and len({*listed}) == 2
        and isinstance(listed[0], nn.Parameter)
    )
    model(USERS).sum().backward()
    optimizer.step()
