"""The code in README.md and docs/ runs, prints what they say, and uses names that exist.

The Python blocks of a file run in order in one fresh process, as a reader would paste them. A
``text`` block right after a Python block is what it prints. A block that needs names of those
before it says so in its first line, visibly: ``# Continues the code above``. One that can't run
here has the reason in a comment above it, which a reader does not see: ``<!-- not run: ... -->``. A ``diff`` block is a whole script with the lines to add: what
it leads to runs as a Python block does, and what it starts from runs too, in a process of its own.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.warm import run_script

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT = 120
OPT_OUT = re.compile(r"<!-- not run: \S.{9,} -->\n\Z")
CONTINUES = "# Continues the code above\n"
FENCE = re.compile(r"^```(?P<kind>[^`\n]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)

# Runs blocks by themselves, so that tracebacks name the line of the document; the output of each is
# written to a file.
RUNNER = """
import contextlib, io, json, sys
from pathlib import Path
blocks, out = json.loads(Path(sys.argv[1]).read_text()), []
namespace = {"__name__": "__main__"}
for name, line, code in blocks:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\\n" * (line - 1) + code, name, "exec"), namespace)
    out.append(printed.getvalue())
with open(sys.argv[2], "w") as file:
    json.dump(out, file)
sys.stdout.flush()
sys.stderr.flush()
__import__("os")._exit(0)  # gloo's teardown under a live DDP sometimes aborts
"""


class Block(NamedTuple):
    """A fenced block: its language, its text, the line of the text in the file, and what follows it
    directly."""

    kind: str
    code: str
    line: int
    output: str | None
    opted_out: bool = False


def blocks_of(text: str) -> list[Block]:
    found = list(FENCE.finditer(text))
    blocks = []
    for fence, after in zip(found, [*found[1:], None][: len(found)], strict=True):
        output = None
        if (
            after is not None
            and after["kind"].strip() == "text"
            and not text[fence.end() : after.start()].strip()
        ):
            output = after["code"]
        line = text.count("\n", 0, fence.start("code")) + 1
        opted_out = OPT_OUT.search(text, 0, fence.start()) is not None
        blocks.append(Block(fence["kind"].strip(), fence["code"], line, output, opted_out))
    return blocks


def read(file: Path) -> list[Block]:
    return blocks_of(file.read_text(encoding="utf-8"))


def run(name: str, blocks: list[Block], folder: Path) -> list[str]:
    """Runs Python blocks in a fresh process in ``folder``; returns what each has printed."""
    runner, given, result = folder / "runner.py", folder / "blocks.json", folder / "printed.json"
    runner.write_text(RUNNER)
    given.write_text(json.dumps([(name, block.line, block.code) for block in blocks]))
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_script(runner, [given, result], cwd=folder, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, f"{name} does not run:\n{done.stderr[-4000:]}"
    printed: list[str] = json.loads(result.read_text())
    return printed


def side(block: Block, sign: str) -> Block:
    """A ``diff`` block as Python: with ``"-"`` what it starts from, with ``"+"`` what it leads
    to."""
    lines = [line[1:] for line in block.code.splitlines() if line[:1] in ("", " ", sign)]
    return block._replace(kind="python", code="\n".join(lines) + "\n")


def to_run(file: Path) -> list[Block]:
    blocks = [side(block, "+") if block.kind == "diff" else block for block in read(file)]
    return [block for block in blocks if block.kind == "python" and not block.opted_out]


@pytest.mark.parametrize(
    "file", [file for file in FILES if to_run(file)], ids=lambda file: file.name
)
def test_python_blocks_run_and_print_what_the_document_says(file: Path, tmp_path: Path) -> None:
    blocks = to_run(file)
    for package in ("torchrec", "tensorboard"):
        if any(package in block.code.lower() for block in blocks):
            pytest.importorskip(package)
    # A page may show an extra that has been deleted.
    for extra in re.findall(r"dist_sparse\.extras\.\w+", "".join(block.code for block in blocks)):
        pytest.importorskip(extra)
    for block, printed in zip(blocks, run(file.name, blocks, tmp_path), strict=True):
        assert printed == (block.output or ""), (
            f"{file.name}, the Python block at line {block.line}"
        )


def borrowed(code: str) -> set[str]:
    """The names that code reads and nothing in it binds: those of the blocks before it."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return {node.id for node in names} - bound - set(dir(builtins)) - {"__file__"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_blocks_that_continue_others_say_so(file: Path) -> None:
    for block in to_run(file):
        says = block.code.startswith(CONTINUES)
        assert says == bool(borrowed(block.code)), (
            f"line {block.line}: {CONTINUES.strip()!r}; {borrowed(block.code)}"
        )


