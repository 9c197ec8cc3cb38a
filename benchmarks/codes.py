"""What codes cost: a training step against the plain one, and decoded rows against FBGEMM's int4
rows.

CPU time of one thread, so that other work on the machine counts little. Kinds take turns, and the
fastest round of each is shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.measure import keep
from dist_sparse import export, load_served
from dist_sparse.extras.codes import quantize
from dist_sparse.serving.books import decode_books

__all__ = ["main"]

Row = dict[str, Any]
Call = Callable[[Any], object]

COLUMNS, GROUPS, IDS = 44, 11, 20_000
"""Columns and groups of the table whose lookups are measured, and ids of a lookup."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, print and keep the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codes", description=__doc__)
    add = parser.add_argument
    add("--tables", type=int, default=8, help="that are trained (default: 8)")
    add("--rows", type=int, default=200_000, help="of a table (default: 200000)")
    add("--dim", type=int, default=64, help="columns of a table (default: 64)")
    add("--codes", type=int, default=16, help="bytes of a row (default: 16)")
    add("--batch-size", type=int, default=4096, help="default: 4096")
    add("--rounds", type=int, default=40, help="default: 40")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="of the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [*_steps(options), *_lookups(options)]
    lines = ["| what | CPU time |", "|---|---|"]
    lines += [f"| {row['what']} | {row['time']:.4g} {row['unit']} |" for row in rows]
    text = "\n".join(lines)
    print(text)
    keep(options.out, "codes", rows, text)
    return 0


def _steps(options: argparse.Namespace) -> list[Row]:
    """Forward and backward of bags of one id, a fused row-wise Adagrad included."""
    plain, coded = _model(options), _model(options)
    handle = quantize(coded, [], codes=options.codes, begin=0, end=0)
    began = time.process_time()
    handle.step()
    fit = time.process_time() - began
    calls = {"a plain step": _step(plain), "a step through codes": _step(coded)}
    found = _fastest(calls, [_batch(options, seed) for seed in range(options.rounds)])
    shape = f"{options.tables} x {options.rows:,} x {options.dim}, {options.codes} codes"
    rows = [_row(f"{name}, {shape}", 1e3 * found[name], "ms") for name in calls]
    plain_step, coded_step = found.values()
    rows.append(_row("the second over the first", coded_step / plain_step, ""))
    return [*rows, _row("the first fit and assignment", fit, "s")]


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=f"t{at}",
            embedding_dim=options.dim,
            num_embeddings=options.rows,
            feature_names=[f"f{at}"],
        )
        for at in range(options.tables)
    ]
    collection = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return DistributedModelParallel(collection, device=torch.device("cpu"))


def _batch(options: argparse.Namespace, seed: int) -> KeyedJaggedTensor:
    made = torch.Generator().manual_seed(seed)
    size = options.tables * options.batch_size
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f{at}" for at in range(options.tables)],
        torch.randint(options.rows, (size,), generator=made),
        torch.ones(size, dtype=torch.int32),
    )


def _step(model: nn.Module) -> Call:
    return lambda batch: model(batch).wait().values().square().sum().backward()


def _lookups(options: argparse.Namespace) -> list[Row]:
    """Bags of one id of a table of 44 columns, and the decoder alone."""
    model = nn.EmbeddingBag(options.rows, COLUMNS, include_last_offset=True)
    handle = quantize(model, [], codes=GROUPS, begin=0)
    handle.step()
    [coded], [books] = handle.coded().values(), handle.books.values()
    codes = coded.shards[0].tensor
    with tempfile.TemporaryDirectory() as folder:
        export(model, handle, Path(folder) / "codes", dtype="codes")
        handle.detach()
        export(model, None, Path(folder) / "int4", dtype="int4")
        served, rows = (load_served(Path(folder) / name) for name in ("codes", "int4"))
    offsets = torch.arange(IDS + 1)
    calls: dict[str, Call] = {
        "decoder": lambda ids: decode_books(codes.index_select(0, ids), books, COLUMNS),
        "artifact of codes": lambda ids: served(ids, offsets),
        "artifact of int4 rows, by FBGEMM": lambda ids: rows(ids, offsets),
    }
    made = torch.Generator().manual_seed(0)
    ids = [torch.randint(options.rows, (IDS,), generator=made) for _ in range(options.rounds)]
    found = _fastest(calls, ids)
    shape = f"{options.rows:,} x {COLUMNS}, {GROUPS} codes"
    return [_row(f"{name}, {shape}", 1e9 * found[name] / IDS, "ns an id") for name in calls]


def _fastest(calls: Mapping[str, Call], given: Sequence[Any]) -> dict[str, float]:
    """Return the CPU seconds of the fastest call of each kind."""
    found = dict.fromkeys(calls, float("inf"))
    for each in given:
        for name, call in calls.items():
            began = time.process_time()
            call(each)
            found[name] = min(found[name], time.process_time() - began)
    return found


def _row(what: str, value: float, unit: str) -> Row:
    return {"what": what, "time": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
