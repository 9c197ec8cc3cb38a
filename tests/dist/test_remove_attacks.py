"""`remove_untouched()` on ranks: replicas, weights that TorchRec's shards draw, ranks that know
something else, and random trainings that lose a part of their record. (C23)"""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Checkpoints, compact, expand, export, load_served, plan, remove_untouched
from dist_sparse.ids.counts import count_lookups
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import Cell, TableSpec, batch, build, drawn, gathered, set_weights
from tests.dist.copies import COPIES, SHARE, build_copies, copied_cells, first_copy
from tests.dist.enforcing import kernels, loss_of, optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_remove import train

pytestmark = pytest.mark.whole  # rows that training has read are never removed

adam = partial(torch.optim.Adam, lr=0.01)


def removes_the_unread(
    model: nn.Module, optimizer: Any, counts: dict[str, Tensor], initial: dict[str, Tensor]
) -> None:
    """Exactly the rows without a lookup; a table without any stays whole."""
    before = gathered(model)
    removed = remove_untouched(model, optimizer)
    for name, after in gathered(model).items():
        never = (counts[name] == 0) & bool(counts[name].any())
        assert torch.equal((before[name] == initial[name]).all(1), counts[name] == 0)
        assert torch.equal(after, before[name].masked_fill(never[:, None], 0.0)), name
        assert removed.removed[name] == int(never.sum())


def plain_cells(world: int) -> list[tuple[int, str]]:
    """Cells with weights of 32 bits."""
    return [(world, name) for name in trained_cells(world) if "16" not in name]


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name"), [*plain_cells(2), (4, "row_wise"), (4, "grid_shard"), (4, "mixed")]
)
def test_weights_that_the_shards_draw(world: int, name: str) -> None:
    """With bounds by the rows of the table, whatever part of it a shard is."""
    cell = trained_cells(world)[name]
    model = build(cell, initial=True)
    optimizer = optimizer_of(model, tables=adam)
    initial = gathered(model)
    counts = count_lookups(train(cell, model, optimizer, range(2)), model)
    removes_the_unread(model, optimizer, counts, initial)


@on_ranks(2)
def test_a_rank_whose_batches_have_no_ids() -> None:
    cell = trained_cells(2)["row_wise"]
    model = build(cell, initial=True)
    optimizer = optimizer_of(model, tables=adam)
    initial = gathered(model)
    features = batch(cell, seed=3, size=4)
    if dist.get_rank() == 1:
        lengths = torch.zeros_like(features.lengths())
        features = KeyedJaggedTensor(features.keys(), features.values()[:0], lengths=lengths)
    loss_of(model(features)).backward()
    optimizer.step()
    removes_the_unread(model, optimizer, count_lookups([features], model), initial)


