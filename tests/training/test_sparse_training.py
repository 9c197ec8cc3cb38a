"""SparseTraining around a loop: atomic loads, what is left dense, automatic steps,
early ends."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import dist_sparse
from dist_sparse import COL, ROW, Advanced, SparseTraining, sparsify
from dist_sparse.tables.chunked import ChunkedTensor
from tests.keywords import nested
from tests.states import edited

ROOT = Path(__file__).parents[2]


class Two(nn.Module):
    def __init__(self, rows: int = 40, others: int = 30) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = (
            nn.EmbeddingBag(rows, 4, mode="sum"),
            nn.EmbeddingBag(others, 4, mode="sum"),
        )
        self.over = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.over(
            self.user(ids % len(self.user.weight)) * self.item(ids % len(self.item.weight))
        )


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse training stopped", UserWarning)
        yield


def train(
    model: nn.Module, optimizer: optim.Optimizer, sparse: SparseTraining | None, steps: int
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12).view(4, 3) * (step + 1)).sum().backward()
        optimizer.step()
        if sparse is not None:
            sparse.step()


def pair(**plan: Any) -> tuple[Two, optim.Optimizer, SparseTraining]:
    model = Two()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    return (
        model,
        optimizer,
        sparsify(model, optimizer, **nested(**({"level": 0.6, "end": 6, "every": 2} | plan))),
    )


def everything(model: nn.Module, sparse: SparseTraining) -> Any:
    return copy.deepcopy([model.state_dict(), sparse.state_dict(), sparse.sparsifier.data_groups])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, ChunkedTensor):
        return same(one.kept, other.kept)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def zero_rows(table: nn.Module) -> int:
    return int((table.weight == 0).all(dim=1).sum())  # type: ignore[arg-type, union-attr]


class TestAtomicLoads:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("final", math.nan),
            ("begin", -5),
            ("last_epoch", "4"),
            ("last_epoch", -7),
            ("every", 0),
            ("step", 3),
            ("schedule_param", "nothing"),
        ],
    )
    def test_a_refused_schedule_leaves_the_masks_alone(self, key: str, value: Any) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 5)
        state = copy.deepcopy(sparse.state_dict())
        train(model, optimizer, sparse, 3)
        before = everything(model, sparse)
        with edited(state, "schedule") as saved:
            saved["scheduler"][key] = value
        with pytest.raises(ValueError):
            sparse.load_state_dict(state)
        assert same(everything(model, sparse), before)

    @pytest.mark.parametrize(
        ("path", "value", "says"),
        [
            (["floors"], 5, "'floors' of the state must be a mapping, and is of type int"),
            (["floors"], None, "'floors' of the state must be a mapping"),
            (["floors"], {"user": 1.1}, r"Invalid floors\['user'\]=1\.1"),
            (["floors"], {"nobody": 0.5}, r"unknown keys \['nobody'\]: it belongs to other tables"),
            (["scope"], "world", "Invalid scope='world'"),
            (["scope"], None, "Invalid scope=None"),
            (["score"], "frequency", "pass Advanced\\(score='frequency'"),
            (["score"], "accumulator", "'user': no Adagrad steps it"),
            (["newer"], 1, r"The schedule of the state has the unknown keys \['newer'\]"),
            (["scheduler", "extra_2"], 1, r"CubicDataScheduler has the unknown keys \['extra_2'\]"),
            (["scheduler"], [1], r"CubicDataScheduler must be a mapping"),
        ],
        ids=str,
    )
    def test_refused_settings_change_nothing(self, path: list[str], value: Any, says: str) -> None:
        """And a good state still loads: a bad floor once locked the object."""
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 5)
        good = copy.deepcopy(sparse.state_dict())
        state = copy.deepcopy(good)
        train(model, optimizer, sparse, 3)
        before = everything(model, sparse)
        with edited(state, "schedule") as saved:
            node = saved
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
        with pytest.raises(ValueError, match=says):
            sparse.load_state_dict(state)
        assert same(everything(model, sparse), before)
        sparse.load_state_dict(good)
        assert same(everything(model, sparse)[1], good)

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("updates", "x", "Invalid updates='x' of 'user'"),
            ("removed", -1, "Invalid removed=-1 of 'user'"),
            ("shape", 5, "Table 'user' has the shape"),
            ("newer", 1, r"Table 'user': the state has unknown keys \['newer'\]"),
            ("config", [], "Table 'user': the state has no configuration"),
            (
                "config",
                {"sparsity_level": 0.5},
                r"'user': its configuration in the state lacks .*'zeros_per_block'",
            ),
        ],
        ids=str,
    )
    def test_refused_tables_change_nothing(self, key: str, value: Any, says: str) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 3)
        state = copy.deepcopy(sparse.state_dict())
        before = everything(model, sparse)
        with edited(state["sparsifier"]["sharded"], "tables") as tables:
            if key == "config" and value:
                value = value | {"sparsity_level": tables["user"]["config"]["sparsity_level"]}
            tables["user"][key] = value
        with pytest.raises(ValueError, match=says):
            sparse.load_state_dict(state)
        assert same(everything(model, sparse), before)

    def test_masks_are_checked_against_the_floors_of_their_state(self) -> None:
        """Not against those in force, which can't be met here any more."""
        model, optimizer, sparse = pair(floor=0.3)
        train(model, optimizer, sparse, 5)
        good = copy.deepcopy(sparse.state_dict())
        sparse.sparsifier.floors = {"user": 1.1}
        sparse.load_state_dict(good)
        assert sparse.sparsifier.floors == {"user": 0.3, "item": 0.3}

    def test_refused_masks_leave_the_schedule_alone(self) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 5)
        state = copy.deepcopy(sparse.state_dict())
        del state["sparsifier"]["sharded"]["masks"]["user"]
        train(model, optimizer, sparse, 3)
        before = everything(model, sparse)
        with pytest.raises(ValueError, match="user"):
            sparse.load_state_dict(state)
        assert same(everything(model, sparse), before)

    def test_masks_and_a_schedule_of_two_saves(self) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 3)
        early = copy.deepcopy(sparse.state_dict())
        train(model, optimizer, sparse, 2)
        before = everything(model, sparse)
        for mixed in ({"sparsifier": early["sparsifier"]}, {"schedule": early["schedule"]}):
            with pytest.raises(ValueError, match="of different steps: the level of 'user' is"):
                sparse.load_state_dict({**sparse.state_dict(), **mixed})
        assert same(everything(model, sparse), before)

    @pytest.mark.parametrize("levels", [3, [], {"user": 0.1}, {"user": None, "item": None}])
    def test_levels_of_another_kind(self, levels: Any) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 3)
        state = copy.deepcopy(sparse.state_dict())
        before = everything(model, sparse)
        with edited(state, "schedule") as saved:
            saved["levels"] = levels
        with pytest.raises(ValueError, match=r"'levels' of the state|of different steps"):
            sparse.load_state_dict(state)
        assert same(everything(model, sparse), before)

    def test_a_state_without_levels_loads(self) -> None:
        """Older releases did not save them."""
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 3)
        state = copy.deepcopy(sparse.state_dict())
        with edited(state, "schedule") as saved:
            del saved["levels"]
        train(model, optimizer, sparse, 2)
        sparse.load_state_dict(state)
        assert sparse.scheduler.last_epoch == 3

    @pytest.mark.parametrize("plan", [{}, {"end": None}, {"schedule": "linear", "every": 3}])
    @pytest.mark.parametrize("step", [4, 5, 6])
    def test_masks_that_were_loaded_alone_are_saved_and_resumed(
        self, step: int, plan: dict[str, Any]
    ) -> None:
        """At once, between two updates or just before one, as the warning about ``end=None`` asks
        for. The resumed run equals the one that went on."""
        model, optimizer, sparse = pair(level=0.8, **plan)
        train(model, optimizer, sparse, 8)
        other = copy.deepcopy(sparse.state_dict())
        sparse.detach()

        model, optimizer, sparse = pair(**plan)
        train(model, optimizer, sparse, step)
        sparse.sparsifier.load_state_dict(other["sparsifier"])
        train(model, optimizer, sparse, step % 2)
        saved = copy.deepcopy({"sparse": sparse.state_dict(), "model": model.state_dict()})
        levels = copy.deepcopy(sparse.sparsifier.data_groups)
        train(model, optimizer, sparse, 5)

        again, steps, resumed = pair(**plan)
        again.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["sparse"])
        assert resumed.sparsifier.data_groups == levels
        train(again, steps, resumed, 5)
        assert same(again.state_dict(), model.state_dict())
        assert resumed.sparsifier.audit() == sparse.sparsifier.audit()
        assert resumed.sparsifier.data_groups == sparse.sparsifier.data_groups

    @pytest.mark.parametrize("sparse_first", [True, False])
    def test_back_to_the_best_weights(self, sparse_first: bool) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 3)
        best = copy.deepcopy({"sparse": sparse.state_dict(), "model": model.state_dict()})
        train(model, optimizer, sparse, 5)
        loads = [
            lambda: sparse.load_state_dict(best["sparse"]),
            lambda: model.load_state_dict(best["model"]),
        ]
        for load in loads if sparse_first else reversed(loads):
            load()
        model(torch.arange(6).view(2, 3))
        assert same(model.state_dict(), best["model"]) and zero_rows(model.user) < 24


