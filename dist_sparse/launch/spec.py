"""The description of a job: what runs, where, and with which environment.

A `LaunchSpec` is frozen. What reaches a shell script or a directive matches a pattern below, or is
quoted where it is written; what torchrun checks itself is left to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# As Kubernetes names pods, with room for its suffixes.
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,51}[a-z0-9])?")
_ENV_KEY = re.compile(r"[A-Z_][A-Z0-9_]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NNODES = re.compile(r"([1-9][0-9]*)(?::([1-9][0-9]*))?")
_WALLTIME = re.compile(r"(?:[0-9]+-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one node. None means the scheduler's default.

    Args:
        cpu: cores. gpu: GPUs. memory_gib: memory in GiB.
        walltime: limit on the run, `HH:MM:SS` or `DAYS-HH:MM:SS`, for Slurm.
        image: the container image, for Kubernetes.

    Raises:
        ValueError: names the field, its value and its rule.
    """

    cpu: int | None = None
    gpu: int | None = None
    memory_gib: int | None = None
    walltime: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        _match_given("walltime", self.walltime, _WALLTIME, "HH:MM:SS or DAYS-HH:MM:SS")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where and under which name the nodes of a job meet. A job on one node needs none of it.

    Args:
        endpoint: `HOST:PORT` of the store, the same from every node; HOST is the node that holds
            it.
        id: the same on all nodes and different for every job.
        local_addr: the address under which other nodes reach this one; None for what its host name
            resolves to.
    """

    endpoint: str | None = None
    id: str | None = None
    local_addr: str | None = None


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
        rendezvous: for several nodes.
        env: variables for the ranks. Keys match `[A-Z_][A-Z0-9_]*`.
        max_restarts: how often torchrun restarts all ranks after one of them has failed.
        grace: seconds that ranks have to exit after a signal before they are killed.
        resources: for schedulers.
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
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace: int = 30
    resources: Resources = field(default_factory=Resources)
    python: str = sys.executable

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            given = f"script={self.script!r}, module={self.module!r}"
            raise ValueError(f"Invalid {given}: must be exactly one of them.")
        _match_given("module", self.module, _MODULE, "a dotted Python name")
        rule = "1 to 53 of a-z, 0-9 and -, beginning with a letter, not ending with -"
        _match("name", self.name, _NAME, rule)
        self._check_sizes()
        for key in self.env:
            _match("env", key, _ENV_KEY, "keys of A-Z, 0-9 and _, not beginning with a digit")
        # Copies: a spec stays as it was checked.
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    def _check_sizes(self) -> None:
        found = _match("nnodes", self.nnodes, _NNODES, 'a number from 1 on, or "MIN:MAX"')
        least, most = found.groups(default=found[1])
        if int(least) > int(most):
            raise ValueError(f"Invalid nnodes={self.nnodes!r}: MIN must not be greater than MAX.")
        count = self.nproc_per_node
        if count not in ("gpu", "cpu", "auto") and (not isinstance(count, int) or count < 1):
            rule = "a whole number, at least 1, or one of 'gpu', 'cpu', 'auto'"
            raise ValueError(f"Invalid nproc_per_node={count!r}: must be {rule}.")

    @property
    def max_nodes(self) -> int:
        """The number of nodes, or the maximum of a range."""
        return int(self.nnodes.rpartition(":")[2])


def _match(name: str, value: object, pattern: re.Pattern[str], rule: str) -> re.Match[str]:
    found = pattern.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"Invalid {name}={value!r}: must be {rule}.")
    return found


def _match_given(name: str, value: object, pattern: re.Pattern[str], rule: str) -> None:
    if value is not None:
        _match(name, value, pattern, rule)
