"""Golden values: the fingerprint of every cell and what its mask updates send. A refactoring may
not change them.

``python -m tests.dist.test_golden`` writes ``golden.json`` again, for a change of masks or messages
that is meant.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import build, cells, every_cell, set_weights, weights
from tests.dist.harness import Ranks
from tests.dist.plugin import on_ranks

GOLDEN = Path(__file__).with_name("golden.json")
CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {"sparse_block_shape": (1, ROW), "norm": "L2", "sparsity_level": 0.5},
    "1x4": {"sparse_block_shape": (1, 4), "norm": "L1", "sparsity_level": 0.8},
    "3x5": {"sparse_block_shape": (3, 5), "norm": "L2", "sparsity_level": 0.37},
    "2 of 4": {
        "sparse_block_shape": (1, 4),
        "zeros_per_block": 2,
        "norm": "L1",
        "sparsity_level": 1.0,
    },
}


def measure(world: int, name: str) -> dict[str, list[Any]]:
    """Config -> ``[fingerprint, collectives, bytes of each rank]`` of two mask updates of a cell.
    Collective."""
    model = build(cells(world)[name])
    found: dict[str, list[Any]] = {}
    for label, config in CONFIGS.items():
        set_weights(model, weights(cells(world)[name]))
        sparsifier = DataNormSparsifier(**config)
        sparsifier.add_model(model)
        reset_traffic()
        try:
            sparsifier.step()
            sparsifier.step()
        except ValueError:  # zeros_per_block below the block, and a column border that cuts blocks
            found[label] = ["refused"]
            continue
        sent = traffic()
        prints = json.dumps(sparsifier.fingerprint(), sort_keys=True).encode()
        mine = [hashlib.sha256(prints).hexdigest()[:16], sent.collectives]
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (mine, sent.bytes))
        assert [theirs for theirs, _ in everyone] == [mine] * world
        found[label] = [*mine, [size for _, size in everyone]]
    return found


@on_ranks()
@pytest.mark.parametrize(("world", "name"), every_cell())
def test_fingerprints_and_traffic_are_golden(world: int, name: str) -> None:
    assert measure(world, name) == json.loads(GOLDEN.read_text())[str(world)][name]


def test_every_cell_has_golden_values() -> None:
    assert {world: sorted(found) for world, found in json.loads(GOLDEN.read_text()).items()} == {
        str(world): sorted(cells(world)) for world in (1, 2, 4)
    }


if __name__ == "__main__":
    lines = []
    for world in (1, 2, 4):
        ranks = Ranks(world)
        rows = [
            f'  "{name}": {json.dumps(ranks.call(measure, world, name)[0])}'
            for name in cells(world)
        ]
        ranks.close()
        lines.append(f'"{world}": {{\n' + ",\n".join(rows) + "\n}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