class TestLeftDense:
    def test_tiny_tables(self) -> None:
        model = Two(others=15)
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.9, end=0)
        assert sparse.left_dense == {"item": "15 rows, fewer than min_rows=16"}
        assert list(sparse.sparsifier.data_groups) == ["user"]
        assert (
            "1 table, 1 left dense" in repr(sparse)
            and "item is left dense: 15 rows" in sparse.summary()
        )
        sparse.step()
        assert zero_rows(model.item) == 0 and zero_rows(model.user) == 36

    def test_min_rows(self) -> None:
        model = Two(others=2)
        sparse = sparsify(
            model,
            optim.SGD(model.parameters(), lr=0.1),
            level=0.5,
            end=0,
            advanced=Advanced(min_rows=0),
        )
        sparse.step()
        assert not sparse.left_dense and (zero_rows(model.user), zero_rows(model.item)) == (20, 1)

    @pytest.mark.parametrize(("level", "kept"), [(0.999, 1), (1.0, 0)])
    def test_the_last_block_goes_at_level_1_only(self, level: float, kept: int) -> None:
        model = Two()
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=level, end=0)
        sparse.step()
        assert (zero_rows(model.user), zero_rows(model.item)) == (40 - kept, 30 - kept)

    def test_frozen_tables(self) -> None:
        model = Two()
        model.item.weight.requires_grad_(False)
        before = model.item.weight.clone()
        sparse = sparsify(model, optim.SGD(model.user.parameters(), lr=0.1), level=0.5, end=0)
        sparse.step()
        assert sparse.left_dense == {"item": "frozen (requires_grad=False)"}
        assert torch.equal(model.item.weight, before)

    @pytest.mark.parametrize(
        ("name", "left"),
        [
            *(
                (name, True)
                for name in (
                    "position_embeddings",
                    "wpe",
                    "_pos_emb",
                    "PositionEmbedding",
                    "posEmb",
                    "posemb",
                )
            ),
            *((name, True) for name in ("positional", "ad_position", "POS", "positions")),
            *(
                (name, False)
                for name in ("composer", "purpose", "post_id", "posts", "deposit", "opposition")
            ),
        ],
    )
    def test_position_embeddings(self, name: str, left: bool) -> None:
        model = nn.ModuleDict({"word": nn.Embedding(40, 4), name: nn.Embedding(32, 4)})
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.5, end=0)
        reason = {name: "position embeddings; include= prunes them"}
        assert sparse.left_dense == (reason if left else {})
        sparse.step()
        assert (zero_rows(model["word"]), zero_rows(model[name])) == (20, 0 if left else 16)
        assert ("position embeddings" in sparse.summary()) is left

    def test_position_embeddings_that_are_named(self) -> None:
        model = nn.ModuleDict({"word": nn.Embedding(40, 4), "wpe": nn.Embedding(32, 4)})
        sgd = optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            ValueError, match=r"left dense: 'wpe' \(position embeddings; include= prunes them\)"
        ):
            sparsify(model, sgd, level={"wpe": 0.5}, end=0)
        sparse = sparsify(model, sgd, level=0.5, end=0, include=["word", "wp*"])
        sparse.step()
        assert not sparse.left_dense and zero_rows(model["wpe"]) == 16

    def test_dense_parameters_are_no_tables(self) -> None:
        model = Two()
        sparse = sparsify(
            model,
            optim.SGD(model.parameters(), lr=0.1),
            level=0.5,
            end=0,
            block=(1, 1),
            advanced=Advanced(dense="over.w*"),
        )
        sparse.step()
        assert not sparse.left_dense and int((model.over.weight == 0).sum()) == 2


