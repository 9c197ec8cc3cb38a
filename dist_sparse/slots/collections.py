"""Collections of TorchRec whose tables follow their traffic.

The rows of a following table are *slots*. As a compact collection, with slots in the place of kept
rows: ``inner`` stores them, and :class:`FollowingIds` translates ids in front of it. It notes the
ids of training batches until they are counted, and how many batches a train pipeline has translated
ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

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
from dist_sparse.compaction.replacing import places_of, put
from dist_sparse.compaction.row_index import REMOVED, UNKNOWN, RowIndex
from dist_sparse.enforcer.enforcer import refuse_masked
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.protocols import Collection
from dist_sparse.torchrec.collections import KeyedJaggedTensor, collection, configs_of
from dist_sparse.torchrec.port import compact_refusal

# Which id holds each slot

# In the place of an id: none holds the slot, or comes into it.
VACANT = -1

# A table of so many ids counts each of them. The reservation for the largest is the smallest int32.
MOST_COUNTED = 2**31 - 3

MOST_IDS = 2**62

# Of Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3): the high bits of the
# product are the bucket.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


def _swapped(ids: Tensor) -> Tensor:
    """Return reservations for ids, or the ids of reservations: -2 for 0, -3 for 1, and so on."""
    return -2 - ids


class _Buckets(NamedTuple):
    """The ids that hold slots, by bucket.

    Args:
        starts: where each bucket begins, int32 ``(2**bits,)``.
        ids: bucket after bucket, and as many places behind them as a bucket has at most.
        slots: of the ids, int32; behind them :data:`~dist_sparse.compaction.row_index.REMOVED`.
        longest: ids of the fullest bucket, at least 1.
    """

    starts: Tensor
    ids: Tensor
    slots: Tensor
    longest: int


class SlotIndex(nn.Module):
    """Which slot each id of one table holds.

    Args:
        rows: ids of the table, from 0.
        slots: rows that it stores.
        ids: of the first slots, int64.

    Attributes:
        id_of_slot: int32 ``(slots,)``, or int64 above :data:`MOST_COUNTED` ids, the state: an id,
            :data:`VACANT`, or ``-2 - id`` where a slot is reserved. Loading other values into it is
            enough.
        rows, stored: ids of the table; its slots.
        hashed: whether there are too many ids to count each.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.collections import SlotIndex
        >>> index = SlotIndex(rows=10, slots=3, ids=torch.tensor([2, 5, 9]))
        >>> index.hand_over(leaving=torch.tensor([5]), coming=torch.tensor([0]))
        >>> index(torch.tensor([0, 2, 5, 9, 10]))  # 0 comes, 5 has left, 10 is out of range
        tensor([-1,  0, -1,  2, -2], dtype=torch.int32)
        >>> index.admit()
        (tensor([0]), tensor([1]))
        >>> index(torch.tensor([0, 2, 5, 9]))
        tensor([ 1,  0, -1,  2], dtype=torch.int32)
    """

    id_of_slot: Tensor

    def __init__(self, rows: int, slots: int, ids: Tensor | Sequence[int] = ()) -> None:
        super().__init__()
        if not 1 <= rows <= MOST_IDS:
            raise ValueError(
                f"Invalid number of ids, {rows}: a following table has from 1 to {MOST_IDS}."
            )
        self.rows = rows
        self.stored = slots
        self.hashed = rows > MOST_COUNTED
        dtype = torch.int64 if self.hashed else torch.int32
        state = torch.full((slots,), VACANT, dtype=dtype)
        state[: len(ids)] = torch.as_tensor(ids)
        self.register_buffer("id_of_slot", state)
        # From half an id a bucket to one, if all slots are held.
        self._bits = max(1, (slots - 1).bit_length())
        # The state that the buckets were made of. A load writes into it, moving it replaces it.
        self._made_of: tuple[Tensor | None, int] = (None, -1)
        self._buckets: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A copied tensor counts its versions from 0 again: old buckets would seem to fit.
        return {**self.__dict__, "_made_of": (None, -1), "_buckets": None}

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of what lookups read."""
        starts, ids, slots, _ = self._current()
        return self.id_of_slot.nbytes + starts.nbytes + ids.nbytes + slots.nbytes

    @property
    def num_kept(self) -> int:
        """How many ids hold a slot."""
        return int((self.id_of_slot >= 0).count_nonzero())

    def forward(self, ids: Tensor) -> Tensor:
        """Return the slots of ids: int32, in their shape; of an id without a slot
        :data:`~dist_sparse.compaction.row_index.REMOVED`, of one out of ``[0, rows)``
        :data:`~dist_sparse.compaction.row_index.UNKNOWN`.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        buckets = self._current()
        given = ids.reshape(-1).long()
        # Cut to int32, an id out of range could be another one.
        inside = given.clamp(0, self.rows - 1)
        wanted = inside.to(buckets.ids.dtype)
        found = place = buckets.starts.index_select(0, self._bucket(inside))
        # At most one place has the id: all of a bucket are compared, and no branch is needed.
        for _ in range(1, buckets.longest):
            place = place + 1
            found = torch.where(buckets.ids.index_select(0, place) == wanted, place, found)
        slots = buckets.slots.index_select(0, found)
        slots = torch.where(buckets.ids.index_select(0, found) == wanted, slots, REMOVED)
        return torch.where(inside == given, slots, UNKNOWN).view(ids.shape)

    def holders(self) -> tuple[Tensor, Tensor]:
        """Return the ids that hold a slot, ascending, int64 ``(n,)``, and their slots, int64."""
        [slots] = (self.id_of_slot >= 0).nonzero(as_tuple=True)
        ids, order = self.id_of_slot[slots].long().sort()
        return ids, slots[order]

    def hand_over(self, leaving: Tensor, coming: Tensor) -> None:
        """Free the slots of the ids ``leaving``, and reserve slots for the ids ``coming``: the
        smallest free slot for the smallest id, and so on. Both are int64 ``(n,)``, ascending."""
        self.id_of_slot[self(leaving).long()] = VACANT
        [free] = (self.id_of_slot == VACANT).nonzero(as_tuple=True)
        self.id_of_slot[free[: len(coming)]] = _swapped(coming).to(self.id_of_slot.dtype)

    def admit(self) -> tuple[Tensor, Tensor]:
        """Let ids hold the slots that are reserved for them; return these ids and slots, both int64
        ``(n,)``."""
        [slots] = (self.id_of_slot < VACANT).nonzero(as_tuple=True)
        ids = _swapped(self.id_of_slot[slots])
        self.id_of_slot[slots] = ids
        return ids.long(), slots

    def _bucket(self, ids: Tensor) -> Tensor:
        """Return the bucket of ids, int64."""
        # The sign is shifted in, and masked away.
        last = (1 << self._bits) - 1
        return (ids * _MULTIPLIER).bitwise_right_shift_(64 - self._bits).bitwise_and_(last)

    def _current(self) -> _Buckets:
        """Return the buckets, made of the state as it is now."""
        state = self.id_of_slot
        made_of, version = self._made_of
        if made_of is state and version == state._version:
            found: _Buckets = self._buckets
            return found
        [slots] = (state >= 0).nonzero(as_tuple=True)
        bucket = self._bucket(state[slots].long())
        sizes = torch.bincount(bucket, minlength=1 << self._bits)
        slots = slots[bucket.int().argsort()]
        longest = max(1, int(sizes.max()))
        behind = state.new_full((longest,), VACANT)
        self._buckets = made = _Buckets(
            (sizes.cumsum(0) - sizes).int(),
            torch.cat([state[slots], behind]),
            torch.cat([slots.int(), behind.int()]),
            longest,
        )
        self._made_of = (state, state._version)
        return made


# Collections

# Ids of batches that are copied; then they are counted, id by id.
_NOTED = 1 << 22


class FollowingIds(CompactIds):
    """Translate a KeyedJaggedTensor of ids into one of slots, without the ids that have none.

    Args:
        tables: configurations of the whole tables.
        indexes: by table, of those that follow; other tables keep all of their rows.
        collection: the collection whose ids these are.

    Attributes:
        fates: by table, lookups in training on this rank since the last update, once batches are
            sorted out: of all ids; of ids of the table without a slot; of them, of ids that were
            never looked up before, known to their owners; of ids out of range. int64 ``(4,)``.
        ahead: how many training batches are translated, and not looked up yet.
    """

    def __init__(self, tables: Sequence[Any], indexes: Mapping[str, Any], collection: Any) -> None:
        super().__init__(tables, indexes, collection)
        self.fates = {name: torch.zeros(4, dtype=torch.int64) for name in indexes}
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
        batches = self._batches
        self._batches = []
        self._noted = 0
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for values, lengths in batches:
            for table, ids in zip(self._tables, torch.split(values, lengths), strict=True):
                if table in self.indexes:
                    parts[table].append(ids)
        for table, looked_up in parts.items():
            self._counted[table].append(self._distinct(table, torch.cat(looked_up)))

    def take_noted(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of a table that training has looked up on this rank since the
        last call, ascending, of the dtype of its state, ``(n,)``, and how often, int64 ``(n,)``,
        both on the CPU."""
        self.sort_out()
        counted, self._counted[table] = self._counted[table], []
        none = torch.empty(0, dtype=self.slots[table].id_of_slot.dtype)
        some, times = zip((none, none.long()), *counted, strict=True)
        ids, places = torch.unique(torch.cat(some), return_inverse=True)
        sums = torch.zeros(len(ids), dtype=torch.int64)
        return ids, sums.index_add_(0, places, torch.cat(times))

    def _distinct(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of lookups that are in range, and how often each occurs."""
        index = self.slots[table]
        inside = ids[(ids >= 0) & (ids < index.rows)].to(index.id_of_slot.dtype)
        found, times = torch.unique(inside, return_counts=True)
        missed = int(times[index(found) < 0].sum())
        self.fates[table] += torch.tensor([len(ids), missed, 0, len(ids) - len(inside)])
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


FollowingCollection = FollowingEmbeddingBagCollection | FollowingEmbeddingCollection


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


def _of_collection(given: nn.Module, rows: Mapping[str, int]) -> Any:
    found = collection(given)
    if found is None or found.is_sharded:
        raise ValueError(
            f"Invalid collection of type {type(given).__name__}: must be an"
            " EmbeddingBagCollection or EmbeddingCollection that is not sharded yet."
        )
    if not all(parameter.is_meta for parameter in given.parameters()):
        raise ValueError(
            "The collection must be on the meta device, device=torch.device('meta'): its tables"
            " have memory for all ids."
        )
    _refuse(given, given)
    configs = configs_of(given)
    ids = {config.name: config.num_embeddings for config in configs}
    if not rows or set(rows) - set(ids):
        raise ValueError(f"Invalid rows={rows!r}: the collection has the tables {sorted(ids)}.")
    indexes = {}
    for name, count in rows.items():
        checks.integer("rows", count, least=1, most=ids[name], of=name)
        indexes[name] = SlotIndex(ids[name], count)
    return _made(configs, indexes, found)


def _refuse(model: nn.Module, inner: nn.Module) -> None:
    if reason := compact_refusal(model, inner):
        raise ValueError(f"This collection can't follow its traffic: {reason}.")


def _made(configs: list[Any], indexes: Mapping[str, Any], found: Collection) -> Any:
    """Return a following collection in the place of one that was found."""
    kind = FollowingEmbeddingBagCollection if found.pooled else FollowingEmbeddingCollection
    return kind(configs, indexes, found.weighted, torch.device("meta"))


def _of_compact(model: nn.Module) -> nn.Module:
    """Put following collections in the places of compact ones, around the rows that they store."""
    # By exact class: not the ones that follow already.
    kinds = (CompactEmbeddingBagCollection, CompactEmbeddingCollection)
    replaced: dict[nn.Module, nn.Module] = {}
    for old in model.modules():
        if type(old) in kinds and cast(Any, old).table_indexes():
            replaced[old] = _around(old, model)
    if not replaced:
        raise ValueError(
            f"{type(model).__name__} has no compact collection with removed rows, which compact()"
            " makes. Of a collection, give rows={table: count}."
        )
    put(places_of(model, replaced), replaced)
    return replaced.get(model, model)


def _around(old: Any, model: nn.Module) -> Any:
    """Return a following collection that has the rows of a compact one."""
    inner = old.inner
    found = collection_of(inner)
    _refuse(model, inner)
    refuse_masked(list(inner.named_parameters()))
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
