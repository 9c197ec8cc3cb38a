"""The layers of a DLRM above its tables: from TorchRec's model to a file, and served without
TorchRec."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["Layers", "save_layers"]


def save_layers(dlrm: nn.Module, file: Path) -> None:
    """Write the weights of the layers of TorchRec's DLRM, as ``dense.0.weight`` and so on."""
    weights = {}
    for name, mlp in (("dense", dlrm.dense_arch), ("over", dlrm.over_arch)):
        linears = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
        for number, linear in enumerate(linears):
            weights[f"{name}.{number}.weight"] = linear.weight.detach()
            weights[f"{name}.{number}.bias"] = linear.bias.detach()
    save_file(weights, file)
    # safetensors lets only this user read it; a server may be another one.
    file.chmod(0o644)


class Layers:
    """A DLRM above its tables (Naumov et al., 2019): the dense features pass an MLP; the dot
    products between its output and all embeddings pass another.

    Args:
        file: what :func:`save_layers` wrote.

    Attributes:
        dense_features: number of dense features.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, file: Path) -> None:
        try:
            weights = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}.") from None
        self._dense = _linears(weights, "dense")
        self._over = _linears(weights, "over")
        self.dense_features = self._dense[0][0].shape[1]

    def __call__(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Return the logits ``(b,)`` of dense features ``(b, features)`` and embeddings
        ``(b, tables, dim)``."""
        for weight, bias in self._dense:
            dense = torch.relu(nn.functional.linear(dense, weight, bias))
        vectors = torch.cat([dense.unsqueeze(1), embedded], dim=1)
        left, right = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, left, right]
        hidden = torch.cat([dense, products], dim=1)
        for weight, bias in self._over[:-1]:
            hidden = torch.relu(nn.functional.linear(hidden, weight, bias))
        return nn.functional.linear(hidden, *self._over[-1]).squeeze(1)


def _linears(weights: dict[str, Tensor], mlp: str) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of each layer of an MLP."""
    count = sum(name.startswith(f"{mlp}.") for name in weights) // 2
    return [
        (weights[f"{mlp}.{number}.weight"], weights[f"{mlp}.{number}.bias"])
        for number in range(count)
    ]
