"""The small sharded model that ``dist-sparse selftest`` trains."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, train_pipeline
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

# Rows and columns by table.
Shapes = Mapping[str, tuple[int, int]]


class TrialModel(nn.Module):
    """Bags of some tables and a linear layer, in a forward that TorchRec's pipelines can trace."""

    def __init__(self, shapes: Shapes, data_type: DataType) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=cols,
                feature_names=[f"{name}_ids"],
                data_type=data_type,
            )
            for name, (rows, cols) in shapes.items()
        ]
        # On the meta device: DistributedModelParallel allocates each rank's shards.
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.over = nn.Linear(sum(cols for _, cols in shapes.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and one number per sample."""
        out = self.over(self.tables(features).values().float()).squeeze(1)
        return out.square().mean(), out.detach()


def trial_model(
    shapes: Shapes,
    device: torch.device,
    *,
    optimizer: str = "EXACT_SGD",
    kernel: str = "fused",
    data_type: str = "FP32",
) -> DistributedModelParallel:
    """Return a model whose tables are cut by rows over all ranks. Collective.

    Args:
        shapes: of the tables.
        device: of this rank.
        optimizer: FBGEMM's name of the fused optimizer.
        kernel: TorchRec's compute kernel.
        data_type: TorchRec's name of the type of weights; FBGEMM rounds FP16 stochastically on
            CUDA.
    """
    # The layers are equal on all ranks.
    torch.manual_seed(0)
    net = TrialModel(shapes, DataType[data_type])
    fused: dict[str, Any] = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    if kernel == "fused_uvm_caching":
        fused["cache_load_factor"] = 0.2
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        net.tables,
        dict.fromkeys(shapes, row_wise(compute_kernel=kernel)),
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=device.type,
    )
    return DistributedModelParallel(
        net, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def layers_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    """Return the optimizer of the parameters that no fused optimizer steps."""
    layers = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(layers, lambda params: torch.optim.SGD(params, lr=0.01))


def trial_batch(shapes: Shapes, seed: int) -> KeyedJaggedTensor:
    """Return a batch in CPU memory: 64 bags of 8 ids for each table, drawn by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(rows, (64 * 8,), generator=generator) for rows, _ in shapes.values()]
    lengths = torch.full((len(shapes) * 64,), 8)
    return KeyedJaggedTensor([f"{name}_ids" for name in shapes], torch.cat(ids), lengths=lengths)


def pipeline_of(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Any:
    """Return one of TorchRec's pipelines, by the name of its class."""
    return getattr(train_pipeline, kind)(model, optimizer, device)
