"""`export()` on ranks: the same files for every sharding and number of ranks, errors on all of
them, nothing left."""

from __future__ import annotations

import os
import re
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import DataType

from dist_sparse import Advanced, DataNormSparsifier, compact, export, load_served, sparsify
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.parcels import Parcels
from dist_sparse.tables.modules import ModelTables, modules_by_path
from tests.dist.cells import (
    Cell,
    TableSpec,
    batch,
    build,
    cells,
    gathered,
    plain,
    set_weights,
    weights,
)
from tests.dist.copies import build_copies, copied_cells
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.plugin import on_ranks
from tests.serving.stored import crcs, dense, unsharded

KINDS: dict[str, tuple[Any, Any, dict[str, dict[str, float]]]] = {
    "rows": (
        (1, "ROW"),
        "fp32",
        {"tiny": {"sparsity_level": 1.0}, "word": {"sparsity_level": 0.0}},
    ),
    "small blocks": ((1, 4), "int4", {"user": {"sparsity_level": 0.9}}),
    "blocks cut by borders": ((3, 5), "int8", {}),
    "scales of columns": ((1, "ROW"), "int4/column", {}),
}
CELLS = {
    1: ("row_wise", "ec_column_wise"),
    2: (
        "table_wise",
        "row_wise",
        "column_wise_uneven",
        "two_shards",
        "mixed",
        "row_wise_fp16",
        "ec_row_wise",
    ),
    4: (
        "row_wise",
        "column_wise",
        "table_row_wise",
        "data_parallel",
        "grid_shard",
        "ec_data_parallel",
    ),
}
EVERY = [(world, name) for world, names in CELLS.items() for name in names]

BIG = Cell("big", 2, {"big": row_wise(), "other": table_wise(rank=1)}, tables=(
    TableSpec("big", 9000, 16, ("big_id",)),
    TableSpec("other", 3000, 16, ("other_id",)),
))  # fmt: skip


