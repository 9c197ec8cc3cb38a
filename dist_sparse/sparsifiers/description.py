"""Everything that a sparsifier holds, as a text table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import block_shape_text, block_text, level_text, shape_text, table_lines

_HEAD = (
    *("name", "shape", "dtype", "sharding", "shards (here)"),
    *("block", "zeros/block", "level", "mask bytes (here)"),
)


def describe(sparsifier: BaseDataSparsifier) -> str:
    """Return a text table of everything registered: name, shape, dtype, sharding, shards,
    configuration, level, mask bytes. Local.

    "here" counts what this rank holds; :meth:`~dist_sparse.BaseDataSparsifier.table_stats` counts
    over all ranks.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, describe
        >>> data = [("user", torch.ones(10, 4))]
        >>> print(describe(DataNormSparsifier(data, sparse_block_shape=(1, 4))))
        DataNormSparsifier: 1 registered, over 1 rank
        name  shape   dtype    sharding  shards (here)  block  zeros/block  level  mask bytes (here)
        ----  ------  -------  --------  -------------  -----  -----------  -----  -----------------
        user  10 x 4  float32  plain     1 (1)          1x4    all          0.5    160
    """
    located = sparsifier.masks.tables.locate()
    rows = []
    for name, config in sparsifier.data_groups.items():
        if name in located:
            stored = _sharded_cells(sparsifier, located[name])
        else:
            stored = _plain_cells(sparsifier, name)
        rows.append((name, *stored[:-1], *_config_cells(config), stored[-1]))
    ranks = max((len(data.ranks or (0,)) for data in located.values()), default=1)
    over = f"{ranks} rank{'s' if ranks > 1 else ''}"
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {over}"
    return "\n".join([title, *table_lines(_HEAD, rows)])


def _sharded_cells(sparsifier: BaseDataSparsifier, data: ShardedData) -> list[str]:
    size = sum(mask.bits.numel() for mask in sparsifier.masks.tables.masks(data.name))
    shards = f"{len(data.rects)} ({len(data.shards)})"
    return [shape_text(data.shape), _dtype_text(data.dtype), data.sharding, shards, f"{size:,}"]


def _plain_cells(sparsifier: BaseDataSparsifier, name: str) -> list[str]:
    weight, mask = sparsifier.masks.plain.held(name), sparsifier.masks.plain.mask(name)
    size = mask.numel() * mask.element_size()
    return [shape_text(weight.shape), _dtype_text(weight.dtype), "plain", "1 (1)", f"{size:,}"]


def _config_cells(config: Mapping[str, Any]) -> list[str]:
    block, level = config.get("sparse_block_shape"), config.get("sparsity_level")
    zeros = block_text(block, config.get("zeros_per_block"))
    return [block_shape_text(block), zeros, "-" if level is None else level_text(level)]


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
