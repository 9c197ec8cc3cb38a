"""Plans: what fits a budget, which of it is recommended, and what is known of traffic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import dist_sparse
from dist_sparse import plan, remove_untouched
from dist_sparse.ids.counts import count_lookups
from dist_sparse.ids.share import Share
from dist_sparse.planning.candidates import CODED, Candidate, TableShape
from dist_sparse.planning.plan import Plan
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.training.arguments import dense_bytes

TOWERS = {"user": (30_000, 64), "item": (40_000, 64)}
CROSSED = TOWERS | {"cross": (500_000, 64)}
GROUPS: Any = [["user", "item"]]


def used(answer: Plan) -> list[tuple[str, str, int]]:
    """Kind, dtype and columns of the first table of what is recommended."""
    return [
        (c.kind, c.candidate.dtype, c.candidate.shape(answer.tables[0])[1])
        for c in answer.recommended
    ]


@pytest.mark.parametrize(
    ("budget", "towers", "others"),
    [
        ("100%", [], []),
        ("50%", [("full", "int8", 64)], [("full", "int8", 64)]),
        ("27%", [("full", "int8", 64)], [("full", "int8", 64)]),
        (
            "20%",
            [("full", "int4", 64), ("columns", "int8", 44)],
            [("full", "int4", 64), ("small", "int8", 44)],
        ),
        (
            "9.4%",
            [
                ("columns", "int8", 20),
                ("columns", "int4", 40),
                ("small", "int8", 20),
                ("small", "int4", 40),
            ],
            [("small", "int8", 20), ("small", "int4", 40)],
        ),
        (
            "4.7%",
            [
                ("columns", "int8", 8),
                ("columns", "int4", 16),
                ("small", "int8", 8),
                ("small", "int4", 16),
                ("columns", "int4 by column", 24),
                ("columns", "codes of 4", 44),
            ],
            [
                ("small", "int8", 8),
                ("small", "int4", 16),
                ("small", "int4 by column", 24),
                ("small", "codes of 4", 44),
            ],
        ),
        (
            "2.3%",
            [("columns", "int4 by column", 8), ("columns", "codes of 8", 40)],
            [("small", "int4 by column", 8), ("small", "codes of 8", 40)],
        ),
        ("0.2%", [], []),
    ],
)
def test_the_measured_rules(budget: str, towers: Any, others: Any) -> None:
    """Those of a table of 64 columns, for two towers and for models that may read their tables
    otherwise."""
    assert used(plan(TOWERS, budget, rotate=GROUPS)) == towers
    assert used(plan(TOWERS, budget)) == others
    turned = plan(TOWERS, budget, rotate="table")
    assert used(turned) == others, "no gain was measured"


@pytest.mark.parametrize("budget", ["13%", "9.4%", "6.9%", "4.7%", "2.5%"])
def test_columns_or_small_tables_is_no_fixed_verdict(budget: str) -> None:
    """As frontier() does, at every budget: both are to be measured, and the reason says what
    decides."""
    answer = plan(TOWERS, budget, rotate=GROUPS)
    assert {kind for kind, *_ in used(answer)} >= {"columns", "small"}
    for what in ("the data", "compute", "Measure both"):
        assert what in answer.why
    assert answer.why.startswith(plan(TOWERS, "9.4%", rotate=GROUPS).why)


def test_what_fits_is_the_most_that_fits() -> None:
    for budget in ("20%", "9.4%", "3%"):
        answer = plan(CROSSED, budget, rotate=[list(CROSSED)])
        assert {choice.fits for choice in answer.choices} == {True, False}
        for choice in answer.choices:
            assert choice.fits == (choice.served.total <= answer.budget)
            if choice.kind in ("small", "columns"):
                step = CODED.get(choice.candidate.dtype, 4) / 64
                more = replace(choice.candidate, columns=choice.candidate.columns + step)
            else:
                continue
            assert more.served_bytes(answer.tables).total > answer.budget


def test_small_tables_are_not_turned_back() -> None:
    """Their basis would take more than they lose."""
    answer = plan({"user": (30_000, 64), "country": (4, 64)}, "9.4%", rotate="table")
    assert {choice.candidate.groups for choice in answer.choices if choice.kind == "columns"} == {
        (("user",),)
    }


def test_nothing_fits() -> None:
    answer = plan(TOWERS, 1000)
    assert (
        answer.recommended == ()
        and answer.why == "Nothing fits: even the narrowest tables take more."
    )
    assert plan(TOWERS, 420_000).recommended


def test_small_tables_have_no_codes() -> None:
    """Nor have tables whose columns the codes do not divide."""
    for shape in ((19_999, 64), (30_000, 3)):
        answer = plan({"user": shape}, "5%")
        assert not any(choice.candidate.dtype in CODED for choice in answer.choices)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.cross = nn.EmbeddingBag(50, 16), nn.EmbeddingBag(1000, 16)


def trained(optimizer: Any) -> tuple[Crossed, torch.optim.Optimizer]:
    """Every user, and every fourth crossed row, has had gradients."""
    model = Crossed()
    stepping = optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        (
            model.user(torch.arange(50)[None]).sum()
            + model.cross(torch.arange(0, 1000, 4)[None]).sum()
        ).backward()
        stepping.step()
    return model, stepping


def test_rows_that_training_has_never_touched(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adagrad)
    answer = plan(model, "10%", optimizer=optimizer)
    assert answer.untouched == {"cross": 750} and answer.hardly_read == {"cross": 0}
    assert answer.unknown["user"].startswith("every row has a gradient: all were looked up, or a")
    assert used(answer) == [("full", "int8", 16)], "9.3%"
    assert plan(model, "40%", optimizer=optimizer).recommended == answer.recommended, "lossless"
    [choice] = answer.recommended
    assert choice.candidate.levels == {"cross": 0.75} and "Remove nothing else" in answer.why
    assert "\ncross  1,000         750            0\n" in str(answer)
    assert "\nuser      50     unknown      unknown\n" in str(answer)
    assert "\nUnknown of user: every row has a gradient: all were looked up, or" in str(answer)
    assert json.loads(json.dumps(answer.to_json()))["unknown"] == answer.unknown
    text = " ".join(str(answer).split())
    assert "removing these rows is lossless on the training data, if the record covers it." in text
    users, crossed = torch.arange(50).view(10, 5), torch.arange(0, 1000, 4).view(-1, 5)
    before = model.user(users), model.cross(crossed)
    removed = paste(answer, 1, model, optimizer, tmp_path)["removed"]
    assert removed.removed == {"cross": 750}
    assert torch.equal(model.user(users), before[0]) and torch.equal(
        model.cross(crossed), before[1]
    )


def test_the_steps_that_a_record_covers_and_what_shows_that_it_covers_the_training() -> None:
    """Initial values of torch show nothing: the plan says so, and prints a call that does too."""
    model, optimizer = trained(torch.optim.Adagrad)
    text = " ".join(str(plan(model, "10%", optimizer=optimizer)).split())
    assert "Record of cross: the optimizer's state, 2 steps." in text
    assert "Nothing shows that the record covers the training of cross: the initial values" in text
    assert (
        "# trust_record: you say that the record covers the whole training removed ="
        " ds.remove_untouched( model, optimizer, include=['cross'], trust_record=True, )"
    ) in text
    said = json.loads(json.dumps(plan(model, "10%", optimizer=optimizer).to_json()))
    assert said["records"] == {"cross": "the optimizer's state, 2 steps"}
    assert said["doubts"]["cross"] == "the initial values are not known to be uniform"


def test_a_proved_record_needs_no_trust(tmp_path: Path) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    table = EmbeddingBagConfig(
        name="user", num_embeddings=1000, embedding_dim=16, feature_names=["f"]
    )
    model = EmbeddingBagCollection([table])
    optimizer = torch.optim.Adam(model.parameters())
    ids = KeyedJaggedTensor(["f"], torch.arange(0, 1000, 4), lengths=torch.ones(250).int())
    for _ in range(2):
        model(ids).values().sum().backward()
        optimizer.step()
    answer = plan(model, "20%", optimizer=optimizer)
    text = str(answer)
    assert answer.untouched == {"user": 750}
    assert "\nRecord of user: the optimizer's state, 2 steps.\n" in text
    assert "lossless on the training data." in text
    assert "removed = ds.remove_untouched(model, optimizer)\n" in text
    assert paste(answer, 1, model, optimizer, tmp_path)["removed"].removed == {"user": 750}


def test_the_share_of_lookups_that_would_read_zeros() -> None:
    model, optimizer = trained(torch.optim.Adagrad)
    before = plan(model, "10%", optimizer=optimizer)
    assert before.reads_zeros is None and before.to_json()["reads_zeros"] is None
    batches = [
        # Training has read each fourth row of the cross.
        {
            "user": torch.tensor([0, 1, 2, 3]),
            "cross": torch.tensor([[0, 4], [4, 5], [6, 7], [8, 8]]),
        },
        {"user": torch.tensor([9]), "cross": torch.tensor([[1]])},
    ]
    answer = plan(model, "10%", optimizer=optimizer, batches=iter(batches))
    told = answer.to_json()["reads_zeros"]
    assert told == {"lookups": {"cross": 9}, "removed": {"cross": 4}, "examples": 5, "affected": 3}
    json.dumps(answer.to_json())
    text = str(answer)
    assert "\ntable   rows  never read  hardly read  reads zeros\n" in text
    assert "\ncross  1,000         750            0        44.4%\n" in text
    assert "\nuser      50     unknown      unknown      unknown\n" in text
    assert "\n3 of 5 examples (60.0%) would read zeros.\n" in text
    assert max(map(len, text.splitlines())) < 80
    assert replace(answer, reads_zeros=None) == before, "batches change nothing else"
    removed = remove_untouched(model, optimizer, include="cross", trust_record=True)
    assert removed.share(batches) == answer.reads_zeros


def test_batches_where_no_row_is_known() -> None:
    model, optimizer = trained(torch.optim.SGD)
    answer = plan(model, "9%", optimizer=optimizer, batches=[{"user": torch.tensor([0, 1])}])
    assert answer.reads_zeros == Share(lookups={}, removed={}, examples=2, affected=0)
    assert "zeros" not in str(answer)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"user": torch.tensor([50])}, "Table 'user' has 50 rows: the id 50 is out of range"),
        ({"other": torch.tensor([0])}, r"No feature of the batch has a table; .*'cross', 'user'"),
        (torch.tensor([0]), "must be a KeyedJaggedTensor"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch: Any, message: str) -> None:
    model, optimizer = trained(torch.optim.Adagrad)
    with pytest.raises(ValueError, match=message):
        plan(model, "10%", optimizer=optimizer, batches=[batch])


def test_tables_of_a_plan_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is wider, and untouched rows have a line."""
    monkeypatch.setenv("COLUMNS", "200")
    model, optimizer = trained(torch.optim.Adagrad)
    text = str(plan(model, "10%", optimizer=optimizer))
    assert "best       touched rows " in text and max(map(len, text.splitlines())) < 80


