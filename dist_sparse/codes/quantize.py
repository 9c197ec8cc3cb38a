"""One call that trains tables through codes."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from dist_sparse.checks import integer
from dist_sparse.codes.attaching import refuse_cut_groups
from dist_sparse.codes.columns import ColumnOrder
from dist_sparse.codes.training import CodedTraining, Schedule
from dist_sparse.compaction.kept_rows import sparsifier_of
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.rotation.rotate import Rotate
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData, resolve_block
from dist_sparse.text import count
from dist_sparse.training.sparsify import SparseTraining

LEAST_ROWS: Final = 20_000
"""Smaller tables are refused: of 64 columns, their books of 32 KiB take more than a byte a row."""


def quantize(
    model: nn.Module,
    optimizer: Any,
    *,
    codes: int | Mapping[str, int],
    begin: int,
    end: int | None = None,
    every: int = 1000,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    order: Rotate | None = None,
    sparse: SparseTraining | BaseDataSparsifier | None = None,
) -> CodedTraining:
    """Train tables through codes: product quantization in place. Collective: every rank of the
    world must call it.

    From step ``begin`` on, each lookup returns rows that were decoded: one byte for each group of
    columns, the number of one of 256 entries of a book. Gradients go straight through to the table
    of floats, which its optimizer trains as before. Due steps refit the books, one round of
    Lloyd's over all rows, and assign the codes again. Books and codes are the same on every
    sharding and number of ranks. ``export(model, handle, path, dtype="codes")`` writes what lookups
    return, bit for bit.

    Codes take ``codes`` bytes a row beside the floats. A row of zeros, such as a removed one,
    decodes to exactly 0.

    Args:
        model: a DistributedModelParallel, a DDP module or any module, as it is trained: wrap it
            first.
        optimizer: the optimizer that steps it, or a sequence of all of them.
        codes: bytes of a row, a divisor of the table's columns; of all tables, or by globs over
            table names, of which the last that matches counts.
        begin, end, every: first and last step at which books and codes change, and the steps
            between them. Steps count from 0. After ``end`` they stay as they are, so that other
            layers fit to them; None goes on for good. An assignment costs some 3 us a row of 64
            columns on one CPU thread: 8 times an epoch are enough.
        include, exclude: globs over table names and fully qualified names.
        order: tables whose columns may change places, as of :func:`~dist_sparse.rotate`:
            ``"table"`` turns the outputs of each table back, groups of names share an order, and
            only dot products between them may read them. At the first fit their columns are put
            into groups of equal products of variances. Pass it after a rotation, whose first
            columns hold the most.
        sparse: what sparsifies the same tables, by whole rows. Its ``step()`` comes first.

    Returns:
        A handle with ``step()``, to be called after each optimizer step, ``summary()``,
        ``state_dict()``, ``load_state_dict()`` and ``detach()``.

    Raises:
        ValueError: an argument is invalid; a table has fewer than 20,000 rows, or columns that
            ``codes`` does not divide; shards cut a group of columns; something else than sums,
            means or rows is read of a table; masks remove parts of rows, or rotate tables still. On
            every rank, and nothing is attached.

    Source: Jégou et al., Product quantization for nearest neighbor search, 2011.

    Example::

        >>> import torch
        >>> from dist_sparse import quantize
        >>> model = torch.nn.EmbeddingBag(20_000, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with quantize(model, optimizer, codes=2, begin=0, end=0) as handle:
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.arange(100).view(2, 50)).sum().backward()
        ...         optimizer.step()
        ...         handle.step()
        ...     row = model(torch.tensor([[7]]))
        ...     code = handle.coded()["weight"].shards[0].tensor[7]
        ...     books = handle.books["weight"]
        >>> books.shape, torch.equal(row[0, :4], books[0, int(code[0])].float())
        (torch.Size([2, 256, 4]), True)
    """
    world = group_over(world_ranks())
    with world.agreeing("quantize()") as facts:
        schedule = _schedule(begin, end, every)
        sparsifier = None if sparse is None else sparsifier_of(sparse)
        source = ModelTables(model, include=include, exclude=exclude)
        located = {data.name: data for data in source.locate()}
        groups = _groups_of(codes, located)
        for name, data in located.items():
            _refuse_small(data)
            refuse_cut_groups(data, groups[name])
        if sparsifier is not None:
            _refuse_masks(sparsifier, located)
        facts["codes"] = groups
        facts["begin, end, every"] = list(schedule)
        facts["order"] = None if order is None else repr(order)
        facts["sparse is None"] = sparsifier is None
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        columns = ColumnOrder.checked(order, model, located, groups, optimizers)
    handle = CodedTraining(source, groups, schedule, columns, sparsifier)
    try:
        with world.agreeing("quantize()"):
            handle.attach()
    except BaseException:
        # Another rank may have refused.
        handle.detach()
        raise
    if columns.alone:
        columns.turn_outputs(located)
        # Rows are decoded before they are turned back, so the hooks of before are too late.
        handle.attach()
    return handle


def _schedule(begin: Any, end: Any, every: Any) -> Schedule:
    first = integer("begin", begin, least=0)
    last = None if end is None else integer("end", end, least=first)
    return Schedule(first, last, integer("every", every, least=1))


def _groups_of(codes: Any, located: Mapping[str, ShardedData]) -> dict[str, int]:
    """Return the codes of a row, by table."""
    by_glob = codes if isinstance(codes, Mapping) else {"*": codes}
    found = {}
    for name, data in located.items():
        matching = [value for glob, value in by_glob.items() if fnmatchcase(name, glob)]
        if not matching:
            raise ValueError(f"Invalid {codes=}: nothing matches table {name!r}; exclude it.")
        columns = data.shape[1]
        groups = integer("codes", matching[-1], least=1, most=columns, of=name)
        if columns % groups:
            fits = [each for each in range(1, columns + 1) if columns % each == 0]
            raise ValueError(
                f"Invalid {codes=}: {groups} does not divide the {columns} columns of table"
                f" {name!r}; {fits} do."
            )
        found[name] = groups
    return found


def _refuse_small(data: ShardedData) -> None:
    if data.shape[0] < LEAST_ROWS:
        raise ValueError(
            f"Table {data.name!r} has {count(data.shape[0])} rows, and codes are for tables of at"
            f" least {count(LEAST_ROWS)}: books of 512 bytes a column outweigh what they save."
            f" exclude={data.name!r} leaves it as it is."
        )


def _refuse_masks(sparsifier: BaseDataSparsifier, located: Mapping[str, ShardedData]) -> None:
    """Refuse masks that change what is left of a row."""
    if sparsifier.masks.rotation is not None:
        raise ValueError(
            "sparse rotates tables at its mask updates, which would turn them away from their"
            " books: compact() the model, then quantize it."
        )
    for name, config in sparsifier.data_groups.items():
        if name not in located:
            continue
        block = resolve_block(name, config["sparse_block_shape"], located[name].shape)
        if block[1] < located[name].shape[1]:
            raise ValueError(
                f"Table {name!r}: sparse removes blocks of {block[0]} x {block[1]}, parts of rows,"
                " which books can't keep at zero. Masks of whole rows work; of columns, compact()"
                " the model first."
            )
