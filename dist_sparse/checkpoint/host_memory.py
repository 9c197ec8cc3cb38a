"""Memory of the machine that a rank runs on: how much is left, and whether the copies of all ranks
there fit."""

from __future__ import annotations

import re
import socket
import sys
from collections import Counter
from pathlib import Path

from dist_sparse.groups import Group
from dist_sparse.messages import ranks_text
from dist_sparse.text import size

# For control groups of both versions: their path in /proc/self/cgroup, the folder of their files,
# the names of limit and use, and in memory.stat the cached pages of files, which make room.
_CONTROLS = (
    (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still take: what the machine has available, and what
    the process's control groups leave of their limits. Where Linux tells neither, more than any
    machine has.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    available = _found(root / "proc/meminfo", r"MemAvailable: +(\d+) kB", str(sys.maxsize))
    left = [1024 * int(available)]
    for path, top, limit, used, cached in _CONTROLS:
        own = root / top / _found(root / "proc/self/cgroup", path, "")
        # The limits of the groups around it apply too. In a container, its own path may be one of
        # the machine's, which does not exist there.
        for group in (own, *own.parents):
            # The file says "max" where there is no limit.
            most = int(_found(group / limit, r"^(\d+)$", str(sys.maxsize)))
            makes_room = int(_found(group / "memory.stat", rf"^{cached} (\d+)$", "0"))
            left.append(most - int(_found(group / used, r"^(\d+)$", "0")) + makes_room)
    return min(left)


def refuse_without_memory(action: str, remedy: str, nbytes: int, group: Group) -> None:
    """Refuse copies that do not fit into the memory of the machines. Collective over ``group``, and
    to be called before any rank copies anything.

    Args:
        action: what copies, for the message.
        remedy: what to do instead.
        nbytes: how many bytes this rank is about to copy.
        group: the ranks that copy.

    Raises:
        ValueError: on every rank.
    """
    # Containers of several machines may have one name.
    machine = (
        f"{socket.gethostname()} {_found(Path('/proc/sys/kernel/random/boot_id'), '(.*)', '')}"
    )
    told = group.all_gather_json([machine, nbytes, available_bytes()])
    needed: Counter[str] = Counter()
    for name, to_copy, _ in told:
        needed[name] += to_copy
    for name, _, left in told:
        if needed[name] > left:
            ranks = [rank for rank, (other, *_) in enumerate(told) if other == name]
            raise ValueError(
                f"{action} was refused on every rank, nothing was changed. {ranks_text(ranks)}:"
                f" copies of {size(needed[name])} do not fit into the {size(left)} of memory that"
                f" their machine has left. {remedy}"
            )


def _found(file: Path, pattern: str, otherwise: str) -> str:
    """Return what the group of a pattern matches in a file."""
    try:
        match = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return otherwise
    return match[1] if match else otherwise
