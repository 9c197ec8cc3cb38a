"""Memory that compact() gives back: the resident memory of a fresh process, and the bytes that are
still reachable."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from tests.warm import run_script

ROWS, DIM, MIB = 400_000, 64, 1 << 20  # 98 MiB, and as much of element-wise optimizer state

CODE = """
import ctypes, gc, json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from dist_sparse import DataNormSparsifier, MaskEnforcer, compact

kind, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of small blocks for later is no table
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:")) << 10

def made(rows):
    if kind == "plain":
        model = nn.ModuleDict({"t": nn.EmbeddingBag(rows, dim, mode="sum")})
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        return model, lambda: model["t"](torch.arange(8).view(2, 4)).sum().backward(), [optimizer]
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    net = EmbeddingBagCollection([config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, net.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(nn.ModuleDict({"c": net}))
    ids = KeyedJaggedTensor(["f"], torch.arange(8), lengths=torch.tensor([4, 4]))
    return model, lambda: model.module["c"](ids).values().sum().backward(), [model.fused_optimizer]

def run(rows):
    model, train, optimizers = made(rows)
    train()
    sparsifier = DataNormSparsifier(sparsity_level=0.8, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(model)
    sparsifier.step()
    MaskEnforcer(sparsifier).attach(*optimizers)
    model.zero_grad()
    # For clipping or L2. FBGEMM's batch of tables is the base of TorchRec's parameters, and ends with the last of them.
    listed = list(model.parameters()) if kind == "plain" else []
    before = resident()
    result = compact(model, sparsifier)
    # What a script still holds.
    return before - resident(), result, (model, sparsifier, optimizers, listed)

if kind != "plain":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
warm = run(1000)
freed, result, held = run(rows)
print(json.dumps(freed))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs Linux, to read /proc, and glibc's malloc_trim"
)
@pytest.mark.parametrize("kind", ["plain", "torchrec"])
def test_resident_memory_falls_by_what_was_removed(kind: str, tmp_path: Path) -> None:
    """Within 5%, bitmap included, while the old model, plain parameters, the sparsifier and the
    optimizers are held."""
    script = tmp_path / "script.py"
    script.write_text(CODE)
    done = run_script(script, [kind, ROWS, DIM], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    removed = ROWS * 4 // 5 * DIM * 4 * 2
    assert abs(json.loads(done.stdout.splitlines()[-1]) - removed) < 0.05 * removed + 2 * MIB
