"""Following tables as loops over Python numbers: what :class:`dist_sparse.extras.following.FollowingTables` must
do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from dist_sparse.compaction.tables import initial_rows

__all__ = ["Oracle"]

MOST = 15


class Oracle:
    """One following table: ids, counts, slots, and the row in each slot.

    Args:
        ahead: batches that a pipeline has translated when an update comes.
        candidates: ids that have a count after an update; None: all.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        *,
        every: int,
        admit_after: int = 1,
        half_life: int = 80,
        protected: Sequence[int] = (),
        ahead: int = 0,
        candidates: int | None = None,
    ) -> None:
        self.rows, self.slots, self.every = rows, slots, every
        self.admit_after, self.half_life, self.protected = admit_after, half_life, set(protected)
        self.ahead, self.steps, self.moved = ahead, 0, 0
        self.candidates = candidates
        self.counts: defaultdict[int, int] = defaultdict(int)
        # Updates since the last lookup.
        self.ages: defaultdict[int, int] = defaultdict(int)
        self.id_of_slot = [-1] * slots
        self.written: list[tuple[int, int]] = []
        self.admits_at: int | None = None

    def score(self, number: int) -> Fraction:
        return Fraction(self.counts[number], self.ages[number] + 1)

    def slot(self, number: int) -> int:
        return self.id_of_slot.index(number) if number in self.id_of_slot else -1

    def look_up(self, ids: Sequence[int]) -> list[int]:
        """Count ids as they are looked up; return their slots."""
        for number in ids:
            self.counts[number] = min(MOST, self.counts[number] + 1)
            self.ages[number] = 0
        return [self.slot(number) for number in ids]

    def step(self) -> None:
        self.written = []
        self.steps += 1
        if self.admits_at == self.steps:
            self.admit()
        if self.steps % self.every:
            return
        hottest = sorted(self.counts, key=lambda number: (-self.score(number), number))
        kept = [number for number in hottest if self.counts[number]][: self.candidates]
        self.counts = defaultdict(int, {number: self.counts[number] for number in kept})
        holders = {number for number in self.id_of_slot if number >= 0}
        able = [
            number
            for number in sorted({*self.counts, *holders, *self.protected})
            if number in holders
            or number in self.protected
            or (self.counts[number] >= self.admit_after and self.ages[number] == 0)
        ]
        able.sort(
            key=lambda number: (
                number not in self.protected,
                -self.score(number) if number not in self.protected else 0,
                number not in holders if number not in self.protected else 0,
                number,
            )
        )
        winners = set(able[: self.slots])
        for slot, number in enumerate(self.id_of_slot):
            if number >= 0 and number not in winners:
                self.id_of_slot[slot] = -1
        free = [slot for slot, number in enumerate(self.id_of_slot) if number == -1]
        coming = sorted(winners - holders)
        for slot, number in zip(free, coming, strict=False):
            self.id_of_slot[slot] = -2 - number
        self.moved += len(coming)
        for number in self.counts:
            self.ages[number] = min(MOST, self.ages[number] + 1)
        for step in range(self.steps - self.every + 1, self.steps + 1):
            if step % self.half_life == 0:
                for number in self.counts:
                    self.counts[number] //= 2
        self.admits_at = self.steps + self.ahead
        if not self.ahead:
            self.admit()

    def admit(self) -> None:
        self.admits_at = None
        for slot, number in enumerate(self.id_of_slot):
            if number < -1:
                self.id_of_slot[slot] = -2 - number
                self.written.append((slot, -2 - number))


def initial(table: str, number: int, dim: int, rows: int, seed: int = 0) -> Tensor:
    """The row that an id starts from, as TorchRec draws it for a table of ``rows`` ids."""
    bound = rows**-0.5
    return initial_rows(seed, table, torch.tensor([number]), range(dim), (-bound, bound))[0]


def holders(state: Mapping[str, Tensor], table: str) -> list[int]:
    """Who holds each slot, from a model's state."""
    return next(value for key, value in state.items() if f"indexes.{table}.id_of" in key).tolist()


def nursery_row(number: int, rows: int) -> int:
    """Which of the nursery's rows an id without a slot shares."""
    bits = 2**64 - 1
    mixed = number * 0x9E3779B97F4A7C15 & bits
    mixed = (mixed ^ mixed >> 32) * 0xFF51AFD7ED558CCD & bits
    return (mixed >> 33) * rows >> 31
