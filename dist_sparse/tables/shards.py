"""The rectangles of a global tensor that each rank holds, and the grid of its sparse blocks.

A :class:`ShardedData` describes one tensor at one moment: its global shape, the rectangles of all
ranks and this rank's live views. It is located again for each use and never kept, because
resharding, loading and memory stashing replace the storage behind it. Nothing here communicates:
the rectangles of the other ranks come from metadata.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dist_sparse.checks import integer
from dist_sparse.tables.memory import check_memory

# TorchRec's compute kernel for tables in unified memory whose rows are cached on the device.
CACHED = "fused_uvm_caching"

# TorchRec's compute kernels whose lookups an enforcer sees.
FUSED = ("fused", "fused_uvm", CACHED)

ROW = "ROW"
"""In a block shape: the whole row, whatever the width of the table."""

COL = "COL"
"""In a block shape: the whole column, whatever the number of rows of the table."""

Block = tuple[int, int]

# Types of weights that can be scored.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Rect(NamedTuple):
    """A rectangle of a global matrix: the offset of its corner and its size, in elements."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def row_end(self) -> int:
        return self.row + self.rows

    @property
    def col_end(self) -> int:
        return self.col + self.cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def intersect(self, other: Rect) -> Rect | None:
        """Return the common rectangle, or None when it is empty."""
        row, col = max(self.row, other.row), max(self.col, other.col)
        # Negative if the rectangles are apart.
        rows = min(self.row + self.rows, other.row + other.rows) - row
        cols = min(self.col + self.cols, other.col + other.cols) - col
        return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None

    def __str__(self) -> str:
        return f"rows [{self.row}, {self.row_end}) x columns [{self.col}, {self.col_end})"


class Shard(NamedTuple):
    """A rectangle that this rank holds, and its live weights, ``(rect.rows, rect.cols)``."""

    rect: Rect
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class ShardedData:
    """One registered tensor, as it is stored over the ranks at this moment.

    Args:
        name: the name under which it was registered.
        shape: the global (rows, columns).
        dtype: of the weights.
        sharding: TorchRec's sharding type, ``"replicated"``, ``"sharded_tensor"`` or ``"dtensor"``.
        ranks: global ranks of the group that holds the tensor, in group order; ``None`` is a world
            of one.
        tiling: for each group rank the rectangles it holds, in the order of its shards; none of
            them is empty. Equal rectangles on several ranks are replicas.
        shards: this rank's shards, in the order of ``tiling[rank]``.
        kernel: TorchRec's compute kernel; None without TorchRec.
        fqn: the fully qualified name in the model; None for a tensor given by itself.
        features: the features that look the table up, in a collection of TorchRec's.
        copied: replicas are trained separately and averaged periodically (TorchRec's 2-D
            parallelism), so that they may differ; all use the masks of the first.
        merges_ids: an id that a batch has several times is looked up only once (TorchRec's index
            dedup).
        drawn: the bounds of the uniform distribution that its initial values are drawn from; None
            where another initializer is used, or none is known.
        padding: the rows of the ``padding_idx`` of each ``nn.Embedding`` that holds it.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    sharding: str
    ranks: tuple[int, ...] | None
    tiling: tuple[tuple[Rect, ...], ...]
    shards: tuple[Shard, ...]
    kernel: str | None = None
    fqn: str | None = None
    features: tuple[str, ...] = ()
    copied: bool = False
    merges_ids: bool = False
    drawn: tuple[float, float] | None = None
    padding: tuple[int, ...] = ()

    @property
    def holders(self) -> tuple[int, ...]:
        """The global ranks that hold the tensor, in group order."""
        return self.ranks or (0,)

    @cached_property
    def replicated(self) -> bool:
        """Whether any rectangle is held more than once."""
        return len(self.rects) < sum(map(len, self.tiling))

    def owned(self, rank: int) -> list[Rect]:
        """Return the rectangles that group rank ``rank`` owns: the lowest rank with a replica owns
        it."""
        return self._owned[rank]

    def grid(self, block: Block) -> Grid:
        """Return the blocks of the whole table."""
        return grid_of(Rect(0, 0, *self.shape), block)

    def with_padding(self, shard: Shard, read: Tensor) -> Tensor:
        """Return which rows of a shard lookups read, bool ``(rows,)``: the rows that a record has
        seen, and padding rows unless they are zeros. Lookups return a padding row, and no gradient
        reaches it. A record that has seen no row stays empty."""
        if not self.padding or not read.any():
            return read
        read = read.clone()
        # Only a table that each rank holds whole has such rows.
        for row in self.padding:
            read[row] |= shard.tensor[row].any()
        return read

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards; the CPU if it holds none."""
        return self.shards[0].tensor.device if self.shards else torch.device("cpu")

    @cached_property
    def _owned(self) -> list[list[Rect]]:
        return owners(self.tiling)

    @cached_property
    def has_whole_rows(self) -> bool:
        """Whether no rank holds only a part of a row."""
        return all(rect.cols == self.shape[1] for rect in self.rects)

    @cached_property
    def rects(self) -> list[Rect]:
        """The distinct rectangles over all ranks, in row-major order of their corners."""
        return sorted(set(chain(*self.tiling)))


