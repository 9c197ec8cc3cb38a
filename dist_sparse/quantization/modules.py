"""Modules that look up 8-bit tables.

:class:`QuantizedEmbedding` and :class:`QuantizedEmbeddingBag` take the place of ``nn.Embedding`` and
``nn.EmbeddingBag``: the same arguments, results and errors, but no parameter and no gradient. Their one buffer,
``rows``, is their part of a state_dict. A lookup gathers the packed rows of its ids and unpacks those alone, so that
a forward reads the values of :meth:`~QuantizedEmbedding.weight`, bit for bit, up to the order of sums. They are made by
:func:`dist_sparse.post_training_sparse_quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.quantization import grid

__all__ = ["QuantizedEmbedding", "QuantizedEmbeddingBag"]


class _Table(nn.Module):
    """A table of packed rows; base class of both modules."""

    rows: Tensor
    _result: Tensor

    def __init__(self, rows: Tensor, embedding_dim: int, dtype: torch.dtype, padding_idx: int | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = len(rows), embedding_dim, padding_idx
        self.register_buffer("rows", rows)
        # An empty tensor carries the dtype of the results, so that half(), double() and to(dtype) change it as they do
        # for a float module.
        self.register_buffer("_result", torch.empty(0, dtype=dtype, device=rows.device), persistent=False)

    def weight(self) -> Tensor:
        """Return the whole table as floats ``(num_embeddings, embedding_dim)``, in the dtype of the lookups.

        A new tensor each time: writing to it does not change the table."""
        return grid.decode(self.rows, self.embedding_dim).to(self._result.dtype).contiguous()

    def extra_repr(self) -> str:
        """Return the arguments shown by ``repr``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dtype={self._result.dtype}, bits=8"

    def _look_up(self, ids: Tensor) -> Tensor:
        """float32 ``(ids, embedding_dim)`` of a 1-D tensor of ids."""
        return grid.decode(F.embedding(ids, self.rows), self.embedding_dim)


class QuantizedEmbedding(_Table):
    """An ``nn.Embedding`` in 8 bits.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: of the float module. (``padding_idx`` is not used: lookups return
            that row like any other.)
        rows: uint8, FBGEMM's fused 8-bit rows: codes, padded to a multiple of four, then scale and bias as float32.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, post_training_sparse_quantize
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4))
        >>> post_training_sparse_quantize(model, DataNormSparsifier, sparsity_level=0.5, sparse_block_shape=(1, 4))
        >>> model[0](torch.tensor([1, 2])).shape, model[0].rows.shape
        (torch.Size([2, 4]), torch.Size([10, 12]))
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the weights of ids (int32 or int64, any shape): ``(*input.shape, embedding_dim)``.

        Raises:
            IndexError: an id is not in ``[0, num_embeddings)`` (on CUDA a device assert, as float modules have).
        """
        found = self._look_up(input.reshape(-1)).to(self._result.dtype)
        return found.reshape(*input.shape, self.embedding_dim)


class QuantizedEmbeddingBag(_Table):
    """An ``nn.EmbeddingBag`` in 8 bits, for the modes "sum" and "mean". Bags are reduced in float32 (float64 for a
    float64 module), then rounded to the dtype of the float module.

    Attributes:
        num_embeddings, embedding_dim, mode, include_last_offset, padding_idx: of the float module. Ids that are
            ``padding_idx`` do not count.
        rows: as in :class:`QuantizedEmbedding`.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, post_training_sparse_quantize
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4, mode="sum"))
        >>> post_training_sparse_quantize(model, DataNormSparsifier, sparsity_level=0.5, sparse_block_shape=(1, 4))
        >>> model[0](torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        rows: Tensor,
        embedding_dim: int,
        dtype: torch.dtype,
        padding_idx: int | None,
        mode: str,
        include_last_offset: bool,
    ) -> None:
        super().__init__(rows, embedding_dim, dtype, padding_idx)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the reduced weights of each bag: ``(bags, embedding_dim)``.

        Args:
            input: ids, int32 or int64; 2-D: a bag in each row; 1-D: bags that begin at ``offsets``.
            offsets: where bags begin, for 1-D ids; with ``include_last_offset`` also where the last one ends.
            per_sample_weights: a factor for each id, of its shape; "sum" only. Gradients flow to these alone.

        Raises:
            RuntimeError: an id is not in ``[0, num_embeddings)`` (on CUDA a device assert); as float modules do.
            ValueError, NotImplementedError: the arguments do not fit each other; as float modules do.
        """
        ids = input.reshape(-1)
        places = torch.arange(ids.numel(), device=ids.device)
        padding = None
        if self.padding_idx is not None:
            # One more row stands for all padding, because torch leaves out one row by its index.
            padding = ids.numel()
            places = torch.where(ids == self.padding_idx, padding, places)
            ids = torch.cat([ids, ids.new_full((1,), self.padding_idx)])
        try:
            found = self._look_up(ids)
        except IndexError as fault:
            raise RuntimeError(
                f"Ids from {int(ids.min())} to {int(ids.max())} are not all in [0, {self.num_embeddings})."
            ) from fault
        found = found.double() if self._result.dtype == torch.float64 else found
        bags = F.embedding_bag(
            places.view(input.shape),
            found,
            offsets,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(found.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return bags.to(self._result.dtype)

    def extra_repr(self) -> str:
        """Return the arguments shown by ``repr``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
