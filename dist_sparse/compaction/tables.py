"""`nn.Embedding` and `nn.EmbeddingBag` that store kept rows only, and take the ids of the whole
table.

Both are subclasses, so that optimizers, sparsifiers and state_dicts find a table of the same name
in the same place. Outputs equal the outputs of the whole table with removed rows set to zero; an id
out of range raises, as in torch.

This file also has code that must work without TorchRec: the base class by which compact collections
are recognized, and the generator of initial rows.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.ids.row_index import REMOVED, UNKNOWN, RowIndex
from dist_sparse.tables.hashing import STEP, logical_shift, mix64
from dist_sparse.tables.jagged import check_ids, offsets_fit
from dist_sparse.tables.modules import weight_name
from dist_sparse.tables.protocols import TableConfig
from dist_sparse.tables.shards import Rect

_OPTIONS = (
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
    # Only an EmbeddingBag has these.
    "mode",
    "include_last_offset",
)


def lookup_options(table: nn.Embedding | nn.EmbeddingBag) -> dict[str, Any]:
    """Return the constructor arguments that control lookups and training of a table, without
    ``padding_idx``, which is a row number."""
    return {name: getattr(table, name) for name in _OPTIONS if hasattr(table, name)}


def padding_id_of(table: nn.Embedding | nn.EmbeddingBag) -> int | None:
    """Return the id that a whole or a compact table treats as padding."""
    return getattr(table, "padding_id", table.padding_idx)


def _rows(index: RowIndex, ids: Tensor) -> Tensor:
    """Return the rows of ids, -1 where there is none."""
    check_ids(ids)
    # For an id out of range, the row after the last: torch's lookup raises there.
    rows: Tensor = index(ids)
    return rows.masked_fill(rows == UNKNOWN, index.stored)


class CompactCollection(nn.Module):
    """A TorchRec collection that stores kept rows only, in ``inner``, and takes the ids of the
    whole tables."""

    inner: nn.Module
    tables: list[TableConfig]
    weighted: bool

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return the index of each table that has removed rows."""
        raise NotImplementedError


