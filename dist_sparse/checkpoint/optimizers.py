"""State of optimizers for a checkpoint, keyed by parameter: torch's, and TorchRec's keyed, fused
and combined ones.

- Tensors are ``optimizer.<parameter>.<name>``. Options of param groups (learning rates), other
  values and the fused optimizers' count of steps are JSON, gathered from all ranks: not every rank
  holds every parameter.
- A dense optimizer that has not stepped yet has no state: it gets the saved one.
- Row-wise Adagrad's sums have one name, whether its table is sharded or data-parallel; for other
  column cuts see :mod:`dist_sparse.checkpoint.row_wise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn

from dist_sparse.checkpoint.row_wise import RowWise, row_wise
from dist_sparse.checkpoint.trees import as_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

Json = Any
RowWiseState = Literal["refuse", "merge"]

_PREFIX: Final = "optimizer."
# Options of the groups of fused optimizers.
_OF_FUSED: Final = {"params", "lr"}
# Options that torch's learning rate schedulers add to groups.
_OF_SCHEDULERS: Final = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
}


@dataclass(frozen=True, eq=False)
class _Part:
    """An optimizer that keeps state itself, and its parameters by key."""

    optimizer: Any
    params: Mapping[str, Any]

    def state(self, key: str) -> dict[str, Any]:
        """Its state of a parameter; empty before it has stepped."""
        found: dict[str, Any] = self.optimizer.state.get(self.params[key], {})
        return found

    def groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield the param groups that have parameters on this rank, and their keys."""
        # Groups hold parameters, and the checkpoint needs their keys.
        key_of = {id(param): key for key, param in self.params.items()}
        for group in self.optimizer.param_groups:
            if keys := sorted(key_of[id(param)] for param in group["params"]):
                yield group, keys

    def empty(self, key: str, saved: TensorStorageMetadata) -> Tensor:
        """A tensor for state of a parameter that was saved and is not here yet."""
        param, dtype = self.params[key], saved.properties.dtype
        if saved.size == param.shape:
            # Has the strides of the parameter, as in torch.
            return torch.zeros_like(param, dtype=dtype, requires_grad=False)
        # Counts of steps stay on the CPU, unless a kernel reads them.
        options = self.optimizer.param_groups[0]
        read_there = bool(saved.size) or options.get("capturable") or options.get("fused")
        return torch.zeros(saved.size, dtype=dtype, device=param.device if read_there else "cpu")

    @property
    def fused_steps(self) -> int | None:
        """Steps of a fused optimizer, which FBGEMM counts for Adam's bias correction; None of
        others."""
        count = getattr(getattr(self.optimizer, "_emb_module", None), "iter", None)
        return None if count is None else int(count)


