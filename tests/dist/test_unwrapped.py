"""Tables outside DDP in a world of several ranks: a warning, and replicas that drift are found at
the mask update."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import SparseTraining, remove_untouched, sparsify
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.plugin import on_ranks
from tests.keywords import nested

PLAN: dict[str, Any] = {"level": 0.5, "end": 6, "every": 2, "min_rows": 4}


def replicas(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"user": nn.EmbeddingBag(40, 4), "item": nn.EmbeddingBag(30, 4)})


def sparsified(
    model: nn.Module, kind: Any = optim.SGD, **plan: Any
) -> tuple[Any, SparseTraining, list[str]]:
    optimizer = kind(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparse = sparsify(model, optimizer, **nested(**(PLAN | plan)))
    return (
        optimizer,
        sparse,
        [text for each in caught if "DistributedDataParallel" in (text := str(each.message))],
    )


def masks(sparse: SparseTraining) -> list[Any]:
    """Of all ranks."""
    mine = {
        name: sparse.sparsifier.full_mask(name).tolist() for name in sparse.sparsifier.data_groups
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@on_ranks(2)
def test_the_module_inside_ddp_drifts() -> None:
    """Its masks once differed between ranks, without a word."""
    wrapped = DistributedDataParallel(replicas())
    _, sparse, said = sparsified(wrapped.module)
    assert len(said) == (dist.get_rank() == 0)
    for text in said:
        assert text.startswith("The tables user, item are in no DistributedDataParallel")
        assert (
            "of 2 ranks. They are equal on all ranks" in text
            and "sparsify() on the wrapper" in text
        )
    for _ in range(4):
        sparse.step()  # updates masks at steps 0 and 2
    assert masks(sparse)[0] == masks(sparse)[1]
    if dist.get_rank() == 1:
        with torch.no_grad():
            wrapped.module["user"].weight[3] += 1
    before = [weight.clone() for weight in wrapped.parameters()]
    with pytest.raises(
        ValueError,
        match=r"Replicas have drifted from rank 0's: user .* on rank 1\. Nothing was changed",
    ):
        sparse.step()
    assert all(torch.equal(old, new) for old, new in zip(before, wrapped.parameters(), strict=True))
    assert sparse.scheduler.last_epoch == 4
    sparse.detach()


@on_ranks(2)
def test_a_configuration_of_one_rank() -> None:
    _, sparse, _ = sparsified(replicas())
    sparse.sparsifier.data_groups["user"]["zeros_per_block"] = 2 + dist.get_rank()
    with pytest.raises(ValueError, match="the config of table 'user'"):
        sparse.step()
    sparse.detach()


@on_ranks(2)
def test_models_of_each_rank_alone() -> None:
    """They differ from the beginning: one warning, and nothing is compared or sent."""
    _, sparse, said = sparsified(replicas(seed=dist.get_rank()))
    assert len(said) == (dist.get_rank() == 0)
    for text in said:
        assert (
            "differ between ranks (rank 0's item" in text
            and "is not that of rank 1): each rank trains" in text
        )
    reset_traffic()
    for _ in range(7 + dist.get_rank()):  # ranks need not make as many steps
        sparse.step()
    assert traffic().collectives == 0 and sparse.sparsity == 0.5
    sparse.detach()
    assert masks(sparse)[0] != masks(sparse)[1]


@on_ranks(1, 2)
def test_wrapped_models_and_single_processes_are_not_warned_of(world: int) -> None:
    _, sparse, said = sparsified(replicas() if world == 1 else DistributedDataParallel(replicas()))
    assert said == []
    sparse.step()
    reset_traffic()
    sparse.step()
    assert traffic().collectives == 0
    sparse.detach()


@on_ranks(2)
def test_replicas_that_stay_equal_cost_one_message_a_mask_update() -> None:
    _, sparse, _ = sparsified(replicas())
    for due in (1, 0, 1, 0, 1, 0, 1, 0):
        reset_traffic()
        sparse.step()
        assert traffic().collectives == due
    assert masks(sparse)[0] == masks(sparse)[1]
    sparse.detach()


@on_ranks(2)
def test_a_warning_that_is_an_error_leaves_nothing_attached() -> None:
    """Only the first rank warns."""
    model = replicas()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises((ValueError, UserWarning), match="in no DistributedDataParallel"):
            sparsify(model, optim.SGD(model.parameters(), lr=0.1), **nested(**PLAN))
    _, sparse, _ = sparsified(model)
    sparse.detach()


@on_ranks(2)
def test_each_rank_has_removed_rows_of_its_own() -> None:
    """Rank 0's once counted for all."""
    model = nn.EmbeddingBag(100, 8, mode="sum")
    optimizer = optim.Adam(model.parameters())
    read = torch.arange(50) + 50 * dist.get_rank()
    model(read.view(5, 10)).sum().backward()
    optimizer.step()
    removed = remove_untouched(model, optimizer, trust_record=True)
    share = removed.share([{"weight": read}], show_progress=False)
    assert share.removed == {"weight": 0}