class TestNames:
    def test_levels_by_qualified_name(self) -> None:
        model = nn.Sequential(Two())
        level = {"*": 0.5, "0.us*.weight": 0.25}
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=level, end=0)
        sparse.step()
        assert (zero_rows(model[0].user), zero_rows(model[0].item)) == (10, 15)  # type: ignore[union-attr, arg-type]

    @pytest.mark.parametrize(
        ("block", "shape"),
        [
            ("row", (1, ROW)),
            ("ROW", (1, ROW)),
            ("1x4", (1, 4)),
            ("2xrow", (2, ROW)),
            ("Col", (COL, 1)),
            ([2, 2], (2, 2)),
            ((1, ROW),) * 2,
        ],
    )
    def test_blocks(self, block: Any, shape: Any) -> None:
        sparse = pair(block=block)[2]
        assert tuple(sparse.sparsifier.data_groups["user"]["sparse_block_shape"]) == shape

    @pytest.mark.parametrize(
        "schedule", ["constant", "Cosine", "cubic", "EXPONENTIAL", "linear", "one_shot"]
    )
    @pytest.mark.parametrize("norm", ["l1", "L2"])
    def test_schedules_and_norms(self, schedule: Any, norm: Any) -> None:
        model, optimizer, sparse = pair(schedule=schedule, norm=norm)
        train(model, optimizer, sparse, 7)
        assert sparse.sparsifier.norm == norm.upper() and (
            zero_rows(model.user),
            zero_rows(model.item),
        ) == (24, 18)


