"""The tables of TorchRec's collections, sharded or not, and FBGEMM's batches of tables that have a
fused optimizer.

The rectangles of all ranks come from the table groups that TorchRec derives for every rank when it
shards a module, so nothing communicates; the views come from the kernels. Both are read for each
:class:`ShardedTables`, because ``DistributedModelParallel.reshard`` replaces them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final

import fbgemm_gpu
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.protocols import Collection, TableConfig
from dist_sparse.tables.shards import CACHED, Rect, Shard, ShardedData, whole
from dist_sparse.tables.tensors import steps_in_backward
from dist_sparse.torchrec import check_versions
from dist_sparse.torchrec.kernels import FbgemmBatch, Kernel, write_back

# Before TorchRec's own modules, whose errors name no release.
check_versions(torch.__version__, torchrec.__version__, fbgemm_gpu.__version__)

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection, get_module
from torchrec.distributed.types import (
    BoundsCheckMode,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv2D,
    ShardingPlan,
    ShardingStrategy,
)
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_FUSED: Final = ("fused", "fused_uvm", CACHED)
_KERNELS: Final = ("dense", *_FUSED)
_TYPES: Final = (DataType.FP32, DataType.FP16, DataType.BF16)

_KNOWN: Final = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
_BAGS: Final = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
_SHARDED: Final = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_FEATURE_PROCESSED: Final = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
_ANY_COLLECTION: Final = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    ShardedEmbeddingModule,
)

_QUANTIZED: Final = "it is quantized; sparsify the float model before quantizing"
_COLLISIONS: Final = "managed collisions move ids between rows"
_ITEP: Final = "in-training pruning (ITEP) moves ids between rows"
_PEC: Final = "PEC collections handle colliding ids on their own"

REFUSED: Final = {
    "torchrec.modules.mc_embedding_modules": _COLLISIONS,
    "torchrec.distributed.mc_embedding_modules": _COLLISIONS,
    "torchrec.modules.itep_embedding_modules": _ITEP,
    "torchrec.distributed.itep_embeddingbag": _ITEP,
    "torchrec.modules.pec_embedding_modules": _PEC,
    "torchrec.distributed.pec_embedding": _PEC,
    "torchrec.distributed.embedding_tower_sharding": (
        "an embedding tower lives on the ranks of one host only"
    ),
    "torchrec.modules.fused_embedding_modules": (
        "it is a table batch of its own; use EmbeddingBagCollection"
    ),
    "torchrec.quant.embedding_modules": _QUANTIZED,
    "torchrec.distributed.quant_embedding": _QUANTIZED,
    "torchrec.distributed.quant_embeddingbag": _QUANTIZED,
}
"""Python modules whose collections change behind a mask which row an id means, or the row itself,
and why. Not imported: several are slow."""


def refusal(module: nn.Module) -> str | None:
    """Return why the tables below a module of TorchRec's can't be sparsified, and what would work;
    None if they can."""
    env = module._env if isinstance(module, _SHARDED) else None
    # One-dimensional parallelism has no strategy.
    strategy = getattr(env, "sharding_strategy", None)
    if strategy is ShardingStrategy.FULLY_SHARDED:
        return (
            "fully sharded 2-D parallelism frees weights between forward and backward; the default"
            " strategy works"
        )
    for base in type(module).__mro__:
        # These files have helpers besides, which hold no tables.
        if base.__module__ in REFUSED and re.search("^Sharded|Collection", base.__name__):
            return REFUSED[base.__module__]
    if isinstance(module, _ANY_COLLECTION) and not isinstance(module, _KNOWN):
        return (
            "it is not a module that dist_sparse knows; EmbeddingBagCollection and"
            " EmbeddingCollection work"
        )
    return None


def processes_features(module: nn.Module) -> bool:
    """Return whether a module reads the collection in it without calling it, behind a feature
    processor."""
    return isinstance(module, _FEATURE_PROCESSED)


def averages(module: nn.Module) -> bool:
    """Return whether a module averages copies of its tables now and then, by its method
    ``sync``."""
    return isinstance(module, DMPCollection)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded collection."""
    return isinstance(module, _SHARDED)


