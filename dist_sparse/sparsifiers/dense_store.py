"""Plain tensors of one process, each with a dense mask.

As in the ancestor, ``torch.ao.pruning._experimental.data_sparsifier``, a container module holds the
user's own tensor as a buffer, parametrized by its mask. The mask is a live object: in-place edits
take effect at once. A squashed name keeps its mask and configuration, but no longer its
parametrization. Nothing here communicates.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dist_sparse.tables.memory import check_memory
from dist_sparse.tables.shards import matrix_shape

# The configuration of each name.
Configs = Mapping[str, Mapping[str, Any]]


class Masked(nn.Module):
    """The default parametrization: ``mask * x``, and exactly 0 where the mask is 0 (``mask * NaN``
    would be NaN)."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        # The container's state has no mask: it is saved once, in the sparsifier's own state.
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the effective weight, of the shape and dtype of ``x``."""
        mask = self.mask
        assert isinstance(mask, Tensor)
        if mask.shape != x.shape:
            raise ValueError(
                f"The mask of shape {tuple(mask.shape)} does not fit data of shape"
                f" {tuple(x.shape)}."
            )
        return torch.where(mask != 0, mask * x, x.new_zeros(()))


class Container(nn.Module):
    """Holds the registered tensors, each a parametrized buffer until it is squashed."""


class DenseStore:
    """The plain tensors of one sparsifier, in the order in which they were added.

    Attributes:
        state: name -> ``{"mask": the live mask}`` and the user's own entries, as in the ancestor.
        container: the ancestor's ``_container``.
    """

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Any]] = {}
        self.container = Container()

    def __contains__(self, name: object) -> bool:
        return name in self.state

    @property
    def names(self) -> list[str]:
        """Every registered name, squashed ones included."""
        return list(self.state)

    def add(
        self,
        name: str,
        weight: Tensor,
        mask: Tensor,
        parametrization: Callable[[Tensor], nn.Module],
    ) -> Tensor:
        """Register ``weight`` in place of what ``name`` held, if anything. Return the masked data.

        If ``parametrization`` refuses it, the old data stays.
        """
        check_memory(name, weight)
        if name in self:
            # First in another container, which raises before the old data is released.
            _attach(Container(), name, weight, mask, parametrization)
            self.drop(name)
        _attach(self.container, name, weight, mask, parametrization)
        self.state[name] = {"mask": mask}
        return self.effective(name)

    def drop(self, name: str) -> None:
        """Forget ``name``; the user's tensor stays as it is."""
        if self.is_masked(name):
            parametrize.remove_parametrizations(self.container, name, leave_parametrized=False)
        delattr(self.container, name)
        del self.state[name]

    def is_masked(self, name: str) -> bool:
        """Whether ``name`` still has its mask; False once squashed."""
        return parametrize.is_parametrized(self.container, name)

    def mask(self, name: str) -> Tensor:
        """Return the live mask, of any dtype; 0 = removed."""
        mask: Tensor = self.state[name]["mask"]
        return mask

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """Return the whole mask as one piece at offset (0, 0), int8 ``(rows, columns)``."""
        return [((0, 0), as_matrix(self.mask(name)).to(torch.int8))]

    def weight(self, name: str) -> Tensor:
        """Return the registered tensor itself; raise ValueError once squashed."""
        if not self.is_masked(name):
            raise ValueError("mask squashed - original mask value does not exist")
        weight = _parametrizations(self.container, name).original
        # Torch types it as Tensor or Module.
        assert isinstance(weight, Tensor)
        return weight

    def held(self, name: str) -> Tensor:
        """Return the registered tensor, squashed or not."""
        return self.weight(name) if self.is_masked(name) else self.effective(name)

    def effective(self, name: str) -> Tensor:
        """Return the masked data; for a squashed name, the tensor itself."""
        effective: Tensor = getattr(self.container, name)
        return effective

    def tensors(self) -> dict[str, Tensor]:
        """Return :meth:`held` of every name."""
        return {name: self.held(name) for name in self.names}

    @torch.no_grad()
    def squash(self, names: Sequence[str], *, write: bool) -> None:
        """Drop the masks of ``names``, if they have any; if ``write``, write the masked data into
        the user's own tensors first. If masking one raises, nothing has changed."""
        masked = list(filter(self.is_masked, names))
        if write:
            # A first pass raises before anything is written. It stores nothing: data may be large.
            for name in masked:
                self.effective(name)
            for name in masked:
                self.weight(name).data.copy_(self.effective(name))
        for name in masked:
            parametrize.remove_parametrizations(self.container, name, leave_parametrized=False)

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` (masks as sparse COO) and ``_container`` (tensors by reference), the
        ancestor's format."""
        return {
            "state": _converted(self.state, Tensor.to_sparse_coo),
            "_container": dict(self.container.state_dict()),
        }

    def prepare(
        self, saved: Mapping[str, Any], configs: Configs, *, strict: bool
    ) -> Callable[[], list[str]]:
        """Check a :meth:`state_dict` and return the function that loads it. Nothing changes before
        that is called.

        Args:
            saved: ``state`` and ``_container``.
            configs: name -> configuration.
            strict: replace everything; otherwise names that are registered stay as they are.

        Returns:
            A function that loads it and returns the names it has loaded.

        Raises:
            RuntimeError: a name has no configuration, no data or no mask.
            ValueError: a mask does not fit its data.
        """
        # Copies: the caller's state must not change with the masks.
        states = _converted(saved["state"], lambda mask: mask.to_dense().clone())
        if not strict:
            states = {name: entry for name, entry in states.items() if name not in self}
        # In a new container, so that a malformed entry raises before anything is replaced.
        filled = Container()
        _fill(filled, states, configs, saved["_container"])

        def commit() -> list[str]:
            if strict:
                self.container, self.state = filled, states
            else:
                _fill(self.container, states, configs, saved["_container"])
                self.state.update(states)
            return list(states)

        return commit


def check_name(name: object) -> None:
    """Refuse a name that data can't have.

    Raises:
        TypeError: it is not a string.
        KeyError: it is empty, or holds a dot.
    """
    if not isinstance(name, str):
        raise TypeError(f"Invalid {name=}: must be a string.")
    if not name or "." in name:
        raise KeyError(f"Invalid {name=}: must not be empty or hold a '.'.")


def refuse_attribute(name: str) -> None:
    """Raise a KeyError if the name of plain data is an attribute that modules have."""
    # It would shadow the attribute in the container, or in the ModuleDict of its parametrizations.
    if name in {*dir(nn.ModuleDict()), "parametrizations", "__deepcopy__"}:
        raise KeyError(f"Invalid {name=}: every torch module has an attribute of that name.")


def as_matrix(mask: Tensor) -> Tensor:
    """Return a mask as ``(rows, columns)``."""
    return mask.reshape(matrix_shape(mask.shape))


def _attach(
    container: Container,
    name: str,
    weight: Tensor,
    mask: Tensor,
    parametrization: Callable[[Tensor], nn.Module],
) -> None:
    """Hold ``weight`` (never a copy) under ``name``, with ``parametrization(mask)`` over it; on
    failure nothing."""
    # A buffer rather than a parameter: the container trains nothing.
    container.register_buffer(name, weight)
    try:
        # Runs the parametrization once, and checks shape and dtype.
        parametrize.register_parametrization(container, name, parametrization(mask))
    except BaseException:
        delattr(container, name)
        raise


def _parametrizations(container: Container, name: str) -> nn.Module:
    return container.get_submodule(f"parametrizations.{name}")


def _converted(
    state: Mapping[str, Mapping[str, Any]], convert: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Any]]:
    """Return a deep copy of the per-name state with converted masks: sparse COO, the ancestor's
    format for saving, or dense."""
    converted: dict[str, dict[str, Any]] = {}
    for name, entry in state.items():
        rest = dict(entry)
        mask = rest.pop("mask", None)
        converted[name] = copy.deepcopy(rest)
        if mask is not None:
            converted[name]["mask"] = convert(mask.detach())
    return converted


def _fill(
    container: Container,
    state: Mapping[str, dict[str, Any]],
    configs: Configs,
    tensors: Mapping[str, Tensor],
) -> None:
    """Fill a container from a saved state. Squashed names stay squashed. A user's parametrization
    gets its saved buffers."""
    for name, entry in state.items():
        prefix = f"parametrizations.{name}."
        config: Any = configs.get(name)
        data: Any = tensors.get(name, tensors.get(f"{prefix}original"))
        for part, value in (("config", config), ("data", data), ("mask", entry.get("mask"))):
            if value is None:
                raise RuntimeError(f"Error loading {name!r}: the state has no {part} for it.")
        data = data.detach().clone()
        mask = entry["mask"]
        # The ancestor's `DataNormSparsifier` may have dropped or added dimensions of size 1, which
        # the default parametrization can't use.
        if "parametrization" not in config and mask.squeeze().shape == data.squeeze().shape:
            entry["mask"] = mask.reshape(data.shape)
        if name in tensors:
            # A plain buffer: the name was squashed when it was saved.
            container.register_buffer(name, data)
            continue
        _attach(container, name, data, entry["mask"], config.get("parametrization", Masked))
        kept = {
            key.removeprefix(prefix): buffer
            for key, buffer in tensors.items()
            if key.startswith(f"{prefix}0.")
        }
        # strict=False: the default parametrization has no buffers in its state.
        _parametrizations(container, name).load_state_dict(kept, strict=False)