class TestWithoutEnd:
    """Masks follow the weights for good."""

    def test_masks_are_updated_for_good(self) -> None:
        model, optimizer, sparse = pair(end=None, begin=2, every=3)
        due = []
        for step in range(12):
            if sparse.sparsifier.enable_mask_update:
                due.append(step)
            train(model, optimizer, sparse, 1)
        assert due == [2, 5, 8, 11] and (zero_rows(model.user), zero_rows(model.item)) == (24, 18)
        assert not sparse.finished and "SparseTraining(step 12, level 0.6" in repr(sparse)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sparse.detach()  # nothing has been cut short

    def test_a_resumed_one_goes_on(self) -> None:
        model, optimizer, sparse = pair(end=None, every=2)
        train(model, optimizer, sparse, 5)
        state = copy.deepcopy(sparse.state_dict())
        sparse.detach()
        again = sparsify(model, optimizer, level=0.6, end=None, every=2)
        again.load_state_dict(state)
        assert again.scheduler.last_epoch == 5 and not again.sparsifier.enable_mask_update
        train(model, optimizer, again, 1)
        assert again.sparsifier.enable_mask_update

    def test_a_state_that_ends_is_a_warning(self) -> None:
        model, optimizer, sparse = pair(end=4, every=2)
        train(model, optimizer, sparse, 5)
        state = copy.deepcopy(sparse.state_dict())
        sparse.detach()
        again = sparsify(model, optimizer, level=0.6, end=None, every=2)
        with pytest.warns(
            UserWarning, match="schedule ends at step 4 and replaces end=None: masks freeze then"
        ):
            again.load_state_dict(state)

    def test_a_curve_needs_an_end(self) -> None:
        with pytest.raises(
            ValueError, match="Invalid end=None: CubicDataScheduler must have an end"
        ):
            pair(end=None, schedule="cubic")

    def test_lookups_that_are_not_counted(self) -> None:
        assert "lookups of removed rows: not known" in pair()[2].summary()
        with pytest.raises(
            ValueError, match=r"Invalid decay=0\.5 with score=None: 'frequency' alone"
        ):
            pair(decay=0.5)


