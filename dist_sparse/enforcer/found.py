"""What is registered with a sparsifier, and who writes it: a fused optimizer inside the backward, or a plain one?

TorchRec's part is looked up by name, once torchrec is in use: a model that holds its modules implies that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from dist_sparse.enforcer.dense import Target
from dist_sparse.enforcer.lookups import Place
from dist_sparse.enforcer.optimizers import same_storage
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers import dense_store as plain
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import ShardedData, Source

__all__ = [
    "averages",
    "check_not_compiled",
    "collections_of",
    "fused_kernels",
    "lookups_of",
    "models_of",
    "packed_targets",
    "places_in",
    "places_of",
    "plain_targets",
]

Places = Mapping[tuple[int, tuple[int, ...]], Place]
"""Where masks are, by the address and the shape of the weights."""


def models_of(sources: Iterable[Source]) -> list[nn.Module]:
    """The models that were registered."""
    return [source.model for source in sources if hasattr(source, "model")]


def places_of(located: Mapping[str, ShardedData]) -> Places:
    """Where the masks of this rank's shards are."""
    return {
        (shard.tensor.data_ptr(), tuple(shard.tensor.shape)): Place(name, number)
        for name, data in located.items()
        for number, shard in enumerate(data.shards)
    }


def averages(module: nn.Module) -> bool:
    """Whether a module averages copies of its tables now and then, by its method ``sync``."""
    return bool(_torchrec() and _torchrec().averages(module))


def fused_kernels(collection: nn.Module) -> Iterator[Any]:
    """The kernels of a sharded collection on this rank that hold batches of tables with a fused optimizer."""
    yield from _torchrec().fused_kernels(collection)


def collections_of(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The sharded collections in some models, each once."""
    if _torchrec() is not None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        yield from (module for module in modules if _torchrec().shards_tables(module))


def lookups_of(collection: Any) -> list[Any]:
    """The lookups of a sharded collection. A reshard makes new ones on every rank, also where no shard was or is."""
    return list(collection._lookups)


def places_in(kernel: Any, places: Places) -> list[Place | None]:
    """For each table of a kernel, where its mask is."""
    views = kernel.emb_module.split_embedding_weights()
    return [places.get((view.data_ptr(), tuple(view.shape))) for view in views]


def packed_targets(
    sources: Iterable[Source],
    located: Mapping[str, ShardedData],
    fused: set[Place],
    mask: Callable[[Place], BlockMask],
) -> Iterator[Target]:
    """The shards that no fused optimizer writes."""
    owners = [owner for source in sources for owner in _parameters(source)]
    owning = same_storage([parameter for _, _, parameter in owners])
    for name, data in located.items():
        for number, shard in enumerate(data.shards):
            place = Place(name, number)
            if place not in fused:
                target = Target(name, shard.tensor, partial(mask, place))
                for i in owning(shard.tensor)[:1]:
                    module, attribute, target.parameter = owners[i]
                    target.owner = None if module is None else (module, attribute)
                yield target


def plain_targets(sparsifier: BaseDataSparsifier) -> Iterator[Target]:
    """Plain data that is not squashed."""
    container = sparsifier._container
    for name in sparsifier.state:
        if plain.is_attached(container, name):
            weight = plain.original(container, name)
            mask = partial(_plain_mask, sparsifier, name)
            yield Target(name, weight.data, mask, weight if weight.is_leaf else None)


def check_not_compiled(model: nn.Module) -> None:
    """Refuses what hooks can't follow.

    Raises:
        ValueError: the model, or a part of it, is compiled.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run inside torch.compile, so "
                "removed weights would come back unseen. Attach to the model as it was before torch.compile."
            )


def _torchrec() -> Any:
    return importlib.import_module("dist_sparse.tables.torchrec") if "torchrec" in sys.modules else None


def _parameters(source: Any) -> Iterator[tuple[nn.Module | None, str, Tensor]]:
    """What a source has that may be trained: its module and its name there, where there is one."""
    if hasattr(source, "model"):
        for module in source.model.modules():
            yield from ((module, name, p) for name, p in module._parameters.items() if p is not None)
    else:
        pieces = source.data.local_shards() if hasattr(source.data, "local_shards") else None
        tensors = [source.data] if pieces is None else [piece.tensor for piece in pieces]
        yield from ((None, "", tensor) for tensor in tensors if tensor.is_leaf)


def _plain_mask(sparsifier: BaseDataSparsifier, name: str) -> Tensor:
    mask: Tensor = sparsifier.state[name]["mask"]
    return mask
