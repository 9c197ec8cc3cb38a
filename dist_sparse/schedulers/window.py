"""When may a ready schedule move masks, and what do the ranks agree on?

At the due steps of its window only; on the others ``scheduler.step()`` counts and does nothing else, and
``sparsifier.step()`` returns at once. The value in force at step t is the schedule's value at the latest due step not
after t, and ``initial`` before ``begin``, whatever happened in between: resuming needs one integer. Construction and
``load_state_dict`` make sure that all ranks have the same plan.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["ReadyDataScheduler", "by_name"]

T = TypeVar("T")


class ReadyDataScheduler(BaseDataScheduler):
    """What the ready schedulers have in common: a window of due steps, and a value that depends on the step alone.

    To be called as ``sparsifier.step(); scheduler.step()`` once a training step. Several on one sparsifier go together,
    say one per group of tables: the sparsifier's next step moves masks if any of its schedulers is due.

    Args:
        initial: the value before ``begin``, and what curves start from.
        begin: the first due step; steps count from 0, the one of the construction.
        end: the last due step; None, where a schedule allows it, is never.
        every: due steps are this far apart (``end`` is due even off that grid).
        data_sparsifier, schedule_param, last_epoch, verbose: as in :class:`BaseDataScheduler`.

    Raises:
        ValueError: a step or an interval is not a fitting int, a level lies outside [0, 1] (where ``schedule_param`` is
            "sparsity_level"), a name or glob matches no data, or ranks have other plans. On every rank, even if one
            alone is wrong.
    """

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str,
        initial: float,
        begin: int,
        end: int | None,
        every: int,
        last_epoch: int,
        verbose: bool,
    ) -> None:
        self.initial, self.begin, self.end, self.every = initial, begin, end, every
        self.schedule_param = schedule_param
        self._check_plan_everywhere()
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over step and plan, and puts the value and the due flag of that step back in force in the sparsifier.

        Restore the sparsifier first. Collective over all ranks: every rank must call it. On an error nothing has
        changed.
        """
        before = dict(self.__dict__)
        try:
            super().load_state_dict(state_dict)
            self._check_plan_everywhere()
            values = self._agreed_values()
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        self._apply(values)

    def _next_values(self) -> Mapping[str, Any]:
        """Collective at construction. Later nothing crosses ranks: they have one plan, and all depends on the step."""
        if self._step_count == 1:
            return self._agreed_values()
        return self._ask() if self._is_due() else {}

    def _agreed_values(self) -> Mapping[str, Any]:
        """The values in force, once all ranks have the same plan. Collective over all ranks."""
        return self._agreed_answer(group_over(world_ranks()))

    def _is_due(self) -> bool:
        return curves.is_due(self.last_epoch, self.begin, self.end, self.every)

    def _last_due(self) -> int | None:
        return curves.last_due(self.last_epoch, self.begin, self.end, self.every)

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        plan = {key: getattr(self, key) for key in ("initial", "begin", "end", "every")}
        return {**super()._facts(answer), **plan}

    def _check_plan_everywhere(self) -> None:
        """Raises on every rank what :meth:`_check_plan` finds on this one: the others wait for it in an agreement."""
        try:
            self._check_plan()
        except ValueError as error:
            self._refuse(error)

    def _check_plan(self) -> None:
        curves.check_window(self.begin, self.end, self.every)
        self.initial = self._checked("initial", self.initial)

    def _checked(self, what: str, value: object) -> float:
        """``value`` as a float, if it is a finite number and, as a sparsity level, in [0, 1]."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"Invalid {what}={value!r}: must be a finite number.")
        if self.schedule_param == "sparsity_level" and not 0 <= float(value) <= 1:
            raise ValueError(f"Invalid {what}={value!r}: a sparsity_level must be in [0, 1].")
        return float(value)


def by_name(given: T | dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """What is given for each name: under the last glob that matches it. Names that no glob matches are left out.

    Raises:
        ValueError: a glob matches no name.
    """
    names = list(names)
    if not isinstance(given, dict):
        return dict.fromkeys(names, given)
    chosen = {name: glob for glob in given for name in names if fnmatchcase(name, glob)}
    if unmatched := [glob for glob in given if not any(fnmatchcase(name, glob) for name in names)]:
        raise ValueError(f"Invalid names or globs {unmatched}: must match data of the sparsifier, which has {names}.")
    return {name: given[chosen[name]] for name in names if name in chosen}
