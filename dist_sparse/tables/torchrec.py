"""The tables of TorchRec modules, sharded or not.

The rectangles of all ranks come from the table groups that TorchRec derives for every rank when it
shards a module, so nothing communicates; the views come from the kernels. Both are read at each
call, because ``DistributedModelParallel.reshard`` replaces them. :mod:`dist_sparse.tables.modules`
and :mod:`dist_sparse.enforcer.fused` import this module once torchrec is in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import fbgemm_gpu
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import BoundsCheckMode, LazyAwaitable, ShardingEnv2D
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dist_sparse.tables.shards import Rect, Shard, ShardedData
from dist_sparse.tables.versions import check_versions

__all__ = [
    "Table",
    "averages",
    "bounds_checks",
    "check_versions",
    "collection_tables",
    "find_table",
    "fused_kernels",
    "fused_params",
    "outputs_of",
    "refusal",
    "sharded_tables",
    "shards_tables",
    "with_ids",
    "with_outputs",
]

_KERNELS: Final = ("dense", "fused", "fused_uvm")
_FUSED: Final = ("fused", "fused_uvm")
_TYPES: Final = (DataType.FP32, DataType.FP16, DataType.BF16)

# Modules that change which row an id means (or the row itself) behind the mask's back. By the
# Python module of their classes, sharded and not, so that a release without one of them imports all
# the same.
_REFUSED: Final = {
    "torchrec.modules.mc_embedding_modules": "managed collisions move ids between rows",
    "torchrec.distributed.mc_embedding_modules": "managed collisions move ids between rows",
    "torchrec.modules.itep_embedding_modules": "in-training pruning (ITEP) moves ids between rows",
    "torchrec.distributed.itep_embeddingbag": "in-training pruning (ITEP) moves ids between rows",
    "torchrec.modules.pec_embedding_modules": "PEC collections handle colliding ids on their own",
    "torchrec.distributed.pec_embedding": "PEC collections handle colliding ids on their own",
    "torchrec.distributed.embedding_tower_sharding": (
        "an embedding tower lives on the ranks of one host only"
    ),
    "torchrec.modules.fused_embedding_modules": (
        "it is a table batch of its own; use EmbeddingBagCollection"
    ),
    "torchrec.quant.embedding_modules": (
        "it is quantized; sparsify the float model before quantizing"
    ),
    "torchrec.distributed.quant_embedding": (
        "it is quantized; sparsify the float model before quantizing"
    ),
    "torchrec.distributed.quant_embeddingbag": (
        "it is quantized; sparsify the float model before quantizing"
    ),
}


class Table(NamedTuple):
    """A table: its name inside its module, its fully qualified name, and how to look it up under a
    registered name."""

    name: str
    fqn: str
    locate: Callable[[str], ShardedData]


def refusal(module: nn.Module) -> str | None:
    """Why the tables below a module of TorchRec's can't be sparsified (and what would work), or
    None."""
    strategy = getattr(getattr(module, "_env", None), "sharding_strategy", None)
    if strategy is not None and strategy.name == "FULLY_SHARDED":
        return (
            "fully sharded 2-D parallelism frees weights between forward and backward; the default"
            " strategy works"
        )
    for base in type(module).__mro__:
        if base.__module__ in _REFUSED and (
            base.__name__.startswith("Sharded") or "Collection" in base.__name__
        ):
            return _REFUSED[base.__module__]
    known = (
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        ShardedFeatureProcessedEmbeddingBagCollection,
    )
    unknown = isinstance(module, ShardedEmbeddingModule) and not isinstance(module, known)
    collections = EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
    unknown |= isinstance(module, collections) and not isinstance(
        module, (EmbeddingBagCollection, EmbeddingCollection, *known)
    )
    if unknown:
        return (
            "it is not a module that dist_sparse knows; EmbeddingBagCollection and"
            " EmbeddingCollection work"
        )
    return None


def collection_tables(
    module: nn.Module,
) -> tuple[str, nn.ModuleDict, dict[str, tuple[str, ...]]] | None:
    """The attribute, the modules and the features of an unsharded collection by table name, or None
    for another module."""
    if isinstance(module, EmbeddingBagCollection):
        attribute, configs = "embedding_bags", module.embedding_bag_configs()
    elif isinstance(module, EmbeddingCollection):
        attribute, configs = "embeddings", module.embedding_configs()
    else:
        return None
    return (
        attribute,
        getattr(module, attribute),
        {config.name: tuple(config.feature_names) for config in configs},
    )


def shards_tables(module: nn.Module) -> bool:
    """Whether a module is a sharded collection."""
    return isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection))


def averages(module: nn.Module) -> bool:
    """Whether a module averages copies of its tables now and then, by its method ``sync``."""
    return isinstance(module, DMPCollection)


def fused_kernels(module: Any) -> Iterator[Any]:
    """The kernels of a sharded collection on this rank that hold batches of tables with a fused
    optimizer."""
    for lookup in module._lookups:
        for kernel in _kernels_of(lookup):
            if any(
                config.compute_kernel.value in _FUSED for config in kernel._config.embedding_tables
            ):
                yield kernel


def fused_params(module: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of FBGEMM's kernels for each table of a sharded collection with a fused
    optimizer, the same on every rank."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        shardings = module._embedding_shardings
    else:
        shardings = module._sharding_type_to_sharding.values()
    groups = [
        group
        for sharding in shardings
        for of_rank in sharding._grouped_embedding_configs_per_rank
        for group in of_rank
    ]
    return {
        config.name: dict(config.fused_params or {})
        for group in groups
        for config in group.embedding_tables
        if "fused" in config.compute_kernel.value
    }


def bounds_checks(module: nn.Module) -> dict[str, str]:
    """Return FBGEMM's ``bounds_check_mode`` by table of a collection: ``"FATAL"``, ``"WARNING"``,
    ``"IGNORE"`` or ``"NONE"``. A table that no fused kernel holds has no mode, and is left out: its
    lookups raise."""
    if not shards_tables(module):
        return {}
    modes = {
        name: params.get("bounds_check_mode", BoundsCheckMode.WARNING)
        for name, params in fused_params(module).items()
    }
    # FBGEMM lets this variable overrule the argument.
    if overruling := os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE"):
        modes = dict.fromkeys(modes, BoundsCheckMode(int(overruling)))
    return {name: mode.name.removeprefix("V2_") for name, mode in modes.items()}


def outputs_of(module: Any) -> dict[str, str] | None:
    """The table of each output of a collection, sharded or not, in no order; None for another
    module."""
    if isinstance(module, EmbeddingBagCollection):
        configs: Any = module.embedding_bag_configs()
    elif isinstance(module, EmbeddingCollection):
        configs = module.embedding_configs()
    elif shards_tables(module):
        bags = isinstance(module, ShardedEmbeddingBagCollection)
        configs = module._embedding_bag_configs if bags else module._embedding_configs
    else:
        return None
    names = get_embedding_names_by_table(configs)
    return {name: config.name for config, some in zip(configs, names, strict=True) for name in some}


def with_outputs(output: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """What a collection returns, with each output changed once it has arrived.

    Args:
        change: takes an output's name and its values, ``(..., columns)``, and returns values of as
            many rows.
    """
    if isinstance(output, LazyAwaitable):
        output.callbacks.append(lambda arrived: with_outputs(arrived, change))
        return output
    if isinstance(output, KeyedTensor):
        if output.values().dim() != 2:
            raise ValueError(
                f"Outputs of shape {tuple(output.values().shape)} can't be turned back: must be"
                " 2-D."
            )
        keys, widths = output.keys(), output.length_per_key()
        parts = [
            change(key, part)
            for key, part in zip(keys, output.values().split(widths, dim=1), strict=True)
        ]
        return KeyedTensor(keys, [part.shape[1] for part in parts], torch.cat(parts, dim=1))
    return {
        key: JaggedTensor(
            change(key, found.values()),
            found.weights_or_none(),
            found.lengths_or_none(),
            found.offsets_or_none(),
        )
        for key, found in output.items()
    }


def with_ids(
    features: KeyedJaggedTensor, values: Tensor, lengths: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    """The same features of the same samples with other ids."""
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=weights,
        lengths=lengths,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def find_table(module: nn.Module, path: str, table: str, name: str) -> ShardedData:
    """One table of a sharded collection at ``path``, as it is stored now, under a registered
    name."""
    attribute = (
        "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
    )
    return _Collection(module).locate(table, f"{path}.{attribute}.{table}.weight".lstrip("."), name)


def sharded_tables(module: nn.Module, path: str) -> list[Table] | None:
    """The tables of a sharded collection at ``path``, in the order of its configs; None for another
    module."""
    if not shards_tables(module):
        return None
    attribute = (
        "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
    )
    collection = _Collection(module)
    prefix = f"{path}.{attribute}" if path else attribute
    return [
        Table(t, f"{prefix}.{t}.weight", partial(collection.locate, t, f"{prefix}.{t}.weight"))
        for t in collection.names
    ]


@dataclass
class _Pieces:
    """One table: its config (any shard's), the rectangles of every rank and this rank's views, both
    in kernel order."""

    config: Any
    held: list[list[Rect]]
    views: list[Tensor] = field(default_factory=list)


class _Collection:
    """A sharded collection at this moment, read when its first table is located. Lives no longer
    than one walk."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module  # TorchRec's internals are untyped for us
        names: Any = module._table_names
        self.names: list[str] = list(names)

    @cached_property
    def _places(self) -> dict[int, int]:
        """For each global rank that holds the tables, in order: its number among those that share
        one copy."""
        env = self._module._env
        if isinstance(env, ShardingEnv2D):
            copies = env.device_mesh.mesh.tolist()  # a row of ranks for each copy
            return dict(sorted((rank, place) for copy in copies for place, rank in enumerate(copy)))
        if env.process_group is None and env.world_size > 1:
            raise ValueError(
                "A module sharded by ShardingEnv.from_local is for inference; shard it over a"
                " process group."
            )
        if env.world_size == 1:
            return {0: 0}
        return {
            rank: place
            for place, rank in enumerate(dist.get_process_group_ranks(env.process_group))
        }

    @cached_property
    def _pieces(self) -> dict[str, _Pieces]:
        pieces: dict[str, _Pieces] = {}
        world = self._module._env.world_size
        for sharding, lookup in zip(self._shardings(), self._module._lookups, strict=True):
            for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
                for config in (config for group in groups for config in group.embedding_tables):
                    known = pieces.setdefault(
                        config.name, _Pieces(config, [[] for _ in range(world)])
                    )
                    known.held[rank].append(_rect(config))
            for config, view in _views(lookup):
                pieces[config.name].views.append(view)
        return pieces

    def _shardings(self) -> list[Any]:
        if isinstance(self._module, ShardedEmbeddingBagCollection):
            return list(self._module._embedding_shardings)
        return list(self._module._sharding_type_to_sharding.values())

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        places = self._places
        pieces = self._pieces[table]
        config = pieces.config
        kernel = config.compute_kernel.value
        if kernel not in _KERNELS:
            raise ValueError(
                f"Table {name!r}: the compute kernel {kernel!r} is not supported;"
                f" {', '.join(_KERNELS)} are."
            )
        if config.data_type not in _TYPES:
            types = ", ".join(each.value for each in _TYPES)
            raise ValueError(
                f"Table {name!r}: weights of type {config.data_type.value} are not supported;"
                f" {types} are."
            )
        copied = isinstance(self._module._env, ShardingEnv2D) and config.local_metadata is not None
        if copied and kernel not in _FUSED:
            raise ValueError(
                f"Table {name!r}: TorchRec's 2-D parallelism never averages tables with the compute"
                f" kernel {kernel!r}, so that its copies drift apart. Give it a fused optimizer, or"
                " make it data-parallel."
            )
        held = pieces.held[self._module._env.rank]
        sizes = [(rect.rows, rect.cols) for rect in held]
        if [tuple(view.shape) for view in pieces.views] != sizes:
            found = [tuple(view.shape) for view in pieces.views]
            raise ValueError(
                f"Table {name!r}: TorchRec's metadata says this rank holds {sizes}, its kernels"
                f" hold {found}."
            )
        whole = (
            config.global_metadata.size
            if config.global_metadata is not None
            else (config.local_rows, config.local_cols)
        )
        return ShardedData(
            name=name,
            shape=(whole[0], whole[1]),
            dtype=data_type_to_dtype(config.data_type),
            sharding=self._module.module_sharding_plan[table].sharding_type,
            ranks=tuple(places) if len(places) > 1 else None,
            # A row-wise table smaller than the world leaves the last ranks pieces of zero rows:
            # nothing to hold.
            tiling=tuple(
                tuple(r for r in pieces.held[place] if r.numel) for place in places.values()
            ),
            shards=tuple(
                Shard(rect, view.data)
                for rect, view in zip(held, pieces.views, strict=True)
                if rect.numel
            ),
            kernel=kernel,
            fqn=fqn,
            features=tuple(config.feature_names),
            copied=copied,
        )


def _rect(config: Any) -> Rect:
    """The rectangle of a shard. Data-parallel tables have no metadata: every rank holds the
    whole."""
    if config.local_metadata is None:
        return Rect(0, 0, config.local_rows, config.local_cols)
    (row, col), (rows, cols) = (
        config.local_metadata.shard_offsets,
        config.local_metadata.shard_sizes,
    )
    return Rect(row, col, rows, cols)


def _kernels_of(lookup: Any) -> Iterator[Any]:
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    yield from lookup._emb_modules


def _views(lookup: Any) -> Iterator[tuple[Any, Tensor]]:
    """The live weights behind one lookup, shard by shard, as (config, view)."""
    for kernel in _kernels_of(lookup):
        configs = kernel._config.embedding_tables
        # Key-value and virtual tables materialise their weights when read: locate() refuses them,
        # nothing reads them.
        if all(
            config.compute_kernel.value in _KERNELS or "uvm" in config.compute_kernel.value
            for config in configs
        ):
            yield from zip(configs, kernel.emb_module.split_embedding_weights(), strict=True)


check_versions(
    str(torch.__version__),
    str(getattr(torchrec, "__version__", "?")),
    str(getattr(fbgemm_gpu, "__version__", "?")),
)
