"""Collections of TorchRec whose tables follow their traffic.

As a compact collection, with slots in the place of kept rows: ``inner`` stores them, and
:class:`FollowingIds` translates ids in front of it. It notes the ids of training batches until
they are counted, and how many batches a train pipeline has translated ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.weak import WeakIdKeyDictionary

from dist_sparse import checks
from dist_sparse.compaction.collections import (
    CompactEmbeddingBagCollection,
    CompactEmbeddingCollection,
    CompactIds,
    IndexedCollection,
)
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.sites import replace_modules
from dist_sparse.enforcer.enforcer import refuse_masked
from dist_sparse.slots.index import MOST_COUNTED, SlotIndex
from dist_sparse.tables.modules import collection_of, torchrec_port
from dist_sparse.tables.protocols import Collection
from dist_sparse.torchrec.collections import configs_of
from dist_sparse.torchrec.types import KeyedJaggedTensor

_NOTED: Final = 1 << 22
"""Ids of batches that are copied; then they are counted, id by id."""


@dataclass
class Fates:
    """Lookups of a table in training, on this rank, since the last update.

    Args:
        lookups: of all ids.
        missed: of ids of the table without a slot.
        unseen: of them, of ids that were never looked up before; known to the owners of the ids.
        out_of_range: of ids that the table does not have.
    """

    lookups: int = 0
    missed: int = 0
    unseen: int = 0
    out_of_range: int = 0


class FollowingIds(CompactIds):
    """Translate a KeyedJaggedTensor of ids into one of slots, without the ids that have none.

    Args:
        tables: configurations of the whole tables.
        indexes: by table, of those that follow; other tables keep all of their rows.
        collection: the collection whose ids these are.

    Attributes:
        fates: what has become of the lookups of each of them, once batches are sorted out.
        ahead: how many training batches are translated, and not looked up yet.
    """

    def __init__(self, tables: Sequence[Any], indexes: Mapping[str, Any], collection: Any) -> None:
        super().__init__(tables, indexes, collection)
        self.fates = {name: Fates() for name in indexes}
        # Training batches as they came: a step copies their ids, and leaves the rest to an update.
        self._batches: list[tuple[Tensor, list[int]]] = []
        self._noted = 0
        # Distinct ids of batches before, and how often each was looked up.
        self._counted: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in indexes}
        # Which ids of a batch had a slot when it was translated, until its output is put together.
        self._kept: Any = WeakIdKeyDictionary()
        self.ahead = 0

    @property
    def slots(self) -> dict[str, SlotIndex]:
        """The index of each table that follows."""
        found: dict[str, Any] = dict(self.indexes.items())
        return found

    def consumed(self, features: object) -> None:
        """Note that the collection looks a batch up."""
        # TorchRec's pipelines trace the forward once, without a batch.
        if self._trains() and not isinstance(features, Proxy):
            self.ahead -= 1

    def kept(self, features: KeyedJaggedTensor) -> Tensor:
        """Return which ids of a batch had a slot when it was translated: bool ``(n,)``, in the
        order of :meth:`ordered`."""
        flags: Tensor | None = self._kept.get(features)
        return super().kept(features) if flags is None else flags

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return which ids hold slots. Their rows are at :meth:`_Follows.table_slots`.

        Raises:
            ValueError: a table has more ids than a bitmap.
        """
        found = {}
        for name, index in self.slots.items():
            if index.hashed:
                raise ValueError(
                    f"Table {name!r} has {index.rows} ids: the bitmap of kept ids, which compact"
                    f" tables and artifacts have, is of at most {MOST_COUNTED}."
                )
            ids, _ = index.holders()
            kept = torch.zeros(index.rows, dtype=torch.bool, device=ids.device)
            found[name] = RowIndex.of(kept.index_fill_(0, ids, True))
        return found

    def sort_out(self) -> None:
        """Count the ids of training batches, and what became of their lookups. Call it before ids
        come into slots: those of earlier batches had none."""
        batches, self._batches, self._noted = self._batches, [], 0
        parts: dict[str, list[Tensor]] = {name: [] for name in self.indexes}
        for values, lengths in batches:
            for table, ids in zip(self._tables, torch.split(values, lengths), strict=True):
                if table in parts:
                    parts[table].append(ids)
        for table, looked_up in parts.items():
            if looked_up:
                self._counted[table].append(self._distinct(table, torch.cat(looked_up)))

    def take_noted(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of a table that training has looked up on this rank since the
        last call, ascending, of the dtype of its state, ``(n,)``, and how often, int64 ``(n,)``,
        both on the CPU."""
        self.sort_out()
        counted, self._counted[table] = self._counted[table], []
        if len(counted) == 1:
            return counted[0]
        none = torch.empty(0, dtype=self.slots[table].id_of_slot.dtype)
        both = torch.cat([none, *(some for some, _ in counted)])
        ids, places = torch.unique(both, return_inverse=True)
        sums = torch.zeros(len(ids), dtype=torch.int64)
        return ids, sums.index_add_(
            0, places, torch.cat([sums[:0], *(each for _, each in counted)])
        )

    def _distinct(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of lookups that are in range, and how often each occurs."""
        index, fates = self.slots[table], self.fates[table]
        inside = ids[(ids >= 0) & (ids < index.rows)].to(index.id_of_slot.dtype)
        found, times = torch.unique(inside, return_counts=True)
        fates.lookups += len(ids)
        fates.out_of_range += len(ids) - len(inside)
        fates.missed += int(times[index(found) < 0].sum())
        return found.cpu(), times.cpu()

    @property
    def _collection(self) -> Any:
        [collection] = self.collection
        return collection

    def _trains(self) -> bool:
        training: bool = self._collection.training
        return training and torch.is_grad_enabled()

    def _rows_of(self, table: str, ids: Tensor) -> Tensor:
        # Without a map of all ids, which each update would make again.
        if table not in self.indexes:
            return super()._rows_of(table, ids)
        found: Tensor = self.indexes[table](ids)
        return found

    def _translated(
        self, features: KeyedJaggedTensor, ordered: KeyedJaggedTensor, kept: Tensor
    ) -> None:
        if not self._collection.pooled:
            # The index may have changed when the output of this batch is put together.
            self._kept[features] = kept
        if not self._trains():
            return
        self.ahead += 1
        # A copy: the training loop may use its buffers again.
        self._batches.append((ordered.values().clone(), ordered.length_per_key()))
        self._noted += len(kept)
        if self._noted > _NOTED:
            self.sort_out()


class _Follows(IndexedCollection):
    """What both kinds of collections have in common."""

    translation: ClassVar[type[CompactIds]] = FollowingIds
    # A mask of rows would be of slots, which change hands.
    refused: ClassVar = "its rows are slots, which FollowingTables gives to other ids"

    @property
    def following_ids(self) -> FollowingIds:
        """The translation of ids, also where a pipeline has put another module in its place."""
        [ids] = self._translation
        assert isinstance(ids, FollowingIds)
        return ids

    def table_slots(self) -> dict[str, Tensor]:
        """Return the slots of the ids that hold one, in the order of the ids, by table."""
        indexes = self.following_ids.slots.items()
        return {name: index.holders()[1].cpu() for name, index in indexes}

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Return the embeddings, as the collection of TorchRec does."""
        self.following_ids.consumed(features)
        return super().forward(features)


class FollowingEmbeddingBagCollection(_Follows, CompactEmbeddingBagCollection):
    """An EmbeddingBagCollection whose tables store slots, which the ids hold that are looked up
    most; the others read zeros and train nothing. Made by :func:`following`;
    :class:`~dist_sparse.FollowingTables` hands slots over."""


class FollowingEmbeddingCollection(_Follows, CompactEmbeddingCollection):
    """An EmbeddingCollection whose tables store slots; see
    :class:`FollowingEmbeddingBagCollection`."""


FollowingCollection: TypeAlias = FollowingEmbeddingBagCollection | FollowingEmbeddingCollection


def following(model: nn.Module, rows: Mapping[str, int] | None = None) -> Any:
    """Return a collection, or a compact model, in which tables store fewer rows than they have ids,
    and follow their traffic.

    A row of such a table is a slot, which an id holds. Ids without a slot read zeros, train
    nothing, and are counted. :class:`~dist_sparse.FollowingTables`, made from the sharded model,
    gives the slots to the ids that are looked up most, again and again. There are two ways to
    begin:

    - ``following(collection, rows=...)`` before DistributedModelParallel, with a collection on the
      meta device: no table ever exists whole, and no id holds a slot yet.
    - ``following(compact(model, sparse))``: the slots are the rows that the compact tables store,
      held by the ids that were kept, with their weights and optimizer state. No row moves.

    Args:
        model: an EmbeddingBagCollection or EmbeddingCollection on the meta device, whose
            ``num_embeddings`` counts ids; or what :func:`~dist_sparse.compact` returned.
        rows: of a collection: by table, how many rows it stores; other tables keep a row for each
            id.

    Returns:
        A module in the place of the collection, which takes the same ids; TorchRec's collection of
        slots is its ``inner``. Or ``model``, with such modules in it.

    Raises:
        ValueError: an argument is invalid; a collection is not on the meta device, or can't be
            compacted (:func:`~dist_sparse.compact` says which can't); a model has no compact
            collection, is sparsified again, or has default rows.

    Example::

        >>> import torch
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from dist_sparse import following
        >>> item = EmbeddingBagConfig(
        ...     name="item", num_embeddings=100_000_000, embedding_dim=64, feature_names=["item"]
        ... )
        >>> bags = EmbeddingBagCollection([item], device=torch.device("meta"))
        >>> bags = following(bags, rows={"item": 1_000_000})
        >>> bags.inner.embedding_bags["item"].weight.shape
        torch.Size([1000000, 64])
    """
    return _of_compact(model) if rows is None else _of_collection(model, rows)


def _of_collection(collection: nn.Module, rows: Mapping[str, int]) -> Any:
    torchrec = cast(Any, torchrec_port())
    found = torchrec and torchrec.collection(collection)
    if not found or found.is_sharded:
        raise ValueError(
            f"Invalid collection of type {type(collection).__name__}: must be an"
            " EmbeddingBagCollection or EmbeddingCollection that is not sharded yet."
        )
    if not all(parameter.is_meta for parameter in collection.parameters()):
        raise ValueError(
            "The collection must be on the meta device, device=torch.device('meta'): its tables"
            " have memory for all ids."
        )
    if reason := torchrec.compact_refusal(collection, collection):
        raise ValueError(f"This collection can't follow its traffic: {reason}.")
    configs = configs_of(collection)
    ids = {config.name: config.num_embeddings for config in configs}
    if not (isinstance(rows, Mapping) and rows and set(rows) <= set(ids)):
        raise ValueError(f"Invalid rows={rows!r}: the collection has the tables {sorted(ids)}.")
    indexes = {}
    for name, count in rows.items():
        checks.integer("rows", count, least=1, most=ids[name], of=name)
        indexes[name] = SlotIndex(ids[name], count)
    return _made(configs, indexes, found)


def _made(configs: list[Any], indexes: Mapping[str, Any], found: Collection) -> Any:
    """Return a following collection in the place of one that was found."""
    kind = FollowingEmbeddingBagCollection if found.pooled else FollowingEmbeddingCollection
    return kind(configs, indexes, found.weighted, torch.device("meta"))


def _of_compact(model: nn.Module) -> nn.Module:
    """Put following collections in the places of compact ones, around the rows that they store."""
    kinds = (CompactEmbeddingBagCollection, CompactEmbeddingCollection)
    replaced: dict[nn.Module, nn.Module] = {}
    for old in model.modules():
        if isinstance(old, kinds) and not isinstance(old, _Follows) and old.table_indexes():
            replaced[old] = _around(old, model)
    if not replaced:
        raise ValueError(
            f"{type(model).__name__} has no compact collection with removed rows, which compact()"
            " makes. Of a collection, give rows={table: count}."
        )
    return replace_modules(model, replaced)


def _around(old: Any, model: nn.Module) -> Any:
    """Return a following collection that has the rows of a compact one."""
    inner = old.inner
    found = collection_of(inner)
    if reason := cast(Any, torchrec_port()).compact_refusal(model, inner):
        raise ValueError(f"This collection can't follow its traffic: {reason}.")
    refuse_masked([(name, weight) for name, weight in inner.named_parameters()])
    stored = {table.name: table.rows for table in found.tables}
    indexes = {}
    for name, index in old.table_indexes().items():
        if index.default_row:
            raise ValueError(f"Table {name!r} has a default row, which is no one's slot.")
        # Kept rows are stored in the order of their ids.
        ids = index.kept().nonzero().view(-1)
        indexes[name] = SlotIndex(index.rows, stored[name], ids).to(ids.device)
    made = _made(configs_of(old), indexes, found)
    made.inner = inner
    return made.train(old.training)
