"""`remove_untouched()` against trainings that leave an odd record: the rows that training has read
keep their values, and outputs on the training data stay the same, bit for bit. (C23)"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dist_sparse import (
    Advanced,
    Checkpoints,
    compact,
    expand,
    export,
    load_served,
    plan,
    remove_untouched,
    sparsify,
)
from dist_sparse.ids.counts import count_lookups
from tests.keywords import nested
from tests.test_remove import bags, batch, drawn_on_cuda, train, weight

pytestmark = pytest.mark.whole  # rows that training has read are never removed

adam = partial(torch.optim.Adam, lr=0.01)


def lost(model: nn.Module, ids: Tensor) -> torch.optim.Optimizer:
    """A new optimizer that has stepped ``ids`` alone, as after a load without optimizer state."""
    optimizer = adam(model.parameters())
    train(model, optimizer, ids)
    return optimizer


def is_refused(model: nn.Module, optimizer: torch.optim.Optimizer, reason: str) -> None:
    """By each way in, and nothing has changed."""
    before = weight(model).clone()
    with pytest.raises(ValueError, match=reason):
        remove_untouched(model, optimizer)
    with (
        sparsify(
            model, optimizer, level="untouched", end=0, advanced=Advanced(min_rows=0)
        ) as sparse,
        pytest.raises(ValueError, match=reason),
    ):
        model(batch(torch.arange(1)))
        sparse.step()
    answer = plan(model, "50%", optimizer=optimizer)
    assert not answer.untouched and list(answer.unknown) == ["user"]
    assert torch.equal(weight(model).view(torch.int32), before.view(torch.int32))


class TestWeightsWithoutTheirRecord:
    """The optimizer's state was lost after the training."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rows", [64, 1000, 1024])
    def test_stored_in_sixteen_bits(self, rows: int, dtype: torch.dtype) -> None:
        """Between the bounds of 1024 rows, most 16-bit floats can be drawn."""
        model = bags(rows, 16)
        train(model, torch.optim.SGD(model.parameters(), lr=1e-8), torch.arange(rows), steps=200)
        weight(model).copy_(weight(model).to(dtype).float())
        is_refused(model, lost(model, torch.arange(20)), "hold values that its initializer")

    def test_one_row_of_one_number(self) -> None:
        model = bags(1024, 16)
        weight(model)[500] = 2.0**-7
        is_refused(
            model,
            lost(model, torch.arange(20)),
            "1 of the 1,0.. rows that the record calls never read hold values",
        )

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_rows_that_diverged(self, value: float) -> None:
        model = bags(1000, 16)
        weight(model)[500:, 3] = value
        is_refused(
            model,
            lost(model, torch.arange(20)),
            "500 of the 98. rows that the record calls never read hold values",
        )

    @pytest.mark.parametrize("factor", [0.5, 0.25, 0.9, 1.1, -1.0])
    @pytest.mark.parametrize("rows", [1000, 1024])
    def test_scaled(self, rows: int, factor: float) -> None:
        model = bags(rows, 16)
        train(model, torch.optim.SGD(model.parameters(), lr=1e-5), torch.arange(rows), steps=200)
        weight(model).mul_(factor)
        is_refused(model, lost(model, torch.arange(20)), "hold values that its initializer")

    @pytest.mark.parametrize("change", ["clamped", "normalized", "averaged"])
    def test_changed_after_the_training(self, change: str) -> None:
        model = bags(1000, 16)
        initial = weight(model).clone()
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2), torch.arange(1000), steps=200)
        changed = {
            "clamped": weight(model).clamp(-0.03, 0.03),
            "normalized": nn.functional.normalize(weight(model), dim=1) / 100,
            "averaged": 0.9 * initial + 0.1 * weight(model),
        }
        weight(model).copy_(changed[change])
        is_refused(model, lost(model, torch.arange(20)), "hold values that its initializer")

    @pytest.mark.parametrize(("columns", "reason"), [(8, "too few"), (12, "too few"), (16, None)])
    def test_few_columns_drawn_on_cuda(self, columns: int, reason: str | None) -> None:
        """One trained row of 8 columns is missed there with 9%."""
        model = bags(1000, columns)
        bound = math.sqrt(1 / 1000)
        weight(model).copy_(drawn_on_cuda(1000, -bound, bound, True, columns))
        optimizer = adam(model.parameters())
        batches = train(model, optimizer, torch.arange(20))
        if reason:
            is_refused(model, optimizer, reason)
        else:
            read = torch.cat([each.values() for each in batches]).unique()
            assert remove_untouched(model, optimizer).removed["user"] == 1000 - len(read)


