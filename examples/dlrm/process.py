"""The process of an example: warnings, process group, end."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from dlrm.batches import DataError
from dlrm.options import started_world

_TIMEOUT = timedelta(minutes=5)


def run_and_leave(
    main: Callable[[argparse.Namespace], None], options: argparse.Namespace
) -> NoReturn:
    """Start the process group, run ``main`` with ``options``, and end the process: 1 after an
    error, else 0."""
    try:
        quiet()
        _start_process_group()
        main(options)
        dist.barrier()  # no rank leaves while another still communicates with it
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        _leave(1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def quiet() -> None:
    """Silence the warnings about internals that TorchRec 1.8.0 and FBGEMM print at every start on
    CPU."""
    for name in ("torchrec.distributed.utils", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore",
        message=".* is deprecated. (Use|Please use) ",
        category=FutureWarning,
        module=r"torch(rec)?\.distributed",
    )
    warnings.filterwarnings(
        "ignore",
        message="fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel",
        category=UserWarning,
    )


def _start_process_group() -> None:
    """Start the default process group: torchrun's, or one of this process alone."""
    if started_world() is not None:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    else:  # TorchRec wants a process group even for one process; an in-memory store needs no port
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )


def _leave(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown: gloo and DDP sometimes abort while they
    are torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
