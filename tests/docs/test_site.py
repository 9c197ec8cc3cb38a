"""The documentation builds as a site: every public name, no wrong link, nothing from elsewhere."""

from __future__ import annotations

import http.server
import importlib
import inspect
import re
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import dist_sparse
from tests.browser import chromium, opened

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "site", "runs")
CURVES = {
    f"{curve}DataScheduler" for curve in ("Constant", "Cosine", "Exponential", "Linear", "OneShot")
}
"""Names of CurveDataScheduler, whose example has their levels; CubicDataScheduler has its own."""
IN_MODULES = {
    "extend": None,
    "groups": ["set_timeout", "traffic", "reset_traffic"],
    "schedulers": [
        *sorted(CURVES),
        "CurveDataScheduler",
        "LambdaDataScheduler",
        "ReadyDataScheduler",
    ],
}
"""Public names of modules; None is all of ``__all__``."""
RETURNED = {
    *("ArtifactBytes", "Choice", "CompactIds", "Exported", "Frontier", "Plan"),
    *("Resumed", "Run", "Served", "ServedBytes", "TableShape", "Traffic", "Trial"),
}
"""What functions return: their examples show it."""
NO_EXAMPLE = {"ReadyDataScheduler", "merging"} | {"COL", "ROW"} | CURVES
"""A base class, a function of our own; strings, whose example is on their page; and names of a class that has
one."""


