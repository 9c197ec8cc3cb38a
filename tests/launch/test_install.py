"""The package as it is installed: its files, its command, and an editable install that static tools
understand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from .jobs import ROOT, finish, job, script

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


def clone(folder: Path) -> Path:
    """A copy of what a build reads: a build leaves files behind."""
    for name in ("dist_sparse", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        *(file.name for file in ROOT.glob("LICENSE*")),
    ):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = clone(folder / "copy")
    subprocess.run([*PIP, "wheel", *OFFLINE, "-w", str(folder), str(copy)], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        found = {name: files.read(name) for name in files.namelist() if ".dist-info/" not in name}
    package = [
        file
        for file in (ROOT / "dist_sparse").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    assert found == {file.relative_to(ROOT).as_posix(): file.read_bytes() for file in package}


@pytest.mark.slow
def test_the_description_has_no_relative_link(wheel: Path) -> None:
    """On a package index it would lead nowhere."""
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        found = message_from_bytes(files.read(name))
    [url] = found.get_all("Project-URL", [])
    repository = url.removeprefix("Repository, ")
    text = found.get_payload()
    assert isinstance(text, str) and found["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    at = f"v{found['Version']}"
    assert "](#try-it)" in text and f"]({repository}/blob/{at}/docs/quickstart.md)" in text
    assert f"]({repository}/raw/{at}/docs/images/report.png)" in text


def test_one_line_names_the_repository() -> None:
    """A release fills it in."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    files = [
        *(ROOT / name for name in ("pyproject.toml", "setup.py", "mkdocs.yml", "CITATION.cff")),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "dist_sparse").rglob("*.py"),
    ]
    naming = [file.name for file in files if urls["Repository"] in file.read_text()]
    assert naming == ["pyproject.toml"]


def test_hooks_and_workflow_run_what_make_does() -> None:
    """What checks a commit elsewhere can't drift from `make lint` and `.ci/run`."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [
        ".ci/run"
    ]
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in local["hooks"]:
        command = hook["entry"].replace(".venv/bin", "$(BIN)").removesuffix(" --force-exclude")
        assert f"\t{command}\n" in lint


@pytest.mark.slow
def test_the_installed_command_runs_a_job(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site-packages"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", str(place), str(wheel)], check=True
    )
    command = str(place / "bin" / "dist-sparse")
    text = "import dist_sparse\nprint(dist_sparse.__file__, sys.argv[1:])\n"
    words = ["launch", "--nproc", "2", script(tmp_path, text), "--", "--no", "x"]
    with job(tmp_path, words, command=(command,), PYTHONPATH=str(place)) as running:
        status, out, err = finish(running)
    assert status == 0, err
    where = place / "dist_sparse" / "__init__.py"
    assert sorted(out.splitlines()) == [f"[{rank}] {where} ['--no', 'x']" for rank in range(2)]


def test_make_setup_installs_every_extra() -> None:
    """And nothing that it installs asks for another release: `pip check` names fbgemm-gpu alone
    (docs/install.md)."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(wanted.startswith("fbgemm-gpu>=") for wanted in extras["torchrec"])
    files = [ROOT / "requirements" / name for name in ("cpu.txt", "common.txt")]
    pins = re.findall(r"^([\w.-]+)==", "".join(map(Path.read_text, files)), re.MULTILINE)
    wanted = {
        re.split(r"[^\w.-]", each, maxsplit=1)[0] for extra in extras.values() for each in extra
    }
    wanted -= {"dist_sparse"}  # the extra `all` names others
    wanted -= {"mlflow", "wandb"}  # tested with a module that notes what is called
    assert wanted - set(pins) == {"fbgemm-gpu"} and "fbgemm-gpu-cpu" in pins
    assert len(pins) == len(set(pins))


def test_no_line_installs_the_package_from_an_index() -> None:
    """It is on none: `pip install "dist_sparse[report]"` finds nothing where the package is not
    installed yet."""
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "dist_sparse").rglob("*.py"),
    ]
    assert [file.name for file in files if "dist_sparse[" in file.read_text()] == []


@pytest.mark.slow
def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    """Static tools (mypy, editors) follow a path in a .pth file, and no import hook."""
    copy, place = clone(tmp_path / "clone"), tmp_path / "site-packages"
    subprocess.run(
        [*PIP, "install", *OFFLINE, "--target", str(place), "-e", str(copy)],
        check=True,
        cwd=tmp_path,
    )
    (path,) = place.glob("*.pth")
    assert path.read_text().split() == [str(copy)]
    assert not [*place.glob("__editable__*.py")]
