"""The one way from the rest of the package to TorchRec."""

from __future__ import annotations

import sys

from torch import nn

from dist_sparse.tables.protocols import Collection, TorchRecPort


def torchrec_port() -> TorchRecPort | None:
    """Return what the package needs of TorchRec; None until the program has imported torchrec, as
    it has if a model holds modules of TorchRec.

    Raises:
        ImportError: the installed releases do not fit, or lack private names that are needed.
    """
    if "torchrec" not in sys.modules:
        return None
    # Not above: the package needs torch alone.
    from dist_sparse.torchrec import port

    return port


def collection_of(module: nn.Module) -> Collection:
    """Return a collection of TorchRec's as it is now.

    Raises:
        TypeError: the module is none.
    """
    port = torchrec_port()
    found = None if port is None else port.collection(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} is no collection of TorchRec's.")
    return found
