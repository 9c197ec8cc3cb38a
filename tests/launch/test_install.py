"""Is what is installed the same launcher, under the package's name, and does it run from there?"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from .jobs import ROOT, finish, job, script

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("dist_sparse", "launch"):
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "copy")
    words = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(folder), str(folder / "copy")]
    subprocess.run(words, check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_files_of_the_clone_in_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        found = {name: files.read(name) for name in files.namelist() if ".dist-info/" not in name}
    assert not [name for name in found if not name.startswith("dist_sparse/")]
    expected = {
        f"{prefix}/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for prefix, folder in (("dist_sparse", ROOT / "dist_sparse"), ("dist_sparse/launch", ROOT / "launch"))
        for file in folder.rglob("*.py")
    }
    assert {name: data for name, data in found.items() if name.endswith(".py")} == expected
    assert "dist_sparse/py.typed" in found


def test_the_installed_command_runs_a_job(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site-packages"
    subprocess.run([*PIP, "install", *OFFLINE, "--target", str(place), str(wheel)], check=True)
    assert not (place / "launch").exists()
    command = str(place / "bin" / "dist-sparse")
    text = "import dist_sparse\nprint(dist_sparse.__file__, sys.argv[1:])\n"
    words = ["launch", "--nproc", "2", script(tmp_path, text), "--", "--no", "x"]
    with job(tmp_path, words, command=(command,), PYTHONPATH=str(place)) as running:
        status, out, err = finish(running)
    assert status == 0, err
    where = place / "dist_sparse" / "__init__.py"
    assert sorted(out.splitlines()) == [f"[{rank}] {where} ['--no', 'x']" for rank in range(2)]


def test_an_editable_install_has_the_launchers_too(tmp_path: Path) -> None:
    """setuptools maps the name to the folder. Of a copy: an install writes to the clone."""
    copy, place = tmp_path / "clone", tmp_path / "site-packages"
    for name in ("dist_sparse", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    words = [*PIP, "install", *OFFLINE, "--no-build-isolation", "--target", str(place), "-e", str(copy)]
    subprocess.run(words, check=True, cwd=tmp_path)
    # Without this environment's own site, in which there is an editable install already; but with its torch.
    code = (
        f"import site, sys; site.addsitedir({str(place)!r}); sys.path.append({str(Path(torch.__file__).parents[1])!r})"
    )
    code += "; import dist_sparse.launch as it; print(it.__file__)"
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{copy / 'launch' / '__init__.py'}\n"
