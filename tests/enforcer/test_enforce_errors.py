"""What an enforcer refuses, with which message, and that nothing has changed then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from dist_sparse import DataNormSparsifier, MaskEnforcer

IDS = torch.arange(12).view(4, 3) % 10


class Net(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.EmbeddingBag(10, 4, sparse=sparse)
        self.second = nn.Embedding(10, 4, sparse=sparse)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.first(ids) + self.second(ids).sum(1))


def sparse_net(**kwargs: Any) -> tuple[Net, DataNormSparsifier]:
    """A model of which half is removed."""
    model = Net(**kwargs)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model)
    sparsifier.step()
    return model, sparsifier


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.5)


def train(model: nn.Module, *optimizers: Any) -> None:
    """One step."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(IDS).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def hooks(*things: Any) -> dict[str, list[Any]]:
    """The hooks on modules and optimizers."""
    found = {}
    for i, thing in enumerate(things):
        parts = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
        for path, part in parts:
            for name, value in vars(part).items():
                if "hook" in name and hasattr(value, "values"):
                    found[f"{i} {path} {name}"] = list(value.values())
    return found


class TestRefused:
    def test_twice(self) -> None:
        model, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier).attach(sgd(model))
        before = hooks(model)
        with pytest.raises(ValueError, match="An enforcer is attached"):
            enforcer.attach(sgd(model))
        assert enforcer.attached and hooks(model) == before

    def test_a_second_enforcer_of_one_sparsifier(self) -> None:
        model, sparsifier = sparse_net()
        first, second = MaskEnforcer(sparsifier), MaskEnforcer(sparsifier)
        first.attach(sgd(model))
        with pytest.raises(ValueError, match="An enforcer is attached"):
            second.attach(sgd(model))
        assert first.attached and not second.attached
        second.detach()
        assert first.attached, "detach() of one that is not attached is harmless"
        first.detach()
        assert second.attach(sgd(model)).attached

    def test_nothing_registered(self) -> None:
        with pytest.raises(
            ValueError, match=r"Nothing is registered yet: call add_model\(\) or add_data\(\)"
        ):
            MaskEnforcer(DataNormSparsifier()).attach()

    @pytest.mark.parametrize(
        "sparsifier", [None, "sparsifier", nn.Linear(2, 2), DataNormSparsifier]
    )
    def test_what_is_no_sparsifier(self, sparsifier: Any) -> None:
        with pytest.raises(
            ValueError, match=f"Invalid sparsifier of type {type(sparsifier).__name__}"
        ):
            MaskEnforcer(sparsifier)

    @pytest.mark.parametrize("state", ["drop", "", None, True])
    def test_what_is_no_optimizer_state(self, state: Any) -> None:
        with pytest.raises(
            ValueError, match=r"Invalid optimizer_state=.*must be one of 'keep', 'reset'"
        ):
            MaskEnforcer(DataNormSparsifier(), state)

    @pytest.mark.parametrize("optimizer", [None, "SGD", torch.optim.SGD, nn.Linear(2, 2)], ids=repr)
    def test_what_is_no_optimizer(self, optimizer: Any) -> None:
        model, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier)
        right = sgd(model)
        before = hooks(model, right)
        with pytest.raises(
            ValueError, match=f"Invalid optimizer of type {type(optimizer).__name__}"
        ):
            enforcer.attach(right, optimizer)
        assert not enforcer.attached and hooks(model, right) == before
        enforcer.attach(right)

    def test_weights_that_nothing_steps(self) -> None:
        model, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier)
        for optimizers, name in [
            ([], "first"),
            ([sgd(model.first)], "second"),
            ([sgd(model.second)], "first"),
        ]:
            with pytest.raises(
                ValueError, match=rf"None of the given optimizers steps '{name}'.*by exclude="
            ):
                enforcer.attach(*optimizers)
            assert not enforcer.attached
        assert not any(hooks(model).values())
        enforcer.attach(sgd(model.second), sgd(model.first))

    def test_weights_that_an_optimizer_in_the_backward_steps(self) -> None:
        model, sparsifier = sparse_net()
        inside: Any = model.first.weight
        apply_optimizer_in_backward(torch.optim.SGD, [inside], {"lr": 0.1})
        enforcer = MaskEnforcer(sparsifier)
        with pytest.raises(
            ValueError, match=r"'first'.*pass those of weight\._in_backward_optimizers"
        ):
            enforcer.attach(sgd(model.second))
        enforcer.attach(sgd(model.second), *inside._in_backward_optimizers)

    def test_frozen_weights_need_no_optimizer(self) -> None:
        model, sparsifier = sparse_net()
        model.first.weight.requires_grad_(False)
        with MaskEnforcer(sparsifier).attach(sgd(model.second)) as enforcer:
            assert enforcer.attached

    def test_plain_data_that_nothing_steps(self) -> None:
        table, frozen, buffer = (
            nn.Embedding(8, 4),
            nn.Parameter(torch.randn(8, 4), False),
            torch.randn(8, 4),
        )
        sparsifier = DataNormSparsifier([("table", table), ("frozen", frozen), ("buffer", buffer)])
        sparsifier.step()
        with pytest.raises(ValueError, match="None of the given optimizers steps 'table'"):
            MaskEnforcer(sparsifier).attach()
        MaskEnforcer(sparsifier).attach(sgd(table))