# One step each, on rows 0 to 15 of a table of 200.
def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for part in batch(torch.arange(8)), batch(torch.arange(8, 16)):
        model(part).values().sum().backward()
    optimizer.step()


def with_zeros_as_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for part in batch(torch.arange(8)), batch(torch.arange(8, 16)):
        optimizer.zero_grad(set_to_none=False)
        model(part).values().sum().backward()
        optimizer.step()


def scaled_by(value: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (model(batch(torch.arange(16))).values() * value).sum().backward()
    optimizer.step()


def with_a_skipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for ids, value in (torch.arange(100, 120), math.inf), (torch.arange(16), 1.0):
        optimizer.zero_grad()
        scaler.scale((model(batch(ids)).values() * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def with_a_schedule(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaled_by(1.0, model, optimizer)
    schedule.step()


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaled_by(1.0, model, optimizer)
    state = optimizer.state_dict()
    optimizer.state.clear()
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "way",
    [
        *(accumulate, with_zeros_as_gradients, with_a_skipped_step, with_a_schedule, resumed),
        *(partial(scaled_by, math.nan), partial(scaled_by, math.inf), partial(scaled_by, 1e-15)),
    ],
)
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop])
def test_ways_to_train(make: Any, way: Callable[..., None]) -> None:
    model = bags(200, 16)
    optimizer = make(model.parameters(), lr=0.01)
    way(model, optimizer)
    before = weight(model).clone()
    assert remove_untouched(model, optimizer).removed == {"user": 184}
    assert torch.equal(weight(model)[:16].view(torch.int32), before[:16].view(torch.int32))


def test_gradients_clipped_to_zero() -> None:
    """Nothing was trained, and nothing is removed."""
    model = bags(200, 16)
    optimizer = adam(model.parameters())
    model(batch(torch.arange(16))).values().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.0)
    optimizer.step()
    assert remove_untouched(model, optimizer).removed == {"user": 0}


def keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), adam)


def clipping(model: nn.Module) -> Any:
    kind = GradientClipping.NORM
    return GradientClippingOptimizer(keyed(model), clipping=kind, max_gradient=0.1)


def warmup(model: nn.Module) -> Any:
    stage = WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, value=0.1)
    return WarmupOptimizer(CombinedOptimizer([keyed(model)]), [stage])


@pytest.mark.parametrize(
    "wrap", [keyed, clipping, warmup, lambda model: OptimizerWrapper(keyed(model))]
)
def test_optimizers_in_wrappers(wrap: Callable[[nn.Module], Any]) -> None:
    model = bags(200, 16)
    optimizer = wrap(model)
    read = torch.cat([each.values() for each in train(model, optimizer, torch.arange(50))]).unique()
    assert remove_untouched(model, optimizer).removed == {"user": 200 - len(read)}
    with pytest.raises(ValueError, match="optimizer of type StepLR"):
        schedule = torch.optim.lr_scheduler.StepLR(adam(model.parameters()), 1)
        remove_untouched(model, schedule)  # type: ignore[arg-type]


# Tables of torch: nothing proves that the record covers the training.
def rows_left(table: nn.Module) -> list[int]:
    rows: list[int] = table.weight.any(1).nonzero().flatten().tolist()  # type: ignore[operator,union-attr]
    return rows


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("value", [0.0, 7.0])
@pytest.mark.parametrize("by", ["optimizer", "counts", "sparsify"])
def test_the_row_of_padding(kind: Any, value: float, by: str) -> None:
    """A lookup returns it and no gradient reaches it, except that a bag leaves it out."""
    model = kind(50, 8, padding_idx=3)
    with torch.no_grad():
        model.weight[3] = value
    optimizer = torch.optim.Adagrad(model.parameters())
    ids = torch.tensor([[1, 3, 5], [3, 3, 2]])
    model(ids).sum().backward()
    optimizer.step()
    before = model(ids).detach().clone()
    stays = [3] if value and kind is nn.Embedding else []
    planned = plan(model, "90%", optimizer=optimizer).untouched["weight"]
    if by == "sparsify":
        arguments = {"level": "untouched", "end": 0, "min_rows": 0, "trust_record": True}
        with sparsify(model, optimizer, **nested(**arguments)) as sparse:
            sparse.step()
    elif by == "counts":
        record = {"weight": torch.bincount(torch.tensor([1, 5, 2]), minlength=50)}
        remove_untouched(model, record=record, trust_record=True)
    else:
        remove_untouched(model, optimizer, trust_record=True)
    assert torch.equal(model(ids), before)
    assert rows_left(model) == sorted([1, 2, 5, *stays])
    assert planned == 47 - len(stays)


