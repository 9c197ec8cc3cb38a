"""Real jobs: their words, environment, restarts, exit codes, output and last lines."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dist_sparse.launch import child

from .jobs import LAUNCH, ROOT, finish, job, script

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
if attempt == "0":
    if rank == 1:
        say("port0", os.environ["MASTER_PORT"])
        os._exit(3)
    time.sleep(60)
dist.barrier()
say(f"result{rank}", json.dumps([attempt, int(total), sys.argv[1:], dict(os.environ)]))
print("to stdout")
print("to stderr", file=sys.stderr)
os._exit(0)  # gloo's own teardown aborts now and then
"""


@pytest.mark.slow
def test_a_job_on_one_machine(tmp_path: Path) -> None:
    """Words, environment, prefixes, and one restart: a rank dies, and all train on with a new
    store."""
    words = [
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "--env",
        "KEY=x y=$z",
        script(tmp_path, TALK),
        "--",
        *NASTY,
    ]
    with job(
        tmp_path, words, PET_NNODES="7", PET_STANDALONE="1", PET_NPROC_PER_NODE="5"
    ) as running:
        status, out, err = finish(running)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] to stdout", "[1] to stdout"]
    assert {"[0] to stderr", "[1] to stderr"} <= set(err.splitlines())
    names = "PET_NNODES, PET_NPROC_PER_NODE, PET_STANDALONE"
    assert err.splitlines()[0] == f"launch: torchrun would take options from {names}: not passed on"
    for rank in range(2):
        attempt, total, args, environ = json.loads((tmp_path / f"result{rank}").read_text())
        assert (attempt, total, args) == ("1", 2, NASTY)
        assert environ["KEY"] == "x y=$z"
        assert environ["PYTHONHASHSEED"] == "0"
        assert int(environ["OMP_NUM_THREADS"]) >= 1
        assert not [key for key in environ if key.startswith("PET_")]
        assert len(environ["TORCHELASTIC_RUN_ID"]) > 32
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        # Ranks that are handed the store of those before them connect to dead ones, now and then.
        assert environ["MASTER_PORT"] != (tmp_path / "port0").read_text()
    assert not (tmp_path / "pwned").exists()


FAILURES = {
    "exception": (
        "fail('a')",
        1,
        r"rank 1 failed at job\.py:\d+ with ValueError: no column 'a' \(exit code 1\)",
    ),
    "exit": (
        "sys.exit(75)",
        75,
        r"rank 1 failed at job\.py:\d+ with SystemExit: 75 \(exit code 75\)",
    ),
    "os._exit": ("os._exit(3)", 3, r"rank 1 failed \(exit code 3\)"),
    "signal": ("os.kill(os.getpid(), 9)", 137, r"rank 1 was killed by SIGKILL \(exit code 137\)"),
}
# Rank 0 fails because of rank 1, as in a collective: a moment later, which torchrun's own times
# don't tell apart.
FAIL = """
def fail(name):
    raise ValueError(f"no column {name!r}\\nsecond line")
if rank == 1:
    say("failing")
    LAST
while not Path(os.environ["FOLDER"], "failing").exists():
    time.sleep(0.001)
time.sleep(0.05)
raise ConnectionError("lost rank 1")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "status", "line"), FAILURES.values(), ids=FAILURES)
def test_the_last_line_names_the_rank_that_failed_first(
    tmp_path: Path, last: str, status: int, line: str
) -> None:
    script(tmp_path, FAIL.replace("LAST", last))
    with job(tmp_path, ["--nproc", "2", "job.py"]) as running:
        found, out, err = finish(running)
    assert (found, out) == (status, "")
    assert re.fullmatch(f"launch: {line}", err.splitlines()[-1]), err
    # Of torchrun, which says less: these lines hide the script's own.
    assert "closing signal" not in err and "failed (exitcode" not in err
    if "fail(" in last:
        begin = err.index("[1] Traceback (most recent call last)")
        assert err[begin:].splitlines()[1].startswith(f'[1]   File "{tmp_path / "job.py"}", line ')


@pytest.mark.slow
def test_threads_of_gloo_end_before_the_interpreter(tmp_path: Path) -> None:
    """As a thread of Python's here, which runs only where the main thread waits after the script's
    last line."""
    text = """
import sys, threading
sys.modules["torch.distributed"] = sys
sys.setswitchinterval(60)
ended = threading.Event()
threading.Thread(target=lambda: ended.wait() and print("released", flush=True), daemon=True).start()
ended.set()
"""
    (tmp_path / "job.py").write_text(text)
    words = [sys.executable, child.__file__, "rank", str(tmp_path / "job.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "released\n"


@pytest.mark.slow
def test_a_rank_that_has_failed_writes_its_error_file_despite_sigterm(tmp_path: Path) -> None:
    """torchrun exits with a JSONDecodeError if it finds half of the file."""
    text = """
