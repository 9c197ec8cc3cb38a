"""Masks are the same in all copies of a 2-D parallel model; removed weights are zero, averaged or
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import Cell, batch
from tests.dist.copies import COPIES, SHARE, build_copies, copied_cells, first_copy
from tests.dist.enforcing import read_as_zeros
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_mask

WORLD = SHARE * COPIES
CASES: dict[str, tuple[str, type[torch.optim.Optimizer], tuple[int, Any], bool]] = {
    "table_wise": ("table_wise", RowWiseAdagrad, (1, ROW), False),
    "row_wise": ("row_wise", torch.optim.SGD, (1, 4), False),
    "column_wise": ("column_wise", torch.optim.Adagrad, (1, ROW), False),
    "mixed": ("mixed", RowWiseAdagrad, (2, 3), False),
    "mixed, copies over neighbours": ("mixed", RowWiseAdagrad, (1, 4), True),
    "ec_row_wise": ("ec_row_wise", RowWiseAdagrad, (1, ROW), False),
}
LEVEL = 0.6


@on_ranks(WORLD, local_world_size=SHARE)
@pytest.mark.parametrize("case", CASES)
def test_copies(case: str) -> None:
    name, optimizer, block, neighbours = CASES[case]
    cell = copied_cells()[name]
    model = build_copies(cell, optimizer, use_inter_host_allreduce=neighbours)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(model)
    dense = _optimizer(model)
    reader = _Reader(model, sparsifier)
    revived = 0.0
    read_as_zeros(sparsifier)
    with MaskEnforcer(sparsifier).attach(dense) as enforcer:
        for step in range(12):
            _train(model, dense, cell, step)
            if step % 5 == 4:
                model.sync()
                revived += reader.revived()
                _same_in_all_copies(model)
            if step % 4 == 3:  # 3 and 7: between two averages; 11 too
                for group in sparsifier.data_groups.values():
                    group["sparsity_level"] = LEVEL * (step + 1) / 12
                enforcer.settle()
                before = first_copy(model)
                sparsifier.step()
                _masks_are(sparsifier, before, LEVEL * (step + 1) / 12, block)
                assert reader.revived() == 0
    assert revived == 0
    assert reader.checked > 0, "no lookup on this rank has read a removed weight"


@on_ranks(WORLD, local_world_size=SHARE)
def test_the_copies_differ_without_an_enforcer() -> None:
    """Without an enforcer the average brings back what one copy has revived: what the other cases
    would show."""
    cell = copied_cells()["row_wise"]
    model = build_copies(cell)
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    dense = _optimizer(model)
    for step in range(3):
        _train(model, dense, cell, step)
    model.sync()
    assert _Reader(model, sparsifier).revived() > 0
    sparsifier.apply_masks()
    assert _Reader(model, sparsifier).revived() == 0


@on_ranks(WORLD, local_world_size=SHARE)
def test_a_bare_replica_drifts() -> None:
    """Copies may differ, replicas of data-parallel tables may not."""
    cell = copied_cells()["mixed"]
    model = build_copies(cell)
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=(1, 4), norm="L1")
    sparsifier.add_model(model)
    tables = {data.name: data for data in ModelTables(model).locate()}
    assert [data.name for data in tables.values() if data.copied] == ["user", "item", "word"]
    if dist.get_rank() == 3:
        tables["tiny"].shards[0].tensor[0, 0] += 1
    with pytest.raises(ValueError, match=r"Replicas have drifted.*tiny.*on rank 3"):
        sparsifier.step()


@on_ranks(WORLD, local_world_size=SHARE)
def test_what_torchrec_never_averages_is_refused() -> None:
    base = copied_cells()["row_wise"]
    cell = Cell(base.name, base.world, base.plan, fused=False)
    with pytest.raises(
        ValueError,
        match=r"Table 'user'.*2-D parallelism never averages tables with the compute kernel",
    ):
        build_copies(cell)  # it finds the tables as add_model() does, to fill them


class _Reader:
    """Reads the tables where the kernels have them, past the library; and, at each lookup, what it
    is about to read."""

    def __init__(self, model: DMPCollection, sparsifier: DataNormSparsifier) -> None:
        self.model, self.sparsifier, self.checked = model, sparsifier, 0
        for module in model.modules():
            for lookup in getattr(module, "_lookups", []):
                for kernel in getattr(lookup, "module", lookup)._emb_modules:
                    self._watch(kernel.emb_module, kernel._feature_table_map)

    def revived(self) -> int:
        """How many removed weights of this rank's shards are not zero."""
        count = 0
        for data in ModelTables(self.model).locate():
            for (_, mask), shard in zip(
                self.sparsifier.local_masks(data.name), data.shards, strict=True
            ):
                count += int((shard.tensor[mask == 0] != 0).sum())
        return count

    def _watch(self, kernel: Any, tables: list[int]) -> None:
        read = kernel.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            indices, offsets = (
                kwargs.get("indices", args[0] if args else None),
                kwargs.get("offsets"),
            )
            offsets = args[1] if offsets is None else offsets
            size = (offsets.numel() - 1) // len(tables)
            masks = self._by_place()
            for feature, table in enumerate(tables):
                view = kernel.split_embedding_weights()[table]
                ids = indices[
                    int(offsets[feature * size]) : int(offsets[(feature + 1) * size])
                ].long()
                mask = masks.get(view.data_ptr())
                if mask is not None:
                    gone = mask[ids] == 0
                    self.checked += int(gone.sum())
                    assert bool((view[ids][gone] == 0).all()), (
                        "a lookup reads a removed weight that is not 0"
                    )
            return read(*args, **kwargs)

        kernel.forward = forward

    def _by_place(self) -> dict[int, Tensor]:
        return {
            shard.tensor.data_ptr(): mask
            for data in ModelTables(self.model).locate()
            for (_, mask), shard in zip(
                self.sparsifier.local_masks(data.name), data.shards, strict=True
            )
        }


def _optimizer(model: DMPCollection) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rest = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return CombinedOptimizer([model.fused_optimizer, rest])


def _train(model: DMPCollection, optimizer: CombinedOptimizer, cell: Cell, step: int) -> None:
    optimizer.zero_grad()
    model(batch(cell, seed=100 * step + dist.get_rank())).mean().backward()
    optimizer.step()


def _masks_are(
    sparsifier: DataNormSparsifier, weights: dict[str, Tensor], level: float, block: tuple[int, Any]
) -> None:
    for name, full in weights.items():
        want = oracle_mask(full, level, block, None, "L2").bool()
        assert torch.equal(sparsifier.full_mask(name).bool(), want), name
        # Of every copy, where full_mask reads the first.
        for (row, col), mask in sparsifier.local_masks(name):
            assert torch.equal(
                mask.bool(), want[row : row + mask.shape[0], col : col + mask.shape[1]]
            ), name


def _same_in_all_copies(model: DMPCollection) -> None:
    mine = {
        (data.name, rect): tensor.clone()
        for data in ModelTables(model).locate()
        for rect, tensor in data.shards
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for theirs in everyone:
        for place, tensor in theirs.items():
            if place in mine:
                assert torch.equal(tensor, mine[place]), place
