"""FBGEMM's table batches with a fused optimizer, its operators and modules for inference, and
TorchRec's metrics.

Imports neither of them before it is called: artifacts are served without TorchRec, and checked
without FBGEMM.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSet, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from dist_sparse.tables.protocols import KeptOf
from dist_sparse.tables.shards import CACHED

ROW_WRITERS: Final = {
    "SGD",
    "EXACT_SGD",
    "LARS_SGD",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "EXACT_ADAGRAD",
    "ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_WEIGHTED_ADAGRAD",
}
"""Optimizers that write no other rows than a batch has looked up."""


STILL: Final = {
    "SGD",
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
}
"""Optimizers whose step is a multiple of the gradient and of the weight."""


_PLAIN_DECAYS: Final = {"NONE", "L2", "DECOUPLE"}
"""Multiples of the weight: the other modes count the lookups of each row, or compare norms."""


_HYPERPARAMETERS: Final = ("eps", "beta1", "beta2", "weight_decay")


_pending: WeakKeyDictionary[nn.Module, WeakSet[object]] = WeakKeyDictionary()
"""By FBGEMM's module, lookups whose backward is to come. Not only in :class:`FbgemmBatch`: tables
are located anew for every mask update."""


def write_back(kernel: Any) -> None:
    """Write rows that FBGEMM caches on the device back to the tables, and empty the cache; see
    :meth:`~dist_sparse.tables.protocols.TableBatch.write_back`.

    Args:
        kernel: TorchRec's module around the batch.
    """
    batch = kernel.emb_module
    # FBGEMM has no cache on CPUs, and none for other kernels.
    if not batch.lxu_cache_weights.numel():
        return
    configs = kernel._config.embedding_tables
    tables = [config.name for config in configs if config.compute_kernel.value == CACHED]
    if batch.timesteps_prefetched:
        raise ValueError(
            f"The tables {tables} have the compute kernel {CACHED!r}, and rows in their cache are"
            " prefetched for a coming lookup, so that they can't be written back: train with"
            " TrainPipelineSparseDist, which prefetches none."
        )
    # The backward would write to places in the cache that other rows have by then.
    if _pending.get(batch):
        raise ValueError(
            f"The tables {tables} have the compute kernel {CACHED!r}, and a lookup waits for its"
            " backward, so that rows in their cache can't be written back: update masks and read"
            " weights after the backward, and free outputs that get none."
        )
    batch.flush()
    batch.reset_cache_states()


class Kernel:
    """A :class:`~dist_sparse.tables.protocols.LookupKernel`.

    Args:
        kernel: TorchRec's module around the batch.
    """

    def __init__(self, kernel: Any) -> None:
        self.module: nn.Module = kernel
        self._batch: Any = kernel.emb_module
        self.features: list[int] = list(kernel._feature_table_map)
        self._own_pooling: Any = self._batch.pooling_mode
        self.pooling: Literal["sum", "mean", "none"] = self._own_pooling.name.lower()

    def weights(self) -> list[Tensor]:
        """Return live views of the shards."""
        views: list[Tensor] = self._batch.split_embedding_weights()
        return views


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
        self._update_rule: str = self._batch.optimizer.name
        self.is_adagrad = "ADAGRAD" in self._update_rule
        if self._update_rule not in ROW_WRITERS:
            raise ValueError(
                f"The tables {self.tables} have the fused optimizer {self._update_rule}, which"
                " may write rows that no batch has looked up, as far as dist_sparse knows: removed"
                " weights would come back unseen."
            )
        # Where its tables are: on the device, on the host, or in unified memory.
        places = ("weights_dev", "weights_host", "weights_uvm")
        self._silent: Tensor | None = None
        self._stored = [place for place in places if getattr(self._batch, place).numel()]

    @property
    def keeps_zeros(self) -> bool:
        """Whether its optimizer leaves a row of zeros as it is if the gradient is zero."""
        # Adam moves it by its moments; LAMB and LARS divide by the norms of the row and its update.
        if self._update_rule not in STILL:
            return False
        # Without eps Adagrad divides 0 by 0.
        plain_decay = self._batch.weight_decay_mode.name in _PLAIN_DECAYS
        return not self.is_adagrad or (self._batch.optimizer_args.eps > 0 and plain_decay)

    @property
    def cached(self) -> set[int]:
        """The tables whose rows FBGEMM caches on the device. TorchRec groups them with others."""
        kernel: Any = self.module
        kinds = [config.compute_kernel.value for config in kernel._config.embedding_tables]
        return {table for table, kind in enumerate(kinds) if kind == CACHED}

    @property
    def pending(self) -> MutableSet[object]:
        """Lookups whose backward is to come."""
        return _pending.setdefault(self.kernel, WeakSet())

    def write_back(self) -> None:
        """Write cached rows back, and empty the cache; see :func:`write_back`."""
        write_back(self.module)

    def states(self) -> list[Sequence[Tensor]]:
        """Return live views of each shard's optimizer state."""
        # SGD has none, not even an empty one for each table.
        return self._batch.split_optimizer_states() or [()] * len(self.tables)

    def storage(self) -> list[Tensor]:
        """Return the tensors that hold the weights of all shards."""
        return [getattr(self._batch, place) for place in self._stored]

    def weighed(self, call: Mapping[str, Any], kept: KeptOf) -> dict[str, Any] | None:
        """Return the keywords of a pooled lookup in which some ids weigh nothing; see
        :meth:`~dist_sparse.tables.protocols.TableBatch.weighed`."""
        ids, offsets = call["indices"], call["offsets"]
        if not ids.numel():
            return None
        flags = kept(ids, self._ends(offsets, call.get("batch_size_per_feature_per_rank")))
        if flags is None:
            return None
        given = call.get("per_sample_weights")
        weights: Tensor = flags.float() if given is None else given.masked_fill(~flags, 0)
        # FBGEMM's mean does not work with weights: a sum of weights 1 / L takes its place. What it
        # makes of a caller's own weights stays as it is.
        if self.pooling == "mean" and given is None:
            weights *= _shares(offsets, ids.numel())
            self._batch.pooling_mode = type(self._own_pooling).SUM
        changed = {**call, "per_sample_weights": weights}
        # Otherwise FBGEMM makes gradients of the weights, which nothing asks for.
        if not weights.requires_grad:
            changed["feature_requires_grad"] = self._no_gradients(ids.device)
        return changed

    def restore_pooling(self) -> None:
        """Pool as before :meth:`weighed`."""
        self._batch.pooling_mode = self._own_pooling

    def _no_gradients(self, device: torch.device) -> Tensor:
        """Return for each feature that its weights require no gradient."""
        if self._silent is None:
            self._silent = torch.zeros(len(self.features), dtype=torch.int32, device=device)
        return self._silent

    def _ends(
        self, offsets: Tensor, sizes: Sequence[Sequence[int]] | None
    ) -> Sequence[int] | Tensor:
        """Return where the ids of each feature begin and, last, end; on a device without waiting
        for it.

        Args:
            offsets: where each bag begins and, last, where they end.
            sizes: for each feature how many bags it has of each rank; None if all have as many.
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
        # TorchRec's optimizer hands its own rate to the batch at every step.
        kernel: Any = self.module
        for group in kernel.fused_optimizer.param_groups:
            group["lr"] = changed["lr"]


def _shares(offsets: Tensor, count: int) -> Tensor:
    """Return for each id 1 / the number of ids in its bag, float32 ``(count,)``."""
    lengths = offsets.diff()
    # The count is known: without it a device would be waited for.
    return torch.repeat_interleave(lengths.float().reciprocal_(), lengths, output_size=count)


HOST = 3
"""``EmbeddingLocation.HOST`` as a number."""

SPARSE_TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}
"""``SparseType``s as numbers."""

POOLING = {"sum": 0, "mean": 1, "none": 2}
"""``PoolingMode``s as numbers."""


def available() -> bool:
    """Return whether FBGEMM is installed, with its operators loaded."""
    try:
        import fbgemm_gpu  # noqa: F401  (it registers the operators)
    except ImportError:
        return False
    return True


def select_jagged(values: Tensor, lengths: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen values and the lengths that are left: one pass over both."""
    found: tuple[Tensor, Tensor] = torch.ops.fbgemm.masked_select_jagged_1d(values, lengths, chosen)
    return found