def test_padding_alone_is_no_record() -> None:
    model = nn.Embedding(50, 8, padding_idx=3)
    nn.init.ones_(model.weight)
    optimizer = adam(model.parameters())
    with pytest.raises(ValueError, match=r"^No row of 'weight' has a gradient: .* Load it with"):
        remove_untouched(model, optimizer, trust_record=True)
    assert (model.weight == 1).all()
    assert "no row has a gradient" in plan(model, "90%", optimizer=optimizer).unknown["weight"]


def test_a_frozen_table_is_refused() -> None:
    """It may be read ever since, without a trace."""
    model = nn.EmbeddingBag(50, 8)
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'weight' has no record .* frozen"):
        remove_untouched(model, optimizer, trust_record=True)
    with pytest.raises(ValueError, match=r"'weight' \(frozen"):
        sparsify(model, optimizer, level="untouched", end=0, advanced=Advanced(trust_record=True))
    assert "frozen" in plan(model, "90%", optimizer=optimizer).unknown["weight"]
    counts = count_lookups([{"weight": torch.tensor([[1, 2], [9, 1]])}], model)
    remove_untouched(model, record=counts, trust_record=True)
    assert rows_left(model) == [1, 2, 9]


@pytest.mark.parametrize("by", ["call", "sparsify"])
def test_each_of_several_optimizers_has_seen_its_steps(by: str) -> None:
    model = nn.EmbeddingBag(50, 8)
    optimizers = [torch.optim.Adagrad(model.parameters()), adam(model.parameters())]
    arguments = {"level": "untouched", "end": 0, "min_rows": 0, "trust_record": True}
    watch = (
        sparsify(model, optimizers, **nested(**arguments)) if by == "sparsify" else nullcontext()
    )
    with watch as sparse:
        for optimizer, row in zip(optimizers, (1, 5), strict=True):
            optimizer.zero_grad()
            model(torch.tensor([[row]])).sum().backward()
            optimizer.step()
        if sparse is None:
            removed = remove_untouched(model, optimizers, trust_record=True)
            assert "2 steps" in repr(removed)
        else:
            sparse.step()
    assert rows_left(model) == [1, 5]


