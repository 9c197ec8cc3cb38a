"""State as DCP and JSON take it: a tree of a ``state_dict()`` split into tensors and Python values,
by dotted keys.

A subtree without a tensor is one value. Empty ones are left out: a rank without a table has empty
dicts where others have tensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

__all__ = ["as_json", "filled", "quiet", "split"]

Json = Any


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch says at each attribute of the ShardedTensors that TorchRec's states are
    of, and what DCP says in a process without ranks. Filters are those of the process: only for the
    thread that trains."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        warnings.filterwarnings(
            "ignore", message="Please use DTensor instead", category=FutureWarning
        )
        yield


def split(tree: object, key: str) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return the tensors and the values of a tree, by dotted key.

    Args:
        tree: nested dicts, lists and tuples.
        key: of the tree itself.

    Raises:
        ValueError: a value is none of JSON's, or two have the same key; names the key.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    for path, leaf in _leaves(tree, key):
        if path in tensors or path in values:
            raise ValueError(f"The state has two entries of the key {path!r}.")
        if isinstance(leaf, Tensor):
            tensors[path] = leaf
        elif not _empty(leaf):
            values[path] = as_json(path, leaf)
    return tensors, values


def filled(tree: Any, key: str, values: Mapping[str, Json]) -> Any:
    """Return ``tree`` with its values replaced by those of :func:`split`; its tensors are the same
    objects."""
    if isinstance(tree, Tensor):
        return tree
    if not _holds_tensor(tree):
        return values.get(key, tree)
    if isinstance(tree, Mapping):
        return {name: filled(item, f"{key}.{name}", values) for name, item in tree.items()}
    return type(tree)(filled(item, f"{key}.{i}", values) for i, item in enumerate(tree))


def as_json(name: str, value: object) -> Json:
    """Return ``value``, if it is what JSON gives back.

    Raises:
        ValueError: it is not; names it.
    """
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"Invalid {name}: must be what JSON gives back: dicts with strings as keys, lists (no"
            " tuples), strings, finite numbers, True, False and None; nothing is pickled."
        )
    return value


def _leaves(tree: object, key: str) -> list[tuple[str, object]]:
    if isinstance(tree, Tensor) or not _holds_tensor(tree):
        return [(key, tree)]
    assert isinstance(tree, (Mapping, list, tuple))
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return [leaf for name, item in items for leaf in _leaves(item, f"{key}.{name}")]


def _holds_tensor(tree: object) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_holds_tensor, tree.values()))
    return isinstance(tree, Tensor) or (
        isinstance(tree, (list, tuple)) and any(map(_holds_tensor, tree))
    )


def _empty(leaf: object) -> bool:
    return isinstance(leaf, (Mapping, list, tuple)) and all(
        map(_empty, leaf.values() if isinstance(leaf, Mapping) else leaf)
    )
