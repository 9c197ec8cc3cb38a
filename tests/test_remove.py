"""`remove_untouched()` in one process: records, proofs, and 200 random trainings of which some lost
a part of their record."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import compact, export, load_served, plan, remove_untouched
from dist_sparse.ids.counts import LookupCounts, count_lookups
from dist_sparse.tables.initial import trained_rows

pytestmark = pytest.mark.whole  # rows that training has read are never removed

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "row-wise": partial(RowWiseAdagrad, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.001),
    "adamw without decay": partial(torch.optim.AdamW, lr=0.001, weight_decay=0),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001),
}


def bags(rows: int, dim: int, **config: Any) -> EmbeddingBagCollection:
    """A collection of one table."""
    table = EmbeddingBagConfig(
        name="user", num_embeddings=rows, embedding_dim=dim, feature_names=["user_id"], **config
    )
    return EmbeddingBagCollection([table])


def batch(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["user_id"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, steps: int = 3
) -> list[KeyedJaggedTensor]:
    """Take steps whose lookups are among ``ids``; return the batches."""
    batches = []
    for _ in range(steps):
        batches.append(batch(ids[torch.randint(len(ids), (16,))]))
        optimizer.zero_grad()
        (model(batches[-1]).values() * torch.randn(16, 1)).sum().backward()
        optimizer.step()
    return batches


def weight(model: Any) -> Tensor:
    return model.embedding_bags["user"].weight.data


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exactly_the_rows_without_a_lookup(name: str) -> None:
    model = bags(200, 16)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    batches = train(model, optimizer, torch.arange(0, 120))
    read = torch.cat([each.values() for each in batches]).unique()
    before = weight(model).clone()
    removed = remove_untouched(model, optimizer)
    assert removed.removed == {"user": 200 - len(read)}
    assert torch.equal(weight(model)[read], before[read])
    gone = torch.ones(200, dtype=torch.bool).index_fill(0, read, False)
    assert not weight(model)[gone].any()
    assert "3 steps" in repr(removed)
    # Nothing stays: training goes on as if it had never been called.
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_the_result_takes_the_place_of_sparse(tmp_path: Path) -> None:
    model = bags(200, 16)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, torch.arange(50))
    removed = remove_untouched(model, optimizer)
    export(model, removed, tmp_path / "served")
    ids = batch(torch.arange(200))
    expected = model(ids).values()
    assert torch.equal(load_served(tmp_path / "served")(ids).values(), expected)
    smaller = compact(model, removed, optimizer=optimizer)
    assert torch.equal(smaller(ids).values(), expected)


def test_weights_without_their_optimizer_state_are_refused() -> None:
    """The reproduction: trained, loaded without the state, three steps more."""
    model = bags(5000, 8)
    train(model, torch.optim.Adagrad(model.parameters(), lr=0.01), torch.arange(2000), steps=300)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    train(model, optimizer, torch.arange(2000))
    before = weight(model).clone()
    answer = plan(model, "5%", optimizer=optimizer)
    assert not answer.untouched and "lossless" not in str(answer)
    assert "Unknown of user: the record does not cover its training" in str(answer)
    with pytest.raises(
        ValueError,
        match=r"table 'user' \([\d,]+ of the 4,9\d\d rows that the record calls never read hold values .* 3 steps",
    ):
        remove_untouched(model, optimizer)
    assert torch.equal(weight(model), before)
    remove_untouched(model, optimizer, trust_record=True)
    assert not weight(model)[3000:].any()


def kinds(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An initializer, and the configuration that has it."""
    low = rng.choice([-0.05, -0.04, -0.03])
    return rng.choice(
        [
            ("default", {}),
            ("bounds", {"weight_init_min": low, "weight_init_max": 0.05}),
            ("init_fn", {"init_fn": partial(nn.init.uniform_, a=6 * low, b=0.3)}),
            ("one-sided", {"weight_init_min": rng.choice([0.0, 0.04]), "weight_init_max": 0.05}),
            ("normal", {"init_fn": nn.init.normal_}),
        ]
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_trained_row_is_never_removed(seed: int) -> None:
    """Whatever part of the record is lost: all of it, or the sums of some rows."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, dim = rng.choice([40, 300, 2000]), rng.choice([8, 16, 32, 64])
    kind, config = kinds(rng)
    model = bags(rows, dim, **config)
    optimizer_of = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
    optimizer = optimizer_of(list(model.parameters()))
    initial = weight(model).clone()
    most = rng.choice([rows, rows // 2, max(2, rows // 20)])
    train(model, optimizer, torch.randperm(rows)[:most], steps=rng.choice([1, 5, 40]))
    lost = rng.choice(["nothing", "all", "some rows"])
    if lost == "all":
        optimizer = optimizer_of(list(model.parameters()))
        train(model, optimizer, torch.randperm(rows)[:most], steps=2)
    elif lost == "some rows":
        for state in optimizer.state.values():
            for value in state.values():
                if value.dim() == 2:
                    value[: rows // 2] = 0
    trained = (weight(model) != initial).any(1)
    try:
        remove_untouched(model, optimizer)
    except ValueError:
        # An honest record is refused only where values prove nothing.
        assert lost != "nothing" or kind in ("normal", "one-sided")
    gone = (weight(model) == 0).all(1)
    assert not (gone & trained).any()
    if lost == "nothing" and kind not in ("normal", "one-sided"):
        assert torch.equal(gone, ~trained)


class TestBounds:
    """Of a table between bounds where many or all of float32's numbers can be drawn."""

    @pytest.mark.parametrize(
        ("bounds", "dim"), [((0.5, 1.0), 64), ((-3.0, -2.0), 16), ((0.0, 1.0), 8), ((-0.1, 0.1), 2)]
    )
    def test_values_that_prove_too_little(self, bounds: tuple[float, float], dim: int) -> None:
        """A row may be trained and stay among the draws, as here: its optimizer is a new one."""
        torch.manual_seed(0)
        model = bags(60, dim, init_fn=partial(nn.init.uniform_, a=bounds[0], b=bounds[1]))
        train(model, torch.optim.SGD(model.parameters(), lr=1e-5), torch.arange(2), steps=1)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, torch.arange(20, 40))
        before = weight(model).clone()
        with pytest.raises(ValueError, match=rf"'user' \({dim} columns of numbers in .* too few"):
            remove_untouched(model, optimizer)
        assert torch.equal(weight(model), before)

    @pytest.mark.parametrize(
        ("bounds", "dim"), [((-0.1, 0.1), 4), ((0.0, 1.0), 16), ((0.25, 0.25), 8)]
    )
    def test_values_that_prove_enough(self, bounds: tuple[float, float], dim: int) -> None:
        model = bags(60, dim, init_fn=partial(nn.init.uniform_, a=bounds[0], b=bounds[1]))
        optimizer = torch.optim.Adam(model.parameters())
        batches = train(model, optimizer, torch.arange(30))
        read = torch.cat([each.values() for each in batches]).unique()
        assert remove_untouched(model, optimizer).removed == {"user": 60 - len(read)}


