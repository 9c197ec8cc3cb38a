"""Gradients and updates of several optimizers that share a forward.

They can't alternate backward and step: the first step would overwrite weights that the second
backward still needs. So the gradients of all of them are computed before any of them steps. A loss
leaves no gradients on parameters of the model that its optimizer does not own.

Optimizers of one loss share one backward. Several losses need one backward each, which DDP and
TorchRec don't support. Gradients are equal on all ranks, and so are their norms.

Below: the parameters that an OptimScheduler updates, and the class and state of its optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.tables.modules import (
    check_module,
    is_sharded_tensor,
    modules_by_path,
    torchrec_port,
)
from dist_sparse.tables.shards import steps_in_backward

# The gradients of all parameters of an optimizer.
Gradients = dict[nn.Parameter, Tensor | None]

# It leaves losses and gradients as they are, and always steps.
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)

# The methods of a scaler that are called.
_SCALER_METHODS = (
    *("scale", "unscale_", "step", "update", "is_enabled", "get_scale", "get_backoff_factor"),
    *("state_dict", "load_state_dict"),
)


def check_scaler(scaler: object) -> None:
    """Raise a ValueError if an object can't be used as a GradScaler."""
    if missing := [name for name in _SCALER_METHODS if not hasattr(scaler, name)]:
        raise ValueError(
            f"Invalid scaler of type {type(scaler).__name__}: it lacks {missing}; must be a"
            " GradScaler, or None."
        )


class Claim(NamedTuple):
    """What one optimizer needs from a forward: the gradients of a loss for its parameters.

    Args:
        parameters: those that the optimizer owns.
        loss: a scalar; it is not changed.
        parts: number of micro-steps over which the loss is averaged.
        scaler: scales the loss; may be disabled.
    """

    parameters: Sequence[nn.Parameter]
    loss: Tensor
    parts: int
    scaler: torch.amp.GradScaler


def check_claims(wiring: Wiring, claims: Sequence[Claim]) -> None:
    """Raise a ValueError if the model needs one backward and the claims need several."""
    if (wiring.hooked or wiring.replicating) and not _of_one_loss(claims):
        raise ValueError(
            "OptimSchedulers of one model in DDP or with sharded tables share a backward per"
            " forward. Give them the same loss tensor, accum_grad and use_amp, or losses of"
            " separate forwards by different names."
        )


def take_gradients(wiring: Wiring, claims: Sequence[Claim]) -> list[Gradients]:
    """Compute the gradients for claims that have no parameter in common. Collective under DDP.

    Returns:
        For each claim the gradients of its parameters, added to the present ``.grad``. The
        ``.grad`` of all parameters except the first claim's stays as it is; the caller sets the
        first claim's.
    """
    # One backward for each group.
    groups = [claims] if _of_one_loss(claims) else [[claim] for claim in claims]
    parameters = set(wiring.modules[""].parameters())
    # With find_unused_parameters, DDP expects a .grad wherever a micro-step has used the parameter.
    needs_grad = any(getattr(ddp, "find_unused_parameters", False) for ddp in wiring.replicating)
    unchanged = parameters.difference(claims[0].parameters)
    gradients: list[Gradients] = []
    for group in groups:
        foreign = parameters.difference(*(claim.parameters for claim in group))
        with _restored_gradients(unchanged):
            for parameter in foreign:
                parameter.grad = torch.zeros_like(parameter) if needs_grad else None
            gradients += _run_backward(group, keep_graph=group is not groups[-1])
        # The first claim's .grad must survive the backwards of the other groups too.
        unchanged = parameters
    return gradients


def _of_one_loss(claims: Sequence[Claim]) -> bool:
    # A scaled and an unscaled claim need a backward each: at the smaller scale of the two, 1, the
    # gradients of float16 would underflow.
    return len({(claim.loss, claim.parts, claim.scaler.is_enabled()) for claim in claims}) == 1


@contextmanager
def _restored_gradients(parameters: set[nn.Parameter]) -> Iterator[None]:
    """Restore ``.grad`` on leaving."""
    # Copies: a backward adds in place, and DDP may write into them. None stays None: an optimizer
    # skips parameters without a gradient.
    saved = {p: None if p.grad is None else p.grad.clone() for p in parameters}
    try:
        yield
    finally:
        for parameter, grad in saved.items():
            parameter.grad = grad


