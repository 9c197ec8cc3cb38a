"""The two data sparsity callbacks do what torch.ao's do, without their faults."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn, optim
from torch.ao.pruning._experimental.data_scheduler import BaseDataScheduler as TheirScheduler
from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier as TheirSparsifier
from torch.ao.pruning._experimental.data_sparsifier.lightning.callbacks import data_sparsity as theirs
from torch.nn.utils import parametrize

from dist_sparse import BaseDataScheduler, DataNormSparsifier, LinearDataScheduler
from dist_sparse.training.lightning import PostTrainingDataSparsity, TrainingAwareDataSparsity
from tests.lightning.lightning_fits import batches, quiet, trainer

ARGS: dict[str, Any] = {"sparsity_level": 0.4, "sparse_block_shape": (1, 4), "zeros_per_block": 4}


class Inner(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(40, 8)
        self.layers = nn.Sequential(nn.Linear(8, 12, bias), nn.Tanh(), nn.Linear(12, 4, bias))

    def forward(self, ids: Tensor) -> Tensor:
        mixed: Tensor = self.layers(self.bag(ids))
        return mixed


def module_of(package: Any, inner: nn.Module) -> Any:
    """A LightningModule of one package or the other."""

    class Outer(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = (self.model(batch[0]) - 1).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return optim.SGD(self.parameters(), lr=0.1)

    return Outer()


class OurGamma(BaseDataScheduler):
    def __init__(self, data_sparsifier: Any, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(data_sparsifier, "sparsity_level")

    def get_schedule_param(self) -> dict[str, float]:
        return gammas(self)


class TheirGamma(TheirScheduler):
    def __init__(self, data_sparsifier: Any, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(data_sparsifier, "sparsity_level")

    def get_schedule_param(self) -> dict[str, float]:
        return gammas(self)


def gammas(scheduler: Any) -> dict[str, float]:
    groups = scheduler.data_sparsifier.data_groups
    factor = scheduler.gamma if scheduler.last_epoch > 0 else 1
    return {name: group["sparsity_level"] * factor for name, group in groups.items()}


def run(package: Any, callback: Any, folder: Path, inner: nn.Module | None = None, epochs: int = 3) -> Any:
    """Fits with the Trainer of a package; returns the module."""
    module = module_of(package, inner or Inner())
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"enable_checkpointing": False, "default_root_dir": folder, "accelerator": "cpu", "max_epochs": epochs}
    with quiet():
        package.Trainer(**options, callbacks=[callback]).fit(module, batches())
    return module


def check_pair(ours: Any, others: Any) -> None:
    """Masks, configurations, and the weights of the sparsified copy."""
    names = [name.replace(".", "_") for name, _ in ours.sparsified.named_parameters()]
    assert list(ours.data_sparsifier.data_groups) == list(others.data_sparsifier.data_groups) == names
    for name, path in zip(names, dict(ours.sparsified.named_parameters()), strict=True):
        assert torch.equal(ours.data_sparsifier.get_mask(name), others.data_sparsifier.get_mask(name))
        assert ours.data_sparsifier.data_groups[name] == others.data_sparsifier.data_groups[name]
        found, expected = (each.sparsified.get_parameter(path) for each in (ours, others))
        assert torch.equal(found, expected) and 0 < int((found == 0).sum()) < found.numel()
        assert not parametrize.is_parametrized(ours.data_sparsifier.dense_store.container, name)


@pytest.mark.filterwarnings("ignore")  # the ancestor's own
class TestAgainstTheAncestor:
    """Their callbacks run for real, under pytorch_lightning's Trainer; without biases, whose masks fail there."""

    def test_post_training(self, tmp_path: Path) -> None:
        ours = PostTrainingDataSparsity(DataNormSparsifier, ARGS)
        others = theirs.PostTrainingDataSparsity(TheirSparsifier, ARGS)
        trained = run(pl, ours, tmp_path, Inner(False)), run(pytorch_lightning, others, tmp_path, Inner(False))
        check_pair(ours, others)
        assert ours.sparsified is not None and not ours.sparsified.training
        for (name, p), q in zip(trained[0].model.named_parameters(), trained[1].model.parameters(), strict=True):
            assert torch.equal(p, q) and not bool((p == 0).any()), f"{name}: the model that trained is as it was"

    def test_training_aware(self, tmp_path: Path) -> None:
        ours = TrainingAwareDataSparsity(DataNormSparsifier, ARGS, OurGamma, {"gamma": 1.25})
        others = theirs.TrainingAwareDataSparsity(TheirSparsifier, ARGS, TheirGamma, {"gamma": 1.25})
        trained = run(pl, ours, tmp_path, Inner(False)), run(pytorch_lightning, others, tmp_path, Inner(False))
        check_pair(ours, others)
        assert ours.data_scheduler.last_epoch == others.data_scheduler.last_epoch == 3
        assert ours.data_scheduler.base_param == others.data_scheduler.base_param
        assert ours.data_scheduler.get_last_param() == others.data_scheduler.get_last_param()
        assert ours.data_sparsifier_state_dict.keys() == others.data_sparsifier_state_dict.keys()
        for p, q in zip(trained[0].model.parameters(), trained[1].model.parameters(), strict=True):
            assert torch.equal(p, q) and not bool((p == 0).any())

    def test_hooks_by_hand(self) -> None:
        """As the ancestor's own tests call them: without a Trainer, the weights moved between epochs."""
        ours = TrainingAwareDataSparsity(DataNormSparsifier, ARGS, OurGamma, {"gamma": 1.25})
        others = theirs.TrainingAwareDataSparsity(TheirSparsifier, ARGS, TheirGamma, {"gamma": 1.25})
        trainer: Any = 42
        for callback, package in ((ours, pl), (others, pytorch_lightning)):
            module = module_of(package, Inner(False))
            callback.on_train_start(trainer, module)
            for _ in range(3):
                callback.on_train_epoch_start(trainer, module)
                for p in module.model.parameters():
                    p.data = p + 0.125
                callback.on_train_epoch_end(trainer, module)
            callback.on_train_end(trainer, module)
        check_pair(ours, others)


