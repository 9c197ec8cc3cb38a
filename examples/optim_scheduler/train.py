"""Two OptimSchedulers train, sparsify, save and resume one model.

One owns the tables and updates their masks, the other owns the layers; both are stepped with the
losses of one forward.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.metrics.auc import compute_auc
from tqdm import tqdm

from dist_sparse import ROW, CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from dist_sparse.extras.optim import ExponentDecayLr, Noamlr
from dist_sparse.records import TableStats
from dlrm.batches import Batch, DataError, Dataset, batches, steps_per_pass
from optim_scheduler import checkpoint
from optim_scheduler.model import LAYERS, TABLES, Ranker

__all__ = ["Job"]

_LOG = logging.getLogger("optim_scheduler")
_MIN_ROWS = 256
"""Tables with fewer rows stay dense."""

_BEGIN, _END = 0.1, 0.6
"""The part of the updates in which the level rises."""

_WARM_UP = 0.1
"""The part of the updates in which the learning rate of the layers rises."""


class Job:
    """The model, its two optimizers and their progress. Collective: every rank constructs one and
    calls its methods.

    Args:
        options: from :func:`optim_scheduler.options.parse`.
        dataset: the same on every rank.
        rank: of this process.
        world: number of processes; if it is more than one, there is a default process group.

    Raises:
        DataError: there are too few examples, or no table large enough to sparsify.
    """

    def __init__(
        self, options: argparse.Namespace, dataset: Dataset, rank: int, world: int
    ) -> None:
        self.options, self.dataset, self.rank, self.world = options, dataset, rank, world
        self.per_epoch = steps_per_pass(len(dataset.train), options.batch_size)
        self.updates = options.epochs * self.per_epoch // options.accumulate
        if self.updates < 2 or not steps_per_pass(len(dataset.test), options.batch_size):
            raise DataError(
                f"{len(dataset.train)} examples to train and {len(dataset.test)} to test are too"
                f" few for updates of {options.accumulate} x {options.batch_size}."
            )
        torch.manual_seed(options.seed)
        self.net = Ranker(dataset)
        self.model: nn.Module = DistributedDataParallel(self.net) if world > 1 else self.net
        self.sparsifier = DataNormSparsifier(
            sparsity_level=0.0, sparse_block_shape=(1, ROW), norm="L2"
        )
        if not (large := [f"{TABLES}/{f.name}" for f in dataset.sparse if f.rows >= _MIN_ROWS]):
            raise DataError(
                f"There is nothing to sparsify: all tables have fewer than {_MIN_ROWS} rows."
            )
        self.sparsifier.add_model(self.model, include=large)
        begin = int(_BEGIN * self.updates)
        end = max(int(_END * self.updates), begin + 1)
        common: dict[str, Any] = {
            "distributed": (
                world > 1
            ),  # DDP averages gradients: once per update, not at every micro-step
            "accum_grad": options.accumulate,
            "grad_clip": options.clip,
            "use_amp": options.amp != "no",
            "amp_dtype": torch.float16 if options.amp == "fp16" else torch.bfloat16,
        }
        self.tables = ExponentDecayLr(
            "Adagrad",
            {"lr": options.table_lr},
            self.model,
            updated_modules=TABLES,
            decay_factor=0.5,
            data_sparsifier=self.sparsifier,
            data_scheduler=CubicDataScheduler(
                self.sparsifier, final=options.sparsity, begin=begin, end=end, every=options.every
            ),
            **common,
        )
        self.layers = Noamlr(
            "Adam",
            {"lr": options.layer_lr},
            self.model,
            updated_modules=LAYERS,
            warmup_steps=max(1, int(_WARM_UP * self.updates)),
            **common,
        )
        MaskEnforcer(self.sparsifier).attach(self.tables.optimizer)
        self.done = 0  # updates

    def train(self) -> None:
        """Train to the end, or to ``--stop-at``."""
        options = self.options
        last = min(self.updates, options.stop_at or self.updates)
        # disable=None: tqdm itself stays quiet when its output is not a terminal.
        bar = tqdm(
            total=self.updates,
            initial=self.done,
            unit="update",
            disable=None if self.rank == 0 else True,
        )
        self.model.train()
        for step_num, batch in self._micro_steps(last):
            epoch_num = (step_num - 1) // self.per_epoch + 1
            with self.tables.forward_context(step_num, epoch_num):
                losses = {"loss": binary_cross_entropy_with_logits(self.model(batch), batch.labels)}
            self.tables.step(losses, None, "tables", step_num, epoch_num, _LOG)
            self.layers.step(losses, None, "layers", step_num, epoch_num, _LOG)
            if step_num % options.accumulate:
                continue
            self.done = step_num // options.accumulate
            if not bar.disable:
                level = max(
                    config["sparsity_level"] for config in self.sparsifier.data_groups.values()
                )
                bar.set_postfix(
                    loss=f"{float(losses['loss'].detach()):.3f}",
                    sparsity=f"{level:.2f}",
                    refresh=False,
                )
                bar.update()
            if options.checkpoint and (
                self.done == last or self.done % (options.save_every or last) == 0
            ):
                self._save()
        bar.close()

    def resume(self) -> None:
        """Continue from the checkpoint.

        Raises:
            DataError: there is none, or it is of another run.
        """
        state = checkpoint.load(self.options.checkpoint, self._plan())
        try:
            self.net.load_state_dict(state["model"])
            self.tables.load_state_dict(state["tables"])
            self.layers.load_state_dict(state["layers"])
            self.done = int(state["done"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.options.checkpoint} does not fit: {type(error).__name__}: {error}"
            ) from error

    def auc(self) -> float:
        """Return the AUC over the test examples of all ranks, the last incomplete batch
        excluded."""
        self.model.eval()
        with torch.no_grad():
            seen = [
                (self.net(batch).double(), batch.labels.double())
                for batch in self._batches(self.dataset.test)
            ]
        # (2, examples of this rank); every rank has as many, so a plain all-gather does.
        mine = torch.stack([torch.cat(part) for part in zip(*seen, strict=True)])
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(parts, mine)
        else:
            parts = [mine]
        logits, labels = torch.cat(parts, dim=1)[:, None]
        return float(compute_auc(1, [logits], [labels], [torch.ones_like(labels)]))

    def sparsities(self) -> list[TableStats]:
        """Return the sparsity of every sparsified table."""
        return self.sparsifier.table_stats()

    def check_zeros(self) -> int:
        """Check the weights in the tables themselves. Local.

        Returns:
            The number of pruned weights.

        Raises:
            RuntimeError: one of them is not 0.
        """
        removed = 0
        for name in self.sparsifier.data_groups:
            weight = self.net.tables[name.removeprefix(f"{TABLES}/")].weight.detach()
            for (row, column), mask in self.sparsifier.local_masks(name):
                piece = weight[row : row + mask.shape[0], column : column + mask.shape[1]]
                if revived := int((piece[mask == 0] != 0).sum()):
                    raise RuntimeError(
                        f"{revived} removed weights of {name} are not 0 on rank {self.rank}."
                    )
                removed += int((mask == 0).sum())
        return removed

    def _micro_steps(self, last: int) -> Iterator[tuple[int, Batch]]:
        """Yield the rest of this rank's data with the number of each micro-step, until update
        ``last``."""
        begin, end = self.done * self.options.accumulate, last * self.options.accumulate
        while begin < end:
            epoch, skip = divmod(begin, self.per_epoch)
            first = epoch * self.per_epoch
            numbered = enumerate(
                self._batches(self.dataset.train, self.options.seed * 1_000_003 + epoch), first + 1
            )
            begin = min(first + self.per_epoch, end)
            yield from islice(numbered, skip, begin - first)

    def _batches(self, index: Tensor, seed: int | None = None) -> Iterator[Batch]:
        size, rank, world = self.options.batch_size, self.rank, self.world
        return batches(
            self.dataset, index, batch_size=size, rank=rank, world=world, shuffle_seed=seed
        )

    def _plan(self) -> dict[str, Any]:
        """The options that a resumed run must share with the first."""
        names = ("epochs", "batch_size", "accumulate", "sparsity", "every", "seed")
        return {"data": self.dataset.name, **{name: getattr(self.options, name) for name in names}}

    def _save(self) -> None:
        state = {
            "plan": self._plan(),
            "done": self.done,
            "model": self.net.state_dict(),
            "tables": self.tables.state_dict(),
            "layers": self.layers.state_dict(),
        }
        if self.rank == 0:
            checkpoint.save(self.options.checkpoint, state)
        if self.world > 1:
            dist.barrier()  # no rank continues or exits before the file is on disk
