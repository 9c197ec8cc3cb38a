"""One run: build the model from the seed, train it with TorchRec's pipeline, evaluate it on the
test part.

To sparsify a script of your own, add :class:`Sparsification`, and its ``step`` after
``pipeline.progress``.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.metrics.auc import compute_auc
from tqdm import tqdm

from dist_sparse import (
    BaseDataSparsifier,
    Checkpoints,
    CubicDataScheduler,
    ImportanceSparsifier,
    MaskEnforcer,
    remove_untouched,
)
from dist_sparse.ids.share import Share
from dist_sparse.sparsifiers.importance import Score
from dlrm.batches import Batch, DataError, Dataset, batches, steps_per_pass
from dlrm.model import ShardedModel, build
from dlrm.notes import Notes
from dlrm.options import DIM
from dlrm.predictions import Predictions
from dlrm.served import Artifacts, export

_MIN_ROWS = 256
"""Tables with fewer rows stay dense, unless levels are given by table: they save almost nothing."""

_WARM_UP_STEPS = 10
_BEGIN, _END = 0.1, 0.6
"""The fraction of the run in which the level rises; afterwards the model adapts to the final
masks."""

_BAR_EVERY, _BAR_BATCHES = 10, 50
"""Steps between updates of the progress bar; batches of rank 0 that its AUC covers."""

Pipeline = TrainPipelineSparseDist[Batch, tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. ``batch_size`` counts the whole world."""

    sharding: dict[str, str]
    dim: int = DIM
    batch_size: int
    epochs: int
    seed: int
    rank: int
    world: int


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """How tables are sparsified: block shape, norm, final level of all or by table, steps between
    updates, score."""

    block: tuple[int, int | str]
    norm: str
    level: float | dict[str, float]
    every: int
    score: Score = "norm"


