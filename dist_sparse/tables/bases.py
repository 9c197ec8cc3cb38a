"""Tables whose columns are rotated: which ones are rotated together, and how their outputs are
turned back.

The model reads outputs that are turned back as if nothing had been rotated. The basis of a table is
a buffer of the model's root, so that it is saved and loaded with the weights. It is not in
TorchRec's collections, which can be resharded only if their state is tables alone; and not in a
module of its own, which an ``nn.Sequential`` would call. Forward hooks on the modules that look
tables up apply it. A copy of the model has its own bases and hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn

from dist_sparse.tables.modules import loaded_torchrec

# `"table"`: each table by itself. Otherwise groups of names.
TableGroups = Literal["table"] | Sequence[Sequence[str]]

# Begins the names of the buffers that hold bases; the name of the table follows.
BASIS = "rotation_of_"


def rotation_groups(
    rotate: Any, tables: Iterable[str], argument: str = "rotate"
) -> list[list[str]]:
    """Return the groups of tables that ``rotate`` names; for ``"table"``, each table alone.

    Args:
        rotate: an argument of the caller.
        tables: all names.
        argument: the name of that argument.

    Raises:
        ValueError: it is neither ``"table"`` nor groups of such names, each in one group only.

    Example::

        >>> from dist_sparse.tables.bases import rotation_groups
        >>> rotation_groups("table", ["user", "item"]), rotation_groups(
        ...     [("user", "item")], ["user", "item"]
        ... )
        ([['user'], ['item']], [['user', 'item']])
    """
    known = list(tables)
    if rotate == "table":
        return [[name] for name in known]
    wrong = f"Invalid {argument}={rotate!r}:"
    # An empty group is refused below.
    groups = rotate if isinstance(rotate, (list, tuple)) else [()]
    # By type: a string in place of a group would be a group of letters.
    if not all(isinstance(group, (list, tuple)) and group for group in groups):
        raise ValueError(f'{wrong} must be "table", or groups of names such as [["user", "item"]].')
    named = [*map(str, chain(*groups))]
    unknown = sorted(set(named).difference(known))
    if unknown:
        raise ValueError(f"{wrong} {unknown} are not among the tables {known}.")
    if len(set(named)) < len(named):
        raise ValueError(f"{wrong} each name must be in one group only.")
    return [list(map(str, group)) for group in groups]


def turn_back(
    root: nn.Module, module: nn.Module, outputs: Iterable[str | None], name: str, basis: Tensor
) -> None:
    """Have outputs of a module turned back from now on, unless they are already.

    Args:
        root: the model, without wrappers.
        module: looks a table up.
        outputs: the table's outputs in a collection; None is the only output of any other module.
        name: of the table.
        basis: of the table, ``(original columns, columns)``. If the model already has one, it
            stays.
    """
    if BASIS + name not in root._buffers:
        root.register_buffer(BASIS + name, basis)
    hook = _hook_on(module) or TurnBackHook(root)
    if not hook.names:
        # Before hooks of the user's, which read outputs in the original basis.
        module.register_forward_hook(hook, prepend=True)
    hook.names |= dict.fromkeys(outputs, name)


def bases_of_outputs(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the basis, ``(original columns, columns)``, of each output of a module that is turned
    back, by the output's name in a collection; None is the only output of any other module."""
    hook = _hook_on(module)
    return {key: hook.basis(name) for key, name in hook.names.items()} if hook else {}


def move_bases(old: nn.Module, new: nn.Module, root: nn.Module, widths: Mapping[str, int]) -> None:
    """Have ``new``, which replaces ``old``, turn back the same outputs, of fewer columns.

    Args:
        root: the model, without wrappers; it may be ``new``.
        widths: the number of first columns that each table keeps; tables left out keep all.
    """
    hook = _hook_on(old)
    if hook is None:
        return
    # Each name once, in an order that all ranks share.
    for name in dict.fromkeys(hook.names.values()):
        basis = hook.basis(name)
        root.register_buffer(BASIS + name, basis[:, : widths.get(name, basis.shape[1])].clone())
    # The old model is no longer used: the hook moves to the new one.
    hook.buffers = root._buffers
    new.register_forward_hook(hook)


class TurnBackHook:
    """A forward hook that turns outputs of a module back.

    It refers to the dictionary of the root's buffers, not to the root: a copy of the model has a
    hook on its own buffers, and a copy of one module does not copy the model.

    Attributes:
        buffers: of the root.
        names: the table of each output; None is the only output of any other module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.buffers = root._buffers
        self.names: dict[str | None, str] = {}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if None in self.names:
            return self._turn_output(None, output)
        return loaded_torchrec().with_outputs(output, self._turn_output)

    def _turn_output(self, key: str | None, values: Tensor) -> Tensor:
        """Return values of an output, ``(..., remaining columns)``, in the original basis,
        ``(..., columns)``."""
        name = self.names.get(key)
        if name is None:
            return values
        basis = self.basis(name)
        if basis.device != values.device:
            # A rank without a shard of the table did not know the device before.
            basis = self.buffers[BASIS + name] = basis.to(values.device)
        return values @ basis.T.to(values.dtype)

    def basis(self, name: str) -> Tensor:
        """Return the basis of a table."""
        basis = self.buffers[BASIS + name]
        assert basis is not None
        return basis


def _hook_on(module: nn.Module) -> TurnBackHook | None:
    """Return the hook on a module; None if there is none."""
    hooks = (hook for hook in module._forward_hooks.values() if isinstance(hook, TurnBackHook))
    return next(hooks, None)
