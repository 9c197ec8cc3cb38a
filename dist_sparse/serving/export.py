"""`export()`: write the tables of a model, without removed weights, as an artifact on disk.

1. All ranks check the model and the arguments. Nothing has been written then.
2. Tables are streamed to rank 0, one after the other and chunk by chunk. It encodes, compares and
   writes them.
3. Rank 0 reads the files back, and gives the artifact its name.

An error on rank 0 is raised on all ranks, after the last message of the table has arrived. The
files depend only on weights and masks, not on the sharding or the number of ranks.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

import dist_sparse
from dist_sparse.checks import choice
from dist_sparse.groups import Group, world_group
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    Folders,
    StrPath,
    absolute_path,
    check_new,
    folders_of,
)
from dist_sparse.serving.chain import Chain, compare_rows, open_chain
from dist_sparse.serving.comparing import ComparingWriter
from dist_sparse.serving.encodings import (
    ENCODINGS,
    ColumnSpread,
    Dtype,
    encode,
)
from dist_sparse.serving.manifest import (
    PER_ROW,
    Delta,
    Manifest,
    Scale,
    artifact_summary,
    delta_summary,
    refuse_changed,
)
from dist_sparse.serving.sources import (
    ServedTable,
    ServedTables,
    check_zero,
    has_weights_of,
    model_lookups,
    note_export,
    refuse_range,
    refuse_replaced,
    registered_tables,
    served_tables,
    sparsifier_or_empty,
    with_changes,
)
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import progress
from dist_sparse.training.sparsify import SparseTraining


@dataclass(frozen=True)
class Exported:
    """The folder that :func:`export` wrote, itself a path. ``print()`` shows each table's bytes
    before and after.

    Attributes:
        path: the folder.
        manifest: the manifest of the artifact, or for a delta of the artifact after it. It holds
            numbers such as ``manifest.tables["user"].bytes.after``.
        delta: the manifest of the delta, if the folder holds one; otherwise None.
        since: the folders that a delta follows: an artifact and the deltas after it.
    """

    path: Path
    manifest: Manifest
    delta: Delta | None = None
    since: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        shown = artifact_summary(self.manifest) if self.delta is None else delta_summary(self.delta)
        return f"{self.path}\n{shown}"

    def __fspath__(self) -> str:
        return str(self.path)


@runtime_checkable
class Coded(Protocol):
    """Tables that are looked up through codes, such as :func:`~dist_sparse.extras.codes.quantize`
    returns.

    Attributes:
        sparsifier: the owner of the masks of the same tables.
        books: the books of each table, float16 ``(groups, 256, columns of a group)``.
    """

    @property
    def sparsifier(self) -> BaseDataSparsifier: ...

    @property
    def books(self) -> Mapping[str, Tensor]: ...

    def located(self) -> list[ShardedData]:
        """Return the tables that have codes, as they are stored now. Local."""
        ...

    def coded(self) -> Mapping[str, ShardedData]:
        """Return their codes, as tables of bytes ``(rows, groups)``, sharded like the weights.
        Local."""
        ...


def export(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier | Coded | None,
    path: StrPath,
    dtype: Dtype = "fp32",
    scale: Scale = "row",
    since: Folders | None = None,
) -> Exported:
    """Write the tables of ``model``, without removed weights, to a folder that
    ``dist_sparse.load_served`` reads. Collective: every rank of the world must call it; rank 0
    writes.

    Rows that are removed whole are not stored; a bitmap records their ids. What masks remove within
    a kept row is stored as zeros, so masks finer than rows save no bytes. Tables that were never
    sparsified are stored whole. Every weight is compared with what its written bytes decode to, and
    the files are read back before the folder gets its name.

    The manifest records whether training read the weights of a batch. A sharded collection that is
    not weighted reads them if there are any. The served module does the same, or refuses the batch.
    It also refuses batches whose sizes differ by feature, and batches with inverse indices: the
    model does not show these here.

    No rank holds more of a table than its own shards and a few chunks of 8 MiB. The model is not
    changed, except that removed weights are zeroed by an attached enforcer.

    Args:
        model: as it was sparsified, or compacted: a DistributedModelParallel, a DDP module or any
            module.
        sparse: what :func:`~dist_sparse.sparsify` returned, or a sparsifier; None for a model
            without removed rows, or whose removed rows :func:`~dist_sparse.compact` took out. If it
            is what :func:`~dist_sparse.extras.codes.quantize` returned, its tables are stored as
            codes.
        path: the new folder, whose missing parents are made; the same on every rank. Only rank 0
            writes to it.
        dtype: how weights are stored. ``"fp32"`` serves them bit for bit (for float64, the nearest
            float32), ``"fp16"`` the nearest float16, ``"int8"`` and ``"int4"`` the nearest point of
            each row's grid, which holds 0. Tables with codes serve bit for bit what lookups return.
            ``dtype`` applies to the other tables; with ``"codes"`` they are stored as ``"fp32"``.
        scale: ``"column"`` (``"int4"`` only) gives each column a grid for the whole table, instead
            of 4 bytes in every row: a row of 12 bytes holds 24 columns instead of 16. Tables are
            streamed once more, to choose the grids with the smallest squared errors; lookups are in
            pure torch, 2 to 4 times slower than FBGEMM's.
        since: the artifact that was published before, or the artifact and its deltas in order, as
            folders, or what the last :func:`export` returned. The folder is then a delta: the rows
            whose stored bytes have changed, the ids that came, and the ids that went. It takes
            ``load_served([base, delta])`` to what a whole export would serve, bit for bit. All
            weights are streamed and compared, with one exception. If this process wrote the last of
            these folders, tables with a fused optimizer on the CPU stream only the rows that the
            enforcer has seen written. So after writes that torch does not count (through ``.data``,
            numpy, or a collective on weights), call ``sparsifier.apply_masks()`` first. With
            ``scale="column"`` a scale that has changed may change the codes of all rows. Only rank
            0 reads these folders. In tables whose written rows were noted, it verifies which ids
            have rows, but reads the changed rows without verifying them: whatever loads, checks or
            merges the chain finds damaged rows.

    Raises:
        ValueError: something is at ``path``, a table or module can't be served, removed weights are
            not zero, weights are not finite or beyond what ``dtype`` holds, or ranks disagree;
            ``since`` is damaged, out of order, or of other tables, lookups or dtypes; on every
            rank, and nothing was written.
        OSError: the folder can't be written; nothing is left. On several ranks it is a ValueError
            that quotes it. If a rank fails after the folder got its name, for lack of memory, all
            ranks raise, and the folder is complete.

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
        coded = sparse if isinstance(sparse, Coded) else None
        sparsifier = sparsifier_or_empty(sparse) if coded is None else coded.sparsifier
        chosen, by = _check_dtype(dtype, scale, coded)
        target = absolute_path("path", path)
        before = _folders_before(since)
        located = sorted(ModelTables(model).locate(), key=lambda data: data.name)
        facts["tables of sparse"] = sorted(sparsifier.data_groups)
        facts["path, dtype, scale"] = [os.fspath(path), chosen, by]
        facts["codes"] = coded is not None
        facts["since"] = [str(folder) for folder in before]
        # If ranks disagreed about these, they would wait for messages that no rank sends.
        facts.update({f"table {data.name!r}": _placement(data) for data in located})
        collections, lookups = model_lookups(model, located)
        registered = registered_tables(model, sparsifier, located)
        if world.rank == 0:
            check_new(path)
            # Its rows are verified by ComparingWriter, except those that it does not read.
            chain = open_chain(*before, verify=False) if before else None
    with world.jointly("export()"):
        tables = served_tables(located, lookups, sparsifier, registered)
        with world.agreeing("export()"):
            # The enforcer zeroes dirty rows when a lookup reads them: some may still be dirty.
            sparsifier.masks.enforcer.settle()
            tables = _with_codes(tables, coded)
            manifest = Manifest(
                dist_sparse=dist_sparse.__version__,
                dtype=chosen if coded is None else "codes",
                collections=tuple(collections),
                tables={name: table.planned(chosen, by) for name, table in tables.items()},
                bytes=0,
            )
            if chain is not None:
                refuse_changed(chain.manifest, manifest)
                refuse_replaced(sparsifier, before, chain.manifest.hash)
        tables, are_recorded = with_changes(tables, sparsifier, before)
        # An enforcer that records writes has also kept removed weights at zero.
        if not are_recorded:
            check_zero(sparsifier, tables, registered)
        text = _write(target, manifest, tables, chain, world)
        delta = Delta.from_text(text) if before else None
        after = Manifest.from_text(text) if delta is None else delta.artifact
        note_export((*before, target), after, tables, sparsifier)
    return Exported(target, after, delta, before)


