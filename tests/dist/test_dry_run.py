"""A dry run is the same on every sharding, and an error on one rank is one on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from dist_sparse import ROW
from dist_sparse.planning.dry_run import DryRun, dry_run
from tests.dist.cells import Cell, batch, build, cells, gathered
from tests.dist.kinds import some_cells
from tests.dist.plugin import on_ranks

WORLD = 2


def _numbers(answer: DryRun) -> Any:
    """What does not depend on the sharding."""
    stats = ("name", "shape", "dtype", "target", "blocks", "removed_blocks", "table_bytes", "kept_bytes")
    tables = [
        [getattr(table.stats, field) for field in stats] + [table.lookups, table.dead_lookups, table.removed_reads]
        for table in answer.tables
    ]
    return answer.level, sorted(tables)


@on_ranks(WORLD)
@pytest.mark.parametrize("name", [*some_cells(WORLD), "row_wise", "table_wise", "column_wise_uneven"])
def test_every_sharding_gives_the_answer_of_one_process(name: str) -> None:
    cell = cells(WORLD)[name]
    model, rank = build(cell), dist.get_rank()
    before = gathered(model)
    alone = nn.ModuleDict({name: nn.Embedding.from_pretrained(full.clone()) for name, full in before.items()})
    # Not the same number of batches on all ranks, and none on the last.
    seeds = [[0, 1, 2], []]
    mine = [batch(cell, seed=seed) for seed in seeds[rank]]
    everyone = [_by_table(cell, batch(cell, seed=seed)) for some in seeds for seed in some]
    for question in ({"level": 0.6}, {"level": 0.5, "block": (1, 4)}, {"level": 0.7, "block": (3, ROW)}):
        answer = dry_run(model, batches=mine, **question)
        told: list[Any] = [None] * WORLD
        dist.all_gather_object(told, _numbers(answer))
        assert answer.batches == 3
        # Every rank has the whole of this model to itself, and all batches.
        wanted = _numbers(dry_run(alone, batches=everyone, **question))
        assert told == [wanted] * WORLD, f"{question}: {told}, wanted {wanted}"
    for name, full in gathered(model).items():
        torch.testing.assert_close(full, before[name], rtol=0, atol=0)


def _by_table(cell: Cell, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
    """The ids of a batch for a model whose tables have no features."""
    return {table.name: torch.cat([keyed[feature].values() for feature in table.features]) for table in cell.tables}


@on_ranks(WORLD)
def test_errors() -> None:
    cell = cells(WORLD)["mixed"]
    model, rank = build(cell), dist.get_rank()
    good = [batch(cell)]
    for arguments, message in (
        ({"level": 0.5 + rank / 10}, "level is 0.6 on rank 1 and 0.5 on rank 0"),
        ({"level": 2.0 if rank else 0.5}, "rank 1: ValueError: Invalid level=2.0"),
        ({"level": 0.5, "batches": good if rank else None}, "batches is True on rank 1 and False on rank 0"),
        ({"level": 0.5, "batches": [3] if rank else good}, "rank 1: ValueError: Batch 1, of type int"),
        ({"level": 0.5, "batches": None, "exclude": "user" if rank else None}, "table 'user'"),
    ):
        with pytest.raises(ValueError, match=message):
            dry_run(model, **arguments)
    with torch.no_grad():
        # Only rank 1 holds this one.
        for data in _located(model)["word"].shards:
            data.tensor[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"preview\(\) was refused on every rank.*rank 1: .*Table 'word'"):
        dry_run(model, level=0.5)
    for data in _located(model)["word"].shards:
        data.tensor[0, 0] = 1.0
    if rank:
        _located(model)["tiny"].shards[0].tensor[1, 1] += 1
    with pytest.raises(ValueError, match=r"Replicas have drifted.*tiny"):
        dry_run(model, level=0.5)


def _located(model: Any) -> dict[str, Any]:
    from dist_sparse.tables.modules import model_source

    return {data.name: data for data in model_source(model).locate()}
