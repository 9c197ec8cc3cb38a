"""The tables of TorchRec's collections, sharded or not, and FBGEMM's kernels, which look tables up.

When TorchRec shards a module, it derives the table groups of all ranks. The rectangles of all ranks
come from these groups, so nothing communicates; the views of the weights come from the kernels.
Each :class:`ShardedTables` reads both, because ``DistributedModelParallel.reshard`` replaces them.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import fbgemm_gpu
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.groups import several
from dist_sparse.tables.protocols import TableCollection, TableConfig, WeightsOf
from dist_sparse.tables.shards import (
    CACHED,
    FUSED,
    Rect,
    Shard,
    ShardedData,
    not_empty,
    steps_in_backward,
    whole,
)
from dist_sparse.torchrec import check_versions

# Check the releases first: import errors of TorchRec's modules name no release.
check_versions(torch.__version__, torchrec.__version__, fbgemm_gpu.__version__)

from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.comm_ops import get_gradient_division
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

_KERNELS = ("dense", *FUSED)
_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)

_BAGS = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
_SEQUENCES = (EmbeddingCollection, ShardedEmbeddingCollection)
# TorchRec derives a sharded feature processor from its collections; the one inside has the tables.
_KNOWN = (*_BAGS, *_SEQUENCES, ShardedFeatureProcessedEmbeddingBagCollection)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_UNSHARDED = EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

_QUANTIZED = "it is quantized; sparsify the float model before quantizing"
_COLLISIONS = "managed collisions move ids between rows"
_ITEP = "in-training pruning (ITEP) moves ids between rows"
_PEC = "PEC collections handle colliding ids on their own"

# Python modules whose collections change which row an id names, or the row itself, without the
# enforcer seeing it; and the reason. By name: importing them would take seconds.
REFUSED = {
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
        "it is a separate table batch; use EmbeddingBagCollection"
    ),
    "torchrec.quant.embedding_modules": _QUANTIZED,
    "torchrec.distributed.quant_embedding": _QUANTIZED,
    "torchrec.distributed.quant_embeddingbag": _QUANTIZED,
}


def refusal(module: nn.Module) -> str | None:
    """Return why the tables below a TorchRec module can't be sparsified, and what would work; None
    if they can."""
    env = module._env if isinstance(module, _SHARDED) else None
    if isinstance(env, ShardingEnv2D) and env.sharding_strategy is ShardingStrategy.FULLY_SHARDED:
        return (
            "fully sharded 2-D parallelism frees weights between forward and backward; the default"
            " strategy works"
        )
    for base in type(module).__mro__:
        # These Python modules have helper modules too, which hold no tables.
        if base.__module__ in REFUSED and re.search("^Sharded|Collection", base.__name__):
            return REFUSED[base.__module__]
    holds_tables = isinstance(module, (*_UNSHARDED, ShardedEmbeddingModule))
    if holds_tables and not isinstance(module, _KNOWN):
        return (
            "it is not a module that dist_sparse knows; EmbeddingBagCollection and"
            " EmbeddingCollection work"
        )
    return None


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded collection."""
    return isinstance(module, _SHARDED)


def lookups(module: nn.Module) -> list[nn.Module]:
    """Return the lookups of a sharded collection, [] of another module."""
    return list(module._lookups) if isinstance(module, _SHARDED) else []


def collection(module: nn.Module) -> TableCollection | None:
    """Return a collection as it is now, None for another module."""
    if isinstance(module, _SHARDED):
        return ShardedTables(module)
    if isinstance(module, _BAGS + _SEQUENCES):
        return UnshardedTables(module)
    return None


def configs_of(module: Any) -> list[Any]:
    """Return TorchRec's configurations of the tables of a collection, compact ones included."""
    if is_sharded(module):
        return list(module._table_name_to_config.values())
    bags = hasattr(module, "embedding_bag_configs")
    return list(module.embedding_bag_configs() if bags else module.embedding_configs())


