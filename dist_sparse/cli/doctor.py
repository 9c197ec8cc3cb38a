"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the commands that fix it.

Reads the metadata of what is installed and never imports torch, TorchRec or FBGEMM: what has to be loaded is loaded in
a process of its own (:mod:`dist_sparse.cli.probes`). Changes nothing.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dist_sparse.cli.probes import GLOO, LOOKUP, Torch, ask_torch, fails
from dist_sparse.tables.versions import advised, check_versions, fitting
from dist_sparse.text import table_lines

__all__ = ["Diagnosis", "Finding", "examine", "installed"]

_RED, _GREEN, _YELLOW = 31, 32, 33

_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OPTIONAL: Final = {
    "safetensors": "export() and load_served()",
    "tensorboard": "numbers of a run in TensorBoard",
    "lightning": "callbacks for Lightning",
    "torchx": "launching with torchx, which wants urllib3 older than 1.27",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Args:
        what: what was checked.
        status: ``missing`` is not installed or set, ``wrong`` does not work.
        needed: to train a TorchRec model; the rest is optional.
        says: a version, or the problem.
        fix: the command that fixes it; None where nothing is to fix, or no command does.
    """

    what: str
    status: Literal["ok", "missing", "wrong"]
    needed: bool
    says: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Results of all checks."""

    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        """Whether everything needed is there and works."""
        return all(each.status == "ok" for each in self.findings if each.needed)

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON-able values."""
        return {"can_train": self.can_train, "findings": [dataclasses.asdict(each) for each in self.findings]}

    def __str__(self) -> str:
        return self.text()

    def text(self, colors: bool = False) -> str:
        """Return the conclusion, a table of what is needed and one of what is optional, and the commands."""
        broken = [each.what for each in self.findings if each.needed and each.status != "ok"]
        lines = ["Everything needed to train is here."]
        if broken:
            plain = "" if {"python", "torch"} & {*broken} else " Plain PyTorch models can."
            lines = [f"TorchRec models can't be trained here: {', '.join(broken)}.{plain}"]
        if colors:
            lines = [_colored(lines[0], _RED if broken else _GREEN)]
        for needed, head in ((True, "needed"), (False, "optional")):
            group = [each for each in self.findings if each.needed == needed]
            table = table_lines((head, "status", "finding"), [(each.what, each.status, each.says) for each in group])
            at = table[1].index(" ")  # the end of the first column
            for row, each in enumerate(group, start=2) if colors else ():
                color = _GREEN if each.status == "ok" else _RED if needed else _YELLOW
                table[row] = table[row][:at] + table[row][at:].replace(each.status, _colored(each.status, color), 1)
            lines += ["", *table] if group else []
        fixed: dict[str, list[str]] = {}
        for each in self.findings:
            if each.fix is not None:
                fixed.setdefault(each.fix, []).append(each.what)
        fixes = [f"  {', '.join(names)}: {fix}" for fix, names in fixed.items()]
        lines += ["", "To fix:", *fixes] if fixes else []
        if any(" URL" in line for line in fixes):
            lines.append("  URL is that of PyTorch's package index for your CUDA version, or for CPUs.")
        return "\n".join(lines)


def _colored(text: str, color: int) -> str:
    return f"\x1b[{color}m{text}\x1b[0m"


def installed() -> dict[str, str]:
    """Return the version of every installed distribution that is checked, by name."""
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
    progress: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Run all checks; takes as long as TorchRec needs to load, at most two minutes for each of three probes.

    Args:
        versions: as :func:`installed` returns them, which is the default.
        environment: variables to check and to run the probes with; those of the process by default.
        cuda: whether torch sees a GPU; probed by default.
        progress: called with what is checked next, before what may take long.
    """
    versions = installed() if versions is None else versions
    environment = os.environ if environment is None else environment
    progress("torch")
    torch = ask_torch(environment) if "torch" in versions else Torch(fault="torch is not installed")
    cuda = torch.gpus > 0 if cuda is None else cuda
    findings = [*_python_and_torch(versions, torch)]
    progress("TorchRec and FBGEMM")
    findings += _torchrec(versions, environment, cuda, torch)
    progress("devices and communication")
    findings += _devices(versions, environment, cuda, torch)
    findings += _addresses()
    findings += _launching(environment)
    findings += [_package(name, versions, f"for {use}") for name, use in _OPTIONAL.items()]
    return Diagnosis(findings=tuple(findings))


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
        # Not the newest: it has to fit the TorchRec that is installed, or will be. pip would keep a broken one.
        again = "--force-reinstall " if torch.fault is not None and found.status == "wrong" else ""
        found = dataclasses.replace(found, fix=f"{_pip()} install {again}{_torch(versions)}")
    yield found


def _torchrec(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
    """Check that TorchRec and FBGEMM are installed, fit together, and load."""
    gemms = [name for name in _FBGEMM if name in versions]
    fix = _install_trio(versions, cuda)
    rec = versions.get("torchrec")
    yield Finding(
        what="torchrec",
        status="missing" if rec is None else "ok",
        needed=True,
        says=rec or "not installed; without it only plain PyTorch models can be sparsified",
        fix=fix if rec is None else None,
    )
    wrong = None
    if len(gemms) == 2:
        wrong = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
        fix = f"{_pip()} uninstall -y {' '.join(_FBGEMM)} && {fix}"
    elif cuda and gemms == ["fbgemm-gpu-cpu"]:
        wrong = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
        fix = f"{_pip()} uninstall -y fbgemm-gpu-cpu && {fix}"
    yield Finding(
        what="fbgemm",
        status="missing" if not gemms else "ok" if wrong is None else "wrong",
        needed=True,
        says="not installed" if not gemms else wrong or f"{gemms[0]} {versions[gemms[0]]}",
        fix=fix if not gemms or wrong else None,
    )
    if rec is None or not gemms or wrong or "torch" not in versions:
        return
    fits, message = _fit(versions["torch"], rec, versions[gemms[0]])
    yield Finding(
        what="versions fit", status="ok" if fits else "wrong", needed=True, says=message, fix=None if fits else fix
    )
    if not fits or torch.fault is not None:
        return
    fault = fails(LOOKUP, environment)
    yield Finding(
        what="a lookup",
        status="ok" if fault is None else "wrong",
        needed=True,
        says=fault or "TorchRec and FBGEMM's operators load and look up a row",
        fix=None if fault is None else _install_trio(versions, cuda, again=True),
    )


def _devices(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
    """Check devices and communication backends; nothing without a torch that loads."""
    if torch.fault is not None:
        return
    driver = shutil.which("nvidia-smi") is not None
    says, fix = "no GPU: trains on the CPU", None
    if cuda:
        says = f"{torch.gpus} GPU(s), CUDA {torch.cuda}"
    elif driver:
        build = "CPUs" if torch.cuda is None else f"CUDA {torch.cuda}"
        says = f"torch {torch.version}, for {build}, sees no GPU, though there is a driver"
    if driver and not cuda and torch.cuda is None:
        # To pip the torch for CPUs satisfies the requirement, so it has to be uninstalled.
        fix = f"{_pip()} uninstall -y torch {' '.join(_FBGEMM)} && {_install_trio({}, cuda=True)}"
    status: Literal["ok", "missing", "wrong"] = "ok" if cuda else "wrong" if driver else "missing"
    yield Finding(what="cuda", status=status, needed=False, says=says, fix=fix)
    yield Finding(
        what="nccl",
        status="ok" if torch.nccl else "missing",
        needed=cuda,
        says="available" if torch.nccl else "this torch has none; used on GPUs only",
        fix=f"{_pip()} install --force-reinstall {_torch(versions)}" if cuda and not torch.nccl else None,
    )
    fault = fails(GLOO, environment)
    yield Finding(
        what="gloo",
        status="ok" if fault is None else "wrong",
        needed=not cuda,
        says=fault or "a process group starts and sums",
        fix=None if fault is None else "export GLOO_SOCKET_IFNAME=lo",
    )
    yield _package("triton", versions, "for masks on GPUs", needed=cuda)


def _addresses() -> Iterator[Finding]:
    """Check host names: gloo listens on the address of the machine's, launchers on that of localhost."""
    for name, what, fix in (
        ("localhost", "localhost", "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts"),
        (socket.gethostname(), "host name", "export GLOO_SOCKET_IFNAME=lo"),
    ):
        try:
            found = socket.getaddrinfo(name, None)[0][4][0]
        except (OSError, UnicodeError) as error:  # UnicodeError: too long for the DNS
            yield Finding(what=what, status="wrong", needed=False, says=f"{name} has no address: {error}", fix=fix)
        else:
            yield Finding(what=what, status="ok", needed=False, says=f"{name} is {found}")


def _launching(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check what torchrun needs; `dist-sparse launch` does not."""
    folder = str(Path(sys.executable).parent)
    torchrun = shutil.which("torchrun", path=environment.get("PATH"))
    yield Finding(
        what="torchrun",
        status="missing" if torchrun is None else "ok",
        needed=False,
        says="not on PATH, where torchx looks for it" if torchrun is None else "on PATH",
        fix=f"export PATH={shlex.quote(folder)}:$PATH" if torchrun is None else None,
    )
    seed = environment.get("PYTHONHASHSEED")
    fits = seed is not None and re.fullmatch("[0-9]+", seed) is not None
    yield Finding(
        what="PYTHONHASHSEED",
        status="ok" if fits else "missing" if seed is None else "wrong",
        needed=False,
        says=f"{seed}" if fits else "not a fixed number: DMP.reshard hangs (dist-sparse launch sets it)",
        fix=None if fits else "export PYTHONHASHSEED=0",
    )
    options = sorted(name for name in environment if name.startswith("PET_"))
    yield Finding(
        what="PET_ variables",
        status="wrong" if options else "ok",
        needed=False,
        says=f"torchrun takes options from {', '.join(options)}" if options else "none set",
        fix=f"unset {' '.join(options)}" if options else None,
    )


def _package(name: str, versions: Mapping[str, str], use: str = "", needed: bool = False) -> Finding:
    """Check a distribution against the requirements in the package's own metadata."""
    wanted, version = _wanted().get(name, name), versions.get(name)
    status: Literal["ok", "missing", "wrong"] = "ok"
    if version is None:
        status = "missing"
    elif _numbers(version) < _numbers(wanted.partition(">=")[2]):
        status = "wrong"
    says = {"ok": f"{version}", "missing": "not installed", "wrong": f"{version} is too old: {wanted} is required"}
    return Finding(
        what=name,
        status=status,
        needed=needed,
        says=says[status] + (f"; {use}" if use and status != "ok" else ""),
        fix=None if status == "ok" else f'{_pip()} install "{wanted}"',
    )


def _wanted() -> dict[str, str]:
    """Return the requirements of dist_sparse by name, extras included."""
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
    """Return whether versions fit together, and a sentence about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_versions(torch_version, torchrec_version, fbgemm_version)
        except ImportError as error:
            return False, str(error)
    unknown = "; ".join(str(warning.message) for warning in caught)
    return True, unknown or "torch, torchrec and fbgemm were built for each other"


def _install_trio(versions: Mapping[str, str], cuda: bool, again: bool = False) -> str:
    """Return the command that installs TorchRec and FBGEMM for the installed torch, or all three.

    If no release fits the torch, it is that of the installed TorchRec, or the latest.

    Args:
        versions: what is installed.
        cuda: whether there is a GPU.
        again: reinstall the two.
    """
    base = [] if fitting(versions.get("torch", "")) else [_torch(versions)]
    release = _advised(versions)[1]
    pair = [f'"{_FBGEMM[not cuda]}=={release}.*"', f'"torchrec=={release}.*"']
    # torchrec requires the CUDA fbgemm-gpu by name, so on a CPU pip must not follow its requirements.
    first = pair if cuda else ["iopath", "numpy", "pyre-extensions", "tensordict", '"torchmetrics==1.0.3"', "tqdm"]
    words = [_pip(), "install", *base, *first]
    if not cuda or again:
        words += ["&&", _pip(), "install", *(["--force-reinstall"] if again else []), "--no-deps", *pair]
    return " ".join(words)


def _torch(versions: Mapping[str, str]) -> str:
    """Return the arguments of pip for the torch that fits what is installed."""
    return f'"torch=={_advised(versions)[0]}.*" --extra-index-url URL'


def _advised(versions: Mapping[str, str]) -> tuple[str, str]:
    return advised(versions.get("torch", ""), versions.get("torchrec", ""))


def _pip() -> str:
    """Return the command of this interpreter's pip."""
    return f"{shlex.quote(_short(sys.executable))} -m pip"


def _short(path: str) -> str:
    """Return the path relative to the current folder, if it is in it."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below
