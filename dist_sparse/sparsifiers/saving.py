"""Saving and loading a sparsifier. A load is checked whole on all ranks, then put in place whole.

Plain data is saved in the ancestor's format: ``state``, ``_container`` and ``data_groups``. What
belongs to sharded tables is in ``sharded``, their configurations too, as JSON and tensors that
torch.distributed.checkpoint reshards. Beside it the others are left out where they are empty: on a
rank without a shard of some table of the model, DCP 2.13 looks for an entry of each empty mapping,
and finds none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from dist_sparse.sparsifiers.packed_store import PackedStore, TableMasks
from dist_sparse.sparsifiers.pieces import mapping_of, tables_of
from dist_sparse.sparsifiers.step import MaskMaker


def save(sparsifier: MaskMaker) -> dict[str, Any]:
    """See :meth:`dist_sparse.BaseDataSparsifier.state_dict`."""
    dense, packed, configs = sparsifier.masks.plain, sparsifier.masks.tables, sparsifier.data_groups
    plain = {name: copy.deepcopy(configs[name]) for name in dense.names}
    saved = {**dense.state_dict(), "data_groups": plain}
    if not packed:
        return saved
    # DCP looks for an entry of each empty mapping, and finds none.
    kept = {key: part for key, part in saved.items() if part}
    return {**kept, "sharded": packed.state_dict(configs)}


def saved_configs(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configuration of every name in a state.

    Raises:
        ValueError: it is not the state of a sparsifier.
    """
    saved = _whole(saved)
    given = {name: entry["config"] for name, entry in tables_of(saved["sharded"]).items()}
    return copy.deepcopy({**saved["data_groups"], **given})


def prepare_load(
    sparsifier: MaskMaker, saved: Mapping[str, Any], strict: bool
) -> Callable[[], dict[str, dict[str, Any]]]:
    """Check a state and return the function that loads it into the stores and returns the new
    ``data_groups``.

    Collective over the groups of the sharded tables; the function itself is local. See
    :meth:`dist_sparse.BaseDataSparsifier.load_state_dict`.
    """
    dense, packed = sparsifier.masks.plain, sparsifier.masks.tables
    loaded: dict[str, TableMasks] = {}
    with packed.agreeing("load_state_dict()") as noted:
        configs, saved = saved_configs(saved), _whole(saved)
        _refuse_plain_data(sparsifier, saved["state"])
        commit_dense = dense.prepare(saved, configs, strict=strict)
        located = packed.locate()
        # If not strict, tables that are registered stay as they are.
        if strict:
            loaded = packed.prepare(saved["sharded"], located)
        for name in loaded:
            # A state may be of another class of sparsifier: the next mask update would fail.
            if lacking := sorted(set(sparsifier.defaults) - set(configs[name])):
                raise ValueError(
                    f"Error loading {name!r}: its configuration in the state lacks {lacking}."
                )
            sparsifier.check_config(located[name], configs[name])
        for facts, names in noted:
            for name in filter(loaded.__contains__, names):
                one = loaded[name]
                values = [one.block, configs[name], one.updates, one.removed]
                facts[f"the state of table {name!r}"] = values
    if loaded:
        refusal = "The saved masks of the ranks do not fit together. Nothing was changed."
        packed.compare_holders("load_state_dict()", located, loaded, refusal)
        # DCP fills a hole of a checkpoint with zeros, which no hash of this rank could notice.
        _check_removed(packed, loaded)

    # Nothing below can fail: all ranks load, or none.
    def commit() -> dict[str, dict[str, Any]]:
        # A state may have configurations without masks, which are not loaded.
        names = {*commit_dense(), *loaded}
        packed.load(loaded)
        kept = {} if strict else sparsifier.data_groups
        return {**{name: config for name, config in configs.items() if name in names}, **kept}

    return commit


def _refuse_plain_data(sparsifier: MaskMaker, state: Mapping[str, Any]) -> None:
    if state and sparsifier.masks.enforcer is not None:
        raise ValueError(
            f"The state holds copies of the plain data {sorted(state)}, which would take the place"
            " of the tensors that train: detach() the enforcer, load, add_data() the tensors again,"
            " and attach it."
        )
    if both := [name for name in state if name in sparsifier.masks.tables]:
        raise ValueError(
            f"The state has plain data of the names {both}, which belong to sharded tables here."
        )


def _check_removed(packed: PackedStore, loaded: Mapping[str, TableMasks]) -> None:
    """Compare the removed blocks over all ranks with the saved numbers. Collective."""
    here = {name: [one.removed_here] for name, one in loaded.items()}
    # In one order on every rank, so that all raise the same.
    for name, [count] in sorted(packed.summed(here).items()):
        if loaded[name].removed not in (None, count):
            raise ValueError(
                f"Error loading {name!r}: the masks remove {count} blocks over all ranks, but "
                f"{loaded[name].removed} when they were saved. Nothing was changed."
            )


def _whole(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the parts that it has left out."""
    parts = ("state", "data_groups", "_container")
    if not isinstance(saved, Mapping):
        raise ValueError(f"This is not the state of a sparsifier, but a {type(saved).__name__}.")
    # Beside sharded tables, empty parts are left out.
    if missing := [key for key in parts if key not in saved and "sharded" not in saved]:
        raise ValueError(
            f"This is not the state of a sparsifier: it lacks {missing}; it has {sorted(saved)}."
        )
    return {part: mapping_of(saved, part) for part in (*parts, "sharded")}