def exported(model: torch.nn.Module, path: Path, kind: str) -> None:
    block, dtype, config = KINDS[kind]
    sparsifier = DataNormSparsifier(sparsity_level=0.7, sparse_block_shape=block, norm="L2")
    located = {data.name for data in ModelTables(model).locate()}
    sparsifier.add_model(
        model, config={name: entry for name, entry in config.items() if name in located} or None
    )
    sparsifier.step()
    chosen, _, scale = dtype.partition("/")
    export(model, sparsifier, path / kind, chosen, scale or "row")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, Any]]:
    """What one process writes of the unsharded model, by what distinguishes the tables of cells."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in (cells(world)[name] for world, name in EVERY):
        if tables_of(cell) not in found:
            path = tmp_path_factory.mktemp("plain")
            for kind in KINDS:
                exported(plain(cell), path, kind)
            found[tables_of(cell)] = {kind: unsharded(path / kind) for kind in KINDS}
    return found


def tables_of(cell: Cell) -> tuple[str, ...]:
    return (str(cell.tables), str(cell.bags), cell.data_type.value)


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_files_depend_on_the_model_alone(
    world: int, name: str, tmp_path: Path, expected: dict[Any, Any]
) -> None:
    """Byte for byte those of one process; empty ranks, tables smaller than the world and with
    nothing left included."""
    cell = cells(world)[name]
    model = build(cell)
    for kind in KINDS:
        exported(model, tmp_path, kind)
        dist.barrier()
        assert unsharded(tmp_path / kind) == expected[tables_of(cell)][kind], kind
        if KINDS[kind][1] == "fp32":
            found = dense(tmp_path / kind)
            assert all(
                torch.equal(found[table], full.float()) for table, full in gathered(model).items()
            )
            if cell.data_type is DataType.FP32 and cell.trains:
                check_served(cell, model, tmp_path / kind)
        set_weights(model, weights(cell))


def check_served(cell: Cell, model: torch.nn.Module, path: Path) -> None:
    """What is served is bit for bit what the model gives unsharded; row-wise shards add partial
    sums, so they round otherwise."""
    features = batch(cell, seed=dist.get_rank())
    whole = plain(cell)
    set_weights(whole, gathered(model))
    trained = modules_by_path(model)["sparse.tables"](features)
    trained = trained.wait() if isinstance(trained, LazyAwaitable) else trained
    expected = modules_by_path(whole)["sparse.tables"](features)
    served = load_served(path)(features)
    assert list(served.keys()) == list(expected.keys()) and set(trained.keys()) == set(
        served.keys()
    )
    for key in served.keys():  # noqa: SIM118  (a KeyedTensor is no mapping)
        if cell.bags:
            assert torch.equal(served[key], expected[key])
            torch.testing.assert_close(served[key], trained[key], rtol=0, atol=1e-6)
        else:
            assert torch.equal(served[key].values(), trained[key].values())
            assert torch.equal(served[key].lengths(), trained[key].lengths())


@on_ranks()
@pytest.mark.parametrize(("world", "name"), [(2, "mixed"), (2, "ec_row_wise"), (4, "row_wise")])
def test_compact_tables(world: int, name: str, tmp_path: Path) -> None:
    """The same files as before compaction; ids are those of the original tables."""
    model = build(cells(world)[name])
    sparsifier = DataNormSparsifier(sparsity_level=0.6, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(model, config={"tiny": {"sparsity_level": 1.0}})
    sparsifier.step()
    export(model, sparsifier, tmp_path / "before", "int8")
    export(compact(model, sparsifier, optimizer=()), None, tmp_path / "after", "int8")
    dist.barrier()
    assert crcs(tmp_path / "before") == crcs(tmp_path / "after")


@on_ranks(4)
def test_copies(world: int, tmp_path: Path, expected: dict[Any, Any]) -> None:
    """Of two copies that were trained apart (2-D parallelism), the first one is written."""
    cell = copied_cells()["mixed"]
    model = build_copies(cell)
    for data in ModelTables(model).locate():
        for shard in data.shards:
            if data.copied and shard.rect not in data.owned(dist.get_rank()):
                shard.tensor.add_(1.0)
    exported(model, tmp_path, "rows")
    dist.barrier()
    assert unsharded(tmp_path / "rows") == expected[tables_of(cell)]["rows"]


@on_ranks(2)
@pytest.mark.parametrize("block", ["row", "1x4"])
def test_after_a_backward(block: str, tmp_path: Path) -> None:
    """What a fused optimizer has revived since the last forward is zero in the files, and in the
    model."""
    cell = cells(2)["row_wise"]
    model = build(cell)
    optimizer = torch.optim.SGD([model.module.over.weight, model.module.over.bias], lr=0.1)
    with sparsify(
        model, optimizer, level=0.6, end=0, block=block, advanced=Advanced(min_rows=2)
    ) as sparse:
        for step in range(3):
            model(batch(cell, seed=2 * step + dist.get_rank())).sum().backward()
            if step != 1:
                sparse.step()
        model(batch(cell, seed=dist.get_rank())).sum().backward()
        # Of removed rows ids are dropped.
        assert block == "row" or sum(sparse.sparsifier.count_revived().values()) > 0
        export(model, sparse, tmp_path / "served")
        assert sum(sparse.sparsifier.count_revived().values()) == 0
        full = gathered(model)
        assert all(
            torch.equal(found, full[name]) for name, found in dense(tmp_path / "served").items()
        )


@on_ranks(2)
def test_a_plain_model_on_ranks(tmp_path: Path, expected: dict[Any, Any]) -> None:
    """Each rank has its own, without DDP: the first rank's is written."""
    cell = cells(2)["row_wise"]
    exported(plain(cell), tmp_path, "rows")
    ddp = torch.nn.parallel.DistributedDataParallel(plain(cell))
    (tmp_path / "ddp").mkdir(exist_ok=True)
    exported(ddp, tmp_path / "ddp", "rows")
    dist.barrier()
    for path in (tmp_path, tmp_path / "ddp"):
        assert unsharded(path / "rows") == expected[tables_of(cell)]["rows"]


@on_ranks(2)
def test_bytes_on_the_wire(tmp_path: Path) -> None:
    """Each rank sends its kept rows once; nothing else grows with the tables."""
    model = build(BIG)
    sparsifier = DataNormSparsifier(sparsity_level=0.8, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(model)
    sparsifier.step()
    reset_traffic()
    export(model, sparsifier, tmp_path / "served")
    sent = traffic().bytes
    assert 64 * rows_held(model) <= sent <= 64 * rows_held(model) + 16384


def rows_held(model: torch.nn.Module) -> int:
    """The kept rows of this rank's shards."""
    return sum(
        int(s.tensor.any(1).sum()) for data in ModelTables(model).locate() for s in data.shards
    )


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux, to see the memory of a process"
)
def test_no_rank_holds_the_table_of_another(tmp_path: Path) -> None:
    """96 MiB that rank 1 holds: what rank 0 allocates meanwhile, sampled."""
    cell = replace(
        BIG, plan={"big": table_wise(rank=1)}, tables=(TableSpec("big", 3 << 17, 64, ("big_id",)),)
    )
    model = build(cell)
    export(model, None, tmp_path / "warm", "int4")
    before, peak, ended = allocated(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], allocated())

    sampling = threading.Thread(target=sample)
    sampling.start()
    export(model, None, tmp_path / "served", "int8")
    ended.set()
    sampling.join()
    assert 0 < peak[0] - before < 48 << 20


