"""How do drawings follow the reader's light or dark?

An SVG in an ``<img>`` knows the system's setting and not the page's. So the site holds the drawings
of docs/images in the page itself, where the style inside each of them sees the page's scheme. On a
code host they are plain images.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

__all__ = ["on_page_content"]

_IMAGE = re.compile(
    r'<p><img alt="(?P<alt>[^"]*)" src="(?:\.\./)*images/(?P<name>[\w-]+\.svg)" ?/?></p>'
)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts each drawing that stands alone in a paragraph in the place of its image."""

    def drawing(image: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / "images" / image["name"]).read_text(encoding="utf-8")
        named = svg.replace("<svg ", '<svg role="img" aria-label="' + image["alt"] + '" ', 1)
        return f'<figure class="ds-figure">{named}</figure>'

    return _IMAGE.sub(drawing, html)
