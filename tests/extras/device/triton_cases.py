"""Cases for the Triton kernels of rows: one flags the rows it is given, zeroes what is removed in
flagged rows, and writes nothing else; one gives ids their weights, and samples lookups.

The checks, for a process of their own: ``python -m tests.extras.device.triton_cases DEVICE`` prints one
JSON line for each, DEVICE being ``cpu`` (with ``TRITON_INTERPRET=1``), ``cuda`` or ``compiler``.
Triton decides when a kernel is defined whether it is compiled or interpreted, so nothing of it is
imported before :func:`main` is called.
"""

from __future__ import annotations

import json
import mmap
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_sparse.enforcer.rows import MaskedShard
from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.tables.shards import Block, Rect, grid_of
from tests.extras.device.machine_code import (
    Compiled,
    compiled,
    kernels_of_codes,
    kernels_of_rows,
    kernels_of_updates,
)

DEVICE = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES: dict[str, Callable[[], None]] = {}
INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Feature = tuple[MaskedShard | None, Tensor]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def slot(
    rect: Rect, block: Block, dtype: torch.dtype = torch.float32, kept: float = 0.5, stride: int = 3
) -> MaskedShard:
    """A shard amid values of others, with values that arithmetic would not keep, and a random
    mask."""
    whole = torch.randn(rect.rows + 2, rect.cols + stride, dtype=torch.float64)
    for value in (float("nan"), -0.0, 0.0, float("inf")):
        whole[torch.rand_like(whole) < 0.1] = value
    grid = grid_of(rect, block)
    flags = torch.rand(grid.rows * grid.cols) < kept
    weight = whole.to(DEVICE, dtype)[1:-1, min(stride, 1) : rect.cols + min(stride, 1)]
    return MaskedShard(weight, BlockMask(rect, block, pack(flags).to(DEVICE)))


def words(weight: Tensor) -> Tensor:
    """All that lies around a shard, as integers, of which equal ones have equal bits."""
    whole = weight._base
    assert whole is not None
    return whole.view(INTS[whole.element_size()])


