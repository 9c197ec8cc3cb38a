"""The tables of a model as they are served: the rows of each, and how modules look them up.

What can't be served is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.codes.decoding import refuse_lookup
from dist_sparse.compaction.moving import gather_rows, kept_rows, move_rows
from dist_sparse.compaction.replacing import CollectionSite, EmbeddingSite, sites_of
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.groups import world_group, world_rank
from dist_sparse.masking.kept_scores import Written
from dist_sparse.rotation.rotate import bases_of_outputs
from dist_sparse.serving.artifact import all_kept
from dist_sparse.serving.encodings import ENCODINGS, Dtype, chunks
from dist_sparse.serving.manifest import Collection, Feature, Pooling, Scale, Table
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count

_ANY = torch.tensor(True)

# Weights of slots that are brought together into the order of their ids.
_ORDERED = 1 << 21


@dataclass(kw_only=True)
class Lookup:
    """How a model looks a table up.

    Args:
        pooling: of the last module that does.
        index: of the rows of the original table: all of them, if it is not compact.
        slots: where the rows of the index are stored, int64 ``(n,)``; None where they are in the
            order of ids.
        rotation: what its outputs are multiplied by, float32 ``(columns, columns of the output)``;
            None as they are.
    """

    index: RowIndex
    pooling: Pooling = "none"
    slots: Tensor | None = None
    rotation: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether ids are rows, and rows that training writes are those that lookups name."""
        moved = self.slots is not None or self.rotation is not None
        return not moved and self.index.stored == self.index.rows


def model_lookups(
    model: nn.Module, located: Sequence[ShardedData]
) -> tuple[list[Collection], dict[str, Lookup]]:
    """Return how the modules of a model look up its tables, which were located in it: collections
    in the order of their paths, and by table. Does not communicate.

    Raises:
        ValueError: a module does with its rows what a served table can't; names its path.
    """
    named = {}
    lookups = {}
    collections = []
    for data in located:
        named[data.fqn] = data.name
        lookups[data.name] = Lookup(index=RowIndex(all_kept(data.shape[0]), data.shape[0]))
    for site in sites_of(model):
        indexes = site.indexes()
        slots = site.slots()
        names = {}
        for table, fqn in site.tables.items():
            if fqn not in named:
                raise ValueError(
                    f"{fqn} is a table of another module too; only one of them can be served."
                )
            names[table] = named[fqn]
            lookup = lookups[named[fqn]]
            lookup.index = indexes.get(table, lookup.index)
            lookup.slots = slots.get(table)
        if isinstance(site, EmbeddingSite):
            collection = _embedding(lookups, site, names[""])
        else:
            collection = _collection(lookups, site, names)
        collections.append(collection)
        # Hooks are on the module that holds the tables, keys are outputs of the collection.
        bases = bases_of_outputs(site.module)
        keys = collection.outputs or (None,)
        for key, table in zip(keys, collection.looked_up, strict=True):
            if key in bases:
                lookups[table].rotation = _rotation(table, bases[key])
    # By path, so that the file does not depend on the order of the modules.
    return sorted(collections, key=lambda each: each.path), lookups


def _embedding(lookups: Mapping[str, Lookup], site: EmbeddingSite, name: str) -> Collection:
    module = site.module
    refuse_lookup(name, module)
    # An nn.Embedding has neither of the two options.
    lookups[name].pooling = getattr(module, "mode", "none")
    return Collection(
        path=site.place,
        kind="embedding_bag" if isinstance(module, nn.EmbeddingBag) else "embedding",
        include_last_offset=bool(getattr(module, "include_last_offset", False)),
        tables=(name,),
    )


def _collection(
    lookups: Mapping[str, Lookup], site: CollectionSite, names: Mapping[str, str]
) -> Collection:
    inner = site.collection
    # The compact one still has the means of whole tables; inside they are sums.
    whole = site.whole
    # Its outputs hold the ids too, as weights.
    if inner.needs_indices:
        raise ValueError(
            f"Collection {site.place!r} has need_indices=True, which serving does not support."
        )
    features = []
    for table in whole.tables:
        name = names[table.name]
        if whole.weighted and table.pooling == "mean":
            raise ValueError(
                f"Table {name!r} has weighted means, which TorchRec divides differently in"
                " different shardings: they can't be served; weighted sums can."
            )
        lookups[name].pooling = table.pooling
        features += [Feature(name=feature, table=name) for feature in table.features]
    return Collection(
        path=site.place,
        kind="bag" if inner.pooled else "sequence",
        weighted=whole.weighted,
        tables=tuple(names[table.name] for table in whole.tables),
        features=tuple(features),
    )


