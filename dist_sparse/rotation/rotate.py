"""Rotating tables before each mask update, so that the columns that are removed hold as little as
possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.rotation.bases import bases_of
from dist_sparse.rotation.lookups import find_lookup
from dist_sparse.rotation.outputs import follow, turn_back
from dist_sparse.rotation.turning import cut_by_columns, gram_matrices, share_, turn_
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import COL, ShardedData

# `"table"`: each table by itself. Otherwise groups of names.
Rotate: TypeAlias = Literal["table"] | Sequence[Sequence[str]]

Located = Mapping[str, ShardedData]


def rotate(sparsifier: BaseDataSparsifier, tables: Rotate = "table") -> None:
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
        >>> from dist_sparse import DataNormSparsifier, MaskEnforcer, rotate
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
    with group_over(world_ranks()).agreeing("rotate()") as facts:
        if plain := list(sparsifier.masks.plain.names):
            raise ValueError(
                f"Plain data can't be rotated, but {plain} was given to add_data(): use"
                " add_model()."
            )
        groups = rotation_groups(tables, packed.names, "tables")
        names = [*chain.from_iterable(groups)]
        facts["tables"] = groups
        located = packed.locate()
        _refuse_unfit(sparsifier, located, groups)
        # It may be attached later: then update() checks it.
        if sparsifier.masks.enforcer is not None:
            _enforcer(sparsifier).check_rotation(names)
        models = [source.model for source in packed.sources if hasattr(source, "model")]
        alone = {group[0] for group in groups if len(group) == 1}
        lookups = {name: find_lookup(models, located[name], name in alone) for name in names}
    # All ranks have agreed: from here on the model changes.
    turned = {}
    for name in filter(alone.__contains__, names):
        turn_back(*lookups[name], located[name])
        turned[name] = lookups[name].root
    sparsifier.masks.rotation = _Rotation(sparsifier, groups, turned)


class _Rotation:
    """Rotates the tables of a sparsifier.

    Args:
        groups: names of tables that are rotated together.
        turned: the model of each table whose output is turned back: the groups of one.
    """

    def __init__(
        self,
        sparsifier: BaseDataSparsifier,
        groups: Sequence[Sequence[str]],
        turned: Mapping[str, nn.Module],
    ) -> None:
        self._sparsifier, self._groups, self._turned = sparsifier, groups, turned

    @property
    def names(self) -> list[str]:
        return [*chain.from_iterable(self.groups)]

    @property
    def groups(self) -> list[Sequence[str]]:
        """The groups whose tables are all registered still: others can't be rotated any more."""
        registered = set(self._sparsifier.masks.tables.names)
        return [group for group in self._groups if registered.issuperset(group)]

    def update(self) -> None:
        """Rotate every group, in place. Collective over the tables' groups."""
        packed, names = self._sparsifier.masks.tables, self.names
        with packed.agreeing("step()"):
            located = packed.locate()
        # Masks follow their shards first: the rotation reads them.
        packed.reshard(located)
        with packed.agreeing("step()"):
            enforcer = _enforcer(self._sparsifier)
            # A removed weight that is not zero would be spread over the other columns.
            enforcer.settle()
            enforcer.check_rotation(names)
            _refuse_unfit(self._sparsifier, located, self.groups)
        # Each table in the group of ranks that holds it, in one order on all of them.
        chosen, by_ranks = set(names), []
        for ranks, held in packed.groups.items():
            tables = [located[name] for name in sorted(chosen.intersection(held))]
            by_ranks.append((group_over(ranks), tables))
        counts = self._lookups_of if self._sparsifier.counts_lookups else None
        grams: dict[str, Tensor] = {}
        for group, tables in by_ranks:
            found = gram_matrices(tables, group, counts)
            grams |= {data.name: gram for data, gram in zip(tables, found, strict=True)}
        with packed.agreeing("step()"):
            # From the same matrices on every rank.
            bases = self._bases(grams)
        for group, tables in by_ranks:
            # Eigenvectors may differ between ranks in sign and rounding: all use the first rank's.
            share_([bases[data.name] for data in tables], group)
            for data in tables:
                turn_(data, bases[data.name], group)
        for name in filter(self._turned.__contains__, names):
            follow(self._turned[name], name, bases[name])
        enforcer.after_rotation(names)

    def _lookups_of(self, name: str) -> list[Tensor]:
        return [*self._sparsifier.masks.tables.table(name).counts.values()]

    def _bases(self, grams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the basis of each table, from its Gram matrix."""
        for name, gram in grams.items():
            if not gram.isfinite().all():
                raise ValueError(
                    f"Table {name!r} can't be rotated: weights are not finite. No mask was changed."
                )
        bases: dict[str, Tensor] = {}
        for group in self.groups:
            bases.update(zip(group, bases_of([grams[name] for name in group]), strict=True))
        return bases


def rotation_groups(
    rotate: Any, tables: Iterable[str], argument: str = "rotate"
) -> list[list[str]]:
    """Return the groups of tables that ``rotate`` names; of ``"table"`` each table alone.

    Args:
        rotate: what a caller passed.
        tables: the names that there are.
        argument: what the caller calls it.

    Raises:
        ValueError: it is neither ``"table"`` nor groups of such names, each in one group only.

    Example::

        >>> from dist_sparse.rotation.rotate import rotation_groups
        >>> rotation_groups("table", ["user", "item"]), rotation_groups(
        ...     [("user", "item")], ["user", "item"]
        ... )
        ([['user'], ['item']], [['user', 'item']])
    """
    known = list(tables)
    if rotate == "table":
        return [[name] for name in known]
    wrong = f"Invalid {argument}={rotate!r}:"
    groups = rotate if isinstance(rotate, (list, tuple)) else [()]
    # A lone name would be a group of letters.
    if not all(isinstance(group, (list, tuple)) and group for group in groups):
        raise ValueError(f'{wrong} must be "table", or groups of names such as [["user", "item"]].')
    named = [*chain.from_iterable(groups)]
    if unknown := [name for name in named if name not in known]:
        raise ValueError(f"{wrong} {unknown} are none of the tables {known}.")
    if len(set(named)) < len(named):
        raise ValueError(f"{wrong} each name must be in one group only.")
    return list(map(list, groups))


def _refuse_unfit(
    sparsifier: BaseDataSparsifier, located: Located, groups: Sequence[Sequence[str]]
) -> None:
    """Refuse tables that can't be rotated, or not together."""
    for group in groups:
        for name in group:
            # Any other block would remove rotated elements, which mean nothing alone.
            block = sparsifier.data_groups[name].get("sparse_block_shape")
            if not isinstance(block, (tuple, list)) or block[0] != COL:
                raise ValueError(
                    f"Table {name!r} can't be rotated: its blocks are {block}; only whole columns,"
                    " (COL, n), can be."
                )
        check_group([located[name] for name in group])


def check_group(group: Sequence[ShardedData]) -> None:
    """Refuse tables that can't be rotated together. Local.

    Raises:
        ValueError: their widths or ranks differ, or copies of them are cut by columns.
    """
    first = group[0]
    for data in group:
        if data.shape[1] != first.shape[1] or data.ranks != first.ranks:
            raise ValueError(
                f"Tables {first.name!r} and {data.name!r} can't be rotated together: widths"
                f" {first.shape[1]} and {data.shape[1]}, ranks {first.ranks} and {data.ranks};"
                " both must be equal."
            )
        if data.copied and cut_by_columns(data):
            raise ValueError(
                f"Table {data.name!r} can't be rotated: its columns are on several ranks, and 2-D"
                " parallelism trains copies of them; shard it by rows or by table."
            )


def _enforcer(sparsifier: BaseDataSparsifier) -> MaskEnforcer:
    if not isinstance(sparsifier.masks.enforcer, MaskEnforcer):
        raise ValueError(
            "Tables can't be rotated without an attached MaskEnforcer, which knows the state of"
            " their optimizers."
        )
    return sparsifier.masks.enforcer
