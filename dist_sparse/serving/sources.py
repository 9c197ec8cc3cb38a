"""The tables of a model as they are exported: their rows, and how modules look them up.

Models and tables that can't be served are refused here, before anything is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.compaction.moving import gather_rows, kept_rows, move_rows
from dist_sparse.compaction.replacing import CollectionSite, EmbeddingSite, sites_of
from dist_sparse.compaction.tables import padding_id_of
from dist_sparse.groups import world_group, world_rank
from dist_sparse.ids.row_index import RowIndex
from dist_sparse.masking.kept_scores import Written
from dist_sparse.masking.masks import places_of
from dist_sparse.serving.artifact import all_kept
from dist_sparse.serving.encodings import ENCODINGS, Dtype, chunks
from dist_sparse.serving.manifest import Collection, Feature, Manifest, Pooling, Scale, Table
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.score import DataNormSparsifier
from dist_sparse.tables.bases import bases_of_outputs
from dist_sparse.tables.memory import ByMemory
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count
from dist_sparse.training.sparsify import sparsifier_of

# All rows may have changed: broadcasts against the flags of any number of rows.
_ALL_ROWS = torch.tensor(True)


@dataclass(kw_only=True)
class Lookup:
    """How a model looks a table up.

    Args:
        index: finds the rows of ids of the original table; it has all rows if the table is not
            compact.
        pooling: the pooling of the last module that looks it up.
        rotation: the matrix that rotates its outputs back, float32 ``(columns, columns of the
            output)``; None if they are not rotated.
    """

    index: RowIndex
    pooling: Pooling = "none"
    rotation: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the row of an id is the id, and only training on that id changes its outputs."""
        is_compact = self.index.num_kept != self.index.rows
        return self.rotation is None and not is_compact


def sparsifier_or_empty(sparse: Any) -> BaseDataSparsifier:
    """Return the sparsifier of a ``sparse=`` argument; for None a new one without tables."""
    return DataNormSparsifier() if sparse is None else sparsifier_of(sparse)


def model_lookups(
    model: nn.Module, located: Sequence[ShardedData]
) -> tuple[list[Collection], dict[str, Lookup]]:
    """Return how a model looks up the tables that were located in it: its collections by path, and
    the lookup of each table. Local.

    Raises:
        ValueError: a module does something with rows that serving does not support; names its path.
    """
    table_of = {}
    lookups = {}
    collections = []
    for data in located:
        table_of[data.fqn] = data.name
        lookups[data.name] = Lookup(index=RowIndex(all_kept(data.shape[0]), data.shape[0]))
    for site in sites_of(model):
        reason = next(site.reasons_of_outputs(), None)
        if reason is not None:
            raise ValueError(f"{site.label} can't be exported: {reason}.")
        indexes = site.indexes()
        names = {}
        for table, fqn in site.tables.items():
            if fqn not in table_of:
                raise ValueError(
                    f"{fqn} is a table of another module too; only one of them can be served."
                )
            names[table] = table_of[fqn]
            lookup = lookups[table_of[fqn]]
            lookup.index = indexes.get(table, lookup.index)
        if isinstance(site, EmbeddingSite):
            collection = _embedding_of(lookups, site, names[""])
        else:
            collection = _collection_of(lookups, site, names)
        collections.append(collection)
        # Maps the key of an output to its basis. A torch module has one output, with the key None.
        bases = bases_of_outputs(site.module)
        keys = collection.outputs or (None,)
        for key, table in zip(keys, collection.looked_up, strict=True):
            if key in bases:
                rotation = bases[key].T.float().cpu().contiguous()
                if not rotation.isfinite().all():
                    raise ValueError(f"Table {table!r}: its rotation matrix is not finite.")
                lookups[table].rotation = rotation
    # Sort them, so that the files do not depend on the order of the modules.
    return sorted(collections, key=lambda collection: collection.path), lookups


def refuse_lookup(name: str, module: Any) -> None:
    """Refuse a torch embedding module that returns anything other than stored rows, or their sums
    or means.

    Raises:
        ValueError: names the table.
    """
    table = f"Table {name!r}:"
    # Lookups would write to the table.
    if module.max_norm is not None:
        raise ValueError(
            f"{table} max_norm={module.max_norm} changes rows when they are looked up."
        )
    if not isinstance(module, nn.EmbeddingBag):
        return
    if module.mode == "max":
        raise ValueError(f"{table} mode='max' can't be served; 'sum' and 'mean' can.")
    padding = padding_id_of(module)
    if padding is not None:
        raise ValueError(
            f"{table} padding_idx={padding} of an EmbeddingBag can't be served; leave those ids"
            " out of bags."
        )


