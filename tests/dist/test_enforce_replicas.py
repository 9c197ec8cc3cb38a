"""Pruned weights that plain optimizers step stay zero in every forward on every rank; replicas stay
equal.

DDP, data-parallel and dense-kernel tables of TorchRec, and sharded tensors with optimizers of their
own. The reference trains the same on the same ranks with the masks of the same moments:
``w.mul_(mask)`` after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import DataNormSparsifier, MaskEnforcer, sparsify
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import batch, build, cells
from tests.dist.pieces import by_rows, local_tensors, sharded
from tests.dist.plugin import on_ranks
from tests.keywords import nested

WORLD = 2
STEPS = 20
LEVELS = {4: 0.7, 8: 0.2, 12: 0.9, 16: 0.6}
"""Levels by the step after which the masks move."""

Masks = dict[str, list[Tensor]]


class Net(nn.Module):
    """Two tables and dense parameters; ``over`` comes last."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(23, 8, sparse=sparse)
        self.emb = nn.Embedding(17, 8, sparse=sparse)
        self.over = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.bag(ids) * self.emb(ids % 17).sum(1)).square().sum()


@dataclass(frozen=True)
class Case:
    """What trains, and how.

    Args:
        make: the model.
        optimizers: its optimizers, given the model.
        feed: the batch of this rank, by step.
        dense: whether its dense parameters are registered too.
        inside: whether the module inside DDP is registered in its place.
    """

    make: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], Sequence[Any]]
    feed: Callable[[int], Any]
    dense: bool = False
    inside: bool = False


def ids_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * WORLD + dist.get_rank())
    return torch.randint(0, 23, (4, 2), generator=generator)


def ddp(kind: Any, sparse: bool = False, one: bool = False, **kwargs: Any) -> Case:
    """``kind`` for the tables, and for all if it is the one optimizer."""

    def optimizers(model: nn.Module) -> list[Any]:
        net = model.module
        if one:
            return [kind(net.parameters())]
        return [kind([net.bag.weight, net.emb.weight]), optim.Adam(net.over.parameters(), lr=0.1)]

    return Case(lambda: DistributedDataParallel(Net(sparse)), optimizers, ids_of, **kwargs)


def torchrec(name: str, kind: Any) -> Case:
    cell = cells(WORLD)[name]

    def optimizers(model: nn.Module) -> list[Any]:
        assert isinstance(model, DistributedModelParallel)
        stepped = dict(in_backward_optimizer_filter(model.named_parameters()))
        return [CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(stepped, kind)])]

    return Case(
        partial(build, cell), optimizers, lambda step: batch(cell, step * WORLD + dist.get_rank())
    )


SGD = partial(optim.SGD, lr=0.1)
CASES = {
    "ddp_sgd": ddp(SGD),
    "ddp_momentum_all": ddp(partial(optim.SGD, lr=0.05, momentum=0.9), one=True, dense=True),
    "ddp_adam_inside": ddp(partial(optim.Adam, lr=0.1), one=True, inside=True),
    "ddp_rowwise": ddp(partial(RowWiseAdagrad, lr=0.1)),
    "ddp_sparse_sgd": ddp(SGD, True),
    "ddp_sparse_momentum": ddp(partial(optim.SGD, lr=0.05, momentum=0.9), True),
    "ddp_sparse_adam": ddp(partial(optim.SparseAdam, lr=0.1), True),
    "ddp_sparse_adagrad_inside": ddp(partial(optim.Adagrad, lr=0.1), True, inside=True),
    "row_wise_sgd": torchrec("row_wise_dense_kernel", SGD),
    "row_wise_adam": torchrec("row_wise_dense_kernel", partial(optim.Adam, lr=0.1)),
    "data_parallel_sgd": torchrec("data_parallel", SGD),
    "data_parallel_adam": torchrec("data_parallel", partial(optim.Adam, lr=0.1)),
    "data_parallel_fp16": torchrec("data_parallel_fp16", SGD),
}


def pieces(model: nn.Module, dense: bool) -> dict[str, list[Tensor]]:
    """The live weights of this rank by name."""
    return {
        data.name: [shard.tensor for shard in data.shards]
        for data in ModelTables(model, dense=dense or None).locate()
    }


