"""Optimizer, gradient accumulation, mixed precision, clipping, learning rate and sparsity in one step.

:class:`OptimScheduler` keeps the interface of SpeeChain's class of that name. One ``step`` has three phases:

1. Gradients. The first of several OptimSchedulers of a model to be stepped takes the gradients of all of them, before
   any weight changes; each of the others finds its own when its turn comes.
2. Update, at the end of a real step: unscale, clip, step; or nothing, if the norm is not finite.
3. Sparsity, after an update: the data sparsifier steps, then its scheduler.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from dist_sparse.checks import integer, number
from dist_sparse.enforcer.optimizers import optimizer_class
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.optim.config import OptimConfig, check_optimizer, owned_by, wiring_of
from dist_sparse.optim.gradients import Backward, Claim, Gradients, update_weights
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.ready import ReadyDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["OptimScheduler"]

Clock = Callable[[list[str]], AbstractContextManager[Any]]

_peers: WeakKeyDictionary[nn.Module, WeakValueDictionary[int, OptimScheduler]] = WeakKeyDictionary()
"""The OptimSchedulers of each model by id, in the order in which they were constructed, the same on every rank."""


def _argument(name: str) -> Any:
    return property(lambda self: getattr(self.config, name), doc=f"``config.{name}``, under its name in SpeeChain.")


class OptimScheduler(abc.ABC):
    """Optimizer, gradient accumulation, AMP, clipping and learning rate of a model, or of some of its modules.

    Subclasses define :meth:`sche_init` and :meth:`update_lr`. Construct it on every rank, in the same order.

    Args:
        optim_type: a name in ``torch.optim``, a dotted path, or a class.
        optim_conf: its keyword arguments.
        model: plain, DDP or DistributedModelParallel.
        distributed: the model averages gradients over ranks (DDP); do so once per real step.
        optim_loss: name of the loss to differentiate; None is ``"loss"``.
        updated_modules: one or several modules, by path from the user's own module; None is the whole model.
        step_per_update: update at every so many real steps; the losses of others are not differentiated.
        use_amp: mixed precision. With float16 the loss is scaled by a :class:`torch.amp.GradScaler`.
        accum_grad: number of steps in a real step; their gradients are averaged.
        ft_factor: factor of all learning rates, for fine-tuning.
        grad_clip: largest norm of the gradients of this object's parameters, over all ranks; None does not clip.
        grad_norm_type: p of the norm, > 0.
        data_sparsifier, data_scheduler: stepped after every update of the weights, in this order. Attach a
            :class:`~dist_sparse.MaskEnforcer` to ``.optimizer`` to keep pruned weights at zero.
        amp_dtype: ``torch.float16``, or ``torch.bfloat16``, which needs no scaler.
        **sche_conf: arguments of :meth:`sche_init`.

    Attributes:
        config: the arguments, as an immutable :class:`~dist_sparse.optim.OptimConfig`.
        optimizer: the ``torch.optim.Optimizer``. Fused tables, which TorchRec updates inside the backward, are not in
            it: they take the learning rate only, set at the end of the step before and in :meth:`forward_context`.
        scaler: the ``GradScaler``, or None.

    Raises:
        AssertionError: an interval is not an integer >= 1, or ``optim_loss`` is not a string.
        ValueError: another argument is invalid, or does not fit fused tables or the model's other OptimSchedulers.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from dist_sparse import OptimScheduler
        >>> class Steady(OptimScheduler):
        ...     def sche_init(self):
        ...         self.base = self.get_lr()
        ...     def update_lr(self, real_step, epoch_num):
        ...         return self.base
        >>> model = nn.Linear(4, 1)
        >>> scheduler = Steady("SGD", {"lr": 0.1}, model, use_amp=False, accum_grad=2)
        >>> for step_num in range(1, 5):
        ...     with scheduler.forward_context(step_num, epoch_num=1):
        ...         losses = {"loss": model(torch.ones(8, 4)).square().mean()}
        ...     scheduler.step(losses, None, "main", step_num, epoch_num=1)
        >>> scheduler
        Steady(optimizer=SGD, optim_loss=None, updated_modules=None)
    """

    distributed, optim_loss, updated_modules = map(_argument, ("distributed", "optim_loss", "updated_modules"))
    step_per_update, use_amp, accum_grad = map(_argument, ("step_per_update", "use_amp", "accum_grad"))
    ft_factor, grad_clip, grad_norm_type = map(_argument, ("ft_factor", "grad_clip", "grad_norm_type"))

    def __init__(
        self,
        optim_type: str | type[torch.optim.Optimizer],
        optim_conf: Mapping[str, Any] | None,
        model: nn.Module,
        distributed: bool = False,
        optim_loss: str | None = None,
        updated_modules: str | Sequence[str] | None = None,
        step_per_update: int = 1,
        use_amp: bool = True,
        accum_grad: int = 1,
        ft_factor: float = 1.0,
        grad_clip: float | None = 1.0,
        grad_norm_type: float = 2.0,
        *,
        data_sparsifier: BaseDataSparsifier | None = None,
        data_scheduler: BaseDataScheduler | None = None,
        amp_dtype: torch.dtype = torch.float16,
        **sche_conf: Any,
    ) -> None:
        self.config = OptimConfig(
            distributed=distributed,
            optim_loss=optim_loss,
            updated_modules=updated_modules,
            step_per_update=step_per_update,
            use_amp=use_amp,
            accum_grad=accum_grad,
            ft_factor=ft_factor,
            grad_clip=grad_clip,
            grad_norm_type=grad_norm_type,
            amp_dtype=amp_dtype,
        )
        if not isinstance(model, nn.Module):
            raise ValueError(f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module.")
        if optim_conf is not None and not isinstance(optim_conf, Mapping):
            raise ValueError(f"Invalid {optim_conf=}: must be the optimizer's keyword arguments, by name.")
        self.model, self.data_sparsifier, self.data_scheduler = model, data_sparsifier, data_scheduler
        for name, kind in (("data_sparsifier", BaseDataSparsifier), ("data_scheduler", BaseDataScheduler)):
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise ValueError(f"Invalid {name} of type {type(part).__name__}: must be a {kind.__name__}.")
        if data_scheduler is not None and data_scheduler.data_sparsifier is not data_sparsifier:
            raise ValueError("Invalid data_scheduler: it schedules another sparsifier than data_sparsifier.")
        self._wiring = wiring_of(model)
        averages = bool(self._wiring.replicating) or (world_ranks() is None and self.config.accum_grad == 1)
        if distributed and not averages:
            raise ValueError(
                f"Invalid distributed=True: {type(model).__name__} does not average gradients over ranks; wrap the "
                "model in DistributedDataParallel or DistributedModelParallel first."
            )
        self._owned = owned_by(self._wiring, self.config.updated_modules)
        if self._wiring.fused:
            self.config.check_fused(owns_them=bool(self._owned.fused))
        # A group without parameters still has a learning rate: that of fused tables.
        parameters: Any = self._owned.parameters or [{"params": []}]
        self.optimizer = optimizer_class(optim_type)(parameters, **dict(optim_conf or {}))
        self._device = next(iter(model.parameters())).device.type
        self.scaler = torch.amp.GradScaler(self._device) if self.config.scaled else None
        self.sche_init(**sche_conf)
        # Older schedules take no epoch_num.
        self._lr_by_step = list(inspect.signature(self.update_lr).parameters) == ["real_step"]
        self._early: tuple[Tensor, Gradients] | None = None  # taken by another one's step: of which loss, which
        self._last_step: int | None = None
        self._accumulated = 0  # steps of an unfinished real step whose gradients are in .grad
        self._fused_lr: float | None = None
        self._join()
        self.optimizer.zero_grad()  # what is left of an earlier run is not part of the first update
        self._set_fused_lr_ahead(step_num=1, epoch_num=1)

    @abc.abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Take the schedule's own arguments of the constructor; called last in it."""

    @abc.abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate, without ``ft_factor``, of a real step and an epoch, both counted from 1.

        A pure function of its arguments: called at every step that contributes to an update, sometimes repeatedly.
        """

    def extra_repr_fn(self) -> str:
        """Return the schedule's part of ``repr``."""
        return ""

    @contextlib.contextmanager
    def forward_context(self, step_num: int, epoch_num: int | None = None) -> Iterator[None]:
        """Context of a step's forward and losses, for all OptimSchedulers of the model.

        It enables autocast if one of them has ``use_amp``. Under DDP it disables the averaging of gradients, unless an
        update follows this step: DDP decides so in the forward, and ``no_sync`` around the backward has no effect.

        Args:
            step_num: of the step, from 1.
            epoch_num: needed with fused tables, else they have the learning rate of the last epoch in the first step of
                the next one.
        """
        step_num = integer("step_num", step_num, least=1)
        active = [self, *self._others()]
        if epoch_num is not None:
            epoch_num = integer("epoch_num", epoch_num, least=1)
            for peer in active:
                if peer._owned.fused and peer.config.due(step_num):
                    peer._set_fused_lr(peer._lr(step_num, epoch_num))
        amp = next((peer.config.amp_dtype for peer in active if peer.config.use_amp), None)
        with self._unsynchronized(step_num), torch.autocast(self._device, amp) if amp else nullcontext():
            yield

    def step(
        self,
        losses: Mapping[str, Tensor],
        time_func: Clock | None,
        optim_name: str,
        step_num: int,
        epoch_num: int,
        logger: Any = None,
    ) -> None:
        """Run the backward and, at the end of a real step, the update. Collective under DDP and with sharded gradients.

        Several OptimSchedulers of a model can be stepped one after the other with the losses of one forward. Delete one
        that is no longer stepped, or its gradients are still computed.

        Args:
            losses: of this step's forward, by name. They are not changed.
            time_func: returns a context that times its body, from ``["loss_backward_time", optim_name]`` and
                ``["optim_time", optim_name]``; None for no clock.
            optim_name: for the clock.
            step_num: counts from 1, over epochs.
            epoch_num: counts from 1.
            logger: its ``info`` reports an update that is skipped, on all ranks, because the norm is not finite.

        Raises:
            AssertionError: there is no loss named "loss". KeyError: there is none named ``optim_loss``.
            ValueError: a number, the loss or the learning rate is invalid, or the model's OptimSchedulers can't share
                this forward. In all three cases nothing has changed.

        If the backward or the update itself fails (out of memory, say), the gradients of its real step are dropped.
        """
        step_num, epoch_num = integer("step_num", step_num, least=1), integer("epoch_num", epoch_num, least=1)
        clock = time_func or (lambda names: nullcontext())
        config = self.config
        with clock(["loss_backward_time", optim_name]):
            if config.due(step_num):
                self._take_gradients(losses, step_num, epoch_num)
                self._accumulated = 0 if config.updates(step_num) else self._accumulated + 1
        with clock(["optim_time", optim_name]):
            if config.updates(step_num):
                rule: dict[str, Any] = {"grad_clip": config.grad_clip, "norm_type": config.grad_norm_type}
                norm, updated = update_weights(self.optimizer, self.scaler, self._owned, **rule)
                if not math.isfinite(norm) and logger is not None:
                    real_step = config.real_step(step_num)
                    logger.info(f"Real step {real_step}: the norm of the gradients is {norm}; no update.")
                for part in self._sparsity.values() if updated else ():
                    part.step()
        self._set_fused_lr_ahead(step_num + 1, epoch_num)

    def get_lr(self) -> float:
        """Return the learning rate of the last step, of the first parameter group."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the scaler (or None), and those of the sparsifier and its scheduler
        where there are any. It can be loaded with ``torch.load(weights_only=True)``.

        Step numbers are the caller's, and the state of fused optimizers is the model's.
        """
        if self._accumulated:
            warnings.warn(
                f"The state is of the middle of a real step: the gradients of {self._accumulated} of "
                f"{self.config.accum_grad} steps are not in it. Save where step_num is a multiple of accum_grad.",
                stacklevel=2,
            )
        scaler = None if self.scaler is None else self.scaler.state_dict()
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "scaler": scaler}
        if self._owned.fused:
            state["fused_lr"] = self._fused_lr
        return {**state, **{name: part.state_dict() for name, part in self._sparsity.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Collective if there is a sparsifier. A state of a run with AMP can be loaded into
        one without, and the other way round; the scale keeps its initial value then.

        Raises:
            ValueError: a part is missing or does not fit, or ranks load different steps. With a sparsifier it is raised
                on every rank, and nothing has changed on any; without one, only on this rank, which has not changed.
        """
        group = group_over(world_ranks() if self._sparsity else None)
        with group.agreeing("load_state_dict() of an OptimScheduler") as facts:
            try:
                facts.update(self._check_state(state_dict))
            except ValueError:
                raise
            except Exception as fault:  # torch has another one for each way in which a state does not fit
                raise ValueError(f"The state does not fit: {type(fault).__name__}: {fault}.") from fault
        # The other two check on all ranks, the sparsifier as a part of its load. From there on nothing can fail.
        schedule, commit = self.data_scheduler, None
        if isinstance(schedule, ReadyDataScheduler):
            _, commit = schedule.prepare_load(state_dict["data_scheduler"])
        if self.data_sparsifier is not None:
            self.data_sparsifier.load_state_dict(state_dict["data_sparsifier"])
        if commit is not None:
            commit()
        elif schedule is not None:
            schedule.load_state_dict(state_dict["data_scheduler"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.scaler is not None and state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])
        if (lr := state_dict.get("fused_lr")) is not None:
            self._set_fused_lr(lr)
        self._last_step = None if self._last_step is None else 0  # step numbers may start again where they were then
        self._drop_gradients()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: construct a new one for the copy of its model, and "
            "load state_dict() into it."
        )

    def __repr__(self) -> str:
        config, extra = self.config, self.extra_repr_fn()
        parts = f"optim_loss={config.optim_loss}, updated_modules={config.updated_modules}{extra and f', {extra}'}"
        return f"{type(self).__name__}(optimizer={type(self.optimizer).__name__}, {parts})"

    def _join(self) -> None:
        """Become one of the model's OptimSchedulers. One for the same parameters and loss, such as that of a notebook
        cell which runs again, is replaced: steps of others no longer compute gradients for it."""
        self._peers = _peers.setdefault(self._wiring.modules[""], WeakValueDictionary())
        mine = {*self._owned.parameters, *self._owned.fused}
        same_loss = [peer for peer in self._others() if peer.config.loss_name == self.config.loss_name]
        replaced = [peer for peer in same_loss if mine.issuperset([*peer._owned.parameters, *peer._owned.fused])]
        for peer in self._others():
            if peer in replaced:
                continue
            for name, part in self._sparsity.items():
                if part is getattr(peer, name):
                    raise ValueError(f"Invalid {name}: another OptimScheduler of the model steps it at each update.")
            if self.config.use_amp and peer.config.use_amp and self.config.amp_dtype != peer.config.amp_dtype:
                raise ValueError(
                    f"Invalid amp_dtype={self.config.amp_dtype}: another OptimScheduler of the model has "
                    f"{peer.config.amp_dtype}, and they share its forward."
                )
        for peer in replaced:
            del self._peers[id(peer)]
        self._peers[id(self)] = self

    def _others(self) -> list[OptimScheduler]:
        """The other OptimSchedulers of the model, but for those that were replaced."""
        return [peer for peer in self._peers.values() if peer is not self]

    @property
    def _sparsity(self) -> dict[str, Any]:
        parts = {"data_sparsifier": self.data_sparsifier, "data_scheduler": self.data_scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def _claim(self, losses: Mapping[str, Tensor], step_num: int) -> Claim:
        loss, config = self.config.loss_of(losses), self.config
        return Claim(self._owned, loss, config.accum_grad, self.scaler, reduced=config.updates(step_num))

    def _take_gradients(self, losses: Mapping[str, Tensor], step_num: int, epoch_num: int) -> None:
        """Set the gradients of this step, added to those of the micro-steps before, and the learning rate."""
        claim, lr = self._claim(losses, step_num), self._lr(step_num, epoch_num)
        early = self._early
        mine = early[1] if early and early[0] is claim.loss else self._run_backward(claim, losses, step_num)
        for parameter, grad in zip(self._owned.parameters, mine, strict=True):
            parameter.grad = grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._early, self._last_step = None, step_num

    def _run_backward(self, claim: Claim, losses: Mapping[str, Tensor], step_num: int) -> Gradients:
        """Take the gradients of this and of all other OptimSchedulers that are still to be stepped at ``step_num``."""
        others = [
            peer
            for peer in self._others()
            if peer.config.due(step_num) and peer.config.loss_name in losses and peer._last_step != step_num
        ]
        claims = [claim, *(peer._claim(losses, step_num) for peer in others)]
        backward = Backward(self._wiring, claims)
        if any(peer._owned.fused and peer not in others for peer in self._others()):
            raise ValueError(
                "Fused tables are updated inside every backward, but the OptimScheduler that owns them is not due at "
                f"{step_num=} or does not use this loss. Give all of them the same losses and step_per_update, and "
                "delete those that are no longer stepped."
            )
        try:
            with self._unsynchronized(step_num):
                mine, *theirs = backward.run()
        except BaseException:  # out of memory, say: some layers have their gradients, others not
            for peer in (self, *others):
                peer._drop_gradients()
            raise
        for peer, its, gradients in zip(others, claims[1:], theirs, strict=True):
            peer._early = its.loss, gradients
        return mine

    def _drop_gradients(self) -> None:
        """Drop the gradients of an unfinished real step."""
        self.optimizer.zero_grad()
        self._early, self._accumulated = None, 0

    def _lr(self, step_num: int, epoch_num: int) -> float:
        """The learning rate of a step, a finite number >= 0: any other would turn weights into NaN."""
        arguments = {"real_step": self.config.real_step(step_num), "epoch_num": epoch_num}
        if self._lr_by_step:
            del arguments["epoch_num"]
        found: Any = self.update_lr(**arguments)
        lr = number("learning rate", found.item() if isinstance(found, Tensor) else found, least=0)
        return float(number("learning rate times ft_factor", lr * self.config.ft_factor))

    def _set_fused_lr_ahead(self, step_num: int, epoch_num: int) -> None:
        """Set the learning rate of fused tables for the next forward, whose kernels read it."""
        if self._owned.fused and self.config.due(step_num):
            with contextlib.suppress(Exception):  # the step may never come; if it does, it raises this itself
                self._set_fused_lr(self._lr(step_num, epoch_num))

    def _set_fused_lr(self, lr: float) -> None:
        self._fused_lr = lr  # a rank without a table has no optimizer that knows it
        self._owned.set_fused_lr(lr)

    def _unsynchronized(self, step_num: int) -> AbstractContextManager[Any]:
        """``no_sync()`` of all that averages gradients, unless an update of an OptimScheduler follows this step."""
        stack = ExitStack()
        if self.config.distributed and not any(peer.config.updates(step_num) for peer in (self, *self._others())):
            for module in self._wiring.replicating:
                # DDP with a static graph learns it in the first backward, which must average.
                if self._last_step is not None or not getattr(module, "static_graph", False):
                    stack.enter_context(module.no_sync())
        return stack

    def _check_state(self, saved: Any) -> dict[str, Any]:
        """Load a state into copies of the parts, which have the same tensors but no common state. Return what must be
        equal on all ranks; raise whatever torch raises if it does not fit."""
        parts = self._sparsity
        if not isinstance(saved, Mapping):
            raise ValueError(f"Invalid state of type {type(saved).__name__}: must be a result of state_dict().")
        if missing := [name for name in ("optimizer", *parts) if name not in saved]:
            raise ValueError(f"The state lacks {missing}; it has {sorted(saved)}.")
        if unknown := [name for name in ("data_sparsifier", "data_scheduler") if name in saved and name not in parts]:
            raise ValueError(f"The state has {unknown}, which this OptimScheduler was constructed without.")
        optimizer = copy.copy(self.optimizer)
        optimizer.load_state_dict(saved["optimizer"])
        check_optimizer(optimizer, self.optimizer)
        facts: dict[str, Any] = {"learning rates": [group["lr"] for group in optimizer.param_groups]}
        if self.scaler is not None and saved.get("scaler"):  # None or {}: of a run without AMP
            scaler = torch.amp.GradScaler(self._device)
            scaler.load_state_dict(saved["scaler"])
            if not 0 < (scale := scaler.get_scale()) < math.inf:
                raise ValueError(f"Invalid {scale=} of the scaler: must be a finite number > 0.")
            facts["scale of the scaler"] = scale
        if self.data_scheduler is not None and not isinstance(self.data_scheduler, ReadyDataScheduler):
            copy.copy(self.data_scheduler).load_state_dict(saved["data_scheduler"])
        return facts
