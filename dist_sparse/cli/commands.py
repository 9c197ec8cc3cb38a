"""What a command of `dist-sparse` is, and how it prints.

Extras have commands too: a function ``commands`` in their module ``doors`` returns them. Needs no
torch, so that help and runs can be read without it.
"""

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_sparse.cli.arguments import entry_argument
from dist_sparse.launch.__main__ import Option
from dist_sparse.launch.__main__ import option as option
from dist_sparse.text import printable, wrapped

# What commands are for, in the order in which a newcomer needs them, which is also the order of
# `--help`.
TOPICS = ("machine", "size", "training", "runs", "serving")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Args:
        topic: one of :data:`TOPICS`.
        purpose: a line of ``dist-sparse --help``.
        run: takes the parsed options, and returns the exit status.
        epilog: examples and notes.
        options: flags and settings of each option.
    """

    name: str
    topic: str
    purpose: str
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""
    options: Sequence[Option] = ()


JSON = option("--json", help="prints JSON, sizes in bytes", action="store_true")
FUNCTION = option(
    "function",
    help="package.module:function or file.py:function",
    type=entry_argument,
    metavar="FUNCTION",
)
ROTATE = option(
    "--rotate",
    help="tables that only dot products between them read",
    type=lambda names: names.split(","),
    action="append",
    metavar="A,B",
)


# Output: text on stdout, one sentence per failure on stderr. Each function returns the exit status.


def print_text(text: str, end: str = "\n") -> int:
    """Print to stdout."""
    try:
        # Flushed now: at exit, Python would report a full disk with a traceback.
        print(text, end=end, flush=True)
    except OSError as error:
        # Python flushes stdout again when it exits, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            # The status of a program that SIGPIPE ends, as in `... | head`.
            return 128 + signal.SIGPIPE
        print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def print_result(options: argparse.Namespace, value: object, text: str) -> int:
    """Print ``value`` as JSON if --json was given, else ``text``."""
    return print_text(json.dumps(value, indent=2, allow_nan=False) if options.json else text)


def print_failure(command: str, why: str) -> int:
    """Print to stderr, in lines that fit the terminal."""
    for line in f"dist-sparse {command}: {why}".split("\n"):
        # An error may quote names from a model or a log: control characters are escaped.
        print("\n".join(wrapped(printable(line), indent="  ")), file=sys.stderr)
    return 1


def show_progress(what: str) -> None:
    """On a terminal, print what is checked now, over the line of the last call; "" removes it."""
    if sys.stderr.isatty():
        text = f"checking {what} ..." if what else ""
        # Carriage return, then "erase to the end of the line".
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def silence_torchrec() -> None:
    """Silence the notices that TorchRec and FBGEMM print at every start.

    They concern their own internals, and a user of `dist-sparse` can do nothing about them. Errors,
    and warnings of other modules, are shown.
    """
    # Notices about optional accelerators, and about tracing.
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # TorchRec logs this one with the root logger, whose level is the user's.
    logging.getLogger().addFilter(
        lambda record: "LOCAL_WORLD_SIZE from environment" not in str(record.msg)
    )
    warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu)(\.|$)")
    warnings.filterwarnings(
        "ignore", message=".* is deprecated. (Use|Please use) ", module=r"torch\.distributed"
    )
    warnings.filterwarnings(
        "ignore", message="fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel"
    )
