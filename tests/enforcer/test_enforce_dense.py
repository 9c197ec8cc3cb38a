"""Removed weights are zero in every forward of a plain model, whatever optimizer steps it, and
nothing else changes.

The reference trains a copy of the model with the masks of the same moments: ``w.mul_(mask)`` after
each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import DataNormSparsifier, MaskEnforcer
from tests.enforcer.test_enforce_errors import hooks

STEPS = 50
Masks = Mapping[str, Tensor]
Optimizers = Callable[["Net"], Sequence[Any]]


class Net(nn.Module):
    """Two tables, the second of which is read last, and dense parameters of one and two
    dimensions."""

    def __init__(self, sparse: bool = False, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(23, 8, mode="sum", sparse=sparse)
        self.emb = nn.Embedding(17, 8, sparse=sparse, **kwargs)
        self.scale = nn.Parameter(torch.randn(8))
        self.over = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.over(self.bag(ids) * self.scale).tanh()
        return mixed.sum(1) * self.emb(ids % 17).mean((1, 2))

    @property
    def dense(self) -> list[nn.Parameter]:
        return [self.scale, *self.over.parameters()]


def tables(model: Net) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model, config={"emb": {"sparse_block_shape": (3, "ROW")}})
    return sparsifier


def all_of_it(model: Net) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model, dense=True)
    return sparsifier


def plain_data(model: Net) -> DataNormSparsifier:
    """A module, a parameter, a view of one, a 1-D parameter."""
    given = [("bag", model.bag), ("emb", model.emb.weight), ("over/weight", model.over.weight.data)]
    return DataNormSparsifier(given, sparsity_level=0.5, sparse_block_shape=(2, 4))


REGISTER = {"tables": tables, "all_of_it": all_of_it, "plain_data": plain_data}


class Holder:
    """Another library's wrapper."""

    def __init__(self, inner: Any) -> None:
        self._optimizer = inner
        self.zero_grad, self.step = inner.zero_grad, inner.step


def keyed(model: Net, kind: Any, *modules: str) -> KeyedOptimizerWrapper:
    chosen = {name: p for name, p in model.named_parameters() if name.startswith(modules)}
    return KeyedOptimizerWrapper(chosen, lambda params: kind(params, lr=0.1))


def one(kind: Any, **kwargs: Any) -> Optimizers:
    return lambda model: [kind(model.parameters(), **{"lr": 0.1, **kwargs})]


def grouped(model: Net) -> list[Any]:
    tables = {"params": [model.emb.weight, model.bag.weight], "lr": 0.3, "momentum": 0.5}
    return [optim.SGD([{"params": model.dense}, tables], lr=0.1)]


def sparse_and_dense(kind: Any) -> Optimizers:
    """``kind`` for tables with sparse gradients, Adam for the rest."""
    return lambda model: [
        kind([model.bag.weight, model.emb.weight]),
        optim.Adam(model.dense, lr=0.1),
    ]