class TestRecords:
    @pytest.fixture
    def trained(self) -> Iterator[Any]:
        model = bags(100, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        yield model, train(model, optimizer, torch.arange(30))

    def test_counts(self, trained: Any, tmp_path: Path) -> None:
        """Of an optimizer without sums; as tensors, or from a folder."""
        model, batches = trained
        counts = count_lookups(batches, model)
        assert counts.batches == 3 and int(counts["user"].sum()) == 48
        assert "LookupCounts of 3 batches" in repr(counts)
        counts.save(tmp_path / "counts")
        loaded = LookupCounts.load(tmp_path / "counts")
        assert torch.equal(loaded["user"], counts["user"]) and loaded.batches == 3
        expected = 100 - int(counts["user"].count_nonzero())
        removed = remove_untouched(model, record=tmp_path / "counts")
        assert removed.removed == {"user": expected}

    def test_counts_by_feature_without_a_model(self, trained: Any) -> None:
        model, batches = trained
        counts = count_lookups(batches, {"user_id": 100})
        assert torch.equal(counts["user_id"], count_lookups(batches, model)["user"])
        assert remove_untouched(model, record=counts).removed["user"] > 0

    def test_a_record_of_other_batches_is_refused(self, trained: Any) -> None:
        model, batches = trained
        with pytest.raises(ValueError, match="does not draw"):
            remove_untouched(model, record=count_lookups(batches[:1], model))

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"item": torch.ones(100, dtype=torch.int64)}, "no lookups of table 'user'"),
            ({"user": torch.ones(99, dtype=torch.int64)}, "99 rows, and table 'user' has 100"),
            ({"user": torch.ones(100)}, "must be whole numbers"),
            ({"user": [1] * 100}, "must be whole numbers"),
            ({"user": torch.ones(100, dtype=torch.complex64)}, "must be whole numbers"),
            ([torch.ones(100, dtype=torch.int64)], "record of type list: must be lookups of each"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, trained: Any, record: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            remove_untouched(trained[0], record=record)

    def test_no_record(self, trained: Any) -> None:
        with pytest.raises(ValueError, match="'user'"):
            remove_untouched(trained[0])

    def test_damage_is_refused(self, trained: Any, tmp_path: Path) -> None:
        count_lookups(trained[1], trained[0]).save(tmp_path / "counts")
        file = tmp_path / "counts" / "0.int64"
        file.write_bytes(bytes(8) + file.read_bytes()[8:])
        with pytest.raises(ValueError, match=r"0\.int64 does not fit"):
            remove_untouched(trained[0], record=tmp_path / "counts")

    def test_an_id_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="'user_id' has 10 rows: the id 10 is out of range"):
            count_lookups([batch(torch.tensor([3, 10]))], {"user_id": 10})

    def test_a_batch_of_another_kind(self) -> None:
        with pytest.raises(ValueError, match="batch of type list"):
            count_lookups([[1, 2]], {"user_id": 10})
        with pytest.raises(ValueError, match="No feature of the batch has a table"):
            count_lookups([{"item": torch.tensor([1])}], {"user_id": 10})


