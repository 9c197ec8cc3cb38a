"""Outputs of rotated tables, turned back: what a model reads is as if they had never been rotated.

The basis of a table is a buffer of the model, so that it is saved and loaded with the weights that
it belongs to. It is not below TorchRec's collections, which can only be resharded if their state is
tables alone, and no module, which a ``nn.Sequential`` would call. Forward hooks on the modules that
look tables up apply it; a copy of the model has its own bases and hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer import Hook
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import ShardedData

_BASIS = "rotation_of_"


def turn_back(
    root: nn.Module, module: nn.Module, outputs: Mapping[str, str] | None, data: ShardedData
) -> None:
    """Have a module's output for a table turned back from now on, unless it is.

    Args:
        root: the model, without wrappers.
        module: the one that looks the table up.
        outputs: the name and the table of each output of a collection; None for a module whose
            output is one tensor.
    """
    if not has_basis(root, data.name):
        device = data.shards[0].tensor.device if data.shards else torch.device("cpu")
        # A basis of 16 bits would lose more than the table has.
        exact = torch.float64 if data.dtype == torch.float64 else torch.float32
        root.register_buffer(
            _BASIS + data.name, torch.eye(data.shape[1], dtype=exact, device=device)
        )
    hook = _hook(module) or _Hook(root)
    if not hook.names:
        # Hooks of the user's read the original basis.
        module.register_forward_hook(hook, prepend=True)
    in_collection = (data.fqn or "").removesuffix(".weight").rpartition(".")[2]
    of_outputs: Mapping[Any, str] = outputs or {None: in_collection}
    for output, table in of_outputs.items():
        if table == in_collection:
            hook.names[output] = data.name


def expect_bases(root: nn.Module) -> RemovableHandle:
    """Have ``root`` load states with bases from now on, though its tables are rotated only later:
    by :func:`turn_back`, which keeps what was loaded."""

    def register(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
        for key, basis in state.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix + _BASIS) and name not in module._buffers:
                module.register_buffer(name, torch.empty_like(basis))

    handle: RemovableHandle = root.register_load_state_dict_pre_hook(Hook(register))  # type: ignore[no-untyped-call]
    return handle


def follow(root: nn.Module, name: str, basis: Tensor) -> None:
    """Follow a further rotation of a table by ``basis``, float64 on the CPU."""
    held = root.get_buffer(_BASIS + name)
    held.copy_(held.cpu().double() @ basis)


def has_basis(root: nn.Module, name: str) -> bool:
    """Return whether the model keeps a basis that outputs of a table are turned back by."""
    return _BASIS + name in root._buffers


def is_turned(module: nn.Module) -> bool:
    """Return whether a forward hook turns the output of a module back."""
    return _hook(module) is not None


def bases_of_outputs(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the basis ``(original columns, columns)`` of each output of a module that is turned
    back, by the output's name in a collection; None is the output of a module that has one."""
    hook = _hook(module)
    return {key: hook.basis(name) for key, name in hook.names.items()} if hook else {}


def move_bases(old: nn.Module, new: nn.Module, root: nn.Module, widths: Mapping[str, int]) -> None:
    """Have ``new``, in the place of ``old``, turn back outputs of fewer columns, if ``old`` turns
    them back.

    Args:
        root: the model, without wrappers; it may be ``new``.
        widths: the first columns that are left of each table.
    """
    hook = _hook(old)
    if hook is None:
        return
    for name in set(hook.names.values()):
        basis = hook.basis(name)
        root.register_buffer(_BASIS + name, basis[:, : widths.get(name, basis.shape[1])].clone())
    # The old model is consumed: the basis is a buffer of the new one now.
    hook.buffers = root._buffers
    new.register_forward_hook(hook)


class _Hook:
    """Turns back the outputs of a module: by output the name of the table, None for a module whose
    output is one tensor.

    It holds the dictionary of the model's buffers, not the model: a copy of the model has a copy
    that refers to its buffers, and a copy of a module of it does not copy the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.buffers = root._buffers
        self.names: dict[str | None, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if None in self.names:
            return self._turned(None, output)
        torchrec = torchrec_port()
        assert torchrec is not None  # it has returned the output
        return torchrec.with_outputs(output, self._turned)

    def _turned(self, key: str | None, values: Tensor) -> Tensor:
        """``values`` ``(..., columns left)`` of an output in the original basis,
        ``(..., columns)``."""
        name = self.names.get(key)
        return values if name is None else values @ self.basis(name).T.to(values.dtype)

    def basis(self, name: str) -> Tensor:
        """Return the basis of a table."""
        basis = self.buffers[_BASIS + name]
        assert basis is not None
        return basis


def _hook(module: nn.Module) -> _Hook | None:
    hooks = (hook for hook in module._forward_hooks.values() if isinstance(hook, _Hook))
    return next(hooks, None)