def expected(features: Sequence[Feature]) -> list[tuple[MaskedShard, Tensor]]:
    """The words of every shard with zeros where they belong."""
    slots = list({id(slot): slot for slot, _ in features if slot is not None}.values())
    results = []
    for one in slots:
        want, rect = words(one.weight).clone(), one.mask.rect
        place = want.as_strided(one.weight.shape, one.weight.stride(), one.weight.storage_offset())
        removed = one.mask.dense() == 0
        touched = {
            id_ if 0 <= id_ < rect.rows else 0
            for other, ids in features
            if other is one
            for id_ in ids.tolist()
        }
        for row in touched & set(range(rect.rows)):
            place[row][removed[row]] = 0
        results.append((one, want))
    return results


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(grid, arguments...) of each launch from now on."""
    from dist_sparse.extras.device import row_kernels

    kernel, seen = row_kernels.visit_rows, []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                seen.append((grid, *args))
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(row_kernels, "visit_rows", Counted())
    return seen


def flagged(slots: Sequence[MaskedShard | None], flags: Sequence[Tensor] = ()) -> Any:
    """A cleaner of tables whose rows are all flagged, or as ``flags`` of the features say."""
    from dist_sparse.extras.device.row_kernels import TritonRowCleaner

    given: list[Any] = [None] * len(slots)
    for i, one in enumerate(slots):
        if one is not None and one.mask.removes:
            rows = one.mask.rect.rows
            every = torch.ones(rows, dtype=torch.uint8, device=DEVICE)
            given[i] = *one, flags[i] if flags else every
    return TritonRowCleaner(given)


def settle(
    features: Sequence[Feature],
    ends: str = "tensor",
    dtype: torch.dtype = torch.int64,
    expect_zeros: bool = True,
) -> None:
    """One lookup of all features, against the rule."""
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *(ids for _, ids in features)]).to(
        DEVICE, dtype
    )
    sums = [0]
    for _, some in features:
        sums.append(sums[-1] + len(some))
    want = expected(features)
    before = [words(one.weight).clone() for one, _ in want]
    lookup = flagged([slot for slot, _ in features])
    places = (
        sums
        if ends == "list"
        else torch.tensor(sums, dtype=torch.int64 if ends == "tensor" else torch.int32)
    )
    if isinstance(places, Tensor):
        places = places.to(DEVICE)
    if ends == "strided":  # with offsets of bags between those of features, to be skipped
        places = torch.stack([places, places + 1, places + 2], dim=1).flatten()[::3]
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    lookup.clean_read(ids, places)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    for index, (one, expect) in enumerate(want):
        assert torch.equal(words(one.weight), expect), (
            f"table {index}, {one.mask.rect}, {one.mask.block}"
        )
    if expect_zeros:  # else the checks above had nothing to see
        assert any(
            not torch.equal(old, words(one.weight))
            for old, (one, _) in zip(before, want, strict=True)
        )


def zero_pages(size: int) -> Tensor:
    """Bytes of 0 of which those that nobody touches take no memory, on the CPU."""
    if DEVICE.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which mmap does not name
    return torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve),
        dtype=torch.uint8,
    )


def some_ids(rows: int, count: int) -> Tensor:
    return torch.randint(0, rows, (count,))


@case
def blocks_of_every_shape() -> None:
    """Whole shards and shards whose corner, and other end, cuts blocks; widths of less and of more
    than a tile."""
    for index, block in enumerate([(1, 4), (1, 10**9), (1, 1), (4, 4), (3, 5), (1, 32), (7, 1)]):
        for cols in (13, 71):
            for rect in (
                Rect(0, 0, 50, cols),
                Rect(6, 3, 51, cols),
                Rect(2**40 + 1, 2**33 + 7, 20, cols),
            ):
                table = slot(rect, block, DTYPES[index % 4])
                settle(
                    [(table, some_ids(rect.rows, 30))], dtype=(torch.int32, torch.int64)[index % 2]
                )


@case
def shifts_and_divisions() -> None:
    """Powers of two are shifted by; one other block in the lookup and all are divided by."""
    for blocks in ([(4, 8)], [(3, 5)], [(64, 21), (4, 8)], [(64, 21), (3, 5), (4, 8)]):
        settle([(slot(Rect(5, 3, 40, 21), block), some_ids(40, 25)) for block in blocks])


@case
def types_of_weights_and_ids() -> None:
    for dtype in DTYPES:
        for ids in (torch.int32, torch.int64):
            settle(
                [(slot(Rect(1, 2, 30, 10), (2, 4), dtype), some_ids(30, 20)) for _ in range(2)],
                dtype=ids,
            )


@case
def one_id_ten_thousand_times() -> None:
    table = slot(Rect(0, 0, 20, 4), (1, 1))
    settle([(table, torch.full((10_000,), 7))])


@case
def ids_outside_the_table_are_row_0() -> None:
    for outside in (20, 21, -1, -20, 2**31 - 1, -(2**31)):
        for dtype in (torch.int32, torch.int64):
            table = slot(Rect(4, 0, 20, 9), (1, 2))
            table.weight[0] = 1
            settle([(table, torch.tensor([3, outside, 5]))], dtype=dtype)
    table = slot(Rect(0, 0, 20, 9), (1, 1), kept=0)
    settle([(table, torch.tensor([2**32 + 3]))])  # not row 3


@case
def features_without_ids_without_slots_and_of_one_table() -> None:
    first, second = slot(Rect(0, 0, 30, 8), (1, 4)), slot(Rect(3, 1, 25, 17), (2, 3))
    none = torch.zeros(0, dtype=torch.int64)
    for ends in ("list", "tensor", "int32", "strided"):
        first.weight.normal_()
        settle(
            [
                (None, some_ids(10, 5)),
                (first, some_ids(15, 9)),
                (second, none),
                (None, none),
                (first, none),
                (second, some_ids(25, 40)),
                (first, 15 + some_ids(15, 9)),
                (None, some_ids(10**6, 33)),
                (second, none),
            ],
            ends=ends,
        )


@case
def masks_that_remove_nothing_or_everything() -> None:
    keeps, goes = (
        slot(Rect(0, 0, 12, 6), (1, 2), kept=1.1),
        slot(Rect(0, 0, 12, 6), (1, 2), kept=-1),
    )
    assert not keeps.mask.removes
    settle([(keeps, some_ids(12, 50)), (goes, torch.tensor([3, 4])), (keeps, some_ids(12, 8))])
    settle([(keeps, some_ids(12, 50))], expect_zeros=False)


@case
def no_ids() -> None:
    table, none = slot(Rect(0, 0, 12, 6), (1, 2)), torch.zeros(0, dtype=torch.int64)
    for ends in ("list", "tensor"):
        settle([(table, none), (None, none)], ends=ends, expect_zeros=False)
        settle([(None, some_ids(9, 9))], ends=ends, expect_zeros=False)
        settle([], ends=ends, expect_zeros=False)


@case
def a_table_without_rows() -> None:
    empty, table = slot(Rect(7, 0, 0, 6), (1, 2)), slot(Rect(0, 0, 12, 6), (1, 2))
    settle([(empty, some_ids(9, 9)), (table, some_ids(12, 9))])


@case
def hundreds_of_features() -> None:
    """Of every length from none to several programs' worth, over tables of different widths and
    blocks."""
    tables: list[MaskedShard | None] = [None]
    for index in range(37):
        tables.append(
            slot(Rect(index, index % 5, 10 + index, 1 + 3 * index), (1 + index % 3, 1 + index % 4))
        )
    for length in (2, 40):
        features: list[Feature] = [
            (tables[n * 7 % 38], some_ids(10, n * n % length)) for n in range(331)
        ]
        settle(features, ends="int32")


@case
def one_launch_that_reads_the_ends_where_they_lie() -> None:
    tables = [slot(Rect(0, 0, 12, cols), (1, 2)) for cols in (6, 40, 8)]
    with pytest.MonkeyPatch.context() as patch:
        seen = launches(patch)
        ids, offsets = some_ids(12, 48).to(DEVICE), torch.arange(0, 49, 4).to(DEVICE)
        flagged(tables).clean_read(ids, offsets[::4])
        (((programs,), *args),) = seen
        assert programs == 2  # of 32 ids each
        ends = args[2]
        assert (ends.data_ptr(), ends.stride(0), args[3]) == (offsets.data_ptr(), 4, 4)
        flagged([None, None]).clean_read(ids, offsets[::6])
        flagged(tables).clean_read(ids[:0], offsets[::4])
        assert len(seen) == 1


@case
def ends_that_leave_ids_out_or_have_too_few() -> None:
    table = slot(Rect(0, 0, 80, 6), (1, 2), kept=-1)
    ids = torch.arange(80, device=DEVICE)
    for count, ends, rows in ((80, [35, 70], range(35, 70)), (50, [0, 70], range(50))):
        table.weight.fill_(1)
        flagged([table]).clean_read(ids[:count], ends)
        assert (table.weight == 0).all(1).nonzero().flatten().tolist() == list(rows)


@case
def ends_that_do_not_ascend_do_not_hang() -> None:
    table = slot(Rect(0, 0, 80, 6), (1, 2))
    for ends in ([0, 60, 20, 80], [0, 5, 90, 50, 3, 80], [70, 0, 0, 60, 90, 1, 2, 75]):
        cleaner = flagged([table] * (len(ends) - 1))
        cleaner.clean_read(torch.arange(80, device=DEVICE), ends)


@case
def only_flagged_rows_are_cleaned() -> None:
    """By a lookup that names all rows, and without one; two features read the second table."""
    for by_id in (True, False):
        tables = [slot(Rect(5, 3, rows, 21), (3, 5)) for rows in (70, 41)]
        features = [tables[0], None, tables[1], tables[1]]
        flags = [torch.zeros(one.mask.rect.rows, dtype=torch.uint8) for one in tables]
        flags = [each.to(DEVICE) for each in flags]
        cleaner = flagged(features, [flags[0], flags[0], flags[1], flags[1]])
        # 99 is read as row 0.
        named = torch.tensor([69, 3, 3, 1, 2, 40, 7, 99], device=DEVICE)
        cleaner.flag(named, [0, 3, 5, 6, 8])
        assert flags[0].nonzero().flatten().tolist() == [3, 69]
        assert flags[1].nonzero().flatten().tolist() == [0, 7, 40]
        both: list[Feature] = [(tables[0], named[:3]), (tables[1], named[5:])]
        want = expected(both)
        if by_id:
            every = [torch.arange(one.mask.rect.rows) for one in tables]
            ids = torch.cat([every[0], every[1], every[1]]).to(DEVICE)
            cleaner.clean_read(ids, [0, 70, 70, 111, 152])
        else:
            cleaner.clean()
        for one, words_wanted in want:
            assert torch.equal(words(one.weight), words_wanted)
        assert [int(each.sum()) for each in flags] == [2, 3]


@case
def more_than_2_31_elements_and_bits() -> None:
    rows = 2**28 + 100
    weight = zero_pages(rows * 16).view(torch.float16).view(rows, 8)
    mask = BlockMask(Rect(0, 0, rows, 8), (1, 1), zero_pages(rows))
    mask.__dict__["removes"] = True  # known: asking would read every page
    near = torch.tensor([3, 50, 99], device=DEVICE)
    mask.bits[near + 2**28] = 0b1010_0000
    weight[near + 2**28], weight[near] = 5, 5
    flags = zero_pages(rows)
    cleaner = flagged([MaskedShard(weight, mask)], [flags])
    cleaner.flag(near + 2**28, [0, 3])
    assert flags[near + 2**28].all() and not flags[near].any()
    cleaner.clean_read(near + 2**28, [0, 3])
    assert weight[near + 2**28].tolist() == [[0, 0, 0, 0, 0, 5, 0, 5]] * 3
    assert (weight[near] == 5).all()


class Lookup(NamedTuple):
    """The ids of one feature, and the mask of its table; None: a table without one."""

    mask: BlockMask | None
    ids: Tensor
    weighed: bool = True


def check_lookup(
    features: Sequence[Lookup],
    given: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
    strided: bool = False,
) -> None:
    """Flags, weights and samples of a lookup against a count by hand."""
    from dist_sparse.extras.device.row_kernels import TritonLookups

    masks = {id(one.mask): one.mask for one in features if one.mask is not None}
    found = {key: torch.zeros(2, dtype=torch.int64, device=DEVICE) for key in masks}
    want = {key: [0, 0] for key in masks}
    keeps = []
    for mask, ids, weighed in features:
        if mask is None:
            keeps += [True] * len(ids)
            continue
        dead = mask.dead_rows().tolist()
        for id_ in ids.tolist():
            removed = dead[id_ if 0 <= id_ < len(dead) else 0]
            want[id(mask)][0] += 1
            want[id(mask)][1] += removed
            keeps.append(not (removed and weighed))
    ids = torch.cat([one.ids for one in features]).to(DEVICE, dtype)
    ends = torch.tensor([0, *accumulate(len(one.ids) for one in features)])
    if strided:
        ends = torch.stack([ends, ends + 1], dim=1).flatten().int()[::2]
    ends = ends.to(DEVICE)
    plain, sampling = (
        TritonLookups(
            [
                None if mask is None else (mask, found[id(mask)] if samples else None, weighed)
                for mask, _, weighed in features
            ]
        )
        for samples in (False, True)
    )
    # A filter of the enforcer's has tables whose ids are weighed, and no others.
    if all(one.weighed for one in features):
        assert plain.flags(ids, ends).tolist() == keeps
    assert not any(int(each.sum()) for each in found.values())
    kept = torch.tensor(keeps, dtype=torch.bool, device=DEVICE)
    ones = torch.ones(len(ids), device=DEVICE) if given is None else given
    expect, weights = torch.where(kept, ones, 0), sampling.weights(ids, ends, given)
    assert weights.dtype == expect.dtype
    same = INTS[expect.element_size()]
    assert torch.equal(weights.view(same), expect.view(same))
    # Whatever a launch returns, it counts once.
    sampling.flags(ids, ends)
    sampling.sample(ids, ends)
    for key, numbers in want.items():
        assert found[key].tolist() == [3 * number for number in numbers]


def row_mask(rows: int, kept: float = 0.5, height: int = 1, start: int = 0) -> BlockMask:
    """A random mask of whole rows."""
    return slot(Rect(start, 0, rows, 8), (height, 10**9), kept=kept).mask


@case
def weights_of_tables_of_every_kind() -> None:
    """Whole rows, blocks of several rows that a border cuts, blocks finer than rows, tables that
    are counted and not weighed, and tables without a mask; ids out of range are of row 0."""
    finer = slot(Rect(0, 0, 40, 8), (1, 4), kept=0.3).mask
    assert 0 < int(finer.dead_rows().sum()) < 40
    first, tall = row_mask(30), row_mask(41, height=3, start=7)
    none = torch.zeros(0, dtype=torch.int64)
    outside = torch.tensor([2, 30, -1, 2**31 - 1, 5, 29])
    for strided, dtype in ((False, torch.int64), (True, torch.int32)):
        check_lookup(
            [
                Lookup(first, outside),
                Lookup(None, some_ids(10**6, 9)),
                Lookup(finer, some_ids(40, 33), weighed=False),
                Lookup(tall, none),
                Lookup(tall, some_ids(41, 60)),
                Lookup(first, some_ids(30, 17)),
                Lookup(None, none),
            ],
            dtype=dtype,
            strided=strided,
        )
        check_lookup([Lookup(tall, some_ids(41, 50)), Lookup(first, outside)], dtype=dtype)
    check_lookup([Lookup(first, torch.tensor([2**32 + 3, 2**40]))])


@case
def weights_that_are_given() -> None:
    """Bit for bit, whatever they are: 0 times NaN would be NaN."""
    features = [Lookup(row_mask(30), some_ids(30, 700)), Lookup(row_mask(9), some_ids(9, 500))]
    for dtype in DTYPES:
        given = torch.randn(1200)
        for place, value in enumerate((float("nan"), -0.0, float("inf"), -float("inf"))):
            given[place::7] = value
        check_lookup(features, given.to(DEVICE, dtype))
        check_lookup(features, given.to(DEVICE, dtype).repeat_interleave(2)[::2])


@case
def gradients_of_given_weights() -> None:
    from dist_sparse.extras.device.row_kernels import TritonLookups

    mask = row_mask(30)
    samples = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ids = some_ids(30, 50).to(DEVICE)
    given = torch.randn(50, device=DEVICE, requires_grad=True)
    TritonLookups([(mask, samples, True)]).weights(ids, [0, 50], given).sum().backward()
    kept = ~mask.dead_rows()[ids]
    assert given.grad is not None and torch.equal(given.grad, kept.float())
    assert samples.tolist() == [50, int((~kept).sum())]


@case
def samples_of_features_of_every_length() -> None:
    """From none to several programs' worth: each is counted once where programs share it."""
    masks = [None, *(row_mask(10 + index, kept=0.3) for index in range(37))]
    for length in (2, 40, 3000):
        features = [
            Lookup(masks[n * 7 % 38], some_ids(10, n * n % length), n % 5 > 0)
            for n in range(331 if length < 100 else 9)
        ]
        check_lookup(features)


