"""Keywords of sparsify() as tests keep them: flat, since tests merge plans, and an ``advanced`` of
one plan would replace that of another."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dist_sparse import Advanced

__all__ = ["nested"]

ADVANCED = {field.name for field in fields(Advanced)}


def nested(**flat: Any) -> dict[str, Any]:
    """Return the keywords of sparsify(), those of Advanced in one."""
    advanced = {name: value for name, value in flat.items() if name in ADVANCED}
    others = {name: value for name, value in flat.items() if name not in ADVANCED}
    return {**others, "advanced": Advanced(**advanced)} if advanced else others
