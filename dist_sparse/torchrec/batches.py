"""FBGEMM's table batches with a fused optimizer, in TorchRec's kernels."""

from __future__ import annotations

from collections.abc import Mapping, MutableSet, Sequence
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
