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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.checkpoint.row_wise import merging
from dist_sparse.checkpoint.trees import as_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

Json = Any
Change = Callable[[], object]

_PREFIX: Final = "optimizer."
_UNCUT: Final = [0]
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

    def options(self, saved: Mapping[str, Json]) -> list[Change]:
        """Return functions that set the saved options, refused where a group can't have them."""
        changes = []
        for group, keys in self.groups():
            _refuse_other_options(self.optimizer, group, keys, saved)
            changes += _setting(group, group, saved[keys[0]])
        return changes

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
        # First columns of the cuts of row-wise state, in order, by the key of its tensor.
        self._cuts: dict[str, list[int]] = {}
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
        state, param = part.state(key), part.params[key]
        for name, value in state.items():
            # Fused state is named <table>.<name>.
            path = f"{_PREFIX}{key}.{name.rpartition('.')[2]}"
            # The fused Adagrad has no count of steps: as a value it may be missing on either side.
            is_adagrad_step = name == "step" and "sum" in state
            if name == "sum" and _is_row_wise(value, param):
                # As FBGEMM names and stores it.
                path = f"{_PREFIX}{key}.momentum1"
                self.tensors[path], self._cuts[path] = value.view(-1), _UNCUT
            elif isinstance(value, Tensor) and not is_adagrad_step:
                self.tensors[path] = value
                if cuts := _column_cuts(value, param):
                    self._cuts[path] = cuts
            else:
                self._scalars.setdefault(key, {})[name] = _plain(path, value)

    def described(self) -> Json:
        """Return options and values of this rank; :func:`gathered` puts them together."""
        options: dict[str, Json] = {}
        for part in self._parts:
            for group, keys in part.groups():
                options |= dict.fromkeys(keys, _plain_options(group, keys[0]))
        steps = [part.fused_steps for part in self._parts if part.fused_steps is not None]
        return {
            "options": options,
            "values": self._scalars,
            "cuts": self._cuts,
            "fused_steps": steps,
        }

    def prepare_load(
        self, metadata: Metadata, saved: Json, merge: bool
    ) -> tuple[dict[str, Tensor], list[Change], list[str]]:
        """Return the tensors to load into, functions that set everything else, and the keys of
        row-wise state that they merge. Nothing is changed before they are called.

        Args:
            metadata: of the checkpoint.
            saved: from :func:`gathered`.
            merge: whether row-wise state of a table that was cut into other columns is merged;
                it is refused otherwise.

        Raises:
            ValueError: a parameter was not stepped when the checkpoint was saved, or by another
                class of optimizer, or row-wise state is refused.
        """
        merged, changes = self._merged(metadata.state_dict_metadata, saved["cuts"], merge)
        fresh = list(self._fresh(metadata, saved["values"]))
        targets = {f"{_PREFIX}{key}.{name}": value for key, name, value in fresh}
        tensors = {path: value for path, value in targets.items() if isinstance(value, Tensor)}
        changes += [partial(self._put, *each) for each in fresh]
        for key, held in self._scalars.items():
            changes += _setting(self._part_of[key].state(key), held, saved["values"].get(key, {}))
        options = {key: found for found, keys in saved["groups"] for key in keys}
        for part in self._parts:
            changes += part.options(options)
            if part.fused_steps is not None and saved["fused_steps"] is not None:
                # They live in the kernel and not in any state.
                changes.append(partial(part.optimizer.set_optimizer_step, saved["fused_steps"]))
        return self.tensors | tensors | merged, changes, list(merged)

    def _merged(
        self, saved: Mapping[str, object], cuts: Json, merge: bool
    ) -> tuple[dict[str, Tensor], list[Change]]:
        """What to load of row-wise state that was saved with other cuts, and how to merge it."""
        targets: dict[str, Tensor] = {}
        changes: list[Change] = []
        for path in sorted(self._cuts.keys() & saved.keys()):
            # It fits its saved size where the number of cuts is equal, and would be wrong still.
            before, now = cuts.get(path, _UNCUT), self._cuts[path]
            if before == now:
                continue
            if not merge:
                raise ValueError(
                    f"{path!r} has a number for each row of a column shard: it was saved with"
                    f" cuts at columns {before}, and they are at {now} now. Cut the table as"
                    " before, or pass row_wise_state='merge'."
                )
            key = path.removeprefix(_PREFIX).rpartition(".")[0]
            shape = self._part_of[key].params[key].shape
            targets[path], change = merging(self.tensors[path], shape, before, now)
            changes.append(change)
        return targets, changes

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
    whole: Json = {"options": {}, "values": {}, "cuts": {}}
    steps: list[int] = []
    for each in described:
        steps += each["fused_steps"]
        for name, entries in whole.items():
            entries |= each[name]
    # In order, so that the file depends on no sharding.
    groups = [(options, [key]) for key, options in sorted(whole.pop("options").items())]
    return {**whole, "groups": groups, "fused_steps": max(steps, default=None)}


