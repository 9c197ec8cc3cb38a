"""Links that leave docs/.

The pages link to files elsewhere in the repository (figures of benchmarks, examples, tests), as a
code host wants it. What is linked becomes part of the site, under ``repository/``: Markdown as a
page, source as a page that shows it, the rest as it is; and so on with what those pages link to. A
link that leads nowhere is left as it was, so that MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from markdown import Extension, Markdown
from markdown.blockprocessors import build_block_parser
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown"]

_FOLDER = "repository"
# Pages that only links lead to: they are neither in the navigation nor in the search.
_OF_DEVELOPERS = "docs/dev/"
_SOURCE = {
    ".py": "python",
    ".txt": "text",
    ".toml": "toml",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".ipynb": "json",
}
_FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_TO_PAGE = re.compile(r'href="\.\./docs/([\w/]+)\.md(?=[#"])')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Accept two spaces of indentation in lists, as code hosts do; Python-Markdown wants four. Show
    version and licence in the footer. Once a release has named the repository, link to it from the
    footer, and to the source from each page."""
    config.markdown_extensions.insert(0, _TwoSpaces())  # type: ignore[arg-type]
    about = tomllib.loads((_root(config) / "pyproject.toml").read_text())["project"]
    version, repository = f"{about['name']} {about['version']}", about["urls"]["Repository"]
    if ".invalid/" not in repository:
        version = f'<a href="{repository}">{version}</a>'
        # Not repo_url: with it, the theme fetches stars and forks from the code host.
        config.edit_uri = f"{repository}/edit/main/docs/"
    config.copyright = f"{version}, {about['license']}"
    return config


class _TwoSpaces(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        # The parts of a parser read the length at construction.
        md.parser = build_block_parser(md)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to."""
    root = _root(config)
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        here = posixpath.dirname(_in_repository(page.src_uri, config))

        def add(target: str, here: str = here) -> str:
            path = posixpath.normpath(posixpath.join(here, target.partition("#")[0]))
            source = root / path
            is_page = path.startswith("docs/") and not path.startswith(_OF_DEVELOPERS)
            if not is_page and not path.startswith("../") and source.is_file():
                uri = _in_site(path, config)
                if files.get_file_from_path(uri) is None:
                    file = _file(source, uri, config)
                    files.append(file)
                    waiting.extend([file] if source.suffix == ".md" else [])
            return target

        _each_link(page.content_string, add)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the places of the files in the site."""
    uri = page.file.src_uri
    if uri.startswith(f"{_FOLDER}/"):
        page.meta["search"] = {"exclude": True}
    here = posixpath.dirname(_in_repository(uri, config))

    def moved(target: str) -> str:
        name, sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(here, name))
        if not name or not (_root(config) / path).is_file():
            return target
        return (
            posixpath.relpath(_in_site(path, config), posixpath.dirname(uri) or ".") + sign + anchor
        )

    return _each_link(markdown, moved)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point a notebook's links at pages of the site: its Markdown is converted elsewhere."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def moved(link: re.Match[str]) -> str:
        if files.get_file_from_path(f"{link[1]}.md") is None:
            return link[0]
        return f'href="{link[1]}.html'

    return _TO_PAGE.sub(moved, html)


def _file(source: Path, uri: str, config: MkDocsConfig) -> File:
    if source.suffix in _SOURCE:
        text = source.read_text(encoding="utf-8")
        return File.generated(
            config, uri, content=f"# {source.name}\n\n````{_SOURCE[source.suffix]}\n{text}\n````\n"
        )
    return File.generated(config, uri, abs_src_path=str(source))


def _each_link(text: str, change: Callable[[str], str]) -> str:
    parts = _FENCE.split(text)
    parts[::2] = [
        _LINK.sub(lambda link: change(link[1]) if "://" not in link[1] else link[1], p)
        for p in parts[::2]
    ]
    return "".join(parts)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _in_repository(uri: str, config: MkDocsConfig) -> str:
    """Return the path in the repository of a page of the site."""
    outside = uri.removeprefix(f"{_FOLDER}/")
    return outside if outside != uri else f"{Path(config.docs_dir).name}/{uri}"


def _in_site(path: str, config: MkDocsConfig) -> str:
    """Return the path in the site of a file of the repository."""
    docs = f"{Path(config.docs_dir).name}/"
    if path.startswith(docs) and not path.startswith(_OF_DEVELOPERS):
        return path.removeprefix(docs)
    return f"{_FOLDER}/{path}" + (".md" if Path(path).suffix in _SOURCE else "")