def not_empty(rects: Iterable[Rect]) -> tuple[Rect, ...]:
    """Return the rectangles with elements. A row-wise table with fewer rows than ranks leaves the
    last ranks rectangles of zero rows."""
    return tuple([rect for rect in rects if rect.rows and rect.cols])


# Tables as they are stored now, by name.
Located = Mapping[str, ShardedData]


def whole(
    name: str,
    weight: Tensor,
    ranks: tuple[int, ...] | None = None,
    sharding: str = "replicated",
    **more: Any,
) -> ShardedData:
    """Return the data of a matrix that every rank of ``ranks`` holds whole; ``more`` are further
    arguments of :class:`ShardedData`."""
    rect = Rect(0, 0, *weight.shape)
    held = not_empty([rect])
    return ShardedData(
        name=name,
        shape=(rect.rows, rect.cols),
        dtype=weight.dtype,
        sharding=sharding,
        ranks=ranks,
        tiling=(held,) * len(ranks or (0,)),
        shards=(Shard(rect, weight),) * len(held),
        **more,
    )


def steps_in_backward(parameter: object) -> bool:
    """Whether an optimizer inside the backward updates a parameter: torch's, or a fused one."""
    # Set by torch's apply_optimizer_in_backward(), and by TorchRec on parameters that its kernels
    # update. The name is private: checked with torch 2.13 and TorchRec 1.8.
    return hasattr(parameter, "_in_backward_optimizers")


