"""A level that asks first: mask updates wait for validations, and one that costs quality is undone.

Phases of an update under a :class:`Guard`:

1. It happens when the schedule has one, unless the one before waits for its validation. Then it is
   *owed*: it happens at the first step after that validation, at the level that is scheduled then.
2. What it removes is kept (``sparsifiers.masks.LastUpdate``), and it is *pending*.
3. A validation accepts it, and what was kept is released; or undoes it, and the schedule ends.

All decisions follow from numbers that all ranks have in common. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal, TypeAlias

from dist_sparse import checks
from dist_sparse.schedulers import CurveDataScheduler, ReadyDataScheduler
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.masks import LastUpdate

Mode: TypeAlias = Literal["max", "min"]
MODES = ("max", "min")


@dataclass(kw_only=True)
class GuardState:
    """What a guard knows, as it is saved: JSON-able.

    Args:
        active: mask updates wait for validations.
        mode: of the first validation; None before it.
        best: the best metric of a validation that held.
        waiting: no mask update happens before the next validation that holds.
        owed: the schedule had an update meanwhile.
        pending: the step of the update that was not validated yet.
        accepted: the step of the last update that a validation has accepted.
        undone: the step of the update that was undone; none follows.
    """

    active: bool = False
    mode: Mode | None = None
    best: float | None = None
    waiting: bool = False
    owed: bool = False
    pending: int | None = None
    accepted: int | None = None
    undone: int | None = None

    @classmethod
    def parsed(cls, given: object) -> GuardState:
        """Return the state that was saved; of a training without a guard a new one.

        Raises:
            ValueError: it is malformed.
        """
        if given is None:
            return cls()
        names = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or set(given) != names:
            raise ValueError(f"Invalid guard={given!r} in the state: must have {sorted(names)}.")
        for name in ("active", "waiting", "owed"):
            if not isinstance(given[name], bool):
                raise ValueError(f"Invalid {name}={given[name]!r} of the guard: must be a bool.")
        step = partial(checks.integer, least=0)
        mode = partial(checks.choice, known=MODES)
        optional: dict[str, Callable[[str, Any], Any]] = {
            **{"pending": step, "accepted": step, "undone": step},
            **{"mode": mode, "best": checks.number},
        }
        for name, check in optional.items():
            if given[name] is not None:
                check(f"{name} of the guard", given[name])
        return cls(**given)


class Guard:
    """Holds mask updates back until the last one is validated, and undoes one that is not.

    Args:
        sparsifier, scheduler: of the training.
        asks_first: no update happens before the first validation.
    """

    def __init__(
        self, sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, asks_first: bool
    ) -> None:
        self._sparsifier, self._scheduler = sparsifier, scheduler
        self._last = LastUpdate()
        self.put(GuardState(active=asks_first, waiting=asks_first))

    def put(self, state: GuardState) -> None:
        """Replace the state. What was kept of the last update is forgotten."""
        self.state, self._last = state, LastUpdate()
        self._sparsifier.masks.undo = self._last if state.active else None

    def saved(self) -> dict[str, Any] | None:
        """Return the state as JSON-able values; None of a guard that was never used."""
        return asdict(self.state) if self.state.active else None

    @property
    def best(self) -> float:
        """The best metric that held, once there was a validation."""
        assert self.state.best is not None
        return self.state.best

    def before_step(self) -> None:
        """Let the mask update of this step happen, if there is one, or hold it back."""
        state, sparsifier = self.state, self._sparsifier
        if not state.active:
            return
        due = sparsifier.enable_mask_update or state.owed
        state.owed = due and state.waiting
        sparsifier.enable_mask_update = due and not state.waiting

    def after_step(self) -> None:
        """Note the mask update of this step, if it happened."""
        state, step = self.state, self._scheduler.last_epoch
        if not state.active or not self._sparsifier.enable_mask_update:
            return
        if self._sparsifier.masks.tables.keeps_all:
            # An update at level 0 has removed nothing that a metric could miss.
            state.accepted = step
        else:
            state.pending, state.waiting = step, True

    def check(self, metric: object, mode: object) -> float:
        """Return the metric of a validation, checked. Changes nothing.

        Raises:
            ValueError: it is not finite, or of another mode than before, weights were removed
                before the first validation, or the last update can't be undone.
        """
        value = checks.number("metric", metric)
        checks.choice("mode", mode, MODES)
        state, masks = self.state, self._sparsifier.masks
        if state.mode not in (None, mode):
            raise ValueError(f"Invalid {mode=}: earlier validations had mode={state.mode!r}.")
        if not isinstance(self._scheduler, CurveDataScheduler):
            raise ValueError(
                "guard() stops schedules of a final level: those of functions have none."
            )
        if masks.rotation is not None:
            raise ValueError("guard() can't undo updates that rotate tables.")
        if self._sparsifier.counts_lookups and self._sparsifier.decay < 1:
            raise ValueError(
                f"guard() can't undo the decay={self._sparsifier.decay} of counts of lookups."
            )
        if state.mode is None and not masks.tables.keeps_all:
            raise ValueError(
                "The first guard() must come before the first mask update that removes weights:"
                " its metric is the reference, and nothing was kept of earlier updates. Validate"
                " before begin=, or begin later."
            )
        self._last.check(masks.tables.locate())
        return float(value)

    def judge(self, metric: float, tolerance: float, mode: Mode) -> bool:
        """Accept the pending update, or undo it; return whether the metric holds. Local."""
        state = self.state
        if not state.active:
            state.active = True
            self._sparsifier.masks.undo = self._last
        state.mode = mode
        # Larger is better from here on.
        sign = 1.0 if mode == "max" else -1.0
        best = metric if state.best is None else state.best
        if sign * metric < sign * best - tolerance:
            # Without an update to blame, the next one waits for a validation that holds.
            state.waiting = True
            if state.pending is not None:
                self._stop()
            return False
        state.best = max(metric, best, key=lambda value: sign * value)
        if state.pending is not None:
            state.accepted, state.pending = state.pending, None
        state.waiting = False
        self._last.forget()
        return True

    @property
    def can_undo(self) -> bool:
        """Whether the pending update, if any, is kept here: no load came between."""
        return self.state.pending is None or bool(self._last.before)

    def _stop(self) -> None:
        """Undo the pending update, and end the schedule at the level of the one before."""
        state, masks, scheduler = self.state, self._sparsifier.masks, self._scheduler
        assert isinstance(scheduler, CurveDataScheduler)
        if self.can_undo:
            self._last.undo(masks, masks.tables.locate())
            scheduler.stop_at(state.accepted)
        else:
            scheduler.stop_at(state.pending)
        state.undone, state.pending = state.pending, None
        state.waiting = state.owed = False
        masks.undo = None
