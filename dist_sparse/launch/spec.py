"""The description of a job: what runs, where, and with which environment.

A `LaunchSpec` is frozen. What reaches a shell script or a directive matches a pattern in `_RULES`,
or is quoted where it is written; what torchrun checks itself is left to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

_RULES: Final = {
    "module": (r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "a dotted Python name"),
    # As Kubernetes names pods, with room for its suffixes.
    "name": (
        "[a-z](?:[a-z0-9-]{0,51}[a-z0-9])?",
        "1 to 53 of a-z, 0-9 and -, beginning with a letter, not ending with -",
    ),
    "nnodes": ("[1-9][0-9]*(:[1-9][0-9]*)?", 'a number from 1 on, or "MIN:MAX"'),
    "nproc_per_node": (
        "[1-9][0-9]*|gpu|cpu|auto",
        "a whole number, at least 1, or one of 'gpu', 'cpu', 'auto'",
    ),
    "time": ("(?:[0-9]+-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]", "HH:MM:SS or DAYS-HH:MM:SS"),
}
"""What a field must match, and how an error says so."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One job: what runs, on how many nodes and processes, with which environment.

    Args:
        script: path of the Python file that every rank runs, or
        module: dotted name of the module that every rank runs, as in `python -m`.
        args: its arguments. Passed as they are, never through a shell.
        name: 1 to 53 of `a-z 0-9 -`, beginning with a letter and not ending with `-`, as
            Kubernetes' pods need it.
        nnodes: `"N"`, or `"MIN:MAX"` for a job that continues with fewer nodes.
        nproc_per_node: processes on each node, or torchrun's `"gpu"`, `"cpu"`, `"auto"`: one for
            each device.
        rdzv_endpoint: for several nodes, `HOST:PORT` of the store, the same from every node; HOST
            is the node that holds it.
        rdzv_id: for several nodes, the same on all of them and different for every job.
        local_addr: the address under which other nodes reach this one; None for what its host name
            resolves to.
        env: variables for the ranks. Keys match `[A-Z_][A-Z0-9_]*`.
        max_restarts: how often torchrun restarts all ranks after one of them has failed.
        grace: seconds that ranks have to exit after a signal before they are killed.
        cpus: of a node, for schedulers; None is the scheduler's default.
        gpus: of a node, for schedulers; None is the scheduler's default.
        memory_gib: of a node, for schedulers; None is the scheduler's default.
        time: limit on the run, `HH:MM:SS` or `DAYS-HH:MM:SS`, for Slurm.
        image: the container image, for Kubernetes.
        python: the interpreter.

    Raises:
        ValueError: names the field, its value and its rule.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    name: str = "train"
    nnodes: str = "1"
    nproc_per_node: int | str = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    local_addr: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace: int = 30
    cpus: int | None = None
    gpus: int | None = None
    memory_gib: int | None = None
    time: str | None = None
    image: str | None = None
    python: str = sys.executable

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            given = f"script={self.script!r}, module={self.module!r}"
            raise ValueError(f"Invalid {given}: must be exactly one of them.")
        for name, (pattern, rule) in _RULES.items():
            if (value := getattr(self, name)) is not None:
                _match(name, value, pattern, rule)
        for key in self.env:
            _match("env", key, "[A-Z_][A-Z0-9_]*", "keys of A-Z, 0-9 and _, not first a digit")
        object.__setattr__(self, "nnodes", str(self.nnodes))
        if str(self.nproc_per_node).isdecimal():
            object.__setattr__(self, "nproc_per_node", int(self.nproc_per_node))
        # Copies: a spec stays as it was checked.
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    @property
    def max_nodes(self) -> int:
        """The number of nodes, or the maximum of a range."""
        return int(self.nnodes.rpartition(":")[2])


def _match(name: str, value: object, pattern: str, rule: str) -> None:
    if not re.fullmatch(pattern, str(value)):
        raise ValueError(f"Invalid {name}={value!r}: must be {rule}.")
