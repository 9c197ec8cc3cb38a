"""State of a ``SparseTraining``: every part is checked and agreed on all ranks before one is
replaced.

The state has the masks with their configurations, and as JSON the schedule and the settings that
choose masks. Masks are checked against the settings of the same state, not against the current
ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dist_sparse import checks
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.schedulers import LambdaDataScheduler, ReadyDataScheduler, by_name
from dist_sparse.sparsifiers.base import saved_configs
from dist_sparse.sparsifiers.importance import SCORES, ImportanceSparsifier
from dist_sparse.sparsifiers.score import SCOPES
from dist_sparse.training.guard import Guard, GuardState

_ACTION = "load_state_dict()"


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The parts of a state, checked as far as one rank can alone."""

    masks: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    schedule: Mapping[str, Any]
    # Attributes of the sparsifier beside its masks and configurations.
    settings: Mapping[str, Any]
    guard: GuardState


def save(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard
) -> dict[str, Any]:
    """Return the state of all: see :meth:`dist_sparse.SparseTraining.state_dict`."""
    names = sparsifier.data_groups
    parts = {
        "scheduler": scheduler.state_dict(),
        "score": sparsifier.scored_by,
        "scope": sparsifier.scope,
        # Not of tables that were squashed since.
        "floors": {name: floor for name, floor in sparsifier.floors.items() if name in names},
    }
    if (guarded := guard.saved()) is not None:
        parts["guard"] = guarded
    return {
        "sparsifier": sparsifier.state_dict(),
        "schedule": checks.to_json("the schedule", parts),
    }


def prepare_load(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: Guard, state: object
) -> Callable[[], None]:
    """Check a state of :func:`save` on all ranks, and return the local function that puts it in
    place. Collective.

    Raises:
        ValueError: a part is missing, unknown or invalid, does not fit what is registered, differs
            between ranks, masks and schedule are of different steps, or no mask update could
            follow. On every rank; nothing has changed.
    """
    together = group_over(world_ranks())
    # First what each rank can check alone; an error on one is an error on all.
    with together.agreeing(_ACTION) as facts:
        saved = _parsed(state, sparsifier, scheduler)
        base, guarded = saved.schedule["base_param"], asdict(saved.guard)
        compared = {**saved.settings, "base_param": base, "guard": guarded}
        facts.update({f"{name} of the state": value for name, value in compared.items()})
    # Then the schedule, whose levels the masks must have.
    levels, commit_schedule = scheduler.prepare_load(saved.schedule)
    # Then the masks, under the settings that they were made with.
    with _as_in(saved, sparsifier):
        commit_masks = _prepared_masks(sparsifier, saved.masks, together)
        with together.agreeing(_ACTION):
            _check_steps(levels, saved, scheduler)
            _check_next_updates(sparsifier, levels, saved.schedule.get("final"))

    def commit() -> None:
        # Nothing below communicates or can fail, so that no rank is left with half a state.
        commit_masks()
        commit_schedule()
        _put(sparsifier, saved.settings)
        guard.put(saved.guard)

    return commit


def _parsed(
    state: object, sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler
) -> _Saved:
    if not isinstance(state, Mapping):
        raise ValueError(
            f"Invalid state of type {type(state).__name__}: must be what state_dict() returned."
        )
    # Lightning's callback adds its own.
    _check_keys("The state", state, {"sparsifier", "schedule"}, set(state))
    parts = checks.from_json("the schedule", state["schedule"])
    needed = {"scheduler", "score", "scope"}
    _check_keys("The schedule of the state", parts, needed, {"floors", "guard"})
    schedule, kind = parts["scheduler"], type(scheduler).__name__
    if not isinstance(schedule, dict):
        raise ValueError(f"Invalid state: the scheduler must be a mapping, and is {schedule!r}.")
    _check_keys(f"The state of the {kind}", schedule, set(scheduler.state_dict()))
    if (param := schedule["schedule_param"]) != scheduler.schedule_param:
        raise ValueError(
            f"Invalid state: its schedule is one of {param!r}, not of the sparsity level."
        )
    score = checks.choice("score", parts["score"], SCORES)
    # Counting is attached at construction: a state can't switch it on.
    if (score == "frequency") != sparsifier.counts_lookups:
        raise ValueError(f"The state is scored by {score!r}: pass score={score!r} to sparsify().")
    scope = checks.choice("scope", parts["scope"], SCOPES)
    floors = _floors(parts.get("floors", {}), sparsifier.data_groups)
    return _Saved(
        masks=state["sparsifier"],
        configs=saved_configs(state["sparsifier"]),
        schedule=schedule,
        settings={"scored_by": score, "scope": scope, "floors": floors},
        guard=GuardState.parsed(parts.get("guard")),
    )


