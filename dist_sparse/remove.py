"""`remove_untouched()`: remove the rows of a trained model that training never read.

From the top: :func:`remove_untouched` and what it returns, :class:`RemovedRows`; and the records
that tell which rows were read. That a record covers the training is proved by
:mod:`dist_sparse.tables.initial`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.compaction.moving import kept_rows, on_all_ranks
from dist_sparse.groups import Facts, world_group
from dist_sparse.ids.counts import LookupCounts, bytes_of
from dist_sparse.ids.share import Share, share_of
from dist_sparse.messages import names_text
from dist_sparse.optimizers import (
    NOT_STEPPED,
    LookupRecord,
    Optimizers,
    read_rows,
    records,
)
from dist_sparse.sparsifiers.pieces import shared_tensors
from dist_sparse.sparsifiers.score import ScoreSparsifier
from dist_sparse.tables.decoded import refuse_decoded, weights_of
from dist_sparse.tables.initial import ALL_LOOKUPS, IF_COVERED, Unread, refuse_trained
from dist_sparse.tables.shards import ROW, Block, Located, Rect, ShardedData
from dist_sparse.text import count, number_of, printable, table_lines, wrapped

__all__ = ["RemovedRows", "remove_untouched"]

# Lookups by table: counts of each row, or a folder that LookupCounts.save() wrote.
Record = Mapping[str, Tensor] | str | os.PathLike[str]

# A flag is a count of at most 1.
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def remove_untouched(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    record: Record | None = None,
    include: str | list[str] | None = None,
    exclude: str | list[str] | None = None,
    trust_record: bool = False,
) -> RemovedRows:
    """Remove the rows that training never read from a trained model: their weights become zeros.
    Collective: every rank of the world must call it.

    On the training data this changes nothing, if each row that training read got a gradient. A
    later lookup of a removed row reads zeros, where it read the random values that the row began
    with: see :meth:`RemovedRows.share`. No hooks stay on the model: remove rows when training has
    ended, then :func:`~dist_sparse.export` or :func:`~dist_sparse.compact` the model. To train on
    with masks, use ``sparsify(level="untouched")``.

    **The record.** An optimizer that keeps sums for each row tells which rows it has never updated:
    Adagrad, fused or not, row-wise or not; Adam, AdamW and RMSprop. So load a checkpoint with its
    optimizer state. With any other optimizer pass ``record``. A row that was read only without a
    gradient, or with a gradient of exactly 0, looks unread to an optimizer: in evaluation, under
    ``torch.no_grad()``, behind a dead ReLU, in skipped steps. Lookup counts see it. The row of the
    ``padding_idx`` of an ``nn.Embedding`` stays unless it is zeros; a frozen table is refused.

    **A record must cover the training**: a row that was trained before the record began looks as if
    it had never been read. Before anything is removed, each row is compared with the numbers that
    the table's initializer can draw (:func:`~dist_sparse.tables.initial.trained_rows`). If one
    row was trained, the call is refused. It is also refused where the values prove nothing: in
    tables with an initializer other than TorchRec's default, such as ``nn.Embedding``, and in
    16-bit tables.

    Args:
        model: as it was trained: a DistributedModelParallel, a DDP module or any module.
        optimizer: the optimizer that steps tables that are not fused, or a sequence of several: a
            row that one of them has updated was read. Fused optimizers are found in the model.
        record: instead of optimizer state, lookups of each row by table, or by feature if all
            features of a table are there: tensors ``(rows,)``, what
            :func:`~dist_sparse.count_lookups` returns, or a folder that it was saved to.
        include: globs over table names and fully qualified names; None is every table.
        exclude: globs of tables to leave as they are.
        trust_record: do not compare rows with their initial values. Rows that were trained before
            the record began are then lost.

    Returns:
        The removed rows: print it, and pass it to ``export``, ``compact`` and ``Checkpoints`` in
        place of ``sparse``.

    Raises:
        ValueError: a table has no record, a record that does not fit, or one that may not cover its
            training; no step of an optimizer has reached a table; the folder of ``record`` is
            missing or damaged; ``record`` and ``optimizer`` are both given; a table has codes;
            ranks differ; on every rank, and nothing has changed.

    Example::

        >>> import torch
        >>> from dist_sparse import remove_untouched
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randint(0, 20, (64, 5))).sum().backward()
        ...     optimizer.step()
        >>> remove_untouched(model, optimizer)
        Traceback (most recent call last):
        ...
        ValueError: Nothing shows that the record covers the training of table '0'...
        >>> removed = remove_untouched(model, optimizer, trust_record=True)
        >>> removed
        RemovedRows: 80 of 100 rows in 1 table were never read
        record: the optimizer's state, 3 steps
        table  rows  removed
        -----  ----  -------
        0       100       80
    """
    world = world_group()
    with world.agreeing("remove_untouched()") as facts:
        facts["trust_record"] = checks.flag("trust_record", trust_record)
        counts = noted_counts(facts, record, optimizer)

    removed = RemovedRows()
    removed.add_model(model, include=include, exclude=exclude)
    # Over the world: if the model is not wrapped, each rank has its own tables.
    with world.agreeing("remove_untouched()"):
        located = removed.masks.tables.locate()
        refuse_decoded(weights_of(located.values()))
        found = known_rows(model, [*located.values()], optimizer, counts)
        reads = _reads(located, found)
        stepped = _stepped(located, found, counts)
    # Of any rank: one whose rows no batch has looked up may not have stepped its shard.
    idle = located.keys() - set(chain(*world.all_gather_json(stepped)))
    with world.agreeing("remove_untouched()"):
        remedy = _remedy(idle, counts)
        # Without trust, the weights of these tables must show that they were not trained.
        if trust_record and idle:
            raise ValueError(remedy)
        if not trust_record:
            refuse_trained(_unread(located, reads), remedy)
    removed._remove(reads)
    return removed


class RemovedRows(ScoreSparsifier):
    """The rows that :func:`remove_untouched` has removed: a sparsifier that keeps their masks.

    Attributes:
        rows: rows of each table.
        removed: removed rows of each table.
        sources: for each table, what the record is. All three are empty after a state was loaded.

    Example::

        >>> import torch
        >>> from dist_sparse import remove_untouched
        >>> model = torch.nn.EmbeddingBag(10, 8)
        >>> counts = {"weight": torch.arange(10) % 2}
        >>> removed = remove_untouched(model, record=counts, trust_record=True)
        >>> removed.removed
        {'weight': 5}
        >>> removed.share([{"weight": torch.tensor([[0, 1], [3, 5]])}])
        table   lookups  of removed rows  share
        ------  -------  ---------------  -----
        weight        4                1  25.0%
        <BLANKLINE>
        1 of 2 examples (50.0%) read zeros.
    """

    def __init__(self) -> None:
        self._read: Mapping[str, ReadRows] = {}
        self.rows: dict[str, int] = {}
        self.removed: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        level: Any = checks.UNTOUCHED
        super().__init__(sparsity_level=level, sparse_block_shape=(1, ROW))

    def _remove(self, read: Mapping[str, ReadRows]) -> None:
        """Remove the rows that were not read, by table, and count them. Collective; once."""
        self._read = read
        try:
            self.step()
        finally:
            self._read = {}
        # The record describes this moment: later calls of step() do nothing.
        self.enable_mask_update = False
        for table in self.table_stats():
            self.rows[table.name] = table.shape[0]
            self.removed[table.name] = table.removed_blocks
        # A rank without a shard of a table does not know its record.
        mine = {name: rows.source for name, rows in read.items() if rows.by_shard}
        for sources in world_group().all_gather_json(mine):
            self.sources |= sources

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """Return 1 for each element of a row that was read, and 0 for the others."""
        row, column = offset
        for rect, flags in self._read[name].by_shard.items():
            if rect.intersect(Rect(row, column, 1, 1)) is not None:
                rows = flags[row - rect.row : row - rect.row + len(data)]
                return rows.float().unsqueeze(1).expand(data.shape)
        raise AssertionError(f"{name!r} has no shard at {offset}")

    def note(self, facts: Facts, located: Sequence[ShardedData]) -> None:
        super().note(facts, located)
        # Replicas whose optimizers differ would remove different rows.
        for data in located:
            read = self._read[data.name].by_shard if data.name in self._read else {}
            of_shards = [(data, rect, flags) for rect, flags in read.items()]
            facts.replicas |= shared_tensors(of_shards, "the record of ")

    def _check_untouched(self, data: ShardedData, block: Block) -> None:
        if data.copied:
            raise ValueError(
                f"Table {data.name!r}: copies that are trained apart (2-D parallelism) have read"
                " other rows each."
            )

    def prepare_load(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Callable[[], None]:
        commit = super().prepare_load(state_dict, strict)

        def load() -> None:
            commit()
            # The numbers count the rows that the call removed, not the rows in the state.
            self.rows, self.removed, self.sources = {}, {}, {}

        return load

    def share(self, batches: Iterable[Any], *, show_progress: bool = True) -> Share:
        """Return what share of the lookups of some batches, and of the examples, reads removed
        rows. Collective: every rank passes its own batches.

        Args:
            batches: as in :func:`~dist_sparse.count_lookups`.
            show_progress: draw a progress bar on a terminal.

        Raises:
            ValueError: see :func:`~dist_sparse.count_lookups`; on every rank.
        """
        located = self.masks.tables.current_for("share()")
        kept = on_all_ranks(located, kept_rows(self, located))
        return share_of("share()", located.values(), kept, batches, show_progress)

    def __repr__(self) -> str:
        if not self.rows:
            return "RemovedRows (loaded from a state: table_stats() counts the rows)"
        gone, rows = sum(self.removed.values()), sum(self.rows.values())
        tables = number_of(len(self.rows), "table")
        lines = [f"RemovedRows: {count(gone)} of {count(rows)} rows in {tables} were never read"]
        one, *others = sorted(set(self.sources.values()))
        if not others:
            lines += wrapped(f"record: {one}", indent="  ")
        else:
            for name, source in self.sources.items():
                lines += wrapped(f"record of {printable(name)}: {source}", indent="  ")
        cells = []
        for name, number in self.rows.items():
            cells.append([printable(name), count(number), count(self.removed[name])])
        lines += table_lines(("table", "rows", "removed"), cells, right={1, 2})
        if not all(self.removed.values()):
            lines.append("A table that lost no row: its record has seen all of its rows, or none.")
        return "\n".join(lines)


# The records


class ReadRows(NamedTuple):
    """Which rows of this rank's shards of a table a record has seen.

    Args:
        source: what the record is.
        by_shard: bool ``(rows,)`` of each shard.
    """

    source: str
    by_shard: dict[Rect, Tensor]


# What to do where nothing shows that counts cover the training.
_IF_ALL_LOOKUPS = (
    "If these are the lookups of the whole training, pass trust_record=True: the rows are removed"
    " unchecked."
)


def _remedy(idle: Set[str], counts: Mapping[str, Tensor] | None) -> str:
    """Return what to do where nothing shows that the record covers the training.

    Args:
        idle: the tables that no step of their optimizers has reached.
        counts: the record, if it is not a state.
    """
    if counts is not None:
        return _IF_ALL_LOOKUPS
    if not idle:
        return IF_COVERED
    names = names_text(sorted(map(repr, idle)), 4)
    return (
        f"No row of {names} has a gradient: the model was not trained, or the optimizer's state was"
        f" not loaded. Load it with the weights, or pass {ALL_LOOKUPS}, or leave such tables out"
        " with exclude=."
    )


# The source of a record of counts.
COUNTED = "lookup counts"


def noted_counts(
    facts: Facts, record: Record | None, optimizer: Optimizers | None
) -> Mapping[str, Tensor] | None:
    """Return the lookups of a record, perhaps from a folder; None without one. All ranks must have
    the same: add that to what they agree on.

    Raises:
        ValueError: the record is invalid, or given together with an optimizer.
    """
    facts["record is given"] = record is not None
    if record is None:
        return None
    if optimizer is not None:
        raise ValueError(
            "Invalid optimizer: the lookups of record= tell which rows were read, and the"
            " optimizer's state would be ignored. Pass one of both."
        )
    counts = _counts_of(record)
    facts["rows read by the record"] = {
        str(name): _fingerprint(rows) for name, rows in counts.items()
    }
    return counts


def known_rows(
    model: nn.Module,
    located: Sequence[ShardedData],
    optimizer: Optimizers | None,
    counts: Mapping[str, Tensor] | None,
) -> dict[str, list[LookupRecord] | str]:
    """Return for each table a record of each of this rank's shards, or the reason why it is
    unknown which rows were read. Local.

    Args:
        model: holds the tables, and the optimizers of fused ones.
        located: the tables.
        optimizer: what steps the other tables.
        counts: tell instead, if they are given.

    Raises:
        ValueError: the counts do not fit a table, or ``optimizer`` holds something else.
    """
    if counts is None:
        return records(model, located, optimizer)
    names = {data.name for data in located}
    return {data.name: _records_of_counts(data, counts, names) for data in located}


def _reads(located: Located, found: Mapping[str, list[LookupRecord] | str]) -> dict[str, ReadRows]:
    """Return which rows of this rank's shards were read, by table."""
    reads = {}
    for name, data in located.items():
        known = found[name]
        if isinstance(known, str):
            steps_it = "the optimizer that steps it, or " if known == NOT_STEPPED else ""
            raise ValueError(
                f"Table {name!r} has no record of what was read: {known}. Pass {steps_it}"
                f"{ALL_LOOKUPS}, or leave the table out with exclude=."
            )
        source = known[0].text() if known else ""
        reads[name] = ReadRows(source, read_rows(data, known))
    return reads


