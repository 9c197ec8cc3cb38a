"""Compact tables that follow their traffic from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced, compact, sparsify
from dist_sparse.extras.following import FollowingTables, follow_kept_rows, following
from dist_sparse.extras.following import slotted as slotted_module
from dist_sparse.extras.following.slots import FollowingCollection
from tests.compaction.test_compact_sharded import Run, cell_of, check_equal
from tests.dist.cells import batch, build, gathered
from tests.dist.plugin import on_ranks

pytestmark = pytest.mark.whole

EVERY = [
    (1, "ec_row_wise"),
    (2, "mixed"),
    (2, "data_parallel"),
    (4, "row_wise"),
    (4, "ec_column_wise"),
]


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_kept_rows_become_slots(world: int, name: str) -> None:
    """The same rows, state and outputs; then ids that were removed come back."""
    cell = cell_of(world, name)
    small, live = Run(cell), Run(cell)
    for run in (small, live):
        run.train(3)
    if (world, name) == (4, "row_wise"):
        with pytest.raises(
            ValueError, match=r"'tiny' keeps 3 rows, too few .*: keep at least 4, or shard"
        ):
            live.compact(convert=follow_kept_rows)
        live.train(1)
        return
    small.compact()
    live.compact(convert=follow_kept_rows)
    rows = gathered(small.model)
    assert all(torch.equal(found, rows[key]) for key, found in gathered(live.model).items())
    slots = FollowingTables(live.model, live.optimizer, every=4, admit_after=2)
    features = batch(cell, seed=dist.get_rank())
    check_equal(live.model(features), small.model(features), True)
    for mine, other in zip(live.train(3), small.train(3), strict=True):
        check_equal(mine, other, True)
    [collection] = [each for each in live.model.modules() if isinstance(each, FollowingCollection)]
    before = {key: index.kept() for key, index in collection.table_indexes().items()}
    for _ in range(12):
        live.train(1)
        slots.step()
    after = {key: index.kept() for key, index in collection.table_indexes().items()}
    assert any(bool((after[key] & ~before[key]).any()) for key in before)
    for key, index in collection.following_ids.slots.items():
        assert int(before[key].sum()) == index.stored == int(after[key].sum())


def counts_here(slots: FollowingTables, table: str) -> torch.Tensor:
    """The counts of the ids that this rank owns. Collective."""
    return torch.cat([counts for _, counts in slots.state_dict()["counts"][table].writes])


@on_ranks()
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize(
    ("world", "name"), [(1, "ec_row_wise"), (2, "mixed"), (4, "row_wise"), (4, "ec_column_wise")]
)
def test_lookups_are_carried_over(world: int, name: str, decay: float) -> None:
    """The counts of ``score="frequency"`` go on, on the ranks that own the ids from now on."""
    cell = cell_of(world, name)
    model = build(cell, RowWiseAdagrad, {"lr": 0.1})
    sparse = sparsify(
        model,
        (),
        level=0.6,
        begin=2,
        end=2,
        advanced=Advanced(score="frequency", decay=decay),
        block="row",
    )
    for step in range(3):
        model(batch(cell, seed=100 * step + dist.get_rank())).square().mean().backward()
        sparse.step()
    expected = {}
    for key in sparse.sparsifier.masks.tables.names:
        table = sparse.sparsifier.masks.tables.table(key)
        lookups = torch.zeros(table.shape[0], dtype=torch.float64)
        for held in table.leftmost:
            lookups[held.mask.rect.row : held.mask.rect.row_end] = held.counts.double()
        dist.all_reduce(lookups)
        expected[key.removesuffix(".weight").rpartition(".")[2]] = (
            lookups.round().clamp(max=15).byte()
        )
    assert any(bool((lookups > 1).any()) for lookups in expected.values())
    model = compact(model, sparse, convert=follow_kept_rows)
    slots = FollowingTables(model, (), every=1)
    [collection] = [each for each in model.modules() if isinstance(each, FollowingCollection)]
    assert slots.moved.keys() <= expected.keys()
    for table in slots.moved:
        parts: Any = [None] * world
        dist.all_gather_object(parts, counts_here(slots, table))
        assert torch.equal(torch.cat(parts), expected[table])
        assert not collection.following_ids.lookup_stats[table].any()
    # No traffic since: the most looked-up ids hold the slots already.
    slots.step()
    assert not any(slots.moved.values())


@on_ranks(1)
def test_lookups_of_rows_that_are_no_ids_are_left_out() -> None:
    """A compact table that is compacted again has counts of its rows."""
    model, optimizer, features = _sharded("item")
    for convert in (None, follow_kept_rows):
        sparse = sparsify(
            model,
            optimizer,
            level=0.5,
            begin=1,
            end=1,
            advanced=Advanced(score="frequency"),
            block="row",
        )
        for _ in range(2):
            model(features).values().sum().backward()
            sparse.step()
        model = compact(model, sparse, convert=convert)
        optimizer = model.fused_optimizer
    slots = FollowingTables(model, every=1)
    assert not counts_here(slots, "item").any()


@on_ranks(1)
def test_a_protected_table_keeps_a_row_for_each_id() -> None:
    """What protect= and floor= left to the tables are their rows from then on."""
    model, optimizer, features = _sharded("user", "item")
    sparse = sparsify(
        model, optimizer, level=0.9, begin=0, end=0, advanced=Advanced(protect="user", floor=0.25)
    )
    model(features).values().sum().backward()
    sparse.step()
    model = compact(model, sparse, convert=follow_kept_rows)
    [collection] = [each for each in model.modules() if isinstance(each, FollowingCollection)]
    assert {name: index.stored for name, index in collection.table_indexes().items()} == {
        "item": 16
    }
    slots = FollowingTables(model, every=1)
    model(features)
    slots.step()
    assert collection.table_indexes()["item"].kept().sum() == 16


def _sharded(*names: str, **how: Any) -> tuple[Any, Any, KeyedJaggedTensor]:
    """A model of tables of 64 rows, its optimizer, and a batch that looks up each row twice."""
    configs = [_config(name, **how) for name in names]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(bags, device=torch.device("cpu"), plan=_by_table(bags))
    return model, model.fused_optimizer, _batch(*names)


def _config(name: str, **how: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=64, embedding_dim=16, feature_names=[name], **how
    )


def _batch(*names: str) -> KeyedJaggedTensor:
    ids = torch.arange(64).repeat(2 * len(names))
    return KeyedJaggedTensor(list(names), ids, lengths=torch.ones_like(ids))


def _by_table(bags: EmbeddingBagCollection) -> ShardingPlan:
    where = {config.name: table_wise(rank=0) for config in bags.embedding_bag_configs()}
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(bags, where, sharder, 1, 1, "cpu")
    return ShardingPlan({"": plan})


@on_ranks(1)
def test_refused() -> None:
    run = Run(cell_of(1, "row_wise"))
    run.train(3)
    with pytest.raises(ValueError, match=r"can't follow its traffic: it would have a default row"):
        run.compact(removed="default_row", convert=follow_kept_rows)
    run.compact(convert=follow_kept_rows)
    bags = EmbeddingBagCollection(tables=[_config("item")])
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)
    sparse = sparsify(bags, optimizer, level=0.5, begin=0, end=0)
    bags(_batch("item")).values().sum().backward()
    sparse.step()
    with pytest.raises(ValueError, match=r"traffic: it is in no sharded collection of TorchRec"):
        compact(bags, sparse, convert=follow_kept_rows)
    compact(bags, sparse)
    table = nn.EmbeddingBag(32, 4)
    plain = sparsify(table, torch.optim.SGD(table.parameters()), level=0.5, begin=0, end=0)
    plain.step()
    with pytest.raises(ValueError, match=r"^weight can't follow its traffic: it is in no sharded"):
        compact(table, plain, convert=follow_kept_rows)
    assert type(compact(table, plain)).__name__ == "CompactEmbeddingBag"


@on_ranks(1)
def test_narrower_tables_are_refused() -> None:
    rotation = pytest.importorskip("dist_sparse.extras.rotation").Rotation([["item"]])
    model, optimizer, features = _sharded("item")
    sparse = sparsify(
        model,
        optimizer,
        level=0.5,
        begin=0,
        end=0,
        block="col",
        advanced=Advanced(rotate=rotation),
    )
    model(features).values().sum().backward()
    sparse.step()
    with pytest.raises(ValueError, match=r"item.weight can't follow its traffic: it loses columns"):
        compact(model, sparse, convert=follow_kept_rows)


@on_ranks(2)
def test_an_argument_that_differs_between_ranks() -> None:
    run = Run(cell_of(2, "row_wise"))
    run.train(3)
    with pytest.raises(ValueError, match="convert"):
        run.compact(convert=None if dist.get_rank() else follow_kept_rows)
    run.compact()


@on_ranks(1)
def test_an_initializer_that_draws_no_single_rows() -> None:
    """FollowingTables could not draw new rows: the model stays as it was."""
    model, optimizer, features = _sharded("item", init_fn=nn.init.ones_)
    sparse = sparsify(model, optimizer, level=0.5, begin=0, end=0)
    model(features).values().sum().backward()
    sparse.step()
    before = model(features).values()
    with pytest.raises(ValueError, match=r"'item' has an init_fn of its own"):
        compact(model, sparse, convert=follow_kept_rows)
    assert torch.equal(model(features).values(), before)
    assert torch.equal(compact(model, sparse)(features).values(), before)


@on_ranks(2)
def test_a_rank_that_fails_leaves_all_models_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(2, "row_wise")
    run, other = Run(cell), Run(cell)
    run.train(3)
    other.train(3)

    def fails(inner: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(slotted_module, "stored_rows", fails)
        with pytest.raises(ValueError, match=r"rank 1.*no room"):
            run.compact(convert=follow_kept_rows)
    for mine, same in zip(run.train(2), other.train(2), strict=True):
        check_equal(mine, same, True)
    run.compact(convert=follow_kept_rows)


@on_ranks(2)
def test_a_rank_that_cannot_count_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks hear of it, and the lookups are not lost."""
    cell = cell_of(2, "row_wise")
    run, other = Run(cell), Run(cell)
    slots = []
    for each in (run, other):
        each.train(3)
        each.compact(convert=follow_kept_rows)
        slots.append(FollowingTables(each.model, each.optimizer, every=1))
        each.train(1)

    def fails(ids: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(slotted_module.FollowingIds, "count_batches", fails)
        with pytest.raises(ValueError, match=r"rank 1.*no room"):
            slots[0].step()
    slots[0].step()
    slots[1].step()
    for table in slots[0].moved:
        assert torch.equal(counts_here(slots[0], table), counts_here(slots[1], table))
    mine, same = run.model.state_dict(), other.model.state_dict()
    keys = [key for key in mine if key.endswith("id_of_slot")]
    assert keys and all(torch.equal(mine[key], same[key]) for key in keys)


@on_ranks(1)
def test_only_following_tables_need_names_of_their_own() -> None:
    """A table that keeps all its rows stays an ordinary one."""
    nets = nn.ModuleList()
    for _ in range(2):
        configs = [_config("item"), _config("user")]
        bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        nets.append(bags)
    plan = ShardingPlan({str(n): _by_table(bags).plan[""] for n, bags in enumerate(nets)})
    model = DistributedModelParallel(nets, device=torch.device("cpu"), plan=plan)
    features = _batch("item", "user")

    def pruned(level: dict[str, float]) -> Any:
        sparse = sparsify(
            model, (), level=level, begin=0, end=0, block="row", advanced=Advanced(score="norm")
        )
        for net in model.module:
            net(features).values().sum().backward()
        sparse.step()
        return sparse

    sparse = pruned({"*item*": 0.5, "*user*": 0.0})
    with pytest.raises(ValueError, match="another table has its name"):
        compact(model, sparse, convert=follow_kept_rows)
    with pytest.raises(ValueError, match="Invalid convert='yes': must be a function"):
        compact(model, sparse, convert="yes")  # type: ignore[arg-type]
    sparse.detach()
    sparse = pruned({"0.*item*": 0.5, "1.*item*": 0.0, "0.*user*": 0.0, "1.*user*": 0.5})
    model = compact(model, sparse, convert=follow_kept_rows)
    assert FollowingTables(model, ()).moved == {"item": 0, "user": 0}


@on_ranks(2)
def test_holders_that_differ_between_ranks() -> None:
    """Both are valid: only the next update can compare them."""
    run = Run(cell_of(2, "row_wise"))
    run.train(3)
    run.compact(convert=follow_kept_rows)
    slots = FollowingTables(run.model, run.optimizer, every=1)
    [collection] = [each for each in run.model.modules() if isinstance(each, FollowingCollection)]
    for index in collection.following_ids.slots.values():
        if dist.get_rank() == 1:
            index.id_of_slot[0] = -1
    before = {key: index.kept() for key, index in collection.table_indexes().items()}
    run.train(1)
    with pytest.raises(ValueError, match="holders"):
        slots.step()
    after = {key: index.kept() for key, index in collection.table_indexes().items()}
    assert all(torch.equal(before[key], after[key]) for key in before)


@on_ranks(4)
def test_a_rank_without_rows_of_a_following_table() -> None:
    """FBGEMM's CPU kernels would write wrong rows of a wider table beside it."""
    meta, sharder = torch.device("meta"), EmbeddingBagCollectionSharder()
    for rows in (5, 7):
        made = following(EmbeddingBagCollection([_config("item")], device=meta), {"item": rows})
        whole: Any = made.inner
        kinds: Any = {"item": row_wise()}
        plan = construct_module_sharding_plan(whole, kinds, sharder, 2, 4, "cpu")
        model = DistributedModelParallel(
            made, device=torch.device("cpu"), plan=ShardingPlan({"inner": plan})
        )
        if rows == 7:
            FollowingTables(model, ())
            break
        with pytest.raises(ValueError, match=r"'item' has 5 rows, too few .* with rows=7"):
            FollowingTables(model, ())
