"""Replicas that have drifted are refused on every rank. One rank is bad, each in turn. (C6, C7)

Each case starts from a good sparsifier, spoils something on the bad rank, and names the words of
the error; refusals.py checks the rest.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import DataNormSparsifier
from tests.dist.cells import build, cells
from tests.dist.cells import gathered as gathered_model
from tests.dist.pieces import by_rows, local_tensors, sharded, snapshot, write
from tests.dist.plugin import on_ranks
from tests.dist.refusals import (
    COLS,
    ROWS,
    Scene,
    is_bad,
    on_each_bad_rank,
    raised_by,
    replica,
    weights,
)
from tests.oracle import oracle_mask


@on_each_bad_rank
def test_drifted(bad: int) -> None:
    """One element of one replica, by the smallest step of a float."""
    scene = Scene(extra={"twin": replica()})
    local = scene.tensors["twin"].to_local()
    if is_bad(bad):
        kept = local[5].nonzero()[0]
        local[5, kept] = torch.nextafter(local[5, kept], torch.tensor(9.0))
    message = scene.refused(
        r"drifted", r"twin rows \[0, 9\).*on rank 1", "broadcast weights", fix=lambda: None
    )
    assert "a rows" not in message and "b rows" not in message


@on_each_bad_rank
def test_drifted_in_sign_of_zero(bad: int) -> None:
    scene = Scene(extra={"twin": replica()})
    local = scene.tensors["twin"].to_local()
    gone = (scene.sparsifier.get_mask("twin") == 0).nonzero()[0].tolist()
    if is_bad(bad):
        local[gone[0], gone[1]] = -0.0
    scene.refused("drifted", r"twin .*on rank 1", fix=lambda: None)


@on_each_bad_rank
def test_drifted_table(bad: int) -> None:
    """Data-parallel tables of a model."""
    cell = cells(2)["data_parallel"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    sparsifier.step()
    table = sparsifier.get_data("item")
    if is_bad(bad):
        table[7, 3] += 1
    before = {
        name: (sparsifier.get_data(name).clone(), sparsifier.get_mask(name))
        for name in sparsifier.data_groups
    }
    message = raised_by(sparsifier.step)
    assert re.search(r"drifted.*item rows.*on rank 1", message) and "user rows" not in message, (
        message
    )
    for name, (weight, mask) in before.items():
        assert torch.equal(sparsifier.get_data(name), weight) and torch.equal(
            sparsifier.get_mask(name), mask
        )
    good = [None, None]
    dist.all_gather_object(good, before["item"][0])
    table.copy_(good[0])  # as the message says
    sparsifier.step()
    full = gathered_model(model)["item"]
    want = oracle_mask(good[0], 0.5)
    assert torch.equal(sparsifier.get_mask("item"), want)
    assert torch.equal(sparsifier.get_data("item"), good[0] * want)
    assert torch.equal(full, sparsifier.get_data("item"))
    sparsifier.audit()


@on_each_bad_rank
def test_drifted_dense(bad: int) -> None:
    """Parameters that DDP replicates; two of them at once, one of them 1-D."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(net, dense=True)
    sparsifier.step()
    if is_bad(bad):
        net.module[0].bias.data[2] = 3.0
        net.module[1].weight.data[0, 0] = 3.0
    message = raised_by(sparsifier.step)
    assert re.search(r"0/bias rows .*on rank 1", message) and "1/weight rows" in message, message
    assert "0/weight rows" not in message


@on_each_bad_rank
def test_not_finite_replica(bad: int) -> None:
    """A replica with a NaN on one rank has drifted too; the error is that it is not finite."""
    scene = Scene(extra={"twin": replica()})
    if is_bad(bad):
        scene.tensors["twin"].to_local()[2, 2] = torch.nan
    scene.refused(f"rank {bad}: ValueError: Table 'twin'", "finite", fix=lambda: None)


# -- groups of ranks that overlap
# --------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    ("bad", "table"), [(0, "pair"), (1, "pair"), (0, "all"), (3, "all"), (1, "drifted pair")]
)
def test_all_ranks_of_overlapping_groups_raise(bad: int, table: str) -> None:
    """Table ``pair`` is on ranks 0 and 1, ``all`` on four. An error in either is raised on all
    four."""
    sparsifier = DataNormSparsifier()
    tensors: dict[str, Any] = {"all": sharded(weights(0), by_rows(ROWS, COLS, 2, 4, 7))}
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        tensors["pair"] = distribute_tensor(weights(1), mesh, [Replicate()], src_data_rank=None)
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    sparsifier.step()
    if is_bad(bad):
        local_tensors(tensors[table.removeprefix("drifted ")])[0][1][0, 1] = (
            7.0 if "drifted" in table else torch.nan
        )
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert (
        ("drifted" in message)
        if "drifted" in table
        else (f"rank {bad}: ValueError: Table '{table}'" in message)
    )
    assert snapshot(sparsifier, tensors) == before
    for name, tensor in tensors.items():
        write(tensor, weights(ord(name[0])))
    sparsifier.step()
    for name in tensors:
        assert torch.equal(sparsifier.full_mask(name), oracle_mask(weights(ord(name[0])), 0.5)), (
            name
        )
    sparsifier.audit()