@on_ranks(2)
@pytest.mark.parametrize(
    ("config", "is_known"),
    [
        ({"weight_init_min": -0.02, "weight_init_max": 0.03}, True),
        ({"init_fn": partial(nn.init.uniform_, a=-0.3, b=0.2)}, True),
        ({"init_fn": partial(nn.init.normal_, std=0.01)}, False),
        ({"data_type": DataType.FP16}, False),
    ],
)
def test_initializers_of_the_user(config: dict[str, Any], is_known: bool) -> None:
    """Each shard knows the one of its table."""
    tables = []
    for name in ("rows", "columns", "whole", "copy"):
        options = {"name": name, "feature_names": [name], **config}
        tables.append(EmbeddingBagConfig(num_embeddings=50, embedding_dim=16, **options))
    collection = EmbeddingBagCollection(tables)
    sharding = {
        "rows": row_wise(),
        "columns": column_wise(ranks=[0, 1]),
        "whole": table_wise(rank=1),
        "copy": data_parallel(),
    }
    weights = [collection.embedding_bags[name].weight for name in ("rows", "columns", "whole")]
    apply_optimizer_in_backward(RowWiseAdagrad, weights, {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    of_tables = construct_module_sharding_plan(
        collection, sharding, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        nn.Sequential(collection),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": of_tables}),
        sharders=[sharder],
    )
    optimizer = optimizer_of(model, tables=partial(RowWiseAdagrad, lr=0.1))
    ids = torch.arange(4) + 10 * dist.get_rank()
    features = KeyedJaggedTensor([*sharding], ids.repeat(4), lengths=torch.ones(16).long())
    model(features).values().float().sum().backward()
    optimizer.step()
    if is_known:
        assert remove_untouched(model, optimizer).removed == dict.fromkeys(sharding, 42)
    else:
        with pytest.raises(ValueError, match=r"not known to be uniform|is float16"):
            remove_untouched(model, optimizer)


class Towers(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse)
        self.item = nn.EmbeddingBag(30, 8, mode="sum", sparse=sparse)

    def forward(self, user: Tensor, item: Tensor | None) -> Tensor:
        read: Tensor = self.user(user).sum()
        return read if item is None else read + self.item(item).sum()


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "sparse"),
    [
        *((torch.optim.Adagrad, False), (torch.optim.Adam, False)),
        *((torch.optim.Adagrad, True), (torch.optim.SparseAdam, True)),
    ],
)
def test_replicas_of_plain_tables(make: Any, sparse: bool) -> None:
    """Each rank looks other rows up, and rank 0 no items. Where gradients are sparse, it looks one
    up: torch can't add a sparse gradient to none."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Towers(sparse), find_unused_parameters=not sparse)
    optimizer = make(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    none = torch.tensor([[7]]) if sparse else None
    for step in range(2):
        optimizer.zero_grad()
        items = torch.tensor([[7, step]]) if rank else none
        model(torch.tensor([[step + 10 * rank, 5]]), items).backward()
        optimizer.step()
    before = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
    removed = remove_untouched(model, optimizer, trust_record=True)
    assert removed.removed == {"user": 45, "item": 27}
    for name, rows in {"user.weight": [0, 1, 5, 10, 11], "item.weight": [0, 1, 7]}.items():
        weight = model.module.get_parameter(name)
        assert weight.any(1).nonzero().flatten().tolist() == rows
        assert torch.equal(weight[rows], before[name][rows])


@on_ranks(2)
def test_replicas_of_a_collection() -> None:
    """Under DDP: their values prove that the record covers the training, or that it does not."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(
        name="user", num_embeddings=100, embedding_dim=8, feature_names=["user_id"]
    )
    model = DistributedDataParallel(EmbeddingBagCollection([table]))
    optimizer = adam(model.parameters())
    first = 10 * dist.get_rank()
    lengths = torch.ones(5, dtype=torch.int64)
    ids = KeyedJaggedTensor(["user_id"], torch.arange(first, first + 5), lengths=lengths)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).values().sum().backward()
        optimizer.step()
    again = adam(model.parameters())
    again.zero_grad()
    single = KeyedJaggedTensor(["user_id"], torch.tensor([first]), lengths=torch.tensor([1]))
    model(single).values().sum().backward()
    again.step()
    with pytest.raises(
        ValueError,
        match="on this rank, 8 of the 98 rows that the record calls never read hold values",
    ):
        remove_untouched(model, again)
    assert remove_untouched(model, optimizer).removed == {"user": 90}


@on_ranks(2)
class TestRanksThatDiffer:
    """Replicas would lose other rows each. Refused on every rank, and nothing has changed."""

    def test_optimizers_of_replicas(self) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(Towers(False))
        optimizer = adam(model.parameters())
        model(torch.tensor([[1, 2]]), torch.tensor([[3, 4]])).backward()
        optimizer.step()
        if dist.get_rank() == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[model.module.user.weight][name][2] = 0
        with pytest.raises(ValueError, match=r"the record of user rows .* on rank 1"):
            remove_untouched(model, optimizer, trust_record=True)
        assert model.module.user.weight.any(1).all()

    @pytest.mark.parametrize("rows", [([0, 3], [1, 2]), ([0, 5], [5])])
    def test_counts_of_other_rows(self, rows: tuple[list[int], list[int]]) -> None:
        """The numbers of the rows add up to the same."""
        torch.manual_seed(0)
        model = DistributedDataParallel(Towers(False))
        counts = torch.zeros(50, dtype=torch.int64)
        counts[rows[dist.get_rank()]] = 1
        with pytest.raises(ValueError, match="rows read by the record"):
            remove_untouched(model, record={"user": counts}, include="user", trust_record=True)
        assert model.module.user.weight.any(1).all()


