"""Tables of an artifact as modules that look them up: :func:`load_served`.

Loading needs torch alone. Lookups use FBGEMM's operator where FBGEMM is installed;
TorchRec is imported only when a KeyedJaggedTensor is passed. A :class:`Served` calls and exports
its ``lookup``, a module that takes and returns tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.checks import choice
from dist_sparse.compaction.row_index import (
    REMOVED,
    UNKNOWN,
    RowIndex,
    RowIndexes,
    UnknownLookups,
    check_ids,
)
from dist_sparse.serving.artifact import Opened, StrPath, all_kept, folders_of, open_artifact
from dist_sparse.serving.chain import MappedTable, index_after, move_rows, open_next
from dist_sparse.serving.lookup import (
    FbgemmLookup,
    Found,
    LibtorchLookup,
    QuantizedCollection,
    RowLookup,
    StoredTable,
    to_fbgemm,
    to_torchrec,
)
from dist_sparse.serving.manifest import Collection, Delta, Manifest
from dist_sparse.torchrec import kernels

_NO_INDEX = RowIndex(all_kept(0), 0)


class ServedLookup(nn.Module):
    """Find the rows of ids and read them: base class of the modules that are exported.

    Args:
        tables: by name.
        collection: of the manifest.
        fbgemm: whether lookups use FBGEMM's operator if it has one for the tables.
        unknown: what becomes of ids out of range, as of :func:`load_served`. An exported graph
            counts none.
    """

    def __init__(
        self, tables: dict[str, StoredTable], collection: Collection, fbgemm: bool, unknown: str
    ) -> None:
        super().__init__()
        self._collection, self._fbgemm, self.unknown = collection, fbgemm, unknown
        self._names = list(collection.looked_up)
        self.features = len(self._names)
        entries = {name: table.entry for name, table in tables.items()}
        self.dims = [entries[name].columns for name in self._names]
        self.index = self._indexes(tables)
        self.rows = self._row_lookup(tables)
        rows = {name: entry.rows for name, entry in entries.items()}
        self.counted = UnknownLookups(rows, self._names)
        self._hold(tables)

    def _hold(self, tables: Mapping[str, StoredTable]) -> None:
        """Note what the tables are; rows and indexes are held by the modules."""
        self._tables: dict[str, StoredTable] = {}
        for name, table in tables.items():
            self._tables[name] = replace(table, rows={}, index=_NO_INDEX)

    def _indexes(self, tables: Mapping[str, StoredTable]) -> RowIndexes:
        names = list(tables)
        return RowIndexes(
            [table.needed_index for table in tables.values()],
            [table.entry.rows for table in tables.values()],
            [names.index(name) for name in self._names],
        )

    def _row_lookup(self, tables: Mapping[str, StoredTable]) -> RowLookup:
        # Both take the same arguments and return the same sums.
        native = self._fbgemm and all(table.has_kernel for table in tables.values())
        kind = FbgemmLookup if native else LibtorchLookup
        return kind(tables, self._names)

    def tables(self) -> dict[str, StoredTable]:
        """Return the tables as they are now: where their rows are stored, and a copy of their
        indexes on the CPU."""
        indexes, found = self.index.tables(), {}
        for at, (name, table) in enumerate(self._tables.items()):
            entry, places = table.entry, self.rows.stored(name)
            rows = {key: part[: entry.stored] for key, part in places.items()}
            index = indexes.get(at) or RowIndex(all_kept(entry.rows), entry.rows, entry.default_row)
            found[name] = replace(table, rows=rows, index=index.cpu())
        return found

    def copied(self) -> ServedLookup:
        """Return a lookup of the same tables, without room for deltas, on the CPU."""
        tables = {name: replace(table, room=0) for name, table in self.tables().items()}
        return type(self)(tables, self._collection, self._fbgemm, self.unknown).cpu()

    def changed(self, delta: Opened[Delta]) -> Callable[[], None]:
        """Return a function that makes the tables the ones that a delta leads to. Nothing changes
        before it is called.

        Raises:
            ValueError: the delta does not fit the rows; names its folder and table.
        """
        before, tables, is_grown = self.tables(), {}, False
        for name, table in before.items():
            change = delta.manifest.tables[name]
            tensors = delta.tensors(name)
            whole = {key: tensors[key].clone() for key in change.whole}
            # The table may be pooled in another way in another collection.
            entry = replace(change.after, pooling=table.entry.pooling)
            index = index_after(delta, name, table.index)
            room = table.places
            if entry.stored > room:
                # Room for the rows of the next deltas.
                room = entry.stored + entry.stored // 4
            is_grown |= room > table.places or bool(whole)
            whole = {**table.whole, **whole}
            tables[name] = replace(table, entry=entry, whole=whole, index=index, room=room)
        device = self.index.words.device
        index_of_all = self._indexes(tables).to(device)
        lookup = self._row_lookup(tables).to(device) if is_grown else self.rows

        def change_all() -> None:
            for name, table in tables.items():
                places, new = lookup.stored(name), delta.tensors(name)
                move_rows(places, before[name].index, table.index, new)
            self._hold(tables)
            self.index, self.rows = index_of_all, lookup

        return change_all

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Tensor:
        """Look up the tensors that :meth:`Served.forward` takes."""
        if lengths is None or (self._collection.weighted and weights is None):
            raise ValueError(
                f"{self._collection.path!r} takes ids and their lengths or offsets, and weights if"
                " it is weighted."
            )
        found: Tensor = self(ids, lengths, weights)
        return found

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return arguments of a call with some ids."""
        raise NotImplementedError

    def _found(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Return the rows of ids: int32 ``(n,)``, -1 where there is none."""
        check_ids(ids)
        rows: Tensor = self.index(ids, counts)
        if not torch.compiler.is_compiling():
            self._note(ids, rows, counts)  # a graph neither counts nor raises
        if self.unknown == "id0":
            rows = self.index(torch.where(rows == UNKNOWN, 0, ids), counts)
        return rows.clamp(min=REMOVED)

    def _note(self, ids: Tensor, rows: Tensor, counts: Tensor) -> None:
        """Count the ids out of range, or raise them as a ValueError."""
        # One pass where all ids are known, as in most batches.
        if len(rows) == 0 or int(rows.min()) >= REMOVED:
            return
        found = self.counted.add(ids, rows == UNKNOWN, counts.tolist())
        if self.unknown == "raise":
            raise ValueError("Out of range: " + "; ".join(found.values()) + ".")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedLookup:
        """Move to another device, and keep dtypes: rounded scales would not give zeros for
        zeros."""

        def moved(tensor: Tensor) -> Tensor:
            # An empty part shows where a tensor goes, and in which dtype.
            probe = fn(tensor[:0])
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
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
        offsets = _checked(offsets, values.size(0))
        counts = lengths.view(self.features, -1).sum(1)
        found: Tensor = self.rows(Found(self._found(values, counts), offsets, counts, weights))
        return found

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
        ends = offsets.int()
        if not self._collection.include_last_offset:
            last = torch.full((1,), ids.size(0), dtype=torch.int32, device=ids.device)
            ends = torch.cat([ends, last])
        ends = _checked(ends, ids.size(0))
        counts = ends[-1:]
        found: Tensor = self.rows(Found(self._found(ids, counts), ends, counts, weights))
        return found

    def look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Tensor:
        if ids.dim() == 2:
            # A bag in each row.
            bags, each = ids.size()
            # With include_last_offset there is one offset more: the end of the last bag.
            lengths = torch.arange(bags + self._collection.include_last_offset) * each
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
        # One bag of all ids, which are not pooled.
        flat = ids.reshape(-1)
        count = torch.full((1,), flat.size(0), dtype=torch.int32, device=ids.device)
        found: Tensor = self.rows(Found(self._found(flat, count), F.pad(count, (1, 0)), count))
        return found.view(ids.size() + found.size()[1:])

    def look_up(self, ids: Tensor, *_: Tensor | None) -> Tensor:
        found: Tensor = self(ids)
        return found

    def example(self, ids: Tensor) -> tuple[Tensor, ...]:
        return (ids,)


def _checked(offsets: Tensor, count: int) -> Tensor:
    """Return offsets that end with ``count`` and point to no id beyond it: FBGEMM's operator reads
    where they point."""
    message = "Lengths must add up to the number of ids, and offsets must end with it."
    if torch.compiler.is_compiling():
        torch._assert_async(offsets[-1] == count, message)  # stays in the graph, unlike a branch
    elif int(offsets[-1]) != count:
        raise ValueError(message)
    # The last offset fits; one before it may still point anywhere.
    return offsets.clamp(0, count)


class Served(nn.Module):
    """A collection of an artifact: looks its tables up, as the module that was exported did.

    Args:
        manifest: of the artifact.
        collection: of its collections.
        lookup: of its tables.

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
        self._manifest, self._root = manifest, manifest.hash
        self.lookup = lookup
        self.features = [feature.name for feature in collection.features]
        self.outputs = list(collection.outputs)
        self.dims = lookup.dims

    def apply(self, delta: Any) -> Served:
        """Serve what the next delta leads to, in a process that goes on looking up.

        A lookup sees all of a delta or nothing: the change waits for lookups that have begun, and
        lookups that begin then wait until rows are moved and written in place. Memory peaks by the
        delta's changed rows as they are read, a new index (half a byte for each original id, and
        one while bits are counted), and 65,536 rows. A table is loaded with
        room for a sixteenth more rows; if it outgrows its room, or books, scales or a rotation
        change, its rows are copied once, with room for a quarter more. A refused delta changes
        nothing.

        Modules that were made of this one (:meth:`to_pt2`, :meth:`to_fbgemm`, :meth:`to_torchrec`)
        do not follow; calls of :attr:`lookup` itself do not wait. Of a model with several
        collections each is changed on its own.

        Args:
            delta: the folder that ``export(since=)`` wrote.

        Returns:
            self.

        Raises:
            ValueError: the folder is no delta, is damaged, out of order, or of another base (names
                it).
            OSError: a file can't be read.
        """
        if callable(delta):
            # torch.nn.Module.apply(), which calls a function with each module.
            return super().apply(delta)
        with self._gate.preparing:
            opened = open_next(delta, self._manifest, self._root)
            change = self.lookup.changed(opened)
            with self._gate.change():
                change()
            self._manifest = opened.manifest.artifact
        return self

    def forward(
        self, ids: Any, lengths: Tensor | None = None, weights: Tensor | None = None
    ) -> Any:
        """Look ids up. Ids are not changed; ids out of range follow ``load_served(unknown=...)``.

        Args:
            ids: a KeyedJaggedTensor (of a collection), or a tensor, int32 or int64: its values in
                the order of :attr:`features`, or what the torch module took.
            lengths: of collections, int32 or int64 ``(features * batch,)``; of an ``EmbeddingBag``
                its offsets, or None for ids ``(bags, ids of each)``; of an ``Embedding`` None.
            weights: a factor for each id, in the shape of ``ids``.

        Returns:
            For a KeyedJaggedTensor what the collection returned: a KeyedTensor, or a dict of
            JaggedTensors. For tensors float32 ``(bags, columns)``, or each id's row.

        Raises:
            ValueError: lengths or offsets do not fit the ids; a KeyedJaggedTensor for a module of
                torch, a feature or weights are missing, or batches differ in size by feature; with
                ``unknown="raise"`` an id is out of range (names table, id and rows).
        """
        with self._gate.lookup():
            if isinstance(ids, Tensor):
                return self.lookup.look_up(ids, lengths, weights)
            return self._look_up_jagged(ids)

    def _look_up(self, ids: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Any:
        if self.kind == "embedding":
            return self.lookup(ids)
        if self.kind == "embedding_bag" and ids.dim() == 2:
            # A bag in each row.
            bags, each = ids.size()
            # With include_last_offset there is one offset more: the end of the last bag.
            lengths = torch.arange(bags + self._collection.include_last_offset) * each
            ids = ids.reshape(-1)
            if weights is not None:
                weights = weights.reshape(-1)
        if lengths is None or (self.weighted and weights is None):
            raise ValueError(
                f"{self.path!r} takes ids and their lengths or offsets, and weights if it is"
                " weighted."
            )
        return self.lookup(ids, lengths, weights)

    def _look_up_jagged(self, ids: Any) -> Any:
        path, kind = self._collection.path, type(ids)
        if not self.features:
            raise ValueError(
                f"Table {path!r} takes tensors, as its torch.nn module did, not {kind}."
            )
        from dist_sparse.torchrec import port

        values, lengths, weights = port.unpack_ids(ids, self.features, self._collection.weighted)
        found = self.lookup(values, lengths, weights)
        is_pooled = self._collection.kind == "bag"
        return port.pack_outputs(found, lengths, self.outputs, self.dims, is_pooled)

    @property
    def unknown(self) -> dict[str, int]:
        """How many ids out of range were looked up since the artifact was loaded, by table."""
        return dict(self.lookup.counted.counts)

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
                "Invalid unknown='raise' of a lookup that is saved: it runs without Python, which"
                " names the id. Load the artifact with unknown='zero' or unknown='id0'."
            )
        many = {0: torch.export.Dim.DYNAMIC}
        args = self.lookup.example(torch.zeros(2 * len(self.dims), dtype=torch.int64))
        with self._gate.lookup():
            lookup = self.lookup.copied()
        # Sizes of 0 and 1 are not special to a lookup: this is torch's switch for that.
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = torch.export.export(lookup, args, dynamic_shapes=(many,) * len(args))
            torch.export.save(program, str(file))

    def to_fbgemm(self) -> nn.Module:
        """Return FBGEMM's own module over the stored rows, on the CPU:
        ``IntNBitTableBatchedEmbeddingBagsCodegen``, with its remap of ids.

        It takes ids, int64 ``(n,)``, and offsets, int64 ``(features * bags + 1,)``, of the features
        in the order of :attr:`features`, and gives what the artifact serves, bit for bit: removed
        ids are exactly 0. Ids out of range are read as id 0, which FBGEMM also writes to the
        caller's ids. Of tables with several features each feature has a copy. Columns with a
        scale each become float16.

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

        It takes and returns what the collection did, bit for bit as the artifact serves it.
        ``torchrec.inference.modules.shard_quant_model`` shards tables of 8 and 4 bits; its model
        loads the state of this one.

        Raises:
            ValueError: the collection looks up sequences or is a module of torch's, a table was
                rotated alone, or it has 4 bits and an odd number of columns.
            ImportError: TorchRec is not installed.
        """
        with self._gate.lookup():
            return to_torchrec(self._collection, self.lookup.tables(), self.lookup.index)


def load_served(
    path: StrPath | Sequence[StrPath],
    *,
    fbgemm: bool = True,
    unknown: Literal["zero", "raise", "id0"] = "zero",
) -> Served | dict[str, Served]:
    """Load an artifact that :func:`dist_sparse.export` wrote.

    Args:
        path: the folder; or a list of the folder and the deltas after it, in order.
        fbgemm: whether lookups use FBGEMM's operator where it is installed. Without it they are
            pure torch.
        unknown: what becomes of an id that is out of the range of its table, such as one that is
            newer than the model. "zero": what becomes of a removed id: a zero vector, nothing added
            to a sum, and a mean counts it (it is never the default row). "raise": a ValueError that
            names table, id and rows. "id0": it is read as id 0, as FBGEMM does. The ``unknown`` of
            the returned module counts them by table in each case.

    Returns:
        For a model with one collection, a module that takes the same input as the collection; with
        several, a dictionary from their paths to such modules. Pooled columns are in the order of
        the collection's configurations; a sharded collection orders them by sharding type, so read
        both by key. A table that several collections look up is stored in each of them.

    Raises:
        ValueError: the folder is not an artifact, is damaged, or has another version; a delta is
            damaged, out of order, or of another base (names the file).
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
    choice("unknown", unknown, ("zero", "raise", "id0"))
    fbgemm = fbgemm and kernels.available()
    base, *deltas = folders_of(path)
    artifact: Opened[Manifest] = open_artifact(base)
    served = {}
    for collection in artifact.manifest.collections:
        tables = _tables(artifact, collection)
        lookup = _LOOKUPS[collection.kind](tables, collection, fbgemm, unknown)
        served[collection.path] = Served(artifact.manifest, collection, lookup)
    for delta in deltas:
        for one in served.values():
            one.apply(delta)
    # A model of one collection is served as that collection.
    return next(iter(served.values())) if len(served) == 1 else served


def _tables(artifact: Opened[Manifest], collection: Collection) -> dict[str, StoredTable]:
    """Return the tables of a collection, by name."""
    tables = {}
    for name in collection.tables:
        table = MappedTable(artifact, name)
        entry = table.entry
        if collection.kind in ("sequence", "embedding"):
            # The table may be pooled in another collection.
            entry = replace(entry, pooling="none")
        # Rows that come with deltas find room for a sixteenth more, and never need all ids'.
        room = min(entry.stored + entry.stored // 16, entry.rows + entry.default_row)
        # Cloned: rows are copied when they are placed, all else would keep the file mapped.
        whole = {key: part.clone() for key, part in table.whole.items()}
        tables[name] = StoredTable(entry, table.stored(), whole, table.index, room)
    return tables


_LOOKUPS: dict[str, type[ServedLookup]] = {
    "bag": CollectionLookup,
    "sequence": CollectionLookup,
    "embedding_bag": EmbeddingBagLookup,
    "embedding": EmbeddingLookup,
}


class Gate:
    """Lets any number of lookups through, or one change: a change waits for the lookups that have
    begun, and lookups that come then wait for it.

    Attributes:
        preparing: a lock that holds other changes back, while lookups go on.

    A lookup that looks up in its own thread again would wait for itself when a change waits: none
    does.
    """

    def __init__(self) -> None:
        self._turn, self._condition = threading.Lock(), threading.Condition()
        self.preparing = threading.Lock()
        self._inside = 0

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        # A copy of a module gets a gate of its own; locks can't be copied.
        return Gate, ()

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold changes back."""
        with self._turn, self._condition:
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold lookups back, within :attr:`preparing`."""
        # From here no lookup begins: a stream of lookups would keep changes out for good.
        with self._turn, self._condition:
            self._condition.wait_for(lambda: not self._inside)
            yield
