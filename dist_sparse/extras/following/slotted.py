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
from dist_sparse.extras.following.slot_index import MOST_COUNTED, SlotIndex
from dist_sparse.ids.row_index import UNKNOWN, RowIndex
from dist_sparse.masking.masks import Held
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import check_module, collection_of
from dist_sparse.tables.protocols import Collection
from dist_sparse.torchrec.collections import KeyedJaggedTensor, collection, configs_of
from dist_sparse.torchrec.port import compact_refusal

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

    records: ClassVar = True

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

    def _weights(self, ordered: KeyedJaggedTensor, rows: Tensor) -> Tensor | None:
        """Return the weight of each id: float32 ``(n,)``, or None. Of a nursery row, a bag reads a
        multiple."""
        weights: Tensor | None = ordered.weights_or_none()
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

    def rows(self, ordered: KeyedJaggedTensor) -> Tensor:
        # The base class reads maps and bitmaps of all ids, which each update would rebuild.
        parts = torch.split(ordered.values(), ordered.length_per_key())
        return torch.cat(list(map(self._rows_of, self.feature_tables, parts)))

    def _rows_of(self, table: str, ids: Tensor) -> Tensor:
        """Return the stored row of each id of a table, as :meth:`rows`."""
        if table in self.indexes:
            slots: Tensor = self.indexes[table](ids)
            return slots
        is_known = (ids >= 0) & (ids < self.num_ids[table])
        return torch.where(is_known, ids.int(), UNKNOWN)

    def record(
        self, features: KeyedJaggedTensor, ordered: KeyedJaggedTensor, rows: Tensor
    ) -> Tensor | None:
        if not self.collection[0].pooled:
            # An update may change the index before the output of this batch is assembled.
            self._read[features] = rows >= 0, self._scales(ordered, rows)
        if torch.is_grad_enabled() and self.collection[0].training:
            # Copy the ids: the training loop may reuse its buffers.
            ids = ordered.values().clone()
            self._in_flight.append((weakref.ref(features), ids, ordered.length_per_key()))
        return self._weights(ordered, rows)


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
    ids share nursery rows. :func:`following` returns it;
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
