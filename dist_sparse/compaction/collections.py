"""TorchRec collections that store kept rows only, and take the ids of the whole tables.

A plain TorchRec collection, ``inner``, holds the kept rows: DistributedModelParallel, planners,
fused optimizers and checkpoints treat it as any other. In front of it, :class:`CompactIds`
translates ids to rows. It drops the ids of removed rows before the input distribution, so they cost
neither a message nor a lookup. Outputs equal the outputs of whole tables in which removed rows are
zero.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from dist_sparse.compaction.tables import CompactCollection
from dist_sparse.ids.row_index import (
    REMOVED,
    UNKNOWN,
    RowIndex,
    RowIndexes,
    UnknownLookups,
)
from dist_sparse.tables.jagged import check_lengths
from dist_sparse.tables.modules import collection_of
from dist_sparse.torchrec.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    LazyAwaitable,
    PoolingType,
    configs_of,
    get_embedding_names_by_table,
    is_sharded,
    table_configs,
    uniform_bounds,
)
from dist_sparse.torchrec.kernels import select_jagged
from dist_sparse.torchrec.port import reordered, row_shards

_log = logging.getLogger(__name__)

# This many ids of a collection, small tables first, have a map of 4 bytes per id: at most 16 MiB.
# Larger tables use their bitmaps, a quarter of a byte per id: lookups are many times slower.
MAPPED_ROWS = 1 << 22


class _Lookups(NamedTuple):
    """What a translation of ids reads.

    Args:
        state: the device of the ids, and the identity and version of the bits of each index.
        words: these bits: while they are here, no other tensor can have their identity.
        maps: the row of every id of a small table, by table; none on a device.
        mapped: the place of each feature whose table has a map, with the map.
        others: the places of the other features.
        joined: the index of the other features.
    """

    state: list[object]
    words: list[Tensor]
    maps: dict[str, Tensor]
    mapped: list[tuple[int, Tensor]]
    others: list[int]
    joined: RowIndexes


def _read_inside(rows: Tensor, ids: Tensor) -> Tensor:
    """Return the row of each id by a map of a table, :data:`UNKNOWN` for ids out of range."""
    inside = ids.clamp(0, len(rows) - 1)
    return torch.where(inside == ids, rows.index_select(0, inside), UNKNOWN)


def _read_others(lookups: _Lookups, parts: list[Tensor]) -> None:
    """Replace the ids of the features without a map by their rows, in one pass."""
    ids = [parts[place] for place in lookups.others]
    sizes = [len(part) for part in ids]
    found, known = lookups.joined(torch.cat(ids), torch.tensor(sizes))
    rows = torch.where(known, found, UNKNOWN)
    for place, part in zip(lookups.others, torch.split(rows, sizes), strict=True):
        parts[place] = part


class CompactIds(nn.Module):
    """Translate a KeyedJaggedTensor of ids into one of stored rows, without the ids that have no
    row.

    It is a module of its own, so that ``TrainPipelineSparseDist(pipeline_postproc=True)`` runs it
    ahead, with the input distribution.

    Floating weights of ids become float32, as in FBGEMM's kernels.

    Ids out of range are dropped too, even for tables that keep all rows: they read and train no
    row. Before that, FBGEMM's ``bounds_check_mode`` of the table applies, as without compaction: it
    raises a RuntimeError (FATAL), logs (WARNING) or ignores the id (IGNORE). Tables without a fused
    optimizer raise.

    Args:
        tables: configurations of the whole tables.
        indexes: by table, for the tables that do not store a row for each id.
        collection: the compact collection that these ids are looked up in.

    Attributes:
        names: the output names of the collection, in the order of the tables; the keys of the
            result.
        indexes: as given.
        collection: the compact collection, in a list.
        feature_tables: the table of each feature, in the order of :meth:`ordered`.
        num_ids: the number of ids of each table.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig | EmbeddingConfig],
        indexes: Mapping[str, RowIndex],
        collection: Any,
    ) -> None:
        super().__init__()
        self.names = list(chain(*get_embedding_names_by_table(list(tables))))
        # In a list, because a module attribute would make the collection its own descendant.
        self.collection = [collection]
        self._features = [*chain.from_iterable(table.feature_names for table in tables)]
        self.feature_tables = [table.name for table in tables for _ in table.feature_names]
        self.num_ids = {table.name: table.num_embeddings for table in tables}
        self._means = [each.name for each in table_configs(tables) if each.pooling == "mean"]
        self.indexes = nn.ModuleDict(indexes)
        # A list: in each forward, reading a module of another one takes as long as a short lookup.
        self._index_list = list(indexes.values())
        self._unknown = UnknownLookups(self.num_ids, self.feature_tables)
        # Small tables first: more lookups for the same memory.
        small = sorted(indexes, key=self.num_ids.__getitem__)
        sums = list(accumulate(self.num_ids[name] for name in small))
        self._mapped = set(small[: bisect_right(sums, MAPPED_ROWS)])
        self._built: _Lookups | None = None

    @property
    def unknown(self) -> dict[str, int]:
        """Lookups of each table that this rank has dropped because their ids were out of range."""
        return self._unknown.tally.counts

    @property
    def nbytes(self) -> int:
        """Bytes of the indexes, and of the maps that lookups have built so far."""
        indexes: Iterable[Any] = self.indexes.values()
        maps_by_table = {} if self._built is None else self._built.maps
        maps = sum(each.nbytes for each in maps_by_table.values())
        return sum([int(index.nbytes) for index in indexes], maps)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the rows of the ids that have one, under the keys :attr:`names`.

        Raises:
            ValueError: compact collections do not look up this kind of batch as whole tables do.
                Raised on the rank whose batch it is, before the input distribution.
            RuntimeError: an id is out of range, and its table raises then; names table, id and
                rows.
        """
        self._refuse_batch(features)
        ordered = reordered(features, self._features)
        rows, lengths = self.rows(ordered), ordered.lengths()
        # One minimum tells whether all ids have a row, and whether one is out of range.
        least = int(rows.min()) if len(rows) else 0
        # UNKNOWN < REMOVED.
        if least < REMOVED:
            flags = rows == UNKNOWN
            self._report(self._unknown.add(ordered.values(), flags, ordered.length_per_key()))
        weights = ordered.weights_or_none()
        if least < 0:
            kept = rows >= 0
            weights = None if weights is None else weights.masked_select(kept)
            # FBGEMM's operator filters ids and lengths in one pass.
            rows, lengths = select_jagged(rows, lengths, kept)
        return KeyedJaggedTensor(
            keys=self.names,
            values=rows.to(ordered.values().dtype),
            weights=None if weights is None else weights.float(),
            lengths=lengths,
        )

    def _refuse_batch(self, features: KeyedJaggedTensor) -> None:
        """Raise ValueError for a batch that TorchRec looks up in a special way, or differently by
        sharding."""
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError(
                "Batch sizes that differ between features, and inverse indices, are not supported"
                " by compact collections: give all features one batch size, with the ids of each"
                " sample, or train the masked model; expand() restores it."
            )
        ids, weights = features.values(), features.weights_or_none()
        # Ids after the last bag are refused: TorchRec adds them to it in some shardings.
        check_lengths(ids, features.lengths(), len(features.keys()))
        if weights is not None:
            self._refuse_weights(weights, ids)

    def _refuse_weights(self, weights: Tensor, ids: Tensor) -> None:
        if weights.shape != ids.shape or not weights.is_floating_point():
            raise ValueError(
                f"The KeyedJaggedTensor has weights, {weights.dtype} {tuple(weights.shape)}: must"
                f" be floating, {tuple(ids.shape)}. TorchRec drops others or raises, by sharding."
            )
        # Unsharded collections that are not weighted ignore weights.
        if self._means and is_sharded(self.collection[0].inner):
            raise ValueError(
                f"The KeyedJaggedTensor has weights, and the tables {self._means} are means, which"
                " TorchRec divides by the sum of the weights if rows are cut, else by the number of"
                " ids: leave the weights out, or use weighted sums."
            )

    def ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the features of the collection in the order of its tables. A feature that two
        tables share is there twice.

        Raises:
            ValueError: a feature is missing.
        """
        return reordered(features, self._features)

    def rows(self, ordered: KeyedJaggedTensor) -> Tensor:
        """Return the stored row of each id: int32 ``(n,)``.
        :data:`~dist_sparse.ids.row_index.REMOVED` for an id without a row,
        :data:`~dist_sparse.ids.row_index.UNKNOWN` for an id out of range."""
        ids = ordered.values()
        # A load writes into the words, moving the module replaces them.
        state: list[object] = [ids.device]
        for index in self._index_list:
            words = index.words
            state += id(words), words._version
        lookups = self._built
        if lookups is None or lookups.state != state:
            # Free the memory of the last ones first.
            self._built = lookups = None
            lookups = self._built = self._build(ids.device)
        if not lookups.mapped:
            counts = ordered.lengths().view(len(self._features), -1).sum(1)
            found, known = lookups.joined(ids, counts)
            return torch.where(known, found, UNKNOWN)
        parts = list(torch.split(ids, ordered.length_per_key()))
        for place, rows in lookups.mapped:
            try:
                # On the CPU, index_select checks the range of every id: no pass for that here.
                parts[place] = rows.index_select(0, parts[place])
            except IndexError:
                parts[place] = _read_inside(rows, parts[place])
        if lookups.others:
            _read_others(lookups, parts)
        return torch.cat(parts)

    def __getstate__(self) -> dict[str, Any]:
        # The version of a copied tensor starts at 0 again, so stale lookups could pass as current.
        return {**self.__dict__, "_built": None}

    # Tensors of inference mode have no version, and no load could write into them.
    @torch.inference_mode(False)
    def _build(self, device: torch.device) -> _Lookups:
        """Return what :meth:`rows` reads, for ids on a device."""
        indexes: dict[str, Any] = dict(self.indexes.items())
        # A device has one pass for all features: there, each launch takes longer than its lookups.
        names = self._mapped if device.type == "cpu" else set[str]()
        maps = {name: indexes[name](torch.arange(self.num_ids[name])).int() for name in names}
        mapped = []
        others = []
        for place, table in enumerate(self.feature_tables):
            if table in maps:
                mapped.append((place, maps[table]))
            else:
                others.append(place)
        tables = list(dict.fromkeys(self.feature_tables[place] for place in others))
        of_tables = [indexes.get(table) for table in tables]
        joined = RowIndexes(
            of_tables,
            [self.num_ids[table] for table in tables],
            [tables.index(self.feature_tables[place]) for place in others],
        ).to(device)
        # Wait for the copy: another stream may get the memory that is freed now.
        joined.words[-1:].tolist()
        joined.share_with(of_tables)
        words = []
        state: list[object] = [device]
        for index in self._index_list:
            words.append(index.words)
            state += id(index.words), index.words._version
        return _Lookups(state, words, maps, mapped, others, joined)

    def _report(self, unknown: Mapping[str, str]) -> None:
        """Raise or log for ids out of range, as the collection did before it was compact."""
        modes = collection_of(self.collection[0].inner).bounds_checks()
        for table, lookups in unknown.items():
            mode = modes.get(table, "FATAL")
            if mode == "FATAL":
                raise RuntimeError(f"Out of bounds access: {lookups}.")
            if mode == "WARNING":
                _log.warning("Out of bounds access: %s. They read and train no row.", lookups)

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return a copy of the index of each table that has removed rows."""
        return {table: deepcopy(cast(RowIndex, index)) for table, index in self.indexes.items()}


class IndexedCollection(CompactCollection):
    """A TorchRec collection, ``inner``, that gets its input from ``ids``.

    Args:
        tables: configurations of the whole tables; ``num_embeddings`` counts original rows.
        indexes: by table, of the tables that have removed rows.
        is_weighted: as for an EmbeddingBagCollection.
        device: of the stored rows, which TorchRec initializes.
        stored_rows: by table, the least number of rows to store; rows after the kept ones are never
            read.

    Attributes:
        ids: the :class:`CompactIds`.
        inner: the collection of kept rows; DistributedModelParallel replaces it by a sharded one.
    """

    pooled: ClassVar[bool]

    def __init__(
        self,
        tables: Sequence[Any],
        indexes: Mapping[str, RowIndex],
        is_weighted: bool = False,
        device: torch.device | None = None,
        stored_rows: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        self.tables = table_configs(tables)
        self.weighted = is_weighted
        # Not moved to ``device``: on the meta device the indexes would lose their values.
        self.ids = CompactIds(tables, indexes, self)
        # Again, in a list, because pipelines replace the attribute ``ids``.
        self.translations = [self.ids]
        stored = []
        for table, names in zip(tables, get_embedding_names_by_table(list(tables)), strict=True):
            index = indexes.get(table.name)
            rows = table.num_embeddings if index is None else index.stored
            # At least one row, which is never read: TorchRec's planners and FBGEMM's kernels do not
            # expect a table without rows.
            rows = max(rows, 1, (stored_rows or {}).get(table.name, 0))
            stored.append(replace(table, num_embeddings=rows, feature_names=names))
        self.inner = self._stored(stored, device)

    def _stored(self, tables: list[Any], device: torch.device | None) -> Any:
        """Return the collection of kept rows."""
        raise NotImplementedError

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return the indexes of the tables that have removed rows."""
        return self.translations[0].table_indexes()


