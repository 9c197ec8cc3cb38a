"""Can this machine train a sparse TorchRec model, and if not, which command mends it?

Looks at what is installed by its metadata and never imports TorchRec or FBGEMM here: what has to be loaded is loaded in
a process of its own with a time limit, because a bad mix can crash the interpreter. Changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from dist_sparse.text import table_lines
from dist_sparse.versions import check_versions, fitting

__all__ = ["Diagnosis", "Finding", "examine", "installed"]

_LATEST: Final = "1.8"
_TORCH: Final = '"torch==2.13.*" --extra-index-url URL'
_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_SECONDS: Final = 120.0
_OPTIONAL: Final = {
    "tensorboard": "numbers of a run in TensorBoard",
    "matplotlib": "pictures in reports",
    "lightning": "callbacks for Lightning",
    "torchx": "torchx components",
}

_LOOKUP: Final = """
import dist_sparse.torchrec, torch, torchrec
config = torchrec.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
ids = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 3]), torch.tensor([2]))
found = torchrec.EmbeddingBagCollection(tables=[config])(ids)["f"]
assert found.shape == (1, 4) and torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2])).tolist() == [0, 2]
"""

_GLOO: Final = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        what: it is.
        status: ``missing`` is not there, ``wrong`` is there and won't do.
        needed: to train; the rest is optional.
        says: a version, or what is the matter.
        mend: the command that puts it right; None where there is nothing to mend, or no command does.
    """

    what: str
    status: Literal["ok", "missing", "wrong"]
    needed: bool
    says: str
    mend: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        """Nothing that is needed is missing or wrong."""
        return all(each.status == "ok" for each in self.findings if each.needed)

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON-able values."""
        return {"can_train": self.can_train, "findings": [dataclasses.asdict(each) for each in self.findings]}

    def __str__(self) -> str:
        """A text table for people, and the commands."""
        rows = [(each.what, each.status, "needed" if each.needed else "optional", each.says) for each in self.findings]
        lines = table_lines(("what", "status", "", "finding"), rows)
        mends = [f"  {each.what}: {each.mend}" for each in self.findings if each.mend is not None]
        lines += ["", "To mend:", *mends] if mends else []
        if any(" URL" in line for line in mends):
            lines.append("  URL is that of PyTorch's package index for your CUDA version, or for CPUs.")
        broken = [each.what for each in self.findings if each.needed and each.status != "ok"]
        end = f"This can't train: {', '.join(broken)}." if broken else "All that is needed to train is here."
        return "\n".join([*lines, "", end])


def installed() -> dict[str, str]:
    """The version of every installed distribution that is looked at, by name."""
    found = {}
    for name in ("torch", "torchrec", *_FBGEMM, "triton", *_OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def examine(
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    cuda: bool | None = None,
) -> Diagnosis:
    """Looks at everything; takes as long as TorchRec needs to load, two minutes at most for each of two probes.

    Args:
        versions: as :func:`installed` gives them, which is the default.
        environment: variables to look at instead of the process's own; the probes run in it too.
        cuda: whether torch sees a GPU; asked by default.
    """
    versions = installed() if versions is None else versions
    environment = os.environ if environment is None else environment
    cuda = torch.cuda.is_available() if cuda is None else cuda
    return Diagnosis(
        findings=(
            *_python_and_torch(versions),
            *_torchrec(versions, environment, cuda),
            *_devices(versions, environment, cuda),
            *_addresses(),
            *_launching(environment),
            *(_package(name, versions, f"for {use}") for name, use in _OPTIONAL.items()),
        )
    )


def _python_and_torch(versions: Mapping[str, str]) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    yield Finding(
        what="python",
        status="ok" if fits else "wrong",
        needed=True,
        says=version if fits else f"{version}; 3.11 or later is needed",
    )
    yield _package("torch", versions, needed=True)


def _torchrec(versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool) -> Iterator[Finding]:
    """TorchRec and FBGEMM: there, fitting, and loading."""
    gemms = [name for name in _FBGEMM if name in versions]
    mend = _install_trio(versions, cuda)
    rec = versions.get("torchrec")
    yield Finding(
        what="torchrec",
        status="missing" if rec is None else "ok",
        needed=True,
        says=rec or "not installed; without it only plain PyTorch models can be sparsified",
        mend=mend if rec is None else None,
    )
    wrong = None
    if len(gemms) == 2:
        wrong = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
        mend = f"{_pip()} uninstall -y {' '.join(_FBGEMM)} && {mend}"
    elif cuda and gemms == ["fbgemm-gpu-cpu"]:
        wrong = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
        mend = f"{_pip()} uninstall -y fbgemm-gpu-cpu && {mend}"
    yield Finding(
        what="fbgemm",
        status="missing" if not gemms else "ok" if wrong is None else "wrong",
        needed=True,
        says="not installed" if not gemms else wrong or f"{gemms[0]} {versions[gemms[0]]}",
        mend=mend if not gemms or wrong else None,
    )
    if rec is None or not gemms or wrong or "torch" not in versions:
        return
    fits, said = _fit(versions["torch"], rec, versions[gemms[0]])
    yield Finding(
        what="versions fit", status="ok" if fits else "wrong", needed=True, says=said, mend=None if fits else mend
    )
    if not fits:
        return
    fault = _fails(_LOOKUP, environment)
    yield Finding(
        what="a lookup",
        status="ok" if fault is None else "wrong",
        needed=True,
        says=fault or "TorchRec and FBGEMM's operators load and look up a row",
        mend=None if fault is None else _install_trio(versions, cuda, again=True),
    )


def _devices(versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool) -> Iterator[Finding]:
    """What can compute, and what ranks can talk through."""
    driver = shutil.which("nvidia-smi") is not None
    yield Finding(
        what="cuda",
        status="ok" if cuda else "wrong" if driver else "missing",
        needed=False,
        says=f"{torch.cuda.device_count()} GPU(s), CUDA {torch.version.cuda}"
        if cuda
        else f"torch {torch.__version__} sees no GPU, though there is a driver"
        if driver
        else "no GPU: trains on the CPU",
        mend=f'{_pip()} install {_TORCH} "fbgemm-gpu=={_LATEST}.*"' if driver and not cuda else None,
    )
    nccl = dist.is_available() and dist.is_nccl_available()
    yield Finding(
        what="nccl",
        status="ok" if nccl else "missing",
        needed=cuda,
        says="available" if nccl else "this torch has none; ranks talk through it on GPUs only",
        mend=f"{_pip()} install {_TORCH}" if cuda and not nccl else None,
    )
    fault = _fails(_GLOO, environment)
    yield Finding(
        what="gloo",
        status="ok" if fault is None else "wrong",
        needed=not cuda,
        says=fault or "a process group starts and sums",
        mend=None if fault is None else "export GLOO_SOCKET_IFNAME=lo",
    )
    yield _package("triton", versions, "for masks on GPUs", needed=cuda)


def _addresses() -> Iterator[Finding]:
    """gloo listens on the address of the host name, launchers on that of localhost."""
    for name, what, mend in (
        ("localhost", "localhost", "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts"),
        (socket.gethostname(), "host name", "export GLOO_SOCKET_IFNAME=lo"),
    ):
        try:
            found = socket.getaddrinfo(name, None)[0][4][0]
        except OSError as error:
            yield Finding(
                what=what, status="wrong", needed=False, says=f"{name} has no address: {error.strerror}", mend=mend
            )
        else:
            yield Finding(what=what, status="ok", needed=False, says=f"{name} is {found}")


def _launching(environment: Mapping[str, str]) -> Iterator[Finding]:
    """`dist-sparse launch` needs none of these to be right; torchrun does."""
    folder = str(Path(sys.executable).parent)
    torchrun = shutil.which("torchrun", path=environment.get("PATH"))
    yield Finding(
        what="torchrun",
        status="missing" if torchrun is None else "ok",
        needed=False,
        says="is not on PATH, where torchx looks for it" if torchrun is None else "is on PATH",
        mend=f"export PATH={shlex.quote(folder)}:$PATH" if torchrun is None else None,
    )
    seed = environment.get("PYTHONHASHSEED")
    fits = seed is not None and re.fullmatch("[0-9]+", seed) is not None
    yield Finding(
        what="PYTHONHASHSEED",
        status="ok" if fits else "missing" if seed is None else "wrong",
        needed=False,
        says=f"is {seed}" if fits else "is no number on all ranks: DMP.reshard hangs (dist-sparse launch sets it)",
        mend=None if fits else "export PYTHONHASHSEED=0",
    )
    options = sorted(name for name in environment if name.startswith("PET_"))
    yield Finding(
        what="PET_ variables",
        status="wrong" if options else "ok",
        needed=False,
        says=f"torchrun takes options from {', '.join(options)}" if options else "none is set",
        mend=f"unset {' '.join(options)}" if options else None,
    )


def _package(name: str, versions: Mapping[str, str], use: str = "", needed: bool = False) -> Finding:
    """A distribution, against what the package's own metadata asks for."""
    wanted, version = _wanted().get(name, name), versions.get(name)
    status: Literal["ok", "missing", "wrong"] = "ok"
    if version is None:
        status = "missing"
    elif _numbers(version) < _numbers(wanted.partition(">=")[2]):
        status = "wrong"
    says = {"ok": f"{version}", "missing": "not installed", "wrong": f"{version} is older than {wanted} asks for"}
    return Finding(
        what=name,
        status=status,
        needed=needed,
        says=says[status] + (f"; {use}" if use and status != "ok" else ""),
        mend=None if status == "ok" else f'{_pip()} install "{wanted}"',
    )


