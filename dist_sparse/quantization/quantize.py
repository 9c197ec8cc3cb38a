"""Sparse 8-bit tables of a trained model's embeddings.

As in the ancestor, ``torch.ao.pruning._experimental.data_sparsifier.quantization_utils``, but on FBGEMM's rows instead
of ``torch.ao.quantization``, and with removed weights that are exactly 0. The model is changed at the very end, by
assignments that cannot fail: float weights are read, never written, and embeddings that can't be quantized are refused
before any work is done.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.quantization import grid
from dist_sparse.quantization.modules import QuantizedEmbedding, QuantizedEmbeddingBag
from dist_sparse.rotation.outputs import is_turned
from dist_sparse.sparsifiers.dense_store import Masked, name_for

__all__ = ["post_training_sparse_quantize"]

_TYPES: Final = (nn.Embedding, nn.EmbeddingBag)  # exactly: a subclass may do anything in its forward
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A module's hooks around its forward. The objects are passed on, so that handles of hooks keep working.
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
    """Prune the embeddings of a trained model and quantize them to 8 bits, in place. Never communicates.

    Every ``nn.Embedding`` and ``nn.EmbeddingBag`` (exactly these types, at any depth, in an unsharded
    EmbeddingBagCollection too) is replaced by a :class:`~dist_sparse.quantization.modules.QuantizedEmbedding` or
    ``QuantizedEmbeddingBag``, with the same forward, ``weight()`` for the table as floats, and about a quarter of the
    memory of float32 (``embedding_dim + 8`` bytes a row). Removed weights are exactly 0 in it; the others are off by at
    most half a step of their row, a step being ``(max(0, max) - min(0, min)) / 255``. The float modules themselves are
    left as they were. A weight that several embeddings share is quantized once, and shared again.

    Args:
        model: the module that holds the embeddings; it can't be one itself.
        data_sparsifier_class: class of the sparsifier, constructed with ``sparse_config``. It is used through
            ``add_data``, one ``step``, ``get_mask`` and ``get_data``. A name is the path of the module with '_' for
            '.'.
        sparsify_first: if True, compute masks from the float weights, then quantize; otherwise compute masks from the
            quantized weights, where kept weights keep their codes on the grid of the dense table.
        select_embeddings: the modules to take; None is all of them.
        **sparse_config: arguments of the sparsifier's constructor.

    Raises:
        ImportError: FBGEMM is not installed.
        AssertionError: ``select_embeddings`` is not a list, or holds a module of another type or of another model.
        ValueError: ``sparsify_first`` is no bool, there is nothing to quantize, or a table can't be (sharded, max_norm,
            mode "max", shared with something else, NaN, ...). The model is unchanged then, as after all errors of the
            sparsifier.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, post_training_sparse_quantize
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8))
        >>> block = {"sparsity_level": 0.75, "sparse_block_shape": (1, 8)}
        >>> post_training_sparse_quantize(model, DataNormSparsifier, **block)
        >>> model[0]
        QuantizedEmbeddingBag(100, 8, dtype=torch.float32, bits=8, mode='mean')
        >>> int((model[0].weight() == 0).all(dim=1).sum())
        75
    """
    grid.fbgemm()
    if not isinstance(sparsify_first, bool):  # a list of embeddings, say, which would mean all of them
        raise ValueError(f"Invalid sparsify_first of type {type(sparsify_first).__name__}: must be a bool.")
    if sparse_config.get("data_list") is not None:
        raise ValueError("Invalid data_list: the sparsifier is given the embeddings of the model and nothing else.")
    sparsifier = data_sparsifier_class(**sparse_config)
    tables = _find_tables(model, select_embeddings)
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
    """The weights that ``squash_mask`` would write, a few rows at a time."""
    if sparsifier.data_groups[name].get("parametrization") is not None:
        yield from _parts(sparsifier.get_data(name, return_original=False).detach())
        return
    mask = sparsifier.get_mask(name)
    for part, weight in _parts(sparsifier.get_data(name)):
        yield part, Masked(mask[part])(weight)


def _check_finite(table: _FloatTable) -> None:
    wrong = sum(grid.not_finite(weight) for _, weight in _parts(table.weight.detach()))
    _refuse(wrong, table, "NaN, or weights that are infinite or beyond float32")


def _quantized(table: _FloatTable, parts: _Parts) -> Tensor:
    """Packed rows of weights that come in parts."""
    rows, columns = table.weight.shape
    packed, wrong = grid.empty_rows(rows, columns, table.weight.device), 0
    for part, weight in parts:
        wrong += grid.fit_(packed[part], weight, table.weight.dtype)
        grid.encode_(packed[part], weight)
    _refuse(wrong, table, "weights that are not finite, or too far apart for an 8-bit grid")
    return packed


def _encode(table: _FloatTable, packed: Tensor, parts: _Parts) -> None:
    """Packs weights that come in parts, on the grids that are there."""
    wrong = sum(grid.encode_(packed[part], weight) for part, weight in parts)
    _refuse(wrong, table, "NaN, or weights that are infinite or beyond float32, once masked")


def _refuse(wrong: int, table: _FloatTable, what: str) -> None:
    if wrong:
        raise ValueError(f"Embedding {table.path!r}: {wrong} of {table.weight.shape[0]} rows hold {what}.")


def _in_place_of(module: nn.Embedding | nn.EmbeddingBag, packed: Tensor) -> nn.Module:
    """The quantized module with the behaviour of ``module``."""
    dim, dtype, padding = module.embedding_dim, module.weight.dtype, module.padding_idx
    new: nn.Module
    if isinstance(module, nn.EmbeddingBag):
        new = QuantizedEmbeddingBag(packed, dim, dtype, padding, module.mode, module.include_last_offset)
    else:
        new = QuantizedEmbedding(packed, dim, dtype, padding)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(module, hooks))
    return new.train(module.training)


@dataclass(kw_only=True)
class _FloatTable:
    """A weight, the embeddings that look it up, and every place at which the model holds one of them.

    Attributes:
        name: for the sparsifier: the path with '_' for '.', and a number behind it if it would not be unique.
        path: of the first place, as in ``named_modules()``.
        weight: the parameter, ``(num_embeddings, embedding_dim)``.
        modules: the embeddings, once each.
        places: (parent, name of the child, embedding).
    """

    name: str
    path: str
    weight: nn.Parameter
    modules: list[nn.Embedding | nn.EmbeddingBag] = field(default_factory=list)
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)


def _find_tables(model: nn.Module, selected: Any) -> list[_FloatTable]:
    """The tables of the selected embeddings, of all if ``selected`` is None, in the order of the model.

    Raises:
        AssertionError: as torch.ao: ``selected`` is not a list, or holds another type, or a module of another model.
        ValueError: there is nothing to quantize, the model is an embedding itself, or a table can't be quantized.
    """
    if type(model) in _TYPES:
        raise ValueError(
            f"The model is itself an {type(model).__name__}, which can only be replaced inside a module: pass the "
            "module that contains it, such as nn.Sequential(embedding)."
        )
    wanted = _all_of(model) if selected is None else _selected(model, selected)
    tables: dict[int, _FloatTable] = {}
    names: set[str] = set()
    for path, parent, child, module in _places(model):
        if id(module) not in wanted:
            continue
        weight = _weight(module, path)
        if id(weight) not in tables:
            tables[id(weight)] = _FloatTable(name=name_for(path, names), path=path, weight=weight)
        table = tables[id(weight)]
        table.places.append((parent, child, module))
        if not any(module is known for known in table.modules):
            assert isinstance(module, _TYPES)
            table.modules.append(module)
    _check_not_shared(model, tables, wanted)
    return list(tables.values())


def _all_of(model: nn.Module) -> set[int]:
    # Sharded tables are TorchRec's: where there are some, it is imported. Other models do not need it.
    torchrec: Any = importlib.import_module("dist_sparse.tables.torchrec") if "torchrec" in sys.modules else None
    for path, module in model.named_modules():
        if hasattr(module, "split_embedding_weights") or (torchrec and torchrec.shards_tables(module)):
            raise ValueError(
                f"The tables of {type(module).__name__} at {path!r} can't be quantized: they are sharded, or packed in "
                "a table batch of FBGEMM's. Load their weights into an unsharded EmbeddingBagCollection or "
                "EmbeddingCollection and quantize that, or name the plain embeddings in select_embeddings."
            )
    found = {id(module) for module in model.modules() if type(module) in _TYPES}
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no float embeddings: none of the exact type nn.Embedding or nn.EmbeddingBag."
        )
    return found


def _selected(model: nn.Module, selected: Any) -> set[int]:
    if not isinstance(selected, list):
        raise AssertionError(f"select_embeddings must be a list of embedding modules, got {type(selected).__name__}")
    parts = {id(module) for module in model.modules()}
    for module in selected:
        if type(module) not in _TYPES:
            raise AssertionError(
                f"select_embeddings must hold nn.Embedding and nn.EmbeddingBag only, got {type(module).__name__}"
            )
        if id(module) not in parts:
            raise AssertionError(f"the embeddings selected must be part of the model, and {module} is not")
    if not selected:
        raise ValueError("Invalid select_embeddings=[]: selects nothing; None selects all embeddings.")
    return {id(module) for module in selected}


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every place at which the model holds a module, once, as (path, parent, name of the child, module)."""
    for path, parent in model.named_modules():
        for child, module in parent._modules.items():
            if module is not None:
                yield (f"{path}.{child}" if path else child), parent, child, module


