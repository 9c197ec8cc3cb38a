"""A level that asks first: mask updates wait for validations, and one that costs quality is undone.

Phases of an update under a :class:`Guard`:

1. It happens when the schedule has one, unless the one before waits for its validation. Then it is
   *owed*: it happens at the first step after that validation, at the level that is scheduled then.
2. What it removes is kept (``sparsifiers.masks.LastUpdate``), and it is *pending*.
3. A validation accepts it, and what was kept is released; or undoes it, and the schedule ends.

All decisions follow from numbers that all ranks have in common: a guard does not communicate.
Below it is the state of a whole training, which has the guard's.
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
from dist_sparse.sparsifiers.importance import SCORES, ImportanceSparsifier
from dist_sparse.sparsifiers.masks import LastUpdate
from dist_sparse.sparsifiers.score import SCOPES

Mode = Literal["max", "min"]

# By mode what a metric is multiplied by, so that larger is better.
_SIGNS = {"max": 1.0, "min": -1.0}


@dataclass(kw_only=True)
class GuardState:
    """What a guard knows, as it is saved: JSON-able.

    Args:
        active: mask updates wait for validations.
        mode: of the first validation; None before it.
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
            # A new state is valid: its values are False and None.
            if value is not fresh[name]:
                _STATE[name](f"{name} of the guard", value)
        return cls(**given)


def _flag(name: str, value: object) -> None:
    if value is not True:
        raise ValueError(f"Invalid {name}={value!r}: must be a bool.")


# The checks of what differs from a new `GuardState`.
_STATE: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("active", "waiting", "owed"), _flag),
    **dict.fromkeys(("pending", "accepted", "undone"), partial(checks.integer, least=0)),
    "mode": partial(checks.choice, known=_SIGNS),
    "best": checks.number,
}


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
        self._warns = asks_first
        self.put(GuardState(active=asks_first, waiting=asks_first))

    def put(self, state: GuardState) -> None:
        """Replace the state. What was kept of the last update is forgotten."""
        self.state, self._last = state, LastUpdate()
        self._sparsifier.masks.undo = self._last if state.active else None

    def before_step(self) -> None:
        """Let the mask update of this step happen, if there is one, or hold it back."""
        state, sparsifier = self.state, self._sparsifier
        if not state.active:
            return
        if self._warns and state.mode is None and state.owed and sparsifier.enable_mask_update:
            self._warns = False
            warn_on_first_rank(
                'level="auto" has pruned nothing so far: no mask update happens before the first'
                " validation. Call guard(metric) with the metric of each.",
                stacklevel=4,
            )
        state.owed |= sparsifier.enable_mask_update
        sparsifier.enable_mask_update = False
        if not state.waiting:
            sparsifier.enable_mask_update, state.owed = state.owed, False

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
        # A metric of torch's: reading it waits for its device, once a validation.
        if isinstance(metric, Tensor):
            metric = checks.plain(metric.squeeze())
        value = checks.number("metric", metric)
        state = self.state
        masks = self._sparsifier.masks
        scored = self._sparsifier
        rules: dict[str, object] = {
            f"Invalid {mode=}: must be one of 'max', 'min'.": mode not in _SIGNS,
            f"Invalid {mode=}: earlier validations had mode={state.mode!r}.": state.mode
            not in (None, mode),
            "guard() stops schedules of a final level: those of functions have none.": (
                not isinstance(self._scheduler, CurveDataScheduler)
            ),
            "guard() can't undo updates that rotate tables.": masks.rotation is not None,
            # Of counted lookups alone; it is 1 otherwise.
            f"guard() can't undo the decay={scored.decay} of counts of lookups.": scored.decay < 1,
            "The first guard() must come before the first mask update that removes weights: its"
            " metric is the reference, and nothing was kept of earlier updates. Validate before"
            " begin=, or begin later.": state.mode is None and not masks.tables.keeps_all,
        }
        checks.refuse(rules)
        self._last.check(masks.tables.locate())
        return float(value)

    def judge(self, metric: float, tolerance: float, mode: Mode) -> GuardCheck:
        """Accept the pending update, or undo it; return what the metric says. Local."""
        state = self.state
        state.active = True
        state.mode = mode
        self._sparsifier.masks.undo = self._last
        sign = _SIGNS[mode]
        best = metric if state.best is None else state.best
        holds = sign * metric >= sign * best - tolerance
        undone = None
        # Without an update to blame, the next one waits for a validation that holds.
        state.waiting = not holds
        if holds:
            state.best = best = max(metric, best, key=lambda value: sign * value)
            state.accepted = state.accepted if state.pending is None else state.pending
            state.pending = None
            self._last.forget()
        elif state.pending is not None:
            undone = state.undone = state.pending
            self._stop()
        step = max(self._scheduler.last_epoch - 1, 0)
        return GuardCheck(step=step, metric=metric, best=best, holds=holds, undone=undone)

    @property
    def can_undo(self) -> bool:
        """Whether the pending update, if any, is kept here: no load came between."""
        return self.state.pending is None or bool(self._last.before)

    def _stop(self) -> None:
        """Undo the pending update, and end the schedule at the level of the one before."""
        state = self.state
        masks = self._sparsifier.masks
        scheduler = self._scheduler
        assert isinstance(scheduler, CurveDataScheduler)
        if self.can_undo:
            self._last.undo(masks, masks.tables.locate())
            scheduler.stop_at(state.accepted)
        else:
            scheduler.stop_at(state.pending)
            warn_on_first_rank(
                f"The metric fell after the mask update at step {state.pending}, which can't be"
                " undone: weights or a state from before its validation were loaded. The level"
                " stays; no update follows. Save states after guard().",
                stacklevel=4,
            )
        state.pending = None
        state.waiting = False
        state.owed = False
        masks.undo = None


