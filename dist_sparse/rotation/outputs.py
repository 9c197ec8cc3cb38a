"""Outputs of rotated tables, turned back: what a model reads is as if they had never been rotated.

The bases are buffers of a child of the model, so that they are saved and loaded with the weights that they belong to.
They are not below TorchRec's collections, which can only be resharded if their state is tables alone. Forward hooks on
the modules that look tables up apply them; a copy of the model has its own bases and hooks.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.tables.shards import ShardedData

__all__ = ["TurnBack", "is_turned", "turn_back"]

_CHILD = "dist_sparse_rotation"


class TurnBack(nn.Module):
    """The bases of the rotated tables of a model, buffers ``basis_<name>``, by which their outputs are turned back."""

    def follow(self, name: str, basis: Tensor) -> None:
        """Follow a further rotation of a table by ``basis``, float64 on the CPU."""
        held = self.get_buffer(f"basis_{name}")
        held.copy_(held.cpu().double() @ basis)

    def forward(self, name: str, values: Tensor) -> Tensor:
        """Return ``values`` ``(..., columns)`` of a table in its original basis."""
        basis = self.get_buffer(f"basis_{name}")
        return values @ basis.T.to(values.dtype)


def turn_back(root: nn.Module, module: nn.Module, outputs: Mapping[str, str] | None, data: ShardedData) -> TurnBack:
    """Have a module's output for a table turned back from now on, unless it is, and return the bases of its model.

    Args:
        root: the model, without wrappers.
        module: the one that looks the table up.
        outputs: the name and the table of each output of a collection; None for a module whose output is one tensor.
    """
    bases = getattr(root, _CHILD, None)
    if bases is None:
        root.add_module(_CHILD, bases := TurnBack())
    assert isinstance(bases, TurnBack)
    if f"basis_{data.name}" not in bases._buffers:
        device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
        exact = torch.float64 if data.dtype == torch.float64 else torch.float32
        bases.register_buffer(f"basis_{data.name}", torch.eye(data.shape[1], dtype=exact, device=device))
    hook = _hook(module)
    if hook is None:
        module.register_forward_hook(hook := _Hook(bases))
    own = (data.fqn or "").removesuffix(".weight").rpartition(".")[2]  # its name in the collection
    found = [None] if outputs is None else [output for output, table in outputs.items() if table == own]
    hook.names |= dict.fromkeys(found, data.name)
    return bases


def is_turned(module: nn.Module) -> bool:
    """Return whether a forward hook turns the output of a module back."""
    return _hook(module) is not None


class _Hook:
    """Turns back the outputs of a module: by output the name of the table, None for a module whose output is one
    tensor. Its copies and pickles refer to the copied bases."""

    def __init__(self, bases: TurnBack) -> None:
        self._bases = bases
        self.names: dict[str | None, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if None in self.names:
            return self._turned(None, output)
        return importlib.import_module("dist_sparse.tables.torchrec").with_outputs(output, self._turned)

    def _turned(self, key: str | None, values: Tensor) -> Tensor:
        return self._bases(self.names[key], values) if key in self.names else values


def _hook(module: nn.Module) -> _Hook | None:
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, _Hook)), None)
