"""What of a sparsifier is saved, and how does it come back?

Plain data follows the ancestor's format (``state``, ``data_groups``, ``_container``); everything in it loads with
``torch.load``'s default ``weights_only=True``. Sharded tables add ``sharded``: this rank's bits, keyed by table name
and global rectangle, never by rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers import dense_store as plain
from dist_sparse.sparsifiers.packed_store import ShardedTables
from dist_sparse.tables.shards import Rect, ShardedData

if TYPE_CHECKING:
    from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["getstate", "load_state_dict", "setstate", "state_dict"]

_UNSAVED = {"state", "_container", "_tables", "_edited", "_enforcer", "_recorder", "step"}
"""Attributes that a copy does not take over. ``step`` in the instance is a replaced method, bound to the original."""


def state_dict(sparsifier: BaseDataSparsifier) -> dict[str, Any]:
    """See :meth:`BaseDataSparsifier.state_dict`. Tensors of plain data are by reference, like any module's."""
    saved: dict[str, Any] = {
        "state": plain.masks_to(sparsifier.state, sparse=True),
        "data_groups": copy.deepcopy(sparsifier.data_groups),
        "_container": dict(sparsifier._container.state_dict()),
    }
    tables = sparsifier._tables
    if tables:
        saved["sharded"] = {
            name: {
                "shape": tables.shape(name),
                "block": tuple(tables.block(name)),
                "pieces": [{"rect": tuple(mask.rect), "bits": mask.bits.clone()} for mask in tables.masks(name)],
            }
            for name in tables.names
        }
    return saved


def load_state_dict(sparsifier: BaseDataSparsifier, saved: Mapping[str, Any], strict: bool) -> None:
    """See :meth:`BaseDataSparsifier.load_state_dict`."""
    tables = sparsifier._tables
    error: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        if missing := [key for key in ("state", "data_groups", "_container") if key not in saved]:
            raise ValueError(f"This is not the state of a sparsifier: it lacks {missing}; it has {sorted(saved)}.")
        if saved["state"] and sparsifier._enforcer is not None:
            raise ValueError(
                f"The state holds copies of the plain data {sorted(saved['state'])}, which would take the place of the "
                "tensors that train: detach() the enforcer, load, add_data() the tensors again, and attach it."
            )
        states = plain.masks_to(saved["state"], sparse=False)
        groups = copy.deepcopy(dict(saved["data_groups"]))
        if not strict:
            states = {name: entry for name, entry in states.items() if name not in sparsifier.state}
        container = plain.Container()
        plain.restore(container, states, groups, saved["_container"])
        located = tables.locate() if saved.get("sharded") else {}
        masks = _tables_from(tables, located, saved.get("sharded", {}), strict)
        _check_groups(sparsifier, states, groups, masks)
        facts = {f"the state of table {name!r}": [saved["sharded"][name]["block"], groups[name]] for name in masks}
    except Exception as fault:
        error = fault
    tables.agree("load_state_dict()", error, facts)
    if strict:
        sparsifier._container = container
        sparsifier.state = states
    else:
        plain.restore(sparsifier._container, states, groups, saved["_container"])
        sparsifier.state.update(states)
        groups = {**groups, **sparsifier.data_groups}
    lost = [name for name in groups if name not in sparsifier.state and name not in tables]
    sparsifier.data_groups = {name: group for name, group in groups.items() if name not in lost}
    for name, pieces in masks.items():
        tables.commit(located[name], pieces, _block(saved["sharded"][name]["block"]))


def _check_groups(
    sparsifier: BaseDataSparsifier, states: Mapping[str, Any], groups: Mapping[str, Any], masks: Mapping[str, Any]
) -> None:
    both = [name for name in states if name in sparsifier._tables]
    if both:
        raise ValueError(f"The state has plain data of the names {both}, which belong to sharded tables here.")
    for name in masks:
        if name not in groups:
            raise RuntimeError(
                f"Error loading {name!r}: the state has masks of the table but no config in data_groups."
            )


def getstate(sparsifier: BaseDataSparsifier) -> dict[str, Any]:
    """All attributes, subclasses' included; masks sparse.

    Raises:
        TypeError: sharded tables are registered: they belong to a model that lives on many ranks.
    """
    if sparsifier._tables:
        raise TypeError(
            "A sparsifier of sharded tables can't be copied or pickled: save state_dict() and register the model anew."
        )
    kept = {key: value for key, value in sparsifier.__dict__.items() if key not in _UNSAVED}
    container = {name: value.detach() for name, value in sparsifier._container.state_dict().items()}
    return {**kept, "state": plain.masks_to(sparsifier.state, sparse=True), "_container": container}


def setstate(sparsifier: BaseDataSparsifier, saved: Mapping[str, Any]) -> None:
    """Fills a new object from :func:`getstate`."""
    kept = {key: value for key, value in saved.items() if key not in {"state", "_container"}}
    sparsifier.__dict__.update(kept)
    sparsifier.state = plain.masks_to(saved["state"], sparse=False)
    sparsifier._tables = ShardedTables()
    sparsifier._edited = None
    sparsifier._enforcer = None
    sparsifier._recorder = None
    sparsifier._container = plain.Container()
    plain.restore(sparsifier._container, sparsifier.state, sparsifier.data_groups, saved["_container"])


def _tables_from(
    tables: ShardedTables, located: Mapping[str, ShardedData], saved: Mapping[str, Any], strict: bool
) -> dict[str, list[BlockMask]]:
    """The masks of this rank's shards, put together from saved pieces. Checks everything before anything changes."""
    missing = [name for name in tables.names if name not in saved]
    if missing and (strict or saved):
        raise ValueError(f"The state has no masks of the registered tables {missing}; it has those of {sorted(saved)}.")
    unknown = [name for name in saved if name not in tables]
    if unknown:
        raise ValueError(
            f"The state has masks of tables {unknown} that are not registered: call add_model() before loading."
        )
    masks: dict[str, list[BlockMask]] = {}
    for name, entry in saved.items():
        if (shape := entry.get("shape")) is None or tuple(shape) != located[name].shape:
            raise ValueError(
                f"Table {name!r} has the shape {located[name].shape}; the masks in the state are of the shape {shape}."
            )
        try:
            block = _block(entry["block"])
            pieces = [BlockMask(Rect(*piece["rect"]), block, piece["bits"]) for piece in entry["pieces"]]
            masks[name] = []
            for shard in located[name].shards:
                parts = [p.cut(common) for p in pieces if (common := p.rect.intersect(shard.rect)) is not None]
                masks[name].append(BlockMask.assemble(shard.rect, block, parts, shard.tensor.device))
        except ValueError as error:
            raise ValueError(
                f"Table {name!r}: {error} A state_dict() holds only the bits of the rank that made it."
            ) from error
    return masks


def _block(saved: Any) -> tuple[int, int]:
    height, width = saved
    return int(height), int(width)
