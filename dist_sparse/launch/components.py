"""A component for torchx.

`torchx run -s local_cwd FILE:train --script train.py --nproc 2 -- ARGS`, where FILE is this file,
in the folder of the scripts. Each node runs this launcher by the interpreter: torchx's own
`dist.ddp` needs torchrun on PATH, and fails silently without it. torchx parses this file and
executes it outside of any package, so it imports nothing of the launcher. The launcher checks the
arguments on the node.
"""

import sys
from typing import Dict, Optional  # noqa: UP035  # the only annotations that torchx 0.7.0 can parse

from torchx import specs


def train(
    *args: str,
    script: Optional[str] = None,  # noqa: UP045
    module: Optional[str] = None,  # noqa: UP045
    nnodes: int = 1,
    nproc: str = "1",
    name: str = "train",
    image: str = "",
    python: str = sys.executable,
    launcher: str = "launch",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_restarts: int = 0,
    grace: int = 30,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    rdzv_port: int = 29400,
) -> specs.AppDef:
    """Run a training script under torchrun, on one node or several.

    Args:
        args: the script's own arguments
        script: what every rank runs, or
        module: the module that every rank runs
        nnodes: nodes
        nproc: processes on each node: a number, or gpu, cpu, auto
        name: the name of the job: a-z, 0-9 and -
        image: container image, or what the scheduler uses for one
        python: the interpreter on the nodes (default: the one that runs torchx)
        launcher: the launcher's module there: launch in a clone, dist_sparse.launch where the
            package is installed
        env: variables for the ranks
        max_restarts: restarts after a rank has failed
        grace: seconds between a signal and SIGKILL
        cpu: cores of a node
        gpu: GPUs of a node
        memMB: memory of a node, in MB
        rdzv_port: port on the first node, where several nodes meet
    """
    words = ["-m", launcher, "torchrun", "--nnodes", str(nnodes), "--nproc", nproc, "--name", name]
    words += ["--max-restarts", str(max_restarts), "--grace", str(grace)]
    # A job on one node ignores the rendezvous options.
    words += ["--rdzv-host-env", specs.macros.rank0_env, "--rdzv-port", str(rdzv_port)]
    words += ["--rdzv-id", specs.macros.app_id]
    words += [str(script), "--"] if module is None else ["--module", module, "--"]
    # torchx replaces ${...} in all words and values, and $$ by $.
    words += [word.replace("$", "$$") for word in args]
    role = specs.Role(
        name=name,
        image=image,
        entrypoint=python,
        args=words,
        env={key: value.replace("$", "$$") for key, value in (env or {}).items()},
        num_replicas=nnodes,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
        port_map={"c10d": rdzv_port},
    )
    return specs.AppDef(name=name, roles=[role])
