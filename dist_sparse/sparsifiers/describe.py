"""What is registered here, for a person to read?"""

from __future__ import annotations

import math

from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["describe"]

_HEAD = ("name", "shape", "dtype", "sharding", "shards (here)", "block", "zeros/block", "level", "mask bytes (here)")


def describe(sparsifier: BaseDataSparsifier) -> str:
    """A table of everything registered: name, shape, dtype, sharding, shards, configuration, level, mask bytes. Sends
    nothing.

    "here" counts what this rank holds; :meth:`~dist_sparse.BaseDataSparsifier.table_stats` counts over all ranks.
    """
    located = sparsifier._tables.locate() if sparsifier._tables else {}
    rows: list[tuple[str, ...]] = []
    size: tuple[int, ...]
    for name, config in sparsifier.data_groups.items():
        if name in located:
            data = located[name]
            size, dtype, sharding = tuple(data.shape), data.dtype, data.sharding
            shards = f"{len(data.rects)} ({len(data.shards)})"
            mask_bytes = sum(mask.bits.numel() for mask in sparsifier._tables.masks(name))
        else:
            weight = sparsifier.get_data(name, return_original=False)
            mask = sparsifier.get_mask(name)
            size, dtype, sharding, shards = tuple(weight.shape), weight.dtype, "plain", "1 (1)"
            mask_bytes = mask.numel() * mask.element_size()
        block, zeros, level = (config.get(key) for key in ("sparse_block_shape", "zeros_per_block", "sparsity_level"))
        rows.append(
            (
                name,
                " x ".join(map(str, size)),
                str(dtype).removeprefix("torch."),
                sharding,
                shards,
                "-" if block is None else " x ".join(map(str, block)),
                "-" if block is None else "all" if zeros is None or zeros == _area(block) else str(zeros),
                "-" if level is None else f"{level:.4g}",
                f"{mask_bytes:,}",
            )
        )
    ranks = max((len(data.ranks or (0,)) for data in located.values()), default=1)
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {ranks} rank{'s' if ranks > 1 else ''}"
    return "\n".join([title, *_aligned([_HEAD, *rows])])


def _area(block: tuple[int | str, int | str]) -> float:
    return math.nan if any(isinstance(size, str) for size in block) else math.prod(int(size) for size in block)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
