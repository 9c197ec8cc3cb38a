"""The masks of one sparsifier, the objects attached to them, and their counts over all ranks.

:class:`Masks` is the interface of a sparsifier to the rest of the package. Its collective methods
change no mask and no weight. They first check that all ranks make the same call.

A :class:`Recorder` counts what each mask update changes; the sums over ranks cost one small
all-reduce per process group in each update. Without a recorder nothing is counted.
"""

from __future__ import annotations

import numbers
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from dist_sparse.groups import group_over, traffic
from dist_sparse.masking.block_masks import NewMasks
from dist_sparse.masking.device import on_host
from dist_sparse.masking.kept_scores import Written
from dist_sparse.masking.masks import BlockMask, bit_total
from dist_sparse.optimizers import LookupRecord
from dist_sparse.records import MaskChange, StepRecord, TableStats
from dist_sparse.sparsifiers.dense_store import Configs, DenseStore, as_matrix
from dist_sparse.sparsifiers.packed_store import PackedStore, TableMasks
from dist_sparse.sparsifiers.pieces import (
    assembled,
    begun,
    mask_hash,
    removed_blocks,
    shape_hash,
)
from dist_sparse.tables.memory import ByMemory
from dist_sparse.tables.shards import Block, Located, Rect, ShardedData, whole
from dist_sparse.text import (
    block_shape_text,
    level_text,
    number_of,
    shape_text,
    table_lines,
)


class Enforcer:
    """The methods of an attached enforcer that a sparsifier calls. None of them communicates. Here
    they do nothing: see :data:`NO_ENFORCER`."""

    def accumulators(self) -> ByMemory[tuple[Tensor, float]]:
        """Return the sums of squared gradients that Adagrad keeps, and their initial value, by
        weight: live, one for each element, or one for each row of a shard: ``(rows,)`` or ``(rows,
        1)``."""
        return ByMemory()

    def records(self) -> ByMemory[LookupRecord | str]:
        """Return which rows of each registered weight a gradient has reached, as the state of its
        optimizer tells, or why that is unknown."""
        return ByMemory()

    def states(self) -> ByMemory[list[Tensor]]:
        """Return all optimizer state of each registered weight, live."""
        return ByMemory()

    def written(self, reader: str = "scores") -> ByMemory[Written]:
        """Return the possibly written rows of weights whose writes are all tracked, live. Each
        reader has and clears its own."""
        return ByMemory()

    def settle(self) -> None:
        """Zero revived weights, before weights are scored, read or saved."""

    def begin_step(self) -> None:
        """Called before a mask update."""

    def end_step(self) -> None:
        """Called after a mask update, which has zeroed what it removes in sharded tables, but not
        in plain data."""

    def renew(self) -> None:
        """Called after masks were replaced or squashed: look everything up again and zero it."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the registered weights by name, live."""
        return iter(())

    def mark_all(self) -> None:
        """Called after something else has written weights: any row may have been written."""


NO_ENFORCER = Enforcer()
"""Stands in while no enforcer is attached."""

ATTACHED: WeakSet[Enforcer] = WeakSet()
"""All attached enforcers, of all sparsifiers: no weight gets two masks."""


class Rotator(Protocol):
    """Rotates tables before each mask update."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The rotated tables, grouped as they are rotated together. Their columns are sorted by
        norm, so that a mask update removes the last ones."""

    def update(self) -> None:
        """Rotate them. Collective over the groups of the sharded tables."""


class Undo(Protocol):
    """Keeps each mask update until the next, so that it can be undone."""

    def keep(self, masks: Masks, located: Located, made: Mapping[str, NewMasks]) -> None:
        """Replace the update that was kept so far. Called before anything is zeroed. Collective
        over the tables' groups."""

    def forget(self) -> None:
        """Release what is kept. Local."""


