"""Paths of modules inside wrappers are those that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dist_sparse.tables.modules import ModelTables


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


def wrapped(model: nn.Module, wrap: Callable[[nn.Module], nn.Module], inside: bool) -> nn.Module:
    """Wrap parts of a model, or the model, twice."""
    if not inside:
        return checkpoint_wrapper(wrap(model))
    for name in ("user", "item"):
        setattr(model, name, wrap(model.get_submodule(name)))
    return model


@pytest.mark.parametrize("inside", [True, False], ids=["a part", "the model"])
@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, compiled, DistributedDataParallel, DataParallel]
)
def test_wrappers_add_nothing_to_paths(
    wrap: Callable[[nn.Module], nn.Module], inside: bool
) -> None:
    model = Towers()
    tables = [model.get_submodule(path).weight for path in ("user.module", "item")]
    located = ModelTables(wrapped(model, wrap, inside)).locate()
    assert [data.fqn for data in located] == ["user.module.weight", "item.weight"]
    for data, table in zip(located, tables, strict=True):
        assert data.shards[0].tensor.data_ptr() == table.data_ptr()