class TestSteps:
    def test_auto_step_counts_optimizer_steps(self) -> None:
        model, optimizer, sparse = pair(auto_step=True)
        for micro_batch in range(14):
            model(torch.arange(12).view(4, 3) + micro_batch).sum().backward()
            if micro_batch % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert sparse.scheduler.last_epoch == 7 and zero_rows(model.user) == 24
        with pytest.raises(RuntimeError, match="auto_step"):
            sparse.step()
        sparse.detach()
        train(model, optimizer, None, 2)
        assert sparse.scheduler.last_epoch == 7

    def test_auto_step_is_the_same_as_step(self) -> None:
        (model, optimizer, sparse), (other, second, _) = pair(), pair(auto_step=True)
        train(model, optimizer, sparse, 9)
        train(other, second, None, 9)
        assert same(model.state_dict(), other.state_dict())

    def test_auto_step_survives_without_the_result(self) -> None:
        model = Two()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        sparsify(model, optimizer, level=0.6, end=6, every=2, advanced=Advanced(auto_step=True))
        train(model, optimizer, None, 7)
        assert zero_rows(model.user) == 24


class TestEnds:
    def test_detach_before_the_end_warns_once(self) -> None:
        model, optimizer, sparse = pair()
        train(model, optimizer, sparse, 4)
        with pytest.warns(UserWarning, match="stopped at step 4, before .*end=6") as caught:
            sparse.detach()
            sparse.detach()
        assert len(caught) == 1 and not sparse.enforcer.attached

    def test_detach_after_the_end_is_silent(self) -> None:
        model, optimizer, sparse = pair()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with sparse:
                train(model, optimizer, sparse, 7)
        assert not sparse.enforcer.attached and sparse.finished

    def test_a_block_that_raises_detaches_and_keeps_its_error(self) -> None:
        sparse = pair()[2]
        with pytest.raises(KeyError), sparse:
            raise KeyError("lost")
        assert not sparse.enforcer.attached

    def test_sparsified_again(self) -> None:
        model, optimizer, sparse = pair()
        with pytest.raises(ValueError, match=r"already sparsified: call detach\(\) first"):
            sparsify(model, optimizer, level=0.2, end=6)
        assert sparse.enforcer.attached
        sparse.detach()
        sparsify(model, optimizer, level=0.2, end=6)


class TestShown:
    def test_repr_and_summary(self) -> None:
        model, optimizer, sparse = pair(level={"user": 0.5, "item": 0.25})
        train(model, optimizer, sparse, 7)
        assert (
            repr(sparse)
            == "SparseTraining(step 7, schedule ended at 6, level 0.25 to 0.5 by norm, 2 tables,"
            " attached)"
        )
        assert sparse.sparsity == pytest.approx((20 + 8) / 70)
        assert "user" in sparse.summary()
        assert sparse.partial_tables == []

    def test_a_thousand_tables(self) -> None:
        model = nn.ModuleList(nn.Embedding(16, 1) for _ in range(1000))
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.5, end=0)
        assert len(repr(sparse)) < 100


def test_help_begins_with_what_one_starts_with() -> None:
    words = str(dist_sparse.__doc__).split()
    firsts = [
        words.index(name)
        for name in ("sparsify", "SparseTraining", "DataNormSparsifier", "MaskEnforcer")
    ]
    assert max(firsts) < words.index("dist_sparse.extend")


torchrec = pytest.importorskip("torchrec")


class TestUnsharded:
    """Unsharded collections of TorchRec, which DistributedModelParallel replaces."""

    class Model(nn.Module):
        def __init__(self, device: str = "cpu") -> None:
            super().__init__()
            config = torchrec.EmbeddingBagConfig(
                name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"]
            )
            self.ebc = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device(device))
            self.over = nn.Linear(8, 1)

        def forward(self, features: Any) -> Any:
            return self.over(self.ebc(features).values())

    def features(self) -> Any:
        lengths = torch.full((4,), 3)
        return torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["f"], torch.randint(50, (12,)), lengths
        )

    def test_one_process(self) -> None:
        model = self.Model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        sparse = sparsify(model, optimizer, level=0.8, end=2, every=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(self.features()).sum().backward()
            optimizer.step()
            sparse.step()
        assert zero_rows(model.ebc.embedding_bags["t"]) == 40

    def test_another_model_trains(self) -> None:
        model = self.Model()
        other = copy.deepcopy(model)
        sparse = sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.8, end=2, every=1)
        other(self.features()).sum().backward()
        with pytest.raises(RuntimeError, match=r"No forward has used the collections \['ebc'\]"):
            sparse.step()

    def test_weights_that_are_not_there_yet(self) -> None:
        model = self.Model("meta")
        with pytest.raises(ValueError, match="meta device"):
            sparsify(model, optim.SGD(model.parameters(), lr=0.1), level=0.8, end=2)