def _run_backward(claims: Sequence[Claim], *, keep_graph: bool) -> list[Gradients]:
    """Add the gradients of one loss to ``.grad``, and return them, each claim's at the scale of its
    own scaler."""
    # The loss by its scale.
    losses = {
        claim.scaler.get_scale(): claim.scaler.scale(claim.loss / claim.parts) for claim in claims
    }
    # The smallest scale: a larger one could overflow gradients whose own scaler has backed off.
    scale = min(losses)
    for claim in claims:
        # Gradients of earlier micro-steps, to which this backward adds, are at their own scale.
        _multiply(claim.parameters, scale / claim.scaler.get_scale())
    losses[scale].backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    gradients: list[Gradients] = []
    for claim in claims:
        _multiply(claim.parameters, claim.scaler.get_scale() / scale)
        gradients.append({parameter: parameter.grad for parameter in claim.parameters})
    return gradients


def update_weights(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    parameters: Sequence[nn.Parameter],
    *,
    grad_clip: float,
    norm_type: float,
) -> tuple[float, bool]:
    """Update the weights from their gradients: unscale, clip, step. Gradients are dropped, also
    after an error.

    Returns:
        The norm of the gradients, and whether weights were updated; both the same on all ranks. A
        norm that is not finite updates nothing, and the scaler backs off.
    """
    if not _gradients(parameters):
        return 0.0, False
    try:
        for parameter in parameters:
            grad: Any = parameter.grad
            if getattr(grad, "is_sparse", False):
                # Entries of one index are summed first: a norm needs each once.
                parameter.grad = grad.coalesce()
        # Before the norm: grad_clip is a limit on unscaled gradients.
        scaler.unscale_(optimizer)
        norm = gradient_norm(parameters, norm_type)
        finite = bool(torch.isfinite(norm))
        if finite:
            clip_gradients(parameters, norm, grad_clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            _back_off(scaler)
    except BaseException:
        # A scaler refuses a second unscale_() until update(), here at the same scale.
        scaler.update(scaler.get_scale())
        raise
    finally:
        optimizer.zero_grad()
    return float(norm), finite


def _back_off(scaler: torch.amp.GradScaler) -> None:
    if not scaler.is_enabled():
        return
    scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
    # update() with a scale leaves the count of good steps as it is. GradScaler resets it when it
    # finds an overflow itself, which it does not if only the norm overflows.
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Return the p-norm of all gradients as one vector: a scalar on their device, not finite if a
    gradient is not, or if it overflows."""
    # The entries of a sparse gradient are all of it that is not zero.
    values = [grad.values() if grad.is_sparse else grad for grad in _gradients(parameters)]
    # Not empty ones, of batches without ids: torch refuses them for the norm of inf.
    return torch.nn.utils.get_total_norm(filter(torch.numel, values), norm_type)


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, most: float) -> None:
    """Scale the gradients in place so that their norm, ``norm``, is at most ``most``. Local."""
    # The same arithmetic as torch.nn.utils.clip_grad_norm_.
    _multiply(parameters, float(torch.clamp(most / (norm + 1e-6), max=1.0)))


def _multiply(parameters: Sequence[nn.Parameter], factor: float) -> None:
    if factor == 1.0:
        return
    for grad in _gradients(parameters):
        grad.mul_(factor)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# How gradients reach the parameters of a model, the parameters that an OptimScheduler updates,
# and the class of its optimizer.


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How gradients reach the parameters of a model.

    Args:
        modules: by path from the user's own module, which is ``""``; without wrappers.
        hooked: it has sharded collections, whose gradients need a backward through the whole graph.
        fused: it has tables whose optimizer runs inside the backward.
        replicating: the modules that average gradients over ranks, each with ``no_sync()``.
    """

    modules: Mapping[str, nn.Module]
    hooked: bool
    fused: bool
    replicating: list[Any]


def wiring_of(model: nn.Module) -> Wiring:
    """Return how gradients reach the parameters of ``model``, wrapped or not.

    Raises:
        ValueError: it has FSDP modules, DTensors, or sharded tables without a fused optimizer.
    """
    check_module(model)
    # Without DDP, DistributedModelParallel and torch.compile in the paths.
    modules = modules_by_path(model)
    has_fsdp = any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules())
    hooked = fused = False
    unfused = []
    for plan in map(_plan_of, modules.values()):
        for name, table in plan.items():
            # Data-parallel tables too: a TorchRec kernel holds several tables in one tensor, whose
            # gradient hooks split.
            hooked = True
            # They are whole on every rank: their dense kernel leaves gradients as usual.
            if table.sharding_type != "data_parallel":
                fused = True
                if table.compute_kernel == "dense":
                    unfused.append(name)
    if has_fsdp or any(is_sharded_tensor(parameter) for parameter in model.parameters()):
        raise ValueError(
            "An OptimScheduler trains no FSDP modules and no DTensors: wrap the model in"
            " DistributedDataParallel or DistributedModelParallel."
        )
    if unfused:
        raise ValueError(
            f"The tables {unfused} are sharded and have a dense kernel, whose gradients are not"
            " gathered. Give them a fused optimizer, or make them data-parallel."
        )
    return Wiring(
        modules=modules,
        hooked=hooked,
        fused=fused,
        replicating=[model] if hasattr(model, "no_sync") else _ddp_modules(model),
    )


