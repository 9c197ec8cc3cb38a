"""`dist-sparse doctor`: findings and the commands that fix them. Probes are real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import packaging
import pytest

from dist_sparse.cli import doctor, probes
from dist_sparse.cli.doctor import Diagnosis, Finding, examine, installed
from dist_sparse.cli.output import has_colors

GOOD = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load nothing: for tests of installed versions and variables."""
    monkeypatch.setattr(doctor, "fails", lambda code: None)
    monkeypatch.setattr(doctor, "ask_torch", lambda: probes.Torch(version="2.13.0"))


def found(versions: dict[str, str] = GOOD, cuda: bool = False) -> dict[str, Finding]:
    return {each.what: each for each in examine(versions, cuda=cuda).findings}


def test_this_machine() -> None:
    """The machine that runs the tests can train, and the real probes say so."""
    pytest.importorskip("torchrec")
    answer = examine()
    status = {each.what: each.status for each in answer.findings}
    assert answer.can_train, str(answer)
    assert status["versions fit"] == status["a lookup"] == status["gloo"] == "ok"
    assert all((each.fix is None) or each.status != "ok" for each in answer.findings)
    assert answer.text() == "Everything needed to train is here."
    assert str(answer).startswith("Everything needed to train is here.\n\nneeded ")
    said = json.loads(json.dumps(answer.to_json()))
    assert said["can_train"] and {each["what"] for each in said["findings"]} == set(status)
    assert {"torch", "torchrec"} <= set(installed())


