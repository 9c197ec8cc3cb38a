"""All communication of the library: groups of ranks, their collectives, and agreement before
anything changes.

A :class:`Group` wraps a process group of the library's own over given ranks, with a timeout.
Without a process group it is a world of one, which runs the same code and sends nothing. Values are
sent as JSON bytes in tensors, never as pickles. :func:`traffic` counts every collective, by thread.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dist_sparse.checks import digest, encode, number

# The functions for users. The rest of the package calls the others.
__all__ = ["Traffic", "reset_traffic", "set_timeout", "traffic"]

Json = Any


@dataclass(frozen=True)
class Traffic:
    """Number of collectives, and of bytes that this rank put into them, since the last
    :func:`reset_traffic`."""

    collectives: int
    bytes: int


class Replica(NamedTuple):
    """This rank's copy of a tensor that several ranks hold: its hash, whether this rank is the
    first holder, and the number of holders."""

    hash: int
    first: bool
    holders: int


class Refused(ValueError):
    """An error of any rank, raised on every rank of a group.

    Attributes:
        raised_by: the global ranks that raise it.
    """

    raised_by: frozenset[int] = frozenset()


class Facts(dict[str, Json]):
    """Values that must be equal on all ranks of one group, by a key for messages. See
    :func:`agreeing`.

    Attributes:
        replicas: this rank's copies of tensors that other ranks hold too, by a name that is the
            same on all holders.
        drifted: by replica the global ranks where it differs from its first holder's; filled on
            exit.
        drift_error: text of the error on every rank of all groups if a replica has drifted, with
            ``{places}`` for names and ranks. None: no error, the caller reads ``drifted``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replicas: dict[str, Replica] = {}
        self.drifted: dict[str, list[int]] = {}
        self.drift_error: str | None = None


class _Sent(threading.local):
    """Counts of each thread: the collectives of save_async(), which has its own thread, belong to
    no mask update."""

    collectives = 0
    bytes = 0


_sent = _Sent()
_timeout = timedelta(seconds=600)
_groups: dict[tuple[tuple[int, ...], str | None], tuple[Any, Group]] = {}
_weights_device: torch.device | None = None


def traffic() -> Traffic:
    """Return the collectives that this thread took part in through the library, and the bytes it
    handed to them.

    A world of one sends nothing.

    Example::

        >>> from dist_sparse.groups import reset_traffic, traffic
        >>> reset_traffic()
        >>> traffic()
        Traffic(collectives=0, bytes=0)
    """
    return Traffic(_sent.collectives, _sent.bytes)


def reset_traffic() -> None:
    """Reset the counts of :func:`traffic` to zero.

    Example::

        >>> from dist_sparse.groups import reset_traffic, traffic
        >>> reset_traffic()
        >>> traffic().bytes
        0
    """
    _sent.collectives, _sent.bytes = 0, 0


def set_timeout(seconds: float) -> None:
    """Set how long a collective of the library waits for a stalled or dead rank (600 s by default,
    1 s at least).

    Applies to groups made afterwards, so call it before the first ``add_model`` or ``step``, with
    the same value on every rank.

    Example::

        >>> from dist_sparse.groups import set_timeout
        >>> set_timeout(600)
    """
    global _timeout
    _timeout = timedelta(seconds=number("seconds", seconds, least=1))


def weights_are_on(device: torch.device) -> None:
    """Remember the device of this process's sharded weights. Backends without CPU tensors send from
    there, whatever the current device is."""
    global _weights_device
    if device.type != "cpu":
        _weights_device = device


def several(ranks: Iterable[int]) -> tuple[int, ...] | None:
    """Return global ranks as the package represents them: a tuple in group order, or None for a
    single rank, which is a world of one."""
    held = tuple(ranks)
    return held if len(held) > 1 else None


def world_ranks() -> tuple[int, ...] | None:
    """Return all global ranks, or None when torch.distributed is not in use or the world is this
    process alone."""
    return several(range(dist.get_world_size())) if dist.is_initialized() else None


def rank_in(ranks: tuple[int, ...] | None) -> int:
    """Return this process's place among ``ranks``. Does not communicate."""
    return 0 if ranks is None else ranks.index(dist.get_rank())


def world_rank() -> int:
    """Return this process's global rank; 0 without a process group. Does not communicate."""
    return rank_in(world_ranks())


