"""All communication of the library: groups of ranks, their collectives, and agreement before
anything changes.

A :class:`RankGroup` wraps one of the library's own process groups over given ranks, with a timeout.
A :class:`Group` is a world of one, which runs the same code and sends nothing. Values are sent as
JSON bytes in tensors, never as pickles. :func:`traffic` counts every collective, by thread.
"""

from __future__ import annotations

import json
import re
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.checks import Json, digest, json_bytes, number
from dist_sparse.group_names import named_by_ranks
from dist_sparse.kept_buffers import KeptBuffers
from dist_sparse.messages import (
    MOST_SHOWN,
    cut,
    differing,
    drifted,
    explain_actions,
    explain_errors,
    explain_facts,
    ranks_text,
)

# The functions for users. The rest of the package calls the others.
__all__ = ["Traffic", "reset_traffic", "set_timeout", "traffic"]


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


class Lost(RuntimeError):
    """A collective that some ranks of a group did not make.

    Attributes:
        closed: another rank has closed its connection: it failed, hung up or ended.
    """

    closed = False


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
    """Counts of each thread: save_async() has its own, which is not part of a mask update."""

    collectives = 0
    bytes = 0


_sent = _Sent()
_timeout = timedelta(seconds=600)
# How long ranks wait for each other after one of them has hung up.
_RECONNECTS = timedelta(seconds=30)
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


def set_weights_device(device: torch.device) -> None:
    """Remember the device of this process's sharded weights. Backends without CPU tensors send from
    there, whatever the current device is."""
    global _weights_device
    if device.type != "cpu":
        _weights_device = device


def several(ranks: Iterable[int]) -> tuple[int, ...] | None:
    """Return global ranks as a tuple in group order; None for a single rank, a world of one."""
    held = tuple(ranks)
    return held if len(held) > 1 else None


