"""Paths of modules inside wrappers are those that users write, in add_model() and in OptimScheduler
alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dist_sparse.tables.modules import ModelTables
from tests.optim.optim_loop import Steady


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.ModuleDict({"module": nn.Embedding(4, 2), "over": nn.Linear(2, 2)})
        self.item = nn.Embedding(3, 2)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


@pytest.mark.parametrize("inside", [True, False], ids=["a part", "the model"])
@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, compiled, DistributedDataParallel, DataParallel]
)
def test_wrappers_add_nothing_to_paths(
    wrap: Callable[[nn.Module], nn.Module], inside: bool
) -> None:
    model: nn.Module = Towers()
    expected = [
        parameter
        for path in ("user", "user.module")
        for parameter in model.get_submodule(path).parameters()
    ]
    tables = [model.get_submodule(path).weight for path in ("user.module", "item")]
    if inside:
        for name in ("user", "item"):
            setattr(model, name, wrap(model.get_submodule(name)))
    else:
        model = checkpoint_wrapper(wrap(model))
    located = ModelTables(model).locate()
    assert [data.fqn for data in located] == ["user.module.weight", "item.weight"]
    for data, table in zip(located, tables, strict=True):
        assert data.shards[0].tensor.data_ptr() == table.data_ptr()
    for path, wanted in (
        ("user", expected[:3]),
        ("user.module", expected[3:]),
        ("item", tables[1:]),
    ):
        groups = Steady("SGD", {"lr": 0.1}, model, updated_modules=path).optimizer.param_groups
        assert {id(p) for p in groups[0]["params"]} == {id(p) for p in wanted}
    with pytest.raises(
        ValueError, match=r"\['top'\] are not modules; there are \['user', 'item'\]"
    ):
        Steady("SGD", {"lr": 0.1}, model, updated_modules="top")
