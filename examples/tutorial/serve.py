"""Serve what publish.py writes: predictions, health and metrics, with workers that
share memory.

python examples/tutorial/serve.py runs/tutorial/published --port 8000

    POST /predict   {"dense": [[0.1, 0.2, 0.3]],
                     "ids": {"user_id": [[7]], "genres": [[1, 4]], ...}}
                    gives {"version": 0, "logits": [0.5]}
    GET /health     200 once the worker is warm
    GET /metrics    counters of all workers, as Prometheus reads them

A new version is applied while requests are answered. Needs torch, safetensors
and dist_sparse, and no TorchRec.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import multiprocessing
import multiprocessing.connection
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from dist_sparse import load_served
from tutorial.layers import Layers

_POLL = 0.1  # seconds between two checks for a new version
_RETRY = 2.0  # the same, after one was refused
_WARM_UP = 64  # examples
_ENDINGS = (signal.SIGTERM, signal.SIGINT)
_COUNTERS = ("lookups_total", "removed_lookups_total", "unknown_lookups_total")


class Model:
    """The tables, the layers above them, and the version of both.

    A lookup sees the whole delta or none of it. But an answer needs tables and layers of one
    version, so both change while no answer is computed.
    """

    def __init__(self, folder: Path) -> None:
        tables = sorted(folder.glob("*/tables"))
        if not tables:
            raise SystemExit(
                f"{folder} holds no version: run publish.py, and pass FOLDER/published."
            )
        self._folder, self._lock = folder, threading.Lock()
        # Not all at once: if a delta is damaged, the versions before it are served.
        self.tables = load_served(tables[0], count=True)
        self.version = 0
        self._layers = Layers(tables[0].with_name("layers.safetensors"))

    def warm_up(self) -> None:
        """Run everything once, without ids: nothing is counted."""
        nothing = {name: [[]] * _WARM_UP for name in self.tables.features}
        self.answer(*self.read([[0.0] * self._layers.dense_features] * _WARM_UP, nothing))

    def read(self, dense: Any, ids: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of a request: dense features, ids and lengths of their bags.

        Raises:
            ValueError: the request does not fit the model.
        """
        given = torch.tensor(dense, dtype=torch.float32)
        if given.dim() != 2 or given.shape[1] != self._layers.dense_features:
            raise ValueError(f"dense: must be lists of {self._layers.dense_features} numbers")
        for name in self.tables.features:
            if len(ids.get(name, ())) != len(given):
                raise ValueError(f"ids of {name}: must be {len(given)} lists, one per example")
        bags = [bag for name in self.tables.features for bag in ids[name]]
        values = torch.tensor([each for bag in bags for each in bag])
        # As int64, 1.7 would be the id 1. A tensor of nothing is floating.
        if len(values) and values.dtype != torch.int64:
            raise ValueError("ids: must be integers")
        return given, values.long(), torch.tensor([len(bag) for bag in bags])

    @torch.no_grad()
    def answer(self, dense: Tensor, values: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Return the version and the logits."""
        with self._lock:
            embedded = self.tables(values, lengths)
            logits = self._layers(dense, embedded.view(len(dense), len(self.tables.features), -1))
            return {"version": self.version, "logits": logits.tolist()}

    def update(self) -> bool:
        """Apply the next version, if it is there.

        Raises:
            ValueError: it is damaged or out of order; nothing has changed.
        """
        # export() gives tables their name when they are complete, and layers are there before.
        new = self._folder / f"{self.version + 1:03d}"
        if not (new / "tables").is_dir():
            return False
        layers = Layers(new / "layers.safetensors")
        with self._lock:
            self.tables.apply_delta(new / "tables")
            self._layers, self.version = layers, self.version + 1
        return True


class Counters:
    """Counters of all workers, in memory that they share: each worker answers for all of them."""

    def __init__(self, workers: int, tables: Sequence[str]) -> None:
        self._names = [f'{name}{{table="{table}"}}' for name in _COUNTERS for table in tables]
        columns = 3 + len(self._names)
        shared = mmap.mmap(-1, workers * columns * torch.int64.itemsize)
        self._numbers = torch.frombuffer(shared, dtype=torch.int64).view(workers, columns)

    def note(self, worker: int, model: Model) -> None:
        """Note the version and the counts of this worker."""
        metrics = model.tables.metrics()
        counts = [count for name in _COUNTERS for count in metrics[name].values()]
        self._numbers[worker, 2:] = torch.tensor([model.version, *counts])

    def note_refused(self, worker: int, is_refused: bool) -> None:
        """Note whether this worker has refused the next version."""
        self._numbers[worker, 1] = is_refused

    def note_memory(self, worker: int) -> None:
        """Note the memory of this worker. It takes long where tables are large, so not often."""
        self._numbers[worker, 0] = own_bytes()

    def text(self) -> str:
        """Return the sums over all workers, and what each of them has."""
        sums = self._numbers.sum(0).tolist()[3:]
        lines = [f"{name} {number}" for name, number in zip(self._names, sums, strict=True)]
        for worker, (own, refused, version, *_) in enumerate(self._numbers.tolist()):
            lines += [f'version{{worker="{worker}"}} {version}']
            lines += [f'refused{{worker="{worker}"}} {refused}']
            lines += [f'own_memory_bytes{{worker="{worker}"}} {own}']
        return "".join(f"dist_sparse_{line}\n" for line in lines)


def own_bytes() -> int:
    """Return the memory that this process shares with no other."""
    found = re.findall(
        r"^Private_\w+: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M
    )
    return 1024 * sum(map(int, found))


class Server(ThreadingHTTPServer):
    """A worker's socket. All workers listen on one port, and the kernel spreads connections."""

    allow_reuse_port = True


class Requests(BaseHTTPRequestHandler):
    """Answers of a worker."""

    def __init__(self, worker: int, model: Model, counters: Counters, *given: Any) -> None:
        self._worker, self._model, self._counters = worker, model, counters
        super().__init__(*given)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(
                200, {"status": "ok", "worker": self._worker, "version": self._model.version}
            )
        elif self.path == "/metrics":
            self._counters.note(self._worker, self._model)
            self._send(200, self._counters.text())
        else:
            self._send(404, {"error": f"no such page: {self.path}"})

    def do_POST(self) -> None:
        if self.path != "/predict":
            self._send(404, {"error": f"no such page: {self.path}"})
            return
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tensors = self._model.read(request["dense"], request["ids"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            self._send(400, {"error": f"{type(error).__name__}: {error}"})
            return
        answer = self._model.answer(*tensors)
        # Before the client has the answer: the metrics that it reads next have counted it.
        self._counters.note(self._worker, self._model)
        self._send(200, answer)

    def _send(self, status: int, answer: Any) -> None:
        body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/plain" if isinstance(answer, str) else "application/json"
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def work(worker: int, model: Model, counters: Counters, address: tuple[str, int]) -> None:
    """Answer requests, until this process or its parent is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    model.warm_up()
    counters.note_memory(worker)
    # From here on, connections reach this worker: it is warm.
    server = Server(address, partial(Requests, worker, model, counters))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _say(f"worker {worker}: version {model.version}, {own_bytes() >> 20} MiB of its own memory")
    refused = ""
    while parent.is_alive():  # a parent that is killed can't end its workers
        began = time.monotonic()
        is_new, reason = tried(model)
        if is_new:
            ms = 1000 * (time.monotonic() - began)
            counters.note_memory(worker)
            _say(f"worker {worker}: version {model.version}, applied in {ms:.0f} ms")
        if reason and reason != refused:
            _say(f"worker {worker}: stays at version {model.version}: {reason}")
        refused = reason
        counters.note(worker, model)
        counters.note_refused(worker, bool(refused))
        time.sleep(_RETRY if refused else _POLL)


def tried(model: Model) -> tuple[bool, str]:
    """Apply the next version, if it is there. Return whether there was one, and why it is refused:
    then the last one is served until a good one is in its place."""
    try:
        return model.update(), ""
    except (OSError, ValueError) as error:
        return False, str(error)


def refuse_taken(host: str, port: int) -> None:
    """Refuse a port on which something listens. The workers share theirs, so they would share it
    with another server like this one too.

    Raises:
        SystemExit: it is taken, or the address is wrong.
    """
    with socket.socket() as probe:
        # Connections that have ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise SystemExit(
                f"Can't listen on {host}:{port}: {error}. Pass another --port."
            ) from None


def end(*_: object) -> None:
    """End this process and its workers, whatever signals follow."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(0)


def _say(text: str) -> None:
    # In one piece, also where Python does not buffer: several workers write.
    print(f"{text}\n", end="", flush=True)


def main() -> None:
    """Serve until the process is ended. If a worker ends, all do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="FOLDER/published of publish.py")
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error("--workers: must be at least 1")

    refuse_taken(options.host, options.port)
    # One thread in each process: a fork copies no thread, and OpenMP would wait for its own.
    torch.set_num_threads(1)
    try:
        model = Model(options.folder)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    while tried(model)[0]:
        pass  # the deltas that are there already; a worker says which is refused
    counters = Counters(options.workers, list(model.tables.metrics()["lookups_total"]))
    _say(str(model.tables))
    for ending in _ENDINGS:
        signal.signal(ending, end)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((options.host, options.port))
        address = cast("tuple[str, int]", reserved.getsockname())
        _say(f"http://{address[0]}:{address[1]}")
        # The tables are loaded and verified once. Forked workers read the same pages, until
        # a delta writes to them.
        gc.freeze()
        fork = multiprocessing.get_context("fork")
        workers = [
            fork.Process(target=work, args=(worker, model, counters, address), daemon=True)
            for worker in range(options.workers)
        ]
        for process in workers:
            process.start()
        multiprocessing.connection.wait([process.sentinel for process in workers])
    raise SystemExit("A worker has ended.")


if __name__ == "__main__":
    main()