@pytest.mark.parametrize("where", ["block", "config"])
@pytest.mark.parametrize("block", [[1, 10**20], [10**20, 1], [2**40, 2**40]])
def test_a_block_of_a_state_that_no_int64_holds(where: str, block: list[int]) -> None:
    """It was accepted, and each later mask update raised an OverflowError."""
    model, optimizer, sparse = pair(block="row")
    train(model, optimizer, sparse, 5)
    state = copy.deepcopy(sparse.state_dict())
    train(model, optimizer, sparse, 1)
    before = everything(model, sparse)
    with edited(state["sparsifier"]["sharded"], "tables") as tables:
        if where == "block":
            tables["user"]["block"] = block
        else:
            tables["user"]["config"]["sparse_block_shape"] = block
    with pytest.raises(ValueError, match=r"Invalid sparse_block_shape=.*less than 2\*\*63"):
        sparse.load_state_dict(state)
    assert same(everything(model, sparse), before)
    with pytest.raises(ValueError, match=r"less than 2\*\*63 elements"):
        sparsify(Two(), optim.SGD(model.parameters(), lr=0.1), level=0.5, end=1, block=tuple(block))


@pytest.mark.parametrize("schedule", ["linear", "cubic", "cosine", "constant"])
@pytest.mark.parametrize("seed", range(3))
def test_every_level_on_the_way_to_all_blocks_is_reached(seed: int, schedule: str) -> None:
    """With ``scope="global"`` a level just below 1 rounds to all blocks, one more of each table
    than may go: what is accepted at the call must hold for each of its updates."""
    rng = random.Random(seed)
    for _ in range(5):
        torch.manual_seed(seed)
        model = nn.ModuleDict(
            {name: nn.EmbeddingBag(rng.randint(16, 90), 4) for name in ("a", "b", "c")}
        )
        final = rng.choice([0.5, 0.9, 0.99, 0.9999, 1.0])
        level = {"*": 1.0, rng.choice("abc"): final, rng.choice("abc"): rng.choice([0.0, 1.0])}
        floor = rng.choice([None, 0.0, {"a": rng.choice([0.01, 0.1])}])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        try:
            sparse = sparsify(
                model,
                optimizer,
                level=level,
                advanced=Advanced(floor=floor, scope="global"),
                schedule=schedule,
                end=40,
                every=rng.choice([1, 3]),
            )
        except ValueError as error:
            assert "The levels remove" in str(error)
            continue
        for _ in range(41):
            sparse.step()
        sparse.detach()


def test_level_one_of_all_tables_is_reached_over_them() -> None:
    _, _, sparse = pair(level=1.0, scope="global", end=50, every=1)
    for step in range(51):
        sparse.step()
        assert (sparse.sparsity == 1) == (step == 50)


def test_a_state_whose_score_needs_other_optimizers_changes_nothing() -> None:
    """Its next mask update once failed instead of the load."""
    source, model = Two(), Two()
    adagrad, adam = optim.Adagrad(source.parameters()), optim.Adam(model.parameters())
    plan = {"level": 0.5, "end": 6, "every": 2, "min_rows": 4}
    saved = sparsify(source, adagrad, **nested(**plan, score="accumulator"))
    train(source, adagrad, saved, 3)
    sparse = sparsify(model, adam, **nested(**plan))
    before = sparse.state_dict()
    with pytest.raises(ValueError, match="no Adagrad steps it"):
        sparse.load_state_dict(saved.state_dict())
    assert str(sparse.state_dict()) == str(before)
    train(model, adam, sparse, 3)
    saved.detach()
    sparse.detach()
