"""Log of a training run: on rank 0, :class:`RunLog` appends lines of JSON to a file in a folder.

The other ranks only take part in collectives. Each mask update sums its counts over ranks
(:class:`dist_sparse.sparsifiers.masks.Recorder`).

``run.json`` describes the run: when and how it was started, versions, config, bytes of all tables.
Every line of ``log.jsonl`` has a ``kind``:

- ``values``: ``step``, ``seconds`` since the start, and the ``values`` passed to
  :meth:`RunLog.step`;
- ``masks``: the mask update at ``step``: its ``number``, ``seconds``, ``collectives``, ``bytes``
  (of rank 0), and for each of ``tables`` the fields of
  :class:`~dist_sparse.records.MaskChange`;
- ``validation``: the ``step`` and the ``check`` of a guard
  (:class:`~dist_sparse.records.GuardCheck`);
- ``resumed``: first line of another session, with the time that it ``started``;
- ``end``: ``tables`` as :class:`~dist_sparse.records.TableStats` has them, with ``dead_rows``,
  ``lookups`` and ``removed_lookups``, and ``traffic``
  (:class:`~dist_sparse.extras.report.run.RowTraffic`), null where lookups are not counted by row;
  ``seconds`` by cause.
"""

from __future__ import annotations

import math
import numbers
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dist_sparse.checks import integer
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.extras.report.folder import (
    LogFile,
    check_config,
    check_log,
    check_run_name,
    open_log,
)
from dist_sparse.extras.report.summary import table_json
from dist_sparse.extras.report.words import shortened
from dist_sparse.groups import group_over, world_group
from dist_sparse.records import GuardCheck, StepRecord
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.masks import knows_removed_rows, removed_lookups
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import printable
from dist_sparse.training.sparsify import SparseTraining

# Scalars of a mask update for sinks: their names, and the attributes of MaskChange.
_SCALARS = {
    "sparsity": "sparsity",
    "target": "target",
    "churn": "churn",
    "dead_rows": "dead_rows",
    "regrown": "regrown_blocks",
}

# Larger values are logged as null, like infinities: the report subtracts series, and the difference
# of two finite float64 may overflow.
_LARGEST = 1e300

# Bins of the histogram of rows by lookups: 0, 1, 2 to 3, 4 to 7, ... up to the bits of a count.
_OCTAVES = 33


class Sink(Protocol):
    """Receiver of a run's numbers, such as TensorBoard.

    Example::

        >>> import tempfile
        >>> from dist_sparse.extras.report import RunLog
        >>> class Printer:
        ...     def scalars(self, step, values):
        ...         print(step, values)
        ...     def close(self):
        ...         print("end")
        >>> with RunLog(tempfile.mkdtemp(), sinks=[Printer()]) as log:
        ...     log.step(7, loss=0.5)
        7 {'loss': 0.5}
        end
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step, by name."""
        ...

    def close(self) -> None:
        """Finish: no more values follow."""
        ...


