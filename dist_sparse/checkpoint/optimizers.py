"""State of optimizers for a checkpoint, keyed by parameter: torch's, and TorchRec's keyed, fused
and combined ones.

- Tensors are ``optimizer.<parameter>.<name>``. Options of param groups (learning rates), other
  values and the fused optimizers' count of steps are JSON, gathered from all ranks: not every rank
  holds every parameter.
- A dense optimizer that has not stepped yet has no state: it gets what was saved.
- Row-wise Adagrad's sums have one name, whether its table is sharded or data-parallel; for other
  column cuts see :mod:`dist_sparse.checkpoint.row_wise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn

from dist_sparse.checkpoint.row_wise import RowWise, row_wise
from dist_sparse.checkpoint.trees import as_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["OptimizerState", "RowWiseState", "gathered"]

Json = Any
RowWiseState = Literal["refuse", "merge"]

_PREFIX: Final = "optimizer"
_NO_OPTIONS: Final = ("params", "param_names")
_OF_FUSED: Final = {"params", "lr"}
_OF_SCHEDULERS: Final = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
}
"""Options of the groups of fused optimizers; those that torch's learning rate schedulers add to
groups."""


@dataclass(frozen=True)
class _Part:
    """An optimizer that keeps state itself, and its parameters by key."""

    optimizer: Any
    params: Mapping[str, Any]

    def state(self, key: str) -> dict[str, Any]:
        """What it keeps for a parameter; none before it has stepped."""
        found: dict[str, Any] = self.optimizer.state.get(self.params[key], {})
        return found

    def groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield the param groups that have parameters on this rank, and their keys."""
        key_of = {id(param): key for key, param in self.params.items()}
        for group in self.optimizer.param_groups:
            if keys := sorted(key_of[id(param)] for param in group["params"]):
                yield group, keys

    @property
    def fused_steps(self) -> int | None:
        """Steps of a fused optimizer, which FBGEMM counts for Adam's bias correction; None of
        others."""
        count = getattr(getattr(self.optimizer, "_emb_module", None), "iter", None)
        return None if count is None else int(count)


