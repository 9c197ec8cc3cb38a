"""Write a job as a manifest for Kubeflow, in JSON, which kubectl reads like YAML.

It is a TrainJob of Kubeflow Trainer v2 (`trainer.kubeflow.org/v1alpha1`), for a runtime with the
torch policy, such as `torch-distributed`. That policy sets `PET_` variables in each pod. Kubernetes
replaces `$(NAME)` in the command by the variables that differ between nodes, and `$$` by `$`: each
`$` in the user's words is doubled.
"""

import json
from typing import Any

from dist_sparse.launch.spec import LaunchSpec, argv, defaults, new_id


def render(spec: LaunchSpec, *, runtime: str = "torch-distributed") -> str:
    """Return the TrainJob as JSON.

    Args:
        spec: the job. Its rendezvous only gives the id: Kubeflow knows where the nodes meet.
        runtime: name of a ClusterTrainingRuntime with the torch policy.

    Raises:
        ValueError: a range of nodes, or restarts on several nodes.
    """
    if ":" in spec.nnodes:
        raise ValueError(f"Invalid nnodes={spec.nnodes!r}: a TrainJob has a fixed number of nodes.")
    if spec.max_restarts and spec.max_nodes > 1:
        # With the static rendezvous, restarted ranks get the old store: see `defaults` in spec.py.
        raise ValueError(
            f"Invalid max_restarts={spec.max_restarts}: torchrun can't restart ranks on several"
            " nodes here; let the runtime's failurePolicy restart the job."
        )
    args = len(spec.args)
    rendezvous = _rendezvous(spec) if spec.max_nodes > 1 else []
    words = argv(spec, rendezvous=rendezvous, quote=_escape)
    variables = defaults(spec, spec.cpus) | dict(spec.env)
    resources = {"cpu": spec.cpus, "memory": spec.memory("Gi"), "nvidia.com/gpu": spec.gpus}
    resources = _drop_empty(resources)
    trainer = {
        "image": spec.image,
        "numNodes": spec.max_nodes,
        # Not gpu, cpu or auto, which Trainer v2.2 refuses: the command has them.
        "numProcPerNode": spec.processes,
        "command": words[: len(words) - args],
        "args": words[len(words) - args :],
        "env": [{"name": key, "value": _escape(value)} for key, value in variables.items()],
        "resourcesPerNode": _drop_empty({"requests": resources, "limits": resources}),
    }
    api = "trainer.kubeflow.org"
    job = {
        "apiVersion": f"{api}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name},
        "spec": {
            "runtimeRef": {"apiGroup": api, "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": _drop_empty(trainer),
        },
    }
    return json.dumps(job, indent=2) + "\n"


def _drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    # Kubernetes takes an empty field as a value, not as the default.
    return {name: value for name, value in fields.items() if value}


def _rendezvous(spec: LaunchSpec) -> list[str]:
    """Return torchrun's rendezvous options; Kubernetes expands the variables in them."""
    # Not c10d: there the first node must learn from the DNS, in time, that it is first.
    words = ["--rdzv-backend", "static", "--rdzv-endpoint", "", "--rdzv-id", _escape(new_id(spec))]
    words += ["--rdzv-conf", "timeout=600", "--master-addr", "$(PET_MASTER_ADDR)"]
    return [*words, "--master-port", "$(PET_MASTER_PORT)", "--node-rank", "$(PET_NODE_RANK)"]


def _escape(word: str) -> str:
    return word.replace("$", "$$")
