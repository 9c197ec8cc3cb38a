"""Removed rows come back by scores that live on, and no more than `max_change` in a mask update. (C1, C2)"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import ImportanceSparsifier, MaskEnforcer, ScoreSparsifier, sparsify
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.masking.held import most_held
from tests.dist.cells import Cell, build, cells, plain
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks

STEPS = ((0.0, 0), (0.4, 1), (0.5, 2), (0.5, 3), (0.3, 4), (0.95, 5), (0.95, 6), (0.0, 7))
"""Levels, and the seeds of the scores."""


class Drawn(ScoreSparsifier):
    """Scores of rows drawn from a seed, many of them equal."""

    seed = 0

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        return drawn(name, self.seed)[offset[0] : offset[0] + len(data), None].expand(data.shape)


def drawn(name: str, seed: int) -> Tensor:
    return torch.randint(6, (64,), generator=torch.Generator().manual_seed(seed * 100 + len(name))).float()


def oracle(scores: list[float], removed: set[int], count: int, most: int) -> set[int]:
    """The level alone first, with the fewest changes; then one exchange after the other that gains, while there may be
    two changes more."""
    order = sorted(range(len(scores)), key=lambda row: (scores[row], row))
    after = set(removed)
    if count >= len(removed):
        after |= set([row for row in order if row not in removed][: count - len(removed)])
    else:
        after -= set([row for row in reversed(order) if row in removed][: len(removed) - count])
    while len(after ^ removed) + 2 <= most:
        back = [row for row in order if row in removed and row in after][-1:]
        gone = [row for row in order if row not in removed and row not in after][:1]
        if not back or not gone or order.index(back[0]) < order.index(gone[0]):
            break
        after = after - {back[0]} | {gone[0]}
    return after


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "table_wise", "data_parallel"])
@pytest.mark.parametrize("max_change", [0.0, 0.12, 0.3])
def test_changes_are_those_of_an_oracle(name: str, max_change: float) -> None:
    check_changes(cells(2)[name], build(cells(2)[name]), max_change)


@pytest.mark.parametrize("max_change", [0.0, 0.12, 0.3])
def test_changes_in_one_process(max_change: float) -> None:
    cell = cells(1)["row_wise"]
    check_changes(cell, plain(cell), max_change)


def check_changes(cell: Cell, model: nn.Module, max_change: float) -> None:
    """Steps through rising and falling levels."""
    sparsifier = Drawn(sparsity_level=0.0, sparse_block_shape="row")
    sparsifier.add_model(model)
    sparsifier.max_change = max_change
    removed: dict[str, set[int]] = {table.name: set() for table in cell.tables}
    came_back = 0
    for level, seed in STEPS:
        sparsifier.seed = seed
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] = level
        preview = sparsifier.preview()
        sparsifier.step()
        for table in cell.tables:
            most = math.floor(max_change * table.rows + 1e-9)
            want = oracle(
                drawn(table.name, seed).tolist()[: table.rows], removed[table.name], round(level * table.rows), most
            )
            got = {int(row) for row in (sparsifier.full_mask(table.name)[:, 0] == 0).nonzero()}
            assert got == want, f"{table.name} at {level}"
            came_back += len(removed[table.name] - got) if level == 0.5 and seed == 3 else 0
            removed[table.name] = got
        stats = {table.name: table.removed_blocks for table in sparsifier.table_stats()}
        assert stats == {name: len(rows) for name, rows in removed.items()}
        assert {table.name: table.removed_blocks for table in preview.stats} == stats
        sparsifier.load_state_dict(sparsifier.state_dict())  # whose counts of removed blocks are checked
    assert bool(came_back) is (max_change > 0)


def test_the_fewest_that_are_held() -> None:
    """As the definition has it: no more may be exchanged, and no fewer."""
    for blocks, before, after, share in (
        (10, 4, 6, 0.5),
        (10, 6, 4, 0.5),
        (10, 5, 5, 0.29),
        (7, 0, 3, 1.0),
        (9, 9, 0, 0.0),
    ):
        held = most_held(blocks, before, after, share)
        most = max(math.floor(share * blocks), abs(before - after))
        changes = (before - held) + (after - held)
        assert changes <= most or held == 0
        assert held == 0 or changes + 2 > most


@on_ranks(2)
def test_rows_come_back_by_their_traffic() -> None:
    """Lookups of removed rows are counted, so that they come back."""
    model = build(trained_cells(2)["row_wise"], torch.optim.SGD)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="frequency")
    sparsifier.add_model(model)
    taken = []
    with MaskEnforcer(sparsifier).attach(optimizer_of(model)):
        for max_change, hot in ((1.0, slice(0, None, 2)), (1.0, slice(1, None, 2)), (0.2, slice(0, None, 2))):
            for name in sparsifier.data_groups:
                masks = sparsifier.packed_store.masks(name)
                for mask, counts in zip(masks, sparsifier.packed_store.counts(name) or (), strict=True):
                    rows = torch.zeros(64, dtype=torch.int32)
                    rows[hot] = 5
                    counts.copy_(rows[mask.rect.row : mask.rect.row_end])
            sparsifier.max_change = max_change
            before = sparsifier.full_mask("user")[:, 0]
            reset_traffic()
            sparsifier.step()
            taken.append(traffic().collectives)
            after = sparsifier.full_mask("user")[:, 0]
            changed = int((before != after).sum())
            assert changed in ({1.0: (18, 19, 36, 37), 0.2: (6, 7)}[max_change]), changed
    assert max(taken[:2]) <= 9 and taken[2] <= 9 + 7


@on_ranks(2)
def test_refused_on_all_ranks() -> None:
    model = build(cells(2)["column_wise"])
    sparsifier = Drawn(sparsity_level=0.5, sparse_block_shape="row")
    sparsifier.add_model(model)
    sparsifier.max_change = 0.1
    with pytest.raises(ValueError, match=r"max_change=0.1 is for whole blocks .* that no border of a shard cuts"):
        sparsifier.step()
    sparsifier.max_change = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(ValueError, match="max_change"):
        sparsifier.step()
    for score, says in ((None, "score=None: removed blocks come back with"), ("norm", "score='norm'")):
        with pytest.raises(ValueError, match=says):
            sparsify(model, optimizer_of(model), level=0.5, end=1, score=score, max_change=0.1)  # type: ignore[arg-type]
    limited: dict[str, Any] = {"level": 0.5, "end": 9, "score": "frequency", "max_change": 0.1, "min_rows": 0}
    with pytest.raises(ValueError, match="no border of a shard cuts"):  # now, not once masks are updated
        sparsify(model, optimizer_of(model), **limited)
    rows = build(cells(2)["row_wise"])
    with pytest.raises(ValueError, match="is for scope='table'"):
        sparsify(rows, optimizer_of(rows), scope="global", **limited)
    with sparsify(rows, optimizer_of(rows), level=0.5, end=4, min_rows=0, score="frequency", max_change=0.1) as sparse:
        assert sparse.sparsifier.max_change == 0.1
        state = sparse.state_dict()
        sparse.sparsifier.max_change = 0.5
        sparse.load_state_dict(state)
        assert sparse.sparsifier.max_change == 0.1
