"""The configuration of each table of a model, by name or glob, and of a block shape."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from dist_sparse.tables.shards import ShardedData, parse_block

__all__ = ["area_of", "as_scored_matrix", "model_overrides", "shape_of"]


def model_overrides(
    located: Sequence[ShardedData], config: Mapping[str, Any] | None, defaults: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what ``config`` overrides for every table, by name.

    Args:
        config: overrides for all tables, or a mapping from globs (over table names and fully
            qualified names) to overrides; of several globs that match, later ones win.
        defaults: whose keys are the known ones.

    Raises:
        ValueError: a glob matches nothing, a key is unknown, or the two forms are mixed.
    """
    config = config or {}
    by_glob = [isinstance(value, Mapping) and key not in defaults for key, value in config.items()]
    if any(by_glob) and not all(by_glob):
        raise ValueError(
            f"Invalid config={dict(config)!r}: must map either keys to values or globs to such"
            " mappings, not both."
        )
    rules: Mapping[str, Mapping[str, Any]] = config if any(by_glob) else {"*": config}
    for glob, overrides in rules.items():
        unknown = sorted(set(overrides) - set(defaults))
        if unknown:
            raise ValueError(
                f"Invalid config={dict(overrides)!r}: unknown keys {unknown}; known are"
                f" {sorted(defaults)}."
            )
        if not any(_matches(data, glob) for data in located):
            raise ValueError(
                f"Invalid config: {glob!r} matches no table; there are"
                f" {[data.name for data in located]}."
            )
    return {
        data.name: {
            key: copy.deepcopy(value)
            for glob, overrides in rules.items()
            if _matches(data, glob)
            for key, value in overrides.items()
        }
        for data in located
    }


def _matches(data: ShardedData, glob: str) -> bool:
    return fnmatchcase(data.name, glob) or (data.fqn is not None and fnmatchcase(data.fqn, glob))


def shape_of(block: Any) -> Any:
    """Return a block shape given as text, parsed; anything else as it is, to be refused once a
    table is known."""
    return parse_block(block) if isinstance(block, str) else block


def area_of(block: Any) -> int | None:
    """Return the elements of a block; None where the width of the table decides, or if it is no
    block (refused when resolved)."""
    if not isinstance(block, Sequence) or not all(isinstance(size, int) for size in block):
        return None
    return math.prod(block)


def as_scored_matrix(name: str, data: Tensor) -> Tensor:
    """Return ``data`` as a matrix: 2-D as it is, otherwise without its singleton dimensions, one
    real dimension as a row.

    Raises:
        ValueError: more than two real dimensions.
    """
    if data.dim() == 2:
        return data
    real = [size for size in data.shape if size != 1]
    if len(real) > 2:
        raise ValueError(
            f"Data {name!r} of shape {tuple(data.shape)}: only supports 2-D at the moment."
        )
    return data.reshape(real if len(real) == 2 else (1, data.numel()))
