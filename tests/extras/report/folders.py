"""Folders of runs for tests: real ones, and lines written as a RunLog writes them."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_sparse.extras.report.folder import LINES, RUN

__all__ = ["DRIVING", "HOSTILE", "edit", "full_disk", "write_many"]

HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&$x$"

DRIVING = "表अ\x1b]0;title\x07\x1b[2J\nfake row\x9b31m\u202etxt\u2028\ud800"
"""Control sequences of a terminal, a right-to-left override, and a surrogate that UTF-8 can't
encode."""


def edit(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change each line of a log."""
    file = folder / LINES
    lines = [json.dumps(change(json.loads(line))) for line in file.read_text().splitlines()]
    file.write_text("".join(line + "\n" for line in lines))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process can grow beyond ``room`` bytes: a write fails as on a full disk
    (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_many(folder: Path, tables: int, due: int, steps: int, ends: bool = True) -> None:
    """Write the log of a run with many tables, table ``i`` of ``1000 + i`` rows of 4; half of each
    is pruned."""
    folder.mkdir(parents=True)
    about = {
        "format": 3,
        "name": None,
        "command": "",
        "tables": {},
        "started": "2026-11-21T15:02:15+0000",
        "world": 8,
        "versions": {},
        "config": {"lr": 0.1},
    }
    (folder / RUN).write_text(json.dumps(about))
    lines: list[dict[str, Any]] = [
        {
            "kind": "values",
            "step": step,
            "seconds": step / 100,
            "values": {"loss": 1 / (1 + step), "lr": 0.1},
        }
        for step in range(steps)
    ]
    for number in range(1, due + 1):
        step = number * steps // (due + 1)
        changes = [_change(i, 0.5 * number / due) for i in range(tables)]
        cost = {"seconds": 0.01, "collectives": 4, "bytes": 1000}
        lines.append({"kind": "masks", "step": step, "number": number, **cost, "tables": changes})
    if ends:
        seconds = {"total": steps / 100, "masks": due / 100, "enforcement": 0.5}
        stats = [_stats(i) for i in range(tables)]
        lines.append({"kind": "end", "step": steps - 1, "seconds": seconds, "tables": stats})
    (folder / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _change(i: int, level: float) -> dict[str, Any]:
    rows = 1000 + i
    removed = round(level * rows)
    return {
        "name": f"table_{i}",
        "target": level,
        "threshold": 0.5,
        "blocks": rows,
        "removed_blocks": removed,
        "flipped_blocks": removed // 2,
        "regrown_blocks": 1,
        "dead_rows": removed,
        "lookups": None,
        "removed_lookups": None,
    }


def _stats(i: int) -> dict[str, Any]:
    rows = 1000 + i
    removed = round(0.5 * rows)
    return {
        "name": f"table_{i}",
        "shape": [rows, 4],
        "dtype": "float32",
        "sharding": "row_wise",
        "shards": 8,
        "sparse_block_shape": [1, "ROW"],
        "target": 0.5,
        "blocks": rows,
        "removed_blocks": removed,
        "mask_bytes": rows // 8,
        "table_bytes": 16 * rows,
        "kept_bytes": 16 * (rows - removed),
        "dead_rows": removed,
        "lookups": 0,
        "removed_lookups": 0,
        "traffic": None,
    }
