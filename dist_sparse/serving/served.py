"""Collections of an artifact as modules: :func:`load_served`.

Loading needs only torch. Lookups use FBGEMM's operator if FBGEMM is installed; TorchRec is imported
when a KeyedJaggedTensor is passed. A :class:`Served` is what users call. It owns a ``lookup``,
a module from tensors to tensors, which is the part that ``torch.export`` can save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.checks import choice, flag
from dist_sparse.ids.row_index import (
    REMOVED,
    UNKNOWN,
    RowIndex,
    RowIndexes,
    Tally,
    UnknownLookups,
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
from dist_sparse.serving.chain import Deltas, MappedTable, apply_rows, index_after
from dist_sparse.serving.gate import Gate
from dist_sparse.serving.lookup import (
    FbgemmLookup,
    JaggedRows,
    LibtorchLookup,
    LookupCall,
    QuantizedCollection,
    RowLookup,
    StoredTable,
    TablesByName,
    to_fbgemm,
    to_torchrec,
    weights_rule,
)
from dist_sparse.serving.manifest import Collection, Delta, Manifest
from dist_sparse.tables.jagged import bag_offsets, check_ids, check_lengths
from dist_sparse.text import printable
from dist_sparse.torchrec import kernels

# How ids out of range are served; see load_served().
UnknownIds = Literal["zero", "raise"]


class ServedLookup(nn.Module):
    """Find the rows of ids and read them: base class of the modules that are exported.

    Args:
        tables: the tables, by name.
        collection: the manifest's entry of the collection.
        fbgemm: whether lookups use FBGEMM's operator if it supports the tables.
        unknown: how ids out of range are served: see :func:`load_served`.
        is_counting: whether lookups and removed ids are counted.

    Attributes:
        lookups: counts the looked-up ids of each table. An exported graph counts nothing.
        removed_lookups: counts the ids whose rows were removed.
        unknown_lookups: counts the ids out of range.
    """

    def __init__(
        self,
        tables: TablesByName,
        collection: Collection,
        fbgemm: bool,
        unknown: str,
        is_counting: bool,
    ) -> None:
        super().__init__()
        self._collection, self._fbgemm, self.unknown = collection, fbgemm, unknown
        self.is_counting = is_counting
        self._names = list(collection.looked_up)
        self.dims = [tables[name].entry.columns for name in self._names]
        self.index = self._build_index(tables)
        self.row_lookup = self._build_row_lookup(tables)
        self.lookups = Tally(dict.fromkeys(tables, 0))
        self.removed_lookups = Tally(dict.fromkeys(tables, 0))
        num_ids = {name: table.entry.rows for name, table in tables.items()}
        self.unknown_lookups = UnknownLookups(num_ids, self._names)
        self.weights_rule = weights_rule(collection, tables)
        self._set_tables(tables)

    def _set_tables(self, tables: TablesByName) -> None:
        """Remember what :meth:`tables` can't read back from the modules."""
        # self.row_lookup and self.index have copied rows and indexes. A reference to the originals
        # would keep them in memory a second time, so an index of no rows takes their place.
        no_index = RowIndex(all_kept(0), 0)
        self._tables = {
            name: replace(table, rows={}, index=no_index) for name, table in tables.items()
        }

    def _build_index(self, tables: TablesByName) -> RowIndexes:
        names = list(tables)
        return RowIndexes(
            # If no row was removed, ids are row numbers.
            [
                table.index if table.entry.kept < table.entry.rows else None
                for table in tables.values()
            ],
            [table.entry.rows for table in tables.values()],
            [names.index(name) for name in self._names],
        )

    def _build_row_lookup(self, tables: TablesByName) -> RowLookup:
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
        lookup = type(self)(tables, self._collection, self._fbgemm, self.unknown, self.is_counting)
        return lookup.cpu()

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
                apply_rows(rows, before[name].index, table.index, delta.tensors(name))
            self._set_tables(after)
            self.index, self.row_lookup = new_index, new_lookup

        return apply_update

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        """Look up the tensors that :meth:`Served.forward` takes."""
        if lengths is None:
            raise ValueError(
                f"{self._collection.path!r} takes ids and their lengths or offsets, and weights if"
                " it is weighted."
            )
        return self(ids, lengths, weights)

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of a call with some ids, from which ``torch.export`` traces."""
        return (ids,)

    def _read(
        self, ids: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Find the rows of ids, and return them pooled. The other arguments are the fields of
        :class:`JaggedRows`."""
        rows, known = self.index(ids, counts)
        if torch.compiler.is_compiling():
            # A traced graph has no values to count: its branches are fixed.
            rows = rows.masked_fill(~known, REMOVED)
        else:
            rows = self._count(ids, rows, known, counts)
        batch = JaggedRows(rows, offsets, counts, weights)
        pooled: Tensor = self.row_lookup(batch)
        return pooled

    def _count(self, ids: Tensor, rows: Tensor, known: Tensor, counts: Tensor) -> Tensor:
        """Count the lookups of a batch. Return its rows, with :data:`REMOVED` for ids out of
        range.

        Raises:
            ValueError: an id is out of range, with ``unknown="raise"``.
        """
        # It takes half the time of all().
        all_known = known.count_nonzero().item() == known.size(0)
        if not all_known:
            rows = rows.masked_fill(~known, UNKNOWN)
        if self.is_counting:
            sizes = counts.tolist()
            self.lookups.add(self._names, sizes)
            if self.index.any_removed:
                self.removed_lookups.add(self._names, self.index.count_removed(rows, sizes))
        if all_known:
            return rows
        described = self.unknown_lookups.add(ids, ~known, counts.tolist())
        if self.unknown == "raise":
            raise ValueError("Out of range: " + "; ".join(described.values()) + ".")
        return rows.masked_fill(~known, REMOVED)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedLookup:
        """Ignore changes of dtype: ``.half()`` or ``.to(dtype)`` of a model around this module
        would round scales, and removed weights would no longer decode to 0. Called by
        ``torch.nn.Module.to()`` and the like."""

        def move_only(tensor: Tensor) -> Tensor:
            # fn() is opaque: an empty part shows which dtype and device it leads to.
            probe = fn(tensor.new_empty(0))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(move_only, recurse)  # type: ignore[no-untyped-call]
        return self


