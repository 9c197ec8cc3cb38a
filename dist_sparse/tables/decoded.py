"""Tables whose lookups return decoded codes, and not the weights that are stored.

An extra registers what decodes them. The core refuses to remove, move or measure the weights of
such a table, because its lookups would not follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from dist_sparse.tables.memory import same_storage
from dist_sparse.tables.shards import ShardedData


class Decoder(Protocol):
    """What decodes the lookups of some tables while it is in :data:`DECODERS`.

    Attributes:
        sparsifier: whose removed rows decode to zeros.
    """

    @property
    def sparsifier(self) -> object: ...

    def weights(self) -> Iterable[Tensor]:
        """Return the weights of these tables, as they are stored now."""


# All that are attached in this process.
DECODERS: WeakSet[Decoder] = WeakSet()


def refuse_decoded(weights: Sequence[tuple[str, Tensor]], but: object = None) -> None:
    """Refuse weights, by name, whose lookups are decoded, unless ``but`` is the sparsifier whose
    removed rows decode to zeros. Local.

    Raises:
        ValueError: names the first such table.
    """
    decoded: list[int] = []
    for decoder in DECODERS:
        if decoder.sparsifier is not but:
            find = same_storage([weight for _, weight in weights])
            for weight in decoder.weights():
                decoded += find(weight)
    if decoded:
        # The first one: the set has another order on each rank.
        name, _ = weights[min(decoded)]
        raise ValueError(
            f"Table {name!r} has codes: call detach() of their handle first. For masks and codes,"
            " call sparsify() first, and pass sparse= to quantize()."
        )


def weights_of(tables: Iterable[ShardedData]) -> list[tuple[str, Tensor]]:
    """Return this rank's weights of some tables, by name, for :func:`refuse_decoded`."""
    return [(data.name, shard.tensor) for data in tables for shard in data.shards]
