"""Guarded mask updates: each waits for a validation, and one that costs quality is undone.

Phases of an update under a :class:`Guard`:

1. When an update is scheduled, it runs, unless the previous one still awaits validation; then it
   is *owed*: it runs at the first step after that validation, at the level that is scheduled then.
2. Once it has run, it is *pending*. The weights that it removed are kept
   (``sparsifiers.masks.LastUpdate``).
3. A validation accepts it, and the kept weights are released; or undoes it, and the schedule ends.

Every rank decides alike from the same numbers: a guard does not communicate.

The second half of the module saves and loads the state of a whole training, guard included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from dist_sparse import checks
from dist_sparse.groups import warn_on_first_rank, world_group
from dist_sparse.records import GuardCheck
from dist_sparse.schedulers import (
    CurveDataScheduler,
    LambdaDataScheduler,
    ReadyDataScheduler,
    by_name,
)
from dist_sparse.sparsifiers.base import saved_configs
from dist_sparse.sparsifiers.dense_store import Configs
from dist_sparse.sparsifiers.importance import SCORES, ImportanceSparsifier
from dist_sparse.sparsifiers.masks import LastUpdate
from dist_sparse.sparsifiers.score import SCOPES

Mode = Literal["max", "min"]

# Factor of a metric by mode: times it, larger is better in both modes.
_SIGNS = {"max": 1.0, "min": -1.0}


@dataclass(kw_only=True)
class GuardState:
    """State of a guard, as it is saved: JSON-able.

    Args:
        active: mask updates wait for validations.
        mode: the mode of the first validation; None before it.
        best: the best metric of a validation that held.
        waiting: no mask update happens before the next validation that holds.
        owed: the schedule had an update while one was waiting.
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
    def parsed(cls, given: Any) -> GuardState:
        """Return the state that was saved.

        Raises:
            ValueError: it is malformed.
        """
        fresh = asdict(cls())
        _check_keys("The guard of the state", given, set(fresh))
        for name, value in given.items():
            # The values of a new state, False and None, are valid; the checks below take neither.
            if value is not fresh[name]:
                _FIELD_CHECKS[name](f"{name} of the guard", value)
        return cls(**given)


def _flag(name: str, value: object) -> None:
    checks.refuse({f"Invalid {name}={value!r}: must be a bool.": value is not True})


# The check of each saved value that differs from a new `GuardState`'s.
_FIELD_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("active", "waiting", "owed"), _flag),
    **dict.fromkeys(("pending", "accepted", "undone"), partial(checks.integer, least=0)),
    "mode": partial(checks.choice, known=_SIGNS),
    "best": checks.number,
}


