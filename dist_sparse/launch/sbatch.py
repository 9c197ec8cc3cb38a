"""A bash script with which Slurm runs a job: one torchrun on each node, started by `srun`.

Every value in it matches a pattern of `LaunchSpec` or is quoted by shlex; what is not quoted is the
script's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from dist_sparse.launch.spec import LaunchSpec, argv, defaults, meeting, new_id

_HEADER = """\
#!/usr/bin/env bash
# Runs {name} under torchrun. Yours to read and edit; then: sbatch FILE
"""

_BODY = """
set -euo pipefail
unset "${!PET_@}"  # torchrun would take options from these
"""

_MEETING = """
# The first node keeps the store by which all meet, without authentication: they must be in a
# network of their own.
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""


def render(spec: LaunchSpec, *, port: int = 29400) -> str:
    """Return the text of the script.

    Args:
        spec: its rdzv_endpoint and local_addr are not used: Slurm knows the nodes.
        port: on the first node; free there when the job starts.
    """
    where, found = [], ""
    if spec.max_nodes > 1:
        # Shell already: bash fills in the variables.
        job = f'{shlex.quote(new_id(spec))}-"$SLURM_JOB_ID"'
        where, found = meeting(f'"$head_node:{port}"', job), _MEETING
    words = argv(spec, rendezvous=where, quote=shlex.quote)
    variables = defaults(spec, spec.cpus) | dict(spec.env)
    exports: dict[str, object] = {"OMP_NUM_THREADS": '"${OMP_NUM_THREADS:-1}"'}
    exports |= {key: shlex.quote(value) for key, value in variables.items()}
    # srun does not take it over from sbatch.
    exports["SRUN_CPUS_PER_TASK"] = spec.cpus
    head = {
        "job-name": spec.name,
        "nodes": spec.nnodes.replace(":", "-"),
        "ntasks-per-node": 1,  # one torchrun on each node; it starts the ranks
        "cpus-per-task": spec.cpus,
        "gpus-per-node": spec.gpus,
        "mem": spec.memory("G"),
        "time": spec.time,
        "output": "%x-%j.log",
    }
    directives, assignments = _given("#SBATCH --{}={}\n", head), _given("export {}={}\n", exports)
    text = "".join([_HEADER.format(name=spec.name), directives, _BODY, assignments])
    command = " \\\n  ".join(["exec srun --kill-on-bad-exit=1", *_lines(words)])
    return f"{text}{found}\n{command}\n"


def _given(line: str, values: Mapping[str, object]) -> str:
    # None is Slurm's default.
    return "".join(line.format(key, found) for key, found in values.items() if found is not None)


def _lines(words: list[str]) -> list[str]:
    """One option with its value on each line, for readers; the script and its args on the last."""
    lines = [" ".join(words[:3])]
    # The interpreter, -m and torchrun are one line.
    rest = words[3:]
    while rest[0] not in ("-m", "--"):
        lines.append(" ".join(rest[:2]))
        rest = rest[2:]
    return [*lines, " ".join(rest)]
