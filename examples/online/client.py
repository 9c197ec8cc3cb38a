"""Rank 0's side of the server: its process, and a thread that sends requests continuously."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from dlrm.batches import Dataset

__all__ = ["Client"]

_PATIENCE = 60  # seconds until a published day must be served


class Client:
    """Start the server of a folder, and send it requests until :meth:`close`.

    Args:
        folder: has the published artifacts.
        data: examples of the requests.

    Attributes:
        answers: number of answered requests.
        slowest: seconds of the slowest answer.
    """

    def __init__(self, folder: Path, data: Dataset) -> None:
        self._data = data
        script = Path(__file__).parent / "server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._address = self._server.stdout.readline().strip()
        if not self._address:
            raise RuntimeError("The server did not start: its message is above.")
        self.answers, self.slowest = 0, 0.0
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_requests, daemon=True)
        self._thread.start()

    def logits(self, index: Tensor, day: int) -> Tensor:
        """Return the logits of the examples ``index``, once the server serves ``day``.

        Raises:
            TimeoutError: it still serves an earlier day.
        """
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            answer = self._request(index)
            if answer["day"] == day:
                return torch.tensor(answer["logits"])
            time.sleep(0.02)
        raise TimeoutError(f"The server is at day {answer['day']}, not at {day}.")

    def close(self) -> None:
        """End the thread and the server.

        Raises:
            RuntimeError: a request failed.
        """
        self._closed.set()
        self._thread.join()
        self._server.communicate(timeout=_PATIENCE)
        if self._failure is not None:
            raise RuntimeError("A request failed.") from self._failure

    def _request(self, index: Tensor) -> dict[str, Any]:
        features = self._data.batch(index).sparse_features
        ids = {"ids": features.values().tolist(), "lengths": features.lengths().tolist()}
        request = Request(self._address, json.dumps(ids).encode())
        with urlopen(request, timeout=_PATIENCE) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _send_requests(self) -> None:
        """Request 32 examples, about 50 times a second."""
        generator = torch.Generator().manual_seed(0)
        try:
            while not self._closed.wait(0.02):
                started = time.monotonic()
                self._request(torch.randint(len(self._data.labels), (32,), generator=generator))
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.answers += 1
        except Exception as error:  # raised by close(), in the thread of the job
            self._failure = error
