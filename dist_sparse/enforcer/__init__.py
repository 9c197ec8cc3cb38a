"""Hooks that a copy of a model does not inherit, wrapped methods, and the time spent in them.

``copy.deepcopy(model)`` (a moving average of the weights) and ``torch.save(model)`` copy a module's
hooks, and with a bound method the object that it is bound to. So the copy of a :class:`Hook` does
nothing, and the copy of a :class:`Wrapped` method is the plain one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dist_sparse.tables.bases import TurnBackHook

_ATTACHED = (
    "the hooks that keep removed weights at zero: call detach() first, and copy the model after"
    " that, not before."
)


class Hook:
    """A hook that calls a function; a copy of it calls nothing.

    Raises:
        RuntimeError: ``torch.export``, ``torch.jit.trace`` or the capture of a CUDA graph runs it:
            no graph can contain it.
        AttributeError: ``torch.jit.script`` asks for its ``__name__``.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            return None
        if torch.compiler.is_exporting():
            raise RuntimeError(f"torch.export can't trace {_ATTACHED}")
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(f"torch.jit.trace can't trace {_ATTACHED}")
        # A replay would run no hooks, and read masks at the addresses of the capture.
        cuda_runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if cuda_runs and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A CUDA graph can't capture the hooks that keep removed weights at zero: leave"
                " sparsified tables and their optimizers out of it."
            )
        return self._call(*args, **kwargs)

    @property
    def __name__(self) -> str:
        # TorchScript compiles hooks by name. An AttributeError, so that hasattr() and getattr()
        # treat the name as missing.
        raise AttributeError(f"TorchScript can't compile {_ATTACHED}")

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        # copy.deepcopy() uses this as pickle does.
        return Hook, ()


# Where torch keeps the hooks of a module's forward.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

# Where torch keeps the hooks on gradients of a module or a parameter.
GRADIENT_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")


def has_foreign_hooks(owners: Iterable[Any], kinds: Iterable[str]) -> bool:
    """Whether any of some modules and parameters has a hook that is not the package's.

    Args:
        kinds: attributes that hold hooks: of :data:`FORWARD_HOOKS`, :data:`GRADIENT_HOOKS`.
    """
    for owner, kind in product(owners, kinds):
        # A parameter has None until it gets a hook, and modules lack some kinds.
        for hook in (getattr(owner, kind, None) or {}).values():
            if not isinstance(hook, Hook | TurnBackHook):
                return True
    return False


class Wrapped:
    """Replaces one object's method: ``around(method, *args, **kwargs)`` is called instead, until
    :meth:`remove`. The same method may be wrapped several times, and the wrappers removed in any
    order."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        # None once it is removed.
        self._around: Callable[..., Any] | None = around
        # The bound method of the class, or the wrapper that this one wraps.
        self._method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is None:
            return self._method(*args, **kwargs)
        return self._around(self._method, *args, **kwargs)

    def remove(self) -> None:
        """Restore the method. Inside another wrapper, only pass calls on from now on."""
        self._around = None
        top = self._owner.__dict__.get(self._name)
        while isinstance(top, Wrapped) and top._around is None:
            # The next wrapper may have been removed before this one.
            delattr(self._owner, self._name)
            top = top._method
            if isinstance(top, Wrapped):
                setattr(self._owner, self._name, top)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # deepcopy() adds an object to its memo before it copies the object's attributes.
        copied = memo.get(id(self._owner), self._owner)
        return getattr(type(copied), self._name).__get__(copied)


class Hooks:
    """The handles of hooks that are removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle | Wrapped] = []

    def add(self, *handles: RemovableHandle | Wrapped) -> None:
        """Keep handles for :meth:`remove`."""
        self._handles += handles

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@dataclass
class Clock:
    """Host seconds spent in :func:`timed` methods. Methods that call each other count once."""

    seconds: float = 0.0
    running: bool = False


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the time of a method to the ``clock`` of its object."""

    @functools.wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock: Clock = self.clock
        if clock.running:
            return method(self, *args, **kwargs)
        clock.running, started = True, time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            clock.running = False
            clock.seconds += time.perf_counter() - started

    return measured