def _embedding_of(lookups: Mapping[str, Lookup], site: EmbeddingSite, name: str) -> Collection:
    module = site.module
    refuse_lookup(name, module)
    # An nn.Embedding has neither `mode` nor `include_last_offset`.
    lookups[name].pooling = getattr(module, "mode", "none")
    return Collection(
        path=site.place,
        kind="embedding_bag" if isinstance(module, nn.EmbeddingBag) else "embedding",
        include_last_offset=bool(getattr(module, "include_last_offset", False)),
        tables=(name,),
    )


def _collection_of(
    lookups: Mapping[str, Lookup], site: CollectionSite, names: Mapping[str, str]
) -> Collection:
    inner = site.collection
    # A compact collection computes means from sums, so `inner` pools by sums. `whole` has the
    # pooling that the outputs have.
    whole = site.whole
    # With need_indices, outputs have the ids where others have the weights.
    if inner.needs_indices:
        raise ValueError(
            f"Collection {site.place!r} has need_indices=True, which serving does not support."
        )
    features = []
    for table in whole.tables:
        name = names[table.name]
        if whole.weighted and table.pooling == "mean":
            raise ValueError(
                f"Table {name!r} has weighted means, which depend on TorchRec's sharding: only"
                " weighted sums can be served."
            )
        lookups[name].pooling = table.pooling
        features += [Feature(name=feature, table=name) for feature in table.features]
    # Sharded bags weigh ids whenever a batch has weights; unsharded ones read weights only if the
    # collection is weighted, and sequences never.
    weighs_some = inner.is_sharded and inner.pooled
    return Collection(
        path=site.place,
        kind="bag" if inner.pooled else "sequence",
        weighted=whole.weighted or ("optional" if weighs_some else False),
        tables=tuple(names[table.name] for table in whole.tables),
        features=tuple(features),
    )


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """A table of the model, and which of its rows are served.

    Args:
        data: the weights as they are stored now.
        rows: the rows to serve: ``data``, or its codes, uint8 ``(data.shape[0], groups)``.
        lookup: how the model looks it up.
        stored: which of its rows are served: bool ``(data.shape[0],)``.
        kept: which ids have a served row: bool ``(original rows,)``. A compact table has more ids
            than rows.
        books: the books that decode its codes.
        changed: which rows may have changed since the artifact that a delta follows: bool
            ``(data.shape[0],)``, or a single True for all.
    """

    data: ShardedData
    rows: ShardedData
    lookup: Lookup
    stored: Tensor
    kept: Tensor
    books: Tensor | None = None
    changed: Tensor = _ALL_ROWS

    @property
    def is_noted(self) -> bool:
        """Whether training has recorded which rows may have changed."""
        return self.changed.dim() > 0

    def planned(self, dtype: Dtype, scale: Scale) -> Table:
        """Return the manifest's entry of the table, without checksums."""
        rows, dim, groups = len(self.kept), self.data.shape[1], None
        # Only the original table must have rows: one that has lost all of them serves zeros.
        if 0 in (rows, dim):
            raise ValueError(f"Table {self.data.name!r} has no weights to look up.")
        if self.books is not None:
            dtype = "codes"
            scale = "row"
            groups = self.rows.shape[1]
        elif dtype == "codes":
            # Other tables have codes, this one has none.
            dtype = "fp32"
        turned = None if self.lookup.rotation is None else self.lookup.rotation.shape[1]
        return Table(
            rows=rows,
            kept=int(self.kept.count_nonzero()),
            dim=dim,
            pooling=self.lookup.pooling,
            dtype=dtype,
            scale=scale,
            groups=groups,
            default_row=self.lookup.index.default_row,
            turned=turned,
            before=rows * (turned or dim) * self.data.dtype.itemsize,
        )

    def ids(self) -> Tensor:
        """Return the ids of the rows of :meth:`chunks`: int64. The default row counts as the row of
        the id after the last one."""
        ids = places_of(self.kept & self.changed)
        return F.pad(ids, (0, int(self.lookup.index.default_row)), value=len(self.kept))

    def whole(self, planned: Table) -> dict[str, Any]:
        """Return the tensors that are not rows, as far as they are in the layout of the planned
        table."""
        tensors = {"rotation": self.lookup.rotation, "books": self.books}
        if planned.kept < planned.rows:
            tensors["kept"] = RowIndex.of(self.kept).words
        return {key: tensors[key] for key in tensors.keys() & planned.layout().keys()}

    def chunks(self) -> Iterator[Tensor]:
        """Yield the served rows that may have changed, on rank 0, in order, a few at a time:
        encoding them takes several times their memory.

        Collective over the ranks that hold the table, which must all exhaust the iterator. On other
        ranks it is empty.
        """
        if world_rank() not in self.data.holders:
            return
        for part in _stream(self.rows, self.stored & self.changed):
            for chunk in chunks(*part.shape):
                # With NCCL alone, rows arrive on the GPU.
                yield part[chunk].cpu()


