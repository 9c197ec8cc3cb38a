"""`export()`: the tables of a model, without what masks remove, as an artifact on disk.

Everything is checked on all ranks before anything is written. Then tables are streamed to rank 0,
chunk by chunk and one after the other, which encodes and writes them; they are streamed once more
to be compared with the written files; and last the artifact gets its name. An error of rank 0 waits
until the table's messages are through, and is raised on all ranks. Files depend on the weights and
masks alone: not on the sharding, nor on the number of ranks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import dist_sparse
from dist_sparse.checks import choice
from dist_sparse.codes.training import CodedTraining
from dist_sparse.compaction.kept_rows import sparsifier_of
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.progress import Bar, progress
from dist_sparse.serving.artifact import check_new
from dist_sparse.serving.check import Chain, open_chain
from dist_sparse.serving.codes import LARGEST, encode
from dist_sparse.serving.column_grid import ColumnSpread
from dist_sparse.serving.delta import Delta, delta_summary, refuse_changed
from dist_sparse.serving.manifest import Dtype, Manifest, Scale, Table, summary
from dist_sparse.serving.sources import (
    ServedTable,
    check_range,
    check_zero,
    lookups_of,
    registered_tables,
    served_tables,
)
from dist_sparse.serving.writers import DeltaWriter, WholeWriter
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData, check_data
from dist_sparse.text import size
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

    def __str__(self) -> str:
        if self.delta is not None:
            return f"{self.path}\n{delta_summary(self.delta)}"
        return f"{self.path}\n{summary(self.manifest)}"

    def __repr__(self) -> str:
        if self.delta is not None:
            return f"Exported(delta, {size(self.delta.bytes)} of {size(self.manifest.bytes)})"
        tables = self.manifest.tables.values()
        before = sum(table.bytes.before for table in tables)
        counted = f"{len(tables)} table{'s' if len(tables) > 1 else ''}"
        return (
            f"Exported({counted}, {self.manifest.dtype}, {size(before)} ->"
            f" {size(self.manifest.bytes)})"
        )


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
    removed ones, at any moment of training. Before the folder gets its name, every weight of the
    model is compared with the written files.

    No rank holds more of a table than its own shards and a few chunks of 8 MiB. The model is not
    changed, except that removed weights are zeroed by an attached enforcer.

    Args:
        model: as it was sparsified, or compacted: a DistributedModelParallel, a DDP module or any
            module.
        sparse: what :func:`~dist_sparse.sparsify` returned, or a sparsifier; None for a model whose
            removed rows :func:`~dist_sparse.compact` took out, or that has none. With ``"codes"``
            what :func:`~dist_sparse.quantize` returned.
        path: of the new folder, whose missing parents are made; the same on every rank. Only rank 0
            writes to it.
        dtype: of the stored weights. ``"fp32"`` serves them bit for bit (of float64 the nearest
            float32), ``"fp16"`` the nearest float16, ``"int8"`` and ``"int4"`` the nearest point of
            each row's grid, which holds 0, and ``"codes"`` bit for bit what lookups return; tables
            without codes are stored in ``"fp32"`` then.
        scale: ``"column"`` (``"int4"`` only) gives each column a grid for the whole table, in the
            place of 4 bytes in every row: at 12 bytes a row 24 columns instead of 16. Tables are
            streamed once more, to choose the grids with the smallest squared errors; lookups are in
            pure torch, some 4 times slower than FBGEMM's.
        since: the artifact that was published before, or the artifact and its deltas in order, as
            folders, or what the last :func:`export` returned. The folder then is a delta: the rows
            whose stored bytes have changed, the ids that came, and the ids that went. It takes
            ``load_served([base, delta])`` to what a whole export would serve, bit for bit. All
            weights are streamed and compared all the same. With ``scale="column"`` a scale that
            has changed may change the codes of all rows. Only rank 0 reads these folders.

    Raises:
        ValueError: something is at ``path``, a table or module can't be served, removed weights are
            not zero, weights are not finite or beyond what ``dtype`` holds, or ranks disagree;
            ``since`` is damaged, out of order, or of other tables, lookups or dtypes; on every
            rank, and nothing was written.
        OSError: the folder can't be written; nothing is left. On several ranks it is a ValueError
            that quotes it.
        ImportError: safetensors is not installed.

    Example::

        >>> import tempfile, torch
        >>> from dist_sparse import DataNormSparsifier, export
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16))
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.8, sparse_block_shape="row", norm="L2")
        >>> names = sparsifier.add_model(model)
        >>> sparsifier.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exported = export(model, sparsifier, f"{folder}/served", dtype="int8")
        >>> exported
        Exported(1 table, int8, 62.5 KiB -> 4.24 KiB)
        >>> exported.manifest.tables["0"].kept, exported.manifest.tables["0"].bytes.index
        (200, 128)
    """
    world = group_over(world_ranks())
    chain: Any = None
    with world.agreeing("export()") as facts:
        chosen, by = _checked(dtype, scale)
        coded = _coded_training(sparse, chosen)
        of_rows = sparse if coded is None else coded.sparsifier
        before = _chain_of(since)
        sparsifier = None if of_rows is None else sparsifier_of(of_rows)
        located = sorted(ModelTables(model, slots=True).locate(), key=lambda data: data.name)
        facts["sparse is None"] = sparsifier is None
        facts["path, dtype, scale"] = [os.fspath(path), chosen, by]
        facts["since"] = [str(each) for each in before]
        for data in located:
            check_data(data)
            # Ranks that disagree in these would wait for messages that no rank sends.
            facts[f"table {data.name!r}"] = [data.shape, str(data.dtype), data.ranks, data.tiling]
            _refuse_without_rank_0(data)
        lookups = lookups_of(model, located)
        registered: dict[str, ShardedData] = {}
        if sparsifier is not None:
            registered = registered_tables(model, sparsifier, located)
        if world.rank == 0:
            chain = _open(path, before)
    if sparsifier is not None:
        # Masks follow shards that have moved since the last update.
        sparsifier.masks.tables.reshard(registered)
    tables = served_tables(located, lookups, sparsifier, registered)
    with world.agreeing("export()"):
        _settle(sparsifier)
        if coded is not None:
            tables = _with_codes(tables, coded)
        check_range(located, chosen)
    if sparsifier is not None:
        check_zero(sparsifier, tables, registered)
    manifest = Manifest(
        dist_sparse=dist_sparse.__version__,
        dtype=chosen,
        collections=tuple(lookups.collections),
        tables={name: _planned(table, chosen, by) for name, table in tables.items()},
        bytes=0,
    )
    # The working directory may change later.
    target = Path(os.path.abspath(path))
    if before:
        return _delta_of(manifest, tables, target, chain, before, world)
    text = _write(manifest, tables, partial(WholeWriter, target, manifest), world)
    return Exported(target, Manifest.from_text(text))


