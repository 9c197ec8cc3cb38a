"""How do optimizer, gradient accumulation, mixed precision, clipping and learning rate go together in one step?

An :class:`OptimScheduler` is all of them, after SpeeChain's class of that name, and sparsity as well where that is
wanted. It knows DDP (micro-steps that are only accumulated are not sent), TorchRec (fused tables take their learning
rate from it), and others of its kind over other parts of the same model.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.optimizers import optimizer_class
from dist_sparse.optim.backward import Peers
from dist_sparse.optim.checks import (
    check_alone,
    check_arguments,
    check_averaging,
    check_fused,
    check_sparsity,
    count,
    learning_rate,
    lr_arguments,
)
from dist_sparse.optim.ownership import gathers, owned_by, replicating
from dist_sparse.optim.peers import take_gradients, takes_over
from dist_sparse.optim.state import load_states, states
from dist_sparse.optim.update import update
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["OptimScheduler"]

Clock = Callable[[list[str]], AbstractContextManager[Any]]


class OptimScheduler(abc.ABC):
    """Optimizer, gradient accumulation, AMP, clipping and learning rate of a model, or of some of its modules.

    Subclasses define :meth:`sche_init` and :meth:`update_lr`. A training loop with it::

        for step_num, batch in enumerate(batches, start=1):
            with scheduler.forward_context(step_num, epoch_num):
                losses = {"loss": criterion(model(batch))}
            scheduler.step(losses, None, "main", step_num, epoch_num)

    Args:
        optim_type: a name in ``torch.optim``, a dotted path, or a class.
        optim_conf: its keyword arguments.
        model: plain, DDP or DistributedModelParallel.
        distributed: gradients are averaged over ranks by the model (DDP), which is to happen once per real step only.
        optim_loss: which of the losses; None is the one named ``"loss"``.
        updated_modules: a module or several, by path from the user's own module; None is the whole model.
        step_per_update: an update at every so many real steps only; at others the loss is not even differentiated.
        use_amp: mixed precision: with float16 the loss is scaled by a :class:`torch.amp.GradScaler`.
        accum_grad: how many steps make a real step; their gradients are averaged.
        ft_factor: scales all learning rates.
        grad_clip: the longest that the gradient of this object's parameters may be; None does not clip. The norm is
            taken over all ranks, each piece counted once.
        grad_norm_type: p of the norm, > 0.
        data_sparsifier, data_scheduler: stepped after every update of the weights, in this order. Attach a
            :class:`~dist_sparse.MaskEnforcer` to ``.optimizer`` to keep removed weights at zero.
        amp_dtype: ``torch.float16``, or ``torch.bfloat16``, which needs no scaler.
        **sche_conf: for :meth:`sche_init`.

    Attributes:
        optimizer: the ``torch.optim.Optimizer``. Weights that move inside the backward (TorchRec's fused tables) are
            not in it: they only take the learning rate. Their kernels note it in the forward, so it is set at the end
            of the step before, for that step's epoch, and anew in :meth:`forward_context` if that is told the epoch.
        scaler: the ``GradScaler``, or None.

    Raises:
        AssertionError: an interval is not an integer >= 1, or ``optim_loss`` not a string.
        ValueError: another argument is wrong, or does not go with fused tables.
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
        check_arguments(
            optim_conf=optim_conf,
            model=model,
            updated_modules=updated_modules,
            accum_grad=accum_grad,
            step_per_update=step_per_update,
            optim_loss=optim_loss,
            grad_clip=grad_clip,
            grad_norm_type=grad_norm_type,
            ft_factor=ft_factor,
            amp_dtype=amp_dtype,
            use_amp=use_amp,
            distributed=distributed,
        )
        check_sparsity(data_sparsifier, data_scheduler)
        if distributed:
            check_averaging(model, accum_grad)
        self.model = model
        self.distributed = distributed
        self.optim_loss = optim_loss
        self.updated_modules = [updated_modules] if isinstance(updated_modules, str) else updated_modules
        if self.updated_modules is not None:
            self.updated_modules = list(self.updated_modules)
        self.step_per_update, self.accum_grad = int(step_per_update), int(accum_grad)
        self.ft_factor, self.grad_norm_type = float(ft_factor), float(grad_norm_type)
        self.grad_clip = None if grad_clip is None else float(grad_clip)
        self.use_amp, self.amp_dtype = use_amp, amp_dtype
        self.data_sparsifier, self.data_scheduler = data_sparsifier, data_scheduler
        scaled = use_amp and amp_dtype == torch.float16
        self._owned = owned_by(model, self.updated_modules)
        self._fused = owned_by(model, None).moves_in_backward
        check_fused(
            model_moves=self._fused, owned=self._owned, scaled=scaled, accum_grad=accum_grad, grad_clip=grad_clip
        )
        self._replicating, self._gathered = replicating(model), gathers(model)
        kept = self._owned.parameters
        # A group without parameters still has a learning rate: that of fused tables alone.
        self.optimizer = optimizer_class(optim_type)(kept or [{"params": []}], **dict(optim_conf or {}))
        self._device = next(iter(model.parameters())).device.type
        self.scaler = torch.amp.GradScaler(self._device) if scaled else None
        self.sche_init(**sche_conf)
        self._lr_takes = lr_arguments(self.update_lr)
        self._early: tuple[Tensor, list[Tensor | None]] | None = None
        self._turn: int | None = None
        self._unfinished = 0
        self._standing = True
        self._peers = Peers(model)
        replaced = [peer for peer in self._peers if takes_over(self, peer)]
        check_alone(self, [peer for peer in self._peers if peer._standing and peer not in replaced])
        for peer in replaced:
            peer._standing, peer._early = False, None
        self._peers.join(self)
        self.optimizer.zero_grad()  # what somebody has left behind is not part of the first update
        self._fused_lr: float | None = None
        self._set_lr_ahead(step_num=1, epoch_num=1)

    @abc.abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Takes what is the schedule's own of the constructor's arguments; called last in it."""

    @abc.abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The learning rate, ``ft_factor`` left out, of a real step, counted from 1, in an epoch, counted from 1."""

    def extra_repr_fn(self) -> str:
        """What ``repr`` says of the schedule."""
        return ""

    @contextlib.contextmanager
    def forward_context(self, step_num: int, epoch_num: int | None = None) -> Iterator[None]:
        """For the forward of a step: autocast if ``use_amp`` of some OptimScheduler of the model, and under DDP no
        averaging of gradients in the backward, unless this step is the last of its real step for one of them.

        DDP decides in the forward whether a backward averages, so ``no_sync`` around the backward saves nothing.

        With fused tables, give ``epoch_num`` too, or they have the learning rate of the last epoch in the first step
        of the next one, and that of step 1 in the first step of an object made later.
        """
        step_num = count("step_num", step_num)
        if epoch_num is not None:
            epoch_num = count("epoch_num", epoch_num)
            for peer in self._peers:
                if peer._owned.fused and peer._due(step_num):
                    peer._set_fused_lr(peer._next_lr(step_num, epoch_num))
        # One forward serves all: check_alone() has seen to it that they agree on its precision.
        amp = next((peer for peer in self._peers if peer.use_amp and (peer._standing or peer is self)), None)
        with ExitStack() as stack:
            stack.enter_context(self._unsynchronized(step_num))
            if amp is not None:
                stack.enter_context(torch.autocast(self._device, dtype=amp.amp_dtype))
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
        """One step: backward, and at the end of a real step the update. Collective under DDP, and if gradients lie in
        pieces over ranks.

        Args:
            losses: of this step's forward, by name. They are not changed.
            time_func: makes a context that times what happens in it, from ``["loss_backward_time", optim_name]`` and
                ``["optim_time", optim_name]``; None for no clock.
            optim_name: for the clock.
            step_num: counts from 1, over epochs.
            epoch_num: counts from 1.
            logger: its ``info`` is told when gradients are not finite; then nothing is updated, on any rank.

        Raises:
            AssertionError: there is no loss named "loss". KeyError: there is none of the name asked for.
            ValueError: a number, the loss or its learning rate makes no sense, or this object and others over the model
                can't share the forward.

        If the backward or the update itself fails (out of memory, say), the gradients of its real step are dropped.

        Several OptimSchedulers of a model may be given the losses of one forward: the gradients of all that are due are
        taken before any weight moves. Delete one that is no longer stepped, or its gradients are taken for nothing.
        """
        step_num, epoch_num = count("step_num", step_num), count("epoch_num", epoch_num)
        clock = time_func or (lambda names: nullcontext())
        due = self._due(step_num)
        with clock(["loss_backward_time", optim_name]):
            if due:
                take_gradients(self, losses, step_num, epoch_num)
                self._unfinished = 0 if step_num % self.accum_grad == 0 else self._unfinished + 1
        with clock(["optim_time", optim_name]):
            if due and step_num % self.accum_grad == 0 and update(self, self._real_step(step_num), logger):
                if self.data_sparsifier is not None:
                    self.data_sparsifier.step()
                if self.data_scheduler is not None:
                    self.data_scheduler.step()
        self._set_lr_ahead(step_num + 1, epoch_num)

    def get_lr(self) -> float:
        """The learning rate of the last step, of the first parameter group."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the scaler's (or None), and those of the sparsifier and its scheduler where there
        are any. Step numbers are the caller's; the state of fused optimizers is the model's."""
        return states(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over :meth:`state_dict`. A state of a run with AMP loads into one without, and the other way round.
        Collective if there is a sparsifier.

        Raises:
            ValueError: a part is missing or does not fit; nothing was changed. (If the data scheduler refuses its part,
                the sparsifier has taken its own by then.)
        """
        load_states(self, state_dict)
        # Step numbers may begin again where they were then.
        self._turn = None if self._turn is None else 0
        self._drop()

    def __copy__(self) -> OptimScheduler:
        raise TypeError(f"{type(self).__name__} can't be copied without its model: use copy.deepcopy().")

    def __getstate__(self) -> dict[str, Any]:
        """Gradients are not copied, so what is gathered of a real step is not, either."""
        if self.data_sparsifier is not None:  # its copy would hold other tensors than the model's
            raise TypeError(
                f"{type(self).__name__} can't be copied or pickled with a data_sparsifier: save state_dict() and load "
                "it into one that is made anew."
            )
        return {**self.__dict__, "_peers": None, "_early": None, "_unfinished": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, of the model too, is no peer of those of the model it was copied from."""
        self.__dict__.update(state)
        self._peers = Peers(self.model)
        self._peers.join(self)

    def __repr__(self) -> str:
        parts = [
            f"optimizer={type(self.optimizer).__name__}",
            f"optim_loss={self.optim_loss}",
            f"updated_modules={self.updated_modules}",
            *([extra] if (extra := self.extra_repr_fn()) else []),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _real_step(self, step_num: int) -> int:
        return (step_num - 1) // self.accum_grad + 1

    def _due(self, step_num: int) -> bool:
        return self._real_step(step_num) % self.step_per_update == 0

    def _loss(self, losses: Mapping[str, Tensor]) -> Tensor:
        if self.optim_loss is None and "loss" not in losses:
            raise AssertionError(
                f"There is no loss named 'loss' among {list(losses)}: name one so, or give optim_loss."
            )
        loss = losses[name := self.optim_loss or "loss"]
        if not isinstance(loss, Tensor):
            raise ValueError(f"Invalid loss {name!r} of type {type(loss).__name__}: must be a tensor.")
        return loss

    def _drop(self) -> None:
        """Forgets the gradients of a real step that is not finished."""
        self.optimizer.zero_grad()
        self._early, self._unfinished = None, 0

    def _next_lr(self, step_num: int, epoch_num: int) -> float:
        known = {"real_step": self._real_step(step_num), "epoch_num": epoch_num}
        return learning_rate(self.update_lr(**{name: known[name] for name in self._lr_takes}), self.ft_factor)

    def _set_lr_ahead(self, step_num: int, epoch_num: int) -> None:
        """Of fused tables, whose forward is next."""
        if self._owned.fused and self._due(step_num):
            with contextlib.suppress(Exception):  # if there is such a step, it will ask again and raise it
                self._set_fused_lr(self._next_lr(step_num, epoch_num))

    def _set_fused_lr(self, lr: float) -> None:
        self._fused_lr = lr
        self._owned.set_fused_lr(lr)

    def _set_lr(self, lr: float) -> None:
        """Before the backward, in which some weights may already use it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._owned.set_lr(lr)

    def _unsynchronized(self, step_num: int) -> AbstractContextManager[Any]:
        if not self.distributed or any(peer._due(step_num) and step_num % peer.accum_grad == 0 for peer in self._peers):
            return nullcontext()
        stack = ExitStack()
        for module in self._replicating:
            # With a static graph, DDP learns it in the first backward, which must be one that averages.
            if self._turn is not None or not getattr(module, "static_graph", False):
                stack.enter_context(module.no_sync())
        return stack