def _check_keys(
    what: str, found: Mapping[Any, Any], needed: set[str], optional: Set[str] = frozenset()
) -> None:
    if missing := sorted(needed - set(found)):
        raise ValueError(f"{what} lacks {missing}; it has {sorted(map(str, found))}.")
    if unknown := sorted(set(found) - needed - optional):
        raise ValueError(f"{what} has the unknown keys {unknown}: it may be of a newer release.")


def _floors(given: object, names: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(given, dict):
        raise ValueError(
            f"Invalid floors={given!r} in the state: must be numbers in [0, 1] by table."
        )
    if unknown := sorted(set(given) - set(names)):
        raise ValueError(f"Invalid floors in the state: the tables {unknown} are not registered.")
    return {name: checks.level(f"floors[{name!r}]", floor) for name, floor in given.items()}


@contextmanager
def _as_in(saved: _Saved, sparsifier: ImportanceSparsifier) -> Iterator[None]:
    """Give the sparsifier the settings of a state within the block, to check them."""
    groups = {name: dict(config) for name, config in saved.configs.items()}
    settings = {**saved.settings, "data_groups": groups}
    before = {name: getattr(sparsifier, name) for name in settings}
    try:
        _put(sparsifier, settings)
        yield
    finally:
        _put(sparsifier, before)


def _put(sparsifier: ImportanceSparsifier, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(sparsifier, name, value)


def _prepared_masks(
    sparsifier: ImportanceSparsifier, masks: Mapping[str, Any], together: Group
) -> Callable[[], None]:
    # prepare_state_dict() agrees over the groups of tables, one of which is then the world.
    if together.size == 1 or world_ranks() in sparsifier.masks.tables.groups:
        return sparsifier.prepare_state_dict(masks)
    # No table is held by all ranks, so an error of one rank would not reach the others.
    with together.agreeing(_ACTION):
        commit = sparsifier.prepare_state_dict(masks)
    return commit


def _check_steps(levels: Mapping[str, float], saved: _Saved, scheduler: ReadyDataScheduler) -> None:
    """Refuse masks and a schedule of different steps: the schedule's level is in the configuration
    of the masks."""
    if isinstance(scheduler, LambdaDataScheduler):
        return  # its functions are not part of the state: they may be others now
    for name, level in levels.items():
        found = saved.configs.get(name, {}).get("sparsity_level", level)
        # A level may be a word.
        are_numbers = isinstance(found, (int, float)) and isinstance(level, (int, float))
        same = math.isclose(found, level, abs_tol=1e-9) if are_numbers else found == level
        if not same:
            raise ValueError(
                f"Masks and schedule of the state are of different steps: the level of {name!r} is"
                f" {found} with the masks and {level} at step {saved.schedule['last_epoch']} of the"
                " schedule."
            )


def _check_next_updates(
    sparsifier: ImportanceSparsifier, levels: Mapping[str, float], final: Any
) -> None:
    """Refuse settings that no later mask update could follow."""
    tables = [name for name in sparsifier.data_groups if name in sparsifier.masks.tables]
    if isinstance(final, (list, tuple)):
        final = dict(final)  # a state has globs as pairs
    finals = {} if final is None else by_name(final, tables)
    now = {name: sparsifier.data_groups[name]["sparsity_level"] for name in tables}
    # At the step of the state, and at the end of its schedule.
    for reached in (levels, finals):
        sparsifier.check_levels({name: reached.get(name, now[name]) for name in tables})
    # Norms are always known: no walk for them.
    if sparsifier.masks.enforcer is not None and sparsifier.scored_by != "norm":
        sparsifier.look_up(sparsifier.masks.tables.locate())