@pytest.mark.parametrize(
    "file", [file for file in FILES if any(block.kind == "diff" for block in read(file))]
)
def test_diffs_start_from_scripts_that_run(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    for block in read(file):
        if block.kind == "diff":
            assert re.search(r"^\+", block.code, re.MULTILINE), f"line {block.line}: adds nothing"
            assert not re.search(r"^[^-+ ]", block.code, re.MULTILINE), (
                f"line {block.line}: a line without a sign"
            )
            run(file.name, [side(block, "-")], tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_block_says_what_it_is(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(read(file)), (
        "a fence is not closed"
    )
    for block in read(file):
        assert block.kind in ("python", "text", "console", "diff", "cpp"), (
            f"line {block.line}: ```{block.kind}"
        )
        assert block.opted_out or not block.code.startswith("# Not run"), (
            f"line {block.line}: {OPT_OUT.pattern}"
        )
        longest = max(map(len, block.code.splitlines()), default=0)
        assert longest <= (80 if block.kind in ("text", "console") else 100), (
            f"line {block.line}: {longest} columns"
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shell_commands_exist(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = file.read_text(encoding="utf-8")
    shell = "".join(block.code for block in read(file) if block.kind == "console").replace(
        "\\\n", ""
    )
    for command in (
        re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*$", "", text, flags=re.MULTILINE))
        + shell.splitlines()
    ):
        words = command.split()
        if words[:1] == ["make"]:
            assert len(words) == 1 or words[1] in targets, (
                f"{file.name}: `{command}`; there are {sorted(targets)}"
            )
        if words[1:2] == ["-m"]:
            module = ROOT / words[2].replace(".", "/")
            assert words[2] == "pytest" or module.with_suffix(".py").is_file() or module.is_dir(), (
                f"{file.name}: `{command}`"
            )
        if words and Path(words[0]).name in ("python", "torchrun"):
            for script in (word for word in words if word.endswith(".py")):
                assert (ROOT / script).is_file(), f"{file.name}: `{command}`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_pages_say_how_to_activate_the_environment_before_its_command(file: Path) -> None:
    before, used, _ = re.split(
        r"(dist-sparse [a-z]|\Z)", file.read_text(encoding="utf-8"), maxsplit=1
    )
    assert not used or re.search(r"activated?\b", before), "says nothing of the environment"


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/tutorial.md"])
def test_first_pages_import_no_inner_module(name: str) -> None:
    text = (ROOT / name).read_text()
    assert (
        re.findall(r"^(?:from|import) dist_sparse\.(?!extras)\w+\.\w+.*", text, re.MULTILINE) == []
    )


@pytest.mark.parametrize(
    "name", ["README.md", "docs/index.md", "docs/quickstart.md", "docs/planning.md"]
)
def test_first_pages_bind_one_name_of_the_package(name: str) -> None:
    """Most scripts of TorchRec have a `plan` of their own."""
    code = "\n".join(block.code for block in read(ROOT / name) if block.kind == "python")
    assert "import dist_sparse as ds\n" in code and "from dist_sparse import" not in code
    calls = r"(?<![.\w])(plan|sparsify|export|load_served|describe|compact)\("
    shown = code + "".join(block.code for block in read(ROOT / name) if block.kind == "text")
    assert re.findall(calls, shown) == []


def test_the_readme_has_the_two_commands() -> None:
    shell = [
        line
        for block in read(ROOT / "README.md")
        if block.kind == "console"
        for line in block.code.splitlines()
    ]
    assert shell[:2] == ["make setup", "make train"]


@pytest.mark.parametrize("file", [*FILES, ROOT / "CHANGELOG.md"], ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), f"{file.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ +(.+?) *$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            ]
            assert anchor in slugs, f"{file.name}: {target}; there are {slugs}"


def test_the_readme_is_short_and_shows_the_code_first() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert "ds.remove_untouched(model)  # " in "\n".join(lines[:40])


def test_the_design_lists_the_modules() -> None:
    """In the first cell of a row of a table, with dots, without ``dist_sparse.``; and no module
    that does not exist."""
    text = (ROOT / "docs" / "dev" / "design.md").read_text(encoding="utf-8")
    package = ROOT / "dist_sparse"
    paths = [file.relative_to(package).with_suffix("") for file in package.rglob("*.py")]
    modules = {".".join(path.parts) for path in paths if not path.name.startswith("__")}
    # A package may be listed for what its own file holds.
    listable = modules | {".".join(path.parts).removesuffix(".__init__") for path in paths}
    tables = re.findall(r"^\| module\b.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    listed = []
    for name in re.findall(r"`([\w.]+)`", "".join(cells)):
        extra = re.match(r"extras\.(\w+)", name)
        # An extra may have been deleted.
        if extra is None or (package / "extras" / extra[1]).exists():
            listed.append(name)
    assert sorted(modules - set(listed)) == [], "not in docs/dev/design.md, section 3"
    assert sorted(set(listed) - listable) == [], "in docs/dev/design.md, but not in the code"
    assert len(set(listed)) == len(listed)


class TestThisTest:
    def test_a_block_that_fails_is_named_with_its_line(self, tmp_path: Path) -> None:
        blocks = blocks_of("# Title\n\n```python\nx = 1\n```\n\n```python\n\nx / 0\n```\n")
        with pytest.raises(AssertionError, match=r'(?s)File "doc.md", line 9.*ZeroDivisionError'):
            run("doc.md", blocks, tmp_path)

    def test_blocks_share_names_and_output_belongs_to_its_block(self, tmp_path: Path) -> None:
        text = "```python\nx = 1\n```\nso\n```python\nprint(x)\n```\n\n```text\n1\n```\n"
        text += "\n```python\nx\n```\nand\n```text\n```\n"
        blocks = [block for block in blocks_of(text) if block.kind == "python"]
        assert [block.output for block in blocks] == [None, "1\n", None]
        assert run("doc.md", blocks, tmp_path) == ["", "1\n", ""]

    def test_a_diff_has_two_sides(self) -> None:
        block = blocks_of("```diff\n x = 1\n-x = 2\n+x = 3\n\n y = x\n```\n")[0]
        assert [side(block, sign).code for sign in "-+"] == [
            "x = 1\nx = 2\n\ny = x\n",
            "x = 1\nx = 3\n\ny = x\n",
        ]

    def test_opting_out_needs_a_reason(self) -> None:
        reasons = {
            "<!-- not run: needs two GPUs -->": True,
            "<!-- not run: -->": False,
            "Words.": False,
        }
        for above, opted_out in reasons.items():
            blocks = blocks_of(f"{above}\n```python\nx = 1\n```\n\n```python\ny = 1\n```\n")
            assert [block.opted_out for block in blocks] == [opted_out, False]