def look_up_stored(
    tables: Any, rows: Tensor, offsets: Tensor, pooling: str, factors: Tensor | None
) -> Tensor:
    """Return rows of tables in FBGEMM's format for inference, pooled, float32.

    Args:
        tables: has ``weights``, of all tables, uint8, on the host, and ``no_weights``, the same of
            devices, empty. For each feature ``placements``, :data:`HOST`; ``starts``, where its
            table begins in ``weights``, in bytes; ``types``, one of :data:`SPARSE_TYPES`, all the
            same. ``columns``: where the columns of each feature begin in the result, and their
            number, ``total``. ``widest``: the columns of the widest table by type.
        rows: int32 ``(n,)``, feature after feature, in each of them bag after bag.
        offsets: int32 ``(features * bags + 1,)``: where each bag starts.
        pooling: one of :data:`POOLING`.
        factors: float32 ``(n,)``, a factor for each row.
    """
    found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        tables.weights,
        tables.no_weights,
        tables.placements,
        tables.starts,
        tables.types,
        tables.columns,
        tables.total,
        0,
        tables.widest["int4"],
        tables.widest["int8"],
        tables.widest["fp16"],
        tables.widest["fp32"],
        rows,
        offsets,
        POOLING[pooling],
        factors,
        0,  # SparseType.FP32: the dtype of the results
        None,
        None,
        1,  # alignment of rows in bytes
    )
    return found


