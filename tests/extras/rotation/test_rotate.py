"""Rotation in one process: any module, the refusals, copies, saved states, and schedules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dist_sparse import (
    COL,
    Advanced,
    BaseDataSparsifier,
    DataNormSparsifier,
    MaskEnforcer,
    SparseTraining,
    compact,
    export,
    load_served,
    sparsify,
)
from dist_sparse.extras.rotation import Rotation, rotate
from dist_sparse.extras.rotation.turning import common_basis, paired_bases
from tests.keywords import nested


class Towers(nn.Module):
    def __init__(self, **item: Any) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50, 8, mode="mean")
        self.item = nn.Embedding(40, 8, padding_idx=3, **item)
        self.over = nn.Linear(8, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.user(users) * self.item(items)).sum(1)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(50, (16, 3), generator=generator), torch.randint(
        40, (16,), generator=generator
    )


def train(
    model: nn.Module, optimizer: Any, sparse: SparseTraining | None, steps: int
) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(*batch(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if sparse is not None:
            sparse.step()
    return losses


def narrowed(
    tables: Any = "table", schedule: Any = "one_shot", begin: int = 0, **more: Any
) -> tuple[Towers, Any, Any]:
    torch.manual_seed(0)
    model = Towers()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    options = {
        "level": 0.5,
        "block": "col",
        "begin": begin,
        "end": begin + 8,
        "every": 4,
        "rotate": Rotation(tables),
    }
    return (
        model,
        optimizer,
        sparsify(model, optimizer, **nested(schedule=schedule, **(options | more))),
    )


@pytest.mark.parametrize("schedule", ["one_shot", "cubic"])
@pytest.mark.parametrize("tables", ["table", [["user", "item"]], [["user"]]], ids=str)
def test_columns_go_while_training(schedule: str, tables: Any) -> None:
    """The last columns are removed, stay zero, and the others train on."""
    model, optimizer, sparse = narrowed(tables, schedule, begin=2)
    train(model, optimizer, sparse, 20)
    rotated = [model.user, model.item] if tables != [["user"]] else [model.user]
    for table in rotated:
        assert bool(table.weight[:, :4].any(0).all()) and not table.weight[:, 4:].any()
    assert sparse.sparsity == 0.5 and not model.item.weight[3].any()  # padding
    others = {"item": "in no group of rotate"} if tables == [["user"]] else {}
    assert sparse.left_dense == others and bool(model.item.weight.any(0).all()) == bool(others)
    assert compact(model, sparse, optimizer=optimizer).item.weight.shape[1] == (8 if others else 4)


def test_it_costs_less_than_columns_as_they_are() -> None:
    """Of a table that is nearly of rank 4, the cut of half the columns changes nearly nothing."""
    lost = {}
    for tables in (None, "table", [["user", "item"]]):
        torch.manual_seed(1)
        model = Towers()
        with torch.no_grad():
            turn = torch.linalg.qr(torch.randn(8, 8)).Q
            for table in (model.user, model.item):
                table.weight.copy_(
                    (torch.randn(len(table.weight), 8) * torch.tensor([1.0] * 4 + [0.01] * 4))
                    @ turn
                )
        before = model(*batch()).detach()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with sparsify(
            model,
            optimizer,
            level=0.5,
            block=(COL, 1),
            end=1,
            schedule="one_shot",
            advanced=Advanced(rotate=tables and Rotation(tables)),
        ) as sparse:
            sparse.step()
            lost[str(tables)] = float((model(*batch()) - before).norm() / before.norm())
            sparse.step()
    assert lost["None"] > 0.3 and max(lost["table"], lost["[['user', 'item']]"]) < 0.05


def test_copies_and_states_have_their_bases() -> None:
    model, optimizer, sparse = narrowed()
    sparse.step()
    twin, (other, other_optimizer, resumed) = copy.deepcopy(model), narrowed()
    wanted = model(*batch()).detach()
    saved, masks = copy.deepcopy(model.state_dict()), copy.deepcopy(sparse.state_dict())
    losses = train(model, optimizer, sparse, 12)
    torch.testing.assert_close(twin(*batch()), wanted, rtol=0, atol=0)  # of its own
    other.load_state_dict(saved)
    resumed.load_state_dict(masks)
    torch.testing.assert_close(other(*batch()), wanted, rtol=0, atol=0)
    assert train(other, other_optimizer, resumed, 12) == losses
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rotation_of_user"):
        Towers().load_state_dict(saved)


def test_again_on_the_same_model() -> None:
    """A second run starts where the first has left the columns."""
    model, optimizer, sparse = narrowed()
    train(model, optimizer, sparse, 9)
    sparse.detach()
    wanted = model(*batch()).detach()
    second = sparsify(
        model,
        optimizer,
        level=0.75,
        block="col",
        end=1,
        schedule="linear",
        advanced=Advanced(rotate=Rotation("table")),
    )
    second.step()
    torch.testing.assert_close(model(*batch()), wanted, rtol=1e-5, atol=1e-5)
    second.step()
    assert not model.user.weight[:, 2:].any()
    second.detach()
    wanted = model(*batch()).detach()
    with pytest.raises(ValueError, match="'user' can't be rotated: its output is rotated back"):
        sparsify(
            model,
            optimizer,
            level=0.75,
            block="col",
            end=1,
            advanced=Advanced(rotate=Rotation([["user", "item"]])),
        )
    torch.testing.assert_close(model(*batch()), wanted, rtol=0, atol=0)


def test_element_state_is_reset_if_that_was_said() -> None:
    model = Towers()
    for kind, more in ((optim.Adam, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adagrad, {})):
        optimizer = kind(model.parameters(), lr=0.01, **more)  # type: ignore[arg-type]
        options: dict[str, Any] = {
            "level": 0.5,
            "block": "col",
            "begin": 4,
            "end": 5,
            "rotate": Rotation("table"),
        }
        with pytest.raises(
            ValueError, match=r"\['item', 'user'\] can't be rotated: their optimizer keeps"
        ):
            sparsify(model, optimizer, **nested(**options))
        train(model, optimizer, None, 2)
        with sparsify(
            model, optimizer, **nested(schedule="one_shot", **options, optimizer_state="reset")
        ) as sparse:
            train(model, optimizer, sparse, 4)
            assert any(
                bool(state[key].any())
                for state in optimizer.state.values()
                for key in state
                if key != "step"
            )
            sparse.step()
            for parameter in (model.user.weight, model.item.weight):
                state = optimizer.state[parameter]
                assert not any(
                    bool(value.any())
                    for value in state.values()
                    if value is not None and value.dim()
                )
            sparse.step()


class Tied(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 40, bias=False)
        self.again.weight = self.item.weight


PAIR = [["user", "item/0/0"]]


def towers(*after: nn.Module) -> nn.Module:
    item = nn.Sequential(nn.Sequential(nn.Embedding(20, 4), nn.Identity()), *after)
    return nn.ModuleDict({"user": nn.Embedding(20, 4), "item": item})


class Dot(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows @ rows.T


class Shared(Towers):
    """Its table is looked up by a second way."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Sequential(self.item, nn.ReLU())


