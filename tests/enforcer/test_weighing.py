"""Ids of removed rows that weigh nothing equal rows that are read as zeros, trained and zeroed
again, in FBGEMM's kernels: outputs, kept weights, their optimizer state and masks, bit for bit;
means to the last bit.

A CPU drops the ids where it adds rows up. ``as_on_a_device`` has it weigh them there too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType

from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dist_sparse.enforcer import rows
from dist_sparse.enforcer.rows import KeptIds
from dist_sparse.masking.masks import BlockMask
from tests.dist.enforcing import kernels, read_as_zeros

FEATURES = ["f", "g", "h"]
TABLES = {"a": (40, ["f", "g"]), "b": (25, ["g", "h"])}
"""Rows and features: a table has two features, and a feature two tables."""

PER_TABLE = [key for _, keys in TABLES.values() for key in keys]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "rowwise": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "rowwise_l2": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.L2,
    },
    "rowwise_decoupled": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    },
    "no_eps": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 0.0},
}

KINDS = ("sum", "dropped", "mean", "weighted", "trained_weights", "sequence")


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


def collection(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "sequence":
        return EmbeddingCollection(
            [
                EmbeddingConfig(count, 16, name, feature_names=keys)
                for name, (count, keys) in _named()
            ]
        )
    pooling = PoolingType.MEAN if kind == "mean" else PoolingType.SUM
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(count, 16, name, feature_names=keys, pooling=pooling)
            for name, (count, keys) in _named()
        ],
        is_weighted=kind in ("weighted", "trained_weights"),
    )


def _named() -> list[tuple[str, tuple[int, list[str]]]]:
    return list(TABLES.items())


def sharded(kind: str, fused_params: Mapping[str, Any]) -> DistributedModelParallel:
    made = collection(kind)
    make = EmbeddingCollectionSharder if kind == "sequence" else EmbeddingBagCollectionSharder
    sharder: Any = make(fused_params={"learning_rate": 0.3, "eps": 1e-8, **fused_params})
    plan = construct_module_sharding_plan(
        made,
        {name: table_wise(rank=0) for name in TABLES},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    return DistributedModelParallel(
        made, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )


def features(kind: str, seed: int, bags: int = 6, outside: int | None = None) -> KeyedJaggedTensor:
    """Bags of 0 to 5 ids, repeated ones among them; ids are in range of both tables."""
    made = torch.Generator().manual_seed(seed)
    # TorchRec's input distribution cuts off the weights' gradients: the kernel is called itself.
    keys = PER_TABLE if kind == "trained_weights" else FEATURES
    lengths = torch.randint(0, 6, (len(keys) * bags,), generator=made)
    lengths[::4] = 0
    ids = torch.randint(0, 25, (int(lengths.sum()),), generator=made)
    if outside is not None:
        ids[::5] = outside
    weights = None
    if kind in ("weighted", "trained_weights"):
        weights = torch.randn(len(ids), generator=made)
        weights[::7] = 0
        weights.requires_grad_(kind == "trained_weights")
    return KeyedJaggedTensor(keys, ids, weights, lengths)


@dataclass
class Side:
    """One of two equal models that train alike."""

    kind: str
    fused_params: Mapping[str, Any]
    zeroed: bool
    finer: str | None = None
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = sharded(self.kind, self.fused_params)
        self.sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, ROW))
        config = {self.finer: {"sparse_block_shape": (1, 4)}} if self.finer else None
        self.names = self.sparsifier.add_model(self.model, config=config)
        if self.zeroed:
            read_as_zeros(self.sparsifier)
        self.enforcer = MaskEnforcer(self.sparsifier).attach()

    @property
    def batches(self) -> list[Any]:
        return [kernel.emb_module for kernel in kernels(self.model)]

    def move(self, level: float) -> None:
        for group in self.sparsifier.data_groups.values():
            group["sparsity_level"] = level
        self.sparsifier.step()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        # An array of its own: FBGEMM's bounds check writes into the ids.
        ids = KeyedJaggedTensor(
            ids.keys(), ids.values().clone(), ids.weights_or_none(), ids.lengths()
        )
        if self.kind == "trained_weights":
            pooled: Tensor = kernels(self.model)[0](ids)
            return pooled
        found = self.model(ids)
        if self.kind == "sequence":
            return torch.cat([found[key].values() for key in sorted(found.keys())])
        values: Tensor = found.values()
        return values

    def train(self, ids: KeyedJaggedTensor) -> Tensor:
        out = self.forward(ids)
        # Gradients of any size and sign, also where the output is 0.
        (out.sin() + out * 0.3).sum().backward()
        return out.detach()

    def masks(self) -> dict[str, Tensor]:
        return {name: self.sparsifier.full_mask(name) for name in self.names}

    def weights(self) -> list[Tensor]:
        return [view for batch in self.batches for view in batch.split_embedding_weights()]

    def removed(self) -> list[Tensor]:
        """Which rows of each table are removed, bool ``(rows,)``."""
        return [(mask == 0).all(1) for mask in self.masks().values()]

    def kept_states(self) -> list[Tensor]:
        """The optimizers' state, and 0 for removed rows: those of the other side are trained."""
        found = []
        for batch in self.batches:
            for removed, states in zip(
                self.removed(), batch.split_optimizer_states() or [], strict=False
            ):
                for state in states:
                    rows = removed.view(-1, *[1] * (state.dim() - 1))
                    found.append(state.masked_fill(rows, 0))
        return found


