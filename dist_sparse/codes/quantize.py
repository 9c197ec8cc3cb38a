"""Tables that train through codes: `quantize()`, and the handle that fits books by a schedule.

Books are the same on every rank. Codes are stored beside their rows, and follow from the books and
the weights of the moment at which they were last assigned: another moment than that of a
checkpoint, so that it holds codes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.checks import digest, integer, number
from dist_sparse.codes.books import ENTRIES, assign, fit, refit
from dist_sparse.codes.lookups import Attached, CodedShard
from dist_sparse.compaction.moving import sparsifier_of
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, Shard, ShardedData, resolve_block
from dist_sparse.text import count, number_of, shape_text, size, table_lines
from dist_sparse.training.sparsify import SparseTraining

LEAST_ROWS: Final = 20_000
"""Smaller tables are refused: of 64 columns, their books of 32 KiB take more than a byte a row."""

_KEYS: Final = {"step", "schedule", "fitted", "books", "codes"}


def quantize(
    model: nn.Module,
    optimizer: Any,
    *,
    codes: int | Mapping[str, int],
    begin: int,
    end: int | None = None,
    every: int = 1000,
    commitment: float = 0.0,
    sparse: SparseTraining | BaseDataSparsifier | None = None,
) -> CodedTraining:
    """Train tables through codes: product quantization in place. Collective: every rank of the
    world must call it.

    From step ``begin`` on, each lookup returns rows that were decoded: one byte for each group of
    columns, the number of one of 256 entries of a book. Gradients go straight through to the table
    of floats, which its optimizer trains as before. Due steps refit the books, one round of
    Lloyd's over all rows, and assign the codes again. Books and codes are the same on every
    sharding and number of ranks. ``export(model, handle, path, dtype="codes")`` writes what lookups
    return, bit for bit. Codes take ``codes`` bytes a row beside the floats. A row of zeros, such as
    a removed one, decodes to exactly 0.

    Args:
        model: a DistributedModelParallel, a DDP module or any module, as it is trained: wrap it
            first.
        optimizer: the optimizer that steps it, or a sequence of all of them, as of
            :func:`~dist_sparse.sparsify`. It steps the floats as before.
        codes: bytes of a row, a divisor of the table's columns: of all tables, or by the names of
            the tables that have codes.
        begin: the first step at which books and codes change; steps count from 0.
        end: the last one. After it they stay as they are, so that other layers fit to them; None
            goes on for good.
        every: steps between two changes. An assignment costs some 3 us a row of 64 columns on one
            CPU thread: 8 times an epoch are enough.
        commitment: factor of half the squared distance between the floats and the decoded rows that
            a lookup returns, in the loss. **If the loss has an L2 of lookups, pass its factor**:
            L2 acts on floats then, as it does without codes. Otherwise it shrinks the decoded rows
            alone, and floats drift away from them. 0 suits optimizers with weight decay.
        sparse: what sparsifies the same tables, by whole rows. Its ``step()`` comes first.

    Returns:
        A handle with ``step()``, to be called after each optimizer step, ``summary()``,
        ``state_dict()``, ``load_state_dict()`` and ``detach()``.

    Raises:
        ValueError: an argument is invalid; a table has fewer than 20,000 rows, or columns that
            ``codes`` does not divide; shards cut a group of columns; something else than sums,
            means or rows is read of a table; masks remove parts of rows, or rotate tables still. On
            every rank, and nothing is attached.

    Source: Jégou et al., Product quantization for nearest neighbor search, 2011.

    Example::

        >>> import torch
        >>> from dist_sparse import quantize
        >>> model = torch.nn.EmbeddingBag(20_000, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with quantize(model, optimizer, codes=2, begin=0, end=0) as handle:
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.arange(100).view(2, 50)).sum().backward()
        ...         optimizer.step()
        ...         handle.step()
        ...     row = model(torch.tensor([[7]]))
        ...     code = handle.coded()["weight"].shards[0].tensor[7]
        ...     books = handle.books["weight"]
        >>> books.shape, torch.equal(row[0, :4], books[0, int(code[0])].float())
        (torch.Size([2, 256, 4]), True)
    """
    world = group_over(world_ranks())
    with world.agreeing("quantize()") as facts:
        schedule = Window(begin=begin, end=end, every=every)
        pull = number("commitment", commitment, least=0)
        sparsifier = None if sparse is None else sparsifier_of(sparse)
        source = ModelTables(model)
        located = {data.name: data for data in source.locate()}
        groups = _groups_of(codes, located)
        located = {name: located[name] for name in groups}
        if sparsifier is not None:
            _refuse_masks(sparsifier, located)
        facts["begin, end, every"] = asdict(schedule)
        facts["codes, commitment, sparse"] = [groups, pull, sparsifier is not None]
    handle = CodedTraining(source, groups, schedule, pull, sparsifier)
    try:
        with world.agreeing("quantize()"):
            handle.attach()
    except BaseException:
        # Another rank may have refused.
        handle.detach()
        raise
    return handle


class CodedTraining(AbstractContextManager["CodedTraining"]):
    """Codes of tables, their books, and the hooks on lookups; made by
    :func:`~dist_sparse.quantize`.

    As a context manager it detaches at the end of the block.

    Attributes:
        books: of each table, float16 ``(groups, 256, columns of a group)``; zeros before the first
            fit.
        sparsifier: of the masks of the same tables, or None.
    """

    def __init__(
        self,
        source: ModelTables,
        groups: Mapping[str, int],
        schedule: Window,
        commitment: float,
        sparsifier: BaseDataSparsifier | None,
    ) -> None:
        self.sparsifier = sparsifier
        self._source, self._groups = source, groups
        self._schedule, self._commitment = schedule, commitment
        self._step, self._is_fitted = 0, False
        self._masks_version: int | None = None
        self._attached: Attached | None = None
        self.books = {}
        for data in self._located():
            self.books[data.name] = torch.zeros(self._book_shape(data), dtype=torch.float16)

    def step(self) -> None:
        """Call after each optimizer step, and after the ``step()`` of what sparsifies the model:
        fit books and assign codes when the schedule says so. Collective then, otherwise local.

        Raises:
            ValueError: weights are not finite, or shards cut a group of columns; on every rank, and
                nothing has changed.
            RuntimeError: the handle is detached.
        """
        attached = self._while_attached()
        version = None if self.sparsifier is None else self.sparsifier.masks.tables.version
        if self._schedule.updates(self._step):
            self._fit()
        elif version != self._masks_version:
            self._settle()
            for shard, weight in self._weights(attached):
                # A row that was just removed decodes to zeros.
                shard.codes.mul_(weight.any(1, keepdim=True))
        self._masks_version = version
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return schedule, books and codes, for torch.save (of each rank's own) and
        torch.distributed.checkpoint, which loads it on any sharding. Local; changes nothing.

        Raises:
            RuntimeError: the handle is detached.
        """
        return {
            "step": self._step,
            "schedule": asdict(self._schedule),
            "fitted": self._is_fitted,
            "books": {name: books.clone() for name, books in self.books.items()},
            "codes": {name: _chunked(codes) for name, codes in self._coded().items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, before or after the state of the model; its schedule replaces
        the arguments of :func:`~dist_sparse.quantize`. Collective.

        Raises:
            ValueError: it is of other tables, codes or columns, or differs between ranks; on every
                rank, and nothing has changed.
            RuntimeError: the handle is detached.
        """
        attached = self._while_attached()
        with group_over(world_ranks()).agreeing("load_state_dict()") as facts:
            if not isinstance(state_dict, Mapping) or set(state_dict) != _KEYS:
                raise ValueError(f"Invalid state of codes: it must have the keys {sorted(_KEYS)}.")
            step, fitted = state_dict["step"], state_dict["fitted"]
            schedule = Window(**state_dict["schedule"])
            books = {}
            for data in self._located():
                saved = state_dict["books"].get(data.name)
                books[data.name] = _checked_books(data.name, saved, self._book_shape(data))
            pieces = []
            for name, table in self._coded().items():
                pieces += _pieces_of(table, state_dict["codes"].get(name))
            facts["step, schedule"] = [step, asdict(schedule), fitted]
            facts["books"] = {name: digest(each.tolist()) for name, each in books.items()}
        for codes, piece in pieces:
            codes.copy_(piece)
        self._step, self._schedule, self._is_fitted, self.books = step, schedule, fitted, books
        attached.use(books if fitted else None)

    def detach(self) -> None:
        """Return floats from lookups again. Books stay, codes do not."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    def summary(self) -> str:
        """Return a text table of the tables and their bytes. Local."""
        head = ("table", "shape", "codes x columns", "floats", "codes", "books")
        lines = []
        for data in self._located():
            groups, _, width = self._book_shape(data)
            codes, books = data.shape[0] * groups, self.books[data.name].nbytes
            sizes = map(size, (codes * width * data.dtype.itemsize, codes, books))
            lines.append((data.name, shape_text(data.shape), f"{groups} x {width}", *sizes))
        return "\n".join([repr(self), *table_lines(head, lines, right={3, 4, 5})])

    def attach(self) -> None:
        """Put hooks on all lookups, in the place of earlier ones, and assign codes by the books.
        Local.

        Raises:
            ValueError: shards cut a group of columns, or something else reads a table.
        """
        self.detach()
        located = self._located()
        self._attached = Attached(
            self._source.model, located, self._groups, self._commitment, self.attach
        )
        if self._is_fitted:
            with torch.no_grad():
                self._settle()
                for shard, weight in self._weights(self._attached):
                    assign(weight, self.books[shard.name][shard.groups], shard.codes)
            self._attached.use(self.books)

    def coded(self) -> dict[str, ShardedData]:
        """Return the codes that lookups decode, as tables of bytes ``(rows, groups)`` that are
        sharded as the weights. Local.

        Raises:
            ValueError: there are none, before the first fit or after :meth:`detach`.
        """
        if self._attached is None or not self._is_fitted:
            raise ValueError(f"There are no codes to export: {self!r}.")
        return self._coded()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        tables = number_of(len(self._groups), "table")
        return f"CodedTraining(step {self._step}, {tables}, {self._schedule})"

    def _located(self) -> list[ShardedData]:
        return self._source.locate(self._groups)

    def _weights(self, attached: Attached) -> Iterator[tuple[CodedShard, Tensor]]:
        """Yield this rank's shards with their weights."""
        held = {data.name: dict(data.shards) for data in self._located()}
        for shard in attached.shards:
            yield shard, held[shard.name][shard.rect]

    def _while_attached(self) -> Attached:
        if self._attached is None:
            raise RuntimeError("The codes are detached: call quantize() again.")
        self._attached.follow()
        return self._attached

    def _book_shape(self, data: ShardedData) -> tuple[int, int, int]:
        groups = self._groups[data.name]
        return groups, ENTRIES, data.shape[1] // groups

    def _coded(self) -> dict[str, ShardedData]:
        attached = self._while_attached()
        found = {}
        for data in self._located():
            codes = attached.codes(data.name)
            groups, _, width = self._book_shape(data)
            tiling = [tuple(_in_groups(rect, width) for rect in held) for held in data.tiling]
            shards = []
            for rect, _ in data.shards:
                shards.append(Shard(_in_groups(rect, width), codes[rect]))
            found[data.name] = replace(
                data,
                shape=(data.shape[0], groups),
                dtype=torch.uint8,
                tiling=tuple(tiling),
                shards=tuple(shards),
            )
        return found

    def _settle(self) -> None:
        """Zero removed weights that an optimizer has written since."""
        if self.sparsifier is not None:
            self.sparsifier.masks.hooks.settle()

    @torch.no_grad()
    def _fit(self) -> None:
        """Fit the books and assign the codes. Collective."""
        with group_over(world_ranks()).agreeing("step()") as facts:
            facts["step, schedule"] = [self._step, asdict(self._schedule)]
            attached = self._while_attached()
            self._settle()
            located = self._located()
            for data in located:
                _refuse_not_finite(data)
        for data in located:
            over, groups = group_over(data.ranks), self._groups[data.name]
            if self._is_fitted:
                books = refit(data, over, self.books[data.name], attached.codes(data.name))
            else:
                books = fit(data, over, groups)
            self.books[data.name] = books
        self._is_fitted = True
        self.attach()


# Arguments.


def _groups_of(codes: Any, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Return the codes of a row, by table."""
    by_name = codes if isinstance(codes, Mapping) else dict.fromkeys(located, codes)
    if not by_name:
        raise ValueError(f"Invalid {codes=}: it names none of the tables {sorted(located)}.")
    if unknown := sorted(set(by_name) - set(located)):
        raise ValueError(f"Invalid {codes=}: {unknown} are none of the tables {sorted(located)}.")
    found = {}
    for name, data in located.items():
        if name not in by_name:
            continue
        rows, columns = data.shape
        if rows < LEAST_ROWS:
            raise ValueError(
                f"Table {name!r} has {count(rows)} rows, and codes are for tables of at least"
                f" {count(LEAST_ROWS)}: books of 512 bytes a column outweigh what they save."
                " codes= by name leaves other tables as they are."
            )
        found[name] = integer("codes", by_name[name], least=1, most=columns, of=name)
        if columns % found[name]:
            fits = [each for each in range(1, columns + 1) if columns % each == 0]
            raise ValueError(
                f"Invalid {codes=}: {found[name]} does not divide the {columns} columns of table"
                f" {name!r}; {fits} do."
            )
    return found


def _refuse_masks(sparsifier: BaseDataSparsifier, located: Mapping[str, ShardedData]) -> None:
    """Refuse masks that change what is left of a row."""
    for name, config in sparsifier.data_groups.items():
        if name not in located:
            continue
        block = resolve_block(name, config["sparse_block_shape"], located[name].shape)
        if block[1] < located[name].shape[1]:
            raise ValueError(
                f"Table {name!r}: sparse removes {block[0]} x {block[1]} blocks, parts of rows, and"
                " books keep whole rows at zero: compact() removed columns first."
            )


# What a step checks, and what a checkpoint holds.


def _refuse_not_finite(data: ShardedData) -> None:
    for rect, weight in data.shards:
        if not bool(torch.stack(torch.aminmax(weight)).isfinite().all()):
            raise ValueError(
                f"Table {data.name!r} has weights in {rect} that are not finite: books can't be"
                " fitted."
            )


def _in_groups(rect: Rect, width: int) -> Rect:
    """Return the rectangle of a shard's codes."""
    return rect._replace(col=rect.col // width, cols=rect.cols // width)


def _chunked(data: ShardedData) -> ChunkedTensor:
    """Return the codes of a table as a state holds them."""
    owned = data.owned(rank_in(data.ranks))
    writes, wants = [], []
    for rect, codes in data.shards:
        if rect.numel:
            wants.append(((rect.row, rect.col), (rect.rows, rect.cols)))
        if rect.numel and rect in owned:
            writes.append(((rect.row, rect.col), codes.to("cpu", copy=True)))
    return ChunkedTensor(data.shape, torch.uint8, writes, wants)


def _pieces_of(data: ShardedData, saved: Any) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's codes of a table, each with the saved ones to be copied to it."""
    pieces = saved.pieces() if isinstance(saved, ChunkedTensor) else {}
    found = []
    for rect, codes in data.shards:
        piece = pieces.get((rect.row, rect.col), codes[:0])
        if piece.shape != codes.shape:
            raise ValueError(
                f"Table {data.name!r}: the state has no codes of {rect}. Of other ranks, it must be"
                " loaded by torch.distributed.checkpoint."
            )
        found.append((codes, piece))
    return found


def _checked_books(name: str, books: Any, shape: tuple[int, int, int]) -> Tensor:
    """Return a copy of a table's books from a state."""
    fits = isinstance(books, Tensor) and (books.shape, books.dtype) == (shape, torch.float16)
    if not fits or not bool(books.isfinite().all()) or bool(books[:, 0].any()):
        raise ValueError(
            f"Table {name!r}: its books in the state must be finite torch.float16 {shape}, with"
            " zeros as entry 0."
        )
    copied: Tensor = books.detach().cpu().clone()
    return copied