def test_the_share_of_lookups_that_read_zeros() -> None:
    model = bags(100, 16)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, torch.arange(10), steps=20)
    removed = remove_untouched(model, optimizer)
    assert removed.removed == {"user": 90}
    ids = torch.tensor([0, 1, 50, 2, 60, 70])
    lengths = torch.tensor([2, 0, 1, 3])
    share = removed.share([KeyedJaggedTensor(["user_id"], ids, lengths=lengths)])
    assert (share.lookups, share.removed) == ({"user": 6}, {"user": 3})
    assert (share.examples, share.affected) == (4, 2)
    assert "2 of 4 examples (50.0%) read zeros" in repr(share)


def drawn_on_cuda(rows: int, low: float, high: float, fused: bool, columns: int = 16) -> Tensor:
    """As CUDA computes it, with or without a fused multiply-add."""
    first, last = torch.tensor([low, high])
    drawn = (torch.randint(2**32, (rows, columns)).double() * 2.0**-32).float() + 2.0**-33
    if fused:
        return (drawn.double() * (last - first).double() + first.double()).float()
    return drawn * (last - first) + first


class TestTrainedRows:
    @pytest.mark.parametrize("fused", [True, False])
    def test_draws_of_cuda(self, fused: bool) -> None:
        bound = math.sqrt(1 / 999)
        weights = drawn_on_cuda(999, -bound, bound, fused)
        assert not trained_rows(weights, -bound, bound).any()
        moved = weights - 1e-5 * torch.randn(999, 16)
        assert trained_rows(moved, -bound, bound).float().mean() > 0.9

    def test_draws_of_cuda_that_prove_nothing(self) -> None:
        """Of few rows, or where floats near 0 are as far apart as the draws."""
        assert trained_rows(drawn_on_cuda(9, -0.1, 0.1, True), -0.1, 0.1).any()
        assert trained_rows(drawn_on_cuda(999, 0.0, 0.7, True), 0.0, 0.7).any()

    @pytest.mark.parametrize("bounds", [(-0.1, 0.1), (0.0, 0.7), (-3.0, 0.001)])
    @pytest.mark.parametrize("rows", [1, 5, 40, 1000])
    @pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
    def test_draws_of_a_cpu(self, bounds: tuple[float, float], rows: int, share: float) -> None:
        weights = torch.empty(rows, 8).uniform_(*bounds)
        trained = torch.arange(rows) < math.ceil(share * rows)
        weights[trained] -= 1e-4 * torch.randn(int(trained.sum()), 8)
        found = trained_rows(weights, *bounds)
        assert found.any() == trained.any() and not (found & ~trained).any()

    def test_one_trained_row_of_many(self) -> None:
        weights = torch.empty(5000, 8).uniform_(-0.1, 0.1)
        weights[77] -= 1e-6 * torch.rand(8)
        assert trained_rows(weights, -0.1, 0.1).nonzero().tolist() == [[77]]

    def test_some_rows_alone(self) -> None:
        weights = torch.empty(300_000, 8).uniform_(-0.1, 0.1)
        moved = torch.tensor([3, 77, 299_999])
        weights[moved] -= 1e-6 * torch.rand(3, 8)
        among = torch.rand(len(weights)) < 0.5
        among[moved] = torch.tensor([True, False, True])
        found = among.nonzero()[trained_rows(weights, -0.1, 0.1, among)]
        assert found.tolist() == [[3], [299_999]]

    def test_no_rows(self) -> None:
        assert trained_rows(torch.empty(0, 8), -1, 1).shape == (0,)
        assert not trained_rows(torch.zeros(3, 8), 0.5, 1).any()


def test_several_records_name_their_tables() -> None:
    model = nn.ModuleDict({name: nn.EmbeddingBag(40, 4, mode="sum") for name in ("a", "b")})
    optimizers = [torch.optim.Adagrad(model[name].parameters()) for name in ("a", "b")]
    for name, steps, optimizer in zip(("a", "b"), (1, 2), optimizers, strict=True):
        for _ in range(steps):
            model[name](torch.arange(8).view(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    text = repr(remove_untouched(model, optimizers, trust_record=True))
    assert "record of a: the optimizer's state, 1 step" in text
    assert "record of b: the optimizer's state, 2 steps" in text
