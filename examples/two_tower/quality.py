"""How well embeddings tell held-out interactions from drawn ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_ne, get_ne_states

from two_tower.data import NEGATIVES, Interactions, Test

__all__ = ["Quality", "measure"]

_K = 20
_ETA = 1e-12


@dataclass(frozen=True, kw_only=True)
class Quality:
    """AUC over uniform negatives and over popular ones, the normalized entropy over uniform ones,
    in the proportion of training, and recall@20 among items not known from training."""

    auc: float
    ne: float
    auc_popular: float
    recall: float


def measure(user: Tensor, item: Tensor, bias: Tensor, data: Interactions, test: Test) -> Quality:
    """Return the quality of tables of users ``(users, dim)`` and items ``(items, dim)``, and biases
    ``(items,)``."""

    def scores(items: Tensor) -> Tensor:  # (n, k)
        return (user[test.user][:, None] * item[items]).sum(2) + bias[items]

    right, wrong = scores(test.item[:, None]), scores(test.uniform)
    return Quality(
        auc=_auc(right, wrong),
        ne=_ne(right, wrong),
        auc_popular=_auc(right, scores(test.popular)),
        recall=_recall(user, item, bias, data, test),
    )


def _auc(right: Tensor, wrong: Tensor) -> float:
    scores = torch.cat([right.flatten(), wrong.flatten()])[None].double()
    labels = torch.zeros_like(scores)
    labels[:, : right.numel()] = 1
    return float(compute_auc(1, [scores], [labels], [torch.ones_like(scores)]))


def _ne(right: Tensor, wrong: Tensor) -> float:
    logits = torch.cat([right, wrong], dim=1).double()
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1
    weights = torch.where(labels == 1, 1.0, NEGATIVES / wrong.shape[1])
    state = get_ne_states(labels, logits.sigmoid(), weights, _ETA)
    parts = (
        state[name].sum()
        for name in ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    )
    return float(compute_ne(*parts, _ETA))


def _recall(user: Tensor, item: Tensor, bias: Tensor, data: Interactions, test: Test) -> float:
    """Return the mean fraction of a user's held-out items among their 20 best-ranked items, the
    items of training excluded."""
    held_user, held_item = test.all_pairs
    recalls = []
    for users in test.ranked_users.split(256):
        ranked = user[users] @ item.T + bias
        place = torch.full((data.users,), -1)
        place[users] = torch.arange(len(users))
        known = place[data.user] >= 0
        ranked[place[data.user[known]], data.item[known]] = -torch.inf
        first = torch.zeros_like(ranked, dtype=torch.bool).scatter_(
            1, ranked.topk(_K, dim=1).indices, True
        )
        held = torch.zeros_like(first)
        mine = place[held_user] >= 0
        held[place[held_user[mine]], held_item[mine]] = True
        recalls.append((first & held).sum(1) / held.sum(1))
    return float(torch.cat(recalls).mean())
