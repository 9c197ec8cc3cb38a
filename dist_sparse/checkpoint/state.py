"""Training state for a checkpoint: tensors for DCP, and JSON values, by dotted keys.

- Nested dicts of a ``state_dict()`` are split by path. A subtree without a tensor is one value.
  Empty subtrees are left out: a rank without a table has empty dicts where others have tensors.
- Optimizer state (torch's, and TorchRec's keyed, fused and combined optimizers) is keyed by
  parameter: tensors are ``optimizer.<parameter>.<name>``. Options of param groups (learning rates),
  other values and the step counts of fused optimizers are JSON, gathered from all ranks, because
  not every rank holds every parameter. A dense optimizer that has not stepped yet has no state: it
  gets the saved state.
- The sums of row-wise Adagrad have one name, whether the table is sharded or data-parallel;
  :func:`merging` converts them between column cuts.
"""

import json
import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise, product
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_sparse.checks import Json, integer, number
from dist_sparse.optimizers import group_of
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.modules import torchrec_port

NamedTensors = dict[str, Tensor]
Apply = Callable[[], object]

_PREFIX = "optimizer."
_UNCUT = [0]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warning at each attribute of a ShardedTensor, and DCP's in a process without
    ranks. Filters belong to the process: only for the thread that trains."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


# Trees of nested dicts


def split(trees: Mapping[str, object]) -> tuple[NamedTensors, dict[str, Json]]:
    """Return the tensors and the values of trees, by dotted key.

    Args:
        trees: nested dicts, by the key that they start with.

    Raises:
        ValueError: a value can't be JSON, or two entries have the same key; names the key.
    """
    tensors: NamedTensors = {}
    values: dict[str, Json] = {}
    taken = ChainMap[str, Any](tensors, values)
    for key, tree in trees.items():
        for path, leaf in _leaves(tree, key):
            if path in taken:
                raise ValueError(f"The state has two entries with the key {path!r}.")
            if isinstance(leaf, Tensor):
                tensors[path] = leaf
            else:
                values[path] = as_json(path, leaf)
    return tensors, values


def filled(tree: Any, key: str, values: Mapping[str, Json]) -> Any:
    """Return ``tree`` with its values replaced by those from :func:`split`; its tensors are the
    same objects."""
    if _is_split(tree):
        return {name: filled(item, f"{key}.{name}", values) for name, item in tree.items()}
    # Tensors and empty trees were not saved as values, and stay.
    return values.get(key, tree)


def as_json(name: str, value: object) -> Json:
    """Return a copy of ``value``, if JSON preserves it.

    Raises:
        ValueError: JSON does not; names it.
    """
    with suppress(TypeError, ValueError, RecursionError):
        # JSON turns tuples into lists and number keys into strings, and has no NaN.
        copy = json.loads(json.dumps(value, allow_nan=False))
        if copy == value:
            return copy
    raise ValueError(
        f"Invalid {name}: must be JSON: dicts with strings as keys, lists (no tuples), strings,"
        " finite numbers, True, False and None."
    )


def _leaves(tree: object, key: str) -> Iterator[tuple[str, object]]:
    if _is_split(tree):
        for name, item in tree.items():
            yield from _leaves(item, f"{key}.{name}")
    # Empty containers, however nested, have no leaves and are left out.
    elif tree_leaves(tree):
        yield key, tree


def _is_split(tree: object) -> TypeGuard[Mapping[str, object]]:
    """Whether ``tree`` is a mapping with a tensor somewhere in it."""
    # tree_leaves() would not do: it takes mappings other than dict as leaves.
    return isinstance(tree, Mapping) and any(
        isinstance(item, Tensor) or _is_split(item) for item in tree.values()
    )


# Optimizers


class _Stepped(NamedTuple):
    """A parameter, and the optimizer that holds its state."""

    owner: Any
    param: Any

    @property
    def state(self) -> dict[str, Any]:
        """The parameter's state; empty before the optimizer's first step."""
        found: dict[str, Any] = self.owner.state.get(self.param, {})
        return found


