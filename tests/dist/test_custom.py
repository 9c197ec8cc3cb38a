"""Custom sparsifiers work on sharded tables as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier
from dist_sparse.extend import ScoreSparsifier
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect
from tests.dist.cells import build, cells, gathered, set_weights, weights
from tests.dist.kinds import names_of, some_cells
from tests.dist.pieces import by_rows, sharded, watched, write
from tests.dist.pieces import gathered as whole
from tests.dist.plugin import on_ranks


def plain_model(full: dict[str, Tensor]) -> nn.ModuleDict:
    """The same tables in this process alone, under the same names."""
    return nn.ModuleDict(
        {name: nn.Embedding.from_pretrained(weight.clone()) for name, weight in full.items()}
    )


class BelowMedianOfRow(BaseDataSparsifier):
    """A user's own ``update_mask``: edits in place, adds to what was removed before, and notes its
    calls."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__(**defaults)
        self.calls: list[tuple[str, tuple[int, ...], int, dict[str, Any]]] = []

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        mask = self.get_mask(name)
        assert mask.shape == data.shape and mask.dtype == torch.int8
        assert self.get_mask(name) is mask
        self.calls.append((name, tuple(data.shape), data.data_ptr(), config))
        mask[data < config["below"]] = 0


class Replacing(BaseDataSparsifier):
    """Sets ``.data`` of the mask, of another dtype too, as the ancestor's sparsifiers do."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name).data = data > config["below"]


class ByIndex(ScoreSparsifier):
    """|w| times the global row, plus the global column: says where things are."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        rows = torch.arange(offset[0], offset[0] + data.shape[0]).unsqueeze(1)
        cols = torch.arange(offset[1], offset[1] + data.shape[1])
        return data.double().abs() * rows + config["weight"] * cols


class Seldom(ScoreSparsifier):
    """A score that is not the weight: rows by how often they are read, so that removed rows can
    come back."""

    def __init__(self, counts: dict[str, Tensor], **options: Any) -> None:
        super().__init__(sparse_block_shape=(1, ROW), **options)
        self.counts = counts

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        top = offset[0]
        return self.counts[name][top : top + data.shape[0], None].expand(data.shape).double()


# -- update_mask
# -------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_own_update_mask(world: int) -> None:
    """Once for each local shard, in the storage that is live, never for none; equal to one
    process."""
    for name, cell in some_cells(world).items():
        model = build(cell)
        sparsifier = BelowMedianOfRow(below=0.0)
        own = {names_of(cell)[0]: {"below": -0.5}}
        names = sparsifier.add_model(model, config=own)
        assert sparsifier.calls == []
        held = {data.name: data for data in ModelTables(model).locate()}
        with watched() as sent:
            sparsifier.step()
        assert len(sent.calls) == (1 if world > 1 else 0)
        expected = [
            (
                table,
                tuple(shard.tensor.shape),
                shard.tensor.data_ptr(),
                sparsifier.data_groups[table],
            )
            for table in names
            for shard in held[table].shards
        ]
        assert sparsifier.calls == expected, name
        alone = BelowMedianOfRow(below=0.0)
        full = {table: weight.to(held[table].dtype) for table, weight in weights(cell).items()}
        alone.add_model(plain_model(full), config=own)
        alone.step()
        for table in names:
            assert torch.equal(sparsifier.full_mask(table), alone.full_mask(table)), (name, table)
            assert torch.equal(gathered(model)[table], alone.get_data(table)), (name, table)
        assert sparsifier.audit() == alone.fingerprint()
        second = weights(cell, seed=1)  # what was removed stays removed, and is zeroed again
        set_weights(model, second)
        sparsifier.step()
        for table in names:
            want = alone.full_mask(table) & (
                second[table].to(held[table].dtype) >= sparsifier.data_groups[table]["below"]
            )
            assert torch.equal(sparsifier.full_mask(table), want), (name, table)
            assert torch.equal(gathered(model)[table], second[table].to(held[table].dtype) * want)


@on_ranks(2)
def test_replaced_mask(world: int) -> None:
    cell = cells(world)["mixed"]
    model = build(cell)
    sparsifier = Replacing(below=0.25)
    names = sparsifier.add_model(model)
    sparsifier.step()
    for table in names:
        want = weights(cell)[table] > 0.25
        assert torch.equal(sparsifier.full_mask(table), want.to(torch.int8))
        assert torch.equal(gathered(model)[table], torch.where(want, weights(cell)[table], 0.0))
    sparsifier.audit()


@on_ranks(2)
def test_mask_of_another_shape(world: int) -> None:
    class Wrong(BaseDataSparsifier):
        def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
            self.get_mask(name).data = torch.ones(1, 1)

    sparsifier = Wrong()
    table = sharded(torch.ones(6, 4), by_rows(6, 4, 2))
    sparsifier.add_data("table", table)
    with pytest.raises(ValueError, match=r"\(1, 1\) does not fit the shard rows"):
        sparsifier.step()
    assert int(sparsifier.full_mask("table").sum()) == 24
    assert torch.equal(whole(table), torch.ones(6, 4))