# State of a ``SparseTraining``: every part is checked and agreed on all ranks before one is
# replaced.
#
# The state has the masks with their configurations, and as JSON the schedule and the settings that
# choose masks. Masks are checked against the settings of the same state, not against the current
# ones.


_ACTION = "load_state_dict()"


def save(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard
) -> dict[str, Any]:
    """Return the state of all: see :meth:`dist_sparse.SparseTraining.state_dict`."""
    # Not of tables that were squashed since.
    floored = sorted(sparsifier.floors.keys() & sparsifier.data_groups)
    parts = {
        "scheduler": scheduler.state_dict(),
        "score": sparsifier.scored_by,
        "scope": sparsifier.scope,
        "floors": {name: sparsifier.floors[name] for name in floored},
        "guard": asdict(guard.state),
    }
    return {
        "sparsifier": sparsifier.state_dict(),
        "schedule": checks.to_json("the schedule", parts),
    }


def prepare_load(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard, state: Any
) -> Callable[[], None]:
    """Check a state of :func:`save` on all ranks, and return the local function that puts it in
    place. Collective.

    Raises:
        ValueError: a part is missing, unknown or invalid, does not fit what is registered, differs
            between ranks, masks and schedule are of different steps, or no mask update could
            follow. On every rank; nothing has changed.
    """
    together = world_group()
    # First what each rank can check alone; an error on one is an error on all.
    with together.agreeing(_ACTION) as facts:
        schedule, settings, guarded = _parsed(state, sparsifier, scheduler)
        masks = state["sparsifier"]
        configs = saved_configs(state["sparsifier"])
        compared = {**settings, "base_param": schedule["base_param"], "guard": asdict(guarded)}
        facts.update({f"{name} of the state": value for name, value in compared.items()})
    # Then the schedule, whose levels the masks must have.
    levels, commit_schedule = scheduler.prepare_load(schedule)
    # Then the masks, under the settings that they were made with.
    made_with = {**settings, "data_groups": configs}
    before = {name: getattr(sparsifier, name) for name in made_with}
    try:
        _put(sparsifier, made_with)
        # Over the world too: where no table is held by all ranks, an error of one would not reach
        # the others.
        with together.agreeing(_ACTION):
            commit_masks = sparsifier.prepare_state_dict(masks)
        with together.agreeing(_ACTION):
            if not isinstance(scheduler, LambdaDataScheduler):
                # Functions are not part of the state: they may be others now.
                _check_steps(levels, configs, schedule["last_epoch"])
            _check_next_updates(sparsifier, levels, schedule.get("final", {}))
    finally:
        _put(sparsifier, before)

    def commit() -> None:
        # Nothing below communicates or can fail, so that no rank is left with half a state.
        commit_masks()
        commit_schedule()
        _put(sparsifier, settings)
        guard.put(guarded)

    return commit