class Recorder:
    """Records the mask updates of one sparsifier over sharded tables; plain data is not recorded.
    Every rank must have one, or none: a mask update checks it.

    Attributes:
        count: mask updates so far.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row", norm="L2")
        >>> names = sparsifier.add_model(torch.nn.EmbeddingBag(10, 4))
        >>> recorder = sparsifier.record()
        >>> sparsifier.step()
        >>> [update] = recorder.take()
        >>> update.tables[0].removed_blocks, update.tables[0].churn
        (5, 0.5)
    """

    def __init__(self) -> None:
        self.count = 0
        self._changes: tuple[MaskChange, ...] = ()
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """Return the records since the last call, in order."""
        done, self._done = self._done, []
        return done

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a mask update and record it. If it fails, nothing is recorded."""
        started, before = time.perf_counter(), traffic()
        yield
        # traffic() counts all collectives of this thread. Here only the mask update sends any.
        self.count += 1
        after = traffic()
        self._done.append(
            StepRecord(
                number=self.count,
                seconds=time.perf_counter() - started,
                collectives=after.collectives - before.collectives,
                bytes=after.bytes - before.bytes,
                tables=self._changes,
            )
        )

    def note(
        self,
        packed: PackedStore,
        located: Located,
        made: Mapping[str, NewMasks],
        configs: Configs,
    ) -> None:
        """Count what changes, before the new masks replace the old. Collective: one all-reduce a
        group.

        Args:
            packed: the masks so far.
            located: the tables as they are stored now.
            made: their new masks.
            configs: name -> configuration.
        """
        # One wait for the counts of all tables on a device.
        counted = on_host(
            [_counts(packed.table(name), located[name], new) for name, new in made.items()]
        )
        counts = {name: found.tolist() for name, found in zip(made, counted, strict=True)}
        self._changes = ()
        for name, sums in packed.summed(counts).items():
            data, new = located[name], made[name]
            values: Sequence[Any] = sums
            removed, flipped, regrown, dead, lookups, removed_lookups = values
            # None is unknown. Masks of different blocks can't be compared.
            if packed.table(name).block != new.block:
                flipped = regrown = None
            if not data.has_whole_rows:
                # No rank sees the rows of a table cut by columns.
                dead = None
            if not lookups:
                lookups = removed_lookups = None
            change = MaskChange(
                name=name,
                target=configured_level(configs[name]),
                threshold=new.threshold.score,
                blocks=data.grid(new.block).blocks,
                removed_blocks=removed,
                flipped_blocks=flipped,
                regrown_blocks=regrown,
                dead_rows=dead,
                lookups=lookups,
                removed_lookups=removed_lookups,
            )
            self._changes += (change,)


def _counts(table: TableMasks, data: ShardedData, made: NewMasks) -> Tensor:
    """Return removed, flipped and regrown blocks, dead rows, lookups and removed lookups of this
    rank's shards: int64 ``(6,)``, on their device. Does not wait for the device."""
    found = []
    new = {mask.rect: mask for mask, _ in made.masks}
    for held in table.owned:
        mask = new[held.mask.rect]
        before, after = begun(held.mask), begun(mask)
        removed = after.blocks - bit_total(after.bits)
        flipped = regrown = torch.zeros_like(removed)
        # Bits of other blocks can't be compared.
        if before.block == after.block:
            flipped = bit_total(before.bits ^ after.bits)
            regrown = bit_total(after.bits & ~before.bits)
        found.append(torch.stack([removed, flipped, regrown, mask.dead_rows().sum()]))
    if not found:
        return torch.zeros(6, dtype=torch.int64)
    # Lookups were counted since the last update, under the old masks.
    lookups = _lookups_on_device(table, data)
    if lookups is None:
        lookups = torch.zeros(2, dtype=torch.int64, device=found[0].device)
    return torch.cat([torch.stack(found).sum(0), lookups])


def configured_level(config: Mapping[str, Any]) -> float | None:
    """Return the configured sparsity_level, where there is one that is a number."""
    level = config.get("sparsity_level")
    return float(level) if isinstance(level, numbers.Real) else None


def knows_removed_rows(data: ShardedData, block: Block) -> bool:
    """Return whether the leftmost shards of a table tell which of its rows are removed."""
    return block[1] >= data.shape[1] or data.has_whole_rows


