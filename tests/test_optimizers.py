"""The rows that optimizers' state says were touched: against the rows that were looked up."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from dist_sparse import Advanced, plan, remove_untouched, sparsify
from dist_sparse.optimizers import LookupRecord, records, state_of
from dist_sparse.tables.modules import ModelTables
from tests.dist.cells import build, cells, gathered
from tests.dist.plugin import on_ranks
from tests.dist.test_importance import learn
from tests.dist.test_untouched import looked_up

STEPS = 3


def ids_of(step: int) -> Tensor:
    return torch.tensor([[2 * step, 7], [2 * step, 11]])


def trained(make: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rows 0, 2, 4, 7 and 11 of 20 were looked up."""
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, 4, mode="sum", **options)
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(ids_of(step)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def known(model: nn.Module, optimizer: Any) -> Any:
    located = ModelTables(model).locate()
    return records(model, located, optimizer)[located[0].name]


PLAIN = [
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"sparse": True}),
    (torch.optim.Adam, {}),
    (partial(torch.optim.Adam, amsgrad=True, fused=True), {}),
    (partial(torch.optim.AdamW, weight_decay=0.1), {}),
    (torch.optim.SparseAdam, {"sparse": True}),
    (partial(torch.optim.RMSprop, centered=True, momentum=0.9), {}),
]


@pytest.mark.parametrize(("make", "options"), PLAIN)
def test_touched_rows_are_those_that_were_looked_up(make: Any, options: Any) -> None:
    model, optimizer = trained(make, **options)
    [record] = known(model, [None, optimizer])
    assert record.touched().nonzero().flatten().tolist() == [0, 2, 4, 7, 11]
    assert record.count_steps() == STEPS
    is_adagrad = type(optimizer) is torch.optim.Adagrad
    assert record.is_sum == is_adagrad
    assert record.lookups_only == (type(optimizer) is torch.optim.SparseAdam)
    if is_adagrad:
        assert torch.equal(record.row_sums() > 0, record.touched())
    record.states[0][13, 2] = math.nan
    assert record.touched()[13], "a row that diverged was read"


@pytest.mark.parametrize(("make", "options"), PLAIN)
def test_before_the_first_step_no_row_is_touched(make: Any, options: Any) -> None:
    model = nn.EmbeddingBag(20, 4, **options)
    [record] = known(model, make(model.parameters(), lr=0.1))
    assert not record.touched().any() and record.count_steps() == 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.SGD, "SGD keeps no state that tells"),
        (partial(torch.optim.SGD, momentum=0.9), "SGD keeps no state that tells"),
        (torch.optim.NAdam, "NAdam keeps no state that tells"),
        (
            partial(torch.optim.Adagrad, weight_decay=0.01),
            "weight_decay=0.01 of Adagrad is a gradient of every row at each step",
        ),
        (
            partial(torch.optim.Adam, weight_decay=0.5),
            "weight_decay=0.5 of Adam is a gradient of every row at each step",
        ),
        (
            partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
            "the sums of Adagrad begin at 0.1, where float32 absorbs small gradients",
        ),
        (
            partial(torch.optim.Adam, betas=(0.4, 0.5)),
            "the state of Adam fades to zero at the factor 0.5",
        ),
        (
            partial(torch.optim.RMSprop, alpha=0.3),
            "the state of RMSprop fades to zero at the factor 0.3",
        ),
    ],
)
def test_reasons_why_it_is_unknown(make: Any, reason: str) -> None:
    assert known(*trained(make)) == reason


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam])
def test_gradients_that_float16_loses(make: Any) -> None:
    """A gradient of 1e-4 trains a row, and its square is 0. Adam's moments may have been cast."""
    model = nn.EmbeddingBag(20, 4, mode="sum", dtype=torch.float16)
    before = model.weight.detach().clone()
    optimizer = make(model.parameters(), lr=0.1, eps=1e-3)
    (model(ids_of(0)) * 1e-4).sum().backward()
    optimizer.step()
    trained_rows = (model.weight != before).any(1)
    assert trained_rows.nonzero().flatten().tolist() == [0, 7, 11]
    assert "is float16, where small gradients" in known(model, optimizer)


def test_state_in_another_order_than_its_weights() -> None:
    """It is there, and can't be read by rows: it is not taken for none."""
    model = nn.Embedding.from_pretrained(torch.randn(4, 20).t(), freeze=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert not known(model, optimizer)[0].touched().any()
    model(ids_of(0)).sum().backward()
    optimizer.step()
    assert (
        known(model, optimizer) == "the state of Adam has another shape or order than its weights"
    )


def test_a_frozen_table() -> None:
    model, optimizer = trained(torch.optim.Adam)
    model.requires_grad_(False)
    assert "frozen" in known(model, optimizer)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adam])
