"""Optimizer, gradient accumulation, AMP, clipping, learning rate and sparsity in one step.

:class:`OptimScheduler` has the interface of SpeeChain's class of that name. Each ``step`` runs up
to three phases:

1. Gradients (``_accumulate``). If several OptimSchedulers share a model, the one that is stepped
   first computes the gradients of all, before any weight changes. The others find theirs in
   ``_pending`` and use them in their own ``step``.
2. Update (``_update``), at the end of a real step, which is ``accum_grad`` steps: unscale, clip,
   step; or nothing, if the norm is not finite.
3. Sparsity, after an update: the data sparsifier steps, then its scheduler.

:mod:`dist_sparse.extras.optim.gradients` has the arithmetic of the first two. The OptimSchedulers
of one model know each other as *peers*.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from dist_sparse.checks import integer, name_list, number, plain
from dist_sparse.extras.optim.gradients import (
    NO_SCALER,
    Claim,
    Gradients,
    check_claims,
    check_scaler,
    optimizer_class,
    parameters_of,
    refuse_other_optimizer,
    take_gradients,
    update_weights,
    wiring_of,
)
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.schedulers import ReadyDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

# The OptimSchedulers of each model by id, in the order of construction, the same on every rank.
# Weak: a deleted OptimScheduler takes no part, and neither map keeps a model alive.
_peers: WeakKeyDictionary[nn.Module, WeakValueDictionary[int, OptimScheduler]] = WeakKeyDictionary()

_WHY_FUSED = (
    "every backward updates the model's fused tables, before gradients can be scaled or"
    " accumulated. Use amp_dtype=torch.bfloat16, or larger batches."
)

# Attributes that the constructor reads once.
_FIXED = ("model", "updated_modules", "use_amp")


class OptimScheduler(abc.ABC):
    """Train a model, or some of its modules, from losses: backward, gradient accumulation, AMP,
    clipping, learning rate, optimizer and sparsity.

    Subclasses define :meth:`sche_init` and :meth:`update_lr`. Construct it on every rank, in the
    same order.

    Args:
        optim_type: a name in ``torch.optim``, a dotted path, or a class.
        optim_conf: its keyword arguments.
        model: plain, DDP or DistributedModelParallel.
        distributed: the model averages gradients over ranks (DDP); do so once per real step.
        optim_loss: name of the loss to differentiate; None is ``"loss"``.
        updated_modules: one or several modules, by path from the user's own module; None is the
            whole model.
        step_per_update: update once in this many real steps; the others are not differentiated.
        use_amp: mixed precision. With float16 a :class:`torch.amp.GradScaler` scales the loss.
        accum_grad: number of steps in a real step; their gradients are averaged.
        ft_factor: factor of all learning rates, for fine-tuning.
        grad_clip: largest norm of this object's gradients, over all ranks; None does not clip.
        grad_norm_type: p of the norm, > 0.
        data_sparsifier: stepped after every update of the weights. A
            :class:`~dist_sparse.MaskEnforcer` on ``.optimizer`` keeps pruned weights at zero.
        data_scheduler: stepped after the sparsifier.
        amp_dtype: ``torch.float16``, or ``torch.bfloat16``, which needs no scaler.
        **sche_conf: arguments of :meth:`sche_init`.

    Attributes:
        optimizer: the ``torch.optim.Optimizer``. Fused tables, which TorchRec updates inside the
            backward, are not in it: they keep their own optimizer and its learning rate.
        scaler: the ``GradScaler``, or None. Another one may be assigned between two real steps.

    ``optimizer``, ``optim_loss``, the intervals, ``ft_factor``, ``grad_clip`` and
    ``grad_norm_type`` are read at each step, so an assigned value is used from then on. ``model``,
    ``updated_modules`` and ``use_amp`` are read once: assigning another value raises an
    AttributeError.

    Raises:
        AssertionError: an interval is not an integer >= 1, or ``optim_loss`` is not a string.
        ValueError: another argument is invalid, or does not fit fused tables or the model's other
            OptimSchedulers; or the model has sharded tables without a fused optimizer.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from dist_sparse.extras.optim import OptimScheduler
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
        self.step_per_update = _interval("step_per_update", step_per_update)
        self.accum_grad = _interval("accum_grad", accum_grad)
        if not isinstance(optim_loss, str | None):
            raise AssertionError(f"Invalid {optim_loss=}: must be the name of a loss, or None.")
        self.model = model
        self.distributed = distributed
        self.use_amp = use_amp
        self.optim_loss = optim_loss
        if updated_modules is not None:
            updated_modules = list(name_list("updated_modules", updated_modules))
        self.updated_modules = updated_modules
        self.ft_factor = float(number("ft_factor", ft_factor, least=0))
        self.grad_clip = _positive("grad_clip", math.inf if grad_clip is None else grad_clip)
        self.grad_norm_type = _positive("grad_norm_type", grad_norm_type)
        self.data_sparsifier = data_sparsifier
        self.data_scheduler = data_scheduler
        flags = {type(use_amp), type(distributed)}
        if flags != {bool}:
            raise ValueError("use_amp and distributed must be True or False.")
        # The dtype of the forward under autocast.
        self._autocast = amp_dtype if use_amp else None
        # Read once: the model must not be wrapped or sharded after this.
        self._wiring = wiring_of(model)
        owned = parameters_of(self._wiring, updated_modules)
        # Tables may stay on the CPU: the parameters that are elsewhere decide.
        devices = {parameter.device.type for parameter in model.parameters()}
        self._device = min(devices - {"cpu"}, default="cpu")
        # A loss and its gradients, computed by a peer's step; this one's has yet to use them.
        self._pending: tuple[Tensor | None, Gradients] = None, {}
        # Whether a backward has run.
        self._has_run = False
        # Number of steps whose gradients are in .grad and wait for the update.
        self._accumulated = 0
        # Float16 needs a scale, bfloat16 has the range of float32.
        scaled = self._autocast == torch.float16
        self._scaler = torch.amp.GradScaler(self._device) if scaled else None
        self._refuse_unfit(amp_dtype)
        self.optimizer = optimizer_class(optim_type)(owned, **dict(optim_conf or {}))
        self.sche_init(**sche_conf)
        self._join_peers()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None:
            check_scaler(scaler)
            if scaler.is_enabled() and self._wiring.fused:
                raise ValueError(f"Invalid scaler: {_WHY_FUSED}")
        if self._accumulated or self._pending[1]:
            raise ValueError(
                "Invalid scaler: there are gradients at the scale of the old one. Assign it after"
                " an update, where step_num is a multiple of accum_grad."
            )
        self._scaler = scaler

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIXED and vars(self).get(name, value) is not value:
            raise AttributeError(
                f"{name} of {type(self).__name__} is read once, by the constructor: construct a new"
                " one, and load state_dict() into it."
            )
        super().__setattr__(name, value)

    @abc.abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Set up the schedule from the constructor's ``sche_conf``; :attr:`optimizer` is there."""

    @abc.abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate, without ``ft_factor``, of a real step and an epoch, from 1.

        It must be a pure function of its arguments: it is called at every step that contributes to
        an update.
        """

    def extra_repr_fn(self) -> str:
        """Return the schedule's part of ``repr``."""
        return ""

    @contextmanager
    def forward_context(self, step_num: int, epoch_num: int = 1) -> Iterator[None]:
        """Run a step's forward and losses in this context, for all OptimSchedulers of the model.

        It enables autocast if an OptimScheduler has ``use_amp``. Under DDP it disables the
        averaging of gradients, unless an update follows this step: DDP decides in the forward, so
        ``no_sync`` around the backward alone has no effect.

        Args:
            step_num: of the step, from 1.
            epoch_num: of the step, from 1; may be left out.
        """
        step_num = integer("step_num", step_num, least=1)
        integer("epoch_num", epoch_num, least=1)
        # At most one: _join_peers() has compared them. With none, an outer autocast stays on.
        dtypes = {peer._autocast for peer in self._sharing()} - {None}
        autocast = torch.autocast(self._device, dtypes.pop()) if dtypes else nullcontext()
        with self._unsynchronized(step_num), autocast:
            yield

    def step(
        self,
        losses: Mapping[str, Tensor],
        time_func: Callable[[list[str]], AbstractContextManager[Any]] | None,
        optim_name: str,
        step_num: int,
        epoch_num: int,
        logger: Any = None,
    ) -> None:
        """Run the backward and, at the end of a real step, the update. Collective under DDP and
        with sharded tables.

        Several OptimSchedulers of a model can be stepped one after the other with the losses of one
        forward. Delete one that is no longer stepped; otherwise its gradients are still computed.

        Args:
            losses: of this step's forward, by name. They are not changed.
            time_func: returns a context that times its body, from ``["loss_backward_time",
                optim_name]`` and ``["optim_time", optim_name]``; None for no clock.
            optim_name: for the clock.
            step_num: counts from 1, over epochs.
            epoch_num: counts from 1.
            logger: its ``info`` reports updates that are skipped, on all ranks, because the norm is
                not finite.

        Raises:
            AssertionError: there is no loss named "loss".
            KeyError: there is none named ``optim_loss``.
            ValueError: a number or the learning rate is invalid, or the model's OptimSchedulers
                can't share this forward. In all three cases nothing has changed.

        If the backward or the update itself fails, for example out of memory, the gradients of the
        real step are dropped.
        """
        step_num = integer("step_num", step_num, least=1)
        epoch_num = integer("epoch_num", epoch_num, least=1)
        clock = time_func or nullcontext
        # Both clocks run at every step, so that each has an entry.
        with clock(["loss_backward_time", optim_name]):
            if self._contributes(step_num):
                # Phase 1.
                self._accumulate(losses, step_num, epoch_num)
        with clock(["optim_time", optim_name]):
            if self._updates(step_num):
                # Phases 2 and 3.
                self._update(step_num, logger)

    def get_lr(self) -> float:
        """Return the learning rate of the last step, of the first parameter group."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer and the scaler (or None), and of the sparsifier and
        its scheduler where there are any. ``torch.load(weights_only=True)`` can load it.

        It has no gradients: save where ``step_num`` is a multiple of ``accum_grad``. The caller
        saves step numbers, and the model the state of fused optimizers.
        """
        states = {name: part.state_dict() for name, part in self._sparsity.items()}
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scaler": scaler, **states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Collective if there is a sparsifier. A state of a run with
        AMP can be loaded into one without, and vice versa; the scale keeps its value then.

        Raises:
            ValueError: a part is missing or does not fit, or ranks load different steps. With a
                sparsifier it is raised on every rank, and nothing has changed on any; without one,
                only on this rank, which has not changed.
        """
        # Without a sparsifier a load is local, like torch's own.
        group = group_over(world_ranks() if self._sparsity else None)
        action = "load_state_dict() of an OptimScheduler"
        with group.agreeing(action) as facts:
            try:
                facts.update(self._check_state(state_dict))
            except ValueError:
                raise
            except Exception as error:
                # torch raises many kinds of errors for a state that does not fit.
                text = f"The state does not fit: {type(error).__name__}: {error}."
                raise ValueError(text) from error
        # Nothing may change until all parts are checked on all ranks.
        commit: Callable[[], object] | None = None
        scheduler = self.data_scheduler
        if isinstance(scheduler, ReadyDataScheduler):
            commit = scheduler.prepare_load(state_dict["data_scheduler"])
        if self.data_sparsifier is not None:
            # Over the world: where no table is held by all ranks, an error of one would not reach
            # the others.
            with group.agreeing(action):
                commit_masks = self.data_sparsifier.prepare_load(state_dict["data_sparsifier"])
            commit_masks()
        if commit is not None:
            commit()
        elif scheduler is not None:
            scheduler.load_state_dict(state_dict["data_scheduler"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        # A scaler that is disabled ignores the state of one that is not.
        if state_dict.get("scaler"):
            self._scaling.load_state_dict(state_dict["scaler"])
        self._drop_gradients()

    def _check_state(self, saved: Any) -> dict[str, Any]:
        """Load a state into shallow copies of the parts; return the facts that must be equal on all
        ranks. Local; changes nothing.

        Raises:
            ValueError: a part is missing or does not fit; torch has other errors for the same
                reason.
        """
        missing = sorted({"optimizer", *self._sparsity}.difference(saved))
        extra = {"data_sparsifier", "data_scheduler"} - self._sparsity.keys()
        unknown = sorted(saved.keys() & extra, reverse=True)
        if missing:
            raise ValueError(f"The state lacks {missing}; it has {sorted(saved)}.")
        if unknown:
            raise ValueError(
                f"The state has {unknown}, which this OptimScheduler was constructed without."
            )
        # Optimizer.load_state_dict() assigns new groups and state: a shallow copy is enough.
        loaded = copy.copy(self.optimizer)
        loaded.load_state_dict(saved["optimizer"])
        # Optimizers of other packages have state of any names and shapes.
        if type(self.optimizer).__module__.startswith("torch.optim."):
            refuse_other_optimizer(self.optimizer, loaded)
        facts: dict[str, Any] = {"learning rates": [group["lr"] for group in loaded.param_groups]}
        # A run without AMP has saved None or {}.
        if saved.get("scaler"):
            # The device makes no difference to a state.
            scaler = torch.amp.GradScaler("cpu")
            scaler.load_state_dict(saved["scaler"])
            facts["scale of the scaler"] = number("scale", _positive("scale", scaler.get_scale()))
        schedule = self.data_scheduler
        if not isinstance(schedule, ReadyDataScheduler | None):
            # A user's class has no prepare_load(): try the load on a copy.
            copy.copy(schedule).load_state_dict(saved["data_scheduler"])
        return facts

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: "
            "construct a new one for the copy of its model, and load state_dict() into it."
        )

    def __repr__(self) -> str:
        shown = f"optim_loss={self.optim_loss}, updated_modules={self.updated_modules}"
        parts = [f"optimizer={type(self.optimizer).__name__}", shown, self.extra_repr_fn()]
        return f"{type(self).__name__}({', '.join(filter(None, parts))})"

    @property
    def _scaling(self) -> torch.amp.GradScaler:
        """The scaler in use."""
        return NO_SCALER if self._scaler is None else self._scaler

    @property
    def _loss_name(self) -> str:
        return self.optim_loss or "loss"

    @property
    def _owned(self) -> list[nn.Parameter]:
        """The parameters that are updated; groups may be added to the optimizer at any time."""
        return list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))

    @property
    def _sparsity(self) -> dict[str, Any]:
        parts = {"data_sparsifier": self.data_sparsifier, "data_scheduler": self.data_scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def _refuse_unfit(self, amp_dtype: torch.dtype) -> None:
        """Raise a ValueError if arguments don't fit each other or the model."""
        scheduler = self.data_scheduler
        # One process without accumulation has nothing to average: a plain model is fine.
        averages = self.distributed and (world_ranks() is not None or self.accum_grad > 1)
        # The gradients of fused tables are never materialized.
        fused = self._wiring.fused
        if amp_dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Invalid {amp_dtype=}: must be torch.float16 or torch.bfloat16.")
        # A scheduler of another class may have no such attribute.
        scheduled = getattr(scheduler, "data_sparsifier", scheduler)
        if scheduler is not None and scheduled is not self.data_sparsifier:
            raise ValueError(
                "Invalid data_scheduler: it schedules another sparsifier than data_sparsifier."
            )
        if averages and not self._wiring.replicating:
            raise ValueError(
                f"Invalid distributed=True: {type(self.model).__name__} does not average gradients"
                " over ranks; wrap it in DistributedDataParallel or DistributedModelParallel first."
            )
        if fused and self._scaling.is_enabled():
            raise ValueError(f"Invalid use_amp=True with float16: {_WHY_FUSED}")
        if fused and self.accum_grad > 1:
            raise ValueError(f"Invalid accum_grad={self.accum_grad}: {_WHY_FUSED}")

    # Which phases a step runs.

    def _real_step(self, step_num: int) -> int:
        """Return the number of the real step, from 1, to which a micro-step belongs."""
        return (step_num - 1) // self.accum_grad + 1

    def _contributes(self, step_num: int) -> bool:
        """Whether the gradients of a micro-step are part of an update."""
        return self._real_step(step_num) % self.step_per_update == 0

    def _updates(self, step_num: int) -> bool:
        """Whether an update follows a micro-step: it is the last of its real step."""
        return self._contributes(step_num) and step_num % self.accum_grad == 0

    # Phase 1: gradients, for all OptimSchedulers that share the losses.

    def _accumulate(self, losses: Mapping[str, Tensor], step_num: int, epoch_num: int) -> None:
        """Set the learning rate, and add this step's gradients to ``.grad``."""
        if self.optim_loss is None and "loss" not in losses:
            raise AssertionError(
                f"There is no loss named 'loss' among {list(losses)}: pass one, or set optim_loss."
            )
        # Raises a KeyError with the name of a missing loss.
        loss = losses[self._loss_name]
        returned = self.update_lr(real_step=self._real_step(step_num), epoch_num=epoch_num)
        # A rate that is not finite would turn weights into NaN.
        lr = number("learning rate", plain(returned), least=0)
        lr = float(number("learning rate times ft_factor", lr * self.ft_factor))
        # The sum includes this object. If it is larger than its own count, a peer has unfinished
        # gradients in shared parameters.
        accumulated = sum(peer._accumulated for peer in self._overlapping())
        if accumulated > self._accumulated:
            raise ValueError(
                "Another OptimScheduler has accumulated gradients in parameters that this one"
                " updates too. Finish its real step first, or delete it."
            )
        # If a peer has stepped with this loss before, the gradients are there.
        if self._pending[0] is not loss:
            self._run_backward(losses, step_num)
        for parameter, grad in self._pending[1].items():
            parameter.grad = grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Used up: gradients count once.
        self._pending = None, {}
        self._has_run = True
        self._accumulated += 1

    def _run_backward(self, losses: Mapping[str, Tensor], step_num: int) -> None:
        """Compute the gradients of all OptimSchedulers that use these losses at this step."""
        claims = {}
        for peer in self._sharing():
            if peer._contributes(step_num) and peer._loss_name in losses:
                loss = losses[peer._loss_name]
                claims[peer] = Claim(peer._owned, loss, peer.accum_grad, peer._scaling)
        check_claims(self._wiring, [*claims.values()])
        try:
            with self._unsynchronized(step_num):
                gradients = take_gradients(self._wiring, [*claims.values()])
        except BaseException:
            # A backward that failed halfway leaves gradients on some layers only.
            for peer in claims:
                peer._drop_gradients()
            raise
        # Peers use theirs when they are stepped with the same loss.
        for peer, of_peer in zip(claims, gradients, strict=True):
            peer._pending = claims[peer].loss, of_peer

    def _drop_gradients(self) -> None:
        """Drop the gradients of an unfinished real step."""
        self.optimizer.zero_grad()
        self._pending = None, {}
        self._accumulated = 0

    # Phases 2 and 3: weights, then masks.

    def _update(self, step_num: int, logger: Any) -> None:
        """Update the weights, then the masks."""
        self._accumulated = 0
        norm, updated = update_weights(
            self.optimizer,
            self._scaling,
            self._owned,
            grad_clip=self.grad_clip,
            norm_type=self.grad_norm_type,
        )
        if not math.isfinite(norm) and logger is not None:
            real_step = self._real_step(step_num)
            logger.info(f"Real step {real_step}: the norm of the gradients is {norm}; no update.")
        if updated:
            for part in self._sparsity.values():
                part.step()

    # The model's other OptimSchedulers.

    def _join_peers(self) -> None:
        """Become one of the model's OptimSchedulers."""
        self._peers = _peers.setdefault(self._wiring.modules[""], WeakValueDictionary())
        for peer in self._sharing()[1:]:
            if len({self._autocast, peer._autocast} - {None}) > 1:
                raise ValueError(
                    f"Invalid amp_dtype={self._autocast}: another OptimScheduler of the model has"
                    f" {peer._autocast}, and they share its forward."
                )
            for name, part in self._sparsity.items():
                if part is getattr(peer, name):
                    raise ValueError(
                        f"Invalid {name}: another OptimScheduler of the model steps it at each"
                        " update."
                    )
        self._peers[id(self)] = self
        # In a notebook a cell may run again: gradients of its last run must not be in this update.
        for peer in self._overlapping():
            peer._drop_gradients()

    def _sharing(self) -> list[OptimScheduler]:
        """Return this OptimScheduler, then the model's others that share its forward, newest first.

        No two of them update the same parameter: a newer one, from a notebook cell that runs again
        for example, replaces an older one that still has references.
        """
        sharing, owned = [self], set(self._owned)
        for peer in reversed(list(self._peers.values())):
            if owned.isdisjoint(peer._owned):
                sharing.append(peer)
                owned.update(peer._owned)
        return sharing

    def _overlapping(self) -> list[OptimScheduler]:
        """Return the model's OptimSchedulers that update some of the same parameters, this one
        included."""
        owned = set(self._owned)
        return [peer for peer in self._peers.values() if not owned.isdisjoint(peer._owned)]

    def _unsynchronized(self, step_num: int) -> AbstractContextManager[Any]:
        """Return a context that turns the averaging of gradients off, unless an update of any
        sharing OptimScheduler follows this step."""
        stack = ExitStack()
        if self.distributed and not any(peer._updates(step_num) for peer in self._sharing()):
            for module in self._wiring.replicating:
                # DDP with static_graph learns the graph in the first backward, which must average.
                if self._has_run or not getattr(module, "static_graph", False):
                    stack.enter_context(module.no_sync())
        return stack


