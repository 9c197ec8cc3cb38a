"""Tables that plain optimizers step: their optimizer state, and a new parameter in the place of an
old one."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dist_sparse.enforcer.optimizers import leaves
from dist_sparse.tables.port import torchrec_port

__all__ = ["Stepped", "Steppers"]


class Stepped(NamedTuple):
    """A parameter that plain optimizers step, and the one that takes its place with its state."""

    old: nn.Parameter
    new: nn.Parameter
    states: Mapping[str, Tensor]


class Steppers:
    """The optimizers of a training loop, wrapped ones too.

    Args:
        optimizers: as the training loop has them.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.steppers import Stepped, Steppers
        >>> old, new = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = torch.optim.Adagrad([old])
        >>> steppers = Steppers([optimizer])
        >>> sums = steppers.states(old)["sum"]
        >>> steppers.replace(Stepped(old, new, {"sum": sums[1:]}))
        >>> optimizer.param_groups[0]["params"][0] is new, optimizer.state[new]["sum"].shape
        (True, torch.Size([3, 2]))
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._given = list(optimizers)
        self._leaves = [leaf for optimizer in self._given for leaf in leaves(optimizer)]

    @property
    def kinds(self) -> list[str]:
        """Return the names of the classes that step parameters."""
        return [type(leaf).__name__ for leaf in self._leaves]

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state with the rows of a parameter: of its shape, ``(rows,)`` or
        ``(rows, 1)``.

        Raises:
            ValueError: several optimizers step it.
        """
        # None of them before the first step.
        found = [leaf.state[parameter] for leaf in self._leaves if parameter in leaf.state]
        if len(found) > 1:
            raise ValueError("Several optimizers step the same table; only one may.")
        rows = len(parameter)
        # Step counts and the like belong to no row: they stay with the parameter.
        shapes = {parameter.shape, (rows,), (rows, 1)}
        return {
            name: value
            for name, value in ChainMap(*found).items()
            if getattr(value, "shape", None) in shapes
        }

    def replace(self, stepped: Stepped) -> None:
        """Have a parameter stepped in the place of another, with its options and remaining
        state."""
        old, new, states = stepped
        instead = {old: new}
        for leaf in self._leaves:
            for group in leaf.param_groups:
                group["params"] = [instead.get(each, each) for each in group["params"]]
            if old in leaf.state:
                leaf.state[new] = {**leaf.state.pop(old), **states}
        for optimizer in self._given:
            _rename(optimizer, old, new)


def _rename(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """TorchRec's keyed optimizers hold their parameters a second time, by name."""
    torchrec = torchrec_port()
    inside = list((torchrec.combined(optimizer) if torchrec else None) or ())
    if hasattr(optimizer, "_optimizer"):
        inside.append(optimizer._optimizer)
    for part in inside:
        _rename(part, old, new)
    named = torchrec.named_parameters(optimizer) if torchrec else None
    if named is None:
        return
    for name, parameter in named.items():
        if parameter is old:
            named[name] = new
