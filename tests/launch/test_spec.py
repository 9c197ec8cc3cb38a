"""Specs: what can't be run is refused at construction, and torchrun gets exactly what a spec
says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args

from dist_sparse.launch.spec import LaunchSpec, additions, argv, defaults

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"script": None}, "script=None, module=None: must be exactly one"),
    ({"module": "m"}, "must be exactly one"),
    ({"script": None, "module": "a-b"}, "a dotted Python name"),
    ({"name": "Train"}, "name='Train': must be 1 to 53 of a-z, 0-9 and -, beginning"),
    ({"name": "x" * 54}, "1 to 53"),
    ({"name": "x\n"}, "name="),
    ({"name": "1x"}, "beginning with a letter"),
    ({"name": "x-"}, "not ending with -"),
    ({"nnodes": "0"}, "nnodes='0'"),
    ({"nproc_per_node": 0}, "nproc_per_node=0: must be a whole number, at least 1, or one of"),
    ({"nproc_per_node": "tpu"}, "nproc_per_node='tpu'"),
    ({"env": {"key": "x"}}, "env='key'"),
    ({"env": {"A B": "x"}}, "env='A B'"),
    ({"env": {"PET_NNODES": "9"}}, "env='PET_NNODES'"),
    ({"env": {"A": 1}}, "env=1: must be text"),
    ({"env": {"A": "a\0b"}}, "without a null character"),
    ({"args": "--epochs 1"}, "args='--epochs 1': must be a sequence of words"),
    ({"args": ("--epochs", 1)}, "args=1: must be text"),
    ({"script": Path("train.py")}, "must be text"),
    ({"python": None}, "python=None"),
    ({"name": None}, "name=None"),
    ({"nnodes": None}, "nnodes=None"),
    ({"nnodes": "4:2"}, "nnodes='4:2': must be MIN:MAX, with MIN <= MAX"),
    ({"nnodes": True}, "nnodes=True"),
    ({"nproc_per_node": 1.5}, "nproc_per_node=1.5"),
    ({"max_restarts": "3"}, "max_restarts='3': must be a number from 0 on"),
    ({"max_restarts": -1}, "max_restarts=-1"),
    ({"max_restarts": None}, "max_restarts=None"),
    ({"grace": "30\n#SBATCH --x"}, "grace='30"),
    ({"grace": -3}, "grace=-3: must be a number from 0 on"),
    ({"grace": True}, "grace=True"),
    ({"grace": 10**20}, "below 2**31"),
    ({"rdzv_endpoint": "node1"}, "rdzv_endpoint='node1': must be HOST:PORT"),
    ({"rdzv_endpoint": "node1:0"}, "with a port from 1 to 65535"),
    ({"rdzv_endpoint": "node1:65536"}, "with a port from 1 to 65535"),
    ({"rdzv_endpoint": "a b:1"}, "rdzv_endpoint='a b:1'"),
    ({"rdzv_endpoint": 29400}, "rdzv_endpoint=29400: must be text"),
    ({"rdzv_id": 5}, "rdzv_id=5: must be text"),
    ({"local_addr": 5}, "local_addr=5: must be text"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_bad_values_are_refused_with_their_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LaunchSpec(**{"script": "train.py", **change})


def test_numbers_of_nodes_and_processes_are_taken_as_text_or_not() -> None:
    spec = LaunchSpec(script="train.py", nnodes=2, nproc_per_node="8")  # type: ignore[arg-type]
    assert (spec.nnodes, spec.max_nodes, spec.processes) == ("2", 2, 8)


@pytest.mark.parametrize("endpoint", ["node-1.example:1", "::1:65535", "[fe80::1]:29400"])
def test_endpoints_that_torchrun_takes_are_accepted(endpoint: str) -> None:
    assert LaunchSpec(script="train.py", rdzv_endpoint=endpoint).rdzv_endpoint == endpoint


@pytest.mark.parametrize("key", ["UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"])
def test_variables_that_a_shell_refuses_reach_torchrun(key: str) -> None:
    """The launcher starts torchrun without a shell."""
    assert additions(LaunchSpec(script="train.py", env={key: "5"}), {})[key] == "5"


def test_a_spec_is_frozen_with_all_it_holds() -> None:
    env = {"A": "1"}
    spec = LaunchSpec(script="train.py", args=["x"], env=env)
    env["A"] = "2"
    assert spec.env == {"A": "1"} and spec.args == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.env["A"] = "3"  # type: ignore[index]


def test_only_what_torchrun_needs_is_in_a_spec() -> None:
    """The files of clusters are torchx's: a number for them once became lines of a script."""
    fields = {field.name for field in dataclasses.fields(LaunchSpec)}
    assert not fields & {"cpus", "gpus", "memory_gib", "time", "image"}


