"""One selection over all tables, by bytes, equals a loop over all blocks, on every sharding. (C1,
C2, C3)"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, DataNormSparsifier, sparsify
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.training.arguments import UpdateGuard
from tests.dist.cells import TABLES, build, cells, gathered, set_weights
from tests.dist.enforcing import optimizer_of
from tests.dist.plugin import on_ranks
from tests.keywords import nested
from tests.oracle import oracle_scores

pytestmark = pytest.mark.dist

Block = tuple[int, int | str]


def oracle(
    weights: dict[str, Tensor], level: float, block: Block, floors: dict[str, float]
) -> dict[str, Tensor]:
    """Masks by the block: one block after the other loses its bytes, by (score, table, place)."""
    scores = {name: oracle_scores(weight, block, "L2") for name, weight in sorted(weights.items())}
    widths = {
        name: weight.shape[1] if block[1] == ROW else int(block[1])
        for name, weight in weights.items()
    }
    need = sum(round(level * len(of_table)) * widths[name] for name, of_table in scores.items())
    left = {
        name: len(s) - max(1, round(floors.get(name, 0.0) * len(s) + 0.499999))
        for name, s in scores.items()
    }
    masks = {name: torch.ones(len(of_table), dtype=torch.int8) for name, of_table in scores.items()}
    for _, name, place in sorted(
        (s, name, i) for name, of_table in scores.items() for i, s in enumerate(of_table)
    ):
        if need > 0 and left[name]:
            masks[name][place] = 0
            left[name] -= 1
            need -= widths[name]
    return {n: m.repeat_interleave(widths[n]).view(weights[n].shape) for n, m in masks.items()}


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name"),
    [
        *(
            (1, "two_shards"),
            (2, "column_wise"),
            (2, "mixed"),
            (2, "row_wise_fp16"),
            (4, "data_parallel"),
        ),
        *(
            (4, "row_wise"),
            (4, "column_wise_uneven"),
            (4, "table_row_wise"),
            (4, "table_wise_one_rank"),
        ),
    ],
)
def test_masks_are_those_of_a_loop_over_all_blocks(world: int, name: str) -> None:
    """Tables of other scales, so that some lose nearly all and others nothing; with ties, also
    between tables."""
    model = build(cells(world)[name])
    full = gathered(model)
    for i, weight in enumerate(full.values()):
        weight.mul_(10.0 ** (i % 3))
        weight[::5] = 0.5
        weight[1::7] = 0
    cases: list[tuple[Block, float, dict[str, float]]] = [
        ((1, ROW), 0.5, {}),
        ((1, ROW), 0.7, {"user": 0.5}),
        ((1, 4), 0.3, {"item": 1.0}),
        ((1, 4), 0.9, {}),
    ]
    for block, level, floors in cases:
        set_weights(model, full)
        sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=block, norm="L2")
        sparsifier.scope, sparsifier.floors = "global", floors
        sparsifier.add_model(model)
        before = gathered(model)
        reset_traffic()
        sparsifier.step()
        assert traffic().collectives <= 9
        want = oracle(before, level, block, floors)
        for table in sorted(want):
            got = sparsifier.full_mask(table)
            assert torch.equal(got, want[table]), (
                f"{block} {level} {table}: {got.sum()} of {want[table].sum()}"
            )
        kept = {
            stats.name: stats.blocks - stats.removed_blocks for stats in sparsifier.table_stats()
        }
        assert min(kept.values()) > 0 and sparsifier.audit()
        # Whose counts of removed blocks are checked.
        sparsifier.load_state_dict(sparsifier.state_dict())


@on_ranks(2, 4)
def test_a_budget_is_kept(world: int) -> None:
    """In the end, and with levels that rise to it; index and tables that are left dense
    included."""
    for scope, budget in (("table", "40%"), ("global", 2600)):
        model = build(cells(world)["row_wise"])
        total = sum(t.rows * t.dim * 4 for t in TABLES)
        plan: dict[str, Any] = {
            "budget": budget,
            "scope": scope,
            "protect": "tiny",
            "end": 6,
            "every": 2,
        }
        with sparsify(
            model, optimizer_of(model), **nested(**plan, floor={"word": 0.5}, min_rows=0)
        ) as sparse:
            assert sparse.left_dense == {"tiny": "protected"}
            kept = []
            for _ in range(7):
                sparse.step()
                stats = sparse.sparsifier.table_stats()
                kept.append(sum(table.kept_bytes for table in stats))
            word = next(table for table in stats if table.name == "word")
            assert word.blocks - word.removed_blocks >= 15
        assert kept == sorted(kept, reverse=True) and len(set(kept)) > 2
        index = sum(8 * -(-t.rows // 32) for t in TABLES if t.name != "tiny")
        taken = kept[-1] + index + 3 * 8 * 4
        room = round(0.4 * total) if scope == "table" else 2600
        assert room - 3 * 64 < taken <= room, "at most a row of each table less"


@on_ranks(2)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"level": 0.5, "budget": "20%"}, "exactly one"),
        ({}, "exactly one"),
        (
            {"level": 0.5, "score": "frequency", "decay": 0.9, "guard": UpdateGuard()},
            "Invalid guard with rotate or decay",
        ),
        ({"level": 0.5, "guard": "auto"}, "Invalid guard='auto': must be such as dist_sparse"),
        ({"level": 0.5, "rotate": "table"}, "Invalid rotate='table': must be such as dist_sparse"),
        ({"budget": "20"}, "Did you mean 20%"),
        ({"budget": "a fifth"}, "such as '20%'"),
        ({"budget": -1}, ">= 0"),
        ({"budget": "1%"}, "are the least"),
        ({"budget": "100%"}, "nothing would be removed"),
        ({"level": 0.5, "scope": "all"}, "'table', 'global'"),
        ({"level": 0.5, "floor": {"users": 0.1}}, "floor: \\['users'\\] match none"),
        ({"level": 0.5, "protect": "users"}, "protect: \\['users'\\] match none"),
        ({"level": 0.5, "scope": "global", "floor": 0.8}, "but at most"),
        ({"level": 0.5, "scope": "global", "block": (1, 5)}, "needs blocks that divide"),
        ({"budget": "50%", "block": (1, 5)}, "needs blocks that divide"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_what_can_not_be_is_refused_on_all_ranks(given: dict[str, Any], says: str) -> None:
    """Also if one rank alone is wrong. Nothing is left attached."""
    model = build(cells(2)["row_wise"])
    others: dict[str, Any] = given if dist.get_rank() else {"level": 0.5}
    # Arguments that only all ranks together could refuse differ first.
    for arguments, message in (
        (given, says),
        (others, f"{says}|scope is global on rank 1 and table on rank 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(model, optimizer_of(model), **nested(end=2, min_rows=0, **arguments))
    sparsify(model, optimizer_of(model), level=0.5, end=2).detach()


@on_ranks(2)
def test_tables_of_other_ranks_are_not_selected_from_together() -> None:
    model = nn.ModuleDict(
        {"sharded": build(cells(2)["row_wise"], RowWiseAdagrad), "alone": nn.EmbeddingBag(20, 4)}
    )
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.scope = "global"
    sparsifier.add_model(model)
    with pytest.raises(ValueError, match="same ranks"):
        sparsifier.step()
