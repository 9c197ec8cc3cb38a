"""Which schedules need no code?

Curves over a window of steps, and functions of the step. What they share (due steps, agreement of the ranks, state) is
in :class:`~dist_sparse.schedulers.window.ReadyDataScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.window import ReadyDataScheduler, by_name
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = [
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LinearDataScheduler",
    "OneShotDataScheduler",
]


class _CurveDataScheduler(ReadyDataScheduler):
    """From ``initial`` to ``final`` along a curve.

    Args:
        final: the value at ``end`` and after, for all data, or a mapping from names or globs to values: of several that
            match, later ones win. Data that none matches are not scheduled.
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
        """The values in force at step ``last_epoch``."""
        step = self._last_due()
        finals = by_name(self.final, self.data_sparsifier.data_groups)
        return {name: self._value(step, final) for name, final in finals.items()}

    def _value(self, step: int | None, final: float) -> float:
        """At the latest due step; None is before ``begin``."""
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
        # Pairs, for the order of globs counts.
        final = list(self.final.items()) if isinstance(self.final, dict) else self.final
        return {**super()._facts(answer), "final": repr(final)}


class _GrowingDataScheduler(_CurveDataScheduler):
    """A curve that needs an end to arrive at."""

    def _check_plan(self) -> None:
        if self.end is None:
            raise ValueError(f"Invalid end=None: {type(self).__name__} must have an end, an int >= begin.")
        super()._check_plan()


class ConstantDataScheduler(_CurveDataScheduler):
    """``final`` from ``begin`` on; the mask moves with the weights at each due step, without ``end`` for ever."""

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
    """``final`` at step ``begin``, the only one at which the mask moves: it takes neither ``end`` nor ``every``."""

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
    """Equal amounts at equal distances (:func:`~dist_sparse.schedulers.curves.linear`)."""

    _curve = staticmethod(curves.linear)


class CubicDataScheduler(_GrowingDataScheduler):
    """Fast at first, slow near the end (:func:`~dist_sparse.schedulers.curves.cubic`: Zhu & Gupta 2017, equation 1)."""

    _curve = staticmethod(curves.cubic)


class CosineDataScheduler(_GrowingDataScheduler):
    """Half a cosine wave, slow at both ends (:func:`~dist_sparse.schedulers.curves.cosine`)."""

    _curve = staticmethod(curves.cosine)


class ExponentialDataScheduler(_GrowingDataScheduler):
    """Removes the same fraction of what is left at each due step; ``final`` must be < 1.

    The curve is :func:`~dist_sparse.schedulers.curves.exponential`. It is what the GammaScheduler in the README of
    torch.ao's data scheduler is after. That one multiplies the level of the last step by gamma, starting from the 0.0
    that it wrote itself at construction: 0.0 * gamma is 0.0 for ever, and only data that are added later, with a level
    of their own, ever grow. Here it is the density, 1 at first, that is multiplied, and the value depends on the step
    alone.
    """

    _curve = staticmethod(curves.exponential)

    def _checked(self, what: str, value: object) -> float:
        number = super()._checked(what, value)
        if number >= 1:
            raise ValueError(
                f"Invalid {what}={value!r}: must be < 1, for equal fractions of what is left never remove everything."
            )
        return number


class LambdaDataScheduler(ReadyDataScheduler):
    """A function of the step, called for due steps alone. Those are collective: rank 0's values go to all ranks.

    Args:
        fn: ``fn(step) -> value`` for all data, or such functions by name or glob (as ``final`` elsewhere). Not part of
            the state.
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
        """The values in force at step ``last_epoch``."""
        step = self._last_due()
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
        """Every attribute but the sparsifier and the functions, which a safe load would refuse."""
        return {key: value for key, value in super().state_dict().items() if key != "fn"}

    def _next_values(self) -> Mapping[str, Any]:
        if self._step_count > 1 and not self._is_due():
            return {}
        return self._agreed_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        """The plans are the same, the functions need not be: rank 0's values. Collective over all ranks."""
        return BaseDataScheduler._next_values(self)
