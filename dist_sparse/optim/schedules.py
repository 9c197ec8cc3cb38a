"""Which learning rate does a step have? The schedules that come with :class:`~dist_sparse.OptimScheduler`."""

from __future__ import annotations

import math

from dist_sparse.optim.checks import is_number
from dist_sparse.optim.scheduler import OptimScheduler

__all__ = ["ExponentDecayLr", "Noamlr"]


class Noamlr(OptimScheduler):
    """Rises linearly for ``warmup_steps`` real steps, then falls with the inverse square root of the real step.

    ``lr(t) = top * min(t ** -0.5, t * warmup_steps ** -1.5)``, where ``top`` is ``d_model ** -0.5``, or, without a
    ``d_model``, ``optim_conf["lr"] * warmup_steps ** 0.5``, so that the peak, at ``t = warmup_steps``, is the
    optimizer's own. Source: Vaswani et al., Attention Is All You Need, 2017, equation 3.

    Args:
        d_model: width of the transformer; None takes the peak from the optimizer.
        warmup_steps: real steps until the peak, >= 1.
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: int = 4000) -> None:
        """See the class.

        Raises:
            ValueError: ``warmup_steps`` or ``d_model`` is no finite number >= 1.
        """
        if not (is_number(warmup_steps) and 1 <= warmup_steps < math.inf):
            raise ValueError(f"Invalid {warmup_steps=}: must be a finite number >= 1.")
        if d_model is not None and not (is_number(d_model) and 1 <= d_model < math.inf):
            raise ValueError(f"Invalid {d_model=}: must be a finite number >= 1, or None.")
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.init_lr: float = self.get_lr() * warmup_steps**0.5 if d_model is None else d_model**-0.5

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """``real_step`` counts from 1."""
        return float(self.init_lr * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

    def extra_repr_fn(self) -> str:
        """Its arguments."""
        return f"d_model={self.d_model}, warmup_steps={self.warmup_steps}"


class ExponentDecayLr(OptimScheduler):
    """Falls by a factor every epoch: ``lr = optim_conf["lr"] * decay_factor ** (epoch_num - 1)``.

    Args:
        decay_factor: > 0, by which the learning rate of each epoch is that of the last one.
    """

    def sche_init(self, decay_factor: float = 0.999) -> None:
        """See the class.

        Raises:
            ValueError: ``decay_factor`` is no number > 0.
        """
        if not (is_number(decay_factor) and 0 < decay_factor < math.inf):
            raise ValueError(f"Invalid {decay_factor=}: must be a finite number > 0.")
        self.decay_factor = decay_factor
        self.base_lr = self.get_lr()

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """``epoch_num`` counts from 1."""
        return float(self.base_lr * self.decay_factor ** (epoch_num - 1))

    def extra_repr_fn(self) -> str:
        """Its argument."""
        return f"decay_factor={self.decay_factor}"
