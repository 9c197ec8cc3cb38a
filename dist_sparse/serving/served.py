"""Collections of an artifact as modules: :func:`load_served`.

Loading needs only torch. Lookups use FBGEMM's operator if FBGEMM is installed; TorchRec is imported
when a KeyedJaggedTensor is passed. A :class:`Served` is what users call. It owns a ``lookup``,
a module from tensors to tensors, which is the part that ``torch.export`` can save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.checks import choice, refuse
from dist_sparse.compaction.row_index import (
    REMOVED,
    RowIndex,
    RowIndexes,
    UnknownLookups,
    check_ids,
)
from dist_sparse.serving.artifact import (
    Folders,
    Opened,
    StrPath,
    absolute_path,
    all_kept,
    folders_of,
    open_artifact,
)
from dist_sparse.serving.chain import MappedTable, index_after, move_rows, open_next
from dist_sparse.serving.lookup import (
    FbgemmLookup,
    JaggedRows,
    LibtorchLookup,
    QuantizedCollection,
    RowLookup,
    StoredTable,
    StoredTables,
    to_fbgemm,
    to_torchrec,
)
from dist_sparse.serving.manifest import Collection, Delta, Manifest
from dist_sparse.torchrec import kernels

# How ids out of range are served; see load_served().
UnknownIds = Literal["zero", "raise"]


class ServedLookup(nn.Module):
    """Find the rows of ids and read them: base class of the modules that are exported.

    Args:
        tables: the tables, by name.
        collection: the manifest's entry of the collection.
        fbgemm: whether lookups use FBGEMM's operator if it supports the tables.
        unknown: how ids out of range are served: see :func:`load_served`. An exported graph does
            not count them.
    """

    def __init__(
        self, tables: StoredTables, collection: Collection, fbgemm: bool, unknown: str
    ) -> None:
        super().__init__()
        self._collection, self._fbgemm, self.unknown = collection, fbgemm, unknown
        self._names = list(collection.looked_up)
        self.dims = [tables[name].entry.columns for name in self._names]
        self.index = self._build_index(tables)
        self.row_lookup = self._build_row_lookup(tables)
        num_ids = {name: table.entry.rows for name, table in tables.items()}
        self.unknown_lookups = UnknownLookups(num_ids, self._names)
        self._set_tables(tables)

    def _set_tables(self, tables: StoredTables) -> None:
        """Remember what :meth:`tables` can't read back from the modules."""
        # self.row_lookup and self.index have copied rows and indexes. A reference to the originals
        # would keep them in memory a second time, so an index of no rows takes their place.
        no_index = RowIndex(all_kept(0), 0)
        self._tables = {
            name: replace(table, rows={}, index=no_index) for name, table in tables.items()
        }

    def _build_index(self, tables: StoredTables) -> RowIndexes:
        names = list(tables)
        return RowIndexes(
            # If no row was removed, ids are rows.
            [
                table.index if table.entry.kept < table.entry.rows else None
                for table in tables.values()
            ],
            [table.entry.rows for table in tables.values()],
            [names.index(name) for name in self._names],
        )

    def _build_row_lookup(self, tables: StoredTables) -> RowLookup:
        # One FBGEMM call reads all tables, so a single table without a kernel rules it out.
        uses_fbgemm = self._fbgemm and all(table.has_kernel for table in tables.values())
        lookup_class = FbgemmLookup if uses_fbgemm else LibtorchLookup
        return lookup_class(tables, self._names)

    def tables(self) -> dict[str, StoredTable]:
        """Return the tables as they are now: live views of their rows, and a copy of their indexes
        on the CPU."""
        indexes = self.index.tables()
        tables = {}
        for number, (name, table) in enumerate(self._tables.items()):
            entry = table.entry
            # Spare capacity follows the stored rows.
            stored = self.row_lookup.stored(name)
            rows = {key: part[: entry.stored] for key, part in stored.items()}
            index = indexes.get(number)
            if index is None:
                index = RowIndex(all_kept(entry.rows), entry.rows, entry.default_row)
            tables[name] = replace(table, rows=rows, index=index.cpu())
        return tables

    def copy_to_cpu(self) -> ServedLookup:
        """Return a lookup of the same tables, without spare capacity, on the CPU."""
        tables = {name: replace(table, spare_capacity=0) for name, table in self.tables().items()}
        return type(self)(tables, self._collection, self._fbgemm, self.unknown).cpu()

    def prepare_update(self, delta: Opened[Delta]) -> Callable[[], None]:
        """Return a function that applies a delta to the tables. Until it is called, lookups return
        what they returned before.

        What is slow, and what may be refused, is done here: lookups wait while the returned
        function runs.

        Raises:
            ValueError: the delta does not fit the rows; names its folder and table.
        """
        before = self.tables()
        after = {}
        rebuilds = False
        for name, table in before.items():
            change = delta.manifest.tables[name]
            tensors = delta.tensors(name)
            replaced = {key: tensors[key] for key in change.whole}
            # A manifest has one pooling per table, and another collection may pool it differently.
            entry = replace(change.after, pooling=table.entry.pooling)
            index = index_after(delta, name, table.index)
            spare = table.capacity - entry.stored
            is_full = spare < 0
            if is_full:
                # A quarter more than needed, so that the next deltas fit.
                spare = entry.stored // 4
            # Rows are moved in place if they fit. Books, scales and rotations are copied into the
            # lookup when it is built.
            rebuilds |= is_full or bool(replaced)
            whole = {**table.whole, **replaced}
            after[name] = replace(
                table, entry=entry, whole=whole, index=index, spare_capacity=spare
            )
        device = self.index.words.device
        new_index = self._build_index(after).to(device)
        new_lookup = self._build_row_lookup(after).to(device) if rebuilds else self.row_lookup

        def apply_update() -> None:
            # A new lookup was filled with the old rows, in the order of before[name].index too.
            for name, table in after.items():
                rows = new_lookup.stored(name)
                move_rows(rows, before[name].index, table.index, delta.tensors(name))
            self._set_tables(after)
            self.index, self.row_lookup = new_index, new_lookup

        return apply_update

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        """Look up the tensors that :meth:`Served.forward` takes."""
        if lengths is None or (self._collection.weighted and weights is None):
            raise ValueError(
                f"{self._collection.path!r} takes ids and their lengths or offsets, and weights if"
                " it is weighted."
            )
        # FBGEMM would read behind weights that are too few.
        text = "Weights must have the shape of the ids."
        refuse({text: weights is not None and weights.shape != ids.shape})
        return self(ids, lengths, weights)

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of a call with some ids, from which ``torch.export`` traces."""
        return (ids,)

    def _read(
        self, ids: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Find the rows of ids, and return them pooled. The other arguments are those of
        :class:`JaggedRows`."""
        check_ids(ids)
        rows, known = self.index(ids, counts)
        # A traced graph has no values to count: its branches are fixed.
        is_traced = torch.compiler.is_compiling()
        if is_traced or not known.all():
            if not is_traced:
                described = self.unknown_lookups.add(ids, ~known, counts.tolist())
                if self.unknown == "raise":
                    raise ValueError("Out of range: " + "; ".join(described.values()) + ".")
            rows = rows.masked_fill(~known, REMOVED)
        # FBGEMM ignores strides.
        weights = None if weights is None else weights.contiguous()
        batch = JaggedRows(rows, offsets, counts, weights)
        pooled: Tensor = self.row_lookup(batch)
        return pooled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedLookup:
        """Ignore changes of dtype: ``.half()`` or ``.to(dtype)`` of a model around this module
        would round scales, and removed weights would no longer decode to 0. Called by
        ``torch.nn.Module.to()`` and the like."""

        def move_only(tensor: Tensor) -> Tensor:
            # fn() is opaque: an empty part shows which dtype and device it leads to.
            probe = fn(tensor[:0])
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(move_only, recurse)  # type: ignore[no-untyped-call]
        return self