@case
def lookups_whose_ends_leave_ids_out_or_have_too_few() -> None:
    from dist_sparse.extras.device.row_kernels import TritonLookups

    mask = row_mask(5000, kept=-1)
    ids = torch.arange(4000, device=DEVICE)
    for count, ends, known in ((4000, [35, 3070], range(35, 3070)), (2000, [0, 3000], range(2000))):
        samples = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        weights = TritonLookups([(mask, samples, True)]).weights(ids[:count], ends, None)
        assert (weights == 0).nonzero().flatten().tolist() == list(known)
        assert samples.tolist() == [len(known)] * 2
    for ends in ([0, 60, 20, 80], [0, 5, 90, 50, 3, 80], [70, 0, 0, 60, 90, 1, 2, 75]):
        TritonLookups([(mask, samples, True)] * (len(ends) - 1)).weights(ids[:80], ends, None)


@case
def samples_of_lookups_that_clean() -> None:
    """With whole rows and finer blocks, features of one table, tables that lose nothing or have no
    mask, and ends that leave ids out."""
    from dist_sparse.extras.device.row_kernels import TritonLookups

    for block in ((1, 10**9), (1, 20)):
        tables = [slot(Rect(0, 0, rows, 40), block, kept=0.3) for rows in (30, 41)]
        whole = slot(Rect(0, 0, 9, 40), block, kept=2)
        features = [tables[0], None, tables[1], whole, tables[1]]
        given = [
            torch.cat([some_ids(30, count), torch.tensor([-1, 99])]) for count in range(9, 99, 18)
        ]
        starts = [5, *(5 + end for end in accumulate(map(len, given)))]
        ids = torch.cat([torch.zeros(5, dtype=torch.int64), *given, torch.arange(3)]).to(DEVICE)
        samples = [torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(3)]
        of_each = [samples[0], None, samples[1], samples[2], samples[1]]
        sampled = TritonLookups(
            [one and (one.mask, of, True) for one, of in zip(features, of_each, strict=True)]
        )
        want = [[0, 0] for _ in samples]
        for number, some in ((0, given[0]), (1, given[2]), (2, given[3]), (1, given[4])):
            dead = (*tables, whole)[number].mask.dead_rows()
            rows = torch.where((some < 0) | (some >= len(dead)), 0, some)
            want[number][0] += len(rows)
            want[number][1] += int(dead[rows].sum())
        flagged(features).clean_read(ids, starts, sampled)
        assert [each.tolist() for each in samples] == want
        assert 0 < want[1][1] < want[1][0] and not want[2][1]


