"""Numbers, shapes and tables as text for a terminal or a page.

- The standard library alone: ``dist-sparse doctor`` runs where torch is missing.
- A number always reads the same: no locale, at most four significant digits, bytes in powers of
  1024.
- Names come from models and logs: :func:`printable` escapes control characters in them.
"""

import importlib
import importlib.util
import shutil
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, zip_longest

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# From these bytes on, size() takes the next unit: three digits would round to "1000 KiB".
_LARGEST = [999.5 * 1024**power for power in range(6)]

# Cells of at most this many characters do not wrap.
_SHORT = 16


def printable(text: str) -> str:
    r"""Escape everything that could control a terminal or reorder the text around it.

    Control and format characters (``\x1b``, ``\n``, ``\u202e``), lone surrogates and unassigned
    code points are written as Python's ``repr`` writes them.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a text in lines that fit the terminal, indented from the second line on. Lines break
    at blanks only: a URL stays whole."""
    return textwrap.wrap(
        text,
        _terminal_width(),
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

    In a narrow terminal, heads and long texts wrap at blanks. If that is not enough, a row takes
    several lines: as many cells as fit, and the others indented below. No cell is cut.

    Args:
        head: names of the columns.
        rows: cells, as many as ``head`` has; made :func:`printable`.
        right: columns to align right.
        totals: last rows.
    """
    cells = [[*map(printable, row)] for row in (*rows, *totals)]
    # Names stay whole, and so do numbers: "1.30 MiB" must not break at its blank.
    whole = {0, *right}
    columns = []
    for place, texts in enumerate(zip(head, *cells, strict=True)):
        columns.append(_Column(texts, place in right, place in whole))
    blocks = _blocks(columns, _terminal_width())
    if totals:
        # The rule below the head is repeated above the totals.
        blocks.insert(-len(totals), blocks[1])
    return [*chain(*blocks)]


class _Column:
    """A column of a table. Its width begins with the longest cell; :func:`_blocks` reduces it.

    Args:
        cells: its head and its cells.
        right: whether they are aligned right.
        whole: whether no cell wraps.
    """

    def __init__(self, cells: Sequence[str], right: bool, whole: bool) -> None:
        self.cells = cells
        # A format for a cell and the width.
        self.form = "{:>{}}" if right else "{:<{}}"
        self.width = max(1, *map(len, cells))
        longest = self.width if whole else _SHORT
        # Pieces that must not break: words of the head, short cells, words of long cells.
        pieces = cells[0].split()
        for cell in cells[1:]:
            pieces += [cell] if len(cell) <= longest else cell.split()
        self.least = max(map(len, pieces), default=1)


def _blocks(columns: Sequence[_Column], room: int) -> list[list[str]]:
    """Return the lines of the head, of a rule, and of each row, at most ``room`` wide."""
    # The right ends of the columns at their least widths, with two blanks after each.
    ends = [*accumulate(column.least + 2 for column in columns)]
    # The first column is shown, even if it does not fit.
    fit = max(1, bisect_right(ends, room + 2))
    shown, below = columns[:fit], columns[fit:]
    narrowest = ends[fit - 1] - 2
    widest = sum(column.width + 2 for column in shown) - 2
    # Take away one character at a time, from the widest column that can still wrap.
    for _ in range(widest - max(room, narrowest)):
        widest_column = max(shown, key=lambda column: (column.width > column.least, column.width))
        widest_column.width -= 1
    blocks = [_row_lines(shown, row) for row in range(len(columns[0].cells))]
    blocks.insert(1, ["  ".join("-" * column.width for column in shown)])
    if below:
        for block, more in zip(blocks, _blocks(below, room - 2), strict=True):
            block += map("  {}".format, more)
    return blocks


def _row_lines(columns: Sequence[_Column], row: int) -> list[str]:
    """Return the lines of a row; a cell that wraps makes several."""
    wrapped_cells = []
    for column in columns:
        text = column.cells[row]
        wrapped_cells.append(textwrap.wrap(text, column.width, break_on_hyphens=False))
    lines = []
    for texts in zip_longest(*wrapped_cells, fillvalue=""):
        pairs = zip(columns, texts, strict=True)
        cells = [column.form.format(text, column.width) for column, text in pairs]
        lines.append("  ".join(cells).rstrip())
    return lines


def _terminal_width() -> int:
    # 80 without a terminal, as in a file, a notebook or a job's log.
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


def count(value: int) -> str:
    """Return all digits in groups of three: ``53,562``."""
    return f"{value:,}"


def number_of(value: int, noun: str) -> str:
    """Return ``1 table``, ``1,200 tables`` or ``3 batches``."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count(value)} {noun if value == 1 else plural}"


def level_text(level: float | str) -> str:
    """Return a level with four digits; ``untouched`` is returned as it is."""
    return level if isinstance(level, str) else f"{level:.4g}"


def percent(share: float | None) -> str:
    """Return a fraction in [0, 1] as ``79.9%``, a dash for None."""
    if share is None:
        return "-"
    value = 100 * share
    rounded = f"{value:.1f}%"
    # One decimal, unless a small fraction would read as 0.0%, or a large one as 100.0%.
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
    # Above this, it would round to "60.0 s".
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# Advances a progress bar by a number of units.
Advance = Callable[[float], object]


@contextmanager
def progress(what: str, total: int | None, unit: str, *, shown: bool) -> Iterator[Advance]:
    """Yield a function that advances a progress bar. The bar is drawn on a terminal only, and if
    tqdm is installed."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda done: None
        return
    # None: tqdm hides the bar if stderr is not a terminal.
    hidden = None if shown else True
    bars = importlib.import_module("tqdm")
    with bars.tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, disable=hidden) as bar:
        yield bar.update
