"""What the core takes from this extra: Triton kernels, and the command `selftest`.

Importing it needs no torch.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from dist_sparse.checks import write_whole
from dist_sparse.cli.commands import (
    JSON,
    Command,
    option,
    print_result,
    show_progress,
    silence_torchrec,
)

__all__ = ["commands", "kernels"]


def kernels() -> Any:
    """Return :class:`dist_sparse.masking.device.Kernels`; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from dist_sparse.extras.device.code_kernels import (
        assign_codes,
        decode_lookups,
        sum_by_code,
    )
    from dist_sparse.extras.device.flat_scores import FlatScores
    from dist_sparse.extras.device.kernels import Pruning, prune
    from dist_sparse.extras.device.row_kernels import TritonCounts, TritonLookups, TritonRowCleaner
    from dist_sparse.masking.device import Kernels

    return Kernels(
        FlatScores,
        Pruning,
        prune,
        TritonRowCleaner,
        TritonLookups,
        TritonCounts,
        assign_codes,
        sum_by_code,
        decode_lookups,
    )


def commands() -> list[Command]:
    """Return the command."""
    return [
        Command(
            name="selftest",
            topic="machine",
            purpose="trains on this machine's devices, and compares with the CPU",
            run=_selftest,
            epilog="""\
  dist-sparse selftest
  dist-sparse selftest --device cuda --out selftest.json

Compares masks and weights of small models, and measures mask updates. Takes up
to ten minutes on GPUs, two on a CPU.
""",
            options=[
                option(
                    "--device", help="default: cuda where there is a GPU", choices=("cpu", "cuda")
                ),
                option(
                    "--nproc",
                    help="processes; default: one a GPU, 2 on a CPU",
                    type=int,
                    choices=range(1, 17),
                    metavar="N",
                ),
                option("--out", help="writes JSON for an issue", type=Path, metavar="FILE"),
                JSON,
            ],
        )
    ]


def _selftest(options: argparse.Namespace) -> int:
    # Before the import: TorchRec logs when it is imported.
    silence_torchrec()
    from dist_sparse.extras.device.selftest import as_text, selftest

    try:
        results = selftest(options.device, options.nproc, show_progress)
    finally:
        show_progress("")
    status = print_result(options, results, as_text(results))
    # After the print: the results took minutes, and writing the file may fail.
    if options.out is not None:
        write_whole(options.out, f"{json.dumps(results, indent=2)}\n".encode(), shared=True)
    return status if results["passed"] else max(status, 1)
