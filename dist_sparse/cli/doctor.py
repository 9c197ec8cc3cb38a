"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the
commands that fix it.

Reads the metadata of what is installed and never imports torch, TorchRec or FBGEMM: what has to be
loaded is loaded in a process of its own (:mod:`dist_sparse.cli.probes`). Changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from packaging.requirements import Requirement

from dist_sparse.cli.probes import GLOO, LOOKUP, Torch, ask_torch, fails
from dist_sparse.text import table_lines
from dist_sparse.torchrec.versions import advised, check_versions, fitting

__all__ = ["Diagnosis", "Finding", "examine", "installed"]

_RED, _GREEN = 31, 32

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
        return {
            "can_train": self.can_train,
            "findings": [dataclasses.asdict(each) for each in self.findings],
        }

    def __str__(self) -> str:
        return self.text(verbose=True)

    def text(self, colors: bool = False, verbose: bool = False) -> str:
        """Return the conclusion; if something needed is broken, or ``verbose``, also the findings
        and the fixes."""
        lines = [
            _colored(self._conclusion(), _GREEN if self.can_train else _RED)
            if colors
            else self._conclusion()
        ]
        if self.can_train and not verbose:
            return lines[0]
        for needed, head in ((True, "needed"), (False, "optional")):
            group = [each for each in self.findings if each.needed == needed]
            cells = [(each.what, each.status, each.says) for each in group]
            if group and (needed or verbose):
                lines += ["", *table_lines((head, "status", "finding"), cells)]
        return "\n".join([*lines, *self._fixes(verbose)])

    def _conclusion(self) -> str:
        broken = [each.what for each in self.findings if each.needed and each.status != "ok"]
        if not broken:
            return "Everything needed to train is here."
        plain = "" if {"python", "torch"} & {*broken} else " Plain PyTorch models can."
        return f"TorchRec models can't be trained here: {', '.join(broken)}.{plain}"

    def _fixes(self, verbose: bool) -> list[str]:
        """A line for each command; one command may fix several findings."""
        fixed: dict[str, list[str]] = {}
        for each in self.findings:
            if each.fix is not None and (each.needed or verbose):
                fixed.setdefault(each.fix, []).append(each.what)
        if not fixed:
            return []
        lines = ["", "To fix:", *(f"  {', '.join(names)}: {fix}" for fix, names in fixed.items())]
        if any(" URL" in line for line in lines):
            lines.append(
                "  URL is that of PyTorch's package index for your CUDA version, or for CPUs."
            )
        return lines


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
    """Run all checks; takes as long as TorchRec needs to load, at most two minutes for each of
    three probes.

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
    findings += [_package(name, versions, use) for name, use in _OPTIONAL.items()]
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
        # Not the newest: it has to fit the TorchRec that is installed, or will be. pip would keep a
        # broken one.
        again = "--force-reinstall " if torch.fault is not None and found.status == "wrong" else ""
        found = dataclasses.replace(found, fix=f"{_pip()} install {again}{_torch(versions)}")
    yield found


def _torchrec(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
    """Check that TorchRec and FBGEMM are installed, fit together, and load."""
    fix = _install_trio(versions, cuda)
    rec = versions.get("torchrec")
    if rec is None:
        says = "not installed; without it only plain PyTorch models can be sparsified"
        yield Finding(what="torchrec", status="missing", needed=True, says=says, fix=fix)
    else:
        yield Finding(what="torchrec", status="ok", needed=True, says=rec)
    fbgemm = _fbgemm(versions, cuda, fix)
    yield fbgemm
    if rec is None or fbgemm.status != "ok" or "torch" not in versions:
        return
    [gemm] = (versions[name] for name in _FBGEMM if name in versions)
    fits, message = _fit(versions["torch"], rec, gemm)
    status: Literal["ok", "wrong"] = "ok" if fits else "wrong"
    yield Finding(
        what="versions fit", status=status, needed=True, says=message, fix=None if fits else fix
    )
    if not fits or torch.fault is not None:
        return
    fault = fails(LOOKUP, environment)
    if fault is None:
        says = "TorchRec and FBGEMM's operators load and look up a row"
        yield Finding(what="a lookup", status="ok", needed=True, says=says)
    else:
        again = _install_trio(versions, cuda, again=True)
        yield Finding(what="a lookup", status="wrong", needed=True, says=fault, fix=again)


def _fbgemm(versions: Mapping[str, str], cuda: bool, fix: str) -> Finding:
    gemms = [name for name in _FBGEMM if name in versions]
    if not gemms:
        return Finding(what="fbgemm", status="missing", needed=True, says="not installed", fix=fix)
    if len(gemms) == 2:
        says = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
    elif cuda and gemms == ["fbgemm-gpu-cpu"]:
        says = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
    else:
        return Finding(
            what="fbgemm", status="ok", needed=True, says=f"{gemms[0]} {versions[gemms[0]]}"
        )
    fix = f"{_pip()} uninstall -y {' '.join(gemms)} && {fix}"
    return Finding(what="fbgemm", status="wrong", needed=True, says=says, fix=fix)


def _devices(
    versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool, torch: Torch
) -> Iterator[Finding]:
    """Check devices and communication backends; nothing without a torch that loads."""
    if torch.fault is not None:
        return
    yield _cuda(cuda, torch)
    if torch.nccl:
        yield Finding(what="nccl", status="ok", needed=cuda, says="available")
    else:
        fix = f"{_pip()} install --force-reinstall {_torch(versions)}" if cuda else None
        says = "this torch has none; used on GPUs only"
        yield Finding(what="nccl", status="missing", needed=cuda, says=says, fix=fix)
    fault = fails(GLOO, environment)
    if fault is None:
        yield Finding(
            what="gloo", status="ok", needed=not cuda, says="a process group starts and sums"
        )
    else:
        fix = "export GLOO_SOCKET_IFNAME=lo"
        yield Finding(what="gloo", status="wrong", needed=not cuda, says=fault, fix=fix)
    yield _package("triton", versions, "masks on GPUs", needed=cuda)


def _cuda(cuda: bool, torch: Torch) -> Finding:
    if cuda:
        return Finding(
            what="cuda", status="ok", needed=False, says=f"{torch.gpus} GPU(s), CUDA {torch.cuda}"
        )
    if shutil.which("nvidia-smi") is None:
        return Finding(
            what="cuda", status="missing", needed=False, says="no GPU: trains on the CPU"
        )
    build, fix = f"CUDA {torch.cuda}", None
    if torch.cuda is None:
        build = "CPUs"
        # To pip the torch for CPUs satisfies the requirement, so it has to be uninstalled.
        fix = f"{_pip()} uninstall -y torch {' '.join(_FBGEMM)} && {_install_trio({}, cuda=True)}"
    says = f"torch {torch.version}, for {build}, sees no GPU, though there is a driver"
    return Finding(what="cuda", status="wrong", needed=False, says=says, fix=fix)


def _package(
    name: str, versions: Mapping[str, str], use: str = "", needed: bool = False
) -> Finding:
    """Check a distribution against the requirements in the package's own metadata."""
    wanted, version = _wanted().get(name, Requirement(name)), versions.get(name)
    fix = f'{_pip()} install "{name}{wanted.specifier}"'
    after = f"; for {use}" if use else ""
    if version is None:
        return Finding(
            what=name, status="missing", needed=needed, says=f"not installed{after}", fix=fix
        )
    if not wanted.specifier.contains(version, prereleases=True):
        says = f"{version} is too old: {name}{wanted.specifier} is required{after}"
        return Finding(what=name, status="wrong", needed=needed, says=says, fix=fix)
    return Finding(what=name, status="ok", needed=needed, says=version)


def _wanted() -> dict[str, Requirement]:
    """Return the requirements of dist_sparse by name, extras included."""
    try:
        texts = importlib.metadata.requires("dist_sparse") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


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
    # torchrec requires the CUDA fbgemm-gpu by name, so on a CPU pip must not follow its
    # requirements.
    first = (
        pair
        if cuda
        else ["iopath", "numpy", "pyre-extensions", "tensordict", '"torchmetrics==1.0.3"', "tqdm"]
    )
    words = [_pip(), "install", *base, *first]
    if not cuda or again:
        words += [
            "&&",
            _pip(),
            "install",
            *(["--force-reinstall"] if again else []),
            "--no-deps",
            *pair,
        ]
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
