"""The cells of a sweep and their rows in the CSV.

A cell is one model: the dense one, a copy of it that was sparsified afterwards (``post``), or one
that was sparsified during training (``training``). Its result is a row of the CSV, written when the
cell is done, so that an interrupted sweep resumes.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

__all__ = [
    "COLUMNS",
    "LEVELS",
    "TRAINING_LEVELS",
    "Cell",
    "Row",
    "append",
    "as_row",
    "cells",
    "left_to_do",
    "read",
]

LEVELS = [*(i / 10 for i in range(10)), *(i / 100 for i in range(91, 100)), 1.0]
"""torch.ao's: 0.0 to 0.9 by 0.1, 0.91 to 0.99 by 0.01, 1.0."""

TRAINING_LEVELS = [("", 0.5), ("", 0.8), ("", 0.9), ("", 0.95), ("", 0.99), ("user_x_genre", 0.95)]
TRAINING_NORM = "L2"

Row = dict[str, Any]

_TEXT = ("mode", "block", "tables", "norm", "sharding")
_RUN = ("train_examples", "test_examples", "forward_examples", "batch_size", "ranks", "sharding")
_COUNTS = (
    "table_bytes_kept",
    "mask_bytes",
    "saved_bytes",
    "zipped_bytes",
    "dense_zipped_bytes",
    "seed",
    *(name for name in _RUN if name != "sharding"),
)

COLUMNS = (
    *("mode", "block", "tables", "norm", "sparsity_level", "seed", "removed_share_of_blocks"),
    *("auc", "ne", "accuracy", "precision", "recall", "f1", "log_loss_nats"),
    *("table_bytes_kept", "mask_bytes", "saved_bytes", "zipped_bytes", "dense_zipped_bytes"),
    *("step_ms", "forward_ms", "train_ms_per_step"),
    *_RUN,
)
"""Columns of the CSV. Bytes are of the whole model, or of all tables and masks; times are of the
slowest rank."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of the sweep.

    Args:
        mode: ``dense``, ``post`` or ``training``.
        block: ``rows x columns`` of a sparse block, such as ``1x4`` or ``1xROW``; empty for the
            dense model.
        norm: ``L1`` or ``L2``; empty for the dense model.
        level: the fraction of blocks that is removed, in [0, 1].
        tables: the one table that is sparsified; empty for all large ones.
        seed: of the weights and the order of the examples.
    """

    mode: str
    block: str = ""
    norm: str = ""
    level: float = 0.0
    tables: str = ""
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int | str]:
        """The block as a sparsifier takes it."""
        rows, columns = self.block.split("x")
        return int(rows), int(columns) if columns.isdecimal() else columns


def cells(
    levels: Sequence[float],
    blocks: Sequence[str],
    norms: Sequence[str],
    training_levels: Sequence[tuple[str, float]],
    training_blocks: Sequence[str],
    seeds: Sequence[int],
) -> list[Cell]:
    """All cells in the order in which they are measured, each once: dense, post, training.

    Args:
        levels, blocks, norms: of the post cells, which have the first seed only.
        training_levels: ``(table, level)``; an empty table stands for all large ones.
        training_blocks: of the training cells.
        seeds: of the dense and the training cells.
    """
    found = [Cell(mode="dense", seed=seed) for seed in seeds]
    for block in blocks:
        # L1 and L2 rank single elements alike, so with 1 x 1 blocks one of them does, as in
        # torch.ao's sweep.
        for norm in norms[:1] if block == "1x1" else norms:
            found += [
                Cell(mode="post", block=block, norm=norm, level=level, seed=seeds[0])
                for level in levels
            ]
    for seed, block in product(seeds, training_blocks):
        found += [
            Cell(
                mode="training",
                block=block,
                norm=TRAINING_NORM,
                level=level,
                tables=tables,
                seed=seed,
            )
            for tables, level in training_levels
        ]
    return list(dict.fromkeys(found))


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Adds a row to the CSV, which begins with a heading; no reader sees half a row, even if it is
    killed."""
    lines = io.StringIO(file.read_text() if file.exists() else "", newline="")
    writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
    if not lines.getvalue():
        writer.writeheader()
    lines.seek(0, io.SEEK_END)
    writer.writerow(row)
    new = file.with_suffix(".new")
    new.write_text(lines.getvalue())
    os.replace(new, file)


def read(file: Path) -> list[Row]:
    """The rows of the CSV, numbers as numbers and empty fields as None; no rows if there is no
    file.

    Raises:
        ValueError: the columns are different.
    """
    if not file.exists():
        return []
    with file.open(newline="") as stream:
        lines = csv.DictReader(stream)
        if lines.fieldnames is not None and tuple(lines.fieldnames) != COLUMNS:
            raise ValueError(
                f"Invalid {file}: its columns are {lines.fieldnames}, must be {list(COLUMNS)}."
            )
        return [{name: _value(name, text) for name, text in line.items()} for line in lines]


def left_to_do(file: Path, wanted: Iterable[Cell], run: Mapping[str, Any]) -> list[Cell]:
    """The cells that the CSV does not have yet.

    Args:
        file: the CSV, which may not exist.
        wanted: the cells to have in the end.
        run: what all its rows must have in common: columns and values.

    Raises:
        ValueError: the CSV is of another run.
    """
    done = []
    for row in read(file):
        other = {name: (row[name], value) for name, value in run.items() if row[name] != value}
        if other:
            said = ", ".join(
                f"{name} {was} (asked for: {value})" for name, (was, value) in other.items()
            )
            raise ValueError(
                f"{file} can't be continued: it is of a run with {said}. Start without --resume."
            )
        done.append(_cell(row))
    return [cell for cell in wanted if cell not in done]


def as_row(cell: Cell) -> Row:
    """The columns that name the cell."""
    return {
        "sparsity_level" if name == "level" else name: value for name, value in asdict(cell).items()
    }


def _cell(row: Row) -> Cell:
    return Cell(
        **{f.name: row["sparsity_level" if f.name == "level" else f.name] for f in fields(Cell)}
    )


def _value(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if not text:
        return None
    return int(text) if name in _COUNTS else float(text)