def test_shares_in_each_spelling() -> None:
    budgets = {plan(TOWERS, share).budget for share in ("10%", "10 %", 0.1)}
    assert len(budgets) == 1 and plan(TOWERS, 100).budget == 100


def paste(
    answer: Plan, place: int, model: nn.Module, optimizer: Any, folder: Path, counts: Any = None
) -> dict[str, Any]:
    """Run what a plan prints for a recommended choice; the artifact takes the bytes that were
    planned."""
    code = str(answer).split(f"\n\n{place}. ")[1].split("\n\n")[0].partition("\n")[2]
    names = {"model": model, "optimizer": optimizer, "counts": counts, "ds": dist_sparse}
    exec(code.replace('"served"', repr(str(folder / "served"))), names)
    served = answer.recommended[place - 1].served
    written = open_artifact(folder / "served").manifest.tables.values()
    assert sum(each.bytes.after for each in written) == served.total - served.index // 2
    return names


def test_min_rows_is_printed_only_where_a_small_table_is_pruned() -> None:
    shapes = {"user": (1000, 16), "item": (1000, 16), "country": (10, 16)}
    narrow = str(plan(shapes, "13%", rotate=[["user", "item"]]))
    assert "rotate=Rotation([['user', 'item']]))" in narrow and "min_rows" not in narrow