class CollectionLookup(ServedLookup):
    """Lookups of several features: values and lengths as in a KeyedJaggedTensor."""

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return pooled rows, float32 ``(batch, columns of all features)``, or of sequences the row
        of each id, ``(n, columns)``.

        Args:
            values: ids, int32 or int64 ``(n,)``, feature after feature.
            lengths: int32 or int64 ``(features * batch,)``: how many ids each bag has, feature
                after feature.
            weights: float32 ``(n,)``, a factor for each id, of a weighted collection.
        """
        offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        offsets = _check_offsets(offsets, values.size(0))
        counts = lengths.view(len(self._names), -1).sum(1)
        return self._read(values, offsets, counts, weights)

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        args = ids, torch.ones_like(ids), torch.ones(len(ids))
        return args if self._collection.weighted else args[:2]


class EmbeddingBagLookup(ServedLookup):
    """Lookups of one table: ids and offsets as in ``torch.nn.EmbeddingBag``."""

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return pooled rows, float32 ``(bags, columns)``.

        Args:
            ids: int32 or int64 ``(n,)``, bag after bag.
            offsets: int32 or int64 ``(bags,)``, where bags begin, and with ``include_last_offset``
                where the last ends.
            weights: float32 ``(n,)``, a factor for each id.
        """
        offsets = offsets.int()
        if not self._collection.include_last_offset:
            last = torch.full((1,), ids.size(0), dtype=torch.int32, device=ids.device)
            offsets = torch.cat([offsets, last])
        offsets = _check_offsets(offsets, ids.size(0))
        # The last offset is the number of ids, all of one feature.
        return self._read(ids, offsets, offsets[-1:], weights)

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        if ids.dim() == 2:
            # A bag in each row.
            refuse({"Ids of shape (bags, n) take no offsets.": lengths is not None})
            bags, size = ids.size()
            # include_last_offset adds one more offset: the end of the last bag.
            ends = bags + self._collection.include_last_offset
            lengths = torch.arange(ends, device=ids.device) * size
            ids = ids.reshape(-1)
            if weights is not None:
                weights = weights.reshape(-1)
        return super().look_up(ids, lengths, weights)

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        return ids, torch.arange(len(ids) + self._collection.include_last_offset)