def optimizers_in_backward(parameters: Iterable[object]) -> list[Any]:
    """Return the optimizers that update parameters inside the backward; of fused ones,
    what TorchRec puts in their place."""
    return [
        optimizer
        for parameter in parameters
        for optimizer in getattr(parameter, "_in_backward_optimizers", ())
    ]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix: the last dimension is the columns, all others the
    rows. A scalar is ``(1, 1)``."""
    *rows, columns = 1, *shape
    return math.prod(rows), columns


def owners(tiling: Sequence[Sequence[Rect]]) -> list[list[Rect]]:
    """Return for each rank the rectangles that it owns: the first rank that holds a rectangle owns
    it. Every rank computes the same, as all have the same tiling."""
    seen: set[Rect] = set()
    owned = []
    for held in tiling:
        owned.append([rect for rect in dict.fromkeys(held) if rect not in seen])
        seen.update(held)
    return owned


class Source(Protocol):
    """Something registered: a model's tables, or one sharded tensor."""

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return its tensors as they are stored now. Does not communicate; the same names in the
        same order on every rank.

        Args:
            names: some of the names that the first call has returned; None is all of them.
        """

    def find(self, names: Collection[str]) -> list[ShardedData]:
        """Return tensors that were located before, as they are stored now. Does not walk the
        model."""


def resolve_block(name: str, block: object, shape: tuple[int, int]) -> Block:
    """Return a user's ``sparse_block_shape`` as two ints, with ``ROW`` and ``COL`` resolved for a
    matrix of ``shape``.

    Raises:
        ValueError: it is not two positive ints, ``(int, ROW)`` or ``(COL, int)``, or has more
            elements than an int64 can count.
    """
    try:
        sides: Any = block
        height, width = sides
        # At least 1: a table without columns or rows still needs a block. (ROW, n), (n, COL) and
        # (COL, ROW) keep a string, which integer() refuses.
        if width == ROW:
            width = max(shape[1], 1)
        elif height == COL:
            height = max(shape[0], 1)
        rows, columns = integer("rows", height, least=1), integer("columns", width, least=1)
        integer("elements", rows * columns, most=2**63 - 1)
    except (TypeError, ValueError):
        raise ValueError(
            f"Invalid sparse_block_shape={block!r} of {name!r}: must be two positive ints, (int,"
            " ROW) or (COL, int), of less than 2**63 elements."
        ) from None
    return rows, columns


def check_data(data: ShardedData) -> None:
    """Refuse what can't be sparsified.

    Raises:
        ValueError: a dtype that is not in :data:`DTYPES`, the meta device, elements that share
            memory, or shards that do not tile the shape; names the table.
    """
    if data.dtype not in DTYPES:
        raise ValueError(
            f"Table {data.name!r}: weights of type {data.dtype} are not supported; floating point"
            " ones of 16, 32 or 64 bits are."
        )
    for shard in data.shards:
        if shard.tensor.is_meta:
            raise ValueError(
                f"Table {data.name!r} is on the meta device: it has no weights yet; materialize the"
                " model first."
            )
        check_memory(data.name, shard.tensor)
    check_tiling(data)


def check_writable(data: ShardedData) -> None:
    """Refuse weights whose elements can't be zeroed in place.

    Raises:
        ValueError: a shard is a negated view, an inference tensor, or repeats memory; names the
            table.
    """
    start, end = f"Table {data.name!r}: its weights are a", "which can't be zeroed in place."
    for _, weights in data.shards:
        check_memory(data.name, weights)
        if weights.is_neg():
            raise ValueError(f"{start} negated view, {end}")
        # Torch refuses in-place writes to it outside inference mode.
        if weights.is_inference():
            raise ValueError(f"{start} tensor made in inference mode, {end}")


def check_cached(data: ShardedData, block: Block) -> Block:
    """Refuse a block that is finer than a row if the table's rows are cached on the device.

    Returns:
        The block.

    Raises:
        ValueError: names the table, the block and the rule.
    """
    if data.kernel == CACHED and block[1] < data.shape[1]:
        raise ValueError(
            f"Table {data.name!r}: the compute kernel {CACHED!r} can't zero parts of cached rows,"
            f" as blocks of {block[0]} x {block[1]} need. Use sparse_block_shape=(1, ROW), or the"
            " compute kernel 'fused_uvm'."
        )
    return block


def check_tiling(data: ShardedData) -> None:
    """Refuse rectangles that do not cover the global shape exactly once (replicas counted once).

    Raises:
        ValueError: a rectangle is out of bounds, or there is a gap or an overlap; names the table.
    """
    rects = data.rects
    # All pairs at once: with 1,000 ranks, a loop over the pairs would take long for each table.
    sides = torch.tensor(rects, dtype=torch.int64).view(-1, 4, 1)
    rows, cols, heights, widths = sides.unbind(1)
    bottoms, rights = rows + heights, cols + widths
    outside = (rows < 0) | (cols < 0) | (bottoms > data.shape[0]) | (rights > data.shape[1])
    # For each two shards, whether the first ends above the second, or left of it.
    apart = (bottoms <= rows.T) | (rights <= cols.T)
    overlapping = (~(apart | apart.T)).triu(1)
    # One fault of each kind is enough: the error names the first.
    faults = [f"the shard {rects[i]} is outside the shape {data.shape}" for i, _ in _first(outside)]
    faults += [f"the shards {rects[i]} and {rects[j]} overlap" for i, j in _first(overlapping)]
    if int((heights * widths).sum()) != math.prod(data.shape):
        faults.append(f"the shards leave a gap in {data.shape}")
    if faults:
        raise ValueError(
            f"Table {data.name!r}: {faults[0]}; shards must cover a table exactly once."
        )


def _first(flags: Tensor) -> list[list[int]]:
    """Return the indices of the first flag that is set, in a list; [] if none is."""
    places: list[list[int]] = flags.nonzero()[:1].tolist()
    return places


class Grid(Rect):
    """The sparse blocks that touch a rectangle, as a rectangle of block rows and block columns."""

    __slots__ = ()

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.numel

    @property
    def bytes(self) -> int:
        """Size of their packed bits."""
        return -(-self.blocks // 8)


# A mask update asks for the same few grids many times.
@lru_cache(4096)
def grid_of(rect: Rect, block: Block) -> Grid:
    """Return the blocks that touch ``rect``, on the grid anchored at the global (0, 0); none if it
    is empty."""
    row, col = rect.row // block[0], rect.col // block[1]
    # Rounding up the end would count the block around an empty rectangle.
    if rect.numel == 0:
        return Grid(row, col, 0, 0)
    return Grid(row, col, -(-rect.row_end // block[0]) - row, -(-rect.col_end // block[1]) - col)


def sent(values: Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor of ``values`` on a device, without waiting for it."""
    # A copy from memory that is not pinned would wait for the device.
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type != "cpu")
    return pinned.to(device, non_blocking=True)


# Sizes that budgets and plans compute with.


def index_bytes(rows: int, kept: int) -> int:
    """Return the bytes of a compact table's row index: a bit per original row, and a count per 32
    rows. A table that keeps all rows has none.

    Example::

        >>> from dist_sparse.tables.shards import index_bytes
        >>> index_bytes(1000, 900)  # 0.25 byte per row
        256
    """
    return 8 * -(-rows // 32) if kept < rows else 0


def narrow_width(kept: int, columns: int) -> int:
    """Return the width of a narrow table that keeps ``kept`` columns: a multiple of 4, as FBGEMM
    needs, or all columns."""
    return min(columns, max(4, -(-kept // 4) * 4))


def basis_bytes(columns: int, width: int) -> int:
    """Return the bytes of the float32 matrix that turns ``width`` rotated columns back into
    ``columns``."""
    return 4 * columns * width