def test_traffic_that_is_not_known() -> None:
    model, optimizer = trained(torch.optim.SGD)
    answer = plan(model, "9%", optimizer=optimizer)
    assert answer.untouched == plan(model, "9%").untouched == {}
    assert "Never read" not in str(answer)
    assert "\nUnknown of user, cross: SGD keeps no state that tells.\n" in str(answer)
    assert "\nUnknown of user, cross: no optimizer was passed that steps it.\n" in str(
        plan(model, "9%")
    )


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop"])
def test_adam_and_its_kin_know_rows_that_were_never_read(kind: str, tmp_path: Path) -> None:
    """What is printed removes them."""
    model, optimizer = trained(getattr(torch.optim, kind))
    answer = plan(model, "10%", optimizer=optimizer)
    assert answer.untouched == {"cross": 750} and answer.hardly_read == {}
    assert "\ncross  1,000         750      unknown\n" in str(answer)
    assert "Hardly read:" not in str(answer)
    mask = paste(answer, 1, model, optimizer, tmp_path)["removed"].full_mask("cross")
    assert mask.any(1).nonzero().flatten().tolist() == list(range(0, 1000, 4))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "RMSprop"])
def test_a_loss_over_whole_tables_is_no_traffic(kind: str, padding: int | None) -> None:
    """Its gradient reaches every row at each step, but a row of zeros."""
    torch.manual_seed(0)
    model = nn.Embedding(1000, 16, padding_idx=padding)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ids = torch.arange(1, 301, 3) + step
        (model(ids).sum() + 1e-3 * model.weight.square().sum()).backward()
        optimizer.step()
    answer = plan(model, "40%", optimizer=optimizer)
    assert answer.untouched == answer.hardly_read == {}
    assert answer.unknown == {
        "weight": "every row has a gradient: all were looked up, or a loss term reads the whole"
        " table, such as an L2 of its weight"
    }
    text = str(answer)
    assert "Rows never read: unknown" in text and "never read  hardly read" not in text
    assert not any(choice.candidate.levels for choice in answer.choices)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Adagrad", {"weight_decay": 0.01}, "weight_decay=0.01 of Adagrad is a gradient of every"),
        ("Adam", {"weight_decay": 0.01}, "weight_decay=0.01 of Adam is a gradient of every row"),
        ("RMSprop", {"weight_decay": 0.01}, "weight_decay=0.01 of RMSprop is a gradient of every"),
        ("AdamW", {"weight_decay": 0.01}, None),
        ("SGD", {"momentum": 0.9}, "SGD keeps no state that tells"),
        ("NAdam", {}, "NAdam keeps no state that tells"),
    ],
)
def test_optimizers_that_write_every_row(kind: str, options: Any, reason: str | None) -> None:
    model, optimizer = trained(partial(getattr(torch.optim, kind), **options))
    answer = plan(model, "10%", optimizer=optimizer)
    if reason is None:
        assert answer.untouched == {"cross": 750}, "its decay writes weights, not moments"
    else:
        assert answer.untouched == {} and answer.unknown["cross"].startswith(reason)


