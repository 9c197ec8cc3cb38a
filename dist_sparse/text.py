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
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, zip_longest
from operator import attrgetter

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# Bytes from which on the next unit is shorter: "1,010 KiB" has a digit too many.
_LARGEST = [999.5 * 1024**power for power in range(6)]

# Cells up to here do not wrap.
_SHORT = 16


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
    return textwrap.wrap(
        text,
        _terminal(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    totals: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Return the lines of a table that fits the terminal: head, rule, rows and, below another rule,
    the totals.

    Where it is too wide, heads and long texts wrap at blanks. If that is not enough, a row takes
    several lines: as many cells as fit, and the others indented below. No cell is cut.

    Args:
        head: names of the columns.
        rows: cells, as many as ``head`` has; made :func:`printable`.
        right: columns to align right.
        totals: last rows.
    """
    cells = [[*map(printable, row)] for row in (*rows, *totals)]
    # The first column names its row, and numbers have a blank before their unit.
    whole = {0, *right}
    columns = []
    for place, texts in enumerate(zip(head, *cells, strict=True)):
        columns.append(_Column(texts, place in right, place in whole))
    blocks = _blocks(columns, _terminal())
    if totals:
        blocks.insert(-len(totals), blocks[1])
    return [*chain(*blocks)]


class _Column:
    """A column of a table, as wide as its longest cell at first.

    Args:
        cells: its head and its cells.
        right: align them right.
        whole: no cell wraps.
    """

    def __init__(self, cells: Sequence[str], right: bool, whole: bool) -> None:
        self.cells, self.form = cells, "{:>{}}" if right else "{:<{}}"
        self.width = max(1, *map(len, cells))
        longest = self.width if whole else _SHORT
        pieces = cells[0].split()
        for cell in cells[1:]:
            pieces += [cell] if len(cell) <= longest else cell.split()
        # Narrower, a head would break inside a word, or a cell that stays whole.
        self.least = max(map(len, pieces), default=1)


def _blocks(columns: Sequence[_Column], room: int) -> list[list[str]]:
    """Return the lines of the head, of a rule, and of each row."""
    # Two blanks between columns.
    ends = [*accumulate(column.least + 2 for column in columns)]
    fit = max(1, bisect_right(ends, room + 2))
    shown, below = columns[:fit], columns[fit:]
    narrowest, widest = ends[fit - 1] - 2, sum(column.width + 2 for column in shown) - 2
    for _ in range(widest - max(room, narrowest)):
        wide = max(shown, key=lambda column: (column.width > column.least, column.width))
        wide.width -= 1
    blocks = [_row_lines(shown, row) for row in range(len(columns[0].cells))]
    blocks.insert(1, ["  ".join("-" * column.width for column in shown)])
    if below:
        for block, more in zip(blocks, _blocks(below, room - 2), strict=True):
            block += map("  {}".format, more)
    return blocks


def _row_lines(columns: Sequence[_Column], row: int) -> list[str]:
    cells = []
    for column in columns:
        cells.append(textwrap.wrap(column.cells[row], column.width, break_on_hyphens=False))
    form = "  ".join(map(attrgetter("form"), columns))
    widths = [*map(attrgetter("width"), columns)]
    lines = []
    for line in zip_longest(*cells, fillvalue=""):
        lines.append(form.format(*chain(*zip(line, widths, strict=True))).rstrip())
    return lines


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
    power = bisect_right(_LARGEST, abs(value))
    number = f"{value / 1024**power:#.3g}".removesuffix(".")
    return f"{number} {_UNITS[power]}" if power else f"{value:.0f} B"


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


# Counts what is done.
Bar = Callable[[float], object]


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