class Own(nn.Sequential):
    """It calls its parts itself, not one after the other."""

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item, over = self
        return over(user(users) @ item(items).T)


class Other(BaseDataSparsifier):
    def update_mask(self, name: str, data: Tensor, **config: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "tables", "block", "message"),
    [
        (Towers, "tables", "col", 'must be "table", or groups'),
        (
            Towers,
            [["user", "items"]],
            "col",
            r"\['items'\] are not among the tables \['user', 'item'\]",
        ),
        (Towers, [["user"], ["user", "item"]], "col", "each name must be in one group only"),
        (Towers, [[]], "col", 'must be "table", or groups of names'),
        (Towers, ["user", "item"], "col", 'must be "table", or groups of names'),
        (Towers, "table", "row", r"'user' can't be rotated: its blocks are \(1, 'ROW'\)"),
        (lambda: Towers(max_norm=1.0), "table", "col", "'item' can't be rotated: max_norm"),
        (
            Tied,
            [["user", "item"]],
            "col",
            r"'item' can't be rotated: the modules \['item', 'again'\] share its weight",
        ),
        (lambda: nn.EmbeddingBag(20, 4, mode="max"), "table", "col", "pooled by their maximum"),
        (
            lambda: towers(nn.ReLU()),
            PAIR,
            "col",
            "can't be rotated: ReLU 'item.1' reads it, but only dot products",
        ),
        (lambda: towers(nn.Dropout(), nn.Linear(4, 4)), PAIR, "col", "Linear 'item.2' reads it"),
        (
            lambda: towers(nn.Sequential(nn.Dropout(), nn.Tanh())),
            PAIR,
            "col",
            "Tanh 'item.1.1' reads it",
        ),
        (Shared, [["user", "item"]], "col", "ReLU 'again.1' reads it"),
        (
            lambda: nn.ModuleDict({"user": nn.Embedding(20, 4), "item": nn.Embedding(20, 8)}),
            [["user", "item"]],
            "col",
            "widths 4 and 8",
        ),
    ],
)
def test_refused(model: Any, tables: Any, block: str, message: str) -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape=block)
    made = model()
    sparsifier.add_model(made)
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ValueError, match=message):
        rotate(sparsifier, tables)
    assert sparsifier.masks.rotation is None and list(made.state_dict()) == list(before)


