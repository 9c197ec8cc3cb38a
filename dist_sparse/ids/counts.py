"""Lookups of each row, counted from batches: :func:`count_lookups`.

Counts are a record of what was read, and need no optimizer. They can cover the batches of the whole
training, or the requests of the last 30 days. They are saved to a folder and loaded from it.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.groups import world_group
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import count, number_of, printable, progress, table_lines

__all__ = [
    "BatchIds",
    "LookupCounts",
    "TableIds",
    "bytes_of",
    "check_range",
    "count_lookups",
    "each_batch",
    "features_of",
    "ids_by_table",
]

_MANIFEST = "counts.json"
_FORMAT, _VERSION = "dist_sparse lookup counts", 1


class LookupCounts(dict[str, Tensor]):
    """Lookups of each row by table, int64 ``(rows,)``: what :func:`count_lookups` returns.

    Attributes:
        batches: the number of batches that were counted, over all ranks.

    Raises:
        ValueError: counts have another type or shape; names the table.

    Example::

        >>> import tempfile, torch
        >>> from dist_sparse import LookupCounts
        >>> counts = LookupCounts({"user": torch.tensor([2, 0, 5])}, batches=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     counts.save(f"{folder}/counts")
        ...     LookupCounts.load(f"{folder}/counts")
        LookupCounts of 1 batch
        table  rows  read  lookups
        -----  ----  ----  -------
        user      3     2        7
    """

    def __init__(self, counts: Mapping[str, Tensor], batches: int) -> None:
        for name, rows in counts.items():
            if rows.dtype != torch.int64 or rows.dim() != 1:
                raise ValueError(
                    f"Table {name!r}: lookup counts are {rows.dtype} of shape {tuple(rows.shape)};"
                    " must be int64 (rows,)."
                )
        super().__init__(counts)
        self.batches = batches

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the counts to a new folder: 8 bytes per row. One rank calls it; all have the same.

        Raises:
            FileExistsError: something is at ``path``.
        """
        folder = Path(path)
        folder.mkdir(parents=True)
        tables = []
        for number, (name, counts) in enumerate(self.items()):
            values = bytes_of(counts)
            file = f"{number}.int64"
            (folder / file).write_bytes(values)
            entry = {"table": name, "file": file, "rows": len(counts)}
            tables.append(entry | {"crc32": checks.hex_of(zlib.crc32(values))})
        # Last: a folder without it is refused.
        entries = {"format": _FORMAT, "version": _VERSION, "batches": self.batches}
        (folder / _MANIFEST).write_text(checks.sealed(entries | {"tables": tables}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LookupCounts:
        """Return the counts that were saved to a folder.

        Raises:
            ValueError: the folder does not exist or is damaged; names it, or the file.
            OSError: it can't be read.
        """
        folder = Path(path)
        manifest = folder / _MANIFEST
        if not manifest.is_file():
            raise ValueError(
                f"{folder} holds no lookup counts: it must be a folder that LookupCounts.save()"
                f" wrote, with a {_MANIFEST}."
            )
        checks.refuse_special(manifest)
        counts = {}
        with checks.refusing(manifest):
            entries = checks.unsealed(manifest.read_text(), _FORMAT, _VERSION)
            batches = checks.integer("batches", entries["batches"], least=0)
            for number, entry in enumerate(entries["tables"]):
                # Names in the manifest are not paths: only the order tells which file it is.
                file = folder / f"{number}.int64"
                if not file.is_file():
                    raise ValueError(f"{file.name} is missing: the folder is damaged")
                checks.refuse_special(file)
                values = file.read_bytes()
                fits = checks.hex_of(zlib.crc32(values)) == entry["crc32"]
                if not fits or len(values) != 8 * entry["rows"]:
                    raise ValueError(f"the CRC32 of {number}.int64 does not fit: it is damaged")
                loaded = torch.zeros(entry["rows"], dtype=torch.int64)
                if values:
                    loaded = torch.frombuffer(bytearray(values), dtype=torch.int64)
                counts[str(entry["table"])] = loaded
        return cls(counts, batches)

    def __repr__(self) -> str:
        rows = []
        for name, counts in self.items():
            read = int(counts.count_nonzero())
            rows.append([printable(name), *map(count, (len(counts), read, int(counts.sum())))])
        head = ("table", "rows", "read", "lookups")
        lines = table_lines(head, rows, right={1, 2, 3})
        return "\n".join([f"LookupCounts of {number_of(self.batches, 'batch')}", *lines])


def count_lookups(
    batches: Iterable[Any], tables: nn.Module | Mapping[str, int], *, show_progress: bool = True
) -> LookupCounts:
    """Return how often each row is looked up in batches, by table. Collective: every rank of the
    world must call it, each with its own batches; the counts of all ranks are added.

    Pass the whole training data, or the lookups that a model must answer, such as the lookups of
    the last 30 days. Every rank holds 8 bytes per row while it counts.

    Args:
        batches: KeyedJaggedTensors, or dicts of ids (int32 or int64, of any shape) by feature.
            Features that no table has are ignored. Batches with inverse indices count as if their
            bags were repeated. For another kind of batch pass the ids:
            ``(batch.sparse_features for batch in loader)``.
        tables: the model, whose collections know which features look a table up (the feature of an
            ``nn.Embedding`` or ``nn.EmbeddingBag`` is the name of its table); or the number of rows
            by feature, without a model.
        show_progress: draw a progress bar on a terminal.

    Raises:
        ValueError: an id is out of range, a batch is of another kind, or none of the features has a
            table; on every rank.

    Example::

        >>> import torch
        >>> from dist_sparse import count_lookups
        >>> days = [{"user": torch.tensor([3, 0, 3])}, {"user": torch.tensor([[1], [3]])}]
        >>> counts = count_lookups(days, {"user": 5})
        >>> counts["user"]
        tensor([1, 1, 0, 3, 0])
    """
    world = world_group()
    with world.agreeing("count_lookups()") as facts:
        features, rows = _features_and_rows(tables)
        facts["tables"] = [[name, number] for name, number in rows.items()]
        found = {name: torch.zeros(number, dtype=torch.int64) for name, number in rows.items()}
        total = len(batches) if isinstance(batches, Sized) else None
        number_of_batches = 0
        with progress("counting lookups", total, "batches", shown=show_progress) as advance:
            for batch in each_batch(batches):
                for table, ids, _ in ids_by_table(batch, features).tables:
                    check_range(table, ids, rows[table])
                    # In place: bincount() would make a tensor of all rows for each batch.
                    found[table].index_add_(0, ids, torch.ones_like(ids))
                number_of_batches += 1
                advance(1)
    with world.jointly("count_lookups()"):
        for name in found:
            found[name] = world.all_reduce(found[name])
        seen = int(world.all_reduce(torch.tensor([number_of_batches])))
    return LookupCounts(found, seen)


def each_batch(batches: Iterable[Any]) -> Iterable[Any]:
    """Return ``batches``.

    Raises:
        ValueError: they are one batch.
    """
    if isinstance(batches, Mapping) or hasattr(batches, "to_dict"):
        raise ValueError(
            f"Invalid batches of type {type(batches).__name__}: must be several: pass [batch]."
        )
    return batches


class TableIds(NamedTuple):
    """The ids by which a batch looks one table up.

    Args:
        table: the name of the table.
        ids: int64 ``(n,)``, on the CPU.
        examples: the example of each id, int64 ``(n,)``.
    """

    table: str
    ids: Tensor
    examples: Tensor


class BatchIds(NamedTuple):
    """The ids of a batch.

    Args:
        examples: number of examples.
        tables: the ids by which it looks tables up.
    """

    examples: int
    tables: list[TableIds]


def _features_and_rows(
    tables: nn.Module | Mapping[str, int],
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the tables that each feature looks up, and the rows of each table.

    Args:
        tables: a model, or the number of rows by feature.
    """
    if isinstance(tables, nn.Module):
        located = ModelTables(tables).locate()
        return features_of(located), {data.name: data.shape[0] for data in located}
    rows = {}
    for name, number in dict(tables).items():
        rows[name] = checks.integer("rows", number, least=1, of=name)
    return {name: [name] for name in rows}, rows


def features_of(located: Iterable[ShardedData]) -> dict[str, list[str]]:
    """Return the tables that each feature looks up. The feature of a table of torch is its name."""
    features: defaultdict[str, list[str]] = defaultdict(list)
    for data in located:
        for feature in data.features or (data.name,):
            features[feature].append(data.name)
    return dict(features)


def ids_by_table(batch: Any, features: Mapping[str, Sequence[str]]) -> BatchIds:
    """Return the ids of a batch for each table that one of its features looks up.

    Raises:
        ValueError: the batch is neither a KeyedJaggedTensor nor a mapping, none of its features has
            a table, or ids are not int32 or int64.
    """
    most = 0
    tables = []
    for feature, ids, examples, number in _ids_by_feature(batch):
        most = max(most, number)
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"Invalid ids of {feature!r} of dtype {ids.dtype}: must be int32 or int64."
            )
        for table in features.get(feature, ()):
            tables.append(TableIds(table, ids.long().cpu(), examples))
    if not tables:
        raise ValueError(f"No feature of the batch has a table; these have: {sorted(features)}.")
    return BatchIds(most, tables)


def _ids_by_feature(batch: Any) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yield each feature of a batch with its ids, the example of each id, and the number of
    examples."""
    if isinstance(batch, Mapping):
        for feature, ids in batch.items():
            # The first dimension is the batch.
            by_example = ids.reshape(len(ids), ids.shape[1:].numel())
            examples = torch.arange(len(ids)).repeat_interleave(by_example.shape[1])
            yield feature, by_example.reshape(-1), examples, len(ids)
        return
    # Not isinstance(): a batch may come from a program that has not imported TorchRec.
    if not hasattr(batch, "to_dict"):
        raise ValueError(
            f"Invalid batch of type {type(batch).__name__}: must be a KeyedJaggedTensor (a DLRM's"
            " batch has one: batch.sparse_features) or a dict of ids by feature (of a torch"
            " embedding: by its path in the model)."
        )
    if not len(batch.lengths()):
        # A batch without examples, on which to_dict() fails.
        none = torch.empty(0, dtype=torch.int64)
        for feature in [*batch.keys()]:
            yield feature, none, none, 0
        return
    # Where a feature is deduplicated, examples share its bags, and each reads all ids of its bag.
    keys, bags_of_keys = batch.inverse_indices_or_none() or ((), ())
    shared = dict(zip(keys, bags_of_keys, strict=True))
    for feature, jagged in batch.to_dict().items():
        lengths = jagged.lengths().cpu()
        bags = shared.get(feature, torch.arange(len(lengths))).cpu()
        places, examples = _places(lengths, bags)
        yield feature, jagged.values().cpu()[places], examples, len(bags)


def _places(lengths: Tensor, bags: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the ids of all examples are stored, example after example, and the example of
    each. Values after the last bag are padding, which no example reads.

    Args:
        lengths: number of ids of each bag.
        bags: the bag of each example.
    """
    starts = lengths.cumsum(0) - lengths
    counts = lengths[bags]
    examples = torch.arange(len(bags)).repeat_interleave(counts)
    # The ids of an example are consecutive: what its first id is shifted by shifts them all.
    shifts = starts[bags] - (counts.cumsum(0) - counts)
    return torch.arange(len(examples)) + shifts[examples], examples


def bytes_of(tensor: Tensor) -> bytes:
    """Return a copy of the bytes of a tensor, in row-major order."""
    held = tensor.cpu().contiguous()
    # Tensor.numpy() would need NumPy.
    return ctypes.string_at(held.data_ptr(), held.nbytes)


def check_range(table: str, ids: Tensor, rows: int) -> None:
    if not len(ids):
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise ValueError(f"Table {table!r} has {rows} rows: the id {wrong} is out of range.")
