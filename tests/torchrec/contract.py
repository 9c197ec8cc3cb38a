"""The private names of TorchRec and FBGEMM that the package reads, in one list.

TorchRec has no public way to a shard's place, its kernel or its optimizer state. A release that
renames or removes one of these names fails the tests with the list of all missing ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Set
from importlib.metadata import version
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Final

from packaging.version import Version

from dist_sparse.torchrec.collections import REFUSED

__all__ = ["NAMES", "SINCE", "STORAGE_METHODS", "is_in", "methods_that_use", "missing_names"]

_KERNEL: Final = "_config _feature_table_map _pg emb_module"
_FUSED_KERNEL: Final = f"{_KERNEL} fused_optimizer"
_GROUPS: Final = "_grouped_embedding_configs_per_rank"
_MARKS: Final = "_optimizer_classes _optimizer_kwargs"
_TBE: Final = "split_table_batched_embeddings_ops_training"

NAMES: Final = {
    "torchrec.distributed": {
        # Collections: the lookups of this rank, the table groups of all ranks.
        "embeddingbag.ShardedEmbeddingBagCollection": (
            "_env _lookups _embedding_shardings _is_weighted _table_name_to_config fused_optimizer"
        ),
        "embedding.ShardedEmbeddingCollection": (
            "_env _lookups _need_indices _sharding_type_to_sharding _table_name_to_config"
            " _use_index_dedup fused_optimizer"
        ),
        "embedding_types.GroupedEmbeddingConfig": "embedding_tables",
        "embedding_types.ShardedEmbeddingTable": (
            "compute_kernel fused_params global_metadata local_cols local_metadata local_rows"
            " pooling"
        ),
        "sharding.dp_sharding.BaseDpEmbeddingSharding": _GROUPS,
        "sharding.grid_sharding.BaseGridEmbeddingSharding": _GROUPS,
        "sharding.rw_sharding.BaseRwEmbeddingSharding": _GROUPS,
        "sharding.tw_sharding.BaseTwEmbeddingSharding": _GROUPS,
        "sharding.twrw_sharding.BaseTwRwEmbeddingSharding": _GROUPS,
        "types.LazyAwaitable": "callbacks",
        "types.ShardingEnv2D": "device_mesh sharding_strategy",
        # Kernels.
        "embedding_lookup.GroupedEmbeddingsLookup": "_emb_modules",
        "embedding_lookup.GroupedPooledEmbeddingsLookup": "_emb_modules",
        "batched_embedding_kernel.BatchedDenseEmbedding": _KERNEL,
        "batched_embedding_kernel.BatchedDenseEmbeddingBag": _KERNEL,
        "batched_embedding_kernel.BatchedFusedEmbedding": _FUSED_KERNEL,
        "batched_embedding_kernel.BatchedFusedEmbeddingBag": _FUSED_KERNEL,
        "batched_embedding_kernel.EmbeddingFusedOptimizer": "_emb_module set_optimizer_step",
        # Marks on parameters: their optimizer runs in the backward, with these arguments.
        "batched_embedding_kernel": "_in_backward_optimizers",
        "embedding": _MARKS,
        "embeddingbag": _MARKS,
        # Models that compact() builds again.
        "model_parallel.DistributedModelParallel": (
            "_data_parallel_wrapper _ddp_wrapped _env model_trackers sharders"
        ),
    },
    "torchrec.modules": {
        "embedding_modules.EmbeddingBagCollection": "_is_weighted",
        "embedding_modules.EmbeddingCollection": "_need_indices",
    },
    "torchrec.optim": {
        "keyed.KeyedOptimizerWrapper": "_optimizer params",
        "keyed.OptimizerWrapper": "_optimizer params",
    },
    "fbgemm_gpu": {
        # Table batches: storage, ids, optimizer state, the cache.
        f"{_TBE}.SplitTableBatchedEmbeddingBagsCodegen": (
            "weights_dev weights_host weights_uvm split_embedding_weights"
            " pooling_mode optimizer optimizer_args iter split_optimizer_states"
            " weight_decay_mode indices offsets per_sample_weights feature_requires_grad"
            " batch_size_per_feature_per_rank"
            " get_learning_rate set_optimizer_step update_hyper_parameters"
            " lxu_cache_weights timesteps_prefetched flush reset_cache_states"
        ),
        "split_embedding_codegen_lookup_invokers.lookup_args.OptimizerArgs": (
            "beta1 beta2 eps weight_decay"
        ),
        "split_table_batched_embeddings_ops_common.PoolingMode": "MEAN NONE SUM",
    },
}
"""By package, then class or module: the attributes that it defines, or that its code sets."""

SINCE: Final = {
    "1.9": {
        "torchrec.distributed": {
            "embeddingbag.ShardedEmbeddingBagCollection": "_skip_data_parallel_grad_sync",
            "embedding.ShardedEmbeddingCollection": "_skip_data_parallel_grad_sync",
        }
    }
}
"""Names of :data:`NAMES` that a release has added: older ones are read as if they were False."""

STORAGE_METHODS: Final = {
    "1.8": frozenset(
        {
            "_prefetch",
            "ema_inplace",
            "ensemble_and_swap",
            "flush",
            "forward",
            "init_embedding_weights_uniform",
            "reset_embedding_weight_momentum",
            "split_embedding_weights",
        }
    ),
    # Streams rows that were looked up to another service: reads them, and writes none.
    "1.9": frozenset({"_ship_hbm_rows"}),
}
"""The methods of FBGEMM's table batch that use its storage, by the release that has added them. The
enforcer knows them: one that a release adds may write rows that no hook announces."""


def is_in(release: str) -> bool:
    """Whether the installed TorchRec is a release or a later one."""
    return Version(version("torchrec")) >= Version(release)


def missing_names() -> list[str]:
    """Return the dotted paths of :data:`NAMES` and :data:`REFUSED` that these releases lack."""
    missing = []
    added = [names for release, names in SINCE.items() if is_in(release)]
    for package, owners in chain(*(names.items() for names in (NAMES, *added))):
        for owner, names in owners.items():
            path = f"{package}.{owner}"
            found = _find(path)
            # Without the class or module all its names would be listed.
            lacking = set(names.split()) - _names_in(found) if found else {""}
            missing += sorted(f"{path}.{name}".rstrip(".") for name in lacking)
    return missing + [path for path in REFUSED if not _exists(path)]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it should be in
        return False


def _find(path: str) -> Any:
    """The class or module at a dotted path, None if there is none."""
    parent, _, name = path.rpartition(".")
    try:
        # A module is an attribute of its package once a class of it, or another one, was found.
        return getattr(importlib.import_module(parent), name, None)
    except ImportError:
        return None


def _names_in(owner: Any) -> set[str]:
    """The attributes of a class or module, and all that its functions read or set.

    An attribute that ``__init__`` sets does not exist before there is an instance, which would take
    a process group. But its name is in the code of the method that sets it.
    """
    names = set(dir(owner))
    for part in owner.__mro__ if isinstance(owner, type) else (owner,):
        # Names that nn.Module's own code uses are no proof.
        if getattr(part, "__module__", "").startswith("torch."):
            continue
        names.update(getattr(part, "__annotations__", ()))  # fields without a default
        names.update(*_names_by_function(part).values())
    return names


def methods_that_use(owner: type, names: Set[str]) -> set[str]:
    """Return the methods and properties of a class, without inherited ones, that use one of the
    names."""
    return {
        method for method, used in _names_by_function(owner).items() if not names.isdisjoint(used)
    }


def _names_by_function(owner: Any) -> dict[str, set[str]]:
    """The names that each function of a class or module reads or sets."""
    found = {}
    for name, value in vars(owner).items():
        function: Any = value.fget if isinstance(value, property) else value
        function = inspect.unwrap(function)
        if isinstance(function, FunctionType):
            found[name] = set(_names_used(function.__code__))
    return found


def _names_used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames[: code.co_argcount]  # keywords that a caller passes
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant  # getattr(parameter, "_optimizer_classes", None)
        elif isinstance(constant, CodeType):
            yield from _names_used(constant)
