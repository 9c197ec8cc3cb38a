"""OptimScheduler trains a DistributedModelParallel as one process trains the plain model.

With fused tables, which keep their own optimizer, and with data-parallel ones, which it steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from dist_sparse import CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from dist_sparse.extras.optim import Noamlr, OptimScheduler
from tests.dist.cells import Cell, Net, batch, build, cells, gathered, plain, set_weights, weights
from tests.dist.plugin import on_ranks
from tests.extras.optim.optim_loop import Steady
from tests.extras.optim.test_optim_ranks import refuses

WORLD, STEPS, LR = 2, 6, 0.02
OVER, BOTH = ("weight", "bias"), ["sparse", "over"]


def losses_of(model: nn.Module, cell: Cell, seed: int) -> dict[str, Tensor]:
    y = model(batch(cell, seed))
    return {"loss": y.square().mean(), "other": (y - 1).abs().mean()}


def held(model: nn.Module) -> dict[str, Tensor]:
    """All weights, the same names for a sharded and for a plain model. Collective if it is
    sharded."""
    state = model.state_dict()
    over = {
        f"over.{name}": state[next(key for key in state if key.endswith(f"over.{name}"))]
        for name in OVER
    }
    if isinstance(model, Net):
        tables = {
            name: bag.weight.detach() for name, bag in model.sparse.tables.embedding_bags.items()
        }
    else:
        tables = gathered(model)
    return {name: value.clone() for name, value in {**tables, **over}.items()}


def dense(name: str) -> Cell:
    return replace(cells(WORLD)[name], fused=False)


def trained(
    model: nn.Module, cell: Cell, schedulers: list[Any], context: bool = True, first: int = 1
) -> None:
    """Three steps an epoch."""
    for step_num in range(first, STEPS + 1):
        epoch = 1 + (step_num - 1) // 3
        seed = WORLD * step_num + dist.get_rank()
        if context:
            with schedulers[0].forward_context(step_num, epoch):
                losses = losses_of(model, cell, seed)
        else:
            losses = losses_of(model, cell, seed)
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, epoch)


def reference(cell: Cell, parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One process with the batches of all ranks. ``parts``: modules, loss, accum, clip, rate."""
    torch.manual_seed(0)
    model = plain(cell)
    groups = [
        [p for name in part["modules"] for p in model.get_submodule(name).parameters()]
        for part in parts
    ]
    sums: list[list[Tensor]] = [[torch.zeros_like(p) for p in group] for group in groups]
    for step_num in range(1, STEPS + 1):
        seen = [losses_of(model, cell, WORLD * step_num + rank) for rank in range(WORLD)]
        for part, group, kept in zip(parts, groups, sums, strict=True):
            loss = sum(losses[part.get("loss", "loss")] for losses in seen) / (
                WORLD * part.get("accum", 1)
            )
            grads = torch.autograd.grad(loss, group, retain_graph=True, allow_unused=True)
            kept[:] = [k if g is None else k + g for k, g in zip(kept, grads, strict=True)]
        for part, group, kept in zip(parts, groups, sums, strict=True):
            if step_num % part.get("accum", 1) == 0:
                norm = float(
                    torch.stack([k.norm(part.get("p", 2.0)) for k in kept]).norm(part.get("p", 2.0))
                )
                factor = min(1.0, part.get("clip", math.inf) / (norm + 1e-6))
                real_step = (step_num - 1) // part.get("accum", 1) + 1
                lr = part["rate"](real_step) if "rate" in part else LR
                with torch.no_grad():
                    for parameter, grad in zip(group, kept, strict=True):
                        parameter -= lr * factor * grad
                kept[:] = [torch.zeros_like(k) for k in kept]
    return held(model)


def check_close(
    got: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]
) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=1e-5), (
            name,
            (got[name] - value).abs().max(),
        )
    untrained = [name for name, value in wanted.items() if torch.equal(value, start[name])]
    assert untrained in ([], [f"over.{name}" for name in OVER])


