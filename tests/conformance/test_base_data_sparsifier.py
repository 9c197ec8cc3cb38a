"""`BaseDataSparsifier` equals its ancestor, its bugs aside.

What both must do runs against both (``library`` is "ours" or "ancestor"), so that the tests are
known to describe the ancestor. States are in test_base_data_sparsifier_state.py, the ancestor's
bugs in test_base_data_sparsifier_bugs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.pair import Ancestor, Doubled, Ours, data_of_each_kind, weight_of


@pytest.fixture(params=["ours", "ancestor"])
def library(request: pytest.FixtureRequest) -> type:
    return {"ours": Ours, "ancestor": Ancestor}[request.param]


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


def test_repr_of_many_groups() -> None:
    many = [(f"table_{i}", torch.ones(2, 2)) for i in range(12)]
    ours, ancestors = repr(Ours(many, a=1)).splitlines(), repr(Ancestor(many, a=1)).splitlines()
    assert ours[1:] == [line for line in ancestors[1:] if line]


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

    @pytest.mark.parametrize("name", ["", "a.b", "a.", 3, None, "training", "forward", "items"])
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
            sparsifier.get_data("p", return_original=False).detach(),
            torch.tensor([[0.0, 0], [2, 2], [2, 2]]),
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
        assert torch.equal(
            sparsifier.get_data("w", return_original=False),
            torch.tensor([[0.0, 0], [1, 0], [1, 0]]),
        )
        mask.data = torch.eye(3, 2, dtype=torch.int8)
        assert sparsifier.get_mask("w") is mask and mask.dtype == torch.int8
        assert torch.equal(sparsifier.get_data("w", return_original=False), torch.eye(3, 2))
        mask = mask * 0  # another object: the change is lost
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
