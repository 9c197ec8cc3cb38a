"""Bugs of the ancestor that `BaseDataSparsifier` does not have.

Each has a test of ours alone.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from tests.conformance.pair import Doubled, Ours, data_of_each_kind, saved_and_loaded


class TestMendedBugs:
    @pytest.mark.parametrize("reuse_mask", [True, False])
    @pytest.mark.filterwarnings("ignore:.*:UserWarning")
    def test_bug_1_squashed_name_gets_new_data(self, reuse_mask: bool) -> None:
        old, new = torch.ones(3, 2), torch.full((3, 2), 2.0)
        sparsifier = Ours([("w", old)], level=0.5)
        sparsifier.step()
        sparsifier.squash_mask()
        masked = sparsifier.add_data("w", new, reuse_mask=reuse_mask)
        assert masked.sum(1).tolist() == ([0, 4, 4] if reuse_mask else [4, 4, 4])
        assert sparsifier.get_data("w") is new
        assert sparsifier.data_groups["w"] == {"level": 0.5}
        assert old.sum(1).tolist() == [0, 2, 2]

    def test_bug_2_step_skips_the_squashed(self) -> None:
        a, b = torch.ones(3, 2), torch.ones(3, 2)
        sparsifier = Ours([("a", a), ("b", b)])
        sparsifier.step()
        sparsifier.squash_mask(names=["a"])
        sparsifier.step()
        assert sparsifier.get_mask("a").sum(1).tolist() == [0, 2, 2]
        assert sparsifier.get_mask("b").sum(1).tolist() == [0, 0, 2]

    def test_all_names_are_squashed_or_none(self) -> None:
        a, b = torch.ones(2, 2), torch.ones(2, 2)
        sparsifier = Ours([("a", a), ("b", b)])
        sparsifier.get_mask("a").zero_()
        sparsifier.get_mask("b").data = torch.zeros(3)
        with pytest.raises(ValueError, match="does not fit"):
            sparsifier.squash_mask()
        assert torch.equal(a, torch.ones(2, 2)) and torch.equal(sparsifier.get_data("a"), a)
        sparsifier.get_mask("b").data = torch.zeros(2, 2)
        sparsifier.squash_mask()
        assert not a.any() and not b.any()

    def test_a_mask_that_does_not_fit_can_be_dropped(self) -> None:
        weight = torch.ones(2, 2)
        sparsifier = Ours([("a", weight)])
        sparsifier.get_mask("a").data = torch.zeros(3)
        sparsifier.squash_mask(leave_parametrized=False)
        assert torch.equal(sparsifier.get_data("a", return_original=False), torch.ones(2, 2))

    def test_bug_3_squash_all_when_some_are(self) -> None:
        a, b = torch.ones(3, 2), torch.ones(3, 2)
        sparsifier = Ours([("a", a), ("b", b)])
        sparsifier.step()
        sparsifier.squash_mask(names=["a"])
        sparsifier.squash_mask()
        assert b[0].sum() == 0
        sparsifier.squash_mask()

    def test_bug_4_lenient_load_of_a_known_name(self) -> None:
        source = Ours([("both", torch.ones(3, 2)), ("theirs", torch.ones(3, 2))], level=0.9)
        source.step()
        kept = torch.full((3, 2), 7.0)
        target = Ours([("both", kept), ("mine", torch.ones(3, 2))], level=0.5)
        target.load_state_dict(source.state_dict(), strict=False)
        assert set(target.data_groups) == {"both", "mine", "theirs"}
        assert target.get_data("both") is kept
        assert target.get_mask("both").sum() == 6 and target.data_groups["both"] == {"level": 0.5}
        assert target.get_mask("theirs").sum() == 4 and target.data_groups["theirs"] == {
            "level": 0.9
        }

    @pytest.mark.parametrize("missing", ["data_groups", "_container"])
    @pytest.mark.parametrize("strict", [True, False])
    def test_bug_5_refused_load_changes_nothing(self, missing: str, strict: bool) -> None:
        state = Ours([("a", torch.ones(3, 2)), ("b", torch.ones(3, 2))]).state_dict()
        state[missing] = {
            key: value for key, value in state[missing].items() if "b" not in key.split(".")
        }
        data = torch.full((2, 2), 3.0)
        sparsifier = Ours([("mine", data)], level=0.5)
        sparsifier.step()
        with pytest.raises(RuntimeError, match="b"):
            sparsifier.load_state_dict(state, strict=strict)
        assert list(sparsifier.data_groups) == list(sparsifier.state) == ["mine"]
        assert sparsifier.get_data("mine") is data
        assert sparsifier.get_data("mine", return_original=False).sum(1).tolist() == [0, 6]

    @pytest.mark.parametrize("how", ["load", "deepcopy", "pickle"])
    def test_bug_6_custom_parametrization_survives(self, how: str) -> None:
        source = Ours()
        source.add_data("w", torch.ones(2, 2), parametrization=Doubled)
        source.add_data("v", torch.ones(2, 2))
        if how == "load":
            target = Ours()
            target.load_state_dict(source.state_dict())
        else:
            target = (
                copy.deepcopy(source) if how == "deepcopy" else pickle.loads(pickle.dumps(source))
            )
        assert torch.equal(target.get_data("w", return_original=False), torch.full((2, 2), 2.0))
        assert torch.equal(target.get_data("v", return_original=False), torch.ones(2, 2))

    def test_bug_7_saved_config_stays_as_saved(self) -> None:
        sparsifier = Ours([("w", torch.ones(2, 2))], level=0.5, nested=[1])
        state = sparsifier.state_dict()
        sparsifier.data_groups["w"]["level"] = 0.9
        sparsifier.data_groups["w"]["nested"].append(2)
        sparsifier.add_data("new", torch.ones(2, 2))
        assert state["data_groups"] == {"w": {"level": 0.5, "nested": [1]}}

    def test_bug_8_state_loads_safely(self) -> None:
        sparsifier = Ours(data_of_each_kind(), level=0.5, shape=(1, 4))
        sparsifier.step()
        state = saved_and_loaded(sparsifier.state_dict(), weights_only=True)
        target = Ours()
        target.load_state_dict(state)
        for name in sparsifier.data_groups:
            assert torch.equal(target.get_mask(name), sparsifier.get_mask(name))
        assert target.data_groups["emb"] == {"level": 0.5, "shape": (1, 4)}

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
        ids=["deepcopy", "pickle"],
    )
    def test_bug_9_copies_are_whole(self, copied: Any) -> None:
        sparsifier = Ours([("w", torch.ones(3, 2))], level=0.5)
        sparsifier.enable_mask_update = False
        sparsifier.own = [1, 2]  # type: ignore[attr-defined]
        twin = copied(sparsifier)
        assert twin.enable_mask_update is False and twin.own == [1, 2]
        twin.enable_mask_update = True
        twin.step()
        assert twin.get_mask("w")[0].sum() == 0 and sparsifier.get_mask("w")[0].sum() == 2

    def test_bug_9_setstate_leaves_its_argument_alone(self) -> None:
        sparsifier = Ours([("w", torch.ones(3, 2))])
        state = sparsifier.__getstate__()
        keys = set(state)
        for _ in range(2):
            twin = Ours.__new__(Ours)
            twin.__setstate__(state)
            assert set(state) == keys
            twin.step()

    def test_bug_10_defaults_are_not_shared(self) -> None:
        nested = {"list": [1]}
        sparsifier = Ours([("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))], nested=nested)
        sparsifier.data_groups["a"]["nested"]["list"].append(2)
        assert sparsifier.data_groups["b"]["nested"] == {"list": [1]}
        assert sparsifier.defaults["nested"] == {"list": [1]}

    def test_bug_11_importing_leaves_the_warning_filters_alone(self) -> None:
        code = (
            "import warnings, torch, torch.nn.utils.parametrize; before = list(warnings.filters);"
            "import dist_sparse.sparsifiers.base, dist_sparse.schedulers;"
            "assert list(warnings.filters) == before, warnings.filters"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_reference_cycle() -> None:
    data = torch.ones(3, 2)
    gc.disable()
    try:
        sparsifier = Ours([("w", data)])
        sparsifier.step()
        watched = weakref.ref(sparsifier)
        del sparsifier
        assert watched() is None
    finally:
        gc.enable()
