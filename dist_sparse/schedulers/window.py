"""When may a ready schedule move masks, and what do the ranks agree on?

At the due steps of its window only; on the others ``scheduler.step()`` counts and does nothing else, and
``sparsifier.step()`` returns at once. The value in force at step t is the schedule's value at the latest due step not
after t, and ``initial`` before ``begin``, whatever happened in between: resuming needs one integer. Construction and
``load_state_dict`` make sure that all ranks have the same plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from dist_sparse.checks import number
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["ReadyDataScheduler", "by_name"]

T = TypeVar("T")


class ReadyDataScheduler(BaseDataScheduler):
    """What the ready schedulers have in common: a window of due steps, and a value that depends on the step alone.

    To be called as ``sparsifier.step(); scheduler.step()`` once a training step. Several on one sparsifier go together,
    say one per group of tables: the sparsifier's next step moves masks if any is due of those that have stepped since
    its last one.

    A schedule between ints has ints, rounded half to even, except for ``sparsity_level``.

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
        known = isinstance(data_sparsifier, BaseDataSparsifier)  # what is none is refused below
        self._check_plan_everywhere(data_sparsifier.data_groups if known else None)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over step and plan, and puts the value and the due flag of that step back in force in the sparsifier.
        A name or glob that only matches data of then (squashed since, say) is warned of.

        Restore the sparsifier first. Collective over all ranks: every rank must call it. On an error nothing has
        changed.
        """
        before = dict(self.__dict__)
        try:
            try:
                super().load_state_dict(self._translated(state_dict))
                names = {**self.base_param, **self.data_sparsifier.data_groups}
            except Exception as error:  # whatever it is, the other ranks must hear of it
                self._refuse(ValueError(f"Invalid state of {type(self).__name__}: {error}."))
            self._check_plan_everywhere(names)
            values = self._agreed_values()
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        self._apply(values)
        if gone := _matching_nothing(self._given(), self.data_sparsifier.data_groups):
            warnings.warn(
                f"The names or globs {gone} match data that the sparsifier had when the scheduler was made, and none "
                f"that it has now: {list(self.data_sparsifier.data_groups)}.",
                UserWarning,
                stacklevel=2,
            )

    def _translated(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state of another class as one of this one."""
        return state_dict

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
        plan = {key: getattr(self, key) for key in ("begin", "end", "every")}
        return {**super()._facts(answer), **plan, "initial": repr(self.initial)}  # as text: 1 and 1.0 are two plans

    def _given(self) -> Any:
        """What is scheduled: for all data, or a dict by name or glob."""
        raise NotImplementedError

    def _check_plan_everywhere(self, names: Iterable[str] | None) -> None:
        """Raises on every rank what :meth:`_check_plan` finds on this one: the others wait for it in an agreement.

        Only here must each glob match a name: data may be squashed later.
        """
        try:
            self._check_plan()
            if names is not None and (unmatched := _matching_nothing(self._given(), names)):
                raise ValueError(
                    f"Invalid names or globs {unmatched}: must match data of the sparsifier, which has {list(names)}."
                )
        except Exception as error:
            self._refuse(error)

    def _check_plan(self) -> None:
        self.begin, self.end, self.every = curves.check_window(self.begin, self.end, self.every)
        self.initial = self._checked("initial", self.initial)

    def _checked(self, what: str, value: object) -> float:
        """``value`` as a float, or as an int if it is one and no sparsity level. It must be a finite number and, as a
        sparsity level, in [0, 1]."""
        found = number(what, value)
        if self.schedule_param == "sparsity_level":
            if not 0 <= found <= 1:
                raise ValueError(f"Invalid {what}={value!r}: a sparsity_level must be in [0, 1].")
            return float(found)
        return found


def by_name(given: T | dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """What is given for each name: under the last glob that matches it. Names that no glob matches are left out."""
    names = list(names)
    if not isinstance(given, dict):
        return dict.fromkeys(names, given)
    chosen = {name: glob for glob in given for name in names if fnmatchcase(name, glob)}
    return {name: given[chosen[name]] for name in names if name in chosen}


def _matching_nothing(given: object, names: Iterable[str]) -> list[str]:
    """The globs, if there are any, that match none of the names."""
    globs = given if isinstance(given, dict) else {}
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]