class TestCompiled:
    """Nothing is compiled here: torch.compile only wraps until the first call."""

    @pytest.mark.parametrize(
        ("compiles", "where"),
        [
            (lambda model: torch.compile(model), ""),
            (lambda model: model.compile(), ""),
            (lambda model: model.second.compile(), "second"),
            (lambda model: setattr(model, "second", torch.compile(model.second)), "second"),
        ],
        ids=["torch.compile", "model.compile", "part.compile", "torch.compile of a part"],
    )
    def test_is_refused(self, compiles: Callable[[nn.Module], Any], where: str) -> None:
        model = Net()
        made = compiles(model)
        compiled = model if made is None else made
        sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4))
        sparsifier.add_model(compiled)
        sparsifier.step()
        optimizer = sgd(model)
        before = hooks(model, optimizer)
        with pytest.raises(
            ValueError, match="The model is compiled" + (f" at '{where}'" if where else ":")
        ):
            MaskEnforcer(sparsifier).attach(optimizer)
        assert hooks(model, optimizer) == before


class TestRegistrationWhileAttached:
    def test_is_refused_and_changes_nothing(self) -> None:
        model, sparsifier = sparse_net()
        sparsifier.add_data("plain", torch.randn(4, 4))
        sparsifier.step()
        enforcer = MaskEnforcer(sparsifier).attach(sgd(model))
        before = copy.deepcopy(
            (sparsifier.data_groups, list(sparsifier.state), sparsifier.get_mask("plain"))
        )
        for register in (
            lambda: sparsifier.add_model(nn.Embedding(4, 4)),
            lambda: sparsifier.add_data("more", torch.randn(4, 4)),
            lambda: sparsifier.add_data("plain", torch.randn(4, 4)),
            lambda: sparsifier.add_data("table", nn.Embedding(4, 4)),
        ):
            with pytest.raises(
                ValueError, match=r"An enforcer is attached: detach\(\) it, register"
            ):
                register()
            after = sparsifier.data_groups, list(sparsifier.state), sparsifier.get_mask("plain")
            assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        enforcer.detach()
        sparsifier.add_data("more", torch.randn(4, 4))
        table = nn.Embedding(4, 4)
        assert sparsifier.add_model(table) == ["weight"]
        enforcer.attach(sgd(model), sgd(table))


class TestUnattached:
    def test_settle_and_renew_are_refused(self) -> None:
        model, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier)
        for call in (enforcer.settle, enforcer.renew):
            with pytest.raises(RuntimeError, match=r"not attached: call attach\(optimizer\)"):
                call()
        enforcer.attach(sgd(model)).detach()
        with pytest.raises(RuntimeError, match="not attached"):
            enforcer.settle()

    def test_detach_is_harmless(self) -> None:
        _, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier)
        enforcer.detach()
        with pytest.raises(RuntimeError, match="not attached"), enforcer:
            raise AssertionError("the block must not run")
        enforcer.detach()
        assert enforcer.seconds == 0.0


