"""Doors, through which extras come into the core, which imports no extra.

Most extras need none: a program passes their objects to functions of the core, such as what
``quantize()`` returns to ``export()``. Where the core has to ask, an extra answers in its own
module ``doors``, which holds one function for each door that it uses. Codes that are trained put
themselves into ``tables.decoded.DECODERS``, so that the core refuses to read rows that they decode.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["DOORS", "offered"]

DOORS = {
    "commands": "commands of dist-sparse",
    "kernels": "Triton kernels for mask updates and lookups",
}
"""What the core asks for, by the name of the function."""

_EXTRAS = Path(__file__).with_name("extras")


def offered(door: str) -> list[Any]:
    """Return what the extras have under the name of a door, in the order of their names."""
    found = []
    # By its file: extras without doors are not imported, since most of them import torch.
    for file in sorted(_EXTRAS.glob("*/doors.py")):
        doors = import_module(f"dist_sparse.extras.{file.parent.name}.doors")
        if hasattr(doors, door):
            found.append(getattr(doors, door))
    return found
