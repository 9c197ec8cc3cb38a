"""Train a two-tower model wide, narrowed halfway, and narrow from the start.

Each is served in 32, 8 and 4 bits; --codes adds a narrowed model served as codes.

Two processes:   dist-sparse launch --nproc 2 --ranks 0 \\
                   examples/two_tower/main.py -- --data gowalla.npz
One process:     python examples/two_tower/main.py --data gowalla.npz
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from dist_sparse import export, load_served
from dist_sparse.text import number_of, table_lines
from dlrm.options import as_positive, as_seed, started_world
from dlrm.process import run_and_leave
from two_tower.data import Interactions, load
from two_tower.model import rows_of
from two_tower.quality import Quality, measure
from two_tower.train import Settings, train

if TYPE_CHECKING:
    from dist_sparse.extras.codes import CodedTraining

DTYPES = ("fp32", "int8", "int4")
_HEAD = ("run", "columns", "served as", "bytes", "of wide", "AUC", "AUC popular", "recall@20")


def main(options: argparse.Namespace) -> None:
    """Train and serve all runs, and print their quality. Collective."""
    started = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    data = load(options.data)
    folders = [options.out]
    dist.broadcast_object_list(folders)  # the default names the time, and clocks of ranks differ
    folder = folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    say(
        f"{options.data.name}: {data.users} users, {data.items} items, {len(data.user)}"
        f" interactions to train, {len(data.held_out['test'][0])} to test;"
        f" {number_of(world, 'rank')}"
    )
    wide = Settings(
        dim=options.dim,
        width=options.dim,
        lr=options.lr,
        l2=options.l2,
        epochs=options.epochs,
        cut=options.cut,
        batch_size=options.batch_size,
        seed=options.seed,
        rank=rank,
        world=world,
    )
    runs = {
        "wide": wide,
        "narrowed": replace(wide, width=options.width),
        "narrow from the start": replace(wide, dim=options.width, width=options.width),
    }
    if options.codes is not None:
        runs["narrowed, codes"] = replace(runs["narrowed"], codes=options.codes)
    lines, whole = [], 0
    for name, settings in runs.items():
        model, coded = train(name, data, settings)
        say(f"{name}: trained after {time.perf_counter() - started:.0f} s")
        for dtype, size, quality in served(
            model, coded, data, folder / name.replace(",", "").replace(" ", "-")
        ):
            whole = whole or size
            figures = (f"{quality.auc:.4f}", f"{quality.auc_popular:.4f}", f"{quality.recall:.4f}")
            lines.append(
                (name, str(settings.width), dtype, str(size), f"{size / whole:.1%}", *figures)
            )
    say(f"\nServed from {folder}\n")
    say("\n".join(table_lines(_HEAD, lines, right=(1, 3, 4, 5, 6, 7))))


def served(
    model: DistributedModelParallel, coded: CodedTraining | None, data: Interactions, folder: Path
) -> Iterator[tuple[str, int, Quality]]:
    """Export the tables to ``folder`` in each dtype, or as codes, and measure the artifacts on the
    test part: ``(dtype, bytes, quality)``. Collective; rank 0 measures, and the others get its
    figures."""
    bias = model.module.bias.detach()
    for dtype in DTYPES if coded is None else ("codes",):
        exported = export(model, coded, folder.with_name(f"{folder.name}-{dtype}"), dtype=dtype)
        found: list[Quality | None] = [None]
        if dist.get_rank() == 0:
            rows = rows_of(load_served(exported.path), (data.users, data.items))
            found = [measure(*rows, bias, data, data.test("test"))]
        dist.broadcast_object_list(found)
        assert found[0] is not None
        yield dtype, exported.manifest.bytes, found[0]


def parse() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help=(
            "an interactions .npz: train_user, train_item, test_user, test_item, num_users,"
            " num_items"
        ),
    )
    add(
        "--dim",
        type=as_positive,
        default=64,
        metavar="D",
        help="columns of the wide tables (default: %(default)s)",
    )
    add(
        "--width",
        type=as_positive,
        default=16,
        metavar="D",
        help="columns of the narrow tables (default: %(default)s)",
    )
    add(
        "--codes",
        type=as_positive,
        metavar="G",
        help="narrows to codes of G bytes a row too, for tables of at least 20,000 rows",
    )
    add(
        "--lr",
        type=float,
        default=0.4,
        metavar="X",
        help="learning rate, which falls to 0 over the second half (default: %(default)s)",
    )
    add(
        "--l2",
        type=float,
        default=0.05,
        metavar="X",
        help="L2 of the looked-up rows (default: %(default)s)",
    )
    add(
        "--epochs",
        type=as_positive,
        default=14,
        metavar="N",
        help="passes over the data (default: %(default)s)",
    )
    add(
        "--cut",
        type=as_positive,
        metavar="N",
        help="passes before tables are narrowed (default: half of them)",
    )
    add("--seed", type=as_seed, default=0, metavar="N", help="random seed (default: %(default)s)")
    add(
        "--batch-size",
        type=as_positive,
        default=4096,
        metavar="N",
        help="interactions per step over all processes (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs", time.strftime("two-tower-%Y%m%d-%H%M%S")),
        metavar="DIR",
        help="folder for the artifacts (default: runs/two-tower-<time>)",
    )
    options = parser.parse_args()
    world = started_world() or 1
    for name in ("dim", "width"):
        if getattr(options, name) % 4:
            parser.error(f"argument --{name}: must be a multiple of 4, as FBGEMM wants")
    if options.width >= options.dim:
        parser.error(f"argument --width: must be less than --dim {options.dim}")
    if options.codes is not None and options.width % options.codes:
        parser.error(f"argument --codes: must divide --width {options.width}")
    if options.cut is not None and options.cut >= options.epochs:
        parser.error(f"argument --cut: must be less than --epochs {options.epochs}")
    if not (options.lr > 0 and options.l2 >= 0):
        parser.error("arguments --lr and --l2: must be numbers above 0, and at least 0")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(
            f"argument --out: {options.out} is not empty, and artifacts are never overwritten"
        )
    if options.batch_size % world:
        parser.error(f"argument --batch-size: must be divisible by {world} processes")
    return options


if __name__ == "__main__":
    run_and_leave(main, parse())
