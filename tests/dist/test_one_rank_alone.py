"""An error on one rank alone, at any allocation of a collective call: all ranks raise it within
seconds, and nothing has changed. What a call may leave is in ``LEFT``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_sparse import (
    ROW,
    Advanced,
    CubicDataScheduler,
    DataNormSparsifier,
    compact,
    expand,
    export,
    plan,
    sparsify,
)
from dist_sparse.groups import world_group
from tests.dist.cells import batch, build, cells, set_weights, weights
from tests.dist.enforcing import optimizer_of
from tests.dist.one_rank import Call, count, held_state, inject, masks_of, positions, short_timeout
from tests.dist.plugin import on_ranks

WORLD = 2
CELL = "mixed"


def sparsified(block: Any = (1, ROW), level: float = 0.5, **options: Any) -> tuple[Any, nn.Module]:
    """A sparsifier after one mask update, and other weights since then."""
    cell = cells(WORLD)[options.pop("cell", CELL)]
    model = build(cell)
    scope = options.pop("scope", "table")
    sparsifier = DataNormSparsifier(
        sparsity_level=level, sparse_block_shape=block, norm="L2", **options
    )
    sparsifier.scope = scope
    sparsifier.add_model(model)
    sparsifier.step()
    set_weights(model, weights(cell, seed=3))
    return sparsifier, model


def of(sparsifier: Any, *others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"masks": masks_of(sparsifier), "others": others}


def step_of(folder: Path, block: Any = (1, ROW), plain: bool = False, **options: Any) -> Call:
    sparsifier, model = sparsified(block, **options)
    if plain:
        sparsifier.add_data("dense", torch.randn(6, 4))
    return Call(sparsifier.step, of(sparsifier, model))


def recorded_step(folder: Path) -> Call:
    sparsifier, model = sparsified()
    sparsifier.record()
    return Call(sparsifier.step, of(sparsifier, model))


def adding(folder: Path) -> Call:
    model = build(cells(WORLD)[CELL])
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    return Call(lambda: sparsifier.add_model(model), of(sparsifier, model))


def inspecting(name: str) -> Callable[[Path], Call]:
    def made(folder: Path) -> Call:
        sparsifier, model = sparsified()
        sparsifier.apply_masks()
        argument = ("user",) if name == "full_mask" else ()
        return Call(lambda: getattr(sparsifier, name)(*argument), of(sparsifier, model))

    return made


def saving(folder: Path) -> Call:
    # Borders of columns cut bytes.
    sparsifier, model = sparsified((1, 1), cell="column_wise_uneven")
    return Call(sparsifier.state_dict, of(sparsifier, model))


def loading(folder: Path) -> Call:
    sparsifier, model = sparsified()
    state = copy.deepcopy(sparsifier.state_dict())
    sparsifier.step()
    return Call(lambda: sparsifier.load_state_dict(state), of(sparsifier, model))


def scheduling(folder: Path) -> Call:
    sparsifier, model = sparsified()
    return Call(
        lambda: CubicDataScheduler(sparsifier, "sparsity_level", final=0.8, begin=1, end=9),
        of(sparsifier, model),
    )


def attaching(folder: Path) -> Call:
    model = build(cells(WORLD)[CELL])
    optimizer = optimizer_of(model)
    return Call(
        lambda: sparsify(
            model, optimizer, level=0.5, begin=1, end=3, every=1, advanced=Advanced(min_rows=0)
        ),
        lambda: {"model": model, "hooks": hooks_of(model)},
    )


def hooks_of(model: nn.Module) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if module._forward_pre_hooks or module._forward_hooks
    ]


def trained() -> tuple[Any, nn.Module, Any]:
    cell = cells(WORLD)[CELL]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparse = sparsify(
        model, optimizer, level=0.5, begin=0, end=8, every=1, advanced=Advanced(min_rows=0)
    )
    train(model, optimizer, cell)
    sparse.step()
    train(model, optimizer, cell)
    sparse.step()
    train(model, optimizer, cell)
    sparse.enforcer.settle()
    return sparse, model, optimizer


def train(model: nn.Module, optimizer: Any, cell: Any) -> None:
    optimizer.zero_grad()
    model(batch(cell, seed=dist.get_rank())).square().mean().backward()
    optimizer.step()


def training_state(sparse: Any, model: nn.Module, optimizer: Any, *others: Any) -> Any:
    return lambda: {
        "masks": masks_of(sparse.sparsifier),
        "schedule": sparse.scheduler.state_dict(),
        "model": model,
        "optimizer": optimizer_states(model),
        "others": others,
    }


def optimizer_states(model: nn.Module) -> Any:
    fused = getattr(model, "fused_optimizer", None)
    return None if fused is None else fused.state_dict()["state"]


def training_step(folder: Path) -> Call:
    sparse, model, optimizer = trained()
    return Call(sparse.step, training_state(sparse, model, optimizer))


def resuming(folder: Path) -> Call:
    sparse, model, optimizer = trained()
    state = copy.deepcopy(sparse.state_dict())
    sparse.step()
    return Call(lambda: sparse.load_state_dict(state), training_state(sparse, model, optimizer))


def compacting(folder: Path, **how: Any) -> Call:
    sparse, model, optimizer = trained()
    return Call(lambda: compact(model, sparse, **how), training_state(sparse, model, optimizer))


def expanding(folder: Path) -> Call:
    sparse, model, _ = trained()
    model = compact(model, sparse)
    return Call(lambda: expand(model, optimizer=()), lambda: {"model": model})


def planning(folder: Path) -> Call:
    cell = cells(WORLD)[CELL]
    model = build(cell)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train(model, optimizer, cell)
    return Call(lambda: plan(model, "20%", optimizer=optimizer), lambda: {"model": model})


def exporting(form: str, delta: bool = False) -> Callable[[Path], Call]:
    def made(folder: Path) -> Call:
        sparsifier, model = sparsified()
        sparsifier.apply_masks()
        made = iter(range(10_000))
        dtype, _, scale = form.partition("/")
        options: dict[str, Any] = {"dtype": dtype, "scale": scale or "row"}
        if delta:
            export(model, sparsifier, folder / "base", **options)
            set_weights(model, weights(cells(WORLD)[CELL], seed=5))
            sparsifier.apply_masks()
            options["since"] = folder / "base"
        (folder / "out").mkdir(exist_ok=True, parents=True)
        return Call(
            lambda: export(model, sparsifier, folder / "out" / str(next(made)), **options),
            of(sparsifier, model, folder / "out"),
        )

    return made

    return made


CALLS: dict[str, Callable[[Path], Call]] = {
    "step, rows": step_of,
    "step, blocks": lambda folder: step_of(folder, (3, 5)),
    "step, elements": lambda folder: step_of(folder, (1, 1)),
    "step, columns": lambda folder: step_of(folder, "col"),
    "step, scope": lambda folder: step_of(folder, scope="global"),
    "step, plain data": lambda folder: step_of(folder, plain=True),
    "step, recorded": recorded_step,
    "add_model": adding,
    "table_stats": inspecting("table_stats"),
    "dead_rows": inspecting("dead_rows"),
    "fingerprint": inspecting("fingerprint"),
    "audit": inspecting("audit"),
    "count_revived": inspecting("count_revived"),
    "full_mask": inspecting("full_mask"),
    "state_dict": saving,
    "load_state_dict": loading,
    "scheduler": scheduling,
    "sparsify": attaching,
    "SparseTraining.step": training_step,
    "SparseTraining.load_state_dict": resuming,
    "compact": compacting,
    "expand": expanding,
    "plan": planning,
    "export, fp32": exporting("fp32"),
    "export, int4 by column": exporting("int4/column"),
    "export, delta": exporting("int8", delta=True),
}


# What a call may leave, as its docstring says: paths of its state.
LEFT = {
    # No model is left if a rank fails while the old tables are released.
    "compact": ".",
    "expand": ".",
    # The folder is complete.
    "export, fp32": "/others/1$",
    "export, int4 by column": "/others/1$",
    "export, delta": "/others/1$",
}

# Positions at which a call fails.
MOST = pytest.mark.parametrize("most", [4, pytest.param(14, marks=pytest.mark.slow)])


def sweep(
    name: str, make: Callable[[Path], Call], folder: Path, most: int, left: str | None
) -> None:
    """Check that the call fails alike on all ranks at some positions.

    Args:
        left: what it may leave: paths of its state.
    """
    bad: list[str] = []
    with short_timeout():
        total = count(make(folder / "counted"))
        call = make(folder / "call")
        for at in positions(total, most):
            found = inject(call, at)
            if left and not found.is_done:
                call = make(folder / f"left{at}")
            if not found.where:
                # The first call fills caches, so that later ones have fewer operations.
                call = make(folder / f"call{at}")
            elif found.is_done:
                # Done again by the rank that failed: with the same result as without the error.
                done = held_state(call)
                call = make(folder / f"done{at}")
                call.run()
                assert done == held_state(call), at
                call = make(folder / f"again{at}")
            elif not found.is_agreed(left):
                bad.append(
                    f"{name} at {at} of {total}, {found.seconds:.1f} s\n raised: {found.raised}\n"
                    f" changed: {found.changed}\n{found.where}"
                )
                world_group().hang_up()
                call = make(folder / f"call{at}")
    assert not bad, "\n".join(bad)


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, LEFT.get(name))


@on_ranks(WORLD)
def test_an_unknown_name_on_one_rank() -> None:
    sparsifier, _ = sparsified()
    with short_timeout(), pytest.raises(ValueError, match="unknown"):
        sparsifier.full_mask("unknown" if dist.get_rank() else "user")


@on_ranks(WORLD)
def test_a_name_of_plain_data_on_one_rank() -> None:
    """Its mask is on each rank: that rank once sent nothing, and the others waited."""
    sparsifier, _ = sparsified()
    sparsifier.add_data("plain", torch.ones(4, 4))
    with short_timeout(), pytest.raises(ValueError, match="rank"):
        sparsifier.full_mask("plain" if dist.get_rank() else "user")
    assert sparsifier.full_mask("plain").shape == (4, 4)
