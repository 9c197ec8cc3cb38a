"""Which OptimSchedulers of a model take their gradients in this backward?

The one that is stepped, and those that are expected to be stepped beside it with losses of the same forward: whatever
they need must be taken before any weight moves. Not expected is one whose part a newer one is in charge of, or one that
was not stepped while such another was (a notebook's last cell may hold it), until it is stepped again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dist_sparse.optim.backward import Backward, Claim

if TYPE_CHECKING:
    from dist_sparse.optim.scheduler import OptimScheduler

__all__ = ["joins", "take_gradients", "takes_over"]


def take_gradients(scheduler: OptimScheduler, losses: Mapping[str, Tensor], step_num: int, epoch_num: int) -> None:
    """Leaves the gradients of ``scheduler``'s parameters in their ``.grad``, added to those of the micro-steps before,
    and keeps those of the others; sets the learning rates, because fused weights move in it. Collective under DDP.

    Raises:
        AssertionError, KeyError: the loss is not there.
        ValueError: it is no tensor, its learning rate no number, or the losses, or who is in charge of fused tables, do
            not fit together. Nothing has changed then. After an error of the backward itself, the gradients of
            unfinished real steps are dropped.
    """
    claim = _claim(scheduler, losses, step_num)
    lr = scheduler._next_lr(step_num, epoch_num)
    if scheduler._early is not None and scheduler._early[0] is claim.loss:
        for parameter, grad in zip(claim.parameters, scheduler._early[1], strict=True):
            parameter.grad = grad
        scheduler._set_lr(lr)
        scheduler._early, scheduler._turn, scheduler._standing = None, step_num, True
        return
    others = [peer for peer in scheduler._peers if peer is not scheduler and joins(peer, losses, step_num, scheduler)]
    claims = [claim, *(_claim(peer, losses, step_num) for peer in others)]
    backward = Backward(
        scheduler.model,
        claims,
        fused=scheduler._fused,
        gathered=scheduler._gathered,
        replicating=scheduler._replicating,
    )
    moving = [peer for peer in scheduler._peers if peer._owned.moves_in_backward and peer is not scheduler]
    if any(peer not in others and _beside(peer, scheduler) for peer in moving):
        raise ValueError(
            "Fused tables move inside every backward, but the OptimScheduler in charge of them is not due at "
            f"{step_num=}, or has no part in this loss. Give all the same losses and step_per_update, and delete "
            "those that are no longer stepped."
        )
    lrs = [(peer, peer._next_lr(step_num, epoch_num)) for peer in moving if peer in others]
    scheduler._early, scheduler._turn, scheduler._standing = None, step_num, True
    for peer, its in [*lrs, (scheduler, lr)]:
        peer._set_lr(its)
    try:
        with scheduler._unsynchronized(step_num):
            for peer, gradients in backward.run().items():
                peer._early = (peer._loss(losses), gradients)
    except BaseException:  # out of memory, say: what it has left are the gradients of some layers
        for peer in (scheduler, *others):
            peer._drop()
        raise


def joins(peer: OptimScheduler, losses: Mapping[str, Tensor], step_num: int, first: OptimScheduler) -> bool:
    """Whether a backward that ``first`` makes now should be for ``peer`` too. One that was not stepped since somebody
    last did it the favour may come back, so that it is done again."""
    known = (peer.optim_loss or "loss") in losses
    return _beside(peer, first) and known and peer._turn != step_num and peer._due(step_num)


def takes_over(scheduler: OptimScheduler, other: OptimScheduler) -> bool:
    """Whether ``scheduler`` is in charge of all that ``other`` is, by the same loss."""
    mine = {id(part) for part in (*scheduler._owned.parameters, *scheduler._owned.fused)}
    theirs = {id(part) for part in (*other._owned.parameters, *other._owned.fused)}
    return theirs <= mine and (scheduler.optim_loss or "loss") == (other.optim_loss or "loss")


def _beside(peer: OptimScheduler, first: OptimScheduler) -> bool:
    """Whether ``peer`` is still expected to be stepped beside ``first``."""
    return peer._standing and not (peer._early is not None and takes_over(first, peer))


def _claim(scheduler: OptimScheduler, losses: Mapping[str, Tensor], step_num: int) -> Claim:
    scaler = scheduler.scaler
    return Claim(
        owner=scheduler,
        parameters=scheduler._owned.parameters,
        whole=scheduler._owned.whole,
        loss=scheduler._loss(losses),
        parts=scheduler.accum_grad,
        scaled=scaler.scale if scaler is not None else lambda loss: loss,
        scale=None if scaler is None else id(scaler),
        reduced=step_num % scheduler.accum_grad == 0,
    )