def _lookups_on_device(table: TableMasks, data: ShardedData) -> Tensor | None:
    """Return all lookups of this rank's part of a table, and the lookups of its removed rows: int64
    ``(2,)``, on the device of the masks. They are counted if the score needs counts, and sampled by
    the enforcer since the last mask update otherwise; 0 if there is no enforcer. None if no shard
    here counts lookups, or removed rows are not known. Local; does not wait for the device."""
    if not (knows_removed_rows(data, table.block) and table.leftmost):
        return None
    sums = torch.stack([held.lookups.double() for held in table.leftmost]).sum(0)
    # Decayed counts have fractions. Rounding the sum once loses less than rounding each.
    return sums.round().long()


def removed_lookups(packed: PackedStore, action: str) -> dict[str, list[int]]:
    """Return all lookups and removed lookups of each table, 0 where they are not known, by name.
    Collective: one all-reduce for each group.

    Args:
        packed: the registered tables.
        action: the public call, for messages.
    """
    located = packed.current_for(action)
    found = {}
    for name, data in located.items():
        lookups = _lookups_on_device(packed.table(name), data)
        found[name] = torch.zeros(2, dtype=torch.int64) if lookups is None else lookups
    # One wait for all tables on a device.
    read = zip(found, on_host([*found.values()]), strict=True)
    return packed.summed({name: lookups.tolist() for name, lookups in read})


class _MasksHere(NamedTuple):
    """The masks of one name on this rank. Masks of plain data have blocks of (1, 1).

    Args:
        masks: of all shards on this rank.
        owned: of the shards that this rank counts.
        nbytes: size of all masks on this rank.
    """

    data: ShardedData
    block: Block
    masks: list[BlockMask]
    owned: list[BlockMask]
    nbytes: int


