"""Scores that know traffic equal an oracle on gathered weights and optimizer state, on every
sharding. (C1, C2, C11)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, ImportanceSparsifier, MaskEnforcer, sparsify
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import TABLES, Cell, batch, build, cells, gathered, set_weights
from tests.dist.enforcing import kernels, loss_of, optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import moves, reshard
from tests.keywords import nested

pytestmark = pytest.mark.dist


def trained(cell: Cell, steps: int = 3) -> tuple[nn.Module, CombinedOptimizer]:
    """A model that row-wise Adagrad has trained a little: some rows are touched often, some
    never."""
    model = build(cell)
    optimizer = optimizer_of(model, tables=lambda params: RowWiseAdagrad(params, lr=0.1))
    for step in range(steps):
        learn(model, optimizer, cell, step)
    return model, optimizer


def learn(model: nn.Module, optimizer: CombinedOptimizer, cell: Cell, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model(batch(cell, seed=100 * step + dist.get_rank(), size=2))).backward()
    optimizer.step()


def totals(
    model: nn.Module, optimizer: CombinedOptimizer, shapes: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Adagrad's sums for each element, by table, from TorchRec's kernels and torch's optimizers.
    Collective."""
    mine: list[tuple[str, tuple[int, int], Tensor]] = []
    for kernel in kernels(model):
        batch_ = kernel.emb_module
        for number, (config, view) in enumerate(
            zip(kernel._config.embedding_tables, batch_.split_embedding_weights(), strict=True)
        ):
            if not hasattr(batch_, "split_optimizer_states"):  # data-parallel: stepped by torch
                continue
            at = config.local_metadata.shard_offsets
            state = batch_.split_optimizer_states()[number][0]
            mine.append((config.name, (at[0], at[1]), state.view(-1, 1).expand(view.shape).clone()))
    for _, part in optimizer._optims[1:]:
        for key, parameter in part.params.items():
            table = key.split(".")[-2]
            if table in shapes:
                total = part.state[parameter]["sum"]
                mine.append((table, (0, 0), total.expand(parameter.shape).clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, (row, col), part in (piece for pieces in everyone for piece in pieces):
        full[name][row : row + part.shape[0], col : col + part.shape[1]] = part
    return full


def oracle(scores: Tensor, level: float, width: int) -> Tensor:
    """Of element scores, float64, the mask that removes the blocks of ``width`` columns with the
    smallest means."""
    blocks = scores.view(scores.shape[0], -1, width).mean(-1).float().flatten().tolist()
    order = sorted(range(len(blocks)), key=lambda i: (blocks[i], i))
    mask = torch.ones(len(blocks), dtype=torch.int8)
    mask[order[: round(level * len(blocks))]] = 0
    return mask.repeat_interleave(width).view(scores.shape)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name"),
    [
        *(
            (1, "two_shards"),
            (1, "data_parallel"),
            (2, "column_wise"),
            (2, "mixed"),
            (2, "ec_row_wise"),
        ),
        *((4, "row_wise"), (4, "column_wise"), (4, "table_row_wise"), (4, "table_wise")),
    ],
)
def test_masks_are_those_of_an_oracle(world: int, name: str) -> None:
    cell = trained_cells(world).get(name)
    assert cell is not None
    model, optimizer = trained(cell)
    full = gathered(model)
    sums = totals(model, optimizer, {name: weight.shape for name, weight in full.items()})
    assert (sums["user"] == 0).any() and (sums["user"] > 0).any()
    for score, block in (
        ("accumulator", (1, ROW)),
        ("norm_accumulator", (1, ROW)),
        ("norm_accumulator", (1, 4)),
    ):
        set_weights(model, full)
        sparsifier = ImportanceSparsifier(sparsity_level=0.6, sparse_block_shape=block, score=score)
        sparsifier.add_model(model)
        with MaskEnforcer(sparsifier).attach(optimizer):
            sparsifier.step()
            for table, weight in full.items():
                exact = sums[table].double()
                if score == "norm_accumulator":
                    exact = weight.double() ** 2 * (exact + 2.0**-100)
                want = oracle(exact, 0.6, weight.shape[1] if block == (1, ROW) else 4)
                assert torch.equal(sparsifier.full_mask(table), want), f"{score} {block} {table}"
            sparsifier.audit()


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name"),
    [(1, "two_shards"), (2, "ec_row_wise"), (4, "table_wise"), (4, "row_wise"), (4, "column_wise")],
)
def test_lookups_are_counted(world: int, name: str) -> None:
    cell = trained_cells(world)[name]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="frequency", decay=0.5)
    sparsifier.add_model(model)
    counts = {table.name: torch.zeros(table.rows, dtype=torch.float64) for table in cell.tables}
    with MaskEnforcer(sparsifier).attach(optimizer):
        for step in range(2):
            for turn in range(2):
                learn(model, optimizer, cell, 2 * step + turn)
                for rank in range(world):
                    features = batch(cell, seed=100 * (2 * step + turn) + rank, size=2)
                    for table in cell.tables:
                        for feature in table.features:
                            counts[table.name] += torch.bincount(
                                features[feature].values(), minlength=table.rows
                            )
            with torch.no_grad():
                model(batch(cell, seed=7))  # no training
            reset_traffic()
            sparsifier.step()
            assert traffic().collectives <= 9
            for table, count in counts.items():
                shape = sparsifier.full_mask(table).shape
                want = oracle(count.view(-1, 1).expand(shape) / shape[1], 0.5, shape[1])
                assert torch.equal(sparsifier.full_mask(table), want), table
                count /= 2  # in fractions: a row that is looked up now and then is not forgotten
            check_counts(sparsifier, counts)