class CollectionLookup(ServedLookup):
    """Lookups of several features: values and lengths as in a KeyedJaggedTensor."""

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return pooled rows, float32 ``(batch, columns of all features)``, or for sequences the
        row of each id, ``(n, columns)``.

        Args:
            values: ids, int32 or int64 ``(n,)``, feature after feature.
            lengths: int32 or int64 ``(features * batch,)``: how many ids each bag has, feature
                after feature.
            weights: floating-point ``(n,)``, a factor for each id.
        """
        weights = self.weights_rule.check(values, weights)
        counts = check_lengths(values, lengths, len(self._names))
        offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return self._read(values, offsets, counts, weights)

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        return ids, torch.ones_like(ids)


class EmbeddingBagLookup(ServedLookup):
    """Lookups of one table: ids and offsets as in ``torch.nn.EmbeddingBag``."""

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return pooled rows, float32 ``(bags, columns)``.

        Args:
            ids: int32 or int64 ``(n,)``, bag after bag.
            offsets: int32 or int64 ``(bags,)``, where bags begin, and with ``include_last_offset``
                where the last bag ends, which must be at the last id. If ids follow it, torch's
                kernels drop some, and divide means by others.
            weights: floating-point ``(n,)``, a factor for each id.
        """
        weights = self.weights_rule.check(ids, weights)
        offsets = bag_offsets(ids, offsets, self._collection.include_last_offset)
        # The last offset is the number of ids, all of one feature.
        return self._read(ids, offsets, offsets[-1:], weights)

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        if ids.dim() == 2:
            # A bag in each row.
            bags, size = ids.size()
            if lengths is not None:
                raise ValueError("Ids of shape (bags, n) take no offsets.")
            if bags and not size:
                raise ValueError("Ids of shape (bags, 0): torch refuses bags of size 0.")
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
        check_ids(ids)
        # One bag of all ids. The pooling of this kind of lookup is "none".
        flat = ids.reshape(-1)
        count = torch.full((1,), flat.size(0), dtype=torch.int32, device=ids.device)
        rows = self._read(flat, F.pad(count, (1, 0)), count)
        return rows.view(ids.size() + rows.size()[1:])

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        if lengths is not None or weights is not None:
            raise ValueError(f"{self._collection.path!r} takes ids alone, as torch.nn.Embedding.")
        return self(ids)


