"""Docstrings' ``:class:`~dist_sparse.X``` as links, and ``Example::`` as a section.

The docstrings use the roles and literal blocks of reStructuredText, the site is Markdown. What has
a place in the site becomes a link; the rest is shown as code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Roles"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~?)(?P<name>[\w.]+)`")
_EXAMPLE = re.compile(r"^Example::\n\n", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrite the roles and examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object of the package, outermost last."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: _link(obj, role), obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub("Examples:\n", text)


def _link(obj: griffe.Object, role: re.Match[str]) -> str:
    name = role["name"]
    text = name.rpartition(".")[2] if role["short"] else name
    return f'<autoref optional identifier="{_path(obj, name)}"><code>{text}</code></autoref>'


def _path(obj: griffe.Object, name: str) -> str:
    """Return the full name of an object that a docstring names relative to its own scope."""
    scope: griffe.Object | None = obj
    while scope is not None:
        if (
            name.partition(".")[0] in scope.members
            and scope.members[name.partition(".")[0]] is not scope
        ):
            return f"{scope.path}.{name}"
        scope = scope.parent
    return name
