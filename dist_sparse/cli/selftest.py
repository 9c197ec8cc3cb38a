"""The subcommand `dist-sparse selftest`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dist_sparse.cli.output import progress, show
from dist_sparse.cli.parsing import Commands, add_json, subcommand

_EPILOG = """examples:
  dist-sparse selftest
  dist-sparse selftest --device cuda --out selftest.json
  dist-sparse selftest --device cpu --nproc 4

Trains small models on every device and compares masks and weights with those of
the CPU; measures mask updates. Takes up to ten minutes on GPUs, two on a CPU.
Needs TorchRec. What it finds on GPUs is worth an issue: docs/cuda.md.

exit status: 0 everything that ran is right, 1 something differs or failed,
2 invalid command line
"""


def _run(options: argparse.Namespace) -> int:
    from dist_sparse.selftest.run import selftest

    try:
        found = selftest(options.device, options.nproc, progress)
    finally:
        progress("")
    text = json.dumps(found.to_json(), indent=2)
    status = show(text if options.json else found.text())
    # The result took minutes: it is shown also where the file can't be written.
    if options.out is not None:
        options.out.write_text(f"{text}\n")
    # Output that could not be written comes first.
    return status or (0 if found.passed else 1)


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"Invalid {text!r}: must be a whole number, at least 1")
    return int(text)


def add_selftest(commands: Commands) -> None:
    """Add the subcommand."""
    parser = subcommand(
        commands, "selftest", "trains on this machine's devices, and compares with the CPU", _EPILOG
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--nproc", type=_processes, metavar="N", help="processes; default: one a GPU, 2 on a CPU"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes JSON for an issue")
    add_json(parser)
    parser.set_defaults(run=_run)