class OptimizerState:
    """State of optimizers on this rank, as live tensors and JSON. Local.

    Args:
        optimizer: one of torch or TorchRec, or a list of them; None is none.
        model: whose names are the keys of the parameters that torch's optimizers step.

    Attributes:
        tensors: by key.

    Raises:
        ValueError: something is no such optimizer, or two step the same parameter.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._scalars: dict[str, dict[str, Json]] = {}
        self._row_wise: dict[str, RowWise] = {}
        self._part_of: dict[str, _Part] = {}
        names = {id(param): name for name, param in model.named_parameters()}
        for part in _parts(() if optimizer is None else optimizer, "", names):
            for key in part.params:
                if key in self._part_of:
                    raise ValueError(f"Invalid optimizer: two of them step {key!r}.")
                self._part_of[key] = part
                self._note(key, part)
        # A rank without a table has fused optimizers of no parameters, which are left out.
        self._parts = list(dict.fromkeys(self._part_of.values()))

    def _note(self, key: str, part: _Part) -> None:
        state = part.state(key)
        for name, value in state.items():
            # Fused state is named <table>.<name>.
            path = f"{_PREFIX}{key}.{name.rpartition('.')[2]}"
            # The fused Adagrad has no count of steps: as a value it may be missing on either side.
            is_adagrad_step = name == "step" and "sum" in state
            if (found := row_wise(name, value, part.params[key])) is not None:
                path = f"{_PREFIX}{key}.{found.name}"
                self.tensors[path], self._row_wise[path] = found.tensor, found
            elif isinstance(value, Tensor) and not is_adagrad_step:
                self.tensors[path] = value
            else:
                self._scalars.setdefault(key, {})[name] = _plain(path, value)

    def described(self) -> Json:
        """Return options and values of this rank; :func:`gathered` puts them together."""
        groups = []
        for part in self._parts:
            for group, keys in part.groups():
                options = {}
                for name in group.keys() - {"params", "param_names"}:
                    options[name] = _plain(f"option {name!r} of {keys[0]!r}", group[name])
                groups.append((options, keys))
        return {
            "groups": groups,
            "values": self._scalars,
            "cuts": {path: found.cuts for path, found in self._row_wise.items()},
            "fused_steps": _most(part.fused_steps for part in self._parts),
        }

    def prepare_load(
        self, metadata: Metadata, saved: Json, choice: RowWiseState
    ) -> tuple[dict[str, Tensor], Callable[[], list[str]]]:
        """Return the tensors to load into, and a function that sets everything else
        and returns the keys of merged row-wise state. Nothing is changed before it is
        called.

        Args:
            metadata: of the checkpoint.
            saved: from :func:`gathered`.
            choice: what happens to row-wise state of a table that was cut into other columns.

        Raises:
            ValueError: a parameter was not stepped when the checkpoint was saved, or by another
                class of optimizer, or row-wise state is refused.
        """
        targets = dict(self.tensors)
        changes: list[Callable[[], object]] = []
        merged = []
        for path, target, merge in self._merges(metadata, saved["cuts"], choice):
            targets[path] = target
            changes.append(merge)
            merged.append(path)
        for key, name, value in self._fresh(metadata, saved["values"]):
            if isinstance(value, Tensor):
                targets[f"{_PREFIX}{key}.{name}"] = value
            changes.append(partial(self._put, key, name, value))
        for key, held in self._scalars.items():
            for name in held.keys() & saved["values"].get(key, {}).keys():
                state = self._part_of[key].state(key)
                changes.append(partial(_set, state, name, saved["values"][key][name]))
        options = {key: found for found, keys in saved["groups"] for key in keys}
        for part in self._parts:
            for group, keys in part.groups():
                _refuse_other_options(part, group, keys, options)
                for name in group.keys() & options[keys[0]].keys():
                    changes.append(partial(_set, group, name, options[keys[0]][name]))
            if part.fused_steps is not None and saved["fused_steps"] is not None:
                # They live in the kernel and not in any state.
                changes.append(partial(part.optimizer.set_optimizer_step, saved["fused_steps"]))

        def commit() -> list[str]:
            for change in changes:
                change()
            return sorted(merged)

        return targets, commit

    def _merges(
        self, metadata: Metadata, cuts: Json, choice: RowWiseState
    ) -> Iterator[tuple[str, Tensor, Callable[[], None]]]:
        """Row-wise state that was saved with other cuts: its key, what to load, how to merge it."""
        for path, found in self._row_wise.items():
            # It fits its saved size where the number of cuts is equal, and may be wrong still.
            before = cuts.get(path, [0])
            if path not in metadata.state_dict_metadata or before == found.cuts:
                continue
            if choice == "refuse":
                raise ValueError(
                    f"{path!r} has a number for each row of a column shard: it was saved with"
                    f" cuts at columns {before}, and they are at {found.cuts} now. Cut the table"
                    " as before, or pass row_wise_state='merge'."
                )
            yield path, *found.merging(before)

    def _fresh(self, metadata: Metadata, values: Json) -> Iterator[tuple[str, str, Any]]:
        """State by parameter and name, where it has none yet and had some when it was saved:
        tensors to load into, and values."""
        bare = {key for key, part in self._part_of.items() if not part.state(key)}
        found: dict[str, Any] = metadata.state_dict_metadata
        for path, saved in found.items():
            key, _, name = path.removeprefix(_PREFIX).rpartition(".")
            if key in bare and path.startswith(_PREFIX):
                yield key, name, self._part_of[key].empty(key, saved)
        for key in bare & values.keys():
            for name, value in values[key].items():
                yield key, name, value

    def _put(self, key: str, name: str, value: object) -> None:
        part = self._part_of[key]
        part.optimizer.state[part.params[key]][name] = value


def gathered(described: Sequence[Json]) -> Json:
    """Return the :meth:`OptimizerState.described` of all ranks as one."""
    options: dict[str, Json] = {}
    values: dict[str, Json] = {}
    cuts: dict[str, list[int]] = {}
    for each in described:
        values |= each["values"]
        cuts |= each["cuts"]
        for found, keys in each["groups"]:
            options |= dict.fromkeys(keys, found)
    # Parameters of equal options share a group, so that the file depends on no sharding.
    groups: dict[str, tuple[Json, list[str]]] = {}
    for key, found in sorted(options.items()):
        groups.setdefault(repr(sorted(found.items())), (found, []))[1].append(key)
    steps = _most(each["fused_steps"] for each in described)
    return {"groups": list(groups.values()), "values": values, "cuts": cuts, "fused_steps": steps}


def _most(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _parts(optimizer: Any, prefix: str, names: Mapping[int, str]) -> Iterator[_Part]:
    """The optimizers in an optimizer that keep state themselves."""
    if isinstance(optimizer, (list, tuple)):
        for each in optimizer:
            yield from _parts(each, prefix, names)
    elif hasattr(optimizer, "optimizers"):  # torchrec.optim.keyed.CombinedOptimizer
        for key, part in optimizer.optimizers:
            yield from _parts(part, _joined(prefix, key), names)
    elif isinstance(getattr(optimizer, "params", None), Mapping):  # any other KeyedOptimizer
        params = {_joined(prefix, key): param for key, param in optimizer.params.items()}
        yield _Part(optimizer, params)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield _Part(optimizer, _named_params(optimizer, names))
    else:
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be one of torch or"
            " TorchRec, or a list of them."
        )


def _named_params(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """The parameters of a torch optimizer by their names in the model."""
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"Invalid optimizer: {type(optimizer).__name__} steps a parameter of shape"
                    f" {tuple(param.shape)}, which is none of the model's."
                )
            found[names[id(param)]] = param
    return found


def _joined(prefix: str, key: str) -> str:
    return ".".join(filter(None, (prefix, key)))


def _refuse_other_options(
    part: _Part, group: dict[str, Any], keys: list[str], saved: Mapping[str, Json]
) -> None:
    """Refuse saved options that a param group can't have."""
    if unsaved := [key for key in keys if key not in saved]:
        raise ValueError(
            f"{unsaved[0]!r} was stepped by no optimizer when the checkpoint was saved."
        )
    first = keys[0]
    for key in keys:
        for name in sorted(group.keys() & saved[first].keys() & saved[key].keys()):
            if not _alike(saved[key][name], saved[first][name]):
                raise ValueError(
                    f"{first!r} and {key!r} had another {name!r} each, and are in one group now."
                )
    # Fused optimizers have a learning rate alone.
    is_fused = group.keys() <= _OF_FUSED
    for key in () if is_fused else keys:
        if lost := sorted(saved[key].keys() - group.keys() - _OF_SCHEDULERS):
            raise ValueError(
                f"{key!r} was saved with the option {lost[0]!r}, which"
                f" {type(part.optimizer).__name__} does not have: it was stepped by another"
                " class of optimizer."
            )


def _alike(ours: Json, theirs: Json) -> bool:
    """Whether options are equal; FBGEMM has learning rates in float32."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _set(held: dict[str, Any], name: str, value: Json) -> None:
    """Give an option or a value its saved one, in the type that it has."""
    now = held[name]
    if isinstance(now, Tensor):
        # A learning rate may be a tensor, which captured graphs hold.
        now.fill_(value)
    else:
        held[name] = tuple(value) if isinstance(now, tuple) else value


def _plain(what: str, value: Any) -> Json:
    if isinstance(value, Tensor):
        value = value.item()
    elif isinstance(value, tuple):
        value = list(value)
    return as_json(what, value)