def check(ours: Side, oracle: Side, close: bool) -> None:
    """Removed rows are 0 before anything cleans them, and all else is as the oracle has it."""
    if ours.fused_params is OPTIMIZERS["no_eps"]:
        ours.enforcer.settle()  # its rows are zeroed too: 0 / 0 is no number
    for removed, weight in zip(ours.removed(), ours.weights(), strict=True):
        assert not weight[removed].any()
    oracle.enforcer.settle()
    assert ours.masks().keys() == oracle.masks().keys()
    pairs = [*zip(ours.masks().values(), oracle.masks().values(), strict=True)]
    pairs += [*zip(ours.weights(), oracle.weights(), strict=True)]
    pairs += [*zip(ours.kept_states(), oracle.kept_states(), strict=True)]
    for mine, theirs in pairs:
        _equal(mine, theirs, close)


def _equal(mine: Tensor, theirs: Tensor, close: bool) -> None:
    if close:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    else:
        assert torch.equal(mine, theirs)


def as_on_a_device(kind: str) -> Any:
    """No ids are dropped, as if one of them were out of range."""
    passed_on = mock.patch.object(KeptIds, "select", lambda self, features: features)
    return mock.MagicMock() if kind == "dropped" else passed_on


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_zeroing(kind: str, name: str) -> None:
    """Four mask updates; gradients of one lookup and of two. No row comes back: the oracle has
    trained its state meanwhile."""
    ours, oracle = (Side(kind, OPTIMIZERS[name], zeroed) for zeroed in (False, True))
    if name == "no_eps" and "weight" in kind:
        pytest.skip("without eps, weights of 0 make NaN of kept rows")
    close = kind == "mean"
    seed = 0
    with as_on_a_device(kind):
        for level in (0.0, 0.5, 0.8, 0.9):
            for side in (ours, oracle):
                side.move(level)
            for _ in range(3):
                seed += 1
                ids = features(kind, seed)
                outputs = [side.train(ids) for side in (ours, oracle)]
                _equal(*outputs, close)
                if kind == "trained_weights":
                    _same_gradients(ours, oracle, ids)
            pending = [
                [side.forward(features(kind, seed + more)) for more in (20, 30)]
                for side in (ours, oracle)
            ]
            for first, second in pending:
                (first.cos().sum() * second.sin().sum()).backward()
            check(ours, oracle, close)
            with torch.no_grad():
                _equal(*(side.forward(features(kind, seed)) for side in (ours, oracle)), close)
    assert sum(int(removed.sum()) for removed in ours.removed()) > 0


def _same_gradients(ours: Side, oracle: Side, ids: KeyedJaggedTensor) -> None:
    """The ids' weights get the gradients that rows of zeros give them."""
    found = []
    for side in (ours, oracle):
        ids.weights().grad = None
        side.train(ids)
        found.append(ids.weights().grad.clone())
    _equal(*found, False)
    assert found[0].any()


@pytest.mark.parametrize("kind", ["sum", "dropped", "mean", "sequence"])
def test_masks_move_between_lookup_and_backward(kind: str) -> None:
    """A backward revives rows that its lookup kept and that are removed by now: not for long."""
    side = Side(kind, OPTIMIZERS["rowwise"], zeroed=False)
    side.move(0.2)
    with as_on_a_device(kind):
        out = side.forward(features(kind, 1))
        side.move(0.8)
        out.sum().backward()
        read: list[Tensor] = []
        look = side.batches[0].register_forward_pre_hook(
            lambda *_: read.extend(
                weight[removed].clone()
                for removed, weight in zip(side.removed(), side.weights(), strict=True)
            )
        )
        side.train(features(kind, 2))
        look.remove()
        assert len(read) == 2 and not any(bool(rows.any()) for rows in read)
        out = side.forward(features(kind, 1))
        side.move(0.9)
        out.sum().backward()
        state = side.model.state_dict()
        for name, mask in side.masks().items():
            weight = next(value for key, value in state.items() if f".{name}." in key)
            assert not weight.local_tensor()[mask == 0].any()


