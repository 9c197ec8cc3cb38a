"""Rotate tables before each mask update, so that the removed columns hold as little information as
possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.extras.rotation.lookups import TableLookup, find_lookup, find_lookup_for_dots
from dist_sparse.extras.rotation.turning import bases_of, gram_matrices, share_, turn_
from dist_sparse.groups import Group, world_group
from dist_sparse.masking.device import with_one_retry
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.bases import BASIS, TableGroups, rotation_groups, turn_back
from dist_sparse.tables.shards import COL, Located, ShardedData
from dist_sparse.whole_rows import refuse_cut_copies

__all__ = ["Rotation", "rotate"]


@dataclass(frozen=True)
class Rotation:
    """The rotation of tables during :func:`~dist_sparse.sparsify`: its ``Advanced(rotate=...)``.

    Needs ``block="col"``. Tables in no group stay dense. The score does not choose the columns, but
    ``"frequency"`` weights rows by their lookups.

    Args:
        tables: ``"table"``, for each table that is pruned, or groups of names: see :func:`rotate`.

    Example::

        >>> import torch
        >>> import dist_sparse as ds
        >>> from dist_sparse.extras.rotation import Rotation
        >>> table = torch.nn.EmbeddingBag(50, 8)
        >>> optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        >>> rotated = ds.Advanced(rotate=Rotation("table"))
        >>> sparse = ds.sparsify(table, optimizer, level=0.5, end=0, block="col", advanced=rotated)
        >>> sparse.step()
        >>> (table.weight[:, 4:] == 0).all().item()
        True
        >>> sparse.detach()
    """

    tables: TableGroups

    def rotate(self, sparsifier: BaseDataSparsifier) -> None:
        """Rotate the tables before each mask update of a sparsifier. Collective."""
        rotate(sparsifier, self.tables)


def rotate(sparsifier: BaseDataSparsifier, tables: TableGroups = "table") -> None:
    """Rotate tables before each mask update from now on, without changing the model's output.
    Collective: every rank of the world must call it.

    The columns of a rotated table are in descending order of the information they hold. The last
    columns are removed, whatever the sparsifier's norm or score: no other columns could hold less.
    Tables are rotated in place; removed columns stay zero, because later rotations act only on the
    remaining columns. Call it once everything is registered; an enforcer must be attached at mask
    updates.

    Args:
        sparsifier: one that removes whole columns, ``sparse_block_shape=(COL, n)``. If it counts
            lookups (``score="frequency"``), each row is weighted by its number of lookups.
        tables: ``"table"``, or groups of registered names. A group of one table, and each table of
            ``"table"``, gets the eigenvectors of ``W^T W``, and a forward hook rotates its output
            back, so that any model may read it. Outputs of larger groups are not rotated back: only
            **dot products between them** may read them. Two tables get the balanced basis of their
            dot products, more get one orthogonal basis. Tables in no group are not rotated.

    Raises:
        ValueError: a name is unknown or in two groups; blocks are not whole columns; the tables of
            a group differ in width or ranks, the output of one is rotated back already, or an
            ``nn.Sequential`` passes it on to a layer or nonlinearity; a weight is tied,
            renormalized (``max_norm``) or pooled by its maximum; or the optimizer's state would be
            wrong. On every rank, and nothing has changed.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, MaskEnforcer
        >>> from dist_sparse.extras.rotation import rotate
        >>> table = torch.nn.EmbeddingBag(50, 8)
        >>> optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape="col", norm="L2")
        >>> names = sparsifier.add_model(table)
        >>> rotate(sparsifier)
        >>> ids, before = torch.arange(50).view(10, 5), table.weight.detach().clone()
        >>> with MaskEnforcer(sparsifier).attach(optimizer):
        ...     pooled = table(ids)
        ...     sparsifier.step()
        ...     torch.allclose(table(ids), pooled, atol=1e-5), torch.equal(table.weight, before)
        (True, False)
    """
    packed = sparsifier.masks.tables
    with world_group().agreeing("rotate()") as facts:
        if plain := list(sparsifier.masks.plain.names):
            raise ValueError(
                f"Plain data can't be rotated, but {plain} was given to add_data(): use"
                " add_model()."
            )
        groups = rotation_groups(tables, packed.names, "tables")
        facts["tables"] = groups
        located = packed.locate()
        _refuse_unfit(sparsifier, located, groups)
        # An enforcer that is attached later is checked by update().
        enforcer = sparsifier.masks.enforcer
        if isinstance(enforcer, MaskEnforcer):
            enforcer.check_rotation([*chain(*groups)])
        models = [source.model for source in packed.sources if hasattr(source, "model")]
        alone = {}
        for group in groups:
            if len(group) == 1:
                alone[group[0]] = find_lookup(models, located[group[0]])
                continue
            for name in group:
                find_lookup_for_dots(models, located[name])
        bases = {name: _no_rotation(located[name]) for name in alone}
    # All ranks have agreed: only now does the model change.
    for name, lookup in alone.items():
        turn_back(lookup.root, lookup.module, lookup.outputs, name, bases[name])
    sparsifier.masks.rotation = _Rotator(sparsifier, groups, alone)


@dataclass(frozen=True, eq=False)
class _Rotator:
    """Rotates the tables of a sparsifier.

    Args:
        given: names of tables that are rotated together.
        alone: how the model looks up the tables in groups of one, whose outputs are rotated back.
    """

    sparsifier: BaseDataSparsifier
    given: Sequence[Sequence[str]]
    alone: Mapping[str, TableLookup]

    @property
    def names(self) -> list[str]:
        """The tables that are rotated."""
        return [*chain(*self.groups)]

    @property
    def groups(self) -> list[Sequence[str]]:
        """The groups whose tables are all still registered: only they can be rotated."""
        registered = set(self.sparsifier.masks.tables.names)
        return [group for group in self.given if registered.issuperset(group)]

    def update(self) -> None:
        """Rotate every group, in place. Collective over the tables' groups."""
        packed = self.sparsifier.masks.tables
        # With their masks: enforcer.settle() needs the masks of the current shards.
        located = packed.current_for("step()")
        with packed.agreeing("step()"):
            enforcer = _enforcer(self.sparsifier)
            # The rotation would spread a removed weight that is not zero over the other columns.
            enforcer.settle()
            enforcer.check_rotation(self.names)
            _refuse_unfit(self.sparsifier, located, self.groups)
        # Every rank of a group handles its tables in the same order.
        by_group = []
        for group, names in packed.over_groups(self.names):
            by_group.append((group, [located[name] for name in names]))
        bases = self._new_bases(by_group)
        for group, tables in by_group:
            # Eigenvectors may differ between ranks in sign and rounding: all use the first rank's.
            share_([bases[data.name] for data in tables], group)
        # A table is rotated with the basis that rotates its output back, so that a later error
        # changes no output.
        for group, tables in by_group:
            for data in tables:
                turn_(data, bases[data.name], group)
                with_one_retry(partial(self._note_basis, data.name, bases[data.name]))
        with_one_retry(partial(enforcer.after_rotation, self.names))

    def _note_basis(self, name: str, basis: Tensor) -> None:
        """Extend the basis by which the output of a table is rotated back, if it is: from the
        original columns to the current ones, over all rotations so far."""
        if name in self.alone:
            total = self.alone[name].root.get_buffer(BASIS + name)
            total.copy_(total.cpu().double() @ basis)

    def _new_bases(
        self, by_group: Iterable[tuple[Group, Sequence[ShardedData]]]
    ) -> dict[str, Tensor]:
        """Return the basis of each table for its current weights. Collective over the groups.

        Args:
            by_group: groups of ranks, each with the tables that it holds.
        """
        packed = self.sparsifier.masks.tables
        counts = None
        if self.sparsifier.counts_lookups:
            counts = {name: [*packed.table(name).counts.values()] for name in self.names}
        grams: dict[str, Tensor] = {}
        for group, tables in by_group:
            grams |= gram_matrices(tables, group, counts)
        bases: dict[str, Tensor] = {}
        # Local, but weights that are not finite must be refused on all ranks.
        with packed.agreeing("step()"):
            for names in self.groups:
                bases |= bases_of(grams, names)
        return bases


