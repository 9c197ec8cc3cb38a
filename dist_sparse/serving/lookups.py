"""How a model looks its tables up, as a served one has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.sites import Site, sites_of
from dist_sparse.compaction.tables import CompactEmbedding, CompactEmbeddingBag
from dist_sparse.rotation.outputs import bases_of_outputs
from dist_sparse.serving.manifest import Collection, Feature, Pooling
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.shards import ShardedData

__all__ = ["Lookups", "lookups_of"]


@dataclass
class Lookups:
    """How a model looks its tables up.

    Args:
        collections: in the order of their paths.
        pooling: by table.
        indexes: of the rows of original tables, by the name of a table that is compact.
        rotations: by table, what its outputs are multiplied by, float32
            ``(columns, columns of the output)``.
    """

    collections: list[Collection] = field(default_factory=list)
    pooling: dict[str, Pooling] = field(default_factory=dict)
    indexes: dict[str, RowIndex] = field(default_factory=dict)
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
        if isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)):
            _add_embedding(found, site.module, names[""], site.place)
        else:
            _add_collection(found, site, names)
    for data in located:
        # A compact table that keeps no row still looks up: every id is a removed one.
        if 0 in data.shape and data.name not in found.indexes:
            raise ValueError(f"Table {data.name!r} has no weights: there is nothing to look up.")
    for name, matrix in found.rotations.items():
        if not bool(matrix.isfinite().all()):
            raise ValueError(
                f"The rotation of table {name!r} is not finite: what it turns back can't be served."
            )
    found.collections.sort(key=lambda each: each.path)
    return found


def _rotations_of(module: nn.Module) -> dict[str | None, Tensor]:
    """The matrix that each output is multiplied by, by the output's key; None is the key of an
    embedding's only output."""
    bases = bases_of_outputs(module)
    return {key: basis.T.float().cpu().contiguous() for key, basis in bases.items()}


def _add_embedding(
    found: Lookups, module: nn.Embedding | nn.EmbeddingBag, name: str, path: str
) -> None:
    found.collections.append(_collection_of(module, name, path))
    found.pooling[name] = _pooling_of(module)
    if isinstance(module, (CompactEmbedding, CompactEmbeddingBag)):
        found.indexes[name] = module.index
    rotations = _rotations_of(module)
    if None in rotations:
        found.rotations[name] = rotations[None]


def _pooling_of(module: nn.Embedding | nn.EmbeddingBag) -> Pooling:
    if isinstance(module, nn.Embedding):
        return "none"
    return "mean" if module.mode == "mean" else "sum"


def _add_collection(found: Lookups, site: Site, names: Mapping[str, str]) -> None:
    inner = collection_of(site.module)
    # The compact one still has the means of whole tables; inside they are sums.
    whole = inner if site.outer is None else site.outer
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
    if site.outer is not None:
        for table_name, index in site.outer.table_indexes().items():
            found.indexes[names[table_name]] = index
    collection = Collection(
        path=site.place,
        kind="bag" if inner.pooled else "sequence",
        weighted=whole.weighted,
        tables=tuple(names[table.name] for table in whole.tables),
        features=tuple(features),
    )
    found.collections.append(collection)
    rotations = _rotations_of(site.module)
    for key, feature in zip(collection.outputs, features, strict=True):
        if key in rotations:
            found.rotations[feature.table] = rotations[key]


def _collection_of(module: nn.Embedding | nn.EmbeddingBag, name: str, path: str) -> Collection:
    """The collection of an embedding module of torch's.

    Raises:
        ValueError: it does with its rows what a served table can't.
    """
    if module.max_norm is not None:
        raise ValueError(
            f"Table {name!r}: max_norm={module.max_norm} changes rows when they are looked up."
        )
    if not isinstance(module, nn.EmbeddingBag):
        return Collection(path=path, kind="embedding", tables=(name,))
    if module.mode == "max":
        raise ValueError(f"Table {name!r}: mode='max' can't be served; 'sum' and 'mean' can.")
    padding = getattr(module, "padding_id", module.padding_idx)
    if padding is not None:
        raise ValueError(
            f"Table {name!r}: padding_idx={padding} of an EmbeddingBag can't be served; leave those"
            " ids out of bags."
        )
    last = bool(module.include_last_offset)
    return Collection(path=path, kind="embedding_bag", include_last_offset=last, tables=(name,))
