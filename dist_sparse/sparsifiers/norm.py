"""Which blocks have the smallest norm?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dist_sparse.masking.scores import Measure
from dist_sparse.sparsifiers.score import ScoreSparsifier

__all__ = ["DataNormSparsifier"]


class DataNormSparsifier(ScoreSparsifier):
    """Removes the blocks whose elements are smallest, by the mean of ``|x|`` (L1) or of ``x * x`` (L2) over the block.

    The masks of a sharded table are the same, bit for bit, for every sharding and any number of ranks. Among equal
    norms the block with the smaller global row-major index goes first.

    Args:
        data_list: ``(name, data)`` pairs to register at once.
        sparsity_level: fraction of blocks to hit: exactly ``round(sparsity_level * blocks)``, half to even.
        sparse_block_shape: ``(rows, columns)``, the grid anchored at the tensor's corner; ``(1, ROW)`` is whole rows.
        zeros_per_block: elements to remove in a hit block, the smallest first; None is the whole block.
        norm: ``"L1"`` or ``"L2"``.

    All but ``norm`` can be overridden by name, in ``add_data`` or ``add_model``.
    """

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int | str] = (1, 4),
        zeros_per_block: int | None = None,
        norm: str = "L1",
    ) -> None:
        if norm not in ("L1", "L2"):
            raise AssertionError(f"only L1 and L2 norm supported at the moment, got {norm!r}")
        self.norm = norm
        super().__init__(data_list, sparsity_level, sparse_block_shape, zeros_per_block)

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """``|x|`` or ``x * x``, float64."""
        exact = data.double()
        return exact.abs() if self.norm == "L1" else exact * exact

    def _measure(self, name: str, config: Mapping[str, Any]) -> Measure:
        if type(self).score is not DataNormSparsifier.score:
            return super()._measure(name, config)
        return "L1" if self.norm == "L1" else "L2"
