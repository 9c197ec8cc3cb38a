"""The description of a job, and torchrun's argv and environment for it.

- A `LaunchSpec` is frozen. A value that reaches a shell script or a directive matches a pattern in
  `_RULES`, or is quoted when it is written. torchrun checks the rest.
- The argv has every option that torchrun could otherwise take from a `PET_` variable. Flags
  (`PET_STANDALONE`, ...) can't be switched off there, so no job inherits `PET_` variables.
- A job on one node uses the loopback address and a free port. Not `--standalone`, which overrides
  both.
"""

import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from string import Template
from types import MappingProxyType

# Patterns of fields, and their texts in errors.
_RULES = {
    "module": (r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "a dotted Python name"),
    # As Kubernetes names pods, with room for its suffixes.
    "name": (
        "[a-z](?:[a-z0-9-]{0,51}[a-z0-9])?",
        "1 to 53 of a-z, 0-9 and -, beginning with a letter, not ending with -",
    ),
    "max_restarts": ("[0-9]+", "a number from 0 on"),
    "nnodes": ("[1-9][0-9]*(:[1-9][0-9]*)?", 'a number from 1 on, or "MIN:MAX"'),
    "nproc_per_node": (
        "[1-9][0-9]*|gpu|cpu|auto",
        "a whole number, at least 1, or one of 'gpu', 'cpu', 'auto'",
    ),
    "time": ("(?:[0-9]+-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]", "HH:MM:SS or DAYS-HH:MM:SS"),
}

# Pattern and text of the keys of `env`.
_KEY = ("[A-Z_][A-Z0-9_]*", "keys of A-Z, 0-9 and _, not first a digit")

_LOOPBACK = "127.0.0.1"


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
        cpus: CPUs of a node, for schedulers; None is the scheduler's default.
        gpus: GPUs of a node, for schedulers; None is the scheduler's default.
        memory_gib: memory of a node, for schedulers; None is the scheduler's default.
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
        for name, rule in _RULES.items():
            _refuse_mismatch(name, getattr(self, name), rule)
        for key in self.env:
            _refuse_mismatch("env", key, _KEY)
        # Copies, so that the checked values can't change. The dataclass is frozen: by object.
        set_field = partial(object.__setattr__, self)
        set_field("nnodes", str(self.nnodes))
        set_field("nproc_per_node", str(self.nproc_per_node))
        set_field("args", tuple(self.args))
        set_field("env", MappingProxyType(dict(self.env)))

    @property
    def processes(self) -> int:
        """The number of processes on each node; 0 for `gpu`, `cpu` and `auto`, which torchrun
        resolves."""
        number = str(self.nproc_per_node)
        return int(number) if number.isdecimal() else 0

    def memory(self, unit: str) -> str | None:
        """Return the memory of a node, with the scheduler's unit for GiB."""
        return None if self.memory_gib is None else f"{self.memory_gib}{unit}"

    @property
    def max_nodes(self) -> int:
        """The number of nodes, or the maximum of a range."""
        return int(self.nnodes.rpartition(":")[2])


def _refuse_mismatch(name: str, value: object, rule: tuple[str, str]) -> None:
    pattern, text = rule
    if value is not None and not re.fullmatch(pattern, str(value)):
        raise ValueError(f"Invalid {name}={value!r}: must be {text}.")


