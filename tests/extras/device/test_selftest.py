"""`dist-sparse selftest`, whole, on a CPU; and what it says of wrong results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_sparse.cli.main import main

pytest.importorskip("torchrec")

from dist_sparse.extras.device import selftest

ROOT = Path(__file__).parents[3]
NEEDS_A_GPU = {
    "ordinary steps",
    "streams",
    "TrainPipelineFusedSparseDist",
    "bfloat16",
    "fused_uvm",
    "fused_uvm_caching",
    "device_id=",
}


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_on_this_cpu(nproc: int, tmp_path: Path) -> None:
    """With one process too, as on a machine with one GPU."""
    out = tmp_path / "selftest.json"
    command = ["-m", "dist_sparse", "selftest", "--device", "cpu", "--out", str(out)]
    command += ["--nproc", str(nproc)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    processes = ["1 rank", "2 ranks"][nproc - 1]
    assert done.stdout.startswith(
        f"As it should be on cpu, {processes}; {len(NEEDS_A_GPU)} of {len(selftest.CHECKS)} checks not run."
    )
    found = json.loads(out.read_text())
    assert found["passed"] and found["device"] == "cpu" and found["nproc"] == nproc
    status = {each["check"]: each["status"] for each in found["outcomes"]}
    assert {name for name, one in status.items() if one == "not run"} == NEEDS_A_GPU
    assert set(status.values()) == {"ok", "not run"}


WRONG = """
import sys
import torch.distributed as dist
from dist_sparse.extras.device import selftest

def differs(device, sizes):
    if dist.get_rank() == 1:
        raise selftest.Difference("a weight differs")
    return "right"

def ends(device, sizes):
    sys.exit(5)

selftest.CHECKS.update({"masks": differs, "ordinary steps": ends, "float16": lambda device, sizes: 1 / 0})
for name in selftest.CHECKS:
    if name not in ("masks", "ordinary steps", "float16"):
        selftest.CHECKS[name] = lambda device, sizes: "right"
selftest._FOR_GPUS = ()
sys.exit(selftest.worker(sys.argv[1:]))
"""


@pytest.mark.slow
def test_differences_errors_and_lost_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is named, and the checks behind it run all the same."""
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    monkeypatch.setattr(selftest, "_WORKER", (str(script),))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    found = selftest.selftest("cpu", 2, said.append)
    assert said == [each["check"] for each in found["outcomes"]]
    status = {each["check"]: (each["status"], each["says"]) for each in found["outcomes"]}
    assert status.pop("masks") == ("differs", "a weight differs")
    assert status.pop("ordinary steps") == ("failed", "a process ended")
    assert status.pop("float16") == ("failed", "ZeroDivisionError: division by zero")
    assert set(status.values()) == {("ok", "right")}
    assert not found["passed"]
    assert selftest.as_text(found).startswith(
        "Not as it should be on cpu, 2 ranks: masks, ordinary steps, float16."
    )


HANGS = """
import sys
import time
from dist_sparse.extras.device import selftest

def hangs_here(device, sizes):
    time.sleep(60)

selftest._STACKS = 1.0
selftest.CHECKS["masks"] = hangs_here
sys.exit(selftest.worker(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_hang_shows_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    monkeypatch.setattr(selftest, "_WORKER", (str(script),))
    monkeypatch.setattr(selftest, "_LIMIT", 40.0)
    monkeypatch.setattr(selftest, "CHECKS", {"masks": selftest.CHECKS["masks"]})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    [outcome] = selftest.selftest("cpu", 1, lambda check: None)["outcomes"]
    assert (outcome["status"], outcome["says"]) == ("failed", "no answer in 40 s")
    assert "in hangs_here" in outcome["details"][0]


@pytest.mark.slow
def test_no_code_of_the_current_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("open('pwned', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(selftest, "CHECKS", {"masks": selftest.CHECKS["masks"]})
    found = selftest.selftest("cpu", 1, lambda check: None)
    assert [each["status"] for each in found["outcomes"]] == ["ok"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("device", "sets"), [("cpu", 1), ("cuda", 2)])
def test_processes_that_bind_their_world_run_one_check(
    device: str, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def attempt(device: str, world: int, names: list[str], progress: Any) -> list[dict[str, Any]]:
        asked.append(names)
        return [{"check": name, "status": "ok", "says": "", "seconds": 0.0} for name in names]

    monkeypatch.setattr(selftest, "_attempt", attempt)
    monkeypatch.setattr(selftest.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(selftest.torch.cuda, "get_device_name", lambda number: "one")
    found = selftest.selftest(device, 2, lambda check: None)
    assert [each["check"] for each in found["outcomes"]] == list(selftest.CHECKS)
    assert len(asked) == sets and (sets == 1 or asked[1] == ["device_id="])


@pytest.mark.parametrize(
    ("kind", "name", "bound"),
    [
        ("cuda", "device_id=", torch.device("cuda", 1)),
        ("cuda", "masks", None),
        ("cpu", "device_id=", None),
    ],
)
def test_which_worlds_are_bound(
    kind: str, name: str, bound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bound(Exception):
        pass

    def init(*args: Any, device_id: Any) -> None:
        raise Bound(device_id)

    monkeypatch.setattr(selftest.dist, "init_process_group", init)
    monkeypatch.setattr(selftest.torch.cuda, "set_device", lambda device: None)
    with pytest.raises(Bound) as raised:
        selftest.worker([str(tmp_path), "1", "2", kind, name])
    assert raised.value.args == (bound,)


def test_a_check_that_did_not_run_took_no_time() -> None:
    skipped = {"check": "float16", "status": "not run", "says": "needs a GPU", "seconds": 2e-5}
    text = selftest.as_text(results({**skipped, "check": "masks", "status": "ok"}, skipped))
    assert text.splitlines()[-2:] == [
        "masks    ok       needs a GPU (0.02 ms)",
        "float16  not run  needs a GPU",
    ]


def results(*outcomes: dict[str, Any]) -> dict[str, Any]:
    passed = all(each["status"] == "ok" for each in outcomes)
    found = {"passed": passed, "device": "cuda", "nproc": 1, "machine": {"torch": "2"}}
    return {**found, "outcomes": list(outcomes)}


def test_exit_status_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"check": "masks", "status": "ok", "says": "bit for bit", "seconds": 1.5}
    wrong = {"check": "float16", "status": "differs", "says": "a long story " * 20, "seconds": 0.0}
    found = results(right)
    monkeypatch.setattr(selftest, "selftest", lambda device, nproc, progress: found)
    assert main(["selftest"]) == 0
    assert "As it should be on cuda, 1 rank; 0 of 1 checks" in capsys.readouterr().out
    found = results(right, wrong)
    assert main(["selftest", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == found
    assert main(["selftest", "--out", str(tmp_path / "none" / "out.json")]) == 1
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "No such file" in shown.err and "float16" in shown.out


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda", "--nproc", "16"]) == 1
    assert "torch finds" in capsys.readouterr().err
