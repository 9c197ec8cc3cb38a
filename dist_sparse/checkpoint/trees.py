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

Json = Any


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warning at each attribute of a ShardedTensor, and DCP's in a process without
    ranks. Filters belong to the process: only for the thread that trains."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def split(trees: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return the tensors and the values of trees, by dotted key.

    Args:
        trees: nested dicts, lists and tuples, by the key that they start with.

    Raises:
        ValueError: a value is none of JSON's, or two have the same key; names the key.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    for key, tree in trees.items():
        for path, leaf in _leaves(tree, key):
            if path in tensors or path in values:
                raise ValueError(f"The state has two entries of the key {path!r}.")
            if isinstance(leaf, Tensor):
                tensors[path] = leaf
            elif not _is_empty(leaf):
                values[path] = as_json(path, leaf)
    return tensors, values


def filled(tree: Any, key: str, values: Mapping[str, Json]) -> Any:
    """Return ``tree`` with the values of :func:`split` in the places of its own; its tensors are
    the same objects."""
    if isinstance(tree, Tensor):
        return tree
    if not _holds_tensor(tree):
        # An empty tree was not saved, and stays.
        return values.get(key, tree)
    new = {name: filled(item, f"{key}.{name}", values) for name, item in _children(tree).items()}
    return new if isinstance(tree, Mapping) else type(tree)(new.values())


def as_json(name: str, value: object) -> Json:
    """Return ``value``, if it is what JSON gives back.

    Raises:
        ValueError: it is not; names it.
    """
    try:
        # Tuples and keys of numbers change on the way, and NaN is no JSON.
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"Invalid {name}: must be what JSON gives back: dicts with strings as keys, lists (no"
            " tuples), strings, finite numbers, True, False and None; nothing is pickled."
        )
    return value


def _leaves(tree: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(tree, Tensor) or not _holds_tensor(tree):
        yield key, tree
        return
    for name, item in _children(tree).items():
        yield from _leaves(item, f"{key}.{name}")


def _holds_tensor(tree: object) -> bool:
    return isinstance(tree, Tensor) or any(map(_holds_tensor, _children(tree).values()))


def _is_empty(tree: object) -> bool:
    """Whether it is a dict, list or tuple of nothing, or of empty ones alone."""
    is_container = isinstance(tree, (Mapping, list, tuple))
    return is_container and all(map(_is_empty, _children(tree).values()))


def _children(tree: object) -> Mapping[Any, object]:
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    return tree if isinstance(tree, Mapping) else {}