class OptimizerState:
    """What optimizers keep on this rank, as live tensors and JSON. Local.

    Args:
        optimizer: one of torch or TorchRec, or a list of them; None is none.
        model: whose names are the keys of what torch's optimizers step.

    Attributes:
        tensors: by key.

    Raises:
        ValueError: something is no such optimizer, or two step the same parameter.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        several = (
            optimizer
            if isinstance(optimizer, (list, tuple))
            else []
            if optimizer is None
            else [optimizer]
        )
        names = {id(param): name for name, param in model.named_parameters()}
        self.tensors: dict[str, Tensor] = {}
        self._scalars: dict[str, dict[str, Json]] = {}
        self._row_wise: dict[str, RowWise] = {}
        self._part_of: dict[str, _Part] = {}
        for part in (part for each in several for part in _parts(each, "", names)):
            for key in part.params:
                if key in self._part_of:
                    raise ValueError(f"Invalid optimizer: two of them step {key!r}.")
                self._part_of[key] = part
                self._note(key, part)

    @property
    def _parts(self) -> list[_Part]:
        return list({id(part): part for part in self._part_of.values()}.values())

    def _note(self, key: str, part: _Part) -> None:
        for name, value in part.state(key).items():
            path = (  # fused state is named <table>.<name>
                f"{_PREFIX}.{key}.{name.rpartition('.')[2]}"
            )
            if (found := row_wise(name, value, part.params[key])) is not None:
                path = f"{_PREFIX}.{key}.{found.name}"
                self.tensors[path], self._row_wise[path] = found.tensor, found
            elif isinstance(value, Tensor) and not (name == "step" and "sum" in part.state(key)):
                self.tensors[path] = value
            else:  # steps of Adagrad, which the fused one does not have, among them
                plain = float(value) if isinstance(value, Tensor) else value
                self._scalars.setdefault(key, {})[name] = as_json(path, plain)

    def described(self) -> Json:
        """Return what is no tensor, of this rank; :func:`gathered` puts it together."""
        groups = [
            [
                {
                    name: _plain(keys[0], name, value)
                    for name, value in group.items()
                    if name not in _NO_OPTIONS
                },
                keys,
            ]
            for part in self._parts
            for group, keys in part.groups()
        ]
        cuts = {path: found.cuts for path, found in self._row_wise.items() if found.cuts != [0]}
        steps = [part.fused_steps for part in self._parts if part.fused_steps is not None]
        return {
            "groups": groups,
            "values": self._scalars,
            "cuts": cuts,
            "fused_steps": max(steps, default=None),
        }

    def prepare_load(
        self, metadata: Metadata, saved: Json, choice: RowWiseState
    ) -> tuple[dict[str, Tensor], Callable[[], list[str]]]:
        """Return the tensors to load into, and a function that puts in place what is not loaded in
        place, and returns the keys of merged row-wise state. Nothing is changed before it is
        called.

        Args:
            metadata: of the checkpoint.
            saved: from :func:`gathered`.
            choice: what happens to row-wise state of a table that was cut into other columns.

        Raises:
            ValueError: a parameter was not stepped when the checkpoint was saved, or by another
                class of optimizer, or row-wise state is refused.
        """
        options = {key: found for found, keys in saved["groups"] for key in keys}
        changes = [change for part in self._parts for change in _option_changes(part, options)]
        fresh = self._fresh(metadata, saved["values"])
        targets = dict(self.tensors)
        targets |= {
            f"{_PREFIX}.{key}.{name}": made for key, name, made in fresh if isinstance(made, Tensor)
        }
        merges: dict[str, Callable[[], None]] = {}
        for path, found in self._row_wise.items():
            cuts = saved["cuts"].get(path, [0])
            if path not in metadata.state_dict_metadata or cuts == found.cuts:
                continue
            if choice == "refuse":
                raise ValueError(
                    f"{path!r} has a number for each row of a column shard: it was saved with cuts"
                    f" at columns {cuts}, and they are at {found.cuts} now. Cut the table as"
                    " before, or pass row_wise_state='merge'."
                )
            targets[path], merges[path] = found.merging(cuts)

        def commit() -> list[str]:
            for merge in merges.values():
                merge()
            for key, name, made in fresh:
                part = self._part_of[key]
                part.optimizer.state[part.params[key]][name] = made
            for key, held in self._scalars.items():
                state = self._part_of[key].state(key)
                for name in held.keys() & saved["values"].get(key, {}).keys():
                    _set(state, name, saved["values"][key][name])
            for change in changes:
                change()
            for part in self._parts:
                if part.fused_steps is not None and saved["fused_steps"] is not None:
                    part.optimizer.set_optimizer_step(saved["fused_steps"])
            return sorted(merges)

        return targets, commit

    def _fresh(self, metadata: Metadata, values: Json) -> list[tuple[str, str, Any]]:
        """The state, by key and name, of parameters that have none yet and had some when it was
        saved."""
        bare = {key for key, part in self._part_of.items() if not part.state(key)}
        fresh: list[tuple[str, str, Any]] = []
        found: dict[str, Any] = metadata.state_dict_metadata
        for path, saved in found.items():
            key, _, name = path.removeprefix(f"{_PREFIX}.").rpartition(".")
            if key in bare and path.startswith(f"{_PREFIX}."):
                part = self._part_of[key]
                param, dtype = part.params[key], saved.properties.dtype
                group = next(group for group, keys in part.groups() if key in keys)
                if saved.size == param.shape:
                    made = torch.zeros_like(param, dtype=dtype, requires_grad=False)
                else:  # counts of steps stay on the CPU, as in torch
                    there = bool(saved.size) or group.get("capturable") or group.get("fused")
                    made = torch.zeros(
                        saved.size, dtype=dtype, device=param.device if there else "cpu"
                    )
                fresh.append((key, name, made))
        return fresh + [
            (key, name, value) for key in bare for name, value in values.get(key, {}).items()
        ]


def gathered(described: Sequence[Json]) -> Json:
    """Return what all ranks' :meth:`OptimizerState.described` say together."""
    options: dict[str, Json] = {}
    for each in described:
        options.update({key: found for found, keys in each["groups"] for key in keys})
    groups: dict[str, tuple[Json, list[str]]] = {}
    for key in sorted(options):
        groups.setdefault(repr(sorted(options[key].items())), (options[key], []))[1].append(key)
    steps = [each["fused_steps"] for each in described if each["fused_steps"] is not None]
    return {
        "groups": [list(group) for group in groups.values()],
        "values": {key: value for each in described for key, value in each["values"].items()},
        "cuts": {path: cuts for each in described for path, cuts in each["cuts"].items()},
        "fused_steps": max(steps, default=None),
    }


