"""Tables outside of any wrapper, in a world of several ranks: replicas that nothing keeps equal, or
a separate model on each rank.

If the tables are equal on all ranks when :func:`~dist_sparse.sparsify` is called, they are taken
for replicas: weights and configurations are compared before each mask update. If they differ, each
rank trains its own model, and nothing is compared. Either way the first rank warns once.
"""

from collections.abc import Sequence
from dataclasses import replace

from dist_sparse.groups import Group, Replica, warn_on_first_rank, world_group
from dist_sparse.messages import cut, ranks_text
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.pieces import shared_weights
from dist_sparse.tables.shards import Located


def find_replicas(located: Located) -> list[str]:
    """Return the names of the registered tables that no DistributedDataParallel or
    DistributedModelParallel holds, if they are equal on all ranks; warn of them in either case.
    Collective over the world if there are any; ``add_model()`` has checked that all ranks have the
    same.

    Args:
        located: the registered tables, as they are stored now.
    """
    world = world_group()
    names = [name for name, data in located.items() if data.ranks is None]
    # One rank has no replicas, and does not communicate.
    if world.size == 1 or not names:
        return []
    # An agreement raises for facts that differ. Replicas it reports in facts.drifted instead: ranks
    # may train different models on purpose.
    with world.agreeing("sparsify()") as facts:
        facts.replicas |= _hashes(world, names, located)
    replicas = names
    rule = (
        "They are equal on all ranks, so they are taken for replicas: mask updates raise an error"
        " once they have drifted apart."
    )
    if facts.drifted:
        replicas = []
        place, ranks = next(iter(facts.drifted.items()))
        rule = (
            f"They differ between ranks (rank 0's {place} is not that of {ranks_text(ranks)}): "
            "each rank trains and prunes its own model."
        )
    # A warning may be an error, and only the first rank warns.
    with world.agreeing("sparsify()"):
        warn_on_first_rank(
            f"The tables {cut(', '.join(names), 100)} are in no DistributedDataParallel and no"
            f" DistributedModelParallel, in a world of {world.size} ranks. {rule} To train"
            " replicas, wrap the model and call sparsify() on the wrapper.",
            stacklevel=3,
        )
    return replicas


def compare_replicas(sparsifier: ImportanceSparsifier, names: Sequence[str]) -> None:
    """Compare the replicas of all ranks before a mask update. Collective over the world.

    Raises:
        ValueError: weights or configurations differ; on every rank.
    """
    world = world_group()
    with world.agreeing("step()") as facts:
        # They were replicas when sparsify() was called: with this text, a difference is an error.
        facts.drift_error = (
            "Replicas have drifted from rank 0's: {places}. Nothing was changed. Call sparsify() on"
            " a DistributedDataParallel."
        )
        # A batch may have written removed weights on one rank only: zeroed before hashing.
        sparsifier.masks.enforcer.settle()
        sparsifier.note(facts, [])
        for name in names:
            facts[f"the config of table {name!r}"] = sparsifier.data_groups.get(name)
        facts.replicas |= _hashes(world, names, sparsifier.masks.tables.locate())


def _hashes(world: Group, names: Sequence[str], located: Located) -> dict[str, Replica]:
    """Return hashes of tables as if each rank held one replica of them. Local."""
    replicas = []
    # Some tables may have been squashed since, and are no longer located.
    for name in sorted(located.keys() & names):
        data = located[name]
        # Without a wrapper, the tiling is for one rank: repeated, every rank holds the whole.
        replicas.append(replace(data, ranks=world.ranks, tiling=data.tiling * world.size))
    return shared_weights(replicas)
