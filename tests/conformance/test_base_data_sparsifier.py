"""Does `BaseDataSparsifier` do what its ancestor does, its bugs aside?

What both must do runs against both (``library`` is "ours" or "ancestor"), so that the tests are known to describe the
ancestor. A bug of the ancestor that is mended here is a test of ours alone, with the number that docs/conformance gives
it in its name.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dist_sparse.sparsifiers.base import BaseDataSparsifier

ancestors = pytest.importorskip(
    "torch.ao.pruning._experimental.data_sparsifier",
    reason="this torch has no data sparsifier any more: NOTHING is compared with the ancestor; use torch 2.13 for that",
    exc_type=ImportError,
)


class _FirstRow:
    """Removes the first row at the first step, the second at the next, and so on: every step shows."""

    def update_mask(self, name: str, data: Tensor, rows: int = 1, **config: Any) -> None:
        calls = self.state[name].setdefault("calls", 0)  # type: ignore[attr-defined]
        self.state[name]["calls"] = calls + 1  # type: ignore[attr-defined]
        mask = self.get_mask(name)  # type: ignore[attr-defined]
        mask[calls * rows : (calls + 1) * rows] = 0


class Ours(_FirstRow, BaseDataSparsifier):
    pass


class Ancestor(_FirstRow, ancestors.BaseDataSparsifier):
    pass


class Doubled(nn.Module):
    """A parametrization other than the default."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.mask

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


@pytest.fixture(params=["ours", "ancestor"])
def library(request: pytest.FixtureRequest) -> type:
    return {"ours": Ours, "ancestor": Ancestor}[request.param]


def data_of_each_kind() -> list[tuple[str, Any]]:
    return [
        ("tensor", torch.randn(6, 4)),
        ("param", nn.Parameter(torch.randn(5, 3))),
        ("emb", nn.Embedding(8, 4)),
        ("bag", nn.EmbeddingBag(7, 2)),
    ]


def weight_of(data: Any) -> Tensor:
    return data.weight if isinstance(data, nn.Module) else data


def saved_and_loaded(state: Any, **kwargs: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **kwargs)


class TestConstruction:
    def test_needs_update_mask(self, library: type) -> None:
        with pytest.raises(TypeError):
            library.__mro__[2]()

    def test_defaults_and_attributes(self, library: type) -> None:
        sparsifier = library(level=0.5, shape=(1, 4))
        assert sparsifier.defaults == {"level": 0.5, "shape": (1, 4)}
        assert dict(sparsifier.data_groups) == {} and dict(sparsifier.state) == {}
        assert sparsifier.enable_mask_update is True

    def test_data_list_takes_defaults(self, library: type) -> None:
        data = data_of_each_kind()
        sparsifier = library(data, level=0.5)
        assert list(sparsifier.data_groups) == list(sparsifier.state) == [name for name, _ in data]
        for name, item in data:
            assert sparsifier.data_groups[name] == {"level": 0.5}
            assert set(sparsifier.state[name]) == {"mask"}
            assert sparsifier.get_data(name) is weight_of(item)

    def test_prepare_is_refused(self, library: type) -> None:
        with pytest.raises(NotImplementedError):
            library().prepare(nn.Linear(2, 2), None)

    def test_repr(self, library: type) -> None:
        text = repr(library([("w", torch.ones(2, 2))], b=1, a=2))
        assert text.startswith(library.__name__)
        assert text.index("w") < text.index("a: 2") < text.index("b: 1")


