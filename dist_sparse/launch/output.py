"""How does the output of many ranks become one?

Line by line, each behind the rank that wrote it. What a rank writes over with a carriage return (a progress bar) counts
once, in its last state, when its line ends. On a terminal the unfinished line of one rank, the lowest that has one,
stands below the finished ones and is drawn anew behind them, so that a bar stays where it is while others write. Of
what steers a terminal only colours and styles get through: a rank prints what data and users named.
"""

from __future__ import annotations

import codecs
import copy
import os
import re
from collections.abc import Callable

from dist_sparse.launch.writer import Writer

__all__ = ["Display", "Source", "wants_colour"]

_COLOURS = (36, 33, 35, 32, 34, 31)
_DIM = 2
_LONGEST = 1 << 16
_CLEAR = "\r\x1b[K"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])"  # begins a title, a link, the clipboard, ...
_CONTROL = re.compile(
    r"(\x1b\[[0-9;:]*m)"  # a style: stays
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    rf"|{_STRING}[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_BEGUN = re.compile(  # a sequence that the next bytes may complete
    rf"(?:\x1b[ -/]*|(?:\x1b\[|\x9b)[0-?]*[ -/]*|{_STRING}[^\x00-\x1f\x7f-\x9f]*\x1b?)\Z"
)
_LONGEST_BEGUN = 1 << 12


class Source:
    """One writer: rank `rank` of `world`, or torchrun itself where `rank` is None. Keeps its unfinished line."""

    def __init__(self, rank: int | None = None, world: int = 1) -> None:
        self.order = -1 if rank is None else rank
        self.label = "[torchrun] " if rank is None else f"[{rank:{len(str(world - 1))}}] " if world > 1 else ""
        self.colour = _DIM if rank is None else _COLOURS[rank % len(_COLOURS)]
        self.open = self._begun = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def twin(self) -> Source:
        """The same writer for another output."""
        other = copy.copy(self)
        other.open, other._begun, other._decoder = "", "", codecs.getincrementaldecoder("utf-8")("replace")
        return other

    def take(self, data: bytes, final: bool = False) -> list[str]:
        """The lines that `data` completes; with `final` also the one that it leaves open."""
        text = self.open + self._harmless(self._decoder.decode(data, final), final)
        *lines, rest = text.split("\n")
        if rest and (final or len(rest) > _LONGEST):
            lines.append(rest)
            rest = ""
        before, back, after = rest.rpartition("\r")
        self.open = after if after or not back else f"{_last_state(before)}\r"
        return [_last_state(line) for line in lines]

    def _harmless(self, text: str, final: bool) -> str:
        """`text` without what steers a terminal; a sequence that it begins waits for the rest."""
        text = self._begun + text
        begun = None if final else _BEGUN.search(text, max(0, len(text) - _LONGEST_BEGUN))
        self._begun = begun[0] if begun else ""
        return _CONTROL.sub(lambda found: found[1] or "", text[: len(text) - len(self._begun)])


class Display:
    """An output of the launcher.

    Args:
        fd: where to write.
        terminal: whether it is one that can draw over a line: only there unfinished lines are shown.
        colour: whether the labels are coloured; the ranks' own text stays as it is.
        wake: as `writer`, which does the writing and knows how far it is, calls it.
    """

    def __init__(self, fd: int, *, terminal: bool, colour: bool, wake: Callable[[], None] = lambda: None) -> None:
        self.fd, self.terminal = fd, terminal
        self.writer = Writer(fd, wake)
        self._colour = colour
        self._sources: list[Source] = []
        self._shown = ""

    def feed(self, source: Source, data: bytes, final: bool = False) -> None:
        """Writes what `data`, the next bytes of `source`, completes; `final` ends the source."""
        if source not in self._sources:
            self._sources.append(source)
        lines = [self._labelled(source, line) + "\n" for line in source.take(data, final)]
        if final:
            self._sources.remove(source)
        below = self._unfinished() if self.terminal else ""
        if lines or below != self._shown:
            text = (_CLEAR if self._shown else "") + "".join(lines) + below
            self.writer.put(text.encode("utf-8", "replace"))
            self._shown = below

    def _unfinished(self) -> str:
        for source in sorted(self._sources, key=lambda source: source.order):
            text = _last_state(source.open)
            if text:
                return self._labelled(source, _clip(text, self.columns() - len(source.label) - 1))
        return ""

    def columns(self) -> int:
        """The width of the terminal, 80 where it is not known."""
        try:
            return os.get_terminal_size(self.fd).columns or 80
        except OSError:
            return 80

    def _labelled(self, source: Source, text: str) -> str:
        label = source.label
        if label and self._colour:
            label = f"\x1b[{source.colour}m{label.rstrip()}\x1b[0m "
        return label + text if text else label.rstrip()


def wants_colour(choice: str, terminal: bool, environ: dict[str, str]) -> bool:
    """Whether to colour: as `choice` says, and for "auto" on terminals, unless NO_COLOR is set."""
    if choice == "auto":
        return terminal and not environ.get("NO_COLOR")
    return choice == "always"


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _clip(text: str, width: int) -> str:
    if len(_STYLE.sub("", text)) <= width:
        return text
    return _STYLE.sub("", text)[: max(0, width)]
