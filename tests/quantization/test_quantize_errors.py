"""What can't be quantized is refused by name, and the model is unchanged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

from dist_sparse import BaseDataSparsifier, DataNormSparsifier, post_training_sparse_quantize


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The same module objects at the same places, the same parameters, not one bit of them other."""
    modules = list(model.named_modules(remove_duplicate=False))
    tensors = {name: (tensor, tensor.detach().clone()) for name, tensor in model.named_parameters()}
    yield
    now = list(model.named_modules(remove_duplicate=False))
    assert [(path, id(module)) for path, module in now] == [(path, id(module)) for path, module in modules]
    for name, tensor in model.named_parameters():
        assert tensor is tensors[name][0] and torch.equal(tensor.nan_to_num(), tensors[name][1].nan_to_num()), name


def model_with(module: Any) -> nn.Module:
    """A model in which ``module`` comes after an embedding that could be quantized."""
    return nn.ModuleDict({"fine": nn.Embedding(9, 4), "deep": nn.Sequential(nn.Identity(), module)})


def spoilt(value: float, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    weight = torch.randn(9, 4, dtype=dtype)
    weight[2, 1] = weight[5] = value
    return nn.Embedding(9, 4, _weight=weight)


def two_ends(value: float) -> nn.Embedding:
    return nn.Embedding(2, 2, _weight=torch.tensor([[value, -value], [0.0, 1.0]]))


def normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Embedding(9, 4))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.EmbeddingBag(9, 4, mode="max"), "'deep.1' can't be quantized: mode='max' is not supported"),
        (lambda: nn.EmbeddingBag(9, 4, max_norm=1.0), r"'deep.1' can't be quantized: max_norm=1.0"),
        (lambda: nn.Embedding(9, 4, max_norm=2.0), r"'deep.1' can't be quantized: max_norm=2.0"),
        (lambda: spoilt(float("nan")), "'deep.1': 2 of 9 rows hold NaN, or weights that are infinite"),
        (lambda: spoilt(-float("inf"), torch.float16), "'deep.1': 2 of 9 rows hold NaN, or weights that are infinite"),
        (lambda: spoilt(1e300, torch.float64), "'deep.1': 2 of 9 rows hold NaN, or .* beyond float32"),
        (lambda: two_ends(3e38), "'deep.1': 1 of 2 rows hold weights .* too far apart"),
        (normed, "'deep.1' can't be quantized: its weight is computed"),
        (lambda: nn.Embedding(9, 4, device="meta"), "'deep.1' can't be quantized: its weight is a meta tensor"),
        (lambda: nn.Embedding(0, 4), r"'deep.1' can't be quantized: its weight of shape \(0, 4\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_tables_that_cannot_be(make: Any, message: str, first: bool) -> None:
    model = model_with(make())
    if message.startswith("'deep.1' can't be quantized: its weight is a meta"):
        with pytest.raises(ValueError, match=message):
            post_training_sparse_quantize(model, DataNormSparsifier, first)
        return
    with unchanged(model), pytest.raises(ValueError, match=message):
        post_training_sparse_quantize(model, DataNormSparsifier, first, sparsity_level=0.0)


class Broken(BaseDataSparsifier):
    """Fails at the second table."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name).zero_()
        if name != "fine":
            raise ArithmeticError("no mask for this one")


class Kept(BaseDataSparsifier):
    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        pass


class ToNan(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x / 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "sparsifier, config, error, message",
    [
        (DataNormSparsifier, {"norm": "L3"}, AssertionError, "only L1 and L2"),
        (DataNormSparsifier, {"levle": 0.5}, TypeError, "levle"),
        (DataNormSparsifier, {"sparse_block_shape": (0, 4)}, ValueError, "sparse_block_shape"),
        (DataNormSparsifier, {"zeros_per_block": 9}, ValueError, "zeros_per_block"),
        (DataNormSparsifier, {"data_list": [("x", torch.ones(2, 2))]}, ValueError, "Invalid data_list"),
        (Broken, {}, ArithmeticError, "no mask for this one"),
        (Broken, {"parametrization": ToNan}, ArithmeticError, "no mask for this one"),
        (BaseDataSparsifier, {}, TypeError, "abstract"),
        (object, {}, AttributeError, "add_data"),
        (3, {}, TypeError, "not callable"),
    ],
)
def test_what_a_sparsifier_raises(
    sparsifier: Any, config: dict[str, Any], error: Any, message: str, first: bool
) -> None:
    model = model_with(nn.EmbeddingBag(9, 4))
    with unchanged(model), pytest.raises(error, match=message):
        post_training_sparse_quantize(model, sparsifier, first, **config)


@pytest.mark.parametrize("first", [True, False])
def test_a_parametrization_that_makes_nan(first: bool) -> None:
    model = model_with(nn.EmbeddingBag(9, 4))
    with unchanged(model), pytest.raises(ValueError, match="'fine': 9 of 9 rows hold"):
        post_training_sparse_quantize(model, Kept, first, parametrization=ToNan)


def test_selections() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Sequential(nn.EmbeddingBag(9, 4)))
    with unchanged(model):
        for select, message in (
            (model[0], "must be a list"),
            ((model[0],), "must be a list"),
            ([model[0], model[1]], "got Linear"),
            ([model[2]], "got Sequential"),
            ([nn.Embedding(9, 4)], "must be part of the model"),
        ):
            with pytest.raises(AssertionError, match=message):
                post_training_sparse_quantize(model, DataNormSparsifier, True, select)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="Invalid sparsify_first of type list"):
            post_training_sparse_quantize(model, DataNormSparsifier, [model[0]])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"select_embeddings=\[\]: selects nothing"):
            post_training_sparse_quantize(model, DataNormSparsifier, True, [])


def test_models_without_embeddings_to_replace() -> None:
    class Own(nn.Embedding):
        pass

    for model in (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Own(9, 4))):
        with unchanged(model), pytest.raises(ValueError, match="Sequential holds no float embeddings"):
            post_training_sparse_quantize(model, DataNormSparsifier)
    for root in (nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)):
        with pytest.raises(ValueError, match="which can only be replaced inside a module"):
            post_training_sparse_quantize(root, DataNormSparsifier)
    once = nn.Sequential(nn.Embedding(9, 4))
    post_training_sparse_quantize(once, DataNormSparsifier)
    with unchanged(once), pytest.raises(ValueError, match="holds no float embeddings"):
        post_training_sparse_quantize(once, DataNormSparsifier)


def test_weights_tied_to_what_stays_float() -> None:
    model = nn.ModuleDict(
        {"emb": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False), "bag": nn.EmbeddingBag(9, 4)}
    )
    model["head"].weight = model["emb"].weight
    with unchanged(model), pytest.raises(ValueError, match=r"'emb' .* its weight is also 'head.weight'.*untie them"):
        post_training_sparse_quantize(model, DataNormSparsifier)
    post_training_sparse_quantize(model, DataNormSparsifier, select_embeddings=[model["bag"]])
    assert type(model["emb"]) is nn.Embedding

    pair = nn.Sequential(nn.Embedding(9, 4), nn.Embedding(9, 4))
    pair[1].weight = pair[0].weight
    with unchanged(pair), pytest.raises(ValueError, match=r"'1' .* its weight is also '0.weight'.*select both"):
        post_training_sparse_quantize(pair, DataNormSparsifier, select_embeddings=[pair[1]])


def test_sharded_tables() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["f"])

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
            self.plain = nn.Embedding(9, 4)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedModelParallel(Mixed(), device=torch.device("cpu"))
        with (
            unchanged(model),
            pytest.raises(ValueError, match=r"of ShardedEmbeddingBagCollection at '.*tables'.*unsharded"),
        ):
            post_training_sparse_quantize(model, DataNormSparsifier)
        plain = model.module.plain if hasattr(model.module, "plain") else model.module.module.plain
        post_training_sparse_quantize(model, DataNormSparsifier, select_embeddings=[plain])
    finally:
        dist.destroy_process_group()


def test_table_batches_of_fbgemm() -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    batch = SplitTableBatchedEmbeddingBagsCodegen([(9, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    model = model_with(batch)
    with unchanged(model), pytest.raises(ValueError, match=r"of SplitTable.* at 'deep.1'"):
        post_training_sparse_quantize(model, DataNormSparsifier)


def test_without_fbgemm() -> None:
    """The package imports, and the call says what to install before anything else."""
    code = """
import sys
sys.modules["fbgemm_gpu"] = None  # as Python has it for what can't be imported
import torch, dist_sparse
from torch import nn
model = nn.Sequential(nn.Embedding(9, 4))
floats = model[0]
try:
    dist_sparse.post_training_sparse_quantize(model, dist_sparse.DataNormSparsifier, norm="nonsense")
except ImportError as error:
    print(error, model[0] is floats)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "install fbgemm-gpu, or fbgemm-gpu-cpu" in done.stdout and done.stdout.strip().endswith("True")


def test_fbgemm_comes_with_the_call_alone() -> None:
    code = """
import sys
import dist_sparse
dist_sparse.post_training_sparse_quantize
assert "fbgemm_gpu" not in sys.modules and "torchrec" not in sys.modules
from torch import nn
model = nn.Sequential(nn.Embedding(9, 4))
dist_sparse.post_training_sparse_quantize(model, dist_sparse.DataNormSparsifier)
assert "fbgemm_gpu" in sys.modules and "torchrec" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