class RunLog:
    """Log of one run. Every rank must make one, with the same sparsifier or none. Collective: 32
    bytes, twice.

    Args:
        folder: created if missing. One RunLog at a time writes to it; its files are readable by the
            user only.
        sparsifier: what :func:`~dist_sparse.sparsify` returned, or a sparsifier: log its mask
            updates from now on. A recorder is attached to it until the log is closed; one log at a
            time.
        enforcer: log its time at the end. By default the enforcer of what ``sparsify`` returned.
        model: count the bytes of all its tables, those that are not sparsified too, so that bytes
            of runs are comparable.
        name: the run's name in reports; by default the folder's.
        config: JSON-able description of the run, written to ``run.json``.
        sinks: receive every number as well, on rank 0 (:mod:`dist_sparse.extras.report.run_log`).
        resume: continue the log in the folder, if there is one.

    Raises:
        ValueError: the folder has a log and ``resume`` is False, or a log of another format, or one
            that another RunLog is writing; ``config`` is not JSON; an argument is invalid. On every
            rank; nothing is written.
        OSError: rank 0 can't write there; on several ranks a ValueError.

    Example::

        >>> import tempfile
        >>> import torch
        >>> from dist_sparse import sparsify
        >>> from dist_sparse.extras.report import RunLog
        >>> from dist_sparse.extras.report import read_run
        >>> model = torch.nn.EmbeddingBag(100, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparse = sparsify(model, optimizer, level=0.5, begin=0, end=2, every=1)
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder, sparse, model=model, config={"lr": 0.1}) as log:
        ...     for step in range(3):
        ...         loss = model(torch.arange(10).view(2, 5)).sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         sparse.step()
        ...         log.step(step, loss=loss)
        >>> read_run(folder).tables[0].removed_blocks
        50
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sparsifier: SparseTraining | BaseDataSparsifier | None = None,
        *,
        enforcer: MaskEnforcer | None = None,
        model: nn.Module | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        sinks: Iterable[Sink] = (),
        resume: bool = False,
    ) -> None:
        self._validations: list[GuardCheck] = []
        if isinstance(sparsifier, SparseTraining):
            enforcer = enforcer or sparsifier.enforcer
            self._validations = sparsifier.validations
            sparsifier = sparsifier.sparsifier
        world = world_group()
        self._writes = world.rank == 0
        with world.agreeing("RunLog()") as facts:
            # Inside agreeing(): an error on one rank is raised on all, so that no rank waits.
            _refuse_wrong(sparsifier, enforcer)
            check_run_name(name)
            self.folder = Path(folder)
            given_sinks = [*sinks]
            if self._writes:
                check_log(self.folder, resume)
            located: Sequence[ShardedData] = []
            if model is not None:
                located = ModelTables(model).locate()
            sizes = {data.name: math.prod(data.shape) * data.dtype.itemsize for data in located}
            if model is None and sparsifier is not None:
                located = [*sparsifier.masks.tables.locate().values()]
            self._shown = [_shown(data) for data in located]
            about = {"config": check_config(config or {}), "name": name}
            about |= {"world": world.size, "tables": sizes}
            # Mask updates and close() send what the log of a sparsifier needs.
            facts["whether there is a sparsifier"] = sparsifier is not None
        self._file: LogFile | None = None
        self._sinks: list[Sink] = []
        # Another agreement: rank 0 writes nothing before all ranks have accepted their arguments.
        with world.agreeing("RunLog()"):
            if self._writes:
                self._file = open_log(self.folder, about, resume)
                self._sinks = given_sinks
        self._enforcer = enforcer
        # An enforcer counts since it was attached, and may have more logs than this one.
        self._enforced_before = getattr(enforcer, "seconds", 0.0)
        self._sparsifier = sparsifier
        self._take_records: Callable[[], list[StepRecord]] = list
        if sparsifier is not None:
            self._take_records = sparsifier.record().take
        self._started = time.perf_counter()
        self._mask_seconds = 0.0
        self._last_step = -1
        self._closed = False
        # Earlier validations belong to another run, or to an earlier session of this one.
        self._logged_validations = len(self._validations)

    def step(self, step: int, **values: float | Tensor | None) -> None:
        """Log the values of one training step, after ``sparsifier.step()``. Local.

        Mask updates since the last call are logged at this step.

        Args:
            step: larger than in the last call.
            **values: numbers or one-element tensors, such as ``loss=``; None is left out. Reading a
                tensor of a GPU waits for it. The values of rank 0 are written.

        Raises:
            ValueError: ``step`` is not an int or not larger than the last one, a value is not a
                real number or too large for a float, or the log is closed.
        """
        if self._closed:
            raise ValueError(f"The log in {self.folder} is closed: it takes no step {step!r}.")
        # Readers treat a step that does not ascend as a repetition by a resumed session.
        step = integer("step", step, least=self._last_step + 1)
        given = {}
        for name, value in values.items():
            if value is not None:
                # On every rank: if rank 0 alone raised, the others would wait for it.
                _refuse_non_number(name, value)
                given[name] = value
        self._last_step = step
        self._write_events()
        # Reading a tensor waits for its device: only rank 0 does.
        if self._writes and given:
            scalars, finite = {}, {}
            for name, value in given.items():
                # detach(): float() of a tensor that requires a gradient warns.
                number = float(value.detach() if isinstance(value, Tensor) else value)
                scalars[name] = number
                # JSON has neither NaN nor infinities.
                finite[name] = number if abs(number) < _LARGEST else None
            self._write(kind="values", step=step, seconds=self._elapsed(), values=finite)
            self._call_sinks("scalars", step, scalars)

    def close(self) -> None:
        """Write what is left and the state of all tables, and detach the recorder. Further calls do
        nothing.

        Collective, like ``table_stats()`` and ``dead_rows()``.
        """
        if self._closed:
            return
        # If a collective fails, the recorder is detached and the file closed all the same.
        try:
            seconds, tables = {}, []
            if self._sparsifier is not None:
                with self._sparsifier.masks.tables.jointly("RunLog.close()"):
                    tables = _end_of_tables(self._sparsifier)
                # After the collectives: where warnings are errors, it may raise on rank 0 alone.
                self._write_events()
                seconds["masks"] = self._mask_seconds
            if self._enforcer is not None:
                seconds["enforcement"] = self._enforcer.seconds - self._enforced_before
            seconds["total"] = self._elapsed()
            self._write(kind="end", step=self._last_step, seconds=seconds, tables=tables)
        finally:
            self._shut()

    def __repr__(self) -> str:
        """Return the folder and the tables of the model, or of the sparsifier alone."""
        state = "closed" if self._closed else "open"
        head = f"RunLog({printable(str(self.folder))}, {state}"
        last = "none" if self._last_step < 0 else self._last_step
        return "\n".join([head, *self._shown, f"  last step: {last}", ")"])

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close. After an exception, do so without collectives: other ranks may not have raised."""
        if error is None:
            self.close()
        else:
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        if self._sparsifier is not None:
            self._sparsifier.stop_recording()
        if self._file is not None:
            self._file.close()
        self._call_sinks("close")
        self._sinks = []

    def _elapsed(self) -> float:
        return round(time.perf_counter() - self._started, 6)

    def _write(self, **line: Any) -> None:
        if self._file is not None:
            self._file.write(line)

    def _call_sinks(self, method: str, *values: Any) -> None:
        failures = []
        # Over a copy: a sink that fails is removed from the list.
        for sink in [*self._sinks]:
            try:
                getattr(sink, method)(*values)
            # Any exception: a sink is the user's code, and must not end training.
            except Exception as error:
                self._sinks.remove(sink)
                failures.append(f"{type(sink).__name__} failed ({type(error).__name__}: {error})")
        # Last: where warnings are errors, the other sinks have been called.
        for failure in failures:
            warnings.warn(f"{failure}: it gets no more values.", RuntimeWarning, stacklevel=3)

    def _write_events(self) -> None:
        """Write the mask updates and validations since the last call."""
        # On every rank, though only rank 0 writes: records that are not taken pile up.
        for record in self._take_records():
            self._mask_seconds += record.seconds
            self._write(kind="masks", step=self._last_step, **asdict(record))
            self._call_sinks("scalars", self._last_step, _scalars(record))
        for check in self._validations[self._logged_validations :]:
            self._write(kind="validation", step=self._last_step, check=asdict(check))
        self._logged_validations = len(self._validations)