@pytest.mark.parametrize("mode", [*BoundsCheckMode][:4])
@pytest.mark.parametrize("outside", [-1, -7, 999, 10**12])
@pytest.mark.parametrize("kind", ["dropped", "mean", "sequence"])
def test_ids_out_of_range(kind: str, outside: int, mode: BoundsCheckMode) -> None:
    """What FBGEMM makes of them is left to it: row 0, removed or not, or an error."""
    if mode == BoundsCheckMode.NONE and kind == "sequence":
        pytest.skip("FBGEMM reads memory outside of the table")
    params = {**OPTIMIZERS["rowwise"], "bounds_check_mode": mode}
    ours, oracle = (Side(kind, params, zeroed) for zeroed in (False, True))
    for level in (0.3, 0.9):
        for side in (ours, oracle):
            side.move(level)
        outcomes = [_outcome(side, features(kind, 5, outside=outside)) for side in (ours, oracle)]
        if isinstance(outcomes[0], Tensor):
            _equal(*outcomes, kind == "mean")
        else:
            assert outcomes[0] is outcomes[1]
        # The next lookup pools as ever, and rows are as they were.
        check(ours, oracle, kind == "mean")
        _equal(*(side.train(features(kind, 6)) for side in (ours, oracle)), kind == "mean")


def _outcome(side: Side, ids: KeyedJaggedTensor) -> Any:
    try:
        return side.train(ids)
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("kind", ["sum", "dropped", "mean"])
def test_batches_of_several_sizes(kind: str) -> None:
    """Features with another number of bags each, in the kernel itself."""
    ours, oracle = (Side(kind, OPTIMIZERS["rowwise"], zeroed) for zeroed in (False, True))
    for side in (ours, oracle):
        side.move(0.6)
    sizes = [2, 0, 5, 1]
    made = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 5, (sum(sizes),), generator=made)
    ids = torch.randint(0, 25, (int(lengths.sum()),), generator=made)
    outputs = []
    with as_on_a_device(kind):
        for side in (ours, oracle):
            given = KeyedJaggedTensor(
                PER_TABLE,
                ids.clone(),
                lengths=lengths,
                stride_per_key_per_rank=[[n] for n in sizes],
            )
            outputs.append(kernels(side.model)[0](given))
            outputs[-1].sin().sum().backward()
    _equal(*outputs, kind == "mean")
    check(ours, oracle, kind == "mean")


@pytest.mark.parametrize("kind", ["sum", "dropped", "mean", "sequence"])
def test_blocks_of_both_kinds_in_a_kernel(kind: str) -> None:
    """Table a loses whole rows, b parts of rows, which are zeroed as ever."""
    sides = [Side(kind, OPTIMIZERS["rowwise"], zeroed, finer="b") for zeroed in (False, True)]
    ours, oracle = sides
    with as_on_a_device(kind):
        for level in (0.5, 0.8):
            for side in sides:
                side.move(level)
            for seed in range(3):
                _equal(*(side.train(features(kind, seed)) for side in sides), kind == "mean")
            ours.enforcer.settle()
            check(ours, oracle, kind == "mean")


def test_a_row_that_comes_back_is_fresh() -> None:
    """Its weights are 0 and its sum of squares is the one from before it was removed."""
    side = Side("sum", OPTIMIZERS["rowwise"], zeroed=False)
    with as_on_a_device("sum"):
        for seed in range(4):
            side.train(features("sum", seed))
        side.move(0.8)
        sums = [states[0].clone() for states in side.batches[0].split_optimizer_states()]
        removed = side.removed()
        for seed in range(4, 8):
            side.train(features("sum", seed))
        now = [states[0] for states in side.batches[0].split_optimizer_states()]
        for before, after, rows in zip(sums, now, removed, strict=True):
            assert torch.equal(before[rows], after[rows]) and not torch.equal(before, after)
        side.move(0.0)
        for rows, weight in zip(removed, side.weights(), strict=True):
            assert rows.any() and not weight[rows].any()
        side.train(features("sum", 9))
        assert any(bool(w[rows].any()) for rows, w in zip(removed, side.weights(), strict=True))


def test_no_row_is_watched() -> None:
    """Nothing is flagged or cleaned for whole rows, and no gradient of the weights is made."""
    side = Side("sum", OPTIMIZERS["rowwise"], zeroed=False)
    side.move(0.8)
    calls: list[dict[str, Any]] = []
    side.batches[0].register_forward_pre_hook(
        lambda module, args, call: calls.append(call), with_kwargs=True
    )
    zeroed = AssertionError("rows were zeroed")
    with (
        as_on_a_device("sum"),
        mock.patch.object(rows, "zero_rows", side_effect=zeroed),
        mock.patch.object(BlockMask, "apply_", side_effect=zeroed),
    ):
        for seed in range(3):
            side.train(features("sum", seed))
        side.enforcer.settle()
    assert calls[0]["per_sample_weights"].unique().tolist() == [0, 1]
    assert not calls[0]["per_sample_weights"].requires_grad
    assert calls[0]["feature_requires_grad"].tolist() == [0] * 4
    # One for all lookups: on a device, each is a launch.
    assert calls[0]["feature_requires_grad"] is calls[1]["feature_requires_grad"]
    with torch.no_grad():
        side.forward(features("sum", 2))
    assert calls[-1].get("per_sample_weights") is None


def test_stashed_weights_are_refused() -> None:
    configs = [EmbeddingBagConfig(24, 16, "stashed", feature_names=["f"], stash_weights=True)]
    model = DistributedModelParallel(EmbeddingBagCollection(configs), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="'stashed': memory stashing"):
        DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW)).add_model(model)
