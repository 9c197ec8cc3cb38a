"""What happens, in which order, in a due step over sharded tables?

Before that, where masks that have moved with their shards are needed at once: they follow. Then

1. Local: find the tables, score them (or run the user's ``update_mask``), hash the replicas. Errors are noted, not
raised.
2. One exchange of status: an error, another config or another set of names on any rank stops all ranks here, before
anything has changed.
3. Collective: masks follow their shards if those have moved; thresholds are found and new masks made.
4. Local: what is newly removed is zeroed in the weights, and the new masks take the place of the old.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from dist_sparse.groups import Disagreement, Group, Replica, Rider, group_over
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.sparsifiers.packed_store import ShardedTables
from dist_sparse.sparsifiers.recorder import Recorder
from dist_sparse.sparsifiers.replicas import hashes_of, restore, take_over, to_restore
from dist_sparse.tables.shards import ShardedData

__all__ = ["MaskRule", "due_step", "follow_moved", "make_masks"]


_WAITING = "what of earlier steps is still to be recorded"


class MaskRule(Protocol):
    """How a sparsifier makes masks of sharded tables; the two halves of a step around the exchange of status."""

    edits_masks: bool
    """Whether ``prepare`` reads the present masks."""

    def prepare(self, located: Mapping[str, ShardedData]) -> Any:
        """The local half. Must not communicate or change anything."""
        ...

    def facts(self, name: str) -> Any:
        """What must be equal on all ranks for one table, JSON-able."""
        ...

    def target(self, name: str) -> float | None:
        """The sparsity level that one table is to have, where there is such a thing."""
        ...

    def finish(self, prepared: Any, names: list[str], group: Group, rider: Rider | None) -> Mapping[str, MadeMasks]:
        """The collective half: new masks of the named tables. Its first all-reduce, if any, carries ``rider``."""
        ...


def follow_moved(tables: ShardedTables, rule: MaskRule) -> Exception | None:
    """Makes masks follow their shards before anything else, where the shards have moved. Collective then, over the
    tables' groups. Returns what this rank found wrong, for :func:`due_step` to raise on all."""
    try:
        located = tables.locate()
    except Exception as fault:
        return fault
    if tables.moved(located):
        _agree_all(tables, located, rule, None, repair=None)
        tables.follow(located)
    return None


def due_step(
    tables: ShardedTables, rule: MaskRule, error: Exception | None, repair: str, recorder: Recorder | None = None
) -> None:
    """Moves the masks of all sharded tables. Collective over the tables' groups: every rank must call it.

    Args:
        tables: what is registered.
        rule: how masks are made.
        error: found before on this rank, to be raised on all.
        repair: ``"raise"`` or ``"broadcast"``: what to do about replicas that have drifted apart.
        recorder: notes what changes.
    """
    with nullcontext() if recorder is None else recorder.step():
        located, made = make_masks(tables, rule, error, repair, recorder)
        for name, new in made.items():
            for shard, before, (mask, dirty) in zip(located[name].shards, tables.masks(name), new.masks, strict=True):
                mask.apply_changed_(shard.tensor, before, dirty)
            if recorder is not None:
                recorder.note(located[name], tables.masks(name), tables.block(name), new, rule.target(name))
            tables.commit(located[name], [mask for mask, _ in new.masks], new.block)


def make_masks(
    tables: ShardedTables,
    rule: MaskRule,
    error: Exception | None,
    repair: str,
    recorder: Recorder | None = None,
    action: str = "step()",
) -> tuple[Mapping[str, ShardedData], dict[str, MadeMasks]]:
    """Parts 1 to 3: the tables as they lie, and their new masks, not put in place yet. Collective, as :func:`due_step`,
    whose arguments it takes; ``action`` is for messages. No weight is written, but for replicas that were to be
    repaired."""
    located: Mapping[str, ShardedData] = {}
    prepared: Any = None
    if error is None:
        try:
            located = tables.locate()
        except Exception as fault:
            error = fault
    if error is None:
        try:
            prepared = rule.prepare(located)
        except Exception as fault:
            error = fault
    drifted = _agree_all(tables, located, rule, error, repair, recorder, action)
    if drifted:
        restore(tables, located, drifted)
        prepared = rule.prepare(located)
    tables.follow(located)
    made: dict[str, MadeMasks] = {}
    for ranks, names in tables.groups.items():
        group = group_over(ranks)
        with nullcontext() if recorder is None else recorder.riding(ranks, group) as rider:
            finished = rule.finish(prepared, names, group, rider)
        made.update(take_over(finished, located, group))
    return located, made


def _agree_all(
    tables: ShardedTables,
    located: Mapping[str, ShardedData],
    rule: MaskRule,
    error: Exception | None,
    repair: str | None,
    recorder: Recorder | None = None,
    action: str = "step()",
) -> set[str]:
    """The tables whose replicas are to be restored, once the ranks of every group are about to do the same. Collective
    over the tables' groups.

    No group is left out after an error, and larger ones come later, so that all ranks of the largest hear of it.

    Args:
        repair: as in :func:`due_step`; None does not look at replicas.
    """
    drifted: set[str] = set()
    for ranks, names in tables.groups.items():
        group = group_over(ranks)
        if group.size == 1:
            continue
        facts: dict[str, Any] = {"sparsifier.repair": repair, "whether steps are recorded": recorder is not None}
        if recorder is not None:
            facts[_WAITING] = recorder.waiting_for(ranks)
        replicas: dict[str, Replica] = {}
        if error is None:
            facts["the tables that have moved"] = tables.moved({name: located[name] for name in names})
        for name in names if error is None else ():
            data = located[name]
            facts[f"the config of table {name!r}"] = rule.facts(name)
            facts[f"the shape of table {name!r}"] = [*data.shape, str(data.dtype)]
            facts[f"the sharding of table {name!r}"] = data.tiling
            if repair is not None and data.replicated and not data.copied:
                replicas.update(hashes_of(data, group.rank))
        try:
            drifted |= to_restore(group.agree(action, facts, error, replicas), names, located, repair)
        except ValueError as refused:
            error = refused
            if recorder is not None and isinstance(refused, Disagreement) and _WAITING in refused.keys:
                recorder.forget()  # on all ranks alike: the next step finds nothing that they could disagree on
    if error is not None:
        raise error
    return drifted