def _scalars(record: StepRecord) -> dict[str, float]:
    """Return the known numbers of a mask update for sinks, by name and table."""
    scalars = {}
    for change in record.tables:
        for name, attribute in _SCALARS.items():
            value = getattr(change, attribute)
            if value is not None:
                scalars[f"{name}/{change.name}"] = float(value)
    return scalars


def _shown(data: ShardedData) -> str:
    rows, columns = data.shape
    dtype = str(data.dtype).removeprefix("torch.")
    return f"  {printable(data.name)}: {rows:,} rows, {columns} columns, {dtype}"


def _end_of_tables(sparsifier: BaseDataSparsifier) -> list[dict[str, Any]]:
    """Return the state of all tables as JSON-able values. Collective."""
    # Collectives, in this order on every rank.
    stats = sparsifier.table_stats()
    dead = sparsifier.dead_rows()
    traffic = _traffic(sparsifier)
    lookups_of = removed_lookups(sparsifier.masks.tables, "RunLog.close()")
    tables = []
    for table in stats:
        lookups, removed = lookups_of.get(table.name, (0, 0))
        tables.append(
            table_json(table)
            | {"dead_rows": dead.get(table.name), "traffic": traffic.get(table.name)}
            | {"lookups": lookups, "removed_lookups": removed}
        )
    return tables