def _is_row_wise(value: Tensor, param: Tensor) -> bool:
    """Whether the sums of a table that is not sharded are one number a row."""
    # A table of one column has sums of its own shape in any Adagrad.
    return value.shape == (*param.shape[:1], 1) != param.shape and value.is_contiguous()


def _column_cuts(value: Tensor, param: Any) -> list[int]:
    """The first columns of the cuts of a table, if it is sharded and ``value`` has a number for
    each row of each cut; empty otherwise."""
    if value.dim() != 1 or not hasattr(param, "local_shards"):
        return []
    shards = [shard for shard in param.metadata().shards_metadata if 0 not in shard.shard_sizes]
    cuts = sorted({shard.shard_offsets[1] for shard in shards})
    # TorchRec has state of one number for each shard, too.
    return cuts if value.size(0) == len(cuts) * param.size(0) else []


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
    optimizer: object, group: dict[str, Any], keys: list[str], saved: Mapping[str, Json]
) -> None:
    """Refuse saved options that a param group can't have."""
    if unsaved := [key for key in keys if key not in saved]:
        raise ValueError(
            f"{unsaved[0]!r} was stepped by no optimizer when the checkpoint was saved."
        )
    first = saved[keys[0]]
    for key in keys:
        for name in sorted(group.keys() & first.keys() & saved[key].keys()):
            if not _alike(saved[key][name], first[name]):
                raise ValueError(
                    f"{keys[0]!r} and {key!r} had another {name!r} each, and are in one group now."
                )
    # Fused optimizers have a learning rate alone.
    is_fused = group.keys() <= _OF_FUSED
    for key in () if is_fused else keys:
        if lost := sorted(saved[key].keys() - group.keys() - _OF_SCHEDULERS):
            raise ValueError(
                f"{key!r} was saved with the option {lost[0]!r}, which"
                f" {type(optimizer).__name__} does not have: it was stepped by another"
                " class of optimizer."
            )


def _alike(ours: Json, theirs: Json) -> bool:
    """Whether options are equal; FBGEMM has learning rates in float32."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _setting(held: dict[str, Any], now: Mapping[str, Json], saved: Json) -> list[Change]:
    """Return functions that give values and options that are here their saved ones."""
    return [partial(_set, held, name, saved[name]) for name in now.keys() & saved.keys()]


def _set(held: dict[str, Any], name: str, value: Json) -> None:
    """Give an option or a value its saved one, in the type that it has."""
    now = held[name]
    if isinstance(now, Tensor):
        # A learning rate may be a tensor, which captured graphs hold.
        now.fill_(value)
    else:
        held[name] = tuple(value) if isinstance(now, tuple) else value


def _plain_options(group: Mapping[str, Any], first: str) -> Json:
    """The options of a param group, whose first parameter an error names."""
    names = group.keys() - {"params", "param_names"}
    return {name: _plain(f"option {name!r} of {first!r}", group[name]) for name in names}


def _plain(what: str, value: Any) -> Json:
    if isinstance(value, Tensor):
        value = value.item()
    elif isinstance(value, tuple):
        value = list(value)
    return as_json(what, value)
