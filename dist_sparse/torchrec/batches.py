"""FBGEMM's table batches with a fused optimizer, in TorchRec's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from dist_sparse.tables.protocols import WholeRowWriter

__all__ = ["ROW_WRITERS", "WHOLE_WRITERS", "FbgemmBatch"]

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


class _WholeWriter(NamedTuple):
    """A method that writes all rows, and the keys of its mode that say after how many steps."""

    method: str
    intervals: tuple[str, ...]


WHOLE_WRITERS: Final = {
    "EMAINPLACE_ROWWISE_ADAGRAD": _WholeWriter("ema_inplace", ("step_ema",)),
    "ENSEMBLE_ROWWISE_ADAGRAD": _WholeWriter("ensemble_and_swap", ("step_ema", "step_swap")),
}
"""Optimizers that write rows outside of the batch too."""

_HYPERPARAMETERS: Final = ("eps", "beta1", "beta2", "weight_decay")


class FbgemmBatch:
    """A :class:`~dist_sparse.tables.protocols.TableBatch`.

    Args:
        kernel: TorchRec's module around the batch.

    Raises:
        ValueError: its optimizer is not known, so that it may write rows that no hook announces.
    """

    def __init__(self, kernel: Any) -> None:
        self.module: nn.Module = kernel
        self._batch: Any = kernel.emb_module
        self.tables = [config.name for config in kernel._config.embedding_tables]
        self.features: list[int] = list(self._batch.feature_table_map)
        self.adds_rows: bool = self._batch.pooling_mode.name == "SUM"
        self._update_rule: str = self._batch.optimizer.name
        self.is_adagrad = "ADAGRAD" in self._update_rule
        if self._update_rule not in ROW_WRITERS | WHOLE_WRITERS.keys():
            raise ValueError(
                f"The tables {self.tables} have the fused optimizer {self._update_rule}, which"
                " dist_sparse does not know: it may write rows that no batch has looked up, and"
                " removed weights would come back unseen."
            )
        # A batch uses one of them: on the device, on the host, or in unified memory.
        places = ("weights_dev", "weights_host", "weights_uvm")
        self._stored = [place for place in places if getattr(self._batch, place).numel()]

    def weights(self) -> list[Tensor]:
        """Return live views of the shards."""
        views: list[Tensor] = self._batch.split_embedding_weights()
        return views

    def states(self) -> list[Sequence[Tensor]]:
        """Return live views of each shard's optimizer state."""
        # SGD has none, not even an empty one for each table.
        return self._batch.split_optimizer_states() or [()] * len(self.tables)

    def storage(self) -> list[Tensor]:
        """Return the tensors that hold the weights of all shards."""
        return [getattr(self._batch, place) for place in self._stored]

    def whole_row_writers(self) -> list[WholeRowWriter]:
        """Return what writes rows other than those of a lookup."""
        writer = WHOLE_WRITERS.get(self._update_rule)
        if writer is None:
            return []
        wrote = partial(self._wrote, writer.intervals)
        return [WholeRowWriter(self._batch, writer.method, wrote)]

    def _wrote(self, intervals: Sequence[str], mode: Mapping[str, float]) -> bool:
        """Whether such a method has just written, by FBGEMM's rule: every so many steps."""
        now = int(self._batch.iter_cpu.item())
        return any(now % int(mode[interval]) == 0 for interval in intervals)

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