import os
class Failure(Exception):
    def __str__(self):
        os.kill(os.getpid(), 15)
        return "text"
raise Failure
"""
    (tmp_path / "job.py").write_text(text)
    words = [sys.executable, child.__file__, "rank", str(tmp_path / "job.py")]
    file = tmp_path / "error.json"
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert json.loads(file.read_text())["message"]["message"] == "Failure: text"


@pytest.mark.slow
def test_one_process_has_the_launcher_s_own_files(tmp_path: Path) -> None:
    """A module here; and its traceback ends with the script's frames."""
    script(tmp_path, "print(sys.argv[1:], __name__, __spec__.name, input())\nint('x')\n")
    words = [sys.executable, "-m", "launch", "-m", "job", "--x"]
    with job(
        tmp_path, [f"echo typed | {' '.join(words)}"], command=("sh", "-c"), PYTHONPATH=str(ROOT)
    ) as running:
        status, out, err = finish(running)
    assert (status, out) == (1, "['--x'] __main__ job typed\n")
    assert "child.py" not in err and "runpy" not in err
    place = r"launch: rank 0 failed at job\.py:\d+ with ValueError: invalid literal"
    assert re.match(place, err.splitlines()[-1])


BAR = """
from tqdm import tqdm
for step in tqdm(range(20), desc="train", mininterval=0):
    pass
print(os.isatty(1), flush=True)
if rank == 1:
    def of_rank_1():
        raise ValueError("of rank 1")
    of_rank_1()
time.sleep(0 if os.environ["WORLD_SIZE"] == "1" else 60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"), [([], 0), (["--nproc", "2", "--ranks", "0"], 1)], ids=["alone", "shown"]
)
def test_one_shown_rank_writes_to_the_terminal(
    tmp_path: Path, words: list[str], status: int
) -> None:
    """So that a bar is drawn in place. Of the others there is the traceback of the one that
    failed."""
    command = [*LAUNCH, *words, script(tmp_path, BAR)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(
            command[0], command, {**os.environ, "FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 1 << 16)
        except OSError:
            break
    os.close(terminal)
    text = drawn.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status, text
    assert text.count("\rtrain:") > 10 and "20/20" in text
    assert text.count("True") == 1 and "[0]" not in text
    if status:
        assert "in of_rank_1\r\n" in text
        assert text.splitlines()[-1].endswith("with ValueError: of rank 1 (exit code 1)")


@pytest.mark.slow
def test_a_hidden_rank_that_exits_has_no_traceback(tmp_path: Path) -> None:
    """As under `python`: argparse exits after a wrong option, which the shown rank reports too."""
    words = ["--nproc", "2", "--ranks", "0"]
    with job(
        tmp_path, [*words, script(tmp_path, "if rank == 1: sys.exit(2)\ntime.sleep(60)\n")]
    ) as running:
        status, _, err = finish(running)
    assert status == 2 and "Traceback" not in err
    assert err.splitlines()[-1].endswith("with SystemExit: 2 (exit code 2)")


@pytest.mark.slow
def test_only_shown_ranks_are_printed(tmp_path: Path) -> None:
    words = [
        "--nproc",
        "3",
        "--ranks",
        "0,2",
        script(tmp_path, "print(rank)\nprint('error', file=sys.stderr)\n"),
    ]
    with job(tmp_path, words) as running:
        status, out, err = finish(running)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0", "[2] 2"]
    assert sorted(err.splitlines()) == ["[0] error", "[2] error"]


@pytest.mark.slow
def test_two_nodes_meet(tmp_path: Path) -> None:
    """Two launchers on this machine, each with one rank; one takes its endpoint from a variable."""
    text = """
import torch.distributed as dist
dist.init_process_group("gloo")
names = [None, None]
dist.all_gather_object(names, os.environ["NODE"])
print(rank, dist.get_world_size(), sorted(names), os.environ["LOCAL_WORLD_SIZE"])
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
    with (
        job(tmp_path, first, **loopback) as one,
        job(tmp_path, second, HEAD="127.0.0.1", **loopback) as other,
    ):
        outputs = sorted(finish(running)[:2] for running in (one, other))
    assert outputs == [(0, "0 2 ['a', 'b'] 1\n"), (0, "1 2 ['a', 'b'] 1\n")]