def check_dense(case: tuple[dict[str, Any], list[dict[str, Any]], bool]) -> None:
    """Data-parallel tables are parameters as any others."""
    conf, parts, together = case
    cell = dense("data_parallel")
    model = build(cell)
    start = held(model)
    schedulers = [
        Steady(
            "SGD",
            {"lr": LR},
            model,
            distributed=True,
            updated_modules=None if together else part["modules"],
            grad_clip=part.get("clip"),
            accum_grad=part.get("accum", 1),
            grad_norm_type=part.get("p", 2.0),
            scale=128.0,
            **{"use_amp": False, **conf},
        )
        for part in parts
    ]
    trained(model, cell, schedulers, context=not conf.get("use_amp"))
    check_close(held(model), reference(cell, parts), start)
    if schedulers[0].accum_grad > 1:
        parts_of = (
            part
            for module in model.modules()
            for part in (module, *getattr(module, "_lookups", ()))
        )
        averaging = [part for part in parts_of if isinstance(part, DistributedDataParallel)]
        with schedulers[0].forward_context(STEPS + 1):
            assert not any(part.require_backward_grad_sync for part in averaging)
    for scheduler in schedulers:
        if (scaler := scheduler.scaler) is not None:
            assert (scaler.get_scale(), scaler._get_growth_tracker()) == (
                128.0,
                STEPS // scheduler.accum_grad,
            )


def check_dense_losses(_: None) -> None:
    """Gradients of TorchRec's tables can't be taken one loss at a time, with a static graph of
    DDP's or without."""
    cell = dense("data_parallel")
    torch.manual_seed(0)
    net, sharder = Net(cell), EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        net.sparse.tables,
        dict(cell.plan),
        sharder=sharder,
        local_size=WORLD,
        world_size=WORLD,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse.tables": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    set_weights(model, weights(cell))
    conf: dict[str, Any] = {"distributed": True, "use_amp": False, "grad_clip": None}
    tables = Steady("SGD", {"lr": LR}, model, updated_modules="sparse", **conf)
    over = Steady("SGD", {"lr": LR}, model, updated_modules="over", optim_loss="other", **conf)
    before = held(model)
    for scheduler in (over, tables):
        losses = losses_of(model, cell, dist.get_rank())
        refuses("Give them the same loss tensor", partial(scheduler.step, losses, None, "a", 1, 1))
    assert all(torch.equal(value, before[key]) for key, value in held(model).items())
    over = Steady("SGD", {"lr": LR}, model, updated_modules="over", **conf)
    trained(model, cell, [tables, over], context=False)
    check_close(held(model), reference(cell, [{"modules": BOTH}]), before)


def noam(model: nn.Module, **conf: Any) -> Noamlr:
    return Noamlr(
        "SGD", {"lr": 2 * LR}, model, distributed=True, use_amp=False, warmup_steps=3, **conf
    )


def noam_rate(real_step: int) -> float:
    return 2 * LR * 3**0.5 * min(real_step**-0.5, real_step * 3**-1.5)


def check_fused(name: str) -> None:
    """The tables keep their learning rate; the layer has that of the scheduler, and is clipped."""
    cell = cells(WORLD)[name]
    model = build(cell, torch.optim.SGD, {"lr": LR})
    start = held(model)
    trained(model, cell, [noam(model, updated_modules="over", grad_clip=0.1)])
    over = {"modules": ["over"], "clip": 0.1, "rate": noam_rate}
    check_close(held(model), reference(cell, [{"modules": ["sparse"]}, over]), start)


def check_fused_refused(_: None) -> None:
    cell = cells(WORLD)["row_wise"]
    model = build(cell, torch.optim.SGD, {"lr": 0.5})
    make = partial(Steady, "SGD", {"lr": 0.1}, model, distributed=True)
    for said, conf in [
        ("amp_dtype=torch.bfloat16", {}),
        ("Invalid accum_grad=2", {"use_amp": False, "accum_grad": 2}),
        ("or only fused tables", {"use_amp": False, "updated_modules": "sparse"}),
        (
            "name the collection, 'sparse.tables'",
            {"updated_modules": "sparse.tables.embedding_bags.user"},
        ),
    ]:
        refuses(said, partial(make, **conf))
    unfused = build(dense("row_wise"))
    refuses(
        "are sharded and have a dense kernel",
        partial(Steady, "SGD", {"lr": 0.1}, unfused, updated_modules="over"),
    )