@dataclass(frozen=True)
class TableRow:
    """The state of one table; ``blocks`` is 0 if it was left dense."""

    name: str
    shape: tuple[int, int]
    sharding: str
    kept_bytes: int
    blocks: int = 0
    removed_blocks: int = 0
    target: float = 0.0
    mask_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one run.

    ``table_bytes``: the remaining weights, without masks. ``ms_per_step``: None if the newest
    checkpoint already covers all steps. ``removed``: weights read at the end and found to be 0.
    ``touched``: the same model without the rows that training has never looked up. ``reads_zeros``:
    which lookups of the test read these rows.
    """

    name: str
    dim: int
    auc: float
    ne: float
    table_bytes: int
    ms_per_step: float | None
    removed: int = 0
    tables: list[TableRow] = field(default_factory=list)
    artifacts: Artifacts
    touched: Artifacts | None = None
    reads_zeros: Share | None = None


class Sparsification:
    """Sparsifier, enforcer and schedule of a run. Collective: every rank constructs one and steps
    it at every step."""

    def __init__(self, sharded: ShardedModel, sparsity: Sparsity, steps: int) -> None:
        level = sparsity.level
        names = list(level) if isinstance(level, dict) else large_tables(sharded)
        self.sparsifier = ImportanceSparsifier(
            sparsity_level=0.0,
            sparse_block_shape=sparsity.block,
            norm=sparsity.norm,
            score=sparsity.score,
        )
        # The report shows lookups, and only tables with a fused optimizer count them.
        fused = all(sharded.sharding[name] != "data_parallel" for name in names)
        self.sparsifier.counts_lookups |= fused
        self.sparsifier.add_model(sharded.model, include=names)
        begin = int(steps * _BEGIN)
        end = max(int(steps * _END), begin + 1)
        self.scheduler = CubicDataScheduler(
            self.sparsifier,
            "sparsity_level",
            final=level,
            begin=begin,
            end=end,
            every=sparsity.every,
        )
        self.enforcer = MaskEnforcer(self.sparsifier).attach(sharded.optimizer)
        self.masks_seconds = 0.0

    def step(self) -> None:
        """Update the masks if the schedule says so, then step the schedule."""
        started = time.perf_counter()
        self.sparsifier.step()
        self.scheduler.step()
        self.masks_seconds += time.perf_counter() - started

    def check_zeros(self, sharded: ShardedModel) -> int:
        """Check in TorchRec's own state that every removed weight is 0. Collective.

        Returns:
            The number of removed weights over all ranks; each replica counts.

        Raises:
            AssertionError: one is not 0.
        """
        removed = 0
        for fqn, weight in sharded.model.state_dict().items():
            name = fqn.split(".")[-2]
            if ".embedding_bags." not in fqn or name not in self.sparsifier.data_groups:
                continue
            pieces = {(0, 0): weight}
            if isinstance(weight, ShardedTensor):
                pieces = {tuple(s.metadata.shard_offsets): s.tensor for s in weight.local_shards()}
            for offset, mask in self.sparsifier.local_masks(name):
                revived = int((pieces[offset][mask == 0] != 0).sum())
                assert revived == 0, (
                    f"{revived} removed weights of {name} are not 0 on rank {dist.get_rank()}"
                )
                removed += int((mask == 0).sum())
        total = torch.tensor(removed)
        dist.all_reduce(total)
        return int(total)

    @property
    def level(self) -> float:
        """The current level. Local."""
        return max(config["sparsity_level"] for config in self.sparsifier.data_groups.values())

    def tables(self, sharded: ShardedModel) -> list[TableRow]:
        """Return the state of every table of the model. Collective."""
        stats = {table.name: table for table in self.sparsifier.table_stats()}
        rows = []
        for name, (height, width) in sharded.tables.items():
            dense_bytes = height * width * torch.float32.itemsize
            row = TableRow(name, (height, width), sharded.sharding[name], dense_bytes)
            if name in stats:
                table = stats[name]
                row = replace(
                    row,
                    blocks=table.blocks,
                    removed_blocks=table.removed_blocks,
                    target=table.target,
                    mask_bytes=table.mask_bytes,
                    kept_bytes=table.kept_bytes,
                )
            rows.append(row)
        return rows


class Saving:
    """The checkpoints of a run. Collective."""

    def __init__(
        self, checkpoints: Checkpoints, sharded: ShardedModel, sparsification: Sparsification | None
    ) -> None:
        self._checkpoints = checkpoints
        self._parts: dict[str, Any] = {"model": sharded.model, "optimizer": sharded.optimizer}
        if sparsification is not None:
            masks = {"sparsifier": sparsification.sparsifier, "scheduler": sparsification.scheduler}
            self._parts["sparse"] = masks

    def resume(self) -> int:
        """Load the newest checkpoint; return the number of steps that it covers, 0 if there is
        none."""
        resumed = self._checkpoints.resume_latest(**self._parts)
        return 0 if resumed is None else resumed.step

    def save(self, step: int, last: bool) -> None:
        """Save at regular intervals of steps, and after the last one."""
        self._checkpoints.save(step, **self._parts, force=last)


def run(
    name: str,
    dataset: Dataset,
    settings: Settings,
    folder: Path,
    sparsity: Sparsity | None = None,
    checkpoints: Checkpoints | None = None,
    touched: Path | None = None,
) -> Result:
    """Train a model from the seed, or from its newest checkpoint, evaluate it and log both in
    ``folder``. Collective; all ranks get the same result except for the times.

    The trained model's artifacts are in ``folder/served``; without the rows that training has never
    looked up, in ``touched/served``, if a folder is given.
    """
    sharded = build(
        dataset,
        sharding=settings.sharding,
        seed=settings.seed,
        world=settings.world,
        dim=settings.dim,
    )
    steps = settings.epochs * steps_per_pass(len(dataset.train), settings.batch_size)
    sparsification = sparsifier = enforcer = None
    if sparsity is not None:
        sparsification = Sparsification(sharded, sparsity, steps)
        sparsifier, enforcer = sparsification.sparsifier, sparsification.enforcer
    saving, start = None, 0
    if checkpoints is not None:
        saving = Saving(checkpoints, sharded, sparsification)
        start = saving.resume()
    pipeline: Pipeline = TrainPipelineSparseDist(
        sharded.model, sharded.optimizer, torch.device("cpu")
    )

    rows = {feature.name: feature.rows for feature in dataset.sparse}
    config = {
        "data": dataset.name,
        "rows": rows,
        **asdict(settings),
        "sparsity": sparsity and asdict(sparsity),
    }
    notes = Notes(
        folder,
        name,
        sharded.model,
        config,
        sparsifier,
        enforcer,
        start=start if saving else None,
    )
    sharded.model.train()
    # The position in the data counts trained batches; the pipeline has drawn two more.
    examples = islice(epochs(dataset, settings), start, None)
    ms_per_step = train_steps(
        name,
        pipeline,
        examples,
        steps,
        settings.rank,
        sparsification,
        notes,
        saving=saving,
        start=start,
    )
    sharded.model.eval()
    predictions = _test(pipeline, dataset, settings)
    auc, ne = predictions.auc, predictions.ne

    tables, removed, table_bytes = [], 0, sharded.table_bytes
    if sparsification is not None:
        tables = sparsification.tables(sharded)
        removed = sparsification.check_zeros(sharded)
        table_bytes = sum(table.kept_bytes for table in tables)
    pipeline.detach()
    artifacts = _export(
        name, folder, sharded, sparsifier, dataset, settings, predictions, saving is not None
    )
    notes.close(test_auc=auc, test_ne=ne, ms_per_step=ms_per_step)
    without, reads_zeros = None, None
    if touched is not None:
        # A resumed job may have this log already: continue it.
        begin = 0 if saving else None
        without, reads_zeros = _touched_rows(sharded, dataset, settings, config, touched, begin)
    return Result(
        name=name,
        dim=settings.dim,
        auc=auc,
        ne=ne,
        table_bytes=table_bytes,
        ms_per_step=ms_per_step,
        removed=removed,
        tables=tables,
        artifacts=artifacts,
        touched=without,
        reads_zeros=reads_zeros,
    )


def _export(
    name: str,
    folder: Path,
    sharded: ShardedModel,
    sparsifier: BaseDataSparsifier | None,
    dataset: Dataset,
    settings: Settings,
    predictions: Predictions,
    resumed: bool,
) -> Artifacts:
    """Export the model to ``folder/served``. Collective."""
    if resumed and settings.rank == 0:
        # Left by a run that was killed after its export.
        shutil.rmtree(folder / "served", ignore_errors=True)
    export(sharded, sparsifier, dataset, len(predictions.logits), folder / "served")
    return Artifacts(run=name, folder=folder / "served", trained=predictions)


def _touched_rows(
    sharded: ShardedModel,
    dataset: Dataset,
    settings: Settings,
    config: dict[str, Any],
    folder: Path,
    start: int | None,
) -> tuple[Artifacts, Share]:
    """Remove the rows that training has never looked up, according to Adagrad's sums, without
    further training. Evaluate the model, log the run in ``folder`` and export it.

    Returns:
        The artifacts, and which lookups of the test read removed rows.
    """
    name = "touched rows"
    removed = remove_untouched(sharded.model, sharded.optimizer, include=large_tables(sharded))
    config = config | {"sparsity": {"level": "untouched"}}
    notes = Notes(folder, name, sharded.model, config, removed, start=start)
    pipeline: Pipeline = TrainPipelineSparseDist(
        sharded.model, sharded.optimizer, torch.device("cpu")
    )
    predictions = _test(pipeline, dataset, settings)
    pipeline.detach()
    tested = (batch.sparse_features for batch in _test_batches(dataset, settings))
    share = removed.share(tested)
    notes.close(test_auc=predictions.auc, test_ne=predictions.ne, test_reads_zeros=share.fraction)
    resumed = start is not None
    artifacts = _export(name, folder, sharded, removed, dataset, settings, predictions, resumed)
    return artifacts, share


def large_tables(sharded: ShardedModel) -> list[str]:
    """Return the names of the tables that are worth sparsifying.

    Raises:
        DataError: there are none.
    """
    large = [name for name, (rows, _) in sharded.tables.items() if rows >= _MIN_ROWS]
    if not large:
        raise DataError(
            f"There is nothing to sparsify: all tables have fewer than {_MIN_ROWS} rows."
        )
    return large


def epochs(dataset: Dataset, settings: Settings) -> Iterator[Batch]:
    """Yield all training batches of this rank as one stream, so that the pipeline never runs empty
    between epochs."""
    for epoch in range(settings.epochs):
        yield from batches(
            dataset,
            dataset.train,
            batch_size=settings.batch_size,
            rank=settings.rank,
            world=settings.world,
            shuffle_seed=settings.seed * 1_000_003 + epoch,
        )


def train_steps(
    name: str,
    pipeline: Pipeline,
    examples: Iterator[Batch],
    steps: int,
    rank: int,
    sparsification: Sparsification | None,
    notes: Notes | None = None,
    *,
    saving: Saving | None = None,
    start: int = 0,
) -> float | None:
    """Train; return the mean milliseconds per step, mask updates and checkpoints included, without
    the first few steps; None if no step is left.

    Args:
        start: steps before this call.
    """
    # disable=None: tqdm itself stays quiet when its output is not a terminal.
    bar = tqdm(total=steps, initial=start, desc=name, disable=None if rank == 0 else True)
    recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=_BAR_BATCHES)
    started = time.perf_counter()
    warm = min(start + _WARM_UP_STEPS, steps - 1)
    for step in range(start, steps):
        if step == warm:
            started = time.perf_counter()
        loss, logits, labels = pipeline.progress(examples)
        if sparsification is not None:
            sparsification.step()
        if notes is not None:
            notes.step(loss, logits, labels)
        if saving is not None:
            saving.save(step + 1, last=step + 1 == steps)
        if not bar.disable:
            recent.append((logits, labels))
            if step % _BAR_EVERY == 0:
                level = 0.0 if sparsification is None else sparsification.level
                bar.set_postfix(
                    loss=f"{float(loss):.3f}",
                    auc=f"{_auc(recent):.3f}",
                    sparsity=f"{level:.2f}",
                    refresh=False,
                )
            bar.update()
    bar.close()
    return 1000 * (time.perf_counter() - started) / (steps - warm) if start < steps else None


def _test(pipeline: Pipeline, dataset: Dataset, settings: Settings) -> Predictions:
    """Predict the test part, whole batches of it. Collective: every rank gets all."""
    examples = _test_batches(dataset, settings)
    outputs = []
    with torch.no_grad():
        for _ in range(steps_per_pass(len(dataset.test), settings.batch_size)):
            _, logits, labels = pipeline.progress(examples)
            outputs.append(torch.stack([logits, labels]))
    # (steps, 2, examples of a rank): the same shape on every rank.
    local = torch.stack(outputs)
    parts = [torch.empty_like(local) for _ in range(settings.world)]
    dist.all_gather(parts, local)
    logits, labels = torch.cat(parts, dim=2).unbind(1)
    return Predictions(logits.flatten(), labels.flatten())


def _test_batches(dataset: Dataset, settings: Settings) -> Iterator[Batch]:
    """Return this rank's part of the test."""
    return batches(
        dataset,
        dataset.test,
        batch_size=settings.batch_size,
        rank=settings.rank,
        world=settings.world,
    )


def _auc(recent: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the AUC of this rank's last few batches, for the progress bar."""
    logits, labels = (torch.cat(part)[None].double() for part in zip(*recent, strict=True))
    return float(compute_auc(1, [logits], [labels], [torch.ones_like(labels)]))
