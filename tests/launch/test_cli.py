"""The launcher's command line: specs, refusals, help and the files that it writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dist_sparse.launch import child
from dist_sparse.launch.__main__ import main
from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec

from .jobs import LAUNCH, ROOT


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of the command that `--print` shows, read as a shell would."""
    assert main(list(words)) == 0
    found = shlex.split(capsys.readouterr().out)
    assert found.pop(0) == "env"
    variables = [word for word in found[: found.index("-m") - 1] if "=" in word]
    return dict(word.split("=", 1) for word in variables), found[len(variables) :]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize("command", [[], ["local"]], ids=["without", "with"])
def test_local_is_the_command_when_none_is_given(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    variables, words = printed(
        capsys, *command, "--print", "--nproc", "2", "a.py", "--", "--epochs", "1", "it's"
    )
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[words.index("--") :] == ["--", "a.py", "--epochs", "1", "it's"]
    assert value(words, "--rdzv-endpoint") == "127.0.0.1:0"
    assert value(words, "--rdzv-id").startswith("a-")
    assert variables["PYTHONHASHSEED"] == "0"


def test_args_may_follow_without_a_separator(capsys: pytest.CaptureFixture[str]) -> None:
    _, words = printed(capsys, "--print", "a.py", "--nproc", "7", "--", "-h")
    assert value(words, "--nproc-per-node") == "1"
    assert words[words.index("--") :] == ["--", "a.py", "--nproc", "7", "--", "-h"]


def test_options_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--nproc",
        "gpu",
        "--max-restarts",
        "2",
        "--grace",
        "5",
        "--env",
        "A=b=c d",
        "--name",
        "x",
    ]
    variables, words = printed(capsys, "--print", *options, "--python", "/py 3", "-m", "pkg.mod")
    assert words[0] == "/py 3"
    assert (value(words, "--nproc-per-node"), value(words, "--max-restarts")) == ("gpu", "2")
    assert words[-3:] == ["-m", "--", "pkg.mod"]
    assert (variables["A"], variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("b=c d", "5")
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(("host", "endpoint"), [("node7", "node7:1234"), ("", "localhost:1234")])
def test_the_endpoint_may_come_from_a_variable(
    host: str, endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEAD", host)
    options = [
        "--rdzv-host-env",
        "HEAD",
        "--rdzv-port",
        "1234",
        "--rdzv-id",
        "x",
        "--local-addr",
        "10.0.0.1",
    ]
    _, words = printed(capsys, "torchrun", "--print", "--nnodes", "1:2", *options, "a.py")
    assert (value(words, "--rdzv-endpoint"), value(words, "--local-addr")) == (endpoint, "10.0.0.1")
    assert (value(words, "--nnodes"), value(words, "--rdzv-id")) == ("1:2", "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: SCRIPT"),
        (["--nproc", "0", "a.py"], "Invalid --nproc='0'"),
        (["--nproc", "-1", "a.py"], "launch: error: Invalid --nproc='-1'"),
        (["--env", "A", "a.py"], "--env: 'A': must be KEY=VALUE"),
        (["--ranks", "0,x", "a.py"], "--ranks: invalid local_ranks value: '0,x'"),
        (
            ["--nproc", "2", "--ranks", "0,2", "pyproject.toml"],
            "Invalid --ranks=2: must be a local rank, below 2.",
        ),
        (["--env", "a=1", "a.py"], "Invalid --env='a'"),
        (["--name", "A", "a.py"], "Invalid --name='A'"),
        (["--nnodes", "2", "a.py"], "--nnodes"),
        (["-m", "no-such"], "Invalid SCRIPT='no-such': must be a dotted Python name"),
        (["no-such.py"], "Invalid SCRIPT='no-such.py': there is no such file"),
        (["torchrun", "--nnodes", "2", "-m", "this"], "Invalid --rdzv-endpoint=None"),
        (
            ["torchrun", "--nnodes", "2", "--rdzv-endpoint", "a:1", "-m", "this"],
            "Invalid --rdzv-id=None",
        ),
        (
            ["torchrun", "--rdzv-endpoint", "a:1", "--rdzv-host-env", "A", "-m", "a"],
            "not allowed with argument",
        ),
        (["torchrun", "--rdzv-endpoint", "a", "a.py"], "Invalid --rdzv-endpoint='a': must be HOST"),
        (["--grace", "-1", "a.py"], "Invalid --grace=-1: must be a number from 0 on"),
        (["--ranks", "-1", "pyproject.toml"], "Invalid --ranks=-1: must be a local rank, below 1"),
        (["--env", "PET_NNODES=9", "a.py"], "Invalid --env='PET_NNODES'"),
        (["sbatch", "a.py"], "Invalid SCRIPT='sbatch': there is no such file"),
    ],
    ids=str,
)
def test_wrong_words_are_2_and_start_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    found = capsys.readouterr()
    assert message in found.err.replace("\n  ", " ") and not found.out


@pytest.mark.parametrize("command", [[], ["local"], ["torchrun"]], ids=str)
def test_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--help"], prog="dist-sparse launch")
    assert leaving.value.code == 0
    found = capsys.readouterr().out
    assert "dist-sparse launch --nproc 2 train.py -- --epochs 1" in found
    assert found.split("\n\n")[1].startswith("Runs ") and "exit status: " in found


