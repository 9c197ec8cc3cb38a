"""With whom does a process of the job die, where does it listen, where does it write, and how does it end?

`agent()` is torchrun's own process: it ends when the launcher dies, keeps its stores on the loopback address where the
job is on one node, and leaves with the exit code of the ranks. `rank()` goes before a rank: it arranges that the rank
dies with torchrun, gets the rank's output from the launcher, and becomes the rank, under the same pid.

This file is run by its path, outside the package, so that it works the same in every folder and environment. `rank`
runs once per rank before anything else, so it imports little.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["JOB", "SOCKET", "agent", "rank"]

JOB = "DIST_SPARSE_LAUNCH_JOB"
"""One job's random mark, behind those of the jobs that it runs in; every process has it in its environment."""

SOCKET = "DIST_SPARSE_LAUNCH_SOCKET"
"""The path of the launcher's Unix socket."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Asks the kernel for a signal when the thread that has started this process ends. On Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        sys.exit("The launcher is gone.")


def rank() -> None:
    """Becomes `python -u` with the words of sys.argv, its output where the launcher wants it. Does not return."""
    die_with_parent(signal.SIGKILL)
    hello = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}
    with socket.socket(socket.AF_UNIX) as launcher:
        # A launcher that is gone, or that sees no torchrun any more, gives no files: nothing is started then. Nor where
        # it may not open more.
        launcher.connect(os.environ.pop(SOCKET))
        launcher.sendall(json.dumps(hello).encode() + b"\n")
        _, files, _, _ = socket.recv_fds(launcher, 1, 2)
    if not files:
        sys.exit("No files from the launcher: the job is over, or too many are open (see `ulimit -n`).")
    os.dup2(files[0], 1)
    os.dup2(files[-1], 2)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


def agent(parent: int, loopback: bool, words: list[str]) -> int:
    """Runs torchrun with these words in this process; returns the exit code of the job.

    That is the code of the first rank that failed, 128 + n where it died of signal n. A job that was sent signal n has
    the code that its ranks chose, if they all ended with the same one, and 128 + n otherwise. 0 and 1 are not chosen: 1
    is what any exception ends with.
    """
    die_with_parent(signal.SIGTERM, parent)
    try:
        import torch.distributed
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if loopback:
            _replace(torch.distributed, "TCPStore", _loopback_store)
        from torch.distributed import run
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
        from torch.distributed.launcher import api
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    codes: list[int | None] = []
    _meet_anew(DynamicRendezvousHandler)
    _replace(api, "LocalElasticAgent", functools.partial(_noting_agent, codes))
    try:
        run.main(words)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return _status(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        same = codes[0] if len(set(codes)) == 1 else None
        return same if same is not None and same > 1 else 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _replace(module: types.ModuleType, name: str, make: Callable[[Any], type]) -> None:
    """Puts a subclass into the place of a class of torch, which has no setting for what it does."""
    vars(module)[name] = make(vars(module)[name])


def _noting_agent(codes: list[int | None], base: Any) -> type:
    """torchrun's agent, but that it notes how its ranks ended when it has ended them."""

    class Agent(base):  # type: ignore[misc]
        def _shutdown(self, *args: Any, **options: Any) -> None:
            super()._shutdown(*args, **options)
            handlers = getattr(getattr(self, "_pcontext", None), "subprocess_handlers", {})
            codes[:] = [handler.proc.poll() for handler in handlers.values()]

    return Agent


def _meet_anew(handler: Any) -> None:
    """Gives ranks a new store after a restart. Torch 2.13 leaves them the old one, with addresses of dead ranks in it.

    Gloo then connects to those, now and then, and the restart fails.
    """
    meet = handler.next_rendezvous

    def next_rendezvous(self: Any) -> Any:
        self._bootstrap_store_info = None
        return meet(self)

    handler.next_rendezvous = next_rendezvous


def _loopback_store(base: Any) -> type:
    """TCPStore, but that a server for a loopback address listens there. Torch's own listens on all interfaces."""

    class LoopbackStore(base):  # type: ignore[misc]
        def __init__(self, host_name: str, port: int = 0, *args: Any, **options: Any) -> None:
            if options.get("is_master") and host_name == "127.0.0.1" and "master_listen_fd" not in options:
                server = socket.create_server((host_name, port), backlog=1024)
                port = server.getsockname()[1]
                options["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, *args, **options)

    return LoopbackStore


if __name__ == "__main__":
    status = agent(int(sys.argv[1]), sys.argv[2] == "loopback", sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