def allocated() -> int:
    """Resident bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


@on_ranks(2, 4)
def test_errors_are_raised_on_all_ranks(world: int, tmp_path: Path) -> None:
    cell = replace(BIG, world=world, plan={"big": row_wise(), "other": table_wise(rank=world - 1)})
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model)
    sparsifier.step()
    rank, last = dist.get_rank(), world - 1
    served = tmp_path / "served"

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            export(model, *arguments)
        dist.barrier()
        assert not [*tmp_path.iterdir()], message
        dist.barrier()

    refused(
        f"rank {last}: ValueError: Invalid dtype='int3'",
        sparsifier,
        served,
        "int3" if rank == last else "int8",
    )
    refused("path, dtype", sparsifier, served, "int8" if rank == last else "int4")
    refused("path, dtype", sparsifier, tmp_path / str(rank))
    refused("rank 0: ValueError: Invalid path.* exists already", sparsifier, tmp_path)
    refused(
        f"rank {last}: ValueError: Invalid sparse", "sparse" if rank == last else sparsifier, served
    )
    other = next(data for data in ModelTables(model).locate() if data.name == "other")
    if rank == last:
        kept = tuple(other.shards[0].tensor.nonzero()[9])
        other.shards[0].tensor[kept] = torch.nan
    refused(
        "rank 0: ValueError: Table 'other' can't be exported in fp32: it has the value nan",
        sparsifier,
        served,
    )
    if rank == last:
        other.shards[0].tensor[kept] = 1e5
    refused(
        "rank 0: .*'other' can't be exported in fp16: it has the value 100000.0",
        sparsifier,
        served,
        "fp16",
    )
    if rank == last:
        other.shards[0].tensor.fill_(1.0)
    refused("'other' has .* removed weights that are not zero", sparsifier, served)
    sparsifier.apply_masks()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        refused("rank 0: OSError.* File too large", sparsifier, served)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    export(model, sparsifier, served)


def killed(path: Path, rank: int, exchange: int) -> None:
    """End a rank, as kill -9 would, when it is about to send for the n-th time."""
    model = build(BIG)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(model)
    sparsifier.step()
    if dist.get_rank() == rank:
        real, calls = Parcels.exchange, iter(range(exchange))

        def ending(self: Parcels, device: torch.device) -> None:
            if next(calls, None) is None:
                os._exit(9)
            real(self, device)

        Parcels.exchange = ending  # type: ignore[method-assign]
    export(model, sparsifier, path / "served")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("rank", "exchange"), [(1, 1), (0, 1)], ids=["other", "writer"])
def test_a_killed_rank_leaves_no_artifact(tmp_path: Path, rank: int, exchange: int) -> None:
    with pytest.raises(RanksFailed, match=f"rank {rank} ----\ndied with exit code 9"):
        run_ranks(2, killed, tmp_path, rank, exchange)
    left = [entry.name for entry in tmp_path.iterdir()]
    assert all(name.endswith(".partial") for name in left) and (rank == 0) == bool(left)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_collections_of_sharded_modules(kind: str, tmp_path: Path) -> None:
    """The same as of the unsharded module, except for weights, which sharded bags always read."""
    cell = cells(2)["mixed" if kind == "bags" else "ec_row_wise"]
    mine = export(build(cell), None, tmp_path / "sharded").manifest
    whole = export(plain(cell), None, tmp_path / "plain").manifest
    [found], [expected] = mine.collections, whole.collections
    assert found.weighted == ("optional" if kind == "bags" else False)
    assert replace(found, weighted=False) == expected and mine.tables == whole.tables
    assert (found.path, found.kind) == ("sparse.tables", "bag" if kind == "bags" else "sequence")
