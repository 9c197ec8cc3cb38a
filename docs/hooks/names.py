"""Names in the prose of guides that lead to the reference.

A public name in code type that is no link yet, ``export()`` or ``RunLog``, becomes one. Functions
need their parentheses: ``plan`` and ``export`` are words of the shell too.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

__all__ = ["on_page_content"]

_PLACE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_CODE = re.compile(
    # Tags whose code is not prose, or a name with its call.
    r"<(?P<tag>pre|a|h\d)\b.*?</(?P=tag)>|<code>(?P<name>\w+)(?P<call>\([^<]*\))?</code>",
    re.DOTALL,
)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make public names links, except in the reference, which has its own."""
    if page.file.src_uri.startswith(("api/", "repository/")) or page.file.src_uri.endswith("ipynb"):
        return html
    places = _places(Path(config.docs_dir))

    def linked(found: re.Match[str]) -> str:
        place = places.get(found["name"] or "")
        if place is None or not (found["call"] or found["name"][0].isupper()):
            return found[0]
        return f'<autoref optional identifier="{place}">{found[0]}</autoref>'

    return _CODE.sub(linked, html)


def _places(docs: Path) -> dict[str, str]:
    """Return the full names in the reference, by their last parts."""
    pages = sorted((docs / "api").glob("*.md"))
    found = [name for page in pages for name in _PLACE.findall(page.read_text(encoding="utf-8"))]
    return {name.rpartition(".")[2]: name for name in found}
