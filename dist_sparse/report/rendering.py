"""Templates of the report: HTML and SVG beside this module, filled by Jinja2.

Everything that a template prints from a run is escaped, and control characters in it are made
visible.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dist_sparse.text import count, percent, printable

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["COLORS", "environment", "part", "render"]

_FOLDER: Final = Path(__file__).parent

COLORS: Final = {
    "bg": ("#f4f6f9", "#0e131a"),
    "card": ("#fff", "#171e28"),
    "ink": ("#18202b", "#e8edf4"),
    "soft": ("#515c6b", "#a7b3c2"),
    "line": ("#dde2e9", "#2b3543"),
    "grid": ("#e6eaf0", "#263040"),
    "main": ("#1d5fc4", "#6fa8ff"),
    "target": ("#5a6472", "#aab5c3"),
    "thin": ("#8a97a8", "#66758a"),
    "o0": ("#b3500a", "#f0a05a"),
    "o1": ("#18794e", "#58c994"),
    "o2": ("#8a3fb5", "#cb9cff"),
    "o3": ("#b02a52", "#ff8fae"),
    "o4": ("#0b7285", "#63d3e4"),
    "o5": ("#6b6400", "#d2cb52"),
    "o6": ("#7a4a2b", "#c9a184"),
    "o7": ("#a3158f", "#f08ae0"),
    "o8": ("#4a5568", "#b8c2d0"),
    "gone": ("#b3500a", "#f0a05a"),
    "both": ("#8a6a4a", "#c0a080"),
    "track": ("#e3e8ef", "#2a3442"),
    "rest": ("#8491a2", "#66758a"),
    "warn": ("#8a4b00", "#ffcf87"),
    "warnbg": ("#fff3dc", "#3a2c12"),
}
"""Light and dark: variables of the page's style, and colors of the SVG files."""


def render(template: str, **values: Any) -> str:
    """Return a template filled with values, all escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return environment().get_template(template).render(values)


def part(name: str) -> str:
    """Return a file of the page, which Jinja2 takes for markup: never text from a run."""
    from markupsafe import Markup  # jinja2 needs it

    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:  # torch brings it, but runs are read without torch
        raise ImportError("Reports need jinja2: pip install jinja2.") from error
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # by name it would leave .svg out
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # a file ends with one
    )
    environment.globals["colors"] = COLORS
    environment.filters |= {"count": count, "percent": percent, "short": _short}
    return environment


def _visible(value: Any) -> Any:
    """Return text from a run without control characters; the project's own markup has line ends."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def _short(text: str, most: int) -> str:
    """Return text that fits a place of fixed width."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