class TestAddData:
    @pytest.mark.parametrize("kind", range(4))
    def test_config_is_defaults_overlaid(self, library: type, kind: int) -> None:
        name, data = data_of_each_kind()[kind]
        sparsifier = library(level=0.5, other=1)
        sparsifier.add_data(name, data, level=0.7, extra="x")
        assert sparsifier.data_groups[name] == {"level": 0.7, "other": 1, "extra": "x"}
        assert sparsifier.defaults == {"level": 0.5, "other": 1}

    def test_exact_types_only(self, library: type) -> None:
        class MyParameter(nn.Parameter):
            pass

        class MyEmbedding(nn.Embedding):
            pass

        sparsifier = library()
        for data in (MyParameter(torch.ones(2)), MyEmbedding(2, 2), nn.Linear(2, 2), [1.0], None):
            with pytest.raises(AssertionError):
                sparsifier.add_data("w", data)
        assert dict(sparsifier.data_groups) == {} and dict(sparsifier.state) == {}

    @pytest.mark.parametrize(
        "dtype", [torch.int64, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float64]
    )
    def test_any_dtype(self, library: type, dtype: torch.dtype) -> None:
        sparsifier = library()
        data = torch.ones(3, 2).to(dtype)
        sparsifier.add_data("w", data)
        assert sparsifier.get_mask("w").dtype == dtype
        assert sparsifier.get_data("w") is data

    @pytest.mark.parametrize("name", ["", "a.b", "a.", 3, None, "training", "forward"])
    def test_bad_names_register_nothing(self, library: type, name: Any) -> None:
        sparsifier = library()
        with pytest.raises((KeyError, TypeError, ValueError)):
            sparsifier.add_data(name, torch.ones(2, 2))
        assert dict(sparsifier.data_groups) == {} and dict(sparsifier.state) == {}
        sparsifier.add_data("good", torch.ones(2, 2))
        sparsifier.step()

    def test_outside_edits_are_seen(self, library: type) -> None:
        parameter = nn.Parameter(torch.ones(3, 2))
        sparsifier = library([("p", parameter)])
        sparsifier.get_mask("p")[0] = 0
        with torch.no_grad():
            parameter.add_(1)
        assert torch.equal(
            sparsifier.get_data("p", return_original=False).detach(), torch.tensor([[0.0, 0], [2, 2], [2, 2]])
        )
        parameter.data = torch.full((3, 2), 5.0)
        assert sparsifier.get_data("p") is parameter
        assert sparsifier.get_data("p", return_original=False)[1, 0] == 5
        parameter.grad = torch.ones(3, 2)
        torch.optim.SGD([parameter], lr=1.0).step()
        assert sparsifier.get_data("p")[1, 0] == 4

    def test_given_mask(self, library: type) -> None:
        mask = torch.tensor([[1, 0], [0, 1]], dtype=torch.int8)
        sparsifier = library()
        masked = sparsifier.add_data("w", torch.full((2, 2), 3.0), mask=mask)
        assert sparsifier.get_mask("w") is mask
        assert torch.equal(masked, torch.tensor([[3.0, 0], [0, 3]]))

    def test_given_parametrization(self, library: type) -> None:
        sparsifier = library()
        masked = sparsifier.add_data("w", torch.ones(2, 2), parametrization=Doubled)
        assert torch.equal(masked, torch.full((2, 2), 2.0))
        assert torch.equal(sparsifier.get_data("w"), torch.ones(2, 2))

    def test_returns_masked_data_with_masked_gradient(self, library: type) -> None:
        sparsifier = library()
        plain = sparsifier.add_data("w", torch.ones(2, 2))
        assert not plain.requires_grad
        parameter = nn.Parameter(torch.ones(2, 2))
        masked = sparsifier.add_data("p", parameter, mask=torch.tensor([[1.0, 0], [1, 1]]))
        assert masked.grad_fn is not None
        masked.sum().backward()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.tensor([[1.0, 0], [1, 1]]))


