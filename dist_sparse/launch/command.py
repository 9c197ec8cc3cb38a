"""torchrun's argv and environment for a job.

Options that torchrun could otherwise take from `PET_` variables are in the argv. Flags
(`PET_STANDALONE`, ...) can't be switched off there, so `environment` drops all `PET_` variables.
One node means the loopback address and a port of the system's choice; never `--standalone`, which
overrides both.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from string import Template

from dist_sparse.launch.spec import LaunchSpec

_LOOPBACK = "127.0.0.1"


def new_id(spec: LaunchSpec) -> str:
    """Return the rendezvous id of `spec`, or a random one (which several nodes could not share) if
    it has none."""
    return spec.rdzv_id or f"{spec.name}-{secrets.token_hex(16)}"


def argv(
    spec: LaunchSpec,
    *,
    rendezvous: Sequence[str] = (),
    program: Sequence[str] = (),
    output: Sequence[str] = ("--redirects", "0", "--tee", "0"),
    before: Sequence[str] = (),
    quote: Callable[[str], str] = str,
) -> list[str]:
    """Return the words of the command that runs `spec` on one node; no shell, no quotes.

    Args:
        rendezvous: words that say how nodes meet, instead of those made from `spec`.
        program: words that run torchrun, instead of `python -m torch.distributed.run`.
        output: torchrun's options for the output of the ranks.
        before: a script and its first words, which get the job's own script or module with its
            args.
        quote: applied to all words but `rendezvous`, for a program that reads them.

    Raises:
        ValueError: several nodes have no endpoint or no id.
    """
    target = ["-m", str(spec.module)] if spec.script is None else [spec.script]
    words = [_literal(word) for word in (*before, *target, *spec.args)]
    # Without `--`, torchrun takes words of the script for abbreviations of its own options.
    ranks = ["-m", "--", *words[1:]] if words[0] == "-m" else ["--", *words]
    start = [*(program or [spec.python, "-m", "torch.distributed.run"])]
    start += ["--nnodes", spec.nnodes, "--nproc-per-node", str(spec.nproc_per_node)]
    end = ["--max-restarts", str(spec.max_restarts), "--monitor-interval", "0.1"]
    end += ["--start-method", "spawn", "--event-log-handler", "null", "--role", "default"]
    meeting = rendezvous or map(quote, _rendezvous(spec))
    return [*map(quote, start), *meeting, *map(quote, (*end, *output, *ranks))]


def _literal(word: str) -> str:
    # torchrun fills in ${local_rank} in all words of the ranks, and makes one $ of two.
    changed = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if changed else word


def meeting(endpoint: str, job: str) -> list[str]:
    """Return the words by which the nodes of `job` meet at `endpoint`."""
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
    """Return the variables of torchrun and of the ranks of a job on any machine, and the threads
    of a rank on a node with so many cores, at least 1.

    `PYTHONHASHSEED=0`: TorchRec's resharding takes message tags from `hash()`.

    After a restart, torch 2.13 gives the ranks the store of the ranks before them, with the
    addresses of those in it, and gloo now and then connects to dead ranks. With
    `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`, rank 0 makes a new store each time.
    """
    found = {"PYTHONHASHSEED": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(spec.grace)}
    # A change in the number of nodes restarts ranks too.
    if spec.max_restarts > 0 or ":" in spec.nnodes:
        found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Of `gpu`, `cpu` and `auto`, only torchrun knows the number of ranks.
    if cores and isinstance(spec.nproc_per_node, int):
        found["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return found


def additions(spec: LaunchSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks get besides what they inherit: defaults for what is not set,
    and `spec.env`.

    `GLOO_SOCKET_IFNAME=lo`, on one node: gloo listens where the host name resolves to, otherwise.
    """
    # macOS has no affinity.
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    added = defaults(spec, cores)
    if spec.max_nodes == 1 and os.path.isdir("/sys/class/net/lo"):
        added["GLOO_SOCKET_IFNAME"] = "lo"
    kept = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONHASHSEED"} & inherited.keys()
    # A rank with `random` hashes, or an invalid seed, could not talk to the others.
    if not inherited.get("PYTHONHASHSEED", "").isdecimal():
        kept.discard("PYTHONHASHSEED")
    return {name: value for name, value in added.items() if name not in kept} | dict(spec.env)


def environment(spec: LaunchSpec, inherited: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the whole environment of the job, and the names of the `PET_` variables that were left
    out of it."""
    dropped = sorted(key for key in inherited if key.startswith("PET_"))
    # torchrun reads an option from PET_ wherever the argv lacks it.
    kept = {key: value for key, value in inherited.items() if key not in dropped}
    return kept | additions(spec, inherited), dropped