def check_counts(sparsifier: ImportanceSparsifier, counts: Mapping[str, Tensor]) -> None:
    """The counts of this rank's shards are those parts of the global ones."""
    for name, count in counts.items():
        parts = sparsifier.masks.tables.table(name).counts.values()
        for mask, part in zip(sparsifier.masks.tables.masks(name), parts, strict=True):
            assert part.dtype == sparsifier.count_dtype
            assert torch.equal(part.double(), count[mask.rect.row : mask.rect.row_end].double()), (
                name
            )


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "decay"), [("table_wise", 1.0), ("column_wise", 1.0), ("table_wise", 0.75)]
)
def test_counts_follow_their_rows(world: int, kind: str, decay: float) -> None:
    """Through DMP.reshard, with the masks' message; and through a state."""
    cell, move = moves(world)[kind]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="frequency", decay=decay)
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        for step in range(2):
            learn(model, optimizer, cell, step)
        sparsifier.step()
        counts = {table.name: torch.zeros(table.rows, dtype=torch.int64) for table in cell.tables}
        for seed in (100 * step + rank for step in range(2) for rank in range(world)):
            for table in cell.tables:
                for feature in table.features:
                    counts[table.name] += torch.bincount(
                        batch(cell, seed, 2)[feature].values(), minlength=table.rows
                    )
        counts = {name: decay * count for name, count in counts.items()}
        check_counts(sparsifier, counts)
        assert all(count.any() for count in counts.values())
        reshard(model, move, world)
        reset_traffic()
        sparsifier.apply_masks()
        assert traffic().collectives == 1, "counts travel with the masks"
        check_counts(sparsifier, counts)
        sparsifier.step()
        counts = {name: decay * count for name, count in counts.items()}
        state = sparsifier.state_dict()
        for name in counts:
            for part in sparsifier.masks.tables.table(name).counts.values():
                part.zero_()
        sparsifier.load_state_dict(state)
        check_counts(sparsifier, counts)
        if dist.get_rank() == 0:
            for piece in (
                piece for counts in state["sharded"]["counts"].values() for piece in counts.kept
            ):
                piece["counts"] = piece["counts"].float()
        with pytest.raises(ValueError, match=r"rank.* 0.*int32 or float64 >= 0"):
            sparsifier.load_state_dict(state)


@on_ranks(2)
def test_what_is_not_known_is_refused_on_all_ranks() -> None:
    every = cells(2)
    for name, score, says in (
        ("data_parallel", "frequency", "needs a fused optimizer, and this table is dense"),
        ("row_wise", "accumulator", "no Adagrad steps it"),
    ):
        model = build(every[name], torch.optim.SGD)
        sparsifier = ImportanceSparsifier(score=score)  # type: ignore[arg-type]
        if score == "frequency":
            with pytest.raises(ValueError, match=says):
                sparsifier.add_model(model)
            continue
        sparsifier.add_model(model)
        with pytest.raises(ValueError, match="needs an attached MaskEnforcer"):
            sparsifier.step()
        before = gathered(model)
        with (
            MaskEnforcer(sparsifier).attach(optimizer_of(model)),
            pytest.raises(ValueError, match=says),
        ):
            sparsifier.step()
        assert all(torch.equal(weight, before[name]) for name, weight in gathered(model).items())


