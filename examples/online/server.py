"""Answer requests from a folder of artifacts, and apply each delta that is published there.

python examples/online/server.py PUBLISHED

prints its address, and answers POST requests there: JSON with "ids" and "lengths", as a
KeyedJaggedTensor of the model's features has them, gives {"day": ..., "logits": [...]}. It imports
neither TorchRec nor the training code, except for the formula.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from dist_sparse import load_served
from online.formula import DELTA, scores

_POLL = 0.05  # seconds between two checks of the folder


class Model:
    """The served tables, and their day.

    A lookup sees the whole delta or none of it, but an answer names the day too. So a delta waits
    for answers that have begun.
    """

    def __init__(self, base: Path) -> None:
        self._tables = load_served(base)
        self._lock = threading.Lock()
        self.day = 0

    def apply_delta(self, delta: Path) -> None:
        """Apply the next day's delta."""
        with self._lock:
            self._tables.apply_delta(delta)
            self.day += 1

    def answer(self, ids: list[int], lengths: list[int]) -> dict[str, Any]:
        """Return the day and the logits."""
        examples = len(lengths) // 3  # of users, of movies, then of crosses
        with self._lock, torch.no_grad():
            day = self.day
            found = self._tables(torch.tensor(ids), torch.tensor(lengths))
        embedded = found.view(examples, 3, -1)
        return {"day": day, "logits": scores(embedded).tolist()}


def follow(model: Model, folder: Path) -> None:
    """Apply each delta as soon as it appears: a folder gets its name when it is complete."""
    while True:
        delta = folder / DELTA.format(model.day + 1)
        if delta.is_dir():
            model.apply_delta(delta)
        else:
            time.sleep(_POLL)


def main() -> None:
    """Serve until the process is killed, or its standard input is closed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where a base and its deltas are published")
    folder = parser.parse_args().folder
    model = Model(folder / DELTA.format(0))

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(model.answer(request["ids"], request["lengths"])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    threading.Thread(target=follow, args=(model, folder), daemon=True).start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()  # ends with the process that started this one
    assert "torchrec" not in sys.modules


if __name__ == "__main__":
    main()
