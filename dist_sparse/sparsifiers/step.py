"""One mask update: locate, score, agree, select, apply.

Nothing of a sharded table is written before all ranks have agreed that the update can succeed. The
masks of plain data are put back if the update fails, whatever the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_sparse.groups import Facts, Group, Parcels, Rider, group_over
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.selection import NewMask
from dist_sparse.sparsifiers.digest import shared_weights
from dist_sparse.sparsifiers.lookups import lookups_here
from dist_sparse.sparsifiers.masks import Masks
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import Tiling, send_masks
from dist_sparse.sparsifiers.recorder import Recorder
from dist_sparse.tables.shards import CACHED, ShardedData, check_writable, owners

Ranks = tuple[int, ...] | None
Located = Mapping[str, ShardedData]
Configs = Mapping[str, Mapping[str, Any]]
Noted = Sequence[tuple[Facts, list[str]]]
"""The facts of each group, and the names of its tables."""

_WAITING = "the list of unsent counts of earlier mask updates"


class MaskMaker(Protocol):
    """The attributes and methods of a sparsifier that mask updates and loads use."""

    defaults: dict[str, Any]
    data_groups: dict[str, dict[str, Any]]
    masks: Masks

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        """Note what else must be equal on all ranks of the group of ``located``, once they are
        scored. Local."""
        ...

    @property
    def edits_masks(self) -> bool:
        """Whether ``score_tables`` edits the present masks of sharded tables."""
        ...

    def update_mask(self, name: str, data: Tensor, **config: Any) -> Any: ...

    def check_config(self, data: ShardedData, config: Mapping[str, Any]) -> object: ...

    def score_tables(self, located: Located, configs: Configs) -> Any:
        """Score this rank's shards. Local: must neither communicate nor change anything."""
        ...

    def select_masks(
        self, scored: Any, names: list[str], group: Group, rider: Rider | None
    ) -> Mapping[str, MadeMasks]:
        """Return the new masks of ``names``. Collective over ``group``; its first all-reduce, if
        any, carries ``rider``."""
        ...


@torch.no_grad()
def update_masks(sparsifier: MaskMaker) -> None:
    """Update every mask. Collective over the groups of the sharded tables: every rank must call it.

    Raises:
        ValueError: on every rank; no mask and no weight has changed, but that tables may be
            rotated.
    """
    packed, enforcer = sparsifier.masks.tables, sparsifier.masks.enforcer
    if sparsifier.masks.rotation is not None:
        # Before anything is scored: it moves the norm of a table into its first columns.
        sparsifier.masks.rotation.update()
    recorder = sparsifier.masks.recorder if packed else None
    undo: list[tuple[Tensor, Tensor]] = []

    def update_plain() -> None:
        if enforcer is not None:
            # Zeroes revived weights, which scores must not see.
            enforcer.begin_step()
        _update_plain(sparsifier, undo)

    try:
        with nullcontext() if recorder is None else recorder.step():
            located, made = make_masks(sparsifier, update_plain, recorder)
            if sparsifier.masks.undo is not None:
                sparsifier.masks.undo.keep(sparsifier.masks, located, made)
            _apply(packed, located, made, sparsifier.data_groups, recorder)
    except BaseException:
        # KeyboardInterrupt too: a mask of plain data that was half edited must not stay.
        for mask, before in undo:
            mask.data = before
        raise
    if enforcer is not None:
        enforcer.end_step()


