"""Gloo ranks on this machine: processes that are forked from one warm server, and that always end.

The server imports torch, torchrec and the package once, so that a start costs well under a second. Ranks answer
over pipes; a rank that hangs gives its stack, and after a failure all are killed: they may be at
different collectives.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

from tests import seeds

__all__ = ["LOCAL", "Ranks", "RanksFailed", "context", "run_ranks"]

LOCAL: Final = {1: 1, 2: 2, 3: 3, 4: 2}
"""``local_world_size`` for a world of this size. TorchRec keeps its host groups for the life of a
process: one each."""

# Seconds. They end a hang, on the slowest machine that is busy with other things too.
_CALL_ENDS = 300.0  # below the timeout of pytest, in pyproject.toml, which shows no stacks of ranks
_COLLECTIVES_END = 200.0  # in the default group and in those of the library
_GRACE = 10.0  # for the other ranks to end by themselves, after one of them failed

# Of a rank: others take its place then.
_MOST_THREADS = 100

# DMP.reshard matches its messages by hash() of strings; gloo would otherwise bind the address of
# the host name.
_SERVER_ENV = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
# What most tests import: a second of CPU less in each rank. Modules that are missing are passed over.
_PRELOAD = [
    *("torch", "torch.distributed", "torchrec", "torchrec.distributed.model_parallel"),
    *("dist_sparse.checkpoint.checkpoints", "dist_sparse.compaction.compact", "dist_sparse.remove"),
    *("dist_sparse.serving.export", "dist_sparse.training.sparsify", "tests.dist.cells"),
]


class RanksFailed(AssertionError):
    """What went wrong, by rank: the traceback, or the stack of a rank that had to be killed."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(
            "\n".join(f"---- rank {rank} ----\n{text}" for rank, text in self.failures.items())
        )


class Ranks:
    """Processes with a gloo process group over them. They run one function at a time, all the same
    one.

    Args:
        world: number of ranks.
        local_world_size: ranks of one "host", for table-row-wise and grid sharding; None is
            ``LOCAL[world]``.
    """

    def __init__(self, world: int, local_world_size: int | None = None) -> None:
        self.alive = True
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        local = local_world_size or LOCAL.get(world, world)
        forking = context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = forking.Pipe()
            args = (rank, self._path, world, local, theirs)
            process = forking.Process(target=_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of ``fn(*args, **kwargs)`` by rank.

        Args:
            fn: a module-level function of an importable module. Arguments and results must pickle.

        Raises:
            RanksFailed: a rank raised, died or hung. The first to fail comes first, and all ranks
                are gone.
        """
        work = pickle.dumps((seeds.current(), fn, args, kwargs))
        logged = [self._tail("log", rank)[0] for rank in range(len(self._pipes))]
        for pipe in self._pipes:
            pipe.send_bytes(work)
        try:
            answers, failures = self._collect(logged)
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise RanksFailed(failures)
        if self._is_crowded():
            self.close()
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all ranks, whatever they do."""
        self.alive = False
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()

    def _is_crowded(self) -> bool:
        """Whether tests have left process groups open: each has three threads, and they wake up a
        hundred times a second."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.exists() and len(list(tasks.iterdir())) > _MOST_THREADS

    def _collect(self, logged: list[int]) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers and failures by rank, the first failure first; the wait is short once a rank has
        failed."""
        deadline = time.monotonic() + _CALL_ENDS
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(
                waiting.values(), max(deadline - time.monotonic(), 0)
            )
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answer = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join()
                    answer = {"error": f"died with exit code {self._processes[rank].exitcode}"}
                if "error" in answer:
                    failures[rank] = (
                        f"{answer['error']}\n{self._tail('log', rank, logged[rank])[1]}"
                    )
                    deadline = min(deadline, time.monotonic() + _GRACE)
                else:
                    answers[rank] = answer["value"]
        for rank in waiting:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)  # faulthandler writes the stack
        if waiting:
            time.sleep(0.5)
        why = (
            "killed after another rank had failed" if failures else f"killed after {_CALL_ENDS:g} s"
        )
        for rank in waiting:
            stack, log = (
                self._tail("stack", rank, lines=60)[1],
                self._tail("log", rank, logged[rank])[1],
            )
            failures[rank] = f"{why}; it was here:\n{stack}\n{log}"
        return answers, failures

    def _tail(self, name: str, rank: int, start: int = 0, lines: int = 20) -> tuple[int, str]:
        """The size of what a rank has written, and the last lines of it behind ``start``."""
        file = self._path / f"{name}{rank}"
        text = file.read_bytes() if file.exists() else b""
        return len(text), "\n".join(text[start:].decode(errors="replace").splitlines()[-lines:])


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, local_world_size: int | None = None
) -> list[Any]:
    """As :meth:`Ranks.call`, on ranks that are started for this call and then end."""
    ranks = Ranks(world, local_world_size)
    try:
        return ranks.call(fn, *args)
    finally:
        ranks.close()


def context() -> Any:
    """The :mod:`multiprocessing` context whose processes are forked from the warm server."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(_PRELOAD)
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
    return forking


def _main(rank: int, folder: Path, world: int, local: int, pipe: Connection) -> None:
    """One rank. Leaves by os._exit: tearing gloo down while DDP is alive sometimes aborts."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
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
    started = False
    while True:
        try:
            work = pipe.recv_bytes()
        except EOFError:  # the tests have ended
            os._exit(0)
        try:
            if not started:
                _start(folder, rank, world)
                started = True
            answer = pickle.dumps({"value": _run(work)})
        except BaseException:
            answer = pickle.dumps({"error": traceback.format_exc()})
            pipe.send_bytes(answer)
            os._exit(1)
        pipe.send_bytes(answer)


def _start(folder: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    from dist_sparse.groups import set_timeout

    # ShardedTensor, at each attribute.
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    set_timeout(_COLLECTIVES_END)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_COLLECTIVES_END)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    # Modules are never garbage: a full collection takes 0.2 s less, and copies no page of theirs.
    gc.freeze()


def _run(work: bytes) -> Any:
    seed, fn, args, kwargs = pickle.loads(work)
    seeds.seed(seed)  # so that a function draws the same, whatever ran before it
    try:
        with warnings.catch_warnings():
            return fn(*args, **kwargs)
    finally:
        # pytest undoes the patches of its own process, not those of the copies it has sent here.
        for patches in kwargs.values():
            if isinstance(patches, pytest.MonkeyPatch):
                patches.undo()