class EmbeddingLookup(ServedLookup):
    """Lookups of one table: ids as in ``torch.nn.Embedding``."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the row of each id, float32 ``(*ids.shape, columns)``; ``ids`` are int32 or int64,
        of any shape."""
        # One bag of all ids. The pooling of this kind of lookup is "none".
        flat = ids.reshape(-1)
        count = torch.full((1,), flat.size(0), dtype=torch.int32, device=ids.device)
        rows = self._read(flat, F.pad(count, (1, 0)), count)
        return rows.view(ids.size() + rows.size()[1:])

    def look_up(self, ids: Tensor, *_: Tensor | None) -> Any:
        return self(ids)


def _check_offsets(offsets: Tensor, count: int) -> Tensor:
    """Refuse offsets that do not begin with 0 and end with ``count``, and return them clamped to
    ``[0, count]``: FBGEMM's operator does not check them, and would read any memory that they point
    to."""
    message = "Lengths must add up to the number of ids; offsets begin with 0, and end with it."
    if torch.compiler.is_compiling():
        # A branch on a value can't be traced. This assertion becomes a node of the graph.
        torch._assert_async((offsets[-1] == count) & (offsets[0] == 0), message)
    elif (int(offsets[0]), int(offsets[-1])) != (0, count):
        raise ValueError(message)
    # Only two offsets were checked: negative lengths may move the others out of range.
    return offsets.clamp(0, count)