@pytest.mark.parametrize(
    ("model", "tables"),
    [
        (towers(), PAIR),
        (towers(nn.Dropout(), nn.Sequential(nn.Flatten())), PAIR),
        (towers(nn.Sequential(Dot()), nn.ReLU()), PAIR),
        (Own(nn.Embedding(20, 4), nn.Embedding(20, 4), nn.ReLU()), [["0", "1"]]),
    ],
    ids=["nothing", "what is harmless", "dot products", "not one after the other"],
)
def test_what_may_read_tables_that_are_rotated_together(
    model: nn.Module, tables: list[list[str]]
) -> None:
    sparsifier = DataNormSparsifier(sparse_block_shape="col")
    sparsifier.add_model(model)
    rotate(sparsifier, tables)
    rotate(sparsifier)
    assert sparsifier.masks.rotation is not None


def test_hooks_of_the_user_read_the_original_basis() -> None:
    torch.manual_seed(0)
    table, ids = nn.Embedding(20, 8), torch.arange(20)
    table.register_forward_hook(lambda module, args, output: output.relu())
    optimizer, before = optim.SGD(table.parameters(), lr=0.1), table(ids).detach()
    sparse = sparsify(
        table, optimizer, level=0.0, block="col", end=1, advanced=Advanced(rotate=Rotation("table"))
    )
    rows = table.weight.detach().clone()
    sparse.step()
    assert not torch.equal(rows, table.weight)
    torch.testing.assert_close(table(ids), before)


def test_plain_data_is_refused() -> None:
    sparsifier = DataNormSparsifier([("user", torch.ones(4, 4))], sparse_block_shape="col")
    with pytest.raises(ValueError, match=r"Plain data can't be rotated, but \['user'\]"):
        rotate(sparsifier)
    other = Other()
    other.add_model(Towers())
    with pytest.raises(ValueError, match="its blocks are None"):
        rotate(other)


def test_a_squashed_table_stays_as_it_is() -> None:
    model = Towers()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="col")
    sparsifier.add_model(model)
    with MaskEnforcer(sparsifier).attach(optim.SGD(model.parameters(), lr=0.1)):
        rotate(sparsifier, [["user", "item"]])
        sparsifier.step()
        sparsifier.squash_mask(names=["item"])
        before = model(*batch()).detach()
        sparsifier.step()
    torch.testing.assert_close(model(*batch()), before)


@pytest.mark.parametrize("zeros", [(), (2, 5), range(8)], ids=str)
def test_bases(zeros: Any) -> None:
    torch.manual_seed(0)
    # Of rank 4.
    user, item = (
        torch.randn(30, 8, dtype=torch.float64),
        torch.randn(4, 8, dtype=torch.float64),
    )
    user[:, list(zeros)] = 0
    used = 8 - len(zeros)
    basis = common_basis([user.T @ user, item.T @ item])
    torch.testing.assert_close(basis @ basis.T, torch.eye(8, dtype=torch.float64))
    alone = user @ common_basis([user.T @ user])
    assert not alone[:, used:].any()
    torch.testing.assert_close(alone[:, :used].norm(dim=0), torch.linalg.svdvals(user)[:used])
    r_user, r_item = paired_bases(user.T @ user, item.T @ item)
    torch.testing.assert_close((user @ r_user) @ (item @ r_item).T, user @ item.T)
    assert not (user @ r_user)[:, used:].any()


def test_what_would_lose_the_bases_is_refused() -> None:
    pytest.importorskip("fbgemm_gpu")
    model, _, sparse = narrowed()
    sparse.step()
    sparse.detach()
    rows = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.5, begin=0, end=0)
    rows.step()
    with pytest.raises(
        ValueError,
        match="is rotated, and its output is turned back by a hook: it can't be compacted",
    ):
        compact(model, rows)


def test_tables_that_meet_in_dot_products_are_served(tmp_path: Path) -> None:
    """Their rotated rows are what a served model reads."""
    pytest.importorskip("safetensors")
    model, optimizer, sparse = narrowed([["user", "item"]], begin=2)
    train(model, optimizer, sparse, 8)
    wanted = model.item(torch.arange(40)).detach()
    served = load_served(export(model, sparse, tmp_path / "served").path)
    torch.testing.assert_close(served["item"](torch.arange(40)), wanted, rtol=0, atol=0)


def test_a_basis_goes_where_the_outputs_are() -> None:
    """A rank without a shard of the table knows no device when the basis is made."""
    model, _, sparse = narrowed()
    sparse.detach()
    model.to("meta").rotation_of_user = torch.eye(8)
    assert model(*(ids.to("meta") for ids in batch())).is_meta
    assert model.rotation_of_user.is_meta
