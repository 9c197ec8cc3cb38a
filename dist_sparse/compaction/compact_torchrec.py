"""Compact collections in the place of TorchRec's, sharded or not, and what a sharded one needs to
train on.

With :mod:`dist_sparse.tables.torchrec`, this module knows the internals of TorchRec. A sharded
collection is built again, with kept rows only, by a plan derived from its own: the same sharding
types, ranks and columns, so that the arithmetic of training stays the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_module
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dist_sparse.compaction.collections import (
    CompactEmbeddingBagCollection,
    CompactEmbeddingCollection,
)
from dist_sparse.compaction.consumed import consume
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.compaction.sites import cut
from dist_sparse.tables.shards import ShardedData
from dist_sparse.tables.torchrec import (
    collection_tables,
    find_table,
    fused_kernels,
    fused_params,
    sharded_tables,
    shards_tables,
)

__all__ = [
    "Fused",
    "before_ddp",
    "compacted",
    "consume_collection",
    "consume_model",
    "fused_tables",
    "is_bags",
    "is_compact",
    "is_sharded",
    "is_sharded_model",
    "located",
    "lookups",
    "parameters_of",
    "plan_of",
    "refusal",
    "reshard",
    "set_hyperparameters",
    "table_indexes",
    "table_names",
    "table_rows",
    "unwrapped",
    "wrap_layers",
]

Collection = CompactEmbeddingBagCollection | CompactEmbeddingCollection
Planner = Callable[[nn.Module], ShardingPlan]


def is_compact(module: nn.Module) -> bool:
    """Return whether a module is a compact collection."""
    return isinstance(module, (CompactEmbeddingBagCollection, CompactEmbeddingCollection))


def is_bags(module: nn.Module) -> bool:
    """Return whether a collection pools its rows."""
    return isinstance(module, (EmbeddingBagCollection, ShardedEmbeddingBagCollection))


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether a model is a DistributedModelParallel."""
    return isinstance(model, DistributedModelParallel)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded collection."""
    return shards_tables(module)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside a DistributedModelParallel."""
    module: nn.Module = model.module  # type: ignore[assignment]
    return module


def table_names(module: nn.Module, path: str) -> dict[str, str] | None:
    """Return the fully qualified names of the weights of a collection at ``path``, by table; None
    for another module."""
    tables = sharded_tables(module, path)
    if tables is not None:
        return {table.name: table.fqn for table in tables}
    found = collection_tables(module)
    if found is None:
        return None
    return {name: _join(path, f"{found[0]}.{name}.weight") for name in found[1]}


def table_rows(module: nn.Module) -> dict[str, int]:
    """Return the rows of each table of a collection."""
    return {config.name: config.num_embeddings for config in _configs(module)}


def table_indexes(module: Collection) -> dict[str, RowIndex]:
    """Return the indexes of a compact collection's tables that have removed rows."""
    return module.table_indexes()