DENSE: dict[str, Optimizers] = {
    "sgd": one(optim.SGD),
    "momentum": one(optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": one(optim.Adam, amsgrad=True),
    "adam_foreach": one(optim.Adam, foreach=True),
    "adam_fused": one(optim.Adam, fused=True),
    "adamw": one(optim.AdamW),
    "adagrad": one(optim.Adagrad),
    "rmsprop": one(optim.RMSprop, momentum=0.9, centered=True),
    "rowwise": lambda m: [
        RowWiseAdagrad([m.bag.weight, m.emb.weight, m.over.weight]),
        optim.SGD([m.scale, m.over.bias]),
    ],
    "groups": grouped,
    "several": lambda m: [
        optim.Adam(m.bag.parameters()),
        optim.SGD([m.emb.weight], lr=0.1),
        optim.Adam(m.dense),
    ],
    "keyed": lambda m: [keyed(m, optim.Adam, "bag", "emb", "over", "scale")],
    "combined": lambda m: [
        CombinedOptimizer(
            [
                ("a", keyed(m, optim.Adagrad, "bag", "emb")),
                ("b", keyed(m, optim.SGD, "over", "scale")),
            ]
        )
    ],
    "holder": lambda m: [Holder(Holder(optim.AdamW(m.parameters(), lr=0.1)))],
}
SPARSE: dict[str, Optimizers] = {
    "sgd": sparse_and_dense(partial(optim.SGD, lr=0.3)),
    "momentum": sparse_and_dense(partial(optim.SGD, lr=0.3, momentum=0.9)),
    "sparse_adam": sparse_and_dense(partial(optim.SparseAdam, lr=0.1)),
    "adagrad": sparse_and_dense(partial(optim.Adagrad, lr=0.3)),
    "holder": sparse_and_dense(lambda params: Holder(optim.SparseAdam(params, lr=0.1))),
}
LOOPS: dict[str, dict[str, Any]] = {
    "zero_before": {"zero": "before"},
    "zeros_before": {"zero": "before", "set_to_none": False},
    "zeros_after": {"zero": "after", "set_to_none": False},
    "accumulated": {"accumulate": 3},
    "scaled": {"scaled": True},
    "scheduled": {"scheduled": True},
}


def train(
    model: Net,
    optimizers: Sequence[Any],
    after_step: Callable[[int], None],
    *,
    steps: int = STEPS,
    zero: str = "after",
    set_to_none: bool = True,
    accumulate: int = 1,
    scaled: bool = False,
    scheduled: bool = False,
) -> None:
    """A training loop as people write it. Some steps of a scaled one are skipped."""
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
    schedulers = [optim.lr_scheduler.StepLR(o, 5, 0.7) for o in optimizers] if scheduled else []
    generator = torch.Generator().manual_seed(2)

    def zero_grad() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    for step in range(steps):
        if zero == "before":
            zero_grad()
        ids = torch.randint(0, 23, (3, 2), generator=generator)
        loss = model(ids).square().sum() * (torch.inf if scaled and step % 7 == 3 else 1.0)
        scaler.scale(loss).backward()
        if (step + 1) % accumulate == 0:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            if zero == "after":
                zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        after_step(step)


def live(model: Net, sparsifier: DataNormSparsifier) -> dict[str, tuple[Tensor, Tensor]]:
    """The weight and the mask of this moment under each name, as matrices, past all that
    settles."""
    weights = {
        name.removesuffix(".weight") if name[0] in "be" else name: p
        for name, p in model.named_parameters()
    }
    masks = {name: sparsifier.get_mask(name) for name in sparsifier.data_groups}
    return {
        name: (weights[name.replace("/", ".")].data.view_as(mask), mask)
        for name, mask in masks.items()
    }


def check_zero(model: Net, sparsifier: DataNormSparsifier) -> int:
    """Every removed weight is +0.0. How many there are."""
    removed = 0
    for name, (weight, mask) in live(model, sparsifier).items():
        assert bool((weight.view(torch.int32)[mask == 0] == 0).all()), name
        removed += int((mask == 0).sum())
    return removed


@contextmanager
def watched(model: Net, sparsifier: DataNormSparsifier) -> Iterator[list[int]]:
    """Checks inside every forward, when all but the last table have been read. Yields what is
    removed in each."""
    seen: list[int] = []
    handle = model.emb.register_forward_pre_hook(
        lambda *_: seen.append(check_zero(model, sparsifier))
    )
    yield seen
    handle.remove()


def check_training(sparse: bool, register: str, make: Optimizers, **loop: Any) -> None:
    """Masks grow, shrink and grow again; the reference has the same."""
    model = Net(sparse)
    reference = copy.deepcopy(model)
    sparsifier = REGISTER[register](model)
    sparsifier.step()
    history: list[Masks] = []

    def note() -> None:
        history.append({name: mask.clone() for name, (_, mask) in live(model, sparsifier).items()})

    def after_step(step: int) -> None:
        if step % 10 == 5:
            level = (0.7, 0.2, 0.9, 0.0, 0.6)[step // 10]
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = level
            sparsifier.step()
            check_zero(model, sparsifier)
        note()
        if step % 13 == 0:
            for name, (weight, mask) in live(model, sparsifier).items():
                assert torch.equal(sparsifier.get_data(name).detach().view_as(mask), weight * mask)

    note()
    optimizers = make(model)
    with MaskEnforcer(sparsifier).attach(*optimizers), watched(model, sparsifier) as seen:
        train(model, optimizers, after_step, **loop)
    assert len(seen) == STEPS and len(set(seen)) == 6, "masks have moved"

    def multiply(masks: Masks) -> None:
        weights = {name: weight for name, (weight, _) in live(reference, sparsifier).items()}
        for name, mask in masks.items():
            weights[name].mul_(mask)

    multiply(history[0])
    train(
        reference,
        make(reference),
        lambda step: (multiply(history[step]), multiply(history[step + 1])),
        **loop,
    )
    for (name, parameter), other in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.equal(parameter, other), name


@pytest.mark.slow
@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("optimizer", DENSE)
def test_dense_gradients(optimizer: str, register: str) -> None:
    check_training(False, register, DENSE[optimizer])


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("optimizer", SPARSE)
def test_sparse_gradients(optimizer: str, register: str) -> None:
    check_training(True, register, SPARSE[optimizer])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("sparse", "make"), [(False, DENSE["momentum"]), (True, SPARSE["sgd"])], ids=["dense", "sparse"]
)
def test_loops(loop: str, sparse: bool, make: Optimizers) -> None:
    check_training(sparse, "all_of_it" if sparse else "tables", make, **LOOPS[loop])


def attached(
    make: Optimizers,
    sparse: bool = False,
    register: str = "tables",
    state: str = "keep",
    **kwargs: Any,
) -> tuple[Net, DataNormSparsifier, Sequence[Any], MaskEnforcer]:
    model = Net(sparse, **kwargs)
    sparsifier = REGISTER[register](model)
    sparsifier.step()
    optimizers = make(model)
    return model, sparsifier, optimizers, MaskEnforcer(sparsifier, state).attach(*optimizers)


def few(model: Net, optimizers: Sequence[Any], steps: int = 3) -> None:
    train(model, optimizers, lambda step: None, steps=steps)


def test_lbfgs_reads_zeros_inside_its_step() -> None:
    model, sparsifier, (optimizer,), _ = attached(
        one(optim.LBFGS, max_iter=4), register="all_of_it"
    )
    ids = torch.arange(24).view(12, 2) % 23

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        return loss

    with watched(model, sparsifier) as seen:
        for _ in range(5):
            optimizer.step(closure)
            check_zero(model, sparsifier)
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("optimizer", "all_rows"),
    [("sgd", False), ("sparse_adam", False), ("adagrad", False), ("momentum", True)],
)
def test_only_rows_of_a_sparse_gradient_are_masked(optimizer: str, all_rows: bool) -> None:
    """Other rows are not written: a value put there past torch stays. Momentum moves all rows ever
    touched."""
    model, sparsifier, optimizers, enforcer = attached(SPARSE[optimizer], sparse=True)
    ids = torch.tensor([[3, 5], [3, 7]])
    touched = torch.zeros(23, dtype=torch.bool).index_fill_(0, ids.flatten(), True)
    model(ids).sum().backward()
    for weight, mask in live(model, sparsifier).values():
        weight.masked_fill_(mask == 0, 7.0)
    for each in optimizers:
        each.step()
    found = live(model, sparsifier)
    for name, (weight, mask) in found.items():
        rows = touched[: len(mask), None] | torch.tensor(all_rows)
        assert torch.equal(
            weight[mask == 0], torch.where(rows, 0.0, 7.0).expand_as(mask)[mask == 0]
        ), name
    assert bool(((found["bag"][1] == 0) & touched[:, None]).any())
    enforcer.renew()
    check_zero(model, sparsifier)


