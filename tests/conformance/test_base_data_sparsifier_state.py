"""States of `BaseDataSparsifier` equal its ancestor's, after any sequence of calls.

What both must do runs against both: ``library`` is "ours" or "ancestor".
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conformance.pair import Ancestor, Ours, data_of_each_kind, saved_and_loaded


@pytest.fixture(params=["ours", "ancestor"])
def library(request: pytest.FixtureRequest) -> type:
    return {"ours": Ours, "ancestor": Ancestor}[request.param]


class TestState:
    def test_layout(self, library: type) -> None:
        data = torch.randn(3, 2)
        sparsifier = library([("w", data), ("s", torch.randn(2, 2))], level=0.5)
        sparsifier.step()
        sparsifier.squash_mask(names=["s"])
        state = sparsifier.state_dict()
        assert set(state) == {"state", "data_groups", "_container"}
        assert state["state"]["w"]["mask"].layout == torch.sparse_coo
        assert torch.equal(state["state"]["w"]["mask"].to_dense(), sparsifier.get_mask("w"))
        assert state["state"]["w"]["calls"] == 1
        assert state["data_groups"] == {"w": {"level": 0.5}, "s": {"level": 0.5}}
        assert set(state["_container"]) == {"parametrizations.w.original", "s"}
        assert state["_container"]["parametrizations.w.original"].data_ptr() == data.data_ptr()

    @pytest.mark.parametrize("strict", [True, False])
    def test_round_trip(self, library: type, strict: bool) -> None:
        source = library(data_of_each_kind(), level=0.5)
        source.step()
        source.squash_mask(names=["bag"])
        state = source.state_dict()
        target = library([("mine", torch.ones(4, 4))], level=0.1)
        target.load_state_dict(state, strict=strict)
        assert set(target.data_groups) == set(source.data_groups) | (set() if strict else {"mine"})
        assert target.defaults == {"level": 0.1}
        for name in source.data_groups:
            assert torch.equal(target.get_mask(name), source.get_mask(name))
            assert target.get_mask(name) is not source.get_mask(name)
            assert target.data_groups[name] == {"level": 0.5}
            masked = target.get_data(name, return_original=False)
            assert torch.equal(masked, source.get_data(name, return_original=False))
            if name != "bag":
                loaded = target.get_data(name)
                assert torch.equal(loaded, source.get_data(name)) and loaded is not source.get_data(
                    name
                )
                assert type(loaded) is Tensor and not loaded.requires_grad
        with pytest.raises(ValueError):
            target.get_data("bag")

    @pytest.mark.parametrize(
        "source, target", [(Ancestor, Ours), (Ours, Ancestor)], ids=["to ours", "from ours"]
    )
    def test_states_are_interchangeable(self, source: type, target: type) -> None:
        saved = source(data_of_each_kind(), level=0.5)
        saved.step()
        saved.squash_mask(names=["emb"])
        loaded = target()
        loaded.load_state_dict(saved_and_loaded(saved.state_dict(), weights_only=False))
        assert dict(loaded.data_groups) == dict(saved.data_groups)
        for name in saved.data_groups:
            assert torch.equal(loaded.get_mask(name), saved.get_mask(name))
            masked = loaded.get_data(name, return_original=False)
            assert torch.equal(masked, saved.get_data(name, return_original=False))

    def test_a_loaded_sparsifier_goes_on_as_the_saved_one(self, library: type) -> None:
        source = library([("w", torch.ones(4, 2))])
        source.step()
        target = library()
        target.load_state_dict(source.state_dict())
        target.step()
        assert target.get_mask("w").sum(1).tolist() == [0, 0, 2, 2]
        assert source.get_mask("w").sum(1).tolist() == [0, 2, 2, 2]

    def test_loading_leaves_the_given_state_alone(self, library: type) -> None:
        source = library([("w", torch.ones(3, 2))], level=0.5)
        state = source.state_dict()
        target = library()
        target.load_state_dict(state)
        target.step()
        target.data_groups["w"]["level"] = 0.9
        assert torch.equal(state["state"]["w"]["mask"].to_dense(), torch.ones(3, 2))
        assert state["data_groups"]["w"] == {"level": 0.5}
        assert torch.equal(source.get_mask("w"), torch.ones(3, 2))

    @pytest.mark.parametrize("missing", ["data_groups", "_container"])
    def test_incomplete_state_is_refused(self, library: type, missing: str) -> None:
        state = library([("w", torch.ones(3, 2))]).state_dict()
        state[missing] = {}
        with pytest.raises(RuntimeError):
            library().load_state_dict(state)

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies(self, library: type, copied: Any) -> None:
        sparsifier = library(data_of_each_kind(), level=0.5)
        sparsifier.step()
        sparsifier.squash_mask(names=["bag"])
        twin = copied(sparsifier)
        assert type(twin) is library and twin.defaults == sparsifier.defaults
        assert dict(twin.data_groups) == dict(sparsifier.data_groups)
        for name in sparsifier.data_groups:
            assert torch.equal(twin.get_mask(name), sparsifier.get_mask(name))
            assert torch.equal(
                twin.get_data(name, return_original=False),
                sparsifier.get_data(name, return_original=False),
            )
        twin.get_mask("tensor").zero_()
        assert sparsifier.get_mask("tensor").sum() > 0


NAMES = st.sampled_from(["a", "b", "c"])
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), NAMES, st.sampled_from([0.1, 0.2, None]), st.booleans()),
    st.tuples(st.just("step")),
    st.tuples(st.just("edit"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("squash"), NAMES, st.booleans()),
    st.tuples(st.just("reload"), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=12), st.integers(0, 1000))
def test_any_sequence_of_calls(operations: list[tuple[Any, ...]], seed: int) -> None:
    """The same calls on both leave the same state, outside of its bugs (nothing squashed is touched
    again)."""
    both: list[Any] = [Ours(level=0.5), Ancestor(level=0.5)]
    squashed: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (what, *rest) in enumerate(operations):
            known = set(both[0].data_groups) - squashed
            if what == "add" and rest[0] not in squashed:
                data = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + number))
                config = {} if rest[1] is None else {"level": rest[1]}
                for sparsifier in both:
                    sparsifier.add_data(rest[0], data.clone(), reuse_mask=rest[2], **config)
            elif what == "step" and not squashed:
                for sparsifier in both:
                    sparsifier.step()
            elif what == "edit" and rest[0] in known:
                for sparsifier in both:
                    sparsifier.get_mask(rest[0])[rest[1]] = 0
            elif what == "squash" and rest[0] in known:
                squashed.add(rest[0])
                for sparsifier in both:
                    sparsifier.squash_mask(names=[rest[0]], leave_parametrized=rest[1])
            elif what == "reload":
                for i, sparsifier in enumerate(both):
                    both[i] = type(sparsifier)(level=0.5)
                    both[i].load_state_dict(sparsifier.state_dict(), strict=rest[0])
    check_same(*both)


def check_same(ours: Any, theirs: Any) -> None:
    assert list(ours.data_groups) == list(theirs.data_groups)
    assert dict(ours.data_groups) == dict(theirs.data_groups)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert set(mine["_container"]) == set(other["_container"])
    for name in ours.data_groups:
        assert torch.equal(ours.get_mask(name), theirs.get_mask(name))
        assert ours.get_mask(name).dtype == theirs.get_mask(name).dtype
        assert torch.equal(
            ours.get_data(name, return_original=False), theirs.get_data(name, return_original=False)
        )
        assert set(mine["state"][name]) == set(other["state"][name])
        assert torch.equal(
            mine["state"][name]["mask"].to_dense(), other["state"][name]["mask"].to_dense()
        )