def test_names_come_from_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in (
        (["My_Script.py"], "my-script"),
        (["-m", "a.b.Train_2"], "train-2"),
        (["__.py"], "train"),
        (["x" * 70 + ".py"], "x" * 53),
    ):
        _, found = printed(capsys, "--print", *words)
        assert value(found, "--rdzv-id").rpartition("-")[0] == name


def test_a_printed_command_sets_variables_that_shells_do_not(tmp_path: Path) -> None:
    """In bash, `UID=5 command` fails: UID is read-only."""
    show = tmp_path / "python"
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$NOTE" "$OMP_NUM_THREADS"; env | grep ^UID=\n')
    show.chmod(0o755)
    options = ["--env", "UID=5", "--env", "NOTE=it's $HOME", "--python", str(show)]
    command = shlex.join([*LAUNCH, "--print", *options, "a.py"])
    done = subprocess.run(
        ["bash", "-c", f'eval "$({command})"'], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    note, threads, uid = done.stdout.splitlines()
    assert (note, uid) == ("it's $HOME", "UID=5") and int(threads) >= 1


@pytest.mark.parametrize("command", [LAUNCH, (sys.executable, "-m", "dist_sparse", "launch")])
def test_a_printed_command_has_the_bytes_of_its_words(command: tuple[str, ...]) -> None:
    """Names of files need not be UTF-8, whatever the encoding of the terminal."""
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [*command, "--print", "a.py", b"\xff", "é"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, check=True, timeout=60)
    assert done.stdout.endswith(b"-- a.py '\xff' '\xc3\xa9'\n")


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@needs_full
@pytest.mark.parametrize(
    ("words", "outputs", "message"),
    [
        ("--print a.py", "> /dev/full", "No space left on device"),
        ("--python /no/such -m this", "", "/no/such"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_1(words: str, outputs: str, message: str) -> None:
    command = f"{' '.join(LAUNCH)} {words} {outputs}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("python -m launch: ") and message in line


def test_an_output_of_python_s_own() -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print("before")
        assert main(["--print", "a.py", "é"]) == 0
    assert output.getvalue().startswith("before\nenv ")
    assert output.getvalue().endswith("-- a.py 'é'\n")


def test_only_the_main_thread_can_run_a_job() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="in the main thread"):
        pool.submit(run, LaunchSpec(script=__file__)).result()


NOWHERE = "no-such-node.invalid"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--rdzv-endpoint", f"{NOWHERE}:29400", "--local-addr", "127.0.0.1"],
            f"Invalid --rdzv-endpoint='{NOWHERE}:29400': the name '{NOWHERE}' does not resolve",
        ),
        (
            ["--rdzv-endpoint", "localhost:29400", "--local-addr", NOWHERE],
            f"Invalid --local-addr='{NOWHERE}': the name '{NOWHERE}' of this node does not resolve",
        ),
    ],
    ids=["endpoint", "own"],
)
def test_names_that_do_not_resolve_are_named_before_anything_starts(
    options: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun would try to connect for a minute, and name no address."""
    monkeypatch.setattr("dist_sparse.launch.run.NAME_SECONDS", 0.1)
    with pytest.raises(SystemExit) as leaving:
        main(["torchrun", "--nnodes", "2", "--rdzv-id", "x", *options, "-m", "this"])
    assert leaving.value.code == 2
    found = capfd.readouterr()
    assert message in found.err.replace("\n  ", " ") and not found.out
    # At once, in case that the name comes later.
    waits = f"launch: the name '{NOWHERE}' in the rendezvous endpoint does not resolve; waits 0.1 s"
    assert (waits in found.err) == (options[0] == "--rdzv-endpoint" and NOWHERE in options[1])


def test_the_host_name_of_a_node_must_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: NOWHERE)
    spec = LaunchSpec(module="this", nnodes="2", rdzv_endpoint="localhost:29400", rdzv_id="x")
    with pytest.raises(ValueError, match=f"local_addr=None: the name '{NOWHERE}' of this node"):
        run(spec)


def test_the_launcher_needs_no_torch() -> None:
    """It starts quickly, and where torch is broken."""
    code = "import dist_sparse.launch.__main__, sys\n"
    code += "print(sorted({'torch', 'torchx', 'yaml', 'numpy'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n"


def test_a_failure_is_described_where_the_working_directory_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may clean up after itself; the exit code stays the rank's."""
    trace = 'Traceback (most recent call last)\n  File "/jobs/train.py", line 3, in <module>\n'
    message = {"message": "SystemExit: 7", "extraInfo": {"py_callstack": trace, "timestamp": "1"}}
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": message}))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=7, error_file=str(file))

    def fail(words: list[str]) -> None:
        raise ChildFailedError("train.py", {0: failure})

    monkeypatch.setattr("torch.distributed.run.main", fail)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    assert child.torchrun("", []) == 7
    said = capsys.readouterr().err
    assert said == "launch: rank 0 failed at /jobs/train.py:3 with SystemExit: 7 (exit code 7)\n"


@pytest.mark.parametrize(
    ("nproc", "hint"), [("gpu", " `--nproc gpu` needs a GPU here."), ("2", "")], ids=["gpu", "2"]
)
def test_what_only_torchrun_can_check_is_one_line(
    nproc: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(words: list[str]) -> None:
        raise ValueError("It is not available.")

    monkeypatch.setattr("torch.distributed.run.main", refuse)
    words = ["--nnodes", "1", "--nproc-per-node", nproc, "--", "gpu"]
    assert child.torchrun("", words) == 2
    said = capsys.readouterr().err
    assert said == f"launch: error: torchrun: It is not available.{hint}\n"
