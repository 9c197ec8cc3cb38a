"""How do hooks stay behind when what they hang on is copied or saved?

``copy.deepcopy(model)`` (a moving average of the weights) and ``torch.save(model)`` take a module's hooks along, and
with a bound method all that it belongs to. A :class:`Hook` is copied and pickled as one that does nothing: a copy of a
model is a model like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook"]


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