class Masks:
    """The masks of one sparsifier, and what is attached to it.

    Attributes:
        tables: the masks of sharded tables.
        plain: the masks of plain data.
        enforcer: the :class:`~dist_sparse.MaskEnforcer` that is attached, or :data:`NO_ENFORCER`.
        rotation: rotates tables before each mask update, if any.
        undo: keeps each mask update until the next, if one is to be undone.
        recorder: counts what mask updates change, since ``sparsifier.record()``.
        schedulers: all that have stepped on the sparsifier and are still alive, with their notes.
    """

    def __init__(self) -> None:
        self.tables, self.plain = PackedStore(), DenseStore()
        self.enforcer = NO_ENFORCER
        self.rotation: Rotator | None = None
        self.undo: Undo | None = None
        self.recorder: Recorder | None = None
        self.schedulers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @property
    def rotated_groups(self) -> Sequence[Sequence[str]]:
        """The rotated tables, grouped as they are rotated together; none if nothing is rotated."""
        return () if self.rotation is None else self.rotation.groups

    def note_write(self) -> None:
        """Tell attached enforcers that weights were written: another sparsifier may have one on the
        same kernels."""
        # A list: weak references may die during the loop.
        for enforcer in list(ATTACHED):
            enforcer.mark_all()

    def forget_update(self) -> None:
        """Release what is kept of the last mask update: masks or weights are being replaced in
        another way, so it can't be undone. Local."""
        if self.undo is not None:
            self.undo.forget()

    def held(self, located: Located) -> dict[str, _MasksHere]:
        """Return the masks of every name on this rank. Local."""
        found = {}
        for name, data in located.items():
            table = self.tables.table(name)
            owned = [held.mask for held in table.owned]
            nbytes = sum(mask.bits.numel() for mask in table.masks)
            found[name] = _MasksHere(data, table.block, table.masks, owned, nbytes)
        for name in self.plain.names:
            # Masks of plain data may have any dtype.
            mask = self.plain.mask(name)
            weight = as_matrix(self.plain.held(name))
            data = whole(name, weight, sharding="plain")
            elements = BlockMask.of_elements(Rect(0, 0, *data.shape), as_matrix(mask))
            found[name] = _MasksHere(data, (1, 1), [elements], [elements], mask.nbytes)
        return found

    def _summed(
        self, located: Located, count: Callable[[_MasksHere], list[int]]
    ) -> dict[str, tuple[_MasksHere, list[int]]]:
        """Return the masks of every name on this rank, and the sums over all ranks of what
        ``count`` returns for them. Collective: one all-reduce per group."""
        here = self.held(located)
        sums = self.tables.summed({name: count(one) for name, one in here.items()})
        return {name: (one, sums[name]) for name, one in here.items()}

    def table_stats(self, configs: Configs) -> dict[str, TableStats]:
        """See :meth:`dist_sparse.BaseDataSparsifier.table_stats`."""
        located = self.tables.current_for("table_stats()")
        here = self.held(located)
        counts = {name: _count(one) for name, one in here.items()}
        found = {}
        for name, (removed, removed_elements, mask_bytes) in self.tables.summed(counts).items():
            held, data = here[name], here[name].data
            elements = data.shape[0] * data.shape[1]
            found[name] = TableStats(
                name=name,
                shape=data.shape,
                dtype=data.dtype,
                sharding=data.sharding,
                shards=len(data.rects),
                sparse_block_shape=configs[name].get("sparse_block_shape"),
                target=configured_level(configs[name]),
                blocks=data.grid(held.block).blocks,
                removed_blocks=removed,
                mask_bytes=mask_bytes,
                table_bytes=elements * data.dtype.itemsize,
                kept_bytes=(elements - removed_elements) * data.dtype.itemsize,
            )
        return found

    def count_revived(self, located: Located) -> dict[str, int]:
        """See :meth:`dist_sparse.BaseDataSparsifier.count_revived`; ``located`` are the tables as
        they are stored now, with their masks."""
        counts = self._summed(located, _count_revived)
        # Squashed names have no masks any more.
        kept = [*self.tables.names, *filter(self.plain.is_masked, self.plain.names)]
        return {name: counts[name][1][0] for name in kept}

    def dead_rows(self) -> dict[str, int]:
        """See :meth:`dist_sparse.BaseDataSparsifier.dead_rows`."""
        counts = self._summed(self.tables.current_for("dead_rows()"), _count_dead_rows)
        # No rank sees a whole row of other tables.
        return {
            name: count
            for name, (held, [count]) in counts.items()
            if knows_removed_rows(held.data, held.block)
        }

    def fingerprints(self, action: str) -> dict[str, str]:
        """See :meth:`dist_sparse.BaseDataSparsifier.fingerprint`; ``action`` is the public call,
        for messages."""
        found, located = {}, self.tables.current_for(action)
        # A hash is a sum over elements, so the sum over ranks is the hash of the whole mask.
        for name, (held, [value]) in self._summed(located, _hash).items():
            found[name] = f"{(value + shape_hash(held.data.shape)) % (1 << 64):016x}"
        return found

    def audit(self) -> dict[str, str]:
        """See :meth:`dist_sparse.BaseDataSparsifier.audit`."""
        packed, enforced = self.tables, self.enforcer is not NO_ENFORCER
        located = packed.current_for("audit()")
        with packed.agreeing("audit()"):
            # Dirty rows would be zeroed before the next forward: they are not errors.
            self.enforcer.settle()
        refusal = "Masks differ between their holders."
        packed.compare_holders("audit()", located, packed.snapshot(), refusal)
        revived = self.count_revived(located)
        counts = "; ".join(
            f"table {name!r}: {revived[name]} removed weights are not zero"
            # Without an enforcer, plain data keeps the weights that it removes.
            for name in (revived if enforced else packed.names)
            if revived[name]
        )
        # Over all groups, so that ranks without a part of the table raise too.
        with packed.agreeing("audit()"):
            if counts:
                if enforced:
                    raise ValueError(
                        f"Masks and weights differ, although an enforcer is attached. {counts}."
                        " torch does not count writes through .data; apply_masks() zeroes them."
                    )
                warnings.warn(
                    f"Masks and weights differ. {counts}: no enforcer is attached, so what"
                    " optimizers revive stays until apply_masks().",
                    stacklevel=3,
                )
        return self.fingerprints("audit()")

    def full_mask(self, name: str) -> Tensor:
        """See :meth:`dist_sparse.BaseDataSparsifier.full_mask`; of a sharded table."""
        packed, data = self.tables, self.tables.find(name)
        group = group_over(data.ranks)
        with group.agreeing("full_mask()") as facts:
            facts["name"] = name
        with group.jointly("full_mask()"):
            packed.reshard({name: data})
            table, whole = packed.table(name), Rect(0, 0, *data.shape)
            # Move to a tiling in which every rank holds the whole table.
            move = table.move(((whole,),) * len(data.tiling))
            arrived = packed.exchange({name: move})[name]
            held = assembled(whole, table.block, arrived, torch.device("cpu"), table.counted)
            return held.mask.dense()


