"""Which float embeddings of a model can be quantized, and where does it hold them?

Nothing is changed here. What can't be quantized is refused by its path, before any work is done.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.sparsifiers.dense_store import name_for

__all__ = ["FloatTable", "find_tables"]

_TYPES: Final = (nn.Embedding, nn.EmbeddingBag)  # exactly: a subclass may do anything in its forward
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(kw_only=True)
class FloatTable:
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


def find_tables(model: nn.Module, selected: Any) -> list[FloatTable]:
    """The tables of the selected embeddings, of all if ``selected`` is None, in the order of the model.

    Raises:
        AssertionError: as torch.ao: ``selected`` is not a list, or holds another type, or a module of another model.
        ValueError: there is nothing to quantize, the model is an embedding itself, or a table can't be quantized.
    """
    if type(model) in _TYPES:
        raise ValueError(
            f"The model is an {type(model).__name__} itself, so nothing holds it in which it could be replaced: "
            "pass the module around it, nn.Sequential(embedding) say."
        )
    wanted = _all_of(model) if selected is None else _checked(model, selected)
    tables: dict[int, FloatTable] = {}
    names: set[str] = set()
    for path, parent, child, module in _places(model):
        if id(module) not in wanted:
            continue
        weight = _weight(module, path)
        if id(weight) not in tables:
            tables[id(weight)] = FloatTable(name=name_for(path, names), path=path, weight=weight)
        table = tables[id(weight)]
        table.places.append((parent, child, module))
        if not any(module is known for known in table.modules):
            assert isinstance(module, _TYPES)
            table.modules.append(module)
    _check_not_shared(model, tables, wanted)
    return list(tables.values())


def _all_of(model: nn.Module) -> set[int]:
    # Sharded tables are TorchRec's: whoever has some has imported it. Others do not need it.
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
            f"{type(model).__name__} holds no float embeddings: no nn.Embedding or nn.EmbeddingBag of these very types."
        )
    return found


def _checked(model: nn.Module, selected: Any) -> set[int]:
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
    elif weight is None:
        reason = "its weight is computed (parametrized, or flattened by FSDP)"
    elif type(weight.data) is not Tensor or weight.is_meta:
        reason = f"its weight is a {'meta tensor' if weight.is_meta else type(weight.data).__name__}"
    elif weight.dtype not in _DTYPES or weight.numel() == 0:
        reason = f"its weight of shape {tuple(weight.shape)} and {weight.dtype} holds no floats"
    if weight is None or reason is not None:
        raise ValueError(f"Embedding {path!r} can't be quantized: {reason}.")
    return weight


def _check_not_shared(model: nn.Module, tables: dict[int, FloatTable], wanted: set[int]) -> None:
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