_COUNTING = "pass record=ds.count_lookups(batches, model), with all training data."


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "nothing",
            f"Load the optimizer's state with the weights and pass optimizer=, or {_COUNTING}",
        ),
        ("a new one", f"Load the optimizer's state with the weights, or {_COUNTING}"),
        ("SGD", _COUNTING.replace("pass", "Pass")),
        ("no lookups", _COUNTING.replace("pass", "Pass")),
        ("shapes", "A trained model would tell, with its optimizer's state."),
    ],
)
def test_a_plan_says_what_would_tell_which_rows_were_read(how: str, says: str) -> None:
    """Before it says which smaller tables to train."""
    model: Any = trained(torch.optim.Adagrad)[0]
    given: dict[str, dict[str, Any]] = {
        "a new one": {"optimizer": torch.optim.Adam(model.parameters())},
        "SGD": {"optimizer": torch.optim.SGD(model.parameters())},
        "no lookups": {"record": {"user": torch.zeros(50).int(), "cross": torch.zeros(1000).int()}},
    }
    if how == "shapes":
        model = {"user": (1000, 64)}
    answer = plan(model, "9%", **given.get(how, {}))
    text = " ".join(str(answer).split())
    assert f"Rows never read: unknown. {says} " in text
    assert text.index(says) < text.index(answer.why)
    assert answer.untouched == {}


def test_a_plan_of_known_rows_asks_for_nothing() -> None:
    model, optimizer = trained(torch.optim.Adagrad)
    assert "Rows never read: unknown" not in str(plan(model, "9%", optimizer=optimizer))


