"""Templates of the report: HTML and SVG beside this module, filled by Jinja2.

Everything that a template prints from a run is escaped, and control characters in it are made
visible.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dist_sparse.text import amount, block_shape_text, count, number_of, percent, printable, size

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER: Final = Path(__file__).parent


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
    # torch brings it, but runs are read without torch.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # by name it would leave .svg out
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # a file ends with one
    )
    texts = (amount, block_shape_text, count, number_of, percent, size)
    environment.filters |= {text.__name__: text for text in texts} | {"short": _short}
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
