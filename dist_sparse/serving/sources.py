"""The tables of a model as they are served: the rows of each, and how modules look them up.

What can't be served is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.compaction.kept_rows import kept_rows, move_rows
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.sites import EmbeddingSite, Site, sites_of
from dist_sparse.compaction.tables import padding_id_of
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.rotation.outputs import bases_of_outputs
from dist_sparse.serving.codes import LARGEST, chunks, out_of_range
from dist_sparse.serving.manifest import Collection, Dtype, Feature, Pooling
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count

_ORDERED: Final = 1 << 21
"""Weights of slots that are brought together into the order of their ids."""


@dataclass
class Lookups:
    """How a model looks its tables up.

    Args:
        collections: in the order of their paths.
        pooling: by table.
        indexes: of the rows of original tables, by the name of a table that is compact.
        slots: by table, where the rows of its index are stored, int64 ``(n,)``; missing where they
            are in the order of ids.
        rotations: by table, what its outputs are multiplied by, float32
            ``(columns, columns of the output)``.
    """

    collections: list[Collection] = field(default_factory=list)
    pooling: dict[str, Pooling] = field(default_factory=dict)
    indexes: dict[str, RowIndex] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)
    rotations: dict[str, Tensor] = field(default_factory=dict)


def lookups_of(model: nn.Module, located: Sequence[ShardedData]) -> Lookups:
    """Return how the modules of a model look up its tables, which were located in it. Does not
    communicate.

    Raises:
        ValueError: a module does with its rows what a served table can't; names its path.
    """
    named = {data.fqn: data.name for data in located}
    found = Lookups()
    for site in sites_of(model):
        names = {}
        for table, fqn in site.tables.items():
            if fqn not in named:
                raise ValueError(
                    f"{fqn} is a table of another module too; only one of them can be served."
                )
            names[table] = named[fqn]
        for table, index in site.indexes().items():
            found.indexes[names[table]] = index
        for table, slots in site.slots().items():
            found.slots[names[table]] = slots
        if isinstance(site, EmbeddingSite):
            _add_embedding(found, site, names[""])
        else:
            _add_collection(found, site, names)
    for data in located:
        # A compact table that keeps no row still looks up: every id is a removed one.
        if 0 in data.shape and data.name not in found.indexes:
            raise ValueError(f"Table {data.name!r} has no weights: there is nothing to look up.")
    # By path, so that the file does not depend on the order of the modules.
    found.collections.sort(key=lambda each: each.path)
    return found


def _add_embedding(found: Lookups, site: EmbeddingSite, name: str) -> None:
    module = site.module
    _refuse_embedding(name, module)
    # An nn.Embedding has neither of the two options.
    found.pooling[name] = getattr(module, "mode", "none")
    collection = Collection(
        path=site.place,
        kind="embedding_bag" if isinstance(module, nn.EmbeddingBag) else "embedding",
        include_last_offset=bool(getattr(module, "include_last_offset", False)),
        tables=(name,),
    )
    found.collections.append(collection)
    _add_rotations(found, module, {None: name})


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    # It would write to the table when it is looked up.
    if module.max_norm is not None:
        raise ValueError(
            f"Table {name!r}: max_norm={module.max_norm} changes rows when they are looked up."
        )
    if isinstance(module, nn.Embedding):
        return
    if module.mode == "max":
        raise ValueError(f"Table {name!r}: mode='max' can't be served; 'sum' and 'mean' can.")
    if (padding := padding_id_of(module)) is not None:
        raise ValueError(
            f"Table {name!r}: padding_idx={padding} of an EmbeddingBag can't be served; leave those"
            " ids out of bags."
        )


def _add_collection(found: Lookups, site: Site, names: Mapping[str, str]) -> None:
    inner = collection_of(site.module)
    # The compact one still has the means of whole tables; inside they are sums.
    whole = inner if site.outer is None else site.outer
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
        found.pooling[name] = table.pooling
        features += [Feature(name=feature, table=name) for feature in table.features]
    collection = Collection(
        path=site.place,
        kind="bag" if inner.pooled else "sequence",
        weighted=whole.weighted,
        tables=tuple(names[table.name] for table in whole.tables),
        features=tuple(features),
    )
    found.collections.append(collection)
    # Hooks are on the module that holds the tables, keys are outputs of the collection.
    tables = [feature.table for feature in features]
    _add_rotations(found, site.module, dict(zip(collection.outputs, tables, strict=True)))


def _add_rotations(found: Lookups, module: nn.Module, tables: Mapping[Any, str]) -> None:
    """Note the matrices that outputs of a module are multiplied by; ``tables`` by the key of the
    output, None for the only one of an embedding."""
    bases = bases_of_outputs(module)
    for key in bases.keys() & tables.keys():
        rotation = bases[key].T.float().cpu().contiguous()
        if not bool(rotation.isfinite().all()):
            raise ValueError(
                f"Table {tables[key]!r}: the matrix that turns its outputs back is not finite."
            )
        found.rotations[tables[key]] = rotation


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """A table of the model, and its rows that are served.

    Args:
        data: as it is stored now.
        pooling: of the module that looks it up.
        stored: which of its rows are served: bool ``(data.shape[0],)``.
        kept: the ids that they belong to: bool ``(original rows,)``. More than ``stored`` in a
            compact table.
        default_row: whether the last of the served rows is that of removed ids.
        rotation: what turns its outputs back: float32 ``(data.shape[1], columns of the output)``;
            None as they are.
        slots: where the kept rows are stored, int64 ``(n,)``; None: in their order.
        codes: in the place of its weights, uint8 ``(data.shape[0], groups)``, and their books.
        changed: of a delta, which of its rows may have changed: bool ``(data.shape[0],)``; None is
            any.
    """

    data: ShardedData
    pooling: Pooling
    stored: Tensor
    kept: Tensor
    default_row: bool
    rotation: Tensor | None
    slots: Tensor | None = None
    codes: ShardedData | None = None
    books: Tensor | None = None
    changed: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether ids are its rows, and rows are stored as they are."""
        return self.kept is self.stored and self.rotation is None and self.slots is None

    def ids(self) -> Tensor:
        """Return the ids of the rows of :meth:`chunks`; the default row has the id behind the last:
        int64."""
        kept = self.kept if self.changed is None else self.kept & self.changed
        ids = kept.nonzero().flatten()
        return F.pad(ids, (0, int(self.default_row)), value=len(self.kept))

    def whole(self) -> dict[str, Tensor]:
        """Return its tensors that are no rows, named as in :meth:`Table.layout`."""
        found = {"rotation": self.rotation, "books": self.books}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def chunks(self) -> Iterator[Tensor]:
        """Yield the served rows that may have changed on rank 0, in order, a few at a time:
        encoding them takes several times their memory. Collective over the ranks that hold the
        table: they must exhaust it; on others it ends at once."""
        data = self.data if self.codes is None else self.codes
        # move_rows() is collective over the holders alone.
        if rank_in(world_ranks()) not in (data.ranks or (0,)):
            return
        rows = self.stored if self.changed is None else self.stored & self.changed
        streamed = _moved(data, rows) if self.slots is None else _by_id(data, self.slots)
        for part in streamed:
            yield from (part[some] for some in chunks(*part.shape))


