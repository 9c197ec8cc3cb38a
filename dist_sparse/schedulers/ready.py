"""Schedulers that need no code: curves over a window of steps, and functions of the step.

Masks are updated only at the steps of the window. At all other steps ``scheduler.step()`` counts and does nothing else,
and ``sparsifier.step()`` returns at once. The value in force at step t is the schedule's value at the latest update not
after t, and ``initial`` before ``begin``, whatever happened in between: resuming needs one integer. Construction and
``load_state_dict`` check that all ranks have the same plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

from dist_sparse.checks import level, number
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.curves import Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = [
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LinearDataScheduler",
    "OneShotDataScheduler",
    "ReadyDataScheduler",
    "by_name",
]

T = TypeVar("T")


class ReadyDataScheduler(BaseDataScheduler):
    """Base class of the ready schedulers: a window of mask updates, and a value that depends on the step alone.

    Call ``sparsifier.step(); scheduler.step()`` once per training step. One sparsifier may have several, for example
    one per group of tables: its next step updates masks if any of those that have stepped since its last one has an
    update.

    A schedule between ints has ints, rounded half to even, except for ``sparsity_level``.

    Args:
        initial: the value before ``begin``, where curves start.
        begin: the first mask update; steps count from 0, the one of the construction.
        end: the last mask update; None, where a schedule allows it, is never.
        every: steps between mask updates (``end`` is an update even off that grid).
        data_sparsifier, schedule_param, last_epoch, verbose: as in :class:`BaseDataScheduler`.

    Raises:
        ValueError: a step or an interval is invalid, a level is outside [0, 1] (where ``schedule_param`` is
            "sparsity_level"), a name or glob matches no data, or ranks have different plans. On every rank, even if one
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
        known = isinstance(data_sparsifier, BaseDataSparsifier)  # anything else is refused below
        self._check_plan_everywhere(data_sparsifier.data_groups if known else None)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    @property
    def window(self) -> Window:
        """The steps at which masks are updated."""
        return Window(begin=self.begin, end=self.end, every=self.every)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore step and plan, and write the values of that step to the sparsifier. Warns of a name or glob that only
        matches data which the sparsifier no longer has (squashed, for example).

        Restore the sparsifier first. Collective over all ranks: every rank must call it. On an error nothing has
        changed.
        """
        _, commit = self.prepare_load(state_dict)
        commit()

    def prepare_load(self, state_dict: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[], None]]:
        """Check a state on all ranks without changing anything. Collective over all ranks.

        Returns:
            The values in force at the step of the state, by name, and the function that restores the state. It is local
            and cannot fail.

        Raises:
            ValueError: the state is invalid on some rank, or ranks have different ones; on every rank.
        """
        loaded = object.__new__(type(self))
        loaded.__dict__.update(self.__dict__)
        try:
            loaded.__dict__.update(self._checked_state(self._translated(state_dict)))
            names = {**loaded.base_param, **loaded.data_sparsifier.data_groups}
        except Exception as error:  # of any kind: the other ranks must raise too
            self._refuse(ValueError(f"Invalid state of {type(self).__name__}: {error}."))
        loaded._check_plan_everywhere(names)
        values = loaded._agreed_values()

        def commit() -> None:
            self.__dict__.update(loaded.__dict__)
            self._apply(values)
            if unmatched := _matching_nothing(self._given(), self.data_sparsifier.data_groups):
                warnings.warn(
                    f"The names or globs {unmatched} match data that the sparsifier had when the scheduler was made, "
                    f"and none that it has now: {list(self.data_sparsifier.data_groups)}.",
                    UserWarning,
                    stacklevel=3,
                )

        return values, commit

    def _translated(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state of another class, converted to one of this class."""
        return state_dict

    def _next_values(self) -> Mapping[str, Any]:
        """Collective at construction. Later local: ranks have one plan, which depends on the step only."""
        if self._step_count == 1:
            return self._agreed_values()
        return self._ask() if self._updates_masks() else {}

    def _agreed_values(self) -> Mapping[str, Any]:
        """The values in force, once all ranks have the same plan. Collective over all ranks."""
        return self._agreed_answer(group_over(world_ranks()))

    def _updates_masks(self) -> bool:
        return self.window.updates(self.last_epoch)

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        plan = {key: getattr(self, key) for key in ("begin", "end", "every")}
        return {**super()._facts(answer), **plan, "initial": repr(self.initial)}  # as text: 1 and 1.0 are two plans

    def _given(self) -> Any:
        """The schedule of all data, or a dict by name or glob."""
        raise NotImplementedError

    def _check_plan_everywhere(self, names: Iterable[str] | None) -> None:
        """Raise on every rank what :meth:`_check_plan` raises on this one: the others wait for it in an agreement.

        Each glob must match a name here, and only here: data may be squashed later.
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
        window = self.window
        self.begin, self.end, self.every = window.begin, window.end, window.every
        self.initial = self._checked("initial", self.initial)

    def _checked(self, what: str, value: object) -> float:
        """``value`` as a finite float, or as an int if it is one and no sparsity level; levels must be in [0, 1]."""
        return level(what, value) if self.schedule_param == "sparsity_level" else number(what, value)


class _CurveDataScheduler(ReadyDataScheduler):
    """Base class of the curves from ``initial`` to ``final``.

    Args:
        final: the value at ``end`` and after, for all data, or a mapping from names or globs to values: of several that
            match, later ones win. Data that none matches is not scheduled.
    """

    _curve: ClassVar[staticmethod[[int, float, float, int, int | None], float]]

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: float | Mapping[str, float],
        initial: float = 0,
        begin: int = 0,
        end: int | None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.final = dict(final) if isinstance(final, Mapping) else final
        super().__init__(data_sparsifier, schedule_param, initial, begin, end, every, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, float]:
        """Return the values in force at step ``last_epoch``."""
        step = self.window.last_update(self.last_epoch)
        finals = by_name(self.final, self.data_sparsifier.data_groups)
        return {name: self._value(step, final) for name, final in finals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier, and a mapping ``final`` as pairs: of a mapping
        torch.distributed.checkpoint loads the keys alone that are here already."""
        pairs = {"final": list(map(list, self.final.items()))} if isinstance(self.final, dict) else {}
        return {**super().state_dict(), **pairs}

    def _checked_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        final = state_dict.get("final")
        return super()._checked_state(
            {**state_dict, "final": dict(final)} if isinstance(final, (list, tuple)) else state_dict
        )

    def _value(self, step: int | None, final: float) -> float:
        """The value of the latest mask update ``step``; None is before ``begin``."""
        curve = type(self)._curve
        value = self.initial if step is None else curve(step, self.initial, final, self.begin, self.end)
        return round(value) if isinstance(self.initial, int) and isinstance(final, int) else float(value)

    def _given(self) -> float | dict[str, float]:
        return self.final

    def _check_plan(self) -> None:
        super()._check_plan()
        if isinstance(self.final, dict):
            self.final = {name: self._checked(f"final[{name!r}]", value) for name, value in self.final.items()}
        else:
            self.final = self._checked("final", self.final)

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        # Pairs, because the order of globs matters.
        final = list(self.final.items()) if isinstance(self.final, dict) else self.final
        return {**super()._facts(answer), "final": repr(final)}


