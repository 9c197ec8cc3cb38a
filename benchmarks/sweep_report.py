"""The results of a sweep as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.sweep_cells import Row

__all__ = ["curves", "name_of", "report"]

_SHOWN = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
Curve = tuple[str, str, str]


def curves(rows: Sequence[Row]) -> dict[Curve, list[Row]]:
    """(mode, block, norm) to its cells by level, of all large tables and the first seed; without
    the dense one."""
    found: dict[Curve, list[Row]] = {}
    seed = rows[0]["seed"]
    drawn = [
        row for row in rows if row["mode"] != "dense" and row["seed"] == seed and not row["tables"]
    ]
    for row in sorted(drawn, key=lambda row: row["sparsity_level"]):
        found.setdefault((row["mode"], row["block"], row["norm"]), []).append(row)
    return dict(sorted(found.items()))


def name_of(block: str) -> str:
    """Return the label of a block."""
    named = {"1x1": "elements", "1xROW": "rows"}
    return named.get(block, block)


def report(rows: Sequence[Row]) -> str:
    """The figures as markdown tables with what they mean."""
    dense = next(row for row in rows if row["mode"] == "dense")
    levels = [level for level in _SHOWN if any(row["sparsity_level"] == level for row in rows)]
    notes = (
        f"The main job's DLRM on MovieLens-100K, {dense['train_examples']:,} examples to train,"
        f" {dense['test_examples']:,} to test, {dense['ranks']} process(es), {dense['sharding']}"
        f" sharding, seed {dense['seed']}. The four tables with fewer than 256 rows stay dense at"
        " every level. post: the trained dense model, sparsified afterwards with no more training,"
        " as torch.ao's evaluation did it. training: sparsified while it trains, over the part of"
        " the run from 10 to 60 %. With 1 x 1 blocks L1 and L2 rank alike, so L1 stands for both."
        " In every cell what is removed was read and found to be 0. zip: the saved weights in a"
        " zip archive (deflate); masks are packed bits, not in it, and the weights alone say what"
        " is 0. step: from all kept to the level, shortest of several (training: the shortest of"
        f" the later half of the due steps). forward: {dense['forward_examples']:,} examples,"
        " shortest of several; FBGEMM looks removed rows up like any other, so it does not depend"
        " on the level. Times are of the slowest rank. All cells are in the CSV."
    )
    base = (
        f"Dense: AUC {dense['auc']:.4f}, NE {dense['ne']:.4f}, accuracy {dense['accuracy']:.4f},"
        f" log loss {dense['log_loss_nats']:.4f}; saved {_mb(dense['saved_bytes'])}, zipped"
        f" {_mb(dense['zipped_bytes'])}; forward {dense['forward_ms']:.0f} ms."
    )
    parts = [
        ("AUC lost", lambda row: f"{dense['auc'] - row['auc']:.4f}"),
        ("NE added", lambda row: f"{row['ne'] - dense['ne']:.4f}"),
        ("Accuracy lost", lambda row: f"{dense['accuracy'] - row['accuracy']:.4f}"),
        (
            "Zip, and masks beside it",
            lambda row: f"{_mb(row['zipped_bytes'])} + {row['mask_bytes'] / 1e6:.3f}",
        ),
        ("Step, ms", lambda row: f"{row['step_ms']:.1f}"),
        ("Forward, ms", lambda row: f"{row['forward_ms']:.1f}"),
    ]
    tables = [_table(rows, title, levels, show) for title, show in parts]
    return "\n\n".join([notes, base, *tables[:1], *_over_seeds(rows), *tables[1:]])


def _over_seeds(rows: Sequence[Row]) -> list[str]:
    """What was trained with several seeds: the mean of the AUC lost, against the dense model of the
    same seed, and half its range."""
    dense = {row["seed"]: row["auc"] for row in rows if row["mode"] == "dense"}
    lost: dict[tuple[str, ...], list[float]] = {}
    kept: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["mode"] == "training":
            cell = (
                name_of(row["block"]),
                row["tables"] or "all large",
                f"{100 * row['sparsity_level']:g} %",
            )
            lost.setdefault(cell, []).append(dense[row["seed"]] - row["auc"])
            kept[cell] = row["table_bytes_kept"]
    if len(dense) < 2 or not lost:
        return []
    aucs = list(dense.values())
    head = (
        f"Sparsified during training, seeds {', '.join(map(str, dense))}; dense AUC"
        f" {_spread(aucs)}:"
    )
    lines = [
        "| blocks | tables | level | bytes of weights kept | AUC lost |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(cell)} | {kept[cell]:,} | {_spread(losses)} |"
        for cell, losses in lost.items()
    ]
    return [head, "\n".join(lines)]


def _spread(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def _table(
    rows: Sequence[Row], title: str, levels: Sequence[float], show: Callable[[Row], str]
) -> str:
    head = [title, *(f"{100 * level:g} %" for level in levels)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (mode, block, norm), cells in curves(rows).items():
        found = {cell["sparsity_level"]: show(cell) for cell in cells}
        figures = [found.get(level, "-") for level in levels]
        lines.append("| " + " | ".join([f"{mode}, {name_of(block)}, {norm}", *figures]) + " |")
    return "\n".join(lines)


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
