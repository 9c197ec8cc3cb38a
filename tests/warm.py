"""Python scripts in processes that are forked from a warm server: as ``python script.py``, without
the imports.

Importing torch and torchrec costs three seconds of CPU in every new process, more than what most
scripts of the tests do then. Tests of imports, and one start of each program as its users start it,
stay with :mod:`subprocess`.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.dist.harness import context

__all__ = ["run_case", "run_ranks_of", "run_script"]

ROOT = Path(__file__).parents[1]


def run_script(
    script: Path,
    arguments: Sequence[object] = (),
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 200.0,
) -> CompletedProcess[str]:
    """What ``python script arguments`` returns and prints. ``env`` comes on top of this
    process's."""
    return _run(script, arguments, cwd, [env or {}], timeout)[0]


def run_ranks_of(
    script: Path, arguments: Sequence[object] = (), *, world: int, cwd: Path, timeout: float = 200.0
) -> list[CompletedProcess[str]]:
    """The same of every rank, with the variables that torchrun sets. Their clocks show different
    hours."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "TZ": f"ZONE{rank}"}
        for rank in range(world)
    ]
    return _run(script, arguments, cwd, ranks, timeout)


def run_case(module: str, case: dict[str, Any], ranks: int, threads: int = 1) -> dict[str, Any]:
    """As :func:`benchmarks.measure.fresh`. ``threads`` is that of the server: 1."""
    assert threads == 1
    script = ROOT / f"{module.replace('.', '/')}.py"
    done = run_ranks_of(script, [json.dumps(case)], world=ranks, cwd=ROOT)[0]
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(
    script: Path,
    arguments: Sequence[object],
    cwd: Path,
    envs: Sequence[Mapping[str, str]],
    timeout: float,
) -> list[CompletedProcess[str]]:
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(envs))]
        processes: list[Any] = []
        for folder, env in zip(folders, envs, strict=True):
            folder.mkdir()
            args = (words, str(cwd), {**os.environ, **env}, str(folder))
            processes.append(context().Process(target=_main, args=args, daemon=False))
            processes[-1].start()
        try:
            for process in processes:
                process.join(timeout)
                assert process.exitcode is not None, f"{words} runs for more than {timeout:g} s"
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            CompletedProcess(
                words, process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()
            )
            for process, folder in zip(processes, folders, strict=True)
        ]


def _main(words: list[str], cwd: str, env: dict[str, str], folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
