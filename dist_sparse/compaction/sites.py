"""Modules that hold tables, and compact ones in their places.

A :class:`Site` is an embedding of torch's or a collection of TorchRec's. It names its tables by
their fully qualified names, and knows what :func:`~dist_sparse.compact` needs of its kind: which
rows it stores, why it can't be compacted, and the compact module that replaces it; of a compact
one, the whole module that replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor, nn

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.tables import (
    CompactCollection,
    CompactEmbedding,
    CompactEmbeddingBag,
    CompactTable,
    cut,
    lookup_options,
    padding_id_of,
)
from dist_sparse.tables.modules import collection_of, modules_by_path, torchrec_port
from dist_sparse.tables.protocols import Collection, TorchRecPort

Kept: TypeAlias = Mapping[str, Tensor]
"""Which stored rows of a module's tables are kept, bool ``(rows,)``, by the table's name in it."""

# By exact class: a subclass may do more in its forward.
_COMPACT: Final[dict[type[nn.Module], type[CompactEmbedding] | type[CompactEmbeddingBag]]] = {
    nn.Embedding: CompactEmbedding,
    CompactEmbedding: CompactEmbedding,
    nn.EmbeddingBag: CompactEmbeddingBag,
    CompactEmbeddingBag: CompactEmbeddingBag,
}


def dmp_port(model: nn.Module) -> TorchRecPort | None:
    """Return TorchRec's port if a model is a DistributedModelParallel, otherwise None."""
    torchrec = torchrec_port()
    return torchrec if torchrec is not None and torchrec.is_sharded_model(model) else None


@dataclass(frozen=True, eq=False)
class _Site:
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

    @property
    def label(self) -> str:
        """Its tables, for a message: up to 3 names, otherwise the first and how many follow."""
        # A collection may have hundreds.
        names = list(self.tables.values())
        return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"

    def slots(self) -> dict[str, Tensor]:
        """Return where the rows of indexes are stored, of tables that do not keep them in the order
        of their ids."""
        return {} if self.outer is None else self.outer.table_slots()


class EmbeddingSite(_Site):
    """An ``nn.Embedding`` or ``nn.EmbeddingBag``, compact already or not.

    Attributes:
        is_sharded: whether TorchRec shards its tables.
        has_one_width: whether its tables must have the same columns.
    """

    # Four classes without a common base: two of torch, two of theirs that are compact.
    module: Any
    is_sharded: ClassVar = False
    has_one_width: ClassVar = False

    @property
    def padding_id(self) -> int | None:
        """The id that lookups treat as padding."""
        return padding_id_of(self.module)

    def rows(self) -> dict[str, int]:
        """Return how many rows the table stores."""
        return {"": len(self.module.get_parameter("weight"))}

    def indexes(self) -> dict[str, RowIndex]:
        """Return the index of a table that has lost rows before."""
        return {"": self.module.index} if isinstance(self.module, CompactTable) else {}

    def parameters(self, made: nn.Module | None = None) -> dict[str, nn.Parameter]:
        """Return the weight, or that of the module ``made`` in its place."""
        # Only by name: reading ``weight`` of a compact table raises.
        module = self.module if made is None else made
        return {"": module.get_parameter("weight")}

    def refusal(self, model: nn.Module, narrowed: bool) -> str | None:
        """Return why it can't be compacted, or made narrower, as the rest of a sentence."""
        if type(self.module) not in _COMPACT:
            return (
                f"belongs to a {type(self.module).__name__}, which is neither nn.Embedding nor"
                " nn.EmbeddingBag and may do more: it can't be compacted."
            )
        if narrowed and self.indexes():
            return "has lost rows already: narrow its table before it loses rows."
        # A zero may be the maximum of a bag; an id without a row never is.
        if getattr(self.module, "mode", None) == "max":
            return "has mode='max', in which removed rows count as zeros: it can't be compacted."
        return None

    def compacted(
        self, kept: Kept, widths: Mapping[str, int], model: nn.Module, default_row: bool
    ) -> nn.Module:
        """Return an embedding of fewer columns, or of fewer rows."""
        old, weight = self.module, self.module.get_parameter("weight").data
        made: nn.Module
        if widths:
            options = {**lookup_options(old), "padding_idx": old.padding_idx}
            narrow = weight[:, : widths[""]].clone()
            # Not a compact table: it keeps all rows, so that ids are row numbers.
            made = type(old)(*narrow.shape, **options, _weight=narrow)
            made.requires_grad_(old.weight.requires_grad)
        else:
            index = RowIndex.of(kept[""].to(weight.device), default_row)
            # Ids of a table that was compacted before are those of the original table.
            for earlier in self.indexes().values():
                index = earlier.compose(index)
            made = _COMPACT[type(old)](old, cut(weight, kept[""], index.stored), index)
        return made.train(old.training)

    def initial_bounds(self, table: str) -> None:
        """Return None: torch draws both kinds from the standard normal distribution."""

    def expanded(self) -> nn.Module:
        """Return an embedding of all rows of the original table; those that were removed are 0."""
        old: Any = self.module
        index, weight = old.index, old.stored_weight
        whole = cut(
            weight, torch.ones(len(weight), dtype=torch.bool), index.rows, placed=index.kept()
        )
        made: Any = nn.EmbeddingBag if isinstance(old, nn.EmbeddingBag) else nn.Embedding
        options = {**lookup_options(old), "padding_idx": padding_id_of(old)}
        table: nn.Module = made(*whole.shape, **options, _weight=whole)
        return table.requires_grad_(weight.requires_grad).train(old.training)


