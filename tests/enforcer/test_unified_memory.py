"""Tables in unified memory. On a CPU, TorchRec gives its kernels ``fused_uvm`` and ``fused_uvm_caching``
host memory and no cache: here the first is as on a GPU, and the second gets a cache of rows around
FBGEMM's own lookups and backwards. Nothing of it has run on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
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

from dist_sparse import ROW, DataNormSparsifier, ImportanceSparsifier, MaskEnforcer
from tests.dist.enforcing import kernels

ROWS = {"a": 40, "b": 25}
FINER = [(1, 4), (2, 2), (1, 1)]


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


Kernel = str | Mapping[str, str]
"""Of all tables, or by table."""


def model_of(kernel: Kernel, bags: bool = True, optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> Any:
    """Two tables of the same weights in every model."""
    torch.manual_seed(0)
    kinds = dict.fromkeys(ROWS, kernel) if isinstance(kernel, str) else kernel
    net: Any
    if bags:
        made = [
            EmbeddingBagConfig(rows, 16, name, feature_names=[name]) for name, rows in ROWS.items()
        ]
        net, make = EmbeddingBagCollection(made), EmbeddingBagCollectionSharder
    else:
        each = [
            EmbeddingConfig(rows, 16, name, feature_names=[name]) for name, rows in ROWS.items()
        ]
        net, make = EmbeddingCollection(each), EmbeddingCollectionSharder
    sharder: Any = make(
        fused_params={"learning_rate": 0.3, "eps": 1e-8, "optimizer": EmbOptimType[optimizer]}
    )
    plan = construct_module_sharding_plan(
        net,
        {name: table_wise(rank=0, compute_kernel=kind) for name, kind in kinds.items()},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )
    for kernel_module in kernels(model):
        for config, view in zip(
            kernel_module._config.embedding_tables,
            kernel_module.emb_module.split_embedding_weights(),
            strict=True,
        ):
            made_by = torch.Generator().manual_seed(ROWS[config.name])
            view.copy_(torch.randn(view.shape, generator=made_by))
    return model


class Cache:
    """FBGEMM's cache of rows: lookups read and backwards write copies. The batch's own memory holds
    the copies, another tensor the tables."""

    def __init__(self, batch: Any) -> None:
        self._copies = batch.split_embedding_weights()
        self._tables = [copies.clone() for copies in self._copies]
        self._cached = [torch.zeros(len(table), dtype=torch.bool) for table in self._tables]
        self.reset()
        batch.lxu_cache_weights = torch.zeros(1, 1)
        batch._prefetch = self.fetch
        batch.flush, batch.reset_cache_states = self.flush, self.reset
        batch.split_embedding_weights = lambda: self._tables

    def fetch(self, ids: Tensor, offsets: Tensor, *_: Any, **__: Any) -> None:
        bags = (len(offsets) - 1) // len(self._tables)
        for number, (table, copies, cached) in enumerate(self._parts()):
            rows = ids[offsets[number * bags] : offsets[(number + 1) * bags]]
            # Full: all rows make way. FBGEMM's kernels write unseen by torch, which counts writes.
            if int(cached.sum()) > len(table) // 2:
                table.data[cached] = copies[cached]
                cached[:] = False
            new = rows[~cached[rows]]
            copies.data[new] = table[new]
            cached[new] = True

    def flush(self) -> None:
        for table, copies, cached in self._parts():
            table[cached] = copies[cached]

    def reset(self) -> None:
        for _, copies, cached in self._parts():
            cached[:] = False
            # No lookup may read rows that are not cached any more.
            copies[:] = torch.nan

    def _parts(self) -> Any:
        return zip(self._tables, self._copies, self._cached, strict=True)


class Run:
    """A model that trains with masks of whole rows."""

    def __init__(
        self,
        kernel: Kernel,
        bags: bool = True,
        cache: bool = False,
        config: Any = None,
        **options: Any,
    ) -> None:
        self._bags = bags
        self.model = model_of(kernel, bags)
        if cache:
            for each in kernels(self.model):
                Cache(each.emb_module)
        score = {"score": "norm", "sparse_block_shape": (1, ROW), **options}
        self.sparsifier = ImportanceSparsifier(sparsity_level=0.0, norm="L2", **score)
        self.names = self.sparsifier.add_model(self.model, config=config)
        self.enforcer = MaskEnforcer(self.sparsifier).attach()

    def features(self, seed: int) -> KeyedJaggedTensor:
        made = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (12,), generator=made)
        ids = torch.randint(0, 25, (int(lengths.sum()),), generator=made)
        return KeyedJaggedTensor(list(ROWS), ids, lengths=lengths)

    def look_up(self, seed: int) -> Tensor:
        found = self.model(self.features(seed))
        if not self._bags:
            return torch.cat([found[name].values() for name in ROWS])
        values: Tensor = found.values()
        return values

    def train(self, first: int, steps: int = 3) -> list[Tensor]:
        outputs = [self.look_up(first)]
        outputs[0].sin().sum().backward()
        for seed in range(first + 1, first + steps):
            outputs.append(self.look_up(seed))
            outputs[-1].sin().sum().backward()
        return outputs

    def update(self, level: float) -> None:
        for group in self.sparsifier.data_groups.values():
            group["sparsity_level"] = level
        self.sparsifier.step()

    def state(self) -> list[Tensor]:
        """Masks, weights, and the optimizer's sums."""
        # Not state_dict(), which has TorchRec's own views of the batch's memory.
        self.enforcer.settle()
        masks = [self.sparsifier.full_mask(name) for name in self.names]
        found = [*masks]
        for kernel in kernels(self.model):
            found += [view.clone() for view in kernel.emb_module.split_embedding_weights()]
            for states in kernel.emb_module.split_optimizer_states():
                found += [state.clone() for state in states]
        return found


