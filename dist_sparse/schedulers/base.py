"""Base class of the schedulers, which change a sparsifier's configuration during training.

A scheduler calls ``get_schedule_param`` for the values of one configuration key and writes them to
``data_groups``. Masks are not touched: the values take effect at the next ``sparsifier.step()``.
With several ranks, construction and ``step`` are collective: all ranks must schedule the same
names, and the values of rank 0 are written everywhere. A step happens on every rank or on none.
"""

import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dist_sparse.checks import from_json, integer, plain, to_json
from dist_sparse.groups import Facts, warn_on_first_rank, world_group
from dist_sparse.messages import ranks_text
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.text import number_of

# Subject of the error if a value is not JSON.
_VALUES = "the values of get_schedule_param()"


@dataclass
class _Record:
    """Steps and warnings of a scheduler, stored with its sparsifier.

    Args:
        constructed: ``step_count`` of the sparsifier when the scheduler was constructed.
        stepped: ``step_count`` of the sparsifier when the scheduler last stepped.
        warned: it has warned of overruled values.
    """

    constructed: int | None = None
    stepped: int | None = None
    warned: bool = False


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
        if not isinstance(data_sparsifier, BaseDataSparsifier):
            self._refuse(
                TypeError(
                    f"{type(data_sparsifier).__name__} is not an instance of"
                    " dist_sparse.BaseDataSparsifier"
                )
            )
        groups = data_sparsifier.data_groups
        self.data_sparsifier = data_sparsifier
        self.schedule_param = schedule_param
        # The values at construction. Names that are added later have none.
        self.base_param = {name: config.get(schedule_param) for name, config in groups.items()}
        self.last_epoch = last_epoch
        self._step_count = 0
        self.verbose = verbose
        # torch.ao's attribute, which schedulers that were written for it may read.
        self._get_sp_called_within_step = False
        self._last_param: dict[str, Any] = {}
        self.step()
        # If the sparsifier's count is still this one at the next step, the order is wrong.
        self._record().constructed = data_sparsifier.step_count

    def get_schedule_param(self) -> Mapping[str, Any]:
        """Return the values for step ``self.last_epoch`` by name; names left out keep theirs.

        Defined by subclasses. Called on every rank; the values of rank 0 are used. Values are None,
        bools, numbers (0-D tensors and NumPy scalars are converted to Python's), strings, or lists
        and tuples of these.
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
        # Counted before the values are computed: get_schedule_param() reads the counters.
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
        # The constructor has taken the first step: this is the first call by the user. Last: where
        # warnings are errors, the step has happened.
        if self._step_count == 2:
            self._warn_of_wrong_order()

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
        """Return rank 0's values; rank 0 warns if other ranks have different ones. Collective."""
        group = world_group()
        values = self._local_values()
        # One rank sends nothing: its values need not be JSON.
        if group.size == 1:
            return values
        texts = group.all_gather_json(to_json(_VALUES, values))
        by_rank = [from_json(_VALUES, text) for text in texts]
        self._warn_of_overruled(dict(zip(group.ranks, by_rank, strict=True)))
        # Only overruled values are replaced: the others stay this rank's own objects, since JSON
        # turns a list into a tuple.
        overruled = _differing(by_rank[0], by_rank[group.rank])
        return {**values, **{name: by_rank[0][name] for name in overruled}}

    def _local_values(self) -> Mapping[str, Any]:
        """Return this rank's values, once all ranks have valid ones for the same names.
        Collective."""
        group = world_group()
        with group.agreeing(f"step of {type(self).__name__}") as facts:
            values = self._compute_values()
            if group.size > 1:
                # Refused here, where all ranks learn of it, and not when they are sent.
                to_json(_VALUES, values)
            facts.update(self._facts(values))
        return values

    def _compute_values(self) -> Mapping[str, Any]:
        """Call ``get_schedule_param()``; return its values with scalars as Python's. Local."""
        self._get_sp_called_within_step = True
        try:
            values = self.get_schedule_param()
        finally:
            self._get_sp_called_within_step = False
        # base_param would lack names that were added to the sparsifier later.
        known = self.data_sparsifier.data_groups
        if unknown := sorted(values.keys() - known.keys()):
            raise ValueError(
                f"Invalid values of {type(self).__name__}.get_schedule_param(): unknown names "
                f"{unknown}; the sparsifier has {list(known)}."
            )
        # Configurations are saved as JSON, which has no tensors.
        return {name: plain(value) for name, value in values.items()}

    def _facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts that must be the same on all ranks."""
        facts = {
            "scheduler": type(self).__name__,
            "schedule_param": self.schedule_param,
            "last_epoch": self.last_epoch,
            "step count": self._step_count,
        }
        for name in self.data_sparsifier.data_groups:
            facts[f"data {name!r}"] = "scheduled" if name in values else "not scheduled"
        return facts

    def _warn_of_overruled(self, by_rank: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn, once for each scheduler, of the ranks whose values are not the first rank's.
        Collective that time."""
        record = self._record()
        first = next(iter(by_rank))
        used = by_rank[first]
        overruled = [rank for rank, values in by_rank.items() if _differing(used, values)]
        if record.warned or not overruled:
            return
        record.warned = True
        # One value as an example.
        rank = overruled[0]
        name = _differing(used, by_rank[rank])[0]
        # A warning may be an error, and only the first rank warns.
        with world_group().agreeing(f"step of {type(self).__name__}"):
            warn_on_first_rank(
                f"{type(self).__name__}: {self.schedule_param!r} of {name!r} is"
                f" {by_rank[rank][name]!r} on rank {rank} and {used[name]!r} on rank {first}, whose"
                f" values are used on all ranks. Overruled: {ranks_text(overruled)}.",
                stacklevel=5,
            )

    def _apply(self, values: Mapping[str, Any]) -> None:
        """Write values to the configurations, and decide whether the next step of the sparsifier
        updates masks. Local."""
        sparsifier = self.data_sparsifier
        groups = sparsifier.data_groups
        for name, value in values.items():
            groups[name][self.schedule_param] = value
            if self.verbose:
                print(f"Adjusting {self.schedule_param} for group {name} to {value}")
        param = self.schedule_param
        self._last_param = {name: config.get(param) for name, config in groups.items()}
        self._record().stepped = sparsifier.step_count
        # One update of any scheduler is enough. Only schedulers that have stepped since the
        # sparsifier did count: one that its user no longer steps would otherwise give the same
        # answer forever.
        sparsifier.enable_mask_update = any(
            scheduler._updates_masks()
            for scheduler, record in list(sparsifier.masks.schedulers.items())
            if record.stepped == sparsifier.step_count
        )

    def _record(self) -> _Record:
        """Return the record of this scheduler. It is stored with the sparsifier, so that states and
        copies of the scheduler have none."""
        record: _Record = self.data_sparsifier.masks.schedulers.setdefault(self, _Record())
        return record

    def _updates_masks(self) -> bool:
        # A user's class has no window: its values may change at any step.
        return True

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise ``error`` on this rank, and an error that quotes it on all others."""
        # These wait in the agreement of their first step.
        world_group().agree(f"construction of {type(self).__name__}", Facts(), error)
        raise error

    def _warn_of_wrong_order(self) -> None:
        """Warn if the sparsifier has not stepped since the scheduler was constructed."""
        sparsifier = self.data_sparsifier
        # Not _record(), which would create one: a copy of a scheduler has none, and never warns.
        record = sparsifier.masks.schedulers.get(self, _Record())
        # An instance attribute hides the method, which counts the calls.
        if "step" in vars(sparsifier):
            text = (
                "The step of the data sparsifier has been replaced, so its calls cannot be counted."
                " Call `data_sparsifier.step()` before `scheduler.step()`."
            )
        elif sparsifier.step_count == record.constructed:
            text = (
                "`scheduler.step()` was called before `data_sparsifier.step()`: the first "
                "scheduled value has never been used. Call `data_sparsifier.step()` first."
            )
        else:
            return
        warnings.warn(text, UserWarning, stacklevel=3)


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names with another value, compared as text: NaN is NaN, and types count too."""
    return [name for name, value in first.items() if repr(value) != repr(other[name])]
