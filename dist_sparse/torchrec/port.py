"""The functions of :class:`~dist_sparse.tables.protocols.TorchRecPort`: collections, models built
again, optimizers, and the containers of ids and outputs.

A DistributedModelParallel is built again around a module whose sharded collections were replaced.
The new plan is derived from the old one, with the same sharding types, ranks and columns, so that
the arithmetic of training stays the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.jagged import check_lengths
from dist_sparse.tables.protocols import Replacement
from dist_sparse.tables.shards import steps_in_backward
from dist_sparse.torchrec.collections import (
    CombinedOptimizer,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingFusedOptimizer,
    EmbeddingModuleShardingPlan,
    FeatureProcessedEmbeddingBagCollection,
    FusedOptimizer,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedOptimizer,
    KeyedTensor,
    LazyAwaitable,
    ParameterSharding,
    ShardedFeatureProcessedEmbeddingBagCollection,
    ShardedTables,
    ShardingPlan,
    UnshardedTables,
    collection,
    get_module,
    is_sharded,
    lookups,
    refusal,
)
from dist_sparse.torchrec.kernels import select_jagged

# Models and optimizers


def processes_features(module: nn.Module) -> bool:
    """Return whether a module reads the collection in it without calling it, behind a feature
    processor."""
    processor = FeatureProcessedEmbeddingBagCollection
    return isinstance(module, processor | ShardedFeatureProcessedEmbeddingBagCollection)


def averages(module: nn.Module) -> bool:
    """Return whether a module averages copies of its tables periodically, by its method
    ``sync``."""
    return isinstance(module, DMPCollection)


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether a model is a DistributedModelParallel."""
    return isinstance(model, DistributedModelParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside a DistributedModelParallel."""
    module: nn.Module = model.module  # type: ignore[assignment]
    return module


def dense_layers(model: nn.Module) -> nn.Module:
    """Return the DDP module of a DistributedModelParallel's dense layers, the user's module if
    there is none."""
    module: nn.Module = get_module(model)
    return module


def compact_refusal(model: Any, module: Any) -> str | None:
    """Return why a collection of ``model`` can't be compacted, or None."""
    return next(_reasons_against_compacting(model, module), None)


def _reasons_against_compacting(model: Any, module: Any) -> Iterator[str]:
    # Unsharded processors are not an obstacle: they weight the ids before the collection removes
    # some.
    processor = ShardedFeatureProcessedEmbeddingBagCollection
    for outer in model.modules():
        if isinstance(outer, processor) and module in outer.modules():
            yield (
                "a feature processor weights ids by their positions, which removed ids would shift"
            )
    if is_sharded_model(model):
        yield from _reasons_of_wrapper(model)
    yield from _reasons_of_module(model, module)
    # Pipelines set their own function as the instance's forward.
    if getattr(module.forward, "__self__", None) is not module:
        yield "a train pipeline has replaced its forward; call pipeline.detach() first"
    tables: Any = collection(module)
    means = [table.name for table in tables.tables if table.pooling == "mean"]
    if tables.weighted and means:
        yield (
            "it has weighted means, which TorchRec divides differently in different shardings; use"
            " weighted sums"
        )
    if _misdivided(module, means):
        yield (
            "it has means of row-wise tables beside tables of other sharding types, and TorchRec"
            " divides those too; give them collections of their own"
        )
    if tables.needs_indices:
        yield "need_indices=True is not supported"


def _reasons_of_module(model: Any, module: nn.Module) -> Iterator[str]:
    """Yield reasons against compacting a collection as it is sharded, or is not, in ``model``."""
    if is_sharded(module):
        if not is_sharded_model(model):
            yield "it is sharded, but the model is not a DistributedModelParallel; pass that"
    elif any(map(steps_in_backward, module.parameters())):
        yield "its optimizer runs in the backward though it is not sharded; shard the model first"


def _reasons_of_wrapper(model: Any) -> Iterator[str]:
    """Yield reasons against compacting a DistributedModelParallel."""
    # By exact class: DMPCollection, of 2-D parallelism, is a subclass.
    if type(model) is not DistributedModelParallel:
        name = type(model).__name__
        yield (
            f"the model is a {name}; 2-D parallelism is not supported, DistributedModelParallel is"
        )
        return
    if model.model_trackers:
        yield "the model tracks its ids; compact it before the tracker is initialized"
    wrapper = type(dense_layers(model))
    if wrapper not in (DistributedDataParallel, type(unwrapped(model))):
        yield f"its dense part is wrapped in {wrapper.__name__}; DistributedDataParallel works"


def _plan_of(module: Any) -> dict[str, ParameterSharding]:
    """Return the sharding of each table of a collection; none if it is not sharded."""
    return dict(getattr(module, "module_sharding_plan", {}))


def _misdivided(module: nn.Module, means: Iterable[str]) -> bool:
    """Whether TorchRec divides outputs of tables that are not row-wise by the divisor of row-wise
    ``means``."""
    # Its callback divides the output of the whole collection.
    row_wise = {name: "row_wise" in cut.sharding_type for name, cut in _plan_of(module).items()}
    return any(map(row_wise.get, means)) and not all(row_wise.values())


def row_shards(module: nn.Module) -> dict[str, int]:
    """Return how many row pieces a sharded collection cuts each table into. Data-parallel tables
    are missing."""
    specs = {name: sharding.sharding_spec for name, sharding in _plan_of(module).items()}
    return {name: max(_row_pieces(spec.shards).values()) for name, spec in specs.items() if spec}


def _row_pieces(shards: Iterable[ShardMetadata]) -> Counter[int]:
    """Return the number of shards in each group of columns, by its first column."""
    return Counter(shard.shard_offsets[1] for shard in shards)


def compact_plan(
    model: Any,
    root: nn.Module,
    replacements: Iterable[Replacement],
    planner: Callable[[nn.Module], Any] | None,
) -> dict[str, Any]:
    """Return the plan, by path, of a model in which collections have replaced others.

    Args:
        root: the user's module.
        planner: returns a plan for ``root``; None derives it from the old one.
    """
    plan: dict[str, Any] = dict(model.plan.plan)
    for old, old_path, new, new_path in replacements:
        tables: dict[str, Any] = UnshardedTables(new).embeddings()
        for name, parameters in ShardedTables(old).fused_params().items():
            # TorchRec reads a fused kernel's arguments from these attributes, which its
            # apply_optimizer_in_backward() sets on a weight.
            tables[name].weight._optimizer_classes = [None]
            tables[name].weight._optimizer_kwargs = [dict(parameters)]
        plan.pop(old_path, None)
        shardings = _plan_of(old).items()
        resized = {name: _resized(sharding, tables[name]) for name, sharding in shardings}
        plan[new_path] = EmbeddingModuleShardingPlan(resized)
    return plan if planner is None else {**plan, **planner(root).plan}


def _resized(sharding: ParameterSharding, table: Any) -> ParameterSharding:
    """Return a sharding on the same ranks for a table with different rows and fewer columns. Rows
    are cut as TorchRec cuts them: equal blocks, the last ones smaller. Shards without a remaining
    column are dropped."""
    spec = sharding.sharding_spec
    # A data-parallel table has none.
    if spec is None:
        return sharding
    rows, columns = table.num_embeddings, table.embedding_dim
    remaining = [shard for shard in spec.shards if shard.shard_offsets[1] < columns]
    row_pieces = _row_pieces(remaining)
    pieces_above = Counter[int]()
    resized = []
    # TorchRec lists the shards of a group of columns from top to bottom.
    for shard in remaining:
        column = shard.shard_offsets[1]
        block = -(-rows // row_pieces[column])
        top = min(pieces_above[column] * block, rows)
        sizes = [min(block, rows - top), min(shard.shard_sizes[1], columns - column)]
        resized.append(ShardMetadata([top, column], sizes, shard.placement))
        pieces_above[column] += 1
    # The planner's own list if no shard is dropped: its order may differ.
    ranks = sharding.ranks
    if len(remaining) < len(spec.shards):
        ranks = [shard.placement.rank() for shard in remaining]
    return replace(sharding, ranks=ranks, sharding_spec=EnumerableShardingSpec(resized))


def reshard(model: Any, root: nn.Module, plan: Mapping[str, Any]) -> nn.Module:
    """Return a DistributedModelParallel like ``model`` around ``root``. Rows on the meta device are
    sharded, not filled; dense layers are not under DDP yet.

    Collective where a collection has data-parallel tables, which TorchRec puts under DDP at once.
    """
    cuda = [model.device] if model.device.type == "cuda" else []
    # Sharding initializes weights, which are overwritten.
    with torch.random.fork_rng(cuda):
        sharded: nn.Module = DistributedModelParallel(
            root,
            env=model._env,
            device=model.device,
            plan=ShardingPlan(dict(plan)),
            sharders=model.sharders,
            # wrap_layers() does it, in a step of its own on which all ranks agree.
            init_data_parallel=False,
            data_parallel_wrapper=model._data_parallel_wrapper,
        )
    return sharded


def wrap_layers(new: Any, model: Any) -> None:
    """Put the dense layers of a new DistributedModelParallel under DDP if ``model`` has them there.
    Collective."""
    if model._ddp_wrapped:
        new.init_data_parallel()


def parts(optimizer: object) -> list[Any] | None:
    """Return the optimizers inside one of TorchRec's: the parts of a CombinedOptimizer; [] for one
    that only represents a fused optimizer. None for another optimizer."""
    if isinstance(optimizer, CombinedOptimizer):
        return [part for _, part in optimizer.optimizers]
    return [] if isinstance(optimizer, FusedOptimizer) else None


def replace_parameter(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter in the names that keyed optimizers have for parameters."""
    if isinstance(optimizer, CombinedOptimizer):
        # It has no names itself: it collects them from its parts.
        for _, part in optimizer.optimizers:
            replace_parameter(part, old, new)
        return
    if hasattr(optimizer, "_optimizer"):
        replace_parameter(optimizer._optimizer, old, new)
    if isinstance(optimizer, KeyedOptimizer):
        for name, parameter in optimizer.params.items():
            if parameter is old:
                optimizer.params[name] = new


def fused_steps(optimizer: Any) -> int | None:
    """Return how many steps a fused optimizer has taken, None for another optimizer."""
    is_fused = isinstance(optimizer, EmbeddingFusedOptimizer)
    return int(optimizer._emb_module.iter) if is_fused else None


# TorchRec's containers of ids and outputs


def reordered(ids: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """Return some features of a KeyedJaggedTensor, in this order; one may come twice. The tensor
    itself is returned if it has just these.

    Raises:
        ValueError: a feature is missing.
    """
    keys = ids.keys()
    if keys == list(features):
        return ids
    # This runs in each forward, with perhaps thousands of features: keys.index() would be slow.
    places = dict(zip(keys, range(len(keys)), strict=True))
    if missing := sorted(set(features).difference(places)):
        raise ValueError(f"Features {missing} are not in the KeyedJaggedTensor, which has {keys}.")
    return ids.permute([places[feature] for feature in features])


def unpack_ids(
    ids: KeyedJaggedTensor,
    features: Sequence[str],
    check_weights: Callable[[Tensor, Tensor | None], Tensor | None],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, lengths and weights in the order of ``features``.

    Args:
        check_weights: called with values and weights, or None, as they come; returns the weights,
            or raises.

    Raises:
        ValueError: a feature or weights are missing, batches differ in size by feature, or lengths
            do not fit in a KeyedJaggedTensor that is reordered; others are not checked.
    """
    if not isinstance(ids, KeyedJaggedTensor):
        raise ValueError(
            f"Invalid ids, {type(ids)}: must be a KeyedJaggedTensor or tensors of values and"
            " lengths."
        )
    # With either, outputs and inputs differ in their number of rows.
    if ids.variable_stride_per_key() or ids.inverse_indices_or_none() is not None:
        raise ValueError(
            "A KeyedJaggedTensor with batches of different sizes or inverse indices is not"
            " supported: pass one with the same batch for each feature, repeated ids included."
        )
    keys, values, lengths = ids.keys(), ids.values(), ids.lengths()
    weights = check_weights(values, ids.weights_or_none())
    if keys == list(features):
        return values, lengths, weights
    # Reordering runs a kernel that trusts lengths, and sums that a KeyedJaggedTensor was made with:
    # a new one has none.
    check_lengths(values, lengths, len(keys))
    ids = reordered(KeyedJaggedTensor(keys, values, weights, lengths), features)
    return ids.values(), ids.lengths(), ids.weights_or_none()


def pack_outputs(
    rows: Tensor, lengths: Tensor, outputs: Sequence[str], dims: Sequence[int], pooled: bool
) -> KeyedTensor | dict[str, JaggedTensor]:
    """Return pooled rows as a KeyedTensor, or the rows of ids as one JaggedTensor per output."""
    if pooled:
        return KeyedTensor(keys=list(outputs), length_per_key=list(dims), values=rows)
    # One row per output.
    by_output = lengths.view(len(outputs), -1)
    values = torch.split(rows, by_output.sum(1).tolist())
    return {
        key: JaggedTensor(values=part, lengths=sizes)
        for key, part, sizes in zip(outputs, values, by_output, strict=True)
    }


def select_ids(features: KeyedJaggedTensor, chosen: Tensor) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of the ``chosen`` ids, bool ``(n,)``, and their weights, through
    which gradients flow back."""
    values, lengths = select_jagged(features.values(), features.lengths(), chosen)
    weights = features.weights_or_none()
    # Either one stride for all features, or one per feature and rank (TorchRec's variable batch).
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=None if weights is None else weights.masked_select(chosen),
        lengths=lengths,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def with_outputs(output: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return the output of a collection with each of its parts changed once it has arrived.

    Args:
        change: takes an output's name and its values, ``(..., columns)``, and returns values of as
            many rows.
    """
    # Still on its way: TorchRec calls the callbacks when the output is waited for.
    if isinstance(output, LazyAwaitable):
        output.callbacks.append(lambda arrived: with_outputs(arrived, change))
        return output
    if isinstance(output, KeyedTensor):
        keys = output.keys()
        values = output.values().split(output.length_per_key(), dim=1)
        parts = list(map(change, keys, values))
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