class OptimizerState:
    """Optimizer state on this rank, as live tensors and JSON. Local.

    Args:
        optimizer: one of torch or TorchRec, a list of them, or None.
        model: its parameter names are the keys of parameters that torch's optimizers step.

    Attributes:
        tensors: the tensors of the state, by key.

    Raises:
        ValueError: an object is not such an optimizer, or two of them step the same parameter.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        self.tensors: NamedTensors = {}
        self._scalars: dict[str, dict[str, Json]] = {}
        # The first column of each column cut of row-wise state, ascending, by the tensor's key.
        self._cuts: dict[str, list[int]] = {}
        self._params: dict[str, _Stepped] = {}
        # Param groups with parameters on this rank, and the keys of these parameters.
        self._groups: list[tuple[dict[str, Any], list[str]]] = []
        # Fused optimizers, with their steps: FBGEMM counts them, for Adam's bias correction.
        self._fused: dict[Any, int] = {}
        torchrec = torchrec_port()
        names = {id(param): name for name, param in model.named_parameters()}
        for prefix, owner in _owners(optimizer, ""):
            keys = names
            # A KeyedOptimizer has its own names.
            if isinstance(getattr(owner, "params", None), Mapping):
                keys = {
                    id(param): f"{prefix}.{key}".strip(".") for key, param in owner.params.items()
                }
            steps = None if torchrec is None else torchrec.fused_steps(owner)
            if steps is not None:
                self._fused[owner] = steps
            for group in owner.param_groups:
                self._add(owner, group, keys)

    def _add(self, owner: Any, group: dict[str, Any], keys: Mapping[int, str]) -> None:
        added: list[str] = []
        for param in group["params"]:
            key = keys.get(id(param))
            if key is None:
                raise ValueError(
                    f"Invalid optimizer: {type(owner).__name__} steps a parameter of shape"
                    f" {tuple(param.shape)}, which is not in the model."
                )
            if key in self._params:
                raise ValueError(f"Invalid optimizer: two of them step {key!r}.")
            self._params[key] = _Stepped(owner, param)
            self._add_state(key, self._params[key])
            added.append(key)
        # Fused optimizers have no parameters on a rank without a shard.
        if added:
            self._groups.append((group, sorted(added)))

    def _add_state(self, key: str, stepped: _Stepped) -> None:
        """Record a parameter's state: tensors by key, other values by parameter."""
        for name, value in stepped.state.items():
            # Fused state is named <table>.<name>.
            path = f"{_PREFIX}{key}.{name.rpartition('.')[2]}"
            # Torch's Adagrad counts steps, the fused one does not. So the count is saved as a
            # value, which may be missing on either side; a tensor may not.
            is_adagrad_step = name == "step" and "sum" in stepped.state
            # If a table has one column, the sums of any Adagrad have its shape.
            row_sums = (*stepped.param.shape[:1], 1)
            if name == "sum" and value.shape == row_sums != stepped.param.shape:
                # It is saved with FBGEMM's name and shape, so that either optimizer loads it.
                path = f"{_PREFIX}{key}.momentum1"
                self.tensors[path] = value.view(-1)
                self._cuts[path] = _UNCUT
            elif isinstance(value, Tensor) and not is_adagrad_step:
                self.tensors[path] = value
                self._cuts |= _column_cuts(path, value, stepped.param)
            else:
                self._scalars.setdefault(key, {})[name] = _plain(path, value)

    def described(self) -> Json:
        """Return the options and values of this rank, for :func:`gathered`."""
        options: dict[str, Json] = {}
        for group, keys in self._groups:
            # Sorted: a set has a different order in each process, and equal states have equal
            # files.
            names = sorted(group.keys() - {"params", "param_names"})
            values = {
                name: _plain(f"option {name!r} of {keys[0]!r}", group[name]) for name in names
            }
            options |= dict.fromkeys(keys, values)
        return {
            "options": options,
            "values": self._scalars,
            "cuts": self._cuts,
            "fused_steps": list(self._fused.values()),
        }

    def prepare_load(
        self, tensors: Mapping[str, Any], saved: Json, merge: bool
    ) -> tuple[NamedTensors, list[Apply], list[str]]:
        """Return the tensors to load into, functions that set everything else, and the keys of
        row-wise state that these functions merge. Nothing changes before they are called.

        Args:
            tensors: DCP's metadata of each saved tensor, by key.
            saved: what :func:`gathered` returned.
            merge: whether to merge row-wise state of a table that was cut into different columns;
                otherwise it is refused.

        Raises:
            ValueError: a parameter was not stepped when the checkpoint was saved, or was stepped by
                another class of optimizer, or row-wise state is refused.
        """
        merged, changes = self._merged(tensors, saved["cuts"], merge)
        fresh = self._missing_state(tensors)
        changes += [partial(self._put, *_key_and_name(path), new) for path, new in fresh.items()]
        for key in self._params.keys() & saved["values"].keys():
            values = saved["values"][key]
            # A parameter without state gets all saved values, others only the values they have.
            state = self._params[key].state
            for name in values.keys() & (state or values).keys():
                value = _typed(f"{name} of {key!r}", state.get(name), values[name])
                changes.append(partial(self._put, key, name, value))
        options: dict[str, Json] = {}
        for values, keys in saved["groups"]:
            options |= dict.fromkeys(keys, values)
        for group, keys in self._groups:
            for name, saved_value in self._common_options(group, keys, options).items():
                value = _typed(f"{name} of {keys[0]!r}", group.get(name), saved_value)
                changes.append(partial(_set, group, name, value))
        # FBGEMM's kernel holds the step count; it is in no state.
        steps = integer("fused_steps", saved["fused_steps"], least=0)
        for owner in self._fused:
            # zero_grad() gives the learning rate to the kernel.
            changes += [partial(owner.set_optimizer_step, steps), owner.zero_grad]
        return self.tensors | fresh | merged, changes, list(merged)

    def _common_options(
        self, group: dict[str, Any], keys: list[str], saved: Mapping[str, Json]
    ) -> dict[str, Json]:
        """Return the saved options of a param group.

        Raises:
            ValueError: its parameters were saved with different options, or with one that this
                optimizer does not have.
        """
        if unsaved := sorted(set(keys) - saved.keys()):
            raise ValueError(
                f"{unsaved[0]!r} was stepped by no optimizer when the checkpoint was saved."
            )
        first: dict[str, Json] = saved[keys[0]]
        shared = group.keys() & first.keys()
        # Fused optimizers have no option but the learning rate.
        is_fused = self._params[keys[0]].owner in self._fused
        for key in keys:
            for name in sorted(shared & saved[key].keys()):
                if not _alike(saved[key][name], first[name]):
                    raise ValueError(
                        f"{keys[0]!r} and {key!r} had different values of {name!r}, and are in one"
                        " group now."
                    )
            for name in sorted(saved[key].keys() - group.keys()):
                # Learning rate schedulers add options such as initial_lr and max_momentum.
                if not is_fused and not name.endswith(("_lr", "_momentum")):
                    raise ValueError(
                        f"{key!r} was saved with the option {name!r}, which"
                        f" {type(self._params[key].owner).__name__} does not have: it was stepped"
                        " by another class of optimizer."
                    )
        # With initial_lr, which a learning rate scheduler that is made after the resume reads.
        return first

    def _merged(
        self, tensors: Mapping[str, Any], cuts: Json, merge: bool
    ) -> tuple[NamedTensors, list[Apply]]:
        """Return the tensors to load for row-wise state that was saved with different cuts, and the
        functions that merge them."""
        targets: NamedTensors = {}
        changes: list[Apply] = []
        for path in sorted(self._cuts.keys() & tensors.keys()):
            # Sizes do not tell: the same number of cuts at different columns has the same size.
            before, now = cuts.get(path, _UNCUT), self._cuts[path]
            if before == now:
                continue
            if not merge:
                raise ValueError(
                    f"{path!r} has a number for each row of a column shard: it was saved with"
                    f" cuts at columns {before}, not {now}. Cut the table there, or pass"
                    " row_wise_state='merge'."
                )
            shape = self._params[_key_and_name(path)[0]].param.shape
            targets[path], change = merging(self.tensors[path], shape, before, now)
            changes.append(change)
        return targets, changes

    def _missing_state(self, tensors: Mapping[str, Any]) -> NamedTensors:
        """Return tensors to load into, for parameters that have saved state and none here yet."""
        fresh: NamedTensors = {}
        for path, saved in tensors.items():
            stepped = self._params.get(_key_and_name(path)[0])
            if not path.startswith(_PREFIX) or stepped is None or stepped.state:
                continue
            param = stepped.param
            dtype = saved.properties.dtype
            if saved.size == param.shape:
                # Torch's optimizers create state with the strides of the parameter too.
                fresh[path] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
                continue
            # Torch keeps step counts on the CPU too, unless a kernel reads them.
            options = group_of(stepped.owner, param)
            in_kernel = bool(options.get("capturable") or options.get("fused"))
            device = param.device if saved.size or in_kernel else torch.device("cpu")
            fresh[path] = torch.zeros(saved.size, dtype=dtype, device=device)
        return fresh

    def _put(self, key: str, name: str, value: object) -> None:
        stepped = self._params[key]
        _set(stepped.owner.state[stepped.param], name, value)


