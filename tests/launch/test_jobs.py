"""Does a real job get its words, its environment and its restarts, and do its exit code and output come back?"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from .jobs import finish, job, script

NASTY = [
    "a b",
    "$(touch pwned)",
    '"',
    "'",
    "--no",
    "--",
    "-h",
    "$HOME",
    "two\nlines",
    "*",
    "\\",
    "ü",
    "",
    "$$",
    "${local_rank}",
]

TALK = """
import json
import torch
import torch.distributed as dist
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if attempt == "0" and rank == 1:
    sys.exit(3)
if attempt == "0":
    time.sleep(60)
def mine(pid):
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            pass
sockets = {*mine(os.getpid()), *mine(os.getppid())}
listening = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            listening.append(fields[1].split(":")[0])
dist.barrier()
say(f"result{rank}", json.dumps([attempt, int(total), sys.argv[1:], dict(os.environ), listening]))
print("to stdout", flush=True)
print("to stderr", file=sys.stderr)
os._exit(0)  # gloo's own teardown aborts now and then
"""


def test_a_job_on_one_machine(tmp_path: Path) -> None:
    """Words, environment, one restart, labels, and stores on the loopback address alone."""
    words = ["--nproc", "2", "--max-restarts", "1", "--env", "KEY=x y=$z", script(tmp_path, TALK), "--", *NASTY]
    with job(tmp_path, words, PET_NNODES="7", PET_STANDALONE="1", PET_NPROC_PER_NODE="5") as running:
        status, out, err = finish(running)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] to stdout", "[1] to stdout"]
    assert {"[0] to stderr", "[1] to stderr"} <= set(err.splitlines())
    names = "PET_NNODES, PET_NPROC_PER_NODE, PET_STANDALONE"
    assert err.splitlines()[0] == f"launch: not passed on, torchrun would take options from: {names}"
    for rank in range(2):
        attempt, total, args, environ, listening = json.loads((tmp_path / f"result{rank}").read_text())
        assert (attempt, total, args) == ("1", 2, NASTY)
        assert environ["KEY"] == "x y=$z"
        assert environ["PYTHONHASHSEED"] == "0"
        assert int(environ["OMP_NUM_THREADS"]) >= 1
        assert not [key for key in environ if key.startswith("PET_")]
        assert len(environ["TORCHELASTIC_RUN_ID"]) > 32
        # 0100007F is 127.0.0.1, as /proc has it.
        assert len(listening) >= 2
        assert set(listening) == {"0100007F"}
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("last", "status"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path, last: str, status: int) -> None:
    text = f"say(str(rank))\nif rank == 1:\n    {last}\ntime.sleep(60)\n"
    with job(tmp_path, ["--nproc", "2", script(tmp_path, text)]) as running:
        found, out, err = finish(running)
    assert (found, out) == (status, "")
    # torchrun's summary, without a traceback of torchrun's own insides.
    assert f"[torchrun] {tmp_path / 'job.py'} FAILED" in err
    assert "Traceback" not in err


def test_a_module_in_one_process_has_no_label(tmp_path: Path) -> None:
    script(tmp_path, "print(sys.argv[1:], __name__)\n")
    with job(tmp_path, ["-m", "job", "--x"], PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}") as running:
        assert finish(running)[:2] == (0, "['--x'] __main__\n")


def test_two_nodes_meet(tmp_path: Path) -> None:
    """Two launchers on this machine, each with one rank; one takes its endpoint from a variable."""
    text = """
import torch.distributed as dist
dist.init_process_group("gloo")
names = [None, None]
dist.all_gather_object(names, os.environ["NODE"])
print(dist.get_world_size(), sorted(names), os.environ["LOCAL_WORLD_SIZE"])
dist.barrier()
os._exit(0)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = ["torchrun", "--nnodes", "2", "--rdzv-id", "two-nodes", "--local-addr", "127.0.0.1"]
    path = script(tmp_path, text)
    first = [*common, "--rdzv-endpoint", f"127.0.0.1:{port}", "--env", "NODE=a", path]
    second = [*common, "--rdzv-host-env", "HEAD", "--rdzv-port", port, "--env", "NODE=b", path]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    with job(tmp_path, first, **loopback) as one, job(tmp_path, second, HEAD="127.0.0.1", **loopback) as other:
        outputs = sorted(finish(running)[:2] for running in (one, other))
    assert outputs == [(0, "[0] 2 ['a', 'b'] 1\n"), (0, "[1] 2 ['a', 'b'] 1\n")]
