"""Output of `dist-sparse`: text on stdout, one sentence per failure on stderr, and the exit status
of either.

A full disk is a failure; a reader that closed the pipe ends the command as it ends other programs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

from dist_sparse.text import printable, wrapped


def fail(command: str, why: Exception | str) -> int:
    complain(f"dist-sparse {command}: {why}")
    return 1


def complain(text: str) -> None:
    """Print to stderr, in lines that fit the terminal."""
    for line in text.split("\n"):  # which may hold names of a model or a log
        print("\n".join(wrapped(printable(line), indent="  ")), file=sys.stderr)


def interrupted() -> int:
    print("dist-sparse: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def progress(what: str) -> None:
    """Say on a terminal what is checked, in one line that the next call replaces; nothing
    elsewhere."""
    if sys.stderr.isatty():
        text = f"checking {what} ..." if what else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show(text: str) -> int:
    """Print; return the exit status."""
    try:
        print(text)
    except OSError as error:
        return _unwritten(error)
    # Now: at exit, Python would report a full disk with a traceback.
    return flush()


def flush() -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    return 0


def _unwritten(error: OSError) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again when it exits
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as other programs do when their reader closes the pipe
    print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
    return 1


def quiet() -> None:
    """Keep what TorchRec and FBGEMM print at every start out of a command's output, from now on.

    They are notices about their own internals, which a user of `dist-sparse` can do nothing about.
    Errors, and warnings of other modules, are shown.
    """
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