def lookups(module: Any) -> tuple[bool, list[tuple[str, tuple[str, ...], str]]]:
    """Return whether the ids of a collection have weights, and its tables in their order: name,
    features, and ``"sum"``, ``"mean"`` or ``"none"``."""
    weighted = (
        module.is_weighted()
        if hasattr(module, "is_weighted")
        else getattr(module, "_is_weighted", False)
    )
    pooling = [
        config.pooling.value.lower() if hasattr(config, "pooling") else "none"
        for config in _configs(module)
    ]
    names = [(config.name, tuple(config.feature_names)) for config in _configs(module)]
    return weighted, [(*each, pooled) for each, pooled in zip(names, pooling, strict=True)]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a collection that plain optimizers step, by table: those without a
    fused optimizer. They are what this rank holds of a table, and empty if that is nothing."""
    return {
        name.split(".")[-2]: parameter
        for name, parameter in module.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    }


def refusal(model: nn.Module, module: nn.Module) -> str | None:
    """Return why a collection of ``model`` can't be compacted, or None."""
    for other in model.modules():
        if (
            isinstance(other, ShardedFeatureProcessedEmbeddingBagCollection)
            and module in other.modules()
        ):
            return (
                "a feature processor weights ids by their positions, which removed ids would shift"
            )
    if is_sharded_model(model):
        if type(model) is not DistributedModelParallel:
            return (
                f"the model is a {type(model).__name__}; 2-D parallelism is not supported,"
                " DistributedModelParallel is"
            )
        if model.model_trackers:
            return "the model tracks its ids; compact it before the tracker is initialized"
        if type(get_module(model)) not in (DistributedDataParallel, type(unwrapped(model))):
            return (
                f"its dense part is wrapped in {type(get_module(model)).__name__};"
                " DistributedDataParallel works"
            )
    elif shards_tables(module):
        return "it is sharded, but the model is no DistributedModelParallel; pass that"
    elif any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()):
        return "its optimizer runs in the backward though it is not sharded; shard the model first"
    if getattr(module.forward, "__self__", None) is not module:
        return "a train pipeline has replaced its forward; call pipeline.detach() first"
    weighted = getattr(module, "_is_weighted", False)
    if weighted and any(config.pooling is PoolingType.MEAN for config in _configs(module)):
        return (
            "it has weighted means, which TorchRec divides differently in different shardings; use"
            " weighted sums"
        )
    if shards_tables(module) and _misdivided(module):
        return (
            "it has means of row-wise tables beside tables of other sharding types, and TorchRec"
            " divides those too; give them collections of their own"
        )
    if getattr(module, "_need_indices", False):
        return "need_indices=True is not supported"
    return None


def _misdivided(module: Any) -> bool:
    """Whether TorchRec's divisor for row-wise means is applied to tables that it is not meant
    for."""
    by_rows = {
        name: "row_wise" in sharding.sharding_type
        for name, sharding in module.module_sharding_plan.items()
    }
    pooled = {config.name: getattr(config, "pooling", None) for config in _configs(module)}
    means = [
        name for name, pooling in pooled.items() if pooling is PoolingType.MEAN and by_rows[name]
    ]
    return bool(means) and not all(by_rows.values())


