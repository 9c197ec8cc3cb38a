"""Artifacts of the tests, read back as whole tables."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.check import MappedTable
from dist_sparse.serving.codes import decode

__all__ = ["crcs", "dense"]


def dense(path: Path) -> dict[str, Tensor]:
    """Every table of an artifact, with zeros for what was removed: float32 ``(rows, columns)``."""
    artifact = open_artifact(path)
    found = {}
    for name, entry in artifact.manifest.tables.items():
        table = MappedTable(artifact, name)
        whole = torch.zeros(entry.rows, entry.dim)
        kept = table.index.kept()
        whole[kept] = decode(table.rows(0, entry.kept), entry.dim)
        found[name] = whole
    return found


def crcs(path: Path) -> dict[str, int]:
    """A CRC32 of each file of a folder."""
    return {file.name: zlib.crc32(file.read_bytes()) for file in sorted(path.iterdir())}
