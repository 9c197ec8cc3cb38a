"""State of a :class:`~dist_sparse.SparseTraining`: every part is checked and agreed on by all ranks
before any is replaced.

It holds the masks with their configurations, and as JSON the schedule, the guard and the settings
that choose masks. Its masks must fit the settings saved with them, not the current ones:
:func:`prepare_load` temporarily overwrites these attributes of the live sparsifier while it checks
the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dist_sparse import checks
from dist_sparse.groups import warn_on_first_rank, world_group
from dist_sparse.schedulers import ReadyDataScheduler, by_name
from dist_sparse.sparsifiers.base import saved_configs
from dist_sparse.sparsifiers.dense_store import Configs
from dist_sparse.sparsifiers.importance import SCORES, ImportanceSparsifier
from dist_sparse.sparsifiers.masks import NO_ENFORCER
from dist_sparse.sparsifiers.score import SCOPES
from dist_sparse.training.arguments import UpdateGuard

_ACTION = "load_state_dict()"


def save(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: UpdateGuard
) -> dict[str, Any]:
    """Return the whole state: see :meth:`dist_sparse.SparseTraining.state_dict`."""
    # Tables that were squashed since construction have no configuration, and no floor.
    floored = sparsifier.floors.keys() & sparsifier.data_groups
    configs = sparsifier.data_groups
    parts = {
        "scheduler": scheduler.state_dict(),
        "score": sparsifier.scored_by,
        "scope": sparsifier.scope,
        "floors": {name: sparsifier.floors[name] for name in sorted(floored)},
        "guard": guard.state_dict(),
        # Not always the schedule's: masks that were loaded alone keep their levels until the next
        # mask update.
        "levels": {name: configs[name].get("sparsity_level") for name in configs},
    }
    return {
        "sparsifier": sparsifier.state_dict(),
        "schedule": checks.to_json("the schedule", parts),
    }


def prepare_load(
    sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler, guard: UpdateGuard, state: Any
) -> Callable[[], None]:
    """Check a state of :func:`save` on all ranks, and return the local function that restores it.
    Collective.

    Raises:
        ValueError: a part is missing, unknown or invalid, does not fit what is registered, differs
            between ranks, masks and schedule were not saved together, or no mask update could
            follow. On every rank; nothing has changed.
    """
    world = world_group()
    # 1. What each rank can check alone; an error on one is an error on all.
    with world.agreeing(_ACTION) as facts:
        parts = _parts(state)
        schedule, settings = _parse(parts, sparsifier, scheduler)
        commit_guard = guard.prepare_load(parts["guard"])
        masks = state["sparsifier"]
        configs = saved_configs(masks)
        _refuse_other_steps(parts.get("levels"), configs)
        compared = {**settings, "base_param": schedule["base_param"], "guard": parts["guard"]}
        facts.update({f"{name} of the state": value for name, value in compared.items()})
        # Here, where all ranks raise it if warnings are errors.
        if scheduler.end is None and schedule["end"] is not None:
            warn_on_first_rank(
                f"The state's schedule ends at step {schedule['end']} and replaces end=None: masks"
                " freeze then. Load its masks alone, by"
                " sparse.sparsifier.load_state_dict(state['sparsifier']).",
                stacklevel=4,
            )
    # 2. The schedule.
    levels, commit_schedule = scheduler.prepare_values(schedule)
    # 3. The masks, under the settings that they were made with.
    made_with = {**settings, "data_groups": configs}
    before = {name: getattr(sparsifier, name) for name in made_with}
    try:
        vars(sparsifier).update(made_with)
        # Over the world too: where no table is held by all ranks, an error of one would not reach
        # the others.
        with world.agreeing(_ACTION):
            commit_masks = sparsifier.prepare_load(masks)
        with world.agreeing(_ACTION):
            _check_next_updates(sparsifier, levels, schedule.get("final", {}))
    finally:
        vars(sparsifier).update(before)

    def commit() -> None:
        # Nothing below communicates. Masks come last: the levels of their configurations are in
        # force until the next mask update. Then they zero removed weights, which alone needs
        # memory: a rank that runs out of memory is left with the whole state.
        commit_schedule()
        vars(sparsifier).update(settings)
        commit_guard()
        commit_masks()

    return commit


def _parts(state: Any) -> dict[str, Any]:
    """Return what :func:`save` has put into a state beside the masks."""
    # None: Lightning's callback adds its own keys.
    checks.keys("The state", state, {"sparsifier", "schedule"}, None)
    parts = checks.from_json("the schedule", state["schedule"])
    needed = {"scheduler", "score", "scope", "floors", "guard"}
    # Older releases saved no levels.
    checks.keys("The schedule of the state", parts, needed, {"levels"})
    return parts


def _parse(
    parts: Mapping[str, Any], sparsifier: ImportanceSparsifier, scheduler: ReadyDataScheduler
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schedule of a state, and its settings as attributes of the sparsifier by name,
    checked as far as one rank can alone."""
    schedule = parts["scheduler"]
    floors = parts["floors"]
    checks.keys(
        f"The state of the {type(scheduler).__name__}", schedule, set(scheduler.state_dict())
    )
    checks.keys("The entry 'floors' of the state", floors, set(), set(sparsifier.data_groups))
    score = checks.choice("score", parts["score"], SCORES)
    param = schedule["schedule_param"]
    if param != scheduler.schedule_param:
        raise ValueError(
            f"Invalid state: its schedule is one of {param!r}, not of the sparsity level."
        )
    # sparsify() attaches the counters of lookups: a state can't switch them on.
    if (score == "frequency") != sparsifier.counts_lookups:
        raise ValueError(
            f"The state is scored by {score!r}: pass Advanced(score={score!r}) to sparsify()."
        )
    settings = {
        "scored_by": score,
        "scope": checks.choice("scope", parts["scope"], SCOPES),
        "floors": {
            name: checks.level(f"floors[{name!r}]", floor) for name, floor in floors.items()
        },
    }
    return schedule, settings


def _refuse_other_steps(saved: Any, configs: Configs) -> None:
    """Refuse masks and a schedule that were not saved together: the levels beside the schedule are
    not those in the configurations of the masks."""
    if saved is None:
        return
    checks.keys("The entry 'levels' of the state", saved, set(configs))
    for name, config in configs.items():
        masked = config.get("sparsity_level")
        if saved[name] != masked:
            raise ValueError(
                f"Masks and schedule of the state are of different steps: the level of {name!r} is"
                f" {masked} with the masks and {saved[name]} with the schedule."
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
    # level. sparsifier.prepare_load() has just walked the model.
    located = tables.find_all(tables.names)
    # Norms are always known. Other scores need the optimizers that an enforcer knows, and tell
    # check_levels() which tables have sums.
    if sparsifier.masks.enforcer is not NO_ENFORCER and sparsifier.scored_by != "norm":
        sparsifier.look_up(located)
    for reached in (levels, finals):
        by_table = {name: reached.get(name, current[name]) for name in current}
        sparsifier.check_levels(by_table, located)
