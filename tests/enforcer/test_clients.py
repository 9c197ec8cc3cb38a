"""What training code of other people does with a model while an enforcer is attached."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dist_sparse import DataNormSparsifier, MaskEnforcer
from tests.enforcer.test_enforce_errors import IDS, Net, hooks, sgd, sparse_net, train

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.5),
    "fused adam": lambda params: torch.optim.Adam(
        params, lr=0.5, fused=True
    ),  # its writes are not counted by torch
}


def revived(model: nn.Module, sparsifier: DataNormSparsifier) -> int:
    """Removed weights that are not 0."""
    weights = {"first": model.first.weight, "second": model.second.weight}
    return sum(int((w[sparsifier.get_mask(name) == 0] != 0).sum()) for name, w in weights.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
class TestAnOptimizerMadeAfterAttach:
    def test_its_steps_are_followed(self, optimizer: str) -> None:
        model, sparsifier = sparse_net()
        first = sgd(model)
        with MaskEnforcer(sparsifier).attach(first):
            train(model, first)
            second = OPTIMIZERS[optimizer](model.parameters())
            for _ in range(2):
                train(model, second)
                assert revived(model, sparsifier) == 0

    def test_also_before_the_known_one_has_stepped(self, optimizer: str) -> None:
        model, sparsifier = sparse_net()
        with MaskEnforcer(sparsifier).attach(sgd(model)):
            train(model, OPTIMIZERS[optimizer](model.parameters()))
            assert revived(model, sparsifier) == 0
            model(IDS)

    def test_a_parameter_added_to_it_later(self, optimizer: str) -> None:
        model, sparsifier = sparse_net()
        model.second.weight.requires_grad_(False)
        known = OPTIMIZERS[optimizer]([*model.first.parameters(), *model.over.parameters()])
        with MaskEnforcer(sparsifier).attach(known):
            train(model, known)
            model.second.weight.requires_grad_(True)
            known.add_param_group({"params": [model.second.weight]})
            train(model, known)
            assert revived(model, sparsifier) == 0

    def test_a_step_of_the_sparsifier_inside_its_post_hook(self, optimizer: str) -> None:
        """Masks are chosen from masked weights, also where the caller's hook runs before the
        enforcer's."""
        model, sparsifier = sparse_net()
        with MaskEnforcer(sparsifier).attach(sgd(model)):
            made = OPTIMIZERS[optimizer](model.parameters())
            made.register_step_post_hook(lambda *_: sparsifier.step())
            gone = sparsifier.get_mask("first") == 0
            train(model, made)
            assert torch.equal(sparsifier.get_mask("first") == 0, gone), (
                "magnitude masks do not bring blocks back"
            )
            assert revived(model, sparsifier) == 0

    def test_its_state_is_reset(self, optimizer: str) -> None:
        model, sparsifier = sparse_net()
        with MaskEnforcer(sparsifier, "reset").attach(sgd(model)):
            made = OPTIMIZERS[optimizer](model.parameters())
            train(model, made)
            sparsifier.step()
            state = made.state.get(model.first.weight, {})
            gone = sparsifier.get_mask("first") == 0
            assert all(
                bool((s[gone] == 0).all())
                for s in state.values()
                if isinstance(s, Tensor) and s.dim() == 2
            )

    def test_is_not_kept_alive(self, optimizer: str) -> None:
        model, sparsifier = sparse_net()
        with MaskEnforcer(sparsifier).attach(sgd(model)):
            made = OPTIMIZERS[optimizer](model.parameters())
            train(model, made)
            gone = weakref.ref(made)
            del made
            gc.collect()
            assert gone() is None


def test_optimizers_of_other_models_cost_no_hook() -> None:
    model, sparsifier = sparse_net()
    other = Net()
    with MaskEnforcer(sparsifier).attach(sgd(model)):
        stranger = sgd(other)
        train(other, stranger)
        assert not any(hooks(stranger).values())


def test_a_model_that_is_dropped_is_freed() -> None:
    """Nothing that belongs to the whole process keeps it alive."""
    model, sparsifier = sparse_net()
    optimizer = sgd(model)
    MaskEnforcer(sparsifier).attach(optimizer)
    train(model, optimizer)
    gone = weakref.ref(model)
    del model, sparsifier, optimizer
    gc.collect()
    assert gone() is None


