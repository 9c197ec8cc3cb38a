"""Drawings that follow the reader's light or dark, and plots for narrow screens.

An SVG in an ``<img>`` knows the system's setting and not the page's. So the site holds the drawings
of docs/images in the page itself, where the style inside each of them sees the page's scheme. On a
code host they are plain images.

Plots with a second file for narrow screens, such as ``speed-phone.png``, become a ``<picture>`` of
both.
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


_PLOT = re.compile(
    r'<img alt="(?P<alt>[^"]*)" src="(?P<path>(?:\.\./)*images/(?P<stem>[\w-]+))\.png" ?/?>'
)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each image of a drawing by the drawing, and of a plot by both of its files."""

    def drawing(image: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / "images" / image["name"]).read_text(encoding="utf-8")
        named = svg.replace("<svg ", '<svg role="img" aria-label="' + image["alt"] + '" ', 1)
        return f'<figure class="ds-figure">{named}</figure>'

    def plot(image: re.Match[str]) -> str:
        phone = f"{image['stem']}-phone.png"
        if not (Path(config.docs_dir) / "images" / phone).is_file():
            return image[0]
        source = f'<source media="(max-width: 44rem)" srcset="{image["path"]}-phone.png">'
        return f"<picture>{source}{image[0]}</picture>"

    return _PLOT.sub(plot, _IMAGE.sub(drawing, html))
