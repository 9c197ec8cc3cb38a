"""`export()`: the tables of a model, without what masks remove, as an artifact on disk.

Everything is checked on all ranks before anything is written. Then tables are streamed to rank 0,
chunk by chunk and one after the other, which encodes, compares and writes them; the written files
are read back; and last the artifact gets its name. An error of rank 0 waits until the table's
messages are through, and is raised on all ranks. Files depend on the weights and masks alone: not
on the sharding, nor on the number of ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dist_sparse
from dist_sparse.checks import choice, hex_of, refuse
from dist_sparse.codes.quantize import CodedTraining, sparsifier_or_empty
from dist_sparse.groups import Group, world_group
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    StrPath,
    all_kept,
    bytes_of,
    check_new,
    folders_of,
    ids_of,
    memory_of,
    path_of,
    rows_of,
    sum_of_rows,
    update_checksum,
    words_of,
)
from dist_sparse.serving.chain import Chain, MappedTable, compare_rows, open_chain
from dist_sparse.serving.encodings import ENCODINGS, ColumnSpread, Dtype, encode
from dist_sparse.serving.manifest import (
    PER_ROW,
    Delta,
    Manifest,
    Scale,
    Table,
    TableDelta,
    delta_summary,
    refuse_changed,
    summary,
)
from dist_sparse.serving.sources import (
    ServedTable,
    check_zero,
    model_lookups,
    note_delta,
    refuse_range,
    refuse_replaced,
    registered_tables,
    served_tables,
    with_changes,
)
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData, check_data
from dist_sparse.text import Bar, progress
from dist_sparse.training.sparsify import SparseTraining


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
    path: StrPath,
    dtype: Dtype = "fp32",
    scale: Scale = "row",
    since: StrPath | Sequence[StrPath] | Exported | None = None,
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
            whose written rows were noted, which ids have rows, and rows that changed: damage of
            other rows is found by what loads, checks or merges the chain.

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
    world = world_group()
    chain: Chain | None = None
    with world.agreeing("export()") as facts:
        # Any: what sparsify() and quantize() return and a sparsifier have no base in common.
        given: Any = sparse
        is_coded = isinstance(sparse, CodedTraining)
        sparsifier = given.sparsifier if is_coded else sparsifier_or_empty(given)
        chosen, by = _checked(dtype, scale, is_coded)
        # The working directory may change later.
        target = Path(os.path.abspath(path_of("path", path)))
        before = _folders(since)
        located = sorted(ModelTables(model, slots=True).locate(), key=lambda data: data.name)
        facts["tables of sparse"] = sorted(sparsifier.data_groups)
        facts["path, dtype, scale"] = [os.fspath(path), chosen, by]
        facts["since"] = [str(each) for each in before]
        # Ranks that disagree in these would wait for messages that no rank sends.
        facts.update({f"table {data.name!r}": _where(data) for data in located})
        collections, lookups = model_lookups(model, located)
        registered = registered_tables(model, sparsifier, located)
        if world.rank == 0:
            check_new(path)
            # Of tables whose changes are noted nothing else of it is read: see DeltaWriter.
            chain = open_chain(*before, verify=False) if before else None
    tables = served_tables(located, lookups, sparsifier, registered)
    with world.agreeing("export()"):
        # An enforcer may owe zeros to rows that no forward has read since a step.
        sparsifier.masks.hooks.settle()
        if is_coded:
            tables = _with_codes(tables, given)
        manifest = Manifest(
            dist_sparse=dist_sparse.__version__,
            dtype="codes" if is_coded else chosen,
            collections=tuple(collections),
            tables={name: table.planned(chosen, by) for name, table in tables.items()},
            bytes=0,
        )
        if chain is not None:
            refuse_changed(chain.manifest, manifest)
            refuse_replaced(sparsifier, before, chain.manifest.hash)
    tables = with_changes(tables, sparsifier, registered, before)
    check_zero(sparsifier, tables, registered)
    text = _write(target, manifest, tables, chain, world)
    if not before:
        return Exported(target, Manifest.from_text(text))
    delta = Delta.from_text(text)
    # New codes and new scales of columns change rows that training has not written.
    if manifest.dtype != "codes" and by == "row":
        note_delta((*before, target), delta.artifact.hash, tables, sparsifier)
    return Exported(target, delta.artifact, delta, before)


def _checked(dtype: Any, scale: Any, is_coded: bool) -> tuple[Dtype, Scale]:
    chosen: Any = choice("dtype", dtype, ENCODINGS)
    by: Any = choice("scale", scale, ("row", "column"))
    scaled = f"Invalid scale='column' with dtype={chosen!r}: it is for 'int4' alone."
    coded = "Invalid sparse with dtype='codes': must be what quantize() returned."
    refuse({scaled: by == "column" and chosen != "int4", coded: chosen == "codes" and not is_coded})
    return chosen, by


def _folders(since: Any) -> tuple[Path, ...]:
    """Return the folders that a delta follows; none for a whole export."""
    if isinstance(since, Exported):
        return (*since.since, since.path)
    if since in (None, [], ()):
        # An empty list is the history of a job that has published nothing yet.
        return ()
    return tuple(Path(os.path.abspath(folder)) for folder in folders_of("since", since))


def _where(data: ShardedData) -> list[Any]:
    """Return where a table is stored, and refuse one of other ranks than rank 0."""
    check_data(data)
    if 0 not in (data.ranks or (0,)):
        raise ValueError(
            f"Table {data.name!r} is on ranks {data.ranks}; export() needs rank 0 among them."
        )
    return [data.shape, str(data.dtype), data.ranks, data.tiling]


def _with_codes(tables: dict[str, ServedTable], coded: CodedTraining) -> dict[str, ServedTable]:
    codes, found = coded.coded(), dict(tables)
    strange = sorted(codes.keys() - tables.keys())
    if strange:
        raise ValueError(f"The codes are of {strange}, which are no tables of the model.")
    for name, data in codes.items():
        found[name] = replace(tables[name], rows=data, books=coded.books[name])
    return found


def _write(
    path: Path,
    manifest: Manifest,
    sources: Mapping[str, ServedTable],
    chain: Chain | None,
    world: Group,
) -> str:
    """Write, check and publish; return the text of the manifest that was written. Collective.

    Rank 0 alone has a writer. The others go through the same steps: to send their rows, and to
    raise its errors.
    """
    writer: ArtifactWriter | None = None
    text = None
    rows = sum(table.stored for table in manifest.tables.values())
    with ExitStack() as stack:
        with world.agreeing("export()"):
            if chain is not None:
                writer = stack.enter_context(DeltaWriter(path, manifest, chain, sources))
            elif world.rank == 0:
                writer = stack.enter_context(ArtifactWriter(path))
                writer.begin(manifest.tables)
        shown = progress(f"export {manifest.dtype}", rows, "rows", shown=world.rank == 0)
        bar = stack.enter_context(shown)
        for name, source in sources.items():
            table = manifest.tables[name]
            whole = source.whole(table)
            if table.scale == "column":
                # Scales are chosen from all rows, which are streamed once more for them.
                spread = ColumnSpread(table.dim)
                with _streaming(world, source) as chunks:
                    for some in chunks:
                        refuse_range(name, some, table.dtype)
                        spread.add(some)
                whole["scales"] = spread.scales()
            with _streaming(world, source) as chunks:
                if writer is not None:
                    _write_table(writer, name, table, source, whole, bar, chunks)
        with world.agreeing("export()"):
            if writer is not None:
                text = writer.finish(manifest).to_text()
    return str(world.all_gather_json(text)[0])


@contextmanager
def _streaming(world: Group, source: ServedTable) -> Iterator[Iterator[Tensor]]:
    """Stream the chunks of a table to rank 0; other ranks get none. Collective; what is raised
    inside is raised on all ranks."""
    chunks = source.chunks()
    error: Exception | None = None
    try:
        yield chunks
    except Exception as fault:
        error = fault
    # The other ranks wait for messages until the table is through, so the error waits too.
    deque(chunks, maxlen=0)
    with world.agreeing("export()"):
        if error is not None:
            raise error


def _write_table(
    writer: ArtifactWriter,
    name: str,
    table: Table,
    source: ServedTable,
    whole: Mapping[str, Tensor],
    bar: Bar,
    chunks: Iterator[Tensor],
) -> None:
    writer.add(name, whole)
    ids, first = source.ids(), 0
    for rows in chunks:
        refuse_range(name, rows, table.dtype)
        stored = encode(rows, table.dtype, whole.get("scales"))
        # The files are read back once they are written: these bytes are the ones that are served.
        compare_rows(name, first, rows, stored, table)
        parts = {key: stored[key].cpu() for key in PER_ROW & stored.keys()}
        writer.add(name, parts, ids[first : first + len(rows)])
        first += len(rows)
        bar(len(rows))
    if first != len(ids):
        raise ValueError(f"Table {name!r}: {first} rows came, and it has {len(ids)}.")


# A delta, written in the place of a whole artifact: it gets the same tensors in the same order, and
# is read back and published like one.

_PIECE = 8 << 20  # bytes of spooled rows that are read at once


class DeltaWriter(ArtifactWriter):
    """Writes what changed since a chain.

    Changed rows wait in files without a name, beside the delta: the format begins with their
    number, which is known at the end.

    Args:
        path: the final name.
        manifest: of the whole artifact, without checksums.
        chain: what the delta follows.
        sources: the tables, by name. Where changes are noted, no row of the chain is read that was
            not written, and rows are not verified: only what says which ids have one.
    """

    def __init__(
        self, path: Path, manifest: Manifest, chain: Chain, sources: Mapping[str, ServedTable]
    ) -> None:
        for name, source in sources.items():
            chain.artifact.verify_table(name, rows=not source.is_noted)
            for delta in chain.deltas:
                delta.verify_table(name, rows=not source.is_noted)
        super().__init__(path)
        self._manifest, self._chain = manifest, chain
        self._tables: dict[str, _Changes] = {}

    def add(self, table: str, parts: Mapping[str, Tensor], ids: Tensor | None = None) -> None:
        """Compare the next rows of a table, or begin it with its tensors that are no rows."""
        if ids is not None:
            self._tables[table].add(ids, parts)
            return
        before, after = self._chain.table(table), self._manifest.tables[table]
        self._tables[table] = _Changes(before, after, parts, self.folder)

    def finish(self, manifest: Any) -> Any:
        """Write what was found, publish it, and return the manifest of the delta.

        Args:
            manifest: as it was given.
        """
        found = {name: changes.result() for name, changes in self._tables.items()}
        after = {name: change.after for name, change in found.items()}
        artifact = replace(manifest, tables=after, bytes=bytes_of(after))
        self.begin(found)
        for name, changes in self._tables.items():
            for key, part in changes.parts():
                self.append(f"{name}.{key}", part)
        base = self._chain.artifact.manifest.hash
        previous = self._chain.manifest.hash
        return super().finish(Delta(base=base, previous=previous, artifact=artifact, tables=found))


class _Changes:
    """What changed in a table, found as its rows go by.

    Args:
        before: the table that the delta follows.
        after: without checksums.
        whole: tensors that are no rows, and the bitmap of the ids that are kept now.
        folder: of files without a name.
    """

    def __init__(
        self, before: MappedTable, after: Table, whole: Mapping[str, Tensor], folder: Path
    ) -> None:
        self._before, self._after, self._now = before, after, whole
        words = whole.get("kept", all_kept(after.rows))
        self._gone = torch.cat([*ids_of(before.index.words & ~words, after.rows)])
        self._whole = {}
        for key, tensor in before.whole.items():
            if not torch.equal(whole[key], tensor):
                self._whole[key] = whole[key]
        self._came = 0
        self._found = [torch.empty(0, dtype=torch.int32)]
        self._spools, self._sums = {}, {}
        for key, part in before.gather(self._gone).items():
            # Open until the delta is written.
            self._spools[key] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            # Of the rows that stay, come and go: rows of the artifact before are not read for it.
            self._sums[key] = int(before.entry.checksums[key], 16) - sum_of_rows(self._gone, part)

    def add(self, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        had_one = rows_of(self._before.index, ids) >= 0
        old, changed = self._before.gather(ids[had_one]), ~had_one
        for key, part in parts.items():
            differs = words_of(part[had_one]) != words_of(old[key])
            changed[had_one] |= differs.any(1)
        self._came += int((~had_one).count_nonzero())
        self._found.append(ids[changed].int())
        for key, part in parts.items():
            held = part[changed]
            out = sum_of_rows(ids[had_one & changed], old[key][changed[had_one]])
            self._sums[key] = update_checksum(self._sums[key] - out, held, ids[changed])
            self._spools[key].write(memory_of(held))

    def result(self) -> TableDelta:
        sums = self._sums | {key: update_checksum(0, part) for key, part in self._now.items()}
        checksums = {key: hex_of(sums[key] % 2**64) for key in self._after.layout()}
        return TableDelta(
            after=replace(self._after, checksums=checksums),
            rows=sum(map(len, self._found)),
            came=self._came,
            gone=len(self._gone),
            whole=tuple(self._whole),
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the delta, rows as bytes and a few at a time."""
        yield "ids", torch.cat(self._found)
        yield "gone", self._gone.int()
        yield from self._whole.items()
        for key, spool in self._spools.items():
            with spool:
                spool.seek(0)
                while raw := spool.read(_PIECE):
                    yield key, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
