"""Modules and quiet Trainers for the tests of the Lightning callbacks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dist_sparse.extras.lightning import SparsifyCallback

__all__ = [
    "PLAN",
    "Collected",
    "Net",
    "Numbered",
    "adam",
    "batches",
    "checkpoint",
    "quiet",
    "sparsified",
    "trainer",
    "zero_rows",
]

ROWS = 40
PLAN: dict[str, Any] = {"level": 0.6, "begin": 1, "end": 9, "every": 2}

adam: Callable[[Any], Any] = partial(optim.Adam, lr=0.1)


class Net(pl.LightningModule):
    """A table and a layer over it; notes how many rows of the table are zero in every forward."""

    def __init__(self, make: Callable[[Any], Any] = adam) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(ROWS, 8, mode="sum")
        self.over = nn.Linear(8, 4)
        self.make = make
        self.trained: list[int] = []
        self.validated: list[int] = []

    def loss(self, ids: Tensor) -> Tensor:
        return (self.over(self.bag(ids)).tanh() - 1).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch[0])
        self.trained.append(zero_rows(self.bag.weight))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch[0])
        self.validated.append(zero_rows(self.bag.weight))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Numbered(Net):
    """What a rank trains on depends on the step and the rank alone: no DataLoader of torch's can go
    back into the middle of an epoch."""

    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(
            7 * self.trainer.global_step + self.trainer.global_rank
        )
        return torch.randint(ROWS, (4, 3), generator=generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step([self.ids()], batch_idx)


class Collected(Net):
    """Its table is TorchRec's, not sharded."""

    def __init__(self) -> None:
        super().__init__()
        item = EmbeddingBagConfig(
            name="item", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"]
        )
        self.tables = EmbeddingBagCollection(tables=[item])
        del self._modules["bag"]

    @property
    def bag(self) -> Any:
        return self.tables.embedding_bags["item"]

    def loss(self, ids: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor(
            ["f"], ids.flatten(), lengths=torch.full((len(ids),), ids.shape[1])
        )
        loss: Tensor = (self.over(self.tables(keyed).values()).tanh() - 1).square().mean()
        return loss


def zero_rows(weight: Tensor) -> int:
    return int((weight == 0).all(1).sum())


def batches(number: int = 12) -> DataLoader[Any]:
    """The same ids at every call: ``number`` batches of 4 bags of 3."""
    ids = torch.randint(ROWS, (number * 4, 3), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(ids), batch_size=4)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning says about devices, workers and log intervals."""
    loggers = [
        logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "pytorch_lightning")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*does not have many workers",
                ".*LeafSpec",
                ".*val_dataloader",
                ".*logging interval",
            ):
                warnings.filterwarnings("ignore", message)
            for message in (
                ".*ended before the epoch ended",
                ".*exists and is not empty",
                ".*has no training batches",
            ):
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    """On the CPU, in ``folder``, one epoch, without bars, loggers and checkpoints unless
    ``options`` say so."""
    silent = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    plain = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "default_root_dir": folder}
    with quiet():
        return pl.Trainer(**{**silent, **plain, **options}, callbacks=list(callbacks))


def checkpoint(fitted: pl.Trainer, file: Path) -> dict[str, Any]:
    """Saves one, and reads it as a safe load does."""
    fitted.save_checkpoint(file, weights_only=False)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


def sparsified(folder: Path, module: Any, number: int = 12, **options: Any) -> SparsifyCallback:
    """The callback, after a fit by it with ``PLAN``."""
    callback = SparsifyCallback(**PLAN)
    fitted = trainer(folder, callback, **options)
    with quiet():
        fitted.fit(module, batches(number))
    return callback