class TestFaultsOfTheAncestor:
    def test_the_log_has_a_line_for_every_parameter(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="dist_sparse")
        run(pl, PostTrainingDataSparsity(DataNormSparsifier, ARGS), tmp_path)
        names = ["bag.weight", "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
        levels = ["40.00", "41.67", "33.33", "41.67", "0.00"]  # of 80, 24, 3, 12 and 1 blocks
        expected = [f"Sparsity in layer {name} = {level}%" for name, level in zip(names, levels, strict=True)]
        assert [each.getMessage() for each in caplog.records if "dist_sparse" in each.name] == expected
        caplog.clear()
        run(pl, TrainingAwareDataSparsity(DataNormSparsifier, ARGS, OurGamma, {"gamma": 1.0}), tmp_path)
        assert [each.getMessage() for each in caplog.records if "dist_sparse" in each.name] == expected

    @pytest.mark.parametrize("aware", [True, False])
    def test_names_that_would_be_the_same(self, aware: bool, tmp_path: Path) -> None:
        """ "bag.weight" and "bag_weight" have a mask each; so does what is called like an attribute of all modules."""
        inner = Inner()
        inner.bag_weight = nn.Parameter(torch.randn(6, 4))
        inner.zero = nn.Module()
        inner.zero.grad = nn.Parameter(torch.randn(6, 4))
        callback = made(aware)
        run(pl, callback, tmp_path, inner)
        shapes = {name: tuple(callback.data_sparsifier.get_mask(name).shape) for name in callback.data_sparsifier.state}
        assert shapes["bag_weight"] == shapes["zero_grad_2"] == (6, 4) and shapes["bag_weight_2"] == (40, 8)
        assert all(int((p == 0).sum()) > 0 for p in callback.sparsified.parameters() if p.numel() > 4)

    @pytest.mark.parametrize("aware", [True, False])
    def test_what_is_not_of_floating_point_is_left_alone(self, aware: bool, tmp_path: Path) -> None:
        inner = Inner()
        inner.counts = nn.Parameter(torch.arange(8), requires_grad=False)
        inner.special = type("Special", (nn.Parameter,), {})(torch.ones(3, 4))
        callback = made(aware)
        run(pl, callback, tmp_path, inner)
        assert len(callback.data_sparsifier.state) == 5
        assert torch.equal(callback.sparsified.counts, torch.arange(8))

    def test_parameters_come_and_go(self) -> None:
        """Also between epochs; nothing is kept of what is gone, and masks of the rest go on."""
        callback, module, trainer = made(aware=True), module_of(pl, Inner()), None
        callback.on_train_start(trainer, module)
        sizes = []
        for epoch in range(4):
            module.model.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(1 + epoch % 2)])
            callback.on_train_epoch_start(trainer, module)
            callback.on_train_epoch_end(trainer, module)
            saved = callback.data_sparsifier_state_dict
            sizes.append([len(saved[part]) for part in ("state", "data_groups", "_container")])
        assert sizes == [[3, 3, 3], [5, 5, 5]] * 2
        assert callback.data_sparsifier.data_groups["bag_weight"]["sparsity_level"] > 0.4

    def test_a_second_fit_starts_afresh(self, tmp_path: Path) -> None:
        callback = made(aware=True)
        run(pl, callback, tmp_path)
        assert callback.data_sparsifier.data_groups["bag_weight"]["sparsity_level"] > 0.7
        run(pl, callback, tmp_path, epochs=1)
        assert int((callback.data_sparsifier.get_mask("bag_weight") == 0).sum()) == 0.4 * 320
        run(pl, callback, tmp_path, nn.Sequential(nn.EmbeddingBag(40, 16)), epochs=1)
        assert list(callback.data_sparsifier.state) == ["0_weight"]

    def test_warns_of_nothing(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        run(pl, made(aware=True), tmp_path)
        assert not [str(each.message) for each in recwarn if "Replacing" in str(each.message)]

    @pytest.mark.parametrize("aware", [True, False])
    @pytest.mark.parametrize("model", [None, "a model"])
    def test_a_module_without_a_model_is_refused_before_it_trains(
        self, aware: bool, model: str | None, tmp_path: Path
    ) -> None:
        class Outer(pl.LightningModule):
            def training_step(self, batch: Any, batch_idx: int) -> None:
                raise AssertionError("it trains")

            def configure_optimizers(self) -> None:
                return None

        module = Outer()
        if model is not None:
            module.model = model  # type: ignore[assignment]
        with (
            pytest.raises(ValueError, match=r"Invalid Outer\.model of type (NoneType|str): \w+ sparsifies a copy"),
            quiet(),
        ):
            trainer(tmp_path, made(aware)).fit(module, batches())

    def test_objects_in_the_place_of_classes(self) -> None:
        with pytest.raises(ValueError, match="data_sparsifier_class of type DataNormSparsifier: must be a class"):
            PostTrainingDataSparsity(DataNormSparsifier(), {})
        with pytest.raises(ValueError, match="Invalid data_scheduler_class of type int"):
            TrainingAwareDataSparsity(DataNormSparsifier, {}, 3, {})

    @pytest.mark.parametrize("args", [{"levle": 0.5}, {"norm": "L3"}, None])
    @pytest.mark.parametrize("aware", [True, False])
    def test_wrong_arguments_are_refused_before_it_trains(self, aware: bool, args: Any, tmp_path: Path) -> None:
        callback = made(aware)
        callback.data_sparsifier_args = args
        module = module_of(pl, Inner())
        before = module.model.bag.weight.clone()
        with pytest.raises((TypeError, AssertionError), match=r"levle|only L1 and L2|must be a mapping"), quiet():
            trainer(tmp_path, callback).fit(module, batches())
        assert torch.equal(module.model.bag.weight, before)

    def test_a_ready_schedule(self, tmp_path: Path) -> None:
        """A step an epoch; its arguments are left as they are."""
        plan = {"final": 0.5, "end": 2}
        callback = TrainingAwareDataSparsity(DataNormSparsifier, ARGS, LinearDataScheduler, plan)
        run(pl, callback, tmp_path)
        assert int((callback.data_sparsifier.get_mask("bag_weight") == 0).sum()) == 160 and plan == {
            "final": 0.5,
            "end": 2,
        }


def made(aware: bool) -> Any:
    if aware:
        return TrainingAwareDataSparsity(DataNormSparsifier, ARGS, OurGamma, {"gamma": 1.25})
    return PostTrainingDataSparsity(DataNormSparsifier, ARGS)


def imported(without: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process where some packages can't be found."""
    absent = f"import sys\nsys.modules.update(dict.fromkeys({without}))\n"
    return subprocess.run([sys.executable, "-c", absent + code], capture_output=True, text=True, timeout=120)


class TestPackages:
    def test_with_neither_lightning(self) -> None:
        done = imported(["lightning", "pytorch_lightning"], "import dist_sparse.training.lightning")
        assert "ImportError: dist_sparse.training.lightning needs Lightning" in done.stderr
        assert "pip install lightning." in done.stderr

    def test_with_pytorch_lightning_alone(self) -> None:
        code = (
            "import torch, pytorch_lightning as pl\n"
            "from dist_sparse.training.lightning import SparsifyCallback\n"
            "class M(pl.LightningModule):\n"
            "    def __init__(self):\n        super().__init__(); self.bag = torch.nn.EmbeddingBag(20, 4)\n"
            "    def training_step(self, batch, i):\n        return self.bag(batch).square().sum()\n"
            "    def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
            "options = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, max_epochs=1)\n"
            "callback = SparsifyCallback(level=0.5, end=2)\n"
            "trainer = pl.Trainer(**options, enable_checkpointing=False, accelerator='cpu', callbacks=[callback])\n"
            "model = M()\n"
            "trainer.fit(model, torch.utils.data.DataLoader(torch.randint(20, (8, 2)), batch_size=2))\n"
            "assert int((model.bag.weight == 0).all(1).sum()) == 10\n"
        )
        done = imported(["lightning"], code)
        assert done.returncode == 0, done.stderr