def _rotation(table: str, basis: Tensor) -> Tensor:
    """Return the matrix that outputs of a table are multiplied by."""
    rotation = basis.T.float().cpu().contiguous()
    if not rotation.isfinite().all():
        raise ValueError(f"Table {table!r}: the matrix that turns its outputs back is not finite.")
    return rotation


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """A table of the model, and its rows that are served.

    Args:
        data: as it is stored now.
        rows: its weights, or their codes: uint8 ``(data.shape[0], groups)``.
        lookup: of the module that looks it up.
        stored: which of its rows are served: bool ``(data.shape[0],)``.
        kept: the ids that they belong to: bool ``(original rows,)``. More than ``stored`` in a
            compact table.
        books: of its codes.
        changed: of a delta, which of its rows may have changed: bool ``(data.shape[0],)``; one True
            is any.
    """

    data: ShardedData
    rows: ShardedData
    lookup: Lookup
    stored: Tensor
    kept: Tensor
    books: Tensor | None = None
    changed: Tensor = _ANY

    @property
    def is_noted(self) -> bool:
        """Whether it is known which rows have changed."""
        return self.changed.dim() > 0

    def planned(self, dtype: Dtype, scale: Scale) -> Table:
        """Describe the table as it will be stored, without checksums."""
        rows, dim, groups = len(self.kept), self.data.shape[1], None
        # A compact table that keeps no row still looks up: every id is a removed one.
        if 0 in (rows, dim):
            raise ValueError(f"Table {self.data.name!r} has no weights to look up.")
        if self.books is not None:
            dtype = "codes"
            scale = "row"
            groups = self.rows.shape[1]
        elif dtype == "codes":
            # A table beside those with codes.
            dtype = "fp32"
        return Table(
            rows=rows,
            kept=int(self.kept.count_nonzero()),
            dim=dim,
            pooling=self.lookup.pooling,
            dtype=dtype,
            scale=scale,
            groups=groups,
            default_row=self.lookup.index.default_row,
            turned=None if self.lookup.rotation is None else self.lookup.rotation.shape[1],
            before=rows * dim * self.data.dtype.itemsize,
        )

    def ids(self) -> Tensor:
        """Return the ids of the rows of :meth:`chunks`; the default row has the id behind the last:
        int64."""
        ids = (self.kept & self.changed).nonzero().flatten()
        return F.pad(ids, (0, int(self.lookup.index.default_row)), value=len(self.kept))

    def whole(self, planned: Table) -> dict[str, Any]:
        """Return its tensors that are no rows, named as in the layout of the planned table."""
        found = {"rotation": self.lookup.rotation, "books": self.books}
        if planned.kept < planned.rows:
            found["kept"] = RowIndex.of(self.kept).words
        return {key: found[key] for key in found.keys() & planned.layout().keys()}

    def chunks(self) -> Iterator[Tensor]:
        """Yield the served rows that may have changed on rank 0, in order, a few at a time:
        encoding them takes several times their memory. Collective over the ranks that hold the
        table: they must exhaust it; on others it ends at once."""
        slots = self.lookup.slots
        # move_rows() is collective over the holders alone.
        if world_rank() not in (self.data.ranks or (0,)):
            return
        changed = self.stored & self.changed
        parts = _moved(self.rows, changed) if slots is None else _by_id(self.rows, slots)
        for part in parts:
            yield from (part[some] for some in chunks(*part.shape))


