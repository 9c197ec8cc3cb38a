"""What else the package does with tables on the device: states, rotation, weights that plain
optimizers step, compact tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_sparse import COL, DataNormSparsifier, MaskEnforcer, compact
from dist_sparse.checkpoint import storage
from dist_sparse.tables import modules
from dist_sparse.tables.chunked import ChunkedTensor
from tests.extras.device.simulated.account import ACCOUNT
from tests.extras.device.simulated.fake import FakeCudaTensor, counting, cuda, inner
from tests.extras.device.simulated.runs import BLOCKS, Run, on_device

DEVICES = ["cpu", "cuda"]


def leaves(value: Any) -> list[Any]:
    """What a state holds, with tensors in CPU memory; of global tensors, their pieces."""
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, ChunkedTensor):
            found += leaves([leaf.writes, leaf.kept])
        else:
            found.append(inner(leaf))
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same."""
    mine, theirs = leaves(one), leaves(other)
    assert len(mine) == len(theirs) > 0
    for left, right in zip(mine, theirs, strict=True):
        same = torch.equal(left, right) if isinstance(left, Tensor) else left == right
        if not same:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_removed_weights_have_no_optimizer_state(name: str) -> None:
    options: dict[str, Any] = {"optimizer_state": "reset"}
    runs = []
    with on_device():
        for device in DEVICES:
            run = Run(device, BLOCKS[name], enforcer=options)
            run.train(2)
            run.update()
            runs.append(run)
            run.train()
            run.update(0.7)
            run.enforcer.settle()
    assert all(map(torch.equal, runs[0].kernel.sums, runs[1].kernel.sums))
    assert torch.equal(runs[0].kernel.memory, runs[1].kernel.memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_a_state_moves_between_devices(name: str) -> None:
    """What is saved on one is what is saved on the other, and either loads it."""
    states, masks = {}, {}
    with on_device():
        for device in DEVICES:
            run = Run(device, BLOCKS[name], score="frequency")
            run.train(2)
            run.update(0.6)
            states[device], masks[device] = run.sparsifier.state_dict(), run.masks()
        assert equal(states["cpu"], states["cuda"])
        for device in DEVICES:
            other = "cpu" if device == "cuda" else "cuda"
            run = Run(device, BLOCKS[name], score="frequency")
            run.sparsifier.load_state_dict(states[other])
            assert all(map(torch.equal, masks[other], run.masks()))
            # The first forward masks what was loaded.
            run.train()
            run.update()


def test_rotated_tables_are_the_cpus() -> None:
    rotate = pytest.importorskip("dist_sparse.extras.rotation").rotate
    tables = []
    with on_device():
        for device in DEVICES:
            run = Run(device, (COL, 1))
            rotate(run.sparsifier)
            run.update()
            tables.append(run.weights())
    assert all(map(torch.equal, *tables))
    assert any(bool((table == 0).all(0).any()) for table in tables[1])


def embedding(device: str) -> nn.Embedding:
    """A table of torch's own on a device."""
    weight = torch.randn(600, 16, generator=torch.Generator().manual_seed(3))
    table = nn.Embedding(1, 1)
    table.weight = nn.Parameter(cuda(weight) if device == "cuda" else weight)
    return table


def known_type(device: str) -> Any:
    """Weights of other types than Tensor are refused, which that of the device is not to be."""
    return mock.patch.object(modules, "Tensor", FakeCudaTensor if device == "cuda" else Tensor)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("state", ["keep", "reset"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", BLOCKS)
def test_weights_that_plain_optimizers_step_are_the_cpus(name: str, kind: str, state: str) -> None:
    found = {}
    for device in DEVICES:
        with on_device(), known_type(device):
            table = embedding(device)
            optimizer = OPTIMIZERS[kind](table.parameters())
            sparsifier = DataNormSparsifier(None, 0.5, BLOCKS[name], None, "L2")
            sparsifier.add_model(table)
            enforcer = MaskEnforcer(sparsifier, optimizer_state=state).attach(optimizer)
            generator = torch.Generator().manual_seed(5)
            for step in range(4):
                # Autograd has no such device; the optimizers see gradients alone.
                grad = torch.randn(600, 16, generator=generator)
                table.weight.grad = cuda(grad) if device == "cuda" else grad
                optimizer.step()
                if step % 2 == 0:
                    sparsifier.data_groups["weight"]["sparsity_level"] = 0.4 + step / 10
                    sparsifier.step()
            enforcer.detach()
            found[device] = inner(table.weight.data), optimizer.state_dict()["state"]
    assert torch.equal(found["cpu"][0], found["cuda"][0])
    assert equal(found["cpu"][1], found["cuda"][1])


def test_compact_tables_are_the_cpus() -> None:
    found = {}
    for device in DEVICES:
        with on_device(), known_type(device):
            model = nn.ModuleDict({"table": embedding(device)})
            sparsifier = DataNormSparsifier(None, 0.5, BLOCKS["row"], None, "L2")
            sparsifier.add_model(model)
            sparsifier.step()
            small = compact(model, sparsifier, optimizer=())
            found[device] = dict(small.state_dict())
    assert equal(found["cpu"], found["cuda"])


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_is_kept_in_host_memory(device: str) -> None:
    """A third of the weights is removed, and kept so that it can be put back."""
    undo = pytest.importorskip("dist_sparse.extras.guard.undo")
    with on_device():
        run = Run(device, BLOCKS["1x4"])
        run.update(0.3)
        before = run.weights()
        masks = run.sparsifier.masks
        masks.undo = kept = undo.LastUpdate()
        held = ACCOUNT.live
        run.update(0.6)
        # The masks so far, and no weights.
        assert ACCOUNT.live - held < run.kernel.memory.nbytes // 50
        assert not all(map(torch.equal, before, run.weights()))
        kept.undo(masks, masks.tables.locate())
        assert all(map(torch.equal, before, run.weights()))


def test_copies_of_a_checkpoint_come_through_pinned_memory() -> None:
    """In pieces of a fixed size, of which the last one is smaller."""
    values = torch.arange(100, dtype=torch.float32)
    tensors = {"long": values, "empty": values[:0], "columns": values.view(10, 10)[:, :3]}
    with on_device(), mock.patch.object(storage, "_STAGED", 64):
        with counting() as meter:
            found = storage.copied({name: cuda(tensor) for name, tensor in tensors.items()})
        # Of a piece of 16 numbers: its event. Of what is empty or cut by columns: the copy.
        assert meter.spent.waits == 7 + 2, meter.spent.lines
    for name, tensor in tensors.items():
        assert not isinstance(found[name], FakeCudaTensor)
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() != tensor.data_ptr() or not tensor.numel()