def test_after_detach_it_trains_as_if_never_attached() -> None:
    for sparse, make in ((False, DENSE["adam"]), (True, SPARSE["sgd"])):
        never = Net(sparse)
        tables(never).step()
        model = copy.deepcopy(never)
        sparsifier = tables(model)
        sparsifier.step()
        optimizers, others = make(model), make(never)
        before = hooks(model, *optimizers)
        enforcer = MaskEnforcer(sparsifier).attach(*optimizers)
        assert hooks(model, *optimizers) != before
        enforcer.detach()
        assert hooks(model, *optimizers) == before and not enforcer.attached
        assert repr(enforcer).endswith(" names, detached)")
        few(model, optimizers)
        few(never, others)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), never.parameters(), strict=True)
        )
        with pytest.raises(AssertionError):
            check_zero(model, sparsifier)
        enforcer.attach(*optimizers)
        check_zero(model, sparsifier)


def test_a_with_block_detaches_on_exceptions_too() -> None:
    model, sparsifier, optimizers, enforcer = attached(DENSE["adam"])
    with pytest.raises(ZeroDivisionError), enforcer:
        few(model, optimizers)
        raise ZeroDivisionError
    assert not enforcer.attached and not any(hooks(model, *optimizers).values())
    check_zero(model, sparsifier)
    assert enforcer.seconds > 0


@pytest.mark.parametrize("register", ["all_of_it", "plain_data"])
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_nothing_and_all(level: float, register: str) -> None:
    model, sparsifier, optimizers, _ = attached(DENSE["adam"], register=register)
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level
    sparsifier.step()
    with watched(model, sparsifier) as seen:
        few(model, optimizers)
    masks = [mask for _, mask in live(model, sparsifier).values()]
    assert seen == [sum(mask.numel() for mask in masks) * int(level)] * 3


@pytest.mark.parametrize("sparse", [False, True])
def test_nan_in_a_removed_weight_becomes_zero(sparse: bool) -> None:
    model, sparsifier, optimizers, _ = attached(SPARSE["sgd"] if sparse else DENSE["adam"], sparse)
    for _ in range(3):
        model(torch.arange(23)[:, None]).sum().backward()
        for p in (model.bag.weight, model.emb.weight):
            (p.grad._values() if sparse else p.grad).fill_(torch.nan)
        for optimizer in optimizers:
            optimizer.step()
        check_zero(model, sparsifier)
        assert bool(model.bag.weight.isnan().any()), "what is kept is the optimizer's"