@case
def a_lookup_without_ids() -> None:
    check_lookup([Lookup(row_mask(5), torch.zeros(0, dtype=torch.int64))] * 2)


@case
def more_than_2_31_rows() -> None:
    """Of one column of 8 bits, so that they fit into memory."""
    from dist_sparse.extras.device.row_kernels import TritonLookups

    rows = 2**32 + 16
    mask = BlockMask(Rect(0, 0, rows, 1), (1, 1), zero_pages(rows // 8))
    mask.bits[-2:] = 0b0110_0000
    ids = torch.arange(16, device=DEVICE) + 2**32
    lookups = TritonLookups([(mask, None, True)])
    assert lookups.flags(ids, [0, 16]).nonzero().flatten().tolist() == [5, 6, 13, 14]
    assert not lookups.flags(ids - 2**32, [0, 16]).any()


def compile_for_cuda() -> None:
    """Compiles the kernel of rows to machine code, which needs no GPU: the interpreter takes more
    than the compiler does."""
    for one in kernels_of_rows().values():
        compile_one(one)


def compile_mask_updates() -> None:
    """The kernels of mask updates."""
    for one in kernels_of_updates().values():
        compile_one(one)


def compile_codes() -> None:
    """The kernels of codes, which add exact products."""
    for one in kernels_of_codes().values():
        compile_one(one, fused=True)


def compile_one(one: Compiled, fused: bool = False) -> None:
    """Compile a kernel for an A100, an H100, and two newer GPUs. Unless `fused`, no product is added
    before it is rounded, as on a CPU."""
    for capability in (80, 90, 100, 120):
        binary = compiled(one, capability)
        assert ".global" in binary.asm["ptx"] and binary.asm["cubin"]
        assert fused or "fma.rn.f64" not in binary.asm["ptx"]


COMPILED = {each.__name__: each for each in (compile_for_cuda, compile_mask_updates, compile_codes)}


def main(device: str) -> None:
    global DEVICE
    DEVICE = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    for name, function in (COMPILED if device == "compiler" else CASES).items():
        torch.manual_seed(0)
        error = ""
        try:
            function()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