@pytest.mark.usefixtures("no_probes")
def test_torch_alone_trains_plain_models() -> None:
    answer = examine({"torch": "2.13.0"}, cuda=False)
    text = str(answer)
    assert text.startswith(
        "TorchRec models can't be trained here: torchrec, fbgemm. Plain PyTorch models can.\n"
    )
    assert "\n  torchrec, fbgemm: " in text and not answer.can_train, "one command installs both"


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("versions", "what", "status", "says", "fix"),
    [
        (
            {"torch": "2.13.0"},
            "torchrec",
            "missing",
            "not installed",
            '--no-deps "fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            {"torch": "2.12.1"},
            "fbgemm",
            "missing",
            "not installed",
            '"fbgemm-gpu-cpu==1.7.*" "torchrec==1.7.*"',
        ),
        (
            {"torch": "2.10.0"},
            "torch",
            "wrong",
            "2.10.0 is too old: torch>=2.11",
            'install "torch==2.13.*" --extra',
        ),
        ({}, "torch", "missing", "not installed", 'install "torch==2.13.*" --extra'),
        (
            {**GOOD, "torch": "2.14.0"},
            "versions fit",
            "wrong",
            "torchrec 1.8.0 needs 2.13.*",
            '"torch==2.13.*"',
        ),
        (
            {"torch": "2.13.0", "torchrec": "0.8.0", "fbgemm-gpu-cpu": "0.8.0"},
            "versions fit",
            "wrong",
            "torchrec is too old: 1.0 or later",
            '"torchrec==1.8.*"',
        ),
        (
            {**GOOD, "fbgemm-gpu-cpu": "1.7.0"},
            "versions fit",
            "wrong",
            "fbgemm-gpu is wrong",
            "fbgemm-gpu-cpu==1.8.*",
        ),
        (
            {**GOOD, "fbgemm-gpu": "1.8.0"},
            "fbgemm",
            "wrong",
            "both installed",
            "uninstall -y fbgemm-gpu fbgemm-gpu-cpu && ",
        ),
        (
            {**GOOD, "tensorboard": "2.3.0"},
            "tensorboard",
            "wrong",
            "2.3.0 is too old",
            '"tensorboard>=2.16"',
        ),
        (
            GOOD,
            "safetensors",
            "missing",
            "for export() and load_served()",
            '-m pip install "safetensors>=0.5"',
        ),
        (GOOD, "torchx", "missing", "older than 1.27", '-m pip install "torchx>=0.7"'),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_packages(versions: dict[str, str], what: str, status: str, says: str, fix: str) -> None:
    each = found(versions)[what]
    assert each.status == status and says in each.says, each
    assert each.fix is not None and fix in each.fix, each


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("versions", "torch", "release"),
    [
        ({"torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.7.0"}, "2.12", None),
        ({"torchrec": "1.7.0"}, "2.12", "1.7"),
        ({"torchrec": "1.7.0", "torch": "2.10.0"}, "2.12", "1.7"),
        ({"torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "2.13", None),
        ({"torchrec": "1.6.0"}, "2.13", "1.8"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "2.13", "1.8"),
    ],
)
def test_torch_fits_the_torchrec_that_is_here(
    versions: dict[str, str], torch: str, release: str | None
) -> None:
    """The commands install releases that fit together, in any order."""
    answer = found(versions)
    fixes = [
        str(answer[what].fix)
        for what in ("torch", "torchrec", "fbgemm")
        if answer[what].status != "ok"
    ]
    assert f'install "torch=={torch}.*"' in fixes[0]
    assert set(re.findall(r'"torch==([\d.]+)\.\*', " ".join(fixes))) == {torch}
    assert set(re.findall(r"(?:torchrec|cpu)==([\d.]+)\.\*", " ".join(fixes))) == (
        {release} if release else set()
    )


@pytest.mark.usefixtures("no_probes")
def test_a_good_mix_needs_nothing_more() -> None:
    answer = examine(GOOD, cuda=False)
    assert answer.can_train
    assert {each.what for each in answer.findings if each.needed} >= {
        "python",
        "torch",
        "torchrec",
        "fbgemm",
    }
    newer = found({"torch": "2.14.0", "torchrec": "1.9.0", "fbgemm-gpu-cpu": "1.9.0"})[
        "versions fit"
    ]
    assert newer.status == "ok" and "knows those of 1.7, 1.8" in newer.says


@pytest.mark.usefixtures("no_probes")
def test_a_gpu_asks_for_more() -> None:
    each = {each.what: each for each in examine(GOOD, cuda=True).findings}
    assert each["fbgemm"].status == "wrong" and "no CUDA kernels" in each["fbgemm"].says
    assert each["fbgemm"].fix is not None
    assert each["fbgemm"].fix.endswith('--no-deps "fbgemm-gpu==1.8.*" "torchrec==1.8.*"')
    assert not each["gloo"].needed
    alone = {
        each.what: each for each in examine({**GOOD, "fbgemm-gpu": "1.8.0"}, cuda=False).findings
    }
    assert alone["gloo"].needed


@pytest.mark.parametrize("build", [None, "12.6"])
def test_a_driver_whose_gpu_torch_does_not_see(
    build: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "fails", lambda code: None)
    monkeypatch.setattr(doctor, "ask_torch", lambda: probes.Torch(version="2.13.0", cuda=build))
    cuda = found()["cuda"]
    assert (
        cuda.status == "wrong"
        and f"for {f'CUDA {build}' if build else 'CPUs'}, sees no GPU" in cuda.says
    )


def test_a_probe_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.fails("pass") is None
    assert probes.fails("import dist_sparse.torchrec.versions") is None, (
        "finds the package without a PYTHONPATH"
    )
    assert probes.fails("import os; os.abort()") == "the interpreter was killed by SIGABRT"
    assert probes.fails("raise ImportError('undefined symbol')") == "ImportError: undefined symbol"
    assert probes.fails("raise SystemExit(3)") == "ended with status 3"
    monkeypatch.setattr(probes, "_SECONDS", 1.0)
    assert probes.fails("import time; time.sleep(60)") == "did not end within 1 s"


@pytest.mark.parametrize("name", ["json", "torch"])
def test_the_current_folder_is_not_imported_from(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from somebody else: nothing in it runs, or is taken for torch."""
    (tmp_path / f"{name}.py").write_text(
        "open('ran', 'w').close()\nraise ImportError('not the real one')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}")
    found = probes.ask_torch()
    assert found.fault is None and found.version.startswith("2.")
    assert not (tmp_path / "ran").exists()


def test_what_does_not_load_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with operators that were built for another torch: a lookup that kills its process."""
    monkeypatch.setattr(doctor, "LOOKUP", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(doctor, "GLOO", "pass")
    lookup = found()["a lookup"]
    assert lookup.status == "wrong" and "SIGSEGV" in lookup.says
    assert lookup.fix is not None and "--force-reinstall --no-deps" in lookup.fix


BROKEN = {
    "missing": None,
    "without a library": "raise ImportError('libcudart.so.13: cannot open shared object file')",
    "for another glibc": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_it_runs_without_a_torch_that_loads(code: str | None, tmp_path: Path) -> None:
    """In a process that has only what dist_sparse requires, or with a torch that fails as real ones
    do."""
    (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    root = Path(__file__).resolve().parents[2]
    if code is not None:
        (tmp_path / "torch.py").write_text(code)
        about = tmp_path / "torch-2.13.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    start = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]; from dist_sparse.cli.main"
        " import main; "
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", f"{start}sys.exit(main({list(words)!r}))"]
        return subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    assert (
        run("--help").returncode
        == run("plan", "--help").returncode
        == run("doctor", "--help").returncode
        == 0
    )
    done = run("doctor")
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "TorchRec models can't be trained here: torch, torchrec, fbgemm.\n" in done.stdout
    if code is None:
        assert "torch: " in done.stdout and "not installed" in done.stdout
    else:
        said = (
            "libcudart.so.13: cannot open shared object file"
            if "libcudart" in code
            else "killed by SIGSEGV"
        )
        assert (
            "does not load:"
            f" {'ImportError: ' if 'libcudart' in code else 'the interpreter was '}{said}"
            in done.stdout
        )
        assert 'install --force-reinstall "torch==2.13.*"' in done.stdout


def test_colors_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Diagnosis(findings=(Finding(what="ok", status="ok", needed=True, says="1"),))
    assert answer.text(colors=True) == "\x1b[32mEverything needed to train is here.\x1b[0m"
    assert "\x1b" not in str(answer)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colors()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors()


def test_only_what_is_needed_decides() -> None:
    def diagnosis(**fields: Any) -> Diagnosis:
        return Diagnosis(findings=(Finding(what="x", says="", **fields),))

    assert diagnosis(status="ok", needed=True).can_train
    assert diagnosis(status="wrong", needed=False).can_train
    assert not diagnosis(status="wrong", needed=True).can_train
    assert not diagnosis(status="missing", needed=True).can_train
    text = str(diagnosis(status="missing", needed=True, fix="install x --index-url URL"))
    assert (
        "  x: install x --index-url URL" in text
        and "URL is that of PyTorch's package index" in text
    )
