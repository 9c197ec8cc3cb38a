"""What does a sparsifier ask of whoever keeps its removed weights at zero between two of its steps?

:class:`dist_sparse.enforcer.enforcer.MaskEnforcer` is the answer; a sparsifier knows only this much of it.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Enforced", "Enforcer"]


class Enforcer(Protocol):
    """Attached to one sparsifier. None of these communicates."""

    def settle(self) -> None:
        """Zeroes what optimizers have revived since it was last zeroed: before weights are scored, read or saved."""
        ...

    def begin_step(self) -> None:
        """Before masks move."""
        ...

    def end_step(self) -> None:
        """After masks have moved: what they remove in sharded tables is zero already, in plain data it is not."""
        ...

    def renew(self) -> None:
        """After masks were replaced or squashed: all is looked up anew and zeroed."""
        ...


class Enforced:
    """The half of a sparsifier that knows of its enforcer."""

    _enforcer: Enforcer | None = None

    def _settled(self) -> None:
        """Before weights are given out."""
        if self._enforcer is not None:
            self._enforcer.settle()

    def _renewed(self) -> None:
        """After masks were replaced, other than by a step."""
        if self._enforcer is not None:
            self._enforcer.renew()

    def _check_not_enforced(self) -> None:
        """Before something is registered.

        Raises:
            ValueError: an enforcer is attached, which knows no optimizer for what is new.
        """
        if self._enforcer is not None:
            raise ValueError("An enforcer is attached: detach() it, register, and attach it again.")
