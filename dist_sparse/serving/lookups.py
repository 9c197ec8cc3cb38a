"""How a model looks its tables up: what a served one has to do in its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from dist_sparse.serving.manifest import Collection, Feature, Kind, Pooling
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.shards import ShardedData

__all__ = ["Lookups", "lookups_of"]


class Lookups(NamedTuple):
    """The collections of a model, in the order of their paths, and the pooling of each table."""

    collections: tuple[Collection, ...]
    pooling: dict[str, Pooling]


def lookups_of(model: nn.Module, located: Sequence[ShardedData]) -> Lookups:
    """Return how the modules of a model look up its tables, which were located in it. Does not communicate.

    Raises:
        ValueError: a module does with its rows what a served table can't; names its path.
    """
    named = {data.fqn: data.name for data in located}
    # Looked up by name: a static import would make torchrec a need of every user.
    torchrec: Any = importlib.import_module("dist_sparse.tables.torchrec") if "torchrec" in sys.modules else None
    found: dict[str, Collection] = {}
    pooling: dict[str, Pooling] = {}
    for path, module in modules_by_path(model).items():
        if any(path.startswith(f"{other}." if other else "") for other in found):
            continue  # tables of a collection that has been found
        known = torchrec.lookups(module, path) if torchrec else None
        if known is not None:
            weighted, tables = known
            found[path] = Collection(
                path=path,
                kind="sequence" if tables[0].pooling == "none" else "bag",
                weighted=weighted,
                tables=tuple(named[table.fqn] for table in tables),
                features=tuple(Feature(name=f, table=named[table.fqn]) for table in tables for f in table.features),
            )
            pooling |= {named[table.fqn]: table.pooling for table in tables}
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            name = _table_of(module, path, named)
            kind: Kind = "embedding_bag" if isinstance(module, nn.EmbeddingBag) else "embedding"
            ends = isinstance(module, nn.EmbeddingBag) and bool(module.include_last_offset)
            found[path] = Collection(path=path, kind=kind, include_last_offset=ends, tables=(name,))
            pooling[name] = "none" if kind == "embedding" else "mean" if module.mode == "mean" else "sum"
    return Lookups(tuple(found[path] for path in sorted(found)), pooling)


def _table_of(module: nn.Embedding | nn.EmbeddingBag, path: str, named: dict[str | None, str]) -> str:
    """The table of a module of torch's, which is one that can be served."""
    fqn = f"{path}.weight".lstrip(".")
    if fqn not in named:
        raise ValueError(f"Module {path!r} shares its table with another module; only one of them can be served.")
    if module.max_norm is not None:
        raise ValueError(f"Table {named[fqn]!r}: max_norm={module.max_norm} changes rows when they are looked up.")
    if isinstance(module, nn.EmbeddingBag):
        if module.mode == "max":
            raise ValueError(f"Table {named[fqn]!r}: mode='max' can't be served; 'sum' and 'mean' can.")
        if module.padding_idx is not None:
            raise ValueError(
                f"Table {named[fqn]!r}: padding_idx={module.padding_idx} of an EmbeddingBag can't be served; leave "
                "those ids out of the bags."
            )
    return named[fqn]