def parameters_of(wiring: Wiring, names: Sequence[str] | None) -> list[nn.Parameter]:
    """Return the parameters of the modules at these paths, or of the whole model for None, without
    those that are updated inside the backward.

    Raises:
        ValueError: there is no such module, it is a part of a sharded collection, or no parameters
            are left.
    """
    root = wiring.modules[""]
    shown = [type(root).__name__]
    if names is not None:
        _refuse_paths(names, wiring.modules)
        root = nn.ModuleList(map(wiring.modules.__getitem__, names))
        shown = list(names)
    parameters = [p for p in root.parameters() if not steps_in_backward(p)]
    if not parameters:
        raise ValueError(
            f"The modules {shown} have no parameters, or only fused tables, which their own"
            " optimizer updates inside the backward."
        )
    return parameters


def _refuse_paths(names: Sequence[str], known: Mapping[str, nn.Module]) -> None:
    refused = f"Invalid updated_modules={list(names)}:"
    unknown = sorted(set(names) - (known.keys() - {""}))
    children = list(dict(known[""].named_children()))
    if unknown or not names:
        raise ValueError(f"{refused} {unknown} are not modules; there are {children}.")
    for path, module in known.items():
        if not _plan_of(module):
            continue
        # If the model itself is a collection, its path is "" and all paths are inside: no prefix.
        prefix = f"{path}.".lstrip(".")
        inside = [name for name in names if name.startswith(prefix)]
        if inside:
            raise ValueError(
                f"{refused} {inside} are parts of a sharded collection, whose tables share kernels:"
                f" name the collection, {path!r}."
            )


def _ddp_modules(model: nn.Module) -> list[Any]:
    parts: list[nn.Module] = list(model.modules())
    if torchrec := torchrec_port():
        # TorchRec keeps the DDP modules of data-parallel tables outside of the module tree.
        parts += chain(*map(torchrec.lookups, model.modules()))
    # dict.fromkeys(): each once, in order.
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
        ValueError: there is none of that name, or it is LBFGS.
    """
    named: Any = query
    wrong = f"Invalid optim_type={query!r}:"
    if isinstance(query, str):
        path, _, name = query.rpartition(".")
        try:
            named = getattr(importlib.import_module(path or "torch.optim"), name, None)
        except (ImportError, TypeError) as error:
            raise ValueError(f"{wrong} {error}.") from error
    # The base class itself is abstract.
    base = torch.optim.Optimizer
    is_optimizer = isinstance(named, type) and issubclass(named, base) and named is not base
    if named is torch.optim.LBFGS:
        raise ValueError(
            f"{wrong} its step() needs a closure that runs the backward several times; here one"
            " backward runs, before the step."
        )
    if not is_optimizer:
        raise ValueError(
            f"{wrong} must be a name in torch.optim (such as SGD, Adagrad or AdamW) or the dotted"
            " path of an optimizer."
        )
    found: type[torch.optim.Optimizer] = named
    return found


def refuse_other_optimizer(optimizer: torch.optim.Optimizer, loaded: torch.optim.Optimizer) -> None:
    """Refuse a state, loaded into a copy of ``optimizer``, of another class or other parameters:
    torch itself compares only numbers of parameters.

    Raises:
        ValueError: names what does not fit.
    """
    for ours, group in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        # Only defaults of the class: learning rate schedulers add keys to groups.
        missing = sorted(loaded.defaults.keys() & ours.keys() - group.keys())
        if missing:
            raise ValueError(
                f"The state belongs to another optimizer class: its groups lack {missing};"
                f" expected {type(loaded).__name__}."
            )
        for parameter in group["params"]:
            state = loaded.state.get(parameter, {})
            # State has the shape of its parameter, except step counts, which are scalars, and
            # Adafactor's variances of rows and columns.
            for name in sorted(state.keys() - {"row_var", "col_var"}):
                shape = getattr(state[name], "shape", torch.Size())
                if shape not in (parameter.shape, torch.Size()):
                    raise ValueError(
                        f"The state is of other parameters: {name} has the shape {tuple(shape)},"
                        f" the parameter {tuple(parameter.shape)}."
                    )
