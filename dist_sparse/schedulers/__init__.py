"""Schedulers of a sparsifier's configuration: a base class for your own, and ready ones, which are
curves over a window of steps, and functions of the step.

Between the mask updates of a window ``scheduler.step()`` only counts, and ``sparsifier.step()``
returns at once. The value at step t is the schedule's value at the latest update not after t, and
``initial`` before ``begin``. It depends only on t, so that resuming needs one integer. Construction
and ``load_state_dict`` check that all ranks have the same plan.
"""

import copy
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from glob import escape
from typing import Any, ClassVar, TypeVar

from dist_sparse.checks import UNTOUCHED, number, scheduled_level
from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.curves import Curve, Window
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = [
    "BaseDataScheduler",
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "CurveDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LinearDataScheduler",
    "OneShotDataScheduler",
    "ReadyDataScheduler",
    "Window",
    "curves",
]

T = TypeVar("T")
Finals = float | str | Mapping[str, float | str]

# Curves that need an ``end``: they depend on the fraction of the way to it.
_GROWING = (curves.linear, curves.cubic, curves.cosine, curves.exponential)


class ReadyDataScheduler(BaseDataScheduler):
    """Base class of the ready schedulers: a window of mask updates, and a value that depends only
    on the step.

    Call ``sparsifier.step(); scheduler.step()`` once per training step. One sparsifier may have
    several, for example one per group of tables: its next step updates masks if any scheduler that
    has stepped since its last step has an update.

    Schedules between ints give ints, rounded half to even, except for ``sparsity_level``.

    Args:
        initial: the value before ``begin``, where curves start.
        begin: the first mask update; steps count from 0, the one of the construction.
        end: the last mask update; None, where a schedule allows it, is never.
        every: steps between mask updates (``end`` is an update even if it is off that grid).
        data_sparsifier: whose configuration is scheduled, as in :class:`BaseDataScheduler`.
        schedule_param: the scheduled key, as there.
        last_epoch: the step to go on from, as there.
        verbose: as there.

    Raises:
        ValueError: a step or an interval is invalid, a level is outside [0, 1] (where
            ``schedule_param`` is "sparsity_level"), a name or glob matches no data, or ranks have
            different plans. On every rank, even if one alone is wrong.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        initial: float = 0,
        begin: int = 0,
        end: int | None = None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
        **unknown: Any,
    ) -> None:
        # Python's error would name this class, not the one that was called.
        if unknown:
            raise TypeError(
                f"{type(self).__name__}() has no argument {', '.join(unknown)}; see final or fn."
            )
        # Before the base class, whose constructor takes the first step.
        self.initial = initial
        self.begin = begin
        self.end = end
        self.every = every
        self.schedule_param = schedule_param
        # The base class refuses anything that is not a sparsifier.
        if isinstance(data_sparsifier, BaseDataSparsifier):
            self._check_plan_everywhere(data_sparsifier.data_groups)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    @property
    def window(self) -> Window:
        """The steps at which masks are updated."""
        return Window(begin=self.begin, end=self.end, every=self.every)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore step and plan, and write the values of that step to the sparsifier.

        Restore the sparsifier first. Collective over all ranks: every rank must call it. On an
        error nothing has changed.
        """
        self.prepare_load(state_dict)()

    def prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state on all ranks without changing anything. Collective over all ranks.

        Returns:
            The function that restores the state. It is local and cannot fail.

        Raises:
            ValueError: the state is invalid on some rank, or ranks have different ones; on every
                rank.
        """
        _, commit = self.prepare_values(state_dict)
        return commit

    def prepare_values(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Callable[[], None]]:
        """Return the values in force at the step of a state, by name, and :meth:`prepare_load`.
        Collective over all ranks."""
        # The state is loaded into a copy, whose attributes this scheduler takes once all ranks
        # agree. Until then it has not changed.
        loaded = copy.copy(self)
        try:
            BaseDataScheduler.load_state_dict(loaded, state_dict)
            # The state may name data that was squashed since.
            names = {**loaded.base_param, **loaded.data_sparsifier.data_groups}
        except Exception as error:
            # Any error: the other ranks, which wait in an agreement, must raise too.
            self._refuse(ValueError(f"Invalid state of {type(self).__name__}: {error}."))
        # As the constructor does with its arguments.
        loaded._check_plan_everywhere(names)
        values = loaded._agreed_values()

        def commit() -> None:
            # The copy is shallow: both have the same sparsifier.
            self.__dict__.update(loaded.__dict__)
            # The sparsifier's own load may have replaced plain data since.
            known = values.keys() & self.data_sparsifier.data_groups.keys()
            self._apply({name: values[name] for name in known})

        return values, commit

    def _next_values(self) -> Mapping[str, Any]:
        """Return the values of this step. Collective at construction only: later, all ranks have
        the same plan, and its values depend on the step alone."""
        if self._step_count == 1:
            return self._agreed_values()
        # Between mask updates nothing is written: values that a user sets stay.
        return self._values_of_update() if self._updates_masks() else {}

    def _values_of_update(self) -> Mapping[str, Any]:
        """Return the values of a mask update. Local: equal plans have equal values."""
        return self._compute_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        """Return the values of this step, once all ranks have the same plan. Collective over all
        ranks."""
        return self._local_values()

    def _updates_masks(self) -> bool:
        return self.window.updates(self.last_epoch)

    def _facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # The window has begin, end and every. initial as text: 1 and 1.0 are two plans.
        return {**super()._facts(values), **vars(self.window), "initial": repr(self.initial)}

    def get_schedule_param(self) -> dict[str, Any]:
        """Return the values in force at step ``last_epoch``."""
        return self._values_at(self.window.last_update(self.last_epoch))

    def _values_at(self, update: int | None) -> dict[str, Any]:
        """Return the values of a mask update by name; None is before ``begin``."""
        finals = by_name(self._given, self.data_sparsifier.data_groups)
        return {name: self._value(name, update, final) for name, final in finals.items()}

    @property
    def _given(self) -> Any:
        """The schedule of all data, or a dict by name or glob."""
        raise NotImplementedError

    def _value(self, name: str, step: int | None, given: Any) -> Any:
        """Return the value at the mask update of a step; None is before ``begin``."""
        raise NotImplementedError

    def _check_plan_everywhere(self, names: Iterable[str]) -> None:
        """Call :meth:`_check_plan`; raise its error on every rank.

        Each glob must match a name at construction and loading, and only then: data may be squashed
        later.
        """
        try:
            self._check_plan()
            globs = self._given if isinstance(self._given, dict) else ()
            unmatched = [glob for glob in globs if not fnmatch.filter(names, glob)]
            if unmatched:
                raise ValueError(
                    f"Invalid names or globs {unmatched}: must match data of the sparsifier, which "
                    f"has {list(names)}."
                )
        except Exception as error:
            self._refuse(error)

    def _check_plan(self) -> None:
        # Python's ints, checked.
        vars(self).update(vars(self.window))
        self.initial = self._checked("initial", self.initial)

    def _checked(self, what: str, value: object) -> Any:
        """Return ``value`` as a finite number; levels as floats in [0, 1], other ints stay ints."""
        # Only the range of levels is known here; the sparsifier checks other keys.
        is_level = self.schedule_param == "sparsity_level"
        return scheduled_level(what, value) if is_level else number(what, value)


class CurveDataScheduler(ReadyDataScheduler):
    """A curve from ``initial`` to ``final``. The six classes named after curves are this one.

    Args:
        curve: a pure function from :mod:`dist_sparse.schedulers.curves`, or your own: ``curve(
            step, initial, final, begin, end) -> value``, the same on every rank. Not saved in the
            state. None is the curve that the class is named after.
        final: the value at ``end`` and after, required: for all data, or a mapping from names or
            globs to values; the last match wins. Data without a match is not scheduled.
        initial: as in :class:`ReadyDataScheduler`, like the next three.
        begin: the first mask update.
        end: the last mask update. Curves that grow need it.
        every: steps between mask updates.
        data_sparsifier: whose configuration is scheduled, as in :class:`BaseDataScheduler`.
        schedule_param: the scheduled key, as there.
        last_epoch: the step to go on from, as there.
        verbose: as there.

    Raises:
        ValueError, TypeError: see :class:`ReadyDataScheduler`.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.schedulers import CurveDataScheduler, curves
        >>> def levels(curve):
        ...     sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        ...     scheduler = CurveDataScheduler(sparsifier, curve=curve, final=0.8, end=4)
        ...     seen = []
        ...     for _ in range(5):
        ...         seen.append(round(sparsifier.data_groups["table"]["sparsity_level"], 3))
        ...         sparsifier.step()
        ...         scheduler.step()
        ...     return seen
        >>> levels(curves.linear)
        [0.0, 0.2, 0.4, 0.6, 0.8]
        >>> levels(curves.cubic)
        [0.0, 0.463, 0.7, 0.788, 0.8]
        >>> levels(curves.cosine)
        [0.0, 0.117, 0.4, 0.683, 0.8]
        >>> levels(curves.exponential)
        [0.0, 0.331, 0.553, 0.701, 0.8]
    """

    _unsaved = ("data_sparsifier", "curve")
    _curve: ClassVar[Curve] = curves.constant

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        curve: Curve | None = None,
        final: Finals | None = None,
        **plan: Any,
    ) -> None:
        self.curve = curve or type(self)._curve
        # None is refused with the other values, after unknown arguments.
        self.final: Any = dict(final) if isinstance(final, Mapping) else final
        super().__init__(data_sparsifier, schedule_param, **plan)

    def stop_at(self, step: int | None) -> None:
        """End the schedule with the values of an earlier ``step``, which are in force from now on;
        None is before ``begin``. Local: every rank must call it."""
        if step is None:
            step = self.begin - 1
        update = self.window.last_update(step)
        values = self._values_at(update)
        if isinstance(self.final, dict):
            # Names become globs here: a table may be called "a[0]".
            self.final = {escape(name): value for name, value in values.items()}
        else:
            self.final = self._value("all data", update, self.final)
        self.end = max(step, self.begin)
        self._apply(values)

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier and the curve, which a safe load refuses.

        A mapping ``final`` is saved as pairs, because torch.distributed.checkpoint loads only those
        keys of a mapping that are here already.
        """
        state = super().state_dict()
        if isinstance(self.final, dict):
            state["final"] = list(map(list, self.final.items()))
        return state

    def _checked_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        final = state_dict.get("final")
        # As state_dict() saves a mapping.
        if isinstance(final, list | tuple):
            state_dict = {**state_dict, "final": dict(final)}
        return super()._checked_state(state_dict)

    def _value(self, name: str, step: int | None, given: Any) -> Any:
        value: Any = self.initial
        if step is not None:
            value = self.curve(step, self.initial, given, self.begin, self.end)
        if value == UNTOUCHED:
            return value
        # Keys such as zeros_per_block take ints only. Levels are floats since _checked().
        only_ints = {type(self.initial), type(given)} == {int}
        return round(value) if only_ints else float(value)

    @property
    def _given(self) -> Any:
        return self.final

    def _check_plan(self) -> None:
        if self.end is None and self.curve in _GROWING:
            raise ValueError(
                f"Invalid end=None: {type(self).__name__} must have an end, an int >= begin; a"
                " constant level none."
            )
        super()._check_plan()
        if isinstance(self.final, dict):
            finals = self.final.items()
            self.final = {name: self._checked(f"final[{name!r}]", value) for name, value in finals}
        else:
            self.final = self._checked("final", self.final)

    def _checked(self, what: str, value: object) -> Any:
        checked = super()._checked(what, value)
        if checked == UNTOUCHED:
            if self.curve is not curves.constant or what == "initial":
                raise ValueError(
                    f"Level {value!r} does not rise: the schedule must be constant or one-shot."
                )
            return checked
        if checked >= 1 and self.curve is curves.exponential:
            raise ValueError(f"Invalid {what}={value!r}: must be < 1 on the exponential curve.")
        return checked

    def _facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # A callable object has no __name__.
        curve = getattr(self.curve, "__name__", type(self.curve).__name__)
        # As text: 1 and 1.0 are two plans, and the order of globs matters.
        return {**super()._facts(values), "final": repr(self.final), "curve": curve}


