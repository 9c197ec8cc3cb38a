"""`export()`: the tables of a model, without what masks remove, as an artifact on disk.

Everything is checked on all ranks before anything is written. Then tables are streamed to rank 0,
chunk by chunk and one after the other, which encodes, compares and writes them; the written files
are read back; and last the artifact gets its name. An error of rank 0 waits until the table's
messages are through, and is raised on all ranks. Files depend on the weights and masks alone: not
on the sharding, nor on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import dist_sparse
from dist_sparse.checks import choice
from dist_sparse.codes.quantize import CodedTraining
from dist_sparse.compaction.moving import sparsifier_of
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.progress import Bar, progress
from dist_sparse.serving.artifact import check_new
from dist_sparse.serving.check import compare_rows, open_chain
from dist_sparse.serving.codes import LARGEST, encode
from dist_sparse.serving.column_grid import ColumnSpread
from dist_sparse.serving.delta import Delta, delta_summary, refuse_changed
from dist_sparse.serving.manifest import Dtype, Manifest, Scale, Table, summary
from dist_sparse.serving.noted import note_delta, refuse_replaced, with_changes
from dist_sparse.serving.sources import (
    ServedTable,
    check_zero,
    lookups_of,
    refuse_range,
    registered_tables,
    served_tables,
)
from dist_sparse.serving.writers import DeltaWriter, WholeWriter
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.score import DataNormSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData, check_data
from dist_sparse.training.sparsify import SparseTraining

Consume = Callable[[Iterator[Tensor]], object]


@dataclass(frozen=True)
class Exported:
    """The folder that :func:`export` wrote. ``print()`` shows each table's bytes before and after.

    Attributes:
        path: the folder.
        manifest: as in its ``manifest.json``; ``manifest.tables["user"].bytes.after`` is one of its
            numbers. Of a delta it is the manifest of the artifact that the delta leads to.
        delta: what the folder holds, if it is a delta; otherwise None.
        since: of a delta the folders that it follows: an artifact and the deltas after it.
    """

    path: Path
    manifest: Manifest
    delta: Delta | None = None
    since: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        shown = summary(self.manifest) if self.delta is None else delta_summary(self.delta)
        return f"{self.path}\n{shown}"


def export(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier | CodedTraining | None,
    path: str | os.PathLike[str],
    dtype: Dtype = "fp32",
    scale: Scale = "row",
    since: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Exported | None = None,
) -> Exported:
    """Write the tables of ``model``, without removed weights, to a folder that
    ``dist_sparse.load_served`` reads. Collective: every rank of the world must call it; rank 0
    writes.

    Rows that are removed whole are not stored; a bitmap records their ids. What masks remove within
    a kept row is stored as zeros, so masks finer than rows save no bytes. Tables that were never
    sparsified are stored whole. Of a table that follows its traffic, ids without a slot are the
    removed ones, at any moment of training. Every weight is compared with what its written bytes
    decode to, and the files are read back before the folder gets its name.

    No rank holds more of a table than its own shards and a few chunks of 8 MiB. The model is not
    changed, except that removed weights are zeroed by an attached enforcer.

    Args:
        model: as it was sparsified, or compacted: a DistributedModelParallel, a DDP module or any
            module.
        sparse: what :func:`~dist_sparse.sparsify` returned, or a sparsifier; None for a model whose
            removed rows :func:`~dist_sparse.compact` took out, or that has none. What
            :func:`~dist_sparse.quantize` returned has its tables stored as codes.
        path: of the new folder, whose missing parents are made; the same on every rank. Only rank 0
            writes to it.
        dtype: of the stored weights. ``"fp32"`` serves them bit for bit (of float64 the nearest
            float32), ``"fp16"`` the nearest float16, ``"int8"`` and ``"int4"`` the nearest point of
            each row's grid, which holds 0. Tables with codes serve bit for bit what lookups return,
            and ``dtype`` is that of the others; of ``"codes"`` it is ``"fp32"``.
        scale: ``"column"`` (``"int4"`` only) gives each column a grid for the whole table, in the
            place of 4 bytes in every row: at 12 bytes a row 24 columns instead of 16. Tables are
            streamed once more, to choose the grids with the smallest squared errors; lookups are in
            pure torch, some 4 times slower than FBGEMM's.
        since: the artifact that was published before, or the artifact and its deltas in order, as
            folders, or what the last :func:`export` returned. The folder then is a delta: the rows
            whose stored bytes have changed, the ids that came, and the ids that went. It takes
            ``load_served([base, delta])`` to what a whole export would serve, bit for bit. All
            weights are streamed and compared; from the second delta of a process on, of tables
            with a fused optimizer on the CPU, only rows that the enforcer has seen written: after
            writes that torch does not count (through ``.data``, numpy, or a collective on weights)
            call ``sparsifier.apply_masks()`` first. With ``scale="column"`` a scale that has
            changed may change the codes of all rows. Only rank 0 reads these folders; of tables
            whose written rows were noted, only rows that changed: damage elsewhere is found by
            what loads, checks or merges the chain.

    Raises:
        ValueError: something is at ``path``, a table or module can't be served, removed weights are
            not zero, weights are not finite or beyond what ``dtype`` holds, or ranks disagree;
            ``since`` is damaged, out of order, or of other tables, lookups or dtypes; on every
            rank, and nothing was written.
        OSError: the folder can't be written; nothing is left. On several ranks it is a ValueError
            that quotes it.

    Example::

        >>> import tempfile, torch
        >>> from dist_sparse import DataNormSparsifier, export
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16))
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.8, sparse_block_shape="row", norm="L2")
        >>> names = sparsifier.add_model(model)
        >>> sparsifier.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exported = export(model, sparsifier, f"{folder}/served", dtype="int8")
        >>> exported.manifest.tables["0"].kept, exported.manifest.tables["0"].bytes.index
        (200, 128)
    """
    world = group_over(world_ranks())
    chain: Any = None
    with world.agreeing("export()") as facts:
        chosen, by = _checked(dtype, scale)
        coded = _coded_training(sparse, chosen)
        before = _folders(since)
        sparsifier = _sparsifier(sparse)
        located = sorted(ModelTables(model, slots=True).locate(), key=lambda data: data.name)
        facts["tables of sparse"] = sorted(sparsifier.data_groups)
        facts["path, dtype, scale"] = [os.fspath(path), chosen, by]
        facts["since"] = [str(each) for each in before]
        for data in located:
            check_data(data)
            # Ranks that disagree in these would wait for messages that no rank sends.
            facts[f"table {data.name!r}"] = [data.shape, str(data.dtype), data.ranks, data.tiling]
            _refuse_without_rank_0(data)
        lookups = lookups_of(model, located)
        registered = registered_tables(model, sparsifier, located)
        if world.rank == 0:
            check_new(path)
            # Of tables whose changes are noted nothing else of it is read: see DeltaWriter.
            chain = open_chain(*before, verify=False) if before else None
    tables = served_tables(located, lookups, sparsifier, registered)
    with world.agreeing("export()"):
        # An enforcer may owe zeros to rows that no forward has read since a step.
        sparsifier.masks.hooks.settle()
        if coded is not None:
            tables = _with_codes(tables, coded)
        manifest = Manifest(
            dist_sparse=dist_sparse.__version__,
            dtype=chosen if coded is None else "codes",
            collections=tuple(lookups.collections),
            tables={name: _planned(table, chosen, by) for name, table in tables.items()},
            bytes=0,
        )
        if chain is not None:
            refuse_changed(chain.manifest, manifest)
            refuse_replaced(sparsifier, before, chain.manifest.hash)
    tables = with_changes(tables, sparsifier, registered, before)
    check_zero(sparsifier, tables, registered)
    # The working directory may change later.
    target = Path(os.path.abspath(path))
    writing: Callable[[], WholeWriter | DeltaWriter] = partial(
        WholeWriter, target, manifest, tables
    )
    if before:
        writing = partial(DeltaWriter, target, manifest, tables, chain)
    text = _write(manifest, tables, writing, world)
    if not before:
        return Exported(target, Manifest.from_text(text))
    delta = Delta.from_text(text)
    # New codes and new scales of columns change rows that training has not written.
    if coded is None and by == "row":
        note_delta((*before, target), delta.artifact.hash, tables, sparsifier)
    return Exported(target, delta.artifact, delta, before)


def _sparsifier(sparse: Any) -> BaseDataSparsifier:
    """The sparsifier of the rows; of None one that removes nothing."""
    rows = sparse.sparsifier if isinstance(sparse, CodedTraining) else sparse
    return DataNormSparsifier() if rows is None else sparsifier_of(rows)


def _folders(since: Any) -> tuple[Path, ...]:
    """The folders that a delta follows; none for a whole export."""
    if since is None:
        return ()
    if isinstance(since, Exported):
        return (*since.since, since.path)
    folders = [since] if isinstance(since, (str, os.PathLike)) else since
    return tuple(Path(os.path.abspath(folder)) for folder in folders)


def _checked(dtype: Any, scale: Any) -> tuple[Dtype, Scale]:
    chosen: Any = choice("dtype", dtype, LARGEST)
    by: Any = choice("scale", scale, ("row", "column"))
    if by == "column" and chosen != "int4":
        raise ValueError(f"Invalid scale='column' with dtype={chosen!r}: it is for 'int4' alone.")
    return chosen, by


def _coded_training(sparse: Any, dtype: Dtype) -> CodedTraining | None:
    coded = sparse if isinstance(sparse, CodedTraining) else None
    if coded is None and dtype == "codes":
        raise ValueError(
            f"Invalid sparse of type {type(sparse).__name__} with dtype='codes': must be what"
            " quantize() returned."
        )
    return coded


def _with_codes(tables: Mapping[str, ServedTable], coded: CodedTraining) -> dict[str, ServedTable]:
    codes, books = coded.coded(), coded.books
    if strange := sorted(set(codes) - set(tables)):
        raise ValueError(f"The codes are of {strange}, which are no tables of the model.")
    return {
        name: replace(table, codes=codes.get(name), books=books.get(name))
        for name, table in tables.items()
    }


def _refuse_without_rank_0(data: ShardedData) -> None:
    if 0 not in (data.ranks or (0,)):
        raise ValueError(
            f"Table {data.name!r} is on ranks {data.ranks}; export() needs rank 0 among them."
        )


def _planned(source: ServedTable, dtype: Dtype, scale: Scale) -> Table:
    """Describe the table as it will be stored."""
    rows, dim = len(source.kept), source.data.shape[1]
    if source.codes is not None:
        dtype, scale = "codes", "row"
    elif dtype == "codes":
        dtype = "fp32"
    return Table(
        rows=rows,
        kept=int(source.kept.count_nonzero()),
        dim=dim,
        pooling=source.pooling,
        dtype=dtype,
        scale=scale,
        groups=None if source.codes is None else source.codes.shape[1],
        default_row=source.default_row,
        turned=None if source.rotation is None else source.rotation.shape[1],
        before=rows * dim * source.data.dtype.itemsize,
    )


def _write(
    manifest: Manifest,
    sources: Mapping[str, ServedTable],
    writing: Callable[[], WholeWriter | DeltaWriter],
    world: Group,
) -> str:
    """Write, check and publish; return the text of the manifest that was written. Collective.

    Rank 0 alone has a writer. The others go through the same steps: to send their rows, and to
    raise its errors.
    """
    writer: Any = None
    text = None
    rows = sum(table.stored for table in manifest.tables.values())
    with ExitStack() as stack:
        with world.agreeing("export()"):
            if world.rank == 0:
                writer = stack.enter_context(writing())
        shown = progress(f"export {manifest.dtype}", rows, "rows", shown=world.rank == 0)
        bar = stack.enter_context(shown)
        for name, source in sources.items():
            table, whole = manifest.tables[name], source.whole()
            if table.scale == "column":
                # Scales are chosen from all rows, which are streamed once more for them.
                spread = ColumnSpread(table.dim)
                _stream(world, source, partial(_count, spread, name, table.dtype))
                whole["scales"] = spread.scales()
            _stream(world, source, partial(_write_table, writer, name, table, source, whole, bar))
        with world.agreeing("export()"):
            if writer is not None:
                text = writer.finish().to_text()
    return str(world.all_gather_json(text)[0])


def _stream(world: Group, source: ServedTable, consume: Consume) -> None:
    """Stream a table to rank 0, where ``consume`` gets its chunks. Collective; what it raises is
    raised on all ranks."""
    chunks = source.chunks()
    error: Exception | None = None
    try:
        if world.rank == 0:
            consume(chunks)
    except Exception as fault:
        error = fault
    # The other ranks wait for messages until the table is through, so the error waits too.
    for _ in chunks:
        pass
    with world.agreeing("export()"):
        if error is not None:
            raise error


def _count(spread: ColumnSpread, name: str, dtype: Dtype, chunks: Iterator[Tensor]) -> None:
    for rows in chunks:
        refuse_range(name, rows, dtype)
        spread.add(rows)


def _write_table(
    writer: WholeWriter | DeltaWriter,
    name: str,
    table: Table,
    source: ServedTable,
    whole: Mapping[str, Tensor],
    bar: Bar,
    chunks: Iterator[Tensor],
) -> None:
    writer.start(name, whole)
    ids, first = source.ids(), 0
    for rows in chunks:
        refuse_range(name, rows, table.dtype)
        stored = encode(rows, table.dtype, whole.get("scales"))
        # The files are read back once they are written: these bytes are the ones that are served.
        compare_rows(name, first, rows, stored, table)
        parts = {"rows": stored.rows.cpu()}
        if stored.scale_bias is not None:
            parts["scale_bias"] = stored.scale_bias.cpu()
        writer.add(name, ids[first : first + len(rows)], parts)
        first += len(rows)
        bar(len(rows))
    if first != len(ids):
        raise ValueError(f"Table {name!r}: {first} rows came, and it has {len(ids)}.")
