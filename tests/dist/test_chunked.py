"""Masks saved by torch.distributed.checkpoint load on any other world and sharding, bit for bit. (C8)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dist_sparse import COL, ROW, DataNormSparsifier
from tests.dist.cells import build, cells
from tests.dist.plugin import on_ranks

TYPES = ("table_wise", "row_wise", "column_wise", "two_shards", "data_parallel", "table_row_wise", "mixed")
BLOCKS = {"user": (1, ROW), "item": (1, 4), "tiny": (COL, 1), "word": (3, 5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def made(model: nn.Module, level: float) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(None, level, norm="L2")
    sparsifier.add_model(model, config={name: {"sparse_block_shape": block} for name, block in BLOCKS.items()})
    return sparsifier


@on_ranks(1, 2, 4)
def test_save(world: int, folder: Path) -> None:
    """For :func:`test_load`, on every sharding; half of them in the background."""
    for i, name in enumerate(TYPES):
        sparsifier = made(build(cells(world)[name]), 0.6)
        sparsifier.step()
        target: Any = {"checkpoint_id": folder / f"{world}-{name}"}
        if i % 2:
            dcp.async_save({"sparse": sparsifier}, **target).result()
        else:
            dcp.save({"sparse": sparsifier}, **target)
        prints = sparsifier.fingerprint()
        if dist.get_rank() == 0:
            known = folder / "fingerprint"
            assert not known.exists() or known.read_text() == str(prints), name
            known.write_text(str(prints))


@on_ranks(1, 2, 4)
def test_load(world: int, folder: Path) -> None:
    """Every sharding of this world reads every world's, each pair of shardings on one pair of worlds."""
    worlds = (1, 2, 4)
    for i, name in enumerate(TYPES):
        target = made(build(cells(world)[name]), 0.1)
        for j, other in enumerate(TYPES):
            saved = worlds[(worlds.index(world) + i + j) % 3]
            if (i + 2 * j) % 3 != worlds.index(world):
                continue
            dcp.load({"sparse": target}, checkpoint_id=folder / f"{saved}-{other}")
            assert str(target.audit()) == (folder / "fingerprint").read_text(), (name, saved, other)
            assert target.data_groups["user"]["sparsity_level"] == 0.6
        target.step()