def _wanted() -> dict[str, str]:
    """The requirements of dist_sparse by name, extras too."""
    try:
        requirements = importlib.metadata.requires("dist_sparse") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [requirement.partition(";")[0].strip() for requirement in requirements]
    return {re.split(r"[^\w-]", requirement, maxsplit=1)[0]: requirement for requirement in plain}


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [] if found is None else [int(part) for part in found[0].split(".")]


def _fit(torch_version: str, torchrec_version: str, fbgemm_version: str) -> tuple[bool, str]:
    """Whether a mix may be used, and what there is to say of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_versions(torch_version, torchrec_version, fbgemm_version)
        except ImportError as error:
            return False, str(error)
    unknown = "; ".join(str(warning.message) for warning in said)
    return True, unknown or "torch, torchrec and fbgemm were built for each other"


def _install_trio(versions: Mapping[str, str], cuda: bool, again: bool = False) -> str:
    """The command that installs the TorchRec and FBGEMM that fit the torch that is here; else all three.

    Args:
        versions: what is here.
        cuda: there is a GPU.
        again: install the two anew, though they are there.
    """
    release = fitting(versions.get("torch", ""))
    base = [] if release else [_TORCH]
    release = release or _LATEST
    pair = [f'"{_FBGEMM[not cuda]}=={release}.*"', f'"torchrec=={release}.*"']
    # On a CPU torchrec asks for the CUDA fbgemm-gpu by name, so that pip may not follow its needs.
    first = pair if cuda else ["iopath", "numpy", "pyre-extensions", "tensordict", '"torchmetrics==1.0.3"', "tqdm"]
    words = [_pip(), "install", *base, *first]
    if not cuda or again:
        words += ["&&", _pip(), "install", *(["--force-reinstall"] if again else []), "--no-deps", *pair]
    return " ".join(words)


def _pip() -> str:
    """pip of this interpreter, by the shortest path from here."""
    below = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if below.startswith('..') else below)} -m pip"


def _fails(code: str, environment: Mapping[str, str]) -> str | None:
    """What goes wrong when a process of its own runs ``code``; None if nothing does."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env={**environment, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the interpreter was killed by {signal.Signals(-done.returncode).name}"
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"ended with status {done.returncode}"