def _stepped(
    located: Located,
    found: Mapping[str, Any],
    counts: Mapping[str, Tensor] | None,
) -> list[str]:
    """Return the tables that a step of this rank has reached, and those that need none: counts may
    have no lookup of a table."""
    if counts is not None:
        return [*located]
    stepped = []
    for name, data in located.items():
        # A table without rows has nothing to step.
        if not data.shape[0] or any(map(LookupRecord.has_stepped, found[name])):
            stepped.append(name)
    return stepped


def _counts_of(record: Record) -> Mapping[str, Tensor]:
    """Return the lookups of a record, perhaps from a folder."""
    if isinstance(record, str | os.PathLike):
        return LookupCounts.load(record)
    if not isinstance(record, Mapping):
        raise ValueError(
            f"Invalid record of type {type(record).__name__}: must be lookups of each row by table,"
            " as dist_sparse.count_lookups(batches, model) returns them, or the folder that they"
            " were saved to."
        )
    return record


def _fingerprint(counts: Tensor) -> list[int]:
    """Return numbers that differ between records of different rows."""
    if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.dtype not in _WHOLE:
        kind = getattr(counts, "dtype", type(counts).__name__)
        raise ValueError(
            f"Invalid record of {kind} {list(getattr(counts, 'shape', ()))}: must be whole numbers"
            " (rows,)."
        )
    read = counts != 0
    return [len(read), int(read.count_nonzero()), zlib.crc32(bytes_of(read))]


