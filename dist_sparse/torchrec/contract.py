"""The releases of torch, TorchRec and FBGEMM, checked when the package first meets TorchRec."""

from __future__ import annotations

import fbgemm_gpu
import torch
import torchrec

from dist_sparse.torchrec.versions import check_versions

__all__ = ["check_contract"]


def check_contract() -> None:
    """Refuse releases that were not built for each other.

    Raises:
        ImportError: they do not fit.
    """
    check_versions(
        str(torch.__version__),
        str(getattr(torchrec, "__version__", "?")),
        str(getattr(fbgemm_gpu, "__version__", "?")),
    )