class TestReplace:
    def test_warns_and_keeps_config_and_mask(self, library: type) -> None:
        sparsifier = library(level=0.5, other=1)
        old = torch.ones(3, 2)
        sparsifier.add_data("w", old, level=0.7)
        sparsifier.step()
        mask = sparsifier.get_mask("w").clone()
        new = torch.full((3, 2), 2.0)
        with pytest.warns(UserWarning):
            sparsifier.add_data("w", new, extra=1)
        assert sparsifier.data_groups["w"] == {"level": 0.7, "other": 1, "extra": 1}
        assert torch.equal(sparsifier.get_mask("w"), mask) and mask[0].sum() == 0
        assert sparsifier.get_data("w") is new
        assert torch.equal(old, torch.ones(3, 2))

    def test_changed_defaults_are_not_applied_again(self, library: type) -> None:
        sparsifier = library([("w", torch.ones(2, 2))], level=0.5)
        sparsifier.defaults["level"] = 0.9
        with pytest.warns(UserWarning):
            sparsifier.add_data("w", torch.ones(2, 2))
        assert sparsifier.data_groups["w"] == {"level": 0.5}

    def test_fresh_mask(self, library: type) -> None:
        sparsifier = library([("w", torch.ones(3, 2))])
        sparsifier.step()
        with pytest.warns(UserWarning):
            sparsifier.add_data("w", torch.ones(5, 4), reuse_mask=False)
        assert torch.equal(sparsifier.get_mask("w"), torch.ones(5, 4))

    def test_other_shape_is_refused_and_changes_nothing(self, library: type) -> None:
        old = torch.ones(3, 2)
        sparsifier = library([("w", old)], level=0.5)
        sparsifier.step()
        mask = sparsifier.get_mask("w")
        with pytest.raises(AssertionError), pytest.warns(UserWarning):
            sparsifier.add_data("w", torch.ones(2, 2), level=0.9)
        assert sparsifier.get_data("w") is old and sparsifier.get_mask("w") is mask
        assert sparsifier.data_groups["w"] == {"level": 0.5}

    def test_other_names_are_left_alone(self, library: type) -> None:
        kept = torch.ones(2, 2)
        sparsifier = library([("kept", kept), ("w", torch.ones(2, 2))])
        with pytest.warns(UserWarning):
            sparsifier.add_data("w", torch.zeros(2, 2))
        assert sparsifier.get_data("kept") is kept


class TestReading:
    def test_unknown_names(self, library: type) -> None:
        sparsifier = library([("w", torch.ones(2, 2))])
        for read in (sparsifier.get_data, sparsifier.get_mask):
            with pytest.raises(ValueError):
                read("nobody")
        with pytest.raises(ValueError):
            sparsifier.squash_mask(names=["nobody"])

    def test_mask_edits_show_at_once(self, library: type) -> None:
        sparsifier = library([("w", torch.ones(3, 2))])
        mask = sparsifier.get_mask("w")
        mask[0] = 0
        mask *= torch.tensor([1.0, 0.0])
        assert torch.equal(sparsifier.get_data("w", return_original=False), torch.tensor([[0.0, 0], [1, 0], [1, 0]]))
        mask.data = torch.eye(3, 2, dtype=torch.int8)
        assert sparsifier.get_mask("w") is mask and mask.dtype == torch.int8
        assert torch.equal(sparsifier.get_data("w", return_original=False), torch.eye(3, 2))
        mask = mask * 0  # another object: nobody sees it
        assert torch.equal(sparsifier.get_data("w", return_original=False), torch.eye(3, 2))


class TestStep:
    def test_order_arguments_and_no_grad(self, library: type) -> None:
        seen = []

        class Spy(library):  # type: ignore[misc]
            def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
                seen.append((name, data, config, torch.is_grad_enabled()))

        data = data_of_each_kind()
        sparsifier = Spy(data, level=0.5)
        sparsifier.data_groups["param"]["level"] = 0.9
        assert sparsifier.step() is None
        assert [name for name, *_ in seen] == [name for name, _ in data]
        for (name, item), (_, given_data, config, grad) in zip(data, seen, strict=True):
            assert given_data is weight_of(item)
            assert config == {"level": 0.9 if name == "param" else 0.5}
            assert not grad
        assert torch.is_grad_enabled()

    def test_disabled(self, library: type) -> None:
        sparsifier = library([("w", torch.ones(2, 2))])
        sparsifier.enable_mask_update = False
        assert sparsifier.step() is None
        assert torch.equal(sparsifier.get_mask("w"), torch.ones(2, 2))