class CompactTable(nn.Module):
    """Weights of a compact table: by row number in the parameter :attr:`stored_weight`, by id in
    :meth:`full_weight`.

    A model that reads ``table.weight`` means ids: with row numbers, top-k over all items returns
    wrong items, and a softmax over all items trains on wrong labels. So there is no ``weight``.

    Attributes:
        stored_weight: the parameter, ``(index.stored, embedding_dim)``: kept rows in ascending
            order of their ids, then the default row if there is one.
    """

    index: RowIndex
    padding_id: int | None
    stored_weight: nn.Parameter

    def _stand_in_for(self, table: nn.Embedding | nn.EmbeddingBag, index: RowIndex) -> None:
        """Take the same ids as ``table``, a whole or a compact one."""
        # The constructors of torch call it ``weight``.
        self.register_parameter("stored_weight", self._parameters.pop("weight"))
        self.stored_weight.requires_grad_(table.get_parameter(weight_name(table)).requires_grad)
        self.index = index
        # The number of ids, because models loop over it.
        self.num_embeddings = index.rows
        # In ids of the original table, unlike padding_idx, which is a row.
        self.padding_id = padding_id_of(table)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "index" in self._modules:
            raise AttributeError(
                f"A {type(self).__name__} has no weight: it stores {self.index.stored} of"
                f" {self.index.rows} rows, so ids are not its row numbers. Read full_weight(), with"
                " a row for each id, or stored_weight."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor sets ``weight`` before there is an index. A later one ties it to a layer.
        if name == "weight" and "index" in self._modules:
            raise AttributeError(
                f"Invalid weight: a {type(self).__name__} stores {self.index.stored} of"
                f" {self.index.rows} rows, and can't share a weight with a row for each id."
            )
        super().__setattr__(name, value)

    def full_weight(self) -> Tensor:
        """Return the weights by id: ``(index.rows, embedding_dim)``, of the dtype and on the device
        of the parameter.

        Removed ids have zeros, or the default row. Gradients reach the stored rows, as dense
        tensors. It is a new tensor in each call, with the memory of the table before
        :func:`~dist_sparse.compact`.

        Example::

            >>> import torch
            >>> from dist_sparse.ids.row_index import RowIndex
            >>> from dist_sparse.compaction.tables import CompactEmbedding
            >>> table = torch.nn.Embedding.from_pretrained(torch.tensor([[1.0], [2.0], [3.0]]))
            >>> kept = torch.tensor([True, False, True])
            >>> compact = CompactEmbedding(table, table.weight[kept], RowIndex.of(kept))
            >>> compact.full_weight().tolist()
            [[1.0], [0.0], [3.0]]
        """
        weight = self.stored_weight
        rows = self.index(torch.arange(self.index.rows, device=weight.device))
        [ids] = (rows >= 0).nonzero(as_tuple=True)
        zeros = weight.new_zeros(self.index.rows, weight.shape[1])
        return zeros.index_copy(0, ids, weight.index_select(0, rows[ids]))


class CompactEmbedding(CompactTable, nn.Embedding):
    """An ``nn.Embedding`` of the kept rows of another one; removed ids give zero vectors, or the
    default row.

    Args:
        table: the whole table, or a compact one; its options are kept.
        weight: its stored rows, ``(index.stored, embedding_dim)``.
        index: of the original rows.

    Example::

        >>> import torch
        >>> from dist_sparse.ids.row_index import RowIndex
        >>> from dist_sparse.compaction.tables import CompactEmbedding
        >>> table, kept = torch.nn.Embedding(4, 2), torch.tensor([False, True, False, True])
        >>> compact = CompactEmbedding(table, table.weight.data[kept], RowIndex.of(kept))
        >>> compact.stored_weight.shape, bool((compact(torch.tensor(3)) == table.weight[3]).all())
        (torch.Size([2, 2]), True)
        >>> compact(torch.tensor([[0]])).tolist()
        [[[0.0, 0.0]]]
    """

    def __init__(self, table: nn.Embedding, weight: Tensor, index: RowIndex) -> None:
        row = None
        padding_id = padding_id_of(table)
        if padding_id is not None:
            row = int(index(torch.tensor(padding_id, device=weight.device)))
        super().__init__(
            weight.shape[0],
            weight.shape[1],
            # A removed padding id reads zeros anyway.
            padding_idx=None if row == REMOVED else row,
            **lookup_options(table),
            _weight=weight,
        )
        self._stand_in_for(table, index)

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids of any shape: ``(*input.shape, embedding_dim)``.

        Raises:
            IndexError: an id is out of the range of the original table; on CUDA a device-side
                assertion.
        """
        rows = _rows(self.index, input).view(-1)
        # Only ids with a row are looked up: the gradients of the others have no row.
        [places] = (rows >= 0).nonzero(as_tuple=True)
        found = F.embedding(
            rows[places],
            self.stored_weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        out = found.new_zeros(rows.numel(), self.embedding_dim).index_copy(0, places, found)
        return out.view(*input.shape, self.embedding_dim)


class CompactEmbeddingBag(CompactTable, nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` (sum or mean) of the kept rows of another one; removed ids add nothing
    to a bag, or the default row.

    A mean divides by all ids of a bag, removed ones too, except for those equal to ``padding_idx``,
    as torch does.

    Args:
        table: the whole table, or a compact one; its options are kept.
        weight: its stored rows, ``(index.stored, embedding_dim)``.
        index: of the original rows.

    Example::

        >>> import torch
        >>> from dist_sparse.ids.row_index import RowIndex
        >>> from dist_sparse.compaction.tables import CompactEmbeddingBag
        >>> table = torch.nn.EmbeddingBag.from_pretrained(
        ...     torch.tensor([[0.0], [1.0], [0.0], [3.0]]), mode="mean"
        ... )
        >>> kept = torch.tensor([False, True, False, True])
        >>> compact = CompactEmbeddingBag(table, table.weight.data[kept], RowIndex.of(kept))
        >>> ids = torch.tensor([[0, 1], [1, 3], [0, 2]])
        >>> compact(ids).tolist() == table(ids).tolist() == [[0.5], [2.0], [0.0]]
        True
    """

    def __init__(self, table: nn.EmbeddingBag, weight: Tensor, index: RowIndex) -> None:
        super().__init__(weight.shape[0], weight.shape[1], **lookup_options(table), _weight=weight)
        self._stand_in_for(table, index)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled bags, ``(bags, embedding_dim)``; the arguments are the same as for
        ``nn.EmbeddingBag``.

        Raises:
            IndexError: an id is out of the range of the original table; on CUDA a device-side
                assertion.
            ValueError: offsets are given for bags of one length, or missing for bags in one line;
                they do not begin with 0, fall, or do not end with the number of ids (not checked on
                CUDA, as in torch). Or the weights have another shape, or the mode is ``"mean"``.
        """
        self._refuse_weights(input, per_sample_weights)
        ids, ends = input.reshape(-1), self._ends(input, offsets)
        rows = _rows(self.index, ids)
        # ``pooled``: all ids of bags except padding. ``kept``: the ids among them that have a row.
        if self.padding_id is None:
            pooled = torch.ones_like(ids, dtype=torch.bool)
        else:
            pooled = ids != self.padding_id
        kept = (rows >= 0) & pooled
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)[kept]
        sums = F.embedding_bag(
            rows[kept],
            self.stored_weight,
            _counted(kept)[ends],
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode="sum",
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=True,
        )
        if self.mode == "sum":
            return sums
        # Removed ids count as zeros: they are part of the divisor.
        return sums / _counted(pooled)[ends].diff().clamp(min=1).unsqueeze(1)

    def _ends(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Return where each bag begins among all ids, and where the last one ends:
        ``(bags + 1,)``.

        Raises:
            ValueError: see :meth:`forward`.
        """
        # A matrix has bags of one length, and torch refuses the length 0.
        if input.dim() == 2 and offsets is None and input.shape[1]:
            return torch.arange(len(input) + 1, device=input.device) * input.shape[1]
        if input.dim() != 1 or offsets is None:
            raise ValueError(
                f"Invalid input of shape {tuple(input.shape)}: must be 2-D with a column or more,"
                " or 1-D with offsets."
            )
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"Invalid offsets, {offsets.dtype} {tuple(offsets.shape)}: must be int32 or int64,"
                " 1-D."
            )
        ends = offsets
        if not self.include_last_offset:
            ends = torch.cat([offsets, offsets.new_tensor([input.numel()])])
        # On a device, the host would have to wait.
        if ends.is_cpu:
            self._refuse_offsets(ends, input.numel())
        return ends

    def _refuse_offsets(self, ends: Tensor, count: int) -> None:
        """Refuse offsets with which torch raises, or reads memory outside of the ids."""
        if not len(ends):
            raise ValueError("Invalid offsets: must be at least one, with include_last_offset.")
        # torch's kernels disagree about ids after the last offset: some add them to the last bag.
        if not offsets_fit(ends, count):
            first, last = int(ends[0]), int(ends[-1])
            end = "end with" if self.include_last_offset else "be at most"
            raise ValueError(
                f"Invalid offsets of {count} ids, from {first} to {last}: must begin with 0, never"
                f" fall, and {end} {count}."
            )

    def _refuse_weights(self, input: Tensor, weights: Tensor | None) -> None:
        """Refuse weights that torch refuses."""
        if weights is None:
            return
        if self.mode != "sum":
            raise ValueError(f"Invalid per_sample_weights: mode={self.mode!r} takes none.")
        if weights.shape != input.shape:
            raise ValueError(
                f"Invalid per_sample_weights of shape {tuple(weights.shape)}: must have the shape"
                f" of the input, {tuple(input.shape)}."
            )


