"""How do a trained model's embeddings become sparse 8-bit tables?

As in the ancestor, ``torch.ao.pruning._experimental.data_sparsifier.quantization_utils``, but on FBGEMM's rows, not on
``torch.ao.quantization``, and with removed weights that are exactly 0. All of it is done beside the model: float
weights are read, never written, and new modules are put in at the very end, by assignments that cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.quantization import grid
from dist_sparse.quantization.floats import FloatTable, find_tables
from dist_sparse.quantization.modules import QuantizedEmbedding, QuantizedEmbeddingBag
from dist_sparse.sparsifiers.dense_store import Masked

__all__ = ["post_training_sparse_quantize"]

# What a module has of hooks around its forward. The objects are handed on, so that the handles of hooks go on working.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def post_training_sparse_quantize(
    model: nn.Module,
    data_sparsifier_class: Callable[..., Any],
    sparsify_first: bool = True,
    select_embeddings: list[nn.Module] | None = None,
    **sparse_config: Any,
) -> None:
    """Sparsifies and quantizes the embeddings of a trained model to 8 bits, in place. Local: never communicates.

    Every ``nn.Embedding`` and ``nn.EmbeddingBag`` (these very types, at any depth, those in an unsharded
    EmbeddingBagCollection too) is replaced by a :class:`~dist_sparse.quantization.modules.QuantizedEmbedding` or
    ``QuantizedEmbeddingBag``, with the same forward, ``weight()`` for the table as floats, and about a quarter of the
    memory of float32 (``embedding_dim + 8`` bytes a row). Removed weights are exactly 0 in it; the others are off by at
    most half a step of their row, a step being ``(max(0, max) - min(0, min)) / 255``. The float modules themselves are
    left as they were. A weight that several embeddings share is quantized once, and shared again.

    Args:
        model: holds the embeddings; it can't be one itself.
        data_sparsifier_class: makes the sparsifier, from ``sparse_config``. Its ``add_data``, one ``step`` and what
            ``get_mask`` and ``get_data`` then say are used. A name is the path of the module with '_' for '.'.
        sparsify_first: masks of the float weights, which are then quantized; or else masks of the quantized weights, of
            which those that are kept keep their codes, on the grid of the dense table.
        select_embeddings: the modules to take; None is all of them.
        **sparse_config: of the sparsifier's constructor.

    Raises:
        ImportError: FBGEMM is not installed.
        AssertionError: ``select_embeddings`` is not a list, or holds a module of another type or of another model.
        ValueError: ``sparsify_first`` is no bool, there is nothing to quantize, or a table can't be (sharded, max_norm,
            mode "max", shared with something else, NaN, ...). These errors, and all of the sparsifier's, leave the
            model as it was.
    """
    grid.fbgemm()
    if not isinstance(sparsify_first, bool):  # a list of embeddings, say, which would mean all of them
        raise ValueError(f"Invalid sparsify_first of type {type(sparsify_first).__name__}: must be a bool.")
    if sparse_config.get("data_list") is not None:
        raise ValueError("Invalid data_list: the sparsifier is given the embeddings of the model and nothing else.")
    sparsifier = data_sparsifier_class(**sparse_config)
    tables = find_tables(model, select_embeddings)
    with torch.no_grad():
        for table in tables:
            _check_finite(table)
        packed: dict[str, Tensor] = {}
        for table in tables:
            weight = table.weight.detach()
            if not sparsify_first:
                packed[table.name] = _quantized(table, _parts(weight))
                weight = grid.decode(packed[table.name], weight.shape[1]).contiguous()
            sparsifier.add_data(name=table.name, data=weight)
        sparsifier.step()
        for table in tables:
            parts = _sparse_parts(sparsifier, table.name)
            if sparsify_first:
                packed[table.name] = _quantized(table, parts)
            else:
                _encode(table, packed[table.name], parts)
        new = {id(module): _in_place_of(module, packed[table.name]) for table in tables for module in table.modules}
    for table in tables:
        for parent, child, module in table.places:
            parent._modules[child] = new[id(module)]


_Parts = Iterator[tuple[slice, Tensor]]


def _parts(weight: Tensor) -> _Parts:
    for part in grid.chunks(*weight.shape):
        yield part, weight[part]


def _sparse_parts(sparsifier: Any, name: str) -> _Parts:
    """What ``squash_mask`` would write into the data, a few rows at a time."""
    if sparsifier.data_groups[name].get("parametrization") is not None:
        yield from _parts(sparsifier.get_data(name, return_original=False).detach())
        return
    mask = sparsifier.get_mask(name)
    for part, weight in _parts(sparsifier.get_data(name)):
        yield part, Masked(mask[part])(weight)


def _check_finite(table: FloatTable) -> None:
    wrong = sum(grid.not_finite(weight) for _, weight in _parts(table.weight.detach()))
    _refuse(wrong, table, "NaN, or weights that are infinite or beyond float32")


def _quantized(table: FloatTable, parts: _Parts) -> Tensor:
    """Packed rows of weights that come in parts."""
    rows, columns = table.weight.shape
    packed, wrong = grid.empty_rows(rows, columns, table.weight.device), 0
    for part, weight in parts:
        wrong += grid.fit_(packed[part], weight, table.weight.dtype)
        grid.encode_(packed[part], weight)
    _refuse(wrong, table, "weights that are not finite, or too far apart for an 8-bit grid")
    return packed


def _encode(table: FloatTable, packed: Tensor, parts: _Parts) -> None:
    """Packs weights that come in parts, on the grids that are there."""
    wrong = sum(grid.encode_(packed[part], weight) for part, weight in parts)
    _refuse(wrong, table, "NaN, or weights that are infinite or beyond float32, once masked")


def _refuse(wrong: int, table: FloatTable, what: str) -> None:
    if wrong:
        raise ValueError(f"Embedding {table.path!r}: {wrong} of {table.weight.shape[0]} rows hold {what}.")


def _in_place_of(module: nn.Embedding | nn.EmbeddingBag, packed: Tensor) -> nn.Module:
    """The quantized module that does what ``module`` did."""
    dim, dtype, padding = module.embedding_dim, module.weight.dtype, module.padding_idx
    new: nn.Module
    if isinstance(module, nn.EmbeddingBag):
        new = QuantizedEmbeddingBag(packed, dim, dtype, padding, module.mode, module.include_last_offset)
    else:
        new = QuantizedEmbedding(packed, dim, dtype, padding)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(module, hooks))
    return new.train(module.training)
