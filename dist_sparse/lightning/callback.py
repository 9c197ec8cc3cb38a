"""How is the model that Lightning trains sparsified?

:class:`SparsifyCallback` calls :func:`~dist_sparse.sparsify` when training starts, on the model as the strategy has
wrapped it and on its optimizers, and takes a step for every round of optimizer steps. Every hook runs on every rank, so
what is collective there is called by all of them; ``state_dict()``, too, is called on all, and does not communicate.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.hooks import Hook
from dist_sparse.tables.shards import ROW
from dist_sparse.training.plan import BlockShape, Levels, Norm, OptimizerState, Plan, Schedule
from dist_sparse.training.sparsify import SparseTraining, combines, sparsify, steppers

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:

    def _installed() -> Any:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            try:
                return importlib.import_module(package)
            except ModuleNotFoundError as missing:
                if missing.name not in (package, package.partition(".")[0]):
                    raise  # it is there, and lacks something itself
        raise ImportError(
            "dist_sparse.training.lightning needs Lightning, and neither lightning nor pytorch_lightning is installed: "
            'pip install "dist_sparse[lightning]".'
        )

    Callback = _installed().Callback

__all__ = ["Callback", "OptimizerRounds", "SparsifyCallback"]

_log = logging.getLogger(__name__)

_REFUSED: Final = {
    "FSDPStrategy": "it flattens or splits parameters on its own",
    "ModelParallelStrategy": "it splits parameters into DTensors on its own",
    "DeepSpeedStrategy": "its engine takes the steps, and may hold the weights elsewhere",
    "XLAStrategy": "its tensors are lazy",
    "SingleDeviceXLAStrategy": "its tensors are lazy",
}


class SparsifyCallback(Callback):
    """Sparsifies the embedding tables of the model while the Trainer trains it.

    A step of the schedule is a round of optimizer steps
    (:class:`~dist_sparse.lightning.callback.OptimizerRounds`), taken at the end of its batch: accumulated
    batches and steps that a gradient scaler skips do not count.

    The masks, the configurations and the schedule's step are part of Lightning's checkpoints, in which removed weights
    are 0; ``trainer.fit(ckpt_path=...)`` goes on exactly, also on another number of DDP ranks. Another fit of the same
    model by the same Trainer goes on as well; any other begins anew. What goes on is the schedule of then, whatever is
    asked for here.

    When masks move, the achieved sparsity goes to all loggers and to ``trainer.callback_metrics``: ``sparsity/<table>``
    of each, and ``sparsity/level``, the level that was asked for, over all blocks.

    Args:
        level, end, begin, every, block, norm, include, exclude, dense, schedule, optimizer_state: as in
            :func:`~dist_sparse.sparsify`; steps are rounds of optimizer steps.
        log: False logs nothing, and saves a pass over the masks and one collective per due step.

    Attributes:
        training: the :class:`~dist_sparse.SparseTraining` of the fit; detached after its end, when masks can still be
            read; None before the first.

    Raises:
        ValueError: an argument is invalid, here or when training starts, where models, optimizers and ranks are known;
            the strategy is not supported; the model is compiled. Nothing is left attached.
    """

    def __init__(
        self,
        *,
        level: Levels,
        end: int,
        begin: int = 0,
        every: int = 100,
        block: BlockShape = (1, ROW),
        norm: Norm = "L2",
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        dense: bool | str | list[str] | None = None,
        schedule: Schedule = "cubic",
        optimizer_state: OptimizerState = "keep",
        min_rows: int = 16,
        log: bool = True,
    ) -> None:
        super().__init__()
        self._plan: dict[str, Any] = {
            "level": level,
            "end": end,
            "begin": begin,
            "every": every,
            "block": block,
            "norm": norm,
            "schedule": schedule,
            "optimizer_state": optimizer_state,
            "min_rows": min_rows,
        }
        Plan(**self._plan)  # invalid arguments are refused here, before anything is loaded or trained
        self.training: SparseTraining | None = None
        self._tables: dict[str, Any] = {"include": include, "exclude": exclude, "dense": dense}
        self._logs = log
        self._rounds = OptimizerRounds([])
        self._saved_hook: RemovableHandle | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._first = 0
        self._fit: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None

    @property
    def state_key(self) -> str:
        """Callbacks for different tables of one model have states of their own."""
        chosen = {key: value for key, value in self._tables.items() if value is not None}
        return self._generate_state_key(**chosen) if chosen else super().state_key

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what can't be followed, before anything is wrapped or loaded."""
        self._loaded = None  # what an earlier run has loaded and not used
        if stage == "fit":
            _refuse(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, or goes on. Collective."""
        assert trainer.model is not None
        fit = weakref.ref(trainer), weakref.ref(pl_module)
        state = self._loaded
        if state is None and trainer.global_step > 0:
            if self._fit == fit:
                state = self.state_dict()
            else:
                _log.warning("No masks were loaded: sparsification begins anew at global step %d", trainer.global_step)
        self._detach()
        training = sparsify(trainer.model, trainer.optimizers, **self._tables, **self._plan)
        rounds = OptimizerRounds(trainer.optimizers)
        first = training.scheduler.last_epoch
        try:
            if state is not None:
                _load(training, rounds, state)
        except BaseException:
            rounds.stop()
            training.detach()
            raise
        if trainer.is_global_zero and (sharded := training.partial_tables):
            _log.warning(
                "The tables %s are sharded: Lightning's checkpoints hold the weights and masks of one rank, so that "
                "training can't be resumed from them. Save every rank's, or use torch.distributed.checkpoint.",
                sharded,
            )
        self.training, self._rounds, self._first, self._loaded, self._fit = training, rounds, first, None, fit
        settle = Hook(lambda *_: training.enforcer.settle())
        self._saved_hook = pl_module.register_state_dict_pre_hook(settle)  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the steps of the rounds that the batch has made. Collective where one is due."""
        training = self.training
        assert training is not None
        while training.scheduler.last_epoch - self._first < self._rounds.rounds:
            groups = training.sparsifier.data_groups
            asked = {name: float(group["sparsity_level"]) for name, group in groups.items()}
            due = training.sparsifier.enable_mask_update
            training.step()
            if due and self._logs:
                self._report(trainer, training, asked)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends enforcement: removed weights are 0, whatever callbacks before this one have put in their place."""
        if self.training is not None and self.training.enforcer.attached:
            self.training.sparsifier.apply_masks()
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends enforcement."""
        try:
            self._detach()
        except Exception:  # the one that ended the fit says more
            _log.warning("Removed weights may not all be 0 after the exception that ended the fit.", exc_info=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends enforcement if nothing else has."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Masks (of this rank's tables), configurations, the schedule's step and the optimizers' steps. Local."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self.training is None:
            return {}
        return {**self.training.state_dict(), "optimizer_steps": self._rounds.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts; used at once while it goes on, as by a search for a learning rate. Collective
        then."""
        if self.training is not None and self.training.enforcer.attached:
            _load(self.training, self._rounds, state_dict)
        else:
            self._loaded = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with a training whose masks no callback takes over.

        Raises:
            ValueError: the checkpoint has the state of such a callback for other tables.
        """
        mine = [key for key in checkpoint.get("callbacks", {}) if str(key).partition("{")[0] == type(self).__qualname__]
        here = [callback.state_key for callback in trainer.callbacks]  # type: ignore[attr-defined]
        if trainer.state.fn == "fit" and (lost := [key for key in mine if key not in here]):
            raise ValueError(
                f"The checkpoint has the masks of {lost}, which no callback takes over: include, exclude and dense "
                f"must be the same as then. The callbacks here are {here}."
            )

    def _report(self, trainer: Trainer, training: SparseTraining, asked: Mapping[str, float]) -> None:
        stats = training.sparsifier.table_stats()
        blocks = sum(table.blocks for table in stats)
        level = sum(asked[table.name] * table.blocks for table in stats) / max(blocks, 1)
        metrics = {"sparsity/level": level, **{f"sparsity/{table.name}": table.sparsity for table in stats}}
        # Past log_every_n_steps, which would drop most of the few steps at which masks move.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _detach(self) -> None:
        self._rounds.stop()
        if self._saved_hook is not None:
            self._saved_hook.remove()
            self._saved_hook = None
        if self.training is not None:
            self.training.detach()


def _refuse(trainer: Any, pl_module: Any) -> None:
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _REFUSED:
            raise ValueError(
                f"Invalid strategy {type(trainer.strategy).__name__}: SparsifyCallback does not support it, because "
                f'{_REFUSED[kind.__name__]}. Use a single device or "ddp".'
            )
    if getattr(pl_module, "_compiler_ctx", None) is not None:  # Lightning unpacks a compiled module, and keeps this
        raise ValueError(
            "The LightningModule is compiled: hooks do not run inside torch.compile, so removed weights would come "
            "back unseen. Fit the module as it was before torch.compile."
        )


def _load(training: SparseTraining, rounds: OptimizerRounds, state: Mapping[str, Any]) -> None:
    before = rounds.counts
    rounds.load(state.get("optimizer_steps", ()))
    try:
        training.load_state_dict(state)
    except BaseException:
        rounds.load(before)
        raise


class OptimizerRounds:
    """Counts from its construction on, until :meth:`stop`.

    Args:
        optimizers: as the training loop has them, wrapped or not.

    Raises:
        ValueError: something is no optimizer.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        counted = {id(each): each for optimizer in optimizers for each in steppers(optimizer)}
        self._counts = [0] * len(counted)
        self._handles: list[RemovableHandle] = [
            each.register_step_post_hook(Hook(partial(self._stepped, number)))
            for number, each in enumerate(counted.values())
        ]

    @property
    def rounds(self) -> int:
        """How many there were."""
        return max(self._counts, default=0)

    @property
    def counts(self) -> list[int]:
        """By optimizer, to be saved."""
        return list(self._counts)

    def load(self, counts: Sequence[int]) -> None:
        """Goes on from :attr:`counts` of the same optimizers.

        Raises:
            ValueError: they are others.
        """
        if len(counts) != len(self._counts):
            raise ValueError(
                f"Invalid state: it has the steps of {len(counts)} optimizers; the model has {len(self._counts)} here."
            )
        self._counts = list(counts)

    def stop(self) -> None:
        """Ends counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stepped(self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Fused tables have no gradient after the backward: steps of their optimizers always count.
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if combines(optimizer) or any(gradient is not None for gradient in gradients):
            self._counts[number] += 1
