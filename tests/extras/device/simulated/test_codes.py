"""Books, codes and lookups on the device are the CPU's, in launches that grow neither with rows,
nor with groups of columns, nor with features."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse.groups import world_group
from dist_sparse.masking import device as devices
from dist_sparse.tables.shards import Rect, Shard, ShardedData
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.fake import counting, cuda, inner
from tests.extras.device.simulated.runs import on_device

learning = pytest.importorskip("dist_sparse.extras.codes.learning")
decoding = pytest.importorskip("dist_sparse.extras.codes.decoding")

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def drawn(count: int, groups: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Books, and rows among which are ties, zeros, weights beyond the grid and weights halfway
    between two of its points."""
    random = torch.Generator().manual_seed(count + groups)
    books = torch.randn(groups, 256, width, generator=random).half()
    books[:, 0] = 0
    books[:, 200:] = books[:, :56]
    rows = torch.randn(count, groups * width, generator=random)
    rows[::5] = 0
    rows[1::7] *= 1_000
    halves = torch.arange(-2, 2).repeat(width)[:width].double() + 0.5
    rows[2::5] = (halves / learning.grid_scales(books)).flatten().float()
    return books, rows.to(dtype)


def codes_of(rows: Tensor, books: Tensor, put: Any) -> tuple[Tensor, Spent]:
    codes = torch.full((len(rows), len(books)), 255, dtype=torch.uint8)
    with on_device(), counting() as meter:
        learning.assign(put(rows), books, put(codes))
    return codes, meter.spent


def sums_of(rows: Tensor, codes: Tensor, books: Tensor, put: Any) -> tuple[Tensor, Spent]:
    with on_device(), counting() as meter:
        sums = learning._sum_by_entry(put(rows), put(codes), books)
    # The sums of entries 0 are not read.
    return inner(sums)[:, 1:], meter.spent


def here(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "width"), [(1, 1), (3, 5), (2, 32), (40, 1)])
def test_codes_and_sums_are_the_cpus(groups: int, width: int, dtype: torch.dtype) -> None:
    books, rows = drawn(131, groups, width, dtype)
    expected, _ = codes_of(rows, books, here)
    found, _ = codes_of(rows, books, cuda)
    assert torch.equal(found, expected) and expected.unique().numel() > 20
    expected_sums, _ = sums_of(rows, expected, books, here)
    found_sums, _ = sums_of(rows, expected, books, cuda)
    assert torch.equal(found_sums, expected_sums) and expected_sums.any()


def test_columns_of_a_wider_table() -> None:
    books, rows = drawn(131, 3, 4, torch.float32)
    wide = torch.cat([rows, torch.ones(131, 5)], 1)[:, :12]
    expected, _ = codes_of(rows, books, here)
    assert torch.equal(codes_of(wide, books, cuda)[0], expected)
    expected_sums, _ = sums_of(rows, expected, books, here)
    assert torch.equal(sums_of(wide, expected, books, cuda)[0], expected_sums)
    empty, _ = codes_of(rows[:0], books, cuda)
    assert not empty.numel() and not sums_of(rows[:0], empty, books, cuda)[0].any()


def table(rows: Tensor) -> ShardedData:
    """Rows as a whole table in one rank."""
    rect = Rect(0, 0, rows.shape[0], rows.shape[1])
    return ShardedData(
        name="t",
        shape=(rect.rows, rect.cols),
        dtype=rows.dtype,
        sharding="table_wise",
        ranks=None,
        tiling=((rect,),),
        shards=(Shard(rect, rows),),
        kernel="fused",
        fqn="t.weight",
        features=("f",),
    )


def a_fit(count: int, groups: int) -> Spent:
    """Assign codes on the device, and refit the books to them; return what that costs."""
    books, rows = drawn(count, groups, 4, torch.float32)
    with on_device():
        codes = cuda(torch.zeros(count, groups, dtype=torch.uint8))
        placed = cuda(rows)
        with counting() as meter:
            learning.assign(placed, books, codes)
            learning.refit_books(table(placed), world_group(), books, table(codes))
    return meter.spent


def test_costs_grow_neither_with_rows_nor_with_groups() -> None:
    found = {(count, groups): a_fit(count, groups) for count in (100, 700) for groups in (2, 6)}
    costs = {(spent.waits, spent.launches) for spent in found.values()}
    assert len(costs) == 1, found
    [(waits, launches)] = costs
    assert waits <= 4 and launches <= 18, found[700, 6].lines
    # Books and their sums: 2 KiB a column and a group, and no memory for each row.
    for groups in (2, 6):
        few, many = found[100, groups].peak, found[700, groups].peak
        assert few == many <= 4 * 256 * 8 * 5 * groups


