"""The files for Slurm and Kubeflow: golden ones, and what torchrun gets from them."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_sparse.launch import kubeflow, sbatch
from dist_sparse.launch.spec import LaunchSpec, argv

from .jobs import finish, job, script

GOLDEN = Path(__file__).with_name("golden")
NASTY = (
    "a b",
    "$(touch pwned)",
    "$HOME",
    '"',
    "'",
    "--no",
    "--",
    "two\nlines",
    "$$",
    "-x",
    "#",
    "é",
    "`id`",
    "",
    "${local_rank}",
    '"$head_node:31000"',
)
ONE = LaunchSpec(
    script="examples/dlrm/main.py",
    args=("--epochs", "1"),
    name="dlrm",
    nproc_per_node=2,
    max_restarts=3,
    rdzv_id="dlrm-0123456789abcdef",
    python="python",
)
TWO = LaunchSpec(
    module="my.training",
    args=NASTY,
    name="two-tower",
    nnodes="2",
    nproc_per_node=8,
    rdzv_id="two-tower-0123456789abcdef",
    env={"NOTE": 'it\'s $5 & "more"', "NCCL_DEBUG": "INFO"},
    grace=120,
    cpus=64,
    gpus=8,
    memory_gib=512,
    time="1-02:00:00",
    image="registry.example/t:1",
    python="python",
)
SPECS = {"one": ONE, "two": TWO}
MEETING = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--node-rank",
    "--local-addr",
)
MEETING += ("--master-addr", "--master-port")
TALK = """
import json
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
say(f"result{rank}", json.dumps([int(total), sys.argv[1:], os.environ.get("NOTE")]))
dist.barrier()
os._exit(0)  # gloo's own teardown aborts now and then
"""


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def cluster(folder: Path) -> dict[str, str]:
    """A Slurm of one machine: `srun` runs the command here, without its own options; `scontrol`
    knows the nodes."""
    folder.mkdir()
    executable(folder / "srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"')
    executable(folder / "scontrol", 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"')
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77", "PET_NNODES": "9"}


def without_meeting(words: list[str]) -> list[str]:
    """The words of a torchrun, but those that say how nodes meet."""
    kept, rest = [], list(words)
    while rest:
        if rest[0] == "--":
            return kept + rest
        word = rest.pop(0)
        if word in MEETING:
            rest.pop(0)
        else:
            kept.append(word)
    return kept


@pytest.mark.parametrize("name", SPECS)
def test_sbatch_scripts_are_the_golden_ones(name: str) -> None:
    text = sbatch.render(SPECS[name])
    assert text == (GOLDEN / f"{name}.sbatch").read_text()
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sbatch"], check=True)


@pytest.mark.parametrize("name", SPECS)
def test_sbatch_scripts_run_torchrun_word_for_word(name: str, tmp_path: Path) -> None:
    """bash undoes all quotes; `python` is one that prints its words and what it inherits."""
    spec = SPECS[name]
    environ = {**os.environ, **cluster(tmp_path / "bin"), "HOME": str(tmp_path)}
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    executable(
        tmp_path / "bin" / "python",
        f'exec {shlex.quote(sys.executable)} -c {shlex.quote(show)} "$@"',
    )
    (tmp_path / "job.sh").write_text(sbatch.render(spec, port=31000))
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    words, inherited = json.loads(done.stdout)
    expected = spec
    if spec.max_nodes > 1:
        expected = replace(spec, rdzv_endpoint="n1:31000", rdzv_id=f"{spec.rdzv_id}-77")
    assert ["python", *words] == argv(expected)
    assert spec.env.items() <= inherited.items()
    assert inherited["PYTHONHASHSEED"] == "0"
    assert not [key for key in inherited if key.startswith("PET_")]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["c10d", '"$head_node:31000"', "0", "$(touch pwned)"])
def test_a_script_called_like_a_word_of_the_meeting_is_quoted(name: str, tmp_path: Path) -> None:
    """Such words are found by their place in the command: only torchrun's own are left to bash and
    Kubernetes."""
    environ = {**os.environ, **cluster(tmp_path / "bin")}
    executable(
        tmp_path / "bin" / "python",
        f'exec {shlex.quote(sys.executable)} -c "import sys; print(sys.argv)" "$@"',
    )
    (tmp_path / "job.sh").write_text(
        sbatch.render(LaunchSpec(script=name, nnodes="2", python="python"), port=31000)
    )
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert ast.literal_eval(done.stdout)[-1] == name
    own = "$(PET_NODE_RANK)"
    command = json.loads(kubeflow.render(LaunchSpec(script=own, nnodes="2")))["spec"]["trainer"][
        "command"
    ]
    assert command.count(own) == 1 and command[-1] == f"${own}"


@pytest.mark.slow
def test_an_sbatch_script_runs_a_real_job(tmp_path: Path) -> None:
    words = [
        "launch",
        "sbatch",
        "--nproc",
        "2",
        "--env",
        "NOTE=a 'b'",
        "--output",
        "job.sh",
        script(tmp_path, TALK),
    ]
    written = subprocess.run(
        [sys.executable, "-m", *words, "--", *NASTY], cwd=tmp_path, env=_clone()
    )
    assert written.returncode == 0
    with job(tmp_path, ["job.sh"], command=("bash",), **cluster(tmp_path / "bin")) as running:
        status, _, err = finish(running)
    assert status == 0, err
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == [2, list(NASTY), "a 'b'"]


@pytest.mark.parametrize("name", SPECS)
def test_trainjobs_are_the_golden_ones(name: str) -> None:
    spec = SPECS[name]
    text = kubeflow.render(spec)
    assert text == (GOLDEN / f"{name}.trainjob.json").read_text()
    found = json.loads(text)
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    words, variables = as_kubernetes(found["spec"]["trainer"], {})
    anywhere = replace(spec, rdzv_endpoint="any:1", rdzv_id="any")
    assert without_meeting(words) == without_meeting(argv(anywhere))
    assert spec.env.items() <= variables.items()


def as_kubernetes(trainer: dict[str, Any], pod: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words and variables of a container, with $(NAME) filled in and $$ undone as Kubernetes
    does it."""

    def filled(text: str, variables: dict[str, str]) -> str:
        def value(found: re.Match[str]) -> str:
            return "$" if found[0] == "$$" else variables.get(found[1], found[0])

        return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)

    variables = dict(pod)
    for entry in trainer["env"]:
        variables[entry["name"]] = filled(entry["value"], variables)
    return [
        filled(word, variables) for word in [*trainer["command"], *trainer.get("args", [])]
    ], variables


