"""How is a table kept in 8 bits and looked up?

:class:`QuantizedEmbedding` and :class:`QuantizedEmbeddingBag` take the place of ``nn.Embedding`` and
``nn.EmbeddingBag``: the same arguments, results and errors, but no parameter and no gradient. Their one buffer,
``rows``, is what a state_dict has of them. A lookup gathers the packed rows of its ids and unpacks those alone, so that
a forward reads what :meth:`~QuantizedEmbedding.weight` shows, bit for bit, up to the order of sums. They are made by
:func:`dist_sparse.post_training_sparse_quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.quantization import grid

__all__ = ["QuantizedEmbedding", "QuantizedEmbeddingBag"]


class _Table(nn.Module):
    """A table of packed rows, and what both modules have in common."""

    rows: Tensor
    _result: Tensor

    def __init__(self, rows: Tensor, embedding_dim: int, dtype: torch.dtype, padding_idx: int | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = len(rows), embedding_dim, padding_idx
        self.register_buffer("rows", rows)
        # An empty tensor carries the dtype of the results, so that half(), double() and to(dtype) change it as they
        # change what a float module returns.
        self.register_buffer("_result", torch.empty(0, dtype=dtype, device=rows.device), persistent=False)

    def weight(self) -> Tensor:
        """The whole table as floats ``(num_embeddings, embedding_dim)``, in the dtype of the lookups. A new tensor each
        time: writing into it changes nothing."""
        return grid.decode(self.rows, self.embedding_dim).to(self._result.dtype).contiguous()

    def extra_repr(self) -> str:
        """What ``repr`` says of the module."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dtype={self._result.dtype}, bits=8"

    def _look_up(self, ids: Tensor) -> Tensor:
        """float32 ``(ids, embedding_dim)`` of a 1-D tensor of ids."""
        return grid.decode(F.embedding(ids, self.rows), self.embedding_dim)


class QuantizedEmbedding(_Table):
    """An ``nn.Embedding`` in 8 bits.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: of the float module. (Its ``padding_idx`` says what is not trained;
            lookups return that row as any other.)
        rows: uint8, FBGEMM's fused 8-bit rows: codes, padded to a multiple of four, then scale and bias as float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The weights of ids (int32 or int64, any shape): ``(*input.shape, embedding_dim)``.

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
        """The reduced weights of each bag: ``(bags, embedding_dim)``.

        Args:
            input: ids, int32 or int64; 2-D: a bag in each row; 1-D: bags that begin at ``offsets``.
            offsets: where bags begin, for 1-D ids; with ``include_last_offset`` also where the last one ends.
            per_sample_weights: a factor for each id, of its shape; "sum" only. Gradients flow to these alone.

        Raises:
            RuntimeError: an id is not in ``[0, num_embeddings)`` (on CUDA a device assert); as float modules have it.
            ValueError, NotImplementedError: the arguments do not fit each other; as float modules have it.
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
        """What ``repr`` says of the module."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