def _moved(data: ShardedData, stored: Tensor) -> Iterator[Tensor]:
    """Yield some rows on rank 0, in the order in which they are stored. Collective."""
    whole = Rect(0, 0, int(stored.count_nonzero()), data.shape[1])
    ranks = data.ranks or (0,)
    wanted: list[list[Rect]] = [[] for _ in ranks]
    wanted[ranks.index(0)] = [whole]
    shards = [shard.tensor for shard in data.shards]
    for _, rows in move_rows(data, shards, stored, wanted):
        yield rows


def _by_id(data: ShardedData, slots: Tensor) -> Iterator[Tensor]:
    """Yield the rows of slots on rank 0, in the order of ``slots``. Collective."""
    for some in torch.split(slots, max(1, _ORDERED // data.shape[1])):
        stored = torch.zeros(data.shape[0], dtype=torch.bool)
        stored[some] = True
        if rows := list(_moved(data, stored)):
            # They arrive in the order of slots.
            yield torch.cat(rows)[some.argsort().argsort()]


def registered_tables(
    model: nn.Module, sparsifier: BaseDataSparsifier, located: Sequence[ShardedData]
) -> dict[str, ShardedData]:
    """Return the sharded tables of a sparsifier as they are stored now, by name. Local.

    Raises:
        ValueError: it is a sparsifier of other tensors than the model's.
    """
    tables = {data.name: _addresses(data) for data in located}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    found = {}
    for name in sparsifier.data_groups:
        if name in sparsifier.masks.tables:
            found[name] = sparsifier.masks.tables.find(name)
            held = _addresses(found[name])
        else:
            held = [sparsifier.masks.plain.held(name).data_ptr()]
        # Equal names prove nothing: the storage must be the same. Other weights than tables may be
        # sparsified too.
        is_same = held == tables[name] if name in tables else parameters.issuperset(held)
        if not is_same:
            raise ValueError(
                f"The sparsifier's {name!r} is none of the model's tables {sorted(tables)}, or is"
                " another tensor: export the model that was sparsified, with all of its tables."
            )
    return found


def _addresses(data: ShardedData) -> list[int]:
    return [shard.tensor.data_ptr() for shard in data.shards]


def served_tables(
    located: Sequence[ShardedData],
    lookups: Mapping[str, Lookup],
    sparsifier: BaseDataSparsifier,
    registered: Mapping[str, ShardedData],
) -> dict[str, ServedTable]:
    """Return the tables that are served, by name. Collective.

    Args:
        registered: from :func:`registered_tables`.
    """
    # Masks follow shards that have moved since the last update.
    sparsifier.masks.tables.reshard(registered)
    kept = kept_rows(sparsifier, registered)
    found = {}
    for data in located:
        stored = kept.get(data.name, torch.ones(data.shape[0], dtype=torch.bool))
        found[data.name] = _served_table(data, lookups[data.name], stored)
    return found


def _served_table(data: ShardedData, lookup: Lookup, stored: Tensor) -> ServedTable:
    index = lookup.index
    if index.default_row and not bool(stored[: index.stored].all()):
        raise ValueError(
            f"Table {data.name!r} has lost rows since it got its default row: it can't be served."
        )
    if index.stored == index.rows == len(stored):
        return ServedTable(data=data, rows=data, lookup=lookup, stored=stored, kept=stored)
    # No id has the rows behind.
    stored = stored & (torch.arange(len(stored)) < index.stored)
    kept = index.kept().cpu()
    # Of the ids that compact() kept, the ones whose rows masks keep still.
    kept[kept.clone()] = stored[: index.num_kept]
    return ServedTable(data=data, rows=data, lookup=lookup, stored=stored, kept=kept)


def check_range(located: Sequence[ShardedData], dtype: str) -> None:
    """Refuse values on this rank that are not finite in ``dtype``. Local."""
    for data in located:
        # Every rank checks its own shards; the agreement around this call tells the others.
        for shard in data.shards:
            refuse_range(data.name, shard.tensor, dtype)


def refuse_range(name: str, weights: Tensor, dtype: str) -> None:
    """Refuse weights of a table that are not finite in ``dtype``."""
    largest = ENCODINGS[dtype].largest
    if not weights.numel():
        return
    for value in map(float, torch.aminmax(weights)):
        # Not ``>``, which is false for NaN.
        if not abs(value) <= largest:
            raise ValueError(
                f"Table {name!r} can't be exported in {dtype}: it has the value {value}, and must"
                f" have finite ones of at most {largest:g}."
            )


def check_zero(
    sparsifier: BaseDataSparsifier,
    tables: Mapping[str, ServedTable],
    registered: Mapping[str, ShardedData],
) -> None:
    """Refuse removed weights that are not zero. Collective; the same on every rank."""
    if all(table.is_noted for table in tables.values()):
        # Where an enforcer notes what is written, it has kept them at zero.
        return
    revived = sparsifier.masks.count_revived(registered)
    with world_group().agreeing("export()"):
        for name in revived.keys() & tables.keys():
            if revived[name]:
                raise ValueError(
                    f"Table {name!r} has {count(revived[name])} removed weights that are not zero:"
                    " an optimizer has revived them without an enforcer, or masks were never"
                    " applied. sparsifier.apply_masks() zeroes sharded tables, squash_mask() plain"
                    " data."
                )


# Rows that training has written since the last delta, where an attached enforcer notes them: the
# next delta streams these rows alone. Nothing is noted of tables without a fused optimizer, on an
# accelerator, rotated, or made compact: all of their rows are compared.


class _Note(NamedTuple):
    """The hash of the artifact that the last delta led to, and the rows that it keeps of each
    table."""

    artifact: str
    kept: Mapping[str, Tensor]


# By the folders of the last delta and of what it follows.
_NOTES: WeakKeyDictionary[BaseDataSparsifier, dict[tuple[Path, ...], _Note]] = WeakKeyDictionary()


def with_changes(
    tables: dict[str, ServedTable],
    sparsifier: BaseDataSparsifier,
    registered: Mapping[str, ShardedData],
    before: tuple[Path, ...],
) -> dict[str, ServedTable]:
    """Return the tables with the rows that may have changed since the last delta, if it is the last
    of the folders ``before``. Collective."""
    note = _NOTES.get(sparsifier, {}).get(before)
    if note is None:
        return tables
    found = dict(tables)
    # A rotation changes rows that no lookup names, and rows of a compact table are not ids.
    plain = {name for name, table in tables.items() if table.lookup.is_plain}
    flags = partial(_flags, _records(sparsifier))
    for names in sparsifier.masks.tables.groups.values():
        # In the same order on every rank.
        fit = [registered[name] for name in names if name in plain]
        if not fit:
            continue
        for name, rows in gather_rows(fit, flags).items():
            rows |= ~note.kept[name]
            if not bool(rows.all()):
                found[name] = replace(tables[name], changed=rows)
    return found


def refuse_replaced(
    sparsifier: BaseDataSparsifier, before: tuple[Path, ...], artifact: str
) -> None:
    """Refuse folders that hold another artifact than the last delta led to. Local."""
    note = _NOTES.get(sparsifier, {}).get(before, _Note(artifact, {}))
    if note.artifact != artifact:
        raise ValueError(f"{before[-1]} is refused: it was replaced since this process wrote it.")


def note_delta(
    folders: tuple[Path, ...],
    artifact: str,
    tables: Mapping[str, ServedTable],
    sparsifier: BaseDataSparsifier,
) -> None:
    """From now on note what training writes. Local.

    Args:
        folders: the delta that has just been written, last, and the ones before it.
        artifact: the hash of the artifact that it leads to.
    """
    for record in _records(sparsifier).values():
        record.clear()
    kept = {name: table.kept for name, table in tables.items()}
    _NOTES[sparsifier] = {folders: _Note(artifact, kept)}


def _records(sparsifier: BaseDataSparsifier) -> Mapping[int, Written]:
    """Return the rows written by the address of the weights; none without an enforcer."""
    enforcer = sparsifier.masks.enforcer
    return {} if enforcer is None else enforcer.written("deltas")


def _flags(records: Mapping[int, Written], data: ShardedData, rect: Rect) -> Tensor:
    record = records.get(dict(data.shards)[rect].data_ptr())
    rows = None if record is None else record.rows()
    # Where nothing is noted, any row may have been written.
    flags = torch.full((rect.rows,), rows is None)
    if rows is not None:
        flags[rows] = True
    return flags