def _check_dtype(dtype: Any, scale: Any, coded: object) -> tuple[Dtype, Scale]:
    chosen: Any = choice("dtype", dtype, ENCODINGS)
    by: Any = choice("scale", scale, ("row", "column"))
    if by == "column" and chosen != "int4":
        raise ValueError(f"Invalid scale='column' with dtype={chosen!r}: it is for 'int4' alone.")
    if chosen == "codes" and not coded:
        raise ValueError("Invalid sparse with dtype='codes': must be what quantize() returned.")
    return chosen, by


def _folders_before(since: Any) -> tuple[Path, ...]:
    """Return the folders that a delta follows; none for a whole export."""
    if isinstance(since, Exported):
        return (*since.since, since.path)
    # A list may be empty: the history of a job that has published nothing yet.
    return () if since is None else tuple(folders_of("since", since))


def _placement(data: ShardedData) -> list[Any]:
    """Return how a table is sharded, or refuse a table without a shard on rank 0."""
    if 0 not in data.holders:
        raise ValueError(
            f"Table {data.name!r} is on ranks {data.ranks}; export() needs rank 0 among them."
        )
    return [data.shape, str(data.dtype), data.ranks, data.tiling]


def _with_codes(tables: ServedTables, coded: Coded | None) -> ServedTables:
    if coded is None:
        return tables
    codes = coded.coded()
    with_codes = dict(tables)
    for data in coded.located():
        name = data.name
        # Another model may have a table of the same name.
        if name not in tables or not has_weights_of(tables[name].data, data):
            raise ValueError(
                f"Table {name!r} of this model is not the one that has codes: export the model"
                " that quantize() was called with."
            )
        with_codes[name] = replace(tables[name], rows=codes[name], books=coded.books[name])
    return with_codes