def _traffic(sparsifier: BaseDataSparsifier) -> dict[str, dict[str, Any]]:
    """Return the fields of :class:`~dist_sparse.extras.report.run.RowTraffic` by table, for tables
    that count lookups and whose rows are on one rank or removed as a whole. Collective: one small
    all-reduce per table."""
    packed = sparsifier.masks.tables
    traffic = dict[str, dict[str, Any]]()
    # The same on every rank, so that all ranks or none communicate.
    if not sparsifier.counts_lookups:
        return traffic
    for name, data in packed.current_for("RunLog.close()").items():
        if knows_removed_rows(data, packed.table(name).block):
            # Rows: kept, removed. Columns: rows by octave, then their lookups.
            sums = torch.zeros(2, _OCTAVES + 1, dtype=torch.int64)
            for held in packed.table(name).leftmost:
                # Shards whose lookups another shard counts have no counts.
                if held.counts.numel():
                    _add_rows(sums, held.mask.dead_rows().cpu(), held.counts.cpu().double())
            kept, removed = group_over(data.ranks).all_reduce(sums).tolist()
            traffic[name] = {"kept": kept[:-1], "removed": removed[:-1]}
            traffic[name] |= {"kept_lookups": kept[-1], "removed_lookups": removed[-1]}
    return traffic


def _add_rows(sums: Tensor, dead: Tensor, lookups: Tensor) -> None:
    """Add the rows of a shard to ``sums``, int64 ``(2, _OCTAVES + 1)``.

    Args:
        dead: bool ``(rows,)``: rows without a kept weight.
        lookups: ``(rows,)``; decayed counts are not whole numbers.
    """
    # frexp: 1 has the exponent 1, 2 and 3 have 2, 4 to 7 have 3. Counts that have decayed below 1
    # belong to octave 1, and octave 0 is for rows without a lookup.
    octaves = torch.frexp(lookups).exponent.long().clamp(min=1).where(lookups > 0, 0)
    for kind, rows in enumerate((~dead, dead)):
        sums[kind, :_OCTAVES] += torch.bincount(octaves[rows], minlength=_OCTAVES)
        sums[kind, _OCTAVES] += lookups[rows].sum().round().long()


def _refuse_wrong(sparsifier: Any, enforcer: Any) -> None:
    """Refuse arguments of a wrong type, and a sparsifier that another log records."""
    wrong = "Invalid {} of type {}: must be a {}."
    if not isinstance(sparsifier, BaseDataSparsifier | None):
        raise ValueError(
            wrong.format("sparsifier", type(sparsifier).__name__, "BaseDataSparsifier")
        )
    if not isinstance(enforcer, MaskEnforcer | None):
        raise ValueError(wrong.format("enforcer", type(enforcer).__name__, "MaskEnforcer"))
    if sparsifier is not None and sparsifier.masks.recorder is not None:
        raise ValueError(
            "Another RunLog or recorder has this sparsifier: close that log, or call"
            " stop_recording()."
        )


def _refuse_non_number(name: str, value: object) -> None:
    """Refuse everything that ``float()`` does not take, without reading a tensor."""
    if isinstance(value, Tensor):
        fits = value.numel() == 1 and not value.is_complex()
    else:
        fits = isinstance(value, numbers.Real) and _fits_float(value)
    if not fits:
        raise ValueError(
            f"Invalid {name}={shortened(value)}: must be a real number that a float can hold, or a"
            " one-element tensor of real numbers."
        )


def _fits_float(value: numbers.Real) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


# ------------------------------------------------------------------------------
# Sinks of a :class:`~dist_sparse.extras.report.RunLog`.


class TensorBoardSink:
    """Writes event files for TensorBoard.

    Args:
        folder: the folder of the files.

    Raises:
        ImportError: tensorboard is not installed.

    Example::

        >>> import tempfile
        >>> from dist_sparse.extras.report import RunLog
        >>> from dist_sparse.extras.report import TensorBoardSink
        >>> with RunLog(tempfile.mkdtemp(), sinks=[TensorBoardSink(tempfile.mkdtemp())]) as log:
        ...     log.step(0, loss=0.5)
    """

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # tensorboard has no types.
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered and close the files."""
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases. Its run starts with the first values, on rank 0 alone, and ends
    with the log.

    Args:
        **settings: arguments of ``wandb.init``, such as ``project=``.

    Raises:
        ImportError: wandb is not installed.

    Example::

        >>> from dist_sparse.extras.report import WandbSink
        >>> sink = WandbSink(project="tables", mode="offline")  # doctest: +SKIP
    """

    def __init__(self, **settings: Any) -> None:
        # Now, on every rank, and not when the first values come.
        self._wandb: Any = import_module("wandb")
        self._settings = settings
        self._run: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        if self._run is None:
            self._run = self._wandb.init(**self._settings)
            # The horizontal axis. W&B's own counts calls, and ignores a step that decreases: the
            # values of a mask update may come after later steps.
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


