"""DistributedModelParallel, built again around a module whose sharded collections were replaced.
TorchRec's optimizers: several in one, and stand-ins for what runs inside the backward.

The new plan is derived from the old one, with the same sharding types, ranks and columns, so that
the arithmetic of training stays the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.protocols import Collection, Replacement
from dist_sparse.tables.shards import steps_in_backward
from dist_sparse.torchrec import types
from dist_sparse.torchrec.collections import (
    ShardedTables,
    UnshardedTables,
    collection,
    configs_of,
    is_sharded,
)


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether a model is a DistributedModelParallel."""
    return isinstance(model, types.DistributedModelParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside a DistributedModelParallel."""
    module: nn.Module = model.module  # type: ignore[assignment]
    return module


def dense_layers(model: nn.Module) -> nn.Module:
    """Return the DDP module of a DistributedModelParallel's dense layers, the user's module if
    there is none."""
    module: nn.Module = types.get_module(model)
    return module


def compact_refusal(model: nn.Module, module: nn.Module) -> str | None:
    """Return why a collection of ``model`` can't be compacted, or None."""
    found = collection(module)
    if found is None:
        return "it is no collection of TorchRec's"
    return _model_refusal(model, module) or _collection_refusal(module, found)


def _model_refusal(model: nn.Module, module: nn.Module) -> str | None:
    """Why no collection, or not this one, can be compacted where it is in the model."""
    for other in model.modules():
        processes = isinstance(other, types.ShardedFeatureProcessedEmbeddingBagCollection)
        if processes and module in other.modules():
            return (
                "a feature processor weights ids by their positions, which removed ids would shift"
            )
    if is_sharded_model(model):
        return _wrapper_refusal(model)
    if is_sharded(module):
        return "it is sharded, but the model is no DistributedModelParallel; pass that"
    if any(map(steps_in_backward, module.parameters())):
        return "its optimizer runs in the backward though it is not sharded; shard the model first"
    return None


def _wrapper_refusal(model: Any) -> str | None:
    if type(model) is not types.DistributedModelParallel:
        return (
            f"the model is a {type(model).__name__}; 2-D parallelism is not supported,"
            " DistributedModelParallel is"
        )
    if model.model_trackers:
        return "the model tracks its ids; compact it before the tracker is initialized"
    wrapper = type(dense_layers(model))
    if wrapper not in (DistributedDataParallel, type(unwrapped(model))):
        return f"its dense part is wrapped in {wrapper.__name__}; DistributedDataParallel works"
    return None


def _collection_refusal(module: nn.Module, found: Collection) -> str | None:
    if getattr(module.forward, "__self__", None) is not module:
        return "a train pipeline has replaced its forward; call pipeline.detach() first"
    averaged = [table.name for table in found.tables if table.pooling == "mean"]
    if found.weighted and averaged:
        return (
            "it has weighted means, which TorchRec divides differently in different shardings; use"
            " weighted sums"
        )
    if found.is_sharded and _misdivided(module, averaged):
        return (
            "it has means of row-wise tables beside tables of other sharding types, and TorchRec"
            " divides those too; give them collections of their own"
        )
    if found.needs_indices:
        return "need_indices=True is not supported"
    return None


def _misdivided(module: Any, averaged: Iterable[str]) -> bool:
    """Whether TorchRec's divisor for row-wise means is applied to tables that it is not meant
    for."""
    plan = module.module_sharding_plan
    by_rows = {name: "row_wise" in plan[name].sharding_type for name in plan}
    return any(by_rows[name] for name in averaged) and not all(by_rows.values())


def row_shards(module: nn.Module) -> dict[str, int]:
    """Return into how many pieces a collection cuts the rows of each table."""
    counts = {config.name: 1 for config in configs_of(module)}
    if not is_sharded(module):
        return counts
    sharded: Any = module
    for name, sharding in sharded.module_sharding_plan.items():
        if sharding.sharding_spec is not None:  # it has none if the table is data-parallel
            counts[name] = max(map(len, _by_columns(sharding.sharding_spec).values()))
    return counts


def _by_columns(spec: EnumerableShardingSpec) -> dict[int, list[ShardMetadata]]:
    """The shards of each group of columns, by the first one."""
    groups: dict[int, list[ShardMetadata]] = defaultdict(list)
    for shard in spec.shards:
        groups[shard.shard_offsets[1]].append(shard)
    return groups


def compact_plan(
    model: Any,
    root: nn.Module,
    replacements: Iterable[Replacement],
    planner: Callable[[nn.Module], Any] | None,
) -> dict[str, Any]:
    """Return the plan by path of a model in which collections have taken the places of others.

    Args:
        root: the user's module.
        planner: returns a plan for ``root``; None derives it from the old one.
    """
    plan: dict[str, Any] = dict(model.plan.plan)
    for each in replacements:
        tables: dict[str, Any] = UnshardedTables(each.new).embeddings()
        for name, parameters in ShardedTables(each.old).fused_params().items():
            # TorchRec takes a fused kernel's arguments from these marks on the weight, which
            # apply_optimizer_in_backward leaves.
            tables[name].weight._optimizer_classes = [None]
            tables[name].weight._optimizer_kwargs = [dict(parameters)]
        old: Any = each.old
        plan.pop(each.old_path, None)
        plan[each.new_path] = types.EmbeddingModuleShardingPlan(
            {
                name: _cut_again(sharding, tables[name])
                for name, sharding in old.module_sharding_plan.items()
            }
        )
    return plan if planner is None else {**plan, **planner(root).plan}


def _cut_again(sharding: types.ParameterSharding, table: Any) -> types.ParameterSharding:
    """The same shards of a table with other rows, cut as TorchRec cuts them: equal blocks, the last
    ones smaller. Of a table that loses columns those shards stay that hold columns that are
    left."""
    spec = sharding.sharding_spec
    if spec is None:  # data-parallel
        return sharding
    rows, columns = table.num_embeddings, table.embedding_dim
    cut: dict[int, ShardMetadata] = {}  # by the id of the old shard, to keep TorchRec's order
    for column, group in _by_columns(spec).items():
        if column >= columns:
            continue
        block = -(-rows // len(group))
        for number, shard in enumerate(group):
            top, bottom = min(number * block, rows), min((number + 1) * block, rows)
            width = min(shard.shard_sizes[1], columns - column)
            cut[id(shard)] = ShardMetadata([top, column], [bottom - top, width], shard.placement)
    left = [shard for shard in spec.shards if id(shard) in cut]
    ranks = sharding.ranks
    if len(left) < len(spec.shards):
        ranks = [shard.placement.rank() for shard in left]
    shards = EnumerableShardingSpec([cut[id(shard)] for shard in left])
    return replace(sharding, ranks=ranks, sharding_spec=shards)


def reshard(model: Any, root: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
    """Return a DistributedModelParallel like ``model`` around ``root``. Rows on the meta device are
    sharded, not filled; dense layers are not under DDP yet.

    Collective where a collection has data-parallel tables, which TorchRec puts under DDP at once.
    """
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):  # sharding initializes weights, which are overwritten
        made: nn.Module = types.DistributedModelParallel(
            root,
            env=model._env,
            device=model.device,
            plan=types.ShardingPlan(dict(plan)),
            sharders=model.sharders,
            init_data_parallel=False,
            data_parallel_wrapper=model._data_parallel_wrapper,
        )
    return made


def wrap_layers(made: Any, model: Any) -> None:
    """Put the dense layers of a new DistributedModelParallel under DDP if ``model`` has them there.
    Collective."""
    if model._ddp_wrapped:
        made.init_data_parallel()


def combined(optimizer: object) -> list[Any] | None:
    """Return the optimizers inside a CombinedOptimizer; None for another optimizer."""
    if not isinstance(optimizer, types.CombinedOptimizer):
        return None
    return [part for _, part in optimizer.optimizers]


def is_fused(optimizer: object) -> bool:
    """Return whether an optimizer only represents one that runs inside the backward."""
    return isinstance(optimizer, types.FusedOptimizer)


def named_parameters(optimizer: object) -> dict[str, Any] | None:
    """Return the dict in which a keyed optimizer holds its parameters a second time, live; None for
    another optimizer."""
    # A CombinedOptimizer collects those of its parts anew at each read.
    if not isinstance(optimizer, types.KeyedOptimizer) or isinstance(
        optimizer, types.CombinedOptimizer
    ):
        return None
    named: dict[str, Any] = optimizer.params
    return named
