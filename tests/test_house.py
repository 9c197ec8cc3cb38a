"""Does the package keep its own rules: what it offers, what it imports, how long its files are?"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

import dist_sparse
import dist_sparse.groups

ROOT = Path(__file__).parents[1]
CODE = [
    file
    for folder in ("dist_sparse", "launch", "examples", "benchmarks", "tests")
    for file in (ROOT / folder).rglob("*.py")
]


def public_names() -> list[str]:
    """The names in the reference's table of public names."""
    section = (ROOT / "docs" / "api" / "index.md").read_text().split("## Public names", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def imported(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def below(modules: set[str], package: str) -> set[str]:
    return {module for module in modules if module == package or module.startswith(f"{package}.")}


def test_public_names_are_those_of_the_reference() -> None:
    assert sorted(dist_sparse.__all__) == sorted(public_names())
    assert len(set(dist_sparse.__all__)) == len(dist_sparse.__all__) > 10
    assert {"traffic", "reset_traffic", "set_timeout"} <= set(dist_sparse.groups.__all__)


@pytest.mark.parametrize("name", [name for name in dist_sparse.__all__ if name != "ROW"])
def test_public_names_have_docstrings(name: str) -> None:
    public = getattr(dist_sparse, name)
    assert public.__doc__
    for attribute, value in vars(public).items() if isinstance(public, type) else ():
        if callable(value) and not attribute.startswith("_"):
            assert any(getattr(getattr(base, attribute, None), "__doc__", None) for base in public.__mro__), attribute


def test_import_alone_needs_nothing() -> None:
    """Not even torch, so that the doctor runs where it is broken; each name comes when it is used."""
    within = imported("import dist_sparse\nassert set(dist_sparse.__all__) < set(dir(dist_sparse))")
    assert below(within, "dist_sparse") == {"dist_sparse"} and not below(within, "torch")
    assert not below(imported("import dist_sparse.cli.main, dist_sparse.cli.doctor"), "torch")
    imported("import dist_sparse\nassert callable(dist_sparse.sparsify) and dist_sparse.groups.traffic()")
    imported("import pickle, dist_sparse as d\nassert pickle.loads(pickle.dumps(d.RunLog)) is d.RunLog")
    with pytest.raises(AttributeError, match="module 'dist_sparse' has no attribute 'sparsfy'"):
        dist_sparse.__getattr__("sparsfy")


def test_the_stub_has_the_public_names() -> None:
    """Type checkers and editors read the stub, the interpreter ``__init__.py``: the same names, of the same modules."""
    tree = ast.parse((ROOT / "dist_sparse" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if node.module != "dist_sparse"}
    packages = {alias.asname for node in imports for alias in node.names if node.module == "dist_sparse"}
    assert sorted(map(str, seen)) == sorted(dist_sparse.__all__)
    for name, module in seen.items():
        assert getattr(import_module(str(module)), str(name)) is getattr(dist_sparse, str(name))
    assert packages | set(seen) | {"__version__"} <= set(dir(dist_sparse))
    assert not set(seen) & {path.stem for path in (ROOT / "dist_sparse").iterdir()}, "a name is a module's too"


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dist_sparse.__version__ == project["version"]


def test_the_names_need_torch_alone() -> None:
    """Nothing but modules of its own: what torch has not imported, neither does the package."""
    without, within = imported("import torch"), imported("import torch\nfrom dist_sparse import *\nsparsify, RunLog")
    assert within - without == below(within, "dist_sparse")
    assert below(within, "dist_sparse.tables.torchrec") == set()


def test_whoever_registers_plain_data_needs_torch_alone() -> None:
    use = (
        "sparsifier = dist_sparse.DataNormSparsifier([('table', torch.randn(9, 4))])\n"
        "sparsifier.add_model(torch.nn.EmbeddingBag(8, 4))\n"
        "scheduler = dist_sparse.CubicDataScheduler(sparsifier, 'sparsity_level', final=0.5, begin=0, end=4, every=2)\n"
        "sparsifier.step(); scheduler.step(); sparsifier.squash_mask(); dist_sparse.describe(sparsifier)\n"
    )
    more = imported(f"import torch, dist_sparse\n{use}") - imported("import torch")
    for package in ("torchrec", "fbgemm_gpu", "numpy", "tqdm", "torch.ao", "dist_sparse.tables.torchrec", "launch"):
        assert below(more, package) == set()


def test_torchrec_needs_no_import_order() -> None:
    """The package may come before torchrec."""
    table = "torchrec.EmbeddingBagConfig(name='t', num_embeddings=8, embedding_dim=4, feature_names=['f'])"
    use = f"dist_sparse.DataNormSparsifier().add_model(torchrec.EmbeddingBagCollection(tables=[{table}]))"
    within = imported(f"import dist_sparse, torchrec\nassert {use} == ['t']")
    assert "dist_sparse.tables.torchrec" in within


@pytest.mark.parametrize("file", CODE, ids=[str(file.relative_to(ROOT)) for file in CODE])
def test_files_are_short_and_say_what_they_are_for(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 500
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "has no docstring"


def test_one_module_communicates_and_nobody_prints() -> None:
    """Collectives are in groups.py alone, and what is printed is a scheduler's ``verbose``."""
    calls = {"all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "all_to_all", "broadcast", "barrier"}
    for file in (ROOT / "dist_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                here = f"{file.name}:{node.lineno}"
                assert file.name == "groups.py" or not (node.func.value.id == "dist" and node.func.attr in calls), here
                assert node.func.value.id != "pickle", here
            if isinstance(node.func, ast.Name) and node.func.id == "print":
                place = f"{file.parent.name}/{file.name}"
                allowed = place in ("schedulers/base.py", "cli/main.py") or file.parent.name == "launch"
                assert allowed, f"{place}:{node.lineno}"


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config) -> None:
    """By default it leaves out folders called ``dist``, which is where tests on real ranks are."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {file.parent.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in left_out)]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_a_borrowed_environment_is_not_installed_into(tmp_path: Path) -> None:
    """It is another checkout's, whose own installation would then lead here."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "others").mkdir()
    (tmp_path / ".venv").symlink_to("others")
    done = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and ".venv is a symbolic link" in done.stderr
    assert not [*(tmp_path / "others").iterdir()]