class TestRecords:
    """Counts of lookups, as `remove_untouched()` takes them."""

    BATCHES: ClassVar[Any] = [
        {"user": torch.arange(40)[None], "cross": torch.arange(0, 1000, 4)[None]}
    ]

    @pytest.mark.parametrize("form", ["counts", "tensors", "folder"])
    def test_rows_without_a_lookup(self, form: str, tmp_path: Path) -> None:
        model, _ = trained(torch.optim.SGD)
        counts = count_lookups(self.BATCHES, model)
        record: Any = {"counts": counts, "tensors": dict(counts), "folder": tmp_path / "counts"}[
            form
        ]
        counts.save(tmp_path / "counts")
        later = [{"user": torch.tensor([1, 45]), "cross": torch.tensor([4, 5])}]
        answer = plan(model, "10%", record=record, batches=later)
        assert answer.untouched == {"user": 10, "cross": 750} and answer.hardly_read == {}
        assert answer.unknown == {} and answer.counted
        assert {*answer.records.values()} == {"lookup counts"}
        assert "\nRecord of user, cross: lookup counts.\n" in str(answer)
        assert answer.recommended[0].candidate.levels == {"user": 0.2, "cross": 0.75}
        made = paste(answer, 1, model, None, tmp_path, counts=record)
        assert made["removed"].removed == answer.untouched
        assert made["removed"].share(later) == answer.reads_zeros
        assert answer.reads_zeros is not None and answer.reads_zeros.affected == 1
        json.dumps(answer.to_json())

    def test_a_proved_record_and_one_that_misses_rows(self, tmp_path: Path) -> None:
        """The second one is unknown, as `remove_untouched()` refuses it."""
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        table = EmbeddingBagConfig(
            name="user", num_embeddings=1000, embedding_dim=16, feature_names=["f"]
        )
        model = EmbeddingBagCollection([table])
        with torch.no_grad():
            model.embedding_bags["user"].weight[:100] -= 1e-3 * torch.rand(100, 16)
        record = {"user": torch.arange(1000) < 100}
        answer = plan(model, "20%", record=record)
        assert answer.untouched == {"user": 900} and not answer.doubts
        assert "ds.remove_untouched(model, record=counts)\n" in str(answer)
        missing = {"user": torch.arange(1000) < 50}
        unknown = plan(model, "20%", record=missing)
        assert unknown.untouched == {}
        assert unknown.unknown["user"].startswith(
            "the record does not cover its training: 50 of the 950 rows that the record calls"
        )
        with pytest.raises(ValueError, match="50 of the 950 rows that the record calls never read"):
            remove_untouched(model, record=missing)
        removed = paste(answer, 1, model, None, tmp_path, counts=record)["removed"]
        assert removed.removed == answer.untouched

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ([1], "Invalid record of type list"),
            ({"user": torch.ones(50)}, "Invalid record of torch.float32"),
            ({"user": torch.ones(50).int()}, "The record has no lookups of table 'cross'"),
            ({"user": torch.ones(9).int(), "cross": torch.ones(1000).int()}, "'user' has 9 rows"),
            ("no/such/folder", "no/such/folder"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, record: Any, message: str) -> None:
        """In the words of `remove_untouched()`."""
        model, _ = trained(torch.optim.SGD)
        with pytest.raises(ValueError, match=message) as refused:
            plan(model, "10%", record=record)
        with pytest.raises(ValueError, match=message) as also:
            remove_untouched(model, record=record)
        assert str(refused.value) == str(also.value)

    def test_a_record_and_an_optimizer(self) -> None:
        model, optimizer = trained(torch.optim.Adagrad)
        counts = count_lookups(self.BATCHES, model)
        with pytest.raises(ValueError, match="Invalid optimizer: the lookups of record= tell"):
            plan(model, "10%", record=counts, optimizer=optimizer)


def test_an_optimizer_that_is_none_is_skipped() -> None:
    model, optimizer = trained(torch.optim.Adagrad)
    alone = plan(model, "9%", optimizer=optimizer).untouched
    assert alone == plan(model, "9%", optimizer=[optimizer, None]).untouched


def test_rows_that_were_hardly_read() -> None:
    """Below a tenth of the mean of the touched rows; of columns with sums of their own, the largest
    counts. A row whose sum is not a number was read."""
    model, optimizer = trained(torch.optim.Adagrad)
    sums = optimizer.state[model.cross.weight]["sum"].zero_()
    sums[:4] = torch.tensor([10.0, 0.5, 0.499, 0.1])[:, None]
    sums[2, 3] = 0.7
    sums[4:6, 0] = torch.tensor([7.0, 11.0])
    answer = plan(model, "20%", optimizer=optimizer)
    # The mean of 10, 0.5, 0.7, 0.1, 7 and 11 is 4.88.
    assert answer.untouched["cross"] == 994 and answer.hardly_read == {"cross": 1}
    assert answer.to_json()["hardly_read"] == answer.hardly_read
    sums[10] = math.nan
    answer = plan(model, "20%", optimizer=optimizer)
    assert answer.untouched["cross"] == 993 and answer.hardly_read["cross"] == 1


