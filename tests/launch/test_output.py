"""Does the output of several ranks stay readable: whole lines, labels, bars that stay below?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dist_sparse.launch.output import Display, Source, wants_colour

from .jobs import wait_for

CLEAR = "\r\x1b[K"


@contextmanager
def display(*, terminal: bool, colour: bool = False) -> Iterator[tuple[Display, list[str]]]:
    """A display on a pipe, and what it has written, one entry for each call to `feed` that wrote."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    shown = Display(writer, terminal=terminal, colour=colour)
    written: list[str] = []
    feed = shown.feed

    def noting(source: Source, data: bytes, final: bool = False) -> None:
        feed(source, data, final)
        wait_for(lambda: not shown.writer.busy)
        try:
            written.append(os.read(reader, 1 << 16).decode())
        except BlockingIOError:
            written.append("")

    shown.feed = noting  # type: ignore[method-assign]
    yield shown, written
    shown.writer.close()
    os.close(reader)
    os.close(writer)


def test_lines_of_ranks_do_not_mix() -> None:
    with display(terminal=False) as (shown, written):
        zero, one, agent = Source(0, 12), Source(1, 12), Source()
        shown.feed(zero, b"be")
        shown.feed(one, b"first\nsec")
        shown.feed(zero, b"gin\n\n")
        shown.feed(agent, b"note\r\n")
        shown.feed(one, b"ond", final=True)
    assert written == ["", "[ 1] first\n", "[ 0] begin\n[ 0]\n", "[torchrun] note\n", "[ 1] second\n"]


def test_what_is_written_over_counts_once() -> None:
    with display(terminal=False) as (shown, written):
        source = Source(0, 2)
        shown.feed(source, b"\r 0%")
        shown.feed(source, b"\r50%\r")
        shown.feed(source, b"100%\r\x1b[A")
        shown.feed(source, b"\ndone\n")
    assert "".join(written) == "[0] 100%\n[0] done\n"


def test_a_character_may_come_in_parts() -> None:
    with display(terminal=False) as (shown, written):
        source = Source(0, 1)
        for byte in "ü€\n".encode() + b"\xff\n":
            shown.feed(source, bytes([byte]))
    assert "".join(written) == "ü€\n\ufffd\n"


def test_a_bar_stays_below_on_a_terminal() -> None:
    with display(terminal=True) as (shown, written):
        zero, one = Source(0, 2), Source(1, 2)
        shown.feed(zero, b"\r10%")
        shown.feed(one, b"hello\n")
        shown.feed(one, b"bar of one")
        shown.feed(zero, b"\r20%\n")
        shown.feed(one, b"", final=True)
    assert written == [
        "[0] 10%",
        f"{CLEAR}[1] hello\n[0] 10%",
        "",  # one line has room, the lowest rank's
        f"{CLEAR}[0] 20%\n[1] bar of one",
        f"{CLEAR}[1] bar of one\n",
    ]


def test_what_is_too_wide_is_cut_only_while_it_is_unfinished() -> None:
    with display(terminal=True) as (shown, written):
        source = Source(0, 2)
        shown.feed(source, b"x" * 200)
        shown.feed(source, b"\n")
    assert written[0] == "[0] " + "x" * (80 - 5)
    assert written[1] == f"{CLEAR}[0] {'x' * 200}\n"


HARMFUL = {
    "title": "\x1b]0;title\x07",
    "title with ST": "\x1b]0;ü\x1b\\",
    "clipboard": "\x1b]52;c;aGVsbG8=\x9c",
    "C1 title": "\x9d0;title\x9c",
    "reset": "\x1bc",
    "save": "\x1b7",
    "charset": "\x1b(0",
    "clear": "\x1b[2J",
    "C1 clear": "\x9b2J",
    "cursor": "\x1b[?25l",
    "keys": "\x1b[>4;2m",
    "device": "\x1bP+q544e\x1b\\",
    "bell": "\x07",
    "backspace": "\b\b",
}


@pytest.mark.parametrize("harmful", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_only_styles_steer_the_terminal(harmful: str, size: int) -> None:
    """However they are cut by reads."""
    data = f"a{harmful}b\x1b[1;31mred\x1b[0m\tc\n".encode()
    with display(terminal=False) as (shown, written):
        source = Source(0, 1)
        for begin in range(0, len(data), size):
            shown.feed(source, data[begin : begin + size])
    assert "".join(written) == "ab\x1b[1;31mred\x1b[0m\tc\n"


def test_a_sequence_that_never_ends_does_not_hold_text_back() -> None:
    source = Source(0, 1)
    assert source.take(b"\x1b]0;no end\nnext\n") == ["0;no end", "next"]
    assert source.take(b"\x1b]" + b"x" * 9000) == []
    assert source.take(b"y\n") == ["x" * 9000 + "y"]
    assert source.take(b"last\x1b[", final=True) == ["last"]


def test_only_labels_are_coloured() -> None:
    with display(terminal=False, colour=True) as (shown, written):
        for rank in (0, 1):
            shown.feed(Source(rank, 2), b"\x1b[1mtext\x1b[0m\n")
        shown.feed(Source(0, 1), b"alone\n")
    assert written[0] == "\x1b[36m[0]\x1b[0m \x1b[1mtext\x1b[0m\n"
    assert written[1].startswith("\x1b[33m[1]\x1b[0m ")
    assert written[2] == "alone\n"


@pytest.mark.parametrize(
    ("choice", "terminal", "environ", "wanted"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_who_wants_colour(choice: str, terminal: bool, environ: dict[str, str], wanted: bool) -> None:
    assert bool(wants_colour(choice, terminal, environ)) is wanted