def documented() -> list[str]:
    """What the pages of docs/api have a place for."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


def test_every_public_name_has_one_place() -> None:
    names = [f"dist_sparse.{name}" for name in dist_sparse.__all__]
    for module, some in IN_MODULES.items():
        path = f"dist_sparse.{module}"
        names += [f"{path}.{name}" for name in some or importlib.import_module(path).__all__]
    assert not set(names) - set(documented()), "not in docs/api"
    assert len(documented()) == len(set(documented()))


def test_every_reference_has_an_example() -> None:
    """In its docstring, which is where CI runs it."""
    without = set()
    for name in documented():
        module, _, last = name.rpartition(".")
        if module == "dist_sparse.extras.lightning":
            pytest.importorskip("lightning")
        if ">>> " not in (getattr(importlib.import_module(module), last).__doc__ or ""):
            without.add(last)
    # An extra may have been deleted, with its page.
    known = {name.rpartition(".")[2] for name in documented()}
    assert without == (RETURNED | NO_EXAMPLE) & known


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """``make docs`` on a copy of the repository, with the environment of this one."""
    return subprocess.run(
        ["make", "docs", f"DOCS={ROOT / '.venv-docs'}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, and in it the site."""
    made = subprocess.run(
        ["make", ".venv-docs/.ready"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if made.returncode and re.search(
        r"connection|name resolution|timed out", made.stderr, re.IGNORECASE
    ):
        pytest.skip(
            f"OFFLINE, the documentation is not built: {made.stderr.strip().splitlines()[-1]}"
        )
    assert made.returncode == 0, made.stderr
    folder = tmp_path_factory.mktemp("site") / "repository"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    done = built(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.network
class TestSite:
    def test_fetches_nothing_from_elsewhere(self, copy: Path) -> None:
        for page in (copy / "site").rglob("*.html"):
            tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page.read_text())
            assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], (
                page
            )
        for sheet in (copy / "site").rglob("*.css"):
            assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet

    def test_drawings_are_in_the_page(self, copy: Path) -> None:
        page = (copy / "site" / "concepts.html").read_text()
        assert (
            len(
                re.findall(r'<figure class="ds-figure"><svg role="img" aria-label="[^"]{40,}', page)
            )
            == 3
        )
        assert "images/blocks.svg" not in page

    def test_what_pages_link_to_outside_of_docs_is_there(self, copy: Path) -> None:
        page = (copy / "site" / "repository" / "docs" / "dev" / "log.html").read_text()
        for target in (
            "benchmarks/results/2026-11-21-sweep.html",
            "benchmarks/results/2026-11-21-sweep.csv",
        ):
            assert f'href="../../{target}"' in page
            assert (copy / "site" / "repository" / target).is_file()
        shown = (copy / "site" / "repository" / "examples" / "quickstart.py.html").read_text()
        assert "init_process_group" in shown

    def test_no_link_leads_to_markdown(self, copy: Path) -> None:
        """MkDocs does not convert a notebook's links."""
        for page in (copy / "site").rglob("*.html"):
            links = re.findall(r'href="((?!https?:)[^"]*\.md)["#]', page.read_text())
            assert not links, page
        assert 'href="schedules.html' in (copy / "site" / "notebook.html").read_text()

    def test_what_two_spaces_indent_belongs_to_the_list(self, copy: Path) -> None:
        page = (copy / "site" / "repository" / "docs" / "dev" / "log.html").read_text()
        assert re.search(r"<li>(?:(?!</li>).)*<table>", page, re.DOTALL)

    def test_no_list_or_table_is_left_as_text(self, copy: Path) -> None:
        for page in (copy / "site").glob("*.html"):
            outside_of_code = re.sub(r"<pre>.*?</pre>", "", page.read_text(), flags=re.DOTALL)
            assert not re.findall(
                r"^(?:<p>)?(?:[-*] |\| ?[-\w]).*", outside_of_code, re.MULTILINE
            ), page

    def test_names_in_prose_lead_to_the_reference(self, copy: Path) -> None:
        page = (copy / "site" / "rows.html").read_text()
        assert 'href="api/sparsify.html#dist_sparse.sparsify"><code>sparsify()</code>' in page
        assert 'href="api/serving.html#dist_sparse.export"><code>export(' in page
        assert "<autoref" not in page

    def test_docstrings_link_to_each_other(self, copy: Path) -> None:
        page = (copy / "site" / "api" / "sparsify.html").read_text()
        assert re.search(r'href="enforcer\.html#dist_sparse\.(?:\w+\.)*MaskEnforcer"', page)
        for page_ in (copy / "site" / "api").glob("*.html"):
            assert not re.search(r":(?:class|func|meth|mod|attr|data):", page_.read_text()), page_

    def test_every_reference_has_an_anchor(self, copy: Path) -> None:
        pages = "".join(page.read_text() for page in (copy / "site" / "api").glob("*.html"))
        for name in documented():
            assert f'id="{name}"' in pages

    def test_every_public_method_has_an_anchor(self, copy: Path) -> None:
        """On the class itself, or on a base that is in the reference too."""
        pages = "".join(page.read_text() for page in (copy / "site" / "api").glob("*.html"))
        anchors = set(re.findall(r'id="dist_sparse\.(?:\w+\.)*(\w+\.\w+)"', pages))
        for name in documented():
            module, _, last = name.rpartition(".")
            if module == "dist_sparse.extras.lightning":
                pytest.importorskip("lightning")
            kind = getattr(importlib.import_module(module), last)
            for method, _ in (
                inspect.getmembers(kind, inspect.isfunction) if inspect.isclass(kind) else ()
            ):
                homes = [
                    base for base in kind.__mro__ if base.__module__.startswith("dist_sparse.")
                ]
                if not method.startswith("_") and any(method in vars(base) for base in homes):
                    assert any(f"{base.__name__}.{method}" in anchors for base in homes), (
                        f"{name}.{method}"
                    )

    def test_what_leads_nowhere_stops_the_build(self, copy: Path, tmp_path: Path) -> None:
        prepare_two_pages(copy, tmp_path)
        links = ("nowhere.md", "other.md#nowhere", "../benchmarks/nowhere.md")
        # Ends the build before links are looked at.
        wrong = {"::: dist_sparse.nowhere": ["dist_sparse.nowhere"]}
        wrong |= {
            "\n".join(f"[x]({link})" for link in links): [
                link.removeprefix("other.md") for link in links
            ]
        }
        for text, named in {"[x](other.md#other)": [], **wrong}.items():
            (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{text}\n")
            done = built(tmp_path)
            assert (done.returncode != 0) == bool(named), done.stdout + done.stderr
            for name in named:
                assert name in done.stdout + done.stderr

    def test_pages_link_to_their_source_once_a_release_names_it(
        self, copy: Path, tmp_path: Path
    ) -> None:
        prepare_two_pages(copy, tmp_path)
        project = (copy / "pyproject.toml").read_text()
        assert "Edit this page" not in (copy / "site" / "rows.html").read_text()
        named = re.sub(r'(?m)^Repository = ".*"', 'Repository = "https://host.test/it"', project)
        (tmp_path / "pyproject.toml").unlink()
        (tmp_path / "pyproject.toml").write_text(named)
        (tmp_path / "docs" / "index.md").write_text("# Start\n")
        done = built(tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        page = (tmp_path / "site" / "other.html").read_text()
        assert 'href="https://host.test/it/edit/main/docs/other.md"' in page
        assert 'href="https://host.test/it"' in page, "in the footer"


def prepare_two_pages(copy: Path, folder: Path) -> None:
    """Make a site of two pages, with all else as it is, so that it is built in seconds; its index
    is not written yet."""
    for name in ("Makefile", "dist_sparse", "pyproject.toml", "requirements"):
        (folder / name).symlink_to(copy / name)
    (folder / "docs").mkdir()
    (folder / "docs" / "hooks").symlink_to(copy / "docs" / "hooks")
    settings = (copy / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(
        re.sub(r"^nav:\n(?: .*\n|\n)+", "", settings, flags=re.MULTILINE)
    )
    (folder / "docs" / "other.md").write_text("# Other\n")


needs_chromium = pytest.mark.skipif(
    chromium() is None,
    reason="NO CHROMIUM: the site was not looked at in a browser (apt-get install chromium)",
)


class SubPath(http.server.SimpleHTTPRequestHandler):
    """Serve a site below /project/, with its own page for wrong addresses, as code hosts do."""

    def translate_path(self, path: str) -> str:
        below = path.removeprefix("/project/")
        return super().translate_path(below if below != path else "/nowhere")

    def send_error(self, code: int, *args: object, **kwargs: object) -> None:
        page = (Path(self.directory) / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.browser
@needs_chromium
def test_a_wrong_address_leads_to_the_first_page(copy: Path, tmp_path: Path) -> None:
    """From a folder, and at any depth below a sub-path of a server."""
    site = copy / "site"
    link = "document.querySelector('a')?.href"  # none while the page is loading
    handler = partial(SubPath, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        opened(tmp_path) as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(site / "404.html", 390)
        assert browser.value(link) == (site / "index.html").as_uri()
        assert browser.low_contrasts() == []
        root = f"http://127.0.0.1:{server.server_address[1]}/project"
        browser.value(f"location.href = '{root}/api/deep/wrong.html'")
        until = time.monotonic() + 30
        while browser.value(f"location.protocol === 'http:' && {link}") != f"{root}/index.html":
            assert time.monotonic() < until, browser.value(link)
            time.sleep(0.05)
        server.shutdown()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.browser
@needs_chromium
def test_the_site_works_when_opened_from_files(copy: Path, tmp_path: Path) -> None:
    """On a phone and a desktop, light and dark, with its search; nothing is fetched."""
    site = copy / "site"
    with opened(tmp_path) as browser:
        for number, name in enumerate(("index", "results", "tutorial", "notebook", "api/sparsify")):
            for width in (390, 1400):
                dark = (number + width) % 4 == 0
                browser.open(site / f"{name}.html", width, dark=dark)
                assert browser.value("document.documentElement.scrollWidth") <= width, name
                assert browser.value("document.body.dataset.mdColorScheme") == (
                    "slate" if dark else "default"
                ), name
                assert browser.value(
                    "[...document.images].every((image) => image.naturalWidth > 0)"
                ), name
                assert browser.low_contrasts(".md-content *") == [], name
                assert not [
                    url for url in browser.requested if not url.startswith(("file:", "data:"))
                ], name
        browser.value("""
            const box = document.querySelector(".md-search__input");
            box.focus();
            box.value = "checkpoint";
            box.dispatchEvent(new Event("keyup", {bubbles: true}));
        """)
        until = time.monotonic() + 30
        while not (
            found := browser.value(
                '[...document.querySelectorAll(".md-search-result__link")].map((a) => a.href)'
            )
        ):
            assert time.monotonic() < until, "the search finds nothing"
            time.sleep(0.05)
        assert any(address.startswith((site / "checkpoints.html").as_uri()) for address in found)