def make_masks(
    sparsifier: MaskMaker, first: Callable[[], None], recorder: Recorder | None = None
) -> tuple[Located, dict[str, MadeMasks]]:
    """Return the sharded tables as they are stored now, and their new masks, not put in place yet.
    Collective.

    Args:
        sparsifier: whose masks.
        first: local work before scoring; an error in it is raised on every rank.
        recorder: whose waiting counts travel along.
    """
    packed = sparsifier.masks.tables
    noted: Noted = []
    try:
        # 1. Local: locate, score, note what must be equal. 2. Agree: an error or a difference stops
        # all ranks here.
        with packed.agreeing("step()") as noted:
            located = packed.locate()
            _note_facts(noted, located, sparsifier, recorder)
            moved = packed.moved(located) and _uses_masks_in_place(sparsifier)
            if not moved:
                scored = _score(sparsifier, located, first, noted)
        if moved:
            # The exchange is collective: all ranks have agreed before it, and agree again on the
            # scores.
            packed.reshard(located)
            with packed.agreeing("step()") as noted:
                _note_facts(noted, located, sparsifier, recorder)
                scored = _score(sparsifier, located, first, noted)
    except ValueError:
        if recorder is not None:
            _forget_differing_counts(recorder, list(packed.groups), noted)
        raise
    # 3. Collective: bring masks to their shards, select.
    packed.reshard(located)
    made: dict[str, MadeMasks] = {}
    for ranks, names in packed.groups.items():
        group = group_over(ranks)
        rider = None if recorder is None else recorder.rider(ranks)
        selected = sparsifier.select_masks(scored, names, group, rider)
        # A selection without an all-reduce has not carried the rider.
        if recorder is not None and rider is not None:
            recorder.arrived(ranks, rider, group)
        made |= _of_first_copies(selected, located, group)
    return located, made


def _uses_masks_in_place(sparsifier: MaskMaker) -> bool:
    """Whether masks must be with their shards before scoring: a user edits them, or an enforcer
    zeroes weights by them."""
    return sparsifier.edits_masks or sparsifier.masks.enforcer is not None


def _score(sparsifier: MaskMaker, located: Located, first: Callable[[], None], noted: Noted) -> Any:
    first()
    for name, data in located.items():
        check_writable(data)
        if data.kernel == CACHED:
            # Only some blocks can be masked there, and a schedule may have changed the block.
            sparsifier.check_config(data, sparsifier.data_groups[name])
    scored = sparsifier.score_tables(located, sparsifier.data_groups)
    for facts, names in noted:
        tables = [located[name] for name in names]
        _note_replicas(facts, tables)
        sparsifier.note(facts, tables)
    return scored


def _forget_differing_counts(recorder: Recorder, groups: Sequence[Ranks], noted: Noted) -> None:
    """Drop counts that the ranks of a group can't sum: on all of these ranks alike, so that the
    next mask update can agree."""
    for ranks, (facts, _) in zip(groups, noted, strict=False):
        if _WAITING in facts.differing:
            recorder.forget(ranks)


def masks_by_shard(
    packed: PackedStore, update_mask: Callable[..., Any], located: Located, configs: Configs
) -> dict[str, list[NewMask]]:
    """Return the new masks of this rank's shards, as a user's own ``update_mask`` edits them: one
    bit an element."""
    made: dict[str, list[NewMask]] = {}
    for name, data in located.items():
        made[name] = []
        for shard, before in zip(data.shards, packed.masks(name), strict=True):
            mask = before.dense()
            with packed.editing(name, mask):
                update_mask(name, shard.tensor, **configs[name])
            new = BlockMask.of_elements(shard.rect, mask)
            # A user's own rule says nothing about zeros: all that is removed is written.
            made[name].append(NewMask(new, ~new.bits))
    return made


def _update_plain(sparsifier: MaskMaker, undo: list[tuple[Tensor, Tensor]]) -> None:
    """Run ``update_mask`` on every plain tensor. Adds each mask to ``undo`` before it may
    change."""
    dense = sparsifier.masks.plain
    for name in filter(dense.is_masked, list(dense.state)):
        mask = dense.mask(name)
        # A user's update_mask may edit it in place.
        undo.append((mask, mask.detach().clone()))
        sparsifier.update_mask(name, dense.weight(name), **sparsifier.data_groups[name])