def uniform_bounds(config: Any) -> tuple[float, float] | None:
    """Return the bounds of the uniform distribution of a table's initial values; None if the
    table has another initializer."""
    # TorchRec's configuration sets the default: a partial of uniform_ with its bounds.
    if getattr(config.init_fn, "func", None) is not nn.init.uniform_:
        return None
    given = config.init_fn.keywords
    return given.get("a", 0.0), given.get("b", 1.0)


def table_configs(configs: Sequence[Any]) -> list[TableConfig]:
    """Return the package's form of TorchRec's configurations."""
    found = []
    for config in configs:
        # Configurations of sequences have no such field.
        pooling: Any = getattr(config, "pooling", PoolingType.NONE).value.lower()
        features = tuple(config.feature_names)
        rows, drawn = config.num_embeddings, uniform_bounds(config)
        found.append(TableConfig(config.name, features, rows, pooling, drawn))
    return found


# Optimizers that leave a zero weight alone if its gradient is zero: the step is a sum of multiples
# of both.
ZERO_KEEPERS = {
    "SGD",
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
}


# Optimizers that write only rows that the batch has looked up.
ROW_WRITERS = {
    *ZERO_KEEPERS,
    "LARS_SGD",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "EXACT_ROWWISE_WEIGHTED_ADAGRAD",
}

# Modes of weight decay that shrink a weight by a multiple of itself. The others count the lookups
# of each row, or compare norms.
_PLAIN_DECAYS = {"NONE", "L2", "DECOUPLE"}

_HYPERPARAMETERS = ("eps", "beta1", "beta2", "weight_decay")

# Lookups whose backward has not run yet, by FBGEMM's module: it outlives each FbgemmBatch.
_pending: WeakKeyDictionary[nn.Module, WeakSet[object]] = WeakKeyDictionary()


class Kernel:
    """A :class:`~dist_sparse.tables.protocols.LookupKernel`.

    Args:
        kernel: TorchRec's module around the batch.
    """

    def __init__(self, kernel: Any) -> None:
        self.module: Any = kernel
        self._batch: Any = kernel.emb_module
        self.features: list[int] = list(kernel._feature_table_map)
        self._own_pooling: Any = self._batch.pooling_mode
        self.pooling: Literal["sum", "mean", "none"] = self._own_pooling.name.lower()

    @property
    def divides_later(self) -> bool:
        """Whether sums become means after the output distribution, as in row-wise tables."""
        tables = self.module._config.embedding_tables
        return self.pooling == "sum" and any(table.pooling is PoolingType.MEAN for table in tables)

    @property
    def loss_share(self) -> float:
        """What the gradient of a rank's loss is multiplied by on its way to the output of the
        kernel; see :class:`~dist_sparse.tables.protocols.LookupKernel`."""
        # The output distribution divides gradients by the number of its ranks. A data-parallel
        # table has none, and no metadata: DDP averages the gradients of the parameter later.
        is_cut = any(table.local_metadata for table in self.module._config.embedding_tables)
        ranks = dist.get_world_size(self.module._pg) if is_cut and get_gradient_division() else 1
        return 1 / ranks

    def weights(self) -> list[Tensor]:
        """Return live views of the shards."""
        return list(self._batch.split_embedding_weights())

    def write_back(self) -> None:
        """Write rows that FBGEMM caches on the device back to the tables, and empty the cache; see
        :meth:`~dist_sparse.tables.protocols.TableBatch.write_back`."""
        # Empty on CPUs, and with other compute kernels.
        if not self._batch.lxu_cache_weights.numel():
            return
        configs = self.module._config.embedding_tables
        tables = [config.name for config in configs if config.compute_kernel.value == CACHED]
        start = f"The tables {tables} have the compute kernel {CACHED!r}, and"
        if self._batch.timesteps_prefetched:
            raise ValueError(
                f"{start} prefetched rows can't be written back from the cache: use"
                " TrainPipelineSparseDist, which has none."
            )
        # The backward would write to cache slots that hold other rows by then.
        if _pending.get(self._batch):
            raise ValueError(
                f"{start} a lookup waits for its backward: update masks and read weights after it,"
                " and free outputs that get none."
            )
        self._batch.flush()
        self._batch.reset_cache_states()


