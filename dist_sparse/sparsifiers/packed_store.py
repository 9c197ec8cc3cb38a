"""Masks of sharded tables, as packed bits that are stored with their shards.

A :class:`PackedStore` holds the registered sources, which locate the tables whenever they are
needed, and a :class:`~dist_sparse.masking.masks.BlockMask` for each shard on this rank. If shards
have moved since, one all-to-all brings the bits to their new holders. Registration, groups and
tilings are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dist_sparse.checks import fault_of, to_json
from dist_sparse.groups import (
    Call,
    Facts,
    Group,
    agreeing,
    group_over,
    jointly,
    rank_in,
    signed,
)
from dist_sparse.masking.block_masks import NewMasks
from dist_sparse.masking.device import with_one_retry
from dist_sparse.masking.masks import BlockMask, Held
from dist_sparse.sparsifiers import pieces
from dist_sparse.tables.memory import shared_memory
from dist_sparse.tables.shards import (
    Block,
    Located,
    Rect,
    ShardedData,
    Source,
    grid_of,
    owners,
    resolve_block,
)

Ranks = tuple[int, ...] | None
T = TypeVar("T")


@dataclass
class TableMasks:
    """This rank's masks of one registered table, by the tiling at the time they were stored.

    Attributes:
        shards: the mask and the lookup counts of each shard, in the order of the shards.
        counted: dtype of the counts of lookups; None where lookups are not counted.
        removed: blocks that the masks remove over all ranks, if known.
        updates: mask updates since registration. Saved, to detect states of different steps.
    """

    source: Source
    shape: tuple[int, int]
    ranks: Ranks
    tiling: pieces.Tiling
    block: Block
    shards: list[Held]
    counted: torch.dtype | None
    removed: int | None = 0
    updates: int = 0

    @property
    def masks(self) -> list[BlockMask]:
        return [held.mask for held in self.shards]

    @property
    def counts(self) -> dict[Rect, Tensor]:
        """Lookups by shard; empty where they are not counted."""
        return {held.mask.rect: held.counts for held in self.shards}

    @property
    def owned(self) -> list[Held]:
        """The masks and counts of the shards that this rank owns, once each."""
        here = {held.mask.rect: held for held in self.shards}
        # A Group would know the rank too, but making one is collective, and this is local.
        return [here[rect] for rect in owners(self.tiling)[rank_in(self.ranks)]]

    @property
    def leftmost(self) -> list[Held]:
        """The owned shards whose lookups count: all shards of the same rows have equal counts."""
        return [held for held in self.owned if held.mask.rect.col == 0]

    @property
    def removed_here(self) -> int:
        """Number of blocks that the masks of this rank's shards remove. The first holder alone
        counts a replica or a cut block."""
        return sum(pieces.removed_blocks(held.mask) for held in self.owned)

    def move(self, new: pieces.Tiling) -> pieces.Move:
        """Return the move of masks and counts to another tiling."""
        return pieces.Move(self.shards, self.block, self.tiling, new, self.counted)

    def move_of_whole_blocks(self) -> pieces.Move:
        """Return the move that brings all holders' bits of the blocks that a shard touches."""
        return self.move(tuple(tuple(map(self._whole_blocks, rects)) for rects in self.tiling))

    def _whole_blocks(self, rect: Rect) -> Rect:
        """Return a rectangle with all of the blocks that it touches."""
        height, width = self.block
        grid = grid_of(rect, self.block)
        top, left = grid.row * height, grid.col * width
        # The last block of a table may be smaller.
        rows = min(grid.rows * height, self.shape[0] - top)
        return Rect(top, left, rows, min(grid.cols * width, self.shape[1] - left))

    def differs_at(self, arrived: Sequence[Held]) -> Rect | None:
        """Return a rectangle where another holder's bits differ from those here, if there is
        one."""
        for mask in self.masks:
            here = self._whole_blocks(mask.rect)
            for theirs in arrived:
                rect = theirs.mask.rect
                inside = rect.intersect(here) == rect
                if inside and not torch.equal(mask.cut(rect).bits.cpu(), theirs.mask.bits):
                    return rect
        return None

    def assembled(self, data: ShardedData, arrived: Sequence[Held]) -> list[Held]:
        """Return the masks and counts of the shards of ``data`` from the pieces of a
        :meth:`move`."""
        return self._assembled(data, self.block, arrived)

    def _assembled(self, data: ShardedData, block: Block, arrived: Sequence[Held]) -> list[Held]:
        return [
            pieces.assembled(rect, block, arrived, weights.device, self.counted)
            for rect, weights in data.shards
        ]

    def follow(self, data: ShardedData) -> None:
        """Copy masks to the devices of their shards where these differ."""
        devices = [shard.tensor.device for shard in data.shards]
        self.shards = list(map(Held.to, self.shards, devices))

    def loaded(
        self, data: ShardedData, entry: Mapping[str, Any], masks: object, counts: object
    ) -> TableMasks:
        """Return what a state holds for the shards of this rank.

        Args:
            data: the table as it is stored now.
            entry: see :func:`~dist_sparse.sparsifiers.pieces.tables_of`.
            masks, counts: its tensors in the state.

        Raises:
            ValueError: they do not fit the table, were changed since they were saved, or do not
                cover the shards.
        """
        # A list where the state was read from JSON.
        if (shape := entry.get("shape")) not in (data.shape, list(data.shape)):
            raise ValueError(
                f"Table {data.name!r} has the shape {data.shape}; the masks in the state are of"
                f" {shape}."
            )
        try:
            # The block of the state, which without DCP may differ from the registered one.
            given = pieces.ints("block", entry.get("block"), 2, least=1)
            block = resolve_block(data.name, given, data.shape)
            counted = self.counted is not None
            saved = pieces.saved_pieces(
                masks, counts, block, registered=self.block, counted=counted
            )
            shards = self._assembled(data, block, saved)
        # A state may have been edited by hand: entries may be missing, or of another type.
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Table {data.name!r}: {fault_of(error).rstrip('.')}. Outside a DCP"
                " checkpoint, a state_dict() has only its own rank's bits."
            ) from error
        removed = entry.get("removed")
        updates = entry.get("updates", 0)
        return replace(
            self, tiling=data.tiling, block=block, shards=shards, removed=removed, updates=updates
        )