def _count(held: _MasksHere) -> list[int]:
    """Return removed blocks, removed elements and mask bytes of this rank's shards."""
    elements = 0
    for mask in held.owned:
        for _, kept in mask.element_chunks(only_removing=True):
            elements += int((~kept).sum())
    return [sum(map(removed_blocks, held.owned)), elements, held.nbytes]


def _count_revived(held: _MasksHere) -> list[int]:
    """Count removed weights that are not zero, replicas too."""
    count = 0
    for shard, mask in zip(held.data.shards, held.masks, strict=True):
        # In chunks: unpacked to elements, a mask may be as large as the weights.
        for rows, kept in mask.element_chunks(only_removing=True):
            count += int(((shard.tensor[rows] != 0) & ~kept).sum())
    return [count]


def _count_dead_rows(held: _MasksHere) -> list[int]:
    """Count rows with nothing left in the leftmost shards, which are the whole rows where
    :func:`knows_removed_rows`."""
    return [sum(int(mask.dead_rows().sum()) for mask in held.owned if mask.rect.col == 0)]


def _hash(held: _MasksHere) -> list[int]:
    return [sum(map(mask_hash, held.owned))]


_HEAD = ("name", "shape", "dtype", "sharding", "shards", "block", "level", "mask bytes")


def describe(sparsifier: Any) -> str:
    """Return a text table of everything registered: name, shape, dtype, sharding, shards,
    configuration, level, mask bytes. Local.

    Takes a sparsifier, or what :func:`~dist_sparse.sparsify` returned.

    Shards are all of a table, and in parentheses the ones on this rank; mask bytes are this rank's.
    :meth:`~dist_sparse.BaseDataSparsifier.table_stats` counts over all ranks. A block of
    ``2 of 1x4`` loses two of its elements.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, describe
        >>> data = [("user", torch.ones(10, 4))]
        >>> print(describe(DataNormSparsifier(data, sparse_block_shape=(1, 4))))
        DataNormSparsifier: 1 registered, over 1 rank
        name  shape   dtype    sharding  shards  block     level  mask bytes
        ----  ------  -------  --------  ------  --------  -----  ----------
        user  10 x 4  float32  plain     1 (1)   4 of 1x4  0.5    160
    """
    given = sparsifier
    sparsifier = getattr(sparsifier, "sparsifier", sparsifier)
    masks = getattr(sparsifier, "masks", None)
    if not isinstance(masks, Masks):
        raise TypeError(
            f"Invalid sparsifier of type {type(given).__name__}: must be a sparsifier, or what"
            " sparsify() returned."
        )
    rows = []
    held = masks.held(masks.tables.locate())
    for name, config in sparsifier.data_groups.items():
        data, size = held[name].data, held[name].nbytes
        dtype = str(data.dtype).removeprefix("torch.")
        shards = f"{len(data.rects)} ({len(data.shards)})"
        block = block_shape_text(config.get("sparse_block_shape"))
        if zeros := config.get("zeros_per_block"):
            block = f"{zeros} of {block}"
        level = level_text(config.get("sparsity_level", "-"))
        stored = shape_text(data.shape), dtype, data.sharding, shards
        rows.append((name, *stored, block, level, f"{size:,}"))
    ranks = max((len(each.data.tiling) for each in held.values()), default=1)
    title = f"{type(sparsifier).__name__}: {len(rows)} registered, over {number_of(ranks, 'rank')}"
    return "\n".join([title, *table_lines(_HEAD, rows)])
