"""The order of lookups and writes of tables across CUDA streams."""

from __future__ import annotations

from typing import Any

import torch


class StreamOrder:
    """Orders lookups and writes of a set of tables across CUDA streams, for training pipelines with
    a stream of their own for lookups. Never blocks the host.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: set[Any] = set()
        # The stream of the last write, and an event after it.
        self._last_write: tuple[Any, Any] | None = None

    def before_read(self) -> None:
        """Have the current stream wait for the last write."""
        if self._has_streams():
            stream = torch.cuda.current_stream(self._device)
            self._wait_for_last_write(stream)
            self._readers.add(stream)

    def before_write(self) -> None:
        """Have the current stream wait for all lookups, their backwards, and the last write."""
        if self._has_streams():
            stream = torch.cuda.current_stream(self._device)
            self._wait_for_last_write(stream)
            for reader in self._readers - {stream}:
                stream.wait_stream(reader)

    def after_write(self) -> None:
        """Have later lookups on other streams wait for the current one, up to here."""
        if self._has_streams():
            stream = torch.cuda.current_stream(self._device)
            self._last_write = stream, stream.record_event()

    def _wait_for_last_write(self, stream: Any) -> None:
        # An event: waiting for all work of the other stream would end the overlap of the two.
        if self._last_write is not None and self._last_write[0] != stream:
            stream.wait_event(self._last_write[1])

    def _has_streams(self) -> bool:
        # Asking for the current stream would initialize CUDA.
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return started and self._device.type == "cuda"
