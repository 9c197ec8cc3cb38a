"""What is registered here, for a person to read?"""

from __future__ import annotations

from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.text import block_text, shape_text, table_lines

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
                shape_text(size),
                str(dtype).removeprefix("torch."),
                sharding,
                shards,
                shape_text(block),
                block_text(block, zeros),
                "-" if level is None else f"{level:.4g}",
                f"{mask_bytes:,}",
            )
        )
    ranks = max((len(data.ranks or (0,)) for data in located.values()), default=1)
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {ranks} rank{'s' if ranks > 1 else ''}"
    return "\n".join([title, *table_lines(_HEAD, rows)])
