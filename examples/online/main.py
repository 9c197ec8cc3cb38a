"""Train a model day by day, publish the changes, and serve them.

Two processes:   dist-sparse launch --nproc 2 --ranks 0 examples/online/main.py

MovieLens-100K in order of time, cut into days of equal length. Each day the
model in training and a server predict the ratings; then the model trains on
them. In the evening the job publishes a delta, which the server applies while
it answers requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import Advanced, export, sparsify
from dist_sparse.extras.guard import Guard
from dist_sparse.extras.report import Quality
from dist_sparse.serving.export import Exported
from dist_sparse.text import size, table_lines
from dlrm.batches import Batch, Dataset, batches
from dlrm.movielens import fetch, load
from dlrm.options import as_positive, as_seed
from dlrm.process import run_and_leave
from online.client import Client
from online.formula import DELTA
from online.model import CROSS, IDS, build

_HEAD = ("day", "AUC trained", "AUC served", "delta", "full", "gone", "removed", "guard")
_HELD_OUT = 20  # one in 20 ratings is held out for the guard's validation
_TOLERANCE = 0.002


class Online:
    """The state of a job on all ranks: the model, its masks, and the published folders.

    Args:
        data: has only the features of the model.
        options: of the command line.
    """

    def __init__(self, data: Dataset, options: argparse.Namespace) -> None:
        self.data, self.options = data, options
        self.model = build(data, options.seed)
        kept = torch.arange(len(data.labels)) % _HELD_OUT != 0
        self.validation = torch.arange(len(data.labels))[~kept]
        self.days = torch.arange(len(data.labels))[kept].chunk(options.days)
        self.steps = len(self.days[-1]) // options.batch_size
        self.guard = Guard(tolerance=_TOLERANCE)
        self.sparse = sparsify(
            self.model,
            self.model.fused_optimizer,
            level=0.999,
            schedule="linear",
            include=[CROSS],
            advanced=Advanced(guard=self.guard),
            begin=max(1, options.days // 4) * self.steps,
            end=options.days * self.steps,
            every=self.steps,
        )
        self.published: list[Path] = []

    def train(self, index: Tensor) -> None:
        """Train on a day's ratings, in order of time. Collective."""
        for batch in self._batches(index):
            labels = batch.labels
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                self.model(batch.sparse_features), labels
            )
            loss.backward()  # the fused optimizers update the tables in here
            self.sparse.step()

    def auc(self, index: Tensor) -> float:
        """Return the AUC of the model in training, over all ranks. Collective."""
        quality = Quality()
        self.model.eval()
        with torch.no_grad():
            for batch in self._batches(index):
                quality.update(self.model(batch.sparse_features), batch.labels)
        self.model.train()
        return quality.compute()["auc"]

    def publish(self, folder: Path) -> Exported:
        """Write the changes since the last call; the first call writes everything. Collective."""
        path = folder / DELTA.format(len(self.published))
        since = self.published or None
        written = export(self.model, self.sparse, path, dtype="int8", since=since)
        self.published.append(written.path)
        return written

    def _batches(self, index: Tensor) -> Iterator[Batch]:
        rank, world = dist.get_rank(), dist.get_world_size()
        size = min(self.options.batch_size, len(index))
        return batches(self.data, index, batch_size=size, rank=rank, world=world)


def main(options: argparse.Namespace) -> None:
    """Run all days, and print a line for each. Collective over the default process group."""
    first = dist.get_rank() == 0
    if first:
        fetch()
    dist.barrier()
    whole = load(fetch())
    features = [each for each in whole.sparse if each.name in (*IDS, CROSS)]
    data = replace(whole, sparse=tuple(features))
    folders = [options.out]
    dist.broadcast_object_list(folders)  # the default names the time, and clocks of ranks differ
    published, full = folders[0] / "published", folders[0] / "full"
    job = Online(data, options)
    job.publish(published)
    client = Client(published, data) if first else None
    lines, sizes = [], []
    for day, index in enumerate(job.days, 1):
        trained = job.auc(index)
        served = auc_of(client.logits(index, day - 1), data.labels[index]) if client else 0.0
        job.train(index)
        held = job.guard.check(job.auc(job.validation))
        written = job.publish(published)
        # For comparison: the artifact to publish if there were no deltas.
        export(job.model, job.sparse, full / DELTA.format(day), dtype="int8")
        level = f"{job.sparse.sparsity:.0%}"  # collective
        if not first:
            continue
        sizes.append((bytes_of(written.path), bytes_of(full / DELTA.format(day))))
        assert written.delta is not None  # the base was published before the first day
        tables = written.delta.tables.values()
        gone = str(sum(each.gone for each in tables))
        figures = (f"{trained:.4f}", f"{served:.4f}", *map(size, sizes[-1]), gone)
        lines.append((str(day), *figures, level, "holds" if held else "undone"))
        print(f"day {day} of {len(job.days)}: published {size(sizes[-1][0])}", flush=True)
    if client:
        client.logits(job.validation[:100], len(job.days))  # every delta is applied
        client.close()
        print("\n" + "\n".join(table_lines(_HEAD, lines, right=range(8))))
        print("\n" + conclusion(sizes, lines, client))


def conclusion(
    sizes: Sequence[tuple[int, int]], lines: Sequence[Sequence[str]], client: Client
) -> str:
    """Return a summary of all days."""
    deltas, whole = map(sum, zip(*sizes, strict=True))
    trained, served = (sum(float(line[column]) for line in lines) / len(lines) for column in (1, 2))
    return (
        f"Published {size(deltas)} in {len(sizes)} deltas, {deltas / whole:.1%} of as many whole"
        f" artifacts.\nMean AUC {trained:.4f} in training, {served:.4f} served.\n"
        f"The server answered {client.answers:,} requests meanwhile, each from one day;\n"
        f"the slowest took {1000 * client.slowest:.0f} ms."
    )


def bytes_of(folder: Path) -> int:
    """Return the bytes of the files of an artifact."""
    return sum(file.stat().st_size for file in folder.iterdir())


def auc_of(logits: Tensor, labels: Tensor) -> float:
    """Return the AUC of one process's predictions."""
    from dist_sparse.torchrec.kernels import auc_and_ne

    return auc_and_ne(torch.sigmoid(logits.double()), labels.double())[0]


def parse() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--days",
        type=as_positive,
        default=20,
        metavar="N",
        help="parts of equal length (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=as_positive,
        default=64,
        metavar="N",
        help="ratings per step over all processes (default: %(default)s)",
    )
    add("--seed", type=as_seed, default=0, metavar="N", help="random seed (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("runs", time.strftime("online-%Y%m%d-%H%M%S")),
        metavar="DIR",
        help="folder for artifacts; must not exist yet (default: runs/online-<time>)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_and_leave(main, parse())
