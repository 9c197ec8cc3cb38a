"""torch.ao's two Lightning callbacks, which prune copies of the training model.

Both copy ``pl_module.model`` and prune the copy, which is then in ``sparsified``, for comparison. Every floating point
parameter is registered with the data sparsifier under its name with '_' for '.'. The training model is not changed;
:class:`~dist_sparse.lightning.SparsifyCallback` prunes that one.

Source: ``torch.ao.pruning._experimental.data_sparsifier.lightning.callbacks``, same constructors, attributes and hooks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from dist_sparse.lightning.callback import Callback
from dist_sparse.sparsifiers.base import SUPPORTED_TYPES
from dist_sparse.sparsifiers.dense_store import name_for

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["PostTrainingDataSparsity", "TrainingAwareDataSparsity"]

_log = logging.getLogger(__name__)


class PostTrainingDataSparsity(Callback):
    """Prune a copy of the model after training: one ``step()``, then ``squash_mask()``.

    Args:
        data_sparsifier_class: a class of data sparsifiers. One object is made when the fit starts, to check the
            arguments, and the one that is used at its end.
        data_sparsifier_args: its keyword arguments, without ``data_list``.

    Attributes:
        sparsified: the copy, in eval mode; None before the end of the fit.
        data_sparsifier: its sparsifier, with masks and configurations.

    Raises:
        ValueError: no class is given; or, when the fit starts, ``pl_module.model`` is no module. Errors of the class
            about its arguments are raised at the start of the fit, too.

    Example::

        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.lightning import PostTrainingDataSparsity
        >>> callback = PostTrainingDataSparsity(DataNormSparsifier, {"sparsity_level": 0.5})
        >>> callback.sparsified is None  # until Trainer(callbacks=[callback]).fit(model) ends
        True
    """

    def __init__(self, data_sparsifier_class: Any, data_sparsifier_args: Mapping[str, Any]) -> None:
        super().__init__()
        _check_classes(data_sparsifier_class=data_sparsifier_class)
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = data_sparsifier_args
        self.data_sparsifier: Any = None
        self.sparsified: nn.Module | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a module without ``model``, and arguments that the class does not take, before training."""
        _model_of(pl_module, self)
        self.data_sparsifier_class(**self.data_sparsifier_args)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the model, prune the copy and log the sparsity of every parameter."""
        sparsified = deepcopy(_model_of(pl_module, self)).eval()
        data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        _register(sparsified, data_sparsifier)
        data_sparsifier.step()
        data_sparsifier.squash_mask()
        self.sparsified, self.data_sparsifier = sparsified, data_sparsifier
        _log_sparsity(sparsified, data_sparsifier)


class TrainingAwareDataSparsity(Callback):
    """Prune a new copy of the model at the end of every epoch, by a schedule: a preview of the pruned model.

    Args:
        data_sparsifier_class: a class of data sparsifiers. The object is made when training starts.
        data_sparsifier_args: its keyword arguments, without ``data_list``.
        data_scheduler_class: a class of data schedulers, which steps once per epoch.
        data_scheduler_args: its keyword arguments, without ``data_sparsifier``.

    Attributes:
        sparsified: the last copy; masked once training has ended.
        data_sparsifier, data_scheduler: new ones in every fit.
        data_sparsifier_state_dict: of the sparsifier at the end of the last epoch; None before the first one's.

    Raises:
        ValueError: no class is given; or, when training starts, ``pl_module.model`` is no module.

    On several ranks, every rank does the same with its replica; a scheduler's steps are collective.

    Example::

        >>> from dist_sparse import DataNormSparsifier, LinearDataScheduler
        >>> from dist_sparse.lightning import TrainingAwareDataSparsity
        >>> plan = {"schedule_param": "sparsity_level", "final": 0.5, "end": 10}
        >>> callback = TrainingAwareDataSparsity(DataNormSparsifier, {}, LinearDataScheduler, plan)
        >>> callback.sparsified is None  # until the first epoch of Trainer(callbacks=[callback]).fit(model) ends
        True
    """

    def __init__(
        self,
        data_sparsifier_class: Any,
        data_sparsifier_args: Mapping[str, Any],
        data_scheduler_class: Any,
        data_scheduler_args: Mapping[str, Any],
    ) -> None:
        super().__init__()
        _check_classes(data_sparsifier_class=data_sparsifier_class, data_scheduler_class=data_scheduler_class)
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = data_sparsifier_args
        self.data_scheduler_class = data_scheduler_class
        self.data_scheduler_args = data_scheduler_args
        self.data_sparsifier: Any = None
        self.data_scheduler: Any = None
        self.sparsified: nn.Module | None = None
        self.data_sparsifier_state_dict: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sparsifier and scheduler; nothing of an earlier fit is kept."""
        sparsified = deepcopy(_model_of(pl_module, self))
        data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        _register(sparsified, data_sparsifier)  # so that the scheduler knows what it schedules
        args = {**deepcopy(dict(self.data_scheduler_args)), "data_sparsifier": data_sparsifier}
        self.data_scheduler = self.data_scheduler_class(**args)
        self.sparsified, self.data_sparsifier, self.data_sparsifier_state_dict = sparsified, data_sparsifier, None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load masks and configurations of the last epoch, if there was one."""
        if self.data_sparsifier_state_dict is not None:
            self.data_sparsifier.load_state_dict(self.data_sparsifier_state_dict)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the model again and step sparsifier and scheduler, from the masks and configurations so far."""
        sparsified = deepcopy(_model_of(pl_module, self))
        _register(sparsified, self.data_sparsifier)
        self.data_sparsifier.step()
        self.data_scheduler.step()
        self.sparsified, self.data_sparsifier_state_dict = sparsified, self.data_sparsifier.state_dict()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the masks into ``sparsified`` and log the sparsity of every parameter."""
        self.data_sparsifier.squash_mask()
        assert self.sparsified is not None
        _log_sparsity(self.sparsified, self.data_sparsifier)


def _check_classes(**given: Any) -> None:
    for name, value in given.items():
        if not callable(value):
            raise ValueError(f"Invalid {name} of type {type(value).__name__}: must be a class, not an object of it.")


def _model_of(pl_module: Any, callback: Callback) -> nn.Module:
    model = getattr(pl_module, "model", None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Invalid {type(pl_module).__name__}.model of type {type(model).__name__}: {type(callback).__name__} "
            "sparsifies a copy of it, so it must be a torch.nn.Module."
        )
    return model


def _register(model: nn.Module, data_sparsifier: Any) -> None:
    """Register the parameters of ``model`` in place of those of the same names. Configurations are kept, and masks if
    the shape is the same. Names that the model no longer has are removed."""
    named = dict(_named(model))
    for name in [name for name in data_sparsifier.data_groups if name not in named]:
        data_sparsifier.delete_data(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Replacing existing data", UserWarning)  # intended here
        for name, (_, parameter) in named.items():
            fits = name in data_sparsifier.state and data_sparsifier.get_mask(name=name).shape == parameter.shape
            data_sparsifier.add_data(name=name, data=parameter, reuse_mask=fits)


def _named(model: nn.Module) -> Iterator[tuple[str, tuple[str, nn.Parameter]]]:
    """Name in the sparsifier -> name in the model, and parameter; those that can be registered."""
    used: set[str] = set()
    for path, parameter in model.named_parameters():
        if type(parameter) in SUPPORTED_TYPES and parameter.is_floating_point():
            yield name_for(path, used), (path, parameter)


def _log_sparsity(model: nn.Module, data_sparsifier: Any) -> None:
    for name, (path, parameter) in _named(model):
        removed = int((data_sparsifier.get_mask(name=name) == 0).sum())
        _log.info("Sparsity in layer %s = %.2f%%", path, 100 * removed / max(parameter.numel(), 1))
