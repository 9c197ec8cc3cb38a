"""Frame for tests of bad input: refused on every rank, within seconds, with nothing changed.

It checks that every rank raises the words of a case, that masks, weights and configs are the same
bit for bit, and that a good step works once the fault is fixed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from dist_sparse import BaseDataSparsifier, DataNormSparsifier
from tests.dist.pieces import (
    Tiling,
    by_cols,
    by_rows,
    gathered,
    local_tensors,
    sharded,
    snapshot,
    write,
)
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask

__all__ = [
    "COLS",
    "COLWISE",
    "ROWS",
    "ROWWISE",
    "Scene",
    "is_bad",
    "on_each_bad_rank",
    "raised_by",
    "replica",
    "weights",
]

# Seconds; the timeout of collectives is much longer (harness.py), so that waiting for it shows.
SOON = 60.0
ROWS, COLS = 9, 12
ROWWISE = by_rows(ROWS, COLS, 4)
COLWISE = by_cols(ROWS, COLS, 5)

Test = TypeVar("Test", bound=Callable[..., None])


def weights(seed: int = 0, rows: int = ROWS, cols: int = COLS) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def is_bad(bad: int) -> bool:
    return dist.get_rank() == bad


def raised_by(call: Callable[[], Any]) -> str:
    """The message of the ValueError that ``call`` raises soon."""
    start = time.monotonic()
    with pytest.raises(ValueError) as raised:
        call()
    seconds = time.monotonic() - start
    assert seconds < SOON, f"after {seconds:.1f} s: {raised.value}"
    return str(raised.value)


@dataclass
class Scene:
    """Tables ``a`` and ``b`` under a sparsifier that has updated its masks once.

    Args:
        tiling: of table ``a``; ``b`` is row-wise.
        config: of the sparsifier.
        kind: of sparsifier.
        extra: more data, by name.
    """

    tiling: Tiling = field(default_factory=lambda: ROWWISE)
    config: Mapping[str, Any] = field(default_factory=dict)
    kind: type[BaseDataSparsifier] = DataNormSparsifier
    extra: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.sparsifier = self.kind(**self.config)
        self.tensors: dict[str, Any] = {
            "a": sharded(weights(0).to(self.dtype), self.tiling),
            "b": sharded(weights(1), ROWWISE),
            **self.extra,
        }
        for name, tensor in self.tensors.items():
            self.sparsifier.add_data(name, tensor)
        self.sparsifier.step()

    def put(self, name: str, row: int, col: int, value: float) -> None:
        """Write one element of a table, if this rank holds it."""
        for (top, left), local in local_tensors(self.tensors[name]):
            if 0 <= row - top < local.shape[0] and 0 <= col - left < local.shape[1]:
                local[row - top, col - left] = value

    def refused(self, *words: str, fix: Callable[[], Any]) -> str:
        """Take a step that must be refused, fix the fault, and take a good one."""
        before = snapshot(self.sparsifier, self.tensors)
        message = raised_by(self.sparsifier.step)
        for word in words:
            assert re.search(word, message), f"{word!r} is not in: {message}"
        assert snapshot(self.sparsifier, self.tensors) == before, "something has changed"
        fix()
        self.good()
        return message

    def good(self) -> None:
        """Write new weights, and update the masks."""
        full = {}
        for seed, (name, tensor) in enumerate(self.tensors.items()):
            write(tensor, weights(10 + seed, *tensor.shape).to(tensor.dtype))
            full[name] = gathered(tensor)
        self.sparsifier.step()
        self.sparsifier.audit()
        if isinstance(self.sparsifier, DataNormSparsifier):
            for name, whole in full.items():
                config = self.sparsifier.data_groups[name]
                level, block, zeros = (
                    config[key]
                    for key in ("sparsity_level", "sparse_block_shape", "zeros_per_block")
                )
                want = oracle_mask(whole, level, block, zeros, self.sparsifier.norm)
                assert torch.equal(self.sparsifier.full_mask(name), want), name


def replica() -> DTensor:
    """A table of which ranks 0 and 1 hold a copy each."""
    return distribute_tensor(
        weights(3), DeviceMesh("cpu", [0, 1]), [Replicate()], src_data_rank=None
    )


def on_each_bad_rank(test: Test) -> Test:
    """Run ``test(bad)`` on two ranks, twice: with rank 0 bad, and with rank 1."""
    return on_ranks(2)(pytest.mark.parametrize("bad", [0, 1])(test))