def test_plain_data_outlives_its_sparsifier() -> None:
    table = nn.Embedding(10, 4)
    optimizer = sgd(table)

    def attach() -> Tensor:
        sparsifier = DataNormSparsifier(
            [("table", table)], sparsity_level=0.5, sparse_block_shape=(1, 4)
        )
        sparsifier.step()
        MaskEnforcer(sparsifier).attach(optimizer)
        return sparsifier.get_mask("table")

    mask = attach()
    gc.collect()
    train(table, optimizer)
    assert bool((table.weight[mask == 0] == 0).all())


def test_forwards_before_the_first_step_read_no_whole_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluation before training costs what it costs later."""
    model, sparsifier = sparse_net()
    seen: list[str] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def operations() -> list[str]:
        seen.clear()
        with Counted(), torch.no_grad():
            model(IDS)
        return list(seen)

    plain = operations()
    with MaskEnforcer(sparsifier).attach(sgd(model)):
        assert operations() == plain


class TestCompiledParts:
    """Nothing is compiled here: torch.compile only wraps until the first call."""

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize(
        "compiles",
        [lambda m: m.over.compile(), lambda m: setattr(m, "over", torch.compile(m.over))],
    )
    def test_what_holds_nothing_registered_may_be_compiled(
        self, compiles: Callable[[nn.Module], Any], when: str
    ) -> None:
        model, sparsifier = sparse_net()
        if when == "before":
            compiles(model)
        MaskEnforcer(sparsifier).attach(sgd(model))
        if when == "after":
            compiles(model)
        state = sparsifier.state_dict()
        sparsifier.load_state_dict(state)

    def test_a_compiled_part_with_registered_weights_is_refused(self) -> None:
        model = Net()
        model.over.compile()
        sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4))
        sparsifier.add_model(model, dense=["over.weight"])
        with pytest.raises(ValueError, match="compiled at 'over'"):
            MaskEnforcer(sparsifier).attach(sgd(model))


class TestStateDict:
    @pytest.mark.parametrize("part", ["model", "table"])
    def test_of_a_plain_model_is_masked(self, part: str) -> None:
        model, sparsifier = sparse_net()
        MaskEnforcer(sparsifier).attach(sgd(model))
        with torch.no_grad():
            model.first.weight.fill_(1)
        (model if part == "model" else model.first).state_dict()
        assert revived(model, sparsifier) == 0

    def test_of_ddp_is_masked(self) -> None:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            model = DistributedDataParallel(Net())
            sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
            sparsifier.add_model(model)
            sparsifier.step()
            MaskEnforcer(sparsifier).attach(sgd(model))
            with torch.no_grad():
                model.module.first.weight.fill_(1)
            state = model.state_dict()
            assert bool(
                (state["module.first.weight"][sparsifier.get_mask("first") == 0] == 0).all()
            )
        finally:
            torch.distributed.destroy_process_group()


class TestLoadedWeights:
    """Early stopping: the best weights come back into a model that is sparser by now."""

    def start(self) -> tuple[Net, DataNormSparsifier, MaskEnforcer, dict[str, Any], dict[str, Any]]:
        model, sparsifier = sparse_net()
        optimizer = sgd(model)
        enforcer = MaskEnforcer(sparsifier).attach(optimizer)
        train(model, optimizer)
        best = (
            {key: value.clone() for key, value in model.state_dict().items()},
            sparsifier.state_dict(),
        )
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] = 0.8
        sparsifier.step()
        train(model, optimizer)
        return model, sparsifier, enforcer, *best

    @pytest.mark.parametrize("reader", ["model", "table", "settle", "step"])
    @pytest.mark.parametrize("part", ["model", "table"])
    def test_without_their_masks_there_is_a_warning(self, reader: str, part: str) -> None:
        model, sparsifier, enforcer, weights, _ = self.start()
        if part == "model":
            model.load_state_dict(weights)
        else:
            model.first.load_state_dict({"weight": weights["first.weight"]})
        read = {
            "model": lambda: model(IDS),
            "table": lambda: model.first(IDS),
            "settle": enforcer.settle,
        }
        with pytest.warns(
            UserWarning,
            match=r"masks zeroed .* of the loaded weights, in 'first'.*state of its sparsifier",
        ):
            read.get(reader, sparsifier.step)()
        assert revived(model, sparsifier) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(IDS)

    @pytest.mark.parametrize("order", ["weights first", "masks first"])
    def test_with_their_masks_they_come_back_whole(self, order: str) -> None:
        model, sparsifier, _, weights, masks = self.start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if order == "weights first":
                model.load_state_dict(weights)
                sparsifier.load_state_dict(masks)
            else:
                sparsifier.load_state_dict(masks)
                model.load_state_dict(weights)
            model(IDS)
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())

    def test_weights_of_the_same_masks_bring_nothing(self) -> None:
        model, _, _, _, _ = self.start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
            model(IDS)


class TestASecondEnforcer:
    @pytest.mark.parametrize("second", ["model", "table", "data"])
    def test_of_the_same_weights_is_refused(self, second: str) -> None:
        model, sparsifier = sparse_net()
        optimizer = sgd(model)
        first = MaskEnforcer(sparsifier).attach(optimizer)
        before = hooks(model, optimizer)
        other = DataNormSparsifier(sparsity_level=0.2, sparse_block_shape=(1, 4))
        if second == "data":
            other.add_data("first", model.first.weight.data[:5])
        else:
            other.add_model(model if second == "model" else model.first)
        with pytest.raises(ValueError, match=r"already sparsified: call detach\(\)"):
            MaskEnforcer(other).attach(optimizer)
        assert hooks(model, optimizer) == before
        first.detach()
        MaskEnforcer(other).attach(optimizer)

    def test_of_other_tables_is_not(self) -> None:
        model = Net()
        optimizer = sgd(model)
        for name in ("first", "second"):
            sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
            sparsifier.add_model(model, include=name)
            sparsifier.step()
            MaskEnforcer(sparsifier).attach(optimizer)
        train(model, optimizer)
        assert int((model.first.weight == 0).sum()) == int((model.second.weight == 0).sum()) == 20


def test_enforcers_may_be_freed_in_the_middle_of_a_step() -> None:
    """By the garbage collector, while torch iterates over the hooks of all optimizers."""
    model, sparsifier = sparse_net()
    optimizer = sgd(model)
    handle = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    try:
        for _ in range(3):
            other, of_other = sparse_net()
            MaskEnforcer(of_other).attach(sgd(other))
            other.cycle = other
            del other, of_other
            with MaskEnforcer(sparsifier).attach(optimizer):
                train(model, optimizer)
    finally:
        handle.remove()


@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_with_other_weights_is_refused(trained: bool) -> None:
    """They belong to the caller, and are not written."""
    model, sparsifier = sparse_net()
    optimizer = sgd(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        others = {
            key: torch.ones_like(value).requires_grad_(trained)
            for key, value in model.state_dict().items()
        }
        with pytest.raises(ValueError, match="'first'"):
            torch.func.functional_call(model, others, (IDS,))
        assert all(bool((value == 1).all()) for value in others.values())
        train(model, optimizer)
        assert revived(model, sparsifier) == 0


def test_only_the_innermost_of_wrapped_optimizers_is_hooked() -> None:
    """Torch runs hooks of TorchRec's CombinedOptimizer too; masking twice would be for nothing."""
    model, sparsifier = sparse_net()
    inner = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.5)
    )
    combined = CombinedOptimizer([("all", inner)])
    with MaskEnforcer(sparsifier).attach(combined):
        train(model, combined)
        assert revived(model, sparsifier) == 0
        assert not any(hooks(combined, inner).values())


def test_an_audit_finds_what_was_written_through_data() -> None:
    """In plain modules too, where the next forward would read it, and in plain data."""
    model, sparsifier = sparse_net()
    plain = nn.Parameter(torch.arange(1.0, 9.0).view(2, 4))
    sparsifier.add_data("plain", plain)
    sparsifier.step()
    with MaskEnforcer(sparsifier).attach(torch.optim.SGD([*model.parameters(), plain], lr=0.5)):
        before = sparsifier.audit()
        number = int((sparsifier.get_mask("second") == 0).sum())
        model.second.weight.data.add_(1)
        with pytest.raises(ValueError, match=rf"'second': {number} removed weights are not zero"):
            sparsifier.audit()
        sparsifier.apply_masks()
        assert sparsifier.audit() == before
        plain.data.add_(1)
        with pytest.raises(ValueError, match=r"'plain': \d+ removed weights are not zero"):
            sparsifier.audit()