class Served(nn.Module):
    """A collection of an artifact: looks its tables up, as the module that was exported did.

    Args:
        manifest: the manifest of the artifact.
        collection: the manifest's entry of the collection.
        lookup: the lookup of its tables.
        deltas: opens deltas; shared by the collections of a load.

    Attributes:
        lookup: the module that is called and exported; tensors in, a tensor out.
        features: names, in the order of values and lengths. A feature of two tables is listed
            twice.
        outputs: keys of the results, in the same order.
        dims: columns of the results, likewise.
    """

    __call__: LookupCall

    def __init__(
        self, manifest: Manifest, collection: Collection, lookup: ServedLookup, deltas: Deltas
    ) -> None:
        super().__init__()
        self._collection, self._gate, self._deltas = collection, Gate(), deltas
        self._manifest, self._base_hash = manifest, manifest.hash
        self._num_deltas = 0
        self.lookup = lookup
        self.features = [feature.name for feature in collection.features]
        self.outputs = list(collection.outputs)
        self.dims = lookup.dims

    def apply_delta(self, delta: Any) -> Served:
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
        updated on its own; the first one reads and verifies the delta, which stays in memory until
        each collection of the load has it.

        Args:
            delta: the folder that ``export(since=)`` wrote.

        Returns:
            self.

        Raises:
            ValueError: ``delta`` is not a path; the folder is not a delta, is damaged, out of
                order, or of another base (names it).
            OSError: a file can't be read.
            RuntimeError: an earlier delta was applied in part.
        """
        with self._gate.updating:
            folder = absolute_path("delta", delta)
            opened = self._deltas.open(folder, self._manifest, self._base_hash)
            apply_update = self.lookup.prepare_update(opened)
            with self._gate.update():
                apply_update()
            self._manifest = opened.manifest.artifact
            self._num_deltas += 1
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
            weights: a factor for each id, in the shape of ``ids``, of any floating-point dtype.

        Returns:
            For a KeyedJaggedTensor what the collection returned: a KeyedTensor, or a dict of
            JaggedTensors. For tensors float32 ``(bags, columns)``, or each id's row.

        Raises:
            RuntimeError: a delta was applied in part.
            ValueError: lengths or offsets do not fit the ids; a KeyedJaggedTensor for a module of
                torch; a feature is missing, or batches differ in size by feature; weights are
                missing, were not read in training, or are integers; with ``unknown="raise"`` an id
                is out of range (names table, id and rows).
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

            check_weights = self.lookup.weights_rule.check
            values, lengths, weights = port.unpack_ids(ids, self.features, check_weights)
            out = self.lookup(values, lengths, weights)
            is_pooled = self._collection.kind == "bag"
            return port.pack_outputs(out, lengths, self.outputs, self.dims, is_pooled)

    @property
    def removed(self) -> dict[str, int]:
        """The number of lookups of removed ids since the artifact was loaded, by table. They read
        zeros, or the default row.

        Raises:
            RuntimeError: it was loaded without ``count=True``.
        """
        if not self.lookup.is_counting:
            raise RuntimeError("Not counted: load the artifact with count=True.")
        return self.lookup.removed_lookups.counts

    @property
    def unknown(self) -> dict[str, int]:
        """The number of lookups of ids out of range since the artifact was loaded, by table."""
        return self.lookup.unknown_lookups.tally.counts

    def metrics(self) -> dict[str, Any]:
        """Return what a server exports: plain numbers and strings. Any thread may call it.

        Returns:
            ``lookups_total``, ``removed_lookups_total`` and ``unknown_lookups_total``: the number
            of looked-up ids by table, and how many of them were removed or out of range; without
            ``count=True`` the last one alone. An id counts once for each feature that looks it
            up, and in a batch that ``unknown="raise"`` refuses too. ``deltas_applied``: since the
            base. ``artifact_hash``: of the served content, as deltas name it.
        """
        found: dict[str, Any] = {"unknown_lookups_total": self.unknown}
        if self.lookup.is_counting:
            found["removed_lookups_total"] = self.removed
            # A batch adds to them first and they are read last: a part never exceeds the whole.
            found["lookups_total"] = self.lookup.lookups.counts
        found["deltas_applied"] = self._num_deltas
        found["artifact_hash"] = self._manifest.hash
        return found

    def __repr__(self) -> str:
        """Return the tables, how many of their rows are kept, and how many deltas were applied."""
        lines = []
        for name in self._collection.tables:
            entry = self._manifest.tables[name]
            default = " and a default row" if entry.default_row else ""
            lines.append(
                f"  {printable(name)}: {entry.kept:,} of {entry.rows:,} rows{default},"
                f" {entry.columns} columns, {entry.dtype}"
            )
        lines.append(f"  deltas applied: {self._num_deltas}")
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def to_pt2(self, file: StrPath, weights: bool = False) -> None:
        """Save :attr:`lookup` by ``torch.export``, for ``torch.export.load`` or AOTInductor.

        It takes tensors, like :meth:`forward` called with tensors. It can be called with any number
        of ids and of bags, including 0 and 1. Where it uses FBGEMM's operator, a C++ program must
        load FBGEMM's library first; ``load_served(path, fbgemm=False)`` gives a lookup that needs
        only libtorch.

        Args:
            file: the new file, which may exist.
            weights: whether it takes weights, float32, where batches may have none. A saved lookup
                has a fixed number of inputs: without this, it takes only ids and lengths or
                offsets. The lookup of a weighted collection takes weights in any case.

        Raises:
            ValueError: the artifact was loaded with ``unknown="raise"``; the collection takes no
                weights.
        """
        if self.lookup.unknown == "raise":
            raise ValueError(
                "Invalid unknown='raise': a saved lookup can't raise; load it with 'zero'."
            )
        any_size = {0: torch.export.Dim.DYNAMIC}
        # Two ids for each feature: torch.export may specialize on an example of size 0 or 1.
        args = self.lookup.example(torch.zeros(2 * len(self.dims), dtype=torch.int64))
        rule = self.lookup.weights_rule
        if weights or rule.is_needed:
            args = (*args, torch.ones(len(args[0])))
            rule.check(args[0], args[-1])
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
        Offsets and weights are checked as in :meth:`forward`.

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

        It takes and returns what the collection did. Results are bit for bit what the artifact
        serves, except for means of tables with a scale per column or codes: these tables become
        float16, and their means are equal to the last bit.
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
    count: bool = False,
    by_path: Literal[False] = False,
) -> Served: ...


@overload
def load_served(
    path: Folders,
    *,
    fbgemm: bool = True,
    unknown: UnknownIds = "zero",
    count: bool = False,
    by_path: Literal[True],
) -> dict[str, Served]: ...


def load_served(
    path: Folders,
    *,
    fbgemm: bool = True,
    unknown: UnknownIds = "zero",
    count: bool = False,
    by_path: bool = False,
) -> Served | dict[str, Served]:
    """Load an artifact that :func:`dist_sparse.export` wrote.

    Args:
        path: the folder; or an iterable of the folder and the deltas after it, in order.
        fbgemm: whether lookups use FBGEMM's operator if it is installed. Otherwise they are pure
            torch.
        unknown: how to serve an id out of the range of its table, such as an id that is newer than
            the model. ``"zero"``: like a removed id, as a zero vector that adds nothing to a sum
            and counts in a mean (it never reads the default row). ``"raise"``: a ValueError names
            table, id and rows. In both cases the returned module's ``unknown`` counts them by
            table.
        count: whether lookups, and lookups of removed ids, are counted by table: see
            :meth:`Served.metrics`. This takes up to 16% of the time of a short lookup.
        by_path: return a dictionary from the paths of collections in the model to modules. A model
            with several collections gets it in any case; pass True so that type checkers know.

    Returns:
        A module that takes the same input as the collection, or a dictionary of such modules.
        Pooled columns are in the order of the collection's configurations; a sharded collection
        orders them by sharding type, so read both by key. A table that several collections look up
        is stored in each of them. Weights of a batch are read as training read them, or refused:
        see "Weights of a batch" in the documentation. Batches whose sizes differ by feature, and
        inverse indices, are refused.

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
    flag("count", count)
    fbgemm = fbgemm and kernels.available()
    folders = folders_of("path", path)
    if not folders:
        raise ValueError(f"Invalid path={path!r}: must name the folder of an artifact first.")
    artifact: Opened[Manifest] = open_artifact(folders[0])
    collections = {}
    deltas = Deltas(len(artifact.manifest.collections))
    for collection in artifact.manifest.collections:
        tables = _load_tables(artifact, collection)
        lookup_class = _LOOKUP_CLASSES[collection.kind]
        lookup = lookup_class(tables, collection, fbgemm, unknown_ids, count)
        collections[collection.path] = Served(artifact.manifest, collection, lookup, deltas)
    for delta in folders[1:]:
        for served in collections.values():
            served.apply_delta(delta)
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