def _weight(module: Any, path: str) -> nn.Parameter:
    """The weight of an embedding.

    Raises:
        ValueError: its forward does what the quantized one can't, or the weight is no plain float matrix.
    """
    weight: nn.Parameter | None = module._parameters.get("weight")
    reason: str | None = None
    if module.max_norm is not None:
        reason = f"max_norm={module.max_norm} rescales rows whenever they are looked up"
    elif getattr(module, "mode", "sum") not in ("sum", "mean"):
        reason = f"mode={module.mode!r} is not supported; 'sum' and 'mean' are"
    elif is_turned(module):
        reason = "it is rotated, and a forward hook turns its output back"
    elif weight is None:
        reason = "its weight is computed (parametrized, or flattened by FSDP)"
    elif type(weight.data) is not Tensor or weight.is_meta:
        reason = f"its weight is a {'meta tensor' if weight.is_meta else type(weight.data).__name__}"
    elif weight.dtype not in _DTYPES or weight.numel() == 0:
        reason = f"its weight of shape {tuple(weight.shape)} and {weight.dtype} holds no floats"
    if weight is None or reason is not None:
        raise ValueError(f"Embedding {path!r} can't be quantized: {reason}.")
    return weight


def _check_not_shared(model: nn.Module, tables: dict[int, _FloatTable], wanted: set[int]) -> None:
    """Refuses a weight that something else would go on using as floats, no longer tied to the table."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in tables and id(module) not in wanted:
                owner = tables[id(parameter)].path
                way_out = "select both" if type(module) in _TYPES else "untie them, or leave the embedding out"
                raise ValueError(
                    f"Embedding {owner!r} can't be quantized: its weight is also {f'{path}.{name}'!r}, which would "
                    f"stay as it is and no longer be tied; {way_out}."
                )