def _apply(
    packed: PackedStore,
    located: Located,
    made: Mapping[str, MadeMasks],
    configs: Configs,
    recorder: Recorder | None,
) -> None:
    """Zero newly removed weights, and put the new masks in place. Local."""
    # All tables in one list: many small ones are zeroed together.
    changes = []
    for name, new in made.items():
        data, before = located[name], packed.masks(name)
        if recorder is not None:
            # Of the old masks, which have answered these lookups.
            lookups = lookups_here(packed, data)
            recorder.note(data, before, packed.block(name), new, configs[name], lookups)
        for shard, old, (mask, dirty) in zip(data.shards, before, new.masks, strict=True):
            changes.append((mask, shard.tensor, old, dirty))
    BlockMask.apply_all_changed_(changes)
    # Masks last: if a write fails, none of them claims zeros that were not written.
    for name, new in made.items():
        packed.replace(located[name], [mask for mask, _ in new.masks], new.block, new.removed)


def _note_facts(
    noted: Noted, located: Located, sparsifier: MaskMaker, recorder: Recorder | None
) -> None:
    """Note what must be equal on all ranks."""
    moved = set(sparsifier.masks.tables.moved(located))
    for facts, names in noted:
        facts["whether steps are recorded"] = recorder is not None
        facts["whether an enforcer is attached"] = sparsifier.masks.enforcer is not None
        if recorder is not None:
            # They are summed position by position.
            facts[_WAITING] = recorder.waiting_for(located[names[0]].ranks)
        facts["the list of moved tables"] = [name for name in names if name in moved]
        for name in names:
            data = located[name]
            facts[f"the config of table {name!r}"] = sparsifier.data_groups[name]
            facts[f"the shape of table {name!r}"] = [*data.shape, str(data.dtype)]
            # add_model() has compared the tilings of models, which takes long at 1,000 ranks.
            if name in moved or data.fqn is None:
                facts[f"the sharding of table {name!r}"] = data.tiling


def _note_replicas(facts: Facts, tables: Sequence[ShardedData]) -> None:
    """Note the hashes of weights that several ranks hold and that are meant to be equal."""
    # Copies are trained apart.
    equal = [data for data in tables if data.replicated and not data.copied]
    if equal:
        facts.replicas |= shared_weights(equal, group_over(equal[0].ranks).rank)
    facts.on_drift = _refuse_drift


def _refuse_drift(drifted: Mapping[str, list[int]]) -> None:
    places = "; ".join(f"{place} on ranks {ranks}" for place, ranks in drifted.items())
    raise ValueError(
        f"Replicas have drifted from their first holder's: {places}. Nothing was changed. Load the"
        " same checkpoint on all ranks, or broadcast weights and optimizer state from the first,"
        " and find what updates them differently."
    )


def _of_first_copies(
    made: Mapping[str, MadeMasks], located: Located, group: Group
) -> dict[str, MadeMasks]:
    """Replace the new masks of copies that are trained apart (2-D parallelism) by the first copy's.
    Collective over ``group`` if there are such copies: one all-to-all of packed
    bits."""
    copied = {name: located[name] for name in made if located[name].copied}
    if not copied:
        # The same on every rank: the tables of a group are.
        return dict(made)
    parcels, arriving = Parcels(group), {}
    for name, data in copied.items():
        masks, block = [mask for mask, _ in made[name].masks], made[name].block
        arriving[name] = send_masks(
            parcels, group.rank, masks, block, data.tiling, _later_copies(data)
        )
    # Masks go on to the devices of their shards one by one.
    parcels.exchange(torch.device("cpu"))
    taken = dict(made)
    for name, read in arriving.items():
        first = {mask.rect: mask for mask in read()}
        new = [_of_first_copy(own, first.get(own.mask.rect)) for own in made[name].masks]
        taken[name] = made[name]._replace(masks=new)
    return taken


def _later_copies(data: ShardedData) -> Tiling:
    """Return for each rank the rectangles that it holds and another rank owns."""
    later = []
    for held, owned in zip(data.tiling, owners(data.tiling), strict=True):
        later.append(tuple(rect for rect in dict.fromkeys(held) if rect not in owned))
    return tuple(later)


def _of_first_copy(own: NewMask, first: BlockMask | None) -> NewMask:
    if first is None:
        return own
    bits = first.bits.to(own.mask.bits.device)
    # Blocks that are zero in this copy already need not be those that the other removes.
    return NewMask(BlockMask(first.rect, first.block, bits), ~bits)