def _open(path: str | os.PathLike[str], before: Sequence[Path]) -> Chain | None:
    """Check that ``path`` can be written, and return the artifacts that a delta follows."""
    check_new(path)
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("export() needs safetensors: pip install safetensors.")
    return open_chain(*before) if before else None


def _delta_of(
    manifest: Manifest,
    tables: Mapping[str, ServedTable],
    target: Path,
    chain: Any,  # of rank 0, None elsewhere
    before: tuple[Path, ...],
    world: Group,
) -> Exported:
    """Write the delta from ``chain``, which rank 0 alone has opened. Collective."""
    with world.agreeing("export()"):
        if world.rank == 0:
            refuse_changed(chain.manifest, manifest)
    text = _write(manifest, tables, partial(DeltaWriter, target, manifest, chain), world)
    delta = Delta.from_text(text)
    return Exported(target, delta.artifact, delta, before)


def _settle(sparsifier: BaseDataSparsifier | None) -> None:
    if sparsifier is not None and sparsifier.masks.enforcer is not None:
        # It may owe zeros to rows that no forward has read since a step.
        sparsifier.masks.enforcer.settle()


def _chain_of(since: Any) -> tuple[Path, ...]:
    """The folders that a delta follows; none for a whole export."""
    if since is None:
        return ()
    if isinstance(since, Exported):
        return (*since.since, since.path)
    folders = [since] if isinstance(since, (str, os.PathLike)) else list(since)
    if not folders:
        raise ValueError("Invalid since=[]: must begin with an artifact; None is a whole export.")
    return tuple(Path(os.path.abspath(folder)) for folder in folders)