@pytest.mark.parametrize("score", ["norm", "frequency", "norm_accumulator"])
@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize(
    ("kernel", "cache"),
    [("fused_uvm", False), ("fused_uvm_caching", False), ("fused_uvm_caching", True)],
)
def test_training_is_that_of_tables_in_the_memory_of_the_device(
    kernel: str, cache: bool, bags: bool, score: str
) -> None:
    found, expected = Run(kernel, bags, cache, score=score), Run("fused", bags, score=score)
    for number, level in enumerate((0.2, 0.5, 0.8)):
        outputs = [run.train(10 * number) for run in (found, expected)]
        assert all(map(torch.equal, *outputs))
        for run in (found, expected):
            run.update(level)
        assert all(map(torch.equal, found.state(), expected.state()))
    assert found.state()[0].eq(0).any()


@pytest.mark.parametrize("block", FINER)
def test_fused_uvm_takes_finer_blocks(block: tuple[int, int]) -> None:
    found, expected = (Run(kind, sparse_block_shape=block) for kind in ("fused_uvm", "fused"))
    for level in (0.5, 0.8):
        for run in (found, expected):
            run.update(level)
            run.train(int(10 * level))
    assert all(map(torch.equal, found.state(), expected.state()))


def test_cached_tables_share_a_batch_with_others() -> None:
    """One of them may have finer blocks."""
    finer = {"b": {"sparse_block_shape": (1, 4)}}
    found = Run({"a": "fused_uvm_caching", "b": "fused"}, cache=True, config=finer)
    expected = Run("fused", config=finer)
    assert len(kernels(found.model)) == 1
    for level in (0.5, 0.8):
        for run in (found, expected):
            run.update(level)
            run.train(int(10 * level))
    assert all(map(torch.equal, found.state(), expected.state()))


@pytest.mark.parametrize("block", FINER)
def test_fused_uvm_caching_takes_no_finer_blocks(block: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match="Table 'a': the compute kernel 'fused_uvm_caching' can't zero"
    ):
        Run("fused_uvm_caching", sparse_block_shape=block)


def test_it_takes_no_masks_of_ones_own() -> None:
    class Own(DataNormSparsifier):
        trains_removed = True

    sparsifier = Own(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(model_of("fused_uvm_caching"))
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have the compute kernel 'fused_uvm_cach"):
        MaskEnforcer(sparsifier).attach()


def test_rows_in_use_are_not_written_back() -> None:
    """Neither prefetched ones nor those that a backward will write; masks and weights stay."""
    run = Run("fused_uvm_caching", cache=True)
    run.train(0)
    run.update(0.5)
    before = run.state()
    out = run.look_up(1)
    with pytest.raises(ValueError, match=r"\['a', 'b'\].* a lookup waits for its backward"):
        run.update(0.8)
    del out
    assert all(map(torch.equal, before, run.state()))
    [kernel] = kernels(run.model)
    kernel.emb_module.timesteps_prefetched.append(1)
    with pytest.raises(ValueError, match=r"\['a', 'b'\].* prefetched .* TrainPipelineSparseDist"):
        run.update(0.8)
    kernel.emb_module.timesteps_prefetched.clear()
    assert all(map(torch.equal, before, run.state()))
