"""What FBGEMM's remap and TorchRec's pruned tables serve, where an artifact serves the model: see
docs/dev/log.md.

If one of these fails after an update, they have been fixed: correct the table in the docs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.inference.modules import quantize_inference_model, set_pruning_data
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse.serving.served import Served, load_served
from tests.serving.folders import Source, table, write


def remapped(weights: list[Tensor], features: list[int]) -> Any:
    """FBGEMM's inference module over the kept rows of tables, with its array remap, for features
    with these tables."""
    kept = [(weight != 0).any(1) for weight in weights]
    rows = [weight[some].contiguous() for weight, some in zip(weights, kept, strict=True)]
    return IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (f"t{at}", len(some), some.shape[1], SparseType.FP32, EmbeddingLocation.HOST)
            for at, some in enumerate(rows)
        ],
        feature_table_map=features,
        index_remapping=[torch.where(some, some.cumsum(0) - 1, -1).int() for some in kept],
        weight_lists=[(some.view(torch.uint8), None) for some in rows],
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
        indices_dtype=torch.int64,
        device="cpu",
        row_alignment=1,
    )


def test_the_remap_of_a_table_with_two_features_is_wrong(tmp_path: Path) -> None:
    """Right with a feature for each table; with two for the first, all features after it get other
    rows, silently."""
    weights = [table(300, 8, 0.5), table(200, 8, 0.5)]
    of = [Source("t0", weights[0], ["a", "b"]), Source("t1", weights[1], ["c"])]
    ids, lengths = torch.randint(0, 200, (3 * 40,)), torch.ones(3 * 40, dtype=torch.int64)
    want = torch.cat(
        [weights[at][ids[40 * feature :][:40]] for feature, at in enumerate([0, 0, 1])], 1
    )
    offsets = torch.arange(121)
    alone = remapped(weights, [0, 1])(torch.cat([ids[:40], ids[80:]]), offsets[:81])
    assert torch.equal(alone, torch.cat([want[:, :8], want[:, 16:]], 1))
    shared = remapped(weights, [0, 0, 1])(ids.clone(), offsets)
    assert torch.equal(shared[:, :8], want[:, :8])
    wrong = (shared[:, 8:16] != want[:, 8:16]).any(1)
    assert wrong.any(), "FBGEMM's remap of a table with two features is right by now"
    served = load_served(write(tmp_path / "served", ("", "bag", of)))
    assert torch.equal(served(ids, lengths), want)


@pytest.mark.filterwarnings("ignore")
def test_pruned_tables_of_torchrec_serve_another_row(tmp_path: Path) -> None:
    """``set_pruning_data`` keeps the first rows; ids of the others look up row 0, whichever rows
    were pruned."""
    weight = table(100, 8, 0.4)
    kept = (weight != 0).any(1)
    config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["a"])
    model = torch.nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=[config])})
    model["sparse"].embedding_bags["t"].weight.data.copy_(weight)
    set_pruning_data(model, {"t": int(kept.sum())})
    pruned = quantize_inference_model(model, quantization_dtype=torch.float32)["sparse"]
    ids = torch.arange(100)
    given = ids.clone()  # it writes to the ids, too
    got = pruned(KeyedJaggedTensor(["a"], given, lengths=torch.ones(100).int())).values()
    last = int(kept.sum())
    assert torch.equal(got[:last], weight[:last])
    assert torch.equal(got[last:], weight[:1].expand(100 - last, 8)), (
        "TorchRec serves pruned tables otherwise by now"
    )
    served = load_served(write(tmp_path / "served", ("", "bag", [Source("t", weight, ["a"])])))
    assert isinstance(served, Served)
    assert torch.equal(served(ids, torch.ones(100).int()), weight)
