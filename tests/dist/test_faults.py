"""Faults of one rank that once passed in silence, or left the others waiting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import build, cells, set_weights, weights
from tests.dist.pieces import by_rows, move, sharded
from tests.dist.plugin import on_ranks
from tests.states import edited


def updated(
    cell: str, level: float = 0.5, **options: Any
) -> tuple[DataNormSparsifier, torch.nn.Module]:
    model = build(cells(2)[cell])
    sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=(1, ROW), **options)
    sparsifier.add_model(model)
    sparsifier.step()
    return sparsifier, model


@on_ranks(2)
@pytest.mark.parametrize("checked", [True, False])
def test_replicas_of_a_state_must_be_equal(checked: bool) -> None:
    """Bits of one rank inverted: its own hash tells, and where there is none the comparison over
    ranks."""
    sparsifier, _ = updated("data_parallel")
    state = copy.deepcopy(sparsifier.state_dict())
    [piece] = state["sharded"]["masks"]["item"].kept
    if not checked:
        piece["hash"] = None
    if dist.get_rank() == 1:
        piece["bits"] = ~piece["bits"]
    before = sparsifier.fingerprint()
    with pytest.raises(
        ValueError, match="rank 1: .*hash differs" if checked else "do not fit together.*'item'"
    ):
        sparsifier.load_state_dict(state)
    assert sparsifier.audit() == before


@on_ranks(2)
def test_states_of_different_steps_are_refused() -> None:
    sparsifier, model = updated("row_wise")
    early = copy.deepcopy(sparsifier.state_dict())
    set_weights(model, weights(cells(2)["row_wise"], seed=3))
    sparsifier.step()
    late = copy.deepcopy(sparsifier.state_dict())
    before = sparsifier.fingerprint()
    with pytest.raises(ValueError, match="the state of table 'item'"):
        sparsifier.load_state_dict(late if dist.get_rank() else early)
    assert sparsifier.fingerprint() == before
    # Of two runs, with as many updates: the blocks that are removed do not add up.
    for state in (
        early,
        late,
    ):
        with edited(state["sharded"], "tables") as tables:
            for table in tables.values():
                table["updates"] = 1
            tables["item"]["removed"] = 3
    with pytest.raises(ValueError, match="blocks over all ranks, but 3 when they were saved"):
        sparsifier.load_state_dict(late if dist.get_rank() else early)
    assert sparsifier.fingerprint() == before


@on_ranks(2)
def test_calls_that_differ_between_ranks_are_named() -> None:
    sparsifier, _ = updated("row_wise")
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="name is item on rank 1 and user on rank 0"):
        sparsifier.full_mask("item" if rank else "user")
    for first, second in (
        ("table_stats", "dead_rows"),
        ("fingerprint", "step"),
        ("audit", "count_revived"),
    ):
        with pytest.raises(
            ValueError, match=rf"rank 1 at '{second}\(\)' while rank 0 is at '{first}\(\)'"
        ):
            getattr(sparsifier, second if rank else first)()
    reset_traffic()
    sparsifier.fingerprint()
    assert traffic().bytes == 2 * 32 + 4 * 8, "two agreements, and a hash of each table"


@on_ranks(2)
def test_an_enforcer_on_one_rank_is_named() -> None:
    """Where shards have moved, one rank would send more than the other."""
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW))
    table = sharded(torch.randn(8, 4), by_rows(8, 4, 3))
    sparsifier.add_data("t", table)
    sparsifier.step()
    if dist.get_rank():
        local = [torch.nn.Parameter(shard.tensor) for shard in table.local_shards()]
        MaskEnforcer(sparsifier).attach(torch.optim.SGD(local, lr=0.1))
    move(table, torch.randn(8, 4), by_rows(8, 4, 5))
    with pytest.raises(
        ValueError, match=r"whether an enforcer is attached is True on rank 1 and False on rank 0"
    ):
        sparsifier.step()


@on_ranks(2)
def test_memory_that_ends_while_replicas_are_hashed_is_an_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparsifier, _ = updated("data_parallel")
    if dist.get_rank():
        monkeypatch.setattr("dist_sparse.sparsifiers.pieces._hashed", lambda _: [][1])
    with pytest.raises(ValueError, match="rank 1: IndexError"):
        sparsifier.step()
