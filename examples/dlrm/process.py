"""The process of an example: warnings, process group, end."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from datetime import timedelta

import torch.distributed as dist

from dlrm.options import started_world

__all__ = ["leave", "quiet", "start_process_group"]

_TIMEOUT = timedelta(minutes=5)


def quiet() -> None:
    """Silence the warnings about internals that TorchRec 1.8.0 and FBGEMM print at every start on CPU."""
    for name in ("torchrec.distributed.utils", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore",
        message=".* is deprecated. (Use|Please use) ",
        category=FutureWarning,
        module=r"torch(rec)?\.distributed",
    )
    warnings.filterwarnings(
        "ignore", message="fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel", category=UserWarning
    )


def start_process_group() -> None:
    """Start the default process group: torchrun's, or one of this process alone."""
    if started_world() is not None:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    else:  # TorchRec wants a process group even for one process; an in-memory store needs no port
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)


def leave(status: int) -> None:
    """End the process without the interpreter's shutdown: gloo and DDP sometimes abort while they are torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