def _moved(data: ShardedData, stored: Tensor) -> Iterator[Tensor]:
    """Yield some rows on rank 0, in the order in which they are stored. Collective."""
    whole = Rect(0, 0, int(stored.count_nonzero()), data.shape[1])
    wanted = [[whole] if rank == 0 else [] for rank in data.ranks or (0,)]
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
        if held != tables.get(name, held) or not (name in tables or parameters.issuperset(held)):
            raise ValueError(
                f"The sparsifier's {name!r} is none of the model's tables {sorted(tables)}, or is"
                " another tensor: export the model that was sparsified, with all of its tables."
            )
    return found


def _addresses(data: ShardedData) -> list[int]:
    return [shard.tensor.data_ptr() for shard in data.shards]


def served_tables(
    located: Sequence[ShardedData],
    lookups: Lookups,
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
        stored = kept.get(data.name)
        if stored is None:
            stored = torch.ones(data.shape[0], dtype=torch.bool)
        found[data.name] = _served_table(data, lookups, stored)
    return found


def _served_table(data: ShardedData, lookups: Lookups, stored: Tensor) -> ServedTable:
    kept, default_row = stored, False
    index = lookups.indexes.get(data.name)
    if index is not None:
        default_row = index.default_row
        if default_row and not bool(stored[: index.stored].all()):
            raise ValueError(
                f"Table {data.name!r} has lost rows since it got its default row: it can't be"
                " served."
            )
        # No id has the rows behind.
        stored = stored & (torch.arange(len(stored)) < index.stored)
        kept = index.kept().cpu()
        # Of the ids that compact() kept, the ones whose rows masks keep still.
        kept[kept.clone()] = stored[: index.num_kept]
    return ServedTable(
        data=data,
        pooling=lookups.pooling[data.name],
        stored=stored,
        kept=kept,
        default_row=default_row,
        rotation=lookups.rotations.get(data.name),
        slots=lookups.slots.get(data.name),
    )


def check_range(located: Sequence[ShardedData], dtype: Dtype) -> None:
    """Refuse values on this rank that are not finite in ``dtype``. Local."""
    for data in located:
        # Every rank checks its own shards; the agreement around this call tells the others.
        for shard in data.shards:
            refuse_range(data.name, shard.tensor, dtype)


def refuse_range(name: str, weights: Tensor, dtype: Dtype) -> None:
    """Refuse weights of a table that are not finite in ``dtype``."""
    if (value := out_of_range(weights, dtype)) is not None:
        raise ValueError(
            f"Table {name!r} can't be exported in {dtype}: it has the value {value}, and must have"
            f" finite ones of at most {LARGEST[dtype]:g}."
        )


def check_zero(
    sparsifier: BaseDataSparsifier,
    tables: Mapping[str, ServedTable],
    registered: Mapping[str, ShardedData],
) -> None:
    """Refuse removed weights that are not zero. Collective; the same on every rank."""
    if all(table.changed is not None for table in tables.values()):
        # Where an enforcer notes what is written, it has kept them at zero.
        return
    revived = sparsifier.masks.count_revived("export()", registered)
    with group_over(world_ranks()).agreeing("export()"):
        for name in revived.keys() & tables.keys():
            if revived[name]:
                raise ValueError(
                    f"Table {name!r} has {count(revived[name])} removed weights that are not zero:"
                    " an optimizer has revived them without an enforcer, or masks were never"
                    " applied. sparsifier.apply_masks() zeroes sharded tables, squash_mask() plain"
                    " data."
                )
