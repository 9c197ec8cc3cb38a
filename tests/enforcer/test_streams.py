"""Lookups and mask updates on several streams are ordered, and captures refused, on stand-ins for
CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.fused import StreamOrder


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def record_event(self) -> str:
        return f"write on {self.name}"

    def wait_event(self, event: str) -> None:
        self.waits.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(f"all of {other.name}")


LOOKUPS, MAIN = "lookups", "main"


@pytest.fixture
def streams() -> Iterator[dict[str, Stream]]:
    made = {LOOKUPS: Stream(LOOKUPS), MAIN: Stream(MAIN)}
    with mock.patch.object(torch.cuda, "current_stream", lambda device: made["now"]):
        made["now"] = made[MAIN]
        yield made


def test_on_two_streams(streams: dict[str, Stream]) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    lookups, main = streams[LOOKUPS], streams[MAIN]

    streams["now"] = lookups
    order.before_read()
    assert lookups.waits == ["write on main"]  # whatever came before
    lookups.waits.clear()

    streams["now"] = main
    order.before_write()
    order.after_write()
    assert main.waits == ["all of lookups"]

    streams["now"] = lookups
    order.before_read()
    assert lookups.waits == ["write on main"]
    order.before_write()  # rows cleaned in the middle of a lookup
    order.after_write()
    assert lookups.waits == ["write on main"] * 2

    streams["now"] = main
    order.before_read()
    assert main.waits == ["all of lookups", "write on lookups"]


def test_on_one_stream(streams: dict[str, Stream]) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    for _ in range(2):
        order.before_read()
        order.before_write()
        order.after_write()
    assert streams[MAIN].waits == []


def test_without_streams() -> None:
    with mock.patch.object(torch.cuda, "current_stream", side_effect=AssertionError):
        order = StreamOrder(torch.device("cpu"))
        order.before_read()
        order.before_write()
        order.after_write()


def test_capture_is_refused() -> None:
    called: list[int] = []
    hook = Hook(called.append)
    with (
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        pytest.raises(RuntimeError, match="CUDA graph can't capture"),
    ):
        hook(1)
    hook(2)
    assert called == [2]