def test_torchrun_understands_one_node() -> None:
    args = ("--no", "--", "-h", "--nnodes", "9", "a b")
    words = argv(
        LaunchSpec(script="train.py", args=args, nproc_per_node="gpu", max_restarts=2, python="py")
    )
    assert words[:3] == ["py", "-m", "torch.distributed.run"]
    options = parse_args(words[3:])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("1", "gpu", 2)
    assert (options.rdzv_backend, options.rdzv_endpoint, options.local_addr) == (
        "c10d",
        "127.0.0.1:0",
        "127.0.0.1",
    )
    assert (options.standalone, options.module, options.no_python) == (False, False, False)
    assert (options.training_script, options.training_script_args) == ("train.py", list(args))


def test_torchrun_understands_several_nodes_and_a_module() -> None:
    words = argv(
        LaunchSpec(
            module="a.b",
            args=("--n", "1"),
            nnodes="2:4",
            nproc_per_node=8,
            rdzv_endpoint="[fe80::1]:29400",
            rdzv_id="x1",
            local_addr="10.0.0.2",
        )
    )
    options = parse_args(words[3:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id) == ("2:4", "8", "x1")
    assert (options.rdzv_endpoint, options.local_addr) == ("[fe80::1]:29400", "10.0.0.2")
    assert (options.module, options.training_script, options.training_script_args) == (
        True,
        "a.b",
        ["--n", "1"],
    )


def test_ids_are_random_and_never_the_same() -> None:
    spec = LaunchSpec(script="train.py", name="n")
    first, second = (words[words.index("--rdzv-id") + 1] for words in (argv(spec), argv(spec)))
    assert first != second and re.fullmatch("n-[0-9a-f]{32}", first)


@pytest.mark.parametrize(
    ("meeting", "message"),
    [
        ({"rdzv_id": "x"}, "rdzv_endpoint=None: must be given for nnodes='2'"),
        ({"rdzv_endpoint": "a:1"}, "rdzv_id=None: must be given for nnodes='2', the same"),
    ],
)
def test_several_nodes_must_know_where_to_meet(meeting: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argv(LaunchSpec(script="train.py", nnodes="2", **meeting))  # type: ignore[arg-type]


def test_variables_that_are_set_stay() -> None:
    spec = LaunchSpec(script="train.py", nproc_per_node=2, env={"A": "spec"})
    inherited = {"OMP_NUM_THREADS": "7", "PYTHONHASHSEED": "3", "A": "outside", "B": "b"}
    added = additions(spec, inherited)
    assert added["A"] == "spec" and not {"OMP_NUM_THREADS", "PYTHONHASHSEED", "B"} & added.keys()
    # Ranks with random hashes could not talk to each other.
    assert additions(spec, {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "0"


def test_threads_share_the_cores() -> None:
    spec = LaunchSpec(script="train.py", nproc_per_node=3)
    assert [defaults(spec, cores)["OMP_NUM_THREADS"] for cores in (1, 3, 8)] == ["1", "1", "2"]
    assert "OMP_NUM_THREADS" not in defaults(LaunchSpec(script="a.py", nproc_per_node="gpu"), 8)
    assert "GLOO_SOCKET_IFNAME" not in additions(LaunchSpec(script="train.py", nnodes="2"), {})
