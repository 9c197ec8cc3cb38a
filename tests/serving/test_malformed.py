"""Lengths and offsets that do not fit the ids, in every module that looks an artifact up: refused
before a kernel reads or writes memory by them. In processes of their own, which may crash."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse import load_served
from dist_sparse.serving.served import Served
from tests.serving.folders import Source, bags, table, write

KEYS = ["a", "b", "c"]
ROWS = 40
NUDGES = [1, 3, 7, 200_000, 2**31, 2**32, 2**33 - 2, 2**62, 2**63 - 1]
"""What lengths and offsets are wrong by: 2**32 wraps in int32."""

Lengths = list[int]
Lookup = Callable[[Tensor, Lengths, random.Random], Tensor]
"""Ids, lengths feature after feature; any random choices are drawn from the last argument."""


def sources(pooling: Any) -> list[Source]:
    tables = [Source("one", table(ROWS, 8, 0.5), ["a", "b"]), Source("two", table(ROWS, 8, 1.0))]
    tables[1].features = ["c"]
    for each in tables:
        each.pooling = pooling
    return tables


def tensor_of(values: Lengths, some: random.Random) -> Tensor:
    """int64, or int32 if they fit."""
    small = all(-(2**31) <= value < 2**31 for value in values) and some.random() < 0.5
    return torch.tensor(values, dtype=torch.int32 if small else torch.int64)


def wrapped(value: int) -> int:
    """As a sum in int64."""
    return (value + 2**63) % 2**64 - 2**63


def offsets_of(lengths: Lengths) -> Lengths:
    return [wrapped(each) for each in accumulate(lengths, initial=0)]


def jagged(ids: Tensor, lengths: Lengths, some: random.Random) -> KeyedJaggedTensor:
    """With lengths or offsets, the keys in any order, and sums that a caller may have got wrong."""
    keys = some.sample(KEYS, 3)
    sums = [some.choice(NUDGES[:5]) for _ in keys] if some.random() < 0.2 else None
    if some.random() < 0.5:
        return KeyedJaggedTensor(keys, ids, offsets=tensor_of(offsets_of(lengths), some))
    return KeyedJaggedTensor(keys, ids, lengths=tensor_of(lengths, some), length_per_key=sums)


def by_tensors(module: Any) -> Lookup:
    return lambda ids, lengths, some: module(ids, tensor_of(lengths, some))


def by_offsets(module: Any) -> Lookup:
    return lambda ids, lengths, some: module(ids, tensor_of(offsets_of(lengths), some))


def by_starts(module: Any) -> Lookup:
    return lambda ids, lengths, some: module(ids, tensor_of(offsets_of(lengths)[:-1], some))


def by_keys(module: Any) -> Lookup:
    def look_up(ids: Tensor, lengths: Lengths, some: random.Random) -> Tensor:
        batch = jagged(ids, lengths, some)
        found = module(batch)
        if batch.keys() != KEYS:
            # Other tables read these ids: what counts is that nothing crashes.
            return torch.empty(0)
        if isinstance(found, dict):
            return torch.cat([part.values() for part in found.values()])
        values: Tensor = found.values()
        return values

    return look_up


def program(served: Served, folder: Path) -> Any:
    served.to_pt2(folder / "served.pt2")
    return torch.export.load(folder / "served.pt2").module()


BAGS: dict[str, Callable[[Served, Path], Lookup]] = {
    "tensors": lambda served, _: by_tensors(served),
    "lookup": lambda served, _: by_tensors(served.lookup),
    "keys": lambda served, _: by_keys(served),
    "to_fbgemm": lambda served, _: by_offsets(served.to_fbgemm()),
    "to_torchrec": lambda served, _: by_keys(served.to_torchrec()),
    "pt2": lambda served, folder: by_tensors(program(served, folder)),
}
CASES = [
    *[("bag", how, fbgemm) for how in BAGS for fbgemm in (True, False)],
    *[("sequence", how, True) for how in ("tensors", "keys", "to_fbgemm", "pt2")],
    *[("embedding_bag", how, fbgemm) for how in ("starts", "ends", "pt2") for fbgemm in (True, False)],
]  # fmt: skip


def loaded(kind: str, how: str, fbgemm: bool, folder: Path) -> tuple[Lookup, list[Source]]:
    pooling: Any = "none" if kind == "sequence" else "sum"
    of = sources(pooling)
    place: Any = kind
    if kind == "embedding_bag":
        del of[1]
    path = write(folder / "served", ("", place, of), last=how == "ends")
    unknown: Any = "raise" if how in ("lookup", "starts") else "zero"
    served = load_served(path, fbgemm=fbgemm, unknown=unknown)
    assert isinstance(served, Served)
    if kind != "embedding_bag":
        return BAGS[how](served, folder), of
    if how == "pt2":
        saved = program(served, folder)
        # Traced with int64 offsets.
        return lambda ids, lengths, _: saved(ids, torch.tensor(offsets_of(lengths)[:-1])), of
    return (by_offsets if how == "ends" else by_starts)(served), of


def nudged(lengths: Lengths, some: random.Random) -> Lengths:
    """Lengths of which some are wrong, or none is."""
    by = some.choice(NUDGES)
    first, second = some.randrange(len(lengths)), some.randrange(len(lengths))
    wrong = list(lengths)
    kind = some.randrange(6)
    if kind == 0:
        return wrong
    if kind == 1:
        # They still add up.
        wrong[first] += by
        wrong[second] -= by
    elif kind == 2:
        wrong[first] += some.choice([by, -by])
    elif kind == 3:
        # Four times 2**62 is 0 in int64, and 2**32 is 0 in int32.
        wrong = [each + 2**62 for each in wrong] if len(wrong) % 4 == 0 else [2**32] * len(wrong)
    elif kind == 4:
        wrong = [some.choice([-1, 0, 1, 4, -3, 2**31]) for _ in wrong]
    else:
        wrong.append(some.choice([0, -1, by]))
    return [min(max(each, -(2**63)), 2**63 - 1) for each in wrong]


def fuzz(folder: str, saved: bool) -> None:
    """Every case, after its name: a crash tells none."""
    for case in CASES:
        if (case[1] == "pt2") == saved:
            print(*case, file=sys.stderr, flush=True)
            fuzz_case(*case, Path(folder, "-".join(map(str, case))))


def fuzz_case(kind: str, how: str, fbgemm: bool, folder: Path) -> None:
    """Look random batches up: what fits is pooled, everything else is refused."""
    look_up, of = loaded(kind, how, fbgemm, folder)
    features = [source for source in of for _ in source.features]
    count = 1 if kind == "embedding_bag" else len(features)
    some = random.Random(f"{kind} {how}")
    refused = 0
    for _ in range(600):
        lengths = [some.randrange(4) for _ in range(count * some.randrange(1, 5))]
        n = sum(lengths)
        lengths = nudged(lengths, some)
        # Without any ids, too.
        n = n if some.random() < 0.9 else 0
        ids = torch.tensor([some.randrange(ROWS) for _ in range(n)], dtype=torch.int64)
        ends = offsets_of(lengths)
        # The last bag of torch's modules ends with the ids, whatever its length.
        ends = [*ends[:-1], n] if kind == "embedding_bag" and how != "ends" else ends
        fits = all(0 <= a <= b <= n for a, b in pairwise(ends))
        fits &= len(lengths) % count == 0 and ends[-1] == n
        try:
            found = look_up(ids, lengths, some)
        except (ValueError, RuntimeError, AssertionError) as error:
            # A saved lookup has assertions of its own.
            assert not fits and (how == "pt2" or isinstance(error, ValueError)), (ids, lengths)
            refused += 1
            continue
        assert fits, (ids, lengths)
        if len(found):
            check(found, ids, ends, features[:count], kind)
    assert 150 < refused < 550, refused


def check(found: Tensor, ids: Tensor, ends: Lengths, features: list[Source], kind: str) -> None:
    each = torch.tensor(ends).diff().view(len(features), -1)
    parts = torch.split(ids, each.sum(1).tolist())
    pairs = list(zip(features, parts, each, strict=True))
    if kind == "sequence":
        expected = torch.cat([source.decoded()[part] for source, part, _ in pairs])
    else:
        columns = [bags(source.decoded(), part, some, "sum") for source, part, some in pairs]
        expected = torch.cat(columns, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True], ids=["modules", "saved"])
def test_random_lengths(tmp_path: Path, saved: bool) -> None:
    call = f"import tests.serving.test_malformed as t; t.fuzz({str(tmp_path)!r}, {saved})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
