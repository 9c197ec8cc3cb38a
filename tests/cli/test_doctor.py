"""`dist-sparse doctor`: findings and the commands that fix them. Probes are real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import packaging
import pytest

from dist_sparse.cli import doctor
from dist_sparse.cli.doctor import TORCH, Diagnosis, Finding, probe
from dist_sparse.torchrec import installed

GOOD = {
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
}
TORCH_HERE = {"gpus": 0, "cuda": None}
READY = "Everything needed to train is here, on "


def no_probes_but(monkeypatch: pytest.MonkeyPatch, **torch: object) -> None:
    printed = json.dumps(TORCH_HERE | torch)
    monkeypatch.setattr(doctor, "probe", lambda code: (None, printed))


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load nothing: for tests of installed versions and variables."""
    no_probes_but(monkeypatch)


def examine(versions: dict[str, str] | None = None) -> Diagnosis:
    """The diagnosis of this machine, or of one with these distributions."""
    with pytest.MonkeyPatch.context() as patch:
        if versions is not None:
            patch.setattr(doctor, "installed", lambda: versions)
        return doctor.examine(lambda what: None)


def found(versions: dict[str, str] = GOOD) -> dict[str, Finding]:
    return {each.what: each for each in examine(versions).findings}


@pytest.mark.slow
def test_this_machine() -> None:
    """The machine that runs the tests can train, and the real probes say so."""
    pytest.importorskip("torchrec")
    answer = examine()
    assert answer.broken == [], answer.text()
    assert answer.text().startswith(READY) and "\n" not in answer.text()
    whole = answer.text(verbose=True)
    assert whole.startswith(f"{answer.text()}\n  torch: 2.") and "\n  a lookup: works" in whole
    said = json.loads(json.dumps(answer.to_json()))
    assert said["can_train"]
    assert [each["what"] for each in said["findings"]] == [each.what for each in answer.findings]
    assert {"torch", "torchrec"} <= set(installed())


