"""Cases that were wrong once: irregular tilings, drift, states and arguments of one rank of
three."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import ROW, DataNormSparsifier, describe
from dist_sparse.tables.modules import TensorSource
from tests.dist.harness import run_ranks
from tests.dist.pieces import Piece, sharded
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask
from tests.states import table


def guillotine(draw: random.Random, piece: Piece, depth: int) -> list[Piece]:
    """Cuts a rectangle into smaller ones that need not line up with each other."""
    row, col, rows, cols = piece
    if depth == 0 or draw.random() < 0.15:
        return [piece]
    if draw.random() < 0.6 and rows > 1:
        at = draw.randint(1, rows - 1)
        halves: list[Piece] = [(row, col, at, cols), (row + at, col, rows - at, cols)]
    elif cols > 4:
        at = 4 * draw.randint(1, (cols - 1) // 4)  # zeros_per_block wants block borders here
        halves = [(row, col, rows, at), (row, col + at, rows, cols - at)]
    else:
        return [piece]
    return [part for half in halves for part in guillotine(draw, half, depth - 1)]


@pytest.mark.slow
@on_ranks(3)
def test_irregular_tilings() -> None:
    draw = random.Random(7)
    for turn in range(60):
        rows, cols = draw.randint(5, 22), draw.choice([8, 12, 16])
        tiling: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
        for piece in guillotine(draw, (0, 0, rows, cols), 3):
            tiling[draw.randrange(len(tiling))].append(piece)
        block, zeros = draw.choice([(4, 4), (3, 2), (5, 4)]), draw.choice([None, 1, 3, 5])
        level, norm = draw.choice([0.3, 0.6, 1.0]), draw.choice(["L1", "L2"])
        full = torch.randn(rows, cols, generator=torch.Generator().manual_seed(turn))
        sparsifier = DataNormSparsifier(None, level, block, zeros, norm)
        sparsifier.add_data("items", sharded(full, tiling))  # a name that plain data can't have
        sparsifier.step()
        want = oracle_mask(full, level, block, zeros, norm).bool()
        assert torch.equal(sparsifier.full_mask("items").bool(), want), (
            f"{turn=} {tiling=} {block=} {zeros=} {level=}"
        )
        sparsifier.audit()


@on_ranks(3)
def test_a_cut_row_that_lies_whole_elsewhere() -> None:
    full = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    for cut in (5, 1):
        tiling = [[(0, 0, 10, 4)], [(0, 4, cut, 4), (cut, 4, 10 - cut, 4)], []]
        sparsifier = DataNormSparsifier(None, 1.0, (4, 4), 5)
        sparsifier.add_data("t", sharded(full, tiling))
        sparsifier.step()
        assert torch.equal(
            sparsifier.full_mask("t").bool(), oracle_mask(full, 1.0, (4, 4), 5, "L1").bool()
        )


def drift(change: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(9, 4)))
    sparsifier = DataNormSparsifier(None, 0.5, (1, ROW))
    sparsifier.add_model(model)
    sparsifier.step()
    change(model.module[0].weight.data)
    with pytest.raises(ValueError, match=r"drifted.*on ranks? 1"):
        sparsifier.step()


@on_ranks(3)
def test_a_flipped_sign() -> None:
    for column in range(4):

        def flip(weight: Tensor, column: int = column) -> None:
            kept = int(weight.abs().sum(1).nonzero()[0])
            if dist.get_rank() == 1:
                weight[kept, column] *= -1

        drift(flip)


@on_ranks(3)
def test_changes_that_cancel() -> None:
    def nudge(weight: Tensor) -> None:
        words = weight.view(torch.int32)
        kept = int(weight.abs().sum(1).nonzero()[0])
        words[kept, 0] += {1: 1, 2: -1}.get(dist.get_rank(), 0)

    drift(nudge)


def describing() -> None:
    """Rank 0 alone, in processes that have no process groups yet: one made now would wait for the
    others."""
    sparsifier = DataNormSparsifier()
    sparsifier.add_data("t", sharded(torch.randn(6, 4), [[(2 * r, 0, 2, 4)] for r in range(3)]))
    if dist.get_rank() == 0:
        with mock.patch.object(
            dist, "new_group", side_effect=AssertionError("describe() makes a process group")
        ):
            assert "over 3 ranks" in describe(sparsifier)


@pytest.mark.dist
def test_one_rank_describes() -> None:
    run_ranks(3, describing)


@on_ranks(3)
def test_a_state_without_a_config() -> None:
    sparsifier = DataNormSparsifier(None, 0.5, (1, ROW))
    sparsifier.add_data("t", sharded(torch.randn(6, 4), [[(2 * r, 0, 2, 4)] for r in range(3)]))
    saved = sparsifier.state_dict()
    short, other = copy.deepcopy(saved), copy.deepcopy(saved)
    if dist.get_rank() == 2:
        with table(short, "t") as entry:
            del entry["config"]
    with pytest.raises(ValueError, match=r"rank 2.*'t'.*no config"):
        sparsifier.load_state_dict(short)
    with table(other, "t") as entry:
        entry["config"]["sparsity_level"] = 0.1 * dist.get_rank()
    with pytest.raises(ValueError, match=r"the state of table 't'"):
        sparsifier.load_state_dict(other)
    sparsifier.step()
    sparsifier.load_state_dict(saved)


@on_ranks(3)
def test_what_sharded_data_refuses() -> None:
    tensor = sharded(torch.randn(6, 4), [[(2 * r, 0, 2, 4)] for r in range(3)])
    sparsifier = DataNormSparsifier()
    with pytest.raises(ValueError, match="'mask'"):
        sparsifier.add_data("t", tensor, mask=torch.zeros(2, 4))
    sparsifier.add_data("t", tensor)
    with pytest.raises(ValueError, match="registered already, as 't'"):
        sparsifier.add_data("again", tensor)
    assert list(sparsifier.data_groups) == ["t"]


@on_ranks(3)
def test_empty_rectangles_are_no_replicas() -> None:
    sparsifier = DataNormSparsifier(None, 0.5, (1, 4))
    tensor = sharded(torch.randn(2, 4), [[(0, 0, 2, 4)], [(2, 0, 0, 4)], [(2, 0, 0, 4)]])
    sparsifier.add_data("t", tensor)
    assert not TensorSource("t", tensor).locate()[0].replicated
    sparsifier.step()