class Served(nn.Module):
    """A collection of an artifact: looks its tables up, as the module that was exported did.

    Args:
        manifest: the manifest of the artifact.
        collection: the manifest's entry of the collection.
        lookup: the lookup of its tables.

    Attributes:
        lookup: the module that is called and exported; tensors in, a tensor out.
        features: names, in the order of values and lengths. A feature of two tables is listed
            twice.
        outputs: keys of the results, in the same order.
        dims: columns of the results, likewise.
    """

    def __init__(self, manifest: Manifest, collection: Collection, lookup: ServedLookup) -> None:
        super().__init__()
        self._collection, self._gate = collection, Gate()
        self._manifest, self._base_hash = manifest, manifest.hash
        self.lookup = lookup
        self.features = [feature.name for feature in collection.features]
        self.outputs = list(collection.outputs)
        self.dims = lookup.dims

    def apply(self, delta: Any) -> Served:
        """Apply the next delta, in place, while other threads look up.

        A lookup sees all of a delta or nothing: the update waits for running lookups, and new
        lookups wait until rows are moved and written in place. Peak memory is the delta itself,
        a new index (half a byte per original id, and one byte while bits are counted), and
        65,536 rows. If moving them fails (out of memory, an interrupt), lookups and deltas raise a
        RuntimeError from then on. A table is loaded with capacity for a sixteenth more rows. If it
        outgrows that, or books, scales or a rotation change, its rows are copied once, with
        capacity for a quarter more. A refused delta changes nothing.

        Modules that :meth:`to_pt2`, :meth:`to_fbgemm` and :meth:`to_torchrec` have returned are not
        updated, and direct calls of :attr:`lookup` do not wait. Each collection of a model is
        updated on its own.

        Args:
            delta: the folder that ``export(since=)`` wrote.

        Returns:
            self.

        Raises:
            ValueError: ``delta`` is no path; the folder is no delta, is damaged, out of order, or
                of another base (names it).
            OSError: a file can't be read.
            RuntimeError: an earlier delta was applied in part.
        """
        if callable(delta):
            # torch.nn.Module.apply(), which calls a function with each module.
            return super().apply(delta)
        with self._gate.updating:
            folder = absolute_path("delta", delta)
            opened = open_next(folder, self._manifest, self._base_hash, verify=False)
            # Verified in memory: the file may be overwritten before its rows are moved.
            apply_update = self.lookup.prepare_update(opened.read().verify())
            with self._gate.update():
                apply_update()
            self._manifest = opened.manifest.artifact
        return self

    def forward(
        self, ids: Any, lengths: Tensor | None = None, weights: Tensor | None = None
    ) -> Any:
        """Look ids up. Ids are not changed; ids out of range follow ``load_served(unknown=...)``.

        Args:
            ids: a KeyedJaggedTensor (of a collection), or a tensor, int32 or int64: its values in
                the order of :attr:`features`, or what the torch module took.
            lengths: for a collection, int32 or int64 ``(features * batch,)``; for an
                ``EmbeddingBag`` its offsets, or None with ids ``(bags, ids of each)``; for an
                ``Embedding`` None.
            weights: a factor for each id, in the shape of ``ids``.

        Returns:
            For a KeyedJaggedTensor what the collection returned: a KeyedTensor, or a dict of
            JaggedTensors. For tensors float32 ``(bags, columns)``, or each id's row.

        Raises:
            RuntimeError: a delta was applied in part.
            ValueError: lengths or offsets do not fit the ids; a KeyedJaggedTensor for a module of
                torch, a feature or weights are missing, or batches differ in size by feature; with
                ``unknown="raise"`` an id is out of range (names table, id and rows).
        """
        with self._gate.lookup():
            if isinstance(ids, Tensor):
                return self.lookup.look_up(ids, lengths, weights)
            if not self.features:
                raise ValueError(
                    f"Table {self._collection.path!r} takes tensors, as its torch.nn module did,"
                    f" not {type(ids)}."
                )
            from dist_sparse.torchrec import port

            values, lengths, weights = port.unpack_ids(
                ids, self.features, self._collection.weighted
            )
            out = self.lookup(values, lengths, weights)
            is_pooled = self._collection.kind == "bag"
            return port.pack_outputs(out, lengths, self.outputs, self.dims, is_pooled)

    @property
    def unknown(self) -> dict[str, int]:
        """The number of lookups of ids out of range since the artifact was loaded, by table."""
        return dict(self.lookup.unknown_lookups.counts)

    def to_pt2(self, file: StrPath) -> None:
        """Save :attr:`lookup` by ``torch.export``, for ``torch.export.load`` or AOTInductor.

        It takes tensors, like :meth:`forward` called with tensors. The number of ids and of bags
        may be any when it is called, 0 and 1 included. Where it uses FBGEMM's operator, a C++
        program must load FBGEMM's library first; ``load_served(path, fbgemm=False)`` gives one that
        needs libtorch alone.

        Raises:
            ValueError: the artifact was loaded with ``unknown="raise"``.
        """
        if self.lookup.unknown == "raise":
            raise ValueError(
                "Invalid unknown='raise': a saved lookup can't raise; load it with 'zero'."
            )
        any_size = {0: torch.export.Dim.DYNAMIC}
        # Two ids for each feature: torch.export may specialize on an example of size 0 or 1.
        args = self.lookup.example(torch.zeros(2 * len(self.dims), dtype=torch.int64))
        with self._gate.lookup():
            lookup = self.lookup.copy_to_cpu()
        # torch.export guards against sizes 0 and 1 by default. No lookup depends on them, and
        # batches may be empty: torch has no public switch for this.
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = torch.export.export(lookup, args, dynamic_shapes=(any_size,) * len(args))
            torch.export.save(program, str(file))

    def to_fbgemm(self) -> nn.Module:
        """Return FBGEMM's own module over the stored rows, on the CPU:
        ``IntNBitTableBatchedEmbeddingBagsCodegen``, with its remap of ids.

        It takes ids, int64 ``(n,)``, and offsets, int64 ``(features * bags + 1,)``, of the features
        in the order of :attr:`features`, and returns what the artifact serves, bit for bit: removed
        ids are exactly 0. Ids out of range are read as id 0: a module around FBGEMM's, which is
        ``.tables``, clamps negative ones. A table with several features is copied for each of
        them. Tables with a scale per column and tables with codes become float16, and their means
        are equal to the last bit. If fewer than 1% of the ids have a row, the remap is FBGEMM's
        hash map: it takes fewer bytes than an array, and such a module can't be copied or pickled.

        Raises:
            ValueError: the collection has sums and means, a table was rotated alone, or it has 4
                bits and an odd number of columns.
            ImportError: FBGEMM is not installed.
        """
        with self._gate.lookup():
            return to_fbgemm(self._collection, self.lookup.tables())

    def to_torchrec(self) -> QuantizedCollection:
        """Return a module with TorchRec's quantized ``EmbeddingBagCollection`` over the stored
        rows, behind an index from ids to rows; on the CPU.

        It takes and returns what the collection did, bit for bit as the artifact serves it, but for
        means of tables with a scale per column or codes: they become float16, and are equal to the
        last bit.
        ``torchrec.inference.modules.shard_quant_model`` shards tables of 8 and 4 bits; its model
        loads the state of this one.

        Raises:
            ValueError: the collection looks up sequences or is a module of torch's, a table was
                rotated alone, or its rows have an odd number of bytes in 8 or 4 bits.
            ImportError: TorchRec is not installed.
        """
        with self._gate.lookup():
            return to_torchrec(self._collection, self.lookup.tables(), self.lookup.index)


