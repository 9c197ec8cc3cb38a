"""Tables of an artifact in modules that others load: FBGEMM's table batch with its remap of ids,
and TorchRec's quantized collection.

Both hold rows of the artifact bit for bit, and removed ids are exactly 0. Columns with a scale each
and codes are stored in float16, which holds their steps and the entries of books exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.compaction.row_index import RowIndexes
from dist_sparse.serving.codes import Rows, decode
from dist_sparse.serving.lookup import StoredTable
from dist_sparse.serving.manifest import Collection


def to_fbgemm(collection: Collection, tables: Mapping[str, StoredTable]) -> nn.Module:
    """See :meth:`dist_sparse.serving.served.Served.to_fbgemm`."""
    from dist_sparse.torchrec.kernels import table_batch

    if len({table.entry.pooling for table in tables.values()}) > 1:
        raise ValueError(
            f"Collection {collection.path!r} has tables of sums and of means, and FBGEMM's module"
            " pools in one way: use to_torchrec()."
        )
    features = [feature.table for feature in collection.features] or list(collection.tables)
    # FBGEMM's remap counts tables where it should count features: a table with two features and a
    # remap serves other rows. So each feature has a table of its own.
    stored = []
    for place, name in enumerate(features):
        rows, index = torch.arange(tables[name].entry.rows), tables[name].index
        remap = rows if index is None else index(rows)
        stored.append(replace(_stored(tables[name], f"{name}.{place}"), remap=remap.int()))
    return table_batch(stored)


def to_torchrec(
    collection: Collection, tables: Mapping[str, StoredTable], index: RowIndexes
) -> QuantizedCollection:
    """See :meth:`dist_sparse.serving.served.Served.to_torchrec`."""
    from dist_sparse.torchrec.kernels import bag_collection

    if collection.kind != "bag":
        raise ValueError(
            f"Collection {collection.path!r} is of the kind {collection.kind!r}, and TorchRec's"
            " EmbeddingBagCollection looks up bags: use to_fbgemm()."
        )
    # A feature of two tables has other rows in each: its outputs' names tell them apart.
    keys: dict[str, list[str]] = {name: [] for name in collection.tables}
    for feature, key in zip(collection.features, collection.outputs, strict=True):
        keys[feature.table].append(key)
    stored = []
    for name in collection.tables:
        one = _stored(tables[name], name)
        # Behind the last row one of zeros: for removed ids, and for ids out of range.
        tail = None if one.scale_bias is None else F.pad(one.scale_bias, (0, 0, 0, 1))
        rows = F.pad(one.rows, (0, 0, 0, 1))
        stored.append(replace(one, rows=rows, scale_bias=tail, features=tuple(keys[name])))
    zeros = [tables[feature.table].entry.stored for feature in collection.features]
    inner = bag_collection(stored, collection.weighted)
    return QuantizedCollection(collection, inner, index, zeros)


class QuantizedCollection(nn.Module):
    """TorchRec's quantized EmbeddingBagCollection behind an index from ids to rows.

    Args:
        looked_up: the collection of the manifest.
        collection: TorchRec's; takes rows.
        index: from ids to rows.
        zeros: the row of zeros of each feature's table.
    """

    zeros: Tensor

    def __init__(
        self, looked_up: Collection, collection: nn.Module, index: RowIndexes, zeros: Sequence[int]
    ) -> None:
        super().__init__()
        self.collection, self.index = collection, index
        self.features = [feature.name for feature in looked_up.features]
        self.keys, self.weighted = looked_up.outputs, looked_up.weighted
        self.register_buffer("zeros", torch.tensor(zeros, dtype=torch.int32), persistent=False)

    def forward(self, ids: Any) -> Any:
        """Return the pooled rows of a KeyedJaggedTensor as a KeyedTensor. Removed ids, and ids out
        of range, count as zeros."""
        from dist_sparse.torchrec import port

        values, lengths, weights = port.take(ids, self.features, self.weighted)
        counts = lengths.view(len(self.features), -1).sum(1)
        rows = self.index(values, counts)
        zeros = torch.repeat_interleave(self.zeros, counts, output_size=len(values))
        rows = torch.where(rows < 0, zeros, rows)
        return self.collection(port.keyed(self.keys, rows, lengths, weights))


def _stored(table: StoredTable, name: str) -> Any:
    """The stored rows of a table in FBGEMM's format."""
    from dist_sparse.torchrec.kernels import StoredRows

    entry = table.entry
    if entry.turned is not None:
        raise ValueError(
            f"Table {name!r} was rotated alone: its outputs are turned back by a matrix, for which"
            " other libraries have no place. Rotate its group instead, or serve it by this one."
        )
    if entry.dtype == "int4" and entry.dim % 2:
        raise ValueError(f"Table {name!r} has {entry.dim} columns: in 4 bits their number is even.")
    dtype, rows = entry.dtype, table.rows["rows"]
    if "scales" in table.whole or "books" in table.whole:
        by_books = Rows(rows, None, table.whole.get("scales"), table.whole.get("books"))
        dtype, rows = "fp16", decode(by_books, entry.dim).half()
    tail = table.rows.get("scale_bias")
    return StoredRows(
        name=name,
        features=(name,),
        columns=entry.dim,
        dtype=dtype,
        pooling=entry.pooling,
        rows=rows.view(torch.uint8),
        scale_bias=None if tail is None else tail.view(torch.uint8),
    )
