"""Modules that hold tables, and compact ones in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.tables import CompactEmbedding, CompactEmbeddingBag
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.port import torchrec_port
from dist_sparse.tables.protocols import TableConfig

__all__ = [
    "CompactCollection",
    "Site",
    "compact_embedding",
    "cut",
    "narrow_embedding",
    "replace_modules",
    "sites_of",
]


class CompactCollection(nn.Module):
    """A collection of TorchRec's that stores kept rows only: ``inner`` behind the ids of the whole
    tables."""

    inner: nn.Module
    tables: list[TableConfig]
    weighted: bool

    def table_indexes(self) -> dict[str, RowIndex]:
        """Return the index of each table that has removed rows."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Site:
    """A module that holds tables.

    Args:
        path: of the module in the model.
        module: an embedding, or a collection of TorchRec's.
        outer: the compact collection whose ``inner`` it is, if there is one.
        tables: fully qualified names of the weights, by the table's name in the module; of an
            embedding by ``""``.
    """

    path: str
    module: nn.Module
    outer: CompactCollection | None
    tables: dict[str, str]

    @property
    def replaced(self) -> nn.Module:
        """The module whose place a compact one takes."""
        return self.module if self.outer is None else self.outer

    @property
    def place(self) -> str:
        """The path of :attr:`replaced`."""
        return self.path if self.outer is None else self.path.rpartition(".")[0]


def sites_of(model: nn.Module) -> Iterator[Site]:
    """Yield every module that holds tables, with its path in the user's module."""
    torchrec, inside = torchrec_port(), set[nn.Module]()
    modules = modules_by_path(model)
    for path, module in modules.items():
        if module in inside:
            continue
        collection = torchrec.collection(module) if torchrec is not None else None
        if collection is not None:
            inside.update(module.modules())
            outer = modules.get(path.rpartition(".")[0])
            tables = {table.name: collection.fqn(path, table.name) for table in collection.tables}
            yield Site(
                path, module, outer if isinstance(outer, CompactCollection) else None, tables
            )
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield Site(path, module, None, {"": f"{path}.weight".lstrip(".")})


def replace_modules(root: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in the places of others, wherever ``root`` holds them; return the root, which may
    be one of them."""
    for module in list(root.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and child in replaced:
                setattr(module, name, replaced[child])
    return replaced.get(root, root)


def compact_embedding(
    module: nn.Embedding | nn.EmbeddingBag, kept: Tensor, default_row: bool
) -> nn.Module:
    """Return the compact module of an embedding, compact already or not."""
    weight = module.get_parameter("weight")
    index = RowIndex.of(kept.to(weight.device), default_row)
    if isinstance(module, (CompactEmbedding, CompactEmbeddingBag)):
        index = module.index.compose(index)
    rows = cut(weight.data, kept, index.stored)
    made = (
        CompactEmbedding(module, rows, index)
        if isinstance(module, nn.Embedding)
        else CompactEmbeddingBag(module, rows, index)
    )
    return made.train(module.training)


def narrow_embedding(module: nn.Embedding | nn.EmbeddingBag, columns: int) -> nn.Module:
    """Return an embedding of the first columns of another."""
    weight = module.weight.detach()[:, :columns].clone()
    names = (
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
        "mode",
        "include_last_offset",
    )
    options: dict[str, Any] = {
        name: getattr(module, name) for name in names if hasattr(module, name)
    }
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    made = kind(len(weight), columns, **options, _weight=weight).train(module.training)
    made.weight.requires_grad_(module.weight.requires_grad)
    return made


def cut(tensor: Tensor, kept: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """Return the kept rows of a tensor in a new one of so many rows, the ones behind them 0; of a
    matrix no more than the first ``columns``."""
    tensor = tensor if columns is None or tensor.dim() < 2 else tensor[:, :columns]
    out = tensor.new_zeros((rows, *tensor.shape[1:]))
    found = tensor.detach()[kept.to(tensor.device)]
    out[: len(found)] = found
    return out