def lookups(module: nn.Module) -> list[nn.Module]:
    """Return the lookups of a sharded collection, [] of another module."""
    return list(module._lookups) if isinstance(module, _SHARDED) else []


def collection(module: nn.Module) -> Collection | None:
    """Return a collection as it is now, None for another module."""
    if is_sharded(module):
        return ShardedTables(module)
    if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
        return UnshardedTables(module)
    return None


def configs_of(module: Any) -> list[Any]:
    """Return TorchRec's own configurations of a collection's tables, of a compact one too."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        return list(module._embedding_bag_configs)
    if isinstance(module, ShardedEmbeddingCollection):
        return list(module._embedding_configs)
    bags = hasattr(module, "embedding_bag_configs")
    return list(module.embedding_bag_configs() if bags else module.embedding_configs())


def table_configs(configs: Sequence[Any], pooled: bool) -> list[TableConfig]:
    """Return TorchRec's configurations as the package has them, of bags if ``pooled``."""
    found = []
    for config in configs:
        pooling: Any = config.pooling.value.lower() if pooled else "none"
        features = tuple(config.feature_names)
        found.append(TableConfig(config.name, features, config.num_embeddings, pooling))
    return found


class UnshardedTables:
    """An ``EmbeddingBagCollection`` or ``EmbeddingCollection``: a
    :class:`~dist_sparse.tables.protocols.Collection`."""

    is_sharded = weighted = needs_indices = False

    def __init__(self, module: Any) -> None:
        self._module = module  # TorchRec is untyped for us
        self._configs = configs_of(module)
        self.pooled = isinstance(module, _BAGS)
        self.attribute = "embedding_bags" if self.pooled else "embeddings"
        # Only bags have weighted ids, and only sequences return the ids themselves.
        if self.pooled:
            self.weighted = module._is_weighted
        else:
            self.needs_indices = module._need_indices

    @property
    def tables(self) -> list[TableConfig]:
        """The tables in TorchRec's order."""
        return table_configs(self._configs, self.pooled)

    def fqn(self, path: str, table: str) -> str:
        """Return the fully qualified name of a table's weight in a collection at ``path``."""
        return f"{path}.{self.attribute}.{table}.weight".lstrip(".")

    def outputs(self) -> dict[str, str]:
        """Return the table of each output, in no order."""
        found = {}
        by_table = get_embedding_names_by_table(self._configs)
        for config, names in zip(self._configs, by_table, strict=True):
            found.update(dict.fromkeys(names, config.name))
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what plain optimizers step on this rank, by table."""
        return {
            name.split(".")[-2]: parameter  # "embedding_bags.TABLE.weight"
            for name, parameter in self._module.named_parameters()
            if not steps_in_backward(parameter)
        }

    def embeddings(self) -> dict[str, nn.Module]:
        """Return the embedding modules by table; none if kernels have the weights."""
        return dict(getattr(self._module, self.attribute).items())

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        """Return a table under a registered name; this rank holds it whole."""
        weight = self.embeddings()[table].get_parameter("weight")
        return whole(name, weight.data, fqn=fqn)

    def kernels(self) -> Iterator[Kernel]:
        """Yield this rank's kernels."""
        yield from ()

    def batches(self) -> Iterator[FbgemmBatch]:
        """Yield this rank's table batches with a fused optimizer."""
        yield from ()

    def bounds_checks(self) -> dict[str, str]:
        """Return FBGEMM's ``bounds_check_mode`` by table with a fused kernel."""
        return {}

    def optimizers(self) -> list[Any]:
        """Return the fused optimizers."""
        return []

    def set_hyperparameters(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Set the hyperparameters of fused optimizers by table.

        Raises:
            ValueError: two tables that the plan brings into one kernel differ in them.
        """
        for batch in self.batches():
            names = list(batch.tables)
            if any(values[name] != values[names[0]] for name in names):
                raise ValueError(
                    f"The tables {names} share a kernel in the new plan, but their optimizers'"
                    " hyperparameters differ."
                )
            batch.set_hyperparameters(values[names[0]])


@dataclass
class _Pieces:
    """One table: its config (any shard's), the rectangles of every rank and this rank's views, both
    in kernel order, and the kernel of each view."""

    config: Any
    held: list[list[Rect]]
    views: list[Tensor] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)


class ShardedTables(UnshardedTables):
    """A sharded collection at this moment, read when its first table is located: a
    :class:`~dist_sparse.tables.protocols.Collection`. Lives no longer than one walk."""

    is_sharded = True

    def embeddings(self) -> dict[str, nn.Module]:
        """Return {}: kernels have the weights."""
        return {}

    def kernels(self) -> Iterator[Kernel]:
        """Yield this rank's kernels, whoever steps their tables."""
        yield from map(Kernel, self._kernels())

    def _kernels(self) -> Iterator[Any]:
        return chain.from_iterable(map(_kernels_of, self._module._lookups))

    def batches(self) -> Iterator[FbgemmBatch]:
        """Yield this rank's table batches with a fused optimizer."""
        for kernel in self._kernels():
            configs = kernel._config.embedding_tables
            if any(config.compute_kernel.value in _FUSED for config in configs):
                yield FbgemmBatch(kernel)

    def fused_params(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of FBGEMM's kernels for each table with a fused optimizer, the same
        on every rank."""
        return {
            config.name: dict(config.fused_params or {})
            for sharding in self._shardings()
            for _, config in _placed(sharding)
            if "fused" in config.compute_kernel.value
        }

    def bounds_checks(self) -> dict[str, str]:
        """Return FBGEMM's ``bounds_check_mode`` by table with a fused kernel."""
        modes = {
            name: params.get("bounds_check_mode", BoundsCheckMode.WARNING)
            for name, params in self.fused_params().items()
        }
        # FBGEMM lets this variable overrule the argument.
        if overruling := os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE"):
            modes = dict.fromkeys(modes, BoundsCheckMode(int(overruling)))
        return {name: mode.name.removeprefix("V2_") for name, mode in modes.items()}

    def optimizers(self) -> list[Any]:
        """Return the fused optimizers."""
        return [optimizer for _, optimizer in self._module.fused_optimizer.optimizers]

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        """Return a table as it is stored now, under a registered name.

        Raises:
            ValueError: it is stored in a way that masks do not follow.
        """
        places = self._places
        pieces = self._pieces[table]
        config = pieces.config
        copied = isinstance(self._module._env, ShardingEnv2D) and config.local_metadata is not None
        _refuse_unknown_storage(name, config, copied)
        held = pieces.held[self._module._env.rank]
        sizes = [(rect.rows, rect.cols) for rect in held]
        found = [tuple(view.shape) for view in pieces.views]
        if found != sizes:
            raise ValueError(
                f"Table {name!r}: TorchRec's metadata says this rank holds {sizes}, its kernels"
                f" hold {found}."
            )
        if config.compute_kernel.value == CACHED:
            # The caller may read and write the weights until the next lookup.
            for kernel in pieces.kernels:
                write_back(kernel)
        return ShardedData(
            name=name,
            shape=_shape(config),
            dtype=data_type_to_dtype(config.data_type),
            sharding=self._module.module_sharding_plan[table].sharding_type,
            ranks=tuple(places) if len(places) > 1 else None,
            # A row-wise table smaller than the world leaves the last ranks pieces of zero rows:
            # nothing to hold.
            tiling=tuple(_not_empty(pieces.held[place]) for place in places.values()),
            shards=tuple(
                Shard(rect, view.data)
                for rect, view in zip(held, pieces.views, strict=True)
                if rect.numel
            ),
            kernel=config.compute_kernel.value,
            fqn=fqn,
            features=tuple(config.feature_names),
            copied=copied,
        )

    @cached_property
    def _places(self) -> dict[int, int]:
        """For each global rank that holds the tables, in order: its number among those that share
        one copy."""
        env = self._module._env
        if isinstance(env, ShardingEnv2D):
            # A row of ranks for each copy.
            mesh = env.device_mesh.mesh
            places = torch.arange(mesh.shape[1]).expand_as(mesh)
            pairs = zip(mesh.flatten().tolist(), places.flatten().tolist(), strict=True)
            return dict(sorted(pairs))
        if env.world_size == 1:
            return {0: 0}
        if env.process_group is None:
            raise ValueError(
                "A module sharded by ShardingEnv.from_local is for inference; shard it over a"
                " process group."
            )
        ranks = dist.get_process_group_ranks(env.process_group)
        return {rank: place for place, rank in enumerate(ranks)}

    @cached_property
    def _pieces(self) -> dict[str, _Pieces]:
        pieces: dict[str, _Pieces] = {}
        world = self._module._env.world_size
        # TorchRec has one lookup for each sharding, in the same order.
        for sharding, lookup in zip(self._shardings(), self._module._lookups, strict=True):
            for rank, config in _placed(sharding):
                empty = _Pieces(config, [[] for _ in range(world)])
                pieces.setdefault(config.name, empty).held[rank].append(_rect(config))
            for kernel in _kernels_of(lookup):
                for config, view in _views(kernel):
                    pieces[config.name].views.append(view)
                    pieces[config.name].kernels.append(kernel)
        return pieces

    def _shardings(self) -> list[Any]:
        if self.pooled:
            return list(self._module._embedding_shardings)
        return list(self._module._sharding_type_to_sharding.values())


def _placed(sharding: Any) -> Iterator[tuple[int, Any]]:
    """The rank and the config of every shard of a sharding's tables, in kernel order."""
    for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
        for group in groups:
            for config in group.embedding_tables:
                yield rank, config


def _refuse_unknown_storage(name: str, config: Any, copied: bool) -> None:
    kernel = config.compute_kernel.value
    types = ", ".join(each.value for each in _TYPES)
    rules = (
        (
            kernel not in _KERNELS,
            f"the compute kernel {kernel!r} is not supported; {', '.join(_KERNELS)} are.",
        ),
        # Releases before 1.8 have no such field.
        (
            getattr(config, "stash_weights", False),
            "memory stashing moves its weights away between forward and backward, where masks do"
            " not follow. Set stash_weights=False in its configuration.",
        ),
        (
            config.data_type not in _TYPES,
            f"weights of type {config.data_type.value} are not supported; {types} are.",
        ),
        (
            copied and kernel not in _FUSED,
            "TorchRec's 2-D parallelism never averages tables with the compute kernel"
            f" {kernel!r}, so that its copies drift apart. Give it a fused optimizer, or make it"
            " data-parallel.",
        ),
    )
    for holds, reason in rules:
        if holds:
            raise ValueError(f"Table {name!r}: {reason}")


def _shape(config: Any) -> tuple[int, int]:
    if config.global_metadata is None:  # data-parallel
        return config.local_rows, config.local_cols
    rows, cols = config.global_metadata.size
    return rows, cols


def _rect(config: Any) -> Rect:
    """The rectangle of a shard. Data-parallel tables have no metadata: every rank holds the
    whole."""
    if config.local_metadata is None:
        return Rect(0, 0, config.local_rows, config.local_cols)
    return Rect(*config.local_metadata.shard_offsets, *config.local_metadata.shard_sizes)


def _not_empty(rects: Sequence[Rect]) -> tuple[Rect, ...]:
    return tuple(rect for rect in rects if rect.numel)


def _kernels_of(lookup: Any) -> Iterator[Any]:
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    yield from lookup._emb_modules


def _views(kernel: Any) -> Iterator[tuple[Any, Tensor]]:
    """The live weights of a kernel, shard by shard, as (config, view)."""
    configs = kernel._config.embedding_tables
    # Key-value and virtual tables materialise their weights when read: locate() refuses them,
    # nothing reads them.
    if all(config.compute_kernel.value in _KERNELS for config in configs):
        yield from zip(configs, kernel.emb_module.split_embedding_weights(), strict=True)
