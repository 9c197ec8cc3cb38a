"""A run saved with torch.ao's data sparsifier and scheduler continues with those of this
package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dist_sparse.schedulers import CubicDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.score import DataNormSparsifier
from tests.conformance.pair import Ancestor, Doubled, Ours, ancestors, saved_and_loaded, weight_of

schedulers = pytest.importorskip(
    "torch.ao.pruning._experimental.data_scheduler", exc_type=ImportError
)
AncestorNorm = ancestors.DataNormSparsifier
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Scaled(nn.Module):
    """A parametrization with a buffer of its own, which training changes."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * self.mask


def safely(state: Any) -> Any:
    """As docs/migrating.md has it: an empty dict for each defaultdict, whose items a safe load
    refuses to set."""
    with torch.serialization.safe_globals(
        [(lambda *_: {}, "collections.defaultdict"), dict, Doubled, Scaled]
    ):
        return saved_and_loaded(state, weights_only=True)


@pytest.fixture(params=["in memory", "safely", "unsafely"])
def passed(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """How the state gets here."""
    ways: dict[str, Callable[[Any], Any]] = {
        "in memory": lambda state: state,
        "safely": safely,
        "unsafely": lambda state: saved_and_loaded(state, weights_only=False),
    }
    return ways[request.param]


def same(ours: Any, theirs: Any) -> None:
    assert set(ours.data_groups) >= set(theirs.data_groups)
    for name, group in theirs.data_groups.items():
        mask = theirs.get_mask(name)
        assert ours.get_mask(name).dtype == mask.dtype and torch.equal(ours.get_mask(name), mask), (
            name
        )
        effective = theirs.get_data(name, return_original=False)
        assert torch.equal(ours.get_data(name, return_original=False), effective), name
        assert ours.data_groups[name].keys() == group.keys()


def trained(*sparsifiers: Any) -> None:
    """The same new weights for all that is registered in each; no two are equal, so that nothing
    ties."""
    for name in sparsifiers[0].data_groups:
        data = sparsifiers[0].get_data(name)
        order = torch.randperm(data.numel(), generator=torch.Generator().manual_seed(data.numel()))
        for sparsifier in sparsifiers:
            sparsifier.get_data(name).data.copy_((order + 1.0).view(data.shape))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_sparsifier(passed: Callable[[Any], Any], dtype: torch.dtype, strict: bool) -> None:
    torch.manual_seed(0)
    data: list[tuple[str, Any, float]] = [
        ("tensor", torch.randn(9, 7).to(dtype), 0.5),
        ("param", nn.Parameter(torch.randn(8, 6).to(dtype)), 0.3),
        ("emb", nn.Embedding(10, 8, dtype=dtype), 0.5),
        ("bag", nn.EmbeddingBag(5, 9, dtype=dtype), 0.9),
        ("all", torch.randn(4, 4).to(dtype), 1.0),
        ("none", torch.randn(4, 4).to(dtype), 0.0),
        ("squashed", torch.randn(6, 4).to(dtype), 0.5),
    ]
    theirs = AncestorNorm(sparse_block_shape=(1, 2), norm="L2")
    for name, tensor, level in data:
        theirs.add_data(name, tensor, sparsity_level=level)
    theirs.step()
    theirs.squash_mask(names=["squashed"])

    ours = DataNormSparsifier([("mine", torch.ones(2, 2))], norm="L2")
    ours.load_state_dict(passed(theirs.state_dict()), strict=strict)
    same(ours, theirs)
    assert dict(ours.data_groups) == {
        **({} if strict else {"mine": ours.defaults}),
        **theirs.data_groups,
    }
    assert ours.get_mask("all").sum() == 0 and ours.get_mask("none").sum() == 16
    assert all(ours.get_data(name) is not weight_of(tensor) for name, tensor, _ in data[:-1])
    with pytest.raises(ValueError, match="squashed"):
        ours.get_data("squashed")

    del theirs.data_groups["squashed"]  # the ancestor can't step a squashed name
    # Of half types the ancestor's masks are not those of the exact rule.
    if dtype in (
        torch.float32,
        torch.float64,
    ):
        trained(theirs, ours)
        before = theirs.get_mask("tensor").clone()
        ours.step()
        theirs.step()
        same(ours, theirs)
        assert not torch.equal(before, ours.get_mask("tensor"))


@pytest.mark.parametrize("strict", [True, False])
def test_custom_sparsifier(passed: Callable[[Any], Any], strict: bool) -> None:
    """Masks of any dtype, a parametrization, entries of the user's own: all go on."""
    theirs = Ancestor(rows=1)
    theirs.add_data("doubled", torch.ones(4, 2), parametrization=Doubled)
    theirs.add_data("given", torch.ones(4, 2), mask=torch.tensor([[1, 0]] * 4))
    theirs.add_data("flags", torch.ones(4, 2), mask=torch.tensor([[True, False]] * 4))
    theirs.add_data("parts", torch.ones(4, 2, 3), mask=torch.full((4, 2, 3), 0.5))
    theirs.add_data("ints", torch.arange(8).view(4, 2))
    theirs.step()
    theirs.state["given"]["seen"] = torch.arange(3)
    theirs.state["given"]["nested"] = {"of": [1, 2]}
    ours = Ours()
    ours.load_state_dict(passed(theirs.state_dict()), strict=strict)
    same(ours, theirs)
    assert torch.equal(ours.state["given"]["seen"], torch.arange(3))
    assert ours.state["given"]["nested"] == {"of": [1, 2]}
    assert ours.data_groups["doubled"] == {"rows": 1, "parametrization": Doubled}
    assert {entry["calls"] for entry in ours.state.values()} == {1}
    for sparsifier in (ours, theirs):
        sparsifier.step()
    same(ours, theirs)
    assert ours.get_mask("doubled").sum(1).tolist() == [0, 0, 2, 2]


def test_what_a_parametrization_has_learned(passed: Callable[[Any], Any]) -> None:
    theirs = Ancestor()
    theirs.add_data("w", torch.ones(4, 2), parametrization=Scaled)
    theirs._container.parametrizations.w[0].scale.fill_(5.0)
    theirs.step()
    ours = Ours()
    ours.load_state_dict(passed(theirs.state_dict()))
    same(ours, theirs)
    assert ours.get_data("w", return_original=False).sum(1).tolist() == [0, 10, 10, 10]
    ours.get_mask("w")[1] = 0  # it is still the mask that the parametrization has
    assert ours.get_data("w", return_original=False).sum(1).tolist() == [0, 0, 10, 10]


@pytest.mark.parametrize("shape", [(8,), (6, 1), (3, 1, 4), (1, 1, 6), (2, 1, 1, 8)])
def test_masks_that_the_ancestor_bent(passed: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    """Its step drops or adds dimensions of size 1; then it can't even read the data. Ours can."""
    theirs = AncestorNorm(
        [("w", torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape))],
        sparse_block_shape=(1, 1),
    )
    theirs.step()
    state = passed(theirs.state_dict())
    bent = state["state"]["w"]["mask"].to_dense()
    assert bent.shape != shape
    with pytest.raises(AssertionError):
        AncestorNorm().load_state_dict(state)
    for strict in (True, False):
        ours = DataNormSparsifier()
        ours.load_state_dict(state, strict=strict)
        assert ours.get_mask("w").shape == shape and torch.equal(
            ours.get_mask("w").flatten(), bent.flatten()
        )
        assert torch.equal(ours.get_data("w", return_original=False) != 0, ours.get_mask("w") != 0)
        ours.step()
        assert torch.equal(ours.get_mask("w").flatten(), bent.flatten())
        assert ours.state_dict()["state"]["w"]["mask"].shape == shape


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (16,), (2, 4, 2)])
def test_masks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    theirs = AncestorNorm([("w", torch.randn(4, 4))])
    state = theirs.state_dict()
    state["state"]["w"]["mask"] = torch.ones(shape).to_sparse_coo()
    ours = DataNormSparsifier([("mine", torch.ones(2, 4))])
    with pytest.raises(ValueError, match="does not fit"):
        ours.load_state_dict(state)
    assert list(ours.data_groups) == list(ours.state) == ["mine"]


