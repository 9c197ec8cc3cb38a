"""What share of lookups reads removed rows, or would read them: :func:`share_of`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_sparse.groups import world_group
from dist_sparse.ids.counts import check_range, each_batch, features_of, ids_by_table
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import count, percent, printable, progress, table_lines

__all__ = ["Share", "share_of"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which lookups of some batches read removed rows.

    Args:
        lookups: lookups of each table.
        removed: how many of them read a removed row, by table.
        examples: number of examples.
        affected: how many of them look up a removed row.

    Example::

        >>> from dist_sparse.ids.share import Share
        >>> share = Share(lookups={"user": 640}, removed={"user": 127}, examples=640, affected=127)
        >>> share.shares, share.examples_text, round(share.fraction, 3)
        ({'user': '19.8%'}, '127 of 640 examples (19.8%)', 0.198)
    """

    lookups: Mapping[str, int]
    removed: Mapping[str, int]
    examples: int
    affected: int

    @property
    def shares(self) -> dict[str, str]:
        """The share of the lookups of each table as text; a dash without a lookup."""
        shares = {}
        for name, lookups in self.lookups.items():
            shares[name] = percent(self.removed[name] / lookups) if lookups else "-"
        return shares

    @property
    def fraction(self) -> float:
        """The share of the examples, as a number: for a log,
        ``RunLog.step(..., test_reads_zeros=share.fraction)``."""
        return self.affected / max(self.examples, 1)

    @property
    def examples_text(self) -> str:
        """``affected`` as text, such as ``127 of 640 examples (19.8%)``."""
        of_all = f"{count(self.affected)} of {count(self.examples)} examples"
        return f"{of_all} ({percent(self.fraction)})"

    def __repr__(self) -> str:
        rows = []
        for name, share in self.shares.items():
            lookups, removed = self.lookups[name], self.removed[name]
            rows.append([printable(name), count(lookups), count(removed), share])
        head = ("table", "lookups", "of removed rows", "share")
        lines = table_lines(head, rows, right={1, 2, 3})
        return "\n".join([*lines, "", f"{self.examples_text} read zeros."])


def share_of(
    action: str,
    located: Collection[ShardedData],
    kept: Mapping[str, Tensor],
    batches: Iterable[Any],
    show_progress: bool,
) -> Share:
    """Return which lookups of ``batches`` read rows that are not kept. Collective.

    Args:
        action: the call, for messages.
        located: the tables whose features the batches have.
        kept: which rows of a table are kept, bool ``(rows,)``, on every rank; tables that it lacks
            are not counted.
    """
    world = world_group()
    # A row for each table, and one for the examples.
    totals = torch.zeros(len(kept) + 1, 2, dtype=torch.int64)
    with world.agreeing(action):
        features = features_of(located)
        rows = {data.name: data.shape[0] for data in located}
        places = {name: place for place, name in enumerate(kept)}
        with progress("counting lookups", None, "batches", shown=show_progress) as advance:
            for batch in each_batch(batches):
                found = ids_by_table(batch, features)
                reads_zeros = torch.zeros(found.examples, dtype=torch.bool)
                for table, ids, of_examples in found.tables:
                    check_range(table, ids, rows[table])
                    if table in kept:
                        gone = ~kept[table][ids]
                        totals[places[table]] += torch.tensor([len(ids), int(gone.sum())])
                        reads_zeros[of_examples[gone]] = True
                totals[-1] += torch.tensor([found.examples, int(reads_zeros.sum())])
                advance(1)
    with world.jointly(action):
        *by_table, (examples, affected) = world.all_reduce(totals).tolist()
    return Share(
        lookups={name: by_table[place][0] for name, place in places.items()},
        removed={name: by_table[place][1] for name, place in places.items()},
        examples=examples,
        affected=affected,
    )
