"""Errors on one rank alone: at one allocation of a call, and what is left of the call on all
ranks."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_sparse.groups import set_timeout, world_group
from dist_sparse.sparsifiers.masks import NO_ENFORCER
from dist_sparse.tables.chunked import ChunkedTensor

__all__ = [
    "Call",
    "Found",
    "count",
    "held_state",
    "inject",
    "masks_of",
    "positions",
    "short_timeout",
]

INJECTED = "out of memory, injected"


class Failing(TorchDispatchMode):
    """Counts the operations of torch that return new memory, and fails at one of them."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.count, self.where = at, 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        new = any(each.alias_info is None and "Tensor" in str(each.type) for each in schema.returns)
        # Messages of the backend: an error inside them can't be agreed.
        if new and func.namespace != "c10d" and not _is_of_ddp():
            self.count += 1
            if self.count == self.at:
                self.where = "".join(traceback.format_stack(limit=14)[:-1])
                raise MemoryError(f"{INJECTED} at {self.at} ({func})")
        return func(*args, **(kwargs or {}))


def _is_of_ddp() -> bool:
    """Whether DDP runs, called by the library: it communicates without agreement, so that the other
    ranks wait for the timeout of the model's group."""
    frame: FrameType | None = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if "dist_sparse" in file:
            return False
        if file.endswith(os.path.join("nn", "parallel", "distributed.py")):
            return True
        frame = frame.f_back
    return False


@dataclass
class Call:
    """A public call, and all that it may change.

    Args:
        run: makes the call.
        held: the objects whose state it may change, by name.
    """

    run: Callable[[], Any]
    held: Callable[[], Mapping[str, Any]]


@dataclass
class Found:
    """What an error at one position has left.

    Args:
        at: the position.
        raised: by rank the error.
        changed: by rank what differs from before.
        where: the stack of the injected error.
        seconds: how long the call took.
    """

    at: int
    raised: list[str | None]
    changed: list[list[str]]
    where: str
    seconds: float

    def is_agreed(self, left: str | None) -> bool:
        """Whether all ranks raise the same error, and nothing has changed but what ``left``, a
        pattern of paths, matches."""
        named = all(text is not None and INJECTED in text for text in self.raised)
        changed = [path for paths in self.changed for path in paths]
        return named and all(left and re.search(left, path) for path in changed)

    @property
    def is_done(self) -> bool:
        """Whether the call has succeeded on all ranks."""
        return self.raised == [None, None]


def count(call: Call) -> int:
    """Make the call, and return how many of its operations on rank 1 return new memory."""
    with Failing() as mode:
        call.run()
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, mode.count)
    return int(counts[1])


def inject(call: Call, at: int) -> Found:
    """Make the call, which fails on rank 1 at its ``at``-th allocation."""
    before = held_state(call)
    mode, raised = Failing(at if dist.get_rank() else 0), None
    started = time.monotonic()
    try:
        with mode:
            call.run()
    except (Exception, BaseException) as error:
        raised = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    # Rank 0 may still be removing files.
    dist.barrier()
    after = held_state(call)
    changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, (raised, changed, mode.where, seconds))
    texts, differences, places, times = zip(*reports, strict=True)
    return Found(at, list(texts), list(differences), places[1], max(times))


def held_state(call: Call) -> dict[str, Any]:
    try:
        return state_of(call.held())
    except RuntimeError as error:
        # A model that compact() has released refuses every use.
        return {"released": str(error)}


def positions(total: int, most: int) -> list[int]:
    """Return at most ``most`` positions of ``total``, spread, with the first and the last."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({1 + round(turn * (total - 1) / (most - 1)) for turn in range(most)})


@contextmanager
def short_timeout(seconds: float = 60) -> Iterator[None]:
    """Let collectives of the library end sooner, but not on a busy machine where nothing waits."""
    set_timeout(seconds)
    world_group().hang_up()
    try:
        yield
    finally:
        set_timeout(200)
        world_group().hang_up()


def state_of(held: Any, prefix: str = "", into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return hashes of all tensors, and all plain values, in a nest of modules, optimizers, states,
    mappings and sequences, by path."""
    found: dict[str, Any] = {} if into is None else into
    if isinstance(held, nn.Module):
        found[f"{prefix}.modules"] = [
            f"{path}: {type(module).__name__}" for path, module in held.named_modules()
        ]
    held = _plain(held)
    if isinstance(held, Tensor):
        data = held.detach().cpu().contiguous().flatten().view(torch.uint8)
        found[prefix] = [str(held.dtype), tuple(held.shape), zlib.crc32(data.numpy().data)]
    elif isinstance(held, Mapping):
        for key, value in held.items():
            state_of(value, f"{prefix}/{key}", found)
    elif isinstance(held, (list, tuple)):
        found[f"{prefix}.length"] = len(held)
        for index, value in enumerate(held):
            state_of(value, f"{prefix}/{index}", found)
    elif held is None or isinstance(held, (str, int, float, bool)):
        found[prefix] = repr(held)
    elif isinstance(held, os.PathLike):
        found[prefix] = _files(os.fspath(held))
    return found


def _plain(held: Any) -> Any:
    """Return the state of an object with one, and this rank's part of a sharded tensor."""
    if isinstance(held, ChunkedTensor):
        return held.kept
    if isinstance(held, ShardedTensor):
        return [shard.tensor for shard in held.local_shards()]
    if hasattr(held, "state_dict"):
        return held.state_dict()
    return held


def _files(folder: str) -> list[str]:
    """Return the paths and hashes of all files below a folder."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with open(path, "rb") as stream:
                found.append(f"{path}: {zlib.crc32(stream.read())}")
    return sorted(found)


def masks_of(sparsifier: Any) -> dict[str, Any]:
    """Return the state of a sparsifier on this rank, without communication."""
    masks = sparsifier.masks
    tables = {}
    for name in masks.tables.names:
        table = masks.tables.table(name)
        values = {
            each.name: getattr(table, each.name)
            for each in fields(table)
            if each.name in ("shape", "block", "updates", "removed")
        }
        values["bits"] = [mask.bits for mask in table.masks]
        values["rects"] = [tuple(mask.rect) for mask in table.masks]
        values["counts"] = [held.counts for held in table.shards]
        values["tiling"] = repr(table.tiling)
        tables[name] = values
    plain = {name: [masks.plain.held(name), masks.plain.mask(name)] for name in masks.plain.names}
    return {
        "tables": tables,
        "plain": plain,
        "configs": repr(sparsifier.data_groups),
        "enabled": sparsifier.enable_mask_update,
        "attached": [masks.enforcer is NO_ENFORCER, masks.rotation is None, masks.recorder is None],
    }
