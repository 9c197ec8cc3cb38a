"""Dropping the ids of removed rows equals reading, training and zeroing them: outputs, kept
weights, masks, and the optimizer state of what is kept, bit for bit. (C15)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, ImportanceSparsifier, MaskEnforcer
from tests.dist.cells import Cell, batch, build, gathered
from tests.dist.enforcing import (
    SMALL,
    Reads,
    Small,
    features_of,
    kernels,
    loss_of,
    optimizer_of,
    read_as_zeros,
    small,
    total,
    trained_cells,
)
from tests.dist.plugin import on_ranks

SGD, ADAGRAD = torch.optim.SGD, torch.optim.Adagrad
CASES: list[tuple[int, str, Any, tuple[int, Any]]] = [
    (1, "mixed", RowWiseAdagrad, (1, ROW)),
    (2, "row_wise", RowWiseAdagrad, (1, ROW)),
    (2, "two_shards", ADAGRAD, (1, 4)),
    (2, "table_wise", SGD, (2, ROW)),
    (2, "row_wise_fp16", SGD, (1, ROW)),
    (2, "ec_row_wise", RowWiseAdagrad, (1, ROW)),
]


class Side:
    """One of two equal models that train alike, with what their lookups read."""

    def __init__(
        self, model: Any, zeroed: bool, block: tuple[int, Any], score: Any = "norm"
    ) -> None:
        self.model = model
        self.optimizer = optimizer_of(model)
        self.sparsifier = ImportanceSparsifier(
            sparsity_level=0.0, sparse_block_shape=block, score=score
        )
        self.names = self.sparsifier.add_model(model)
        self.reads = Reads(model, self.masks())
        if zeroed:
            read_as_zeros(self.sparsifier)
        self.enforcer = MaskEnforcer(self.sparsifier).attach(self.optimizer)

    def masks(self) -> dict[str, Tensor]:
        return {name: self.sparsifier.full_mask(name) for name in self.names}

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.model(features)
        return out if isinstance(out, tuple) else (loss_of(out), out)

    def train(self, *batches: KeyedJaggedTensor) -> list[Tensor]:
        """All forwards, then all backwards, then a step."""
        self.optimizer.zero_grad()
        found = [self.forward(features) for features in batches]
        for loss, _ in reversed(found):
            loss.backward()
        self.optimizer.step()
        return [out for _, out in found]

    def move(self, level: float) -> None:
        for group in self.sparsifier.data_groups.values():
            group["sparsity_level"] = level
        self.sparsifier.step()
        self.reads.masks = self.masks()

    def states(self) -> list[Tensor]:
        """The optimizers' state, and 0 for rows of which nothing is kept."""
        self.enforcer.settle()
        found = []
        for kernel in kernels(self.model):
            if hasattr(kernel.emb_module, "split_optimizer_states"):
                weights = kernel.emb_module.split_embedding_weights()
                for weight, of_table in zip(
                    weights, kernel.emb_module.split_optimizer_states(), strict=False
                ):
                    found += [
                        state * (weight != 0).any(1).view(-1, *[1] * (state.dim() - 1))
                        for state in of_table
                    ]
        return found


def check(sides: list[Side]) -> None:
    """Bit for bit, except for the sign of a zero. Collective."""
    (masks, weights, states), (masks_, weights_, states_) = (
        (side.masks(), gathered(side.model), side.states()) for side in sides
    )
    assert all(torch.equal(masks[name], masks_[name]) for name in masks)
    assert all(torch.equal(weights[name], weights_[name]) for name in weights)
    assert all(torch.equal(one, other) for one, other in zip(states, states_, strict=True))
    for one, other in zip(*(side.model.module.over.parameters() for side in sides), strict=True):
        assert torch.equal(one, other)


def both(sides: list[Side], *batches: KeyedJaggedTensor) -> None:
    outputs, theirs = (side.train(*batches) for side in sides)
    assert all(torch.equal(one, other) for one, other in zip(outputs, theirs, strict=True))


@on_ranks()
@pytest.mark.parametrize(("world", "name", "fused", "block"), CASES)
def test_equals_zeroing(world: int, name: str, fused: Any, block: tuple[int, Any]) -> None:
    cell, rank = trained_cells(world)[name], dist.get_rank()
    lr = {"lr": 0.02 if "16" in name else 0.1}
    sides = [Side(build(cell, fused, lr), zeroed, block) for zeroed in (False, True)]
    batches = [batch(cell, seed=world * step + rank, size=12) for step in range(6)]
    some = features_of(
        cell.tables, {t.features[0]: [[0, 0, 1], [], [0]] for t in cell.tables}, size=12
    )
    for level in (0.0, 0.4, 0.8):
        for side in sides:
            side.move(level)
        for features in batches:
            both(sides, features)
        both(sides, *batches[:3])  # gradients accumulate, in another order
        both(sides, some if rank else features_of(cell.tables, {}, size=12), batches[0])
        check(sides)
        pending = [side.forward(batches[1])[0] for side in sides]
        for side, loss in zip(sides, pending, strict=True):
            side.move(level + 0.1)  # the backward writes rows that are removed now
            loss.backward()
        both(sides, batches[2])
        check(sides)
        with torch.no_grad():
            out, theirs = (side.model(batches[3]) for side in sides)
        assert torch.equal(out, theirs)
    dropping, zeroing = sides
    assert dropping.reads.wrong == zeroing.reads.wrong == 0
    assert total(zeroing.reads.revived) > 0
    if not cell.bags:
        assert dropping.reads.removed == zeroing.reads.removed
    elif block[1] == ROW and name != "mixed":  # which has a data-parallel table, too
        assert dropping.reads.removed == 0
    else:
        assert total(dropping.reads.removed) < total(zeroing.reads.removed)