# -- score
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2, 4)
def test_own_score(world: int) -> None:
    """The same masks as in one process, on every sharding; zeroed even where the score says nothing
    of the weight."""
    for name, cell in some_cells(world).items():
        model = build(cell)
        full = {table: weight.clone() for table, weight in gathered(model).items()}
        for block, zeros in (((1, ROW), None), ((3, 5), None), ((1, 1), None), ((4, 1), 2)):
            # 0: all of the first row scores 0, whatever is in it.
            weight = 0.0 if block == (1, ROW) else 0.25
            sparsifier, alone = (
                ByIndex(
                    sparsity_level=0.4,
                    sparse_block_shape=block,
                    zeros_per_block=zeros,
                    weight=weight,
                )
                for _ in "ab"
            )
            names = sparsifier.add_model(model)
            alone.add_model(plain_model(full))
            for seed in (2, 3):
                drawn = {t: w.to(full[t].dtype) for t, w in weights(cell, seed=seed).items()}
                set_weights(model, drawn)
                write_alone(alone, drawn)
                sparsifier.step()
                alone.step()
                after = gathered(model)
                for table in names:
                    where = f"{name}, {table}, {block}, {seed}"
                    want = alone.full_mask(table)
                    assert torch.equal(sparsifier.full_mask(table), want), where
                    assert torch.equal(after[table], torch.where(want.bool(), drawn[table], 0.0)), (
                        where
                    )
            assert sparsifier.audit() == alone.fingerprint()


def write_alone(sparsifier: BaseDataSparsifier, full: dict[str, Tensor]) -> None:
    for table, weight in full.items():
        sparsifier.get_data(table).copy_(weight)


@on_ranks(2, 4)
def test_rows_come_back(world: int) -> None:
    """A removed row whose score rises is kept again, and starts at 0."""
    rows = 11
    counts = {"table": torch.arange(rows)}
    sparsifier = Seldom(counts, sparsity_level=0.5)
    table = sharded(torch.ones(rows, 4), by_rows(rows, 4, 3, *([6, 8] if world == 4 else [])))
    sparsifier.add_data("table", table)
    sparsifier.step()
    gone = torch.arange(rows) < round(rows / 2)
    assert torch.equal(sparsifier.full_mask("table")[:, 0] == 0, gone)
    assert torch.equal(whole(table)[:, 0], (~gone).float())
    counts["table"] = torch.arange(rows).flip(0)
    sparsifier.step()
    now = torch.arange(rows) >= rows - round(rows / 2)
    assert torch.equal(sparsifier.full_mask("table")[:, 0] == 0, now)
    assert torch.equal(whole(table)[:, 0], (~gone & ~now).float())


# -- what one rank can see
# ---------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_several_shards_or_none(world: int) -> None:
    seen = set()
    for name in ("two_shards", "table_wise_one_rank"):
        sparsifier = DataNormSparsifier()
        model = build(cells(world)[name])
        sparsifier.add_model(model)
        sparsifier.step()
        for data in ModelTables(model).locate():
            table = data.name
            pieces, full = sparsifier.local_masks(table), sparsifier.full_mask(table)
            seen.add(len(data.shards))
            assert [at for at, _ in pieces] == [(rect.row, rect.col) for rect, _ in data.shards]
            for (row, col), mask in pieces:
                assert torch.equal(mask, full[row : row + mask.shape[0], col : col + mask.shape[1]])
            if len(pieces) == 1:
                assert torch.equal(sparsifier.get_mask(table), pieces[0][1])
                assert sparsifier.get_data(table).data_ptr() == data.shards[0].tensor.data_ptr()
                continue
            message = rf"'{table}' has {len(pieces)} shards.*local_masks\('{table}'\)"
            with pytest.raises(ValueError, match=message):
                sparsifier.get_mask(table)
            for original in (True, False):
                with pytest.raises(ValueError, match=message):
                    sparsifier.get_data(table, return_original=original)
    assert seen == ({1, 2} if dist.get_rank() == world - 1 else {0})


@on_ranks(2)
def test_effective_data(world: int) -> None:
    full = torch.randn(9, 8)
    sparsifier = DataNormSparsifier()
    table = sharded(full, by_rows(9, 8, 4, *([6, 7] if world == 4 else [])))
    sparsifier.add_data("table", table)
    sparsifier.step()
    write(table, full)
    live = table.local_shards()[0].tensor
    assert sparsifier.get_data("table").data_ptr() == live.data_ptr()
    mask = sparsifier.get_mask("table")
    assert torch.equal(sparsifier.get_data("table", return_original=False), live * mask)
    mask.zero_()  # unpacked: edits of it count only inside update_mask
    assert int(sparsifier.get_mask("table").sum()) > 0


@on_ranks(2)
def test_masks_that_move_on_some_ranks_only(world: int) -> None:
    """The first rank alone has a table that has moved, and must agree twice: every rank refuses,
    and none waits in the second agreement for one that has passed it."""
    sparsifier = Replacing(below=0.5)
    sparsifier.add_data("both", sharded(torch.ones(6, 4), by_rows(6, 4, 2)))
    alone = distribute_tensor(torch.ones(6, 4), DeviceMesh("cpu", [0]), [Shard(0)])
    if dist.get_rank() == 0:
        sparsifier.add_data("alone", alone)
        table = sparsifier.masks.tables.table("alone")
        # As if it had been stored in two shards before.
        halves = Rect(0, 0, 2, 4), Rect(2, 0, 4, 4)
        table.shards = [table.shards[0].cut(half) for half in halves]
        table.tiling = (halves,)
    with pytest.raises(ValueError, match=r"disagree at 'step\(\)'"):
        sparsifier.step()
    sparsifier.apply_masks()
    sparsifier.step()
    assert bool(sparsifier.full_mask("both").all())
