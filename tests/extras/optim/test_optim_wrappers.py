"""``updated_modules`` are paths that users write, inside wrappers too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.extras.optim.optim_loop import Steady
from tests.tables.test_wrappers import Towers, alone, compiled, wrapped

__all__ = ["alone"]  # a fixture


@pytest.mark.parametrize("inside", [True, False], ids=["a part", "the model"])
@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, compiled, DistributedDataParallel, DataParallel]
)
def test_wrappers_add_nothing_to_paths(
    wrap: Callable[[nn.Module], nn.Module], inside: bool
) -> None:
    model = Towers()
    users = {id(parameter) for parameter in model.user.parameters()}
    tables = {name: id(model.get_submodule(name).weight) for name in ("user.module", "item")}
    expected = {
        "user": users,
        "user.module": {tables["user.module"]},
        "item": {tables["item"]},
    }
    within = wrapped(model, wrap, inside)
    for path, wanted in expected.items():
        groups = Steady("SGD", {"lr": 0.1}, within, updated_modules=path).optimizer.param_groups
        assert {id(p) for p in groups[0]["params"]} == wanted
    with pytest.raises(
        ValueError, match=r"\['top'\] are not modules; there are \['user', 'item'\]"
    ):
        Steady("SGD", {"lr": 0.1}, within, updated_modules="top")
