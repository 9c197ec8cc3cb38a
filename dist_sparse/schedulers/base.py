"""Base class of the schedulers, which change a sparsifier's configuration during training.

A scheduler calls ``get_schedule_param`` for the values of one configuration key and writes them to
``data_groups``. Masks are not touched: the values take effect at the next ``sparsifier.step()``.
With several ranks, construction and ``step`` are collective: all ranks must schedule the same
names, and the values of rank 0 are written everywhere. A step happens on every rank or on none.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dist_sparse.checks import from_json, integer, plain, to_json
from dist_sparse.groups import Facts, Group, ranks_text, world_group
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.text import number_of

_WIRE = "the values of get_schedule_param()"


@dataclass
class _Notes:
    """Notes on a scheduler, stored with its sparsifier: ``step_count`` of the sparsifier when the
    scheduler was constructed and when it last stepped; whether it has warned of overruled
    values."""

    constructed: int | None = None
    stepped: int | None = None
    overruled: bool = False


class BaseDataScheduler:
    """Change one configuration key of a data sparsifier during training.

    Subclasses define ``get_schedule_param``. Call ``sparsifier.step()`` before
    ``scheduler.step()``. The constructor takes one silent step, so that the value of step 0 is in
    the configuration and ``last_epoch`` is ``last_epoch + 1``. Collective over all ranks, as
    :meth:`step` is: every rank must call it.

    Args:
        data_sparsifier: the sparsifier to schedule. Names added to it later take part as well, but
            have no ``base_param``.
        schedule_param: the key of its configuration.
        last_epoch: the last step already taken, to resume; -1 to start.
        verbose: print each value that is written.

    Raises:
        TypeError: ``data_sparsifier`` is not a ``BaseDataSparsifier``.
        ValueError: see :meth:`step`.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.extend import BaseDataScheduler
        >>> class Stairs(BaseDataScheduler):
        ...     def get_schedule_param(self):
        ...         level = 0.25 * (self.last_epoch // 2)
        ...         return {name: level for name in self.data_sparsifier.data_groups}
        >>> sparsifier = DataNormSparsifier([("table", torch.ones(8, 4))], sparsity_level=0.0)
        >>> scheduler = Stairs(sparsifier, "sparsity_level")
        >>> for _ in range(4):
        ...     sparsifier.step()
        ...     scheduler.step()
        >>> scheduler.get_last_param()
        {'table': 0.5}
    """

    _unsaved: ClassVar[tuple[str, ...]] = ("data_sparsifier",)

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        kind = type(data_sparsifier).__name__
        if not isinstance(data_sparsifier, BaseDataSparsifier):
            self._refuse(TypeError(f"{kind} is not an instance of dist_sparse.BaseDataSparsifier"))
        groups = data_sparsifier.data_groups
        self.data_sparsifier = data_sparsifier
        self.schedule_param = schedule_param
        # The values at construction; names added later have none.
        self.base_param = {name: config.get(schedule_param) for name, config in groups.items()}
        self.last_epoch = last_epoch
        self._step_count = 0
        self.verbose = verbose
        self._get_sp_called_within_step = False
        self._last_param: dict[str, Any] = {}
        self.step()
        # For the warning of a wrong order, which needs the sparsifier's count from here on.
        self._noted().constructed = data_sparsifier.step_count

    def get_schedule_param(self) -> Mapping[str, Any]:
        """Return the values for step ``self.last_epoch`` by name; names left out keep theirs.

        Defined by subclasses. Called on every rank; the values of rank 0 are used. Values are None,
        bools, numbers (0-D tensors and NumPy scalars are converted to Python's), strings, or lists
        and tuples of those.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define get_schedule_param(): a mapping from name to value."
        )

    def step(self) -> None:
        """Take the next step: compute its values and write them.

        Collective over all ranks: every rank must call it.

        Raises:
            ValueError: ``get_schedule_param`` returns unknown names, or ranks differ in scheduler,
                parameter, step or names; the message lists them. Exceptions of
                ``get_schedule_param`` are re-raised unchanged in one process, and as a ValueError
                that names the rank on all of several. Nothing has changed then.
        """
        # The constructor has taken the first step: this is the first call by the user.
        if self._step_count == 1:
            self._check_order()
        # get_schedule_param() reads the counters of the step that it computes.
        before = self.last_epoch, self._step_count
        self.last_epoch += 1
        self._step_count += 1
        try:
            values = self._next_values()
        except BaseException:
            # A step happens on every rank or on none.
            self.last_epoch, self._step_count = before
            raise
        self._apply(values)

    def get_last_param(self) -> dict[str, Any]:
        """Return the value of every name after the last step.

        None where a configuration lacks the key.
        """
        return self._last_param

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute but the sparsifier, whose own state must be saved too."""
        return {key: value for key, value in vars(self).items() if key not in self._unsaved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. The sparsifier is not touched: restore it first.

        Raises:
            ValueError: a counter is not an int; nothing has changed.
        """
        self.__dict__.update(self._checked_state(state_dict))

    def __repr__(self) -> str:
        # A model may have a thousand tables.
        param = reprlib.Repr()
        param.maxdict = 3
        names = number_of(len(self.base_param), "name")
        values = f"{self.schedule_param} of {names}: {param.repr(self.base_param)}"
        return f"{type(self).__name__}(step {self.last_epoch}, {values})"

    def _checked_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a state, without the sparsifier; see :meth:`load_state_dict`."""
        state = {key: value for key, value in state_dict.items() if key not in self._unsaved}
        epoch = state.get("last_epoch", self.last_epoch)
        count = state.get("_step_count", self._step_count)
        return {
            **state,
            "last_epoch": integer("last_epoch", epoch, least=-1),
            "_step_count": integer("_step_count", count, least=0),
        }

    def _next_values(self) -> Mapping[str, Any]:
        """Return the values that this step writes. Collective over all ranks."""
        return self._agreed_values()

    def _agreed_values(self) -> Mapping[str, Any]:
        """Return rank 0's values; rank 0 warns where other ranks have others. Collective."""
        group = world_group()
        answer = self._agreed_answer(group)
        # Nothing was sent, and nothing was converted.
        if group.size == 1:
            return answer
        texts = group.all_gather_json(to_json(_WIRE, answer))
        found = [from_json(_WIRE, text) for text in texts]
        if group.rank == 0:
            # On rank 0 alone: every rank would print the same.
            self._warn_of_overruled(found, group.ranks)
        # Equal values stay this rank's own objects: on the wire, a tuple and a list are the same.
        overruled = _differing(found[0], found[group.rank])
        return {**answer, **{name: found[0][name] for name in overruled}}

    def _agreed_answer(self, group: Group) -> Mapping[str, Any]:
        """Return this rank's values, once all ranks have valid ones for the same names.
        Collective."""
        with group.agreeing(f"step of {type(self).__name__}") as facts:
            answer = self._ask()
            if group.size > 1:
                # Values cross ranks as JSON.
                to_json(_WIRE, answer)
            facts.update(self._facts(answer))
        return answer

    def _ask(self) -> Mapping[str, Any]:
        self._get_sp_called_within_step = True
        try:
            answer = self.get_schedule_param()
        finally:
            self._get_sp_called_within_step = False
        # The sparsifier's, not base_param's: names added later take part.
        known = self.data_sparsifier.data_groups
        if unknown := sorted(answer.keys() - known.keys()):
            raise ValueError(
                f"Invalid values of {type(self).__name__}.get_schedule_param(): unknown names "
                f"{unknown}; the sparsifier has {list(known)}."
            )
        # Configurations are saved as JSON, which has no tensors.
        return {name: plain(value) for name, value in answer.items()}

    def _facts(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts that must be the same on all ranks."""
        facts = {
            "scheduler": type(self).__name__,
            "schedule_param": self.schedule_param,
            "last_epoch": self.last_epoch,
            "step count": self._step_count,
        }
        for name in self.data_sparsifier.data_groups:
            facts[f"data {name!r}"] = "scheduled" if name in answer else "not scheduled"
        return facts

    def _warn_of_overruled(self, found: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
        """Name the ranks whose values are not rank 0's. Once for each scheduler."""
        notes, first = self._noted(), found[0]
        overruled: dict[int, tuple[str, Any]] = {}
        for rank, theirs in zip(ranks, found, strict=True):
            if names := _differing(first, theirs):
                overruled[rank] = names[0], theirs[names[0]]
        if notes.overruled or not overruled:
            return
        notes.overruled = True
        (rank, (name, value)), *_ = overruled.items()
        warnings.warn(
            f"{type(self).__name__}: {self.schedule_param!r} of {name!r} is {value!r} on rank"
            f" {rank} and {first[name]!r} on rank {ranks[0]}, whose values are used on all ranks."
            f" Overruled, from now on without a warning: {ranks_text(list(overruled))}.",
            UserWarning,
            stacklevel=5,
        )

    def _apply(self, values: Mapping[str, Any]) -> None:
        sparsifier = self.data_sparsifier
        groups = sparsifier.data_groups
        for name, value in values.items():
            groups[name][self.schedule_param] = value
            if self.verbose:
                print(f"Adjusting {self.schedule_param} for group {name} to {value}")
        param = self.schedule_param
        self._last_param = {name: config.get(param) for name, config in groups.items()}
        self._noted().stepped = sparsifier.step_count
        # Schedulers that have not stepped since the sparsifier did are not counted: the flag of one
        # that has reached its end would stay in force for good.
        sparsifier.enable_mask_update = any(
            scheduler._updates_masks()
            for scheduler, notes in list(sparsifier.masks.schedulers.items())
            if notes.stepped == sparsifier.step_count
        )

    def _noted(self) -> _Notes:
        """Return the notes on this scheduler. They are stored with the sparsifier, so that states
        and copies have none."""
        notes: _Notes = self.data_sparsifier.masks.schedulers.setdefault(self, _Notes())
        return notes

    def _updates_masks(self) -> bool:
        # A class of a user's has no window: its values may change at any step.
        return True

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise ``error`` on every rank."""
        # The other ranks wait in the agreement of their first step.
        world_group().agree(f"construction of {type(self).__name__}", Facts(), error)
        raise error

    def _check_order(self) -> None:
        """Warn at the second step ever if the sparsifier has not stepped since the first."""
        sparsifier = self.data_sparsifier
        # A copy has none.
        notes = sparsifier.masks.schedulers.get(self, _Notes())
        # An instance attribute hides the method that counts.
        if "step" in vars(sparsifier):
            warnings.warn(
                "The step of the data sparsifier has been replaced, so its calls cannot be counted."
                " Call `data_sparsifier.step()` before `scheduler.step()`.",
                UserWarning,
                stacklevel=3,
            )
        elif sparsifier.step_count == notes.constructed:
            warnings.warn(
                "`scheduler.step()` was called before `data_sparsifier.step()`: the first "
                "scheduled value has never been used. Call `data_sparsifier.step()` first.",
                UserWarning,
                stacklevel=3,
            )


def _differing(first: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names with another value, compared as text: NaN is NaN, and types count too."""
    return [name for name, value in first.items() if repr(value) != repr(theirs[name])]
