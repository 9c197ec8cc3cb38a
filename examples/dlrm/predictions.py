"""Predictions of the test part, and how good they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_ne, get_ne_states

_ETA = 1e-12


@dataclass(frozen=True)
class Predictions:
    """Logits and labels, both (examples,) float32, in the order of the test part."""

    logits: Tensor
    labels: Tensor

    @cached_property
    def auc(self) -> float:
        """Area under the ROC curve."""
        labels = self.labels.double()
        return float(
            compute_auc(
                1, [self._probabilities[None]], [labels[None]], [torch.ones_like(labels)[None]]
            )
        )

    @cached_property
    def ne(self) -> float:
        """Normalized entropy: the log loss, relative to always predicting the mean label."""
        labels = self.labels.double()
        state = get_ne_states(labels, self._probabilities, torch.ones_like(labels), _ETA)
        entropy = compute_ne(
            state["cross_entropy_sum"],
            state["weighted_num_samples"],
            state["pos_labels"],
            state["neg_labels"],
            _ETA,
        )
        return float(entropy)

    @property
    def _probabilities(self) -> Tensor:
        return torch.sigmoid(self.logits.double())
