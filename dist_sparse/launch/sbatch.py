"""Write a job as a bash script for Slurm's `sbatch`: `srun` starts one torchrun on each node.

Every value in it matches a pattern of `LaunchSpec` or is quoted by shlex.
"""

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
    rendezvous, find_head_node = [], ""
    if spec.max_nodes > 1:
        # These words are not quoted: bash expands the variables in them.
        job = f'{shlex.quote(new_id(spec))}-"$SLURM_JOB_ID"'
        rendezvous = meeting(f'"$head_node:{port}"', job)
        find_head_node = _MEETING
    words = argv(spec, rendezvous=rendezvous, quote=shlex.quote)
    variables = defaults(spec, spec.cpus) | dict(spec.env)
    exports: dict[str, object] = {"OMP_NUM_THREADS": '"${OMP_NUM_THREADS:-1}"'}
    exports |= {key: shlex.quote(value) for key, value in variables.items()}
    # srun does not inherit --cpus-per-task from sbatch.
    exports["SRUN_CPUS_PER_TASK"] = spec.cpus
    head = {
        "job-name": spec.name,
        "nodes": spec.nnodes.replace(":", "-"),
        # One torchrun, which starts the ranks.
        "ntasks-per-node": 1,
        "cpus-per-task": spec.cpus,
        "gpus-per-node": spec.gpus,
        "mem": spec.memory("G"),
        "time": spec.time,
        "output": "%x-%j.log",
    }
    directives = _format_given("#SBATCH --{}={}\n", head)
    assignments = _format_given("export {}={}\n", exports)
    header = _HEADER.format(name=spec.name)
    command = " \\\n  ".join(["exec srun --kill-on-bad-exit=1", *_lines_of(words)])
    return f"{header}{directives}{_BODY}{assignments}{find_head_node}\n{command}\n"


def _format_given(line: str, values: Mapping[str, object]) -> str:
    # A value of None is left to Slurm's default.
    return "".join(line.format(key, value) for key, value in values.items() if value is not None)


def _lines_of(words: list[str]) -> list[str]:
    """Return one option with its value per line, for readers; the script and its args are the last
    line."""
    lines = [" ".join(words[:3])]
    # The interpreter, -m and torchrun are one line.
    rest = words[3:]
    while rest[0] not in ("-m", "--"):
        lines.append(" ".join(rest[:2]))
        rest = rest[2:]
    return [*lines, " ".join(rest)]