def test_a_few_idle_rows_stay() -> None:
    """Their index would take more than they do."""
    model, optimizer = trained(torch.optim.Adagrad)
    with torch.no_grad():
        optimizer.state[model.cross.weight]["sum"][:990] = 1.0
    answer = plan(model, "20%", optimizer=optimizer)
    assert answer.untouched["cross"] == 8
    lost = {choice.candidate.dtype for choice in answer.choices if choice.candidate.levels}
    assert lost == {"fp32"}, "of 64 bytes a row; the index takes 256"


def test_for_people_and_for_programs() -> None:
    answer = plan(CROSSED, "9.4%", rotate=[list(CROSSED)])
    assert str(answer).splitlines()[0] == "budget 13.1 MiB, 9.4% of 139 MiB in 3 tables"
    table = str(answer).split("\n\n")[1].splitlines()
    assert max(map(len, table)) < 80 and {line.split("  ")[0] for line in table[2:]} <= {
        *("fits", "too large", *(f"measure {number}" for number in range(1, 5)))
    }
    assert max(map(len, str(answer).splitlines())) < 80
    assert str(answer).split("\n\n")[-3].splitlines()[:10] == [
        "2. rotated columns, int4:",
        "from dist_sparse.extras.rotation import Rotation",
        "sparse = ds.sparsify(",
        "    model,",
        "    optimizer,",
        "    level=0.375,",
        '    block="col",',
        "    end=0,",
        "    advanced=ds.Advanced(rotate=Rotation([['user', 'item', 'cross']])),",
        ")",
    ]
    said = json.loads(json.dumps(answer.to_json()))
    assert (said["budget"], said["dense_bytes"]) == (answer.budget, dense_bytes(answer.tables))
    assert Candidate(**said["recommended"][0]["candidate"]) == answer.recommended[0].candidate
    assert said["tables"][2] == {"name": "cross", "shape": [500_000, 64], "dtype": "torch.float32"}


def test_tables_without_rows() -> None:
    model = nn.ModuleDict({"user": nn.EmbeddingBag(64, 16), "empty": nn.EmbeddingBag(0, 16)})
    assert used(plan(model, "40%")) == [("full", "int8", 16)]
    with pytest.raises(ValueError, match="The tables have no rows"):
        plan(nn.EmbeddingBag(0, 16), "40%")


def test_sums_that_begin_above_0_are_unknown() -> None:
    """In float32, 0.1 absorbs small gradients: the row was trained, and its sum is the initial one."""
    model = nn.EmbeddingBag(1000, 16)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    (1e-6 * model(torch.arange(500)[None])).sum().backward()
    optimizer.step()
    answer = plan(model, "20%", optimizer=optimizer)
    assert answer.untouched == {}
    assert answer.unknown == {
        "weight": "the sums of Adagrad begin at 0.1, where float32 absorbs small gradients"
    }


def test_a_model_that_was_not_trained_keeps_its_rows() -> None:
    """Its sums are all zero, as after a load of weights alone: they say nothing of traffic."""
    model = Crossed()
    answer = plan(model, "10%", optimizer=torch.optim.Adagrad(model.parameters()))
    assert answer.untouched == {} and answer.recommended == plan(model, "10%").recommended
    assert answer.unknown["cross"].startswith("no row has a gradient: it was not trained, or")


def test_tables_of_a_model() -> None:
    model = Crossed().half()
    answer = plan(model, "60%", exclude="user")
    assert (
        answer.tables == (TableShape("cross", (1000, 16), torch.float16),)
        and answer.dense_bytes == 32_000
    )
    assert used(answer) == [("full", "int4", 16), ("small", "int8", 12)], "int8 is 20 of 32 bytes"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"budget": "ten"}, "budget='ten'"),
        ({"rotate": [["user", "items"]]}, r"\['items'\] are not among the tables"),
        (
            {"rotate": [["user", "item"]], "model": {"user": (9, 8), "item": (9, 4)}},
            r"have \[8, 4\] columns",
        ),
        ({"rotate": ["user", "item"]}, 'must be "table", or groups of names'),
        ({"exclude": "user"}, "they are for models"),
        ({"batches": []}, "they are for models"),
        ({"record": {"user": torch.ones(9).int()}}, "they are for models"),
        ({"model": {"user": 9}}, r"Invalid shape 9 of 'user'"),
        ({"model": {}}, "must be a module, or shapes by table"),
        (
            {"model": nn.EmbeddingBag(9, 8).state_dict()},
            r"Invalid shape of 'weight': it is a tensor. Pass the module, not its state_dict\(\)",
        ),
    ],
)
def test_what_is_wrong_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"model": TOWERS, "budget": "10%", **how})
