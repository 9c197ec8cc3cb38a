"""TorchRec collections whose tables follow their traffic.

The rows of a following table are *slots*. The collection is built like a compact one, with slots
instead of kept rows: ``inner`` stores them, and :class:`FollowingIds` translates ids in front of
it. :class:`FollowingIds` also records the ids of training batches until they are counted, and which
batches a train pipeline has translated ahead.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dist_sparse import checks
from dist_sparse.compaction.collections import (
    CompactEmbeddingBagCollection,
    CompactEmbeddingCollection,
    CompactIds,
    IndexedCollection,
    initial_bounds,
    stored_rows,
)
from dist_sparse.compaction.replacing import Change
from dist_sparse.compaction.row_index import REMOVED, UNKNOWN, RowIndex
from dist_sparse.masking.masks import Held
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import check_module, collection_of
from dist_sparse.tables.protocols import Collection
from dist_sparse.torchrec.collections import KeyedJaggedTensor, collection, configs_of
from dist_sparse.torchrec.port import compact_refusal

# The id that holds each slot

# Marks a slot that no id holds, and that is reserved for none.
VACANT = -1

# Tables of at most this many ids count each id. The reservation of the largest id, -2 - id, is then
# the smallest int32.
MOST_COUNTED = 2**31 - 3

# The bound keeps all sums and differences of ids within int64.
MOST_IDS = 2**62

# 2**64 / golden ratio, as a signed int64: Fibonacci hashing (Knuth, The Art of Computer
# Programming, volume 3, section 6.4). The high bits of the product are the bucket.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64

# The first multiplier of MurmurHash3's finalizer, as a signed int64.
_MIXER = 0xFF51AFD7ED558CCD - 2**64


def hashed_row(ids: Tensor, rows: int) -> Tensor:
    """Return which of ``rows`` rows ids share, int64 in the shape of ``ids``, int64.

    The high half of a product is mixed into its low half and multiplied again: a product alone
    leaves most rows empty for some numbers of rows and ids.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.slotted import hashed_row
        >>> hashed_row(torch.arange(6), 3)
        tensor([0, 0, 0, 0, 0, 0])
    """
    mixed = ids * _MULTIPLIER
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    mixed *= _MIXER
    # The top 31 bits, a number below 1 with 31 binary places, times the rows.
    return ((mixed >> 33) & 0x7FFFFFFF).mul_(rows).bitwise_right_shift_(31)


class _Buckets(NamedTuple):
    """A hash table of the held slots, keyed by the ids that hold them.

    It stores no ids: ``SlotIndex.id_of_slot`` has them. Every rank has the whole table, so 4 bytes
    a slot here are 4 bytes a slot and rank.

    Args:
        state, version: the ``id_of_slot`` that it was built from, and its version then.
        starts: the first place of each bucket in ``slots``, int32 ``(2**bits,)``.
        slots: bucket after bucket, int32, padded with ``longest`` zeros so that a lookup may read
            ``longest`` places from any start.
        longest: slots in the fullest bucket, at least 1.
    """

    state: Tensor
    version: int
    starts: Tensor
    slots: Tensor
    longest: int


class SlotIndex(nn.Module):
    """The slot that each id of one table holds.

    Args:
        rows: number of ids; they begin at 0.
        slots: number of slots, the first rows that the table stores.
        ids: the holders of the first slots, int64.
        nursery: number of rows after the slots, which the ids without a slot share.

    Attributes:
        id_of_slot: int32 ``(slots,)``, or int64 above :data:`MOST_COUNTED` ids, the whole state: an
            id, :data:`VACANT`, or ``-2 - id`` where a slot is reserved. It may be overwritten in
            place or replaced: lookups rebuild their hash table.
        table: its name, for messages; :class:`FollowingIds` sets it.
        rows, slots, nursery, stored: number of ids, of slots, of nursery rows, and of both kinds of
            rows.
        nursery_scale: what a lookup multiplies a nursery row by. While it is 0, ids without a slot
            read zeros, and train nothing.
        hashed: whether the table has too many ids to count each.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.slotted import SlotIndex
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

    def __init__(
        self, rows: int, slots: int, ids: Tensor | Sequence[int] = (), nursery: int = 0
    ) -> None:
        super().__init__()
        self.table = ""
        self.rows = checks.integer("num_embeddings", rows, least=1, most=MOST_IDS)
        self.slots, self.nursery, self.stored = slots, nursery, slots + nursery
        self.nursery_scale = 0.0
        self.hashed = rows > MOST_COUNTED
        dtype = torch.int64 if self.hashed else torch.int32
        state = torch.full((slots,), VACANT, dtype=dtype)
        state[: len(ids)] = torch.as_tensor(ids)
        self.register_buffer("id_of_slot", state)
        # If all slots are held, a bucket has between half a slot and one on average.
        self._bits = max(1, (slots - 1).bit_length())
        self._buckets: _Buckets | None = None

    def refuse_invalid(self, state: Tensor) -> None:
        """Raise ValueError if a tensor can't be :attr:`id_of_slot`: it is damaged, or of another
        table."""
        taken = state[state != VACANT]
        # Reserved ids too: see admit().
        ids = torch.where(taken < 0, -2 - taken, taken)
        own = self.id_of_slot
        fits = (state.dtype, state.shape) == (own.dtype, own.shape)
        if not fits or (ids >= self.rows).any() or len(torch.unique(ids)) < len(ids):
            raise ValueError(
                f"Invalid id_of_slot of table {self.table!r}: must be distinct ids in"
                f" [0, {self.rows}), {own.dtype} {tuple(own.shape)}."
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # If the key is missing, torch raises.
        self.refuse_invalid(state_dict.get(f"{prefix}id_of_slot", self.id_of_slot))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        # The version of a copied tensor starts at 0 again, so stale buckets could pass as current.
        return {**self.__dict__, "_buckets": None}

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the hash table, on this rank."""
        buckets = self._current_buckets()
        return self.id_of_slot.nbytes + buckets.starts.nbytes + buckets.slots.nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows that ids read: their slots, or their nursery rows. Like
        :meth:`slots_of` in all else."""
        slots = self.slots_of(ids)
        if not (self.nursery and self.nursery_scale):
            return slots
        return torch.where(slots == REMOVED, self.nursery_rows(ids.long()).int(), slots)

    def nursery_rows(self, ids: Tensor) -> Tensor:
        """Return the nursery rows of ids, which a hash chooses: int64 in the shape of ``ids``,
        int64."""
        return hashed_row(ids, self.nursery).add_(self.slots)

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, int32 in the shape of ``ids``:
        :data:`~dist_sparse.compaction.row_index.REMOVED` for an id without a slot,
        :data:`~dist_sparse.compaction.row_index.UNKNOWN` for an id outside ``[0, rows)``.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        state, _, starts, slots, longest = self._current_buckets()
        flat = ids.reshape(-1).long()
        # Clamp before the cast: an id out of range, cut to int32, could equal another id.
        inside = flat.clamp(0, self.rows - 1)
        wanted = inside.to(state.dtype)
        place = starts.index_select(0, self._bucket(inside))
        found = slots.index_select(0, place)
        # Every lookup compares as many places as the fullest bucket has. Reading into the next
        # bucket or the padding is harmless: a slot counts only if this id holds it, and an id holds
        # at most one.
        for _ in range(1, longest):
            place = place + 1
            slot = slots.index_select(0, place)
            found = torch.where(state.index_select(0, slot) == wanted, slot, found)
        found = torch.where(state.index_select(0, found) == wanted, found, REMOVED)
        return torch.where(inside == flat, found, UNKNOWN).view(ids.shape)

    def holders(self) -> tuple[Tensor, Tensor]:
        """Return the ids that hold a slot, ascending, int64 ``(n,)``, and their slots, int64."""
        [slots] = (self.id_of_slot >= 0).nonzero(as_tuple=True)
        ids, order = self.id_of_slot[slots].long().sort()
        return ids, slots[order]

    def hand_over(self, leaving: Tensor, coming: Tensor) -> None:
        """Free the slots of the ids ``leaving``, and reserve slots for the ids ``coming``: the
        smallest free slot for the smallest id, and so on. Both are int64 ``(n,)``, ascending.

        A reserved slot belongs to no id yet: lookups of ``coming`` find none before
        :meth:`admit`."""
        state, buckets = self.id_of_slot, self._current_buckets()
        state[self.slots_of(leaving).long()] = VACANT
        [free] = (state == VACANT).nonzero(as_tuple=True)
        state[free[: len(coming)]] = (-2 - coming).to(state.dtype)
        # The hash table stays valid: a lookup compares the holder, and these slots have none.
        self._buckets = buckets._replace(version=state._version)

    def reserved(self) -> tuple[Tensor, Tensor]:
        """Return the ids that slots are reserved for, and these slots, both int64 ``(n,)``."""
        [slots] = (self.id_of_slot < VACANT).nonzero(as_tuple=True)
        # A reservation is -2 - id, which is its own inverse.
        return -2 - self.id_of_slot[slots].long(), slots

    def admit(self) -> tuple[Tensor, Tensor]:
        """Turn reservations into holders; return the new holders and their slots, both int64
        ``(n,)``."""
        ids, slots = self.reserved()
        if len(slots):
            self.id_of_slot[slots] = ids.to(self.id_of_slot.dtype)
            # Now, in step(): otherwise the next forward would build it.
            self._current_buckets()
        return ids, slots

    def _bucket(self, ids: Tensor) -> Tensor:
        """Return the bucket of ids, int64."""
        # Right shifts of int64 copy the sign: the mask removes it.
        last = (1 << self._bits) - 1
        return (ids * _MULTIPLIER).bitwise_right_shift_(64 - self._bits).bitwise_and_(last)

    def _current_buckets(self) -> _Buckets:
        """Return the hash table of the current state, rebuilt if the state has changed."""
        state = self.id_of_slot
        buckets = self._buckets
        # A load writes into the tensor, and moving the module replaces it.
        if not buckets or buckets.state is not state or buckets.version != state._version:
            [slots] = (state >= 0).nonzero(as_tuple=True)
            bucket = self._bucket(state[slots].long())
            sizes = torch.bincount(bucket, minlength=1 << self._bits)
            longest = max(1, int(sizes.max()))
            starts = (sizes.cumsum(0) - sizes).int()
            slots = nn.functional.pad(slots[bucket.int().argsort()], (0, longest)).int()
            self._buckets = buckets = _Buckets(state, state._version, starts, slots, longest)
        return buckets


# Collections

# Copied ids are counted once there are this many: 32 MiB of int64.
_MOST_COPIED = 1 << 22


class LookupStats(NamedTuple):
    """Training lookups of a table since an update, by what they found.

    Args:
        lookups: all lookups.
        missed: lookups of ids without a slot.
        unseen: the part of ``missed`` whose ids had no count before: never looked up, or forgotten.
            Only the owner of an id knows this, so it adds the number.
        out_of_range: lookups of ids outside ``[0, rows)``.
    """

    lookups: int = 0
    missed: int = 0
    unseen: int = 0
    out_of_range: int = 0


class FollowingIds(CompactIds):
    """Translate a KeyedJaggedTensor of ids into one of slots, without the ids that have no slot.

    Args:
        tables: configurations of the whole tables.
        indexes: the :class:`SlotIndex` of each table that follows its traffic; other tables keep
            all of their rows.
        collection: the collection that these ids are looked up in.

    Attributes:
        lookup_stats: the :class:`LookupStats` of each table, int64 ``(4,)``: training lookups on
            this rank since the last update, as of the last :meth:`count_batches`.
    """

    def __init__(self, tables: Sequence[Any], indexes: Mapping[str, Any], collection: Any) -> None:
        super().__init__(tables, indexes, collection)
        for name, index in indexes.items():
            index.table = name
        self.lookup_stats = {name: torch.tensor(LookupStats()) for name in indexes}
        # Training batches that are translated and not looked up yet, ids and lengths as below. A
        # weak reference does not keep alive what a pipeline drops.
        self._in_flight: list[tuple[Any, Tensor, list[int]]] = []
        # Ids of training batches, and how many each feature has. A step only copies them; counting
        # waits for an update.
        self._batches: list[tuple[Tensor, list[int]]] = []
        self._num_copied = 0
        # Distinct ids of earlier batches, and how often each was looked up.
        self._counted: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in indexes}
        # Maps a batch to what its ids read when it was translated, as read() returns it. Keys are
        # weak, because a batch that a pipeline drops is never looked up.
        self._read: Any = WeakIdKeyDictionary()

    @property
    def ahead(self) -> int:
        """How many training batches are translated and not looked up yet."""
        return sum(batch() is not None for batch, *_ in self._in_flight)

    @property
    def slots(self) -> dict[str, SlotIndex]:
        """The index of each table that follows its traffic."""
        return dict(cast(Any, self.indexes).items())

    def record_lookup(self, features: object) -> None:
        """Record that the collection has looked up a batch: now it counts. A batch in flight does
        not, because a run that resumes from a checkpoint translates it again."""
        for place, (translated, values, lengths) in enumerate(self._in_flight):
            if translated() is features:
                # Pipelines look batches up in the order of their translation: those before this one
                # were dropped, at the end of an epoch or by an exception.
                del self._in_flight[: place + 1]
                self._batches.append((values, lengths))
                self._num_copied += len(values)
                break
        if self._num_copied > _MOST_COPIED:
            self.count_batches()

    def read(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor | None]:
        """Return which ids of a batch had a row when it was translated: bool ``(n,)``, in the order
        of :meth:`ordered`; and what their rows are multiplied by: float32 ``(n,)``, or None."""
        found: tuple[Tensor, Tensor | None] | None = self._read.get(features)
        if found is None:
            ordered = self.ordered(features)
            rows = self.rows(ordered)
            found = rows >= 0, self._scales(ordered, rows)
        return found

    def weights(self, ordered: KeyedJaggedTensor, rows: Tensor) -> Tensor | None:
        """Return the weight of each id: float32 ``(n,)``, or None. Of a nursery row, a bag reads a
        multiple."""
        weights = super().weights(ordered, rows)
        # Sequences are multiplied as they are returned.
        scales = self._scales(ordered, rows) if self.collection[0].pooled else None
        if weights is None or scales is None:
            return scales if weights is None else weights
        return weights.float() * scales

    def _scales(self, ordered: KeyedJaggedTensor, rows: Tensor) -> Tensor | None:
        """Return what the row of each id is multiplied by: float32 ``(n,)``; None if all are 1."""
        indexes = self.slots
        if all(index.nursery_scale in (0, 1) for index in indexes.values()):
            return None
        slots, scales = [], []
        for table in self.feature_tables:
            index = indexes.get(table)
            # A table that keeps all rows has none above.
            slots.append(2**31 - 1 if index is None else index.slots)
            scales.append(1.0 if index is None else index.nursery_scale)

        def of_ids(values: list[Any]) -> Any:
            # Most collections have one value.
            if len(set(values)) == 1:
                return values[0]
            each = torch.tensor(values, device=rows.device)
            lengths = torch.tensor(ordered.length_per_key(), device=rows.device)
            return torch.repeat_interleave(each, lengths, output_size=len(rows))

        return torch.where(rows >= of_ids(slots), of_ids(scales), 1.0)

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return a bitmap of the ids that hold slots, by table. :meth:`_Following.table_slots` has
        the slots.

        Raises:
            ValueError: a table has more ids than a bitmap can have.
        """
        bitmaps = {}
        for name, index in self.slots.items():
            if index.hashed:
                raise ValueError(
                    f"Table {name!r} has {index.rows} ids; compact tables and artifacts can have at"
                    f" most {MOST_COUNTED}."
                )
            ids, _ = index.holders()
            kept = torch.zeros(index.rows, dtype=torch.bool, device=ids.device)
            bitmaps[name] = RowIndex.of(kept.index_fill_(0, ids, True))
        return bitmaps

    def count_batches(self) -> None:
        """Count the ids of recorded batches, and update :attr:`lookup_stats`.

        Call it before ids are admitted: a lookup counts as missed by the current index. For the
        batches that were in flight at an update, this may differ from what they read."""
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for values, lengths in self._batches:
            for table, ids in zip(self.feature_tables, torch.split(values, lengths), strict=True):
                if table in self.indexes:
                    parts[table].append(ids)
        self._batches = []
        self._num_copied = 0
        for table, looked_up in parts.items():
            # int64: the number of rows may not fit the dtype of ids.
            self._counted[table].append(self._count_distinct(table, torch.cat(looked_up).long()))

    def carry_over(self, table: str, first: int, lookups: Tensor) -> None:
        """Count lookups from before this collection existed.

        Args:
            first: the first id that they count.
            lookups: of ids in their order, ``(n,)``; fractions are rounded.
        """
        # Only what is looked up becomes int64: a table may have 100M ids.
        [places] = (lookups > 0.5).nonzero(as_tuple=True)
        ids = (places + first).to(self.slots[table].id_of_slot.dtype)
        self._counted[table].append((ids.cpu(), lookups[places].round().long().cpu()))

    def drop_counts(self, table: str) -> None:
        """Forget the lookups that :meth:`take_counts` would return."""
        self._batches = []
        self._num_copied = 0
        self._counted[table] = []

    def take_counts(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of a table that training has looked up on this rank since the
        last call, ascending, in the dtype of ``id_of_slot``, ``(n,)``, and how often, int64
        ``(n,)``, both on the CPU."""
        self.count_batches()
        counted = self._counted[table]
        self._counted[table] = []
        if len(counted) == 1:
            return counted[0]
        # torch.cat refuses an empty list.
        none = torch.empty(0, dtype=self.slots[table].id_of_slot.dtype)
        some, times = zip((none, none.long()), *counted, strict=True)
        ids, places = torch.unique(torch.cat(some), return_inverse=True)
        sums = torch.zeros(len(ids), dtype=torch.int64)
        return ids, sums.index_add_(0, places, torch.cat(times))

    def _count_distinct(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids in range, and how often each occurs; update the statistics."""
        index = self.slots[table]
        inside = ids[(ids >= 0) & (ids < index.rows)].to(index.id_of_slot.dtype)
        distinct, times = torch.unique(inside, return_counts=True)
        missed = int(times[index.slots_of(distinct) < 0].sum())
        stats = LookupStats(len(ids), missed, out_of_range=len(ids) - len(inside))
        self.lookup_stats[table] += torch.tensor(stats)
        return distinct.cpu(), times.cpu()

    def rows_of(self, table: str, ids: Tensor) -> Tensor:
        # The base class reads a map of all ids, which each update would rebuild.
        if table not in self.indexes:
            return super().rows_of(table, ids)
        slots: Tensor = self.indexes[table](ids)
        return slots

    def record_batch(
        self, features: KeyedJaggedTensor, ordered: KeyedJaggedTensor, rows: Tensor
    ) -> None:
        if not self.collection[0].pooled:
            # An update may change the index before the output of this batch is assembled.
            self._read[features] = rows >= 0, self._scales(ordered, rows)
        if torch.is_grad_enabled() and self.collection[0].training:
            # Copy the ids: the training loop may reuse its buffers.
            ids = ordered.values().clone()
            self._in_flight.append((weakref.ref(features), ids, ordered.length_per_key()))


class _Following(IndexedCollection):
    """The common base of both kinds of following collections."""

    translation: ClassVar[type[CompactIds]] = FollowingIds
    # A mask belongs to a row, and this row is a slot, whose holder changes.
    refused: ClassVar = "its rows are slots, which FollowingTables gives to other ids"

    @property
    def following_ids(self) -> FollowingIds:
        """The translation of ids. A pipeline may have replaced the attribute ``ids``."""
        [ids] = self.translations
        assert isinstance(ids, FollowingIds)
        return ids

    def table_slots(self) -> dict[str, Tensor]:
        """Return the held slots of each table, in the order of the ids that hold them."""
        indexes = self.following_ids.slots.items()
        return {name: index.holders()[1].cpu() for name, index in indexes}

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Return the embeddings, as the collection of TorchRec does."""
        found = super().forward(features)
        self.following_ids.record_lookup(features)
        return found


class FollowingEmbeddingBagCollection(_Following, CompactEmbeddingBagCollection):
    """An EmbeddingBagCollection whose tables store slots. The most looked-up ids hold them; other
    ids read zeros and train nothing. :func:`following` returns it;
    :class:`~dist_sparse.extras.following.FollowingTables` updates which ids hold slots."""


class FollowingEmbeddingCollection(_Following, CompactEmbeddingCollection):
    """An EmbeddingCollection whose tables store slots; see
    :class:`FollowingEmbeddingBagCollection`."""


FollowingCollection = FollowingEmbeddingBagCollection | FollowingEmbeddingCollection


def following(module: nn.Module, rows: Mapping[str, int], nursery: float = 0.1) -> Any:
    """Return a collection whose tables store fewer rows than they have ids, and follow their
    traffic. No table ever exists whole.

    A row of such a table is a slot, which one id holds; the last rows are its *nursery*. Each id
    without a slot reads and trains a nursery row, which a hash chooses, and is counted.
    :class:`~dist_sparse.extras.following.FollowingTables`, built from the
    sharded model, gives the slots to the most looked-up ids at regular intervals; at first no id
    holds one.
    :func:`follow_kept_rows` makes such collections of tables that are already trained.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection on the meta device, whose
            ``num_embeddings`` counts ids, before DistributedModelParallel.
        rows: how many rows to store of each table. Tables that are not listed keep a row for each
            id.
        nursery: the share of these rows that is the nursery, in [0, 1): rounded, at least one row.
            With 0, ids without a slot read zeros and train nothing.

    Returns:
        A module that replaces the collection and takes the same ids; its ``inner`` is TorchRec's
        collection of slots.

    Raises:
        ValueError: an argument is invalid; the collection is not on the meta device, or can't be
            compacted (:func:`~dist_sparse.compact` says which can't).

    Example::

        >>> import torch
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from dist_sparse.extras.following import following
        >>> item = EmbeddingBagConfig(
        ...     name="item", num_embeddings=100_000_000, embedding_dim=64, feature_names=["item"]
        ... )
        >>> bags = EmbeddingBagCollection([item], device=torch.device("meta"))
        >>> bags = following(bags, rows={"item": 1_000_000})
        >>> bags.inner.embedding_bags["item"].weight.shape
        torch.Size([1000000, 64])
    """
    check_module(module)
    found = collection(module)
    if found is None or found.is_sharded:
        raise ValueError(
            f"Invalid collection of type {type(module).__name__}: must be an"
            " EmbeddingBagCollection or EmbeddingCollection that is not sharded."
        )
    is_meta = all(parameter.is_meta for parameter in module.parameters())
    reason = compact_refusal(module, module)
    checks.refuse(
        {
            "The collection must be on the meta device: its tables have memory for all ids.": (
                not is_meta
            ),
            f"This collection can't follow its traffic: {reason}.": reason,
        }
    )
    configs = configs_of(module)
    ids = {config.name: config.num_embeddings for config in configs}
    if not (isinstance(rows, Mapping) and set() < rows.keys() <= ids.keys()):
        raise ValueError(f"Invalid rows={rows!r}: the collection has the tables {sorted(ids)}.")
    nursery = checks.number("nursery", nursery, least=0, most=1)
    indexes = {}
    for name, count in rows.items():
        count = checks.integer("rows", count, least=1, most=ids[name], of=name)
        shared = max(1, round(nursery * count)) if nursery else 0
        if shared >= count:
            raise ValueError(
                f"Table {name!r}: nursery={nursery} of rows={count} leaves no row for one id."
            )
        indexes[name] = SlotIndex(ids[name], count - shared, nursery=shared)
    return _build(configs, indexes, found)


def _build(configs: list[Any], indexes: Mapping[str, Any], found: Collection) -> Any:
    """Return a following collection of the same kind as ``found``, on the meta device."""
    kind = FollowingEmbeddingBagCollection if found.pooled else FollowingEmbeddingCollection
    return kind(configs, indexes, found.weighted, torch.device("meta"))


def follow_kept_rows(changes: Sequence[Change], store: PackedStore) -> None:
    """Turn the rows of compact collections into slots, held by the kept ids:
    ``compact(model, sparse, convert=follow_kept_rows)``.

    :class:`~dist_sparse.extras.following.FollowingTables` gives the slots to the most looked-up ids
    from then on. It continues from the lookups that the sparsifier has counted
    (``score="frequency"``). Without them, and for tables that were compact before, it counts from
    0.

    Args:
        changes, store: what :func:`~dist_sparse.compact` passes.

    Raises:
        ValueError: rows of a table can't become slots, or FollowingTables would refuse it.

    Example::

        >>> from dist_sparse import compact
        >>> from dist_sparse.extras.following import FollowingTables, follow_kept_rows
        >>> # model = compact(model, sparse, convert=follow_kept_rows)
        >>> # slots = FollowingTables(model, optimizer, every=100, admit_after=2)
    """
    names = set[str]()
    for change in changes:
        site = change.site
        shrinking = {table for table, kept in change.kept.items() if not kept.all()}
        cant = f"{site.label} can't follow its traffic"
        if not site.is_sharded:
            raise ValueError(f"{cant}: it is in no sharded collection of TorchRec.")
        if change.widths:
            raise ValueError(f"{cant}: it loses columns.")
        if any(index.default_row for index in change.new.table_indexes().values()):
            raise ValueError(f"{cant}: it would have a default row.")
        if names & shrinking:
            raise ValueError(f"{cant}: another table has its name.")
        names |= shrinking
    for change in changes:
        # Tables that were compact before are left out: their rows are not ids.
        whole = change.names.keys() - change.site.indexes().keys()
        counted = {own: store.table(change.names[own]).leftmost for own in whole}
        change.new = _follow_kept(change.new, counted)


def _follow_kept(compact: Any, counted: Mapping[str, Sequence[Held]]) -> Any:
    """Return a following collection that takes over ``inner``, the kept rows of a compact one.

    Args:
        counted: shards whose lookups this rank has counted, by table; their rows are ids.
    """
    indexes = {}
    rows = stored_rows(compact.inner)
    for name, index in compact.table_indexes().items():
        # Rows that pad a shard are not slots. A model that following() builds has none, so no new
        # process could load the checkpoint.
        if rows[name] > max(1, index.stored):
            raise ValueError(
                f"Table {name!r} keeps {index.stored} rows, too few for all of its ranks to have"
                f" some: keep at least {rows[name]}, or shard it by columns before."
            )
        # This raises now for tables whose new rows could not be drawn.
        initial_bounds(compact, name)
        # Kept rows are stored in the order of their ids, so the first id holds the first slot.
        ids = index.kept().nonzero().view(-1)
        indexes[name] = SlotIndex(index.rows, max(1, index.stored), ids).to(ids.device)
    new = _build(configs_of(compact), indexes, collection_of(compact.inner))
    new.inner = compact.inner
    for table in indexes.keys() & counted.keys():
        for held in counted[table]:
            new.following_ids.carry_over(table, held.mask.rect.row, held.counts)
    return new.train(compact.training)
