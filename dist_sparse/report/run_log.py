"""Log of a run, written while it trains: :class:`RunLog` appends lines of JSON to a folder, on rank
0.

Other ranks take part in collectives only. Counts over ranks are summed in each mask update
(:class:`dist_sparse.sparsifiers.masks.Recorder`).

``run.json`` describes the run: when and how it was started, versions, config, bytes of all tables.
Every line of ``log.jsonl`` has a ``kind``:

- ``values``: ``step``, ``seconds`` since the start, and the ``values`` passed to
  :meth:`RunLog.step`;
- ``masks``: the mask update at ``step``: its ``number``, ``seconds``, ``collectives``, ``bytes``
  (of rank 0), and for each of ``tables`` the fields of
  :class:`~dist_sparse.records.MaskChange`;
- ``slots``: the update of following tables at ``step``: its ``seconds``, and for each of
  ``tables`` the fields of :class:`~dist_sparse.records.SlotChange`;
- ``validation``: the ``step`` and the ``check`` of a guard
  (:class:`~dist_sparse.records.GuardCheck`);
- ``resumed``: first line of another session, with the time that it ``started``;
- ``end``: ``tables`` as :class:`~dist_sparse.TableStats` has them, with ``dead_rows``, ``lookups``
  and ``removed_lookups``, and ``traffic`` (:class:`~dist_sparse.report.run.RowTraffic`), null
  where lookups are not counted by row; ``seconds`` by cause.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dist_sparse.checks import integer
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.records import FATES, GuardCheck, SlotUpdate, StepRecord
from dist_sparse.report.folder import LogFile, check_config, check_log, open_log
from dist_sparse.report.run import RowTraffic
from dist_sparse.report.summary import table_json
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.masks import counted_rows, knows_removed_rows, removed_lookups
from dist_sparse.tables.modules import ModelTables
from dist_sparse.text import shortened
from dist_sparse.training.sparsify import SparseTraining

_SHOWN = {
    "sparsity": "sparsity",
    "target": "target",
    "churn": "churn",
    "dead_rows": "dead_rows",
    "regrown": "regrown_blocks",
}
"""Scalars of a mask update for sinks: the name of each, and of its field."""

_LARGEST = 1e300
"""Values from here on are logged as null, like infinities: differences of two must be finite."""

_OCTAVES = 33
"""Rows without a lookup, with 1, with 2 and 3, with 4 to 7 and so on up to int32's largest."""


