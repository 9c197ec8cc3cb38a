"""One training of the two-tower model by the package, and what its artifact serves."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.quality_methods import BY_COLUMN, read
from dist_sparse import export, load_served
from dlrm.process import quiet
from two_tower.model import rows_of
from two_tower.quality import measure
from two_tower.train import Settings, train

__all__ = ["run"]

_FORMS: dict[str, Any] = {BY_COLUMN: {"dtype": "int4", "scale": "column"}}
"""Arguments of export() that are more than a dtype."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """As ``quality_methods.run``, of full, small dense and narrowed tables, in all dtypes; the bytes
    are those of the artifact."""
    if not dist.is_initialized():
        quiet()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data, tests = read(case["file"], case["split_seed"])
    names = ("dim", "lr", "l2", "cut", "epochs", "batch_size", "seed")
    settings = Settings(
        **{name: case[name] for name in names},
        width=case["kept"],
        codes=case.get("codes"),
        rank=0,
        world=1,
    )
    model, coded = train("", data, settings)
    form = _FORMS.get(case["dtype"], {"dtype": case["dtype"]})
    with tempfile.TemporaryDirectory() as folder:
        exported = export(model, coded, Path(folder) / "served", **form)
        served = rows_of(load_served(exported.path), (data.users, data.items))
    bias = model.module.bias.detach()
    del model
    gc.collect()  # DDP and its hooks are cycles
    found = {part: asdict(measure(*served, bias, data, test)) for part, test in tests.items()}
    return {"bytes": exported.manifest.bytes / (data.users + data.items), **found}