# The tables of an artifact, by name.
ServedTables = Mapping[str, ServedTable]


def _stream(data: ShardedData, is_wanted: Tensor) -> Iterator[Tensor]:
    """Yield the wanted rows on rank 0, in the order in which they are stored. Collective."""
    whole = Rect(0, 0, int(is_wanted.count_nonzero()), data.shape[1])
    targets: list[list[Rect]] = [[] for _ in data.holders]
    targets[data.holders.index(0)] = [whole]
    shards = [shard.tensor for shard in data.shards]
    for _, rows in move_rows(data, shards, is_wanted, targets):
        yield rows


def registered_tables(
    model: nn.Module, sparsifier: BaseDataSparsifier, located: Sequence[ShardedData]
) -> dict[str, ShardedData]:
    """Return the sharded tables of a sparsifier as they are stored now, by name. Local.

    Raises:
        ValueError: the sparsifier has tensors that the model does not have.
    """
    tables = {data.name for data in located}
    owners = ByMemory([(shard.tensor, data.name) for data in located for shard in data.shards])
    parameters = ByMemory([(parameter, True) for parameter in model.parameters()])
    registered = sparsifier.masks.tables.find_all(sparsifier.masks.tables.names)
    for name in sparsifier.data_groups:
        if name in registered:
            weights = [shard.tensor for shard in registered[name].shards]
        else:
            weights = [sparsifier.masks.plain.held(name)]
        # Another model may have tables of the same names. Data that is not a table may be any
        # parameter. A table must have its own name.
        found = {*map(owners.get, weights)}
        is_same = found <= {name}
        if name not in tables:
            is_same = found <= {None} and all(map(parameters.get, weights))
        if not is_same:
            raise ValueError(
                f"The sparsifier's {name!r} is not one of the model's tables {sorted(tables)}, or"
                " is another tensor: export the whole model that was sparsified. Register its"
                " tables by add_model(model); add_data() has to use their names."
            )
    return registered


def has_weights_of(one: ShardedData, other: ShardedData) -> bool:
    """Return whether this rank's shards of two tables are the same weights."""
    known = ByMemory([(shard.tensor, shard.rect) for shard in one.shards])
    found = [known.get(shard.tensor) for shard in other.shards]
    return found == [shard.rect for shard in one.shards]


def served_tables(
    located: Sequence[ShardedData],
    lookups: Mapping[str, Lookup],
    sparsifier: BaseDataSparsifier,
    registered: Mapping[str, ShardedData],
) -> ServedTables:
    """Return the tables that are served, by name. Collective.

    Args:
        registered: what :func:`registered_tables` returned.
    """
    # A reshard since the last mask update has moved the shards, but not the masks.
    sparsifier.masks.tables.reshard(registered)
    kept = kept_rows(sparsifier, registered)
    tables = {}
    for data in located:
        stored = kept.get(data.name, torch.ones(data.shape[0], dtype=torch.bool))
        tables[data.name] = _served_table(data, lookups[data.name], stored)
    return tables


def _served_table(data: ShardedData, lookup: Lookup, stored: Tensor) -> ServedTable:
    index = lookup.index
    if index.default_row and not bool(stored[: index.stored].all()):
        raise ValueError(
            f"Table {data.name!r} has lost rows since it got its default row: it can't be served."
        )
    kept = stored
    if not index.num_kept == index.rows == len(stored):
        # A compact table may be padded with rows that no id has.
        stored = stored & (torch.arange(len(stored)) < index.stored)
        kept = index.kept().cpu()
        # The table was compacted, and then lost more rows to masks: both must keep an id.
        kept[kept.clone()] = stored[: index.num_kept]
    return ServedTable(data=data, rows=data, lookup=lookup, stored=stored, kept=kept)


def refuse_range(name: str, weights: Tensor, dtype: str) -> None:
    """Refuse weights of a table that are not finite in ``dtype``."""
    largest = ENCODINGS[dtype].largest
    if not weights.numel():
        return
    for value in map(float, torch.aminmax(weights)):
        # `value > largest` would be false for NaN.
        if not abs(value) <= largest:
            raise ValueError(
                f"Table {name!r} can't be exported in {dtype}: it has the value {value}, and"
                f" the largest is {largest:g}."
            )