class _GrowingDataScheduler(_CurveDataScheduler):
    """A curve that needs an end."""

    def _check_plan(self) -> None:
        if self.end is None:
            raise ValueError(
                f"Invalid end=None: {type(self).__name__} must have an end, an int >= begin; a constant level none."
            )
        super()._check_plan()


class ConstantDataScheduler(_CurveDataScheduler):
    """``final`` from ``begin`` on. Masks follow the weights at each update; without ``end``, for the whole training.

    Example::

        >>> import torch
        >>> from dist_sparse import ConstantDataScheduler, DataNormSparsifier
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = ConstantDataScheduler(sparsifier, final=0.5, begin=2, every=2)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.0, 0.5, 0.5, 0.5]
    """

    _curve = staticmethod(curves.constant)

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: float | Mapping[str, float],
        initial: float = 0,
        begin: int = 0,
        end: int | None = None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        plan: dict[str, Any] = {"final": final, "initial": initial, "begin": begin, "end": end, "every": every}
        super().__init__(data_sparsifier, schedule_param, **plan, last_epoch=last_epoch, verbose=verbose)


class OneShotDataScheduler(_CurveDataScheduler):
    """``final`` at step ``begin``, the only mask update; takes neither ``end`` nor ``every``.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, OneShotDataScheduler
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = OneShotDataScheduler(sparsifier, final=0.5, begin=2)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.0, 0.5, 0.5, 0.5]
    """

    _curve = staticmethod(curves.one_shot)

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: float | Mapping[str, float],
        initial: float = 0,
        begin: int = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        plan: dict[str, Any] = {"final": final, "initial": initial, "begin": begin, "end": begin, "every": 1}
        super().__init__(data_sparsifier, schedule_param, **plan, last_epoch=last_epoch, verbose=verbose)


