"""Figures of the code's structure: private reads, import circles, lines, and the modules that a
mask update crosses.

``python -m benchmarks.structure`` prints them; tests/test_house.py holds them.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "Crossed",
    "circles",
    "crossed",
    "main",
    "module_of",
    "private_reads",
    "sources",
    "updating",
    "walks",
]

ROOT = Path(__file__).parents[1]
PACKAGE = "dist_sparse"
# The last one is mock.patch.object.
READERS = (
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "object",
)
OF_TORCH = {"_container"}
"""Of torch.ao's data sparsifiers too, by which theirs and ours are compared."""


def sources(*folders: str, root: Path = ROOT) -> list[Path]:
    """All Python files below these folders of the repository."""
    return [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def module_of(file: Path, root: Path = ROOT) -> str:
    parts = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_private(name: str) -> bool:
    # _repr_html_ is a protocol.
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def private_names(tree: ast.AST) -> set[str]:
    """Private attributes and methods that classes of a file define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and owner_of(inner) == "self"
                ):
                    found.add(inner.attr)
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(statement.name)
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [getattr(statement, "target", None)]
                )
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def owner_of(node: ast.Attribute) -> str:
    """``self`` in ``self._x``; ``super`` in ``super()._x``; empty for an expression."""
    value = node.value
    if isinstance(value, ast.Call):
        value = (
            value.func if isinstance(value.func, ast.Name) and value.func.id == "super" else value
        )
    return value.id if isinstance(value, ast.Name) else ""


def private_reads(files: list[Path], root: Path = ROOT) -> dict[str, list[str]]:
    """File -> ``line: name`` of each private name in it that a class or a module of dist_sparse
    defines elsewhere.

    A name counts by attribute access (but on ``self``, ``cls`` and ``super()``), by import, and as
    text in a call of ``getattr``, ``setattr`` or the like.
    """
    trees = {file: ast.parse(file.read_text()) for file in {*sources(PACKAGE, root=root), *files}}
    defined = {file: private_names(tree) for file, tree in trees.items()}
    known = set().union(
        *(names for file, names in defined.items() if PACKAGE in file.relative_to(root).parts[:1])
    )
    known -= OF_TORCH
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        foreign = known - defined[file]
        modules = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(trees[file])
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE
            for alias in node.names
            if (root / str(node.module).replace(".", "/") / f"{alias.name}.py").exists()
        }
        for node in ast.walk(trees[file]):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = owner_of(node)
                if owner in modules or (
                    node.attr in foreign and owner not in ("self", "cls", "super")
                ):
                    names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (
                str(node.module).split(".")[0] == PACKAGE or node.level
            ):
                names = [alias.name for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "getattr",
                "setattr",
                "object",
            ):
                texts = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
                names = [text for text in texts if isinstance(text, str) and text in foreign]
            found[str(file.relative_to(root))] += [f"{node.lineno}: {name}" for name in names]
    return {file: reads for file, reads in found.items() if reads}


def imports_of(file: Path, modules: set[str], root: Path = ROOT) -> set[str]:
    """The modules out of ``modules`` that a file imports, wherever in it; those under
    ``TYPE_CHECKING`` too."""
    found: set[str] = set()
    here = module_of(file, root)
    package = here if file.name == "__init__.py" else here.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {
                each if (each := f"{name}.{alias.name}") in modules else name
                for alias in node.names
            }
    return (found & modules) - {here}


def circles(files: list[Path], root: Path = ROOT) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    names = {module_of(file, root) for file in files}
    graph = {module_of(file, root): imports_of(file, names, root) for file in files}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    below = {name: reached(name) for name in graph}
    groups = {
        frozenset(n for n in below[name] if name in below[n])
        for name in graph
        if name in below[name]
    }
    return sorted(sorted(group) for group in groups)


class Crossed:
    """What a call ran through: :attr:`modules` of dist_sparse by name, :attr:`calls` by
    function."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], int] = defaultdict(int)

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.calls}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(f"{PACKAGE}."):
            self.calls[module.removeprefix(f"{PACKAGE}."), frame.f_code.co_qualname] += 1


def crossed(action: Callable[[], Any]) -> Crossed:
    """Run ``action``, and count the calls of functions of dist_sparse on this thread."""
    seen = Crossed()
    gc.collect()  # what was left unreachable before would call its finalizers now
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return seen


def updating() -> tuple[Any, Any]:
    """A plain model with two tables, and its sparsifier after a first mask update."""
    import torch

    from dist_sparse import ROW, DataNormSparsifier

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(40, 8), torch.nn.Sequential(torch.nn.Embedding(20, 8))
    )
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    return model, sparsifier


class Children(dict[str, Any]):
    """The children of a module, which count how often they are walked."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def walks(model: Any, action: Callable[[], Any]) -> int:
    """How often ``action`` walks over the children of the root of ``model``."""
    children = vars(model)["_modules"]
    vars(model)["_modules"] = counted = Children(children)
    try:
        action()
    finally:
        vars(model)["_modules"] = children
    return counted.walks


def main() -> None:
    model, sparsifier = updating()
    seen = crossed(sparsifier.step)
    lines = {file: len(file.read_text().splitlines()) for file in sources(PACKAGE)}
    reads = private_reads(sources(PACKAGE, "tests", "examples", "benchmarks", "launch"))
    total, longest = sum(lines.values()), max(lines.values())
    print(f"modules                        {len(lines)}, {total} lines, the longest has {longest}")
    print(
        f"modules crossed by an update   {len(seen.modules)} in {sum(seen.calls.values())} calls:"
    )
    print(f"                               {', '.join(sorted(seen.modules))}")
    print(f"model walks of an update       {walks(model, sparsifier.step)}")
    print(f"private reads                  {sum(map(len, reads.values()))} in {len(reads)} files")
    for file, found in reads.items():
        print(f"                               {file}: {'; '.join(found)}")
    found = circles(sources(PACKAGE))
    print(f"import circles                 {len(found)}")
    for circle in found:
        print(f"                               {', '.join(circle)}")


if __name__ == "__main__":
    main()