@dataclass(frozen=True)
class StoredRows:
    """A table in FBGEMM's format for inference.

    Args:
        name: of the table.
        features: that look it up.
        columns: of its rows.
        dtype: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        rows: uint8 ``(n, bytes)``.
        scale_bias: of 8 and 4 bits, uint8 ``(n, 4)``: two float16.
        remap: the row of each id, -1 of removed ids: int32 ``(ids,)``; None in TorchRec's module.
    """

    name: str
    features: tuple[str, ...]
    columns: int
    dtype: str
    pooling: str
    rows: Tensor
    scale_bias: Tensor | None
    remap: Tensor | None = None

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """The rows, and their scales and biases."""
        return self.rows, self.scale_bias


def table_batch(tables: Sequence[StoredRows]) -> nn.Module:
    """Return FBGEMM's module over tables of one pooling and a feature each, which takes the ids of
    the models. They are remapped by arrays: 4 bytes per id of the original table."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    [pooling] = {table.pooling for table in tables}
    module: nn.Module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (
                table.name,
                len(table.rows),
                table.columns,
                SparseType(table.dtype),
                EmbeddingLocation.HOST,
            )
            for table in tables
        ],
        index_remapping=[table.remap for table in tables],
        use_array_for_index_remapping=True,
        pooling_mode=PoolingMode[pooling.upper()],
        weight_lists=[table.weights for table in tables],
        # Results in float16, the default, would round.
        output_dtype=SparseType.FP32,
        indices_dtype=torch.int64,
        device=torch.device("cpu"),
        # Rows without gaps between them, as in the artifact.
        row_alignment=1,
    )
    return module


def bag_collection(tables: Sequence[StoredRows], is_weighted: bool) -> nn.Module:
    """Return TorchRec's quantized EmbeddingBagCollection, which takes rows for ids."""
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
    from torchrec.quant.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=len(table.rows),
            embedding_dim=table.columns,
            feature_names=list(table.features),
            pooling=PoolingType[table.pooling.upper()],
            data_type=DataType[table.dtype.upper()],
        )
        for table in tables
    ]
    module: nn.Module = EmbeddingBagCollection(
        configs,
        is_weighted=is_weighted,
        device=torch.device("cpu"),
        table_name_to_quantized_weights={table.name: table.weights for table in tables},
        # The names of shard_quant_model's state: a model that it has sharded loads this one's.
        quant_state_dict_split_scale_bias=True,
        row_alignment=1,
    )
    return module


_ETA = 1e-12
"""Keeps logarithms finite."""


def auc_and_ne(predictions: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return AUC and normalized entropy of probabilities, ``(examples,)`` as the labels."""
    from torchrec.metrics.auc import compute_auc
    from torchrec.metrics.ne import compute_ne, get_ne_states

    weights = torch.ones_like(labels)
    auc = compute_auc(1, [predictions[None]], [labels[None]], [weights[None]])
    state = get_ne_states(labels, predictions, weights, _ETA)
    names = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    return float(auc), float(compute_ne(*(state[name] for name in names), _ETA))
