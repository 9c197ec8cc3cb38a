"""Tables that train through codes: `quantize()`, and the handle that fits books by a schedule.

Books are the same on every rank. Codes are stored beside their rows, and follow from the books and
the weights of the moment at which they were last assigned: another moment than that of a
checkpoint, so that it holds codes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.checks import digest, integer, number, refuse
from dist_sparse.codes.books import ENTRIES, assign, entries_at, learned, refit, sampled
from dist_sparse.compaction import tables as compact
from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.fused import collections_of, lookups_of
from dist_sparse.groups import group_over, rank_in, world_group
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.score import DataNormSparsifier
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.modules import ModelTables, collection_of
from dist_sparse.tables.protocols import LookupKernel
from dist_sparse.tables.shards import Rect, Shard, ShardedData, resolve_block
from dist_sparse.text import count, number_of, shape_text, size, table_lines
from dist_sparse.training.sparsify import SparseTraining, sparsifier_of

# Smaller tables are refused: of 64 columns, their books of 32 KiB take more than a byte a row.
LEAST_ROWS = 20_000

_KEYS = {"step", "schedule", "fitted", "books", "codes"}


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
    world = world_group()
    with world.agreeing("quantize()") as facts:
        schedule = Window(begin=begin, end=end, every=every)
        pull = number("commitment", commitment, least=0)
        sparsifier = sparsifier_or_none(sparse)
        source = ModelTables(model)
        located = {data.name: data for data in source.locate()}
        groups = _groups_of(codes, located)
        _refuse_masks(sparsifier, groups, located)
        facts["begin, end, every"] = asdict(schedule)
        facts["codes, commitment, sparse"] = [groups, pull, sparse is not None]
    handle = CodedTraining(source, groups, schedule, pull, sparsifier)
    try:
        with world.agreeing("quantize()"):
            handle.attach()
    except BaseException:
        # Another rank may have refused.
        handle.detach()
        raise
    return handle


def sparsifier_or_none(sparse: Any) -> BaseDataSparsifier:
    """Return the sparsifier of what a user has; of None one that removes nothing."""
    return DataNormSparsifier() if sparse is None else sparsifier_of(sparse)


class CodedTraining(AbstractContextManager["CodedTraining"]):
    """Codes of tables, their books, and the hooks on lookups; made by
    :func:`~dist_sparse.quantize`.

    As a context manager it detaches at the end of the block.

    Attributes:
        books: of each table, float16 ``(groups, 256, columns of a group)``; zeros before the first
            fit.
        sparsifier: of the masks of the same tables; without masks one of no tables.
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
        self._attached: Attached | None = None
        self.books: dict[str, Tensor] = {}
        for data in self._located():
            shape = groups[data.name], ENTRIES, data.shape[1] // groups[data.name]
            self.books[data.name] = torch.zeros(shape, dtype=torch.float16)

    def step(self) -> None:
        """Call after each optimizer step, and after the ``step()`` of what sparsifies the model:
        fit books and assign codes when the schedule says so. Collective then, otherwise local.

        Raises:
            ValueError: weights are not finite, or shards cut a group of columns; on every rank, and
                nothing has changed.
            RuntimeError: the handle is detached.
        """
        attached = self._while_attached()
        version = self.sparsifier.masks.tables.version
        if self._schedule.updates(self._step):
            self._fit()
        elif version != self._masks_version:
            self._settle()
            for shard in attached.shards:
                # A row that was just removed decodes to zeros.
                shard.codes.mul_(shard.weight.any(1, keepdim=True))
        self._masks_version = version
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return schedule, books and codes, for torch.save (of each rank's own) and
        torch.distributed.checkpoint, which loads it on any sharding. Local; changes nothing.

        Raises:
            RuntimeError: the handle is detached.
        """
        codes = self._while_attached().coded
        return {
            "step": self._step,
            "schedule": asdict(self._schedule),
            "fitted": self._is_fitted,
            "books": {name: books.clone() for name, books in self.books.items()},
            "codes": {name: _chunked(coded) for name, coded in codes.items()},
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
        with world_group().agreeing("load_state_dict()") as facts:
            if not isinstance(state_dict, Mapping) or set(state_dict) != _KEYS:
                raise ValueError(f"Invalid state of codes: it must have the keys {sorted(_KEYS)}.")
            step, fitted = state_dict["step"], state_dict["fitted"]
            schedule = Window(**state_dict["schedule"])
            books, pieces = {}, []
            for name, table in attached.coded.items():
                own, saved = self.books[name], state_dict["books"].get(name)
                books[name] = _checked_books(name, saved, own.shape)
                pieces += _pieces_of(table, state_dict["codes"].get(name))
            facts["step, schedule"] = [step, asdict(schedule), fitted]
            facts["books"] = {name: digest(each.tolist()) for name, each in books.items()}
        for codes, piece in pieces:
            codes.copy_(piece)
        self._step, self._schedule, self._is_fitted, self.books = step, schedule, fitted, books
        if fitted:
            attached.use(books)
        else:
            self.attach()

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
            groups, _, width = self.books[data.name].shape
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
        # It raises before anything changes.
        attached = Attached(
            self._source.model, self._located(), self._groups, self._commitment, self.attach
        )
        self.detach()
        self._attached = attached
        if self._is_fitted:
            with torch.no_grad():
                self._settle()
                for shard in attached.shards:
                    assign(shard.weight, self.books[shard.name][shard.groups], shard.codes)
            attached.use(self.books)

    def coded(self) -> dict[str, ShardedData]:
        """Return the codes that lookups decode, as tables of bytes ``(rows, groups)`` that are
        sharded as the weights. Local.

        Raises:
            ValueError: there are none before the first fit.
            RuntimeError: the handle is detached.
        """
        if not self._is_fitted:
            raise ValueError(f"There are no codes to export: {self!r}.")
        return self._while_attached().coded

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        tables = number_of(len(self._groups), "table")
        return f"CodedTraining(step {self._step}, {tables}, {self._schedule})"

    def _located(self) -> list[ShardedData]:
        return self._source.locate(self._groups)

    def _while_attached(self) -> Attached:
        if self._attached is None:
            raise RuntimeError("The codes are detached: call quantize() again.")
        self._attached.follow()
        return self._attached

    def _settle(self) -> None:
        """Zero removed weights that an optimizer has written since."""
        self.sparsifier.masks.hooks.settle()

    @torch.no_grad()
    def _fit(self) -> None:
        """Fit the books and assign the codes. Collective."""
        with world_group().agreeing("step()") as facts:
            facts["step, schedule"] = [self._step, asdict(self._schedule)]
            attached = self._while_attached()
            self._settle()
            for shard in attached.shards:
                if not bool(torch.stack(torch.aminmax(shard.weight)).isfinite().all()):
                    raise ValueError(
                        f"Table {shard.name!r} has weights in {shard.rect} that are not finite:"
                        " books can't be fitted."
                    )
        for data in self._located():
            over, name = group_over(data.ranks), data.name
            if self._is_fitted:
                self.books[name] = refit(data, over, self.books[name], attached.coded[name])
            else:
                # From here on the same on every rank: nothing has to be sent.
                self.books[name] = learned(sampled(data, over), self._groups[name])
        self._is_fitted = True
        self.attach()


def _groups_of(codes: Any, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Return the codes of a row, by table."""
    by_name = codes if isinstance(codes, Mapping) else dict.fromkeys(located, codes)
    if not by_name or not by_name.keys() <= located.keys():
        raise ValueError(f"Invalid {codes=}: must name some of the tables {sorted(located)}.")
    found = {}
    for name in sorted(by_name):
        rows, columns = located[name].shape
        if rows < LEAST_ROWS:
            raise ValueError(
                f"Table {name!r} has {count(rows)} rows, and codes are for tables of at least"
                f" {count(LEAST_ROWS)}: books of 512 bytes a column outweigh what they save."
                " codes= by name leaves other tables as they are."
            )
        found[name] = integer("codes", by_name[name], least=1, most=columns, of=name)
        if columns % found[name]:
            raise ValueError(
                f"Invalid {codes=}: {found[name]} does not divide the {columns} columns of table"
                f" {name!r}; {_divisors(columns, 1)} do."
            )
    return found


def _divisors(columns: int, of: int) -> list[int]:
    """Return the multiples of a width that divide the columns."""
    return [each for each in range(of, columns + 1, of) if columns % each == 0]


def _refuse_masks(
    sparsifier: BaseDataSparsifier, groups: Mapping[str, int], located: Mapping[str, ShardedData]
) -> None:
    """Refuse masks that change what is left of a row."""
    for name in sparsifier.data_groups.keys() & groups.keys():
        shape = sparsifier.data_groups[name]["sparse_block_shape"]
        block = resolve_block(name, shape, located[name].shape)
        if block[1] < located[name].shape[1]:
            raise ValueError(
                f"Table {name!r}: sparse removes {block[0]} x {block[1]} blocks, parts of rows, and"
                " books keep whole rows at zero: compact() removed columns first."
            )


def _in_groups(width: int, rect: Rect) -> Rect:
    """Return the rectangle of a shard's codes."""
    return rect._replace(col=rect.col // width, cols=rect.cols // width)


def _chunked(data: ShardedData) -> ChunkedTensor:
    """Return the codes of a table as a state holds them."""
    owned = data.owned(rank_in(data.ranks))
    writes, wants = [], []
    for rect, codes in data.shards:
        if rect.numel:
            wants.append(((rect.row, rect.col), (rect.rows, rect.cols)))
            if rect in owned:
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


def _checked_books(name: str, books: Any, shape: torch.Size) -> Tensor:
    """Return a copy of a table's books from a state."""
    fits = isinstance(books, Tensor) and (books.shape, books.dtype) == (shape, torch.float16)
    if not fits or not bool(books.isfinite().all()) or bool(books[:, 0].any()):
        raise ValueError(
            f"Table {name!r}: its books in the state must be finite torch.float16 {tuple(shape)},"
            " with zeros as entry 0."
        )
    return torch.clone(books.detach().cpu())


# Lookups that return decoded rows, with gradients straight through to the table of floats.
#
# A forward hook on one of TorchRec's kernels or a module of torch's puts pooled decoded rows in the
# place of pooled weights. The backward passes their gradient on to the output that the lookup
# computed, so that a fused optimizer steps as before. At the kernel, ids are local to the shard,
# whatever the sharding. Nothing waits for an accelerator.

_MODULES = (nn.Embedding, nn.EmbeddingBag, compact.CompactEmbedding, compact.CompactEmbeddingBag)


class CodedShard:
    """The codes of a shard, zeros at first, and the entries that they stand for.

    Args:
        name: of the table.
        rect: of the shard.
        weight: of the shard, live.
        width: columns of a group.

    Attributes:
        codes: live, uint8 ``(rows, groups)``.
        entries: of its groups' books; None while lookups return floats.
    """

    def __init__(self, name: str, rect: Rect, weight: Tensor, width: int) -> None:
        self.name, self.rect, self.weight = name, rect, weight
        self.groups = slice(rect.col // width, rect.col_end // width)
        groups, device = rect.cols // width, weight.device
        # The last row, of codes 0, decodes to zeros.
        self._codes = torch.zeros(rect.rows + 1, groups, dtype=torch.uint8, device=device)
        self.codes = self._codes[:-1]
        self._starts = torch.arange(groups, dtype=torch.int32, device=device) * ENTRIES
        self.entries: Tensor | None = None

    def decoded(self, rows: Tensor) -> Tensor:
        """Return decoded rows, float16 ``(n, columns)``, by their numbers."""
        assert self.entries is not None
        return entries_at(self._codes.index_select(0, rows) + self._starts, self.entries)


# A module's output of decoded rows, from its arguments and its output of floats.
_Decode = Callable[[tuple[Any, ...], dict[str, Any], Tensor], Tensor]


class Attached:
    """The codes of tables as they are stored now, and the hooks on their lookups until
    :meth:`remove`.

    Args:
        groups: codes of a row, by table.
        moved: called before a forward after a reshard, which leaves the hooks behind.

    Attributes:
        shards: of this rank.
        coded: the live codes, by table.

    Raises:
        ValueError: shards cut a group of columns, or something else reads a table; no hook is left.
    """

    def __init__(
        self,
        model: nn.Module,
        located: Sequence[ShardedData],
        groups: Mapping[str, int],
        commitment: float,
        moved: Callable[[], object],
    ) -> None:
        self._commitment, self._moved = commitment, moved
        self._by_weight: dict[tuple[int, torch.Size], CodedShard] = {}
        self.coded: dict[str, ShardedData] = {}
        for data in located:
            width = data.shape[1] // groups[data.name]
            _refuse_cut_groups(data, width)
            in_groups = partial(_in_groups, width)
            codes = []
            for rect, weight in data.shards:
                shard = CodedShard(data.name, rect, weight, width)
                self._by_weight[weight.data_ptr(), weight.shape] = shard
                codes.append(Shard(in_groups(rect), shard.codes))
            self.coded[data.name] = replace(
                data,
                shape=(data.shape[0], groups[data.name]),
                dtype=torch.uint8,
                tiling=tuple(tuple(map(in_groups, held)) for held in data.tiling),
                shards=tuple(codes),
            )
        self.shards = [*self._by_weight.values()]
        self._unread = {*self.shards}
        self._handles = ExitStack()
        self._known: dict[nn.Module, list[nn.Module]] = {}
        with ExitStack() as undo:
            undo.callback(self.remove)
            for collection in collections_of(model.modules()):
                self._known[collection] = lookups_of(collection)
                handle = collection.register_forward_pre_hook(Hook(self.follow))
                self._handles.enter_context(handle)
                for kernel in collection_of(collection).kernels():
                    self._hook_kernel(kernel)
            for path, module in model.named_modules():
                self._hook_module(path, module)
            for shard in self._unread:
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: neither a module of torch's nor a"
                    f" sharded collection of TorchRec's looks up its shard {shard.rect}."
                )
            undo.pop_all()

    def use(self, books: Mapping[str, Tensor]) -> None:
        """Decode by these books from now on, by table."""
        for shard in self.shards:
            entries = books[shard.name][shard.groups].flatten(0, 1)
            shard.entries = entries.to(shard.codes.device)

    def follow(self, *_: Any) -> None:
        """Report a reshard, which makes new lookups on every rank."""
        if any(lookups_of(each) != known for each, known in self._known.items()):
            self._moved()

    def remove(self) -> None:
        """Remove the hooks."""
        self._handles.close()

    def _hook_kernel(self, kernel: LookupKernel) -> None:
        weights = kernel.weights()
        shards = [self._by_weight.get((each.data_ptr(), each.shape)) for each in weights]
        if any(shards):
            by_feature = [(shards[each], weights[each].shape[1]) for each in kernel.features]
            decode = partial(_decode_features, by_feature, kernel.pooling)
            self._hook(kernel.module, list(filter(None, shards)), decode)

    def _hook_module(self, path: str, module: nn.Module) -> None:
        # Not the parameters that a sharded collection shows: its kernels read them.
        weights = [] if type(module) is nn.Module else module.parameters(recurse=False)
        for weight in weights:
            shard = self._by_weight.get((weight.data_ptr(), weight.shape))
            if shard is None:
                continue
            # By exact class: a subclass may do more in its forward.
            if type(module) not in _MODULES or weight.itemsize < 4:
                raise ValueError(
                    f"Table {shard.name!r} can't have codes: what looks it up, the"
                    f" {type(module).__name__} at {path!r}, must be an nn.Embedding or an"
                    " nn.EmbeddingBag of float32 or float64: serving does not round to 16 bits."
                )
            refuse_lookup(shard.name, module)
            self._hook(module, [shard], partial(_decode_module, shard, module))

    def _hook(self, module: nn.Module, shards: Sequence[CodedShard], decode: _Decode) -> None:
        self._unread.difference_update(shards)
        hook = Hook(partial(self._decode, shards[0], decode))
        # Before the hook that turns outputs of rotated tables back.
        handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
        self._handles.enter_context(handle)

    def _decode(
        self, shard: CodedShard, decode: _Decode, _: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """Return decoded rows in the place of a module's output, to which their gradient goes: a
        forward hook."""
        # Of a module's shards all have entries, or none has.
        if shard.entries is None:
            return None
        with torch.no_grad():
            decoded = decode(args, kwargs, output).view(output.shape).to(output.dtype)
        return _StraightThrough.apply(output, decoded, self._commitment)  # type: ignore[no-untyped-call]


def _refuse_cut_groups(data: ShardedData, width: int) -> None:
    columns = data.shape[1]
    for rect in data.rects:
        if rect.col % width or rect.cols % width:
            raise ValueError(
                f"Table {data.name!r}: the shard {rect} cuts a group of {width} columns. Shards of"
                f" {_divisors(columns, width)} columns fit {columns // width} codes."
            )


class _StraightThrough(torch.autograd.Function):
    """The decoded rows forward; backward the gradient, and that of ``commitment`` times half the
    squared distance between floats and decoded rows."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, decoded: Tensor, commitment: float) -> Tensor:
        if commitment:
            ctx.save_for_backward((output - decoded).mul_(commitment))
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pulls = ctx.saved_tensors
        return (grads[0] + pulls[0] if pulls else grads[0]), None, None


def _decode_features(
    by_feature: Sequence[tuple[CodedShard | None, int]],
    pooling: str,
    args: Any,
    _: Any,
    output: Any,
) -> Tensor:
    """Decode the output of one of TorchRec's kernels.

    Args:
        by_feature: the shard of each feature and its columns; None leaves its output as it is.
    """
    ids = args[0]
    if ids.variable_stride_per_key():
        raise ValueError("Codes do not support batches of another size for each feature.")
    # TorchRec has counted each feature's ids as it distributed them.
    starts, stride = ids.offset_per_key(), ids.stride()
    # Bags of features are side by side, sequences below each other.
    is_pooled = pooling != "none"
    sizes = [columns for _, columns in by_feature] if is_pooled else ids.length_per_key()
    decoded = torch.empty_like(output)
    parts = torch.split(decoded, sizes, int(is_pooled))
    floats = torch.split(output, sizes, int(is_pooled))
    for feature, (part, rows) in enumerate(zip(parts, floats, strict=True)):
        shard, mine = by_feature[feature][0], slice(starts[feature], starts[feature + 1])
        if shard is not None:
            numbers = ids.values()[mine].long()
            # FBGEMM reads row 0 for an id out of range, unless it has raised an error.
            outside = (numbers < 0) | (numbers >= shard.rect.rows)
            rows = shard.decoded(numbers.masked_fill(outside, 0))
            if is_pooled:
                ends = ids.offsets()[feature * stride : (feature + 1) * stride + 1] - mine.start
                rows = _pooled(rows, ends, pooling, ids.weights_or_none(), mine)
        part.copy_(rows)
    return decoded


def _pooled(
    rows: Tensor, ends: Tensor, pooling: str, weights: Tensor | None, mine: slice
) -> Tensor:
    """Return the sums or means of the rows of each bag, ``(bags, columns)``.

    Args:
        ends: where bags begin, and the last one ends.
        weights: a factor for each row, at ``mine``. A weighted mean is over the number of rows.
    """
    # TorchRec's kernels ignore whole numbers.
    if weights is not None and weights.is_floating_point():
        rows = rows * weights[mine].unsqueeze(1)
    # Most bags of real models have one id. A device would have to be waited for.
    if ends.is_cpu and len(rows) == len(ends) - 1 and bool((ends.diff() == 1).all()):
        return rows
    places = torch.arange(len(rows), device=rows.device)
    return F.embedding_bag(
        places, rows.float(), ends.long(), mode=pooling, include_last_offset=True
    )


def _decode_module(
    shard: CodedShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor
) -> Tensor:
    """Decode the output of an ``nn.Embedding`` or ``nn.EmbeddingBag``, compact or not."""
    given = {**dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)), **kwargs}
    ids = given.pop("input")
    numbers = ids.reshape(-1).long()
    if isinstance(module, compact.CompactTable):
        numbers = module.index(numbers).long()
        # Removed ids read the row of zeros.
        numbers = torch.where(numbers < 0, shard.rect.rows, numbers)
    rows = shard.decoded(numbers).float()
    if isinstance(module, nn.EmbeddingBag):
        given.update(mode=module.mode, include_last_offset=module.include_last_offset)
        places = torch.arange(len(rows), device=rows.device).view(ids.shape)
        rows = F.embedding_bag(places, rows, **given)
    return rows


def refuse_lookup(name: str, module: Any) -> None:
    """Refuse an embedding of torch's that returns something else than stored rows, their sums or
    means, with a ValueError that names the table."""
    padding = compact.padding_id_of(module) if isinstance(module, nn.EmbeddingBag) else None
    # max_norm would write to the table.
    has_norm, is_max = module.max_norm is not None, getattr(module, "mode", "") == "max"
    rules = {
        f"max_norm={module.max_norm} changes rows when they are looked up": has_norm,
        "mode='max' can't be served; 'sum' and 'mean' can": is_max,
        f"padding_idx={padding} of an EmbeddingBag can't be served; leave those ids out of bags": (
            padding is not None
        ),
    }
    refuse({f"Table {name!r}: {reason}.": rules[reason] for reason in rules})
