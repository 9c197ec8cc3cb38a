"""Measuring candidates on a trained model, with a line of JSON for each, so that an interrupted run
goes on."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.planning.candidates import TableShape, dense_bytes
from dist_sparse.planning.methods import Attempt, Part
from dist_sparse.planning.trials import serving
from dist_sparse.serving.sources import check_range
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.modules import model_source

__all__ = ["Evaluate", "Measured", "Measurements", "Train"]

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Returns metrics of a model by name, the same on all ranks; does not change the model."""

Train = Mapping[Part, Callable[[float], tuple[nn.Module, Evaluate]]]
"""By ``"columns"`` and ``"rows"`` what trains a model whose tables have a fraction of their
columns, or whose ids are hashed into a fraction of their rows, and returns it with what evaluates
it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of an attempt: the bytes of its tables once they are served, and its
    metrics."""

    attempt: Attempt
    bytes: int
    metrics: Mapping[str, float]


class Measurements:
    """Measures what attempts would serve of a trained model. Collective, as all that it does.

    Args:
        model: a DistributedModelParallel, a DDP module or any module; it is not changed.
        evaluate: called with ``model`` while its tables hold what is served.
        train: what trains the models of attempts that need another.
        file: to which a line is added for each attempt, on rank 0; those of an earlier run are not
            measured again, if the weights, and the metrics of the model as it is, were the same.

    Attributes:
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
        train: Train = MappingProxyType({}),
        file: Path | None = None,
    ) -> None:
        self._world = group_over(world_ranks())
        self._whole, self._train = (model, evaluate), train
        self._file = file if self._world.rank == 0 else None
        with self._world.agreeing("measuring a model") as facts:
            self.tables = _shapes(model)
            # Of weights that are not finite no metric says which.
            check_range(model_source(model).locate(), "fp32")
            facts["tables"] = [[table.name, table.shape, str(table.dtype)] for table in self.tables]
        self.table_bytes = dense_bytes(self.tables)
        self.full = self._metrics(model, evaluate)
        self._fingerprint = self._hash()
        self._done = self._read()
        self._other: tuple[tuple[Part, float], tuple[nn.Module, Evaluate]] | None = None

    def __call__(self, attempts: Sequence[Attempt], title: str) -> list[Measured]:
        """Return what was measured of each attempt, in their order; shows a bar of tqdm's on a
        terminal."""
        new = {_key(attempt): attempt for attempt in attempts if _key(attempt) not in self._done}
        with _bar(len(new), title, shown=self._world.rank == 0) as advance:
            # Each model once.
            for attempt in sorted(new.values(), key=lambda each: each.trained or ("", 0.0)):
                self._measure(attempt)
                advance()
        return [Measured(attempt=attempt, **self._done[_key(attempt)]) for attempt in attempts]

    def _measure(self, attempt: Attempt) -> None:
        model, evaluate = (
            self._whole if attempt.trained is None else self._trained(*attempt.trained)
        )
        tables = self.tables if attempt.trained is None else _shapes(model)
        with serving(model, attempt.candidate):
            metrics = self._metrics(model, evaluate)
        found = {"bytes": attempt.candidate.served_bytes(tables).total, "metrics": metrics}
        self._done[_key(attempt)] = found
        with self._world.agreeing("writing the file of trials"):
            if self._file is not None:
                with self._file.open("a") as stream:
                    stream.write(
                        json.dumps({"model": self._fingerprint, **asdict(attempt), **found}) + "\n"
                    )

    def _trained(self, part: Part, share: float) -> tuple[nn.Module, Evaluate]:
        """The model with a part of the tables; the last one is kept."""
        if self._other is None or self._other[0] != (part, share):
            self._other = None  # before there are two
            self._other = (part, share), self._train[part](share)
        return self._other[1]

    def _metrics(self, model: nn.Module, evaluate: Evaluate) -> dict[str, float]:
        with self._world.agreeing("evaluate()") as facts:
            found = evaluate(model)
            if not isinstance(found, Mapping) or not found:
                raise ValueError(f"evaluate() returned {found!r}; must return metrics by name.")
            try:
                metrics = {str(name): float(value) for name, value in found.items()}
            except (TypeError, ValueError):
                raise ValueError(
                    f"evaluate() returned {found!r}; values must be numbers."
                ) from None
            for name, value in metrics.items():
                if not math.isfinite(value):
                    raise ValueError(f"evaluate() returned {name}={value}; must be finite.")
            facts["metrics"] = metrics
        return metrics

    def _hash(self) -> str:
        """A hash of the tables' weights and of the metrics."""
        mine = [
            f"{data.name} {shard.rect} {hash_tensor(shard.tensor)}"
            for data in model_source(self._whole[0]).locate()
            for shard in data.shards
            if shard.rect in data.owned(rank_in(data.ranks))
        ]
        known = [
            self._world.all_gather_json(mine),
            {name: f"{value:.5g}" for name, value in self.full.items()},
        ]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def _read(self) -> dict[str, dict[str, Any]]:
        """What the file says of this model, by key."""
        found: dict[str, Any] = {}
        with self._world.agreeing("reading the file of trials"):
            lines = (
                self._file.read_text().splitlines()
                if self._file is not None and self._file.exists()
                else []
            )
            for text in lines:
                try:
                    line = json.loads(text)
                except ValueError:  # cut off when the run was interrupted
                    continue
                if isinstance(line, dict) and line.get("model") == self._fingerprint:
                    found[_key(line)] = {"bytes": line["bytes"], "metrics": line["metrics"]}
        told: Any = self._world.all_gather_json(found)[0]
        return dict(told)


def _shapes(model: nn.Module) -> list[TableShape]:
    return [TableShape(data.name, data.shape, data.dtype) for data in model_source(model).locate()]


def _key(attempt: Attempt | Mapping[str, Any]) -> str:
    """What tells attempts apart, as text."""
    fields = asdict(attempt) if isinstance(attempt, Attempt) else attempt
    return json.dumps([fields["candidate"], fields["trained"]], sort_keys=True)


@contextmanager
def _bar(total: int, title: str, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function that counts one: on a terminal with a bar of tqdm's, if tqdm is
    installed."""
    if (
        not shown
        or not total
        or not sys.stderr.isatty()
        or importlib.util.find_spec("tqdm") is None
    ):
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(total=total, desc=title) as bar:
        yield bar.update
