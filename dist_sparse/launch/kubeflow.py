"""A manifest with which Kubeflow runs a job, as JSON, which kubectl reads like YAML.

A TrainJob of Kubeflow Trainer v2 (`trainer.kubeflow.org/v1alpha1`), on a runtime with its torch
policy, such as `torch-distributed`. That policy sets `PET_` variables in each pod. Kubernetes fills
in those that differ between nodes, as `$(NAME)` in the command; in all words of the user `$` is
doubled, which Kubernetes undoes.
"""

from __future__ import annotations

import json
from typing import Any

from dist_sparse.launch.spec import LaunchSpec, argv, defaults, new_id


def render(spec: LaunchSpec, *, runtime: str = "torch-distributed") -> str:
    """Return the TrainJob as JSON.

    Args:
        spec: of its rendezvous only the id is used: Kubeflow knows where the nodes meet.
        runtime: name of a ClusterTrainingRuntime with the torch policy.

    Raises:
        ValueError: a range of nodes, or restarts on several nodes.
    """
    if ":" in spec.nnodes:
        raise ValueError(f"Invalid nnodes={spec.nnodes!r}: a TrainJob has a fixed number of nodes.")
    if spec.max_restarts and spec.max_nodes > 1:
        # torch's static rendezvous gives restarted ranks the store of the ranks before them; see
        # `defaults`.
        raise ValueError(
            f"Invalid max_restarts={spec.max_restarts}: torchrun can't restart ranks on several"
            " nodes here; let the runtime's failurePolicy restart the job."
        )
    args = len(spec.args)
    words = argv(spec, rendezvous=_meeting(spec) if spec.max_nodes > 1 else [], quote=_escaped)
    variables = defaults(spec, spec.cpus) | dict(spec.env)
    amounts = {"cpu": spec.cpus, "memory": spec.memory("Gi"), "nvidia.com/gpu": spec.gpus}
    amounts = _given(amounts)
    trainer = {
        "image": spec.image,
        "numNodes": spec.max_nodes,
        # Trainers from v2.2 on accept only numbers here; the command has it anyway.
        "numProcPerNode": spec.processes,
        "command": words[: len(words) - args],
        "args": words[len(words) - args :],
        "env": [{"name": key, "value": _escaped(value)} for key, value in variables.items()],
        "resourcesPerNode": _given({"requests": amounts, "limits": amounts}),
    }
    api = "trainer.kubeflow.org"
    job = {
        "apiVersion": f"{api}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name},
        "spec": {
            "runtimeRef": {"apiGroup": api, "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": _given(trainer),
        },
    }
    return json.dumps(job, indent=2) + "\n"


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    # Kubernetes reads an empty field as a value, not as the default.
    return {name: value for name, value in fields.items() if value}


def _meeting(spec: LaunchSpec) -> list[str]:
    """Return words in which Kubernetes fills in the variables."""
    # Not c10d: the first node would have to find out through the DNS, in time, that it is the
    # first.
    words = ["--rdzv-backend", "static", "--rdzv-endpoint", "", "--rdzv-id", _escaped(new_id(spec))]
    words += ["--rdzv-conf", "timeout=600", "--master-addr", "$(PET_MASTER_ADDR)"]
    return [*words, "--master-port", "$(PET_MASTER_PORT)", "--node-rank", "$(PET_NODE_RANK)"]


def _escaped(word: str) -> str:
    return word.replace("$", "$$")
