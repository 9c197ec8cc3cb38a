"""Ways to a smaller table: what is tried of each within a number of bytes, and its training with
the kernel.

All train the two-tower model of ``examples/two_tower``. What is removed stays removed. Bytes are
those of an artifact, index included. Masks finer than rows include bitmasks, which artifacts no
longer store.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.quality_kernel import Floats, Model, rotated
from dist_sparse.serving.encodings import ColumnSpread, decode, encode
from two_tower.data import Interactions, Test, load
from two_tower.quality import measure

__all__ = ["BY_COLUMN", "CUT_METHODS", "DIM", "FULL", "METHODS", "forms", "read", "run"]

Case = dict[str, Any]

DIM = 64
"""Columns of the full table."""

FULL = 4 * DIM
"""Bytes of a row of it."""

_BOOKS = 256 * 2
"""Bytes of a table's books for each of its columns."""

BY_COLUMN = "int4 by column"
"""4 bits on a grid for each column: ``export(dtype="int4", scale="column")``."""

CODES = "codes"
"""A byte for each group of columns, with books that are trained from half time on."""

_BITS = {"fp32": 32, "int8": 8, "int4": 4, BY_COLUMN: 4}
_SHARED = ("mod hash", "double hash", "frequency cut-off")
_FINE = {"elements": 1, "soft threshold": 1, "1x4 blocks": 4}
_NARROWED = ("narrowed", "narrowed by column", "narrowed codes")
_SMALL = ("small dense", "small dense by column", "small dense codes", "small dense float32")
_CODES = ("narrowed codes", "small dense codes")
CUT_METHODS = (*_NARROWED, "small dense codes", *_FINE, "rows")
METHODS = (*_NARROWED, *_SMALL, *_FINE, "rows", *_SHARED)

_SIZES = {5: (8, 4), 11: (4, 3), 21: (3,), 22: (2,)}
"""For each number of codes, the numbers of columns in a group that are tried."""

_BOOKS_OF_A_ROW = 0.015
"""Bytes of books for each row and column, in tables that are as large as Gowalla's."""


def _row_bytes(dim: int, dtype: str) -> float:
    """Bytes of a row of values; in 8 and 4 bits with a scale and a bias of 2 bytes each. Scales of
    columns are 2 bytes a column for the whole table: less than 0.001 bytes a row of this data."""
    return dim * _BITS[dtype] / 8 + (4 if dtype in ("int8", "int4") else 0)