class Tied(nn.Module):
    """One weight, which two modules read."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.item, self.other = nn.Embedding(50, 8), other
        self.other.weight = self.item.weight  # type: ignore[assignment]

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        read: Tensor = self.item(first) + self.other(second)
        return read


def test_tied_weights() -> None:
    model = Tied(nn.Embedding(50, 8))
    optimizer = adam(model.parameters())
    model(torch.tensor([1, 2]), torch.tensor([7, 7])).sum().backward()
    optimizer.step()
    remove_untouched(model, optimizer, trust_record=True)
    assert rows_left(model.item) == [1, 2, 7]


def test_a_padding_row_of_the_second_of_tied_modules() -> None:
    """The first one has none; the second returns the row, and it gets no gradient."""
    model = Tied(nn.Embedding(50, 8, padding_idx=3))
    optimizer = adam(model.parameters())
    ids = torch.tensor([1, 2]), torch.tensor([7, 3])
    model(*ids).sum().backward()
    optimizer.step()
    before = model(*ids)
    remove_untouched(model, optimizer, trust_record=True)
    # The first module's lookups have trained row 3 neither.
    assert rows_left(model.item) == [1, 2, 3, 7]
    assert torch.equal(model(*ids), before)


def test_optimizers_that_are_made_again_take_their_records_with_them() -> None:
    """One for each epoch: rows of the last one alone would stay."""
    model = nn.EmbeddingBag(50, 8)
    advanced = Advanced(min_rows=0, trust_record=True)
    optimizer = adam(model.parameters())
    sparse = sparsify(model, optimizer, level="untouched", end=0, advanced=advanced)
    for epoch in range(2):
        # The first one stays: sparsify() holds it.
        optimizer = adam(model.parameters())
        model(torch.tensor([[10 + epoch, 20 + epoch]])).sum().backward()
        optimizer.step()
    gc.collect()
    with sparse, pytest.raises(ValueError, match="an optimizer that has stepped it exists no more"):
        sparse.step()
    assert len(rows_left(model)) == 50


def test_a_tied_output_layer_reads_every_row() -> None:
    model = nn.ModuleDict({"item": nn.Embedding(50, 8), "out": nn.Linear(8, 50, bias=False)})
    model["out"].weight = model["item"].weight
    optimizer = adam(model.parameters())
    logits = model["out"](model["item"](torch.tensor([1, 2])))
    nn.functional.cross_entropy(logits, torch.tensor([3, 4])).backward()
    optimizer.step()
    assert remove_untouched(model, optimizer, trust_record=True).removed == {"item": 0}


def test_rows_that_max_norm_rescales() -> None:
    model = nn.Embedding(50, 8, max_norm=0.5)
    optimizer = adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    expected = model(torch.tensor([1, 2])).detach().clone()
    remove_untouched(model, optimizer, trust_record=True)
    assert torch.equal(model(torch.tensor([1, 2])), expected) and rows_left(model) == [1, 2]


@pytest.mark.parametrize("way", ["a gradient of zero", "no gradient"])
def test_reads_that_only_counts_see(way: str) -> None:
    """As the guide says."""
    model = bags(200, 16)
    optimizer = adam(model.parameters())
    batches = train(model, optimizer, torch.arange(50))
    silent = batch(torch.arange(100, 110))
    if way == "no gradient":
        with torch.no_grad():
            model(silent)
    else:
        optimizer.zero_grad()
        (model(silent).values() - 9.0).relu().sum().backward()
        optimizer.step()
    expected = model(silent).values().detach().clone()
    remove_untouched(model, record=count_lookups([*batches, silent], model))
    assert torch.equal(model(silent).values(), expected)
    remove_untouched(model, optimizer)
    assert not model(silent).values().any()


class TestCounts:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32])
    def test_flags_and_small_numbers(self, dtype: torch.dtype) -> None:
        model = bags(300, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        read = train(model, optimizer, torch.arange(30))
        counts = count_lookups(read, model)["user"]
        removed = remove_untouched(model, record={"user": counts.clamp(max=1).to(dtype)})
        assert removed.removed == {"user": int((counts == 0).sum())}

    def test_a_record_without_a_lookup(self) -> None:
        model = bags(300, 16)
        before = weight(model).clone()
        record = {"user": torch.zeros(300, dtype=torch.int64)}
        assert remove_untouched(model, record=record).removed == {"user": 0}
        assert torch.equal(weight(model), before)

    @pytest.mark.parametrize("name", ["item", "last_item"])
    def test_all_features_of_a_table_count(self, name: str) -> None:
        """One of them may have the table's name."""
        table = EmbeddingBagConfig(
            name=name,
            num_embeddings=50,
            embedding_dim=8,
            feature_names=["item", "last_item"],
            init_fn=nn.init.normal_,
        )
        model = EmbeddingBagCollection([table])
        batches = [{"item": torch.tensor([1, 2]), "last_item": torch.tensor([2, 9])}]
        record = count_lookups(batches, {"item": 50, "last_item": 50})
        remove_untouched(model, record=record, trust_record=True)
        assert rows_left(model.embedding_bags[name]) == [1, 2, 9]

    def test_weights_empty_batches_and_batch_sizes_by_feature(self) -> None:
        model = bags(300, 16)
        none = torch.empty(0, dtype=torch.int64)
        weighted = KeyedJaggedTensor(
            ["user_id"], torch.tensor([4, 5]), torch.tensor([0.0, 1.0]), torch.tensor([2])
        )
        varying = KeyedJaggedTensor(
            ["other", "user_id"],
            torch.tensor([1, 6, 7]),
            lengths=torch.tensor([1, 1, 1]),
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(["other", "user_id"], torch.tensor([[0, 0], [1, 0]])),
        )
        batches = [batch(none), {"user_id": none.view(0, 3)}, weighted, varying]
        counts = count_lookups(batches, model)["user"]
        assert counts.nonzero().flatten().tolist() == [4, 5, 6, 7]
        assert counts.sum() == 4

    def test_a_negative_id(self) -> None:
        with pytest.raises(ValueError, match="the id -1 is out of range"):
            count_lookups([batch(torch.tensor([3, -1]))], {"user_id": 10})