def masks_of(sparsifier: DataNormSparsifier, names: Iterable[str]) -> Masks:
    """Of this rank's shards."""
    return {name: [mask for _, mask in sparsifier.local_masks(name)] for name in names}


def live(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a parameter."""
    return tensor.data.to_local() if isinstance(tensor, DTensor) else tensor.data


def check_zero(weights: dict[str, list[Tensor]], masks: Masks) -> int:
    """Every removed weight is zero. How many are removed."""
    for name, of_table in masks.items():
        for weight, mask in zip(weights[name], of_table, strict=True):
            assert bool((weight[mask == 0] == 0).all()), name
    return sum(int((mask == 0).sum()) for of_table in masks.values() for mask in of_table)


def same_on_all(value: Any) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert everyone[1:] == everyone[:-1]


def bits(tensors: Sequence[Tensor]) -> list[Any]:
    return [tensor.detach().contiguous().view(torch.uint8).tolist() for tensor in tensors]


def train(
    case: Case, model: nn.Module, optimizers: Sequence[Any], after_step: Callable[[int], None]
) -> None:
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(case.feed(step)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        after_step(step)


@on_ranks(WORLD)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str) -> None:
    """One model with an enforcer and its reference, step by step."""
    case = CASES[name]
    model, reference = case.make(), case.make()
    registered = model.module if case.inside else model
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4), norm="L2")
    names = sparsifier.add_model(registered, dense=case.dense or None)
    sparsifier.step()
    replicated = {data.name for data in ModelTables(model).locate() if data.replicated}
    history: list[Masks] = []
    seen: list[int] = []

    def before_last(*_: Any) -> None:
        seen.append(check_zero(pieces(model, case.dense), history[-1]))

    def after_step(step: int) -> None:
        check_zero(pieces(model, case.dense), history[-1])
        if step in LEVELS:
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = LEVELS[step]
            sparsifier.step()
        history.append(masks_of(sparsifier, names))

    history.append(masks_of(sparsifier, names))
    optimizers = case.optimizers(model)
    handle = next(
        m for n, m in model.named_modules() if n.endswith("over")
    ).register_forward_pre_hook(before_last)
    with MaskEnforcer(sparsifier).attach(*optimizers):
        train(case, model, optimizers, after_step)
    handle.remove()
    assert len(seen) == STEPS and len(set(seen)) > 2, "masks have moved"
    found = pieces(model, case.dense)
    assert check_zero(found, history[-1]) > 0
    for table in names:
        if table in replicated or case.inside:
            same_on_all((bits(found[table]), bits(history[-1][table])))
    same_on_all(sparsifier.fingerprint())

    def multiply(masks: Masks) -> None:
        weights = pieces(reference, case.dense)
        for name, of_table in masks.items():
            for weight, mask in zip(weights[name], of_table, strict=True):
                weight.mul_(mask)

    multiply(history[0])
    others = case.optimizers(reference)
    train(
        case, reference, others, lambda step: (multiply(history[step]), multiply(history[step + 1]))
    )
    for table, of_table in pieces(reference, case.dense).items():
        assert all(torch.equal(a, b) for a, b in zip(found[table], of_table, strict=True)), table


def trained_tensor(kind: str, full: Tensor) -> tuple[Any, nn.Parameter]:
    """Something to register, and the parameter that an optimizer has of it."""
    if kind == "sharded_tensor":
        tensor = sharded(full, by_rows(*full.shape, 5))
        return tensor, nn.Parameter(tensor.local_shards()[0].tensor)
    placements = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}[kind]
    made = nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (WORLD,)), [placements]))
    return made, made


@on_ranks(WORLD)
@pytest.mark.parametrize("kind", ["rows", "columns", "replicas", "sharded_tensor"])
def test_tensors(kind: str) -> None:
    """Data registered by itself has no known forward: it is masked right after each step."""
    for make in (SGD, partial(optim.Adam, lr=0.1), partial(optim.SGD, lr=0.1, momentum=0.9)):
        full = torch.randn(13, 8, generator=torch.Generator().manual_seed(3))
        (data, parameter), (_, other) = trained_tensor(kind, full), trained_tensor(kind, full)
        sparsifier = DataNormSparsifier(
            [("data", data)], sparsity_level=0.5, sparse_block_shape=(2, 4)
        )
        sparsifier.step()
        optimizer, unmasked = make([parameter]), make([other])
        with MaskEnforcer(sparsifier).attach(optimizer):
            for step in range(STEPS):
                live(other).mul_(masks_of(sparsifier, ["data"])["data"][0])
                check_zero(
                    {"data": [local for _, local in local_tensors(data)]},
                    masks_of(sparsifier, ["data"]),
                )
                for p, o in ((parameter, optimizer), (other, unmasked)):
                    o.zero_grad()
                    (p - 0.5).square().sum().backward()
                    o.step()
                live(other).mul_(masks_of(sparsifier, ["data"])["data"][0])
                assert torch.equal(live(parameter), live(other))
                if step in LEVELS:
                    sparsifier.data_groups["data"]["sparsity_level"] = LEVELS[step]
                    sparsifier.step()
        gone = masks_of(sparsifier, ["data"])["data"][0] == 0
        counts = torch.stack([gone.sum(), (live(parameter) != 0).sum()])
        dist.all_reduce(counts)
        assert counts.min() > 0
        if kind == "replicas":
            same_on_all((bits([live(parameter)]), bits(masks_of(sparsifier, ["data"])["data"])))
        same_on_all(sparsifier.fingerprint())


@on_ranks(WORLD)
def test_unstepped() -> None:
    """A parameter that no optimizer steps is named before training, as others are."""
    data, _ = trained_tensor("rows", torch.randn(13, 8))
    sparsifier = DataNormSparsifier([("data", data)], sparse_block_shape=(2, 4))
    sparsifier.step()
    with pytest.raises(ValueError, match="None of the given optimizers steps 'data'"):
        MaskEnforcer(sparsifier).attach()


@on_ranks(WORLD)
def test_one_call() -> None:
    """All of it by sparsify(), resumed from each rank's state."""
    cell = cells(WORLD)["data_parallel"]
    plan: dict[str, Any] = {"level": 0.6, "end": 9, "every": 3, "block": (1, 4), "min_rows": 0}
    whole = Case(
        partial(build, cell),
        CASES["data_parallel_adam"].optimizers,
        CASES["data_parallel_adam"].feed,
    )
    model, again = whole.make(), whole.make()
    optimizers = whole.optimizers(model)
    training = sparsify(model, optimizers, **nested(**plan))
    states: list[Any] = []

    def after_step(step: int) -> None:
        training.step()
        if step == 5:
            states.append(training.state_dict())

    train(whole, model, optimizers, after_step)
    same_on_all(bits([tensor for of_table in pieces(model, False).values() for tensor in of_table]))
    for stats in training.sparsifier.table_stats():
        assert stats.removed_blocks == round(0.6 * (stats.shape[0] * stats.shape[1] // 4)), stats
    resumed = sparsify(again, whole.optimizers(again), **nested(**plan))
    resumed.load_state_dict(states[0])
    assert resumed.scheduler.last_epoch == 6
    rank = dist.get_rank()
    faults: list[dict[str, Any]] = [
        {"norm": "L3"},
        {"level": 2},
        {"schedule": 5},
        {"include": 3},
        {"block": 3},
    ]
    faults += [{"optimizer_state": "bad"}, {"every": "a"}, {"schedule": lambda sparsifier: None}]
    for wrong in faults:
        with pytest.raises(ValueError, match="rank 1"):
            sparsify(
                again, whole.optimizers(again), **nested(**(plan | wrong if rank == 1 else plan))
            )
    for junk in (None, {}, {**states[0], "schedule": 5}):
        with pytest.raises(ValueError, match="rank 1: "):
            resumed.load_state_dict(junk if rank == 1 else states[0])
    check_zero(pieces(again, False), masks_of(resumed.sparsifier, pieces(again, False)))
