"""Measuring candidates on a trained model, with a line of JSON for each, so that an interrupted run
continues."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.planning.candidates import dense_bytes, shape_of
from dist_sparse.planning.choices import Attempt
from dist_sparse.planning.trials import serving
from dist_sparse.progress import progress
from dist_sparse.serving.sources import check_range
from dist_sparse.sparsifiers.pieces import hash_tensor
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import ShardedData

_FILE: Final = "trials.jsonl"

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Returns metrics of a model by name, the same on all ranks; does not change the model."""

Train = Callable[[float], tuple[nn.Module, Evaluate]]
"""Trains a model whose tables have a fraction of their columns, and returns it with its
evaluation."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of an attempt: the served bytes of its tables, and its metrics."""

    attempt: Attempt
    bytes: int
    metrics: Mapping[str, float]


class Measurements:
    """Metrics of a trained model with the weights that attempts would serve. Construction and calls
    are collective.

    Args:
        model: a DistributedModelParallel, a DDP module or any module; it is not changed.
        evaluate: called with ``model`` while its tables hold the served weights.
        train: trains the models of attempts that need another.
        folder: made if need be. A line is added to its ``trials.jsonl`` for each attempt; those of
            an earlier run are not measured again, if the weights, and the metrics of the model as
            it is, were the same.

    Attributes:
        folder: on rank 0, which alone reads and writes it; None on others.
        tables: of the model, their shapes.
        table_bytes: of them as they are.
        full: its metrics as it is.

    Raises:
        ValueError: weights or metrics are no finite numbers, metrics differ between ranks, or the
            file can't be read; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        train: Train | None,
        folder: Path | None,
    ) -> None:
        self._world = group_over(world_ranks())
        self._whole, self._train = (model, evaluate), train
        self.folder = folder if self._world.rank == 0 else None
        with self._world.agreeing("measuring a model") as facts:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            located = model_source(model).locate()
            self.tables = tuple(map(shape_of, located))
            # A metric would not name the weights that are not finite.
            check_range(located, "fp32")
            facts["tables"] = [[table.name, table.shape, str(table.dtype)] for table in self.tables]
        self.table_bytes = dense_bytes(self.tables)
        self.full = self._metrics(model, evaluate)
        # Lines of other weights or other metrics are of another model.
        self._fingerprint = self._hash(located)
        self._done = self._read()
        self._small: tuple[float, tuple[nn.Module, Evaluate]] | None = None

    def __call__(self, attempts: Sequence[Attempt]) -> list[Measured]:
        """Return the measurements of attempts, in their order."""
        new = {_key(attempt): attempt for attempt in attempts if _key(attempt) not in self._done}
        # In this order each model is trained once.
        in_order = sorted(new.values(), key=lambda attempt: attempt.trained or 0.0)
        with progress("frontier", len(new), "trials", shown=self._world.rank == 0) as bar:
            for attempt in in_order:
                self._measure(attempt)
                bar(1)
        return [Measured(attempt=attempt, **self._done[_key(attempt)]) for attempt in attempts]

    def _measure(self, attempt: Attempt) -> None:
        model, evaluate = self._whole
        tables = self.tables
        if attempt.trained is not None:
            model, evaluate = self._trained(attempt.trained)
            tables = tuple(map(shape_of, model_source(model).locate()))
        # The weights are restored on leaving, also after an error of evaluate().
        with serving(model, attempt.candidate):
            metrics = self._metrics(model, evaluate)
        found = {"bytes": attempt.candidate.served_bytes(tables).total, "metrics": metrics}
        self._done[_key(attempt)] = found
        with self._world.agreeing("writing the file of trials"):
            if self.folder is not None:
                line = json.dumps({"model": self._fingerprint, **asdict(attempt), **found})
                # Opened for each line, so that a killed run has lost none.
                with (self.folder / _FILE).open("a") as stream:
                    stream.write(line + "\n")

    def write(self, result: Mapping[str, Any]) -> None:
        """Write a result beside the trials. Collective."""
        with self._world.agreeing("writing a frontier"):
            if self.folder is not None:
                text = json.dumps(result, indent=1, allow_nan=False)
                (self.folder / "frontier.json").write_text(f"{text}\n")

    def _trained(self, columns: float) -> tuple[nn.Module, Evaluate]:
        """Return the model that was trained with a fraction of the columns; the last one is
        kept."""
        assert self._train is not None  # or there is no such attempt
        if self._small is None or self._small[0] != columns:
            # First freed: two models may not fit into memory.
            self._small = None
            self._small = columns, self._train(columns)
        return self._small[1]

    def _metrics(self, model: nn.Module, evaluate: Evaluate) -> dict[str, float]:
        with self._world.agreeing("evaluate()") as facts:
            found = evaluate(model)
            try:
                # 0-D tensors and NumPy scalars are numbers too.
                metrics = {str(name): float(value) for name, value in found.items()}
            except (AttributeError, TypeError, ValueError):
                metrics = {}
            if not metrics or not all(map(math.isfinite, metrics.values())):
                raise ValueError(
                    f"evaluate() returned {found!r}; must return metrics by name, finite numbers."
                )
            facts["metrics"] = metrics
        return metrics

    def _hash(self, located: Sequence[ShardedData]) -> str:
        """Return a hash of the tables' weights and of the metrics."""
        mine = []
        for data in located:
            # Replicas count once, so that the hash is the same for any number of them.
            owned = data.owned(rank_in(data.ranks))
            for shard in data.shards:
                if shard.rect in owned:
                    mine.append(f"{data.name} {shard.rect} {hash_tensor(shard.tensor)}")
        # Metrics rounded: the order of sums may differ from run to run.
        metrics = {name: f"{value:.5g}" for name, value in self.full.items()}
        known = [self._world.all_gather_json(mine), metrics]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the measurements of this model in the file, by key."""
        found: dict[str, Any] = {}
        with self._world.agreeing("reading the file of trials"):
            if self.folder is not None and (self.folder / _FILE).exists():
                for text in (self.folder / _FILE).read_text().splitlines():
                    # A line that was cut off when the run was interrupted is measured again.
                    with suppress(json.JSONDecodeError):
                        line = json.loads(text)
                        if line["model"] == self._fingerprint:
                            found[_key(line)] = {name: line[name] for name in ("bytes", "metrics")}
        # All ranks must skip the same attempts.
        of_rank_0: Any = self._world.all_gather_json(found)[0]
        return dict(of_rank_0)


def _key(attempt: Attempt | Mapping[str, Any]) -> str:
    """Return text that is equal for equal attempts alone, whatever their method is called."""
    fields = asdict(attempt) if isinstance(attempt, Attempt) else attempt
    return json.dumps([fields["candidate"], fields["trained"]], sort_keys=True)
