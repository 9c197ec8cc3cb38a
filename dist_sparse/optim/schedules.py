"""Learning rate schedules of SpeeChain: Noam and exponential decay."""

from __future__ import annotations

from dist_sparse.checks import number
from dist_sparse.optim.scheduler import OptimScheduler


class Noamlr(OptimScheduler):
    """Linear warm-up, then decay with the inverse square root of the real step.

    ``lr(t) = top * min(t ** -0.5, t * warmup_steps ** -1.5)``, where ``top`` is
    ``d_model ** -0.5``, or without ``d_model`` ``optim_conf["lr"] * warmup_steps ** 0.5``, so that
    the peak at ``t = warmup_steps`` is the optimizer's own learning rate. Source: Vaswani et al.,
    Attention Is All You Need, 2017, equation 3.

    Args:
        d_model: width of the transformer; None takes the peak from the optimizer.
        warmup_steps: real steps until the peak, >= 1.

    Example::

        >>> from torch import nn
        >>> from dist_sparse.optim import Noamlr
        >>> model = nn.Linear(2, 1)
        >>> scheduler = Noamlr("Adam", {"lr": 0.01}, model, use_amp=False, warmup_steps=100)
        >>> [round(scheduler.update_lr(real_step, 1), 4) for real_step in (1, 50, 100, 400)]
        [0.0001, 0.005, 0.01, 0.005]
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: int = 4000) -> None:
        """Set up the schedule; see the class.

        Raises:
            ValueError: ``warmup_steps`` or ``d_model`` is not a finite number >= 1.
        """
        self.warmup_steps = number("warmup_steps", warmup_steps, least=1)
        self.d_model = None if d_model is None else number("d_model", d_model, least=1)
        if self.d_model is None:
            self.init_lr = float(self.get_lr() * self.warmup_steps**0.5)
        else:
            self.init_lr = float(self.d_model**-0.5)

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate of a real step, counted from 1."""
        return float(self.init_lr * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

    def extra_repr_fn(self) -> str:
        """Return the schedule's arguments, for ``repr``."""
        return f"d_model={self.d_model}, warmup_steps={self.warmup_steps}"


class ExponentDecayLr(OptimScheduler):
    """Exponential decay by epochs: ``lr = optim_conf["lr"] * decay_factor ** (epoch_num - 1)``.

    Args:
        decay_factor: factor between the learning rates of consecutive epochs, > 0.

    Example::

        >>> from torch import nn
        >>> from dist_sparse.optim import ExponentDecayLr
        >>> model = nn.Linear(2, 1)
        >>> scheduler = ExponentDecayLr("SGD", {"lr": 0.8}, model, use_amp=False, decay_factor=0.5)
        >>> [scheduler.update_lr(real_step=1, epoch_num=epoch) for epoch in (1, 2, 3)]
        [0.8, 0.4, 0.2]
    """

    def sche_init(self, decay_factor: float = 0.999) -> None:
        """Set up the schedule; see the class.

        Raises:
            ValueError: ``decay_factor`` is not a finite number > 0.
        """
        self.decay_factor = number("decay_factor", decay_factor)
        if self.decay_factor <= 0:
            raise ValueError(f"Invalid {decay_factor=}: must be a number > 0.")
        self.base_lr = self.get_lr()

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate of an epoch, counted from 1."""
        return float(self.base_lr * self.decay_factor ** (epoch_num - 1))

    def extra_repr_fn(self) -> str:
        """Return the schedule's argument, for ``repr``."""
        return f"decay_factor={self.decay_factor}"