class TestSquash:
    @pytest.mark.parametrize("kind", range(4))
    def test_writes_into_the_users_tensor(self, library: type, kind: int) -> None:
        name, data = data_of_each_kind()[kind]
        weight = weight_of(data)
        before = weight.detach().clone()
        sparsifier = library([(name, data)])
        sparsifier.step()
        sparsifier.squash_mask()
        assert weight_of(data) is weight
        before[0] = 0
        assert torch.equal(weight.detach(), before)
        assert torch.equal(sparsifier.get_data(name, return_original=False).detach(), before)
        with pytest.raises(ValueError):
            sparsifier.get_data(name)
        assert sparsifier.get_mask(name)[0].sum() == 0 and name in sparsifier.data_groups

    def test_leave_dense(self, library: type) -> None:
        data = torch.ones(3, 2)
        sparsifier = library([("w", data)])
        sparsifier.step()
        sparsifier.squash_mask(leave_parametrized=False)
        assert torch.equal(data, torch.ones(3, 2))
        assert torch.equal(sparsifier.get_data("w", return_original=False), torch.ones(3, 2))

    def test_listed_names(self, library: type) -> None:
        a, b = torch.ones(2, 2), torch.ones(2, 2)
        sparsifier = library([("a", a), ("b", b)])
        sparsifier.step()
        sparsifier.squash_mask("ignored", names=["b"], also_ignored=1)
        assert torch.equal(a, torch.ones(2, 2)) and b[0].sum() == 0
        assert sparsifier.get_data("a") is a


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
                assert torch.equal(loaded, source.get_data(name)) and loaded is not source.get_data(name)
                assert type(loaded) is Tensor and not loaded.requires_grad
        with pytest.raises(ValueError):
            target.get_data("bag")

    @pytest.mark.parametrize("source, target", [(Ancestor, Ours), (Ours, Ancestor)], ids=["to ours", "from ours"])
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
        "copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
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
                twin.get_data(name, return_original=False), sparsifier.get_data(name, return_original=False)
            )
        twin.get_mask("tensor").zero_()
        assert sparsifier.get_mask("tensor").sum() > 0


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
        assert target.get_mask("theirs").sum() == 4 and target.data_groups["theirs"] == {"level": 0.9}

    @pytest.mark.parametrize("missing", ["data_groups", "_container"])
    @pytest.mark.parametrize("strict", [True, False])
    def test_bug_5_refused_load_changes_nothing(self, missing: str, strict: bool) -> None:
        state = Ours([("a", torch.ones(3, 2)), ("b", torch.ones(3, 2))]).state_dict()
        state[missing] = {key: value for key, value in state[missing].items() if "b" not in key.split(".")}
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
            target = copy.deepcopy(source) if how == "deepcopy" else pickle.loads(pickle.dumps(source))
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
        "copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
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
            "import dist_sparse.sparsifiers.base, dist_sparse.schedulers.ready;"
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
    """The same calls on both leave the same state, outside of its bugs (nothing squashed is touched again)."""
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
    ours, theirs = both
    assert list(ours.data_groups) == list(theirs.data_groups)
    assert dict(ours.data_groups) == dict(theirs.data_groups)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert set(mine["_container"]) == set(other["_container"])
    for name in ours.data_groups:
        assert torch.equal(ours.get_mask(name), theirs.get_mask(name))
        assert ours.get_mask(name).dtype == theirs.get_mask(name).dtype
        assert torch.equal(ours.get_data(name, return_original=False), theirs.get_data(name, return_original=False))
        assert set(mine["state"][name]) == set(other["state"][name])
        assert torch.equal(mine["state"][name]["mask"].to_dense(), other["state"][name]["mask"].to_dense())
