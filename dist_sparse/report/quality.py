"""AUC and normalized entropy of a model's predictions over all ranks, every so many steps.

Computed by torchrec.metrics. In between nothing is sent, and nothing is read from a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_sparse.checks import integer
from dist_sparse.groups import group_over, world_ranks


class Quality:
    """AUC and NE of the predictions since the last result. Collective every ``every`` steps: every
    rank must call :meth:`update` equally often.

    AUC is the area under the ROC curve. NE is the mean log loss over that of predicting the mean
    label (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, 2014, equation
    1): below 1 is better than the mean.

    Args:
        every: steps between two results, >= 1.

    Raises:
        ValueError: ``every`` is invalid. ImportError: torchrec is not installed.

    Example::

        >>> import torch
        >>> from dist_sparse.report import Quality
        >>> quality = Quality(every=2)
        >>> labels = torch.tensor([0.0, 1.0])
        >>> quality.update(torch.tensor([-1.0, 2.0]), labels)
        {}
        >>> sorted(quality.update(torch.tensor([-2.0, 1.0]), labels))
        ['auc', 'ne']
    """

    def __init__(self, every: int = 100) -> None:
        self.every = integer("every", every, least=1)
        # In the constructor: the first result would be late for an ImportError.
        from dist_sparse.torchrec.kernels import auc_and_ne

        self._auc_and_ne = auc_and_ne
        self._steps = 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Take the logits and labels (0 or 1) of one step of this rank, ``(examples,)`` each.
        Collective at every ``every``-th call.

        Returns:
            ``{"auc": ..., "ne": ...}`` at such a call, else ``{}``:
            ``log.step(step, **quality.update(...))``.

        Raises:
            ValueError: the shapes differ.
        """
        if logits.shape != labels.shape:
            raise ValueError(
                f"Invalid labels of shape {tuple(labels.shape)}: the logits have"
                f" {tuple(logits.shape)}."
            )
        # Detached, and left on their device until a result is due.
        self._kept.append((logits.detach().flatten(), labels.detach().flatten()))
        self._steps += 1
        return self.compute() if self._steps % self.every == 0 else {}

    def compute(self) -> dict[str, float]:
        """Return AUC and NE of what was taken, and start again. Collective: two messages. ``{}`` if
        no rank had any."""
        kept, self._kept = self._kept, []
        mine = torch.empty(2, 0, dtype=torch.float64)
        if kept:
            logits, labels = map(torch.cat, zip(*kept, strict=True))
            mine = torch.stack([logits.double(), labels.double()]).cpu()
        group = group_over(world_ranks())
        sizes = group.all_gather(torch.tensor([mine.shape[1]])).flatten().tolist()
        # Known to all ranks, so all return here.
        if not sum(sizes):
            return {}
        # Ranks hold different numbers of examples, and an all-gather takes equal shapes.
        padded = torch.zeros(2, max(sizes), dtype=torch.float64)
        padded[:, : mine.shape[1]] = mine
        gathered = group.all_gather(padded)
        own = [gathered[rank, :, :size] for rank, size in enumerate(sizes)]
        logits, labels = torch.cat(own, dim=1)
        auc, ne = self._auc_and_ne(torch.sigmoid(logits), labels)
        return {"auc": auc, "ne": ne}
