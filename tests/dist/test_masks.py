"""Masks of every table are those of one process, bit for bit, on every sharding and world. (C1, C2)

The reference is :func:`tests.oracle.oracle_mask` on the gathered weights of that very step: plain
loops that share nothing with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import ROW, DataNormSparsifier
from tests.dist.cells import build, cells, every_cell, gathered, set_weights
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask

BLOCKS: tuple[tuple[int, Any], ...] = ((1, 1), (1, 4), (4, 1), (3, 5), (1, ROW), (8, 8))
LEVELS = (0.5, 0.0, 1.0, 0.37, 0.8)


def _ties(w: Tensor) -> Tensor:
    return w.mul(2).round()


def _equal(w: Tensor) -> Tensor:
    return torch.full_like(w, 0.25)


def _many_zeros(w: Tensor) -> Tensor:
    return torch.where(torch.arange(w.shape[0]).unsqueeze(1) % 3 == 0, w, 0.0)


def _negative_zeros(w: Tensor) -> Tensor:
    return torch.where(w > 0, w, -0.0)


def _random(w: Tensor) -> Tensor:
    return w


WEIGHTS: tuple[Callable[[Tensor], Tensor], ...] = (
    _random,
    _equal,
    _ties,
    _negative_zeros,
    _many_zeros,
)


_known: dict[Any, Tensor] = {}


def known_mask(full: Tensor, level: float, block: tuple[int, Any], norm: str) -> Tensor:
    """The oracle's, which is slow: cells with the same weights share it."""
    key = (full.view(torch.uint8).numpy().tobytes(), full.dtype, full.shape, level, block, norm)
    if key not in _known:
        _known[key] = oracle_mask(full, level, block, None, norm).bool()
    return _known[key]


@pytest.mark.whole  # contract C1
@on_ranks()
@pytest.mark.parametrize(("world", "name"), every_cell())
def test_masks_equal_the_single_process_oracle(world: int, name: str) -> None:
    """Every block and norm on one model, with the next weights and level each time; other cells
    begin with others.

    A config is changed in place, as a schedule would. So every block meets every kind of weights
    over the cells of a world, and every cell meets all kinds of weights and levels.
    """
    cell = cells(world)[name]
    model = build(cell)
    original = gathered(model)
    turn = list(cells(world)).index(name)
    for block in BLOCKS:
        for norm in ("L1", "L2"):
            sparsifier = DataNormSparsifier(sparse_block_shape=block, norm=norm)
            names = sparsifier.add_model(model)
            assert names == [table.name for table in cell.tables]
            turn += 1
            pattern = WEIGHTS[turn % len(WEIGHTS)]
            level = LEVELS[(2 * turn + turn // 5) % 5] if pattern is not _ties else 0.5
            before = {table: pattern(full).clone() for table, full in original.items()}
            set_weights(model, before)
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = level
            sparsifier.step()
            after = gathered(model)
            for i, (table, full) in enumerate(before.items()):
                where = (
                    f"{name} on {world} ranks, table {table}, {block=}, {norm=},"
                    f" {pattern.__name__}, {level=}"
                )
                got = sparsifier.full_mask(table).bool()
                # The oracle is slow: every table is checked by one rank.
                if (turn + i) % world == dist.get_rank():
                    want = known_mask(full, level, block, norm)
                    assert torch.equal(got, want), (
                        f"{where}: {int((got != want).sum())} elements differ"
                    )
                effective = torch.where(got, full, torch.zeros((), dtype=full.dtype))
                torch.testing.assert_close(after[table], effective, rtol=0, atol=0, msg=where)
            found = sparsifier.audit()
            # It is slow too: one rank masks the whole tables, as one process.
            if turn % world == dist.get_rank():
                alone = DataNormSparsifier(list(before.items()), level, block, None, norm)
                alone.step()
                assert found == alone.fingerprint(), (
                    f"{name}, {block=}, {norm=}, {pattern.__name__}, {level=}"
                )
