"""Lightning callback that prunes the training model.

:class:`SparsifyCallback` calls :func:`~dist_sparse.sparsify` when training starts, on the model as
the strategy has wrapped it and on its optimizers, and takes a step for every batch that ends with a
step of an optimizer. Every hook runs on every rank, so collective calls in it are made by all of
them; ``state_dict()`` is called on all ranks too.

``Callback`` is the class of ``lightning``, or of ``pytorch_lightning`` if only that is installed.
They are the same code under two names, and a Trainer of one refuses callbacks of the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import torch

from dist_sparse.enforcer import Hook, Hooks
from dist_sparse.sparsifiers.masks import configured_level
from dist_sparse.sparsifiers.score import BlockShape
from dist_sparse.tables.bases import BASIS
from dist_sparse.training.arguments import Advanced, Levels, Schedule, SparsifyArgs
from dist_sparse.training.sparsify import SparseTraining, sparsify

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:

    def _import_lightning() -> Any:
        modules = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
        for package, module in modules.items():
            if importlib.util.find_spec(package):
                # No try here: if the package lacks a dependency, the user sees that error.
                return importlib.import_module(module)
        raise ImportError(
            "dist_sparse.extras.lightning needs Lightning, and neither lightning nor"
            " pytorch_lightning is installed: pip install lightning."
        )

    Callback = _import_lightning().Callback

__all__ = ["SparsifyCallback"]

_log = logging.getLogger(__name__)

# Strategies that are not supported, and the reason.
_REFUSED = {
    "FSDPStrategy": "it flattens or splits parameters on its own",
    "ModelParallelStrategy": "it splits parameters into DTensors on its own",
    "DeepSpeedStrategy": "its engine takes the steps, and may hold the weights elsewhere",
    "XLAStrategy": "its tensors are lazy",
    "SingleDeviceXLAStrategy": "its tensors are lazy",
}


class SparsifyKeywords(TypedDict, total=False):
    """Keywords of :func:`~dist_sparse.sparsify`, for type checkers."""

    level: Levels | None
    budget: float | str | None
    end: Required[int | None]
    begin: int
    every: int
    block: BlockShape
    include: str | list[str] | None
    exclude: str | list[str] | None
    schedule: Schedule | None
    advanced: Advanced | None


class SparsifyCallback(Callback):
    """Prune the embedding tables of the model while the Trainer trains it.

    A step of the schedule is a batch that ends with an optimizer step. Batches that only accumulate
    gradients do not count.

    The masks, the configurations and the schedule's step are part of Lightning's checkpoints, in
    which removed weights are 0; ``trainer.fit(ckpt_path=...)`` resumes exactly, also on another
    number of DDP ranks. Another fit of the same model by the same Trainer resumes as well; any
    other starts again. A resumed fit keeps its schedule, whatever the arguments here. For sharded
    models, call ``dcp.save({"sparse": callback})``, and ``dcp.load`` once training has started.

    At each mask update the achieved sparsity is sent to all loggers and to
    ``trainer.callback_metrics``: ``sparsity/<table>`` of each, and ``sparsity/level``, the
    scheduled level, over all blocks.

    Args:
        plan: the keywords of :func:`~dist_sparse.sparsify`, with the same defaults; not
            ``Advanced(auto_step=True)``: the callback takes the steps.
        log: False logs nothing, and saves a pass over the masks and one collective per mask update.

    Attributes:
        training: the :class:`~dist_sparse.SparseTraining` of the fit; detached after its end, with
            masks that can still be read; None before the first.

    Raises:
        ValueError: an argument is invalid, here or when training starts, where models, optimizers
            and ranks are known; the strategy is not supported; the model is compiled. Nothing is
            left attached.

    Example::

        >>> import logging, torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from dist_sparse.extras.lightning import SparsifyCallback
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.bag = torch.nn.EmbeddingBag(40, 4)
        ...     def training_step(self, ids, step):
        ...         return self.bag(ids).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        >>> model, ids = Model(), torch.randint(40, (8, 2, 5))
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> callback = SparsifyCallback(level=0.75, end=4, every=2)
        >>> quiet["enable_checkpointing"] = False
        >>> trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet)
        >>> trainer.fit(model, torch.utils.data.DataLoader(list(ids), batch_size=None))
        >>> callback.training.sparsity
        0.75
    """

    def __init__(self, *, log: bool = True, **plan: Unpack[SparsifyKeywords]) -> None:
        super().__init__()
        bound = inspect.signature(sparsify).bind(None, None, **plan)
        bound.apply_defaults()
        self._plan: dict[str, Any] = {**plan}
        self._advanced = plan.get("advanced") or Advanced()
        # Refuses invalid arguments now, before any data is loaded. The object is not needed.
        SparsifyArgs(**bound.kwargs)
        if self._advanced.auto_step:
            raise ValueError("Invalid auto_step=True: the callback itself takes the steps.")
        self.training: SparseTraining | None = None
        self._logs = log
        self._hooks = Hooks()
        # A state that was loaded before training starts.
        self._loaded: Mapping[str, Any] | None = None
        # The Trainer's global step that was last seen.
        self._global_step = 0
        # Trainer and module of the last fit.
        self._fit: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints. It holds the arguments that select tables, so that
        callbacks for different tables of one model have different keys."""
        selected = {name: self._plan.get(name) for name in ("include", "exclude")}
        selected["dense"] = self._advanced.dense
        selected = {name: globs for name, globs in selected.items() if globs is not None}
        return self._generate_state_key(**selected) if selected else super().state_key

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported strategies and compiled models, before anything is wrapped or
        loaded."""
        # A state that an earlier run has loaded and not used.
        self._loaded = None
        if stage == "fit":
            _refuse_unsupported(trainer, pl_module)
            # Lightning loads the checkpoint before on_train_start(): the module must accept the
            # bases of rotated tables, although nothing is rotated yet.
            if self._advanced.rotate is not None:
                self._hooks.add(
                    pl_module.register_load_state_dict_pre_hook(Hook(_expect_bases))  # type: ignore[no-untyped-call]
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start, or resume. Collective."""
        assert trainer.model is not None
        fit = weakref.ref(trainer), weakref.ref(pl_module)
        state = self._loaded
        if state is None and trainer.global_step > 0:
            if self._fit == fit:
                # A second fit of the same model by the same Trainer continues with its masks.
                state = self.state_dict()
            else:
                _log.warning(
                    "No masks were loaded: sparsification starts again at global step %d",
                    trainer.global_step,
                )
        self._detach()
        # Assigned before the state is loaded: if that fails, on_exception() detaches it.
        self.training = training = sparsify(trainer.model, trainer.optimizers, **self._plan)
        if state is not None:
            training.load_state_dict(state)
        if trainer.is_global_zero and (sharded := training.partial_tables):
            _log.warning(
                "The tables %s are sharded: training can't be resumed from Lightning's checkpoints,"
                " which hold one rank's shards. Save the model and this callback by dcp.save().",
                sharded,
            )
        self._loaded = None
        self._fit = fit
        self._global_step = trainer.global_step
        # Before a checkpoint is written: mask the rows that were written since they were masked.
        settle = Hook(lambda *_: training.enforcer.settle())
        self._hooks.add(pl_module.register_state_dict_pre_hook(settle))  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a step if the batch has ended with one of an optimizer. Collective at mask
        updates."""
        training = self.training
        assert training is not None
        # No optimizer has stepped: the batch only accumulated gradients.
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        # Read before the step, which sets the levels of the next mask update.
        groups = training.sparsifier.data_groups
        levels = {name: configured_level(group) for name, group in groups.items()}
        masks = training.sparsifier.masks.tables
        version = masks.version
        training.step()
        # A guard may hold an update back, or make it up.
        if masks.version != version and self._logs:
            self._log_sparsity(trainer, training, levels)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End enforcement. Removed weights are 0, even if an earlier callback has written to
        them."""
        if self.training is not None and self.training.enforcer.attached:
            self.training.sparsifier.apply_masks()
        self._detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End enforcement."""
        try:
            self._detach()
        except Exception:
            # The exception that ended the fit matters more.
            _log.warning(
                "Removed weights may not all be 0 after the exception that ended the fit.",
                exc_info=True,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End enforcement if nothing else has."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return masks, configurations and the schedule's step; communicates where
        :meth:`~dist_sparse.BaseDataSparsifier.state_dict` does."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {} if self.training is None else self.training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts. During training, as the learning rate finder does,
        load it at once, which is collective."""
        if self.training is not None and self.training.enforcer.attached:
            self.training.load_state_dict(state_dict)
        else:
            self._loaded = state_dict

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint with masks that no callback would load.

        Raises:
            ValueError: the checkpoint has the state of a SparsifyCallback for other tables.
        """
        if trainer.state.fn != "fit":
            return
        here = [callback.state_key for callback in trainer.callbacks]  # type: ignore[attr-defined]
        lost = sorted(checkpoint.get("callbacks", {}).keys() - {*here})
        # A key is the name of the class, with the arguments that select tables in braces.
        lost = [key for key in lost if key.partition("{")[0] == type(self).__qualname__]
        if lost:
            raise ValueError(
                f"The checkpoint has the masks of {lost}, which no callback loads: include, exclude"
                f" and dense must be those of that training. The callbacks here are {here}."
            )

    def _log_sparsity(
        self, trainer: Trainer, training: SparseTraining, levels: Mapping[str, Any]
    ) -> None:
        stats = training.sparsifier.table_stats()
        metrics = {f"sparsity/{table.name}": table.sparsity for table in stats}
        # The level "untouched" is not a number.
        if None not in levels.values():
            scheduled = blocks = 0
            for table in stats:
                scheduled += levels[table.name] * table.blocks
                blocks += table.blocks
            metrics["sparsity/level"] = scheduled / max(blocks, 1)
        # Not by log(): log_every_n_steps would drop most of the few mask updates.
        for name, value in metrics.items():
            trainer.callback_metrics[name] = torch.tensor(value)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _detach(self) -> None:
        self._hooks.remove()
        if self.training is not None:
            self.training.detach()


def _expect_bases(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *_: Any
) -> None:
    """Let a module load a state with the bases of tables that are rotated later: a rotation keeps
    bases that were loaded."""
    for key, basis in state.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix + BASIS) and name not in module._buffers:
            module.register_buffer(name, torch.empty_like(basis))


def _refuse_unsupported(trainer: Any, pl_module: Any) -> None:
    strategy = type(trainer.strategy)
    # Names are compared, because importing a strategy needs its package. The MRO has base classes.
    reasons = [_REFUSED[kind.__name__] for kind in strategy.__mro__ if kind.__name__ in _REFUSED]
    if reasons:
        raise ValueError(
            f"Invalid strategy {strategy.__name__}: SparsifyCallback does not support it, because"
            f' {reasons[0]}. Use a single device or "ddp".'
        )
    # Lightning unpacks a compiled module, and keeps the compiler's context.
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "Hooks do not run in a compiled LightningModule: fit the module without torch.compile."
        )
