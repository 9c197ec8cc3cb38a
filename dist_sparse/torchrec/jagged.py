"""TorchRec's containers to tensors, and back: chosen ids of inputs, changed parts of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_sparse.torchrec.kernels import select_jagged
from dist_sparse.torchrec.types import JaggedTensor, KeyedJaggedTensor, KeyedTensor, LazyAwaitable


def reordered(ids: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """Return some features of a KeyedJaggedTensor, in this order; one may come twice.

    Raises:
        ValueError: a feature is missing.
    """
    places = {key: place for place, key in enumerate(ids.keys())}
    if missing := sorted(set(features) - set(places)):
        raise ValueError(
            f"Features {missing} are not in the KeyedJaggedTensor, which has {ids.keys()}."
        )
    return ids.permute([places[feature] for feature in features])


def take(
    ids: KeyedJaggedTensor, features: Sequence[str], weighted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, lengths and weights (None of a collection that is not weighted) in the order
    of ``features``.

    Raises:
        ValueError: a feature or weights are missing, or batches differ in size by feature.
    """
    _refuse_unfit(ids, weighted)
    if list(ids.keys()) != list(features):
        ids = reordered(ids, features)
    return ids.values(), ids.lengths(), ids.weights() if weighted else None


def keyed(
    keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of ids, feature after feature."""
    return KeyedJaggedTensor(list(keys), values, weights=weights, lengths=lengths)


def _refuse_unfit(ids: KeyedJaggedTensor, weighted: bool) -> None:
    if not isinstance(ids, KeyedJaggedTensor):
        raise ValueError(
            f"Invalid ids, {type(ids)}: must be a KeyedJaggedTensor or tensors of values and"
            " lengths."
        )
    # Both say that outputs have other rows than inputs.
    if ids.variable_stride_per_key() or ids.inverse_indices_or_none() is not None:
        raise ValueError(
            "A KeyedJaggedTensor with batches of different sizes or inverse indices is not"
            " supported."
        )
    if weighted and ids.weights_or_none() is None:
        raise ValueError("The collection is weighted, and the KeyedJaggedTensor has no weights.")


def give(
    found: Tensor, lengths: Tensor, outputs: Sequence[str], dims: Sequence[int], pooled: bool
) -> KeyedTensor | dict[str, JaggedTensor]:
    """Return pooled rows as a KeyedTensor, or the rows of ids as a JaggedTensor for each of
    ``outputs``."""
    if pooled:
        return KeyedTensor(keys=list(outputs), length_per_key=list(dims), values=found)
    # Feature after feature; a row of lengths for each.
    each = lengths.view(len(outputs), -1)
    parts = torch.split(found, each.sum(1).tolist())
    return {
        key: JaggedTensor(values=part, lengths=size)
        for key, part, size in zip(outputs, parts, each, strict=True)
    }


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
