"""How does one call sparsify a model that trains?

A sparsifier, a schedule and an enforcer with the choices that most models want; whoever wants others makes the three.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dist_sparse import checks
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers.ready import CubicDataScheduler, ReadyDataScheduler
from dist_sparse.sparsifiers.norm import DataNormSparsifier
from dist_sparse.tables.shards import ROW

__all__ = ["SparseTraining", "sparsify"]


class SparseTraining:
    """A sparsifier, its schedule and its enforcer, attached; made by :func:`sparsify`.

    Attributes:
        sparsifier: the :class:`~dist_sparse.DataNormSparsifier`.
        scheduler: of its ``sparsity_level``.
        enforcer: the :class:`~dist_sparse.MaskEnforcer`.
    """

    def __init__(self, sparsifier: DataNormSparsifier, scheduler: ReadyDataScheduler, enforcer: MaskEnforcer) -> None:
        self.sparsifier, self.scheduler, self.enforcer = sparsifier, scheduler, enforcer

    def step(self) -> None:
        """After each optimizer step: moves the masks when the schedule says so. Collective then, otherwise local."""
        self.sparsifier.step()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Masks (this rank's bits), configurations and the schedule's step."""
        return {"sparsifier": self.sparsifier.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`: masks, configurations and the whole schedule, also where other ones were asked
        for; what the masks remove is zeroed at once. Collective.

        Raises:
            ValueError: a part is missing, or does not fit what is registered; on every rank.
        """
        error: Exception | None = None
        wanted = {"scheduler": set(self.scheduler.state_dict()), "sparsifier": {"state", "data_groups", "_container"}}
        try:
            for part, keys in wanted.items():
                missing = sorted(keys - set(state_dict.get(part, ())))
                if missing:
                    raise ValueError(f"The state lacks {missing} of the {part}; it has {sorted(state_dict)}.")
        except Exception as fault:
            error = fault if isinstance(fault, ValueError) else ValueError(f"Invalid state: {fault}.")
        group_over(world_ranks()).agree("load_state_dict()", {}, error)
        self.sparsifier.load_state_dict(state_dict["sparsifier"])
        self.scheduler.load_state_dict(state_dict["scheduler"])

    def detach(self) -> None:
        """Ends enforcement: the model goes on training as if it had never been sparsified. Zeros stay as they are until
        an optimizer moves them."""
        self.enforcer.detach()


def sparsify(
    model: nn.Module,
    optimizer: Any,
    *,
    level: float | Mapping[str, float],
    end: int,
    begin: int = 0,
    every: int = 100,
    block: tuple[int, int | str] = (1, ROW),
    norm: str = "L2",
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    dense: bool | str | list[str] | None = None,
    schedule: Callable[..., ReadyDataScheduler] = CubicDataScheduler,
    optimizer_state: str = "keep",
) -> SparseTraining:
    """Sparsifies the embedding tables of a model while it trains. Collective: every rank of the world must call it.

    Args:
        model: a DistributedModelParallel, a DDP module or any module.
        optimizer: what steps it, or a sequence of all optimizers that do.
        level: the fraction of blocks to remove in the end, for all tables, or by name or glob.
        begin, end, every: the first and the last step at which masks move, and how many steps lie between two moves;
            ``every`` is cut to ``end - begin`` if that is less. Steps count from 0, so ``level`` is reached by the
            ``end + 1``-th call of ``step()``.
        block: (rows, columns) that are removed together; ``(1, ROW)`` is whole rows.
        norm: ``"L1"`` or ``"L2"``, by which blocks are compared.
        include, exclude, dense: as in :meth:`~dist_sparse.BaseDataSparsifier.add_model`.
        schedule: a ready scheduler's class that takes ``final``, ``begin``, ``end`` and ``every``.
        optimizer_state: as in :class:`~dist_sparse.MaskEnforcer`.

    Returns:
        An object with ``step()``, to be called after every optimizer step, ``state_dict()``, ``load_state_dict()`` and
        ``detach()``.

    Raises:
        ValueError, AssertionError: as the three parts do; nothing is left attached. What one rank alone is told wrong
            is an error on every rank.
    """
    error: Exception | None = None
    try:
        _check(level, schedule)
        sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=block, norm=norm)
        enforcer = MaskEnforcer(sparsifier, optimizer_state)
    except Exception as fault:
        error = fault
    together = group_over(world_ranks())
    together.agree("sparsify()", {}, error)
    sparsifier.add_model(model, include=include, exclude=exclude, dense=dense)
    if all(isinstance(number, numbers.Integral) for number in (begin, end, every)):
        every = min(every, max(end - begin, 1))
    try:
        scheduler = schedule(sparsifier, "sparsity_level", final=level, begin=begin, end=end, every=every)
    except TypeError as fault:  # it takes other arguments: no scheduler has told the other ranks
        together.agree("sparsify()", {}, fault)
    try:
        enforcer.attach(optimizer)
    except Exception as fault:
        error = fault
    try:
        together.agree("sparsify()", {}, error)
    except BaseException:
        enforcer.detach()
        raise
    return SparseTraining(sparsifier, scheduler, enforcer)


def _check(level: object, schedule: object) -> None:
    """Refuses what the schedule would refuse under another name, or not at all."""
    if isinstance(level, Mapping) and not level:
        raise ValueError(f"Invalid {level=}: must be a number in [0, 1], or such numbers by name or glob.")
    for name, each in level.items() if isinstance(level, Mapping) else ((None, level),):
        checks.level("level" if name is None else f"level[{name!r}]", each)
    if not callable(schedule):
        raise ValueError(f"Invalid {schedule=}: must be the class of a ready scheduler.")
