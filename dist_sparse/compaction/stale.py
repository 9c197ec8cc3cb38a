"""Errors for stale objects: modules, optimizers and parameters whose memory was released.

Using a released storage would crash the process, and an empty tensor would give wrong numbers
silently: its L2 norm is 0. So the object's class is replaced by a subclass that raises.
"""

from typing import Any

import torch
from torch import nn


def consume(used: Any, name: str, action: str) -> None:
    """Release everything that an object holds. Using it raises a RuntimeError from now on.

    Args:
        used: a module or an optimizer.
        name: of the object, for the message.
        action: what released it, ``"compact"`` or ``"expand"``.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.stale import consume
        >>> model = torch.nn.Linear(2, 2)
        >>> consume(model, "This model", "compact")
        >>> model(torch.ones(2))
        Traceback (most recent call last):
        RuntimeError: This model was compacted, and its memory released: use the model that
        compact() returned...
    """

    def refuse(self: Any, attribute: str) -> Any:
        # isinstance() reads __class__, and must not raise.
        if attribute.startswith("__"):
            return object.__getattribute__(self, attribute)
        raise RuntimeError(
            f"{name} was {action}ed, and its memory released: use the model that {action}()"
            " returned, and its fused_optimizer."
        )

    used.__dict__.clear()
    kind = type(used)
    object.__setattr__(used, "__class__", type("Consumed", (kind,), {"__getattribute__": refuse}))


def consume_parameter(parameter: nn.Parameter, name: str, action: str) -> None:
    """Release the memory of a table. Computing with it, and reading its gradient or shape, raises
    from now on.

    It can still be compared by ``is``, be a key of a dictionary, and be printed. TorchRec's
    parameter of a fused table is a view: FBGEMM's batch of tables is released with its last view,
    because a pending backward may still write to it.

    Args:
        parameter: a leaf, or TorchRec's view of a fused table.
        name: fully qualified, for the message.
        action: what released it, ``"compact"`` or ``"expand"``.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.stale import consume_parameter
        >>> table = torch.nn.Parameter(torch.ones(4, 2))
        >>> consume_parameter(table, "item.weight", "compact")
        >>> table.square().sum()
        Traceback (most recent call last):
        RuntimeError: The table item.weight was compacted, and its memory released: ...
    """
    message = (
        f"The table {name} was {action}ed, and its memory released: create what held it, such as an"
        f" optimizer, again from the model that {action}() returned."
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    kind = type(parameter)
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    vars(parameter).clear()
    # TorchRec's view has __slots__, and one of them holds the whole batch of tables.
    for slot in getattr(kind, "__slots__", ()):
        if hasattr(parameter, slot):
            delattr(parameter, slot)
    members = {
        "__torch_function__": classmethod(refuse),
        "__repr__": lambda self: f"<{message}>",
        # TorchRec's view overrides ``grad`` with a property, which bypasses __torch_function__.
        "grad": property(refuse),
    }
    parameter.__class__ = type("Consumed", (kind,), members)