class Sink(Protocol):
    """Receiver of a run's numbers, such as TensorBoard.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
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
        enforcer: log its time at the end. By default that of what ``sparsify`` returned.
        slots: a :class:`~dist_sparse.FollowingTables`: log its updates until the log is closed; one
            log at a time.
        model: count the bytes of all its tables, those that are not sparsified too, so that bytes
            of runs compare.
        name: of the run in reports; that of the folder by default.
        config: JSON-able description of the run, written to ``run.json``.
        sinks: receive every number as well, on rank 0 (:mod:`dist_sparse.report.sinks`).
        resume: continue the log in the folder, if there is one.

    Raises:
        ValueError: the folder has a log and ``resume`` is False, or a log of another format, or one
            that another RunLog is writing; ``config`` is not JSON; an argument is invalid. On every
            rank; nothing is written.
        OSError: rank 0 can't write there; on several ranks a ValueError.

    Example::

        >>> import tempfile
        >>> import torch
        >>> from dist_sparse import RunLog, sparsify
        >>> from dist_sparse.report import read_run
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
        slots: Any = None,
        model: nn.Module | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        sinks: Iterable[Sink] = (),
        resume: bool = False,
    ) -> None:
        self._validations: list[GuardCheck] = []
        # What sparsify() returned holds all three.
        if isinstance(sparsifier, SparseTraining):
            enforcer = enforcer or sparsifier.enforcer
            self._validations = sparsifier.validations
            sparsifier = sparsifier.sparsifier
        world = group_over(world_ranks())
        self._writes = world.rank == 0
        with world.agreeing("RunLog()"):
            # Whatever is wrong on one rank is raised on all: none is left waiting.
            _refuse_kinds(sparsifier, enforcer)
            _refuse_slots(slots)
            self.folder, listed = Path(folder), tuple(sinks)
            if self._writes:
                check_log(self.folder, resume)
            about: dict[str, Any] = {"config": check_config(config or {}), "name": name}
            about["tables"] = {} if model is None else _table_bytes(model)
        self._file: LogFile | None = None
        # Only now, when no rank refuses its arguments, may rank 0 write.
        with world.agreeing("RunLog()"):
            if self._writes:
                self._file = open_log(self.folder, about, resume)
        self._sinks = listed if self._writes else ()
        self._enforcer, self._slots = enforcer, slots
        if slots is not None:
            slots.updates = []
        self._started = time.perf_counter()
        self._sparsifier, self._mask_seconds = sparsifier, 0.0
        self._recorder = None if sparsifier is None else sparsifier.record()
        self._last, self._closed = -1, False
        # Earlier ones are in the log of another run, or of an earlier session.
        self._validated = len(self._validations)

    def step(self, step: int, **values: float | Tensor | None) -> None:
        """Log the values of one training step, after ``sparsifier.step()``. Local.

        Mask updates since the last call are logged at this step.

        Args:
            step: larger than in the last call.
            **values: numbers or one-element tensors, such as ``loss=``; None is left out. Reading a
                tensor of a GPU waits for it. Those of rank 0 are written.

        Raises:
            ValueError: ``step`` is not an int or not larger than the last one, a value is not a
                number, or the log is closed.
        """
        if self._closed:
            raise ValueError(f"The log in {self.folder} is closed: it takes no step {step!r}.")
        # A reader takes a step that is not larger for one of a resumed run.
        step = integer("step", step, least=self._last + 1)
        given = {name: value for name, value in values.items() if value is not None}
        # On every rank: after an error on rank 0 alone the others would wait for it.
        for name, value in given.items():
            _refuse_non_number(name, value)
        self._last = step
        self._write_masks(step)
        self._write_validations(step)
        self._write_slots(step)
        if self._writes and given:
            # Only now: reading a tensor waits for the device.
            known = {name: _float(value) for name, value in given.items()}
            # JSON has neither NaN nor infinities.
            finite = {name: x if abs(x) < _LARGEST else None for name, x in known.items()}
            line = {"kind": "values", "step": step, "seconds": self._elapsed(), "values": finite}
            self._write(line)
            self._tell(step, known)

    def close(self) -> None:
        """Write what is left and the state of all tables, and detach the recorder. Further calls do
        nothing.

        Collective, like ``table_stats()`` and ``dead_rows()``.
        """
        if self._closed:
            return
        # Even where a collective fails, the recorder is detached and the file closed.
        try:
            self._write_end()
        finally:
            self._shut()

    def _write_end(self) -> None:
        seconds, tables = {}, []
        self._write_slots(self._last)
        if self._sparsifier is not None:
            self._write_masks(self._last)
            self._write_validations(self._last)
            tables = _end_of_tables(self._sparsifier)
            seconds["masks"] = self._mask_seconds
        if self._enforcer is not None:
            seconds["enforcement"] = self._enforcer.seconds
        seconds["total"] = self._elapsed()
        self._write({"kind": "end", "step": self._last, "seconds": seconds, "tables": tables})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; after an exception without collectives, because other ranks may not have one."""
        if error is None:
            self.close()
        else:
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        if self._sparsifier is not None:
            self._sparsifier.stop_recording()
        if self._slots is not None:
            self._slots.updates = None
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            # A sink is the user's code: its failure must not end training.
            except Exception as error:
                self._drop(sink, error)
        self._sinks = ()

    def _elapsed(self) -> float:
        return round(time.perf_counter() - self._started, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line)

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink.scalars(step, values)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks = tuple(other for other in self._sinks if other is not sink)
        failed = f"{type(sink).__name__} failed ({type(error).__name__}: {error})"
        warnings.warn(f"{failed}: it gets no more values.", RuntimeWarning, stacklevel=2)

    def _write_masks(self, step: int) -> None:
        """Write the mask updates since the last call."""
        # Other ranks take their records too: they would pile up.
        for record in self._recorder.take() if self._recorder else ():
            self._mask_seconds += record.seconds
            self._write({"kind": "masks", "step": step, **dataclasses.asdict(record)})
            if self._sinks:
                self._tell(step, _scalars(record))

    def _write_validations(self, step: int) -> None:
        for check in self._validations[self._validated :]:
            self._write({"kind": "validation", "step": step, "check": dataclasses.asdict(check)})
        self._validated = len(self._validations)

    def _write_slots(self, step: int) -> None:
        """Write the updates of following tables since the last call."""
        if self._slots is None:
            return
        updates, self._slots.updates = self._slots.updates, []
        for update in updates:
            self._write({"kind": "slots", "step": step, **dataclasses.asdict(update)})
            if self._sinks:
                self._tell(step, _fates(update))


def _scalars(record: StepRecord) -> dict[str, float]:
    """Return the known numbers of a mask update for sinks, by name and table."""
    found = {}
    for change in record.tables:
        for name, field in _SHOWN.items():
            if (value := getattr(change, field)) is not None:
                found[f"{name}/{change.name}"] = float(value)
    return found


