"""The gate between lookups, in any number of threads, and updates of what they read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """A readers-writer lock: any number of lookups, or one update. An update goes first: it waits
    for running lookups only, and later lookups wait for it.

    Not reentrant: a lookup inside a lookup of the same thread could wait for an update that waits
    for the outer lookup.

    Attributes:
        updating: a lock for updates, held while the next one is prepared. Lookups do not take it.
    """

    def __init__(self, is_partial: bool = False) -> None:
        # An update has begun, and has not ended: if it raised, rows are wrong from then on.
        self._is_partial = is_partial
        # Each lookup holds it for a moment when it begins; an update holds it until its end.
        self._entrance = threading.Lock()
        # Guards the number of running lookups, and signals its changes.
        self._condition = threading.Condition()
        self._running = 0
        self.updating = threading.Lock()

    def __reduce__(self) -> tuple[type[Gate], tuple[bool]]:
        # Locks can't be copied or pickled: a copy of a module gets its own gate.
        return Gate, (self._is_partial,)

    def _refuse_partial(self) -> None:
        if self._is_partial:
            raise RuntimeError("A delta was applied in part: load the artifact again.")

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold updates back."""
        with self._entrance, self._condition:
            self._refuse_partial()
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Wait for running lookups, and hold later ones back. Call it within :attr:`updating`."""
        # Taking the entrance first stops new lookups: a steady stream of them would otherwise
        # starve the update.
        with self._entrance, self._condition:
            self._refuse_partial()
            self._condition.wait_for(lambda: not self._running)
            self._is_partial = True
            yield
            self._is_partial = False