@overload
def load_served(
    path: Folders,
    *,
    fbgemm: bool = True,
    unknown: UnknownIds = "zero",
    by_path: Literal[False] = False,
) -> Served: ...


@overload
def load_served(
    path: Folders,
    *,
    fbgemm: bool = True,
    unknown: UnknownIds = "zero",
    by_path: Literal[True],
) -> dict[str, Served]: ...


def load_served(
    path: Folders,
    *,
    fbgemm: bool = True,
    unknown: UnknownIds = "zero",
    by_path: bool = False,
) -> Served | dict[str, Served]:
    """Load an artifact that :func:`dist_sparse.export` wrote.

    Args:
        path: the folder; or an iterable of the folder and the deltas after it, in order.
        fbgemm: whether lookups use FBGEMM's operator if it is installed. Otherwise they are pure
            torch.
        unknown: how an id out of the range of its table is served, such as an id that is newer than
            the model. ``"zero"``: like a removed id, as a zero vector that adds nothing to a sum
            and counts in a mean (it never reads the default row). ``"raise"``: a ValueError names
            table, id and rows. In both cases the returned module's ``unknown`` counts them by
            table.
        by_path: return a dictionary from the paths of collections in the model to modules. A model
            with several collections gets it in any case; pass True so that type checkers know.

    Returns:
        A module that takes the same input as the collection, or a dictionary of such modules.
        Pooled columns are in the order of the collection's configurations; a sharded collection
        orders them by sharding type, so read both by key. A table that several collections look up
        is stored in each of them.

    Raises:
        ValueError: an argument is invalid; the folder is not an artifact, is damaged, or has
            another version; a delta is damaged, out of order, or of another base (names the file).
        OSError: a file can't be read.

    Example::

        >>> import tempfile, torch
        >>> from dist_sparse import DataNormSparsifier, export, load_served
        >>> weight = torch.tensor([[0.1, 0.2], [3.0, 4.0]])
        >>> model = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row", norm="L2")
        >>> names = sparsifier.add_model(model)
        >>> sparsifier.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exported = export(model, sparsifier, f"{folder}/served")
        ...     served = load_served(f"{folder}/served")
        >>> served(torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 2]))  # row 0 was removed
        tensor([[3., 4.],
                [6., 8.]])
    """
    unknown_ids: Any = choice("unknown", unknown, get_args(UnknownIds))
    fbgemm = fbgemm and kernels.available()
    folders = folders_of("path", path)
    refuse({f"Invalid path={path!r}: must name the folder of an artifact first.": not folders})
    artifact: Opened[Manifest] = open_artifact(folders[0])
    collections = {}
    for collection in artifact.manifest.collections:
        tables = _load_tables(artifact, collection)
        lookup = _LOOKUP_CLASSES[collection.kind](tables, collection, fbgemm, unknown_ids)
        collections[collection.path] = Served(artifact.manifest, collection, lookup)
    for delta in folders[1:]:
        for served in collections.values():
            served.apply(delta)
    if by_path or len(collections) != 1:
        return collections
    [only] = collections.values()
    return only


