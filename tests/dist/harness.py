"""How do tests run real ranks? Gloo processes on this machine, started once per call, that always end.

Ranks are forked from a server that has imported torch and torchrec once, so that a call costs well under a second after
the first. Results and tracebacks come back through files; a rank that hangs gives its stack, then all are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["RanksFailed", "run_cases", "run_ranks"]

# Seconds. They are there to end a hang, on the slowest machine that is busy with other things too.
_RANKS_END = 600.0  # below the timeout of pytest, in pyproject.toml, which would say less
_COLLECTIVES_END = 200.0  # in the default group and in those of the library

# DMP.reshard matches its messages by hash() of strings; gloo would otherwise bind the address of the host name.
_SERVER_ENV = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
_PRELOAD = ["torch", "torch.distributed", "torchrec", "torchrec.distributed.model_parallel"]
_GRACE = 10.0  # seconds that ranks have to end by themselves after one of them failed


class RanksFailed(AssertionError):
    """What went wrong, by rank: the traceback, or the stack of a rank that had to be killed."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"---- rank {rank} ----\n{text}" for rank, text in self.failures.items()))


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, local_world_size: int | None = None) -> list[Any]:
    """Calls ``fn(*args)`` in ``world`` new processes with a gloo process group over them; returns its results by rank.

    Args:
        fn: a module-level function of an importable module. Its results must pickle.
        local_world_size: ranks of one "host", for table-row-wise and grid sharding; None is all.

    Raises:
        RanksFailed: a rank raised, died or hung. The first to fail comes first.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(world):  # so that they can be read whatever a rank lived to do
            (folder / f"log{rank}").touch()
            (folder / f"stack{rank}").touch()
        context = _context()
        settings = (folder, world, local_world_size or world)
        ranks = [context.Process(target=_main, args=(rank, *settings, fn, args), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            failures = _watch(ranks, folder)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if failures:
            raise RanksFailed(failures)
        return [pickle.loads((folder / f"result{rank}").read_bytes())["value"] for rank in range(world)]


def run_cases(cases: Mapping[str, Any], check: Callable[[Any], None]) -> dict[str, str | None]:
    """Inside ``fn``: calls ``check`` for each case on all ranks; returns case -> None, or this rank's traceback.

    Cases after a failed one are not run, because the ranks may have left each other at different collectives.
    """
    import torch
    import torch.distributed as dist

    # Waits for ranks that time out in the collectives of a case.
    flags = dist.new_group(timeout=timedelta(seconds=_RANKS_END))
    outcome: dict[str, str | None] = {}
    for name, case in cases.items():
        try:
            check(case)
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
        failed = torch.tensor([outcome[name] is not None], dtype=torch.int32)
        dist.all_reduce(failed, group=flags)
        if failed.item():
            outcome[name] = outcome[name] or "failed on another rank"
            break
    return {name: outcome.get(name, "not run: an earlier case failed") for name in cases}


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    kept = {key: os.environ.get(key) for key in _SERVER_ENV}
    os.environ.update(_SERVER_ENV)
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        for key, value in kept.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    return context


def _watch(ranks: list[BaseProcess], folder: Path) -> dict[int, str]:
    """Waits for all ranks to end; shortens the wait when one has failed. Returns the failures, the first first."""
    deadline = time.monotonic() + _RANKS_END
    failures: dict[int, str] = {}
    running = dict(enumerate(ranks))
    while running and time.monotonic() < deadline:
        wait = max(deadline - time.monotonic(), 0)
        multiprocessing.connection.wait([process.sentinel for process in running.values()], timeout=wait)
        for rank, process in list(running.items()):
            if process.is_alive():
                continue
            del running[rank]
            result = folder / f"result{rank}"
            said = (
                pickle.loads(result.read_bytes())
                if result.exists()
                else {"error": f"died with exit code {process.exitcode}"}
            )
            if "error" in said:
                failures[rank] = f"{said['error']}\n{_tail(folder / f'log{rank}')}"
                deadline = min(deadline, time.monotonic() + _GRACE)
    for process in running.values():
        os.kill(process.pid or 0, signal.SIGUSR1)  # faulthandler writes the stack
    if running:
        time.sleep(0.5)
    why = "killed after another rank had failed" if failures else f"killed after {_RANKS_END:g} s"
    for rank in running:
        failures[rank] = f"{why}; it was here:\n{_tail(folder / f'stack{rank}', 60)}\n{_tail(folder / f'log{rank}')}"
    return failures


def _tail(file: Path, lines: int = 20) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def _main(rank: int, folder: Path, world: int, local: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """One rank. Leaves by os._exit: tearing gloo down while DDP is alive sometimes aborts."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(folder / f"stack{rank}", "w")  # noqa: SIM115  (open for faulthandler until the end)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
    }

    import torch
    import torch.distributed as dist

    from dist_sparse.groups import set_timeout

    set_timeout(_COLLECTIVES_END)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    code = 0
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=_COLLECTIVES_END),
        )
        said = {"value": fn(*args)}
        written = pickle.dumps(said)
    except BaseException:
        code = 1
        written = pickle.dumps({"error": traceback.format_exc()})
    part = folder / f"part{rank}"
    part.write_bytes(written)
    part.rename(folder / f"result{rank}")
    if code == 0:
        with contextlib.suppress(Exception):  # another rank failed and says so
            dist.barrier()
    os._exit(code)