class ConstantDataScheduler(CurveDataScheduler):
    """``final`` from ``begin`` on. Masks follow the weights at each update."""


class OneShotDataScheduler(CurveDataScheduler):
    """``final`` at step ``begin``, the only mask update; takes neither ``end`` nor ``every``."""

    def __init__(self, *args: Any, begin: int = 0, **plan: Any) -> None:
        super().__init__(*args, begin=begin, end=begin, **plan)


class LinearDataScheduler(CurveDataScheduler):
    """Equal amounts at equal distances (:func:`~dist_sparse.schedulers.curves.linear`)."""

    _curve = curves.linear


class CubicDataScheduler(CurveDataScheduler):
    """Fast at first, slow near the end (:func:`~dist_sparse.schedulers.curves.cubic`).

    Zhu & Gupta 2017, equation 1.

    Example::

        >>> import torch
        >>> from dist_sparse import CubicDataScheduler, DataNormSparsifier
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = CubicDataScheduler(sparsifier, final=0.8, end=4, every=2)
        >>> for _ in range(2):
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> scheduler.get_last_param()
        {'table': 0.7000000000000001}
    """

    _curve = curves.cubic


class CosineDataScheduler(CurveDataScheduler):
    """Half a cosine wave, slow at both ends (:func:`~dist_sparse.schedulers.curves.cosine`)."""

    _curve = curves.cosine


