"""Progress of long work, for people who watch it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Bar = Callable[[float], object]
"""Counts what is done."""


@contextmanager
def progress(what: str, total: int, unit: str, *, shown: bool) -> Iterator[Bar]:
    """Yield a function that counts what is done on a bar of tqdm's: on a terminal alone, and if
    tqdm is installed."""
    if not shown or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda done: None
        return
    with importlib.import_module("tqdm").tqdm(
        total=total, desc=what, unit=f" {unit}", unit_scale=True
    ) as bar:
        yield bar.update