def compacted(
    module: nn.Module,
    outer: Collection | None,
    kept: Mapping[str, Tensor],
    device: torch.device,
    widths: Mapping[str, int],
    default_row: bool,
) -> Collection:
    """Return a compact collection in place of another: of a sharded one its rows are on the meta
    device, to be sharded and filled.

    Args:
        module: the collection.
        outer: the compact collection that it is the ``inner`` of, if it is.
        kept: by table, which of the rows in ``module`` are kept.
        device: of the ids.
        widths: by table, how many of its first columns are kept, where that is not all.
        default_row: whether the removed ids of a table share a row.
    """
    indexes = outer.table_indexes() if outer is not None else {}
    stored, shards = {}, _row_shards(module)
    for name, flags in kept.items():
        if name in indexes:
            indexes[name] = indexes[name].compose(RowIndex.of(flags[: indexes[name].num_kept]))
        elif not bool(flags.all()):
            indexes[name] = RowIndex.of(flags, default_row)
        # TorchRec cuts rows into equal blocks but for the last. Each must have a row: with an empty
        # table beside others of another width, FBGEMM's CPU backward writes other rows than it was
        # given.
        rows = max(1, indexes[name].stored if name in indexes else len(flags))
        stored[name] = max(rows, (shards[name] - 1) * -(-rows // shards[name]) + 1)
    configs = [
        replace(config, embedding_dim=widths.get(config.name, config.embedding_dim))
        for config in _configs(outer or module)
    ]
    meta = torch.device("meta")
    made: Collection
    if isinstance(module, (EmbeddingBagCollection, ShardedEmbeddingBagCollection)):
        made = CompactEmbeddingBagCollection(configs, indexes, module._is_weighted, meta, stored)
    else:
        made = CompactEmbeddingCollection(configs, indexes, meta, stored)
    made.ids.to(device)
    if not shards_tables(module):
        whole = _tables(module)
        for name, table in _tables(made.inner).items():
            weight = cut(whole[name].weight, kept[name], table.num_embeddings, table.embedding_dim)
            table.weight = nn.Parameter(weight, requires_grad=whole[name].weight.requires_grad)
    return made.train(module.training)


def _configs(module: nn.Module) -> list[Any]:
    """The configurations of a collection's tables, of any kind."""
    for attribute in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, attribute):
            return list(getattr(module, attribute)())
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    found: list[EmbeddingBagConfig | EmbeddingConfig] = getattr(
        module, "_embedding_bag_configs" if bags else "_embedding_configs"
    )
    return list(found)


def _row_shards(module: nn.Module) -> dict[str, int]:
    """For each table into how many shards its rows are cut."""
    counts = {config.name: 1 for config in _configs(module)}
    if shards_tables(module):
        for name, sharding in module.module_sharding_plan.items():  # type: ignore[union-attr, operator]
            if sharding.sharding_spec is not None:
                counts[name] = max(map(len, _by_columns(sharding.sharding_spec).values()))
    return counts


def _by_columns(spec: EnumerableShardingSpec) -> dict[int, list[ShardMetadata]]:
    groups: dict[int, list[ShardMetadata]] = defaultdict(list)
    for shard in spec.shards:
        groups[shard.shard_offsets[1]].append(shard)
    return groups


def _cut_again(sharding: ParameterSharding, table: Any) -> ParameterSharding:
    """The same shards of a table with other rows, cut as TorchRec cuts them: equal blocks, the last
    ones smaller. Of a table that loses columns those shards stay that hold columns that are
    left."""
    spec = sharding.sharding_spec
    if spec is None:
        return sharding
    places, rows = {}, table.num_embeddings
    left = [group for column, group in _by_columns(spec).items() if column < table.embedding_dim]
    for group in left:
        block = -(-rows // len(group))
        for number, shard in enumerate(group):
            top, bottom = min(number * block, rows), min((number + 1) * block, rows)
            places[id(shard)] = ShardMetadata(
                [top, shard.shard_offsets[1]],
                [
                    bottom - top,
                    min(shard.shard_sizes[1], table.embedding_dim - shard.shard_offsets[1]),
                ],
                shard.placement,
            )
    ranks = sharding.ranks
    if len(places) < len(spec.shards):
        ranks = [shard.placement.rank() for shard in spec.shards if id(shard) in places]
    kept = EnumerableShardingSpec(
        [places[id(shard)] for shard in spec.shards if id(shard) in places]
    )
    return replace(sharding, ranks=ranks, sharding_spec=kept)


def plan_of(
    model: Any,
    root: nn.Module,
    replaced: Mapping[str, tuple[nn.Module, Collection]],
    planner: Planner | None,
) -> dict[str, Any]:
    """Return the plan of a model in which compact collections take the places of others, by path.

    Args:
        root: the user's module.
        replaced: by path, a sharded collection, no longer in the model, and the compact one in its
            place.
        planner: returns a plan for ``root``; None derives it from the old one.
    """
    plan: dict[str, Any] = dict(model.plan.plan)
    for path, (old, new) in replaced.items():
        inner, tables = _join(path, "inner"), _tables(new.inner)
        parameters = fused_params(old)
        for name, table in tables.items():
            if name in parameters:  # as apply_optimizer_in_backward leaves them
                table.weight._optimizer_classes = [None]
                table.weight._optimizer_kwargs = [dict(parameters[name])]
        for known in (path, inner):
            plan.pop(known, None)
        plan[inner] = EmbeddingModuleShardingPlan(
            {
                name: _cut_again(sharding, tables[name])
                for name, sharding in old.module_sharding_plan.items()  # type: ignore[union-attr, operator]
            }
        )
    return plan if planner is None else {**plan, **planner(root).plan}


def reshard(model: Any, root: nn.Module, plan: Mapping[str, Any]) -> DistributedModelParallel:
    """Return a new DistributedModelParallel like ``model`` around ``root``, in which compact
    collections with rows on the meta device are sharded. Their rows are not filled yet, and dense
    layers are not under DDP.

    Collective where a collection has data-parallel tables, which TorchRec puts under DDP at once.
    """
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):  # sharding initializes weights, which are overwritten
        return DistributedModelParallel(
            root,
            env=model._env,
            device=model.device,
            plan=ShardingPlan(dict(plan)),
            sharders=model.sharders,
            init_data_parallel=False,
            data_parallel_wrapper=model._data_parallel_wrapper,
        )


def wrap_layers(made: DistributedModelParallel, model: DistributedModelParallel) -> None:
    """Put the dense layers of a new DistributedModelParallel under DDP if those of ``model`` are.
    Collective."""
    if model._ddp_wrapped:
        made.init_data_parallel()


@contextmanager
def before_ddp(agree: Callable[[], None]) -> Iterator[None]:
    """Call ``agree`` in the block whenever DDP is about to be built, just before its first
    collective.

    TorchRec builds it in constructors, after work that may fail on one rank alone, such as
    allocating tables. DDP sets its attribute ``module`` before it communicates.
    """

    def registering(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            agree()

    handle = register_module_module_registration_hook(registering)
    try:
        yield
    finally:
        handle.remove()


def _tables(module: nn.Module) -> dict[str, Any]:
    """The modules of an unsharded collection's tables."""
    tables: Any = (
        module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings
    )
    return dict(tables.items())


@dataclass(frozen=True)
class Fused:
    """One shard of a table with a fused optimizer.

    Args:
        batch: FBGEMM's batch of tables that holds it.
        states: of its optimizer, live views: of the shape of the shard, or one value per row.
    """

    batch: Any
    states: list[Tensor]

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Return those that FBGEMM can change, and the optimizer's step count."""
        arguments = self.batch.optimizer_args
        known = {
            name: float(getattr(arguments, name))
            for name in _HYPERPARAMETERS
            if hasattr(arguments, name)
        }
        return {**known, "lr": self.batch.get_learning_rate(), "step": int(self.batch.iter.item())}


_HYPERPARAMETERS = ("eps", "beta1", "beta2", "weight_decay")


def set_hyperparameters(module: nn.Module, values: Mapping[str, Mapping[str, float]]) -> None:
    """Give the fused optimizers of a sharded collection the hyperparameters of its tables.

    Raises:
        ValueError: two tables that the plan brings into one kernel differ in them.
    """
    for kernel in fused_kernels(module):
        names = [config.name for config in kernel._config.embedding_tables]
        if any(values[name] != values[names[0]] for name in names):
            raise ValueError(
                f"The tables {names} share a kernel in the new plan, but their optimizers'"
                " hyperparameters differ."
            )
        chosen = dict(values[names[0]])
        kernel.emb_module.set_optimizer_step(int(chosen.pop("step")))
        kernel.emb_module.update_hyper_parameters(chosen)
        for group in kernel.fused_optimizer.param_groups:
            group["lr"] = chosen["lr"]


def fused_tables(module: nn.Module) -> dict[str, list[Fused]]:
    """Return this rank's shards of a sharded collection's tables with a fused optimizer, in the
    order of :attr:`ShardedData.shards <dist_sparse.tables.shards.ShardedData>`."""
    found: dict[str, list[Fused]] = {}
    for kernel in fused_kernels(module):
        batch, tables = kernel.emb_module, kernel._config.embedding_tables
        views = batch.split_embedding_weights()
        states = batch.split_optimizer_states() or [[] for _ in tables]  # SGD has none at all
        for config, view, of_table in zip(tables, views, states, strict=True):
            if view.numel():
                found.setdefault(config.name, []).append(Fused(batch, list(of_table)))
    return found


def located(module: nn.Module, table: str) -> ShardedData:
    """Return a table of a sharded collection as it is stored now."""
    return find_table(module, "", table, table)


def consume_collection(module: Any) -> None:
    """Release everything that a sharded collection holds. Using it, or its optimizer, raises from
    now on."""
    optimizers = [optimizer for _, optimizer in module.fused_optimizer._optims]
    for used in (module, *optimizers):
        consume(used, "This table collection")


def consume_model(model: DistributedModelParallel) -> None:
    """Release everything that a DistributedModelParallel holds, but for the user's module: using it
    raises from now on.

    A forward whose backward has not come waits in the hooks of its DDP, which end with it: they
    would take the next backward of the compact model for theirs.
    """
    layers = get_module(model)
    if isinstance(layers, DistributedDataParallel):
        consume(layers, "This model")
    consume(model, "This model")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
