"""The model that Lightning trains is sparse wherever it is read, saved or resumed."""

from __future__ import annotations

import csv
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from dist_sparse import sparsify
from dist_sparse.extras.lightning import SparsifyCallback
from dist_sparse.extras.lightning.callback import SparsifyKeywords
from tests.enforcer.test_enforce_errors import hooks
from tests.extras.lightning.lightning_fits import (
    PLAN,
    Net,
    Numbered,
    adam,
    batches,
    checkpoint,
    quiet,
    trainer,
    zero_rows,
)
from tests.keywords import nested

LEFT = round(0.6 * 40)


def fit(
    module: Net, callback: SparsifyCallback, folder: Path, *others: Any, **options: Any
) -> pl.Trainer:
    ckpt = options.pop("ckpt_path", None)
    fitted = trainer(folder, callback, *others, **options)
    with quiet():
        fitted.fit(module, batches(), batches(2), ckpt_path=ckpt)
    return fitted


def fitted(module: Net, folder: Path, **options: Any) -> tuple[SparsifyCallback, pl.Trainer]:
    callback = SparsifyCallback(**PLAN)
    return callback, fit(module, callback, folder, **options)


@pytest.mark.parametrize(
    ("wrong", "error"), [("levels", TypeError), ("auto_step", ValueError)], ids=str
)
def test_takes_what_sparsify_takes(wrong: str, error: type[Exception]) -> None:
    """Except for ``auto_step``: the callback steps by itself."""
    with pytest.raises(error, match=wrong):
        SparsifyCallback(**nested(level=0.5, end=4, **{wrong: True}))


def test_its_typed_keywords_are_those_of_sparsify() -> None:
    parameters = inspect.signature(sparsify).parameters
    # The callback itself has the model and the optimizers.
    assert [*SparsifyKeywords.__annotations__] == [*parameters][2:]


class TestWhileItTrains:
    def test_validation_sees_zeros(self, tmp_path: Path) -> None:
        """The sanity check before training changes nothing."""
        module = Net()
        callback, _ = fitted(module, tmp_path, val_check_interval=4)
        assert module.validated == [
            0,
            0,
            *[round(PLAN["level"] * 40 * f) for f in (0.578125, 0.578125)],
            *[24] * 4,
        ]
        assert callback.training is not None and not callback.training.enforcer.attached

    def test_logs_what_masks_achieve_when_they_move(self, tmp_path: Path) -> None:
        """To the loggers whatever their interval, and for callbacks that monitor."""
        module = Net()
        logger = CSVLogger(tmp_path)
        _, done = fitted(module, tmp_path, logger=logger)
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
        assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9]
        assert float(rows[-1]["sparsity/bag"]) == 0.6 and float(
            rows[-1]["sparsity/level"]
        ) == pytest.approx(0.6)
        assert all(
            abs(float(row["sparsity/bag"]) - float(row["sparsity/level"])) <= 0.5 / 40
            for row in rows
        )
        assert float(done.callback_metrics["sparsity/bag"]) == pytest.approx(0.6)

    def test_logs_nothing_on_request(self, tmp_path: Path) -> None:
        module = Net()
        done = fit(module, SparsifyCallback(**nested(**PLAN, log=False)), tmp_path)
        assert not [name for name in done.callback_metrics if name.startswith("sparsity/")]
        assert zero_rows(module.bag.weight) == LEFT

    def test_a_run_for_development(self, tmp_path: Path) -> None:
        module = Net()
        callback, _ = fitted(module, tmp_path, fast_dev_run=True)
        assert callback.training is not None and callback.training.scheduler.last_epoch == 1

    def test_two_callbacks_for_two_tables(self, tmp_path: Path) -> None:
        module = Net()
        module.more = nn.Embedding(ROWS := 20, 4)
        module.over.register_forward_pre_hook(lambda _, args: (args[0] + module.more.weight.sum(),))
        first = SparsifyCallback(**nested(**PLAN, include="bag"))
        second = SparsifyCallback(
            **nested(**{**PLAN, "level": 0.2, "block": (2, 4)}, include=["more"])
        )
        done = fit(module, first, tmp_path, second)
        assert zero_rows(module.bag.weight) == LEFT and zero_rows(module.more.weight) == 0.2 * ROWS
        keys = ["SparsifyCallback{'include': 'bag'}", "SparsifyCallback{'include': ['more']}"]
        assert list(checkpoint(done, tmp_path / "two.ckpt")["callbacks"]) == keys


