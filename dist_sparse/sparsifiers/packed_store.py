"""Masks of sharded tables, as packed bits that live with their shards.

A :class:`PackedStore` holds what was registered (sources that locate the tables at any moment) and,
for each shard on this rank, its :class:`~dist_sparse.masking.masks.BlockMask`. When shards have
moved since the bits were stored, one all-to-all brings the bits to their new holders. Registration,
groups and tilings are the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.facts import to_json
from dist_sparse.groups import Facts, Group, Parcels, agreeing, group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.digest import shared_bits
from dist_sparse.sparsifiers.pieces import (
    Tiling,
    assembled,
    block_of,
    counts_from,
    masks_from,
    new_counts,
    saved_counts,
    saved_mask,
    send_counts,
    send_masks,
    written,
)
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import (
    Block,
    Rect,
    Shard,
    ShardedData,
    Source,
    Span,
    grid_of,
    overlapping,
    owners,
)

Ranks = tuple[int, ...] | None


@dataclass
class _Table:
    """One registered table: the tiling that its bits were stored for, and the bits.

    Attributes:
        counted: dtype of ``counts``; None where lookups are not counted.
        removed: blocks that the masks remove over all ranks, if known.
        updates: mask updates since registration.
    """

    source: Source
    shape: tuple[int, int]
    ranks: Ranks
    tiling: Tiling
    block: Block
    masks: list[BlockMask]
    counts: list[Tensor]
    counted: torch.dtype | None
    samples: list[Tensor] | None = None
    removed: int | None = 0
    updates: int = 0

    def send_masks(self, parcels: Parcels, rank: int, new: Tiling) -> Callable[[], list[BlockMask]]:
        return send_masks(parcels, rank, self.masks, self.block, self.tiling, new)

    def move(self, parcels: Parcels, rank: int, data: ShardedData) -> Callable[[], None]:
        """Pack masks and counts for their new holders. Return a function that puts what arrives in
        place."""
        read_masks = self.send_masks(parcels, rank, data.tiling)
        read_counts = None
        if self.counted is not None:
            read_counts = send_counts(
                parcels, rank, self.counts, self.counted, self.tiling, data.tiling
            )

        def put_together() -> None:
            pieces = read_masks()
            self.masks = [
                assembled(rect, self.block, pieces, weights.device) for rect, weights in data.shards
            ]
            if read_counts is not None and self.counted is not None:
                self.counts = new_counts(data, self.counted, read_counts())
            self.tiling, self.samples = data.tiling, None

        return put_together

    def written(self, owned: Sequence[Rect]) -> list[tuple[Rect, Rect]]:
        """Return the owned rectangles of a rank, each with the one that it writes for it."""
        pairs = [(rect, written(rect, self.block, self.shape)) for rect in owned]
        return [(rect, to) for rect, to in pairs if to.numel]

    def needs_bits_of_others(self, rect: Rect, to: Rect) -> bool:
        """Whether the last byte that the owner of ``rect`` writes holds bits of other shards."""
        return grid_of(to, self.block).col_end > grid_of(rect, self.block).col_end


@dataclass(frozen=True)
class Loaded:
    """What a state has of this rank's part of one table, checked.

    Args:
        data: the table as it is stored now.
        removed: blocks that the masks removed over all ranks when they were saved, if known.
    """

    data: ShardedData
    block: Block
    masks: list[BlockMask]
    counts: list[Tensor]
    removed: int | None
    updates: int


class PackedStore:
    """The registered sharded tables of one sparsifier, in the order in which they were added.

    Attributes:
        version: changes whenever a mask is replaced, added or dropped. Read at every forward.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._groups: dict[Ranks, list[str]] | None = None
        self._spans: dict[str, list[Span]] = {}
        # While a user's update_mask edits the mask of one shard, mask() must return that object.
        self._edited: tuple[str, Tensor] | None = None
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
        """What was registered and still has a table here, in that order."""
        return list({id(table.source): table.source for table in self._tables.values()}.values())

    @property
    def groups(self) -> dict[Ranks, list[str]]:
        """The tables' names by the global ranks that hold them, in an order that depends on neither
        rank nor registration; larger groups come later."""
        if self._groups is None:
            groups: dict[Ranks, list[str]] = {}
            # By name: ranks may have registered in another order.
            for name in sorted(self._tables):
                groups.setdefault(self._tables[name].ranks, []).append(name)
            self._groups = dict(
                sorted(groups.items(), key=lambda entry: (len(entry[0] or ()), entry[0] or ()))
            )
        return self._groups

    @contextmanager
    def agreeing(self, action: str) -> Iterator[list[tuple[Facts, list[str]]]]:
        """:func:`dist_sparse.groups.agreeing` over the tables' groups: for each its facts and its
        tables' names."""
        with agreeing(action, [group_over(ranks) for ranks in self.groups]) as noted:
            yield list(zip(noted, self.groups.values(), strict=True))

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
        known = self._known_spans(plain)
        entries = [*known, *((span, data.name) for data in located for span in _spans(data))]
        for i, j in overlapping([span for span, _ in entries]):
            (span, first), second = entries[i], entries[j][1]
            if j < len(known) or first == second:
                continue
            # A table that has moved since may have left its memory to the new one.
            if first not in self or span in _spans(self.find(first)):
                raise ValueError(
                    f"Table {second!r} is registered already, as {first!r}: they share memory."
                )

    def _known_spans(self, plain: Mapping[str, Tensor]) -> list[tuple[Span, str]]:
        """Return the memory of plain tensors, and of tables where they were last seen: to locate a
        thousand again for each new one takes minutes."""
        known = [(Span.of(tensor), name) for name, tensor in plain.items() if tensor.numel()]
        for name, spans in self._spans.items():
            known += [(span, name) for span in spans]
        return known

    def add(
        self,
        source: Source,
        located: Sequence[ShardedData],
        blocks: Mapping[str, Block],
        *,
        counted: torch.dtype | None = None,
    ) -> None:
        """Register what ``source`` has just located, all blocks kept; with room for :meth:`counts`
        of that dtype."""
        for data in located:
            block = blocks[data.name]
            self._tables[data.name] = _Table(
                source=source,
                shape=data.shape,
                ranks=data.ranks,
                tiling=data.tiling,
                block=block,
                masks=[
                    BlockMask.full(rect, block, weights.device) for rect, weights in data.shards
                ],
                counts=[] if counted is None else new_counts(data, counted),
                counted=counted,
            )
            self._spans[data.name] = _spans(data)
        self._groups = None
        self.version += 1

    def drop(self, name: str) -> None:
        """Forget one table, and its source once none of its tables is left."""
        del self._tables[name]
        self._spans.pop(name, None)
        self._groups = None
        self.version += 1

    # Where the tables are.

    def locate(self) -> dict[str, ShardedData]:
        """Return the registered tables as they are stored now, by name. Walks the models; does not
        communicate.

        Raises:
            ValueError: a table is no longer in its model, or has another shape.
        """
        # One walk finds all tables of a model.
        names: dict[int, list[str]] = {}
        for name, table in self._tables.items():
            names.setdefault(id(table.source), []).append(name)
        found: dict[str, ShardedData] = {}
        for source in self.sources:
            found |= {data.name: data for data in source.locate(names[id(source)])}
        if missing := [name for name in self._tables if name not in found]:
            raise ValueError(
                f"The registered tables {missing} are no longer in the model; it holds"
                f" {sorted(found)}."
            )
        located = {name: found[name] for name in self._tables}
        for data in located.values():
            self._check_shape(data)
        self._spans = {name: _spans(data) for name, data in located.items()}
        return located

    def current(self, action: str | None = None) -> dict[str, ShardedData]:
        """:meth:`locate`, and bring the masks to their shards: collective if shards have moved.

        Args:
            action: check first that all ranks make this call. Collective over the tables' groups:
                32 bytes each.
        """
        if action is None:
            located = self.locate()
        else:
            # A rank that can't locate its tables must stop the others before the exchange.
            with self.agreeing(action):
                located = self.locate()
        self.reshard(located)
        return located

    def find(self, name: str) -> ShardedData:
        """Return one table as it is stored now. Does not walk the model, nor communicate."""
        data = self._tables[name].source.find(name)
        self._check_shape(data)
        return data

    def moved(self, located: Mapping[str, ShardedData]) -> list[str]:
        """Return the tables whose rectangles differ from those that the bits were stored for. The
        same on every rank."""
        return [name for name, data in located.items() if data.tiling != self._tables[name].tiling]

    def reshard(self, located: Mapping[str, ShardedData]) -> None:
        """Bring the bits of moved tables to their new holders. Collective over the groups of moved
        tables: one all-to-all each. Bits whose shard is on another device now follow it, which is
        local."""
        moved = set(self.moved(located))
        # Group by group, in an order that all ranks share: each move is collective.
        for ranks, names in self.groups.items():
            if tables := [located[name] for name in names if name in moved]:
                self._move(tables, group_over(ranks))
        for data in located.values():
            self._follow_devices(data)

    def _follow_devices(self, data: ShardedData) -> None:
        table = self._tables[data.name]
        # A model may have been moved, such as by .to(), since the bits were stored.
        devices = [shard.tensor.device for shard in data.shards]
        if [mask.bits.device for mask in table.masks] == devices:
            return
        self.version += 1
        table.samples = None
        table.masks = [
            BlockMask(mask.rect, mask.block, mask.bits.to(device))
            for mask, device in zip(table.masks, devices, strict=True)
        ]
        if table.counted is not None:
            # Counts are summed on the device of the lookups.
            counts = zip(table.counts, devices, strict=True)
            table.counts = [count.to(device) for count, device in counts]

    # Masks.

    def masks(self, name: str) -> list[BlockMask]:
        """Return the masks of this rank's shards, in their order. A mask update replaces the
        list."""
        return self._tables[name].masks

    def counts(self, name: str) -> list[Tensor] | None:
        """Return how often training has looked up each row of this rank's shards, live:
        ``(rect.rows,)``, int32, or float64 where counts decay; None if that is not counted."""
        table = self._tables[name]
        return None if table.counted is None else table.counts

    def samples(self, name: str) -> list[Tensor]:
        """Return what an enforcer has sampled of the lookups of this rank's shards since their
        masks were replaced, live: int64 ``(2,)``, all of them, and lookups of rows that are removed
        whole."""
        table = self._tables[name]
        # Only tables of fused optimizers are ever sampled.
        if table.samples is None:
            table.samples = [
                torch.zeros(2, dtype=torch.int64, device=mask.bits.device) for mask in table.masks
            ]
        return table.samples

    def block(self, name: str) -> Block:
        """Return the block that one bit of the table's masks covers, known on ranks without a
        shard too."""
        return self._tables[name].block

    def replace(
        self,
        data: ShardedData,
        masks: list[BlockMask],
        block: Block,
        removed: int | None,
        updates: int | None = None,
    ) -> None:
        """Replace the masks of this rank's shards by masks of the rectangles that it holds in
        ``data``.

        Args:
            removed: blocks that they remove over all ranks, if known without asking.
            updates: mask updates since registration; None is one more than before.
        """
        assert all(mask.block == block for mask in masks)
        assert [mask.rect for mask in masks] == [shard.rect for shard in data.shards]
        table = self._tables[data.name]
        if list(map(id, masks)) != list(map(id, table.masks)):
            # A mask update that changes nothing keeps the masks themselves.
            self.version += 1
            table.samples = None
        table.masks, table.block, table.tiling, table.removed = masks, block, data.tiling, removed
        table.updates = table.updates + 1 if updates is None else updates

    def mask(self, name: str) -> Tensor:
        """Return the mask of this rank's only shard, unpacked: int8 ``(rows, columns)``, 1 = kept.
        Within :meth:`editing`, the mask given there.

        Raises:
            ValueError: this rank has several shards or none, or shards have moved since the masks
                were last used.
        """
        if self._edited is not None and self._edited[0] == name:
            return self._edited[1]
        masks = self._masks_in_place(name)
        _check_single(name, len(masks))
        return masks[0].dense()

    @contextmanager
    def editing(self, name: str, mask: Tensor) -> Iterator[None]:
        """Have :meth:`mask` return ``mask``, for a user's ``update_mask`` of one shard."""
        self._edited = (name, mask)
        try:
            yield
        finally:
            self._edited = None

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """Return ``((row, column) offset, int8 mask)`` of each shard on this rank; raises as
        :meth:`mask`."""
        masks = self._masks_in_place(name)
        return [((mask.rect.row, mask.rect.col), mask.dense()) for mask in masks]

    def weight(self, name: str) -> Tensor:
        """Return the live weights of this rank's only shard; raises as :meth:`mask`."""
        shards = self.find(name).shards
        _check_single(name, len(shards))
        return shards[0].tensor

    def effective(self, name: str) -> Tensor:
        """Return the masked weights of this rank's only shard, a new tensor; raises as
        :meth:`mask`."""
        weight = self.weight(name)
        return torch.where(self.mask(name) != 0, weight, weight.new_zeros(()))

    @torch.no_grad()
    def apply(self, located: Mapping[str, ShardedData]) -> None:
        """Write zero to the removed weights of this rank's shards. Local."""
        for name, data in located.items():
            for mask, shard in zip(self.masks(name), data.shards, strict=True):
                mask.apply_(shard.tensor)

    def found_in(
        self, other: nn.Module | Mapping[str, Tensor], located: Mapping[str, ShardedData]
    ) -> dict[str, ShardedData]:
        """Return the counterparts of the located tables in a copy of their model, or in a mapping
        from fully qualified (or registered) names to whole tensors. Local; raises ValueError if one
        is missing or sharded otherwise."""
        if isinstance(other, nn.Module):
            copies = {data.fqn: data for data in model_source(other, dense=True).locate()}
            found = {name: copies.get(data.fqn) for name, data in located.items()}
        else:
            found = {name: _whole_tensor(other, data) for name, data in located.items()}
        counterparts = {}
        for name, data in located.items():
            copy = found[name]
            if copy is None or copy.tiling != data.tiling:
                raise ValueError(
                    f"Table {name!r} ({data.fqn}) is not in the copy, or is sharded otherwise"
                    " there."
                )
            counterparts[name] = copy
        return counterparts

    # Saving.

    def state_dict(self, configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tables' masks and counts of lookups as tensors in global coordinates, their
        ``configs``, shapes, blocks and numbers of mask updates as JSON. Local, unless column
        borders cut bytes of masks: then collective."""
        writes: dict[str, list[BlockMask]] = {}
        # First, as it may be collective: nothing below communicates.
        for ranks, names in self.groups.items():
            writes |= self._masks_to_write(names, group_over(ranks))
        tables, masks, counts = {}, {}, {}
        for name, table in self._tables.items():
            tables[name] = {
                "shape": table.shape,
                "block": table.block,
                "updates": table.updates,
                "removed": table.removed,
                "config": configs[name],
            }
            masks[name] = saved_mask(table.shape, table.block, writes[name], table.masks)
            if table.counted is not None:
                rank = group_over(table.ranks).rank
                rects, owned = table.tiling[rank], owners(table.tiling)[rank]
                counts[name] = saved_counts(
                    table.shape[0], table.counted, rects, owned, table.counts
                )
        saved = {"tables": to_json("the configuration of sharded tables", tables), "masks": masks}
        # Without counts there is no entry: for an empty mapping DCP looks in vain.
        return {**saved, "counts": counts} if counts else saved

    def _masks_to_write(self, names: Sequence[str], group: Group) -> dict[str, list[BlockMask]]:
        """Return the parts of each mask that this rank writes to a checkpoint: see
        :func:`~dist_sparse.sparsifiers.pieces.written`. Local, unless a border of columns cuts
        bytes of a mask: then collective over the group."""
        found: dict[str, list[BlockMask]] = {}
        parcels, arriving = Parcels(group), {}
        for name in names:
            table = self._tables[name]
            parts = [table.written(owned) for owned in owners(table.tiling)]
            if any(table.needs_bits_of_others(*part) for part in itertools.chain(*parts)):
                # From the parts of all ranks: all of them take part in the exchange, or none.
                new = tuple(tuple(to for _, to in held) for held in parts)
                arriving[name] = new[group.rank], table.send_masks(parcels, group.rank, new)
            else:
                masks = {mask.rect: mask for mask in table.masks}
                found[name] = [masks[rect].cut(to) for rect, to in parts[group.rank]]
        cpu = torch.device("cpu")
        if arriving:
            parcels.exchange(cpu)
        for name, (rects, read) in arriving.items():
            pieces, block = read(), self._tables[name].block
            found[name] = [assembled(rect, block, pieces, cpu) for rect in rects]
        return found

    def prepare(
        self, saved: Mapping[str, Any], located: Mapping[str, ShardedData]
    ) -> dict[str, Loaded]:
        """Return masks and counts of this rank's shards from saved pieces. Checks everything,
        changes nothing, local.

        Args:
            saved: the tables of a :meth:`state_dict`, by name: see
                :func:`~dist_sparse.sparsifiers.pieces.entries_of`.
            located: the registered tables as they are stored now.

        Raises:
            ValueError: a table is missing or unknown, a field is malformed, or pieces were changed
                since they were saved, differ where they overlap, or do not cover this rank's
                shards.
        """
        if missing := [name for name in self._tables if name not in saved]:
            raise ValueError(
                f"The state has no masks of the registered tables {missing}; it has those of"
                f" {sorted(saved)}."
            )
        if unknown := [name for name in saved if name not in self]:
            raise ValueError(
                f"The state has masks of tables {unknown} that are not registered: call add_model()"
                " before loading."
            )
        loaded = {}
        for name, entry in saved.items():
            data, counted = located[name], self._tables[name].counted
            loaded[name] = Loaded(
                data=data,
                masks=masks_from(data, entry),
                block=block_of(entry),
                counts=[] if counted is None else counts_from(data, entry, counted),
                removed=entry.get("removed"),
                updates=entry.get("updates", 0),
            )
        return loaded

    def note_loaded(
        self,
        noted: Sequence[tuple[Facts, list[str]]],
        loaded: Mapping[str, Loaded],
        configs: Mapping[str, Any],
    ) -> None:
        """Note what must be equal on all ranks before a state is loaded."""
        for facts, names in noted:
            facts.on_drift = _refuse_drift
            for name in filter(loaded.__contains__, names):
                one = loaded[name]
                values = [one.block, configs[name], one.updates, one.removed]
                facts[f"the state of table {name!r}"] = values
                rank = group_over(one.data.ranks).rank
                facts.replicas |= shared_bits(one.data, one.block, one.masks, rank)

    def snapshot(self, located: Mapping[str, ShardedData]) -> dict[str, Loaded]:
        """Return the masks as they are, for :meth:`load`. Nothing is copied: masks are replaced,
        and counts of lookups go on."""
        found = {}
        for name, table in self._tables.items():
            found[name] = Loaded(
                data=located[name],
                block=table.block,
                masks=table.masks,
                counts=table.counts,
                removed=table.removed,
                updates=table.updates,
            )
        return found

    @property
    def keeps_all(self) -> bool:
        """Whether no mask removes anything. The same on every rank."""
        return all(table.removed == 0 for table in self._tables.values())

    def load(self, loaded: Mapping[str, Loaded]) -> None:
        """Put what :meth:`prepare` has returned in place."""
        for name, one in loaded.items():
            # By the block of the state: without DCP it may differ from the configured one.
            self.replace(one.data, one.masks, one.block, one.removed, one.updates)
            self._tables[name].counts = one.counts

    def _check_shape(self, data: ShardedData) -> None:
        shape = self._tables[data.name].shape
        if data.shape != shape:
            raise ValueError(
                f"Table {data.name!r} was registered with the shape {shape} and has {data.shape}"
                " now: its mask does not fit. Make a new sparsifier and register the model again."
            )

    def _masks_in_place(self, name: str) -> list[BlockMask]:
        """:meth:`masks`, for a caller that may be alone and so can't reshard them."""
        if self.moved({name: self.find(name)}):
            raise ValueError(
                f"The shards of table {name!r} have moved since its masks were last used: call"
                " step(), apply_masks() or table_stats() on every rank first."
            )
        return self.masks(name)

    def _move(self, tables: Sequence[ShardedData], group: Group) -> None:
        # One all-to-all for all tables of a group.
        parcels = Parcels(group)
        arriving = [self._tables[data.name].move(parcels, group.rank, data) for data in tables]
        parcels.exchange(torch.device("cpu"))
        for put_together in arriving:
            put_together()
        self.version += 1


def _whole_tensor(tensors: Mapping[str, Tensor], data: ShardedData) -> ShardedData | None:
    """Return a table as stored in a mapping from names to whole tensors, if it is there."""
    tensor = tensors.get(data.fqn or data.name, tensors.get(data.name))
    if tensor is None or any(shard.rect.numel != tensor.numel() for shard in data.shards):
        return None
    # Each shard is the whole table, or the tensor does not fit it.
    whole = tensor.data.view(data.shape)
    return replace(data, shards=tuple(Shard(shard.rect, whole) for shard in data.shards))


def _refuse_drift(drifted: Mapping[str, list[int]]) -> None:
    places = "; ".join(f"{place} on ranks {ranks}" for place, ranks in drifted.items())
    raise ValueError(
        f"The saved masks of the ranks do not fit together; they differ at {places}. Nothing was"
        " changed."
    )


def _check_single(name: str, shards: int) -> None:
    if shards != 1:
        raise ValueError(
            f"Table {name!r} has {shards} shards on this rank: use local_masks({name!r})."
        )


def _spans(data: ShardedData) -> list[Span]:
    # Empty tensors have no memory to share.
    return [Span.of(shard.tensor) for shard in data.shards if shard.tensor.numel()]
