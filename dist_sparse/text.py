"""Numbers, shapes and tables as text for a terminal or a page.

Plain standard library: ``dist-sparse doctor`` prints its table where torch is missing. Numbers have
no locale and at most four significant digits, so that the same number always reads the same; bytes
are in powers of 1024. Names come from models and logs: control characters in them are escaped
(:func:`printable`).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT: Final = 16
"""Cells up to here do not wrap."""


def printable(text: str) -> str:
    r"""Escape everything that could control a terminal or reorder the text around it.

    Control and format characters (``\x1b``, ``\n``, ``\u202e``), lone surrogates and unassigned
    code points are written as Python's ``repr`` writes them.
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shortened(value: object, most: int = 80) -> str:
    """Return ``repr(value)``, with the middle left out where it is longer than ``most``
    characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a text in lines that fit the terminal, the later ones indented. It is broken at
    blanks only: a longer word, such as a URL, stays whole."""
    lines = textwrap.wrap(
        text,
        _terminal(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    total: Sequence[str] | None = None,
) -> list[str]:
    """Return the lines of a table that fits the terminal: head, rule, rows and, below another rule,
    the total.

    Where it is too wide, heads and long texts wrap at blanks. If that is not enough, a row takes
    several lines: its first cell, and indented as many others as fit. No cell is cut.

    Args:
        head: names of the columns.
        rows: cells, as many as ``head`` has; made :func:`printable`.
        right: columns to align right.
        total: last row.
    """
    cells = [list(map(printable, row)) for row in (*rows, *([total] if total else []))]
    columns = [*zip(head, *cells, strict=True)]
    first, *others = _parts(columns, right, _terminal())
    blocks = []
    for place in range(1 + len(cells)):
        below = chain(*(part.lines(place) for part in others))
        blocks.append([*first.lines(place), *(f"  {line}" for line in below)])
    rule = "  ".join("-" * width for width in first.widths)
    if others:
        rule = "-" * max(map(len, chain(*blocks)))
    blocks.insert(1, [rule])
    if total:
        blocks.insert(-1, [rule])
    return [*chain(*blocks)]


class _Part:
    """Columns side by side, as narrow as they must be.

    Args:
        columns: all columns of a table, heads first.
        places: of the ones that are taken.
        right: places of those to align right.
        room: for all of them.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[str]],
        places: Sequence[int],
        right: Collection[int],
        room: int,
    ) -> None:
        self.columns = [columns[place] for place in places]
        self.sides = [">" if place in right else "<" for place in places]
        self.widths = [max(map(len, column)) for column in self.columns]
        # The first column names its row, and numbers have a blank before their unit.
        whole = [place == 0 or place in right for place in places]
        least = [*map(_narrowest, self.columns, whole)]
        while self.width > room and self.widths != least:
            spare = [place for place, width in enumerate(self.widths) if width > least[place]]
            self.widths[max(spare, key=self.widths.__getitem__)] -= 1

    @property
    def width(self) -> int:
        return sum(self.widths) + 2 * len(self.widths) - 2

    def lines(self, row: int) -> list[str]:
        """Return the lines of one row; row 0 is the head."""
        cells = []
        for column, width in zip(self.columns, self.widths, strict=True):
            # A cell that fits is not wrapped: that would collapse its blanks.
            lines = [column[row]]
            if len(column[row]) > width:
                lines = textwrap.wrap(column[row], width, break_on_hyphens=False)
            cells.append(lines)
        form = "  ".join(map("{{:{}{}}}".format, self.sides, self.widths))
        return [form.format(*line).rstrip() for line in zip_longest(*cells, fillvalue="")]


def _narrowest(column: Sequence[str], whole: bool) -> int:
    """Return the width below which a head would break inside a word, or a cell that stays whole."""
    head, *cells = column
    words = head.split()
    for cell in cells:
        words += [cell] if whole or len(cell) <= _SHORT else cell.split()
    return max(map(len, words), default=0)


def _parts(columns: Sequence[Sequence[str]], right: Collection[int], room: int) -> list[_Part]:
    """Return all columns in one part if it fits; otherwise the first alone, and the others,
    indented, in parts that are each as large as possible."""
    whole = _Part(columns, range(len(columns)), right, room)
    if whole.width <= room:
        return [whole]
    groups: list[list[int]] = [[1]]
    for place in range(2, len(columns)):
        if _Part(columns, [*groups[-1], place], right, room - 2).width <= room - 2:
            groups[-1].append(place)
        else:
            groups.append([place])
    return [
        _Part(columns, [0], right, room),
        *(_Part(columns, places, right, room - 2) for places in groups),
    ]


def _terminal() -> int:
    # 80 where there is none, as in a file, a notebook or a job's log.
    return shutil.get_terminal_size().columns


def shape_text(shape: Sequence[int | str] | None) -> str:
    """Return ``(1000, 64)`` as ``1000 x 64``, None as a dash."""
    return "-" if shape is None else " x ".join(map(str, shape))


def block_shape_text(block: Sequence[int | str] | None) -> str:
    """Return a sparse block shape as the command line takes it: ``1x4``, ``row`` for ``(1, ROW)``,
    ``col`` for ``(COL, 1)``; None as a dash."""
    if block is None:
        return "-"
    rows, columns = block
    shape = f"{rows}x{columns}".lower()
    return {"1xrow": "row", "colx1": "col"}.get(shape, shape)


def block_text(block: Sequence[int | str] | None, zeros: int | None = None) -> str:
    """Return how many elements a pruned block loses: a number, ``all``, or a dash without a
    block."""
    if block is None:
        return "-"
    # ROW and COL are as large as the table: no number is known to be all of it.
    sizes = [size for size in block if not isinstance(size, str)]
    whole = zeros is None or (len(sizes) == len(block) and zeros == math.prod(sizes))
    return "all" if whole else str(zeros)


def mib(count: int) -> str:
    """Return bytes as MiB with three decimals, without the unit."""
    return f"{count / 2**20:,.3f}"


def amount(value: float) -> str:
    """Return four significant digits, all digits of whole numbers: ``0.6990``, ``-1.235e-07``,
    ``1,385,728``."""
    if float(value).is_integer() and abs(value) < 1e15:
        return count(int(value))
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def count(value: int) -> str:
    """Return all digits in groups of three: ``53,562``."""
    return f"{value:,}"


def number_of(value: int, noun: str, nouns: str | None = None) -> str:
    """Return ``1 table`` or ``1,200 tables``; ``nouns`` is an irregular plural."""
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def level_text(level: float | str) -> str:
    """Return a level for people: four digits; of rows without a lookup the word."""
    return level if isinstance(level, str) else f"{level:.4g}"


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as ``79.9%``, a dash for None; more digits where one would read as
    nothing or all."""
    if share is None:
        return "-"
    value = 100 * share
    rounded = f"{value:.1f}%"
    # One decimal, unless it would round to nothing or all.
    if value in (0, 100) or rounded not in ("0.0%", "-0.0%", "100.0%"):
        return rounded
    return f"{value:.3g}%" if abs(value) < 1 else f"{value:.4f}%"


def size(value: float) -> str:
    """Return bytes as ``1.30 MiB`` or ``160 B``."""
    units = list(_UNITS)
    # Not 1024: "1,010 KiB" has a digit too many.
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    exact = units[0] == "B" or abs(value) >= 99.95
    return f"{value:{'.0f' if exact else '#.3g'}} {units[0]}"


def duration(seconds: float) -> str:
    """Return ``850 ms``, ``12.3 s``, ``4 min 05 s`` or ``3 h 20 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    # From here on it would round to 60.0.
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# Progress of long work, for people who watch it.


Bar = Callable[[float], object]
"""Counts what is done."""


@contextmanager
def progress(what: str, total: int, unit: str, *, shown: bool) -> Iterator[Bar]:
    """Yield a function that counts what is done on a bar of tqdm's: on a terminal alone, and if
    tqdm is installed."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda done: None
        return
    # To tqdm, None means: on a terminal alone.
    hidden = None if shown else True
    bars = importlib.import_module("tqdm")
    with bars.tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, disable=hidden) as bar:
        yield bar.update
