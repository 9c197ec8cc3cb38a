"""A bash script with which Slurm runs a job: one torchrun on each node, started by `srun`.

Every value in it matches a pattern of `LaunchSpec` or is quoted by shlex; what is not quoted is the
script's own.
"""

from __future__ import annotations

import shlex

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
# The first node keeps the store through which all find each other. torch has no authentication there: the nodes must be
# in a network of their own.
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""  # noqa: E501


def render(spec: LaunchSpec, *, port: int = 29400) -> str:
    """Return the text of the script.

    Args:
        spec: its rdzv_endpoint and local_addr are not used: Slurm knows the nodes.
        port: on the first node; free there when the job starts.
    """
    where = []
    if spec.max_nodes > 1:
        # Shell already: bash fills in the variables.
        job = f'{shlex.quote(new_id(spec))}-"$SLURM_JOB_ID"'
        where = meeting(f'"$head_node:{port}"', job)
    words = argv(spec, rendezvous=where, quote=shlex.quote)
    variables = defaults(spec, spec.cpus) | dict(spec.env)
    exports = {"OMP_NUM_THREADS": '"${OMP_NUM_THREADS:-1}"'}
    exports |= {key: shlex.quote(value) for key, value in variables.items()}
    if spec.cpus is not None:
        # srun does not take it over from sbatch.
        exports["SRUN_CPUS_PER_TASK"] = str(spec.cpus)
    given = {
        "job-name": spec.name,
        "nodes": spec.nnodes.replace(":", "-"),
        "ntasks-per-node": 1,  # one torchrun on each node; it starts the ranks
        "cpus-per-task": spec.cpus,
        "gpus-per-node": spec.gpus,
        "mem": spec.memory_gib and f"{spec.memory_gib}G",
        "time": spec.time,
        "output": "%x-%j.log",
    }
    head = [f"#SBATCH --{key}={value}\n" for key, value in given.items() if value is not None]
    lines = [f"export {key}={value}\n" for key, value in exports.items()]
    text = "".join([_HEADER.format(name=spec.name), *head, _BODY, *lines])
    command = " \\\n  ".join(["exec srun --kill-on-bad-exit=1", *_lines(words)])
    return f"{text}{_MEETING if where else ''}\n{command}\n"


def _lines(words: list[str]) -> list[str]:
    """One option with its value on each line, for readers; the script and its args on the last."""
    lines = [" ".join(words[:3])]
    # The interpreter, -m and torchrun are one line.
    rest = words[3:]
    while rest[0] not in ("-m", "--"):
        lines.append(" ".join(rest[:2]))
        rest = rest[2:]
    return [*lines, " ".join(rest)]
