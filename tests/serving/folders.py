"""Artifacts written from tables and what is kept of them, and their lookups one id at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_sparse.ids.row_index import RowIndex
from dist_sparse.serving.artifact import ArtifactWriter
from dist_sparse.serving.encodings import ColumnSpread, Dtype, decode, encode
from dist_sparse.serving.manifest import (
    Collection,
    CollectionKind,
    Feature,
    Manifest,
    Pooling,
    Scale,
    Table,
)
from tests.serving.stored import put


@dataclass
class Source:
    """A table before it is written: its weights, with removed rows and elements zero."""

    name: str
    weight: Tensor
    features: Sequence[str] = ()
    pooling: Pooling = "sum"
    dtype: Dtype = "fp32"
    scale: Scale = "row"

    @property
    def kept(self) -> Tensor:
        return (self.weight != 0).any(1)

    def decoded(self) -> Tensor:
        """What lookups should read: float32 ``(rows, columns)``, removed rows zero."""
        found = torch.zeros(self.weight.shape)
        found[self.kept] = decode(self.encoded(), self.weight.shape[1])
        return found

    def encoded(self) -> dict[str, Tensor]:
        rows, scales = self.weight[self.kept], None
        if self.scale == "column":
            spread = ColumnSpread(rows.shape[1])
            spread.add(rows)
            scales = spread.scales()
        return encode(rows, self.dtype, scales)

    def stored(self) -> tuple[Table, dict[str, Tensor]]:
        kept = self.kept
        rows = self.encoded()
        entry = Table(
            rows=len(kept),
            kept=int(kept.sum()),
            dim=self.weight.shape[1],
            pooling=self.pooling,
            dtype=self.dtype,
            scale=self.scale,
            before=self.weight.nbytes,
        )
        tensors: dict[str, Tensor] = {}
        if entry.kept < entry.rows:
            tensors["kept"] = RowIndex.of(kept).words
        return entry, {**tensors, **rows}


def table(
    rows: int, dim: int, kept: float, *, block: int = 0, elements: float = 0.5, whole: bool = False
) -> Tensor:
    """Random weights with a share of the rows kept, and of their blocks of columns; ``whole``:
    small integers, whose sums are exact in any order."""
    some = torch.Generator().manual_seed(1000 * rows + dim)
    weight = torch.randn(rows, dim, generator=some)
    if whole:
        weight = weight.mul_(8).round_()
        weight[weight == 0] = 3.0
    weight[torch.rand(rows, generator=some) >= kept] = 0
    if block:
        cells = torch.rand(rows, -(-dim // block), generator=some) < elements
        weight[~cells.repeat_interleave(block, 1)[:, :dim]] = 0
    return weight


def write(
    path: Path,
    *collections: tuple[str, CollectionKind, Sequence[Source]],
    weighted: Any = False,
    last: bool = False,
) -> Path:
    """Write an artifact of collections: path, kind and tables."""
    sources = {source.name: source for _, _, of in collections for source in of}
    stored = {name: source.stored() for name, source in sources.items()}
    manifest = Manifest(
        dist_sparse="0",
        dtype=next(iter(sources.values())).dtype,
        collections=tuple(
            Collection(
                path=at,
                kind=kind,
                weighted=weighted,
                include_last_offset=last,
                tables=tuple(source.name for source in of),
                features=tuple(
                    Feature(name=name, table=source.name)
                    for source in of
                    for name in (source.features if kind in ("bag", "sequence") else ())
                ),
            )
            for at, kind, of in collections
        ),
        tables={name: entry for name, (entry, _) in stored.items()},
        bytes=0,
    )
    with ArtifactWriter(path) as writer:
        writer.begin(manifest.tables)
        for name, (entry, tensors) in stored.items():
            put(writer, name, entry, tensors)
        writer.publish(writer.seal(manifest))
    return path


def bags(
    weight: Tensor, ids: Tensor, lengths: Tensor, pooling: Pooling, weights: Tensor | None = None
) -> Tensor:
    """Pooled rows, one id after the other in float32, a bag's mean over all of its ids; those out
    of range add nothing."""
    found, start = [], 0
    for length in lengths.tolist():
        bag = torch.zeros(weight.shape[1])
        for at in range(start, start + length):
            row = int(ids[at])
            if 0 <= row < len(weight):
                bag = bag + weight[row] * (1.0 if weights is None else weights[at])
        found.append(bag / max(length, 1) if pooling == "mean" else bag)
        start += length
    return torch.stack(found) if found else weight.new_zeros(0, weight.shape[1])