def _checked(dtype: Any, scale: Any) -> tuple[Dtype, Scale]:
    chosen: Any = choice("dtype", dtype, LARGEST)
    by: Any = choice("scale", scale, ("row", "column"))
    if by == "column" and chosen != "int4":
        raise ValueError(f"Invalid scale='column' with dtype={chosen!r}: it is for 'int4' alone.")
    return chosen, by


def _coded_training(sparse: Any, dtype: Dtype) -> CodedTraining | None:
    coded = sparse if isinstance(sparse, CodedTraining) else None
    if (coded is None) == (dtype == "codes"):
        raise ValueError(
            f"Invalid sparse of type {type(sparse).__name__} with dtype={dtype!r}: what quantize()"
            " returned is exported as 'codes', and nothing else is."
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
    return Table(
        rows=rows,
        kept=int(source.kept.count_nonzero()),
        dim=dim,
        pooling=source.pooling,
        dtype="fp32" if dtype == "codes" and source.codes is None else dtype,
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
    checks: dict[str, Mapping[str, int | float]] = {}
    scales: dict[str, Tensor] = {}
    with ExitStack() as stack:
        with world.agreeing("export()"):
            if world.rank == 0:
                writer = stack.enter_context(writing())
        bar = stack.enter_context(_counted_once(manifest, shown=world.rank == 0))
        for name, source in sources.items():
            table = manifest.tables[name]
            if table.scale == "column":
                _stream(world, source, partial(_choose_scales, scales, name, table), bar)
            write = partial(_write_table, writer, name, table, source, scales)
            _stream(world, source, write, bar)
        with world.agreeing("export()"):
            if writer is not None:
                writer.seal()
        for name, source in sources.items():
            # The model is read again, so that a bad message of the first time is found too.
            _stream(world, source, partial(_compare, writer, name, source, checks), bar)
        with world.agreeing("export()"):
            if writer is not None:
                text = writer.publish(checks)
    return str(world.all_gather_json(text)[0])


def _stream(world: Group, source: ServedTable, consume: Consume, bar: Bar) -> None:
    """Stream a table to rank 0, where ``consume`` gets its chunks. Collective; what it raises is
    raised on all ranks."""
    chunks = _counted(source.chunks(), bar)
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


@contextmanager
def _counted_once(manifest: Manifest, *, shown: bool) -> Iterator[Bar]:
    """Yield a function that counts streamed rows on a progress bar."""
    tables = manifest.tables.values()
    # Rows are streamed to be written, and again to be verified; before that for scales of columns.
    passes = 3 if any(table.scale == "column" for table in tables) else 2
    rows = sum(table.stored for table in tables)
    with progress(f"export {manifest.dtype}", rows, "rows", shown=shown) as bar:
        yield lambda streamed: bar(streamed / passes)


def _counted(chunks: Iterator[Tensor], bar: Bar) -> Iterator[Tensor]:
    for rows in chunks:
        yield rows
        bar(len(rows))


def _choose_scales(
    scales: dict[str, Tensor], name: str, table: Table, chunks: Iterator[Tensor]
) -> None:
    spread = ColumnSpread(table.dim)
    for rows in chunks:
        spread.add(rows)
    scales[name] = spread.scales()


def _write_table(
    writer: WholeWriter | DeltaWriter,
    name: str,
    table: Table,
    source: ServedTable,
    scales: Mapping[str, Tensor],
    chunks: Iterator[Tensor],
) -> None:
    writer.start(name, source.kept)
    if source.rotation is not None:
        writer.add_whole(name, "rotation", source.rotation)
    if table.scale == "column":
        writer.add_whole(name, "scales", scales[name])
    if source.books is not None:
        writer.add_whole(name, "books", source.books)
    for rows in chunks:
        writer.add_rows(name, encode(rows, table.dtype, scales.get(name)))


def _compare(
    writer: WholeWriter | DeltaWriter,
    name: str,
    source: ServedTable,
    checks: dict[str, Mapping[str, int | float]],
    chunks: Iterator[Tensor],
) -> None:
    check = writer.check(name, source)
    for rows in chunks:
        check.add(rows)
    checks[name] = check.result()
