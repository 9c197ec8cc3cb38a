"""`nn.Embedding` and `nn.EmbeddingBag` that store kept rows only, behind the ids of the whole
table.

Both are subclasses, so that optimizers, sparsifiers and state_dicts find a table of the same name
in the same place. Results are those of a table with zero rows; an id out of range raises, as it
does in torch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.compaction.row_index import RowIndex

__all__ = ["CompactEmbedding", "CompactEmbeddingBag"]


def _rows(index: RowIndex, ids: Tensor) -> Tensor:
    """The rows of ids, -1 where there is none; behind the last one for ids out of range, at which
    torch's lookup raises."""
    return torch.where((ids >= 0) & (ids < index.rows), index(ids), index.stored)


class _CompactTable(nn.Module):
    """Weights of a compact table: by row number in the parameter, by id in :meth:`full_weight`.

    A model that reads ``table.weight`` means ids: with row numbers, top-k over all items returns
    wrong items, and a softmax over all items trains on wrong labels. So reading it raises, except
    in torch's own code.
    """

    index: RowIndex

    @property
    def weight(self) -> nn.Parameter:
        """The stored rows, for torch's own code.

        Raises:
            RuntimeError: any other code reads it.
        """
        # torch looks parameters up by name, and does not compute with what it finds:
        # get_parameter(), checkpoints, load_state_dict(assign=True).
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.partition(".")[0] == "torch":
            return self.stored_weight
        raise RuntimeError(
            f"weight of a {type(self).__name__} has row numbers, not ids: it stores"
            f" {self.index.stored} of {self.index.rows} rows. Read full_weight(), which has a row"
            " for each id, in place of weight; or stored_weight, the parameter."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        is_tied = name == "weight" and isinstance(value, nn.Parameter) and "index" in self._modules
        if is_tied and len(value) != self.index.stored:
            raise ValueError(
                f"Invalid weight of {len(value)} rows: a {type(self).__name__} stores"
                f" {self.index.stored} of {self.index.rows} rows, and can't share the weight of a"
                " layer that has a row for each id."
            )
        super().__setattr__(name, value)

    @property
    def stored_weight(self) -> nn.Parameter:
        """The parameter, ``(index.stored, embedding_dim)``: kept rows in ascending order of their
        ids, then the default row if there is one."""
        found: nn.Parameter = super().__getattr__("weight")  # type: ignore[assignment]
        return found

    def full_weight(self) -> Tensor:
        """Return the weights by id: ``(index.rows, embedding_dim)``, of the dtype and on the device
        of the parameter.

        Removed ids have zeros, or the default row. Gradients reach the stored rows, as dense
        tensors. It is a new tensor in each call, with the memory of the table before
        :func:`~dist_sparse.compact`.

        Example::

            >>> import torch
            >>> from dist_sparse.compaction.row_index import RowIndex
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


class CompactEmbedding(_CompactTable, nn.Embedding):  # type: ignore[misc]
    """An ``nn.Embedding`` of the kept rows of another one; removed ids give zero vectors, or the
    default row.

    Args:
        table: the whole table, or a compact one; its options are kept.
        weight: its stored rows, ``(index.stored, embedding_dim)``.
        index: of the original rows.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.row_index import RowIndex
        >>> from dist_sparse.compaction.tables import CompactEmbedding
        >>> table, kept = torch.nn.Embedding(4, 2), torch.tensor([False, True, False, True])
        >>> compact = CompactEmbedding(table, table.weight.data[kept], RowIndex.of(kept))
        >>> compact.stored_weight.shape, bool((compact(torch.tensor(3)) == table.weight[3]).all())
        (torch.Size([2, 2]), True)
        >>> compact(torch.tensor([[0]])).tolist()
        [[[0.0, 0.0]]]
    """

    padding_id: int | None

    def __init__(self, table: nn.Embedding, weight: Tensor, index: RowIndex) -> None:
        padding_id = table.padding_id if isinstance(table, CompactEmbedding) else table.padding_idx
        padding = (
            -1 if padding_id is None else int(index(torch.tensor(padding_id, device=weight.device)))
        )
        super().__init__(
            weight.shape[0],
            weight.shape[1],
            padding_idx=padding if padding >= 0 else None,
            max_norm=table.max_norm,
            norm_type=table.norm_type,
            scale_grad_by_freq=table.scale_grad_by_freq,
            sparse=table.sparse,
            _weight=weight,
            _freeze=not table.get_parameter("weight").requires_grad,
        )
        self.index = index
        self.num_embeddings = index.rows  # ids that it looks up, as of the table before
        self.padding_id = padding_id  # of the original table; padding_idx is the row

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids of any shape: ``(*input.shape, embedding_dim)``.

        Raises:
            IndexError: an id is out of the range of the original table; on CUDA a device-side
                assertion.
        """
        rows = _rows(self.index, input).view(-1)
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


class CompactEmbeddingBag(_CompactTable, nn.EmbeddingBag):  # type: ignore[misc]
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
        >>> from dist_sparse.compaction.row_index import RowIndex
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

    padding_id: int | None

    def __init__(self, table: nn.EmbeddingBag, weight: Tensor, index: RowIndex) -> None:
        if table.mode not in ("sum", "mean"):
            raise ValueError(
                f"Invalid mode={table.mode!r}: must be 'sum' or 'mean'; removed rows would count as"
                " zeros."
            )
        super().__init__(
            weight.shape[0],
            weight.shape[1],
            max_norm=table.max_norm,
            norm_type=table.norm_type,
            scale_grad_by_freq=table.scale_grad_by_freq,
            mode=table.mode,
            sparse=table.sparse,
            _weight=weight,
            include_last_offset=table.include_last_offset,
        )
        self.stored_weight.requires_grad_(table.get_parameter("weight").requires_grad)
        self.index = index
        self.num_embeddings = index.rows  # ids that it looks up, as of the table before
        # In ids of the original table, unlike padding_idx, which is a row and stays None.
        self.padding_id = (
            table.padding_id if isinstance(table, CompactEmbeddingBag) else table.padding_idx
        )

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled bags, ``(bags, embedding_dim)``; arguments as of ``nn.EmbeddingBag``.

        Raises:
            IndexError: an id is out of the range of the original table; on CUDA a device-side
                assertion.
            ValueError: offsets are given for bags of one length, or missing for bags in one line.
        """
        if (input.dim() == 2) is (offsets is not None) or input.dim() not in (1, 2):
            raise ValueError(
                f"Invalid input of shape {tuple(input.shape)}: must be 2-D, or 1-D with offsets."
            )
        ids = input.reshape(-1)
        if offsets is None:
            ends = torch.arange(len(input) + 1, device=ids.device) * input.shape[1]
        elif self.include_last_offset:
            ends = offsets
        else:
            ends = torch.cat([offsets, offsets.new_tensor([ids.numel()])])
        rows = _rows(self.index, ids)
        pooled = (
            torch.ones_like(ids, dtype=torch.bool)
            if self.padding_id is None
            else ids != self.padding_id
        )
        kept = (rows >= 0) & pooled
        sums = F.embedding_bag(
            rows[kept],
            self.stored_weight,
            _counted(kept)[ends],
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode="sum",
            sparse=self.sparse,
            per_sample_weights=(
                None if per_sample_weights is None else per_sample_weights.reshape(-1)[kept]
            ),
            include_last_offset=True,
        )
        if self.mode == "sum":
            return sums
        return sums / _counted(pooled)[ends].diff().clamp(min=1).unsqueeze(1)


def _counted(flags: Tensor) -> Tensor:
    """How many flags before each place are set: int64 ``(n + 1,)``."""
    return F.pad(flags.cumsum(0), (1, 0))