def check_zero(
    sparsifier: BaseDataSparsifier,
    tables: ServedTables,
    registered: Mapping[str, ShardedData],
) -> None:
    """Refuse removed weights that are not zero, on every rank. Collective."""
    revived = sparsifier.masks.count_revived(registered)
    with world_group().agreeing("export()"):
        for name in tables:
            if revived.get(name):
                raise ValueError(
                    f"Table {name!r} has {count(revived[name])} removed weights that are not zero:"
                    " they were written after the removal. To keep them, call remove_untouched()"
                    " again; to remove them, sparsifier.apply_masks(), or squash_mask() of data"
                    " that add_data() registered."
                )


# An attached enforcer records the rows that training writes, so that the next delta streams only
# these rows. All rows are compared in tables that it does not record: tables without a fused
# optimizer, on an accelerator, rotated, compact, or in a batch of tables none of which is
# sparsified.


class _Note(NamedTuple):
    """The artifact after the last export, and the ids that it keeps.

    Args:
        artifact: the hash of its manifest.
        kept: which ids of each table have a row, bool ``(rows,)``.
    """

    artifact: str
    kept: Mapping[str, Tensor]


# The last export of a sparsifier, under the folders that lead to it: the base, and all deltas in
# order. The records apply only to a next delta that follows these.
_NOTES: WeakKeyDictionary[BaseDataSparsifier, dict[tuple[Path, ...], _Note]] = WeakKeyDictionary()


def with_changes(
    tables: ServedTables,
    sparsifier: BaseDataSparsifier,
    before: tuple[Path, ...],
) -> tuple[ServedTables, bool]:
    """Return the tables with the rows that may have changed since the last export, if the folders
    ``before`` end with it; and whether the writes to all sparsified tables were recorded, on every
    rank. Collective."""
    if not before:
        return tables, False
    world = world_group()
    note = _NOTES.get(sparsifier, {}).get(before)
    # One rank alone may have none: where an interrupt has ended the last export before its end.
    if world.all_reduce(torch.tensor(int(note is None))):
        return tables, False
    assert note is not None
    marked = dict(tables)
    flags = partial(_flag_written, _records(sparsifier))
    groups: dict[Any, list[ShardedData]] = {}
    for table in tables.values():
        # Records are by row. A rotation changes all rows, and rows of a compact table are not ids.
        if table.lookup.is_plain and world_rank() in table.data.holders:
            groups.setdefault(table.data.ranks, []).append(table.data)
    # Ranks take the process groups in the same order, because gather_rows() is collective.
    for recorded in groups.values():
        for name, rows in gather_rows(recorded, flags).items():
            # A row that was removed then may be kept now, without having been written.
            rows |= ~note.kept[name]
            # 4x faster than all().
            if rows.count_nonzero() < len(rows):
                marked[name] = replace(tables[name], changed=rows)
    of_sparsifier = sparsifier.data_groups.keys() & marked.keys()
    unknown = [name for name in of_sparsifier if not marked[name].is_noted]
    return marked, not world.all_reduce(torch.tensor(len(unknown)))


def refuse_replaced(
    sparsifier: BaseDataSparsifier, before: tuple[Path, ...], artifact: str
) -> None:
    """Refuse folders that hold another artifact than this process wrote there. Local."""
    note = _NOTES.get(sparsifier, {}).get(before, _Note(artifact, {}))
    if note.artifact != artifact:
        raise ValueError(f"{before[-1]} is refused: it was replaced since this process wrote it.")


def note_export(
    folders: tuple[Path, ...],
    artifact: Manifest,
    tables: ServedTables,
    sparsifier: BaseDataSparsifier,
) -> None:
    """Begin to record what training writes after an export. Local.

    Args:
        folders: the base and all deltas; the one that has just been written is the last.
        artifact: the artifact after it.
    """
    # New books and new column scales change the stored bytes of rows that training has not written.
    if artifact.dtype == "codes" or "column" in {table.scale for table in artifact.tables.values()}:
        return
    known = _NOTES.get(sparsifier, {})
    # A full export beside a chain does not end the records of the chain.
    if len(folders) == 1 and known and folders not in known:
        return
    for record in _records(sparsifier).values():
        record.clear()
    kept = {name: table.kept for name, table in tables.items()}
    _NOTES[sparsifier] = {folders: _Note(artifact.hash, kept)}


def _records(sparsifier: BaseDataSparsifier) -> ByMemory[Written]:
    """Return the records of written rows, by shard; none without an enforcer."""
    return sparsifier.masks.enforcer.written("deltas")


def _flag_written(records: ByMemory[Written], data: ShardedData, rect: Rect) -> Tensor:
    """Return which rows of a shard may have been written: bool ``(rect.rows,)``."""
    record = records.get(dict(data.shards)[rect])
    rows = None if record is None else record.rows()
    # If rows is None, any row may have been written.
    flags = torch.full((rect.rows,), rows is None)
    if rows is not None:
        flags[rows] = True
    return flags
