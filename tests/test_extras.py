"""The core works without its extras, and each extra without the others."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from dist_sparse import extras
from dist_sparse.doors import DOORS
from tests.extras.core_names import NAMES_OF_CORE

ROOT = Path(__file__).parents[1]
NAMES = [module.name for module in iter_modules(extras.__path__)]
FOLDERS = (
    ".ci",
    "dist_sparse",
    "launch",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "requirements",
)
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")

# The guides of each extra in docs/; docs/api has one page more with its name.
GUIDES = {
    "codes": ["codes"],
    "device": ["cuda"],
    "frontier": ["frontier"],
    "guard": ["guard"],
    "lightning": ["lightning"],
    "optim": ["optim_scheduler"],
    "report": ["report", "dashboards"],
    "rotation": ["columns", "two_towers"],
}

# What meets extras most: pages, the command line, plans, training, exports and compact models.
CORE = [
    *("cli", "compaction/test_compact.py", "docs", "planning", "serving/test_export.py"),
    *("test_house.py", "training"),
]


def delete_pages(folder: Path, names: list[str]) -> None:
    """Delete pages from the documentation of a copy, with the links to them."""
    for name in names:
        (folder / "docs" / f"{name}.md").unlink(missing_ok=True)
        contents = folder / "mkdocs.yml"
        contents.write_text(re.sub(rf"^ *- {name}\.md\n", "", contents.read_text(), flags=re.M))
    linked = rf"\[([^\]]*)\]\((?:\.\./|docs/)?(?:{'|'.join(names)})\.md[^)]*\)"
    for page in [folder / "README.md", folder / "CHANGELOG.md", *(folder / "docs").rglob("*.md")]:
        page.write_text(re.sub(linked, r"\1", page.read_text()))


def copy_without(folder: Path, *deleted: str) -> Path:
    """Copy the checkout without some extras, their tests and their pages."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in deleted:
        delete_pages(folder, [*GUIDES[name], f"api/{name}"])
        shutil.rmtree(folder / "dist_sparse" / "extras" / name)
        shutil.rmtree(folder / "tests" / "extras" / name, ignore_errors=True)
    return folder


def run(folder: Path, *command: str) -> None:
    """Run a command of Python in a copy, and show what it prints if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_core_lists_its_doors() -> None:
    """An extra answers in functions of these names, and each is asked for."""
    used = set()
    for file in (ROOT / "dist_sparse" / "extras").glob("*/doors.py"):
        doors = import_module(f"dist_sparse.extras.{file.parent.name}.doors")
        for name, value in vars(doors).items():
            if getattr(value, "__module__", "") == doors.__name__ and not name.startswith("_"):
                used.add(name)
    core = [file for file in (ROOT / "dist_sparse").rglob("*.py") if "extras" not in file.parts]
    asked = set(re.findall(r'offered\("(\w+)"\)', "".join(file.read_text() for file in core)))
    assert used == asked == set(DOORS)


def test_extras_import_listed_names_of_the_core() -> None:
    """Public ones, and each that is listed is imported."""
    imported: dict[str, set[str]] = {}
    for file in (ROOT / "dist_sparse" / "extras").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            is_core = module.startswith("dist_sparse") and "extras" not in module
            if isinstance(node, ast.ImportFrom) and is_core:
                imported.setdefault(module, set()).update(name.name for name in node.names)
    assert imported == NAMES_OF_CORE
    assert not any(name.startswith("_") for names in imported.values() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_rest_works_without_one_extra(name: str, tmp_path: Path) -> None:
    copy = copy_without(tmp_path / "copy", name)
    run(copy, "-m", "pytest", "-q", "--collect-only", "tests")
    # All that may name an extra; the rest of the core, and the pages, run once, without any.
    tests = [f"tests/{part}" for part in ("cli", "extras", "test_house.py")]
    run(copy, "-m", "pytest", "-q", "-m", "not slow", *tests)


@pytest.mark.slow
def test_the_core_works_without_extras(tmp_path: Path) -> None:
    copy = copy_without(tmp_path / "copy", *NAMES)
    run(copy, "-m", "mypy", "--strict", "dist_sparse", "launch")
    tests = [f"tests/{name}" for name in CORE]
    run(copy, "-m", "pytest", "-q", "-m", "not slow", *tests)
