"""The job of main.py: train all models, export them, compare what they serve, write the report."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dist_sparse import Checkpoints
from dist_sparse.extras.report import read_run, write_report
from dist_sparse.extras.report.summary import recommended, verdict, wrapped_lines
from dist_sparse.text import block_shape_text, number_of
from dlrm import interactions, movielens
from dlrm.batches import DataError, Dataset
from dlrm.hashing import folded
from dlrm.model import sharding_of
from dlrm.options import DIM, NARROWEST, is_usual
from dlrm.report import overhead, runs_table, served_table, tables_table, zeros_text
from dlrm.served import serve
from dlrm.train import Result, Settings, Sparsity, run

NOISE = ". Noise: half the range of delta, three seeds on 2 processes"
ONE_SEED = ", one seed each: another seed can\nmove AUC by as much as these differences"


def main(options: argparse.Namespace) -> None:
    """Run all and print the summary. Collective over the default process group."""
    started = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    folders = [options.run_dir]  # the default names the time, and clocks of ranks differ
    dist.broadcast_object_list(folders)
    run_dir: Path = folders[0]

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if options.data is not None:
        dataset = interactions.load(options.data, options.seed)
    else:
        if rank == 0:
            movielens.fetch()
        dist.barrier()  # the other ranks read what rank 0 has downloaded
        dataset = movielens.load(movielens.fetch())
    rows = {feature.name: feature.rows for feature in dataset.sparse}
    refuse_unknown(options.level, rows)
    say(
        f"{dataset.name}: {len(dataset.train):,} examples to train, {len(dataset.test):,} to test\n"
        f"{len(rows)} tables with {sum(rows.values()):,} rows x {DIM}, sharding {options.sharding},"
        f" {number_of(world, 'rank')}"
    )
    settings = Settings(
        sharding=sharding_of(rows, options.sharding, world),
        batch_size=options.batch_size,
        epochs=options.epochs,
        seed=options.seed,
        rank=rank,
        world=world,
    )
    sparsity = Sparsity(
        block=options.block,
        norm=options.norm,
        level=options.level,
        every=options.every,
        score=options.score,
    )

    number, count = 0, 3 + len(options.dims or [DIM])

    def train(
        name: str,
        settings: Settings,
        folder: Path,
        sparsity: Sparsity | None = None,
        data: Dataset = dataset,
        touched: Path | None = None,
    ) -> Result:
        nonlocal number
        number += 1
        say(f"run {number} of {count}: {name}")
        result = run(name, data, settings, folder, sparsity, checkpoints_of(name), touched)
        say(f"{name}: done after {time.perf_counter() - started:.0f} s")
        return result

    def checkpoints_of(name: str) -> Checkpoints | None:
        if options.checkpoint is None:
            return None
        return Checkpoints(
            options.checkpoint / name.replace(" ", "_"), every=options.checkpoint_every
        )

    # The report compares a run with those in folders inside its own.
    dense = train("dense", settings, run_dir / "dense", touched=run_dir / "touched_rows")
    sparse = train("sparsified", settings, run_dir, sparsity)
    results = [dense, sparse]
    for dim in options.dims or [same_bytes(dense, sparse)]:
        results.append(
            train(f"dense dim {dim}", narrowed(settings, dim), run_dir / f"dense_dim_{dim}")
        )
    few = same_bytes_in_rows(sparse, least=world)
    results.append(
        train("folded rows", settings, run_dir / "folded_rows", data=folded(dataset, few))
    )
    block = block_shape_text(options.block)
    score = options.norm if options.score == "norm" else options.score
    say(f"\nTables of the sparsified run (block {block}, {score})\n\n{tables_table(sparse.tables)}")
    say(f"\nRuns (NE: normalized entropy, less is better)\n\n{runs_table(results)}")
    if rank == 0:
        assert dense.touched is not None and dense.reads_zeros is not None
        print(f"\n{overhead(read_run(run_dir), sparse.removed)}")
        artifacts = [dense.artifacts, dense.touched]
        served = serve([*artifacts, *(result.artifacts for result in results[1:])])
        page = write_report(run_dir).resolve()
        exact = max(artifact.difference for artifact in served if artifact.dtype == "fp32")
        checked = (
            "Checked: logits from the fp32 artifacts differ from those of the trained models by at"
            f" most {exact:.0e}."
        )
        conclusion = wrapped_lines([verdict(read_run(run_dir)), checked])
        of_dense = {artifact.run for artifact in artifacts}
        four_bits = [artifact for artifact in served if artifact.dtype == "int4"]
        from_dense = [artifact for artifact in four_bits if artifact.run in of_dense]
        retrained = [artifact for artifact in four_bits if artifact.run not in of_dense]
        usual = is_usual(options)
        say("\nArtifacts of the dense model: bytes of their files, AUC as served by a process")
        say(f"without TorchRec{NOISE if usual else ''}\n")
        say(served_table(served[0], [served[0], *from_dense], usual))
        say(f"\nArtifacts of models that were trained again{'' if usual else ONE_SEED}\n")
        say("\n".join([served_table(served[0], retrained, usual), "", *conclusion]))
        say(f"\n{zeros_text(dense.reads_zeros)}\n")
        best = recommended(read_run(run_dir))
        if best and best.path:
            say("Check and serve the recommended artifact:")
            if shutil.which("dist-sparse") is None:  # make train does not activate its environment
                say(f". {shlex.quote(os.path.relpath(sys.prefix))}/bin/activate")
            say(f"dist-sparse serve-check {shlex.quote(str(best.path))}")
            say(f"dist_sparse.load_served({str(best.path)!r})\n")
        say(f"The report, to open in a browser:\n{page.as_uri()}")


def refuse_unknown(level: float | dict[str, float], rows: dict[str, int]) -> None:
    """Refuse levels of tables that do not exist, before the dense run takes its time.

    Raises:
        DataError: there is no such table.
    """
    unknown = level.keys() - rows.keys() if isinstance(level, dict) else ()
    if unknown:
        raise DataError(
            f"There is no table {', '.join(sorted(unknown))}; there are {', '.join(rows)}."
        )


def same_bytes(dense: Result, sparse: Result) -> int:
    """Return the embedding dimension of dense tables with about the bytes that the sparsified run
    kept."""
    return max(
        NARROWEST, round(DIM * sparse.table_bytes / dense.table_bytes / NARROWEST) * NARROWEST
    )


def same_bytes_in_rows(sparse: Result, least: int) -> dict[str, int]:
    """Return, for each sparsified table, the number of whole rows in the bytes of its kept rows and
    its mask, at least ``least``."""
    kept = {
        table.name: table.kept_bytes + table.mask_bytes for table in sparse.tables if table.target
    }
    return {name: max(least, round(size / (4 * DIM))) for name, size in kept.items()}


def narrowed(settings: Settings, dim: int) -> Settings:
    """Return the settings of dense tables of fewer columns.

    Narrow tables are not cut by columns, which changes only where they are stored.
    """
    sharding = {
        name: "table_wise" if kind == "column_wise" else kind
        for name, kind in settings.sharding.items()
    }
    return replace(settings, dim=dim, sharding=sharding)
