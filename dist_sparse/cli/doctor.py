"""Can this machine train a sparse TorchRec model, and if not, which command mends it?

Looks at what is installed by its metadata and never imports torch, TorchRec or FBGEMM here: what has to be loaded is
loaded in a process of its own with a time limit, because it may be missing, and a bad mix can crash the interpreter.
Changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shlex
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dist_sparse.cli.probes import GLOO, LOOKUP, Torch, ask_torch, fails
from dist_sparse.tables.versions import advised, check_versions, fitting

__all__ = ["Diagnosis", "Finding", "examine", "installed"]

_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OPTIONAL: Final = {
    "tensorboard": "numbers of a run in TensorBoard",
    "matplotlib": "pictures in reports",
    "lightning": "callbacks for Lightning",
}


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
        lines = _columns([("what", "status", "", "finding"), *rows])
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
    for name in ("torch", "torchrec", *_FBGEMM, "triton", *_OPTIONAL, "torchx"):
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
    """Looks at everything; takes as long as TorchRec needs to load, two minutes at most for each of three probes.

    Args:
        versions: as :func:`installed` gives them, which is the default.
        environment: variables to look at instead of the process's own; the probes run in it too.
        cuda: whether torch sees a GPU; asked by default.
    """
    versions = installed() if versions is None else versions
    environment = os.environ if environment is None else environment
    torch = ask_torch(environment) if "torch" in versions else Torch(fault="torch is not installed")
    cuda = torch.gpus > 0 if cuda is None else cuda
    return Diagnosis(
        findings=(
            *_python_and_torch(versions, torch),
            *_torchrec(versions, environment, cuda, torch),
            *_devices(versions, environment, cuda, torch),
            *_addresses(),
            *_launching(environment),
            *(_package(name, versions, f"for {use}") for name, use in _OPTIONAL.items()),
            _torchx(versions),
        )
    )


def _python_and_torch(versions: Mapping[str, str], torch: Torch) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    yield Finding(
        what="python",
        status="ok" if fits else "wrong",
        needed=True,
        says=version if fits else f"{version}; 3.11 or later is needed",
    )
    found = _package("torch", versions, needed=True)
    if found.status == "ok" and torch.fault is not None:
        found = dataclasses.replace(found, status="wrong", says=f"does not load: {torch.fault}")
    if found.status != "ok":
        # Not whatever is newest: TorchRec has to fit, the one that is here or the one that will be. What is there and
        # broken would satisfy pip.
        again = "--force-reinstall " if torch.fault is not None and found.status == "wrong" else ""
        found = dataclasses.replace(found, mend=f"{_pip()} install {again}{_torch(versions)}")
    yield found


def _torchrec(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
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
    if not fits or torch.fault is not None:
        return
    fault = fails(LOOKUP, environment)
    yield Finding(
        what="a lookup",
        status="ok" if fault is None else "wrong",
        needed=True,
        says=fault or "TorchRec and FBGEMM's operators load and look up a row",
        mend=None if fault is None else _install_trio(versions, cuda, again=True),
    )


def _devices(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
    """What can compute, and what ranks can talk through: nothing without a torch that loads."""
    if torch.fault is not None:
        return
    driver = shutil.which("nvidia-smi") is not None
    says, mend = "no GPU: trains on the CPU", None
    if cuda:
        says = f"{torch.gpus} GPU(s), CUDA {torch.cuda}"
    elif driver:
        build = "CPUs" if torch.cuda is None else f"CUDA {torch.cuda}"
        says = f"torch {torch.version}, for {build}, sees no GPU, though there is a driver"
    if driver and not cuda and torch.cuda is None:
        # pip takes the torch for CPUs for the one that is asked for, so it has to go.
        mend = f"{_pip()} uninstall -y torch {' '.join(_FBGEMM)} && {_install_trio({}, cuda=True)}"
    status: Literal["ok", "missing", "wrong"] = "ok" if cuda else "wrong" if driver else "missing"
    yield Finding(what="cuda", status=status, needed=False, says=says, mend=mend)
    yield Finding(
        what="nccl",
        status="ok" if torch.nccl else "missing",
        needed=cuda,
        says="available" if torch.nccl else "this torch has none; ranks talk through it on GPUs only",
        mend=f"{_pip()} install --force-reinstall {_torch(versions)}" if cuda and not torch.nccl else None,
    )
    fault = fails(GLOO, environment)
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
        except (OSError, UnicodeError) as error:  # the latter for a name that is too long for the DNS
            yield Finding(what=what, status="wrong", needed=False, says=f"{name} has no address: {error}", mend=mend)
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


def _torchx(versions: Mapping[str, str]) -> Finding:
    """It pins old versions of common packages, so it belongs beside the environment: see docs/launching.md."""
    found = _package("torchx", versions, "for torchx components, from a folder of its own")
    if found.mend is None:
        return found
    pins = Path(__file__).parents[2] / "requirements" / "torchx.txt"
    what = f"--no-deps --target torchx-only -r {shlex.quote(_short(str(pins)))}"
    what = what if pins.is_file() else '--target torchx-only "torchx>=0.7"'
    return dataclasses.replace(found, mend=f"{_pip()} install {what}")


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

    Where no torch fits any, they are of the TorchRec's release, if that is known, and else the latest.

    Args:
        versions: what is here.
        cuda: there is a GPU.
        again: install the two anew, though they are there.
    """
    base = [] if fitting(versions.get("torch", "")) else [_torch(versions)]
    release = _advised(versions)[1]
    pair = [f'"{_FBGEMM[not cuda]}=={release}.*"', f'"torchrec=={release}.*"']
    # On a CPU torchrec asks for the CUDA fbgemm-gpu by name, so that pip may not follow its needs.
    first = pair if cuda else ["iopath", "numpy", "pyre-extensions", "tensordict", '"torchmetrics==1.0.3"', "tqdm"]
    words = [_pip(), "install", *base, *first]
    if not cuda or again:
        words += ["&&", _pip(), "install", *(["--force-reinstall"] if again else []), "--no-deps", *pair]
    return " ".join(words)


def _torch(versions: Mapping[str, str]) -> str:
    """The words for pip that ask for the torch that goes with what is here."""
    return f'"torch=={_advised(versions)[0]}.*" --extra-index-url URL'


def _advised(versions: Mapping[str, str]) -> tuple[str, str]:
    return advised(versions.get("torch", ""), versions.get("torchrec", ""))


def _pip() -> str:
    """pip of this interpreter."""
    return f"{shlex.quote(_short(sys.executable))} -m pip"


def _short(path: str) -> str:
    """The shortest path from here."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A head and rows as lines. (What `dist_sparse.text` has for it can't be imported without torch.)"""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in ruled]
