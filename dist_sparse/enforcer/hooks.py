"""How do hooks stay out of the way: of copies of what they hang on, and of each other?

``copy.deepcopy(model)`` (a moving average of the weights) and ``torch.save(model)`` take a module's hooks along, and
with a bound method all that it belongs to. A copy of a model is a model like any other, so a :class:`Hook` is copied
and pickled as one that does nothing, and a :class:`Wrapped` method as the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook", "Wrapped"]


class Hook:
    """Calls a function, until it is copied."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Wrapped:
    """Takes the place of one object's method: ``around(method, *args, **kwargs)`` is called instead, until
    :meth:`remove`. Others may wrap the same method before and after, and be removed in any order."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._method = getattr(owner, name)
        self._removed = False
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs) if self._removed else self._around(self._method, *args, **kwargs)

    def remove(self) -> None:
        """Gives the method back; under another wrapper, only steps aside."""
        self._removed = True
        if self._owner.__dict__.get(self._name) is self:
            delattr(self._owner, self._name)
            if isinstance(self._method, Wrapped):
                setattr(self._owner, self._name, self._method)
                if self._method._removed:
                    self._method.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner), self._owner)
        return getattr(type(copied), self._name).__get__(copied)