def argv(
    spec: LaunchSpec,
    *,
    rendezvous: Sequence[str] = (),
    program: Sequence[str] = ("-m", "torch.distributed.run"),
    output: Sequence[str] = ("--redirects", "0", "--tee", "0"),
    before: Sequence[str] = (),
    quote: Callable[[str], str] = str,
) -> list[str]:
    """Return the words of the command that runs `spec` on one node; no shell, no quotes.

    Args:
        rendezvous: torchrun's rendezvous options, instead of those of `spec`.
        program: arguments of the interpreter that run torchrun.
        output: torchrun's options for the output of the ranks.
        before: a script with its first arguments, which runs the job's own script or module.
        quote: applied to all words except `rendezvous`.

    Raises:
        ValueError: several nodes have no endpoint or no id.
    """
    target = ["-m", str(spec.module)] if spec.script is None else [spec.script]
    words = list(map(_escape_template, (*before, *target, *spec.args)))
    # `--`: torchrun would read options of the script as abbreviations of its own.
    ranks = ["-m", "--", *words[1:]] if words[0] == "-m" else ["--", *words]
    start = [spec.python, *program, "--nnodes", spec.nnodes]
    start += ["--nproc-per-node", str(spec.nproc_per_node)]
    end = ["--max-restarts", str(spec.max_restarts), "--monitor-interval", "0.1"]
    end += ["--start-method", "spawn", "--event-log-handler", "null", "--role", "default"]
    meeting = rendezvous or map(quote, _rendezvous(spec))
    return [*map(quote, start), *meeting, *map(quote, (*end, *output, *ranks))]


def _escape_template(word: str) -> str:
    # torchrun reads words of the ranks as templates: it replaces ${local_rank}, and $$ by $.
    is_template = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if is_template else word


def new_id(spec: LaunchSpec) -> str:
    """Return the rendezvous id of `spec`, or a random one, which only one node can use."""
    return spec.rdzv_id or f"{spec.name}-{secrets.token_hex(16)}"


def meeting(endpoint: str, job: str) -> list[str]:
    """Return torchrun's options for nodes that meet at `endpoint`."""
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
    return [*words, "--rdzv-conf", "join_timeout=600", "--node-rank", "0"]


def _rendezvous(spec: LaunchSpec) -> list[str]:
    if spec.max_nodes == 1:
        return [*meeting(f"{_LOOPBACK}:0", new_id(spec)), "--local-addr", _LOOPBACK]
    for name in ("rdzv_endpoint", "rdzv_id"):
        if not getattr(spec, name):
            rule = f"must be given for nnodes={spec.nnodes!r}, the same on all nodes"
            raise ValueError(f"Invalid {name}={getattr(spec, name)!r}: {rule}.")
    words = meeting(str(spec.rdzv_endpoint), new_id(spec))
    return [*words, "--local-addr", spec.local_addr] if spec.local_addr else words


def defaults(spec: LaunchSpec, cores: int | None) -> dict[str, str]:
    """Return environment variables for torchrun and the ranks.

    - `PYTHONHASHSEED=0`: TorchRec's resharding takes message tags from `hash()`.
    - `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`: rank 0 creates a new store after each restart. Otherwise
      torch 2.13 gives restarted ranks the old store, which holds the addresses of dead ranks, and
      gloo sometimes connects to them.

    Args:
        cores: CPU cores of a node, which its ranks share; None if unknown.
    """
    variables = {"PYTHONHASHSEED": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(spec.grace)}
    # With a range of nodes, ranks also restart when the number of nodes changes.
    if spec.max_restarts > 0 or ":" in spec.nnodes:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if cores and spec.processes:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // spec.processes))
    return variables


def additions(spec: LaunchSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the inherited ones: `spec.env`, and defaults for those that
    are not set.

    `GLOO_SOCKET_IFNAME=lo` on one node: by default gloo listens on the address of the host name,
    which may be that of no interface.
    """
    added = defaults(spec, len(os.sched_getaffinity(0)))
    if spec.max_nodes == 1:
        added["GLOO_SOCKET_IFNAME"] = "lo"
    kept = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONHASHSEED"} & inherited.keys()
    # Not `random`, with which the ranks' message tags would differ, nor an invalid seed.
    if not inherited.get("PYTHONHASHSEED", "").isdecimal():
        kept.discard("PYTHONHASHSEED")
    return {name: value for name, value in added.items() if name not in kept} | dict(spec.env)