def _fates(update: SlotUpdate) -> dict[str, float]:
    """Return the shares of lookups of an update for sinks, by fate and table."""
    found = {}
    for change in update.tables:
        for fate in FATES:
            found[f"{fate}/{change.name}"] = getattr(change, fate) / max(change.lookups, 1)
    return found


def _table_bytes(model: nn.Module) -> dict[str, int]:
    located = ModelTables(model, slots=True).locate()
    return {data.name: math.prod(data.shape) * data.dtype.itemsize for data in located}


def _end_of_tables(sparsifier: BaseDataSparsifier) -> list[dict[str, Any]]:
    """Return the state of all tables as JSON-able values. Collective."""
    stats, dead = sparsifier.table_stats(), sparsifier.dead_rows()
    traffic = _traffic(sparsifier)
    looked_up = removed_lookups(sparsifier.masks.tables, "RunLog.close()")
    tables = []
    for one in stats:
        table = table_json(one) | {"dead_rows": dead.get(one.name), "traffic": None}
        table["lookups"], table["removed_lookups"] = looked_up.get(one.name, (0, 0))
        if one.name in traffic:
            table["traffic"] = dataclasses.asdict(traffic[one.name])
        tables.append(table)
    return tables


def _traffic(sparsifier: BaseDataSparsifier) -> dict[str, RowTraffic]:
    """Return the traffic of the tables whose lookups are counted, if rows are on one rank or
    removed as a whole. Collective: one small all-reduce per table."""
    packed = sparsifier.masks.tables
    # The same on every rank, so all or none communicate.
    if not sparsifier.counts_lookups:
        return {}
    found = {}
    for name, data in packed.current("RunLog.close()").items():
        if not knows_removed_rows(data, packed.table(name).block):
            continue
        sums = torch.zeros(2, _OCTAVES + 1, dtype=torch.int64)
        for dead, lookups in counted_rows(packed, data):
            _add_rows(sums, dead, lookups)
        found[name] = _row_traffic(group_over(data.ranks).all_reduce(sums))
    return found


def _add_rows(sums: Tensor, dead: Tensor, lookups: Tensor) -> None:
    """Add the rows of a shard to ``sums``: of kept and of removed rows, how many by octave, and all
    their lookups."""
    # The exponent of 1 is 1, of 2 and 3 it is 2: rows without a lookup are octave 0. A count that
    # has decayed below 1 is in the first octave.
    octaves = torch.frexp(lookups).exponent.long().clamp(min=1).where(lookups > 0, 0)
    for kind, rows in enumerate((~dead, dead)):
        sums[kind, :_OCTAVES] += torch.bincount(octaves[rows], minlength=_OCTAVES)
        sums[kind, _OCTAVES] += lookups[rows].sum().round().long()


def _row_traffic(sums: Tensor) -> RowTraffic:
    # The last column is the lookups of all rows.
    kept, removed = sums.tolist()
    return RowTraffic(
        kept=kept[:-1],
        removed=removed[:-1],
        kept_lookups=kept[-1],
        removed_lookups=removed[-1],
    )


def _refuse_kinds(sparsifier: object, enforcer: object) -> None:
    """Refuse arguments of another type, and a sparsifier that is recorded already."""
    for given, kind in ((sparsifier, BaseDataSparsifier), (enforcer, MaskEnforcer)):
        if given is not None and not isinstance(given, kind):
            found = type(given).__name__
            raise ValueError(f"Invalid argument of type {found}: must be a {kind.__name__}.")
    if isinstance(sparsifier, BaseDataSparsifier) and sparsifier.masks.recorder is not None:
        raise ValueError(
            "Another RunLog, or a recorder, records this sparsifier: close that log, or call"
            " stop_recording(), first."
        )


def _refuse_slots(slots: Any) -> None:
    # Not by class: it needs torchrec.
    if slots is not None and not hasattr(slots, "updates"):
        raise ValueError(
            f"Invalid slots of type {type(slots).__name__}: must be a FollowingTables."
        )
    if slots is not None and slots.updates is not None:
        raise ValueError("Another RunLog logs these following tables: close that log first.")


def _refuse_non_number(name: str, value: object) -> None:
    """Refuse everything but numbers and one-element tensors, without reading a tensor."""
    fits = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)
    if not fits:
        raise ValueError(
            f"Invalid {name}={shortened(value)}: must be a number or a one-element tensor."
        )


def _float(value: float | Tensor) -> float:
    # torch warns where a tensor that needs a gradient is read.
    return float(value.detach() if isinstance(value, Tensor) else value)
