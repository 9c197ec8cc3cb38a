"""Guarded mask updates: each waits for a validation, and one that costs quality is undone.

Phases of an update under a :class:`Guard`:

1. When an update is scheduled, it runs, unless the first validation has yet to come, or the
   previous update still awaits its own; then it is *owed*: it runs at the first step after that
   validation, at the level that is scheduled then.
2. Once it has run, it is *pending*. The weights that it removed are kept
   (:class:`~dist_sparse.extras.guard.undo.LastUpdate`).
3. A validation accepts it, and the kept weights are released; or undoes it, and the schedule ends.

Every rank decides alike from the same numbers: only :meth:`Guard.check` communicates, to compare
these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from dist_sparse import checks
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.extras.guard.undo import LastUpdate
from dist_sparse.groups import warn_on_first_rank, world_group
from dist_sparse.records import GuardCheck, removed_share
from dist_sparse.schedulers import CurveDataScheduler, ReadyDataScheduler
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.training.arguments import UpdateGuard

__all__ = ["Guard"]

Mode = Literal["max", "min"]

# Factor of a metric by mode: after the multiplication, larger is better in both modes.
_SIGNS = {"max": 1.0, "min": -1.0}


@dataclass(kw_only=True)
class GuardState:
    """State of a guard, as it is saved: JSON-able.

    Args:
        mode: of the guard.
        best: the best metric of a validation that held; None before the first.
        waiting: no mask update happens before the next validation that holds.
        owed: the schedule had an update while one was waiting.
        pending: the step of the update that was not validated yet.
        accepted: the step of the last update that a validation has accepted.
        undone: the step of the update that was undone; none follows.
    """

    mode: str
    best: float | None = None
    waiting: bool = True
    owed: bool = False
    pending: int | None = None
    accepted: int | None = None
    undone: int | None = None

    @classmethod
    def parsed(cls, given: Any) -> GuardState:
        """Return the state that was saved.

        Raises:
            ValueError: it is malformed.
        """
        checks.keys("The guard of the state", given, set(_FIELD_CHECKS))
        for name, value in given.items():
            # None is the value of a new state.
            if value is not None or name in ("mode", "waiting", "owed"):
                _FIELD_CHECKS[name](f"{name} of the guard", value)
        return cls(**given)


# The check of each saved value.
_FIELD_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "mode": partial(checks.choice, known=_SIGNS),
    "best": checks.number,
    **dict.fromkeys(("waiting", "owed"), checks.flag),
    **dict.fromkeys(("pending", "accepted", "undone"), partial(checks.integer, least=0)),
}


class Guard(UpdateGuard):
    """Delay each mask update until a validation has accepted the one before, and undo one after
    which the metric falls: ``Advanced(guard=Guard())`` of :func:`~dist_sparse.sparsify`.

    Call :meth:`check` with the metric of each validation. No mask update happens before the first
    call; a warning says so at the second that has to wait. While the metric holds, the schedule
    goes on; a mask update that was scheduled in the meantime runs at the first step after the
    validation. When the metric falls, the last mask update is undone: its masks, the weights that
    it removed and their optimizer state are as they were before it, all other weights stay as they
    are now. The schedule then ends, at the level of the update before. To remove as much as the
    metric allows, let the level rise in equal steps: ``level=0.99, schedule="linear"``.

    What an update removes is kept until its validation, on the rank that holds it, with its
    optimizer state: a copy of the removed weights of that one update. It is not saved: a state that
    was saved between an update and its validation can't undo that update. Nor can an update be
    undone if weights or masks were loaded, or masks squashed, in between: the level stays, with a
    warning, and the schedule ends.

    A guard belongs to one training: :func:`~dist_sparse.sparsify` starts it again, and refuses it
    while the one before is attached.

    Args:
        tolerance: by how much the metric may be worse than the best one, at least 0.
        mode: ``"max"`` if a larger metric is better, ``"min"`` if a smaller one is.

    Attributes:
        validations: the calls of :meth:`check` and their outcomes, in order, as
            :class:`~dist_sparse.records.GuardCheck`; not saved.

    Raises:
        ValueError: an argument is invalid.

    Example::

        >>> import torch
        >>> import dist_sparse as ds
        >>> from dist_sparse.extras.guard import Guard
        >>> model = torch.nn.EmbeddingBag(100, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> guard = Guard(tolerance=0.01)
        >>> plan = {"level": 0.99, "schedule": "linear", "end": 10, "every": 1}
        >>> sparse = ds.sparsify(model, optimizer, **plan, advanced=ds.Advanced(guard=guard))
        >>> guard.check(0.75)
        True
        >>> for step in range(11):
        ...     optimizer.zero_grad()
        ...     model(torch.arange(100).view(2, 50)).sum().backward()
        ...     optimizer.step()
        ...     sparse.step()
        ...     holds = guard.check(0.75 if sparse.sparsity < 0.55 else 0.7)
        >>> sparse.sparsity
        0.5
        >>> sparse.detach()
    """

    _sparsifier: ImportanceSparsifier
    _scheduler: ReadyDataScheduler
    _state: GuardState
    _last: LastUpdate
    _warns: bool

    def __init__(self, *, tolerance: float = 0.001, mode: Mode = "max") -> None:
        super().__init__()
        self.tolerance = float(checks.number("tolerance", tolerance, least=0))
        self.mode = checks.choice("mode", mode, _SIGNS)
        self._attached = False

    def refuse_attached(self) -> None:
        """Raise a ValueError if the training that it guards is attached. Local."""
        if self._is_attached:
            raise ValueError(
                "The guard belongs to an attached SparseTraining: call its detach() first, or pass"
                " another guard."
            )

    def attach(self, sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler) -> None:
        """Guard the mask updates of these two from now on, with a new state. Local."""
        self._sparsifier = sparsifier
        self._scheduler = scheduler
        self._attached = True
        self.validations = []
        self._set_state(GuardState(mode=self.mode))

    @property
    def owed(self) -> bool:
        """Whether the schedule had a mask update that is still to come."""
        return self._state.owed

    def before_step(self) -> None:
        """Allow or delay the mask update of this step: set ``enable_mask_update``, which the
        sparsifier's next step reads. Collective when it warns."""
        state = self._state
        sparsifier = self._sparsifier
        # The schedule has set enable_mask_update for this step. The warning waits until a second
        # update is due: many loops train before they validate.
        if self._warns and state.owed and sparsifier.enable_mask_update:
            self._warns = False
            # A warning may be an error, and only the first rank warns.
            with world_group().agreeing("step()"):
                warn_on_first_rank(
                    "The guard has let nothing be removed so far: no mask update happens before the"
                    " first validation. Call Guard.check(metric) after each validation.",
                    stacklevel=4,
                )
        # An owed update counts as one of this step.
        state.owed |= sparsifier.enable_mask_update
        sparsifier.enable_mask_update = False
        if not state.waiting:
            sparsifier.enable_mask_update = state.owed
            state.owed = False

    def after_step(self) -> None:
        """Record the mask update of this step, if it happened."""
        # Still as before_step() has set it.
        if not self._sparsifier.enable_mask_update:
            return
        step = self._scheduler.last_epoch
        if self._sparsifier.masks.tables.keeps_all:
            # An update at level 0 has removed nothing that a metric could miss.
            self._state.accepted = step
        else:
            self._state.pending = step
            self._state.waiting = True

    def check(self, metric: float | Tensor) -> bool:
        """Judge the last mask update by a validation. Collective.

        A metric that falls while no update waits for its validation undoes nothing: the next update
        waits until it holds again.

        Args:
            metric: a finite number or a tensor of one, the same on every rank: reduce it first. The
                first one is the first reference; later, the best one that held is the reference.

        Returns:
            Whether the metric holds.

        Raises:
            ValueError: the metric is invalid or differs between ranks, weights were removed before
                the first call, the schedule has no final level, updates rotate tables, or counts
                decay. On every rank; nothing has changed.
            RuntimeError: the training is detached, or there is none. (On several ranks a
                ValueError, on all of them.)
        """
        with world_group().agreeing("Guard.check()") as facts:
            if not self._is_attached:
                raise RuntimeError(
                    "Guard.check() needs an attached SparseTraining: pass the guard to sparsify(),"
                    " as Advanced(guard=...), and call detach() last."
                )
            # squeeze(): a metric of shape (1,) is one number too. Reading it waits for the device.
            if isinstance(metric, Tensor):
                metric = checks.plain(metric.squeeze())
            value = float(checks.number("metric", metric))
            self._refuse_unfit()
            self._last.forget_moved(self._sparsifier.masks.tables.locate())
            facts.update(metric=value, tolerance=self.tolerance, mode=self.mode)
            facts.update(guard=asdict(self._state), can_undo=self._can_undo)
        pending = self._state.pending
        # Equal facts, so that all ranks take the same branch below.
        outcome = self._accept_or_undo(value)
        if outcome.undone is not None:
            # Collective.
            outcome = replace(outcome, sparsity=removed_share(self._sparsifier.table_stats()))
        self.validations.append(outcome)
        # Last: a warning may be an error, and only the first rank warns.
        if pending is not None and not outcome.holds and outcome.undone is None:
            warn_on_first_rank(
                f"The metric fell after the mask update at step {pending}, which can't be undone:"
                " weights, masks or a state were loaded, masks were squashed, or tables have moved."
                " The level stays; no update follows.",
                stacklevel=2,
            )
        return outcome.holds

    def state_dict(self) -> dict[str, Any]:
        """Return the state: JSON-able."""
        return asdict(self._state)

    def prepare_load(self, state: Any) -> Callable[[], None]:
        """Check a state of :meth:`state_dict`, and return the function that restores it. Local.

        Raises:
            ValueError: it is malformed, of another mode, or of a training without a guard.
        """
        if state is None:
            raise ValueError(
                "The state is of a training without a guard: leave Advanced(guard=...) out, or load"
                " its masks alone, by sparse.sparsifier.load_state_dict(state['sparsifier'])."
            )
        parsed = GuardState.parsed(state)
        if parsed.mode != self.mode:
            raise ValueError(
                f"Invalid mode={self.mode!r} of the guard: the state's has mode={parsed.mode!r}."
            )
        return partial(self._set_state, parsed)

    @property
    def _is_attached(self) -> bool:
        """Whether it guards a training that is attached."""
        return self._attached and isinstance(self._sparsifier.masks.enforcer, MaskEnforcer)

    def _set_state(self, state: GuardState) -> None:
        """Replace the state. The weights that the last update removed are released."""
        self._state = state
        self._warns = state.best is None
        self._last = LastUpdate()
        # Mask updates keep the weights that they remove from here on.
        self._sparsifier.masks.undo = self._last

    def _refuse_unfit(self) -> None:
        """Refuse updates that can't be undone, and a first validation that comes too late."""
        sparsifier = self._sparsifier
        masks = sparsifier.masks
        if not isinstance(self._scheduler, CurveDataScheduler):
            raise ValueError("A guard needs a schedule with a final level; functions have none.")
        if masks.rotation is not None:
            raise ValueError("A guard can't undo updates that rotate tables.")
        # An update shrinks the counts of lookups. Other scores count none: decay is 1.
        if sparsifier.decay < 1:
            raise ValueError(
                f"A guard can't undo the decay={sparsifier.decay} of counts of lookups."
            )
        if self._state.best is None and not masks.tables.keeps_all:
            raise ValueError(
                "The first Guard.check() must come before weights are removed: its metric is the"
                " reference."
            )

    def _accept_or_undo(self, metric: float) -> GuardCheck:
        """Accept the pending update, or undo it; return the outcome. Local."""
        state = self._state
        self._warns = False
        sign = _SIGNS[self.mode]
        # The first metric is the reference of the next ones.
        best = metric if state.best is None else state.best
        holds = sign * metric >= sign * best - self.tolerance
        pending = state.pending
        undone = None
        if holds:
            best = max(metric, best, key=lambda value: sign * value)
            state.best = best
            self._last.forget()
        if pending is None:
            # No update is to blame for a fall: the next one waits for a validation that holds.
            state.waiting = not holds
        elif holds:
            state.accepted = pending
            state.pending = None
            state.waiting = False
        else:
            state.undone = undone = self._stop()
        # last_epoch counts the steps taken; steps count from 0.
        step = max(self._scheduler.last_epoch - 1, 0)
        return GuardCheck(step=step, metric=metric, best=best, holds=holds, undone=undone)

    @property
    def _can_undo(self) -> bool:
        """Whether an undo of the pending update is possible: no load and no squash came between.
        True if none is pending."""
        return self._state.pending is None or bool(self._last.before)

    def _stop(self) -> int | None:
        """Undo the pending update, and end the schedule at the level of the one before. Return the
        step of the update that is undone."""
        state = self._state
        undone = None
        masks = self._sparsifier.masks
        scheduler = self._scheduler
        # _refuse_unfit() has refused other schedulers: only a curve has a level to stop at.
        assert isinstance(scheduler, CurveDataScheduler)
        if self._can_undo:
            undone = state.pending
            self._last.undo(masks, masks.tables.locate())
            scheduler.stop_at(state.accepted)
        else:
            scheduler.stop_at(state.pending)
        state.pending = None
        state.waiting = False
        state.owed = False
        masks.undo = None
        return undone
