"""How do ranks talk? The one module that communicates.

A :class:`Group` wraps a process group of the library's own over given ranks, with a timeout; no process group is a
world of one that runs the same code and sends nothing. Objects cross ranks as JSON bytes in tensors, never as pickles.
Every collective adds to :func:`traffic`.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Group",
    "Replica",
    "Traffic",
    "group_over",
    "rank_in",
    "reset_traffic",
    "set_timeout",
    "traffic",
    "world_ranks",
]

Json = Any


@dataclass(frozen=True)
class Traffic:
    """What this rank has sent since the last :func:`reset_traffic`: number of collectives, bytes it put into them."""

    collectives: int
    bytes: int


class Replica(NamedTuple):
    """This rank's copy of something that several ranks hold: its hash, whether this rank is the first holder, how many
    there are."""

    hash: int
    first: bool
    holders: int


_sent = [0, 0]
_timeout = timedelta(seconds=600)
_groups: dict[tuple[int, ...], tuple[Any, Group]] = {}


def traffic() -> Traffic:
    """Collectives that this process took part in through the library, and the bytes it handed to them. A world of one
    sends nothing."""
    return Traffic(*_sent)


def reset_traffic() -> None:
    """Starts the count of :func:`traffic` again at zero."""
    _sent[:] = [0, 0]


def set_timeout(seconds: float) -> None:
    """The longest that a collective of the library waits for a stalled or dead rank (600 s at first).

    Counts for groups made afterwards, so call it before the first ``add_model`` or ``step``, with the same value on
    every rank.
    """
    global _timeout
    if not seconds > 0:
        raise ValueError(f"Invalid timeout {seconds=}: must be > 0.")
    _timeout = timedelta(seconds=seconds)


def world_ranks() -> tuple[int, ...] | None:
    """All global ranks, or None when torch.distributed is not in use or the world is this process alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return tuple(range(dist.get_world_size()))


def rank_in(ranks: tuple[int, ...] | None) -> int:
    """This process's place among ``ranks``; does not communicate."""
    return 0 if ranks is None or len(ranks) == 1 else ranks.index(dist.get_rank())


