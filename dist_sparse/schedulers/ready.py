"""Schedulers that need no code: curves over a window of steps, and functions of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from dist_sparse.schedulers import curves
from dist_sparse.schedulers.curves import Curve
from dist_sparse.schedulers.windowed import ReadyDataScheduler, by_name
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = [
    "ConstantDataScheduler",
    "CosineDataScheduler",
    "CubicDataScheduler",
    "CurveDataScheduler",
    "ExponentialDataScheduler",
    "LambdaDataScheduler",
    "LinearDataScheduler",
    "OneShotDataScheduler",
    "ReadyDataScheduler",
    "by_name",
]

Finals: TypeAlias = float | Mapping[str, float]

# Their values depend on how much of the way to ``end`` is done.
_GROWING = (curves.linear, curves.cubic, curves.cosine, curves.exponential)


class CurveDataScheduler(ReadyDataScheduler):
    """A curve from ``initial`` to ``final``. The six classes named after curves are this one.

    Args:
        curve: a pure function of :mod:`dist_sparse.schedulers.curves`, or one of your own: ``curve(
            step, initial, final, begin, end) -> value``, the same on every rank. Not saved in the
            state.
        final: the value at ``end`` and after, for all data, or a mapping from names or globs to
            values; the last match wins. Data without a match is not scheduled.
        initial, begin, end, every: as in :class:`ReadyDataScheduler`. Curves that grow need an
            ``end``.
        data_sparsifier, schedule_param, last_epoch, verbose: as in :class:`BaseDataScheduler`.

    Raises:
        ValueError: see :class:`ReadyDataScheduler`.

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

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        curve: Curve,
        final: Finals,
        initial: float = 0,
        begin: int = 0,
        end: int | None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.curve = curve
        self.final = dict(final) if isinstance(final, Mapping) else final
        window = (begin, end, every)
        super().__init__(data_sparsifier, schedule_param, initial, *window, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, float]:
        """Return the values in force at step ``last_epoch``."""
        step = self.window.last_update(self.last_epoch)
        finals = by_name(self.final, self.data_sparsifier.data_groups)
        return {name: self._value(step, final) for name, final in finals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier and the curve, which a safe load refuses.

        A mapping ``final`` is saved as pairs, because torch.distributed.checkpoint loads only those
        keys of a mapping that are here already.
        """
        state = super().state_dict()
        del state["curve"]
        if isinstance(self.final, dict):
            state["final"] = [list(pair) for pair in self.final.items()]
        return state

    def _checked_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        final = state_dict.get("final")
        if isinstance(final, list | tuple):
            state_dict = {**state_dict, "final": dict(final)}
        return super()._checked_state(state_dict)

    def _value(self, step: int | None, final: float) -> float:
        """The value of the latest mask update ``step``; None is before ``begin``."""
        value = self.initial
        if step is not None:
            value = self.curve(step, self.initial, final, self.begin, self.end)
        # Keys such as zeros_per_block take ints only; levels are floats by now.
        both_ints = isinstance(self.initial, int) and isinstance(final, int)
        return round(value) if both_ints else float(value)

    def _given(self) -> float | dict[str, float]:
        return self.final

    def _check_plan(self) -> None:
        if self.end is None and self.curve in _GROWING:
            rule = "must have an end, an int >= begin; a constant level none"
            raise ValueError(f"Invalid end=None: {type(self).__name__} {rule}.")
        super()._check_plan()
        if isinstance(self.final, dict):
            finals = self.final.items()
            self.final = {name: self._checked(f"final[{name!r}]", value) for name, value in finals}
        else:
            self.final = self._checked("final", self.final)

    def _checked(self, what: str, value: object) -> float:
        found = super()._checked(what, value)
        if found >= 1 and self.curve is curves.exponential:
            why = "equal fractions of the rest never remove everything"
            raise ValueError(f"Invalid {what}={value!r}: must be < 1, because {why}.")
        return found

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        # Pairs, because the order of globs matters.
        final = list(self.final.items()) if isinstance(self.final, dict) else self.final
        curve = getattr(self.curve, "__name__", type(self.curve).__name__)
        return {**super()._facts(answer), "final": repr(final), "curve": curve}


# The names repeat the signature, so that type checkers and errors know what each of them takes.


class ConstantDataScheduler(CurveDataScheduler):
    """``final`` from ``begin`` on. Masks follow the weights at each update."""

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: Finals,
        initial: float = 0,
        begin: int = 0,
        end: int | None = None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            data_sparsifier,
            schedule_param,
            curve=curves.constant,
            final=final,
            initial=initial,
            begin=begin,
            end=end,
            every=every,
            last_epoch=last_epoch,
            verbose=verbose,
        )


class OneShotDataScheduler(CurveDataScheduler):
    """``final`` at step ``begin``, the only mask update; takes neither ``end`` nor ``every``."""

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: Finals,
        initial: float = 0,
        begin: int = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            data_sparsifier,
            schedule_param,
            curve=curves.one_shot,
            final=final,
            initial=initial,
            begin=begin,
            end=begin,
            last_epoch=last_epoch,
            verbose=verbose,
        )


class _GrowingDataScheduler(CurveDataScheduler):
    """A curve of a name that needs an end."""

    _named: ClassVar[Curve]

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str = "sparsity_level",
        *,
        final: Finals,
        initial: float = 0,
        begin: int = 0,
        end: int | None,
        every: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            data_sparsifier,
            schedule_param,
            curve=type(self)._named,
            final=final,
            initial=initial,
            begin=begin,
            end=end,
            every=every,
            last_epoch=last_epoch,
            verbose=verbose,
        )


class LinearDataScheduler(_GrowingDataScheduler):
    """Equal amounts at equal distances (:func:`~dist_sparse.schedulers.curves.linear`)."""

    _named = curves.linear


class CubicDataScheduler(_GrowingDataScheduler):
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

    _named = curves.cubic


class CosineDataScheduler(_GrowingDataScheduler):
    """Half a cosine wave, slow at both ends (:func:`~dist_sparse.schedulers.curves.cosine`)."""

    _named = curves.cosine


class ExponentialDataScheduler(_GrowingDataScheduler):
    """Remove the same fraction of the remaining weights at each mask update; ``final`` must be < 1.

    The curve is :func:`~dist_sparse.schedulers.curves.exponential`. The GammaScheduler in the
    README of torch.ao's data scheduler intends the same, but multiplies the level of the last step
    by gamma, starting at the 0.0 that it wrote itself at construction, so that the level stays 0.
    Here the density, 1 at first, is multiplied, and the value depends on the step alone.
    """

    _named = curves.exponential


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
        window = (begin, end, every)
        super().__init__(data_sparsifier, schedule_param, initial, *window, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, Any]:
        """Return the values in force at step ``last_epoch``."""
        step = self.window.last_update(self.last_epoch)
        functions = by_name(self.fn, self.data_sparsifier.data_groups)
        if step is None:
            return dict.fromkeys(functions, self.initial)
        values = {name: function(step) for name, function in functions.items()}
        if self.schedule_param == "sparsity_level":
            for name, value in values.items():
                values[name] = self._checked(f"fn({step}) of {name!r}", value)
        return values

    def _given(self) -> Any:
        return self.fn

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier and the functions, which a safe load
        refuses."""
        return {key: value for key, value in super().state_dict().items() if key != "fn"}

    def _next_values(self) -> Mapping[str, Any]:
        if self._step_count > 1 and not self._updates_masks():
            return {}
        return self._agreed_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        """Rank 0's values: plans are equal on all ranks, functions need not be. Collective."""
        return self._values_of_rank_0()
