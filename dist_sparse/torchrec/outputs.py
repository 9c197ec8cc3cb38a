"""What collections take and return: chosen ids of their inputs, changed parts of their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dist_sparse.torchrec.kernels import select_jagged
from dist_sparse.torchrec.types import JaggedTensor, KeyedJaggedTensor, KeyedTensor, LazyAwaitable


def among(features: KeyedJaggedTensor, chosen: Tensor) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of the ids that are ``chosen``, bool ``(n,)``, and their weights,
    through which gradients flow back."""
    values, lengths = select_jagged(features.values(), features.lengths(), chosen)
    weights = features.weights_or_none()
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=None if weights is None else weights.masked_select(chosen),
        lengths=lengths,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def with_outputs(output: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return the output of a collection with each of its parts changed once it has arrived.

    Args:
        change: takes an output's name and its values, ``(..., columns)``, and returns values of as
            many rows.
    """
    if isinstance(output, LazyAwaitable):
        output.callbacks.append(lambda arrived: with_outputs(arrived, change))
        return output
    if isinstance(output, KeyedTensor):
        if output.values().dim() != 2:
            raise ValueError(
                f"Outputs of shape {tuple(output.values().shape)} can't be turned back: must be"
                " 2-D."
            )
        keys = output.keys()
        values = output.values().split(output.length_per_key(), dim=1)
        parts = [change(key, part) for key, part in zip(keys, values, strict=True)]
        return KeyedTensor(keys, [part.shape[1] for part in parts], torch.cat(parts, dim=1))
    return {
        key: JaggedTensor(
            change(key, found.values()),
            found.weights_or_none(),
            found.lengths_or_none(),
            found.offsets_or_none(),
        )
        for key, found in output.items()
    }
