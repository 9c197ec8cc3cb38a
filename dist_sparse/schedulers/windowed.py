"""Base class of the ready schedulers: a window of steps at which masks are updated.

At all other steps ``scheduler.step()`` counts and does nothing else, and ``sparsifier.step()``
returns at once. The value in force at step t is the schedule's value at the latest update not after
t, and ``initial`` before ``begin``, whatever happened in between: resuming needs one integer.
Construction and ``load_state_dict`` check that all ranks have the same plan.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from dist_sparse.checks import level, number
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["ReadyDataScheduler", "by_name"]

T = TypeVar("T")


class ReadyDataScheduler(BaseDataScheduler):
    """Base class of the ready schedulers: a window of mask updates, a value by step alone.

    Call ``sparsifier.step(); scheduler.step()`` once per training step. One sparsifier may have
    several, for example one per group of tables: its next step updates masks if any of those that
    have stepped since its last one has an update.

    A schedule between ints has ints, rounded half to even, except for ``sparsity_level``.

    Args:
        initial: the value before ``begin``, where curves start.
        begin: the first mask update; steps count from 0, the one of the construction.
        end: the last mask update; None, where a schedule allows it, is never.
        every: steps between mask updates (``end`` is an update even off that grid).
        data_sparsifier, schedule_param, last_epoch, verbose: as in :class:`BaseDataScheduler`.

    Raises:
        ValueError: a step or an interval is invalid, a level is outside [0, 1] (where
            ``schedule_param`` is "sparsity_level"), a name or glob matches no data, or ranks have
            different plans. On every rank, even if one alone is wrong.
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
        known = isinstance(data_sparsifier, BaseDataSparsifier)  # anything else is refused below
        self._check_plan_everywhere(data_sparsifier.data_groups if known else None)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    @property
    def window(self) -> Window:
        """The steps at which masks are updated."""
        return Window(begin=self.begin, end=self.end, every=self.every)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore step and plan, and write the values of that step to the sparsifier.

        Restore the sparsifier first. Collective over all ranks: every rank must call it. On an
        error nothing has changed. Warns of a name or glob that only matches data which the
        sparsifier no longer has (squashed, for example).
        """
        _, commit = self.prepare_load(state_dict)
        commit()

    def prepare_load(
        self,
        state_dict: Mapping[str, Any],
    ) -> tuple[Mapping[str, Any], Callable[[], None]]:
        """Check a state on all ranks without changing anything. Collective over all ranks.

        Returns:
            The values in force at the step of the state, by name, and the function that restores
            the state. It is local and cannot fail.

        Raises:
            ValueError: the state is invalid on some rank, or ranks have different ones; on every
                rank.
        """
        loaded = copy.copy(self)  # it takes the state, and this scheduler takes it once all agree
        try:
            BaseDataScheduler.load_state_dict(loaded, self._translated(state_dict))
            # The state may name data that was squashed since.
            names = {**loaded.base_param, **loaded.data_sparsifier.data_groups}
        except Exception as error:  # of any kind: the other ranks must raise too
            self._refuse(ValueError(f"Invalid state of {type(self).__name__}: {error}."))
        loaded._check_plan_everywhere(names)
        values = loaded._agreed_values()

        def commit() -> None:
            self.__dict__.update(loaded.__dict__)
            self._apply(values)
            present = self.data_sparsifier.data_groups
            if unmatched := _matching_nothing(self._given(), present):
                warnings.warn(
                    f"The names or globs {unmatched} match data that the sparsifier had when the "
                    f"scheduler was made, and none that it has now: {list(present)}.",
                    UserWarning,
                    stacklevel=3,
                )

        return values, commit

    def _translated(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state of another class, converted to one of this class."""
        return state_dict

    def _next_values(self) -> Mapping[str, Any]:
        """Collective at construction. Later local: ranks have one plan, by step alone."""
        if self._step_count == 1:
            return self._agreed_values()
        # Between mask updates nothing is written: values set by hand stay.
        return self._ask() if self._updates_masks() else {}

    def _agreed_values(self) -> Mapping[str, Any]:
        """The values in force, once all ranks have the same plan. Collective over all ranks."""
        return self._agreed_answer(group_over(world_ranks()))

    def _updates_masks(self) -> bool:
        return self.window.updates(self.last_epoch)

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        plan = {key: getattr(self, key) for key in ("begin", "end", "every")}
        # As text: 1 and 1.0 are two plans.
        return {**super()._facts(answer), **plan, "initial": repr(self.initial)}

    def _given(self) -> Any:
        """The schedule of all data, or a dict by name or glob."""
        raise NotImplementedError

    def _check_plan_everywhere(self, names: Iterable[str] | None) -> None:
        """Raise on every rank what :meth:`_check_plan` raises on this one.

        The others wait for it in an agreement. Each glob must match a name here, and only here:
        data may be squashed later.
        """
        try:
            self._check_plan()
            unmatched = [] if names is None else _matching_nothing(self._given(), names)
            if unmatched:
                raise ValueError(
                    f"Invalid names or globs {unmatched}: must match data of the sparsifier, which "
                    f"has {list(names or ())}."
                )
        except Exception as error:
            self._refuse(error)

    def _check_plan(self) -> None:
        window = self.window
        self.begin, self.end, self.every = window.begin, window.end, window.every
        self.initial = self._checked("initial", self.initial)

    def _checked(self, what: str, value: object) -> float:
        """``value`` as a finite number; levels as floats in [0, 1], other ints stay ints."""
        is_level = self.schedule_param == "sparsity_level"
        return level(what, value) if is_level else number(what, value)


def by_name(given: T | dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """Return the entry of the last glob that matches each name.

    Names that no glob matches are left out.
    """
    if not isinstance(given, dict):
        return dict.fromkeys(names, given)
    chosen = {}
    for name in names:
        for glob, entry in given.items():
            if fnmatchcase(name, glob):
                chosen[name] = entry
    return chosen


def _matching_nothing(given: object, names: Iterable[str]) -> list[str]:
    """The globs that match none of the names."""
    if not isinstance(given, dict):
        return []
    matching = {glob for name in names for glob in given if fnmatchcase(name, glob)}
    return [glob for glob in given if glob not in matching]
