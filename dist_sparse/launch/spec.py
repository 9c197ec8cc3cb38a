"""The description of a job, and torchrun's argv and environment for it.

- A `LaunchSpec` is frozen, and checked when it is made. torchrun checks the rest.
- The argv has every option that torchrun could otherwise take from a `PET_` variable. Flags
  (`PET_STANDALONE`, ...) can't be switched off there, so no job inherits or sets `PET_` variables.
- A job on one node uses the loopback address and a free port. Not `--standalone`, which overrides
  both.
"""

import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    "nnodes": ("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", 'a number from 1 on, or "MIN:MAX"'),
    "nproc_per_node": (
        "[1-9][0-9]{0,8}|gpu|cpu|auto",
        "a whole number, at least 1, or one of 'gpu', 'cpu', 'auto'",
    ),
    # The hosts that torchrun takes; an IPv6 address may have brackets.
    "rdzv_endpoint": (
        r"\[?[\w.:-]+\]?:[0-9]{1,5}",
        "HOST:PORT, with a port from 1 to 65535",
    ),
}

# Pattern and text of the keys of `env`.
_KEY = (
    "(?!PET_)[A-Z_][A-Z0-9_]*",
    "keys of A-Z, 0-9 and _, not first a digit; from PET_ variables, torchrun would take options",
)

# Fields that are text, and may be None.
_TEXTS = ("script", "module", "rdzv_endpoint", "rdzv_id", "local_addr")

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
        env: variables for the ranks. Keys match `[A-Z_][A-Z0-9_]*`, and do not begin with `PET_`.
        max_restarts: how often torchrun restarts all ranks after one of them has failed.
        grace: seconds that ranks have to exit after a signal before they are killed.
        python: the interpreter.

    Raises:
        ValueError: names the field, its value and its rule.
    """

    script: str | None = None
    module: str | None = None
    args: Sequence[str] = ()
    name: str = "train"
    nnodes: str = "1"
    nproc_per_node: int | str = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    local_addr: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace: int = 30
    python: str = sys.executable

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            given = f"script={self.script!r}, module={self.module!r}"
            raise ValueError(f"Invalid {given}: must be exactly one of them.")
        if isinstance(self.args, str):
            raise ValueError(f"Invalid args={self.args!r}: must be a sequence of words.")
        # Copies, so that the checked values can't change. The dataclass is frozen: by object.
        set_field = partial(object.__setattr__, self)
        set_field("args", tuple(self.args))
        set_field("env", MappingProxyType(dict(self.env)))
        given_texts = [name for name in _TEXTS if getattr(self, name) is not None]
        for name in ("python", *given_texts):
            _refuse_non_text(name, [getattr(self, name)])
        _refuse_non_text("args", self.args)
        _refuse_non_text("env", self.env.values())
        for name, rule in _RULES.items():
            if name not in _TEXTS or name in given_texts:
                _refuse_mismatch(name, getattr(self, name), rule)
        for key in self.env:
            _refuse_mismatch("env", key, _KEY)
        _refuse_out_of_range("max_restarts", self.max_restarts)
        _refuse_out_of_range("grace", self.grace)
        set_field("nnodes", str(self.nnodes))
        set_field("nproc_per_node", str(self.nproc_per_node))
        self._refuse_ranges()

    def _refuse_ranges(self) -> None:
        """Refuse a range of nodes and a port whose digits are right and whose value is not."""
        least = int(self.nnodes.partition(":")[0])
        if least > self.max_nodes:
            raise ValueError(f"Invalid nnodes={self.nnodes!r}: must be MIN:MAX, with MIN <= MAX.")
        if self.rdzv_endpoint is not None:
            port = int(self.rdzv_endpoint.rpartition(":")[2])
            if not 1 <= port <= 65535:
                rule = _RULES["rdzv_endpoint"][1]
                raise ValueError(f"Invalid rdzv_endpoint={self.rdzv_endpoint!r}: must be {rule}.")

    @property
    def processes(self) -> int:
        """The number of processes on each node; 0 for `gpu`, `cpu` and `auto`, which torchrun
        resolves."""
        number = str(self.nproc_per_node)
        return int(number) if number.isdecimal() else 0

    @property
    def max_nodes(self) -> int:
        """The number of nodes, or the maximum of a range."""
        return int(self.nnodes.rpartition(":")[2])


def _refuse_mismatch(name: str, value: object, rule: tuple[str, str]) -> None:
    pattern, text = rule
    if not re.fullmatch(pattern, str(value)):
        raise ValueError(f"Invalid {name}={value!r}: must be {text}.")


def _refuse_non_text(name: str, values: Iterable[object]) -> None:
    """Refuse everything but text that can be a word of a command or the value of a variable."""
    for value in values:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"Invalid {name}={value!r}: must be text without a null character.")


def _refuse_out_of_range(name: str, value: object) -> None:
    """Refuse everything but a non-negative int that the options of torchrun can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"Invalid {name}={value!r}: must be a number from 0 on, below 2**31.")


