"""Ask the server for predictions of MovieLens's last ratings, which are later than
the training.

python examples/tutorial/ask.py http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from dist_sparse.text import table_lines
from dlrm.batches import Dataset
from dlrm.movielens import fetch, load
from dlrm.predictions import Predictions
from tutorial.job import BATCH_SIZE, TESTED


def main() -> None:
    """Print the quality of the answers, their time and their versions, and the server's metrics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="as serve.py prints it")
    address = parser.parse_args().address.rstrip("/")
    if "://" not in address:
        address = f"http://{address}"
    refuse_silent(address)
    data = load(fetch())
    index = data.test[-TESTED:]
    logits: list[float] = []
    seconds, versions = [], Counter[int]()
    for part in index.split(BATCH_SIZE):
        began = time.monotonic()
        answer = predict(address, request_of(data, part))
        seconds.append(time.monotonic() - began)
        logits += answer["logits"]
        versions[answer["version"]] += 1
    found = Predictions(torch.tensor(logits), data.labels[index])
    asked = ", ".join(f"{count} by version {version}" for version, count in versions.items())
    print(f"{len(seconds)} requests of {BATCH_SIZE} examples: {asked}")
    print(f"AUC {found.auc:.4f}")
    middle, slowest = sorted(seconds)[len(seconds) // 2], max(seconds)
    print(f"median {1000 * middle:.1f} ms, slowest {1000 * slowest:.1f} ms")
    print("\n".join(metrics_lines(address)))


def refuse_silent(address: str) -> None:
    """Refuse an address where no server answers.

    Raises:
        SystemExit: none answers there.
    """
    try:
        urlopen(f"{address}/health").close()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{address} does not answer: {error}. Start serve.py first.") from None


def predict(address: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the server's answer."""
    with urlopen(f"{address}/predict", json.dumps(request).encode()) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def request_of(data: Dataset, index: Tensor) -> dict[str, Any]:
    """Return the request for some examples."""
    ids = {}
    for feature in data.sparse:
        values, lengths = feature.take(index)
        ids[feature.name] = [bag.tolist() for bag in values.split(lengths.tolist())]
    return {"dense": data.dense[index].tolist(), "ids": ids}


def metrics_lines(address: str) -> list[str]:
    """Return the server's counters since its start as a table."""
    with urlopen(f"{address}/metrics") as response:
        text = response.read().decode()
    counts: dict[str, dict[str, int]] = {}
    for name, table, number in re.findall(r'dist_sparse_(\w+)_total{table="(.+)"} (\d+)', text):
        counts.setdefault(table, {})[name] = int(number)
    lines = []
    for table, of in counts.items():
        share = of["removed_lookups"] / max(1, of["lookups"])
        lines.append((table, f"{of['lookups']:,}", f"{share:.1%}", f"{of['unknown_lookups']:,}"))
    head = ("table", "lookups", "of removed rows", "unknown ids")
    return table_lines(head, lines, right=range(1, 4))


if __name__ == "__main__":
    main()
