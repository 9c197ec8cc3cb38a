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

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text_of(dumper: Any, text: str) -> Any:
        style = None if _PLAIN.fullmatch(text) else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_of)
    text: str = yaml.dump(job, Dumper=Dumper, sort_keys=False, width=120)
    return _comments(spec) + text


def _comments(spec: LaunchSpec) -> str:
    what = " ".join(target(spec)[: 1 if spec.script else 2])
    # Some characters end a line, and with it the comment, or are not allowed in YAML.
    comments = _COMMENTS.format(name=spec.name, what=what if what.isprintable() else ascii(what))
    limit = spec.resources.walltime
    if limit is None:
        return comments
    comments += f"# Trainers that know spec.activeDeadlineSeconds can hold the limit of {limit}:\n"
    return f"{comments}# add activeDeadlineSeconds: {_seconds(limit)} below spec.\n"


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
    _refuse_spec(spec)
    _refuse_object_name("runtime", runtime)
    metadata = {"name": spec.name}
    if namespace is not None:
        _refuse_object_name("namespace", namespace)
        metadata["namespace"] = namespace
    _refuse_bytes(spec)
    args = len(spec.args)
    if args > _MOST_WORDS:
        raise ValueError(f"Invalid args: {args} words, a TrainJob takes {_MOST_WORDS}.")
    meeting = _meeting(spec) if spec.max_nodes > 1 else []
    words = argv(spec, rendezvous=meeting, quote=_escaped)
    trainer: dict[str, Any] = {
        "image": spec.resources.image,
        "numNodes": spec.max_nodes,
        # Trainers from v2.2 on accept only numbers here; the command has it anyway.
        "numProcPerNode": spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else None,
        "command": words[: len(words) - args],
        "args": words[len(words) - args :],
        "env": [{"name": key, "value": _escaped(value)} for key, value in _variables(spec).items()],
        "resourcesPerNode": _resources(spec),
    }
    api, kind = "trainer.kubeflow.org", "ClusterTrainingRuntime"
    return {
        "apiVersion": f"{api}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": api, "kind": kind, "name": runtime},
            # Kubernetes reads an empty field as a value, not as the default.
            "trainer": {key: trainer[key] for key in trainer if trainer[key] not in (None, [], {})},
        },
    }


def _refuse_spec(spec: LaunchSpec) -> None:
    """Refuse jobs that a TrainJob can't describe."""
    if ":" in spec.nnodes:
        raise ValueError(f"Invalid nnodes={spec.nnodes!r}: a TrainJob has a fixed number of nodes.")
    if not _DNS_LABEL.fullmatch(spec.name):
        rule = "must begin with a letter and not end with - for Kubernetes"
        raise ValueError(f"Invalid name={spec.name!r}: {rule}.")
    if spec.max_restarts and spec.max_nodes > 1:
        # torch's static rendezvous gives restarted ranks the store of the ranks before them; see
        # `plain_variables`.
        rule = (
            "torchrun can't restart ranks on several nodes here; let the runtime's failurePolicy"
            " restart the job"
        )
        raise ValueError(f"Invalid max_restarts={spec.max_restarts}: {rule}.")


def _refuse_object_name(argument: str, name: str) -> None:
    if not _OBJECT_NAME.fullmatch(name):
        rule = "must be the name of an object in Kubernetes"
        raise ValueError(f"Invalid {argument}={name!r}: {rule}.")


def _refuse_bytes(spec: LaunchSpec) -> None:
    """Refuse words with lone surrogates, which UTF-8 can't hold: words of a command line that are
    not valid in its locale have them."""
    words = [("script", spec.script or ""), ("python", spec.python)]
    words += [("args", word) for word in spec.args]
    shown = [(name, word, ascii(word)) for name, word in words]
    # A value may be a secret.
    shown += [(f"env[{key!r}]", value, "the value") for key, value in spec.env.items()]
    for name, word, text in shown:
        if re.search("[\ud800-\udfff]", word):
            raise ValueError(f"Invalid {name}: {text} is no text, and a TrainJob holds text only.")


def _meeting(spec: LaunchSpec) -> list[str]:
    """Return words in which Kubernetes fills in the variables."""
    # Not c10d: the first node would have to find out through the DNS, in time, that it is the
    # first.
    words = ["--rdzv-backend", "static", "--rdzv-endpoint", "", "--rdzv-id", new_id(spec)]
    words += ["--rdzv-conf", "timeout=600", "--master-addr", "$(PET_MASTER_ADDR)"]
    return [*words, "--master-port", "$(PET_MASTER_PORT)", "--node-rank", "$(PET_NODE_RANK)"]


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