def test_an_optimizer_in_the_backward_is_found_in_the_model(make: Any) -> None:
    """As under TorchRec's apply_optimizer_in_backward() before tables are sharded: no one else has
    it. Passed, it counts once."""
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, 4, mode="sum")
    apply_optimizer_in_backward(make, model.parameters(), {"lr": 0.1})
    inside: Any = model.weight
    for optimizer in (None, inside._in_backward_optimizers):
        assert known(model, optimizer)[0].count_steps() == 0
    for step in range(STEPS):
        model(ids_of(step)).square().sum().backward()
    for optimizer in (None, inside._in_backward_optimizers):
        [record] = known(model, optimizer)
        assert record.touched().nonzero().flatten().tolist() == [0, 2, 4, 7, 11]
        assert record.count_steps() == STEPS
    assert remove_untouched(model, trust_record=True).removed == {"weight": 15}


def test_each_of_several_optimizers_counts() -> None:
    """Those that never stepped the table do not, whichever comes last."""
    model, first = trained(torch.optim.Adagrad)
    idle = torch.optim.Adam(model.parameters())
    for order in ([first, idle], [idle, first]):
        [record] = known(model, order)
        assert record.is_sum and record.count_steps() == STEPS
    second = torch.optim.Adam(model.parameters())
    second.zero_grad()
    model(torch.tensor([[19]])).sum().backward()
    second.step()
    for order in ([first, second, idle], [second, idle, first]):
        [record] = known(model, order)
        assert record.touched().nonzero().flatten().tolist() == [0, 2, 4, 7, 11, 19]
        assert record.count_steps() == STEPS + 1 and not record.is_sum
    assert plan(model, "90%", optimizer=[first, second]).untouched == {"weight": 14}


@pytest.mark.parametrize(
    "make", [torch.optim.NAdam, partial(torch.optim.Adam, weight_decay=0.1), torch.optim.Adamax]
)
def test_an_optimizer_without_a_record_that_has_stepped(make: Any) -> None:
    """Its state shows that it has: the record of the other one misses its rows."""
    model, first = trained(torch.optim.Adagrad)
    second = make(model.parameters())
    assert isinstance(known(model, [first, second]), list)
    second.zero_grad()
    model(torch.tensor([[19]])).sum().backward()
    second.step()
    for order in ([first, second], [second, first]):
        assert type(second).__name__ in known(model, order)


def test_groups_with_options_of_their_own() -> None:
    """Weight decay of other parameters is none of a table's."""
    model = nn.ModuleDict({"user": nn.EmbeddingBag(20, 4), "over": nn.Linear(4, 1)})
    groups = [
        {"params": model["over"].parameters(), "weight_decay": 0.1},
        {"params": model["user"].parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    model["over"](model["user"](ids_of(0))).sum().backward()
    optimizer.step()
    [record] = known(model, optimizer)
    assert record.touched().nonzero().flatten().tolist() == [0, 7, 11]


def test_state_that_fades_where_small_floats_are_flushed_to_zero() -> None:
    trial = trained(torch.optim.Adam)
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    try:
        assert known(*trial) == "torch.set_flush_denormal() lets the state of Adam fade to zero"
    finally:
        torch.set_flush_denormal(False)
    assert isinstance(known(*trial), list)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.Adam, betas=(0.9, 0.6)),
        partial(torch.optim.Adam, betas=(0.6, 0.9), foreach=True),
        partial(torch.optim.Adam, betas=(0.0, 0.51), fused=True),
        partial(torch.optim.RMSprop, alpha=0.6),
    ],
)
def test_moments_shrink_and_never_vanish(make: Any) -> None:
    """The smallest float times a factor above 0.5 rounds to itself: 1,000 steps pass the range of
    float32."""
    model, optimizer = trained(make)
    weight = next(model.parameters())
    for _ in range(1000):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    [record] = known(model, optimizer)
    assert record.touched().nonzero().flatten().tolist() == [0, 2, 4, 7, 11]
    assert max(float(state.abs().max()) for state in record.states) < 1e-37