@pytest.mark.slow
def test_a_trainjob_on_two_nodes_is_a_real_job(tmp_path: Path) -> None:
    """Two pods of this machine, with the variables that Kubeflow's torch policy sets."""
    spec = LaunchSpec(
        script=script(tmp_path, TALK),
        args=NASTY,
        nnodes="2",
        env={"NOTE": "$(PET_NNODES) $$"},
        python=sys.executable,
    )
    trainer = json.loads(kubeflow.render(spec))["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    pod = {
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
    }
    (words, first), (other, second) = (
        as_kubernetes(trainer, pod | {"PET_NODE_RANK": rank}) for rank in "01"
    )
    assert without_meeting(words) == without_meeting(other)
    with (
        job(tmp_path, words[1:], command=words[:1], **first, GLOO_SOCKET_IFNAME="lo") as one,
        job(tmp_path, other[1:], command=other[:1], **second, GLOO_SOCKET_IFNAME="lo") as two,
    ):
        for running in (two, one):
            status, _, err = finish(running)
            assert status == 0, err
    for rank in range(2):
        assert json.loads((tmp_path / f"result{rank}").read_text()) == [
            2,
            list(NASTY),
            "$(PET_NNODES) $$",
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nnodes": "1:2"}, "a fixed number of nodes"),
        ({"nnodes": "2", "max_restarts": 1}, "max_restarts=1"),
    ],
)
def test_what_is_no_trainjob_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kubeflow.render(LaunchSpec(**{"script": "train.py", **change}))


def _clone() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f".:{Path(__file__).parents[2]}"}
