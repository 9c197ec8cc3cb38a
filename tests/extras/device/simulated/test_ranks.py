"""Mask updates over several ranks whose tables are on the device, over NCCL and gloo."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dist_sparse import groups
from dist_sparse.enforcer.rows import EVERY
from dist_sparse.extras.device import flat_scores, update_checks
from dist_sparse.masking import selection
from dist_sparse.tables.shards import Rect
from tests.dist.plugin import on_ranks
from tests.extras.device.simulated import fake
from tests.extras.device.simulated.ceilings import WAITS_OF_ALL_ROUNDS, WAITS_OF_TWO_RANKS
from tests.extras.device.simulated.collectives import fake_world, nccl
from tests.extras.device.simulated.fake import inner
from tests.extras.device.simulated.runs import BLOCKS, Run, on_device
from tests.extras.device.simulated.tables import Layout, one_rank

ROWS, COLS = 301, 24
RANKS = (0, 1)
# Borders cut blocks of every shape.
BY_ROWS = Layout((ROWS, COLS), (Rect(0, 0, 151, COLS), Rect(151, 0, 150, COLS)), RANKS)
BY_COLUMNS = Layout((ROWS, COLS), (Rect(0, 0, ROWS, 10), Rect(0, 10, ROWS, 14)), RANKS)
LAYOUTS = {"rows": BY_ROWS, "columns": BY_COLUMNS}
# Widths of parts of rows that kernels sum.
BY_WIDTHS = Layout((ROWS, COLS), (Rect(0, 0, ROWS, 8), Rect(0, 8, ROWS, 16)), RANKS)


def whole(run: Run) -> list[torch.Tensor]:
    """The masks of all tables, element by element, on every rank."""
    return [inner(run.sparsifier.full_mask(name)).clone() for name in run.sparsifier.data_groups]


# Ranks of their own for each backend: a process keeps its groups, and they their device.
@on_ranks(2, local_world_size=1)
@pytest.mark.parametrize("cut", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_cut_tables_get_the_masks_of_whole_ones_over_nccl(name: str, cut: str) -> None:
    with nccl():
        check_masks_of(name, LAYOUTS[cut])


@on_ranks(2, local_world_size=1)
def test_kernels_sum_the_parts_of_rows_over_nccl() -> None:
    with nccl(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hundreds of torch operations")
        check_masks_of("row", BY_WIDTHS)


@on_ranks(2, local_world_size=2)
@pytest.mark.parametrize("cut", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_cut_tables_get_the_masks_of_whole_ones_over_gloo(name: str, cut: str) -> None:
    check_masks_of(name, LAYOUTS[cut])


def check_masks_of(name: str, layout: Layout) -> None:
    """Two mask updates, and the masks once the tables are cut the other way."""
    rank = dist.get_rank()
    with on_device():
        expected = Run("cpu", BLOCKS[name], [one_rank(ROWS, COLS)] * 2)
        found = Run("cuda", BLOCKS[name], [layout] * 2, rank)
        for level in (0.3, 0.55):
            expected.update(level)
            found.update(level)
            assert all(map(torch.equal, whole(expected), whole(found)))
        for table, shard in zip(expected.weights(), found.weights(), strict=True):
            assert torch.equal(layout.shard(table, rank), shard)
        other = BY_COLUMNS if layout is BY_ROWS else BY_ROWS
        shards = [other.shard(table, rank) for table in expected.weights()]
        found.model.store([other] * 2, shards)
        found.sparsifier.apply_masks()
        assert all(map(torch.equal, whole(expected), whole(found)))
        assert all(map(torch.equal, shards, found.weights()))


@on_ranks(2, local_world_size=2)
@pytest.mark.parametrize("cut", LAYOUTS)
@pytest.mark.parametrize("name", ["row", "1x4"])
def test_cut_tables_train_as_on_a_cpu(name: str, cut: str) -> None:
    """Weights, optimizer state and sampled lookups."""
    found = []
    with on_device():
        for device in ("cpu", "cuda"):
            run = Run(device, BLOCKS[name], [LAYOUTS[cut]] * 2, dist.get_rank())
            run.update(0.8)
            for _ in range(EVERY + 1):
                run.model(run.features(weighted=True)).square().sum().backward()
            tables = run.sparsifier.masks.tables
            held = [shard for table in tables.names for shard in tables.table(table).shards]
            samples = [inner(shard.lookups) for shard in held]
            assert all(0 < int(removed) < int(total) for total, removed in samples)
            found.append([*samples, *run.weights(), *run.kernel.sums])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@on_ranks(2, local_world_size=1)
@pytest.mark.parametrize("name", ["row", "1x4"])
def test_waits_do_not_grow_with_tables(name: str) -> None:
    """Of two ranks, with a recorder: the counts of all tables are read at once."""
    found = {}
    for tables in (2, 8):
        with nccl(), on_device():
            run = Run("cuda", BLOCKS[name], [BY_ROWS] * tables, dist.get_rank())
            run.update(0.3)
            run.train()
            plain = run.update(0.4).waits
            run.sparsifier.record()
            run.train()
            spent = run.update(0.5)
        found[tables] = plain, spent.waits
    assert found[2] == found[8], spent.lines
    assert found[8] == WAITS_OF_TWO_RANKS[name], (found, spent.lines)


def in_three_classes(name: str, seed: int, ties: bool) -> torch.Tensor:
    """A table whose blocks are small, of middling size, or large. The middling ones, where half of
    all blocks are smaller, differ in their last bits, or tie. A list has room for them."""
    width = COLS if name == "row" else 4
    count = ROWS * COLS // width
    place = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) / count
    sizes = torch.where(place < 0.46, 0.1, torch.where(place < 0.54, 1.2, 10.0))
    # All scores of one size have the same leading 21 bits.
    near = 1 if ties else 1 + 3.6e-5 * (place - 0.5) / 0.08
    return (sizes * near).repeat_interleave(width).view(ROWS, COLS)


@on_ranks(2, local_world_size=1)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ["row", "1x4"])
def test_waits_of_all_rounds(name: str, ties: bool) -> None:
    """As in large tables: sampled if blocks are finer than rows, with three rounds for the scores
    and three for the places of ties. The self-test allows as many."""
    tables = [in_three_classes(name, seed, ties) for seed in range(2)]
    rank, rounds = dist.get_rank(), [(8, 16), (4, 16), (0, 16)]
    with (
        nccl(),
        on_device(),
        mock.patch.object(flat_scores, "_SMALL", 1),
        mock.patch.object(selection, "_index_rounds", lambda blocks: rounds),
    ):
        run = Run("cuda", BLOCKS[name], [BY_ROWS] * 2, rank)
        for shard, table in zip(run.kernel.rows(), tables, strict=True):
            shard.copy_(BY_ROWS.shard(table, rank))
        run.update(0.3)
        spent = run.update(0.5)
        expected = Run("cpu", BLOCKS[name], [one_rank(ROWS, COLS)] * 2)
        for shard, table in zip(expected.kernel.rows(), tables, strict=True):
            shard.copy_(table)
        expected.update(0.5)
        assert all(map(torch.equal, whole(expected), whole(run)))
    assert spent.waits == WAITS_OF_ALL_ROUNDS[name][ties], spent.lines
    assert spent.waits <= update_checks.most_waits(name, 2)


@on_ranks(2, local_world_size=1)
def test_agreeing_takes_no_memory_of_the_device() -> None:
    """So that a rank which has run out of it can tell the others."""
    with nccl(), on_device():
        group = groups.world_group()
        with group.agreeing("first()"):
            pass
        with (
            mock.patch.object(fake.ACCOUNT, "hold", _refuse_new_memory),
            pytest.raises(ValueError, match=r"rank 1: RuntimeError: CUDA out of memory\. x+"),
            group.agreeing("step()"),
        ):
            if dist.get_rank() == 1:
                # Longer than one piece of the kept memory.
                raise RuntimeError(f"CUDA out of memory. {'x' * 900}")


def _refuse_new_memory(owner: object, tensor: torch.Tensor) -> None:
    """Tensors may be views of memory that is held already."""
    if not fake.ACCOUNT.holds(tensor):
        raise RuntimeError("CUDA out of memory")


def test_nccl_takes_tensors_of_the_device_alone() -> None:
    """The stand-in can fail."""
    with fake_world(4), on_device(), nccl():
        dist.all_reduce(torch.ones(2, device="cuda"))
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_costs_do_not_grow_with_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, waits and launches of a mask update of 64 ranks and of 1,000."""
    found = {}
    # A sample of a rank's few blocks may mislead, in one of the two worlds.
    monkeypatch.setattr(flat_scores, "_SMALL", 1 << 30)
    for world in (64, 1_000):
        rects = tuple(Rect(rank * 48, 0, 48, 16) for rank in range(world))
        layout = Layout((world * 48, 16), rects, tuple(range(world)))
        with fake_world(world), on_device(), nccl():
            # Sums over ranks are this rank's share: so is what is removed.
            run = Run("cuda", BLOCKS[name], [layout] * 2, rank=1, level=0.25 / world)
            groups.reset_traffic()
            spent = run.update()
            sent = groups.traffic()
            run.train(2)
            assert run.ordinary_step().waits == 0
            assert groups.traffic() == sent
            assert all(stats.removed_blocks for stats in run.sparsifier.table_stats())
        found[world] = spent.waits, spent.launches, sent.collectives, sent.bytes
    for few, many in zip(found[64], found[1_000], strict=True):
        assert many <= few
    *_, collectives, nbytes = found[64]
    assert collectives <= 4 and nbytes <= 50_000