def _parts(optimizer: Any, prefix: str, names: Mapping[int, str]) -> Iterator[_Part]:
    if hasattr(optimizer, "optimizers"):  # torchrec.optim.keyed.CombinedOptimizer
        for key, part in optimizer.optimizers:
            yield from _parts(part, _joined(prefix, key), names)
    elif isinstance(getattr(optimizer, "params", None), Mapping):  # any other KeyedOptimizer
        yield _Part(
            optimizer, {_joined(prefix, key): param for key, param in optimizer.params.items()}
        )
    elif isinstance(optimizer, torch.optim.Optimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if foreign := [param for param in params if id(param) not in names]:
            raise ValueError(
                f"Invalid optimizer: {type(optimizer).__name__} steps a parameter of shape"
                f" {tuple(foreign[0].shape)}, which is none of the model's."
            )
        yield _Part(optimizer, {names[id(param)]: param for param in params})
    else:
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be one of torch or"
            " TorchRec, or a list of them."
        )


def _joined(prefix: str, key: str) -> str:
    return ".".join(part for part in (prefix, key) if part)


def _option_changes(part: _Part, saved: Mapping[str, Json]) -> Iterator[Callable[[], None]]:
    for group, keys in part.groups():
        if unknown := [key for key in keys if key not in saved]:
            raise ValueError(
                f"{unknown[0]!r} was stepped by no optimizer when the checkpoint was saved."
            )
        # Fused optimizers have a learning rate alone.
        for name in sorted(group.keys() & saved[keys[0]].keys()):
            value = saved[keys[0]][name]
            if differing := [key for key in keys if not _alike(saved[key].get(name, value), value)]:
                raise ValueError(
                    f"{keys[0]!r} and {differing[0]!r} had another {name!r} each, and are in one"
                    " group now."
                )
            yield _change(group, name, value)
        lost = {
            name: key for key in keys for name in saved[key].keys() - group.keys() - _OF_SCHEDULERS
        }
        if lost and not group.keys() <= _OF_FUSED:
            name = min(lost)
            raise ValueError(
                f"{lost[name]!r} was saved with the option {name!r}, which"
                f" {type(part.optimizer).__name__} does not have: it was stepped by another class"
                " of optimizer."
            )


def _alike(ours: Json, theirs: Json) -> bool:
    """Whether options are equal; FBGEMM has learning rates in float32."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _change(group: dict[str, Any], name: str, value: Json) -> Callable[[], None]:
    return lambda: _set(group, name, value)


def _set(held: dict[str, Any], name: str, value: Json) -> None:
    """Give an option or a value its saved one, in the type that it has."""
    now = held[name]
    if isinstance(now, Tensor):
        now.fill_(value)
    else:
        held[name] = tuple(value) if isinstance(now, tuple) else value


def _plain(key: str, name: str, value: Any) -> Json:
    if isinstance(value, Tensor):
        value = value.item()
    return as_json(
        f"option {name!r} of {key!r}", list(value) if isinstance(value, tuple) else value
    )
