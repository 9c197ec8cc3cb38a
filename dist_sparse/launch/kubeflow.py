"""A manifest with which Kubeflow runs a job.

A TrainJob of Kubeflow Trainer v2 (`trainer.kubeflow.org/v1alpha1`), on a runtime with its torch
policy, such as `torch-distributed`. That policy sets `PET_` variables in each pod. Kubernetes fills
in those that differ between nodes, as `$(NAME)` in the command; in all words of the user `$` is
doubled, which Kubernetes undoes.
"""

from __future__ import annotations

import re
from typing import Any

from dist_sparse.launch.command import argv, new_id, plain_variables, target, threads
from dist_sparse.launch.spec import LaunchSpec

__all__ = ["manifest", "render"]

_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MOST_WORDS = 128  # the API's limit on the lists `command` and `args`
# Words that need no quotes. kubectl reads 1e-3, 08 and y as numbers and booleans, and PyYAML does
# not quote them.
_PLAIN = re.compile(r"-{0,2}[A-Za-z].+", re.DOTALL)

_COMMENTS = """\
# Runs {name} under torchrun, by Kubeflow Trainer v2. Yours to read and edit; then: kubectl create -f FILE
# The image must hold Python, torch and {what}.
"""  # noqa: E501


def render(
    spec: LaunchSpec, *, runtime: str = "torch-distributed", namespace: str | None = None
) -> str:
    """Return the manifest as YAML, with comments. Arguments and errors are those of `manifest`.

    Raises:
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "`launch kubeflow` writes YAML: it needs PyYAML (pip install pyyaml)."
        ) from error
    job = manifest(spec, runtime=runtime, namespace=namespace)
    what = " ".join(target(spec)[: 1 if spec.script else 2])
    # Some characters end a line, and with it the comment, or are not allowed in YAML.
    comments = _COMMENTS.format(name=spec.name, what=what if what.isprintable() else ascii(what))
    if (limit := spec.resources.walltime) is not None:
        comments += (
            f"# Trainers that know spec.activeDeadlineSeconds can hold the limit of {limit}:\n"
        )
        comments += f"# add activeDeadlineSeconds: {_seconds(limit)} below spec.\n"

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text_of(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else "'"
        )

    Dumper.add_representer(str, text_of)
    text: str = yaml.dump(job, Dumper=Dumper, sort_keys=False, width=120)
    return comments + text


def manifest(
    spec: LaunchSpec, *, runtime: str = "torch-distributed", namespace: str | None = None
) -> dict[str, Any]:
    """Return the TrainJob as a dictionary of plain values.

    Args:
        spec: of its rendezvous only the id is used: Kubeflow knows where the nodes meet.
        runtime: name of a ClusterTrainingRuntime with the torch policy.
        namespace: of the job; None leaves it to kubectl.

    Raises:
        ValueError: a TrainJob can't hold `spec`: a range of nodes, a name that no pod can have, too
            many words, or a word that is not valid text.
    """
    if ":" in spec.nnodes:
        raise ValueError(f"Invalid nnodes={spec.nnodes!r}: a TrainJob has a fixed number of nodes.")
    if not _DNS_LABEL.fullmatch(spec.name):
        raise ValueError(
            f"Invalid name={spec.name!r}: must begin with a letter and not end with - for"
            " Kubernetes."
        )
    if spec.max_restarts and spec.max_nodes > 1:
        # torch's static rendezvous gives restarted ranks the store of the ranks before them; see
        # `plain_variables`.
        rule = (
            "torchrun can't restart ranks on several nodes here; let the runtime's failurePolicy"
            " restart the job"
        )
        raise ValueError(f"Invalid max_restarts={spec.max_restarts}: {rule}.")
    for name, value in (("runtime", runtime), ("namespace", namespace)):
        if value is not None and not _OBJECT_NAME.fullmatch(value):
            raise ValueError(
                f"Invalid {name}={value!r}: must be the name of an object in Kubernetes."
            )
    _refuse_bytes(spec)
    args = len(spec.args)
    if args > _MOST_WORDS:
        raise ValueError(f"Invalid args: {args} words, a TrainJob takes {_MOST_WORDS}.")
    meeting = _meeting(spec) if spec.max_nodes > 1 else []
    words = argv(spec, rendezvous=meeting)
    # The words of the meeting are Kubernetes' to fill in. They are found by place, as in `sbatch`.
    begin = words.index("--rdzv-backend")
    escaped = [_escaped(word) for word in words]
    escaped[begin : begin + len(meeting)] = meeting
    trainer: dict[str, Any] = {
        "image": spec.resources.image,
        "numNodes": spec.max_nodes,
        # Trainers from v2.2 on accept only numbers here; the command has it anyway.
        "numProcPerNode": spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else None,
        "command": escaped[: len(words) - args],
        "args": escaped[len(words) - args :],
        "env": [{"name": key, "value": _escaped(value)} for key, value in _variables(spec).items()],
        "resourcesPerNode": _resources(spec),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": spec.name} | ({} if namespace is None else {"namespace": namespace}),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": runtime,
            },
            "trainer": {
                key: value for key, value in trainer.items() if value not in (None, [], {})
            },
        },
    }


def _refuse_bytes(spec: LaunchSpec) -> None:
    """Words of a command line that are not valid in its locale have lone surrogates, which UTF-8
    can't hold."""
    words = [
        (name, word, ascii(word)) for name in ("script", "python") if (word := getattr(spec, name))
    ]
    words += [("args", word, ascii(word)) for word in spec.args]
    # Which may be a secret.
    words += [(f"env[{key!r}]", value, "the value") for key, value in spec.env.items()]
    for name, word, shown in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise ValueError(f"Invalid {name}: {shown} is no text, and a TrainJob holds text only.")


def _meeting(spec: LaunchSpec) -> list[str]:
    # Not c10d: the first node would have to find out through the DNS, in time, that it is the
    # first.
    words = [
        "--rdzv-backend",
        "static",
        "--rdzv-endpoint",
        "",
        "--rdzv-id",
        new_id(spec),
        "--rdzv-conf",
        "timeout=600",
    ]
    words += ["--master-addr", "$(PET_MASTER_ADDR)", "--master-port", "$(PET_MASTER_PORT)"]
    return [*words, "--node-rank", "$(PET_NODE_RANK)"]


def _variables(spec: LaunchSpec) -> dict[str, str]:
    count = threads(spec, spec.resources.cpu)
    omp = {} if count is None else {"OMP_NUM_THREADS": str(count)}
    return {"PYTHONHASHSEED": "0"} | plain_variables(spec) | omp | dict(spec.env)


def _resources(spec: LaunchSpec) -> dict[str, dict[str, int | str]]:
    needs = spec.resources
    wanted = {
        "cpu": needs.cpu,
        "memory": needs.memory_gib and f"{needs.memory_gib}Gi",
        "nvidia.com/gpu": needs.gpu,
    }
    amounts = {name: amount for name, amount in wanted.items() if amount}
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _escaped(word: str) -> str:
    return word.replace("$", "$$")


def _seconds(walltime: str) -> int:
    days, _, clock = walltime.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
