"""FBGEMM's and TorchRec's own modules for inference, over stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

_CPU = torch.device("cpu")


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
        device=_CPU,
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
        device=_CPU,
        table_name_to_quantized_weights={table.name: table.weights for table in tables},
        # The names of shard_quant_model's state: a model that it has sharded loads this one's.
        quant_state_dict_split_scale_bias=True,
        row_alignment=1,
    )
    return module