def test_torch_takes_a_chunk_at_a_time_without_kernels() -> None:
    """Some launches for each chunk of rows, and two more for each group. The same codes."""
    launches: dict[int, list[int]] = {}
    for groups in (2, 6):
        # One, two and four chunks.
        for count in (512, 1_000, 2_000):
            books, rows = drawn(count, groups, 4, torch.float32)
            expected, _ = codes_of(rows, books, here)
            with (
                mock.patch.object(devices, "_offered_kernels", lambda: None),
                mock.patch.object(learning, "_CHUNK_ON_DEVICE", 512),
            ):
                found, spent = codes_of(rows, books, cuda)
            assert torch.equal(found, expected)
            launches.setdefault(groups, []).append(spent.launches)
    for groups, (one, two, four) in launches.items():
        assert (four - two) / 2 == two - one <= 8 + 2 * groups
    # Converted once each, in any number of chunks.
    assert launches[2][0] - launches[6][0] == 2 * (2 - 6)


# Columns and groups of tables; None has no codes.
TABLES: list[tuple[int, int | None]] = [(6, 2), (8, None), (40, 5), (8, 8), (33, 11)]


def coded_shards(tables: Any, put: Any) -> list[tuple[Any, int]]:
    """A shard of each table with codes, on the CPU or the device, with the same codes and books."""
    random = torch.Generator().manual_seed(0)
    shards: list[tuple[Any, int]] = []
    for columns, groups in tables:
        if groups is None:
            shards.append((None, columns))
            continue
        rows, width = 20 + columns, columns // groups
        weight = put(torch.zeros(rows, columns))
        shard = decoding.CodedShard("t", Rect(0, 0, rows, columns), weight, width)
        codes = torch.randint(256, (rows, groups), generator=random, dtype=torch.uint8)
        inner(shard.codes).copy_(codes)
        shard.entries = put(torch.randn(groups * 256, width, generator=random))
        shards.append((shard, columns))
    return shards


def looked_up(
    tables: Any, pooling: str, weights: torch.dtype | None, put: Any, bags: int = 7
) -> tuple[Tensor, Spent]:
    """The decoded output of a lookup with empty and long bags, and ids out of range."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (len(tables) * bags,), generator=random)
    lengths[3] = 50
    ids = torch.randint(-1, 60, (int(lengths.sum()),), generator=random)
    factors = None
    if weights is not None:
        # Of a power of two, products are exact: the interpreter rounds what a GPU and a CPU do not.
        factors = put((1 << torch.randint(0, 4, ids.shape, generator=random)).to(weights))
    total = sum(columns for columns, _ in tables)
    shape = (len(ids), tables[0][0]) if pooling == "none" else (bags, total)
    floats = torch.randn(shape, generator=random)
    keys = [f"f{number}" for number in range(len(tables))]
    with on_device():
        shards = coded_shards(tables, put)
        batch = KeyedJaggedTensor(keys, put(ids), factors, lengths=put(lengths))
        # Known since TorchRec distributed the ids.
        batch.offset_per_key(), batch.length_per_key(), batch.offsets()
        output = put(floats)
        with torch.no_grad(), counting() as meter:
            found = decoding._decode_kernel(shards, pooling, [batch], {}, output)
    return inner(found), meter.spent


@pytest.mark.parametrize("weights", [None, torch.float32, torch.int64])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_lookups_are_the_cpus(pooling: str, weights: torch.dtype | None) -> None:
    # Sequences have one width.
    tables = [(8, groups) for groups in (2, None, 4, 8)] if pooling == "none" else TABLES
    expected, _ = looked_up(tables, pooling, weights, here)
    found, _ = looked_up(tables, pooling, weights, cuda)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_lookups_cost_the_same_for_any_number_of_features(pooling: str) -> None:
    few, many = ([(8, 2), (8, None), *[(8, 4)] * more] for more in (1, 24))
    costs = []
    for tables in (few, many):
        _, spent = looked_up(tables, pooling, torch.float32, cuda)
        costs.append((spent.waits, spent.launches))
    # The floats, the addresses of the features, and the kernel.
    assert costs == [(0, 3)] * 2
