"""Timing, peak memory, and fresh processes for benchmark cases."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

__all__ = ["best", "environment", "fresh", "keep", "peak_extra_bytes"]


def best(call: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """The shortest of ``repeats`` calls, in seconds; ``before`` runs ahead of each, outside the
    clock."""
    shortest = float("inf")
    for _ in range(repeats):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def peak_extra_bytes(call: Callable[[], Any]) -> int | None:
    """How far the resident memory of this process rises above where it is now during ``call``; None
    where not known.

    Linux only: it resets the kernel's high-water mark.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists() or not os.access(reset, os.W_OK):
        call()
        return None
    reset.write_text("5")
    before = _kib(status.read_text(), "VmRSS:")
    call()
    return max(0, _kib(status.read_text(), "VmHWM:") - before) * 1024


def fresh(module: str, case: dict[str, Any], ranks: int, threads: int) -> dict[str, Any]:
    """Runs ``python -m module`` with the case as JSON in ``ranks`` new processes; returns what rank
    0 printed last."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"}
    launcher = [] if ranks == 1 else ["torch.distributed.run", "--nproc_per_node", str(ranks)]
    if ranks > 1:
        launcher += [
            "--local-addr",
            "127.0.0.1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "-m",
        ]
    command = [sys.executable, "-W", "ignore", "-m", *launcher, module, json.dumps(case)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def keep(out: Path, name: str, cases: list[dict[str, Any]], text: str) -> None:
    """Writes a dated result into the folder ``out``, as JSON and as markdown."""
    today, facts = date.today().isoformat(), environment()
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{today}-{name}"
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": facts, "cases": cases}, indent=1) + "\n"
    )
    depends = ", ".join(f"{key} {value}" for key, value in facts.items())
    title = name.replace("-", " ").capitalize()
    stem.with_suffix(".md").write_text(f"# {title}, {today}\n\n{depends}.\n\n{text}\n")


def _kib(status: str, field: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
