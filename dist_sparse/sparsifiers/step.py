"""One mask update: locate, score, agree, select, apply; and the interface of a sparsifier to it.

No sharded table is written before all ranks have agreed that the update can succeed. If the update
fails for any reason, the masks of plain data are restored.
"""

import abc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dist_sparse.groups import Call, Facts, Group
from dist_sparse.masking.block_masks import NewMasks
from dist_sparse.masking.device import with_one_retry
from dist_sparse.masking.masks import BlockMask, Held, ShardChange
from dist_sparse.masking.selection import NewMask
from dist_sparse.sparsifiers.dense_store import Configs
from dist_sparse.sparsifiers.masks import NO_ENFORCER, Masks
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import Move, Tiling, shared_weights
from dist_sparse.tables.shards import (
    CACHED,
    Block,
    Located,
    ShardedData,
    check_cached,
    check_writable,
    owners,
)

# The live masks of plain data, each with a copy of its values before the update.
PlainMasks = list[tuple[Tensor, Tensor]]

# For each group, its facts, which must be equal on all of its ranks, and the names of its tables.
GroupFacts = Sequence[tuple[Facts, list[str]]]


_DRIFTED = (
    "Replicas have drifted from their first holder's: {places}. Nothing was changed. Load one"
    " checkpoint on all ranks, or broadcast weights and optimizer state."
)


class MaskUpdater(abc.ABC):
    """The attributes and methods of a sparsifier that mask updates and loads use. See
    :class:`~dist_sparse.extend.BaseDataSparsifier`."""

    defaults: dict[str, Any]
    data_groups: dict[str, dict[str, Any]]
    masks: Masks
    counts_lookups = trains_removed = False
    enable_mask_update = True
    step_count = 0

    def step(self) -> None:
        """Update all masks, if enabled; else read nothing and send nothing. Collective if sharded
        tables are registered.

        Plain data is scored raw and only its mask changes, as in the ancestor. In sharded tables,
        newly removed weights are zeroed at once.

        Raises:
            ValueError: on every rank; no mask and no weight has changed.
        """
        # Calls without an update count too: schedulers compare this number with their own.
        self.step_count += 1
        if self.enable_mask_update:
            update_masks(self)

    @abc.abstractmethod
    def update_mask(self, name: str, data: Tensor, **config: Any) -> Any:
        """Edit ``get_mask(name)`` in place (or set its ``.data``). Must not communicate.

        Called once per plain name and once per local shard of a sharded table, with the
        configuration of that moment.
        """

    def check_config(self, data: ShardedData, config: Mapping[str, Any]) -> Block:
        """Return the block of elements that one bit of a new sharded table's masks covers. For
        subclasses.

        Raises:
            ValueError: no mask update could follow the configuration; names the table, the value
                and the rule.
        """
        return check_cached(data, (1, 1))

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        """Add facts that must be equal on all ranks of the group of ``located`` in a mask update.
        For subclasses."""
        facts["sparsifier.counts_lookups"] = self.counts_lookups

    def score_tables(self, located: Located, configs: Configs) -> Any:
        """Score this rank's shards: the local half of a mask update. Must neither communicate nor
        change masks, weights or configurations. :meth:`select` gets the returned value.

        This class calls :meth:`update_mask` on each shard. Subclasses may override both methods.

        Args:
            located: the sharded tables as they are stored now, by name.
            configs: name -> configuration.
        """
        new_masks: dict[str, list[NewMask]] = {}
        for name, data in located.items():
            new_masks[name] = []
            for shard, before in zip(data.shards, self.masks.tables.masks(name), strict=True):
                mask = before.dense()
                with self.masks.tables.editing(name, mask):
                    self.update_mask(name, shard.tensor, **configs[name])
                new = BlockMask.of_elements(shard.rect, mask)
                # A user's rule may remove weights that are not zero: write all removed ones.
                new_masks[name].append(NewMask(new, ~new.bits))
        return new_masks

    def select(self, scored: Any, names: list[str], group: Group) -> None:  # noqa: B027
        """Find what the new masks of ``names``, which are stored over ``group``, remove: the
        collective part of a mask update. This class sends nothing."""

    def selected_masks(self, scored: Any) -> Mapping[str, NewMasks]:
        """Return all new masks, after :meth:`select`. Local."""
        return {name: NewMasks(masks, (1, 1)) for name, masks in scored.items()}


