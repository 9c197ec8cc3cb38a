"""How gradients reach the parameters of a model, the parameters that an OptimScheduler updates,
and the class of its optimizer."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.modules import modules_by_path, torchrec_port
from dist_sparse.tables.tensors import is_sharded, steps_in_backward

Gradients = dict[nn.Parameter, Tensor | None]
"""The gradients of all parameters of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How gradients reach the parameters of a model."""

    # By path from the user's own module, which is ""; without wrappers.
    modules: Mapping[str, nn.Module]
    # Whether it has tables whose optimizer runs inside the backward.
    fused: bool
    # Whether gradients need a backward through the whole graph, with its hooks.
    hooked: bool
    # The modules that average gradients over ranks, each with no_sync().
    replicating: list[Any]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """The parameters that one optimizer updates."""

    # Each once, frozen ones too, without fused tables.
    parameters: list[nn.Parameter]
    # This rank's parts of sharded tables with a dense kernel.
    pieces: frozenset[nn.Parameter]
    # Sharded collections with a fused optimizer, which takes a learning rate only.
    fused: list[Any]

    def overlaps(self, other: Owned) -> bool:
        """Return whether both update a parameter or a collection."""
        return not {*self.parameters, *self.fused}.isdisjoint([*other.parameters, *other.fused])

    def set_fused_lr(self, lr: float) -> None:
        """Set the learning rate of fused tables; their kernels read it in the forward."""
        for module in self.fused:
            for group in module.fused_optimizer.param_groups:
                group["lr"] = lr
            # It hands the rate to the kernels. They have updated the weights already.
            module.fused_optimizer.step()


def wiring_of(model: nn.Module) -> Wiring:
    """Return how gradients reach the parameters of ``model``, wrapped or not.

    Raises:
        ValueError: it has FSDP modules or DTensors.
    """
    # Wrappers (DDP, DMP, compile) are no part of paths.
    modules = modules_by_path(model)
    flat = any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules())
    if flat or any(map(is_sharded, model.parameters())):
        raise ValueError(
            "An OptimScheduler trains no FSDP modules and no DTensors: wrap the model in"
            " DistributedDataParallel or DistributedModelParallel."
        )
    return Wiring(
        modules=modules,
        fused=bool(_fused_collections(modules[""])),
        # A TorchRec kernel holds several tables in one tensor, which hooks split.
        hooked=any(map(_plan_of, modules.values())),
        replicating=[model] if hasattr(model, "no_sync") else _ddp_modules(model),
    )


def owned_by(wiring: Wiring, names: Sequence[str] | None) -> Owned:
    """Return the contents of the modules at these paths, or of the whole model for None.

    Raises:
        ValueError: there is no such module, it is a part of a sharded collection, it has no
            parameters, or torch itself updates some of them inside the backward.
    """
    root, where = wiring.modules[""], [type(wiring.modules[""]).__name__]
    if names is not None:
        _refuse_unknown_paths(names, wiring.modules)
        _refuse_parts_of_collections(names, wiring.modules)
        root, where = nn.ModuleList(wiring.modules[name] for name in names), list(names)
    parameters = list(root.parameters())
    if not parameters:
        raise ValueError(f"The modules {where} have no parameters.")
    fused = _fused_collections(root)
    moving = set(filter(steps_in_backward, parameters))
    if moving.difference(*(collection.parameters() for collection in fused)):
        raise ValueError(
            f"Parameters of {where} are updated inside the backward by"
            " apply_optimizer_in_backward() and belong to no sharded collection: leave that call"
            " out, or shard their tables with DistributedModelParallel first."
        )
    # Whole tensors are equal on all ranks; pieces are not, so their norm needs all ranks.
    stepped = [p for p in parameters if p not in moving]
    pieces = _shards(root).intersection(stepped)
    return Owned(parameters=stepped, pieces=frozenset(pieces), fused=fused)


def _refuse_unknown_paths(names: Sequence[str], known: Mapping[str, nn.Module]) -> None:
    unknown = sorted(set(names) - (known.keys() - {""}))
    if unknown or not names:
        children = list(dict(known[""].named_children()))
        raise ValueError(
            f"Invalid updated_modules={list(names)}: {unknown} are not modules; there are"
            f" {children}."
        )


def _refuse_parts_of_collections(names: Sequence[str], known: Mapping[str, nn.Module]) -> None:
    for path in filter(lambda path: _plan_of(known[path]), known):
        # The model itself may be a collection: everything is inside "", so its prefix is empty.
        prefix = f"{path}.".lstrip(".")
        if inside := [name for name in names if name.startswith(prefix)]:
            raise ValueError(
                f"Invalid updated_modules={list(names)}: {inside} are parts of a sharded"
                " collection, whose tables share kernels and a learning rate: name the collection,"
                f" {path!r}."
            )


def _ddp_modules(model: nn.Module) -> list[Any]:
    parts: list[nn.Module] = list(model.modules())
    if torchrec := torchrec_port():
        # TorchRec keeps the DDP modules of data-parallel tables outside of the module tree.
        parts += chain.from_iterable(map(torchrec.lookups, model.modules()))
    # Each once.
    return [part for part in dict.fromkeys(parts) if isinstance(part, DistributedDataParallel)]


def _plan_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the sharding plan of a sharded collection by table, the same on all ranks."""
    return getattr(module, "module_sharding_plan", None) or {}


def _fused_collections(root: nn.Module) -> list[Any]:
    """Return the collections that have a table with a fused optimizer on any rank."""
    found = []
    for module in root.modules():
        # TorchRec's other kernels all update inside the backward.
        if any(table.compute_kernel != "dense" for table in _plan_of(module).values()):
            found.append(module)
    return found


def _shards(root: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of sharded collections that are not whole on every rank."""
    found = set()
    for module in root.modules():
        plan = _plan_of(module)
        for path, parameter in module.named_parameters() if plan else ():
            # "embedding_bags.TABLE.weight"
            table = plan.get(path.split(".")[-2])
            if table is not None and table.sharding_type != "data_parallel":
                found.add(parameter)
    return found


def optimizer_class(query: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class that a configuration names.

    Args:
        query: a name in ``torch.optim`` (``"AdamW"``), a dotted path
            (``"torchrec.optim.RowWiseAdagrad"``), which is imported, or the class itself.

    Raises:
        ValueError: there is none of that name, or its ``step`` requires a closure (LBFGS).
    """
    found: Any = query
    if isinstance(query, str) and not query.startswith("."):
        path, _, name = query.rpartition(".")
        try:
            found = getattr(importlib.import_module(path or "torch.optim"), name, None)
        except ImportError as error:
            raise ValueError(f"Invalid optim_type={query!r}: {error}.") from error
    abstract = torch.optim.Optimizer
    if not isinstance(found, type) or not issubclass(found, abstract) or found is abstract:
        raise ValueError(
            f"Invalid optim_type={query!r}: must be a name in torch.optim (such as"
            f" {_optimizers_named_like(str(query))}) or the dotted path of an optimizer."
        )
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"Invalid optim_type={query!r}: its step() needs a closure that runs the backward"
            " several times; here one backward runs, before the step."
        )
    return found


def _optimizers_named_like(name: str) -> str:
    known = {each.lower(): each for each in dir(torch.optim) if each[0].isupper()}
    close = difflib.get_close_matches(name.lower(), known, cutoff=0.5)
    return ", ".join(known[each] for each in close or ["sgd", "adagrad", "adam", "adamw"])
