"""expand(): the masked model comes back from the compact one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from dist_sparse import compact, expand, sparsify
from dist_sparse.compaction import replacing
from dist_sparse.compaction.moving import kept_rows
from dist_sparse.compaction.tables import initial_rows
from dist_sparse.optimizers import leaves
from dist_sparse.tables.modules import collection_of
from tests.compaction.test_compact import OPTIMIZERS, Net
from tests.compaction.test_compact import train as train_plain
from tests.compaction.test_compact_agreed import failing
from tests.compaction.test_compact_sharded import Run, cell_of, check_equal
from tests.dist.cells import batch, gathered
from tests.dist.plugin import on_ranks

CELLS = {
    1: ("column_wise",),
    2: ("table_wise", "row_wise", "row_wise_dense_kernel", "column_wise_fp16", "data_parallel"),
    4: ("table_row_wise", "grid_shard", "ec_column_wise", "mixed"),
}
EVERY = [(world, name) for world, names in CELLS.items() for name in names]


def reset_removed(optimizer: Any, tables: list[Tensor]) -> None:
    """Give rows of zeros the optimizer state of new ones."""
    [leaf] = leaves(optimizer)
    for table in tables:
        for state in leaf.state[table].values():
            if len(state.shape) and len(state) == len(table):
                state[~table.any(1)] = 0


def reset_all_removed(run: Run) -> None:
    collection = collection_of(run.model.module.sparse.tables)
    reset_removed(run.optimizer, [each for each in collection.parameters().values() if len(each)])
    for tables in collection.batches():
        for weight, states in zip(tables.weights(), tables.states(), strict=True):
            for state in states:
                state[~weight.any(1)] = 0


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_gives_the_masked_model_back(world: int, name: str) -> None:
    """With its weights and optimizer state: both train on alike."""
    cell = cell_of(world, name)
    masked, run = Run(cell), Run(cell)
    for each in (masked, run):
        each.train(3)
        each.enforcer.settle()
        reset_all_removed(each)
    before, rate = gathered(masked.model), 0.05
    run.compact()
    for group in run.model.fused_optimizer.param_groups:
        group["lr"] = rate
    run.model.fused_optimizer.step()
    run.model = expand(run.model, optimizer=run.optimizer)
    for group in masked.model.fused_optimizer.param_groups:
        group["lr"] = rate
    masked.model.fused_optimizer.step()
    masked.enforcer.detach()
    for table, weight in gathered(run.model).items():
        assert torch.equal(weight, before[table]), table
    # Sums over 4 ranks' shards round by where their memory begins.
    exact = world < 4
    for mine, other in zip(run.train(3), masked.train(3), strict=True):
        check_equal(mine, other, exact)
    after = gathered(masked.model)
    for table, weight in gathered(run.model).items():
        check_equal(weight, after[table], exact)


@on_ranks()
@pytest.mark.parametrize("world", [1, 2])
def test_initial_rows_are_those_of_the_table(world: int) -> None:
    """The same on every sharding; and the result is sparsified and compacted again."""
    for name in ("row_wise", "column_wise", "mixed"):
        run = Run(cell_of(world, name))
        kept = kept_rows(run.sparsifier, run.sparsifier.masks.tables.current())
        masked = gathered(run.model)
        run.compact()
        run.model = expand(run.model, optimizer=run.optimizer, initial="init", seed=5)
        for table, weight in gathered(run.model).items():
            rows, columns = weight.shape
            bound = rows**-0.5
            drawn = initial_rows(5, table, torch.arange(rows), range(columns), (-bound, bound))
            expected = torch.where(kept[table][:, None], masked[table], drawn)
            assert torch.equal(weight, expected), (name, table)
        run.prune(0.5)
        features = batch(run.cell, seed=dist.get_rank())
        output = run.model(features).detach()
        run.compact()
        torch.testing.assert_close(run.model(features), output, rtol=2e-6, atol=2e-6)


@on_ranks(2)
def test_refused() -> None:
    """On every rank, whichever is wrong; nothing is changed."""
    run = Run(cell_of(2, "data_parallel"))
    with pytest.raises(ValueError, match="No table of this model has lost rows"):
        expand(run.model, optimizer=run.optimizer)
    run.compact()
    with pytest.raises(ValueError, match=r"is stepped by a plain optimizer.*expand\(optimizer="):
        expand(run.model)
    one = "init" if dist.get_rank() else "zero"
    with pytest.raises(ValueError, match="initial"):
        expand(run.model, optimizer=run.optimizer, initial=one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 1: .*seed"):
        expand(run.model, optimizer=run.optimizer, seed=-dist.get_rank())
    run.prune(0.5)
    with pytest.raises(ValueError, match="are already sparsified: call detach"):
        expand(run.model, optimizer=run.optimizer)
    run.enforcer.detach()
    run.train(1)
    with (
        patch.object(replacing, "move_tables", failing(replacing.move_tables, 1)),
        pytest.raises(ValueError, match=r"rank 1: MemoryError: none is left"),
    ):
        expand(run.model, optimizer=run.optimizer)
    run.train(1)
    old = run.model
    run.model = expand(run.model, optimizer=run.optimizer)
    run.train(1)
    with pytest.raises(RuntimeError, match="was expanded, and its memory released"):
        old(batch(run.cell))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_tables(mode: str, name: str) -> None:
    runs = []
    for expands in (False, True):
        net: Any = Net(mode)
        optimizer = OPTIMIZERS[name](net)
        sparse = sparsify(net, optimizer, level=0.7, end=0)
        sparse.step()
        train_plain(net, optimizer, range(3))
        sparse.enforcer.settle()
        reset_removed(optimizer, [net.bags.weight, net.words.weight])
        masked = net.bags.weight.detach().clone()
        if expands:
            compact(net, sparse)
            assert expand(net, optimizer=optimizer) is net
            assert type(net.bags) is nn.EmbeddingBag and type(net.words) is nn.Embedding
            assert net.words is net.twice and net.words.padding_idx == 5
            assert torch.equal(net.bags.weight, masked)
        else:
            sparse.detach()
        runs.append(train_plain(net, optimizer, range(10, 20)))
    for mine, other in zip(*runs, strict=True):
        assert torch.equal(mine, other)


def test_optimizer_state_starts_as_the_optimizer_has_it() -> None:
    table: Any = nn.Sequential(nn.Embedding(40, 4, padding_idx=7))
    adagrad = torch.optim.Adagrad(table.parameters(), initial_accumulator_value=0.5)
    sparse = sparsify(table, adagrad, level=0.75, end=0)
    sparse.step()
    table(torch.arange(40)).square().sum().backward()
    adagrad.step()
    sums, kept = adagrad.state[table[0].weight]["sum"].clone(), table[0].weight.any(1)
    compact(table, sparse)
    expand(table, optimizer=adagrad, initial="init", seed=1)
    weight = table[0].weight.detach()
    drawn = initial_rows(1, "0", torch.arange(40), range(4))
    drawn[7] = 0
    assert torch.equal(weight[~kept], drawn[~kept])
    found = adagrad.state[table[0].weight]["sum"]
    assert torch.equal(found[kept], sums[kept]) and bool((found[~kept] == 0.5).all())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_that_lost_all_rows(name: str) -> None:
    net: Any = Net("sum")
    optimizer = OPTIMIZERS[name](net)
    with pytest.warns(UserWarning, match="level"):
        sparse = sparsify(net, optimizer, level=1.0, end=0)
    train_plain(net, optimizer, range(3))
    sparse.step()
    compact(net, sparse)
    expand(net, optimizer=optimizer)
    assert not net.bags.weight.any()
    train_plain(net, optimizer, range(3))
    assert net.bags.weight.any()


def bags(**how: Any) -> nn.Module:
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=30,
            embedding_dim=4,
            feature_names=[name],
            pooling=PoolingType.MEAN,
            **how,
        )
        for name in ("a", "b")
    ]
    return nn.ModuleDict({"bags": EmbeddingBagCollection(tables)})


def test_unsharded_collections() -> None:
    model: Any = bags()
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(24), lengths=torch.full((8,), 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level={"*a": 0.6}, end=0)
    model.bags(ids)
    sparse.step()
    before = model.bags(ids).values()
    weight = model.bags.embedding_bags["a"].weight.detach().clone()
    compact(model, sparse)
    expand(model, optimizer=optimizer)
    assert type(model.bags) is EmbeddingBagCollection
    assert torch.equal(model.bags.embedding_bags["a"].weight, weight)
    assert torch.equal(model.bags(ids).values(), before)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], str]] = {
    "an initializer": (torch.nn.init.zeros_, {}, "Table 'a' has an init_fn of its own"),
    "a default row": (None, {"removed": "default_row"}, "has default rows"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_tables_that_are_refused(case: str) -> None:
    init_fn, how, message = REFUSED[case]
    model: Any = bags(init_fn=init_fn)
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(24), lengths=torch.full((8,), 3))
    sparse = sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), level=0.5, end=0)
    model.bags(ids)
    sparse.step()
    compact(model, sparse, optimizer=(), **how)
    with pytest.raises(ValueError, match=message):
        expand(model, optimizer=(), initial="init")
