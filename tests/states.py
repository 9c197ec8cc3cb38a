"""For tests that spoil a saved state: its JSON as a mapping that can be edited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["edited", "table"]


@contextmanager
def edited(state: Any, key: str) -> Iterator[Any]:
    """``state[key]``, JSON, as what it says; what the body makes of it is saved again."""
    value = json.loads(state[key])
    yield value
    state[key] = json.dumps(value)


@contextmanager
def table(state: Any, name: str) -> Iterator[Any]:
    """The values of one sharded table in the state of a sparsifier, with this rank's ``pieces``."""
    with edited(state["sharded"], "tables") as tables:
        pieces = state["sharded"]["masks"][name].kept
        tables[name]["pieces"] = pieces
        yield tables[name]
        del tables[name]["pieces"]
