"""Codes in training: when books are fitted, and what a checkpoint holds.

Books are the same on every rank. Codes are stored beside their rows, and follow from the books and
the weights of the moment at which they were last assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.codes.attaching import Attached, refuse_cut_groups
from dist_sparse.codes.books import ENTRIES, Books
from dist_sparse.codes.columns import ColumnOrder
from dist_sparse.codes.fitting import fit, refit
from dist_sparse.facts import digest
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, Shard, ShardedData
from dist_sparse.text import number_of, shape_text, size, table_lines

_VERSION: Final = 1


class Schedule(NamedTuple):
    """The steps at which books are fitted and codes assigned: ``begin``, every so many after it,
    and ``end``."""

    begin: int
    end: int | None
    every: int

    def is_due(self, step: int) -> bool:
        """Return whether books and codes change at a step."""
        if step < self.begin or (self.end is not None and step > self.end):
            return False
        return step == self.end or (step - self.begin) % self.every == 0

    def __str__(self) -> str:
        until = "" if self.end is None else f" to {self.end}"
        return f"fits from {self.begin}{until} every {self.every}"


class CodedTraining:
    """Codes of tables, their books, and the hooks on lookups; made by
    :func:`~dist_sparse.quantize`.

    As a context manager it detaches at the end of the block.

    Attributes:
        groups: the codes of a row, by table.
        sparsifier: of the masks of the same tables, or None.
    """

    def __init__(
        self,
        source: ModelTables,
        groups: Mapping[str, int],
        schedule: Schedule,
        order: ColumnOrder,
        sparsifier: BaseDataSparsifier | None,
    ) -> None:
        self.groups = dict(groups)
        self.sparsifier = sparsifier
        self._source, self._schedule, self._order = source, schedule, order
        self._books: dict[str, Books] = {}
        self._step = 0
        # The next lookup assigns all codes again.
        self.stale = False
        self._masks_version = self._version_of_masks()
        self._attached: Attached | None = None

    @property
    def books(self) -> dict[str, Tensor]:
        """The books of each table: float16 ``(groups, 256, columns of a group)``; empty before the
        first fit."""
        return {name: books.entries for name, books in self._books.items()}

    def step(self) -> None:
        """Call after each optimizer step, and after the ``step()`` of what sparsifies the model:
        fit books and assign codes when the schedule says so. Collective then, otherwise local.

        Raises:
            ValueError: weights are not finite, or shards cut a group of columns; on every rank, and
                nothing has changed.
            RuntimeError: the handle is detached.
        """
        if self._attached is None:
            raise RuntimeError("The codes are detached: call quantize() again.")
        version = self._version_of_masks()
        if self._schedule.is_due(self._step):
            self._fit()
        elif version != self._masks_version:
            # A row that was just removed must decode to zeros.
            self.stale = True
        self._masks_version = version
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return books and schedule, for torch.save and torch.distributed.checkpoint: the same on
        every rank. Local, but call it on every rank, where the state of the model is saved.

        Codes are not saved. The next lookup assigns them again, from the weights of that moment, as
        it does after :meth:`load_state_dict`: training goes on as the resumed run will.
        """
        self.stale = True
        books = {
            name: {"entries": books.entries.clone(), "exponent": books.exponent}
            for name, books in self._books.items()
        }
        return {
            "version": _VERSION,
            "step": self._step,
            "schedule": list(self._schedule),
            "groups": dict(self.groups),
            "books": books,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; its schedule replaces the arguments of
        :func:`~dist_sparse.quantize`. The next lookup assigns the codes, so that the state of the
        model may be loaded before or after. Collective.

        Raises:
            ValueError: it is of other tables, codes or columns, or differs between ranks; on every
                rank, and nothing has changed.
        """
        with group_over(world_ranks()).agreeing("load_state_dict()") as facts:
            shapes = {data.name: data.shape for data in self._located()}
            step, schedule, books = _loaded(state_dict, self.groups, shapes)
            facts["step, schedule"] = [step, list(schedule)]
            facts["books"] = {name: _hash(each) for name, each in books.items()}
        self._step, self._schedule = step, schedule
        self._use(books)

    def detach(self) -> None:
        """Return floats from lookups again. Books stay, and can still be saved."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    def summary(self) -> str:
        """Return a text table of the tables and their bytes. Local."""
        head = ("table", "shape", "codes x columns", "floats", "codes", "books")
        rows = []
        for data in self._located():
            groups, (total, columns) = self.groups[data.name], data.shape
            floats = total * columns * data.dtype.itemsize
            books = ENTRIES * columns * torch.float16.itemsize
            cut = f"{groups} x {columns // groups}"
            sizes = size(floats), size(total * groups), size(books)
            rows.append((data.name, shape_text(data.shape), cut, *sizes))
        return "\n".join([repr(self), *table_lines(head, rows, right={3, 4, 5})])

    def attach(self) -> None:
        """Put hooks on all lookups, in the place of earlier ones. Local.

        Raises:
            ValueError: shards cut a group of columns, or something else reads a table.
        """
        self.detach()
        self._attached = Attached(
            self._source.model, self._located(), self.groups, self._is_ready, self.attach
        )
        self._use(self._books)

    def coded(self) -> dict[str, ShardedData]:
        """Return the codes that lookups decode, as tables of bytes ``(rows, groups)`` that are
        sharded as the weights. Local.

        Raises:
            ValueError: there are none, before the first fit or after :meth:`detach`.
        """
        attached = self._attached
        if attached is None or not self._is_ready():
            raise ValueError(f"There are no codes to export: {self!r}.")
        codes = attached.codes()
        found = {}
        for data in self._located():
            groups = self.groups[data.name]
            width = data.shape[1] // groups
            shards = []
            for (rect, _), part in zip(data.shards, codes.get(data.name, ()), strict=True):
                shards.append(Shard(_in_groups(rect, width), part))
            found[data.name] = replace(
                data,
                shape=(data.shape[0], groups),
                dtype=torch.uint8,
                tiling=tuple(
                    tuple(_in_groups(rect, width) for rect in held) for held in data.tiling
                ),
                shards=tuple(shards),
            )
        return found

    def __enter__(self) -> CodedTraining:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        parts = [
            f"step {self._step}",
            str(self._schedule),
            number_of(len(self.groups), "table"),
            "fitted" if self._books else "not fitted",
            "detached" if self._attached is None else "attached",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _located(self) -> list[ShardedData]:
        return self._source.locate(self.groups)

    def _version_of_masks(self) -> int | None:
        return None if self.sparsifier is None else self.sparsifier.masks.tables.version

    def _use(self, books: dict[str, Books]) -> None:
        """Decode by these books from the next lookup on."""
        self._books, self.stale = books, True
        if self._attached is not None and books:
            self._attached.use(books)

    def _is_ready(self) -> bool:
        """Whether rows are decoded; then all codes are assigned."""
        if self.stale and self._books and self._attached is not None:
            with torch.no_grad():
                self._settle()
                self._attached.assign(self._located(), self._books)
        self.stale = False
        return bool(self._books)

    def _settle(self) -> None:
        """Zero removed weights that an optimizer has written since."""
        if self.sparsifier is not None and self.sparsifier.masks.enforcer is not None:
            self.sparsifier.masks.enforcer.settle()

    def _fit(self) -> None:
        """Fit the books and assign the codes. Collective."""
        world = group_over(world_ranks())
        with torch.no_grad():
            with world.agreeing("step()") as facts:
                facts["step, schedule"] = [self._step, list(self._schedule)]
                located = self._located()
                for data in located:
                    refuse_cut_groups(data, self.groups[data.name])
                    _refuse_not_finite(data)
                by_name = {data.name: data for data in located}
                if not self._books:
                    self._order.refuse_element_state(by_name)
                # Codes of a moment after the last fit, such as a load, count as they will be used.
                self._is_ready()
                self._settle()
            books: dict[str, Books] = {}
            if not self._books:
                self._order.apply(by_name, self.groups)
            by_ranks: dict[tuple[int, ...] | None, list[ShardedData]] = {}
            for data in located:
                by_ranks.setdefault(data.ranks, []).append(data)
            for ranks, tables in by_ranks.items():
                over = group_over(ranks)
                if not self._books:
                    books |= fit(tables, over, self.groups)
                else:
                    assert self._attached is not None
                    books |= refit(tables, over, self._books, self._attached.codes())
            self._use(books)
            self._is_ready()


def _refuse_not_finite(data: ShardedData) -> None:
    for rect, weight in data.shards:
        for value in map(float, torch.aminmax(weight)):
            # Not ``>``, which is false for NaN.
            if not abs(value) <= torch.finfo(torch.float32).max:
                raise ValueError(
                    f"Table {data.name!r} has the value {value} in {rect}: books can't be fitted"
                    " to it."
                )


def _in_groups(rect: Rect, width: int) -> Rect:
    """Return the rectangle of a shard's codes."""
    return rect._replace(col=rect.col // width, cols=rect.cols // width)


def _hash(books: Books) -> int:
    return digest([books.exponent, books.entries.view(torch.int16).flatten().tolist()])


def _loaded(
    state: Mapping[str, Any], groups: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]
) -> tuple[int, Schedule, dict[str, Books]]:
    """Return step, schedule and books of a state that fits the tables."""
    keys = {"version", "step", "schedule", "groups", "books"}
    if not isinstance(state, Mapping) or set(state) != keys or state["version"] != _VERSION:
        raise ValueError(f"Invalid state of codes: it must have the keys {sorted(keys)}.")
    if dict(state["groups"]) != dict(groups):
        raise ValueError(
            f"The state has the codes {dict(state['groups'])}, and the model {dict(groups)}."
        )
    found = {}
    for name, entry in state["books"].items():
        expected = (groups[name], ENTRIES, shapes[name][1] // groups[name])
        entries = entry["entries"]
        if tuple(entries.shape) != expected or entries.dtype != torch.float16:
            raise ValueError(
                f"Table {name!r}: its books are {entries.dtype} {tuple(entries.shape)}, and must be"
                f" torch.float16 {expected}."
            )
        if not bool(entries.isfinite().all()) or bool(entries[:, 0].any()):
            raise ValueError(f"Table {name!r}: its books are not finite, or entry 0 is not zeros.")
        found[name] = Books(entries.detach().cpu().clone(), int(entry["exponent"]))
    if found and set(found) != set(groups):
        raise ValueError(f"The state has books of {sorted(found)}, and not of {sorted(groups)}.")
    return int(state["step"]), Schedule(*state["schedule"]), found