@on_ranks(2)
def test_replicas_of_the_state_must_be_equal() -> None:
    """Else their masks would differ: a checkpoint of the optimizer that one rank alone has
    loaded."""
    model, optimizer = trained(cells(2)["data_parallel"])
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="accumulator")
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        sparsifier.step()
        before = sparsifier.audit()
        for total, _ in (
            sparsifier.masks.enforcer.accumulators().values() if dist.get_rank() else ()
        ):
            total[: len(total) // 2] += 1
        with pytest.raises(
            ValueError,
            match=r"optimizer state of \w+ rows .* on rank 1.*broadcast weights and optimizer state",
        ):
            sparsifier.step()
        assert sparsifier.audit() == before
    assert len(before) == len(TABLES)


@on_ranks(2)
def test_ranks_with_other_scores_are_named() -> None:
    model, optimizer = trained(trained_cells(2)["row_wise"])
    sparsifier = ImportanceSparsifier(score="accumulator")
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        if dist.get_rank():
            sparsifier.scored_by = "norm_accumulator"
        with pytest.raises(ValueError, match=r"sparsifier.scored_by.*norm_accumulator"):
            sparsifier.step()


@on_ranks(2)
def test_sparsify_scores_by_what_all_ranks_know() -> None:
    """A rank may have no shard; another may hold tables that no Adagrad steps."""
    plan: dict[str, Any] = {"level": 0.5, "end": 2, "every": 1, "min_rows": 0}
    for name, optimizer, score in (
        ("table_wise_one_rank", RowWiseAdagrad, "norm_accumulator"),
        ("table_wise_one_rank", torch.optim.SGD, "norm"),
        ("mixed", RowWiseAdagrad, "norm"),  # data-parallel tables have Adam
    ):
        model = build(cells(2)[name], optimizer)
        with sparsify(model, optimizer_of(model), **nested(**plan, begin=2)) as sparse:
            assert sparse.sparsifier.scored_by == score and f"by {score}," in sparse.summary()
            for _ in range(3):
                sparse.step()
            assert sparse.sparsifier.audit()
        if score == "norm":
            with pytest.raises(ValueError, match="no Adagrad steps it"):
                sparsify(model, optimizer_of(model), **nested(**plan, score="accumulator"))


@on_ranks(2)
def test_a_table_that_the_planner_replicated_is_said_to_be(world: int) -> None:
    """`model.fused_optimizer` steps the others alone; the way out is the call that the error
    shows."""
    model = build(cells(world)["mixed"], RowWiseAdagrad)
    replicated = (
        r"data-parallel \(replicated on all ranks\).*model\.fused_optimizer does\s+not step"
    )
    call = r".*sparsify\(model, \[model\.fused_optimizer, dense_optimizer\]\)"
    plan: dict[str, Any] = {"level": "untouched", "end": 0, "min_rows": 0, "trust_record": True}
    with pytest.raises(
        ValueError, match=rf"None of the given optimizers steps '.*{replicated}{call}"
    ):
        sparsify(model, model.fused_optimizer, **nested(**plan))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = torch.optim.Adam(dense.values())
    with pytest.raises(ValueError, match=rf"no Adagrad steps it.*{replicated}{call}"):
        level = {"level": 0.5, "end": 1, "min_rows": 0, "score": "norm_accumulator"}
        sparsify(model, [model.fused_optimizer, adam], **nested(**level))
    adagrad = torch.optim.Adagrad(dense.values(), lr=0.1)
    with sparsify(model, [model.fused_optimizer, adagrad], **nested(**plan)) as sparse:
        sparse.step()


@on_ranks(2)
def test_counts_are_integers(world: int) -> None:
    """A mask update loses none of their bits, and no number of lookups makes one negative."""
    cell = trained_cells(world)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5, score="frequency")
    sparsifier.add_model(model)
    [counts] = sparsifier.masks.tables.table("user").counts.values()
    rows = torch.arange(len(counts), dtype=torch.int32)
    with MaskEnforcer(sparsifier).attach(optimizer):
        counts.copy_((1 << 24) + 1 + 2 * rows)
        before, version = counts.clone(), counts._version
        sparsifier.step()
        assert torch.equal(counts, before) and counts._version == version, (
            "at decay 1 nothing is written"
        )
        state = sparsifier.state_dict()
        for piece in (
            piece for saved in state["sharded"]["counts"].values() for piece in saved.kept
        ):
            piece["counts"].fill_(2**31 - 1)
        sparsifier.load_state_dict(state)
        for step in range(2):
            learn(model, optimizer, cell, step)
        [counts] = sparsifier.masks.tables.table("user").counts.values()
        assert int(counts.min()) >= 1 << 30
        sparsifier.step()