def test_an_entry_without_a_mask_is_refused() -> None:
    state = AncestorNorm([("w", torch.randn(4, 4))]).state_dict()
    del state["state"]["w"]["mask"]
    ours = DataNormSparsifier([("mine", torch.ones(2, 4))])
    with pytest.raises(RuntimeError, match=r"'w'.*no mask"):
        ours.load_state_dict(state)
    assert list(ours.data_groups) == ["mine"]


def test_ghosts_stay_behind() -> None:
    """A mere look-up in the ancestor's `data_groups` makes an entry without data, at which its own
    step fails."""
    theirs = AncestorNorm([("w", torch.randn(4, 4))])
    theirs.step()
    assert theirs.data_groups["ghost"] == {}
    ours = DataNormSparsifier()
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.data_groups) == ["w"]
    ours.step()
    with pytest.raises(ValueError):
        theirs.step()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    block=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    level=st.floats(0, 1),
    later=st.floats(0, 1),
    part=st.booleans(),
    norm=st.sampled_from(["L1", "L2"]),
    seed=st.integers(0, 1000),
)
def test_any_norm_sparsifier(
    shape: tuple[int, int],
    block: tuple[int, int],
    level: float,
    later: float,
    part: bool,
    norm: str,
    seed: int,
) -> None:
    zeros = max(1, block[0] * block[1] // 2) if part else None
    data = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    theirs = AncestorNorm(
        [("w", data)],
        sparsity_level=level,
        sparse_block_shape=block,
        zeros_per_block=zeros,
        norm=norm,
    )
    theirs.step()
    ours = DataNormSparsifier(norm=norm)
    ours.load_state_dict(safely(theirs.state_dict()))
    same(ours, theirs)
    for sparsifier in (theirs, ours):
        sparsifier.data_groups["w"]["sparsity_level"] = later
        sparsifier.get_data("w").data.mul_(-1.5)
        sparsifier.step()
    same(ours, theirs)


class TestBack:
    """The other direction. Both formats are one; what the ancestor makes of it is its own."""

    def test_the_ancestor_goes_on(self, passed: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        ours = DataNormSparsifier(
            [("t", torch.randn(9, 7)), ("e", nn.Embedding(8, 4)), ("s", torch.randn(4, 4))]
        )
        ours.step()
        ours.squash_mask(names=["s"])
        theirs = AncestorNorm()
        theirs.load_state_dict(passed(ours.state_dict()))
        same(ours, theirs)
        del theirs.data_groups["s"]
        trained(theirs, ours)
        ours.step()
        theirs.step()
        same(ours, theirs)

    def test_it_takes_new_names_only_into_defaultdicts(self) -> None:
        """What docs/migrating.md says. A state of ours has plain dicts, for the safe load's
        sake."""
        from collections import defaultdict

        state = DataNormSparsifier([("w", torch.randn(4, 4))]).state_dict()
        theirs = AncestorNorm()
        theirs.load_state_dict(state)
        with pytest.raises(KeyError):
            theirs.add_data("new", torch.randn(4, 4))
        for key in ("state", "data_groups"):
            state[key] = defaultdict(dict, state[key])
        theirs = AncestorNorm()
        theirs.load_state_dict(state)
        theirs.add_data("new", torch.randn(4, 4))
        theirs.step()


class _Grows:
    """A tenth more at every step, from what the data had at first."""

    step_size = 0.1
    last_epoch: int
    base_param: dict[str, float]

    def get_schedule_param(self) -> dict[str, float]:
        return {
            name: base + self.step_size * self.last_epoch for name, base in self.base_param.items()
        }


class TestSchedules:
    def saved(self, passed: Callable[[Any], Any], steps: int) -> tuple[Any, Any, Any, Any]:
        kind = type("Grows", (_Grows, schedulers.BaseDataScheduler), {})
        theirs = AncestorNorm(
            [("a", torch.randn(6, 8)), ("b", torch.randn(6, 8))], sparsity_level=0.0
        )
        scheduler = kind(theirs, "sparsity_level")
        scheduler.own = [1, 2]
        for _ in range(steps):
            theirs.step()
            scheduler.step()
        return theirs, scheduler, passed(theirs.state_dict()), passed(scheduler.state_dict())

    def test_a_scheduler_of_the_users_own(self, passed: Callable[[Any], Any]) -> None:
        theirs, their_scheduler, state, plan = self.saved(passed, 3)
        ours = DataNormSparsifier()
        scheduler = type("Grows", (_Grows, BaseDataScheduler), {})(ours, "sparsity_level")
        ours.load_state_dict(state)
        scheduler.load_state_dict(plan)
        assert scheduler.last_epoch == 3 and scheduler.own == [1, 2]
        assert scheduler.state_dict() == their_scheduler.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                for stepped in (ours, scheduler, theirs, their_scheduler):
                    stepped.step()
                same(ours, theirs)
                assert ours.data_groups == theirs.data_groups
        assert ours.data_groups["a"]["sparsity_level"] == pytest.approx(0.6)

    def test_a_ready_schedule_takes_over(self, passed: Callable[[Any], Any]) -> None:
        """Of an ancestor's scheduler it takes the step that it had come to, and keeps its own
        plan."""
        _, _, state, plan = self.saved(passed, 3)
        ours = DataNormSparsifier()
        ours.load_state_dict(state)
        scheduler = CubicDataScheduler(ours, final=0.8, initial=0.1, end=10, every=2)
        scheduler.load_state_dict(plan)
        expected = CubicDataScheduler(
            DataNormSparsifier([("a", torch.ones(2, 2))]), final=0.8, initial=0.1, end=10, every=2
        )
        for _ in range(3):
            expected.data_sparsifier.step()
            expected.step()
        for _ in range(10):
            assert scheduler.last_epoch == expected.last_epoch
            assert scheduler.get_last_param() == dict.fromkeys("ab", expected.get_last_param()["a"])
            assert ours.enable_mask_update == expected.data_sparsifier.enable_mask_update
            for stepped in (ours, scheduler, expected.data_sparsifier, expected):
                stepped.step()
