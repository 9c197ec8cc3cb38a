"""The plugin for tests on ranks: what it runs and reports, that failures do not spread. In a pytest
of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests

pytestmark = pytest.mark.slow

SCRATCH = """
import os, time, warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.dist.plugin import on_ranks

CALLS = []


@pytest.fixture
def made():
    return [os.getpid()]


@on_ranks(2)
def test_first(made, tmp_path):
    CALLS.append(os.getpid())
    assert CALLS[0] != made[0] and dist.get_world_size() == 2
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(2)
@pytest.mark.parametrize("number", [1, 2])
def test_patches_end(monkeypatch, number):
    assert time.sleep is not print and ("error", None, Warning, None, 0) not in warnings.filters
    monkeypatch.setattr(time, "sleep", print)
    warnings.simplefilter("error")


@on_ranks(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_one_fails(bad):
    assert len(CALLS) == (1 if bad == 0 else 0), "ranks are kept until one fails"
    print("printed by", dist.get_rank())
    if dist.get_rank() == bad:
        raise KeyError("lost")
    dist.barrier()


@on_ranks(2)
def test_one_hangs():
    if dist.get_rank() == 1:
        time.sleep(1000)


@on_ranks(2)
def test_one_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


@on_ranks(1, 2)
def test_worlds():
    dist.barrier()


@on_ranks(1, 2)
def test_world(world):
    assert dist.get_world_size() == world == int(os.environ["LOCAL_WORLD_SIZE"])


@on_ranks()
@pytest.mark.parametrize(("world", "name"), [(1, "a"), (2, "b")])
def test_own_world(world, name):
    assert dist.get_world_size() == world == {"a": 1, "b": 2}[name]


@on_ranks(2, local_world_size=1)
def test_hosts():
    assert os.environ["LOCAL_WORLD_SIZE"] == "1"


@on_ranks(2)
@pytest.mark.parametrize("what", [lambda: None], ids=["lambda"])
def test_does_not_pickle(what):
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a pytest over :data:`SCRATCH`."""
    (folder / "test_scratch.py").write_text(SCRATCH)
    root = Path(tests.__file__).parents[1]
    (folder / "conftest.py").write_text(
        "import tests.dist.harness as harness\n"
        "harness._CALL_ENDS = 10.0\n"
        f"harness._PRELOAD = {['torch', 'torch.distributed']}\n"
        "pytest_plugins = ['tests.dist.plugin']\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-v",
            f"--rootdir={folder}",
            *arguments,
            str(folder),
        ],
        env={**os.environ, "PYTHONPATH": f"{root}:{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    code, text = run(tmp_path_factory.mktemp("scratch"))
    assert code == 1, text
    return text


@pytest.mark.parametrize(
    ("case", "outcome"),
    {
        "test_first": "PASSED",
        "test_patches_end[1]": "PASSED",
        "test_patches_end[2]": "PASSED",
        "test_one_fails[0]": "FAILED",
        "test_one_fails[1]": "FAILED",
        "test_one_hangs": "FAILED",
        "test_one_dies": "FAILED",
        "test_worlds[1]": "PASSED",
        "test_worlds[2]": "PASSED",
        "test_world[1]": "PASSED",
        "test_world[2]": "PASSED",
        "test_own_world[1-a]": "PASSED",
        "test_own_world[2-b]": "PASSED",
        "test_hosts": "PASSED",
        "test_does_not_pickle[lambda]": "FAILED",
    }.items(),
)
def test_each_case_has_its_own_outcome(output: str, case: str, outcome: str) -> None:
    assert f"test_scratch.py::{case} {outcome}" in output, output


def test_failures_show_rank_traceback_and_log(output: str) -> None:
    for words in (
        "---- rank 1 ----\nTraceback",
        "KeyError: 'lost'",
        "printed by 1",
        "died with exit code 7",
        "must pickle",
        "killed after 10 s; it was here:",
        "in test_one_hangs",
    ):
        assert words in output, output


def test_nothing_starts_where_nothing_is_selected(tmp_path: Path) -> None:
    code, text = run(tmp_path, "-m", "not dist")
    assert code == 5 and "15 deselected" in text, text


def test_one_case_alone(tmp_path: Path) -> None:
    code, text = run(tmp_path, "-k", "test_world and 2", "-x")
    assert code == 0 and "2 passed" in text, text
