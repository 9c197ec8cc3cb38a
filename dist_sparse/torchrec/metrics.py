"""Metrics of predictions, as torchrec.metrics computes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_ne, get_ne_states

_ETA = 1e-12
"""Keeps logarithms finite."""


def auc_and_ne(predictions: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return AUC and normalized entropy of probabilities, ``(examples,)`` as the labels."""
    weights = torch.ones_like(labels)
    auc = compute_auc(1, [predictions[None]], [labels[None]], [weights[None]])
    state = get_ne_states(labels, predictions, weights, _ETA)
    names = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    return float(auc), float(compute_ne(*(state[name] for name in names), _ETA))