class Group:
    """Ranks that take part in the same collectives. Every method that says "Collective" must be called by all of them.

    Args:
        ranks: global ranks in group order; None or a single rank is a world of one.
        process_group: what the messages go through; None for a world of one.
    """

    def __init__(self, ranks: tuple[int, ...] | None, process_group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks if ranks is not None else (0,)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if process_group is not None else 0
        self._group = process_group
        backend = dist.get_backend(process_group) if process_group is not None else "gloo"
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        self._along: Tensor | None = None
        self._came: Tensor | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. Collective over the group. Takes and returns any shape, on the tensor's device; the input
        may be overwritten."""
        if self._along is not None and tensor.dtype == torch.int64:
            along, self._along = self._along, None
            both = self.all_reduce(torch.cat([tensor.flatten(), along.flatten().to(tensor.device)]))
            self._came = both[tensor.numel() :].view(along.shape)
            return both[: tensor.numel()].view(tensor.shape)
        if self._group is None:
            return tensor
        sent = tensor.to(self.device).contiguous()
        _count(sent)
        dist.all_reduce(sent, group=self._group)
        return sent.to(tensor.device)

    @contextmanager
    def along(self, values: Tensor) -> Iterator[Callable[[], Tensor | None]]:
        """Sends int64 ``values`` along with the next :meth:`all_reduce` of int64 in this context: no message of their
        own. Every rank must do so, with the same shape.

        Yields:
            A function that gives their sum over ranks; None as long as there was no such all-reduce.
        """
        self._along, self._came = values, None
        try:
            yield lambda: self._came
        finally:
            self._along = self._came = None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors of one common shape, stacked: ``(size, *shape)``. Collective over the group."""
        if self._group is None:
            return tensor.unsqueeze(0)
        sent = tensor.to(self.device).contiguous()
        _count(sent)
        parts = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(parts, sent, group=self._group)
        return torch.stack(parts).to(tensor.device)

    def all_to_all(self, pieces: Sequence[list[Tensor]], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Sends the bytes of ``pieces[r]``, one after the other, to rank r. Collective.

        Args:
            pieces: contiguous tensors of any dtype, for each rank. They are let go of as soon as they are copied.
            sizes: how many bytes come from each rank.
            device: where the results are to be.

        Returns:
            What every rank sent here, uint8 ``(sizes[r],)`` from rank r.
        """
        lengths = [sum(piece.numel() * piece.element_size() for piece in parts) for parts in pieces]
        raw = [piece.view(-1).view(torch.uint8).to(self.device) for parts in pieces for piece in parts]
        sent = torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8, device=self.device)
        del raw
        for parts in pieces:
            parts.clear()
        if self._group is None:
            return [sent.to(device)]
        _count(sent)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, sent, list(sizes), lengths, group=self._group)
        return list(torch.split(received.to(device), list(sizes)))

    def all_gather_json(self, value: Json) -> list[Json]:
        """Every rank's JSON value, in group order. Collective over the group; two messages (lengths, then bytes)."""
        if self._group is None:
            return [value]
        raw = torch.frombuffer(bytearray(_encode(value)), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([raw.numel()])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        rows = self.all_gather(padded)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrites ``tensor`` in place by that of the group's first rank. Collective over the group."""
        if self._group is None:
            return
        sent = tensor.data.to(self.device).contiguous()
        _count(sent)
        dist.broadcast(sent, self.ranks[0], group=self._group)
        tensor.data.copy_(sent)

    def agree(
        self,
        action: str,
        facts: Mapping[str, Json],
        error: Exception | None = None,
        replicas: Mapping[str, Replica] | None = None,
    ) -> dict[str, list[int]]:
        """Makes sure that all ranks are about to do the same, before any of them does it. Collective over the group.

        One message of 32 bytes when all is well. Otherwise every rank raises, naming the ranks at fault and what is
        wrong with each.

        Args:
            action: what is about to happen, for messages.
            facts: flat and JSON-able: what must be equal on all ranks; differing keys are named in the message.
            error: what this rank found wrong already; raised on all ranks.
            replicas: hashes of what this rank holds in common with others, by a name that its holders share.

        Returns:
            For each replica that has drifted from its first holder's: the global ranks where it has. Empty when all is
            well.

        Raises:
            ValueError: a rank reported an error (with its text), or facts differ. A world of one re-raises ``error``
                itself.
        """
        if self._group is None:
            if error is not None:
                raise error
            return {}
        replicas = replicas or {}
        balance = sum(_weight(name) * r.hash * (r.holders - 1 if r.first else -1) for name, r in replicas.items())
        # As int64. It sums to zero over ranks, modulo 2**64, if no replica has drifted.
        balance = (balance + (1 << 63)) % (1 << 64) - (1 << 63)
        mine = torch.tensor([error is not None, _digest(action), _digest(facts), balance], dtype=torch.int64)
        told = self.all_gather(mine)
        if not told[:, 0].any() and bool((told[:, 1:3] == told[0, 1:3]).all()):
            if int(told[:, 3].sum()) == 0:
                return {}
            return _drifted(self.ranks, self.all_gather_json({name: [r.hash, r.first] for name, r in replicas.items()}))
        said = None if error is None else f"{type(error).__name__}: {error}"
        reports = self.all_gather_json({"action": action, "facts": dict(facts), "error": said})
        raise ValueError(_explain(self.ranks, reports)) from error


def group_over(ranks: tuple[int, ...] | None) -> Group:
    """The library's own group over these global ranks, made at the first call. Collective over ``ranks`` (that first
    time)."""
    if ranks is None or len(ranks) == 1:
        return Group(None, None)
    parent = dist.group.WORLD
    known = _groups.get(ranks)
    if known is None or known[0] is not parent:  # a destroyed and re-initialised world needs new groups
        everyone = ranks == world_ranks()
        made = dist.new_group(list(ranks), timeout=_timeout, use_local_synchronization=not everyone)
        known = _groups[ranks] = (parent, Group(ranks, made))
    return known[1]


def _count(tensor: Tensor) -> None:
    _sent[0] += 1
    _sent[1] += tensor.numel() * tensor.element_size()


def _encode(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, default=_as_json).encode()


def _as_json(value: object) -> Json:
    """Numbers of NumPy as Python's; of anything else the type, which is as much as ranks can compare."""
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return f"<{type(value).__name__}>"


def _digest(value: Json) -> int:
    return int.from_bytes(hashlib.blake2b(_encode(value), digest_size=8).digest(), "little", signed=True)


def _weight(name: str) -> int:
    return _digest(name) | 1


def _drifted(ranks: Sequence[int], hashes: Sequence[Mapping[str, Json]]) -> dict[str, list[int]]:
    first = {name: value for held in hashes for name, (value, speaks) in held.items() if speaks}
    drifted: dict[str, list[int]] = {}
    for rank, held in zip(ranks, hashes, strict=True):
        for name, (value, _) in held.items():
            if value != first.get(name):
                drifted.setdefault(name, []).append(rank)
    return drifted


def _explain(ranks: Sequence[int], reports: Sequence[Mapping[str, Json]]) -> str:
    """One sentence a fault: errors first, then different actions, then different facts (against the lowest rank's)."""
    errors = [f"rank {rank}: {report['error']}" for rank, report in zip(ranks, reports, strict=True) if report["error"]]
    if errors:
        return f"{reports[0]['action']} was refused on every rank, nothing was changed. " + " | ".join(errors)
    first = reports[0]
    faults = []
    for rank, report in zip(ranks[1:], reports[1:], strict=True):
        if report["action"] != first["action"]:
            faults.append(f"rank {rank} is at {report['action']!r} while rank {ranks[0]} is at {first['action']!r}")
            continue
        for key in sorted({*first["facts"], *report["facts"]}):
            ours, theirs = first["facts"].get(key, "nothing"), report["facts"].get(key, "nothing")
            if ours != theirs:
                faults.append(f"{key} is {theirs} on rank {rank} and {ours} on rank {ranks[0]}")
    return f"The ranks disagree at {first['action']!r}, nothing was changed. " + "; ".join(faults[:20])