class TestWhatComesAfter:
    """Values and ids stay exact on the way."""

    @pytest.fixture
    def trained(self) -> tuple[Any, Any]:
        model = bags(200, 16)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        train(model, optimizer, torch.arange(50), steps=20)
        return model, optimizer

    def test_compact_and_expand(self, trained: tuple[Any, Any]) -> None:
        model, optimizer = trained
        removed = remove_untouched(model, optimizer)
        expected = weight(model).clone()
        small = compact(model, removed, optimizer=optimizer)
        # The record moves along; without it, nothing shows that it covers the training.
        assert remove_untouched(small, optimizer).removed == {"user": 0}
        state = optimizer.state.pop(*small.parameters())
        small(batch(torch.arange(9))).values().sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="hold values that its initializer"):
            remove_untouched(small, optimizer)
        del state
        ids = batch(torch.arange(200))
        trained_on = torch.arange(200) < 9
        restored = expand(small, optimizer=optimizer)
        assert torch.equal(weight(restored)[~trained_on], expected[~trained_on])
        assert restored(ids).values().shape == (200, 16)

    def test_checkpoints(self, trained: tuple[Any, Any], tmp_path: Path) -> None:
        model, optimizer = trained
        removed = remove_untouched(model, optimizer)
        expected = weight(model).clone()
        Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, sparse=removed)
        model = bags(200, 16)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        again = remove_untouched(model, optimizer)
        assert again.removed == {"user": 0}
        Checkpoints(tmp_path).resume_latest(model=model, optimizer=optimizer, sparse=again)
        assert torch.equal(weight(model), expected)
        # Of the call, which removed nothing.
        assert not again.removed and "loaded from a state" in repr(again)
        assert [table.removed_blocks for table in again.table_stats()] == [150]
        assert torch.equal(again.full_mask("user"), removed.full_mask("user"))

    def test_a_delta(self, trained: tuple[Any, Any], tmp_path: Path) -> None:
        """Rows that were removed are trained later, from zero, and served."""
        model, optimizer = trained
        base = tmp_path / "base"
        export(model, remove_untouched(model, optimizer), base)
        [later] = train(model, optimizer, torch.arange(40, 80), steps=1)
        removed = remove_untouched(model, optimizer)
        export(model, removed, tmp_path / "delta", since=base)
        export(model, removed, tmp_path / "full")
        ids = batch(torch.arange(200))
        expected = model(ids).values()
        assert removed.removed["user"] < 150 and expected[later.values()].any(1).all()
        for served in load_served([base, tmp_path / "delta"]), load_served(tmp_path / "full"):
            assert torch.equal(served(ids).values(), expected)


@pytest.mark.slow
def test_more_rows_than_float32_can_count() -> None:
    rows = 2**24 + 3
    model = bags(rows, 4)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    read = torch.tensor([0, 2**24 - 1, 2**24, 2**24 + 1, rows - 1])
    model(batch(read)).values().sum().backward()
    optimizer.step()
    assert remove_untouched(model, optimizer).removed == {"user": rows - 5}
    assert rows_left(model.embedding_bags["user"]) == read.tolist()


class TestWhatARefusalAdvises:
    def test_the_optimizer_only_where_none_steps_the_table(self) -> None:
        model = nn.EmbeddingBag(50, 8)
        with pytest.raises(ValueError, match="Pass the optimizer that steps it, or the lookups of"):
            remove_untouched(model)
        other = torch.optim.Adam(nn.EmbeddingBag(50, 8).parameters())
        with pytest.raises(ValueError, match="Pass the optimizer that steps it, or the lookups of"):
            remove_untouched(model, other)
        with pytest.raises(
            ValueError, match=r"SGD keeps .* tells\. Pass the lookups of"
        ) as refused:
            remove_untouched(model, torch.optim.SGD(model.parameters()))
        assert "optimizer that steps it" not in str(refused.value)

    def test_trust_where_counts_were_given(self) -> None:
        model = nn.ModuleDict({"user": nn.Embedding(50, 8), "item": nn.Embedding(50, 8)})
        record = {name: torch.arange(50) % 2 for name in model}
        with pytest.raises(
            ValueError, match=r"'user' \(the initial .* lookup counts\), 'item'\."
        ) as told:
            remove_untouched(model, record=record)
        assert str(told.value).endswith(
            " If these are the lookups of the whole training, pass trust_record=True: the rows are"
            " removed unchecked."
        )
        assert " record=" not in str(told.value)
        removed = remove_untouched(model, record=record, trust_record=True)
        assert removed.removed == {"user": 25, "item": 25}

    @pytest.mark.parametrize("trust", [False, True])
    def test_weights_without_their_state(self, trust: bool) -> None:
        """No step is covered: that is no success with 0 rows."""
        model = nn.EmbeddingBag(4000, 8)
        before = model.weight.detach().clone()
        with pytest.raises(ValueError, match=r"No row of 'weight' has a gradient: .* Load it with"):
            remove_untouched(model, adam(model.parameters()), trust_record=trust)
        assert torch.equal(model.weight, before)

    def test_one_of_two_states_is_missing(self) -> None:
        model = nn.ModuleDict({"user": nn.EmbeddingBag(50, 8), "item": nn.EmbeddingBag(50, 8)})
        optimizer = adam(model.parameters())
        model["user"](torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="No row of 'item' has a gradient"):
            remove_untouched(model, optimizer, trust_record=True)
        removed = remove_untouched(model, optimizer, exclude="item", trust_record=True)
        assert removed.removed == {"user": 48}
