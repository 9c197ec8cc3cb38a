"""How do removed weights stay zero in what a plain optimizer steps?

Dense parameters, ``nn.Embedding(Bag)``, data-parallel tables and plain data are written by ``optimizer.step()`` as a
whole, so they are made true to their masks right after it: all of them, or the rows of a sparse gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dist_sparse.masks import BlockMask
from dist_sparse.training.optimizer_state import reset_state
from dist_sparse.training.optimizers import leaves, local, same_storage, step_rows
from dist_sparse.training.rows import settle_rows

__all__ = ["DenseWeights", "Target"]


@dataclass
class Target:
    """A weight that an optimizer steps.

    Args:
        name: under which it is registered.
        weight: the live storage, as the mask has it.
        mask: gives the mask of this moment: packed bits, or dense for plain data.
        trained: whether an optimizer is expected to step it.
    """

    name: str
    weight: Tensor
    mask: Callable[[], BlockMask | Tensor]
    trained: bool
    steppers: list[tuple[torch.optim.Optimizer, Tensor]] = field(default_factory=list)
    version: int = 0

    def note(self) -> None:
        """Remembers what the weights are, so that later writes are seen."""
        self.version = self._versions()

    @property
    def written(self) -> bool:
        """Whether somebody has written the weights since :meth:`note`."""
        return self._versions() != self.version

    def _versions(self) -> int:
        return sum(local(parameter)._version for _, parameter in self.steppers)


class DenseWeights:
    """The hooks behind the steps of some optimizers.

    Args:
        targets: what has to stay true to its mask.
        optimizers: as the user has them, wrapped or not.

    Raises:
        ValueError: no optimizer given steps a weight that requires a gradient, or something is no optimizer.
    """

    def __init__(self, targets: Sequence[Target], optimizers: Sequence[Any]) -> None:
        self._targets = list(targets)
        self._fired = self._forgiven = False
        self._handles: list[RemovableHandle] = []
        self._leaves = list({id(leaf): leaf for each in optimizers for leaf in leaves(each)}.values())
        stepped = [(leaf, p) for leaf in self._leaves for group in leaf.param_groups for p in group["params"]]
        by_storage = same_storage([parameter for _, parameter in stepped])
        for target in self._targets:
            target.steppers = [stepped[i] for i in by_storage(target.weight)]
            if target.trained and not target.steppers:
                raise ValueError(
                    f"No optimizer given steps {target.name!r}, which requires a gradient: its removed weights would "
                    "come back unseen. Attach all optimizers, attach(first, second), or freeze it by "
                    "requires_grad_(False)."
                )
            target.note()

    def hook(self) -> None:
        """Begins to follow the optimizers' steps."""
        self._handles = [leaf.register_step_post_hook(self._stepped) for leaf in self._leaves]

    def unhook(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()

    def check_forward(self) -> None:
        """Before a forward: what was written behind the optimizers' backs is settled.

        Raises:
            RuntimeError: weights were written, and no hook has fired since they were attached.
        """
        for target in self._targets:
            if not target.written:
                continue
            if not self._fired and not self._forgiven:
                raise RuntimeError(
                    f"The weights of {target.name!r} have changed, but no step of the optimizers attached was seen: "
                    f"{[type(leaf).__name__ for leaf in self._leaves]}. Attach the optimizer whose step() is called; "
                    "after writing weights yourself, call enforcer.settle()."
                )
            self._settle(target, None)
        self._forgiven = False

    def forgive(self) -> None:
        """After weights were loaded: takes the next change that it sees for that."""
        self._forgiven = True

    def settle(self, *, all_of_them: bool = False) -> None:
        """Settles what was written behind the optimizers' backs, or everything."""
        for target in self._targets:
            if all_of_them or target.written:
                self._settle(target, None)

    def reset(self) -> None:
        """Sets the optimizer state of what is removed to its initial value, zero."""
        for target in self._targets:
            mask = target.mask()
            for leaf, parameter in target.steppers:
                state = leaf.state.get(parameter, {})
                tensors = [local(value) for value in state.values() if isinstance(value, Tensor)]
                shape = local(parameter).shape
                # A 1-D parameter is registered as a matrix of one row.
                reset_state(mask, [t.view_as(target.weight) if t.shape == shape else t for t in tensors])

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._fired = True
        with torch.no_grad():
            for target in self._targets:
                for leaf, parameter in target.steppers:
                    if leaf is optimizer and (parameter.grad is not None or target.written):
                        self._settle(target, step_rows(optimizer, parameter))

    def _settle(self, target: Target, rows: Tensor | None) -> None:
        mask = target.mask()
        if isinstance(mask, BlockMask):
            if mask.removes:
                if rows is None or rows.numel() >= mask.rect.rows:
                    mask.apply_(target.weight)
                else:
                    settle_rows(target.weight, mask, rows)
        else:
            target.weight.data.masked_fill_(mask == 0, 0)
        target.note()