class TestAnotherOptimizerThanAttached:
    """Its steps count as those of the one attached."""

    @pytest.mark.parametrize("sparse", [False, True])
    def test_of_a_model(self, sparse: bool) -> None:
        model, sparsifier = sparse_net(sparse=sparse)
        MaskEnforcer(sparsifier).attach(sgd(model))
        train(model, sgd(model))
        assert bool((model.first.weight[sparsifier.get_mask("first") == 0] == 0).all())

    def test_of_plain_data(self) -> None:
        """No forward is known of a tensor by itself."""
        table = nn.Embedding(10, 4)
        sparsifier = DataNormSparsifier(
            [("table", table)], sparsity_level=0.5, sparse_block_shape=(1, 4)
        )
        sparsifier.step()
        MaskEnforcer(sparsifier).attach(sgd(table))
        train(table, sgd(table))
        assert bool((table.weight[sparsifier.get_mask("table") == 0] == 0).all())

    def test_gradient_accumulation_and_evaluation(self) -> None:
        model, sparsifier = sparse_net(sparse=True)
        optimizer = sgd(model)
        MaskEnforcer(sparsifier).attach(optimizer)
        for _ in range(4):
            model(IDS).sum().backward()
            with torch.no_grad():
                model(IDS)
        before = model.first.weight.detach().clone()
        optimizer.step()
        model(IDS)
        removed = sparsifier.get_mask("first") == 0
        assert bool((model.first.weight[removed] == 0).all())
        # Nothing else is held back: four gradients of the rows that were read arrive.
        summed = model.first.weight.grad
        assert summed is not None
        want = before - 0.5 * summed.to_dense()
        assert torch.allclose(model.first.weight[~removed], want[~removed])

    def test_a_step_that_evaluates_the_model_again(self) -> None:
        """LBFGS writes weights and runs the model inside its first step."""
        model, sparsifier = sparse_net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
        MaskEnforcer(sparsifier).attach(optimizer)
        removed = sparsifier.get_mask("first") == 0
        read: list[bool] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(IDS) - 1).square().sum()
            loss.backward()
            read.append(bool((model.first.weight[removed] == 0).all()))
            return loss

        optimizer.step(closure)
        model(IDS)
        assert len(read) > 1 and all(read)
        assert bool((model.first.weight[removed] == 0).all())

    def test_writes_by_hand(self) -> None:
        model, sparsifier = sparse_net()
        enforcer = MaskEnforcer(sparsifier).attach(sgd(model))
        with torch.no_grad():
            model.first.weight.fill_(1)
        enforcer.settle()
        model(IDS)
        assert bool(((model.first.weight == 0) == (sparsifier.get_mask("first") == 0)).all())

    @pytest.mark.filterwarnings("ignore:The model was loaded")
    def test_loading_a_part(self) -> None:
        model, sparsifier = sparse_net()
        MaskEnforcer(sparsifier).attach(sgd(model))
        model.first.load_state_dict(Net().first.state_dict())
        model(IDS)
        assert bool((model.first.weight[sparsifier.get_mask("first") == 0] == 0).all())


class WithoutBase(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by type alone, around another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class TestErrorsInAttach:
    """No hook is left, and the same enforcer can be attached afterwards."""

    def test_optimizers_that_take_no_hooks(self) -> None:
        model, sparsifier = sparse_net()
        first, rest = sgd(model.first), sgd(model.second, model.over)
        before = hooks(model, first, rest)
        enforcer = MaskEnforcer(sparsifier)
        try:
            enforcer.attach(first, WithoutBase(rest))
        except ValueError as error:
            assert "WithoutBase" in str(error)
            assert hooks(model, first, rest) == before
            enforcer.attach(first, rest)
        else:
            train(model, first, rest)
            assert bool((model.second.weight[sparsifier.get_mask("second") == 0] == 0).all())

    @pytest.mark.parametrize("stage", ["clean_all", "reset", "hook"])
    def test_in_the_middle(self, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Out of memory, say."""
        model, sparsifier = sparse_net()
        optimizer = sgd(model)
        before = hooks(model, optimizer)
        enforcer = MaskEnforcer(sparsifier, "reset")
        places: dict[str, Any] = {
            "clean_all": "dist_sparse.enforcer.dense.DenseWeights.clean_all",
            "reset": "dist_sparse.enforcer.dense.WeightState.reset_removed",
            "hook": "dist_sparse.enforcer.dense.DenseWeights.hook",
        }

        def fails(*args: Any, **kwargs: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(places[stage], fails)
            with pytest.raises(MemoryError):
                enforcer.attach(optimizer)
        assert not enforcer.attached
        assert hooks(model, optimizer) == before
        enforcer.attach(optimizer)
        train(model, optimizer)
        assert bool((model.first.weight[sparsifier.get_mask("first") == 0] == 0).all())

    def test_a_weight_that_is_a_part_of_a_parameter(self) -> None:
        """Its optimizer state is a part of the parameter's."""
        whole = nn.Parameter(torch.randn(20, 4))
        sparsifier = DataNormSparsifier([("last", whole.data[10:])], sparse_block_shape=(1, 4))
        sparsifier.step()
        optimizer = torch.optim.Adam([whole])
        whole.sum().backward()
        optimizer.step()
        with MaskEnforcer(sparsifier, "reset").attach(optimizer):
            gone = sparsifier.get_mask("last") == 0
            moment = optimizer.state[whole]["exp_avg"]
            assert bool((moment[10:] == 0).eq(gone).all()) and bool((moment[:10] != 0).all())
        assert not any(hooks(optimizer).values())
