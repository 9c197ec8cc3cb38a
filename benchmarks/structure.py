"""Figures of the code's structure: density, private reads, import circles, and the modules and
model walks of a mask update in a sharded model.

``python -m benchmarks.structure`` prints them; tests/test_house.py holds them.
"""

from __future__ import annotations

import ast
import gc
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "Crossed",
    "Density",
    "circles",
    "crossed",
    "density",
    "main",
    "module_of",
    "private_reads",
    "sources",
    "walks",
]

ROOT = Path(__file__).parents[1]
PACKAGE = "dist_sparse"
MOST_DECISIONS = 12
# The last one is mock.patch.object.
READERS = (
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "object",
)
OF_TORCH = {"_container"}
"""Private names of torch.ao's data sparsifiers too, by which theirs and ours are compared."""


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


def called(node: ast.Call) -> str:
    """The name of the function that is called, without its module or object."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


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
        reads = found[str(file.relative_to(root))]
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
            elif isinstance(node, ast.Call) and called(node) in (
                "getattr",
                "setattr",
                "object",
            ):
                texts = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
                names = [text for text in texts if isinstance(text, str) and text in foreign]
            reads += [f"{node.lineno}: {name}" for name in names]
    return {file: reads for file, reads in found.items() if reads}


def imports_of(file: Path, modules: set[str], root: Path = ROOT) -> set[str]:
    """The modules out of ``modules`` that a file imports, wherever in it; under ``TYPE_CHECKING``
    too, and by ``import_module("...")``."""
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
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
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


@dataclass
class Density:
    """How much each line says, over some files. A line of code is not blank, not only a comment,
    and not a docstring; the characters are those of such lines without their indentation."""

    lines: int = 0
    code: int = 0
    characters: int = 0
    comments: int = 0
    decisions: int = 0
    nested: int = 0
    """Comprehensions with another one inside."""
    functions: dict[str, int] = field(default_factory=dict)
    """``file:line name`` -> decisions, without those of functions inside."""

    @property
    def above(self) -> dict[str, int]:
        """The functions with too many decisions, the worst first."""
        found = {name: n for name, n in self.functions.items() if n > MOST_DECISIONS}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    @property
    def per_100_lines(self) -> float:
        return 100 * self.decisions / self.code

    @property
    def commented(self) -> float:
        """Per cent of all lines."""
        return 100 * self.comments / self.lines


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
BRANCHES = ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.IfExp
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def density(files: list[Path], root: Path = ROOT) -> Density:
    total = Density()
    for file in files:
        text = file.read_text()
        tree = ast.parse(text)
        code, comments = lines_of(text)
        code -= docstrings(tree)
        lines = text.splitlines()
        total.lines += len(lines)
        total.code += len(code)
        total.characters += sum(len(lines[number - 1].strip()) for number in code)
        total.comments += len(comments)
        for node in ast.walk(tree):
            total.decisions += decisions(node)
            if isinstance(node, COMPREHENSIONS):
                total.nested += any(
                    isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner != node
                )
            if isinstance(node, FUNCTIONS):
                name = f"{file.relative_to(root)}:{node.lineno} {node.name}"
                total.functions[name] = sum(map(decisions, own_nodes(node)))
    return total


def decisions(node: ast.AST) -> int:
    """The decisions of one node: a branch, a loop, a handler, a case, each further operand of
    and/or, each for and if of a comprehension, each further item of ``any([...])``, and a loop that
    ``map()`` or ``filter()`` hides."""
    if isinstance(node, ast.Call):
        return hidden_decisions(node)
    if isinstance(node, BRANCHES | ast.match_case):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def hidden_decisions(call: ast.Call) -> int:
    """The decisions of a call that stands for branches or a loop."""
    name = called(call)
    argument = call.args[0] if call.args else None
    if name in ("any", "all") and isinstance(argument, ast.List | ast.Tuple):
        return len(argument.elts) - 1
    return int(name in ("map", "filter", "starmap"))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, but not in functions inside it; these themselves are."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, FUNCTIONS):
            yield from own_nodes(child)


def lines_of(text: str) -> tuple[set[int], set[int]]:
    """The numbers of the lines with code or a string, and of those with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments


def docstrings(tree: ast.AST) -> set[int]:
    """The numbers of the lines of the docstrings of modules, classes and functions."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, FUNCTIONS | ast.Module | ast.ClassDef)
            and ast.get_docstring(node, False) is not None
        ):
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


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
    from benchmarks.measure import fresh

    counted = density(sources(PACKAGE, "launch"))
    modules = sources(PACKAGE)
    reads = private_reads(sources(PACKAGE, "tests", "examples", "benchmarks", "launch"))
    found = circles(modules)
    figures = {
        "modules": len(modules),
        "lines": counted.lines,
        "lines of code": counted.code,
        "characters of code": counted.characters,
        "decisions per 100 lines of code": f"{counted.per_100_lines:.1f}",
        f"functions above {MOST_DECISIONS} decisions": f"{len(counted.above)} of {len(counted.functions)}",
        "nested comprehensions": counted.nested,
        "lines with a comment": f"{counted.commented:.1f}%",
        "private reads": sum(map(len, reads.values())),
        "import circles": len(found),
        **fresh("benchmarks.structure_case", {}, ranks=2, threads=1),
    }
    for name, figure in figures.items():
        print(f"{name:36} {', '.join(figure) if isinstance(figure, list) else figure}")
    for name, most in counted.above.items():
        print(f"  {most} decisions: {name}")
    for file, names in reads.items():
        print(f"  private reads: {file}: {'; '.join(names)}")
    for circle in found:
        print(f"  circle: {', '.join(circle)}")


if __name__ == "__main__":
    main()
