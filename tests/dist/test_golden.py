"""Golden values: the fingerprint of every cell and what its mask updates send. A refactoring may not change them.

``python -m tests.dist.test_golden`` writes ``golden.json`` again, for a change of masks or messages that is meant.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import LOCAL, build, cells, set_weights, weights
from tests.dist.harness import run_ranks

GOLDEN = Path(__file__).with_name("golden.json")
CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {"sparse_block_shape": (1, ROW), "norm": "L2", "sparsity_level": 0.5},
    "1x4": {"sparse_block_shape": (1, 4), "norm": "L1", "sparsity_level": 0.8},
    "3x5": {"sparse_block_shape": (3, 5), "norm": "L2", "sparsity_level": 0.37},
    "2 of 4": {"sparse_block_shape": (1, 4), "zeros_per_block": 2, "norm": "L1", "sparsity_level": 1.0},
}


def measure(world: int) -> dict[str, dict[str, list[Any]]]:
    """Cell -> config -> ``[fingerprint, collectives, bytes]`` of two mask updates, on this rank."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, cell in cells(world).items():
        model = build(cell)
        found[name] = {}
        for label, config in CONFIGS.items():
            set_weights(model, weights(cell))
            sparsifier = DataNormSparsifier(**config)
            sparsifier.add_model(model)
            reset_traffic()
            try:
                sparsifier.step()
                sparsifier.step()
            except ValueError:  # zeros_per_block below the block, and a column border that cuts blocks
                found[name][label] = ["refused"]
                continue
            sent = traffic()
            prints = json.dumps(sparsifier.fingerprint(), sort_keys=True).encode()
            found[name][label] = [hashlib.sha256(prints).hexdigest()[:16], sent.collectives, sent.bytes]
    return found


def by_rank(world: int) -> dict[str, dict[str, list[Any]]]:
    """As :func:`measure`, with the bytes of all ranks."""
    ranks = run_ranks(world, measure, world, local_world_size=LOCAL[world])
    return {
        cell: {
            label: [*values[:2], *([[rank[cell][label][2] for rank in ranks]] if len(values) > 1 else [])]
            for label, values in configs.items()
        }
        for cell, configs in ranks[0].items()
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fingerprints_and_traffic_are_golden(world: int) -> None:
    assert by_rank(world) == json.loads(GOLDEN.read_text())[str(world)]


if __name__ == "__main__":
    lines = []
    for world in (1, 2, 4):
        rows = [f'  "{cell}": {json.dumps(configs)}' for cell, configs in by_rank(world).items()]
        lines.append(f'"{world}": {{\n' + ",\n".join(rows) + "\n}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