def world_ranks() -> tuple[int, ...] | None:
    """Return all global ranks; None without torch.distributed, or for a process alone."""
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

    # Names a group for another thread; see group_over().
    apart: str | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What the messages are sent through; None for a world of one."""
        return None

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
        rows = self.all_gather(torch.nn.functional.pad(part, (0, max(lengths) - part.shape[-1])))
        return [row[..., :length] for row, length in zip(rows, lengths, strict=True)]

    def all_to_all(self, packed: Tensor, lengths: list[int], sizes: list[int]) -> Tensor:
        """Send bytes to every rank, and return what they send here, uint8, rank after rank.
        Collective.
        :class:`~dist_sparse.parcels.Parcels` does the bookkeeping.

        Args:
            packed: uint8, rank after rank.
            lengths: how many bytes go to each rank.
            sizes: how many bytes come from each rank.
        """
        return packed

    def all_gather_json(self, value: Json) -> list[Json]:
        """Return every rank's JSON value, in group order. Collective over the group; two messages
        (lengths, then bytes)."""
        raw = torch.frombuffer(bytearray(json_bytes(value)), dtype=torch.uint8)
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

    def hang_up(self) -> None:
        """Close this rank's connections to the others, whose collectives then fail. The next
        collective connects all ranks again."""

    @contextmanager
    def agreeing(self, action: str) -> Iterator[Facts]:
        """:func:`agreeing` over this group alone."""
        with agreeing(action, [self]) as (facts,):
            yield facts

    @contextmanager
    def jointly(self, action: str) -> Iterator[Call]:
        """:func:`jointly` over this group alone."""
        with jointly(action, [self]) as call:
            yield call


class RankGroup(Group):
    """Several ranks, with one of the library's own process groups.

    Args:
        ranks: global ranks in group order.
        process_group: what the messages are sent through.
        apart: names a group for another thread.
    """

    def __init__(
        self, ranks: tuple[int, ...], process_group: dist.ProcessGroup, apart: str | None = None
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.apart = apart
        # None once this rank has hung up.
        self._connected: dist.ProcessGroup | None = process_group
        # "cpu:gloo,cuda:nccl": get_backend() is "undefined" for several.
        self._sends_from_cpu = "cpu:" in dist.get_backend_config(process_group)
        self._at = "before any agreement"
        self._is_dead = False
        self._kept_buffers = KeptBuffers(len(ranks))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What the messages are sent through. Collective if a rank has hung up."""
        if self._connected is None:
            self._connected = self._reconnected()
        return self._connected

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
        there = tensor
        if tensor.is_cpu and not self._sends_from_cpu:
            # From pinned memory: the host waits for the sum alone, not for this copy too.
            pinned = torch.empty_like(tensor, pin_memory=True)
            there = pinned.copy_(tensor).to(self.device, non_blocking=True)
        with self._sending("all_reduce", there) as sent:
            dist.all_reduce(sent, group=self.process_group)
        return sent.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :meth:`Group.all_gather`."""
        if tensor.is_cpu and not self._sends_from_cpu:
            return self._kept_buffers.gather(tensor, self.device, self._send_kept)
        with self._sending("all_gather", tensor) as sent:
            # One tensor: nothing is left to allocate once the others have this rank's part.
            gathered = sent.new_empty(self.size, *sent.shape)
            dist.all_gather(list(gathered.unbind()), sent, group=self.process_group)
        return gathered.to(tensor.device)

    def _send_kept(self, gathered: Tensor, piece: Tensor) -> None:
        with self._sending("all_gather", piece) as sent:
            # torch 2.13 renamed it.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered, sent, group=self.process_group)

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
        # As lists: comparing tensors would take memory, after which some ranks would have agreed.
        reports = self._gather_reports(torch.tensor(mine, dtype=torch.int64))
        # No rank has failed, and all have the digests of the first.
        agreed = [0, *reports[0][1:3]]
        if any([report[:3] != agreed for report in reports]):
            raise self._refused(self._refusal(action, facts, error)) from error
        # Each balance is modulo 2**64.
        if sum([report[3] for report in reports]) % (1 << 64):
            held = self.all_gather_json({name: each.hash for name, each in facts.replicas.items()})
            facts.drifted = drifted(self.ranks, held)
            places = "; ".join(
                f"{place} on {ranks_text(ranks)}" for place, ranks in facts.drifted.items()
            )
            if facts.drift_error is not None:
                raise self._refused(facts.drift_error.format(places=places))

    def _gather_reports(self, mine: Tensor) -> list[list[int]]:
        """Return every rank's report. Collective."""
        try:
            return self.all_gather(mine).tolist()
        except Lost as lost:
            if not lost.closed:
                raise
            # A rank has failed in the middle of this call. It comes to this agreement next.
            _hang_up([self])
            try:
                return self.all_gather(mine).tolist()
            except Lost:
                raise lost from None

    def _refused(self, message: str) -> Refused:
        """Return an error that every rank of this group raises."""
        refused = Refused(message)
        refused.raised_by = frozenset(self.ranks)
        return refused

    def _refusal(self, action: str, facts: Mapping[str, Json], error: Exception | None) -> str:
        """Return the message on every rank. Collective over the group: first digests alone, because
        facts may be long (tilings of all ranks), then the values of the first few that differ."""
        text = None if error is None else cut(f"{type(error).__name__}: {error}")
        own = {key: digest(value) for key, value in facts.items()}
        # All ranks get the same reports, so they take the same branch below.
        reports = self.all_gather_json([action, text, isinstance(error, Lost), own])
        actions, errors, are_lost, digests = zip(*reports, strict=True)
        if any(errors):
            # A lost connection follows from an error of another rank, if there is one.
            causes = [None if lost else text for text, lost in zip(errors, are_lost, strict=True)]
            return explain_errors(self.ranks, actions[0], causes if any(causes) else errors)
        if len(set(actions)) > 1:
            return explain_actions(self.ranks, actions)
        shown = differing(digests)[:MOST_SHOWN]
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
        except Lost:
            raise
        except RuntimeError as fault:
            if not re.search(_LOST, str(fault).lower()):
                raise
            lost = Lost(
                f"Rank {self.ranks[self.rank]}: {operation} {self._at} failed. Not all of"
                f" {ranks_text(self.ranks)} made this call: a rank has ended, is stalled, or is"
                f" making another call. The backend says: {cut(str(fault), 300)}"
            )
            lost.closed = bool(re.search("peer|[Bb]roken pipe", str(fault)))
            # The frames of the backend's functions hold its group, and hang_up() must free it.
            traceback.clear_frames(fault.__traceback__)
            raise lost from fault

    def hang_up(self) -> None:
        """See :meth:`Group.hang_up`."""
        # Dropping the last reference closes its sockets: torch has no function for it.
        group, self._connected = self._connected, None
        if group is not None:
            dist.destroy_process_group(group)

    def _reconnected(self) -> dist.ProcessGroup:
        """Return a new process group over the same ranks. Collective.

        Raises:
            Lost: another rank does not connect, now or earlier.
        """
        if self._is_dead:
            held = ranks_text(self.ranks)
            raise Lost(f"The connections between {held} are lost: resume from a checkpoint.")
        # Until the ranks have met here.
        self._is_dead = True
        try:
            met = _connect(self.ranks, self.apart, min(_timeout, _RECONNECTS))
        except RuntimeError as fault:
            raise Lost(f"A rank of {ranks_text(self.ranks)} does not connect.") from fault
        self._is_dead = False
        connected = _connect(self.ranks, self.apart, _timeout)
        # The threads of an open group of gloo wake up a hundred times a second.
        dist.destroy_process_group(met)
        return connected


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
        if _all_raise(refused, groups):
            # None will enter agree().
            raise
        error = refused
    except Exception as fault:
        error = fault
    _agree(action, groups, noted, error)


