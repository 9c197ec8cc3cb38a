"""What a training follows: innermost optimizers, unsharded collections, and replicas that nothing
keeps equal."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dist_sparse.enforcer.dense import combines, leaves
from dist_sparse.groups import Facts, Group, Replica, cut, ranks_text, world_group
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.pieces import shared_weights
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import ShardedData


def steppers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the innermost optimizers, then one that is made of fused ones or of several: torch's
    hooks run on both."""
    yield from leaves(optimizer)
    # As LightningOptimizer does.
    while not combines(optimizer) and hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    if combines(optimizer):
        yield optimizer


def unsharded_collections(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield TorchRec's unsharded collections of registered tables, by path.

    DistributedModelParallel replaces them: a model that is wrapped later trains other modules.
    """
    torchrec = torchrec_port()
    if torchrec is None:
        return
    # Registered names are "collection/table" where two collections have tables of one name.
    registered = {name.rpartition("/")[2] for name in names}
    for path, module in modules.items():
        collection = torchrec.collection(module)
        tables = [] if collection is None or collection.is_sharded else collection.tables
        if not registered.isdisjoint(table.name for table in tables):
            yield path or type(module).__name__, module


# Tables in no wrapper, in a world of several ranks: replicas that nothing keeps equal, or models
# of each rank alone.
#
# Ranks whose tables are all equal when ``sparsify()`` is called count as replicas: their weights
# and configurations are compared before each mask update. Ranks whose tables differ train models
# of their own, which are never compared. Either way the first rank warns once.


def replicas_of(located: Mapping[str, ShardedData]) -> list[str]:
    """Return the registered tables that no DistributedDataParallel or DistributedModelParallel
    holds, if they are equal on all ranks, by name; warn of them in either case. Collective over the
    world if there are any, alike on all ranks, as ``add_model()`` has checked.

    Args:
        located: the registered tables, as they are stored now.
    """
    world = world_group()
    names = [name for name, data in located.items() if data.ranks is None]
    # One rank has no replicas, and does not communicate.
    if world.size == 1 or not names:
        return []
    # Reported, not raised: ranks may train models of their own on purpose.
    facts = Facts()
    facts.replicas |= _hashes(world, names, located)
    world.agree("sparsify()", facts)
    if world.rank == 0:
        _warn(world, names, facts.drifted)
    return [] if facts.drifted else names


def compare_replicas(sparsifier: ImportanceSparsifier, names: Sequence[str]) -> None:
    """Compare the replicas of all ranks before a mask update. Collective over the world.

    Raises:
        ValueError: weights or configurations differ; on every rank.
    """
    world = world_group()
    with world.agreeing("step()") as facts:
        # Replicas by now: a difference is an error.
        facts.on_drift = _refuse
        # Removed weights that a batch has written differ until they are masked.
        sparsifier.masks.hooks.settle()
        sparsifier.note(facts, [])
        for name in names:
            facts[f"the config of table {name!r}"] = sparsifier.data_groups.get(name)
        facts.replicas |= _hashes(world, names, sparsifier.masks.tables.locate())


def _hashes(
    world: Group, names: Sequence[str], located: Mapping[str, ShardedData]
) -> dict[str, Replica]:
    """Hashes of tables as if each rank held one replica of them. Local."""
    # Tables may have been squashed since. Located alone, a table is in a world of one: every rank
    # holds its one tile.
    tables = [located[name] for name in names if name in located]
    held = [replace(data, ranks=world.ranks, tiling=data.tiling * world.size) for data in tables]
    return shared_weights(held)


def _warn(world: Group, names: Sequence[str], drifted: Mapping[str, list[int]]) -> None:
    if drifted:
        place, ranks = next(iter(drifted.items()))
        rule = (
            f"They differ between ranks (rank 0's {place} is not that of {ranks_text(ranks)}): "
            "each rank trains and prunes a model of its own, with masks of its own."
        )
    else:
        rule = (
            "They are equal on all ranks, so they are taken for replicas: mask updates raise an"
            " error once they have drifted apart."
        )
    shown = cut(", ".join(names), 100)
    warnings.warn(
        f"The tables {shown} are in no DistributedDataParallel and no DistributedModelParallel,"
        f" in a world of {world.size} ranks. {rule} To train replicas, wrap the model and"
        " call sparsify() on the wrapper, not on the module inside it.",
        stacklevel=4,
    )


def _refuse(drifted: Mapping[str, list[int]]) -> None:
    places = "; ".join(f"{place} on {ranks_text(ranks)}" for place, ranks in drifted.items())
    raise ValueError(
        f"Replicas have drifted from rank 0's: {places}. Nothing was changed. No wrapper keeps"
        " these tables equal: train a DistributedDataParallel and call sparsify() on it. Models"
        " that are meant to differ must differ when sparsify() is called."
    )
