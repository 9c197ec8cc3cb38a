"""A LightningModule with a sharded model, and a check that it is sparse on both ranks.

Lightning has no strategy for TorchRec: this one leaves the module alone, because
DistributedModelParallel wraps its dense part in DDP itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn, optim
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced
from dist_sparse.extras.lightning import SparsifyCallback
from tests.extras.lightning.lightning_fits import PLAN, batches, quiet, trainer
from tests.oracle import oracle_mask

__all__ = ["check_sharded"]

TABLES = {"item": 40, "user": 30}


class TorchRecStrategy(DDPStrategy):
    """Processes and collectives as in DDP; the module stays as it is."""

    def configure_ddp(self) -> None:
        return

    def model_to_device(self) -> None:
        return


class Sharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise", "table_wise"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
            )
            for name, rows in TABLES.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.over = nn.Linear(16, 4)
        self.read: Any = None

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        self.read = self.tables(keyed)
        loss: Tensor = (self.over(self.read.values()).tanh() - 1).square().mean()
        return loss


class Sharded(pl.LightningModule):
    """One id a bag, so that a removed row reads as zeros."""

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        self.dmp: Any = None
        self.moved = moved
        self.masks: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        inner = Inner()
        apply_optimizer_in_backward(RowWiseAdagrad, inner.tables.parameters(), {"lr": 0.1})
        kinds = {"item": row_wise(), "user": table_wise(rank=1)}
        kinds = {"item": table_wise(rank=0), "user": row_wise()} if self.moved else kinds
        plan = construct_module_sharding_plan(
            inner.tables, kinds, sharder=Sharder(), device_type="cpu"
        )
        whole = ShardingPlan({"tables": plan})
        self.dmp = DistributedModelParallel(
            inner, device=torch.device("cpu"), plan=whole, sharders=[Sharder()]
        )

    def configure_optimizers(self) -> Any:
        dense = dict(in_backward_optimizer_filter(self.dmp.named_parameters()))
        sgd = KeyedOptimizerWrapper(dense, lambda params: optim.SGD(params, lr=0.1))
        return CombinedOptimizer([self.dmp.fused_optimizer, sgd])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            7 * self.trainer.global_step + self.trainer.global_rank
        )
        ids = {
            name: torch.randint(rows, (9,), generator=generator) for name, rows in TABLES.items()
        }
        keyed = KeyedJaggedTensor(
            list(ids), torch.cat(list(ids.values())), lengths=torch.ones(18, dtype=torch.int64)
        )
        loss: Tensor = self.dmp(keyed)
        for name, mask in self.masks.items():
            rows = self.dmp.module.read[name][mask[ids[name], 0] == 0]
            assert bool((rows == 0).all())
        return loss


class Watch(pl.Callback):
    """Before each step of the callback: what its masks will have to be. After it: whether they
    are."""

    def __init__(self, sparse: SparsifyCallback) -> None:
        self.sparse = sparse
        self.moved = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *hook: Any) -> None:
        training = self.sparse.training
        assert training is not None
        expected = dict(pl_module.masks)
        if training.sparsifier.enable_mask_update:
            self.moved += 1
            for name in TABLES:
                level = training.sparsifier.data_groups[name]["sparsity_level"]
                expected[name] = oracle_mask(
                    whole_table(pl_module.dmp, name), level, (1, "ROW"), norm="L2"
                )
        SparsifyCallback.on_train_batch_end(self.sparse, trainer, pl_module, *hook)
        for name, mask in expected.items():
            assert torch.equal(training.sparsifier.full_mask(name), mask)
        pl_module.masks = expected


def whole_table(dmp: Any, name: str) -> Tensor:
    """The rows of a table from all ranks."""
    sharded = dmp.state_dict()[f"tables.embedding_bags.{name}.weight"]
    mine = [
        (shard.metadata.shard_offsets[0], shard.tensor.clone()) for shard in sharded.local_shards()
    ]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return torch.cat(
        [rows for _, rows in sorted((piece for part in told for piece in part), key=lambda p: p[0])]
    )


class Silent(SparsifyCallback):
    """Leaves its steps to :class:`Watch`, which looks at the weights right before them."""

    def on_train_batch_end(self, *hook: Any) -> None:
        return


def check_sharded(folder: Path) -> None:
    """A row-wise and a table-wise table: the oracle's masks, zeros in every forward, a warning
    about checkpoints, and one by torch.distributed.checkpoint that goes on with other shards."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dist_sparse").addHandler(handler)
    module, sparse = Sharded(), Silent(**PLAN, advanced=Advanced(norm="L2"))
    watch = Watch(sparse)
    options: dict[str, Any] = {"devices": 2, "plugins": [TorchElasticEnvironment()]}
    fitted = trainer(folder, sparse, watch, max_steps=12, strategy=TorchRecStrategy(), **options)
    with quiet():
        fitted.fit(module, batches(24))
    assert sparse.training is not None and sparse.training.scheduler.last_epoch == 12
    assert watch.moved == 5
    assert ["'item', 'user'] are sharded" in each for each in said] == [True] * (
        dist.get_rank() == 0
    )
    assert {name: int((mask[:, 0] == 0).sum()) for name, mask in module.masks.items()} == {
        "item": 24,
        "user": 18,
    }
    dcp.save({"model": module.dmp.state_dict(), "sparse": sparse}, checkpoint_id=folder / "saved")
    before = sparse.training.sparsifier.audit()
    moved, callback = (
        Sharded(moved=True),
        SparsifyCallback(level=0.1, end=2, advanced=Advanced(norm="L2")),
    )
    resume = Resume(callback, folder / "saved")
    again = trainer(folder, callback, resume, max_steps=3, strategy=TorchRecStrategy(), **options)
    with quiet():
        again.fit(moved, batches(6))
    assert callback.training is not None and callback.training.scheduler.last_epoch == 15
    assert resume.loaded == before and callback.training.sparsifier.audit() == before, (
        "the schedule had ended"
    )


class Resume(pl.Callback):
    """Behind the callback, which has made its sparsifier when it starts."""

    def __init__(self, sparse: SparsifyCallback, saved: Path) -> None:
        self.sparse, self.saved = sparse, saved
        self.loaded: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        dcp.load(
            {"model": pl_module.dmp.state_dict(), "sparse": self.sparse}, checkpoint_id=self.saved
        )
        assert self.sparse.training is not None
        self.loaded = self.sparse.training.sparsifier.audit()