@torch.no_grad()
def update_masks(sparsifier: MaskUpdater) -> None:
    """Update every mask. Collective over the groups of the sharded tables: every rank must call it.

    Raises:
        ValueError: on every rank; no mask and no weight has changed, except that tables may be
            rotated.
        MemoryError, RuntimeError: this rank ran out of memory twice after its last message, while
            it wrote the new masks. Other ranks have updated theirs, so the next mask update is
            refused on every rank: resume from a checkpoint.
    """
    masks, packed = sparsifier.masks, sparsifier.masks.tables
    recorder = masks.recorder
    before: PlainMasks = []
    try:
        with nullcontext() if recorder is None else recorder.step():
            with packed.jointly("step()") as call:
                if masks.rotation is not None:
                    # Before scoring: a rotation moves the norm of a table into its first columns.
                    masks.rotation.update()
                located, new_masks = make_masks(sparsifier, before, call)
                if recorder is not None:
                    recorder.note(packed, located, new_masks, sparsifier.data_groups)
                if masks.undo is None:
                    # An agreement would be one more message in each mask update.
                    call.sent_all()
                else:
                    masks.undo.keep(masks, located, new_masks)
            with_one_retry(lambda: _zero_removed(packed, located, new_masks))
            # An enforcer of this sparsifier sees what its mask updates write.
            if masks.enforcer is NO_ENFORCER:
                masks.note_write()
            for name, new in new_masks.items():
                packed.replace(located[name], new)
            with_one_retry(masks.enforcer.end_step)
    except BaseException:
        # KeyboardInterrupt too: no mask of plain data may stay half edited.
        for mask, old in before:
            mask.data = old
        raise


def make_masks(
    sparsifier: MaskUpdater, before: PlainMasks, call: Call
) -> tuple[Located, dict[str, NewMasks]]:
    """Return the sharded tables as they are stored now, and their new masks, not put in place yet.
    Collective.

    Args:
        sparsifier: whose masks.
        before: gets the live masks of plain data, which change at once, each with a copy.
        call: the mask update.
    """
    packed = sparsifier.masks.tables
    # If shards have moved, masks must move before scoring where a user's update_mask reads them, or
    # where an enforcer zeroes weights by them.
    runs_user_code = type(sparsifier).score_tables is MaskUpdater.score_tables
    needs_current_masks = runs_user_code or sparsifier.masks.enforcer is not NO_ENFORCER
    # 1. Local: locate, score, collect facts. 2. Agree: an error or a difference stops all ranks
    # here.
    with packed.agreeing("step()") as group_facts:
        located = packed.locate()
        _note_facts(group_facts, located, sparsifier)
        moves_first = needs_current_masks and packed.moved(located)
        if not moves_first:
            scored = _score(sparsifier, located, before, group_facts)
    # 3. Collective: bring masks to shards that have moved, or to their devices.
    packed.reshard(located)
    if moves_first:
        # All ranks agree again, on the scores.
        with packed.agreeing("step()") as group_facts:
            scored = _score(sparsifier, located, before, group_facts)
    # 4. Collective: select.
    for group, names in packed.over_groups(located):
        sparsifier.select(scored, names, group)
    if not _sends_masks(sparsifier.masks, located):
        call.sent_all()
    new_masks = with_one_retry(lambda: sparsifier.selected_masks(scored))
    return located, _replace_by_first_copies(packed, located, new_masks)


def _sends_masks(masks: Masks, located: Located) -> bool:
    """Return whether ranks send messages after they have made their new masks."""
    copied = any(data.copied for data in located.values())
    return copied or masks.recorder is not None or masks.undo is not None