def _interval(name: str, value: object) -> int:
    try:
        return integer(name, value, least=1)
    except ValueError as error:
        # As SpeeChain's constructor does.
        raise AssertionError(str(error)) from None


def _positive(name: str, value: Any) -> float:
    """Return a number > 0, or infinity."""
    checked = value if value == math.inf else number(name, value)
    if checked <= 0:
        raise ValueError(f"Invalid {name}={value!r}: must be a number > 0.")
    return float(checked)


# Learning rate schedules of SpeeChain: Noam and exponential decay.


class Noamlr(OptimScheduler):
    """Linear warm-up, then decay with the inverse square root of the real step.

    ``lr(t) = top * min(t ** -0.5, t * warmup_steps ** -1.5)``, where ``top`` is
    ``d_model ** -0.5``, or without ``d_model`` ``optim_conf["lr"] * warmup_steps ** 0.5``, so that
    the peak at ``t = warmup_steps`` is the optimizer's own learning rate. Source: Vaswani et al.,
    Attention Is All You Need, 2017, equation 3.

    Args:
        d_model: width of the transformer; None takes the peak from the optimizer.
        warmup_steps: real steps until the peak, >= 1.

    Example::

        >>> from torch import nn
        >>> from dist_sparse.extras.optim import Noamlr
        >>> model = nn.Linear(2, 1)
        >>> scheduler = Noamlr("Adam", {"lr": 0.01}, model, use_amp=False, warmup_steps=100)
        >>> [round(scheduler.update_lr(real_step, 1), 4) for real_step in (1, 50, 100, 400)]
        [0.0001, 0.005, 0.01, 0.005]
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: int = 4000) -> None:
        """Set up the schedule; see the class.

        Raises:
            ValueError: ``warmup_steps`` or ``d_model`` is not a finite number >= 1.
        """
        self.warmup_steps = number("warmup_steps", warmup_steps, least=1)
        self.d_model = d_model
        if d_model is None:
            self.init_lr = float(self.get_lr() * self.warmup_steps**0.5)
        else:
            self.init_lr = float(number("d_model", d_model, least=1) ** -0.5)

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate of a real step, counted from 1."""
        return float(self.init_lr * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

    def extra_repr_fn(self) -> str:
        """Return the schedule's arguments, for ``repr``."""
        return f"d_model={self.d_model}, warmup_steps={self.warmup_steps}"


class ExponentDecayLr(OptimScheduler):
    """Exponential decay by epochs: ``lr = optim_conf["lr"] * decay_factor ** (epoch_num - 1)``.

    Args:
        decay_factor: factor between the learning rates of consecutive epochs, > 0.

    Example::

        >>> from torch import nn
        >>> from dist_sparse.extras.optim import ExponentDecayLr
        >>> model = nn.Linear(2, 1)
        >>> scheduler = ExponentDecayLr("SGD", {"lr": 0.8}, model, use_amp=False, decay_factor=0.5)
        >>> [scheduler.update_lr(real_step=1, epoch_num=epoch) for epoch in (1, 2, 3)]
        [0.8, 0.4, 0.2]
    """

    def sche_init(self, decay_factor: float = 0.999) -> None:
        """Set up the schedule; see the class.

        Raises:
            ValueError: ``decay_factor`` is not a finite number > 0.
        """
        self.decay_factor = number("decay_factor", _positive("decay_factor", decay_factor))
        self.base_lr = self.get_lr()

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate of an epoch, counted from 1."""
        return float(self.base_lr * self.decay_factor ** (epoch_num - 1))

    def extra_repr_fn(self) -> str:
        """Return the schedule's argument, for ``repr``."""
        return f"decay_factor={self.decay_factor}"