@on_ranks(SHARE * COPIES, local_world_size=SHARE)
def test_copies_are_refused() -> None:
    """Each copy has read other rows. A plan counts what any of them has read."""
    cell = copied_cells()["mixed"]
    model = build_copies(cell)
    initial = drawn(cell, seed=1)
    for data in ModelTables(model).locate():
        for rect, weights in data.shards:
            part = initial[data.name][rect.row : rect.row_end, rect.col : rect.col_end]
            weights.copy_(part)
    features = batch(cell, seed=dist.get_rank(), size=2)
    loss_of(model(features)).backward()
    before = first_copy(model)
    counts = count_lookups([features], model)
    included = ["user", "item", "word"]
    with pytest.raises(ValueError, match="copies that are trained apart"):
        remove_untouched(model, include=included, trust_record=True)
    assert all(torch.equal(weights, before[name]) for name, weights in first_copy(model).items())
    never = {name: int((counts[name] == 0).sum()) for name in included}
    assert plan(model, "50%").untouched == never


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "mixed", "ec_row_wise"])
def test_what_comes_after(name: str, tmp_path: Path) -> None:
    """Checkpoints, deltas, compact and expanded models hold the same weights, bit for bit."""
    cell = trained_cells(2)[name]
    model = build(cell, initial=True)
    optimizer = optimizer_of(model, tables=adam)
    train(cell, model, optimizer, range(2))
    removed = remove_untouched(model, optimizer)
    export(model, removed, tmp_path / "base")
    left = gathered(model)
    Checkpoints(tmp_path / "steps").save(1, model=model, optimizer=optimizer)
    model = build(cell, initial=True)
    optimizer = optimizer_of(model, tables=adam)
    Checkpoints(tmp_path / "steps").resume_latest(model=model, optimizer=optimizer)
    assert all(torch.equal(left[table], each) for table, each in gathered(model).items())
    # The state of the optimizer came along.
    again = remove_untouched(model, optimizer)
    assert again.removed == removed.removed
    train(cell, model, optimizer, range(7, 8))
    later = remove_untouched(model, optimizer)
    export(model, later, tmp_path / "delta", since=tmp_path / "base")
    export(model, later, tmp_path / "full")
    left = gathered(model)
    features = batch(cell, seed=5)
    chain = load_served([tmp_path / "base", tmp_path / "delta"])(features)
    full = load_served(tmp_path / "full")(features)
    for key in features.keys():  # noqa: SIM118
        one, other = chain[key], full[key]
        if not cell.bags:
            one, other = one.values(), other.values()
        assert torch.equal(one, other)
    dense = [part for _, part in optimizer._optims[1:]]
    small = compact(model, later, optimizer=dense)
    restored = expand(small, optimizer=dense)
    assert all(torch.equal(left[table], each) for table, each in gathered(restored).items())


def random_cell(rng: random.Random) -> Cell:
    """Three tables, each sharded in some way over two ranks."""
    ways = [row_wise(), column_wise(ranks=[0, 1]), table_wise(rank=1), data_parallel()]
    tables = []
    for number in range(3):
        rows, dim = rng.choice([40, 64, 250, 1024]), rng.choice([8, 16, 32])
        tables.append(TableSpec(f"table_{number}", rows, dim, (f"feature_{number}",)))
    sharding = {table.name: rng.choice(ways) for table in tables}
    return Cell("random", 2, sharding, tuple(tables))


