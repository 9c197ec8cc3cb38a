"""SIGKILL at random moments of a training that saves at every step, and whether it ends as one
without.

    python -m tests.checkpoint.kills              20 kills of ranks that this process starts again
    python -m tests.checkpoint.kills --torchrun   5 kills under the launcher, which restarts them

Both print how often a kill came while a checkpoint was written, and compare the end bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import Checkpoints
from tests.checkpoint.faults import inject, kill
from tests.checkpoint.ranks import Job
from tests.dist.harness import RanksFailed, run_ranks

__all__ = ["live"]

KILLS, RESTARTS = 20, 5
_STEPS = 200  # more than the lives before the kills do together
# In the environment of the ranks of the launcher.
_ROOT, _SEED = (
    "CHECKPOINT_KILLS_ROOT",
    "CHECKPOINT_KILLS_SEED",
)


def live(root: Path, steps: int, fault: Mapping[str, object] | None = None) -> dict[str, Tensor]:
    """One life of a training: from the newest checkpoint to the end, or to a fault. Collective.

    Args:
        fault: arguments of ``inject(kill, ...)``, or ``rank`` and ``seconds`` after which it is
            killed.
    """
    job = Job("mixed", root, keep=2)
    resumed = job.checkpoints.resume_latest(**job.parts)
    if dist.get_rank() == 0:  # one for each life
        root.mkdir(parents=True, exist_ok=True)
        (root / f"life-{time.time_ns()}").touch()
    if fault is not None and "seconds" in fault:
        if dist.get_rank() == fault["rank"]:
            timer = threading.Timer(float(str(fault["seconds"])), kill)
            timer.daemon = True
            timer.start()
    elif fault is not None:
        inject(kill, **fault)  # type: ignore[arg-type]
    job.train(0 if resumed is None else resumed.step, steps, save=True)
    return job.state()


def _check(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differing, differing


def _torn(root: Path) -> int:
    """Folders without a marker."""
    return sum(not (folder / "COMMITTED").exists() for folder in root.glob("step-*"))


def _by_this_process(root: Path, wanted: Mapping[str, Tensor]) -> None:
    drawn, killed, torn = random.Random(0), 0, 0
    while killed < KILLS:
        before = Checkpoints(root).steps()
        try:
            run_ranks(
                2,
                live,
                root,
                _STEPS,
                {"rank": drawn.randrange(2), "seconds": drawn.uniform(0.0, 1.5)},
            )
            raise AssertionError(f"the end came after {killed} kills")
        except RanksFailed as failed:
            assert any("exit code -9" in text for text in failed.failures.values()), failed
        killed, torn = killed + 1, torn + _torn(root)
        steps = Checkpoints(root).steps()
        assert steps[-1:] >= before[-1:], (before, steps)
        print(f"kill {killed}: newest step {steps[-1] if steps else None}", flush=True)
    _check(run_ranks(2, live, root, _STEPS)[0], wanted)
    print(f"{killed} kills, {torn} of them while a checkpoint was written: the end is bit-equal")


def _by_torchrun(root: Path, wanted: Mapping[str, Tensor]) -> None:
    launch = [
        sys.executable,
        "-m",
        "dist_sparse.launch",
        "--nproc",
        "2",
        "--max-restarts",
        str(RESTARTS),
    ]
    env = {**os.environ, _ROOT: str(root), _SEED: "1"}
    subprocess.run([*launch, str(Path(__file__).resolve())], env=env, check=True, timeout=550)
    lives = sorted(path.name for path in root.glob("life-*"))
    assert len(lives) == RESTARTS + 1, lives
    _check(torch.load(root / "end.pt"), wanted)
    print(f"{RESTARTS} kills under the launcher: the end is bit-equal")


def _life_under_torchrun() -> None:
    root, count = Path(os.environ[_ROOT]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    drawn = random.Random(100 * int(os.environ[_SEED]) + count)
    fault = (
        {"rank": drawn.randrange(2), "seconds": drawn.uniform(0.2, 1.5)}
        if count < RESTARTS
        else None
    )
    dist.init_process_group("gloo")
    state = live(root, _STEPS, fault)
    if dist.get_rank() == 0:
        torch.save(state, root / "end.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchrun", action="store_true", help="under the launcher")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        wanted = run_ranks(2, live, Path(name) / "whole", _STEPS)[0]
        (_by_torchrun if options.torchrun else _by_this_process)(Path(name) / "killed", wanted)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    _life_under_torchrun() if _ROOT in os.environ else main()
