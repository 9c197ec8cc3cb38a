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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.modules import is_sharded, modules_by_path, torchrec_port
from dist_sparse.tables.shards import steps_in_backward


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How gradients reach the parameters of a model."""

    # By path from the user's own module, which is ""; without wrappers.
    modules: Mapping[str, nn.Module]
    # Whether it has sharded collections: gradients need a backward through the whole graph.
    hooked: bool
    # Whether it has tables whose optimizer runs inside the backward.
    fused: bool
    # The modules that average gradients over ranks, each with no_sync().
    replicating: list[Any]


def wiring_of(model: nn.Module) -> Wiring:
    """Return how gradients reach the parameters of ``model``, wrapped or not.

    Raises:
        ValueError: it has FSDP modules, DTensors, or sharded tables without a fused optimizer.
    """
    # Wrappers (DDP, DMP, compile) are no part of paths.
    modules = modules_by_path(model)
    flat = any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules())
    if flat or any(map(is_sharded, model.parameters())):
        raise ValueError(
            "An OptimScheduler trains no FSDP modules and no DTensors: wrap the model in"
            " DistributedDataParallel or DistributedModelParallel."
        )
    plans = map(_plan_of, modules.values())
    tables = [*chain.from_iterable(plan.items() for plan in plans)]
    # Data-parallel tables have a dense kernel, and are whole on every rank.
    placed = [(name, table) for name, table in tables if table.sharding_type != "data_parallel"]
    if unfused := [name for name, table in placed if table.compute_kernel == "dense"]:
        raise ValueError(
            f"The tables {unfused} are sharded and have a dense kernel: an OptimScheduler gathers"
            " no gradients of shards. Give them a fused optimizer, or make them data-parallel."
        )
    return Wiring(
        modules=modules,
        # A TorchRec kernel holds several tables in one tensor, which hooks split.
        hooked=bool(tables),
        fused=bool(placed),
        replicating=[model] if hasattr(model, "no_sync") else _ddp_modules(model),
    )


def parameters_of(wiring: Wiring, names: Sequence[str] | None) -> list[nn.Parameter]:
    """Return the parameters of the modules at these paths, or of the whole model for None, without
    those that are updated inside the backward.

    Raises:
        ValueError: there is no such module, it is a part of a sharded collection, or no parameters
            are left.
    """
    root, where = wiring.modules[""], [type(wiring.modules[""]).__name__]
    if names is not None:
        _refuse_paths(names, wiring.modules)
        root, where = nn.ModuleList(wiring.modules[name] for name in names), list(names)
    parameters = [p for p in root.parameters() if not steps_in_backward(p)]
    if not parameters:
        raise ValueError(
            f"The modules {where} have no parameters, or only fused tables, which their own"
            " optimizer updates inside the backward."
        )
    return parameters


def _refuse_paths(names: Sequence[str], known: Mapping[str, nn.Module]) -> None:
    refused = f"Invalid updated_modules={list(names)}:"
    unknown = sorted(set(names) - (known.keys() - {""}))
    if unknown or not names:
        children = list(dict(known[""].named_children()))
        raise ValueError(f"{refused} {unknown} are not modules; there are {children}.")
    for path in filter(lambda path: _plan_of(known[path]), known):
        # The model itself may be a collection: everything is inside "", so its prefix is empty.
        prefix = f"{path}.".lstrip(".")
        if inside := [name for name in names if name.startswith(prefix)]:
            raise ValueError(
                f"{refused} {inside} are parts of a sharded collection, whose tables share"
                f" kernels: name the collection, {path!r}."
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
