"""FBGEMM's operators and modules for inference, and TorchRec's metrics.

Functions import them, not this module: artifacts are served without TorchRec, and checked without
FBGEMM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.tables.jagged import check_weights, offsets_fit

# Values of FBGEMM's enums EmbeddingLocation, SparseType and PoolingMode, so that reading them does
# not import FBGEMM.
HOST = 3
SPARSE_TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}
POOLING = {"sum": 0, "mean": 1, "none": 2}


def available() -> bool:
    """Return whether FBGEMM is installed, with its operators loaded. The build for CUDA does not
    load without it."""
    try:
        import fbgemm_gpu  # noqa: F401  (it registers the operators)
    except (ImportError, OSError):
        return False
    return True


def select_jagged(values: Tensor, lengths: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen values and the new lengths of their bags. The lengths must add up to the
    number of values: otherwise the operator copies memory after them."""
    found: tuple[Tensor, Tensor] = torch.ops.fbgemm.masked_select_jagged_1d(values, lengths, chosen)
    return found


def look_up_stored(
    tables: Any, rows: Tensor, offsets: Tensor, pooling: str, factors: Tensor | None
) -> Tensor:
    """Return rows of tables in FBGEMM's format for inference, pooled, float32.

    Args:
        tables: has ``weights``, the weights of all tables on the host, uint8, and ``no_weights``,
            the weights on devices, which is empty. For each feature: ``placements``, :data:`HOST`;
            ``starts``, the offset of its table in ``weights``, in bytes; ``types``, one of
            :data:`SPARSE_TYPES`, all the same; ``columns``, the offset of its columns in the
            result. ``total``: the columns of the result. ``widest``: the columns of the widest
            table, by type.
        rows: int32 ``(n,)``, feature after feature, and within a feature bag after bag.
        offsets: int32 ``(features * bags + 1,)``: of the bags in ``rows``.
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
        # SparseType.FP32: the dtype of the results.
        0,
        None,
        None,
        # Alignment of rows in bytes.
        1,
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
        scale_bias: for 8 and 4 bits, uint8 ``(n, 4)``: two float16.
        remap: the row of each id, int32 ``(ids,)``, -1 for removed ids; None in TorchRec's module.
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


def table_batch(
    tables: Sequence[StoredRows], needs_weights: bool, weights_refusal: str
) -> nn.Module:
    """Return FBGEMM's module over tables with the same pooling, each with one feature. It takes the
    model's own ids and remaps them: by arrays, 8 bytes per id of the original tables, or if fewer
    than 1% of the ids have a row by a hash map, 18 to 40 bytes per row.

    ``needs_weights`` and ``weights_refusal``: as in
    :func:`~dist_sparse.tables.jagged.check_weights`.
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    [pooling] = {table.pooling for table in tables}
    remaps: list[Any] = [table.remap for table in tables]
    # One setting for all tables of the module. A hash map is the slower one.
    rows = torch.cat(remaps)
    uses_array = 100 * int((rows >= 0).count_nonzero()) >= len(rows)
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
        index_remapping=remaps,
        use_array_for_index_remapping=uses_array,
        pooling_mode=PoolingMode[pooling.upper()],
        weight_lists=[table.weights for table in tables],
        # Results in float16, the default, would round.
        output_dtype=SparseType.FP32,
        indices_dtype=torch.int64,
        device=torch.device("cpu"),
        # Rows without gaps between them, as in the artifact.
        row_alignment=1,
    )
    return _TableBatch(module, len(tables), needs_weights, weights_refusal)


class _TableBatch(nn.Module):
    """FBGEMM's module behind checks of its arguments, which it trusts. Negative ids are read as id
    0: FBGEMM lets -1 pass, and its remap reads the entry before the table's first one. TorchScript
    compiles it: a hook could not be."""

    def __init__(
        self, tables: nn.Module, features: int, needs_weights: bool, weights_refusal: str
    ) -> None:
        super().__init__()
        self.tables, self.features = tables, features
        self.needs_weights, self.weights_refusal = needs_weights, weights_refusal

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled rows: see :meth:`dist_sparse.serving.served.Served.to_fbgemm`."""
        for tensor in (indices, offsets):
            if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError("Ids and offsets must be 1-D, and int32 or int64.")
        bags = offsets.size(0) - 1
        if bags < 0 or bags % self.features != 0:
            raise ValueError("Offsets must cover equally many bags per feature, and the end.")
        if not offsets_fit(offsets, indices.size(0)):
            raise ValueError("Offsets begin with 0, never fall, and end with the number of ids.")
        weights = check_weights(
            indices, per_sample_weights, self.needs_weights, self.weights_refusal
        )
        # FBGEMM ignores strides.
        offsets = offsets.long().contiguous()
        pooled: Tensor = self.tables(indices.long().clamp(min=0), offsets, weights)
        return pooled


def bag_collection(tables: Sequence[StoredRows], is_weighted: bool) -> nn.Module:
    """Return TorchRec's quantized EmbeddingBagCollection. Its ids are row numbers."""
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
        # Named as in the state of shard_quant_model(): a model that it has sharded can load this.
        quant_state_dict_split_scale_bias=True,
        row_alignment=1,
    )
    return module


# Keeps logarithms finite.
_ETA = 1e-12


def load_metrics() -> None:
    """Import what :func:`auc_and_ne` needs.

    Raises:
        ImportError, OSError: TorchRec or FBGEMM is not installed, or does not load.
    """
    import torchrec.metrics.auc
    import torchrec.metrics.ne  # noqa: F401


def auc_and_ne(predictions: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return AUC and normalized entropy of probabilities, ``(examples,)`` as the labels."""
    from torchrec.metrics.auc import compute_auc
    from torchrec.metrics.ne import compute_ne, get_ne_states

    weights = torch.ones_like(labels)
    auc = compute_auc(1, [predictions[None]], [labels[None]], [weights[None]])
    state = get_ne_states(labels, predictions, weights, _ETA)
    names = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    return float(auc), float(compute_ne(*(state[name] for name in names), _ETA))
