"""NCCL where there is none: collectives on tensors of the device, over gloo or a group that is not
there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.extras.device.simulated.account import ACCOUNT
from tests.extras.device.simulated.fake import FakeCudaTensor, inner

__all__ = ["fake_world", "nccl"]

COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "all_to_all_single",
    "broadcast",
)


def _of_nccl(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeCudaTensor):
                raise RuntimeError("No backend type associated with device type cpu")
        ACCOUNT.launch(collective.__name__)
        plain_args, plain_kwargs = pytree.tree_map(inner, (args, kwargs))
        return collective(*plain_args, **plain_kwargs)

    return call


@contextlib.contextmanager
def nccl() -> Iterator[None]:
    """Have every process group say that it is NCCL's, which takes tensors of the device only."""
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            call = _of_nccl(getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, call))
        stack.enter_context(mock.patch.object(dist, "get_backend", lambda group=None: "nccl"))
        config = mock.patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        stack.enter_context(config)
        yield


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 1) -> Iterator[None]:
    """A world of this many ranks, of which only this process exists: shapes and counts are right, but
    nothing that others would have sent arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
