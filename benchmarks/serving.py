"""Served tables beside dense ones: bytes, lookups, loading.

Lookups: one table of 1M x 64 in bags of 10, at 0 to 95% of the rows removed, with uniform ids and
with ids of Zipf's law (the rarest are removed): through the artifact, through the dense table of
the same dtype (FBGEMM's inference module, in float32 ``torch.nn.EmbeddingBag`` too), and through
FBGEMM's own remaps. Then many tables behind a KeyedJaggedTensor, and loading in a fresh process.
Results are written to ``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "main", "report"]

TABLE = {"rows": 1_000_000, "dim": 64, "bags": 512, "ids_a_bag": 10, "rounds": 300}
MANY = {
    "tables": 26,
    "rows": 100_000,
    "dim": 32,
    "bags": 512,
    "ids_a_bag": 1,
    "rounds": 300,
    "ids": "uniform",
}

CASES: list[dict[str, Any]] = [
    *[
        {"kind": "lookups", **TABLE, "dtype": dtype, "removed": removed, "ids": ids}
        for dtype in ("fp32", "int8")
        for ids in ("uniform", "zipf")
        for removed in (0, 0.5, 0.8, 0.95)
    ],
    *[{"kind": "lookups", **TABLE, "bags": 64, "dtype": "fp32", "removed": 0.8, "ids": "uniform"}],
    *[
        {"kind": "many", **MANY, "dtype": dtype, "removed": removed}
        for dtype in ("fp32", "int8")
        for removed in (0.8, 0.95)
    ],
]
CASES += [
    {"kind": "targets", **TABLE, "removed": 0.8, "form": form, "compiled": form == "int8"}
    for form in ("fp32", "int8", "int4", "int4/column", "codes")
]
WRITTEN = {"kind": "write", "rows": 2_000_000, "dim": 64, "removed": 0.8}


def main() -> int:
    """Runs the cases, prints the tables, writes the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=["lookups", "many", "targets", "load"], help="only the cases of one kind"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    options = parser.parse_args()
    found = []
    for case in tqdm(
        [c for c in CASES if options.only in (None, c["kind"])], disable=not sys.stderr.isatty()
    ):
        found.append(fresh("benchmarks.serving_case", case, 1, 1))
    if options.only in (None, "load"):
        found += loads(WRITTEN)
    text = report(found)
    print(text)
    # The plot takes the newest result of all kinds.
    name = f"serving-{options.only}" if options.only else "serving"
    keep(options.out, name, found, text)
    return 0


def loads(
    written: dict[str, Any], run: Callable[..., dict[str, Any]] = fresh
) -> list[dict[str, Any]]:
    """Writes a dense model and its artifacts once, and loads each in a process of its own, which
    ``run`` starts."""
    folder = tempfile.mkdtemp()
    try:
        sizes = run("benchmarks.serving_case", {**written, "folder": f"{folder}/written"}, 1, 1)[
            "file_bytes"
        ]
        found = []
        for what in ("dense", "fp32", "int8"):
            case = {**written, "kind": "load", "what": what, "folder": f"{folder}/written"}
            found.append(
                {**run("benchmarks.serving_case", case, 1, 1), "folder": "", "bytes": sizes[what]}
            )
        return found
    finally:
        shutil.rmtree(folder)


def report(found: list[dict[str, Any]]) -> str:
    """The figures as markdown tables with what they mean."""
    notes = (
        "Microseconds a lookup, 1 thread, fresh ids each time, the median of all rounds; peers take"
        " turns within a round. Ratios are the artifact's time over the peer's: below 1 it is"
        " faster. FBGEMM dense: its inference module over the whole table in the same dtype. array,"
        " map: FBGEMM's remaps in front of the same kept rows (8 bytes per original row; a hash"
        " map). index: finding the rows, which is part of the artifact's time. file: bytes of the"
        " artifact over those of the dense float32 table."
    )
    parts = (notes, _lookups(found), _many(found), _targets(found), _loads(found))
    return "\n\n".join(part for part in parts if part)