class TestAfterIt:
    def test_another_trainer_begins_anew(self, tmp_path: Path) -> None:
        module = Net()
        before = hooks(module)
        callback, _ = fitted(module, tmp_path)
        assert hooks(module) == before and zero_rows(module.bag.weight) == LEFT
        fit(module, callback, tmp_path, max_steps=2)
        assert callback.training is not None and callback.training.scheduler.last_epoch == 2
        assert zero_rows(module.bag.weight) < LEFT

    def test_the_same_trainer_goes_on(self, tmp_path: Path) -> None:
        whole = Net()
        fitted(whole, tmp_path, max_epochs=2)
        module = Net()
        callback, done = fitted(module, tmp_path)
        done.fit_loop.max_epochs = 2
        with quiet():
            done.fit(module, batches(), batches(2))
        assert callback.training is not None and callback.training.scheduler.last_epoch == 24
        assert module.trained == whole.trained

    def test_an_average_before_it_is_sparse_in_the_end(self, tmp_path: Path) -> None:
        """It takes the place of the weights when training ends, past what torch counts as a
        write."""
        module = Net()
        ended = trainer(tmp_path, EMAWeightAveraging(), SparsifyCallback(**PLAN))
        with quiet():
            ended.fit(module, batches())
        assert zero_rows(module.bag.weight) == LEFT

    def test_an_exception_ends_it(self, tmp_path: Path) -> None:
        class Failing(Net):
            def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
                if batch_idx == 10:
                    raise RuntimeError("no more data")
                return super().training_step(batch, batch_idx)

        module = Failing()
        before = hooks(module)
        callback = SparsifyCallback(**PLAN)
        with pytest.raises(RuntimeError, match="no more data"):
            fit(module, callback, tmp_path)
        assert hooks(module) == before and zero_rows(module.bag.weight) == LEFT
        assert callback.training is not None and not callback.training.enforcer.attached
        again = Net()
        fit(again, callback, tmp_path)
        assert again.trained[:2] == [0, 0] and zero_rows(again.bag.weight) == LEFT


