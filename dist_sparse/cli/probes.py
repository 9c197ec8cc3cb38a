"""Probes of torch, TorchRec, FBGEMM and gloo, each in a process of its own with a time limit.

A bad mix of releases can crash the interpreter or hang, and torch may be missing: nothing of it is
imported here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SECONDS: Final = 120.0

_ASK: Final = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = {"version": torch.__version__, "gpus": gpus, "cuda": torch.version.cuda}
print(json.dumps(found))
"""

LOOKUP: Final = """
import dist_sparse.torchrec.port, torch, torchrec
config = torchrec.EmbeddingBagConfig(
    name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"]
)
ids = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 3]), torch.tensor([2]))
found = torchrec.EmbeddingBagCollection(tables=[config])(ids)["f"]
assert found.shape == (1, 4)
assert torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2])).tolist() == [0, 2]
"""

GLOO: Final = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """Facts about torch; ``fault`` says why it does not load."""

    fault: str | None = None
    version: str = ""
    gpus: int = 0
    cuda: str | None = None


def ask_torch() -> Torch:
    """Load torch in a process of its own and return facts about it."""
    fault, printed = _probe(_ASK)
    # The last line: packages may print when they are imported.
    return Torch(**json.loads(printed.splitlines()[-1])) if fault is None else Torch(fault=fault)


def fails(code: str) -> str | None:
    """Run ``code`` in a process of its own; return its error, None if there is none."""
    return _probe(code)[0]


def _probe(code: str) -> tuple[str | None, str]:
    """Run ``code`` in a process of its own; return its error, if any, and its output."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # An empty folder in PYTHONPATH is the current one too.
    path = [
        str(Path(__file__).parents[2]),
        *(folder for folder in others if folder not in ("", ".")),
    ]
    # -P: without it the current folder comes first on sys.path, and its json.py or torch.py would
    # run.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_SECONDS:.0f} s", ""
    if done.returncode == 0:
        return None, done.stdout
    # A signal: libraries of another build end in SIGSEGV, not in an error.
    if done.returncode < 0:
        return f"the interpreter was killed by {signal.Signals(-done.returncode).name}", ""
    # A traceback ends with the error.
    return (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1], ""