class Guard:
    """Delay each mask update until the one before is validated, and undo one that fails.

    Args:
        sparsifier, scheduler: the two whose mask updates are guarded.
        waits_for_first: delay the first update too, until the first validation.
    """

    def __init__(
        self,
        sparsifier: ImportanceSparsifier,
        scheduler: ReadyDataScheduler,
        waits_for_first: bool,
    ) -> None:
        self._sparsifier = sparsifier
        self._scheduler = scheduler
        self.set_state(GuardState(active=waits_for_first, waiting=waits_for_first))

    def set_state(self, state: GuardState) -> None:
        """Replace the state. The weights that the last update removed are released."""
        self.state = state
        # An active guard without a validation is level="auto".
        self._warns = state.mode is None
        self._last = LastUpdate()
        self._sparsifier.masks.undo = self._last if state.active else None

    def before_step(self) -> None:
        """Allow or delay the mask update of this step: set ``enable_mask_update``, which the
        sparsifier's next step reads."""
        state = self.state
        sparsifier = self._sparsifier
        if not state.active:
            return
        # The schedule has set enable_mask_update for this step. The warning waits until a second
        # update is due: many loops train before they validate.
        if self._warns and state.owed and sparsifier.enable_mask_update:
            self._warns = False
            warn_on_first_rank(
                'level="auto" has pruned nothing so far: no mask update happens before the first'
                " validation. Call guard(metric) after each validation.",
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
        state = self.state
        step = self._scheduler.last_epoch
        # Still as before_step() has set it.
        if not state.active or not self._sparsifier.enable_mask_update:
            return
        if self._sparsifier.masks.tables.keeps_all:
            # An update at level 0 has removed nothing that a metric could miss.
            state.accepted = step
        else:
            state.pending = step
            state.waiting = True

    def check(self, metric: object, mode: object) -> float:
        """Return the metric of a validation, checked. Changes nothing.

        Raises:
            ValueError: it is not finite, or of another mode than before, or weights were removed
                before the first validation.
        """
        # squeeze(): a metric of shape (1,) is one number too. Reading it waits for the device.
        if isinstance(metric, Tensor):
            metric = checks.plain(metric.squeeze())
        value = checks.number("metric", metric)
        state = self.state
        sparsifier = self._sparsifier
        masks = sparsifier.masks
        checks.refuse(
            {
                f"Invalid {mode=}: must be one of 'max', 'min'.": mode not in list(_SIGNS),
                f"Invalid {mode=}: earlier validations had mode={state.mode!r}.": (
                    state.mode not in (None, mode)
                ),
                "guard() needs a schedule with a final level; function schedules have none.": (
                    not isinstance(self._scheduler, CurveDataScheduler)
                ),
                "guard() can't undo updates that rotate tables.": masks.rotation is not None,
                # An update shrinks the counts of lookups. Other scores count none: decay is 1.
                f"guard() can't undo the decay={sparsifier.decay} of counts of lookups.": (
                    sparsifier.decay < 1
                ),
                "The first guard() must come before the first mask update that removes weights: its"
                " metric is the reference. Validate before begin=, or begin later.": (
                    state.mode is None and not masks.tables.keeps_all
                ),
            }
        )
        self._last.forget_moved(masks.tables.locate())
        return float(value)

    def accept_or_undo(self, metric: float, tolerance: float, mode: Mode) -> GuardCheck:
        """Accept the pending update, or undo it; return the outcome. Local."""
        state = self.state
        state.active = True
        state.mode = mode
        self._warns = False
        # Mask updates keep the weights that they remove from here on.
        self._sparsifier.masks.undo = self._last
        sign = _SIGNS[mode]
        # The first metric is the reference of the next ones.
        best = metric if state.best is None else state.best
        holds = sign * metric >= sign * best - tolerance
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
            state.undone = pending
            undone = self._stop()
        # last_epoch counts the steps taken; steps count from 0.
        step = max(self._scheduler.last_epoch - 1, 0)
        return GuardCheck(step=step, metric=metric, best=best, holds=holds, undone=undone)

    @property
    def can_undo(self) -> bool:
        """Whether an undo of the pending update is possible: no load came between. True if none is
        pending."""
        return self.state.pending is None or bool(self._last.before)

    def _stop(self) -> int | None:
        """Undo the pending update, and end the schedule at the level of the one before. Return the
        step of the update that is undone."""
        undone = None
        state = self.state
        masks = self._sparsifier.masks
        scheduler = self._scheduler
        # check() has refused other schedulers: only a curve has a level to stop at.
        assert isinstance(scheduler, CurveDataScheduler)
        if self.can_undo:
            undone = state.pending
            self._last.undo(masks, masks.tables.locate())
            scheduler.stop_at(state.accepted)
        else:
            scheduler.stop_at(state.pending)
            warn_on_first_rank(
                f"The metric fell after the mask update at step {state.pending}, which can't be"
                " undone: weights or a state were loaded, or tables have moved. The level"
                " stays; no update follows.",
                stacklevel=4,
            )
        state.pending = None
        state.waiting = False
        state.owed = False
        masks.undo = None
        return undone


# State of a `SparseTraining`: every part is checked and agreed on by all ranks before any is
# replaced.
#
# It holds the masks with their configurations, and as JSON the schedule and the settings that
# choose masks. Its masks must fit the settings beside them, not the current ones: prepare_load()
# temporarily overwrites these attributes of the live sparsifier while it checks the masks.


_ACTION = "load_state_dict()"


def save(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard
) -> dict[str, Any]:
    """Return the whole state: see :meth:`dist_sparse.SparseTraining.state_dict`."""
    # Tables that were squashed since construction have no configuration, and no floor.
    floored = sparsifier.floors.keys() & sparsifier.data_groups
    parts = {
        "scheduler": scheduler.state_dict(),
        "score": sparsifier.scored_by,
        "scope": sparsifier.scope,
        "floors": {name: sparsifier.floors[name] for name in sorted(floored)},
        "guard": asdict(guard.state),
    }
    return {
        "sparsifier": sparsifier.state_dict(),
        "schedule": checks.to_json("the schedule", parts),
    }


def prepare_load(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard, state: Any
) -> Callable[[], None]:
    """Check a state of :func:`save` on all ranks, and return the local function that restores it.
    Collective.

    Raises:
        ValueError: a part is missing, unknown or invalid, does not fit what is registered, differs
            between ranks, masks and schedule are of different steps, or no mask update could
            follow. On every rank; nothing has changed.
    """
    world = world_group()
    # 1. What each rank can check alone; an error on one is an error on all.
    with world.agreeing(_ACTION) as facts:
        schedule, settings, guard_state = _parse(state, sparsifier, scheduler)
        masks = state["sparsifier"]
        configs = saved_configs(masks)
        compared = {**settings, "base_param": schedule["base_param"], "guard": asdict(guard_state)}
        facts.update({f"{name} of the state": value for name, value in compared.items()})
    # 2. The schedule, whose levels at this step the masks must have.
    levels, commit_schedule = scheduler.prepare_load(schedule)
    # 3. The masks, under the settings that they were made with.
    made_with = {**settings, "data_groups": configs}
    before = {name: getattr(sparsifier, name) for name in made_with}
    try:
        vars(sparsifier).update(made_with)
        # Over the world too: where no table is held by all ranks, an error of one would not reach
        # the others.
        with world.agreeing(_ACTION):
            commit_masks = sparsifier.prepare_state_dict(masks)
        with world.agreeing(_ACTION):
            if not isinstance(scheduler, LambdaDataScheduler):
                # The functions of a LambdaDataScheduler are not saved: they may be others now.
                _refuse_other_steps(levels, configs, schedule["last_epoch"])
            _check_next_updates(sparsifier, levels, schedule.get("final", {}))
    finally:
        vars(sparsifier).update(before)

    def commit() -> None:
        # Nothing below communicates or can fail, so that no rank is left with half a state.
        commit_masks()
        commit_schedule()
        vars(sparsifier).update(settings)
        guard.set_state(guard_state)

    return commit


def _parse(
    state: Any, sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler
) -> tuple[dict[str, Any], dict[str, Any], GuardState]:
    """Return the schedule of a state, its settings as attributes of the sparsifier by name, and the
    guard's state, checked as far as one rank can alone."""
    # None: Lightning's callback adds its own keys.
    _check_keys("The state", state, {"sparsifier", "schedule"}, None)
    parts = checks.from_json("the schedule", state["schedule"])
    _check_keys(
        "The schedule of the state", parts, {"scheduler", "score", "scope", "floors", "guard"}
    )
    schedule = parts["scheduler"]
    floors = parts["floors"]
    _check_keys(
        f"The state of the {type(scheduler).__name__}", schedule, set(scheduler.state_dict())
    )
    _check_keys("The entry 'floors' of the state", floors, set(), set(sparsifier.data_groups))
    score = checks.choice("score", parts["score"], SCORES)
    param = schedule["schedule_param"]
    checks.refuse(
        {
            f"Invalid state: its schedule is one of {param!r}, not of the sparsity level.": param
            != scheduler.schedule_param,
            # sparsify() attaches the counters of lookups: a state can't switch them on.
            f"The state is scored by {score!r}: pass score={score!r} to sparsify().": (
                (score == "frequency") != sparsifier.counts_lookups
            ),
        }
    )
    settings = {
        "scored_by": score,
        "scope": checks.choice("scope", parts["scope"], SCOPES),
        "floors": {
            name: checks.level(f"floors[{name!r}]", floor) for name, floor in floors.items()
        },
    }
    return schedule, settings, GuardState.parsed(parts["guard"])


def _check_keys(
    what: str, mapping: Any, needed: set[str], optional: Set[str] | None = frozenset()
) -> None:
    """Refuse anything but a mapping with the keys ``needed`` and perhaps some of ``optional``; None
    allows any others."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{what} must be a mapping, and is of type {type(mapping).__name__}.")
    keys = set(mapping)
    missing = sorted(needed - keys)
    unknown = [] if optional is None else sorted(keys - needed - optional)
    other = f"{what} has the unknown keys {unknown}: it is of other tables, or a newer release."
    lacks = f"{what} lacks {missing}; it has {sorted(map(str, keys))}."
    checks.refuse({lacks: missing, other: unknown})


def _refuse_other_steps(levels: Mapping[str, float], configs: Configs, step: int) -> None:
    """Refuse masks and a schedule of different steps: the level in the masks' configuration is not
    the schedule's at its step."""
    for name, level in levels.items():
        masked = configs.get(name, {}).get("sparsity_level", level)
        same = masked == level
        # A level may be the word "untouched". Numbers are compared up to rounding.
        if {type(masked), type(level)} <= {int, float}:
            same = math.isclose(masked, level, abs_tol=1e-9)
        if not same:
            raise ValueError(
                f"Masks and schedule of the state are of different steps: the level of {name!r} is"
                f" {masked} with the masks and {level} at step {step} of the schedule."
            )


def _check_next_updates(
    sparsifier: ImportanceSparsifier, levels: Mapping[str, float], final: Any
) -> None:
    """Refuse settings with which a later mask update would fail."""
    configs = sparsifier.data_groups
    tables = sparsifier.masks.tables
    current = {name: configs[name]["sparsity_level"] for name in configs if name in tables}
    # state_dict() saves a mapping as pairs.
    finals = by_name(dict(final) if isinstance(final, (list, tuple)) else final, current)
    # Updates must work at the state's step and at the end of its schedule. Other tables keep their
    # level.
    for reached in (levels, finals):
        sparsifier.check_levels({name: reached.get(name, current[name]) for name in current})
    # Norms are always known. Other scores need the optimizers that an enforcer knows.
    if sparsifier.masks.enforcer is not None and sparsifier.scored_by != "norm":
        sparsifier.look_up(tables.locate())
