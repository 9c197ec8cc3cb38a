"""What a device that is not there was asked to do: host waits, launches, bytes moved, peak
memory."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

__all__ = ["ACCOUNT", "Account", "Spent", "touched"]

PACKAGE = str(Path(__file__).parents[4] / "dist_sparse")


@dataclass(frozen=True)
class Spent:
    """What some code has cost.

    Args:
        waits: times that the host waited for the device.
        launches: kernels; an operation of torch's that is no view counts as one.
        moved: bytes that kernels read and wrote, from the caches or not.
        peak: bytes of the device's memory at their highest, beyond those at the start.
        lines: the waits, with the lines that asked for them.
    """

    waits: int
    launches: int
    moved: int
    peak: int
    lines: str


@dataclass
class Account:
    """Counts between :meth:`begin` and :meth:`end`. Memory is counted always: tensors that are
    freed between the two may be older."""

    active: bool = False
    on_wait: Callable[[], None] = lambda: None
    """Is called when the host waits, counted or not."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    _held: Counter[int] = field(default_factory=Counter)
    _live: int = 0
    _start: int = 0
    _peak: int = 0
    _tensors: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def begin(self) -> None:
        """Count from zero."""
        self.waits.clear()
        self.launches.clear()
        self.moved, self._start, self._peak = 0, self._live, self._live
        self.active = True

    def end(self) -> Spent:
        """Stop counting, and return what has been counted."""
        self.active = False
        lines = [
            f"{count:6d} x {why:28s} {where}" for (why, where), count in self.waits.most_common()
        ]
        peak = self._peak - self._start
        return Spent(self.waits.total(), self.launches.total(), self.moved, peak, "\n".join(lines))

    def wait(self, why: str, times: int = 1) -> None:
        """Note that the host waits for the device."""
        self.on_wait()
        if self.active:
            self.waits[why, _line_of_package()] += times

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` is in use."""
        return bool(self._held[tensor.untyped_storage().data_ptr()])

    @property
    def live(self) -> int:
        """Bytes of the device's memory that are in use."""
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes in use since :meth:`begin` or :meth:`reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._peak = self._live

    def launch(self, name: str, *tensors: Tensor, times: int = 1) -> None:
        """Note the launch of a kernel that reads or writes these tensors."""
        if self.active:
            self.launches[name] += times
            self.moved += sum(touched(tensor) for tensor in tensors)

    def move(self, nbytes: int) -> None:
        """Note bytes that a kernel has read or written."""
        if self.active:
            self.moved += nbytes

    def hold(self, owner: object, tensor: Tensor) -> None:
        """Note that ``owner`` keeps the storage of ``tensor`` alive, until it is collected."""
        storage = tensor.untyped_storage()
        address, nbytes, key = storage.data_ptr(), storage.nbytes(), id(owner)
        if not nbytes:
            return
        if not self._held[address]:
            self._live += nbytes
            self._peak = max(self._peak, self._live)
        self._held[address] += 1

        def release(_: Any) -> None:
            del self._tensors[key]
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]
                self._live -= nbytes

        self._tensors[key] = weakref.ref(owner, release)


ACCOUNT = Account()
"""Of the one device of a process."""


def touched(tensor: Tensor) -> int:
    """Return a tensor's bytes, with broadcast dimensions counted once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def _line_of_package() -> str:
    """Return the innermost line of dist_sparse in the calls under way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