def lose(rng: random.Random, model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    """Lose the sums of some rows, all of them perhaps, on these ranks."""
    share = rng.choice([0.3, 1.0])
    if dist.get_rank() not in ranks:
        return
    sums = []
    for kernel in kernels(model):
        if hasattr(kernel.emb_module, "split_optimizer_states"):
            sums += [states[0] for states in kernel.emb_module.split_optimizer_states()]
    for _, part in optimizer._optims[1:]:
        sums += [state["sum"] for state in part.state.values() if "sum" in state]
    for total in sums:
        total[: round(share * len(total))] = 0


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_trained_row_is_never_removed(seed: int) -> None:
    """Of two ranks: whatever is lost on one of them or on both, and in whatever form the weights
    were stored."""
    rng = random.Random(seed)
    cell = random_cell(rng)
    model = build(cell)
    initial = drawn(cell, seed)
    set_weights(model, initial)
    optimizer = optimizer_of(model, tables=partial(RowWiseAdagrad, lr=1e-4))
    for kernel in kernels(model):
        if hasattr(kernel.emb_module, "set_learning_rate"):
            kernel.emb_module.set_learning_rate(1e-4)
    train(cell, model, optimizer, range(rng.choice([1, 8])))
    lost = rng.choice(["nothing", "sums", "sums", "sums and bits", "sums of a diverged model"])
    if lost != "nothing":
        lose(rng, model, optimizer, rng.choice([[0], [1], [0, 1]]))
    if lost == "sums and bits":
        dtype = rng.choice([torch.bfloat16, torch.float16])
        set_weights(model, {name: each.to(dtype).float() for name, each in gathered(model).items()})
    before = gathered(model)
    trained = {name: (each != initial[name]).any(1) for name, each in before.items()}
    if lost == "sums of a diverged model":
        for name, each in before.items():
            each[trained[name]] = math.nan
        set_weights(model, before)
    refused = None
    try:
        remove_untouched(model, optimizer)
    except ValueError as error:
        refused = str(error)
    assert refused is None or lost != "nothing", refused
    for name, after in gathered(model).items():
        gone = ~trained[name] & bool(trained[name].any()) & (refused is None)
        expected = before[name].masked_fill(gone[:, None], 0.0)
        assert torch.equal(after.view(torch.int32), expected.view(torch.int32)), name


def many_tables(config: dict[str, Any]) -> tuple[Any, Any]:
    """A sharded collection of 30 tables, trained, and its batch."""
    names = [f"table_with_a_long_name_{number}" for number in range(30)]
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=200, embedding_dim=16, feature_names=[name], **config
        )
        for name in names
    ]
    collection = EmbeddingBagCollection(tables)
    weights = [bag.weight for bag in collection.embedding_bags.values()]
    apply_optimizer_in_backward(RowWiseAdagrad, weights, {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    made = construct_module_sharding_plan(
        collection,
        dict.fromkeys(names, row_wise()),
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        nn.Sequential(collection),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": made}),
        sharders=[sharder],
    )
    ids = torch.arange(dist.get_rank(), 200, 10)
    lengths = torch.ones(30 * len(ids)).long()
    return model, KeyedJaggedTensor(names, ids.repeat(30), lengths=lengths)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["trained rows", "another initializer", "counts", "no step"])
def test_a_refusal_of_many_tables_says_what_to_do(kind: str) -> None:
    """Once and whole, although each rank has other numbers of rows."""
    normal = {"init_fn": partial(nn.init.normal_, std=0.01)}
    model, features = many_tables({} if kind == "trained rows" else normal)
    record = None
    if kind == "counts":
        record = count_lookups([features], model)
    elif kind != "no step":
        model(features).values().sum().backward()
    if kind == "trained rows":
        for kernel in kernels(model):
            for states in kernel.emb_module.split_optimizer_states():
                states[0][: 50 + 10 * dist.get_rank()].zero_()
    before = gathered(model)
    with pytest.raises(ValueError, match="was refused on every rank, nothing was") as refused:
        remove_untouched(model, record=record, trust_record=kind == "no step")
    text = str(refused.value)
    remedy = (
        "or pass the lookups of all training data: record=dist_sparse.count_lookups(batches, model)"
    )
    if kind == "counts":
        remedy = "If these are the lookups of the whole training, pass trust_record=True:"
    assert text.count(remedy) == 1 and len(text) < 1600
    assert " and 26 more" in text and "..." not in text
    if kind == "trained rows":
        assert "rank 0: " in text and "rank 1: " in text
        assert text.count("(on this rank, ") == 2
        assert text.endswith(f" {remedy}.")
    if kind == "no step":
        assert "No row of 'table_with_a_long_name_0', " in text
    assert all(torch.equal(before[name], each) for name, each in gathered(model).items())