class ExponentialDataScheduler(CurveDataScheduler):
    """Remove the same fraction of the remaining weights at each mask update; ``final`` must be < 1.

    The curve is :func:`~dist_sparse.schedulers.curves.exponential`. The GammaScheduler in the
    README of torch.ao's data scheduler intends the same, but multiplies the level of the last step
    by gamma, starting at the 0.0 that it wrote itself at construction, so that the level stays 0.
    Here the density, 1 at first, is multiplied, and the value depends on the step alone.
    """

    _curve = curves.exponential


class LambdaDataScheduler(ReadyDataScheduler):
    """A function of the step, called at mask updates only.

    Mask updates are collective: rank 0's values are used on all ranks.

    Args:
        fn: ``fn(step) -> value`` for all data, or such functions by name or glob (as ``final``
            elsewhere). Not saved in the state.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.schedulers import LambdaDataScheduler
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

    _unsaved = ("data_sparsifier", "fn")

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        fn: Callable[[int], Any] | Mapping[str, Callable[[int], Any]],
        **plan: Any,
    ) -> None:
        # A copy: the caller may change the mapping.
        self.fn = dict(fn) if isinstance(fn, Mapping) else fn
        super().__init__(data_sparsifier, schedule_param, **plan)

    def _values_of_update(self) -> Mapping[str, Any]:
        return self._agreed_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        # Functions may have other values on other ranks: rank 0's values are used.
        return BaseDataScheduler._agreed_values(self)

    def _value(self, name: str, step: int | None, given: Any) -> Any:
        if step is None:
            return self.initial
        value = given(step)
        is_level = self.schedule_param == "sparsity_level"
        return self._checked(f"fn({step}) of {name!r}", value) if is_level else value

    @property
    def _given(self) -> object:
        return self.fn


def by_name(given: T | dict[str, T], names: Collection[str]) -> dict[str, T]:
    """Return the entry of the last glob that matches each name.

    Names that no glob matches are left out.
    """
    if not isinstance(given, dict):
        return dict.fromkeys(names, given)
    chosen: dict[str, T] = {}
    for glob, entry in given.items():
        chosen |= dict.fromkeys(fnmatch.filter(names, glob), entry)
    # The order is the names', not the globs': values are written and printed in it.
    return {name: chosen[name] for name in names if name in chosen}