def _records_of_counts(
    data: ShardedData, counts: Mapping[str, Tensor], tables: Set[str]
) -> list[LookupRecord]:
    """Return which rows of each of this rank's shards have lookups."""
    names = [*data.features]
    if data.name in counts:
        # The name may be the name of one of its features: the others count too.
        others = [name for name in names if name in counts and name not in tables]
        names = [data.name, *others]
    if not names or not counts.keys() >= set(names):
        raise ValueError(
            f"The record has no lookups of table {data.name!r}: it has {sorted(counts)}. Leave the"
            " table out with exclude=, or count its lookups."
        )
    read = torch.zeros(data.shape[0], dtype=torch.bool)
    for name in names:
        if len(counts[name]) != data.shape[0]:
            raise ValueError(
                f"The record of {name!r} has {len(counts[name])} rows, and table {data.name!r} has"
                f" {data.shape[0]}."
            )
        read |= counts[name].cpu() != 0
    of_shards = []
    for shard in data.shards:
        flags = read[shard.rect.row : shard.rect.row_end].to(shard.tensor.device)
        of_shards.append(
            LookupRecord(
                rows=len(flags),
                states=(flags,),
                is_sum=False,
                lookups_only=True,
                count_steps=lambda: None,
                source=COUNTED,
            )
        )
    return of_shards


def _unread(located: Located, read: Mapping[str, ReadRows]) -> Iterator[Unread]:
    """Yield the rows of this rank's shards that no record has seen."""
    for name, data in located.items():
        for shard in data.shards:
            flags = ~read[name].by_shard[shard.rect]
            yield Unread(data, shard.tensor, flags, read[name].source)