class Call:
    """A call that several ranks make. See :func:`jointly`."""

    def __init__(self) -> None:
        self.others_wait = True

    def sent_all(self) -> None:
        """Note that this rank has made the last collective of the call. What fails from now on is
        raised on this rank alone, and no agreement ends the call."""
        self.others_wait = False


@contextmanager
def jointly(action: str, groups: Sequence[Group]) -> Iterator[Call]:
    """Run the part of a call that communicates. If one rank fails, the call fails on all of them.
    Collective over all ``groups``: ends with one agreement each.

    The body must not change anything, or the caller must undo it. If it raises, the rank closes its
    connections. This ends the collectives in which other ranks wait for it, and their bodies raise
    too. Then all connect again, and agree on the error. ``KeyboardInterrupt`` and ``SystemExit``
    leave at once. NCCL can't close a connection: over it alone, the others wait for the timeout.

    Args:
        action: the call, for messages.
        groups: as for :func:`agreeing`.

    Yields:
        The call; see :meth:`Call.sent_all`.

    Raises:
        ValueError: any rank has failed. A world of one re-raises the exception itself.

    Example::

        >>> import torch
        >>> from dist_sparse.groups import group_over, jointly
        >>> group = group_over(None)
        >>> with jointly("count()", [group]):
        ...     total = group.all_reduce(torch.ones(1))
    """
    call = Call()
    error: Exception | None = None
    try:
        yield call
    except Refused as refused:
        if _all_raise(refused, groups):
            raise
        error = refused
    except Exception as fault:
        error = fault
    if call.others_wait:
        if error is not None:
            _hang_up(groups)
        _agree(action, groups, [Facts() for _ in groups], error)
    elif error is not None:
        raise error


def _all_raise(refused: Refused, groups: Sequence[Group]) -> bool:
    """Return whether every rank of ``groups`` raises the error."""
    return all(refused.raised_by >= set(group.ranks) for group in groups)


def _hang_up(groups: Sequence[Group]) -> None:
    """Close this rank's connections in ``groups``, and in smaller groups among the same ranks:
    others may wait there too. All of these ranks fail in this call, so each of them hangs up."""
    ranks: set[int] = set()
    for group in groups:
        ranks.update(group.ranks)
    threads = {group.apart for group in groups}
    # A list: the thread of save_async() may add its groups, which are its own.
    for made_in, group in list(_groups.values()):
        mine = made_in is dist.group.WORLD and group.apart in threads
        if mine and ranks.issuperset(group.ranks):
            group.hang_up()


def _agree(
    action: str, groups: Sequence[Group], noted: Sequence[Facts], error: Exception | None
) -> None:
    """Agree in all groups, and raise the last error."""
    for group, facts in zip(groups, noted, strict=True):
        # After an error in one group, agree in the others too: their ranks are waiting.
        try:
            error = _outcome(group, action, facts, error)
        except Exception as fault:
            # The agreement itself failed here, such as for lack of memory.
            _hang_up([group])
            error = _outcome(group, action, facts, error or fault)
    if error is not None:
        raise error


def _outcome(group: Group, action: str, facts: Facts, error: Exception | None) -> Exception | None:
    """Agree in one group, and return the error that this rank has to raise, if any."""
    try:
        group.agree(action, facts, error)
    except ValueError as refused:
        return refused
    except Lost as lost:
        # Not worth another try, unless another rank tries again too.
        if not lost.closed:
            return error or lost
        raise
    return error


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
        group = RankGroup(ranks, _connect(ranks, apart, _timeout), apart)
        _groups[ranks, apart] = world, group
    return group


def _connect(ranks: tuple[int, ...], apart: str | None, timeout: timedelta) -> dist.ProcessGroup:
    """Return a new process group over these ranks. Collective over them."""
    # With local synchronization, only the members of a smaller group call new_group().
    smaller = ranks != world_ranks()
    # In a world bound to devices, NCCL would split a smaller group off the world's, which waits for
    # all ranks of the world.
    splits = smaller and _bound_device() is not None
    backend = "gloo" if splits or apart is not None else None
    with named_by_ranks(ranks, apart) if smaller else nullcontext():
        # torch 2.14 types it as a group, or the number that ranks outside get; this rank is inside.
        made: Any = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=smaller)
    return cast(dist.ProcessGroup, made)


def world_group(apart: str | None = None) -> Group:
    """Return the library's own group over all ranks; see :func:`group_over`."""
    return group_over(world_ranks(), apart)


# Words in the backends' errors about ranks that do not answer: gloo has no error type for them.
_LOST = "timed out|timeout|connect|socket|peer|broken pipe"


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
