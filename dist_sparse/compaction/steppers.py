"""Tables that plain optimizers step: their optimizer state, and a new parameter in the place of an
old one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dist_sparse.enforcer.optimizers import leaves
from dist_sparse.tables.port import torchrec_port

__all__ = ["Stepped", "Steppers"]


class Stepped(NamedTuple):
    """A parameter that plain optimizers step, the one that takes its place, and the state of
    that."""

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

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state with the rows of a parameter: of its shape, ``(rows,)`` or
        ``(rows, 1)``.

        Raises:
            ValueError: several optimizers step it.
        """
        found = [leaf.state[parameter] for leaf in self._leaves if parameter in leaf.state]
        if len(found) > 1:
            raise ValueError("Several optimizers step the same table; only one may.")
        shapes = tuple(parameter.shape), (len(parameter),), (len(parameter), 1)
        return {
            name: value
            for state in found
            for name, value in state.items()
            if isinstance(value, Tensor) and tuple(value.shape) in shapes
        }

    def replace(self, stepped: Stepped) -> None:
        """Have a parameter stepped in the place of another, with the options and the remaining
        state of that."""
        old, new, states = stepped
        for group in self._groups(old):
            group["params"] = [
                new if parameter is old else parameter for parameter in group["params"]
            ]
        for leaf in self._leaves:
            if old in leaf.state:
                leaf.state[new] = {**leaf.state.pop(old), **states}
        for optimizer in self._given:
            _rename(optimizer, old, new)

    def _groups(self, parameter: nn.Parameter) -> Iterator[dict[str, Any]]:
        for leaf in self._leaves:
            for group in leaf.param_groups:
                if any(other is parameter for other in group["params"]):
                    yield group


def _rename(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """TorchRec's keyed optimizers hold their parameters a second time, by name."""
    torchrec = torchrec_port()
    for part in (torchrec.combined(optimizer) if torchrec else None) or ():
        _rename(part, old, new)
    if hasattr(optimizer, "_optimizer"):
        _rename(optimizer._optimizer, old, new)
    named = torchrec.named_parameters(optimizer) if torchrec else None
    if named is not None:
        named.update({name: new for name, parameter in named.items() if parameter is old})
