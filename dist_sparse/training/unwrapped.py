"""Tables in no wrapper, in a world of several ranks: replicas that nothing keeps equal, or models
of each rank alone.

Ranks whose tables are all equal when ``sparsify()`` is called count as replicas: their weights and
configurations are compared before each mask update. Ranks whose tables differ train
models of their own, which are never compared. Either way the first rank warns once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from dist_sparse.facts import ranks_text
from dist_sparse.groups import Replica, group_over, world_ranks
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.pieces import shared_weights
from dist_sparse.tables.shards import ShardedData


class Unwrapped:
    """The registered tables that no DistributedDataParallel or DistributedModelParallel holds.

    Makes nothing and sends nothing in a world of one, or if there is no such table. Otherwise its
    construction is collective over the world.

    Args:
        sparsifier: registered alike on all ranks, as ``add_model()`` has checked.
        located: its tables, as they are stored now.
    """

    def __init__(
        self, sparsifier: ImportanceSparsifier, located: Mapping[str, ShardedData]
    ) -> None:
        self._sparsifier = sparsifier
        self._world = group_over(world_ranks())
        self._names: list[str] = []
        # One rank has no replicas, and does not communicate.
        if self._world.size == 1:
            return
        self._names = [name for name, data in located.items() if data.ranks is None]
        if self._names:
            # Reported, not raised: ranks may train models of their own on purpose.
            drifted = self._world.agree("sparsify()", {}, None, self._replicas(located))
            self._warn(drifted)
            if drifted:
                self._names = []

    def compare(self) -> None:
        """Compare the replicas of all ranks before a mask update. Collective over the world if
        there are any.

        Raises:
            ValueError: weights or configurations differ; on every rank.
        """
        if not self._names:
            return
        with self._world.agreeing("step()") as facts:
            # Replicas by now: a difference is an error.
            facts.on_drift = _refuse
            # Removed weights that a batch has written differ until they are masked.
            self._sparsifier.masks.hooks.settle()
            self._sparsifier.note(facts, [])
            for name in self._names:
                facts[f"the config of table {name!r}"] = self._sparsifier.data_groups.get(name)
            facts.replicas |= self._replicas(self._sparsifier.masks.tables.locate())

    def _replicas(self, located: Mapping[str, ShardedData]) -> dict[str, Replica]:
        """Hashes of the tables as if each rank held one replica of them. Local."""
        ranks, size = self._world.ranks, self._world.size
        # Tables may have been squashed since. Located alone, a table is in a world of one: every
        # rank holds its one tile.
        tables = [located[name] for name in self._names if name in located]
        held = [replace(data, ranks=ranks, tiling=data.tiling * size) for data in tables]
        return shared_weights(held)

    def _warn(self, drifted: Mapping[str, list[int]]) -> None:
        if self._world.rank != 0:
            return
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
        shown = ", ".join(self._names[:3]) + (", ..." if len(self._names) > 3 else "")
        warnings.warn(
            f"The tables {shown} are in no DistributedDataParallel and no DistributedModelParallel,"
            f" in a world of {self._world.size} ranks. {rule} To train replicas, wrap the model and"
            " call sparsify() on the wrapper, not on the module inside it.",
            UserWarning,
            stacklevel=4,
        )


def _refuse(drifted: Mapping[str, list[int]]) -> None:
    places = "; ".join(f"{place} on {ranks_text(ranks)}" for place, ranks in drifted.items())
    raise ValueError(
        f"Replicas have drifted from rank 0's: {places}. Nothing was changed. No wrapper keeps"
        " these tables equal: train a DistributedDataParallel and call sparsify() on it. Models"
        " that are meant to differ must differ when sparsify() is called."
    )
