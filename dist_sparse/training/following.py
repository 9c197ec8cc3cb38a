"""Hooks on optimizer steps and forwards: ``auto_step``, and a training loop that trains other
tables than were sparsified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer import Hook
from dist_sparse.enforcer.dense import combines, leaves
from dist_sparse.tables.modules import torchrec_port


class Following:
    """Follows the steps of the last optimizer, and the forwards of unsharded collections, until
    :meth:`stop`.

    Args:
        modules: of the model whose tables are registered, by path.
        names: of the registered tables.
        optimizers: of the model.
        step: the training's step, called after each step of the last optimizer if ``auto_step``.

    Raises:
        ValueError: ``auto_step`` without an optimizer.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        names: Iterable[str],
        optimizers: Sequence[Any],
        step: Callable[[], None],
        auto_step: bool,
    ) -> None:
        self._handles: list[RemovableHandle] = []
        if auto_step:
            followed = [each for optimizer in optimizers for each in steppers(optimizer)]
            if not followed:
                raise ValueError("Invalid auto_step=True: there is no optimizer to follow.")
            # It refers to the training, which so lives as long as the optimizer even if the caller
            # drops it.
            hook = Hook(lambda *_: step())
            self._handles.append(followed[-1].register_step_post_hook(hook))
        # One forward of any of them shows that this model trains.
        self._unseen = dict(_unsharded_collections(modules, names))
        for module in self._unseen.values():
            self._handles.append(module.register_forward_pre_hook(Hook(self._seen)))

    def stepped(self) -> None:
        """Note that the training's step() is called.

        Raises:
            RuntimeError: no forward has used the tables.
        """
        # DistributedModelParallel and deepcopy leave the registered modules without forwards.
        if self._unseen:
            raise RuntimeError(
                f"No forward has used the collections {sorted(self._unseen)} since sparsify(): the"
                " model was wrapped or copied afterwards, so that other tables train. Call"
                " sparsify() on the DistributedModelParallel."
            )

    def stop(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._unseen = [], {}

    def _seen(self, *_: Any) -> None:
        self._unseen = {}


def steppers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the innermost optimizers, then one that is made of fused ones or of several: torch's
    hooks run on both."""
    yield from leaves(optimizer)
    # As LightningOptimizer does.
    while not combines(optimizer) and hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    if combines(optimizer):
        yield optimizer


def _unsharded_collections(
    modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield TorchRec's unsharded collections of registered tables, by path.

    DistributedModelParallel replaces them: a model that is wrapped later trains other modules.
    """
    torchrec = torchrec_port()
    if torchrec is None:
        return
    # Registered names are "collection/table" where two collections have tables of one name.
    registered = {name.rpartition("/")[2] for name in names}
    for path, module in modules.items():
        collection = torchrec.collection(module)
        if collection is None or collection.is_sharded:
            continue
        if any(table.name in registered for table in collection.tables):
            yield path or type(module).__name__, module