def argv(
    spec: LaunchSpec,
    *,
    program: Sequence[str] = ("-m", "torch.distributed.run"),
    output: Sequence[str] = ("--redirects", "0", "--tee", "0"),
    before: Sequence[str] = (),
) -> list[str]:
    """Return the words of the command that runs `spec` on one node; no shell, no quotes.

    Args:
        program: arguments of the interpreter that run torchrun.
        output: torchrun's options for the output of the ranks.
        before: a script with its first arguments, which runs the job's own script or module.

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
    return [*start, *_rendezvous(spec), *end, *output, *ranks]


def _escape_template(word: str) -> str:
    # torchrun reads words of the ranks as templates: it replaces ${local_rank}, and $$ by $.
    is_template = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if is_template else word


def _rendezvous(spec: LaunchSpec) -> list[str]:
    """Return torchrun's options for the place where the nodes meet."""
    if spec.max_nodes == 1:
        # Random: several jobs may run on this machine.
        job = spec.rdzv_id or f"{spec.name}-{secrets.token_hex(16)}"
        return [*_meeting(f"{_LOOPBACK}:0", job), "--local-addr", _LOOPBACK]
    for name in ("rdzv_endpoint", "rdzv_id"):
        if not getattr(spec, name):
            rule = f"must be given for nnodes={spec.nnodes!r}, the same on all nodes"
            raise ValueError(f"Invalid {name}={getattr(spec, name)!r}: {rule}.")
    words = _meeting(str(spec.rdzv_endpoint), str(spec.rdzv_id))
    return [*words, "--local-addr", spec.local_addr] if spec.local_addr else words


def _meeting(endpoint: str, job: str) -> list[str]:
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
    return [*words, "--rdzv-conf", "join_timeout=600", "--node-rank", "0"]


def defaults(spec: LaunchSpec, cores: int) -> dict[str, str]:
    """Return environment variables for torchrun and the ranks.

    - `PYTHONHASHSEED=0`: TorchRec's resharding takes message tags from `hash()`.
    - `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`: rank 0 creates a new store after each restart. Otherwise
      torch 2.13 gives restarted ranks the old store, which holds the addresses of dead ranks, and
      gloo sometimes connects to them.

    Args:
        cores: CPU cores of a node, which its ranks share.
    """
    variables = {"PYTHONHASHSEED": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(spec.grace)}
    # With a range of nodes, ranks also restart when the number of nodes changes.
    if spec.max_restarts > 0 or ":" in spec.nnodes:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if spec.processes:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // spec.processes))
    return variables


def additions(spec: LaunchSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the inherited ones: `spec.env`, and defaults for those that
    are not set.

    `GLOO_SOCKET_IFNAME=lo` on one node: by default gloo listens on the address of the host name,
    which may not belong to any interface.
    """
    added = defaults(spec, len(os.sched_getaffinity(0)))
    if spec.max_nodes == 1:
        added["GLOO_SOCKET_IFNAME"] = "lo"
    kept = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONHASHSEED"} & inherited.keys()
    # Not `random`, with which the ranks' message tags would differ, nor an invalid seed.
    if not inherited.get("PYTHONHASHSEED", "").isdecimal():
        kept.discard("PYTHONHASHSEED")
    return {name: value for name, value in added.items() if name not in kept} | dict(spec.env)
