"""Checks of many offsets, as of the batches of a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_sparse.tables.jagged import offsets_fit

MANY = 100_000


class Made(TorchDispatchMode):
    """The bytes of all results that are not views."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
            self.nbytes += sum(each.nbytes for each in tensors)
        return found


def test_many_offsets_are_compared_in_a_byte_each() -> None:
    """New memory takes longer than the comparison."""
    offsets = torch.arange(MANY)
    with Made() as made:
        assert offsets_fit(offsets, MANY - 1)
    assert made.nbytes < 2 * MANY


@pytest.mark.parametrize("count", [3, 100, 8192, 8193, MANY])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_any_number(count: int, dtype: torch.dtype) -> None:
    for fit in (offsets_fit, torch.jit.script(offsets_fit)):
        offsets = torch.arange(count, dtype=dtype)
        assert fit(offsets, count - 1)
        assert not fit(offsets, count)
        assert not fit(offsets + 1, count)
        offsets[count // 2] = torch.iinfo(dtype).max
        assert not fit(offsets, count - 1)
        offsets[count // 2] = -1
        assert not fit(offsets, count - 1)