class LinearDataScheduler(_GrowingDataScheduler):
    """Equal amounts at equal distances (:func:`~dist_sparse.schedulers.curves.linear`).

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, LinearDataScheduler
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = LinearDataScheduler(sparsifier, final=0.8, end=4)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.2, 0.4, 0.6, 0.8]
    """

    _curve = staticmethod(curves.linear)


class CubicDataScheduler(_GrowingDataScheduler):
    """Fast at first, slow near the end (:func:`~dist_sparse.schedulers.curves.cubic`: Zhu & Gupta 2017, equation 1).

    Example::

        >>> import torch
        >>> from dist_sparse import CubicDataScheduler, DataNormSparsifier
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = CubicDataScheduler(sparsifier, final=0.8, end=4, every=2)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.0, 0.7, 0.7, 0.8]
    """

    _curve = staticmethod(curves.cubic)


class CosineDataScheduler(_GrowingDataScheduler):
    """Half a cosine wave, slow at both ends (:func:`~dist_sparse.schedulers.curves.cosine`).

    Example::

        >>> import torch
        >>> from dist_sparse import CosineDataScheduler, DataNormSparsifier
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = CosineDataScheduler(sparsifier, final=0.8, end=4)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.117, 0.4, 0.683, 0.8]
    """

    _curve = staticmethod(curves.cosine)


class ExponentialDataScheduler(_GrowingDataScheduler):
    """Remove the same fraction of the remaining weights at each mask update; ``final`` must be < 1.

    The curve is :func:`~dist_sparse.schedulers.curves.exponential`. The GammaScheduler in the README of torch.ao's data
    scheduler intends the same, but multiplies the level of the last step by gamma, starting at the 0.0 that it wrote
    itself at construction, so that the level stays 0. Here the density, 1 at first, is multiplied, and the value
    depends on the step alone.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, ExponentialDataScheduler
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = ExponentialDataScheduler(sparsifier, final=0.75, end=4)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.293, 0.5, 0.646, 0.75]
    """

    _curve = staticmethod(curves.exponential)

    def _checked(self, what: str, value: object) -> float:
        number = super()._checked(what, value)
        if number >= 1:
            raise ValueError(
                f"Invalid {what}={value!r}: must be < 1, because equal fractions of the rest never remove everything."
            )
        return number


class LambdaDataScheduler(ReadyDataScheduler):
    """A function of the step, called at mask updates only. Those are collective: rank 0's values are used on all ranks.

    Args:
        fn: ``fn(step) -> value`` for all data, or such functions by name or glob (as ``final`` elsewhere). Not saved in
            the state.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, LambdaDataScheduler
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = LambdaDataScheduler(sparsifier, fn=lambda step: step / 10, every=2)
        >>> levels = []
        >>> for _ in range(5):
        ...     levels.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> levels
        [0.0, 0.0, 0.2, 0.2, 0.4]
    """

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        fn: Callable[[int], Any] | Mapping[str, Callable[[int], Any]],
        initial: float = 0,
        begin: int = 0,
        end: int | None = None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.fn = dict(fn) if isinstance(fn, Mapping) else fn
        super().__init__(data_sparsifier, schedule_param, initial, begin, end, every, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, Any]:
        """Return the values in force at step ``last_epoch``."""
        step = self.window.last_update(self.last_epoch)
        functions = by_name(self.fn, self.data_sparsifier.data_groups)
        if step is None:
            return dict.fromkeys(functions, self.initial)
        values = {name: function(step) for name, function in functions.items()}
        if self.schedule_param == "sparsity_level":
            values = {name: self._checked(f"fn({step}) of {name!r}", value) for name, value in values.items()}
        return values

    def _given(self) -> Any:
        return self.fn

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier and the functions, which a safe load refuses."""
        return {key: value for key, value in super().state_dict().items() if key != "fn"}

    def _next_values(self) -> Mapping[str, Any]:
        if self._step_count > 1 and not self._updates_masks():
            return {}
        return self._agreed_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        """Rank 0's values: plans are equal on all ranks, functions need not be. Collective over all ranks."""
        return BaseDataScheduler._next_values(self)


def by_name(given: T | dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """Return the entry of the last glob that matches each name. Names that no glob matches are left out."""
    names = list(names)
    if not isinstance(given, dict):
        return dict.fromkeys(names, given)
    chosen = {name: glob for glob in given for name in names if fnmatchcase(name, glob)}
    return {name: given[chosen[name]] for name in names if name in chosen}


def _matching_nothing(given: object, names: Iterable[str]) -> list[str]:
    """The globs that match none of the names."""
    globs = given if isinstance(given, dict) else {}
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]
