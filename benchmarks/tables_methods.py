"""Methods of `benchmarks.tables`: what each does to the tables, and one training of it.

A method has forms: columns, the kept share of the rows, and how the rows are served. The share
follows from the bytes, which include scales, bitmaps, books, and ids of rows. Tables with fewer
than 256 rows stay whole in all methods. "Touched rows" are those that training read: the others
are removed.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import KeyedJaggedTensor

from benchmarks.tables_data import Problem
from benchmarks.tables_model import Model, collection_of
from dist_sparse import export, load_served, remove_untouched, sparsify
from dist_sparse.extras.codes import quantize
from dlrm.batches import Dataset, SparseFeature
from dlrm.hashing import folded, hashed_cross
from dlrm.predictions import Predictions

__all__ = [
    "ALL_FORMS",
    "FULL",
    "METHODS",
    "TOUCHED",
    "ZCH",
    "Case",
    "Form",
    "forms",
    "frequent_only",
    "run",
    "two_hashed",
]

Case = dict[str, Any]
Rows = Mapping[str, int]

FULL = "full"
TOUCHED = "touched rows"
"""Begins the name of a form whose untouched rows are removed."""

_RETRAINED = f"{TOUCHED}, retrained"
_SMALL = "smaller dim"
_HASH, _TWO_HASHES, _CUT = "hash", "two hashes, summed", "frequency cut"
_LEVEL, _CODES, ZCH = "rows by level", "codes", "TorchRec's ZCH"
METHODS = (_RETRAINED, _SMALL, _HASH, _TWO_HASHES, _CUT, _LEVEL, _CODES, ZCH)

_SERVED: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "fp16": {"dtype": "fp16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "int4 column": {"dtype": "int4", "scale": "column"},
}
"""Arguments of export()."""

ALL_FORMS = (
    *_SERVED,
    *(f"{TOUCHED}, {served}" for served in ("fp32", "int8", "int4", "int4 column")),
)
"""How the full table is served: with all rows, and without those that training never read."""

_LARGE = 256
_CODED = 20_000
"""Rows from which a table is worth a method; and from which quantize() takes it."""

_ID_BYTES = 16
"""Of each row of managed collisions: its id and its place, int64 each. Counts are not served."""

_LEAST = 0.02
"""Of the rows: with fewer, a form is not tried."""

_GROUPS = (4, 8)
"""Columns of a code."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to fit a method into a number of bytes.

    Args:
        dim: columns.
        served: as in ``_SERVED``.
        share: of the rows that are kept, in the tables that shrink.
        largest: whether the largest table shrinks alone, instead of all large ones.
        group: columns of a code.
        interval: batches between two updates of managed collisions.
    """

    dim: int
    served: str
    share: float = 1.0
    largest: bool = False
    group: int = 0
    interval: int = 0


def _row_bytes(dim: int, served: str) -> float:
    each = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5, "int4 column": 0.5}[served]
    # A row of its own grid has a scale and an offset in float16.
    return each * dim + (4 if served in ("int8", "int4") else 0)


def _table_bytes(dim: int, served: str) -> float:
    """Bytes of a table beside its rows, at most: the grids of its columns."""
    return 8 * dim if served == "int4 column" else 0


def forms(method: str, rows: Rows, read: Rows, dim: int, limit: float) -> list[Form]:
    """Return up to two forms of a method that fit into ``limit`` bytes.

    Args:
        rows: of each table.
        read: rows of each table that training reads.
        dim: columns of the full table.
    """
    narrower = [each for each in range(dim, 0, -4)]
    if method in (_SMALL, _RETRAINED):
        kept = _kept_rows(rows, read) if method == _RETRAINED else rows
        index = _bitmaps(_large(rows)) if method == _RETRAINED else 0.0
        found = []
        for served in ("int4 column", "int4"):
            fitting = (each for each in narrower if index + _plain(kept, each, served) <= limit)
            widest = next(fitting, None)
            if widest is not None:
                found.append(Form(dim=widest, served=served))
        return found
    if method == _CODES:
        return _coded_forms(rows, narrower, limit)
    everywhere = Form(dim=dim, served="int4 column")
    made = [replace(everywhere, share=_share(method, rows, everywhere, limit))]
    for each in narrower:
        form = Form(dim=each, served="int4 column", largest=True)
        form = replace(form, share=_share(method, rows, form, limit))
        if form.share >= _LEAST:
            made.insert(0, form)
            break
    return [form for form in made if form.share >= _LEAST]


def _large(rows: Rows) -> dict[str, int]:
    return {name: count for name, count in rows.items() if count >= _LARGE}


def _shrunk(rows: Rows, form: Form) -> dict[str, int]:
    """Return the tables whose rows a method shares out."""
    large = _large(rows)
    if form.largest and large:
        largest = max(large, key=large.__getitem__)
        return {largest: large[largest]}
    return large


def _kept_rows(rows: Rows, read: Rows) -> Rows:
    return {name: read[name] if count >= _LARGE else count for name, count in rows.items()}


def _bitmaps(tables: Rows) -> float:
    """Bytes of a bit for each row, at most: in words of 8 bytes."""
    return sum(8.0 * math.ceil(count / 64) for count in tables.values())


def _plain(rows: Rows, dim: int, served: str) -> float:
    return sum(
        count * _row_bytes(dim, served) + _table_bytes(dim, served) for count in rows.values()
    )


def _share(method: str, rows: Rows, form: Form, limit: float) -> float:
    """Return which share of the rows fits."""
    shrunk = _shrunk(rows, form)
    others = {name: count for name, count in rows.items() if name not in shrunk}
    fixed = _plain(others, form.dim, form.served)
    fixed += len(shrunk) * _table_bytes(form.dim, form.served)
    fixed += _bitmaps(shrunk) if method in (_CUT, _LEVEL) else 0.0
    row = _row_bytes(form.dim, form.served) + (_ID_BYTES if method == ZCH else 0)
    return max(0.0, min(1.0, (limit - fixed) / (row * max(1, sum(shrunk.values())))))


def _coded_forms(rows: Rows, narrower: Sequence[int], limit: float) -> list[Form]:
    coded = {name: count for name, count in rows.items() if count >= _CODED}
    others = {name: count for name, count in rows.items() if name not in coded}
    found = []
    for group in _GROUPS if coded else ():
        for dim in narrower:
            books = sum(count * dim / group + 256 * 2 * dim for count in coded.values())
            if dim % group == 0 and _plain(others, dim, "int4 column") + books <= limit:
                found.append(Form(dim=dim, served="int4 column", group=group))
                break
    return found


# What a method does to ids before training.


def two_hashed(data: Dataset, rows: Rows) -> Dataset:
    """Return the data with two ids for each id of some features: two hashes, whose rows add up."""

    def hashed(feature: SparseFeature) -> SparseFeature:
        if feature.name not in rows:
            return feature
        ids, count = feature.ids.numpy(), rows[feature.name]
        both = [torch.from_numpy(hashed_cross(ids, 0 * ids + salt, count)) for salt in (0, 1)]
        offsets = feature.offsets
        if offsets is None:
            offsets = torch.arange(len(ids) + 1)
        return replace(feature, rows=count, ids=torch.stack(both, 1).flatten(), offsets=2 * offsets)

    return replace(data, sparse=tuple(map(hashed, data.sparse)))


def frequent_only(data: Dataset, rows: Rows) -> Dataset:
    """Return the data in which only the ids that training looks up most have a row of their own; all
    others share the first."""

    def cut(feature: SparseFeature) -> SparseFeature:
        if feature.name not in rows:
            return feature
        taken, _ = feature.take(data.train)
        lookups = torch.bincount(taken, minlength=feature.rows)
        frequent = lookups.argsort(descending=True, stable=True)[: rows[feature.name] - 1]
        row_of = torch.zeros(feature.rows, dtype=torch.int64)
        row_of[frequent] = torch.arange(1, len(frequent) + 1)
        return replace(feature, rows=len(frequent) + 1, ids=row_of[feature.ids])

    return replace(data, sparse=tuple(map(cut, data.sparse)))


_MAPPED: dict[str, Callable[[Dataset, Rows], Dataset]] = {
    _HASH: folded,
    _TWO_HASHES: two_hashed,
    _CUT: frequent_only,
}


# One training.


def run(case: Case, problem: Problem, batch: int) -> dict[str, Any]:
    """Train a method, and return the bytes and the quality of each form in which it is served.

    Args:
        case: network, method, lr, seed; part, ``"test"`` or ``"tuning"``; and the fields of a
            :class:`Form`, in which served may be ``"all"``: all forms of the full table.
    """
    part = problem if case["part"] == "test" else problem.earlier()
    method, original = case["method"], {each.name: each.rows for each in part.data.sparse}
    form = Form(**{name: case[name] for name in Form.__dataclass_fields__})
    shrunk = _shrunk(original, form)
    kept = {name: max(2, int(form.share * count)) for name, count in shrunk.items()}
    data = _MAPPED[method](part.data, kept) if method in _MAPPED else part.data
    rows, managed = {each.name: each.rows for each in data.sparse}, None
    if method == ZCH:
        # The last row is shared by all ids without one.
        managed = original
        rows = {name: kept.get(name, count + 1) for name, count in original.items()}
    model = Model(
        case["network"],
        data,
        rows,
        dim=case["dim"],
        lr=case["lr"],
        seed=case["seed"],
        managed=managed,
        interval=form.interval,
    )
    groups = data.train.view(-1, part.group)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(case["seed"]))
    batches = groups[order].flatten().split(batch)
    started = time.process_time()
    with _attached(method, form, model, original, len(batches)) as handle:
        for index in batches:
            model.step(data, index)
            if handle is not None:
                handle.step()
        seconds = time.process_time() - started
        index_bytes = 0.0  # of what finds rows, and export() does not write
        if method == _CUT:
            index_bytes = _bitmaps(shrunk)
        elif method == ZCH:
            index_bytes = float(_ID_BYTES * sum(kept.values()))
        found = dict(_measured(case, model, handle, data, index_bytes))
    del model, handle
    gc.collect()  # DistributedModelParallel and its hooks are cycles
    return {"served_as": found, "cpu_seconds": round(seconds, 3)}


def _attached(
    method: str, form: Form, model: Model, rows: Rows, steps: int
) -> AbstractContextManager[Any]:
    if method == _LEVEL:
        return sparsify(
            model.module,
            model.optimizers,
            level=1 - form.share,
            include=list(_shrunk(rows, form)),
            begin=steps // 10,
            end=max(steps // 10 + 1, 6 * steps // 10),
            every=max(1, steps // 20),
        )
    if method == _CODES:
        return quantize(
            model.module,
            model.optimizers,
            codes={name: form.dim // form.group for name, count in rows.items() if count >= _CODED},
            begin=steps // 2,
            end=max(steps // 2, 9 * steps // 10),
            every=max(1, steps // 8),
        )
    return nullcontext()


def _measured(
    case: Case, model: Model, handle: Any, data: Dataset, index_bytes: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each form in which the tables are served, with its bytes and its quality."""
    trained = {name: table.clone() for name, table in model.tables.items()}
    names = ALL_FORMS if case["served"] == "all" else [case["served"]]
    if case["method"] == _RETRAINED:
        names = [f"{TOUCHED}, {case['served']}"]
    for name in names:
        for table, weight in trained.items():
            model.tables[table].copy_(weight)
        served, sparse = name.removeprefix(f"{TOUCHED}, "), handle
        if served != name:
            large = list(_large({key: len(weight) for key, weight in trained.items()}))
            sparse = remove_untouched(model.module, include=large)
        size = index_bytes + _serve(model, sparse, served, case["method"] == ZCH)
        logits = model.logits(data, data.test)
        labels = data.labels[data.test]
        quality = Predictions(logits, labels)
        yield (
            name,
            {
                "bytes": size,
                "auc": quality.auc,
                "ne": quality.ne,
                "log_loss": float(binary_cross_entropy_with_logits(logits, labels)),
                # Whether an id has a row of managed collisions is known inside them only.
                **({} if case["method"] == ZCH else {"cold": _cold(model, data)}),
            },
        )