def _parsed(
    state: Any, sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler
) -> tuple[dict[str, Any], dict[str, Any], GuardState]:
    """Return the schedule of a state, the attributes of the sparsifier beside its masks and
    configurations, and the guard's state, checked as far as one rank can alone."""
    # Lightning's callback adds its own keys.
    _check_keys("The state", state, {"sparsifier", "schedule"}, None)
    parts = checks.from_json("the schedule", state["schedule"])
    needed = {"scheduler", "score", "scope"}
    _check_keys("The schedule of the state", parts, needed, {"floors", "guard"})
    schedule, floors = parts["scheduler"], parts.get("floors", {})
    kind = f"The state of the {type(scheduler).__name__}"
    _check_keys(kind, schedule, set(scheduler.state_dict()))
    _check_keys("The entry 'floors' of the state", floors, set(), set(sparsifier.data_groups))
    score = checks.choice("score", parts["score"], SCORES)
    param = schedule["schedule_param"]
    rules = {
        f"Invalid state: its schedule is one of {param!r}, not of the sparsity level.": param
        != scheduler.schedule_param,
        # Counting is attached at construction: a state can't switch it on.
        f"The state is scored by {score!r}: pass score={score!r} to sparsify().": (
            (score == "frequency") != sparsifier.counts_lookups
        ),
    }
    checks.refuse(rules)
    settings = {
        "scored_by": score,
        "scope": checks.choice("scope", parts["scope"], SCOPES),
        "floors": {name: checks.level(f"floors[{name!r}]", each) for name, each in floors.items()},
    }
    return schedule, settings, GuardState.parsed(parts.get("guard", asdict(GuardState())))


def _check_keys(
    what: str, found: Any, needed: set[str], optional: Set[str] | None = frozenset()
) -> None:
    """Refuse what is no mapping, and keys that are missing or unknown; None allows any others."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} must be a mapping, and is of type {type(found).__name__}.")
    missing = sorted(needed - set(found))
    more = set(found) - needed
    unknown = [] if optional is None else sorted(more - optional)
    other = f"{what} has the unknown keys {unknown}: it is of other tables, or a newer release."
    lacks = f"{what} lacks {missing}; it has {sorted(map(str, found))}."
    checks.refuse({lacks: missing, other: unknown})


def _put(sparsifier: ImportanceSparsifier, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(sparsifier, name, value)


def _check_steps(
    levels: Mapping[str, float], configs: Mapping[str, Mapping[str, Any]], step: int
) -> None:
    """Refuse masks and a schedule of different steps: the schedule's level is in the configuration
    of the masks."""
    for name, level in levels.items():
        found = configs.get(name, {}).get("sparsity_level", level)
        # A level may be a word.
        are_numbers = isinstance(found, (int, float)) and isinstance(level, (int, float))
        same = math.isclose(found, level, abs_tol=1e-9) if are_numbers else found == level
        if not same:
            raise ValueError(
                f"Masks and schedule of the state are of different steps: the level of {name!r} is"
                f" {found} with the masks and {level} at step {step} of the schedule."
            )


def _check_next_updates(
    sparsifier: ImportanceSparsifier, levels: Mapping[str, float], final: Any
) -> None:
    """Refuse settings that no later mask update could follow."""
    configs = sparsifier.data_groups
    tables = sparsifier.masks.tables
    now = {name: configs[name]["sparsity_level"] for name in configs if name in tables}
    # A state has globs as pairs.
    finals = by_name(dict(final) if isinstance(final, (list, tuple)) else final, now)
    # At the step of the state, and at the end of its schedule.
    for reached in (levels, finals):
        sparsifier.check_levels({name: reached.get(name, level) for name, level in now.items()})
    # Norms are always known: no walk for them.
    if sparsifier.masks.enforcer is not None and sparsifier.scored_by != "norm":
        sparsifier.look_up(sparsifier.masks.tables.locate())
