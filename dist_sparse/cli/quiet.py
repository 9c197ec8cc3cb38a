"""Keeps what TorchRec and FBGEMM print at every start out of a command's output.

They are notices about their own internals, which a user of `dist-sparse` can do nothing about.
Errors, and warnings of other modules, are shown.
"""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Silence them in this process, from now on."""
    # Notices about optional accelerators, and about tracing.
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # TorchRec logs this one with the root logger.
    logging.getLogger().addFilter(_shown)
    warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu)(\.|$)")
    warnings.filterwarnings(
        "ignore", message=".* is deprecated. (Use|Please use) ", module=r"torch\.distributed"
    )
    warnings.filterwarnings(
        "ignore", message="fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel"
    )


def _shown(record: logging.LogRecord) -> bool:
    return "LOCAL_WORLD_SIZE from environment" not in str(record.msg)