def _write(
    path: Path,
    manifest: Manifest,
    sources: ServedTables,
    chain: Chain | None,
    world: Group,
) -> str:
    """Write, check and publish; return the text of the manifest that was written. Collective.

    Only rank 0 has a writer. The other ranks take the same steps, to send their rows and to raise
    the errors of rank 0.
    """
    writer: ArtifactWriter | None = None
    text = None
    rows = sum(table.stored for table in manifest.tables.values())
    with ExitStack() as stack:
        with world.agreeing("export()"):
            if chain is not None:
                writer = stack.enter_context(ComparingWriter(path, manifest, chain, sources))
            elif world.rank == 0:
                writer = stack.enter_context(ArtifactWriter(path))
                writer.begin(manifest.tables)
        shown = progress(f"export {manifest.dtype}", rows, "rows", shown=world.rank == 0)
        bar = stack.enter_context(shown)
        for name, source in sources.items():
            table = manifest.tables[name]
            whole = source.whole(table)
            if table.scale == "column":
                # Scales depend on all rows, so these are streamed twice.
                spread = ColumnSpread(table.dim)
                with _streaming(world, source) as chunks:
                    for chunk in chunks:
                        refuse_range(name, chunk, table.dtype)
                        spread.add(chunk)
                whole["scales"] = spread.scales()
            with _streaming(world, source) as chunks:
                if writer is None:
                    continue
                writer.add(name, whole)
                ids, first = source.ids(), 0
                for chunk in chunks:
                    refuse_range(name, chunk, table.dtype)
                    stored = encode(chunk, table.dtype, whole.get("scales"))
                    # The comparison covers what is served: the files are read back when complete.
                    compare_rows(name, first, chunk, stored, table)
                    parts = {key: stored[key] for key in PER_ROW & stored.keys()}
                    writer.add(name, parts, ids[first : first + len(chunk)])
                    first += len(chunk)
                    bar(len(chunk))
                assert first == len(ids), f"{name}: {first} rows came, and it has {len(ids)}"
        with world.agreeing("export()"):
            if writer is not None:
                text = writer.finish(manifest).to_text()
    return str(world.all_gather_json(text)[0])


def _noting_errors(chunks: Iterable[Tensor], failed: list[Exception]) -> Iterator[Tensor]:
    """Yield chunks; add the error that ends them to ``failed``."""
    try:
        yield from chunks
    except Exception as fault:
        failed.append(fault)
        raise


@contextmanager
def _streaming(world: Group, source: ServedTable) -> Iterator[Iterator[Tensor]]:
    """Stream the chunks of a table to rank 0; other ranks get none. Collective: an error inside the
    context is raised on all ranks."""
    failed: list[Exception] = []
    chunks = _noting_errors(source.chunks(), failed)
    error: Exception | None = None
    try:
        yield chunks
    except Exception as fault:
        if failed:
            # No more messages can follow: jointly() ends the messages of the other ranks.
            raise
        error = fault
    # The other ranks are still sending or receiving rows of the table. The rest is received and
    # dropped before the error is raised: an agreement in between would not match their messages.
    deque(chunks, maxlen=0)
    with world.agreeing("export()"):
        if error is not None:
            raise error
