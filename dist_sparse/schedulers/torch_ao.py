"""torch.ao's ``LambdaSL`` and ``CubicSL`` for data sparsifiers.

In torch.ao they schedule the groups of a module sparsifier; here the ``sparsity_level`` of each
name of a data sparsifier. Levels are torch.ao's at every step, to the last bit, without a grid of
updates: masks are updated at step 0 and where a level has changed since the step before. New code
should use :class:`~dist_sparse.CubicDataScheduler` and
:class:`~dist_sparse.schedulers.LambdaDataScheduler`, whose ``every`` sets how often masks are
updated.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from dist_sparse.checks import number
from dist_sparse.schedulers.ready import ReadyDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["CubicSL", "LambdaSL"]

T = TypeVar("T")
Each: TypeAlias = T | Sequence[T] | Mapping[str, T]
"""One value for all names, a list in their order, or a dict by name."""

_TORCH_AO_ONLY = {"base_sl", "_last_sl", "_get_sl_called_within_step", "sl_lambdas"}


class _SlScheduler(ReadyDataScheduler):
    """Base class of both: schedule present names relative to their levels, ``base_param``."""

    def __init__(self, sparsifier: BaseDataSparsifier, last_epoch: int, verbose: bool) -> None:
        # The base class refuses anything that is no sparsifier.
        known = isinstance(sparsifier, BaseDataSparsifier)
        groups = sparsifier.data_groups if known else {}
        self.base_param = {name: config.get("sparsity_level") for name, config in groups.items()}
        super().__init__(sparsifier, "sparsity_level", 0.0, 0, None, 1, last_epoch, verbose)

    def get_last_sl(self) -> list[Any]:
        """Return the levels after the last step, in the order of the sparsifier's names."""
        return list(self._last_param.values())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, or a state of torch.ao's class of the same name. Collective.

        Levels of torch.ao's are assigned to the names in their order, its functions are ignored.
        """
        super().load_state_dict(state_dict)

    def _translated(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        # torch.ao's name for base_param.
        if "base_sl" not in state_dict:
            return state_dict
        levels = _for_each("base_sl", state_dict["base_sl"], self.base_param)
        # Its counters have the names that they have here.
        state = {key: value for key, value in state_dict.items() if key not in _TORCH_AO_ONLY}
        return {**state, "base_param": levels}

    def _bases(self) -> dict[str, Any]:
        """Return the levels at construction, without tables squashed since."""
        known = self.data_sparsifier.data_groups
        return {name: level for name, level in self.base_param.items() if name in known}

    def _given(self) -> dict[str, None]:
        # Each name is a glob that matches itself, so that a squashed one is reported.
        return {glob.escape(name): None for name in self.base_param}

    def _check_plan(self) -> None:
        super()._check_plan()
        for name, level in self.base_param.items():
            self._checked(f"sparsity_level of {name!r}", level)


class LambdaSL(_SlScheduler):
    """The level of each name at construction, times a function of the step.

    After torch.ao's ``LambdaSL``.

    As there, a level may leave [0, 1]: it is written unchanged and acts as 0 or 1.

    The functions may differ between ranks (one may read a clock), so rank 0's levels are used, and
    **every** step is collective over all ranks. On several ranks a
    :class:`~dist_sparse.schedulers.LambdaDataScheduler` with ``every`` costs less.

    Args:
        sparsifier: the sparsifier to schedule, with the names that it has now.
        sl_lambda: ``sl_lambda(step) -> factor``; a list of such functions, in the order of the
            names; or a dict by name. Called once a step, from step 0 on. Not saved in the state.
        last_epoch: the last step already taken, to resume; -1 to start. The current levels of the
            sparsifier are multiplied: resume before a saved state is loaded into it, or by
            ``state_dict``.
        verbose: print each level that is written.

    Raises:
        TypeError: ``sparsifier`` is not a ``BaseDataSparsifier``.
        ValueError: not one function for each name, or a level that is no finite number, from
            :meth:`step` too; on every rank.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.compat import LambdaSL
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.5)
        >>> scheduler = LambdaSL(sparsifier, lambda step: min(1.0, step / 2))
        >>> sparsifier.step()
        >>> scheduler.step()
        >>> scheduler.get_last_sl()
        [0.25]
    """

    def __init__(
        self,
        sparsifier: BaseDataSparsifier,
        sl_lambda: Each[Callable[[int], float]],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sl_lambda = sl_lambda
        self._levels: Mapping[str, float] = {}
        self._moves = True
        super().__init__(sparsifier, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, float]:
        """Return the levels at step ``last_epoch``."""
        step = self.last_epoch
        functions = _for_each("sl_lambda", self.sl_lambda, self.base_param)
        levels = {}
        for name, base in self._bases().items():
            what = f"{base} * sl_lambda({step}) of {name!r}"
            levels[name] = self._checked(what, base * functions[name](step))
        return levels

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier and the functions: a safe load refuses them."""
        return {key: value for key, value in super().state_dict().items() if key != "sl_lambda"}

    def _checked(self, what: str, value: object) -> float:
        return float(number(what, value))

    def _check_plan(self) -> None:
        super()._check_plan()
        for name, function in _for_each("sl_lambda", self.sl_lambda, self.base_param).items():
            what = f"sl_lambda={function!r} of {name!r}"
            if not callable(function):
                raise ValueError(f"Invalid {what}: must be a function of the step.")

    def _next_values(self) -> Mapping[str, Any]:
        if self._step_count == 1:
            return self._agreed_values()
        # On every step: a function may read a clock, so that only rank 0's levels count.
        levels = self._moved(self._values_of_rank_0())
        return levels if self._moves else {}

    def _agreed_values(self) -> Mapping[str, Any]:
        """Return the levels after construction and loading. Collective."""
        self._levels = {}
        # The levels of the step before are not in a state, and decide whether masks are updated.
        if self.last_epoch > 0:
            self.last_epoch -= 1
            self._levels = self._values_of_rank_0()
            self.last_epoch += 1
        return self._moved(self._values_of_rank_0())

    def _moved(self, levels: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = [name for name, level in levels.items() if level != self._levels.get(name)]
        # Step 0 updates masks even at the level that the sparsifier has.
        self._moves = self.last_epoch == 0 or bool(changed)
        self._levels = levels
        return levels

    def _updates_masks(self) -> bool:
        return self._moves


class CubicSL(_SlScheduler):
    """From ``init_sl`` to the level of each name at construction, fast at first.

    After torch.ao's ``CubicSL``.

    With ``s_f`` for the level at construction and ``n = delta_t * total_t``, the level at step t is
    ``s_f + (init_sl - s_f) * (1 - (t - init_t) / n) ** 3``: ``init_sl`` until ``init_t``, ``s_f``
    from ``init_t + n`` on, and a new one at **every** step between, whatever ``delta_t``. As in
    torch.ao, a level never falls: if ``init_sl`` is above ``s_f``, it stays ``init_sl``.
    :class:`~dist_sparse.CubicDataScheduler` has neither trait.

    Steps are local, as those of all ready schedulers; construction is collective over all ranks.

    Args:
        sparsifier: the sparsifier to schedule, with the names that it has now.
        init_sl, init_t, delta_t, total_t, initially_zero: one value for all; a list in the order of
            the names; or a dict by name. ``init_t``, ``delta_t`` and ``total_t`` are numbers, whole
            or not; ``initially_zero`` makes the level 0 before ``init_t``.
        last_epoch: the last step already taken, to resume; -1 to start. Levels end at the current
            ones of the sparsifier: resume before a saved state is loaded into it, or by
            ``state_dict``.
        verbose: print each level that is written.

    Raises:
        TypeError: ``sparsifier`` is not a ``BaseDataSparsifier``.
        ValueError: not one value for each name, a level outside [0, 1], ``delta_t * total_t`` below
            1, or ranks have different plans; on every rank.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.compat import CubicSL
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.8)
        >>> scheduler = CubicSL(sparsifier, delta_t=1, total_t=2)
        >>> sparsifier.step()
        >>> scheduler.step()
        >>> scheduler.get_last_sl()
        [0.7000000000000001]
    """

    def __init__(
        self,
        sparsifier: BaseDataSparsifier,
        init_sl: Each[float] = 0.0,
        init_t: Each[float] = 0,
        delta_t: Each[float] = 10,
        total_t: Each[float] = 100,
        initially_zero: Each[bool] = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.init_sl, self.init_t, self.initially_zero = init_sl, init_t, initially_zero
        self.delta_t, self.total_t = delta_t, total_t
        super().__init__(sparsifier, last_epoch, verbose)

    def get_schedule_param(self) -> dict[str, float]:
        """Return the levels at step ``last_epoch``."""
        return self._levels_at(self.last_epoch)

    def _levels_at(self, step: int) -> dict[str, float]:
        plans = self._plans()
        return {name: _cubic(step, base, **plans[name]) for name, base in self._bases().items()}

    def _updates_masks(self) -> bool:
        step = self.last_epoch
        # Levels are pure in the step, so the step before needs no state.
        return step == 0 or self._levels_at(step) != self._levels_at(step - 1)

    def _plans(self) -> dict[str, dict[str, Any]]:
        """The arguments for each name."""
        keys = ("init_sl", "init_t", "delta_t", "total_t", "initially_zero")
        by_key = {key: _for_each(key, getattr(self, key), self.base_param) for key in keys}
        plans: dict[str, dict[str, Any]] = {}
        for name in self.base_param:
            plans[name] = {key: values[name] for key, values in by_key.items()}
        return plans

    def _check_plan(self) -> None:
        super()._check_plan()
        for name, plan in self._plans().items():
            self._checked(f"init_sl of {name!r}", plan["init_sl"])
            for key in ("init_t", "delta_t", "total_t"):
                number(f"{key} of {name!r}", plan[key])
            delta_t, total_t, zero = plan["delta_t"], plan["total_t"], plan["initially_zero"]
            if delta_t * total_t < 1:
                raise ValueError(
                    f"Invalid {delta_t=}, {total_t=} of {name!r}: their product, the number of "
                    "steps from init_sl to the final level, must be >= 1."
                )
            if not isinstance(zero, bool):
                raise ValueError(f"Invalid initially_zero={zero!r} of {name!r}: must be a bool.")

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        facts = {**super()._facts(answer), "final levels": repr(self.base_param)}
        for name, plan in self._plans().items():
            facts[f"plan of {name!r}"] = repr(sorted(plan.items()))
        return facts


def _cubic(
    step: int,
    final: float,
    *,
    init_sl: float,
    init_t: float,
    delta_t: float,
    total_t: float,
    initially_zero: bool,
) -> float:
    if initially_zero and step < init_t:
        return 0.0
    # In torch.ao's order of operations and of clamping: levels are equal to the last bit.
    level = final + (init_sl - final) * (1.0 - (step - init_t) / (delta_t * total_t)) ** 3
    return float(max(init_sl, min(final, level)))


def _for_each(what: str, given: Each[T], names: Iterable[str]) -> dict[str, T]:
    """Return the value of each name.

    Raises:
        ValueError: a list of another length, or a dict with other names.
    """
    names = list(names)
    rule = f"must have a value for each of the names {names}"
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(f"Invalid {what} for {list(given)}: {rule}.")
        return {name: given[name] for name in names}
    if isinstance(given, list | tuple):
        if len(given) != len(names):
            raise ValueError(f"Invalid {what} of length {len(given)}: {rule}.")
        return dict(zip(names, given, strict=True))
    return dict.fromkeys(names, given)  # type: ignore[arg-type]
