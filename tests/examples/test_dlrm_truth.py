"""What the main job prints about its tables equals what is in the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

USERS, ITEMS = 400, 300


def trained(
    path: Path, block: tuple[int, Any]
) -> tuple[list[Any], dict[str, list[tuple[tuple[int, int], Any]]]]:
    """On every rank: the table rows of a sparsified run, and the pieces of the weights that lie
    here at its end."""
    import torch
    import torch.distributed as dist
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from dlrm import interactions, train
    from dlrm.batches import steps_per_pass
    from dlrm.model import build, sharding_of

    dataset = interactions.load(path, seed=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    sharding = sharding_of(
        {feature.name: feature.rows for feature in dataset.sparse}, "mixed", world
    )
    sharding["item_id"] = "data_parallel"
    settings = train.Settings(
        sharding=sharding, batch_size=64, epochs=1, seed=0, rank=rank, world=world
    )
    sharded = build(dataset, sharding=sharding, seed=0, world=world)
    steps = steps_per_pass(len(dataset.train), settings.batch_size)
    sparsity = train.Sparsity(block=block, norm="L2", level=0.7, every=5)
    sparsification = train.Sparsification(sharded, sparsity, steps)
    pipeline = TrainPipelineSparseDist(sharded.model, sharded.optimizer, torch.device("cpu"))
    train.train_steps(
        "sparsified", pipeline, train.epochs(dataset, settings), steps, rank, sparsification
    )

    pieces: dict[str, list[tuple[tuple[int, int], Any]]] = {}
    for fqn, weight in sharded.model.state_dict().items():
        if ".embedding_bags." in fqn:
            local = [((0, 0), weight)]
            if hasattr(weight, "local_shards"):
                local = [(tuple(s.metadata.shard_offsets), s.tensor) for s in weight.local_shards()]
            pieces[fqn.split(".")[-2]] = [
                (corner, part.detach().numpy().copy()) for corner, part in local
            ]
    return sparsification.tables(sharded), pieces


@pytest.mark.dist
@pytest.mark.parametrize(("block", "width"), [((1, "ROW"), 32), ((1, 4), 4)])
def test_as_many_blocks_are_zero_as_the_table_says(
    tmp_path: Path, block: tuple[int, Any], width: int
) -> None:
    rng = np.random.default_rng(7)
    pairs = rng.permutation(np.unique(rng.integers((USERS, ITEMS), size=(4_000, 2)), axis=0))
    path = tmp_path / "tiny.npz"
    users, items = pairs.T
    np.savez(
        path,
        train_user=users[200:],
        train_item=items[200:],
        test_user=users[:200],
        test_item=items[:200],
        num_users=USERS,
        num_items=ITEMS,
    )
    ranks = run_ranks(2, trained, path, block)
    assert ranks[0][0] == ranks[1][0]
    kinds = set()
    for table in ranks[0][0]:
        kinds.add(table.sharding)
        weight = np.full(table.shape, np.nan, dtype=np.float32)
        for _, pieces in ranks:
            for (row, column), part in pieces[table.name]:
                weight[row : row + part.shape[0], column : column + part.shape[1]] = part
        blocks = weight.reshape(table.shape[0], -1, width)
        zero = int((blocks == 0).all(axis=2).sum())
        assert table.blocks == blocks.shape[0] * blocks.shape[1]
        assert table.removed_blocks == zero == round(0.7 * table.blocks)
        assert table.kept_bytes == int((weight != 0).sum()) * 4
    assert kinds == {"row_wise", "column_wise", "data_parallel"}
