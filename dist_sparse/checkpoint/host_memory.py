"""Memory of the machine that a rank runs on: how much is left, and whether the copies of all ranks
there fit."""

from __future__ import annotations

import re
import socket
import sys
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
    the process's control groups leave of their limits. Where Linux tells neither, ``sys.maxsize``.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    left = [sys.maxsize]
    machine = re.search(r"MemAvailable: +(\d+) kB", _text(root / "proc/meminfo"))
    if machine:
        left.append(1024 * int(machine[1]))
    for path, top, limit_file, used_file, cache in _CONTROLS:
        own = re.search(path, _text(root / "proc/self/cgroup"), re.MULTILINE)
        folder = root / top / (own[1] if own else "")
        # The limits of the groups around it apply too. In a container, its own path may be one of
        # the machine's, which does not exist there.
        for group in (folder, *folder.parents):
            limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
            if limit.isdecimal() and used.isdecimal():
                stat = _text(group / "memory.stat")
                cached = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
                left.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
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
    machine = f"{socket.gethostname()} {_text(Path('/proc/sys/kernel/random/boot_id'))}"
    told = group.all_gather_json([machine, nbytes, available_bytes()])
    for name in dict.fromkeys(machine for machine, _, _ in told):
        ranks = [rank for rank, (machine, _, _) in enumerate(told) if machine == name]
        needed = sum(told[rank][1] for rank in ranks)
        left = min(told[rank][2] for rank in ranks)
        if needed > left:
            raise ValueError(
                f"{action} was refused on every rank, nothing was changed. {ranks_text(ranks)}:"
                f" copies of {size(needed)} do not fit into the {size(left)} of memory that their"
                f" machine has left. {remedy}"
            )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
