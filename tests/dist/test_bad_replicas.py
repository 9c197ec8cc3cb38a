"""Replicas that have drifted are refused on every rank. One rank is bad, each in turn. (C6, C7)

Each case starts from a good sparsifier, spoils something on the bad rank, and names the words of the error; refusals.py
checks the rest.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import DataNormSparsifier, ScoreSparsifier
from tests.dist.cells import build, cells
from tests.dist.cells import gathered as gathered_model
from tests.dist.pieces import by_rows, gathered, local_tensors, sharded, snapshot, write
from tests.dist.plugin import on_ranks
from tests.dist.refusals import COLS, ROWS, Scene, is_bad, on_each_bad_rank, raised_by, replica, weights
from tests.oracle import oracle_mask


@on_each_bad_rank
def test_drifted(bad: int) -> None:
    """One element of one replica, by the smallest step of a float."""
    scene = Scene(extra={"twin": replica()})
    local = scene.tensors["twin"].to_local()
    if is_bad(bad):
        kept = local[5].nonzero()[0]
        local[5, kept] = torch.nextafter(local[5, kept], torch.tensor(9.0))
    message = scene.refused(r"drifted", r"twin rows \[0, 9\).*on ranks \[1\]", "repair", fix=lambda: None)
    assert "a rows" not in message and "b rows" not in message


@on_each_bad_rank
def test_drifted_in_sign_of_zero(bad: int) -> None:
    scene = Scene(extra={"twin": replica()})
    local = scene.tensors["twin"].to_local()
    gone = (scene.sparsifier.get_mask("twin") == 0).nonzero()[0].tolist()
    if is_bad(bad):
        local[gone[0], gone[1]] = -0.0
    scene.refused("drifted", r"twin .*on ranks \[1\]", fix=lambda: None)


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
    before = {name: (sparsifier.get_data(name).clone(), sparsifier.get_mask(name)) for name in sparsifier.data_groups}
    message = raised_by(sparsifier.step)
    assert re.search(r"drifted.*item rows.*on ranks \[1\]", message) and "user rows" not in message, message
    for name, (weight, mask) in before.items():
        assert torch.equal(sparsifier.get_data(name), weight) and torch.equal(sparsifier.get_mask(name), mask)
    good = [None, None]
    dist.all_gather_object(good, before["item"][0])
    sparsifier.repair = "broadcast"
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
    assert re.search(r"0/bias rows .*on ranks \[1\]", message) and "1/weight rows" in message, message
    assert "0/weight rows" not in message
    good = [None, None]
    dist.all_gather_object(good, net.module[1].weight.detach().clone())
    sparsifier.repair = "broadcast"
    sparsifier.step()
    assert torch.equal(net.module[1].weight, good[0] * sparsifier.get_mask("1/weight"))


@on_each_bad_rank
def test_not_finite_replica(bad: int) -> None:
    """A replica with a NaN on one rank has drifted too; the error is that it is not finite."""
    scene = Scene(extra={"twin": replica()})
    if is_bad(bad):
        scene.tensors["twin"].to_local()[2, 2] = torch.nan
    scene.refused(f"rank {bad}: ValueError: Table 'twin'", "finite", fix=lambda: None)


class Tired(ScoreSparsifier):
    """Score by magnitude; with ``left`` set, so many calls, and then raise."""

    left: int | None = None

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError("no more scores")
        return data.abs()


@on_each_bad_rank
def test_an_error_after_the_repair(bad: int) -> None:
    """Repaired weights are scored again; what fails then, on one rank, is raised on both."""
    sparsifier, twin = Tired(), replica()
    sparsifier.add_data("twin", twin)
    sparsifier.step()
    before = sparsifier.get_mask("twin")
    twin.to_local()[3, 3] += dist.get_rank()
    sparsifier.repair, sparsifier.left = "broadcast", 1 if is_bad(bad) else None
    message = raised_by(sparsifier.step)
    assert f"rank {bad}: OSError: no more scores" in message, message
    assert torch.equal(sparsifier.get_mask("twin"), before)
    sparsifier.left = None
    sparsifier.step()
    assert torch.equal(sparsifier.get_mask("twin"), oracle_mask(gathered(twin), 0.5))


# -- groups of ranks that overlap --------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(("bad", "table"), [(0, "pair"), (1, "pair"), (0, "all"), (3, "all"), (1, "drifted pair")])
def test_all_ranks_of_overlapping_groups_raise(bad: int, table: str) -> None:
    """Table ``pair`` is on ranks 0 and 1, ``all`` on four. An error in either is raised on all four."""
    sparsifier = DataNormSparsifier()
    tensors: dict[str, Any] = {"all": sharded(weights(0), by_rows(ROWS, COLS, 2, 4, 7))}
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        tensors["pair"] = distribute_tensor(weights(1), mesh, [Replicate()], src_data_rank=None)
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    sparsifier.step()
    if is_bad(bad):
        local_tensors(tensors[table.removeprefix("drifted ")])[0][1][0, 1] = 7.0 if "drifted" in table else torch.nan
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert ("drifted" in message) if "drifted" in table else (f"rank {bad}: ValueError: Table '{table}'" in message)
    assert snapshot(sparsifier, tensors) == before
    for name, tensor in tensors.items():
        write(tensor, weights(ord(name[0])))
    if "drifted" in table:  # which two of the four ranks know of, and repair
        sparsifier.repair = "broadcast"
        for _, local in local_tensors(tensors["pair"]) if "pair" in tensors and dist.get_rank() == 1 else ():
            local[0, 1] = 7.0
    sparsifier.step()
    for name in tensors:
        assert torch.equal(sparsifier.full_mask(name), oracle_mask(weights(ord(name[0])), 0.5)), name
    sparsifier.audit()