def _refuse_unfit(
    sparsifier: BaseDataSparsifier,
    located: Located,
    groups: Sequence[Sequence[str]],
) -> None:
    """Refuse tables that can't be rotated, and groups that can't be rotated together."""
    for name in chain(*groups):
        # Other blocks would remove single rotated elements, which have no meaning of their own.
        block = sparsifier.data_groups[name].get("sparse_block_shape")
        if not isinstance(block, (tuple, list)) or block[0] != COL:
            raise ValueError(
                f"Table {name!r} can't be rotated: its blocks are {block}; only whole columns,"
                " (COL, n), can be."
            )
    for group in groups:
        check_group([located[name] for name in group])


def check_group(group: Sequence[ShardedData]) -> None:
    """Refuse tables that can't be rotated together. Local.

    Raises:
        ValueError: their widths or ranks differ, or copies of them are cut by columns.
    """
    first = group[0]
    for data in group:
        if (data.shape[1], data.ranks) != (first.shape[1], first.ranks):
            raise ValueError(
                f"Tables {first.name!r} and {data.name!r} can't be rotated together: widths"
                f" {first.shape[1]} and {data.shape[1]}, ranks {first.ranks} and {data.ranks}."
            )
        refuse_cut_copies(data, "rotated")


def _enforcer(sparsifier: BaseDataSparsifier) -> MaskEnforcer:
    """Return the attached enforcer; raise ValueError if there is none."""
    enforcer = sparsifier.masks.enforcer
    if not isinstance(enforcer, MaskEnforcer):
        raise ValueError(
            "Tables can't be rotated without an attached MaskEnforcer, which knows the state of"
            " their optimizers."
        )
    return enforcer


def _no_rotation(data: ShardedData) -> Tensor:
    """Return the basis of a table that was not rotated yet."""
    # Not in 16 bits: a rounded basis would add errors to every output.
    exact = torch.promote_types(data.dtype, torch.float32)
    return torch.eye(data.shape[1], dtype=exact, device=data.device)
