"""Who changes a sparsifier's configuration while training goes on?

A scheduler: it asks ``get_schedule_param`` for the values of one configuration key, writes them to ``data_groups`` and
leaves masks alone; the values count from the next ``sparsifier.step()``. When torch.distributed is in use, construction
and ``step`` are collective over all ranks: first they make sure that all ranks schedule the same names, then the answer
of rank 0 is written everywhere. Either all of a step happens, on every rank, or nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["BaseDataScheduler"]

_stepped: weakref.WeakKeyDictionary[BaseDataSparsifier, weakref.WeakSet[BaseDataScheduler]] = (
    weakref.WeakKeyDictionary()
)
"""The schedulers that have stepped since their sparsifier last did: it is due when any of them is. Others have no say,
or one that is finished would keep it due for ever. Kept here, so that no copy takes them along."""


class BaseDataScheduler:
    """Varies one configuration key of a data sparsifier over training. Write ``get_schedule_param`` to get a scheduler.

    Call ``sparsifier.step()`` before ``scheduler.step()``. The constructor takes one silent step, so that the value of
    step 0 is in the configuration and ``last_epoch`` is ``last_epoch + 1``. Collective over all ranks, as :meth:`step`
    is: every rank must call it.

    Args:
        data_sparsifier: what is scheduled. Names that are added to it later take part as well, but have no
            ``base_param``.
        schedule_param: the key of its configuration.
        last_epoch: the last step that was taken already, to resume; -1 to start.
        verbose: print each value that is written.

    Raises:
        TypeError: ``data_sparsifier`` is not a ``BaseDataSparsifier``.
        ValueError: see :meth:`step`.
    """

    _overruled_before = False

    def __init__(
        self, data_sparsifier: BaseDataSparsifier, schedule_param: str, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        if not isinstance(data_sparsifier, BaseDataSparsifier):
            self._refuse(
                TypeError(f"{type(data_sparsifier).__name__} is not an instance of dist_sparse.BaseDataSparsifier")
            )
        self.data_sparsifier = data_sparsifier
        self.schedule_param = schedule_param
        self.base_param = {name: config.get(schedule_param) for name, config in data_sparsifier.data_groups.items()}
        self.last_epoch = last_epoch
        self._step_count = 0
        self.verbose = verbose
        self._get_sp_called_within_step = False
        self._last_param: dict[str, Any] = {}
        self.step()
        data_sparsifier.__dict__["step"] = _counted(data_sparsifier.step)
        data_sparsifier._step_count = 0

    def get_schedule_param(self) -> Mapping[str, Any]:
        """The values for step ``self.last_epoch``, by name; names left out keep theirs. To be written by the subclass.

        Every rank is asked; the answer of rank 0 counts. So values are None, bools, numbers (0-D tensors and NumPy's
        are made Python's), strings, or lists and tuples of those.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define get_schedule_param(): a mapping from name to value."
        )

    def step(self) -> None:
        """Takes the next step: asks for its values and writes them. Collective over all ranks: every rank must call it.

        Raises:
            ValueError: the answer has an unknown name (the names are named), or ranks differ in scheduler, parameter,
                step or names (ranks are named). What ``get_schedule_param`` raises comes out as it is in one process,
                and as a ValueError that names the rank on all of several. In each case nothing has changed.
        """
        if self._step_count == 1:
            self._check_order()
        before = self.last_epoch, self._step_count
        self.last_epoch += 1
        self._step_count += 1
        try:
            values = self._next_values()
        except BaseException:
            self.last_epoch, self._step_count = before
            raise
        self._apply(values)

    def get_last_param(self) -> dict[str, Any]:
        """The value of every name after the last step (None where a configuration lacks the key)."""
        return self._last_param

    def state_dict(self) -> dict[str, Any]:
        """Every attribute but the sparsifier, whose state is to be saved beside it."""
        return {key: value for key, value in self.__dict__.items() if key != "data_sparsifier"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave. The sparsifier is not touched: restore it first."""
        self.__dict__.update({key: value for key, value in state_dict.items() if key != "data_sparsifier"})

    def __repr__(self) -> str:
        values = f"    {self.schedule_param}: {self.base_param}"
        return f"{type(self).__name__} (\nData Sparsifier {self.data_sparsifier}\n{values}\n)"

    def _next_values(self) -> Mapping[str, Any]:
        """What this step writes. Collective over all ranks."""
        group = group_over(world_ranks())
        answer = self._agreed_answer(group)
        return self._overruled(answer, group) if group.size > 1 else answer

    def _agreed_answer(self, group: Group) -> Mapping[str, Any]:
        """This rank's answer, once all ranks have a good one for the same names. Collective over ``group``."""
        answer: Mapping[str, Any] = {}
        error: Exception | None = None
        try:
            answer = self._ask()
            if group.size > 1:
                _to_wire(answer)
        except Exception as raised:  # whatever it is, the other ranks must hear of it
            error = raised
        group.agree(f"step of {type(self).__name__}", self._facts(answer), error)
        return answer

    def _ask(self) -> Mapping[str, Any]:
        self._get_sp_called_within_step = True
        try:
            answer = self.get_schedule_param()
        finally:
            self._get_sp_called_within_step = False
        known = self.data_sparsifier.data_groups
        if unknown := [name for name in answer if name not in known]:
            raise ValueError(
                f"Invalid answer of {type(self).__name__}.get_schedule_param(): unknown names {unknown}; "
                f"the sparsifier has {list(known)}."
            )
        return {name: _python(value) for name, value in answer.items()}

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What must be the same on all ranks."""
        names = {
            f"data {name!r}": "scheduled" if name in answer else "not scheduled"
            for name in self.data_sparsifier.data_groups
        }
        return {
            "scheduler": type(self).__name__,
            "schedule_param": self.schedule_param,
            "last_epoch": self.last_epoch,
            **names,
        }

    def _overruled(self, answer: Mapping[str, Any], group: Group) -> Mapping[str, Any]:
        """The answer of rank 0. Collective over ``group``."""
        mine = _to_wire(answer)
        first = group.all_gather_json(mine)[0]
        # Compared as text: NaN is NaN, and the types count too.
        others = {name: value for name, value in first.items() if repr(value) != repr(mine[name])}
        if others and not self._overruled_before:
            self._overruled_before = True
            name, value = next(iter(others.items()))
            warnings.warn(
                f"{type(self).__name__} on rank {group.ranks[group.rank]}: {self.schedule_param!r} of {name!r} is "
                f"{mine[name]!r} here and {value!r} on rank {group.ranks[0]}, and so for {len(others)} of {len(first)} "
                f"names. The values of rank {group.ranks[0]} are used; later ones will be without a warning.",
                UserWarning,
                stacklevel=4,
            )
        return {name: _from_wire(others[name]) if name in others else value for name, value in answer.items()}

    def _apply(self, values: Mapping[str, Any]) -> None:
        groups = self.data_sparsifier.data_groups
        for name, value in values.items():
            groups[name][self.schedule_param] = value
            if self.verbose:
                print(f"Adjusting {self.schedule_param} for group {name} to {value}")
        self._last_param = {name: config.get(self.schedule_param) for name, config in groups.items()}
        together = _stepped.setdefault(self.data_sparsifier, weakref.WeakSet())
        together.add(self)
        self.data_sparsifier.enable_mask_update = any(scheduler._is_due() for scheduler in together)

    def _is_due(self) -> bool:
        """Whether the sparsifier's next step moves masks: always, for all we know of a scheduler that a user wrote."""
        return True

    def _refuse(self, error: Exception) -> NoReturn:
        """Raises ``error`` on every rank: the others wait for this one in the agreement of their first step."""
        group_over(world_ranks()).agree(f"construction of {type(self).__name__}", {}, error)
        raise error

    def _check_order(self) -> None:
        """At the second step ever: has the sparsifier stepped since the first?"""
        if not hasattr(self.data_sparsifier.step, "_with_counter"):
            warnings.warn(
                "The step of the data sparsifier has been replaced since the scheduler was made, so its calls cannot "
                "be counted. Call `data_sparsifier.step()` before `scheduler.step()`.",
                UserWarning,
                stacklevel=3,
            )
        elif self.data_sparsifier._step_count < 1:
            warnings.warn(
                "`scheduler.step()` was called before `data_sparsifier.step()`: the first scheduled value has never "
                "been used. Call `data_sparsifier.step()` first.",
                UserWarning,
                stacklevel=3,
            )


def _counted(method: Callable[[], None]) -> Callable[[], None]:
    """``sparsifier.step`` that counts its calls in ``sparsifier._step_count``, each of which opens a new round of
    ``_stepped``; the same again if it does already.

    It lives in the sparsifier, so it must not hold it: that would be a reference cycle.
    """
    if hasattr(method, "_with_counter"):
        return method
    instance = weakref.ref(method.__self__)  # type: ignore[attr-defined]
    function = method.__func__  # type: ignore[attr-defined]

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        sparsifier = instance()
        assert sparsifier is not None, "whoever calls the step of a sparsifier holds it"
        sparsifier._step_count += 1
        _stepped.pop(sparsifier, None)
        return function(sparsifier, *args, **kwargs)

    step._with_counter = True  # type: ignore[attr-defined]
    return step


def _python(value: Any) -> Any:
    """``value`` with Python numbers in place of 0-D tensors and NumPy scalars, in lists and tuples too."""
    if type(value) in (list, tuple):
        return type(value)(_python(item) for item in value)
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _to_wire(value: Any) -> Any:
    """``value`` as JSON keeps it: tuples as lists."""
    if isinstance(value, Mapping):
        return {name: _to_wire(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_wire(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"Invalid {type(value).__name__} in the answer of get_schedule_param(): with several ranks, values must be "
        "None, bools, numbers, strings, or lists and tuples of those, for they cross ranks as JSON."
    )


def _from_wire(value: Any) -> Any:
    return tuple(_from_wire(item) for item in value) if isinstance(value, list) else value