def gathered(described: Sequence[Json]) -> Json:
    """Return the :meth:`OptimizerState.described` of all ranks, merged."""
    whole: Json = {"options": {}, "values": {}, "cuts": {}}
    for part, name in product(described, whole):
        whole[name] |= part[name]
    # Sort them, so that the file does not depend on the sharding.
    groups = [(options, [key]) for key, options in sorted(whole.pop("options").items())]
    steps = chain.from_iterable(part["fused_steps"] for part in described)
    return {**whole, "groups": groups, "fused_steps": max(steps, default=0)}


def _owners(optimizer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that hold state, unwrapped, each with the prefix of its keys."""
    if isinstance(optimizer, (list, tuple)):
        for part in optimizer:
            yield from _owners(part, prefix)
    # TorchRec's CombinedOptimizer.
    elif hasattr(optimizer, "optimizers"):
        for key, part in optimizer.optimizers:
            yield from _owners(part, f"{prefix}.{key}".strip("."))
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield prefix, optimizer
    elif optimizer is not None:
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be one of torch or"
            " TorchRec, or a list of them."
        )


def _key_and_name(path: str) -> tuple[str, str]:
    """Return the parameter's key and the name of its state, from the key of a tensor."""
    key, _, name = path.removeprefix(_PREFIX).rpartition(".")
    return key, name


def _alike(ours: Json, theirs: Json) -> bool:
    """Whether options are equal, up to float32: FBGEMM rounds learning rates to it."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _typed(what: str, now: Any, value: Json) -> Any:
    """Return a saved option or value, in the type that it has now.

    Raises:
        ValueError: it is of another type.
    """
    if isinstance(now, tuple):
        if not isinstance(value, list):
            raise ValueError(f"Invalid {what}={value!r}: must be a list.")
        return tuple(value)
    if isinstance(now, (Tensor, int, float)) and not isinstance(now, bool):
        return number(what, value)
    return value


def _set(held: dict[str, Any], name: str, value: Any) -> None:
    """Set an option or a value of :func:`_typed`."""
    now = held.get(name)
    if isinstance(now, Tensor):
        # In place: a captured CUDA graph reads this very tensor.
        now.fill_(value)
    else:
        held[name] = value


def _plain(what: str, value: Any) -> Json:
    if isinstance(value, Tensor):
        value = value.item()
    elif isinstance(value, tuple):
        value = list(value)
    return as_json(what, value)


# Row-wise state


def _column_cuts(path: str, value: Tensor, param: Any) -> dict[str, list[int]]:
    """Return ``{path: first column of each cut}`` if ``param`` is sharded and ``value`` has a
    number for each row of each cut; empty otherwise."""
    if not hasattr(param, "local_shards"):
        return {}
    shards = param.metadata().shards_metadata
    cuts = sorted({each.shard_offsets[1] for each in shards if 0 not in each.shard_sizes})
    # TorchRec also has state with one number for each shard.
    return {path: cuts} if value.size() == (len(cuts) * param.size(0),) else {}


def merging(
    state: Any, shape: Sequence[int], before: Sequence[int], now: Sequence[int]
) -> tuple[ChunkedTensor, Apply]:
    """Return a tensor to load row-wise optimizer state into that was saved with other column cuts,
    and a function that merges it into ``state``.

    State with one number per row, such as row-wise Adagrad's, depends on the cuts: each column cut
    sums its own gradients. TorchRec stores it as a vector of ``cuts x rows`` numbers. For other
    cuts it can't be restored exactly, so it is **merged**: a cut takes the mean of the saved cuts
    that it overlaps, weighted by the shared columns, in float64 and in ascending order. That is the
    sum of an uncut row-wise Adagrad over the same gradients; if a saved cut is split, both parts
    take its sum.

    Args:
        state: row-wise state of one table: sharded, or whole.
        shape: rows and columns of the table.
        before: the first column of each saved cut, ascending.
        now: the first column of each cut of ``state``, ascending.
    """
    rows, width = shape
    saved, cuts = list(pairwise([*before, width])), list(pairwise([*now, width]))
    # The live state of this rank: offset and tensor of each piece.
    pieces = [(0, state)]
    if hasattr(state, "local_shards"):
        pieces = [(each.metadata.shard_offsets[0], each.tensor) for each in state.local_shards()]
    wants: list[tuple[tuple[int], tuple[int]]] = []
    # Each piece, memory to merge it in, and the columns that it shares with saved cuts, by their
    # place in ``wants``.
    merges: list[tuple[Tensor, Tensor, dict[int, int]]] = []
    for offset, numbers in pieces:
        # A rank without a part of the table has an empty shard.
        if not numbers.numel():
            continue
        # The state is cut after cut, each with ``rows`` numbers.
        cut, row = divmod(offset, rows)
        shares = {}
        for place, (first, last) in enumerate(saved):
            columns = min(cuts[cut][1], last) - max(cuts[cut][0], first)
            if columns > 0:
                shares[len(wants)] = columns
                wants.append(((place * rows + row,), (numbers.numel(),)))
        merges.append((numbers, torch.zeros(numbers.shape, dtype=torch.float64), shares))
    # It has the shape of the saved state; this rank loads only the parts in ``wants``.
    target = ChunkedTensor([len(saved) * rows], state.dtype, (), wants)

    def merge() -> None:
        assert target.loaded is not None
        for numbers, total, shares in merges:
            # Shares are added in ascending order of columns, so that replicas get the same bits.
            for want, columns in shares.items():
                total.add_(target.loaded[want], alpha=columns)
            numbers.copy_(total.div_(sum(shares.values())))

    return target, merge
