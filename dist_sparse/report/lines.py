"""Values in the lines of a log, checked as they are read.

Names are strings, counts are not negative, numbers are finite. What no RunLog writes raises one of :data:`WRONG`.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Mapping
from typing import Any

from dist_sparse.records import MaskChange, StepRecord, TableStats
from dist_sparse.report.histograms import LAST_BUCKET, Scored, bucket_of
from dist_sparse.text import shortened

__all__ = [
    "WRONG",
    "count",
    "histogram",
    "integer",
    "mask_update",
    "number",
    "optional",
    "pairs",
    "seconds",
    "string",
    "table_stats",
]

WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What may be raised by reading something that no RunLog writes."""

_LARGEST = 1e15
"""Of seconds and levels, so that their sums and products with counts stay finite."""


def mask_update(line: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        number=count(line["number"]),
        seconds=seconds(line["seconds"]),
        collectives=count(line["collectives"]),
        bytes=count(line["bytes"]),
        tables=tuple(_change(table) for table in line["tables"]),
    )


def _change(table: Mapping[str, Any]) -> MaskChange:
    return MaskChange(
        name=sys.intern(string(table["name"])),
        target=optional(_level, table["target"]),
        threshold=optional(number, table["threshold"]),
        scores=(),
        blocks=count(table["blocks"]),
        removed_blocks=count(table["removed_blocks"]),
        flipped_blocks=optional(count, table["flipped_blocks"]),
        regrown_blocks=optional(count, table["regrown_blocks"]),
        dead_rows=optional(count, table["dead_rows"]),
        lookups=optional(count, table.get("lookups")),  # logs of earlier releases have none
        removed_lookups=optional(count, table.get("removed_lookups")),
    )


def pairs(scores: Any) -> list[tuple[float, int]]:
    return [(number(edge), count(blocks)) for edge, blocks in scores]


def histogram(table: Mapping[str, Any]) -> Scored:
    first, counts = bucket_of(number(table["low"])), table["counts"]
    if first + len(counts) - 1 > LAST_BUCKET:
        raise ValueError(f"{len(counts)} buckets from {first} on are beyond float32")
    return Scored(
        step=integer(table["step"]),
        name=string(table["name"]),
        threshold=number(table["threshold"]),
        first=first,
        counts=array("q", [count(blocks) for blocks in counts]),  # a long run has very many
        **{name: count(table[name]) for name in ("blocks", "removed_blocks", "zeros")},
    )


def table_stats(table: Mapping[str, Any]) -> TableStats:
    dtype = string(table["dtype"])
    if re.fullmatch(r"(b?float|u?int|complex|bool)[a-z0-9_]*", dtype) is None:
        raise ValueError(f"dtype {shortened(dtype)}")
    rows, columns = table["shape"]
    block = table["sparse_block_shape"]
    return TableStats(
        name=string(table["name"]),
        shape=(count(rows), count(columns)),
        dtype=dtype,
        sharding=string(table["sharding"]),
        shards=count(table["shards"]),
        sparse_block_shape=None if block is None else (_side(block[0], "COL"), _side(block[1], "ROW")),
        target=optional(_level, table["target"]),
        **{
            name: count(table[name]) for name in ("blocks", "removed_blocks", "mask_bytes", "table_bytes", "kept_bytes")
        },
    )


def _side(size: Any, whole: str) -> int | str:
    return whole if size == whole else count(size)


def optional(read: Any, value: Any) -> Any:
    return None if value is None else read(value)


def integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise TypeError(f"{shortened(value)} is not an int of 64 bits")
    return value


def count(value: Any) -> int:
    if integer(value) < 0:
        raise ValueError(f"{value} is negative")
    return int(value)


def number(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{shortened(value)} is not a finite number")
    return float(value)


def seconds(value: Any) -> float:
    if not 0 <= number(value) < _LARGEST:
        raise ValueError(f"{value!r} is not a number of seconds in [0, {_LARGEST:g})")
    return float(value)


def _level(value: Any) -> float:
    if abs(number(value)) >= _LARGEST:
        raise ValueError(f"{value!r} is not a level")
    return float(value)


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shortened(value)} is not a string")
    return value