def check_bfloat16(_: None) -> None:
    cell = cells(WORLD)["row_wise"]
    model = build(cell, torch.optim.SGD, {"lr": 0.1})
    before = held(model)
    scheduler = Steady("SGD", {"lr": 0.1}, model, distributed=True, amp_dtype=torch.bfloat16)
    assert scheduler.scaler is None
    trained(model, cell, [scheduler])
    assert not any(torch.equal(held(model)[name], value) for name, value in before.items())


def sparse(model: nn.Module, **conf: Any) -> tuple[OptimScheduler, MaskEnforcer]:
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4), norm="L2")
    sparsifier.add_model(model, include=["user", "item", "word"])
    curve = CubicDataScheduler(sparsifier, "sparsity_level", final=0.5, begin=1, end=4, every=1)
    scheduler = noam(model, data_sparsifier=sparsifier, data_scheduler=curve, **conf)
    fused = bool(model.fused_optimizer.params)
    optimizers = [scheduler.optimizer, model.fused_optimizer] if fused else [scheduler.optimizer]
    return scheduler, MaskEnforcer(sparsifier).attach(*optimizers)


def check_sparsity(case: tuple[str, bool]) -> None:
    """Masks move with the real steps; what is removed stays so; a state brings it all back."""
    name, fused = case
    cell = cells(WORLD)[name] if fused else dense(name)
    conf: dict[str, Any] = {"grad_clip": 0.5, "updated_modules": "over" if fused else None}
    model, twin = (build(cell, torch.optim.SGD, {"lr": 0.1}) for _ in range(2))
    scheduler, enforcer = sparse(model, **conf)
    trained(model, cell, [scheduler])
    enforcer.settle()
    for key in ("user", "item", "word"):
        assert float((held(model)[key] == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert scheduler.data_scheduler is not None and scheduler.data_scheduler.last_epoch == STEPS
    twin.load_state_dict(model.state_dict())
    other, _ = sparse(twin, **conf)
    state = scheduler.state_dict()
    broken = {k: v for k, v in state.items() if k != "optimizer" or dist.get_rank() == 0}
    lr = other.get_lr()
    refuses(
        "rank 1: ValueError: The state lacks ['optimizer']", partial(other.load_state_dict, broken)
    )
    assert other.get_lr() == lr and other.data_scheduler.last_epoch == 0  # type: ignore[union-attr]
    other.load_state_dict(state)
    for each, its in ((model, scheduler), (twin, other)):
        with its.forward_context(STEPS + 1, 3):
            losses = losses_of(each, cell, 50 + dist.get_rank())
        its.step(losses, None, "a", STEPS + 1, 3)
    one, two = held(model), held(twin)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert scheduler.data_sparsifier.fingerprint() == other.data_sparsifier.fingerprint()  # type: ignore[union-attr]


def dense_cases() -> dict[str, Any]:
    clip = {"modules": BOTH, "clip": 0.1}
    apart = [{"modules": ["sparse"], "clip": 0.1}, {"modules": ["over"], "clip": 0.05}]
    return {
        "clip": ({}, [clip], True),
        "AMP, accum": ({"use_amp": True}, [{**clip, "accum": 3}], True),
        "norm 1": ({}, [{**clip, "p": 1.0}], True),
        "no clip": ({}, [{"modules": BOTH}], True),
        "two": ({}, [{**part, "accum": 2} for part in apart], False),
    }


CASES: dict[str, tuple[Callable[[Any], None], Any]] = {
    **{f"dense: {name}": (check_dense, case) for name, case in dense_cases().items()},
    "dense losses": (check_dense_losses, None),
    **{f"fused: {name}": (check_fused, name) for name in ("row_wise", "table_wise_one_rank")},
    "fused, refused": (check_fused_refused, None),
    "fused, bfloat16": (check_bfloat16, None),
    "sparsity, fused": (check_sparsity, ("row_wise", True)),
    "sparsity, dense": (check_sparsity, ("data_parallel", False)),
}


@on_ranks(WORLD)
@pytest.mark.parametrize("name", CASES)
def test_torchrec(name: str) -> None:
    check, argument = CASES[name]
    check(argument)
