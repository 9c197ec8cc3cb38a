"""How a model looks its tables up: what a served one has to do in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dist_sparse.rotation.outputs import bases_of_outputs
from dist_sparse.serving.manifest import Collection, Feature, Pooling
from dist_sparse.serving.row_index import RowIndex
from dist_sparse.serving.sites import sites_of, torchrec_part
from dist_sparse.serving.tables import CompactEmbedding, CompactEmbeddingBag
from dist_sparse.tables.shards import ShardedData

__all__ = ["Lookups", "lookups_of"]


class Lookups(NamedTuple):
    """How a model looks its tables up.

    Args:
        collections: in the order of their paths.
        pooling: by table.
        indexes: of the rows of original tables, by the name of a table that is compact.
        rotations: by table, what its outputs are multiplied by, float32 ``(columns, columns of the output)``.
    """

    collections: tuple[Collection, ...]
    pooling: dict[str, Pooling]
    indexes: dict[str, RowIndex]
    rotations: dict[str, Tensor]


def lookups_of(model: nn.Module, located: Sequence[ShardedData]) -> Lookups:
    """Return how the modules of a model look up its tables, which were located in it. Does not communicate.

    Raises:
        ValueError: a module does with its rows what a served table can't; names its path.
    """
    named = {data.fqn: data.name for data in located}
    found: list[Collection] = []
    pooling: dict[str, Pooling] = {}
    indexes: dict[str, RowIndex] = {}
    rotations: dict[str, Tensor] = {}
    for site in sites_of(model):
        if shared := [fqn for fqn in site.tables.values() if fqn not in named]:
            raise ValueError(f"{shared[0]} is a table of another module too; only one of them can be served.")
        bases = {key: basis.T.float().cpu().contiguous() for key, basis in bases_of_outputs(site.module).items()}
        names = {table: named[fqn] for table, fqn in site.tables.items()}
        if isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)):
            [name] = names.values()
            found.append(_collection_of(site.module, name, site.place))
            bags = isinstance(site.module, nn.EmbeddingBag)
            pooling[name] = "none" if not bags else "mean" if site.module.mode == "mean" else "sum"
            if isinstance(site.module, (CompactEmbedding, CompactEmbeddingBag)):
                indexes[name] = site.module.index
            if None in bases:
                rotations[name] = bases[None]
            continue
        torchrec: Any = torchrec_part()
        weighted, tables = torchrec.lookups(site.replaced)
        if getattr(site.module, "_need_indices", False):
            raise ValueError(f"Collection {site.place!r} has need_indices=True, which serving does not support.")
        for table, _, pooled in tables:
            if weighted and pooled == "mean":
                raise ValueError(
                    f"Table {names[table]!r} has weighted means, which TorchRec divides differently in different "
                    "shardings: they can't be served; weighted sums can."
                )
            pooling[names[table]] = pooled
        if site.outer is not None:
            indexes |= {names[table]: index for table, index in torchrec.table_indexes(site.outer).items()}
        features = tuple(Feature(name=name, table=names[table]) for table, each, _ in tables for name in each)
        found.append(
            Collection(
                path=site.place,
                kind="sequence" if all(pooled == "none" for *_, pooled in tables) else "bag",
                weighted=weighted,
                tables=tuple(names[table] for table, *_ in tables),
                features=features,
            )
        )
        of_outputs = zip(found[-1].outputs, features, strict=True)
        rotations |= {feature.table: bases[key] for key, feature in of_outputs if key in bases}
    if empty := [data.name for data in located if 0 in data.shape and data.name not in indexes]:
        raise ValueError(f"Table {empty[0]!r} has no weights: there is nothing to look up.")
    if wrong := [name for name, matrix in rotations.items() if not bool(matrix.isfinite().all())]:
        raise ValueError(f"The rotation of table {wrong[0]!r} is not finite: what it turns back can't be served.")
    return Lookups(tuple(sorted(found, key=lambda each: each.path)), pooling, indexes, rotations)


def _collection_of(module: nn.Embedding | nn.EmbeddingBag, name: str, path: str) -> Collection:
    """An embedding module of torch's, if it is one that can be served."""
    if module.max_norm is not None:
        raise ValueError(f"Table {name!r}: max_norm={module.max_norm} changes rows when they are looked up.")
    if not isinstance(module, nn.EmbeddingBag):
        return Collection(path=path, kind="embedding", tables=(name,))
    if module.mode == "max":
        raise ValueError(f"Table {name!r}: mode='max' can't be served; 'sum' and 'mean' can.")
    padding = getattr(module, "padding_id", module.padding_idx)
    if padding is not None:
        raise ValueError(
            f"Table {name!r}: padding_idx={padding} of an EmbeddingBag can't be served; leave those ids out of bags."
        )
    last = bool(module.include_last_offset)
    return Collection(path=path, kind="embedding_bag", include_last_offset=last, tables=(name,))
