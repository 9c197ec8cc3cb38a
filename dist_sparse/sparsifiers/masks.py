"""What the rest of the package needs of a sparsifier, in one object: ``sparsifier.masks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.cached.kept_scores import Written
from dist_sparse.sparsifiers.dense_store import DenseStore
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.recorder import Recorder
from dist_sparse.tables.shards import ShardedData


class Enforcer:
    """The methods of an attached enforcer that a sparsifier calls. None of them communicates. This
    class stands in while none is attached, and does nothing."""

    def accumulators(self) -> dict[int, tuple[Tensor, float]]:
        """Return the sums of squared gradients that Adagrad keeps, and their initial value, by the
        address of the weights: live, one for each weight, or one for each row of a shard:
        ``(rows,)`` or ``(rows, 1)``."""
        return {}

    def states(self) -> Mapping[int, Sequence[Tensor]]:
        """Return all optimizer state, live, by the address of the weights."""
        return {}

    def written(self, reader: str = "scores") -> Mapping[int, Written]:
        """Map weight addresses to live sets of possibly written rows, for shards whose writes are
        all tracked. Each reader has and clears its own."""
        return {}

    def settle(self) -> None:
        """Zero revived weights, before weights are scored, read or saved."""

    def begin_step(self) -> None:
        """Called before a mask update."""

    def end_step(self) -> None:
        """Called after a mask update, which has zeroed what it removes in sharded tables, but not
        in plain data."""

    def renew(self) -> None:
        """Called after masks were replaced or squashed: look everything up again and zero it."""


class Rotation(Protocol):
    """What rotates tables before each mask update, if anything does."""

    @property
    def names(self) -> Sequence[str]:
        """The tables whose columns hold less and less in a mask update, so that the last ones are
        removed."""
        ...

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The same tables, grouped as they are rotated together."""
        ...

    def update(self) -> None:
        """Rotate them. Collective over the groups of the sharded tables."""
        ...


class Undo(Protocol):
    """What keeps mask updates to be undone, if anything does."""

    def keep(
        self, masks: Masks, located: Mapping[str, ShardedData], made: Mapping[str, MadeMasks]
    ) -> None:
        """Keep what an update is about to change. Local."""
        ...

    def forget(self) -> None:
        """Release what is kept. Local."""
        ...


class Masks:
    """The masks of one sparsifier, and what is attached to it.

    Attributes:
        tables: the masks of sharded tables.
        plain: the masks of plain data.
        enforcer: the :class:`~dist_sparse.MaskEnforcer` that is attached, if any.
        rotation: the bases of :func:`~dist_sparse.rotate`, if any.
        undo: keeps each mask update until the next, if one is to be undone.
        recorder: counts what mask updates change, since ``sparsifier.record()``.
        schedulers: all that have stepped on the sparsifier and are still alive, with their notes.
    """

    def __init__(self) -> None:
        self.tables, self.plain = PackedStore(), DenseStore()
        self.enforcer: Enforcer | None = None
        self.rotation: Rotation | None = None
        self.undo: Undo | None = None
        self.recorder: Recorder | None = None
        self.schedulers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @property
    def hooks(self) -> Enforcer:
        """The enforcer that is attached, or one that does nothing."""
        return self.enforcer or Enforcer()