class FbgemmBatch(Kernel):
    """A :class:`~dist_sparse.tables.protocols.TableBatch`.

    Args:
        kernel: TorchRec's module around the batch.

    Raises:
        ValueError: its optimizer is not known, so that it may write rows that no hook announces.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        self.tables = [config.name for config in kernel._config.embedding_tables]
        self.kernel: nn.Module = self._batch
        self.update_rule: str = self._batch.optimizer.name
        self.is_adagrad = "ADAGRAD" in self.update_rule
        if self.update_rule not in ROW_WRITERS:
            raise ValueError(
                f"The tables {self.tables} have the fused optimizer {self.update_rule}, which may"
                " write rows that no batch has looked up, removed ones too."
            )

    @property
    def keeps_zeros(self) -> bool:
        """Whether its optimizer leaves a row of zeros alone if the gradient is zero."""
        # Adam moves it by its moments; LAMB and LARS divide by the norms of the row and its update.
        if self.update_rule not in ZERO_KEEPERS:
            return False
        # Adagrad divides by the root of its sums plus eps: 0 by 0 without eps.
        plain_decay = self._batch.weight_decay_mode.name in _PLAIN_DECAYS
        return not self.is_adagrad or (self._batch.optimizer_args.eps > 0 and plain_decay)

    @property
    def cached(self) -> set[int]:
        """The tables whose rows FBGEMM caches on the device. TorchRec may put them into one kernel
        with other tables."""
        return {table for table, kind in enumerate(_compute_kernels(self.module)) if kind == CACHED}

    @property
    def pending(self) -> MutableSet[object]:
        """Lookups whose backward has not run yet."""
        return _pending.setdefault(self.kernel, WeakSet())

    def states(self) -> list[Sequence[Tensor]]:
        """Return live views of each shard's optimizer state."""
        # SGD has none, not even an empty one for each table.
        return self._batch.split_optimizer_states() or [()] * len(self.tables)

    def storage(self) -> list[Tensor]:
        """Return the tensors that hold the weights of all shards."""
        batch = self._batch
        stored = []
        for memory in (batch.weights_dev, batch.weights_host, batch.weights_uvm):
            if memory.numel():
                stored.append(memory)
        return stored

    def mask_weights(self, call: dict[str, Any], weights_of: WeightsOf) -> dict[str, Any]:
        """Return the keywords of a pooled lookup in which some ids have the weight 0; see
        :meth:`~dist_sparse.tables.protocols.TableBatch.mask_weights`."""
        ids, offsets = call["indices"], call["offsets"]
        if not ids.numel():
            return call
        given = call.get("per_sample_weights")
        # FBGEMM's mean does not work with weights: a sum with weights 1 / length replaces it. Its
        # mean of weighted ids must not change.
        if given is None and self.pooling == "mean":
            given = _shares(offsets, ids.numel())
            self._batch.pooling_mode = type(self._own_pooling).SUM
        ends = self._ends(offsets, call.get("batch_size_per_feature_per_rank"))
        weights = weights_of(ids, ends, given)
        changed = {**call, "per_sample_weights": weights}
        # Otherwise FBGEMM would compute gradients of the weights, which nothing uses.
        if not weights.requires_grad:
            changed["feature_requires_grad"] = self._no_gradients
        return changed

    @cached_property
    def _no_gradients(self) -> Tensor:
        # Kept: on a device, each new one is a launch.
        return torch.zeros(len(self.features), dtype=torch.int32, device=self._batch.current_device)

    def restore_pooling(self, *_: object) -> None:
        """Pool as before :meth:`mask_weights`. A forward hook of FBGEMM's module."""
        self._batch.pooling_mode = self._own_pooling

    def _ends(
        self, offsets: Tensor, sizes: Sequence[Sequence[int]] | None
    ) -> Sequence[int] | Tensor:
        """Return the offsets of the features in the ids; on a device without waiting for it.

        Args:
            offsets: of the bags in the ids.
            sizes: for each feature the number of its bags from each rank; None if all features have
                as many bags.
        """
        if sizes is None:
            ends = offsets[:: (offsets.numel() - 1) // len(self.features)]
        else:
            first_bags = [0, *accumulate(map(sum, sizes))]
            on_host = torch.tensor(first_bags, pin_memory=offsets.is_cuda)
            ends = offsets[on_host.to(offsets.device, non_blocking=True)]
        return ends.tolist() if ends.is_cpu else ends

    def hyperparameters(self) -> dict[str, float]:
        """Return the hyperparameters that FBGEMM can change, and the step count."""
        arguments = self._batch.optimizer_args
        known = {name: float(getattr(arguments, name)) for name in _HYPERPARAMETERS}
        return {
            **known,
            "lr": self._batch.get_learning_rate(),
            "step": int(self._batch.iter.item()),
        }

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Set them, all of :meth:`hyperparameters`."""
        changed = dict(values)
        self._batch.set_optimizer_step(int(changed.pop("step")))
        self._batch.update_hyper_parameters(changed)
        # TorchRec's optimizer sets the kernel's learning rate to its own at every step.
        for group in self.module.fused_optimizer.param_groups:
            group["lr"] = changed["lr"]


def _shares(offsets: Tensor, count: int) -> Tensor:
    """Return for each id 1 / the number of ids in its bag, float32 ``(count,)``."""
    lengths = offsets.diff()
    # Without output_size, torch would wait for the device to learn it.
    return torch.repeat_interleave(lengths.float().reciprocal_(), lengths, output_size=count)


class UnshardedTables:
    """An ``EmbeddingBagCollection`` or ``EmbeddingCollection``: a
    :class:`~dist_sparse.tables.protocols.TableCollection`."""

    is_sharded = False

    def __init__(self, module: Any) -> None:
        self._module = module
        self._configs = configs_of(module)
        self.pooled = isinstance(module, _BAGS)
        # Only bags have weighted ids, and only sequences return the ids themselves.
        self.weighted = self.needs_indices = False
        # Only sharded sequences have it, from their sharder or from set_ec_index_dedup().
        self.merges_ids = bool(getattr(module, "_use_index_dedup", False))
        if self.pooled:
            self.attribute, self.weighted = "embedding_bags", module._is_weighted
        else:
            self.attribute, self.needs_indices = "embeddings", module._need_indices

    @property
    def tables(self) -> list[TableConfig]:
        """The tables in TorchRec's order."""
        return table_configs(self._configs)

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
            # "embedding_bags.TABLE.weight"
            name.split(".")[-2]: parameter
            for name, parameter in self._module.named_parameters()
            if not steps_in_backward(parameter)
        }

    def embeddings(self) -> dict[str, nn.Module]:
        """Return the embedding modules by table."""
        return dict(getattr(self._module, self.attribute).items())

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        """Return a table under a registered name; this rank holds it whole."""
        weight = self.embeddings()[table].get_parameter("weight")
        return whole(name, weight.data, fqn=fqn)

    def _torchrec_kernels(self) -> Iterator[Any]:
        """Yield TorchRec's modules around this rank's FBGEMM kernels."""
        return iter(())

    def _shard_configs(self) -> Iterator[tuple[int, Any]]:
        """Yield the rank and the config of every shard, in kernel order."""
        return iter(())

    def kernels(self) -> Iterator[Kernel]:
        """Yield this rank's kernels, with or without a fused optimizer."""
        yield from map(Kernel, self._torchrec_kernels())

    def batches(self) -> Iterator[FbgemmBatch]:
        """Yield this rank's table batches with a fused optimizer."""
        for kernel in self._torchrec_kernels():
            if not set(FUSED).isdisjoint(_compute_kernels(kernel)):
                yield FbgemmBatch(kernel)

    def fused_params(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of FBGEMM's kernels for each table with a fused optimizer, the same
        on every rank."""
        return {
            config.name: dict(config.fused_params or {})
            for _, config in self._shard_configs()
            if "fused" in config.compute_kernel.value
        }

    def bounds_checks(self) -> dict[str, str]:
        """Return FBGEMM's ``bounds_check_mode`` by table with a fused kernel."""
        # FBGEMM prefers this variable to the argument.
        overruling = os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE")
        modes = {}
        for name, params in self.fused_params().items():
            mode = params.get("bounds_check_mode", BoundsCheckMode.WARNING)
            if overruling:
                mode = BoundsCheckMode(int(overruling))
            # The second version of the check has the same modes.
            modes[name] = mode.name.removeprefix("V2_")
        return modes

    def optimizers(self) -> list[Any]:
        """Return the fused optimizers."""
        return [optimizer for _, optimizer in self._module.fused_optimizer.optimizers]

    def set_hyperparameters(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """Set the hyperparameters of fused optimizers by table.

        Raises:
            ValueError: two tables in one kernel differ in them.
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
class _TableShards:
    """The shards of one table.

    Attributes:
        config: of any shard.
        rects: of all ranks, in kernel order, by the rank's index in its copy of the tables.
        views: this rank's weights, in the order of its rectangles, each with its kernel.
    """

    config: Any
    rects: defaultdict[int, list[Rect]] = field(default_factory=partial(defaultdict, list))
    views: list[tuple[Tensor, Any]] = field(default_factory=list)


class ShardedTables(UnshardedTables):
    """A :class:`~dist_sparse.tables.protocols.TableCollection`, sharded as it is at this moment. It
    is read when its first table is located, and kept no longer than one walk."""

    is_sharded = True

    def embeddings(self) -> dict[str, nn.Module]:
        """Return {}: the kernels hold the weights."""
        return {}

    def _torchrec_kernels(self) -> Iterator[Any]:
        for lookup in self._module._lookups:
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            yield from lookup._emb_modules

    def locate(self, table: str, fqn: str, name: str) -> ShardedData:
        """Return a table as it is stored now, under a registered name.

        Raises:
            ValueError: masks can't follow the way it is stored.
        """
        index_in_copy, env = self._index_in_copy, self._module._env
        stored = self._shards_by_table[table]
        config = stored.config
        # Under 2-D parallelism, DDP keeps data-parallel tables equal: they are not copies.
        copied = isinstance(env, ShardingEnv2D) and config.local_metadata is not None
        _refuse_unknown_storage(name, config, copied)
        # Set by mark_data_parallel_skip_grad_sync(), new in 1.9.
        unsynced = getattr(self._module, "_skip_data_parallel_grad_sync", False)
        if unsynced and config.local_metadata is None and len(index_in_copy) > 1:
            raise ValueError(
                f"Table {name!r}: it is data-parallel without DDP, so its replicas drift apart:"
                " drop mark_data_parallel_skip_grad_sync() on its collection."
            )
        shards = []
        for rect, (view, kernel) in zip(stored.rects[env.rank], stored.views, strict=True):
            if view.shape != rect[2:]:
                raise ValueError(
                    f"Table {name!r}: TorchRec's metadata says this rank holds {rect}, its kernel"
                    f" holds {tuple(view.shape)}."
                )
            # A row-wise table smaller than the world leaves the last ranks empty pieces.
            if rect.numel:
                shards.append(Shard(rect, view.data))
            if config.compute_kernel.value == CACHED:
                # The caller may read and write the weights until the next lookup.
                Kernel(kernel).write_back()
        return ShardedData(
            name=name,
            shape=_shape(config),
            dtype=data_type_to_dtype(config.data_type),
            sharding=self._module.module_sharding_plan[table].sharding_type,
            ranks=several(index_in_copy),
            tiling=tuple(not_empty(stored.rects[index]) for index in index_in_copy.values()),
            shards=tuple(shards),
            kernel=config.compute_kernel.value,
            fqn=fqn,
            features=tuple(config.feature_names),
            copied=copied,
            merges_ids=self.merges_ids,
            drawn=self._drawn[table],
        )

    @cached_property
    def _drawn(self) -> dict[str, tuple[float, float] | None]:
        # Configurations of shards have the default init_fn, not the user's.
        return {config.name: uniform_bounds(config) for config in self._configs}

    @cached_property
    def _index_in_copy(self) -> dict[int, int]:
        """The global ranks that hold the tables, ascending, each with its index among the ranks
        that share one copy."""
        env = self._module._env
        if isinstance(env, ShardingEnv2D):
            # Each row of the mesh is the ranks of one copy.
            mesh = env.device_mesh.mesh
            copies, size = mesh.shape
            indices = [*range(size)] * copies
            return dict(sorted(zip(mesh.flatten().tolist(), indices, strict=True)))
        if env.world_size == 1:
            return {0: 0}
        if env.process_group is None:
            raise ValueError(
                "A module sharded by ShardingEnv.from_local is for inference; shard it over a"
                " process group."
            )
        ranks = dist.get_process_group_ranks(env.process_group)
        return dict(zip(ranks, range(len(ranks)), strict=True))

    @cached_property
    def _shards_by_table(self) -> dict[str, _TableShards]:
        shards: dict[str, _TableShards] = {}
        for rank, config in self._shard_configs():
            if config.name not in shards:
                shards[config.name] = _TableShards(config)
            shards[config.name].rects[rank].append(_rect(config))
        # TorchRec has one lookup for each sharding, and one kernel for each of its table groups, in
        # the same order: the views of this rank come in the order of its rectangles.
        for kernel in self._torchrec_kernels():
            # locate() refuses others. Reading key-value or virtual tables would allocate them.
            if set(_compute_kernels(kernel)) <= set(_KERNELS):
                views = kernel.emb_module.split_embedding_weights()
                for config, view in zip(kernel._config.embedding_tables, views, strict=True):
                    shards[config.name].views.append((view, kernel))
        return shards

    def _shard_configs(self) -> Iterator[tuple[int, Any]]:
        # Bags and sequences have them under different names.
        if self.pooled:
            shardings = self._module._embedding_shardings
        else:
            shardings = self._module._sharding_type_to_sharding.values()
        for sharding in shardings:
            for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
                for group in groups:
                    for config in group.embedding_tables:
                        yield rank, config


def _refuse_unknown_storage(name: str, config: Any, copied: bool) -> None:
    kernel = config.compute_kernel.value
    if kernel not in _KERNELS:
        raise ValueError(
            f"Table {name!r}: the compute kernel {kernel!r} is not supported;"
            f" {', '.join(_KERNELS)} are."
        )
    # Also where 1.9's MemoryStashingManager has selected it.
    if config.stash_weights:
        raise ValueError(
            f"Table {name!r}: memory stashing moves its weights away between forward and backward,"
            " where masks do not follow. Set stash_weights=False in its configuration, and leave it"
            " out of MemoryStashingManager's tables."
        )
    if config.data_type not in _TYPES:
        types = ", ".join(each.value for each in _TYPES)
        raise ValueError(
            f"Table {name!r}: weights of type {config.data_type.value} are not supported; {types}"
            " are."
        )
    if copied and kernel not in FUSED:
        raise ValueError(
            f"Table {name!r}: TorchRec's 2-D parallelism never averages tables with the compute"
            f" kernel {kernel!r}, so that its copies drift apart. Give it a fused optimizer, or"
            " make it data-parallel."
        )


def _shape(config: Any) -> tuple[int, int]:
    if config.global_metadata is None:
        # A data-parallel table.
        return config.local_rows, config.local_cols
    rows, cols = config.global_metadata.size
    return rows, cols


def _rect(config: Any) -> Rect:
    """Return the rectangle of a shard. A data-parallel table has no metadata: every rank holds all
    of it."""
    if config.local_metadata is None:
        return Rect(0, 0, config.local_rows, config.local_cols)
    return Rect(*config.local_metadata.shard_offsets, *config.local_metadata.shard_sizes)


def _compute_kernels(kernel: Any) -> list[str]:
    """Return the compute kernel of each table of a kernel."""
    return [config.compute_kernel.value for config in kernel._config.embedding_tables]