def forms(method: str, budget: float) -> list[Case]:
    """Return what is tried of a method within ``budget`` bytes a row: columns, dtype and what is
    kept.

    ``kept`` is a number of columns, or a fraction of rows or weights. Narrow tables are tried in 8
    and in 4 bits with a scale for each row. 4 bits with a scale for each column, codes, and small
    dense tables in float32 are methods of their own. All but codes and float32 are also tried with
    three quarters of the columns that fit. The others have 8 bits, and less than twice the columns
    that would fit: the more of a table must go, the worse they are.
    """
    if method == "small dense float32":
        return [{"dim": int(budget / 4), "dtype": "fp32", "kept": int(budget / 4)}]
    wide = method in _NARROWED
    if method in _CODES:
        return [
            {"dim": DIM if wide else codes * size, "dtype": CODES, "kept": codes * size}
            | {"codes": codes}
            for codes, sizes in _SIZES.items()
            if budget / 1.2 <= codes + 1
            for size in sizes
            if codes + _BOOKS_OF_A_ROW * codes * size <= budget
        ]
    if wide or method in _SMALL:
        dtypes = (BY_COLUMN,) if method.endswith("by column") else ("int8", "int4")
        fit = {
            dtype: int((budget - _row_bytes(0, dtype)) * 8 / _BITS[dtype]) // 2 * 2
            for dtype in dtypes
        }
        return [
            {"dim": DIM if wide else width, "dtype": dtype, "kept": width}
            for dtype, most in fit.items()
            for width in dict.fromkeys((most, most * 3 // 8 * 2))
            if 0 < width < DIM
        ]
    dim = next(dim for dim in (8, 16, 32, DIM) if _row_bytes(dim, "int8") > budget)
    if method in _FINE:
        kept = (budget - 4 - dim / _FINE[method] / 8) / dim  # a bit for each block
    elif method in ("mod hash", "double hash"):
        kept = budget / _row_bytes(dim, "int8")
    else:
        kept = (budget - 1 / 8) / _row_bytes(dim, "int8")  # a bit for each row
    return [{"dim": dim, "dtype": "int8", "kept": round(kept, 4)}]


def _bytes(case: Case, data: Interactions) -> float:
    """Bytes of a row of what is served, with its share of bitmasks, index and books."""
    method, dim, dtype, kept = (case[name] for name in ("method", "dim", "dtype", "kept"))
    if dtype == CODES:
        return case["codes"] + _BOOKS * 2 * kept / (data.users + data.items)
    if method in ("full", *_NARROWED, *_SMALL):
        return _row_bytes(kept, dtype)
    if method in _FINE:
        return _row_bytes(kept * dim, dtype) + dim / _FINE[method] / 8  # a bit for each block
    return kept * _row_bytes(dim, dtype) + (0 if "hash" in method else 1 / 8)  # a bit for each row


def run(case: Case) -> Case:
    """Train, and return the quality on validation and test part, as it is served, and the bytes of
    a row.

    Args:
        case: file, split_seed, and data, a key of both; epochs, batch_size, seed, lr, l2; cut, the
            epochs before the table is cut; method and a form of it; recall, whether it is measured;
            states, a folder for the tables before the cut, which methods share.
    """
    data, tests = read(case["file"], case["split_seed"])
    mapped = _places(case, data) if case["method"] in _SHARED else None
    model = _trained(case, data, mapped)
    served = [_served(torch.from_numpy(weight), case["dtype"]) for weight in model.served()]
    if mapped is not None:
        served = [table[rows].sum(1) for table, rows in zip(served, mapped, strict=True)]
    found: dict[str, Any] = {}
    for part, test in tests.items():
        asked = test if case["recall"] else replace(test, ranked_users=test.ranked_users[:0])
        found[part] = asdict(measure(*served, torch.from_numpy(model.bias[:, 0]), data, asked))
        if not case["recall"]:
            del found[part]["recall"]
    return {"bytes": _bytes(case, data), "cpu_seconds": round(model.seconds, 2), **found}


def _served(weight: Tensor, dtype: Any) -> Tensor:
    """The weights as lookups of an artifact return them."""
    if dtype == CODES:
        return weight
    if dtype != BY_COLUMN:
        return decode(encode(weight, dtype), weight.shape[1])
    spread = ColumnSpread(weight.shape[1])
    spread.add(weight)
    return decode(encode(weight, "int4", spread.scales()), weight.shape[1])


@cache
def read(path: str, split_seed: int) -> tuple[Interactions, dict[str, Test]]:
    data = load(Path(path), split_seed)
    return data, {part: data.test(part) for part in ("validation", "test")}


def _trained(case: Case, data: Interactions, mapped: list[Tensor] | None) -> Model:
    method = case["method"]
    model = _until_cut(case, data, mapped)
    if method in _NARROWED:
        model.weights = [
            np.ascontiguousarray(weight[:, : case["kept"]]) for weight in rotated(model.weights)
        ]
    elif method in _FINE or method == "rows":
        block = case["dim"] if method == "rows" else _FINE[method]
        model.kept = [_largest(weight, block, case["kept"]) for weight in model.weights]
        model.weights = [
            weight * kept for weight, kept in zip(model.weights, model.kept, strict=True)
        ]
    if method in _CODES:
        model.quantize(case["codes"], case["seed"])
    model.train(data, range(case["cut"], case["epochs"]), mapped=mapped, **_settings(case))
    return model


def _until_cut(case: Case, data: Interactions, mapped: list[Tensor] | None) -> Model:
    """What is cut makes no difference before the cut: the state before it is trained once."""
    epochs = range(case["cut"])
    own = ("method", "kept") if mapped is not None or case["method"] == "soft threshold" else ()
    settings = ("dim", "lr", "l2", "seed", "cut", "epochs", "batch_size")
    name = "-".join(str(case[key]) for key in ("data", *own, *settings))
    file = Path(case["states"]) / f"{name.replace('/', '')}.pickle"
    if not file.exists():
        rows = (
            [data.users, data.items]
            if mapped is None
            else [1 + int(places.max()) for places in mapped]
        )
        model = Model(rows, data.items, case["dim"], case["seed"])
        for epoch in epochs:
            model.train(data, range(epoch, epoch + 1), mapped=mapped, **_settings(case))
            if case["method"] == "soft threshold":
                _soften(model.weights, (1 - case["kept"]) * (epoch + 1) / len(epochs))
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(model))
        part.replace(file)
    found: Model = pickle.loads(file.read_bytes())
    return found


def _settings(case: Case) -> dict[str, Any]:
    return {
        "of": case["epochs"],
        **{name: case[name] for name in ("lr", "l2", "seed", "batch_size")},
    }


def _largest(weight: Floats, block: int, kept: float) -> npt.NDArray[np.bool_]:
    """A mask of the fraction ``kept`` of the blocks of 1 x ``block``, those with the largest
    norms."""
    norms = np.square(weight).reshape(-1, block).sum(1)
    left = np.zeros(len(norms), np.bool_)
    left[norms.argsort()[len(norms) - round(kept * len(norms)) :]] = True
    return left.repeat(block).reshape(weight.shape)


def _soften(tables: list[Floats], level: float) -> None:
    """Move all weights toward zero, in place, by the threshold at which a fraction ``level`` of
    them is zero.

    After PEP (Liu et al., ICLR 2021, eq. 5: sign(w) max(|w| - s, 0)), whose threshold is trained
    and ends anywhere; this one is what the bytes allow.
    """
    for table in tables:
        threshold = np.quantile(np.abs(table), level)
        table[:] = np.sign(table) * np.maximum(np.abs(table) - threshold, 0)


def _places(case: Case, data: Interactions) -> list[Tensor]:
    """The rows that each user and each item looks up and adds: (ids, 1), or (ids, 2) of the double
    hash."""
    found = []
    for ids, count in ((data.user, data.users), (data.item, data.items)):
        rows, each = int(case["kept"] * count), torch.arange(count)
        # The most frequent have a row each, and all others the last.
        if case["method"] == "frequency cut-off":
            rank = torch.empty_like(each)
            rank[ids.bincount(minlength=count).argsort(descending=True, stable=True)] = each
            found.append(rank.clamp(max=rows - 1)[:, None])
        elif case["method"] == "mod hash":
            found.append((each % rows)[:, None])
        else:  # and Knuth's multiplicative hash (The Art of Computer Programming, vol. 3, 6.4)
            found.append(torch.stack([each % rows, each * 2_654_435_761 % 2**32 % rows], dim=1))
    return found