def _lookups(found: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| dtype | ids | looked up | removed | file | artifact | index | FBGEMM dense | ratio |"
            " nn.EmbeddingBag | ratio | array | map | index, array, map: bytes |"
        ),
        "|" + "---|" * 14,
    ]
    for f in (f for f in found if f["kind"] == "lookups"):
        times = f["times_s"]
        row = [
            f["dtype"],
            f["ids"],
            f"{f['bags']} x {f['ids_a_bag']}",
            f"{f['removed']:.0%}",
            f"{f['file_bytes'] / f['dense_bytes']:.3f}",
            *(_us(times.get(name)) for name in ("served", "index")),
        ]
        for peer in ("tbe", "nn.EmbeddingBag"):
            row += [
                _us(times.get(peer)),
                f"**{times['served'] / times[peer]:.2f}**" if peer in times else "-",
            ]
        row += [_us(times.get("array")), _us(times.get("map"))]
        row.append(
            ", ".join(
                f"{f[name] / 1e6:.2f}" for name in ("index_bytes", "array_bytes", "map_bytes")
            )
            + " MB"
        )
        lines.append("| " + " | ".join(row) + " |")
    plain = [(f, f["times_s"]) for f in found if "served in torch" in f.get("times_s", {})]
    if plain:
        lines += ["", "Without FBGEMM, in pure torch, against `nn.EmbeddingBag` in float32:", ""]
        lines += [
            "| ids | looked up | removed | artifact | nn.EmbeddingBag | ratio |",
            "|---|---|---|---|---|---|",
        ]
    for f, times in plain:
        ours, theirs = times["served in torch"], times["nn.EmbeddingBag"]
        looked_up = f"{f['bags']} x {f['ids_a_bag']}"
        lines.append(
            f"| {f['ids']} | {looked_up} | {f['removed']:.0%} | {_us(ours)} | {_us(theirs)} |"
            f" **{ours / theirs:.2f}** |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _many(found: list[dict[str, Any]]) -> str:
    lines = [
        "| tables | dtype | removed | artifact | TorchRec, dense | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for f in (f for f in found if f["kind"] == "many"):
        (peer,) = (time for name, time in f["times_s"].items() if name != "served")
        ours, tables = f["times_s"]["served"], f"{f['tables']} of {f['rows']:,} x {f['dim']}"
        lines.append(
            f"| {tables}, {f['bags']} ids each | {f['dtype']} | {f['removed']:.0%} | {_us(ours)} |"
            f" {_us(peer)} | **{ours / peer:.2f}** |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _targets(found: list[dict[str, Any]]) -> str:
    """Nanoseconds an id, by module and stored form."""
    cases = {f["form"]: f for f in found if f["kind"] == "targets"}
    if not cases:
        return ""
    lines = [
        "Nanoseconds an id of one table behind an EmbeddingBagCollection, by what looks it up:",
        "",
        f"| through | {' | '.join(cases)} |",
        "|---" * (len(cases) + 1) + "|",
    ]
    names = {name: None for f in cases.values() for name in f["times_s"]}
    for name in names:
        cells = []
        for f in cases.values():
            seconds = f["times_s"].get(name)
            ids = f["bags"] * f["ids_a_bag"]
            cells.append("-" if seconds is None else f"{1e9 * seconds / ids:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _loads(found: list[dict[str, Any]]) -> str:
    lines = [
        "| loaded in a fresh process | file | seconds | resident memory |",
        "|---|---|---|---|",
    ]
    for f in (f for f in found if f["kind"] == "load"):
        what = (
            f"dense, {f['rows']:,} x {f['dim']}"
            if f["what"] == "dense"
            else f"{f['what']}, {f['removed']:.0%} removed"
        )
        lines.append(
            f"| {what} | {f['bytes'] / 1e6:.0f} MB | {f['seconds']:.2f} | {f['resident'] / 1e6:.0f}"
            " MB |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f}"


if __name__ == "__main__":
    sys.exit(main())
