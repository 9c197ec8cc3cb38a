"""Plans: what fits a budget, which of it is recommended, and what is known of traffic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import compact, export, plan, quantize, sparsify
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


def test_codes_where_only_they_fit_are_printed_and_make_what_was_planned(tmp_path: Path) -> None:
    model = nn.ModuleDict({"user": nn.EmbeddingBag(20_000, 32), "small": nn.EmbeddingBag(20, 32)})
    answer = plan(model, "7%")
    assert used(answer)[-1] == ("full", "codes of 4", 32)
    paste(answer, len(answer.recommended), model, [], tmp_path)


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
    assert answer.untouched == {"user": 0, "cross": 750}
    assert used(answer) == [("full", "int8", 16)], "9.3%"
    assert plan(model, "40%", optimizer=optimizer).recommended == answer.recommended, "lossless"
    [choice] = answer.recommended
    assert choice.candidate.levels == {"cross": 0.75} and "Remove nothing else" in answer.why
    assert "\ncross  1,000         750            0\n" in str(answer)
    assert "Never read: removing these rows is lossless on" in str(answer)
    assert "level=\"untouched\",\n    include=['cross']," in str(answer)
    users, crossed = torch.arange(50).view(10, 5), torch.arange(0, 1000, 4).view(-1, 5)
    before = model.user(users), model.cross(crossed)
    assert (
        paste(answer, 1, model, optimizer, tmp_path)["sparse"]
        .sparsifier.full_mask("cross")
        .any(1)
        .sum()
        == 250
    )
    assert torch.equal(model.user(users), before[0]) and torch.equal(
        model.cross(crossed), before[1]
    )


def test_tables_of_a_plan_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is wider, and untouched rows have a line."""
    monkeypatch.setenv("COLUMNS", "200")
    model, optimizer = trained(torch.optim.Adagrad)
    text = str(plan(model, "10%", optimizer=optimizer))
    assert "best       touched rows " in text and max(map(len, text.splitlines())) < 80


def test_shares_in_each_spelling() -> None:
    budgets = {plan(TOWERS, share).budget for share in ("10%", "10 %", 0.1)}
    assert len(budgets) == 1 and plan(TOWERS, 1).budget == 1


def test_following_tables_have_a_fixed_capacity() -> None:
    pytest.importorskip("torchrec")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    from dist_sparse.slots import following

    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=64, feature_names=[name])
        for name in ("user", "item")
    ]
    # Ids of all tables take no memory on the meta device.
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = nn.ModuleDict({"bags": following(bags, {"item": 16})}).to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"fixed capacity.*: \['item'\]\. Leave"):
        plan(model, "50%")
    assert [table.name for table in plan(model, "50%", exclude="item").tables] == ["user"]


def paste(
    answer: Plan, place: int, model: nn.Module, optimizer: Any, folder: Path
) -> dict[str, Any]:
    """Run what a plan prints for a recommended choice; the artifact takes the bytes that were
    planned."""
    code = str(answer).split(f"\n\n{place}. ")[1].split("\n\n")[0].partition("\n")[2]
    names = {
        "model": model,
        "optimizer": optimizer,
        "sparsify": sparsify,
        "compact": compact,
        "quantize": quantize,
        "export": export,
    }
    exec(code.replace('"served"', repr(str(folder / "served"))), names)
    served = answer.recommended[place - 1].served
    written = open_artifact(folder / "served").manifest.tables.values()
    assert sum(each.bytes.after for each in written) == served.total - served.index // 2
    return names


def test_what_is_printed_makes_what_was_planned(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    answer = plan(model, "13%", rotate=[["user", "cross"]])
    assert used(answer)[:2] == [("columns", "int8", 4), ("columns", "int4", 8)]
    made = paste(answer, 2, model, optimizer, tmp_path)["model"]
    assert made.user.weight.shape == (50, 8) and made.cross.weight.shape == (1000, 8)


def test_what_is_printed_fits_tables_of_a_few_rows(tmp_path: Path) -> None:
    """sparsify() leaves tables of fewer than 16 rows dense, unless it is asked not to."""
    model = nn.ModuleDict({"user": nn.EmbeddingBag(64, 16), "country": nn.EmbeddingBag(10, 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer = plan(model, "13%", rotate=[["user", "country"]])
    assert "min_rows=0" in str(answer)
    made = paste(answer, 2, model, optimizer, tmp_path)["model"]
    assert made["country"].weight.shape == (10, 8)


def test_min_rows_is_printed_only_where_a_small_table_is_pruned() -> None:
    shapes = {"user": (1000, 16), "item": (1000, 16), "country": (10, 16)}
    narrow = str(plan(shapes, "13%", rotate=[["user", "item"]]))
    assert "rotate=[['user', 'item']]" in narrow and "min_rows" not in narrow


def test_traffic_that_is_not_known() -> None:
    # Its sums shrink: after a while they are zero again.
    model, optimizer = trained(torch.optim.Adam)
    assert plan(model, "9%", optimizer=optimizer).untouched == plan(model, "9%").untouched == {}
    assert "Never read" not in str(plan(model, "9%"))


@pytest.mark.parametrize("passed", [True, False])
def test_a_plan_says_where_untouched_rows_are_not_known(passed: bool) -> None:
    """As on the command line, which has the model alone."""
    model, optimizer = trained(torch.optim.Adagrad)
    text = str(plan(model, "9%", optimizer=optimizer if passed else None))
    line = "Rows never read: unknown; a trained model's Adagrad would tell."
    assert (line in text) is not passed


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
    assert answer.untouched["cross"] == 994 and answer.hardly_read == {"user": 0, "cross": 1}
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
    assert str(answer).split("\n\n")[-3].splitlines()[:9] == [
        "2. rotated columns, int4:",
        "sparse = sparsify(",
        "    model,",
        "    optimizer,",
        "    level=0.375,",
        '    block="col",',
        "    rotate=[['user', 'item', 'cross']],",
        "    end=0,",
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
    assert plan(model, "20%", optimizer=optimizer).untouched == {}


def test_a_model_that_was_not_trained_keeps_its_rows() -> None:
    """Its sums are all zero, as after a load of weights alone: they say nothing of traffic."""
    model = Crossed()
    answer = plan(model, "10%", optimizer=torch.optim.Adagrad(model.parameters()))
    assert answer.untouched == {} and answer.recommended == plan(model, "10%").recommended


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
        ({"rotate": [["user", "items"]]}, r"\['items'\] are none of the tables"),
        (
            {"rotate": [["user", "item"]], "model": {"user": (9, 8), "item": (9, 4)}},
            r"have \[8, 4\] columns",
        ),
        ({"rotate": ["user", "item"]}, 'must be "table", or groups of names'),
        ({"exclude": "user"}, "they are for models"),
        ({"model": {"user": 9}}, r"Invalid shape 9 of 'user'"),
        ({"model": {}}, "must be a module, or shapes by table"),
    ],
)
def test_what_is_wrong_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"model": TOWERS, "budget": "10%", **how})