class CompactEmbeddingBagCollection(IndexedCollection):
    """An EmbeddingBagCollection that stores kept rows only. Its output equals the output of whole
    tables in which the other rows are zero.

    Sums and weighted sums are bit-equal. Means divide by the number of all ids of a bag, including
    ids without a row; they are computed as a sum times 1 / ids, so they may differ in the last bit
    from a sharding that divides. Ids out of range add nothing to a bag (see :class:`CompactIds`).

    Example::

        >>> import torch
        >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        >>> from dist_sparse.compaction.collections import CompactEmbeddingBagCollection
        >>> from dist_sparse.ids.row_index import RowIndex, UnknownLookups
        >>> table = EmbeddingBagConfig(
        ...     name="user", num_embeddings=4, embedding_dim=2, feature_names=["user_id"]
        ... )
        >>> index = RowIndex.of(torch.tensor([False, True, False, True]))
        >>> bags = CompactEmbeddingBagCollection([table], {"user": index})
        >>> bags.inner.embedding_bags["user"].weight.shape
        torch.Size([2, 2])
        >>> ids = KeyedJaggedTensor(
        ...     ["user_id"], torch.tensor([1, 0, 2]), lengths=torch.tensor([1, 2])
        ... )
        >>> bags(ids)["user_id"][1]  # both are removed
        tensor([0., 0.], grad_fn=<SelectBackward0>)
    """

    pooled: ClassVar = True

    def _stored(self, tables: list[Any], device: torch.device | None) -> Any:
        averaged: set[str] = set()
        for config in tables:
            if config.pooling is PoolingType.MEAN:
                # Ids of a bag may be dropped: ``inner`` would divide by the number of ids left.
                config.pooling = PoolingType.SUM
                averaged.update(config.feature_names)
        self.mean = _Means(self.ids, averaged) if averaged else None
        return EmbeddingBagCollection(tables, self.weighted, device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled embeddings, as an EmbeddingBagCollection does."""
        pooled: KeyedTensor = self.inner(self.ids(features))
        return pooled if self.mean is None else self.mean(pooled, features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configurations of the whole tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether the KeyedJaggedTensor must have weights."""
        return self.weighted


class _Outputs(nn.Module):
    """Change outputs according to the ids of a batch. A module, because TorchRec's pipelines trace
    modules as leaves."""

    def __init__(self, ids: CompactIds) -> None:
        super().__init__()
        # In a list, because as a module attribute it would be registered twice.
        self._ids = [ids]


class _Means(_Outputs):
    """Divide sums by the number of ids in each bag, including removed ids."""

    def __init__(self, ids: CompactIds, averaged: set[str]) -> None:
        super().__init__(ids)
        self._averaged = averaged

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the means of the averaged keys, and the others as they are."""
        [ids] = self._ids
        keys, widths = pooled.keys(), pooled.length_per_key()
        device = pooled.values().device
        # A sharded collection does not return its keys in the order of the tables.
        places = {name: place for place, name in enumerate(ids.names)}
        order = torch.tensor([places[key] for key in keys], device=device)
        lengths = ids.ordered(features).lengths().view(len(keys), -1).index_select(0, order)
        mean = torch.tensor([[key in self._averaged] for key in keys], device=device)
        scale = torch.where(mean, 1.0 / lengths.clamp(min=1).to(torch.float32), 1.0)
        # From (keys, batch) to one factor for each element of ``pooled``: (batch, columns).
        scale = scale.to(pooled.values().dtype).T
        scale = scale.repeat_interleave(torch.tensor(widths, device=device), dim=1)
        return KeyedTensor(keys=keys, length_per_key=widths, values=pooled.values() * scale)


class CompactEmbeddingCollection(IndexedCollection):
    """An EmbeddingCollection that stores kept rows only and returns zero vectors for ids without a
    row: removed ones, and ids out of range (see :class:`CompactIds`).

    Example::

        >>> import torch
        >>> from torchrec import EmbeddingConfig, KeyedJaggedTensor
        >>> from dist_sparse.compaction.collections import CompactEmbeddingCollection
        >>> from dist_sparse.ids.row_index import RowIndex, UnknownLookups
        >>> table = EmbeddingConfig(
        ...     name="word", num_embeddings=4, embedding_dim=2, feature_names=["query"]
        ... )
        >>> words = CompactEmbeddingCollection(
        ...     [table], {"word": RowIndex.of(torch.tensor([True, False, True, True]))}
        ... )
        >>> ids = KeyedJaggedTensor(
        ...     ["query"], torch.tensor([0, 1, 3]), lengths=torch.tensor([2, 1])
        ... )
        >>> found = words(ids)["query"]
        >>> found.values()[1], found.lengths()
        (tensor([0., 0.], grad_fn=<SelectBackward0>), tensor([2, 1]))
    """

    pooled: ClassVar = False

    def _stored(self, tables: list[Any], device: torch.device | None) -> Any:
        self.zeros = _Zeros(self.ids)
        return EmbeddingCollection(tables, device)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the embeddings of every id, as an EmbeddingCollection does."""
        found: dict[str, JaggedTensor] = self.zeros(self.inner(self.ids(features)), features)
        return found

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configurations of the whole tables."""
        return self._configs


class _Zeros(_Outputs):
    """Insert zero vectors at the places of ids without a row."""

    def forward(self, found: Any, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return one vector for each id of every key."""
        [ids] = self._ids
        # A sharded collection returns before its output distribution is done.
        if isinstance(found, LazyAwaitable):
            found = found.wait()
        features = ids.ordered(features)
        # Looked up again, because the input distribution has no room for the flags.
        kept = ids.rows(features) >= 0
        lengths = features.lengths().view(len(ids.names), -1)
        out: dict[str, JaggedTensor] = {}
        start = looked_up = 0
        places = None
        for name, count, of_bags in zip(ids.names, features.length_per_key(), lengths, strict=True):
            values: Tensor = found[name].values()
            last = looked_up + len(values)
            if len(values) < count:
                if places is None:
                    # Of all features at once: the host waits once for a device.
                    [places] = kept.nonzero(as_tuple=True)
                own = places[looked_up:last] - start
                values = values.new_zeros(count, values.shape[1]).index_copy(0, own, values)
            looked_up = last
            out[name] = JaggedTensor(values=values, lengths=of_bags)
            start += count
        return out


def compact_collection(
    module: nn.Module,
    replaced: nn.Module,
    indexes: dict[str, RowIndex],
    kept: Mapping[str, Tensor],
    device: torch.device,
    widths: Mapping[str, int],
    default_row: bool,
) -> IndexedCollection:
    """Return a compact collection with the tables of ``module``, uninitialized; on the meta device
    if ``module`` is sharded.

    Args:
        module: the collection.
        replaced: the compact collection around it, or ``module`` itself.
        indexes: by table, of tables that have already lost rows; updated in place.
        kept: by table, which rows of ``module`` are kept.
        device: of the ids.
        widths: by table, how many of its first columns are kept; missing: all.
        default_row: whether the removed ids of a table share a row.
    """
    collection = collection_of(module)
    stored = {}
    configs = []
    for config in configs_of(replaced):
        name, rows = config.name, config.num_embeddings
        configs.append(replace(config, embedding_dim=widths.get(name, config.embedding_dim)))
        if name in indexes:
            flags = kept[name][: indexes[name].num_kept]
            indexes[name] = indexes[name].compose(RowIndex.of(flags))
        elif not bool(kept[name][:rows].all()):
            indexes[name] = RowIndex.of(kept[name][:rows], default_row)
        if name in indexes:
            rows = max(1, indexes[name].stored)
        stored[name] = rows
    stored = least_rows(module, stored)
    kind = CompactEmbeddingBagCollection if collection.pooled else CompactEmbeddingCollection
    made = kind(configs, indexes, collection.weighted, torch.device("meta"), stored)
    made.ids.to(device)
    _allocate(made.inner, module)
    return made.train(module.training)


def least_rows(module: nn.Module, rows: Mapping[str, int]) -> dict[str, int]:
    """Return, by table, the least number of rows, ``rows`` or more, with which no block is empty on
    the sharding of ``module``.

    TorchRec cuts rows into equal blocks, except for the last. If a batch of tables has an empty one
    and others of a different width, FBGEMM's CPU backward writes wrong rows."""
    shards = row_shards(module)
    least = {}
    for table, count in rows.items():
        pieces = shards.get(table, 1)
        least[table] = max(count, (pieces - 1) * -(-count // pieces) + 1)
    return least


def _allocate(made: nn.Module, module: nn.Module) -> None:
    """Allocate the tables of a collection on the devices of the tables of ``module``. A sharded
    ``module`` has no embedding modules: its tables are allocated when they are sharded."""
    tables = collection_of(made).embeddings()
    for name, old in collection_of(module).embeddings().items():
        weight, table = old.get_parameter("weight"), tables[name]
        shape = table.get_parameter("weight").shape
        table.weight = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)


def expanded_collection(
    module: nn.Module, replaced: nn.Module
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return a collection of whole tables, uninitialized; on the meta device if ``module`` is
    sharded.

    Args:
        module: the ``inner`` of ``replaced``.
    """
    configs = configs_of(replaced)
    meta = torch.device("meta")
    collection = collection_of(module)
    made: EmbeddingBagCollection | EmbeddingCollection
    if collection.pooled:
        made = EmbeddingBagCollection(configs, collection.weighted, meta)
    else:
        made = EmbeddingCollection(configs, meta)
    _allocate(made, module)
    return made.train(module.training)


def initial_bounds(replaced: nn.Module, table: str) -> tuple[float, float]:
    """Return the bounds of the uniform distribution of a table's initial weights.

    Raises:
        ValueError: the table has another initializer.
    """
    [config] = [config for config in configs_of(replaced) if config.name == table]
    bounds = uniform_bounds(config)
    if bounds is None:
        raise ValueError(
            f"Table {table!r} has an init_fn of its own: only rows of TorchRec's default"
            " initializer, which is uniform, can be drawn one by one."
        )
    return bounds
