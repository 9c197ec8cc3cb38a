"""Quality, size and speed of one sharded model.

Everything here is collective: every rank calls it, and gets the same figures.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_ne, get_ne_states

from benchmarks.measure import best
from dist_sparse import DataNormSparsifier
from dlrm.batches import Batch
from dlrm.model import ShardedModel

__all__ = [
    "check_zeros",
    "forward_ms",
    "live_tables",
    "most",
    "quality",
    "saved",
    "sizes",
    "slowest_ms",
]

_ETA = 1e-12


def slowest_ms(
    call: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None
) -> float:
    """The shortest of several calls that start together, in milliseconds, on the slowest rank; one
    more goes ahead to warm up."""

    def start() -> None:
        if before is not None:
            before()
        dist.barrier()

    start()
    call()
    return most(1e3 * best(call, repeats, start))


def most(value: float) -> float:
    """The largest over ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def forward_ms(sharded: ShardedModel, batch: Batch, repeats: int) -> float:
    """One forward without gradients, loss included."""

    def forward() -> None:
        with torch.no_grad():
            sharded.model(batch)

    return slowest_ms(forward, repeats)


def quality(sharded: ShardedModel, batch: Batch) -> dict[str, float]:
    """How the model does on the examples of the batches of all ranks; a prediction over 0.5 counts
    as positive.

    ``precision``, ``recall`` and ``f1`` are 0 where they are 0 / 0, ``log_loss_nats`` is the mean
    cross entropy.
    """
    with torch.no_grad():
        _, (_, logits, labels) = sharded.model(batch)
    mine = torch.stack([logits, labels])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    logits, labels = torch.cat(parts, dim=1).double()
    predictions, weights = torch.sigmoid(logits), torch.ones_like(labels)
    state = get_ne_states(labels, predictions, weights, _ETA)
    ne = compute_ne(
        state["cross_entropy_sum"],
        state["weighted_num_samples"],
        state["pos_labels"],
        state["neg_labels"],
        _ETA,
    )
    said, true = predictions > 0.5, labels > 0.5
    hits = float((said & true).sum())
    return {
        "auc": float(compute_auc(1, [predictions[None]], [labels[None]], [weights[None]])),
        "ne": float(ne),
        "accuracy": float((said == true).double().mean()),
        "precision": hits / max(1.0, float(said.sum())),
        "recall": hits / max(1.0, float(true.sum())),
        "f1": 2 * hits / max(1.0, float(said.sum() + true.sum())),
        "log_loss_nats": float(
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        ),
    }


def live_tables(sharded: ShardedModel) -> list[Tensor]:
    """This rank's pieces of all tables, TorchRec's own memory, in an order that stays. Local."""
    found: list[Tensor] = []
    for fqn, weight in sharded.model.state_dict().items():
        if ".embedding_bags." in fqn:
            pieces = weight.local_shards() if isinstance(weight, ShardedTensor) else None
            found += [weight] if pieces is None else [piece.tensor for piece in pieces]
    return found


def saved(sharded: ShardedModel) -> dict[str, Tensor]:
    """The whole model's weights on rank 0, each tensor in one piece; elsewhere the part that is not
    sharded."""
    state = sharded.model.state_dict()
    whole = {fqn: weight for fqn, weight in state.items() if not isinstance(weight, ShardedTensor)}
    for fqn, weight in state.items():
        if isinstance(weight, ShardedTensor):
            here = [(shard.metadata.shard_offsets, shard.tensor) for shard in weight.local_shards()]
            parts: list[Any] | None = (
                [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            )
            dist.gather_object(here, parts)
            if parts is not None:
                full = torch.full(tuple(weight.size()), torch.nan)
                for (row, column), part in (piece for rank in parts for piece in rank):
                    full[row : row + part.shape[0], column : column + part.shape[1]] = part
                whole[fqn] = full
    return whole


def sizes(whole: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of a model that is saved by ``torch.save``, and of that file in a zip archive
    (deflate). Local."""
    file, archive = io.BytesIO(), io.BytesIO()
    torch.save(whole, file)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("model.pt", file.getvalue())
    return {"saved_bytes": file.tell(), "zipped_bytes": archive.tell()}


def check_zeros(sparsifier: DataNormSparsifier, whole: dict[str, Tensor], level: float) -> None:
    """What is saved on rank 0 must be 0 where the masks of all ranks remove it, and these must be
    at the level.

    Raises:
        AssertionError: a table has a removed weight that is not 0, or the wrong number of removed
            blocks.
    """
    tables = {
        fqn.split(".")[-2]: weight for fqn, weight in whole.items() if ".embedding_bags." in fqn
    }
    for stats in sparsifier.table_stats():
        assert stats.removed_blocks == round(level * stats.blocks), (
            f"{stats} is not at level {level}"
        )
        removed = sparsifier.full_mask(stats.name) == 0
        if dist.get_rank() == 0:
            alive = int(tables[stats.name][removed].count_nonzero())
            assert alive == 0, f"{alive} removed weights of {stats.name} are not 0"