def _collections() -> Any:
    # Not at the top: it needs torchrec.
    from dist_sparse.compaction import collections

    return collections


class CollectionSite(_Site):
    """A collection of TorchRec's, sharded or not."""

    padding_id: ClassVar = None

    @property
    def collection(self) -> Collection:
        """The collection as it is now."""
        return collection_of(self.module)

    @property
    def is_sharded(self) -> bool:
        """Whether TorchRec shards its tables."""
        return self.collection.is_sharded

    @property
    def has_one_width(self) -> bool:
        """Whether its tables must have the same columns, as in an EmbeddingCollection."""
        return not self.collection.pooled

    def rows(self) -> dict[str, int]:
        """Return how many rows each table stores."""
        return {table.name: table.rows for table in self.collection.tables}

    def indexes(self) -> dict[str, RowIndex]:
        """Return the index of each table that has lost rows before."""
        return {} if self.outer is None else self.outer.table_indexes()

    def parameters(self, made: Any = None) -> dict[str, nn.Parameter]:
        """Return what plain optimizers step, by table; or in the collection ``made``."""
        return collection_of(self.module if made is None else made).parameters()

    def refusal(self, model: nn.Module, narrowed: bool) -> str | None:
        """Return why it can't be compacted, as the rest of a sentence."""
        torchrec = torchrec_port()
        assert torchrec is not None  # the collection is one of its modules
        # Rows that change hands have no order to keep.
        reason = getattr(self.outer, "refused", None)
        reason = reason or torchrec.compact_refusal(model, self.module)
        return reason and f"can't be compacted: {reason}."

    def compacted(
        self, kept: Kept, widths: Mapping[str, int], model: nn.Module, default_row: bool
    ) -> nn.Module:
        """Return a compact collection; rows of a sharded one are not filled yet."""
        # Ids arrive on the device of a DistributedModelParallel.
        device: Any = getattr(model, "device", None)
        made: nn.Module = _collections().compact_collection(
            self.module, self.outer, kept, device, widths, default_row
        )
        return made

    def initial_bounds(self, table: str) -> tuple[float, float]:
        """Return between which values TorchRec draws the initial weights of a table.

        Raises:
            ValueError: it has an initializer of its own.
        """
        assert self.outer is not None
        found: tuple[float, float] = _collections().initial_bounds(self.outer, table)
        return found

    def expanded(self) -> nn.Module:
        """Return a collection of all rows of the original tables. Those of a sharded one are on the
        meta device, to be sharded and filled; otherwise those that were removed are 0."""
        assert self.outer is not None
        made: nn.Module = _collections().expanded_collection(self.module, self.outer)
        return made


Site: TypeAlias = EmbeddingSite | CollectionSite


def sites_of(model: nn.Module) -> Iterator[Site]:
    """Yield every module that holds tables, with its path in the user's module."""
    torchrec, inside = torchrec_port(), set[nn.Module]()
    modules = modules_by_path(model)
    for path, module in modules.items():
        # A collection holds its tables in embeddings, which are no sites of their own.
        if module in inside:
            continue
        collection = None if torchrec is None else torchrec.collection(module)
        if collection is not None:
            inside.update(module.modules())
            holder = modules.get(path.rpartition(".")[0])
            outer = holder if isinstance(holder, CompactCollection) else None
            tables = {table.name: collection.fqn(path, table.name) for table in collection.tables}
            yield CollectionSite(path, module, outer, tables)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            # The path of a model that is a table itself is empty.
            yield EmbeddingSite(path, module, None, {"": f"{path}.weight".lstrip(".")})


def replace_modules(root: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in the places of others, wherever ``root`` holds them; return the root, which may
    be one of them."""
    # Lists, because what they walk changes; a module may have several places.
    for module in list(root.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and child in replaced:
                setattr(module, name, replaced[child])
    return replaced.get(root, root)
