"""Files of a run: private, never written through links, and by one log at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dist_sparse.cli.main import main
from dist_sparse.extras.report import RunLog, read_run, write_report
from dist_sparse.extras.report.folder import LINES, LOCK, RUN, read_lines, write_whole
from tests.extras.report.folders import full_disk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run") as log:
        for step in range(3):
            log.step(step, loss=1.0 * step)
    return tmp_path / "run"


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.lstat().st_mode)


def test_a_report_is_not_written_through_links(folder: Path, tmp_path: Path) -> None:
    """A run folder from somebody else, with links to a file of the reader and to one that does not
    exist."""
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    (folder / "report.html").symlink_to(mine)
    (folder / "value_loss.svg").symlink_to(tmp_path / "new")
    write_report(folder, svg=folder)
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()
    for name in ("report.html", "value_loss.svg"):
        assert (
            (folder / name).is_file()
            and not (folder / name).is_symlink()
            and (folder / name).stat().st_size > 2_000
        )
    assert sorted(file.name for file in folder.iterdir()) == [
        LINES,
        LOCK,
        "report.html",
        RUN,
        "value_loss.svg",
    ]


@pytest.mark.timeout(60)
def test_a_report_is_not_written_into_a_pipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a reader, opening it would block forever."""
    os.mkfifo(folder / "report.html")
    assert main(["report", str(folder)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "report.html is not a regular file: it is neither read nor written." in said
    assert stat.S_ISFIFO((folder / "report.html").stat().st_mode)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", [LINES, LOCK, RUN])
def test_a_log_does_not_wait_at_a_pipe(name: str, resume: bool, tmp_path: Path) -> None:
    """Opening a pipe without a writer, or without a reader, would block forever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        RunLog(tmp_path, resume=resume)
    # Through a link too.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        RunLog(tmp_path / "other", resume=resume)


def test_a_link_to_a_device_is_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/stdout, whose folder the superuser can write."""
    (tmp_path / "stdout").symlink_to("/dev/null")
    with pytest.raises(ValueError, match="stdout is not a regular file"):
        write_whole(tmp_path / "stdout", b"new")
    assert (tmp_path / "stdout").is_symlink()


@pytest.mark.parametrize("name", [LINES, LOCK, RUN])
def test_a_log_is_not_written_through_links(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(mine)
    if name != RUN:
        with pytest.raises(
            ValueError,
            match=r"log\.(jsonl|lock) is not a regular file: it is neither read nor written",
        ):
            RunLog(tmp_path / "run")
    else:
        RunLog(tmp_path / "run").close()
    assert not mine.exists()


def test_the_temporary_file_of_run_json_is_not_written_through_links(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.part").symlink_to(mine)
    RunLog(tmp_path / "run").close()
    assert (
        mine.read_text() == "mine"
        and json.loads((tmp_path / "run" / RUN).read_text())["format"] == 3
    )


def test_logs_are_the_users_alone_and_reports_are_shown(folder: Path) -> None:
    """A config may hold secrets."""
    (folder / "report.html").touch(0o644)
    write_report(folder, svg=folder)
    files = [file for file in folder.iterdir() if file.is_file()]
    private = [file for file in files if file.suffix not in (".html", ".svg")]
    assert len(files) == 5 and {mode_of(file) for file in private} == {0o600}
    assert {mode_of(file) for file in files if file not in private} == {0o644}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder is not a regular file"):
        write_whole(tmp_path / "folder", b"new")
    with pytest.raises(OSError, match=r"No such file or directory: '.*missing/second'"):
        write_whole(tmp_path / "missing" / "second", b"new")
    with full_disk(2), pytest.raises(OSError, match=r"File too large: '.*first'"):
        write_whole(tmp_path / "first", b"new")
    assert (tmp_path / "first").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "folder"]


def test_a_link_that_cannot_be_replaced_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as another user's `latest` in a folder with the sticky bit."""

    def denied(part: Path, target: Path) -> Path:
        if target.name == "latest":
            raise PermissionError(1, "Operation not permitted")
        os.replace(part, target)
        return target

    monkeypatch.setattr(Path, "replace", denied)
    RunLog(tmp_path / "runs" / "a").close()
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["a"]


def test_one_log_at_a_time(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.step(0, loss=1.0)
        with pytest.raises(ValueError, match=r"log\.jsonl is being written by another RunLog"):
            RunLog(tmp_path, resume=True)
        with pytest.raises(ValueError, match="holds the log of a run"):
            RunLog(tmp_path)
        log.step(1, loss=1.0)
    with RunLog(tmp_path, resume=True) as log:
        log.step(2, loss=1.0)
    kinds = [line["kind"] for _, line in read_lines(tmp_path / LINES)]
    assert kinds == ["values", "values", "end", "resumed", "values", "end"]


STARTER = """
import sys, time
from dist_sparse.extras.report import RunLog
print("ready", flush=True)
sys.stdin.readline()
try:
    log = RunLog(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error, flush=True)
else:
    print("writes", flush=True)
    sys.stdin.readline()
    log.close()
"""


def started(folder: Path) -> subprocess.Popen[str]:
    command, env = (
        [sys.executable, "-c", STARTER, str(folder)],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_of_jobs_that_start_together_one_writes(tmp_path: Path) -> None:
    jobs = [started(tmp_path / "run") for _ in range(2)]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    said = sorted(job.stdout.readline() for job in jobs if job.stdout is not None)
    for job in jobs:
        job.communicate("end\n", timeout=60)
    assert said[1] == "writes\n" and said[0].startswith("ValueError "), said
    assert [line["kind"] for _, line in read_lines(tmp_path / "run" / LINES)] == ["end"]


@pytest.mark.slow
def test_a_killed_job_leaves_no_lock(tmp_path: Path) -> None:
    job = started(tmp_path)
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write("go\n")
    job.stdin.flush()
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n", "writes\n"]
    with pytest.raises(ValueError, match="holds the log of a run"):
        RunLog(tmp_path)
    with pytest.raises(ValueError, match="another RunLog"):
        RunLog(tmp_path, resume=True)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
    RunLog(tmp_path, resume=True).close()


FORKS = """
import os, signal, sys, time
from dist_sparse.extras.report import RunLog
log = RunLog(sys.argv[1])
log.step(0, loss=1.0)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_forked_worker_keeps_no_lock(tmp_path: Path) -> None:
    """A DataLoader's worker may outlive its rank while the job restarts."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    worker = int(job.stdout.readline())
    try:
        job.send_signal(signal.SIGKILL)
        job.wait(60)
        os.kill(worker, 0)  # it is still there
        RunLog(tmp_path, resume=True).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        job.stdout.close()
    assert [
        line["step"] for _, line in read_lines(tmp_path / LINES) if line["kind"] == "values"
    ] == [0]


def test_a_run_names_the_commit_of_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is written without one where there is no repository."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "main.py")])
    RunLog(tmp_path / "none").close()
    assert "commit" not in read_run(tmp_path / "none").versions
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    RunLog(tmp_path / "one").close()
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert head.stdout.strip() == read_run(tmp_path / "one").versions["commit"]


# Settings of a repository that name programs, and what makes git run them. `%s` stands for the
# program.
PROGRAMS = {
    "core.fsmonitor": "%s",
    "core.pager": "%s",
    "pager.rev-parse": "%s",
    "core.sshCommand": "%s",
    "core.editor": "%s",
    "diff.external": "%s",
    "diff.mine.textconv": "%s",
    "diff.mine.command": "%s",
    "filter.mine.clean": "%s",
    "filter.mine.smudge": "%s",
    "filter.mine.process": "%s",
    "alias.rev-parse": "!%s",
    "alias.describe": "!%s",
    "trace2.eventTarget": "%s",
    "gpg.program": "%s",
    "credential.helper": "!%s",
}


def test_no_program_of_a_repository_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the script may be a clone of another user's, with his configuration."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "main.py").write_text("1")
    (tmp_path / ".gitattributes").write_text("* filter=mine diff=mine\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 >> {tmp_path}/pwned\n")
    program.chmod(0o755)
    for hook in ("reference-transaction", "post-index-change", "fsmonitor-watchman"):
        shutil.copy(program, tmp_path / ".git" / "hooks" / hook)
    # Through an included file too, which git reads as the repository's own.
    for key, value in PROGRAMS.items():
        words = ["config", "--file", str(tmp_path / "more"), key, value % program]
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "config", "include.path", str(tmp_path / "more")], check=True)
    # The file has changed since: git would have to read it again, through the filters.
    (tmp_path / "main.py").write_text("2")
    monkeypatch.setattr("sys.argv", ["main.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGER", "false")
    RunLog(tmp_path / "run").close()
    assert not (tmp_path / "pwned").exists(), (tmp_path / "pwned").read_text()
    assert len(read_run(tmp_path / "run").versions["commit"]) == 40


def test_a_file_is_no_folder_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("mine")
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=r"Invalid folder='.*train\.py': it is a file; must be"
        ):
            RunLog(file, resume=resume)
    assert file.read_text() == "mine" and [*tmp_path.iterdir()] == [file]
