"""Tables that train through codes: `quantize()`, and the handle that fits books by a schedule.

Books are the same on every rank; codes are sharded like their rows. Codes are assigned from the
books and the weights at scheduled steps, and after a reshard. Weights train on between them, so
codes can't be recomputed from a checkpoint's weights, and the checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.checks import digest, integer, number
from dist_sparse.enforcer.enforcer import refuse_masked
from dist_sparse.extras.codes.decoding import DecodingHooks, divisors
from dist_sparse.extras.codes.learning import assign, learn_books, refit_books, sample_rows
from dist_sparse.groups import group_over, rank_in, world_group
from dist_sparse.optimizers import Optimizers, leaves
from dist_sparse.schedulers.curves import Window
from dist_sparse.serving.books import ENTRIES, LARGEST_HALF, LEAST_ROWS
from dist_sparse.serving.sources import sparsifier_or_empty
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.decoded import DECODERS, refuse_decoded, weights_of
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, ShardedData, resolve_block
from dist_sparse.text import count, number_of, shape_text, size, table_lines
from dist_sparse.training.sparsify import SparseTraining


def quantize(
    model: nn.Module,
    optimizer: Optimizers,
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

    From step ``begin`` on, each lookup returns decoded rows. Each group of columns is one byte, the
    number of one of the 256 entries of a book. Gradients go straight through to the table of
    floats, which its optimizer trains as before. Scheduled steps refit the books, one round of
    Lloyd's over all rows, and assign the codes again. Books and codes are the same on every
    sharding and number of ranks. ``export(model, handle, path, dtype="codes")`` writes what lookups
    return, bit for bit. Codes take ``codes`` bytes per row in addition to the floats. A row of
    zeros, such as a removed one, decodes to exactly 0.

    Args:
        model: a DistributedModelParallel, a DDP module or any module, as it is trained: wrap it
            first.
        optimizer: the optimizer that steps it, or a sequence of all of them, as for
            :func:`~dist_sparse.sparsify`. It steps the floats as before. ``[]`` means that all
            tables are fused.
        codes: bytes of a row, a divisor of the table's columns: one number for all tables, or by
            the names of the tables that get codes.
        begin: the first step at which books and codes change; steps count from 0.
        end: the last such step. After it books and codes are frozen, so that other layers fit to
            them; only a reshard assigns codes again. None never freezes them.
        every: steps between two fits. Assigning codes costs about 3 us per row of 64 columns on one
            CPU thread; 8 fits per epoch are enough.
        commitment: factor in the loss of half the squared distance between the floats and the
            decoded rows that a lookup returns. **If the loss of a rank has an L2 of lookups, pass
            its factor**: then L2 acts on the floats, as it does without codes, on every sharding.
            Otherwise it shrinks only the decoded rows, and floats drift away from them. Gradient
            accumulation and GradScaler do not scale it. 0 suits optimizers with weight decay.
        sparse: the sparsifier of the same tables, by whole rows; required if one is attached to
            them. Call its ``step()`` first.

    Returns:
        A handle with ``step()``, to be called after each optimizer step, ``summary()``,
        ``state_dict()``, ``load_state_dict()`` and ``detach()``.

    Raises:
        ValueError: an argument is invalid; a table has fewer than 20,000 rows, or columns that
            ``codes`` does not divide; shards cut a group of columns; a module reads anything but
            rows, their sums or their means; masks remove parts of rows, or still rotate tables; a
            table has codes already; with a commitment, a row-wise table returns means, or equal ids
            are merged (``use_index_dedup``). Raised on every rank, and nothing is attached.

    Source: Jégou et al., Product quantization for nearest neighbor search, 2011.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.codes import quantize
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
    world = world_group()
    with world.agreeing("quantize()") as facts:
        schedule = Window(begin=begin, end=end, every=every)
        factor = number("commitment", commitment, least=0)
        sparsifier = sparsifier_or_empty(sparse)
        source = ModelTables(model)
        located = {data.name: data for data in source.locate()}
        groups = _groups_of(codes, located)
        _refuse_masks(sparsifier, groups, located)
        # Two hooks would decode by different books.
        refuse_decoded(weights_of([located[name] for name in groups]))
        # Codes need no optimizer. Iterating refuses anything else, which must be a mistake.
        list(leaves(optimizer))
        facts["begin, end, every"] = asdict(schedule)
        facts["codes, commitment, sparse"] = [groups, factor, sparse is not None]
        handle = CodedTraining(source, groups, schedule, factor, sparsifier)
    try:
        with world.agreeing("quantize()"):
            handle.attach()
    except BaseException:
        # Another rank may refuse, after this one has attached its hooks.
        handle.detach()
        raise
    return handle


class CodedTraining(AbstractContextManager["CodedTraining"]):
    """Codes of tables, their books, and the hooks on lookups:
    :func:`~dist_sparse.extras.codes.quantize` returns it.

    As a context manager, it detaches at the end of the block.

    Attributes:
        books: the books of each table, float16 ``(groups, 256, columns of a group)``; zeros before
            the first fit.
        sparsifier: the owner of the masks of the same tables; without masks, a sparsifier that has
            no tables.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.codes import quantize
        >>> handle = quantize(torch.nn.EmbeddingBag(20_000, 8), [], codes=2, begin=10)
        >>> handle.books["weight"].shape, bool(handle.books["weight"].any())
        (torch.Size([2, 256, 4]), False)
    """

    def __init__(
        self,
        source: ModelTables,
        groups: Mapping[str, int],
        schedule: Window,
        commitment: float,
        sparsifier: BaseDataSparsifier,
    ) -> None:
        self.sparsifier = sparsifier
        self._source, self._groups = source, groups
        self._schedule, self._commitment = schedule, commitment
        self._step, self._is_fitted = 0, False
        self._masks_version: int | None = None
        self._hooks: DecodingHooks | None = None
        self._shapes = {data.name: data.shape for data in source.locate(groups)}
        self.books: dict[str, Tensor] = {}
        for name, (_, columns) in self._shapes.items():
            shape = groups[name], ENTRIES, columns // groups[name]
            self.books[name] = torch.zeros(shape, dtype=torch.float16)

    def step(self) -> None:
        """Call after each optimizer step, and after the ``step()`` of what sparsifies the model:
        fit books and assign codes when the schedule says so. Collective then, otherwise local.

        Raises:
            ValueError: weights are not finite or beyond float16, shards cut a group of columns, or
                a table was replaced; on every rank, and nothing has changed.
            RuntimeError: the handle is detached. (Of a fit on several ranks a ValueError, on all of
                them.)
        """
        version = self.sparsifier.masks.tables.version
        if self._schedule.updates(self._step):
            self._fit()
        else:
            hooks = self._live_hooks()
            if version != self._masks_version:
                self._clear_removed(hooks)
        self._masks_version = version
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return schedule, books and codes, for torch.save (of each rank's own) and
        torch.distributed.checkpoint, which loads it on any sharding. Local; changes nothing.

        Raises:
            RuntimeError: the handle is detached.
        """
        codes = {name: _saved_codes(data) for name, data in self._live_hooks().coded.items()}
        return {
            "step": self._step,
            "schedule": asdict(self._schedule),
            "fitted": self._is_fitted,
            "books": {name: books.clone() for name, books in self.books.items()},
            "codes": codes,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, before or after the state of the model; its schedule replaces
        the arguments of :func:`~dist_sparse.extras.codes.quantize`. Collective.

        Raises:
            ValueError: the state is of other tables, codes or columns, or differs between ranks; on
                every rank, and nothing has changed.
            RuntimeError: the handle is detached. (On several ranks a ValueError, on all of them.)
        """
        with world_group().agreeing("load_state_dict()") as facts:
            hooks = self._live_hooks()
            _refuse_foreign(state_dict, list(self.books))
            step = integer("step", state_dict["step"], least=0)
            fitted = state_dict["fitted"]
            schedule = Window(**state_dict["schedule"])
            books, copies = {}, []
            for name, table in hooks.coded.items():
                saved = state_dict["books"].get(name)
                books[name] = _copy_saved_books(name, saved, self.books[name].shape)
                copies += _match_saved_codes(table, state_dict["codes"].get(name))
            facts["step, schedule"] = [step, asdict(schedule), fitted]
            facts["books"] = {name: digest(book.tolist()) for name, book in books.items()}
            entries = hooks.entries_of(books)
            # Without books in the state lookups return floats again, which new hooks do.
            fresh = None if fitted else self._new_hooks(None)
        for codes, saved_codes in copies:
            codes.copy_(saved_codes)
        self._step, self._schedule, self._is_fitted, self.books = step, schedule, fitted, books
        if fresh is None:
            hooks.use_entries(entries)
        else:
            self._replace_hooks(fresh)

    def detach(self) -> None:
        """Make lookups return floats again. Books stay, codes are dropped."""
        if self._hooks is not None:
            self._hooks.remove()
            DECODERS.discard(self)
            self._hooks = None

    def summary(self) -> str:
        """Return a text table of the tables and their bytes. Local."""
        head = ("table", "shape", "codes x columns", "floats", "codes", "books")
        lines = []
        for data in self.located():
            groups, _, width = self.books[data.name].shape
            codes, books = data.shape[0] * groups, self.books[data.name].nbytes
            sizes = map(size, (codes * width * data.dtype.itemsize, codes, books))
            lines.append((data.name, shape_text(data.shape), f"{groups} x {width}", *sizes))
        return "\n".join([repr(self), *table_lines(head, lines, right={3, 4, 5})])

    def attach(self) -> None:
        """Replace the hooks by new ones on all lookups, and assign codes by the books. Local.

        On an error the previous hooks and codes stay.

        Raises:
            ValueError: shards cut a group of columns, or something else reads a table.
        """
        self._replace_hooks(self._new_hooks(self.books if self._is_fitted else None))

    def _new_hooks(self, books: Mapping[str, Tensor] | None) -> DecodingHooks:
        """Return new hooks on all lookups, beside the previous ones, with codes by ``books``, if
        any. Local."""
        hooks = DecodingHooks(
            self._source.model, self.located(), self._groups, self._commitment, self.attach
        )
        with ExitStack() as undo, torch.no_grad():
            undo.callback(hooks.remove)
            if books is not None:
                self.sparsifier.masks.enforcer.settle()
                for shard in hooks.shards:
                    assign(shard.weight, books[shard.name][shard.groups], shard.codes)
                hooks.use(books)
            undo.pop_all()
        return hooks

    def _replace_hooks(self, hooks: DecodingHooks) -> None:
        """Use new hooks instead of the previous ones. Can't fail."""
        self.detach()
        self._hooks = hooks
        DECODERS.add(self)

    def coded(self) -> dict[str, ShardedData]:
        """Return the codes that lookups decode, as tables of bytes ``(rows, groups)``, sharded like
        the weights. Local.

        Raises:
            ValueError: there are none before the first fit.
            RuntimeError: the handle is detached.
        """
        if not self._is_fitted:
            raise ValueError(f"There are no codes to export: {self!r}.")
        return self._live_hooks().coded

    def located(self) -> list[ShardedData]:
        """Return the tables that have codes, as they are stored now. Local.

        Raises:
            ValueError: a table is gone, or has another shape than in
                :func:`~dist_sparse.extras.codes.quantize`.
        """
        tables = self._source.locate(self._groups)
        shapes = {data.name: data.shape for data in tables}
        for name, before in self._shapes.items():
            if shapes.get(name) != before:
                now = shape_text(shapes[name]) if name in shapes else "gone"
                raise ValueError(
                    f"Table {name!r} is {now}, and was {shape_text(before)} when it got codes: call"
                    " quantize() again."
                )
        return tables

    def weights(self) -> list[Tensor]:
        """Return this rank's weights of the tables that have codes, as they are stored now."""
        # Not located(), which raises where a table is gone.
        return [weight for _, weight in weights_of(self._source.locate(self._groups))]

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        tables = number_of(len(self._groups), "table")
        return f"CodedTraining(step {self._step}, {tables}, {self._schedule})"

    @torch.no_grad()
    def _clear_removed(self, hooks: DecodingHooks) -> None:
        """Set the codes of removed rows to 0, the entry of zeros: masks were updated between two
        fits, and lookups must return zeros at once. All other codes stay."""
        self.sparsifier.masks.enforcer.settle()
        for data in self.located():
            shards = zip(data.shards, hooks.coded[data.name].shards, strict=True)
            for (_, weight), (_, codes) in shards:
                codes.mul_(weight.any(1, keepdim=True))

    def _live_hooks(self) -> DecodingHooks:
        """Return the hooks on the modules that look tables up now.

        Raises:
            RuntimeError: the handle is detached.
        """
        if self._hooks is None:
            raise RuntimeError("The codes are detached: call quantize() again.")
        # After a reshard it calls attach(), which replaces self._hooks.
        self._hooks.check_reshard()
        return self._hooks

    @torch.no_grad()
    def _fit(self) -> None:
        """Fit the books and assign the codes. Collective."""
        world = world_group()
        with world.agreeing("step()") as facts:
            facts["step, schedule"] = [self._step, asdict(self._schedule)]
            hooks = self._live_hooks()
            # The enforcer zeroes dirty rows when a lookup reads them; books are fitted to all rows.
            self.sparsifier.masks.enforcer.settle()
            tables = self.located()
            for data in tables:
                for rect, weight in data.shards:
                    _refuse_range(data.name, rect, weight)
        fitted = dict(self.books)
        with ExitStack() as undo:
            with world.jointly("step()"):
                for data in tables:
                    fitted[data.name] = self._fitted_books(data, hooks.coded[data.name])
                made = self._new_hooks(fitted)
                undo.callback(made.remove)
            # No rank has failed, so all use the new hooks.
            undo.pop_all()
        self.books, self._is_fitted = fitted, True
        self._replace_hooks(made)

    def _fitted_books(self, data: ShardedData, coded: ShardedData) -> Tensor:
        """Return the books of a table for its current weights. Collective over its ranks."""
        ranks, books = group_over(data.ranks), self.books[data.name]
        if self._is_fitted:
            books = refit_books(data, ranks, books, coded)
        # All at first. Later, groups of columns that were zero until now: a refit would keep their
        # entries at zero.
        is_empty = ~books.flatten(1).any(1)
        if is_empty.any():
            # Every rank learns from the same sample, so no books are sent.
            learned = learn_books(sample_rows(data, ranks), self._groups[data.name])
            books = torch.where(is_empty[:, None, None], learned, books)
        return books


def _groups_of(codes: Any, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Return the number of codes in a row, by table; each stands for a group of columns."""
    by_name = codes if isinstance(codes, Mapping) else dict.fromkeys(located, codes)
    if not by_name or not by_name.keys() <= located.keys():
        raise ValueError(f"Invalid {codes=}: must name some of the tables {sorted(located)}.")
    groups = {}
    for name in sorted(by_name):
        rows, columns = located[name].shape
        if rows < LEAST_ROWS:
            raise ValueError(
                f"Table {name!r} has {count(rows)} rows; below {count(LEAST_ROWS)}, codes' books"
                " take more than they save. Name larger tables in codes=."
            )
        groups[name] = integer("codes", by_name[name], least=1, most=columns, of=name)
        if columns % groups[name]:
            raise ValueError(
                f"Invalid {codes=}: {groups[name]} does not divide the {columns} columns of table"
                f" {name!r}; {divisors(columns)} do."
            )
    return groups


def _refuse_masks(
    sparsifier: BaseDataSparsifier, groups: Mapping[str, int], located: Mapping[str, ShardedData]
) -> None:
    """Refuse masks of parts of rows, because a decoded row would not be zero there, and masks of
    other sparsifiers, because their removed rows would not be zero."""
    unknown = sorted(set(sparsifier.masks.tables.names).difference(located))
    if unknown:
        raise ValueError(f"Tables {unknown} of sparse are not in this model.")
    for name in groups:
        weights = [(name, weight) for _, weight in located[name].shards]
        refuse_masked(
            weights,
            but=sparsifier.masks.enforcer,
            how="pass sparse=, what sparsify() returned for them.",
        )
    for name in sorted(sparsifier.data_groups.keys() & groups.keys()):
        shape = sparsifier.data_groups[name]["sparse_block_shape"]
        block = resolve_block(name, shape, located[name].shape)
        if block[1] < located[name].shape[1]:
            raise ValueError(
                f"Table {name!r}: sparse removes {block[0]} x {block[1]} blocks, and codes need"
                " whole rows: compact() removed columns first."
            )


def _refuse_range(name: str, rect: Rect, weights: Tensor) -> None:
    """Refuse weights that no entry of a book can hold."""
    if not weights.numel():
        return
    for weight in map(float, torch.aminmax(weights)):
        # `abs(weight) > LARGEST_HALF` would be false for NaN.
        if not abs(weight) <= LARGEST_HALF:
            raise ValueError(
                f"Table {name!r} has the weight {weight} in {rect}: entries of books are finite,"
                f" and at most {LARGEST_HALF:g}."
            )


def _refuse_foreign(state: Any, tables: list[str]) -> None:
    """Refuse what is not a state of codes, or is a state of other tables."""
    expected = {"schedule": ["begin", "end", "every"], "books": tables, "codes": tables}
    wrong = (
        f"Invalid state of codes: must have step, fitted, and mappings with the keys {expected}."
    )
    if not isinstance(state, Mapping) or set(state) != {"step", "fitted", *expected}:
        raise ValueError(wrong)
    for key, names in expected.items():
        if not isinstance(state[key], Mapping) or set(state[key]) != set(names):
            raise ValueError(wrong)
    if state["fitted"] not in (0, 1):
        raise ValueError(f"Invalid fitted={state['fitted']!r}: must be a bool.")


def _saved_codes(data: ShardedData) -> ChunkedTensor:
    """Return a copy of this rank's codes of a table, for a state."""
    # All replicas load the codes, and only their first holder saves them.
    owned = data.owned(rank_in(data.ranks))
    writes, wants = [], []
    for rect, codes in data.shards:
        if rect.numel:
            wants.append(((rect.row, rect.col), (rect.rows, rect.cols)))
            if rect in owned:
                writes.append(((rect.row, rect.col), codes.to("cpu", copy=True)))
    return ChunkedTensor(data.shape, torch.uint8, writes, wants)


def _match_saved_codes(data: ShardedData, saved: Any) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's live codes of a table, each with the saved codes to be copied to it."""
    pieces = saved.pieces() if isinstance(saved, ChunkedTensor) else {}
    copies = []
    for rect, codes in data.shards:
        # A missing piece has no rows, so its shape is refused too, unless the shard is empty.
        piece = pieces.get((rect.row, rect.col), codes[:0])
        if piece.shape != codes.shape:
            raise ValueError(
                f"Table {data.name!r}: the state has no codes of {rect}. Load a state of other"
                " ranks by torch.distributed.checkpoint."
            )
        copies.append((codes, piece))
    return copies


def _copy_saved_books(name: str, books: Any, shape: torch.Size) -> Tensor:
    """Return a copy of a table's books from a state, or refuse them with a ValueError."""
    fits = isinstance(books, Tensor) and (books.shape, books.dtype) == (shape, torch.float16)
    if not fits or not bool(books.isfinite().all()) or bool(books[:, 0].any()):
        raise ValueError(
            f"Table {name!r}: its books in the state must be finite torch.float16 {tuple(shape)},"
            " with zeros as entry 0."
        )
    return torch.clone(books.detach().cpu())