class TestCheckpoints:
    def saved(self, folder: Path, **options: Any) -> tuple[Net, list[Path]]:
        """A model after two epochs, and the checkpoints of every step."""
        module = Numbered()
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        fit(
            module,
            SparsifyCallback(**nested(**PLAN, **options)),
            folder,
            saving,
            max_epochs=2,
            enable_checkpointing=True,
        )
        return module, sorted(
            folder.glob("*.ckpt"), key=lambda file: int(file.stem.partition("=")[2])
        )

    @pytest.mark.parametrize("state", ["keep", "reset"])
    def test_resumes_exactly(self, state: str, tmp_path: Path) -> None:
        """From any step, in new objects, by a safe load: the same bits as the uninterrupted run."""
        whole, files = self.saved(tmp_path, optimizer_state=state)
        assert len(files) == 24
        for step in (1, 4, 9, 10, 12, 17):
            module = Numbered()
            callback = SparsifyCallback(**nested(**PLAN, optimizer_state=state))
            fit(module, callback, tmp_path, max_epochs=2, ckpt_path=files[step - 1])
            assert module.trained == whole.trained[step:]
            assert all(
                torch.equal(p, q)
                for p, q in zip(module.parameters(), whole.parameters(), strict=True)
            )
            assert callback.training is not None and callback.training.scheduler.last_epoch == 24

    def test_resumes_rotated_tables(self, tmp_path: Path) -> None:
        """A checkpoint has their bases, which the model has only once training starts."""
        rotation = pytest.importorskip("dist_sparse.extras.rotation").Rotation("table")
        options: dict[str, Any] = {
            **PLAN,
            "block": "col",
            "rotate": rotation,
            "optimizer_state": "reset",
        }
        saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        whole, module = Numbered(), Numbered()
        fit(
            whole,
            SparsifyCallback(**nested(**options)),
            tmp_path,
            saving,
            enable_checkpointing=True,
        )
        fit(
            module,
            SparsifyCallback(**nested(**options)),
            tmp_path,
            ckpt_path=tmp_path / "step=6.ckpt",
        )
        assert all(
            torch.equal(value, whole.state_dict()[key])
            for key, value in module.state_dict().items()
        )
        assert not module.bag.weight[:, 3:].any() and "rotation_of_bag" in module.state_dict()
        with pytest.raises(RuntimeError, match=r"Unexpected key.*rotation_of_bag"):
            fit(
                Numbered(),
                SparsifyCallback(**PLAN),
                tmp_path,
                ckpt_path=tmp_path / "step=6.ckpt",
            )

    def test_weights_in_them_are_settled(self, tmp_path: Path) -> None:
        """Also where somebody has written them since the last step, and nothing but weights is
        saved."""

        class Writing(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                with torch.no_grad():
                    pl_module.bag.weight.add_(1)

        saving = ModelCheckpoint(
            tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1, save_weights_only=True
        )
        fit(
            Net(),
            SparsifyCallback(**PLAN),
            tmp_path,
            Writing(),
            saving,
            enable_checkpointing=True,
        )
        zeros = [
            zero_rows(torch.load(tmp_path / f"step={step}.ckpt")["state_dict"]["bag.weight"])
            for step in (1, 11)
        ]
        assert zeros == [0, LEFT]

    def test_after_the_fit(self, tmp_path: Path) -> None:
        module = Net()
        callback, done = fitted(module, tmp_path)
        saved = checkpoint(done, tmp_path / "last.ckpt")
        state = saved["callbacks"]["SparsifyCallback"]
        assert zero_rows(saved["state_dict"]["bag.weight"]) == LEFT
        assert json.loads(state["schedule"])["scheduler"]["last_epoch"] == 12
        other = SparsifyCallback(**PLAN)
        trainer(tmp_path, other)
        other.load_state_dict(state)
        assert other.state_dict() == state, "it is saved though it was never trained with"
        assert SparsifyCallback(**PLAN).state_dict() == {}
        assert callback.state_key == "SparsifyCallback"

    def test_a_validation_of_one_is_no_resumption(self, tmp_path: Path) -> None:
        _, files = self.saved(tmp_path)
        module, callback = Net(), SparsifyCallback(**PLAN)
        done = trainer(tmp_path, callback)
        with quiet():
            done.validate(module, batches(2), ckpt_path=files[-1], verbose=False)
            assert module.validated == [LEFT, LEFT] and callback.training is None
            done.fit(Net(), batches())
        assert callback.training is not None and callback.training.scheduler.last_epoch == 12

    def test_without_masks_it_begins_anew_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        dense = trainer(tmp_path)
        with quiet():
            dense.fit(Net(), batches())
        checkpoint(dense, tmp_path / "dense.ckpt")
        callback = SparsifyCallback(**PLAN)
        fit(Net(), callback, tmp_path, max_epochs=2, ckpt_path=tmp_path / "dense.ckpt")
        assert callback.training is not None and callback.training.scheduler.last_epoch == 12
        assert "starts again at global step 12" in caplog.text

    def test_other_tables_are_refused(self, tmp_path: Path) -> None:
        _, files = self.saved(tmp_path)
        module = Net()
        before = hooks(module)
        with pytest.raises(
            ValueError, match=r"has the masks of \['SparsifyCallback'\], which no callback loads"
        ):
            fit(
                module,
                SparsifyCallback(**nested(**PLAN, include="bag")),
                tmp_path,
                max_epochs=3,
                ckpt_path=files[-1],
            )
        spoilt = torch.load(files[11])
        state = spoilt["callbacks"]["SparsifyCallback"]
        for part, value, message in (
            ("schedule", "{}", ""),
            ("sparsifier", {}, "not the state of a sparsifier: it lacks"),
        ):
            torch.save(
                {**spoilt, "callbacks": {"SparsifyCallback": {**state, part: value}}},
                tmp_path / "spoilt.ckpt",
            )
            with pytest.raises(ValueError, match=message):
                fit(
                    module,
                    SparsifyCallback(**PLAN),
                    tmp_path,
                    max_epochs=3,
                    ckpt_path=tmp_path / "spoilt.ckpt",
                )
        assert hooks(module) == before


class TestSearchesForALearningRate:
    def test_before_training(self, tmp_path: Path) -> None:
        module, callback = Net(), SparsifyCallback(**PLAN)
        module.lr = 0.1
        searching = trainer(tmp_path, callback)
        with quiet():
            Tuner(searching).lr_find(module, batches(), num_training=5, update_attr=False)
        assert callback.training is None

    @pytest.mark.parametrize(
        "how", [{}, {"block": "col", "rotate": "table", "optimizer_state": "reset"}], ids=str
    )
    def test_while_it_goes_on(self, how: dict[str, Any], tmp_path: Path) -> None:
        """What the search did to weights, masks, bases and counts is undone."""

        class Again(LearningRateFinder):
            def on_fit_start(self, *_: Any) -> None:
                return

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch == 0:
                    self.lr_find(trainer, pl_module)

        how = {**PLAN, **how}
        if "rotate" in how:
            extra = pytest.importorskip("dist_sparse.extras.rotation")
            how["rotate"] = extra.Rotation(how["rotate"])
        plain, module, callback = Net(), Net(), SparsifyCallback(**nested(**how))
        fit(plain, SparsifyCallback(**nested(**how)), tmp_path)
        module.lr = 0.1
        searching = Again(num_training_steps=5, update_attr=False)
        fit(module, callback, tmp_path, searching, num_sanity_val_steps=0)
        assert callback.training is not None and callback.training.scheduler.last_epoch == 12
        assert len(module.trained) == 17 and module.trained[5:] == plain.trained
        searched, trained = module.state_dict(), plain.state_dict()
        assert all(torch.equal(searched[name], value) for name, value in trained.items())


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"end": 0, "begin": 1}, r"Invalid end=0"),
            ({"every": 0}, r"Invalid every=0"),
            ({"norm": "L3"}, "must be one of 'L1', 'L2'"),
            ({"level": 1.5}, r"Invalid level=1\.5"),
            ({"block": "0x4"}, r"Invalid block '0x4'"),
            ({"optimizer_state": "drop"}, "Invalid optimizer_state='drop'"),
        ],
        ids=str,
    )
    def test_by_the_constructor(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises((ValueError, AssertionError), match=message):
            SparsifyCallback(**nested(**{**PLAN, **wrong}))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"level": {"nothing": 0.5}}, "Invalid level: \\['nothing'\\] match none"),
            ({"include": "nothing"}, "matches none of the tables"),
        ],
        ids=str,
    )
    def test_when_training_starts(
        self, wrong: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        module = Net()
        before = hooks(module)
        with pytest.raises(ValueError, match=message):
            fit(module, SparsifyCallback(**nested(**{**PLAN, **wrong})), tmp_path)
        assert hooks(module) == before and not module.trained

    def test_optimizers_that_do_not_step_the_table(self, tmp_path: Path) -> None:
        module = Net(lambda parameters: adam(list(parameters)[1:]))
        with pytest.raises(ValueError, match="None of the given optimizers steps 'bag'"):
            fit(module, SparsifyCallback(**PLAN), tmp_path)

    def test_a_strategy_that_takes_weights_apart(self, tmp_path: Path) -> None:
        callback = SparsifyCallback(**PLAN)
        apart = trainer(tmp_path, callback)
        apart._accelerator_connector.strategy = FSDPStrategy()  # a Trainer takes it with CUDA only
        with pytest.raises(
            ValueError, match=r"Invalid strategy FSDPStrategy: .* it flattens or splits parameters"
        ):
            callback.setup(apart, Net(), "fit")

    def test_a_compiled_module(self, tmp_path: Path) -> None:
        module = torch.compile(Net(), backend="eager")
        with pytest.raises(ValueError, match="in a compiled LightningModule"):
            fit(module, SparsifyCallback(**PLAN), tmp_path)
        assert not module.trained


def test_can_be_pickled_before_the_fit() -> None:
    """Strategies that spawn processes do that."""
    copy = pickle.loads(pickle.dumps(SparsifyCallback(**PLAN)))
    assert copy.training is None and copy.state_key == "SparsifyCallback"