def _load_tables(artifact: Opened[Manifest], collection: Collection) -> dict[str, StoredTable]:
    """Return the tables of a collection, by name."""
    tables = {}
    for name in collection.tables:
        table = MappedTable(artifact, name)
        entry = table.entry
        if collection.kind in ("sequence", "embedding"):
            # The manifest may have the pooling of another collection with the same table.
            entry = replace(entry, pooling="none")
        # Deltas may add rows: leave capacity for a sixteenth more, but not for more than all ids.
        spare = min(entry.stored // 16, entry.rows - entry.kept)
        # Clone them: a view would keep the file mapped. The lookup copies the rows.
        whole = {key: part.clone() for key, part in table.whole.items()}
        tables[name] = StoredTable(entry, table.base_rows, whole, table.index, spare)
    return tables


_LOOKUP_CLASSES: dict[str, type[ServedLookup]] = {
    "bag": CollectionLookup,
    "sequence": CollectionLookup,
    "embedding_bag": EmbeddingBagLookup,
    "embedding": EmbeddingLookup,
}


class Gate:
    """A readers-writer lock: any number of lookups, or one update. An update goes first: it waits
    for running lookups only, and later lookups wait for it.

    Not reentrant: a lookup inside a lookup of the same thread could wait for an update that waits
    for the outer lookup.

    Attributes:
        updating: a lock for updates, held while the next one is prepared. Lookups do not take it.
    """

    def __init__(self, is_partial: bool = False) -> None:
        # An update has begun, and has not ended: if it raised, rows are wrong from then on.
        self._is_partial = is_partial
        # Each lookup holds it for a moment when it begins; an update holds it until its end.
        self._entrance = threading.Lock()
        # Guards the number of running lookups, and signals its changes.
        self._condition = threading.Condition()
        self._running = 0
        self.updating = threading.Lock()

    def __reduce__(self) -> tuple[type[Gate], tuple[bool]]:
        # Locks can't be copied or pickled: a copy of a module gets a gate of its own.
        return Gate, (self._is_partial,)

    def _refuse_partial(self) -> None:
        if self._is_partial:
            raise RuntimeError("A delta was applied in part: load the artifact again.")

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold updates back."""
        with self._entrance, self._condition:
            self._refuse_partial()
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Wait for running lookups, and hold later ones back. Call it within :attr:`updating`."""
        # Taking the entrance first stops new lookups: a steady stream of them would otherwise
        # starve the update.
        with self._entrance, self._condition:
            self._refuse_partial()
            self._condition.wait_for(lambda: not self._running)
            self._is_partial = True
            yield
            self._is_partial = False
