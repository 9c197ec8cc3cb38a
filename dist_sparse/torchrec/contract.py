"""The private names of TorchRec and FBGEMM that this package reads, checked all at once.

TorchRec has no public way to a shard's place, its kernel or its optimizer state. A release that
renames or removes one of these names is refused when the package first meets it, with the list of
all missing ones, before a default or a comparison could make masks wrong in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, Final

import fbgemm_gpu
import torch
import torchrec

from dist_sparse.torchrec.versions import check_versions

__all__ = ["NAMES", "REFUSED", "check_contract", "missing_names"]

_SHARDED: Final = ("_env", "_lookups", "fused_optimizer")
_SHARDING: Final = ("_grouped_embedding_configs_per_rank",)
_KERNEL: Final = ("_config", "emb_module")

NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Collections: the lookups of this rank, the table groups of all ranks.
        "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": (
            *_SHARDED,
            "_embedding_bag_configs",
            "_embedding_shardings",
            "_is_weighted",
        ),
        "torchrec.distributed.embedding.ShardedEmbeddingCollection": (
            *_SHARDED,
            "_embedding_configs",
            "_need_indices",
            "_sharding_type_to_sharding",
        ),
        "torchrec.distributed.sharding.dp_sharding.BaseDpEmbeddingSharding": _SHARDING,
        "torchrec.distributed.sharding.grid_sharding.BaseGridEmbeddingSharding": _SHARDING,
        "torchrec.distributed.sharding.rw_sharding.BaseRwEmbeddingSharding": _SHARDING,
        "torchrec.distributed.sharding.tw_sharding.BaseTwEmbeddingSharding": _SHARDING,
        "torchrec.distributed.sharding.twrw_sharding.BaseTwRwEmbeddingSharding": _SHARDING,
        "torchrec.distributed.embedding_types.GroupedEmbeddingConfig": ("embedding_tables",),
        "torchrec.distributed.embedding_types.ShardedEmbeddingTable": (
            "compute_kernel",
            "fused_params",
            "global_metadata",
            "local_cols",
            "local_metadata",
            "local_rows",
        ),
        "torchrec.distributed.types.ShardingEnv2D": ("device_mesh", "sharding_strategy"),
        "torchrec.distributed.types.LazyAwaitable": ("callbacks",),
        # Kernels.
        "torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup": ("_emb_modules",),
        "torchrec.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup": ("_emb_modules",),
        "torchrec.distributed.batched_embedding_kernel.BatchedDenseEmbedding": _KERNEL,
        "torchrec.distributed.batched_embedding_kernel.BatchedDenseEmbeddingBag": _KERNEL,
        "torchrec.distributed.batched_embedding_kernel.BatchedFusedEmbedding": (
            *_KERNEL,
            "fused_optimizer",
        ),
        "torchrec.distributed.batched_embedding_kernel.BatchedFusedEmbeddingBag": (
            *_KERNEL,
            "fused_optimizer",
        ),
        # The marks on parameters: whose optimizer runs in the backward, and with what arguments.
        "torchrec.distributed.batched_embedding_kernel": ("_in_backward_optimizers",),
        "torchrec.distributed.embedding": ("_optimizer_classes", "_optimizer_kwargs"),
        "torchrec.distributed.embeddingbag": ("_optimizer_classes", "_optimizer_kwargs"),
        # Optimizers, which hold the parameters a second time.
        "torchrec.optim.keyed.CombinedOptimizer": ("optimizers",),
        "torchrec.optim.keyed.KeyedOptimizer": ("params",),
        "torchrec.optim.keyed.KeyedOptimizerWrapper": ("_optimizer",),
        "torchrec.optim.keyed.OptimizerWrapper": ("_optimizer", "params"),
        "torchrec.optim.fused.FusedOptimizer": ("step",),
        # Models that compact() builds again.
        "torchrec.distributed.model_parallel.DistributedModelParallel": (
            "_data_parallel_wrapper",
            "_ddp_wrapped",
            "_env",
            "model_trackers",
            "sharders",
        ),
        # FBGEMM's table batches: storage, ids, optimizer state, methods that write all rows.
        "fbgemm_gpu.split_table_batched_embeddings_ops_training."
        "SplitTableBatchedEmbeddingBagsCodegen": (
            "ema_inplace",
            "ensemble_and_swap",
            "feature_table_map",
            "get_learning_rate",
            "iter",
            "iter_cpu",
            "optimizer",
            "optimizer_args",
            "pooling_mode",
            "set_optimizer_step",
            "split_embedding_weights",
            "split_optimizer_states",
            "update_hyper_parameters",
            "weights_dev",
            "weights_host",
            "weights_uvm",
        ),
        "fbgemm_gpu.split_table_batched_embeddings_ops_training.EmainplaceModeDefinition": (
            "step_ema",
        ),
        "fbgemm_gpu.split_table_batched_embeddings_ops_training.EnsembleModeDefinition": (
            "step_ema",
            "step_swap",
        ),
        "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args.OptimizerArgs": (
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
        ),
        "fbgemm_gpu.split_table_batched_embeddings_ops_common.PoolingMode": ("SUM",),
    }
)
"""By class or module: attributes that it defines, sets on instances, or (modules) on others."""

_QUANTIZED: Final = "it is quantized; sparsify the float model before quantizing"
_COLLISIONS: Final = "managed collisions move ids between rows"
_ITEP: Final = "in-training pruning (ITEP) moves ids between rows"
_PEC: Final = "PEC collections handle colliding ids on their own"

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
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
)
"""Python modules whose collections change behind a mask which row an id means, or the row itself,
and why. Not imported: several are slow."""


def check_contract() -> None:
    """Refuse releases that were not built for each other, or that lack a name.

    Raises:
        ImportError: lists all missing names.
    """
    torchrec_version = str(getattr(torchrec, "__version__", "?"))
    fbgemm_version = str(getattr(fbgemm_gpu, "__version__", "?"))
    check_versions(str(torch.__version__), torchrec_version, fbgemm_version)
    missing = [*missing_names(NAMES), *_missing_modules(REFUSED)]
    if missing:
        raise ImportError(
            f"torchrec {torchrec_version} and fbgemm-gpu {fbgemm_version} lack names that"
            f" dist_sparse needs to find tables and to mask them: {', '.join(missing)}. Install"
            " releases that it was tested with: dist-sparse doctor prints them."
        )


def missing_names(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the dotted paths of owners that do not exist, and of names that their code does not
    use."""
    missing = []
    for path, wanted in names.items():
        owner = _find(path)
        known = set() if owner is None else _names_in(owner)
        absent = [f"{path}.{name}" for name in wanted if name not in known]
        missing += absent if owner is not None else [path]
    return missing


def _missing_modules(paths: Iterable[str]) -> list[str]:
    missing = []
    for path in paths:
        try:
            found = importlib.util.find_spec(path)
        except ImportError:  # of the package that it should be in
            found = None
        if found is None:
            missing.append(path)
    return missing


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
        if str(getattr(part, "__module__", "")).startswith("torch."):
            continue  # nn.Module's own names are no proof
        names.update(getattr(part, "__annotations__", ()))  # fields without a default
        for value in vars(part).values():
            names.update(_names_of_code(value))
    return names


def _names_of_code(value: Any) -> Iterator[str]:
    function: Any = value.fget if isinstance(value, property) else value
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, FunctionType):
        yield from _names_used(function.__code__)


def _names_used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant  # getattr(parameter, "_optimizer_classes", None)
        elif isinstance(constant, CodeType):
            yield from _names_used(constant)