@torch.no_grad()
def _serve(model: Model, sparse: Any, served: str, copied: bool) -> float:
    """Export the tables, write what the artifact serves into the model, and return its bytes.

    Args:
        copied: export a copy of the tables: export() refuses managed collisions.
    """
    rows = {name: len(weight) for name, weight in model.tables.items()}
    module = model.module
    if copied:
        module = collection_of(rows, next(iter(model.tables.values())).shape[1])
        for name, weight in model.tables.items():
            module.embedding_bags[name].weight.copy_(weight)
    with tempfile.TemporaryDirectory() as folder:
        exported = export(module, sparse, Path(folder) / "served", **_SERVED[served])
        artifact = load_served(exported.path)
        lengths = torch.cat([torch.arange(max(rows.values())) < count for count in rows.values()])
        ids = torch.cat([torch.arange(count) for count in rows.values()])
        everything = KeyedJaggedTensor.from_lengths_sync(list(rows), ids, lengths.int())
        for name, values in artifact(everything).to_dict().items():
            model.tables[name].copy_(values[: rows[name]])
    return float(sum(table.bytes.after for table in exported.manifest.tables.values()))


def _cold(model: Model, data: Dataset) -> float:
    """Return the share of the test's lookups whose row training never read, or is served as
    zeros."""
    cold = lookups = 0
    for each in data.sparse:
        taken, _ = each.take(data.train)
        unread = torch.bincount(taken, minlength=each.rows) == 0
        unread |= (model.tables[each.name] == 0).all(1)
        tested, _ = each.take(data.test)
        cold += int(unread[tested].sum())
        lookups += len(tested)
    return cold / lookups