class SignSGD(torch.optim.Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS, SignSGD])
def test_an_optimizer_whose_state_never_tells_whether_it_has_stepped(make: Any) -> None:
    """It may have trained rows that the other one has not seen."""
    model, optimizer = trained(torch.optim.Adam)
    other = make(model.parameters(), lr=0.1)
    for order in ([optimizer, other], [other, optimizer]):
        assert known(model, order) == f"{make.__name__} keeps no state that tells"
    # Not of this table.
    other = make(nn.Linear(2, 2).parameters(), lr=0.1)
    assert isinstance(known(model, [optimizer, other])[0], LookupRecord)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_state_that_a_cast_may_have_emptied(make: Any) -> None:
    """Torch casts it to the type of the weights when it is loaded."""
    _, optimizer = trained(make)
    half = nn.EmbeddingBag(20, 4, mode="sum").half()
    loaded = make(half.parameters(), lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    assert "is float16, where small gradients" in known(half, loaded)


def test_an_optimizer_of_a_part_of_a_table() -> None:
    model, optimizer = trained(torch.optim.Adam)
    part = nn.Parameter(next(model.parameters()).data[10:15])
    other = torch.optim.Adam([part], lr=0.1)
    part.grad = torch.ones_like(part)
    other.step()
    reason = "the state of Adam has another shape or order than its weights"
    assert known(model, other) == known(model, [optimizer, other]) == reason


def test_the_optimizer_that_has_a_record_counts() -> None:
    model, optimizer = trained(torch.optim.Adam)
    idle = torch.optim.NAdam(model.parameters(), lr=0.1)
    for order in ([optimizer, idle], [idle, optimizer], {"a": optimizer, "b": idle}):
        assert isinstance(known(model, order)[0], LookupRecord)
    assert known(model, None) == "no optimizer was passed that steps it"


@pytest.mark.parametrize(
    "make",
    [
        *(torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop),
        partial(torch.optim.AdamW, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_level_untouched_plan_and_records_are_one(make: Any, whole: bool) -> None:
    """A loss term over the whole table reaches every row: nothing is removed."""
    model, optimizer = trained(make)
    if whole:
        next(model.parameters()).square().sum().backward()
        optimizer.step()
    [record] = known(model, optimizer)
    answer = plan(model, "90%", optimizer=optimizer)
    sparse = sparsify(
        model, optimizer, level="untouched", end=0, advanced=Advanced(min_rows=0, trust_record=True)
    )
    with sparse, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse.step()
        kept = sparse.sparsifier.full_mask("weight").any(1)
    assert torch.equal(kept, record.touched())
    if whole:
        assert kept.all() and "every row has a gradient" in answer.unknown["weight"]
    else:
        assert answer.untouched == {"weight": 15} and int((~kept).sum()) == 15


def test_level_untouched_waits_for_the_first_step() -> None:
    """Adam has no state before it."""
    model = nn.EmbeddingBag(20, 4, mode="sum")
    optimizer = torch.optim.Adam(model.parameters())
    with sparsify(
        model, optimizer, level="untouched", end=2, advanced=Advanced(min_rows=0, trust_record=True)
    ) as sparse:
        for step in range(3):
            optimizer.zero_grad()
            model(ids_of(step)).square().sum().backward()
            optimizer.step()
            sparse.step()
        kept = sparse.sparsifier.full_mask("weight").any(1)
    assert kept.nonzero().flatten().tolist() == [0, 2, 4, 7, 11]


@pytest.mark.parametrize(
    ("level", "make"),
    [
        (0.5, torch.optim.Adam),
        ("untouched", torch.optim.SGD),
        ("untouched", partial(torch.optim.Adam, weight_decay=0.1)),
    ],
)
def test_touched_or_not_is_no_score(level: Any, make: Any) -> None:
    model, optimizer = trained(make)
    with pytest.raises(ValueError, match="Table 'weight': no Adagrad steps it, so there are no"):
        sparsify(
            model, optimizer, level=level, end=0, advanced=Advanced(min_rows=0, score="accumulator")
        )
    assert not model._forward_pre_hooks


@on_ranks(2)
@pytest.mark.parametrize("kind", ["RowWiseAdagrad", "Adagrad", "SGD"])
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "mixed", "row_wise_dense_kernel"])
def test_fused_and_sharded_tables(name: str, kind: str) -> None:
    """Fused optimizers of a CPU, beside Adam for tables that TorchRec does not fuse."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from tests.dist.enforcing import optimizer_of

    cell = cells(2)[name]
    make = RowWiseAdagrad if kind == "RowWiseAdagrad" else getattr(torch.optim, kind)
    model = build(cell, make)
    optimizer = optimizer_of(model)
    before = gathered(model)
    for step in range(2):
        learn(model, optimizer, cell, step)
    assert before.keys() == {table.name for table in cell.tables}
    located = ModelTables(model).locate()
    found = records(model, located, optimizer)
    for data, table in zip(located, cell.tables, strict=True):
        read = looked_up(cell, table, batches=2)
        of_table = found[data.name]
        is_fused = data.kernel == "fused"
        if is_fused and kind == "SGD" and data.shards:
            assert of_table == "its fused optimizer keeps no state of rows"
            continue
        assert isinstance(of_table, list) and len(of_table) == len(data.shards)
        for (rect, _), record in zip(data.shards, of_table, strict=True):
            assert torch.equal(record.touched(), read[rect.row : rect.row_end]), data.name
            assert record.count_steps() == (None if is_fused and kind == "Adagrad" else 2)
            assert record.is_sum == record.lookups_only == is_fused


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_a_step_count_is_no_state_of_the_row_of_a_table_of_one_row(make: Any) -> None:
    """It has one value, and no dimension: resetting removed rows would restart the bias
    correction."""
    table = nn.EmbeddingBag(1, 4, mode="sum")
    optimizer = make(table.parameters())
    table(torch.tensor([[0]])).sum().backward()
    optimizer.step()
    assert "step" in optimizer.state[table.weight]
    found = state_of(optimizer, table.weight, table.weight)
    assert found and all(state.shape == (1, 4) for state, _ in found.values())