@on_ranks(2)
def test_ids_outside() -> None:
    """FBGEMM warns and reads row 0, removed or not, in a lookup of which nothing is dropped."""
    cell = trained_cells(2)["row_wise"]
    sides = [Side(build(cell, SGD), zeroed, (1, ROW)) for zeroed in (False, True)]
    for side in sides:
        side.move(0.9)
    for outside in (999, -7, 10**12):
        for size in (2, 3):
            both(
                sides,
                features_of(
                    cell.tables,
                    {t.features[0]: [[outside, 1], [2, 0, outside]][:size] for t in cell.tables},
                ),
                batch(cell, seed=dist.get_rank()),
            )
        check(sides)
    assert sides[0].reads.wrong == sides[1].reads.wrong == 0
    assert 0 < total(sides[0].reads.removed) < total(sides[1].reads.removed)


@on_ranks(2)
def test_weighted_in_a_pipeline() -> None:
    """TorchRec's pipeline over weighted bags with negative weights and zeros, masks updated while
    batches are on their way; a table in two shards on one rank has each of its features twice."""
    generators: dict[str, Any] = {"a": column_wise(ranks=[0, 0]), "b": row_wise()}
    cell, outputs = Cell("small", 2, {}, SMALL), []
    sides = [Side(small(generators, weighted=True), zeroed, (1, ROW)) for zeroed in (False, True)]
    for side in sides:
        batches = []
        for step in range(14):
            ids = batch(cell, seed=2 * step + dist.get_rank(), size=8)
            drawn = torch.randn(ids.values().numel(), generator=torch.Generator().manual_seed(step))
            drawn[::5] = 0
            batches.append(KeyedJaggedTensor(ids.keys(), ids.values(), drawn, ids.lengths()))
        pipeline = TrainPipelineSparseDist(side.model, side.optimizer, torch.device("cpu"))
        coming, found = iter(batches), []
        for step in range(12):
            found.append(pipeline.progress(coming))
            if step % 3 == 0:
                side.move(0.2 + 0.05 * step)
        outputs.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    check(sides)
    assert total(sides[1].reads.revived) > 0 == total(sides[0].reads.removed)


@on_ranks(2)
@pytest.mark.parametrize("score", ["frequency", "accumulator"])
def test_scores_of_removed_rows(score: str) -> None:
    """Lookups of removed rows count, dropped or not; sums of squared gradients ask for zeroing,
    whatever is chosen."""
    cell = trained_cells(2)["row_wise"]
    sides = [Side(build(cell, RowWiseAdagrad), zeroed, (1, ROW), score) for zeroed in (False, True)]
    for level in (0.6, 0.7, 0.6):
        for step in range(3):
            both(sides, batch(cell, seed=2 * step + dist.get_rank(), size=20))
        before = sides[0].masks()
        for side in sides:
            side.move(level)
        masks, theirs = (side.masks() for side in sides)
        assert all(torch.equal(masks[name], theirs[name]) for name in masks)
    assert any(bool((masks[name] > before[name]).any()) for name in masks)  # some came back
    dropped, zeroed = (total(side.reads.removed) for side in sides)
    assert dropped == (zeroed if score == "accumulator" else 0) < zeroed + 1


class Positioned(Small):
    """Each id is weighted by a trained number for its place in the bag."""

    def __init__(self) -> None:
        super().__init__(weighted=True)
        features = [feature for table in SMALL for feature in table.features]
        self.tables = FeatureProcessedEmbeddingBagCollection(
            self.tables,
            {feature: PositionWeightedModule(max_feature_length=3) for feature in features},
        )


def positioned() -> DistributedModelParallel:
    """:class:`Positioned`, table a on the first rank, b cut by rows. Collective."""
    torch.manual_seed(0)
    net, world = Positioned(), dist.get_world_size()
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        )
    )
    plan = construct_module_sharding_plan(
        net.tables,
        {"a": table_wise(rank=0), "b": row_wise()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    return DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


@on_ranks(2)
def test_positions_and_all_rows_of_a_rank() -> None:
    """Weights of positions, counted before ids are dropped, are trained alike. At last all rows of
    a rank are removed, so that it looks nothing up, and the others go on."""
    cell = Cell("small", 2, {}, SMALL)
    sides = [Side(positioned(), zeroed, (1, ROW)) for zeroed in (False, True)]
    for level in (0.6, 1.0):
        for side in sides:
            side.move(level)
        for step in range(3):
            both(sides, batch(cell, seed=2 * step + dist.get_rank()))
        check(sides)
    found = [
        {k: v for k, v in side.model.named_parameters() if k.endswith("position_weight")}
        for side in sides
    ]
    assert len(found[0]) == 3 and any(bool((weight != 1).any()) for weight in found[0].values())
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert sides[0].reads.removed == 0