class MLflowSink:
    """Logs to MLflow. Its run starts with the first values, on rank 0 alone, and ends with the log.

    Args:
        **settings: arguments of ``mlflow.start_run``, such as ``run_name=``.

    Raises:
        ImportError: mlflow is not installed.

    Example::

        >>> from dist_sparse.extras.report import MLflowSink
        >>> sink = MLflowSink(run_name="80% of the rows")  # doctest: +SKIP
    """

    def __init__(self, **settings: Any) -> None:
        # Now, on every rank, and not when the first values come.
        self._mlflow: Any = import_module("mlflow")
        self._settings = settings
        self._run: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        if self._run is None:
            self._run = self._mlflow.start_run(**self._settings)
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._mlflow.end_run()


# ------------------------------------------------------------------------------
# AUC and normalized entropy of a model's predictions over all ranks, by torchrec.metrics. Between
# two results nothing is sent, and nothing is read from a device.


class Quality:
    """AUC and NE of the predictions since the last result. Collective every ``every`` steps: all
    ranks must call :meth:`update` equally often.

    AUC is the area under the ROC curve. NE is the mean log loss over that of predicting the mean
    label (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, 2014, equation
    1): below 1 is better than the mean.

    Args:
        every: steps between two results, >= 1.

    Raises:
        ValueError: ``every`` is invalid.
        ImportError: torchrec is not installed, or does not load.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.report import Quality
        >>> quality = Quality(every=2)
        >>> labels = torch.tensor([0.0, 1.0])
        >>> quality.update(torch.tensor([-1.0, 2.0]), labels)
        {}
        >>> sorted(quality.update(torch.tensor([-2.0, 1.0]), labels))
        ['auc', 'ne']
    """

    def __init__(self, every: int = 100) -> None:
        self.every = integer("every", every, least=1)
        from dist_sparse.torchrec.kernels import auc_and_ne, load_metrics

        # Now, and not after `every` steps, when the run would end with the error.
        try:
            load_metrics()
        except (ImportError, OSError) as error:
            raise ImportError(
                "Quality() computes AUC and NE by TorchRec, which is not installed or does not load"
                f" ({error}). `dist-sparse doctor` prints how to install it. Without it, pass"
                " numbers of your own: RunLog.step(step, auc=...)."
            ) from error
        self._auc_and_ne = auc_and_ne
        self._steps = 0
        self._batches: list[tuple[Tensor, Tensor]] = []

    def update(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Take the logits and labels (0 or 1) of one step of this rank, ``(examples,)`` each.
        Collective at every ``every``-th call: three messages.

        Returns:
            ``{"auc": ..., "ne": ...}`` at such a call, else ``{}``:
            ``log.step(step, **quality.update(...))``.

        Raises:
            ValueError: the shapes differ; on every rank at such a call, else on this rank alone.
        """
        # First: a rank that catches an error keeps the pace of the others.
        self._steps += 1
        computes = self._steps % self.every == 0
        with world_group().agreeing("Quality.update()") if computes else nullcontext():
            if logits.shape != labels.shape:
                raise ValueError(
                    f"Invalid labels of shape {tuple(labels.shape)}: the logits have"
                    f" {tuple(logits.shape)}."
                )
        # They stay on their device: copying each batch would wait for it.
        self._batches.append((logits.detach().flatten(), labels.detach().flatten()))
        return self.compute() if computes else {}

    def compute(self) -> dict[str, float]:
        """Return AUC and NE of the examples since the last result, ``{}`` if no rank has any.
        Collective: two messages."""
        batches, self._batches = self._batches, []
        # Row 0: logits, row 1: labels.
        examples = torch.empty(2, 0, dtype=torch.float64)
        if batches:
            logits, labels = map(torch.cat, zip(*batches, strict=True))
            examples = torch.stack([logits.double(), labels.double()]).cpu()
        logits, labels = torch.cat(world_group().all_gather_parts(examples), dim=1)
        # All ranks have the same examples: all return here, or none.
        if not len(logits):
            return {}
        auc, ne = self._auc_and_ne(torch.sigmoid(logits), labels)
        return {"auc": auc, "ne": ne}