class PackedStore:
    """The registered sharded tables of one sparsifier, in the order in which they were added.

    Attributes:
        version: changes whenever a mask is replaced, added or dropped. Read at every forward.
    """

    def __init__(self) -> None:
        self._tables: dict[str, TableMasks] = {}
        # The mask that a user's update_mask is editing: mask() must return this object meanwhile.
        self._edited: dict[str, Tensor] = {}
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    @property
    def names(self) -> list[str]:
        """Every registered table."""
        return list(self._tables)

    @property
    def sources(self) -> list[Source]:
        """The registered sources that still have a table here, in the order of registration."""
        return list(dict.fromkeys(table.source for table in self._tables.values()))

    @property
    def groups(self) -> dict[Ranks, list[str]]:
        """The tables' names by the global ranks that hold them. The order is the same on all ranks,
        larger groups come later."""
        groups: dict[Ranks, list[str]] = {}
        # Sorted by name: ranks may have registered tables in another order.
        for name in sorted(self._tables):
            groups.setdefault(self._tables[name].ranks, []).append(name)
        return dict(sorted(groups.items(), key=_by_size))

    def over_groups(self, names: Collection[str]) -> Iterator[tuple[Group, list[str]]]:
        """Yield the groups that hold these tables, each with its tables, in an order that all ranks
        share. Makes no other group, as the ranks of others may not call this."""
        for ranks, held in self.groups.items():
            if chosen := sorted(set(held).intersection(names)):
                yield group_over(ranks), chosen

    @contextmanager
    def agreeing(self, action: str) -> Iterator[list[tuple[Facts, list[str]]]]:
        """:func:`dist_sparse.groups.agreeing` over the tables' groups: for each its facts and its
        tables' names."""
        with agreeing(action, list(map(group_over, self.groups))) as noted:
            yield list(zip(noted, self.groups.values(), strict=True))

    @contextmanager
    def jointly(self, action: str) -> Iterator[Call]:
        """:func:`dist_sparse.groups.jointly` over the tables' groups."""
        with jointly(action, list(map(group_over, self.groups))) as call:
            yield call

    def summed(self, values: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Return the sums of integers of tables over their ranks, modulo 2**64; integers of plain
        data as they are. Collective: one all-reduce for each group with a table among ``values``,
        the same tables on every rank."""
        sums = {name: list(value) for name, value in values.items()}
        for group, names in self.over_groups(values):
            # Hashes are unsigned 64-bit integers; collectives sum int64.
            rows = [list(map(signed, values[name])) for name in names]
            total = group.all_reduce(torch.tensor(rows, dtype=torch.int64))
            sums.update(zip(names, total.tolist(), strict=True))
        return sums

    def exchange(self, moves: Mapping[str, pieces.Move]) -> dict[str, list[Held]]:
        """Return the pieces that the move of each table brings to this rank. Collective: one
        all-to-all for each group with a table among ``moves``, the same tables on every rank."""
        arrived: dict[str, list[Held]] = {}
        for group, names in self.over_groups(moves):
            found = pieces.exchange(group, [moves[name] for name in names])
            arrived.update(zip(names, found, strict=True))
        return arrived

    # Registration.

    def check_new(self, located: Sequence[ShardedData], plain: Mapping[str, Tensor]) -> None:
        """Refuse tables that are registered already, under this name or another, whole or in part.

        Args:
            located: the tables to register.
            plain: the plain tensors of the same sparsifier, by name.

        Raises:
            ValueError: names the table, and the name under which it is known.
        """
        twice = sorted({data.name for data in located} & {*plain, *self._tables})
        if twice:
            raise ValueError(f"The names {twice} are registered already.")
        held = [*_tensors_of(map(self.find, self._tables)), *plain.items()]
        if shared := shared_memory(held, _tensors_of(located)):
            first, second = shared
            raise ValueError(
                f"Table {second!r} is registered already, as {first!r}: they share memory."
            )

    def new(
        self,
        source: Source,
        located: Sequence[ShardedData],
        blocks: Mapping[str, Block],
        counted: torch.dtype | None,
    ) -> dict[str, TableMasks]:
        """Return masks of what ``source`` has just located, all blocks kept, for :meth:`add`.

        Args:
            counted: dtype of the counts of lookups; None where lookups are not counted.
        """
        made = {}
        for data in located:
            block, shards = blocks[data.name], []
            for rect, weights in data.shards:
                mask = BlockMask.full(rect, block, weights.device)
                counts = pieces.no_counts(rect, counted, weights.device)
                shards.append(Held(mask, counts))
            made[data.name] = TableMasks(
                source, data.shape, data.ranks, data.tiling, block, shards, counted
            )
        return made

    def add(self, made: Mapping[str, TableMasks]) -> None:
        """Register tables with the masks of :meth:`new`. Can't fail."""
        self._tables.update(made)
        self.version += 1

    def drop(self, name: str) -> None:
        """Forget one table, and its source once none of its tables is left."""
        del self._tables[name]
        self.version += 1

    # Where the tables are.

    def locate(self) -> dict[str, ShardedData]:
        """Return the registered tables as they are stored now, by name. Walks the models; does not
        communicate.

        Raises:
            ValueError: a table is no longer in its model, or has another shape.
        """
        found: dict[str, ShardedData] = {}
        # One walk of a model finds all of its tables.
        for source in self.sources:
            for data in source.locate(self._tables):
                self._check_shape(data)
                found[data.name] = data
        if missing := sorted(self._tables.keys() - found.keys()):
            raise ValueError(
                f"The registered tables {missing} are no longer in the model; it holds"
                f" {sorted(found)}."
            )
        return {name: found[name] for name in self._tables}

    def current(self) -> dict[str, ShardedData]:
        """:meth:`locate`, and bring the masks to their shards: collective if shards have moved."""
        located = self.locate()
        self.reshard(located)
        return located

    def current_for(self, action: str) -> dict[str, ShardedData]:
        """:meth:`current`, once all ranks make the public call ``action``. Collective over the
        tables' groups: 32 bytes each."""
        # If a rank can't locate its tables, the others must not wait for it in the exchange.
        with self.agreeing(action):
            located = self.locate()
        self.reshard(located)
        return located

    def compare_holders(
        self,
        action: str,
        located: Located,
        masks: Mapping[str, TableMasks],
        refusal: str,
    ) -> None:
        """Refuse masks whose holders differ: replicas, or blocks that a shard border cuts.
        Collective: an agreement, after one all-to-all for each group that holds such bits.

        Args:
            action: the public call, for messages.
            located: the registered tables as they are stored now.
            masks: of these tables, registered or loaded.
            refusal: begins the message.

        Raises:
            ValueError: on every rank; names table, place and rank.
        """
        moves = {}
        for name, table in masks.items():
            move = table.move_of_whole_blocks()
            # Usually no bit has two holders, and nothing is sent.
            if located[name].replicated or move.new != move.old:
                moves[name] = move
        arrived = self.exchange(moves)
        with self.agreeing(action):
            for name, theirs in arrived.items():
                if place := masks[name].differs_at(theirs):
                    raise ValueError(f"{refusal} Table {name!r}: {place}.")

    def find(self, name: str) -> ShardedData:
        """Return one table as it is stored now. Does not walk the model, nor communicate."""
        return self.find_all([name])[name]

    def find_all(self, names: Collection[str]) -> dict[str, ShardedData]:
        """:meth:`find` of several tables, by name."""
        by_source: dict[Source, list[str]] = {}
        for name in names:
            by_source.setdefault(self._tables[name].source, []).append(name)
        found = {}
        for source, own in by_source.items():
            for data in source.find(own):
                self._check_shape(data)
                found[data.name] = data
        return found

    def moved(self, located: Located) -> list[str]:
        """Return the tables whose rectangles have changed since the bits were stored. The same on
        every rank."""
        return [name for name, data in located.items() if data.tiling != self._tables[name].tiling]

    def reshard(self, located: Located) -> None:
        """Bring the bits of moved tables to their new holders. Collective over the groups of moved
        tables: one all-to-all each. Bits whose shard is now on another device are copied there,
        which is local."""
        if moved := self.moved(located):
            self._take(moved, located)
        for name, data in located.items():
            table, before = self._tables[name], self._tables[name].shards
            # A model may have been moved, such as by .to(), since the bits were stored.
            table.follow(data)
            if table.shards != before:
                self.version += 1

    def _take(self, moved: list[str], located: Located) -> None:
        """Receive the bits of this rank's new shards. Collective."""
        moves = {name: self._tables[name].move(located[name].tiling) for name in moved}
        with jointly("moving masks", [group for group, _ in self.over_groups(moved)]) as call:
            arrived = self.exchange(moves)
            call.sent_all()
        # Other ranks have their bits by now.
        taken = with_one_retry(
            lambda: {
                name: self._tables[name].assembled(located[name], found)
                for name, found in arrived.items()
            }
        )
        for name, shards in taken.items():
            self._tables[name].shards = shards
            self._tables[name].tiling = located[name].tiling
        self.version += len(moved)

    # Masks.

    def table(self, name: str) -> TableMasks:
        """Return one table's masks, which the next mask update replaces."""
        return self._tables[name]

    def masks(self, name: str) -> list[BlockMask]:
        """Return the masks of this rank's shards, in their order."""
        return self._tables[name].masks

    def replace(self, data: ShardedData, made: NewMasks) -> None:
        """Replace the masks of this rank's shards in a mask update, by masks of the rectangles that
        it holds in ``data``."""
        table = self._tables[data.name]
        shards = []
        for held, (mask, _) in zip(table.shards, made.masks, strict=True):
            # If nothing changes, these are the same objects, and enforcers keep their state.
            shards.append(held if mask is held.mask else Held(mask, held.counts))
        if shards != table.shards:
            self.version += 1
        table.shards, table.tiling = shards, data.tiling
        table.block, table.removed = made.block, made.removed
        table.updates += 1

    def mask(self, name: str) -> Tensor:
        """Return the mask of this rank's only shard, unpacked: int8 ``(rows, columns)``, 1 = kept.
        Within :meth:`editing`, the mask given there.

        Raises:
            ValueError: this rank has several shards or none, or shards have moved since the masks
                were last used.
        """
        if name in self._edited:
            return self._edited[name]
        return _only(name, self._masks_in_place(name)).dense()

    @contextmanager
    def editing(self, name: str, mask: Tensor) -> Iterator[None]:
        """Have :meth:`mask` return ``mask``, for a user's ``update_mask`` of one shard."""
        self._edited[name] = mask
        try:
            yield
        finally:
            self._edited.clear()

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """Return ``((row, column) offset, int8 mask)`` of each shard on this rank; raises as
        :meth:`mask`."""
        masks = self._masks_in_place(name)
        return [(mask.rect[:2], mask.dense()) for mask in masks]

    def weight(self, name: str) -> Tensor:
        """Return the live weights of this rank's only shard; raises as :meth:`mask`."""
        return _only(name, self.find(name).shards).tensor

    def effective(self, name: str) -> Tensor:
        """Return the masked weights of this rank's only shard, a new tensor; raises as
        :meth:`mask`."""
        weight = self.weight(name)
        return torch.where(self.mask(name) != 0, weight, weight.new_zeros(()))

    @torch.no_grad()
    def apply(self, data: ShardedData) -> None:
        """Write zero to the removed weights of this rank's shards of a table. Local."""
        for shard, mask in zip(data.shards, self.masks(data.name), strict=True):
            mask.apply_(shard.tensor)

    # Saving.

    def state_dict(self, configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tables' masks and counts of lookups as tensors in global coordinates, their
        ``configs``, shapes, blocks and numbers of mask updates as JSON. Local, unless column
        borders cut bytes of masks: then collective."""
        moves, cut = self._moves_to_write()
        with jointly("state_dict()", [group for group, _ in self.over_groups(cut)]):
            return self._saved(configs, moves, self.exchange(cut))

    def _saved(
        self,
        configs: Mapping[str, Any],
        moves: Mapping[str, pieces.Move],
        arrived: Mapping[str, Sequence[Held]],
    ) -> dict[str, Any]:
        """Return the state, with masks from what has arrived of their ``moves``. Local."""
        writes = self._masks_to_write(moves, arrived)
        tables, masks = {}, {}
        for name, table in self._tables.items():
            tables[name] = {
                "shape": table.shape,
                "block": table.block,
                "updates": table.updates,
                "removed": table.removed,
                "config": configs[name],
            }
            masks[name] = pieces.saved_masks(table.shape, table.block, writes[name], table.shards)
        counts = {
            name: pieces.saved_counts(table.shape[0], table.counted, table.leftmost, table.shards)
            for name, table in self._tables.items()
            if table.counted is not None
        }
        saved = {"tables": to_json("the configuration of sharded tables", tables), "masks": masks}
        # Tables without counts get no entry: DCP does not find the entry of an empty mapping.
        return {**saved, "counts": counts} if counts else saved

    def _moves_to_write(self) -> tuple[dict[str, pieces.Move], dict[str, pieces.Move]]:
        """Return the moves to the parts of each mask that this rank writes to a checkpoint, see
        :func:`~dist_sparse.sparsifiers.pieces.written`; and the moves that bring bits of other
        ranks, where a border of columns cuts bytes of a mask."""
        moves, cut = {}, {}
        for name, table in self._tables.items():
            parts, cuts_bytes = pieces.written(table.tiling, table.block, table.shape)
            moves[name] = table.move(parts)
            if cuts_bytes:
                # Known from metadata, so that all ranks of the group take part in the exchange.
                cut[name] = moves[name]
        return moves, cut

    def _masks_to_write(
        self, moves: Mapping[str, pieces.Move], arrived: Mapping[str, Sequence[Held]]
    ) -> dict[str, list[BlockMask]]:
        """Return the parts of each mask that this rank writes. Local."""
        cpu = torch.device("cpu")
        found: dict[str, list[BlockMask]] = {}
        for name, move in moves.items():
            held = arrived.get(name, move.held)
            rank = rank_in(self._tables[name].ranks)
            found[name] = [
                pieces.assembled(rect, move.block, held, cpu, move.counted).mask
                for rect in move.new[rank]
            ]
        return found

    def prepare(self, saved: Mapping[str, Any], located: Located) -> dict[str, TableMasks]:
        """Return masks and counts of this rank's shards from saved ones. Checks everything, changes
        nothing, local.

        Args:
            saved: a :meth:`state_dict`, or empty.
            located: the registered tables as they are stored now.

        Raises:
            ValueError: a table is missing or unknown, a field is malformed, or pieces were changed
                since they were saved, differ where they overlap, or do not cover this rank's
                shards.
        """
        entries = pieces.tables_of(saved)
        if entries.keys() != self._tables.keys():
            raise ValueError(
                f"The registered tables {sorted(self.names)} are not the tables of the state,"
                f" {sorted(entries)}: register the same ones first."
            )
        masks = pieces.mapping_of(saved, "masks")
        counts = pieces.mapping_of(saved, "counts")
        return {
            name: self._tables[name].loaded(located[name], entry, masks.get(name), counts.get(name))
            for name, entry in entries.items()
        }

    def snapshot(self) -> dict[str, TableMasks]:
        """Return the masks as they are, for :meth:`load`. Nothing is copied: masks are replaced,
        and counts of lookups go on."""
        return {name: replace(table) for name, table in self._tables.items()}

    def load(self, loaded: Mapping[str, TableMasks]) -> None:
        """Put what :meth:`prepare` or :meth:`snapshot` has returned in place."""
        for name, table in loaded.items():
            # Copies, because the sampled lookups cached in the originals belong to other masks.
            self._tables[name] = replace(table, shards=list(map(replace, table.shards)))
        self.version += 1

    @property
    def keeps_all(self) -> bool:
        """Whether no mask removes anything. The same on every rank."""
        return all(table.removed == 0 for table in self._tables.values())

    def _check_shape(self, data: ShardedData) -> None:
        shape = self._tables[data.name].shape
        if data.shape != shape:
            raise ValueError(
                f"Table {data.name!r} was registered with the shape {shape} and has {data.shape}"
                " now. Register the model with a new sparsifier."
            )

    def _masks_in_place(self, name: str) -> list[BlockMask]:
        """Return :meth:`masks` without communication. Raise if they would need to be resharded."""
        if self.moved({name: self.find(name)}):
            raise ValueError(
                f"Table {name!r} has moved: call step(), apply_masks() or"
                " table_stats() on every rank first."
            )
        return self.masks(name)


def _by_size(group: tuple[Ranks, list[str]]) -> tuple[int, tuple[int, ...]]:
    ranks = group[0] or ()
    return len(ranks), ranks


def _tensors_of(tables: Iterable[ShardedData]) -> list[tuple[str, Tensor]]:
    return [(data.name, tensor) for data in tables for _, tensor in data.shards]


def _only(name: str, shards: Sequence[T]) -> T:
    if len(shards) != 1:
        raise ValueError(
            f"Table {name!r} has {len(shards)} shards on this rank: use local_masks({name!r})."
        )
    return shards[0]