def warn_on_first_rank(text: str, *, stacklevel: int) -> None:
    """Warn on the first rank only, for a state that all ranks share. Does not communicate."""
    if world_rank() == 0:
        warnings.warn(text, stacklevel=stacklevel + 1)


def _bound_device() -> torch.device | None:
    """Return the ``device_id`` that the world was initialized with, if any."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


class Group:
    """Ranks that take part in the same collectives. Every method that says "Collective" must be
    called by all of them.

    This class is a world of one, which sends nothing: rank 0 of itself, whatever its global rank.
    """

    # Global ranks in group order.
    ranks: tuple[int, ...] = (0,)

    # This process's place among them.
    rank = 0

    # What the messages are sent through; None for a world of one.
    process_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where messages are sent from."""
        return torch.device("cpu")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks. Collective over the group.

        Args:
            tensor: of any shape, on any device, where the result is too; it may be overwritten.
        """
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors of one common shape, stacked: ``(size, *shape)``. Collective
        over the group."""
        return tensor.unsqueeze(0)

    def all_gather_parts(self, part: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in group order; their last dimensions may differ. Collective
        over the group; two messages (lengths, then values), one if all are empty."""
        lengths = self.all_gather(torch.tensor([part.shape[-1]])).flatten().tolist()
        if not any(lengths):
            return [part] * self.size
        # all_gather() takes tensors of one shape, so shorter ones are padded.
        rows = self.all_gather(functional.pad(part, (0, max(lengths) - part.shape[-1])))
        return [row[..., :length] for row, length in zip(rows, lengths, strict=True)]

    def all_to_all(self, packed: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
        """Send bytes to every rank, and return what they send here, uint8, rank after rank.
        Collective. :class:`Parcels` does the bookkeeping.

        Args:
            packed: uint8, rank after rank.
            lengths: how many bytes go to each rank.
            sizes: how many bytes come from each rank.
        """
        return packed

    def all_gather_json(self, value: Json) -> list[Json]:
        """Return every rank's JSON value, in group order. Collective over the group; two messages
        (lengths, then bytes)."""
        raw = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather_parts(raw)]

    def agree(self, action: str, facts: Facts, error: Exception | None = None) -> None:
        """Check that all ranks are about to do the same, before any of them does it. Collective
        over the group.

        One message of 32 bytes when all is well. Otherwise every rank raises, naming the ranks at
        fault and the fault of each. :func:`agreeing` wraps it around the local work that comes
        before. In a world of one nothing differs: its caller raises its own ``error``.

        Args:
            action: what is about to happen, for messages.
            facts: what must be equal on all ranks; differing keys are named in the message. Its
                replicas are compared, and its ``drift_error`` is raised.
            error: an error of this rank; raised on all ranks.

        Raises:
            ValueError: a rank reported an error (with its text), or facts differ.
        """

    @contextmanager
    def agreeing(self, action: str) -> Iterator[Facts]:
        """:func:`agreeing` over this group alone."""
        with agreeing(action, [self]) as (facts,):
            yield facts


class RankGroup(Group):
    """Several ranks, with a process group of the library's own.

    Args:
        ranks: global ranks in group order.
        process_group: what the messages are sent through.
    """

    def __init__(self, ranks: tuple[int, ...], process_group: dist.ProcessGroup) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.process_group = process_group
        # "cpu:gloo,cuda:nccl": get_backend() is "undefined" for several.
        self._sends_from_cpu = "cpu:" in dist.get_backend_config(process_group)
        self._at = "before any agreement"

    @property
    def device(self) -> torch.device:
        """Where messages are sent from: the CPU if the backend takes its tensors, since most
        messages are made there; otherwise the device of the weights."""
        if self._sends_from_cpu:
            return torch.device("cpu")
        # Looked up at each use: the first group may be made before the tables and set_device().
        device = _bound_device() or _weights_device
        return device or torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :meth:`Group.all_reduce`."""
        with self._sending("all_reduce", tensor) as sent:
            dist.all_reduce(sent, group=self.process_group)
        return sent.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :meth:`Group.all_gather`."""
        with self._sending("all_gather", tensor) as sent:
            parts = [torch.empty_like(sent) for _ in self.ranks]
            dist.all_gather(parts, sent, group=self.process_group)
        return torch.stack(parts).to(tensor.device)

    def all_to_all(self, packed: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
        """See :meth:`Group.all_to_all`."""
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        with self._sending("all_to_all", packed) as sent:
            dist.all_to_all_single(received, sent, sizes, lengths, group=self.process_group)
        return received

    def agree(self, action: str, facts: Facts, error: Exception | None = None) -> None:
        """See :meth:`Group.agree`."""
        self._at = f"in {action}"
        mine = [error is not None, digest(action), digest(facts), _balance(facts.replicas)]
        reports = self.all_gather(torch.tensor(mine, dtype=torch.int64))
        errors = reports[:, 0]
        digests = reports[:, 1:3]
        balances = reports[:, 3]
        if bool(errors.any() | (digests != digests[0]).any()):
            refused = Refused(self._refusal(action, facts, error))
            refused.raised_by = frozenset(self.ranks)
            raise refused from error
        # int64 wraps around, so the sum is modulo 2**64, as each balance is.
        if int(balances.sum()) != 0:
            held = self.all_gather_json({name: each.hash for name, each in facts.replicas.items()})
            facts.drifted = _drifted(self.ranks, held)
            drifted = facts.drifted.items()
            places = "; ".join(f"{place} on {ranks_text(ranks)}" for place, ranks in drifted)
            if facts.drift_error is not None:
                raise ValueError(facts.drift_error.format(places=places))

    def _refusal(self, action: str, facts: Mapping[str, Json], error: Exception | None) -> str:
        """Return the message on every rank. Collective over the group: first digests alone, because
        facts may be long (tilings of all ranks), then the values of the first few that differ."""
        text = None if error is None else cut(f"{type(error).__name__}: {error}")
        own = {key: digest(value) for key, value in facts.items()}
        # All ranks get the same reports, so they take the same branch below.
        reports = self.all_gather_json([action, text, own])
        actions, errors, digests = zip(*reports, strict=True)
        if any(errors):
            return explain_errors(self.ranks, actions[0], errors)
        if len(set(actions)) > 1:
            return explain_actions(self.ranks, actions)
        shown = _differing(digests)[:_MOST_SHOWN]
        values = self.all_gather_json({key: facts.get(key, "nothing") for key in shown})
        return explain_facts(self.ranks, action, shown, values)

    @contextmanager
    def _sending(self, operation: str, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor on the device that messages are sent from. Count the collective, and
        explain a timeout or a broken connection in it."""
        sent = tensor.to(self.device).contiguous()
        _sent.collectives += 1
        _sent.bytes += sent.nbytes
        try:
            yield sent
        except RuntimeError as fault:
            if not re.search(_LOST, str(fault).lower()):
                raise
            raise RuntimeError(
                f"Rank {self.ranks[self.rank]}: {operation} {self._at} failed. Not all of"
                f" {ranks_text(self.ranks)} made this call: a rank has ended, is stalled, or is"
                f" making another call. The backend says: {cut(str(fault), 300)}"
            ) from fault


@contextmanager
def agreeing(action: str, groups: Sequence[Group]) -> Iterator[list[Facts]]:
    """Run local work, then check that all ranks are about to do the same. Collective over all
    ``groups``.

    The body must not change anything, or the caller must undo it. Once it is left, an exception in
    it is raised on all ranks of ``groups``, and so is a difference between the facts that it has
    noted. ``KeyboardInterrupt`` and ``SystemExit`` leave at once, without an exchange.

    The body must not communicate either, unless an agreement over the same group comes before each
    of its collectives, with no local work in between: a rank whose body has failed then meets the
    others in their next agreement, and their :class:`Refused` leaves at once.

    Args:
        action: what is about to happen, for messages.
        groups: in an order that all ranks share, larger ones later, so that an error of one group
            reaches all of its ranks through the largest.

    Yields:
        One :class:`Facts` for each group.

    Raises:
        ValueError: see :meth:`Group.agree`. A world of one re-raises the exception itself.

    Example::

        >>> from dist_sparse.groups import agreeing, group_over
        >>> with agreeing("load()", [group_over(None)]) as (facts,):
        ...     facts["path"] = "masks.pt"
    """
    noted = [Facts() for _ in groups]
    error: Exception | None = None
    try:
        yield noted
    except Refused as refused:
        if all(refused.raised_by >= set(group.ranks) for group in groups):
            # Every rank raises it, so none will enter agree().
            raise
        error = refused
    except Exception as fault:
        error = fault
    for group, facts in zip(groups, noted, strict=True):
        # After an error in one group, agree in the others too: their ranks are waiting.
        try:
            group.agree(action, facts, error)
        except ValueError as refused:
            error = refused
    if error is not None:
        raise error


# Reads a parcel once it has arrived.
Read = Callable[[], Tensor]


class Parcels:
    """One all-to-all: pack tensors per receiver, read them per sender.

    Call :meth:`send` and :meth:`expect` for all of them, then :meth:`exchange`. What is expected of
    a rank must come in the order in which that rank sends it: both sides loop over the same
    metadata.

    Args:
        group: over which to send.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pieces: list[list[Tensor]] = [[] for _ in group.ranks]
        self._lengths = [0] * group.size
        self._sizes = [0] * group.size
        self._received: Sequence[Tensor] = ()

    def send(self, receiver: int, tensor: Tensor) -> None:
        """Pack a contiguous tensor for group rank ``receiver``. It is released once it is
        copied."""
        self._pieces[receiver].append(tensor.view(-1).view(torch.uint8))
        self._lengths[receiver] += tensor.nbytes

    def expect(self, sender: int, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Read:
        """Return a function that gives the next tensor of group rank ``sender``, of this shape and
        dtype, once :meth:`exchange` has been called. It may be a view of the received bytes."""
        start = self._sizes[sender]
        stop = self._sizes[sender] = start + math.prod(shape) * dtype.itemsize

        def read() -> Tensor:
            part = self._received[sender][start:stop]
            # Tensors of several dtypes follow each other, and a view as a dtype must be aligned.
            aligned = (part.storage_offset() % dtype.itemsize) == 0
            return (part if aligned else part.clone()).view(dtype).view(tuple(shape))

        return read

    def exchange(self, device: torch.device) -> None:
        """Send and receive everything, to tensors on ``device``. Collective over the group."""
        # An empty tensor first, as torch.cat() takes no empty list. It takes one device, too.
        raw = [torch.empty(0, dtype=torch.uint8, device=self._group.device)]
        raw += [piece.to(self._group.device) for piece in chain(*self._pieces)]
        packed = torch.cat(raw)
        # Free the pieces, which may be large, before the result is allocated.
        raw.clear()
        self._pieces.clear()
        received = self._group.all_to_all(packed, self._lengths, self._sizes)
        self._received = torch.split(received.to(device), self._sizes)


def group_over(ranks: tuple[int, ...] | None, apart: str | None = None) -> Group:
    """Return the library's own group over these global ranks, made at the first call. Collective
    over ``ranks`` (that first time).

    Args:
        ranks: None is a world of one.
        apart: names a separate group, over gloo, for a thread other than the one that trains.
    """
    if ranks is None:
        return Group()
    world = dist.group.WORLD
    made_in, group = _groups.get((ranks, apart), (None, Group()))
    # A destroyed and re-initialised world needs new groups.
    if made_in is not world:
        # With local synchronization, only the members of a smaller group call new_group().
        smaller = ranks != world_ranks()
        # In a world bound to devices, NCCL would split a smaller group off the world's, which waits
        # for all ranks of the world.
        splits = smaller and _bound_device() is not None
        backend = "gloo" if splits or apart is not None else None
        process_group = dist.new_group(
            list(ranks), _timeout, backend, use_local_synchronization=smaller
        )
        group = RankGroup(ranks, process_group)
        _groups[ranks, apart] = world, group
    return group


def world_group(apart: str | None = None) -> Group:
    """Return the library's own group over all ranks; see :func:`group_over`."""
    return group_over(world_ranks(), apart)


# Words in the backends' errors about ranks that do not answer: gloo has no error type for them.
_LOST = "timed out|timeout|connect|socket|peer"


def _balance(replicas: Mapping[str, Replica]) -> int:
    """Return this rank's term, int64, of a sum that is 0 modulo 2**64 if no replica has drifted."""
    total = 0
    for name, replica in replicas.items():
        # The first holder weighs as much as all others together. The weight is odd, so that its
        # product with a difference of hashes is not 0 modulo 2**64.
        weight = digest(name) | 1
        total += weight * replica.hash * (replica.holders - 1 if replica.first else -1)
    return signed(total)


def signed(value: int) -> int:
    """Return the int64 with the bits of an integer modulo 2**64, which has no sign."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _differing(digests: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the keys that are not equal on all ranks, in the order of messages."""
    noted = [each.items() for each in digests]
    differing = dict(set().union(*noted).difference(set(noted[0]).intersection(*noted)))
    everywhere = set(differing).intersection(*digests)
    # Last, facts that some rank has not added: usually a consequence of another difference.
    return [*sorted(everywhere), *sorted(differing.keys() - everywhere)]


def _drifted(ranks: Sequence[int], hashes: Sequence[Mapping[str, Json]]) -> dict[str, list[int]]:
    """Return the replicas that differ from their first holder's, and the ranks where they do."""
    first: dict[str, int] = {}
    drifted: dict[str, list[int]] = {}
    # Ranks ascend, so the first value of a name is its first holder's.
    for rank, held in zip(ranks, hashes, strict=True):
        for name, value in held.items():
            if first.setdefault(name, value) != value:
                drifted.setdefault(name, []).append(rank)
    return drifted


# Messages about ranks that fail or differ. Their length does not grow with the number of ranks.


# Faults in a message; the rest are counted.
_MOST_SHOWN = 3
_LONGEST_ERROR = 1000
_LONGEST_VALUE = 120


def explain_errors(ranks: Sequence[int], action: str, errors: Sequence[str | None]) -> str:
    """Return which ranks failed, and how: equal errors of several ranks once."""
    by_text = _ranks_by(ranks, errors)
    # Ranks without an error.
    by_text.pop(None, None)
    # Two errors or more share the length of one message.
    room = _LONGEST_ERROR // min(len(by_text), 2)
    texts = [*by_text.items()]
    shown = [f"{ranks_text(at)}: {cut(text, room)}" for text, at in texts[:_MOST_SHOWN]]
    if len(texts) > _MOST_SHOWN:
        others = chain.from_iterable(at for _, at in texts[_MOST_SHOWN:])
        shown.append(f"{ranks_text(sorted(others))}: other errors")
    return f"{action} was refused on every rank, nothing was changed. " + " | ".join(shown)


def explain_actions(ranks: Sequence[int], actions: Sequence[str]) -> str:
    """Return the ranks that are about to do something else than the lowest one."""
    (first, _), *others = _ranks_by(ranks, actions).items()
    faults = []
    for action, at in others[:_MOST_SHOWN]:
        faults.append(f"{ranks_text(at)} at {action!r} while rank {ranks[0]} is at {first!r}")
    return f"The ranks disagree at {first!r}, nothing was changed. " + "; ".join(faults)


def explain_facts(
    ranks: Sequence[int], action: str, keys: Sequence[str], values: Sequence[Mapping[str, Json]]
) -> str:
    """Return for each differing key both values, from where they differ, against the lowest rank's.

    Args:
        ranks: global ranks.
        action: what they were about to do.
        keys: the first ones that differ.
        values: for each rank, its values of those.
    """
    shown = []
    for key in keys:
        differences = [_difference(key, theirs, values[0]) for theirs in values]
        (_, *others) = _ranks_by(ranks, differences).items()
        for (path, other, mine), at in others:
            shown.append(f"{path} is {other} on {ranks_text(at)} and {mine} on rank {ranks[0]}")
    faults = cut("; ".join(shown))
    return f"The ranks disagree at {action!r}, nothing was changed. {faults}"


def _ranks_by(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, in the order of the values."""
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _difference(key: str, ours: Json, theirs: Json) -> tuple[str, str, str]:
    """Return the path to an entry of two mappings, or to its first inner entry that differs, and
    both texts, from shortly before the first difference."""
    one, other = ours.get(key, "nothing"), theirs.get(key, "nothing")
    if {type(one), type(other)} == {dict}:
        for inner in sorted({*one, *other}):
            if str(one.get(inner)) != str(other.get(inner)):
                path, first, second = _difference(inner, one, other)
                return f"{key}: {path}", first, second
    texts = [str(one), str(other)]
    # A long common beginning is left out of both.
    same = len(os.path.commonprefix(texts)) - 20  # noqa: RUF071  # of any texts
    if same > 0:
        texts = [f"...{text[same:]}" for text in texts]
    return key, cut(texts[0], _LONGEST_VALUE + 3), cut(texts[1], _LONGEST_VALUE + 3)


def cut(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Return the beginning of ``text``."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 7``, cut after a few."""
    texts = []
    # In a run of consecutive ranks, rank minus position is constant.
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        first, last = members[0], members[-1]
        texts.append(f"{first}-{last}" if first < last else str(first))
    if len(texts) > 8:
        texts = [*texts[:8], f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
