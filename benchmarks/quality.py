"""Quality at equal bytes: tables narrowed while they train against tables that are narrow from the start.

The two-tower model of ``examples/two_tower`` is trained for each method and width, with each L2 factor of a grid and
the first seed; the factor with the best validation AUC is trained with the other seeds too. All are served as float32,
8 and 4 bits from artifacts, whose bytes are those of the files. Every method has the same grid. Trainings that are done
are kept in ``benchmarks/results/``, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["main"]

Row = dict[str, Any]

DIM = 64
WIDTHS = (8, 16, 20, 40)
L2 = (0.03, 0.05, 0.08)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not there yet, print the tables, write the dated result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="an interactions .npz, as examples/two_tower/main.py takes")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--epochs", type=int, default=14, metavar="N", help="default: 14")
    add("--batch-size", type=int, default=4096, metavar="N", help="default: 4096")
    add("--widths", type=int, nargs="+", default=WIDTHS, metavar="D", help=f"default: {WIDTHS}")
    add("--l2", type=float, nargs="+", default=L2, metavar="X", help=f"the grid (default: {L2})")
    add("--workers", type=int, default=2, metavar="N", help="trainings at a time, of one thread each (default: 2)")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="where results are written")
    options = parser.parse_args(argv)
    if not options.data.is_file():
        parser.error(f"argument --data: no such file: {options.data}")
    options.out.mkdir(parents=True, exist_ok=True)
    done = _Done(options.out / f"{date.today().isoformat()}-quality.jsonl")
    common = {"data": str(options.data.resolve()), "epochs": options.epochs, "batch_size": options.batch_size}
    methods = [("wide", DIM, DIM)]
    for width in options.widths:
        methods += [("narrowed", DIM, width), ("narrow from the start", width, width)]
    cells = [{**common, "method": name, "dim": dim, "width": width} for name, dim, width in methods]
    first = [{**cell, "l2": l2, "seed": options.seeds[0]} for cell in cells for l2 in options.l2]
    done.train(first, options.workers)
    best = [{**cell, "l2": _best(done.rows, cell)} for cell in cells]
    done.train([{**cell, "seed": seed} for cell in best for seed in options.seeds[1:]], options.workers)
    chosen = [row for row in done.rows if any(_is(row, cell) for cell in best)]
    text = report(chosen, options.seeds)
    print(text)
    keep(options.out, "quality", done.rows, text)
    done.file.unlink()
    return 0


class _Done:
    """The trainings that are done, a line of JSON each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows: list[Row] = [row for line in lines for row in json.loads(line)]

    def train(self, cases: list[Row], workers: int) -> None:
        """Train those that are not done, several at a time."""
        missing = [case for case in cases if not any(_is(row, case) for row in self.rows)]
        with ThreadPoolExecutor(workers) as pool, tqdm(total=len(missing), disable=None) as bar:
            for found in pool.map(lambda case: fresh("benchmarks.quality_case", case, 1, 1), missing):
                with self.file.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
                self.rows += found  # type: ignore[arg-type]  # this case returns a list
                bar.update()


def report(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return the figures as markdown, with what they mean."""
    wide = next(row for row in rows if (row["method"], row["dtype"]) == ("wide", "fp32"))
    notes = (
        f"examples/two_tower on {wide['data']}, {wide['epochs']} epochs, seeds {', '.join(map(str, seeds))}: mean and "
        "half the range. Narrowed: trained with 64 columns, rotated and cut to the width at half time. L2 chosen by "
        "validation AUC for each method and width on the same grid. Bytes are those of tables.safetensors. AUC over 10 "
        "drawn items for each of 60,000 held-out interactions: drawn uniformly, and by popularity. recall@20 over all "
        "items, 3,000 users."
    )
    lines = [
        "| method | columns | served as | bytes of wide float32 | L2 | AUC | AUC, popular | recall@20 |",
        "|---" * 8 + "|",
    ]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["bytes"] // 4096, row["method"], row["width"], row["dtype"], row["l2"]), []).append(row)
    for (_, method, width, dtype, l2), some in sorted(cells.items(), key=lambda cell: -cell[0][0]):
        share = f"{some[0]['bytes'] / wide['bytes']:.1%}"
        figures = [_spread([row["test"][name] for row in some]) for name in ("auc", "auc_popular", "recall")]
        lines.append("| " + " | ".join([method, str(width), dtype, share, f"{l2:g}", *figures]) + " |")
    return notes + "\n\n" + "\n".join(lines)


def _best(rows: Sequence[Row], cell: Row) -> float:
    """The L2 factor with the best validation AUC in float32."""
    tried = [row for row in rows if _is(row, cell) and row["dtype"] == "fp32"]
    return float(max(tried, key=lambda row: row["validation"]["auc"])["l2"])


def _is(row: Row, case: Row) -> bool:
    return all(row[name] == (Path(value).name if name == "data" else value) for name, value in case.items())


def _spread(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


if __name__ == "__main__":
    sys.exit(main())