def _counted(flags: Tensor) -> Tensor:
    """Return how many flags before each place are set: int64 ``(n + 1,)``."""
    return F.pad(flags.cumsum(0), (1, 0))


# Initial rows
#
# Initial weights of rows that are created during training. The generator is counter-based: each
# element is a hash of the seed, the table's name, the id and the column, and nothing else. So a row
# is the same on every sharding and number of ranks, and in any order of draws.

# Random bits of an element: 52 bits plus the half that is added fit the 53 digits of a float64.
_DIGITS = 52


# Elements drawn at a time: 24 MB of temporaries.
_DRAWN = 1 << 20


def initial_rows(
    seed: int,
    table: str,
    ids: Tensor,
    columns: Iterable[int],
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    """Return initial weights of some columns of a table's rows: float32 ``(len(ids),
    len(columns))``, on the device of ``ids``. It takes 24 bytes per element.

    Args:
        seed: any integer.
        table: the table's name; tables with different names get different weights.
        ids: int64 ``(n,)``.
        columns: column numbers in the whole table.
        bounds: ``(low, high)`` of a uniform distribution, as TorchRec draws; None for the standard
            normal distribution, as ``nn.Embedding`` draws.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.tables import initial_rows
        >>> whole = initial_rows(0, "item", torch.arange(1_000), range(8), bounds=(-0.1, 0.1))
        >>> part = initial_rows(0, "item", torch.tensor([7, 3]), range(4, 8), bounds=(-0.1, 0.1))
        >>> bool((part == whole[[7, 3], 4:]).all()), whole.shape
        (True, torch.Size([1000, 8]))
    """
    digest = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    column = torch.tensor(list(columns), dtype=torch.int64, device=ids.device)
    # SplitMix64's next number after a state, once for the id and once for the column: neither
    # neighbouring rows nor columns correlate.
    rows = mix64(ids.long() + key + STEP)[:, None]
    mixed = mix64(rows + column * STEP + STEP)
    # In the open interval (0, 1): the inverse normal distribution is infinite at both ends.
    drawn = (logical_shift(mixed, 64 - _DIGITS).double() + 0.5) / 2**_DIGITS
    if bounds is not None:
        low, high = bounds
        uniform: Tensor = (low + (high - low) * drawn).float()
        return uniform
    # In float64: devices round it differently, but the float32 is the same.
    return (math.sqrt(2) * torch.erfinv(2 * drawn - 1)).float()


def draw_rows(
    weight: Tensor,
    rect: Rect,
    places: Tensor,
    ids: Tensor,
    seed: int,
    table: str,
    bounds: tuple[float, float] | None,
) -> None:
    """Write initial weights into some rows of a part of a table, in place.

    Args:
        weight: ``(rect.rows, rect.cols)``.
        rect: which rows and columns of the table it has.
        places: rows of ``weight``, int64 ``(n,)``.
        ids: whose initial weights they get, int64 ``(n,)``.
        seed, table, bounds: as in :func:`initial_rows`.
    """
    most = max(1, _DRAWN // max(1, rect.cols))
    device = weight.device
    columns = range(rect.col, rect.col_end)
    for some, at in zip(torch.split(ids, most), torch.split(places, most), strict=True):
        drawn = initial_rows(seed, table, some.to(device), columns, bounds)
        weight[at.to(device)] = drawn.to(weight.dtype)