def _score(
    sparsifier: MaskUpdater,
    located: Located,
    before: PlainMasks,
    group_facts: GroupFacts,
) -> Any:
    """Zero revived weights, update the masks of plain data, score this rank's shards, and add the
    facts that follow from them."""
    # Zeroes revived weights of all tables, which must not be scored.
    sparsifier.masks.enforcer.begin_step()
    _update_plain(sparsifier, before)
    for name, data in located.items():
        check_writable(data)
        if data.kernel == CACHED:
            # A cached kernel allows some blocks only, and a schedule may have changed the block.
            sparsifier.check_config(data, sparsifier.data_groups[name])
    scored = sparsifier.score_tables(located, sparsifier.data_groups)
    for facts, names in group_facts:
        tables = [located[name] for name in names]
        if any(data.replicated for data in tables):
            facts.replicas |= shared_weights(tables)
        facts.drift_error = _DRIFTED
        sparsifier.note(facts, tables)
    return scored


def _update_plain(sparsifier: MaskUpdater, before: PlainMasks) -> None:
    """Run ``update_mask`` on every plain tensor. Adds each mask to ``before`` before it may
    change."""
    dense = sparsifier.masks.plain
    for name in filter(dense.is_masked, list(dense.state)):
        mask = dense.mask(name)
        # A user's update_mask may edit it in place.
        before.append((mask, mask.detach().clone()))
        sparsifier.update_mask(name, dense.weight(name), **sparsifier.data_groups[name])


def _zero_removed(packed: PackedStore, located: Located, new_masks: Mapping[str, NewMasks]) -> None:
    """Zero newly removed weights, before the new masks are put in place: if a write fails, no mask
    claims zeros that were not written. Local."""
    # One list for all tables: on an accelerator, they share launches.
    changes = []
    for name, new in new_masks.items():
        shards = zip(located[name].shards, packed.masks(name), new.masks, strict=True)
        for shard, old, (mask, dirty) in shards:
            changes.append(ShardChange(mask, shard.tensor, old, dirty))
    BlockMask.apply_all_changed_(changes)


def _note_facts(group_facts: GroupFacts, located: Located, sparsifier: MaskUpdater) -> None:
    """Add the facts that are known before scoring."""
    masks = sparsifier.masks
    moved = set(masks.tables.moved(located))
    for facts, names in group_facts:
        facts["whether steps are recorded"] = masks.recorder is not None
        facts["whether an enforcer is attached"] = masks.enforcer is not NO_ENFORCER
        facts["the list of moved tables"] = sorted(moved.intersection(names))
        for name in names:
            data = located[name]
            # Different after an update that finished on some ranks only.
            updates = masks.tables.table(name).updates
            facts[f"the number of mask updates of table {name!r}"] = updates
            facts[f"the config of table {name!r}"] = sparsifier.data_groups[name]
            facts[f"the shape of table {name!r}"] = [*data.shape, str(data.dtype)]
            # add_model() has compared the tilings of models already; that is slow at 1,000 ranks.
            if name in moved or data.fqn is None:
                facts[f"the sharding of table {name!r}"] = data.tiling


def _replace_by_first_copies(
    packed: PackedStore, located: Located, new_masks: Mapping[str, NewMasks]
) -> dict[str, NewMasks]:
    """Replace the new masks of copies that are trained apart (2-D parallelism) by the first copy's.
    Collective over the groups of such copies: one all-to-all of packed bits each."""
    moves = {}
    for name, data in located.items():
        if data.copied:
            held = [Held(mask) for mask, _ in new_masks[name].masks]
            moves[name] = Move(held, new_masks[name].block, data.tiling, _later_copies(data))
    replaced = dict(new_masks)
    for name, arrived in packed.exchange(moves).items():
        before = new_masks[name]
        own = {new.mask.rect: new for new in before.masks}
        for copy in arrived:
            first = copy.to(own[copy.mask.rect].mask.bits.device).mask
            # Weights that are zero in the first copy may not be zero here: write all removed ones.
            own[first.rect] = NewMask(first, ~first.bits)
        # A rank may hold two replicas of a shard: in the order of its shards, not of ``own``.
        masks = [own[new.mask.rect] for new in before.masks]
        replaced[name] = before._replace(masks=masks)
    return replaced


def _later_copies(data: ShardedData) -> Tiling:
    """Return for each rank the rectangles that it holds but another rank owns."""
    later = []
    for held, owned in zip(data.tiling, owners(data.tiling), strict=True):
        later.append(tuple(rect for rect in dict.fromkeys(held) if rect not in owned))
    return tuple(later)
