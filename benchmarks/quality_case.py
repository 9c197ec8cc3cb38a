"""One training of the two-tower model, and what its artifacts serve: a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from dist_sparse import export, load_served
from dlrm.process import quiet
from two_tower.data import load
from two_tower.model import rows_of
from two_tower.quality import measure
from two_tower.train import Settings, train

DTYPES = ("fp32", "int8", "int4")


def main(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each dtype the case, the bytes of the artifact, and its quality on validation and test part."""
    data = load(Path(case["data"]))
    names = ("dim", "width", "l2", "epochs", "batch_size", "seed")
    model = train("", data, Settings(**{name: case[name] for name in names}, rank=0, world=1))
    found = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            exported = export(model, None, Path(folder) / "served", dtype=dtype)
            rows = rows_of(load_served(exported.path), (data.users, data.items))
        row = {**case, "data": Path(case["data"]).name, "dtype": dtype, "bytes": exported.manifest.bytes}
        for part in ("validation", "test"):
            row[part] = asdict(measure(*rows, model.module.bias.detach(), data, data.test(part)))
        found.append(row)
    return found


if __name__ == "__main__":
    quiet()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # gloo aborts now and then when it is destroyed while a DDP module lives
