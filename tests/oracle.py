"""Reference masks by the rules of the math (docs/dev/design.md, section 5).

Plain loops over one whole matrix, written to be obviously right and nothing else. Slow: for small
matrices in tests.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["COL", "ROW", "oracle_blocks", "oracle_mask", "oracle_scores"]

ROW, COL = "ROW", "COL"


def _blocks(
    rows: int, cols: int, block: tuple[int | str, int | str]
) -> list[list[tuple[int, int]]]:
    """The elements of every block. Blocks and elements are in row-major order; the grid starts at
    (0, 0)."""
    height = rows if block[0] == COL else int(block[0])
    width = cols if block[1] == ROW else int(block[1])
    blocks = []
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            elements = []
            for row in range(top, min(top + height, rows)):
                for col in range(left, min(left + width, cols)):
                    elements.append((row, col))
            blocks.append(elements)
    return blocks


def _element_scores(weights: Tensor, norm: str) -> list[list[float]]:
    """|x| for L1, x * x for L2, of every element, in float64."""
    values = weights.detach().cpu().to(torch.float64).tolist()
    if norm == "L1":
        return [[abs(x) for x in row] for row in values]
    assert norm == "L2", norm
    return [[x * x for x in row] for row in values]


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def oracle_blocks(shape: tuple[int, int], block: tuple[int | str, int | str]) -> int:
    """The number of blocks of a matrix."""
    return len(_blocks(*shape, block))


def oracle_scores(weights: Tensor, block: tuple[int | str, int | str], norm: str) -> list[float]:
    """The score of every block, in row-major order: the float64 mean of its real elements, rounded
    once to float32."""
    element = _element_scores(weights, norm)
    scores = []
    for elements in _blocks(*weights.shape, block):
        total = 0.0
        for row, col in elements:
            total += element[row][col]
        scores.append(_float32(total / len(elements)))
    return scores


def oracle_mask(
    weights: Tensor,
    level: float,
    block: tuple[int | str, int | str] = (1, 4),
    zeros_per_block: int | None = None,
    norm: str = "L1",
) -> Tensor:
    """The int8 mask of a matrix, 1 = kept, 0 = removed.

    Args:
        weights: 2-D, any float dtype, finite.
        level: fraction of blocks that are hit; clipped to [0, 1].
        block: height and width of a block; ``(n, "ROW")`` for whole rows, ``("COL", n)`` for whole
            columns.
        zeros_per_block: how many elements of a hit block go; None is all of them.
        norm: "L1" or "L2".
    """
    rows, cols = weights.shape
    element = _element_scores(weights, norm)
    blocks = _blocks(rows, cols, block)
    scores = oracle_scores(weights, block, norm)

    # Python rounds halves to even, as the ancestor does.
    hits = min(max(round(level * len(blocks)), 0), len(blocks))
    order = sorted(range(len(blocks)), key=lambda index: (scores[index], index))

    mask = np.ones((rows, cols), dtype=np.int8)
    for index in order[:hits]:
        elements = blocks[index]
        if zeros_per_block is not None:
            smallest = sorted(
                elements, key=lambda place: (_float32(element[place[0]][place[1]]), place)
            )
            elements = smallest[:zeros_per_block]
        for row, col in elements:
            mask[row, col] = 0
    return torch.from_numpy(mask)