@pytest.mark.usefixtures("no_probes")
def test_the_verdict_comes_first_and_one_command_installs_both() -> None:
    text = examine({"torch": "2.13.0"}).text()
    assert text.startswith("TorchRec models can't be trained here: torchrec, fbgemm.\n  torchrec")
    assert text.count("To fix:") == 1


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("versions", "what", "says", "fix"),
    [
        ({"torch": "2.13.0"}, "torchrec", "not installed", '--no-deps "fbgemm-gpu-cpu==1.8.*"'),
        ({"torch": "2.14.1"}, "fbgemm", "not installed", '-cpu==1.9.*" "torchrec==1.9.*"'),
        ({**GOOD, "torch": "2.14.0"}, "versions fit", "needs 2.13.*", '"torchrec==1.9.*"'),
        (
            {**GOOD, "torchrec": "0.8.0", "fbgemm-gpu-cpu": "0.8.0"},
            "versions fit",
            "torchrec is too old: 1.0 or later",
            '"torchrec==1.8.*"',
        ),
        ({**GOOD, "fbgemm-gpu-cpu": "1.7.0"}, "versions fit", "fbgemm-gpu is wrong", "==1.8.*"),
        (
            {**GOOD, "fbgemm-gpu": "1.8.0"},
            "fbgemm",
            "both installed",
            "uninstall -y fbgemm-gpu fbgemm-gpu-cpu && ",
        ),
    ],
)
def test_packages(versions: dict[str, str], what: str, says: str, fix: str) -> None:
    each = found(versions)[what]
    assert not each.ok and says in each.says and fix in each.fix, each


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("versions", "torch", "release"),
    [
        ({"torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "2.13", None),
        ({"torchrec": "1.8.0"}, "2.13", "1.8"),
        ({"torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, "2.14", None),
        ({"torchrec": "1.6.0"}, "2.14", "1.9"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "2.14", "1.9"),
    ],
)
def test_torch_fits_the_torchrec_that_is_here(
    versions: dict[str, str], torch: str, release: str | None
) -> None:
    """The commands install releases that fit together, in any order."""
    fixes = [each.fix for each in examine(versions).broken]
    assert f'install --force-reinstall "torch=={torch}.*"' in fixes[0]
    assert set(re.findall(r'"torch==([\d.]+)\.\*', " ".join(fixes))) == {torch}
    assert set(re.findall(r"(?:torchrec|cpu)==([\d.]+)\.\*", " ".join(fixes))) == (
        {release} if release else set()
    )


def test_a_gpu_needs_its_own_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    no_probes_but(monkeypatch)
    assert "gloo" in found()
    no_probes_but(monkeypatch, gpus=1)
    each = found(GOOD)["fbgemm"]
    assert not each.ok and "no CUDA kernels" in each.says
    assert each.fix.endswith('--no-deps "fbgemm-gpu==1.8.*" "torchrec==1.8.*"')
    assert "gloo" not in found()


GPU = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}


def with_a_gpu(monkeypatch: pytest.MonkeyPatch, fault: str | None = None) -> list[str]:
    """The names of what is broken on a machine with a GPU, whose kernel has a fault."""
    printed = json.dumps(TORCH_HERE | {"gpus": 1, "cuda": "13.0"})
    monkeypatch.setattr(
        doctor, "probe", lambda code: (fault if code == doctor.KERNEL else None, printed)
    )
    return [each.what for each in examine(GPU).broken]


@pytest.fixture
def equipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that Triton needs, whatever this machine has."""
    pytest.importorskip("triton")
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_what_triton_needs_is_here(equipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_a_gpu(monkeypatch) == []
    assert examine(GPU).findings[-1].what == "a Triton kernel"
    # Without a GPU, nothing compiles a kernel.
    no_probes_but(monkeypatch)
    assert "C compiler" not in found()


def test_what_triton_needs_is_missing(equipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (equipped / "gcc").unlink()
    (equipped / "Python.h").unlink()
    (equipped / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(equipped / "file" / "cache"))
    assert with_a_gpu(monkeypatch) == ["C compiler", "Python.h", "Triton's cache"]
    text = " ".join(examine(GPU).text().split())
    assert "C compiler: Triton finds none: gcc, clang or $CC" in text
    assert "apt-get install gcc" in text and "-dev, or" in text
    assert "export TRITON_CACHE_DIR=FOLDER" in text
    monkeypatch.setenv("CC", str(equipped / "cc"))
    assert "C compiler" in with_a_gpu(monkeypatch)


def test_a_kernel_that_does_not_run(equipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_a_gpu(monkeypatch, "no kernel image is available") == ["a Triton kernel"]
    assert "no kernel image" in examine(GPU).text()


def test_the_kernel_is_read_by_triton() -> None:
    """Its source is; without a GPU, it gets as far as the first tensor on one."""
    pytest.importorskip("triton")
    code = doctor.KERNEL.replace('device="cuda"', 'device="cpu"')
    fault, _ = probe(f"import os\nos.environ['TRITON_INTERPRET'] = '1'\n{code}")
    assert fault is None


@pytest.mark.parametrize("build", [None, "12.6"])
def test_a_driver_whose_gpu_torch_does_not_see(
    build: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    no_probes_but(monkeypatch, cuda=build)
    assert " ".join(examine(GOOD).text().split()) == (
        f"{READY}the CPU: there is a GPU's driver, but torch 2.13.0 sees no GPU."
    )
    no_probes_but(monkeypatch, gpus=2, cuda="12.6")
    gpus = GOOD | {"fbgemm-gpu": "1.8.0"}
    del gpus["fbgemm-gpu-cpu"]
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert examine(gpus).text() == f"{READY}2 GPU(s), CUDA 12.6."


def test_a_probe_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("print(2)") == (None, "2\n")
    assert probe("import dist_sparse.torchrec")[0] is None, "finds the package without a PYTHONPATH"
    for code, fault in {
        "import os; os.abort()": "the interpreter was killed by SIGABRT",
        "raise ImportError('undefined symbol')": "ImportError: undefined symbol",
        "raise SystemExit(3)": "ended with status 3",
    }.items():
        assert probe(code) == (fault, "")
    monkeypatch.setattr(doctor, "_SECONDS", 1.0)
    assert probe("import time; time.sleep(60)") == ("did not end within 1 s", "")


@pytest.mark.slow
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
    fault, printed = probe(TORCH)
    assert fault is None and json.loads(printed).keys() == {"gpus", "cuda"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_does_not_load_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with operators that were built for another torch: a lookup that kills its process."""
    monkeypatch.setattr(doctor, "LOOKUP", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(doctor, "GLOO", "pass")
    lookup = found()["a lookup"]
    assert not lookup.ok and "SIGSEGV" in lookup.says
    assert "--force-reinstall --no-deps" in lookup.fix


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
        about = tmp_path / "torch-2.14.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0\n")
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
    broken = "torch, torchrec, fbgemm"
    assert done.stdout.startswith(f"TorchRec models can't be trained here: {broken}.\n")
    said = {
        "missing": "not installed",
        "without a library": "libcudart.so.13: cannot open shared object file",
        "for another glibc": "the interpreter was killed by SIGSEGV",
    }
    [kind] = [kind for kind, known in BROKEN.items() if known == code]
    assert said[kind] in done.stdout
    assert 'install --force-reinstall "torch==2.14.*"' in done.stdout
    assert "URL: PyTorch's package index" in done.stdout
