"""Artifacts of the tests, read back as whole tables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dist_sparse.serving.artifact import ArtifactWriter, all_kept, ids_of, open_artifact
from dist_sparse.serving.chain import MappedTable
from dist_sparse.serving.encodings import decode
from dist_sparse.serving.manifest import PER_ROW, TABLES, Manifest, Table

__all__ = ["crcs", "dense", "put", "unsharded"]


def dense(path: Path) -> dict[str, Tensor]:
    """Every table of an artifact, with zeros for what was removed: float32 ``(rows, columns)``."""
    artifact = open_artifact(path)
    found = {}
    for name, entry in artifact.manifest.tables.items():
        table = MappedTable(artifact, name)
        whole = torch.zeros(entry.rows, entry.dim)
        kept = table.index.kept()
        whole[kept] = decode({**table.whole, **table.base_rows}, entry.dim)[: entry.kept]
        found[name] = whole
    return found


def put(writer: ArtifactWriter, name: str, entry: Table, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of a table of an artifact."""
    words = tensors.get("kept", all_kept(entry.rows))
    ids = torch.cat([*ids_of(words, entry.rows, entry.default_row)])
    for key, tensor in tensors.items():
        writer.append(f"{name}.{key}", tensor, ids if key in PER_ROW else None)


def crcs(path: Path) -> dict[str, int]:
    """A CRC32 of each file of a folder."""
    return {file.name: zlib.crc32(file.read_bytes()) for file in sorted(path.iterdir())}


def unsharded(path: Path) -> dict[str, object]:
    """A CRC32 of the tables of an artifact, and its manifest as if TorchRec had sharded nothing:
    only sharded bags weigh ids whenever a batch has weights."""
    manifest: Manifest = open_artifact(path).manifest
    collections = [replace(each, weighted=each.weighted is True) for each in manifest.collections]
    whole = replace(manifest, collections=tuple(collections))
    return {TABLES: crcs(path)[TABLES], "manifest": whole.to_text()}
