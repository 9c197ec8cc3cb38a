"""Which Lightning is installed: ``lightning``, or ``pytorch_lightning`` alone?

They are the same code under two names, and a Trainer of the one refuses callbacks of the other. With both installed,
the callbacks are ``lightning``'s.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Callback"]

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    def _installed() -> Any:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            try:
                return importlib.import_module(package)
            except ModuleNotFoundError as missing:
                if missing.name not in (package, package.partition(".")[0]):
                    raise  # it is there, and lacks something itself
        raise ImportError(
            "dist_sparse.training.lightning needs Lightning, and neither lightning nor pytorch_lightning is installed: "
            'pip install "dist_sparse[lightning]".'
        )

    Callback = _installed().Callback
