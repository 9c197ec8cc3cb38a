"""How does plain data carry its mask?

As in the ancestor, ``torch.ao.pruning._experimental.data_sparsifier``: a container module holds the user's own tensor
as a buffer, parametrized by its mask. These functions attach, detach, squash and save one name of that container; what
they keep is plain, dense and local.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = [
    "Container",
    "Masked",
    "attach",
    "check_buffer_name",
    "check_maskable",
    "check_name",
    "detach",
    "held",
    "is_attached",
    "masks_to",
    "name_for",
    "original",
    "restore",
    "squash",
]


class Masked(nn.Module):
    """The default parametrization: ``mask * x``, and exactly 0 where the mask is 0 (``mask * NaN`` would be NaN)."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)  # saved once, in the sparsifier's own state

    def forward(self, x: Tensor) -> Tensor:
        """The effective weight, of the shape and dtype of ``x``."""
        mask = self.check(x)
        return torch.where(mask != 0, mask * x, torch.zeros((), dtype=x.dtype, device=x.device))

    def check(self, x: Tensor) -> Tensor:
        """The mask, if it fits ``x``."""
        mask = self.mask
        assert isinstance(mask, Tensor)
        if mask.shape != x.shape:
            raise ValueError(f"The mask of shape {tuple(mask.shape)} does not fit data of shape {tuple(x.shape)}.")
        return mask


class Container(nn.Module):
    """Holds the registered tensors, each a parametrized buffer until it is squashed."""


def check_name(name: object) -> str:
    """A name that data can have.

    Raises:
        TypeError: it is not a string.
        KeyError: it is empty, holds a dot, or is an attribute that every module has.
    """
    if not isinstance(name, str):
        raise TypeError(f"Invalid {name=}: must be a string.")
    if not name or "." in name:
        raise KeyError(f"Invalid {name=}: must not be empty or hold a '.'.")
    if hasattr(nn.Module(), name):
        raise KeyError(f"Invalid {name=}: every torch module has an attribute of that name.")
    return name


def check_buffer_name(name: str) -> None:
    """Refuses what plain data can't be called: its mask is kept by torch's parametrizations, in a dict of modules.

    Raises:
        KeyError: it is an attribute of one.
    """
    if _is_attribute(name):
        raise KeyError(f"Invalid {name=}: torch's containers have an attribute of that name.")


def name_for(path: str, taken: set[str]) -> str:
    """A name for the parameter or module at ``path``: with '_' for '.', and a number behind it where it is taken ("a.b"
    and "a_b" differ) or can't be a buffer's. Adds it to ``taken``."""
    wanted = name = path.replace(".", "_")
    number = 1
    while name in taken or _is_attribute(name):
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def _is_attribute(name: str) -> bool:
    """Of a module, of the dict in which parametrizations are kept ("items"), or of a parametrized module."""
    return hasattr(nn.ModuleDict(), name) or name in ("parametrizations", "__deepcopy__")


def attach(container: Container, name: str, weight: Tensor, mask: Tensor, parametrization: Any) -> None:
    """Holds ``weight`` itself (no copy) under ``name``, with ``parametrization(mask)`` over it. On failure nothing is
    held."""
    container.register_buffer(name, weight)
    try:
        parametrize.register_parametrization(container, name, parametrization(mask))
    except BaseException:
        detach(container, name)
        raise


def is_attached(container: Container, name: str) -> bool:
    """Whether ``name`` still has its mask; False once squashed."""
    return parametrize.is_parametrized(container, name)


def check_maskable(container: Container, name: str) -> None:
    """Raises what the masking of ``name`` would raise."""
    parts = container.parametrizations
    assert isinstance(parts, nn.ModuleDict)
    made = list(parts[name].children())
    if len(made) == 1 and isinstance(made[0], Masked):
        made[0].check(original(container, name))
    else:
        with torch.no_grad():
            getattr(container, name)


def original(container: Container, name: str) -> Tensor:
    """The registered tensor itself."""
    parts = container.parametrizations
    assert isinstance(parts, nn.ModuleDict)
    weight = parts[name].original
    assert isinstance(weight, Tensor)
    return weight


def held(container: Container, name: str) -> Tensor:
    """The tensor under ``name``, squashed or not."""
    tensor = original(container, name) if is_attached(container, name) else getattr(container, name)
    assert isinstance(tensor, Tensor)
    return tensor


def detach(container: Container, name: str) -> None:
    """Lets go of ``name``; the user's tensor stays as it is."""
    if is_attached(container, name):
        parametrize.remove_parametrizations(container, name, leave_parametrized=False)
    delattr(container, name)


def squash(container: Container, name: str, *, leave_parametrized: bool) -> None:
    """Drops the mask of ``name``; first writes the masked data into the user's own tensor if ``leave_parametrized``."""
    if leave_parametrized:
        weight = original(container, name)
        with torch.no_grad():
            weight.data.copy_(getattr(container, name))
    parametrize.remove_parametrizations(container, name, leave_parametrized=False)


def masks_to(state: Mapping[str, Mapping[str, Any]], *, sparse: bool) -> dict[str, dict[str, Any]]:
    """A deep copy of the per-name state with masks as sparse COO, the ancestor's format for saving, or dense."""
    converted: dict[str, dict[str, Any]] = {}
    for name, entry in state.items():
        converted[name] = {key: copy.deepcopy(value) for key, value in entry.items() if key != "mask"}
        mask = entry.get("mask")
        if mask is not None:
            mask = mask.detach()
            converted[name]["mask"] = mask.to_sparse_coo() if sparse else mask.to_dense().clone()
    return converted


def restore(
    container: Container,
    state: Mapping[str, dict[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Fills a container from a saved state; squashed names stay squashed, and a parametrization of the user's gets the
    buffers that it had.

    Masks of the ancestor's ``DataNormSparsifier`` may have lost or gained dimensions of size 1. Under the default
    parametrization, which could not use them, they take the shape of their data, in ``state`` too.

    Raises:
        RuntimeError: a name has no config, no data or no mask.
        ValueError: a mask does not fit its data.
    """
    for name, entry in state.items():
        if name not in groups:
            raise RuntimeError(f"Error loading {name!r}: the state has a mask for it but no config in data_groups.")
        prefix = f"parametrizations.{name}."
        data = tensors.get(name, tensors.get(f"{prefix}original"))
        if data is None:
            raise RuntimeError(f"Error loading {name!r}: the state has a mask for it but no data.")
        if entry.get("mask") is None:
            raise RuntimeError(f"Error loading {name!r}: the state has data for it but no mask.")
        data = data.detach().clone()
        parametrization = groups[name].get("parametrization", Masked)
        if "parametrization" not in groups[name] and _real(entry["mask"]) == _real(data):
            entry["mask"] = entry["mask"].reshape(data.shape)
        if name in tensors:
            container.register_buffer(name, data)
        else:
            attach(container, name, data, entry["mask"], parametrization)
            kept = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(f"{prefix}0.")}
            parts = container.parametrizations
            assert isinstance(parts, nn.ModuleDict)
            parts[name].load_state_dict(kept, strict=False)


def _real(tensor: Tensor) -> list[int]:
    """Its shape without the dimensions of size 1."""
    return [size for size in tensor.shape if size != 1]
