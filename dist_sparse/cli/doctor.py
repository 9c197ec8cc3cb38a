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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from packaging.requirements import Requirement

from dist_sparse.cli.probes import GLOO, LOOKUP, Torch, ask_torch, fails
from dist_sparse.text import table_lines
from dist_sparse.torchrec.versions import advised, check_versions, fitting

__all__ = ["Diagnosis", "Finding", "examine", "installed"]

_RED, _GREEN = 31, 32

_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OF_TORCHREC: Final = 'iopath numpy pyre-extensions tensordict "torchmetrics==1.0.3" tqdm'
"""What TorchRec requires besides torch and FBGEMM."""
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
        conclusion = self._conclusion()
        if colors:
            conclusion = f"\x1b[{_GREEN if self.can_train else _RED}m{conclusion}\x1b[0m"
        # Ready: one line, whatever optional packages lack.
        if self.can_train and not verbose:
            return conclusion
        lines = [conclusion, *self._table("needed", True)]
        if verbose:
            lines += self._table("optional", False)
        return "\n".join([*lines, *self._fixes(verbose)])

    def _table(self, head: str, needed: bool) -> list[str]:
        group = [each for each in self.findings if each.needed == needed]
        cells = [(each.what, each.status, each.says) for each in group]
        return ["", *table_lines((head, "status", "finding"), cells)] if group else []

    def _conclusion(self) -> str:
        broken = [each.what for each in self.findings if each.needed and each.status != "ok"]
        if not broken:
            return "Everything needed to train is here."
        # Without TorchRec, tables of plain PyTorch can still be pruned.
        plain = "" if {"python", "torch"} & {*broken} else " Plain PyTorch models can."
        return f"TorchRec models can't be trained here: {', '.join(broken)}.{plain}"

    def _fixes(self, verbose: bool) -> list[str]:
        """Return a line for each command; one command may fix several findings."""
        fixed: dict[str, list[str]] = {}
        for each in self.findings:
            if each.fix is not None and (each.needed or verbose):
                fixed.setdefault(each.fix, []).append(each.what)
        if not fixed:
            return []
        lines = ["", "To fix:", *(f"  {', '.join(names)}: {fix}" for fix, names in fixed.items())]
        # pip would take torch for another CUDA version from PyPI.
        if any(" URL" in fix for fix in fixed):
            lines.append(
                "  URL is that of PyTorch's package index for your CUDA version, or for CPUs."
            )
        return lines


def installed() -> dict[str, str]:
    """Return the version of every installed distribution that is checked, by name."""
    found = {}
    for name in ("torch", "torchrec", *_FBGEMM, "triton", *_OPTIONAL):
        # Metadata only: importing a broken torch can end the process.
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
        environment: variables to run the probes with; those of the process by default.
        cuda: whether torch sees a GPU; probed by default.
        progress: called with the name of each check that may take long, before it.
    """
    versions = installed() if versions is None else versions
    environment = os.environ if environment is None else environment
    progress("torch")
    torch = ask_torch(environment) if "torch" in versions else Torch(fault="torch is not installed")
    # Which packages are needed depends on it.
    cuda = torch.gpus > 0 if cuda is None else cuda
    findings = [_python(), _torch(versions, torch)]
    progress("TorchRec and FBGEMM")
    findings += _torchrec(versions, cuda)
    # With a broken release, or without torch, a lookup would only fail once more.
    if torch.fault is None and all(each.status == "ok" for each in findings[2:]):
        findings.append(_lookup(versions, environment, cuda))
    progress("devices and communication")
    if torch.fault is None:
        findings += [_cuda(cuda, torch), _nccl(versions, cuda, torch), _gloo(environment, cuda)]
        findings.append(_package("triton", versions, "masks on GPUs", needed=cuda))
    findings += [_package(name, versions, use, needed=False) for name, use in _OPTIONAL.items()]
    return Diagnosis(findings=tuple(findings))


def _ok(what: str, says: str, needed: bool = True) -> Finding:
    return Finding(what=what, status="ok", needed=needed, says=says)


def _missing(what: str, says: str, fix: str | None, needed: bool = True) -> Finding:
    return Finding(what=what, status="missing", needed=needed, says=says, fix=fix)


def _wrong(what: str, says: str, fix: str | None, needed: bool = True) -> Finding:
    return Finding(what=what, status="wrong", needed=needed, says=says, fix=fix)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    if fits:
        return _ok("python", version)
    return _wrong("python", f"{version}; 3.11 or later is needed", None)


def _torch(versions: Mapping[str, str], torch: Torch) -> Finding:
    found = _package("torch", versions)
    # Not the newest: it has to fit the TorchRec that is installed, or will be.
    install = f"{_pip()} install"
    if found.status == "ok" and torch.fault is not None:
        # pip would keep the broken one.
        fix = f"{install} --force-reinstall {_fitting_torch(versions)}"
        return _wrong("torch", f"does not load: {torch.fault}", fix)
    if found.status == "ok":
        return found
    again = "--force-reinstall " if torch.fault is not None and found.status == "wrong" else ""
    return dataclasses.replace(found, fix=f"{install} {again}{_fitting_torch(versions)}")


def _torchrec(versions: Mapping[str, str], cuda: bool) -> list[Finding]:
    """Check that TorchRec and FBGEMM are installed and fit together and to torch."""
    fix = _install_trio(versions, cuda)
    rec = versions.get("torchrec")
    if rec is None:
        says = "not installed; without it only plain PyTorch models can be sparsified"
        return [_missing("torchrec", says, fix), _fbgemm(versions, cuda, fix)]
    findings = [_ok("torchrec", rec), _fbgemm(versions, cuda, fix)]
    # Without one of the three there is nothing to compare.
    if findings[1].status != "ok" or "torch" not in versions:
        return findings
    # Exactly one: two are refused above.
    [gemm] = (versions[name] for name in _FBGEMM if name in versions)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_versions(versions["torch"], rec, gemm)
        except ImportError as error:
            return [*findings, _wrong("versions fit", str(error), fix)]
    # Releases newer than this package are a warning.
    unknown = "; ".join(str(warning.message) for warning in caught)
    says = unknown or "torch, torchrec and fbgemm were built for each other"
    return [*findings, _ok("versions fit", says)]


def _fbgemm(versions: Mapping[str, str], cuda: bool, fix: str) -> Finding:
    gemms = [name for name in _FBGEMM if name in versions]
    if not gemms:
        return _missing("fbgemm", "not installed", fix)
    # They install the same files.
    if len(gemms) == 2:
        says = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
    elif cuda and gemms == ["fbgemm-gpu-cpu"]:
        says = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
    else:
        return _ok("fbgemm", f"{gemms[0]} {versions[gemms[0]]}")
    return _wrong("fbgemm", says, f"{_pip()} uninstall -y {' '.join(gemms)} && {fix}")


def _lookup(versions: Mapping[str, str], environment: Mapping[str, str], cuda: bool) -> Finding:
    fault = fails(LOOKUP, environment)
    if fault is None:
        return _ok("a lookup", "TorchRec and FBGEMM's operators load and look up a row")
    return _wrong("a lookup", fault, _install_trio(versions, cuda, again=True))


def _cuda(cuda: bool, torch: Torch) -> Finding:
    if cuda:
        return _ok("cuda", f"{torch.gpus} GPU(s), CUDA {torch.cuda}", needed=False)
    # It comes with the driver.
    if shutil.which("nvidia-smi") is None:
        return _missing("cuda", "no GPU: trains on the CPU", None, needed=False)
    build, fix = f"CUDA {torch.cuda}", None
    if torch.cuda is None:
        build = "CPUs"
        # To pip the torch for CPUs satisfies the requirement, so it has to be uninstalled.
        fix = f"{_pip()} uninstall -y torch {' '.join(_FBGEMM)} && {_install_trio({}, cuda=True)}"
    says = f"torch {torch.version}, for {build}, sees no GPU, though there is a driver"
    return _wrong("cuda", says, fix, needed=False)


def _nccl(versions: Mapping[str, str], cuda: bool, torch: Torch) -> Finding:
    if torch.nccl:
        return _ok("nccl", "available", needed=cuda)
    # A CPU trains over gloo.
    fix = f"{_pip()} install --force-reinstall {_fitting_torch(versions)}" if cuda else None
    return _missing("nccl", "this torch has none; used on GPUs only", fix, needed=cuda)


def _gloo(environment: Mapping[str, str], cuda: bool) -> Finding:
    fault = fails(GLOO, environment)
    if fault is None:
        return _ok("gloo", "a process group starts and sums", needed=not cuda)
    # Its usual fault: the host name resolves to an address of no interface.
    return _wrong("gloo", fault, "export GLOO_SOCKET_IFNAME=lo", needed=not cuda)


def _package(name: str, versions: Mapping[str, str], use: str = "", needed: bool = True) -> Finding:
    """Check a distribution against the requirements in the package's own metadata."""
    wanted, version = _wanted().get(name, Requirement(name)), versions.get(name)
    fix = f'{_pip()} install "{name}{wanted.specifier}"'
    after = f"; for {use}" if use else ""
    if version is None:
        return _missing(name, f"not installed{after}", fix, needed)
    if not wanted.specifier.contains(version, prereleases=True):
        says = f"{version} is too old: {name}{wanted.specifier} is required{after}"
        return _wrong(name, says, fix, needed)
    return _ok(name, version, needed)


def _wanted() -> dict[str, Requirement]:
    """Return the requirements of dist_sparse by name, extras included."""
    # A clone on PYTHONPATH has no metadata: any version will do.
    try:
        texts = importlib.metadata.requires("dist_sparse") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def _install_trio(versions: Mapping[str, str], cuda: bool, again: bool = False) -> str:
    """Return the command that installs TorchRec and FBGEMM for the installed torch, or all three.

    If no release fits the torch, it is that of the installed TorchRec, or the latest.

    Args:
        versions: of installed distributions.
        cuda: whether there is a GPU.
        again: reinstall the two.
    """
    release = _advised(versions)[1]
    pair = f'"{_FBGEMM[not cuda]}=={release}.*" "torchrec=={release}.*"'
    # torchrec requires the CUDA fbgemm-gpu by name, so on a CPU pip must not follow its
    # requirements.
    words = [pair if cuda else _OF_TORCHREC]
    # Otherwise the installed torch stays.
    if not fitting(versions.get("torch", "")):
        words.insert(0, _fitting_torch(versions))
    commands = [f"{_pip()} install {' '.join(words)}"]
    if not cuda or again:
        force = "--force-reinstall " if again else ""
        commands.append(f"{_pip()} install {force}--no-deps {pair}")
    return " && ".join(commands)


def _fitting_torch(versions: Mapping[str, str]) -> str:
    """Return the arguments of pip for the torch that fits the installed distributions."""
    return f'"torch=={_advised(versions)[0]}.*" --extra-index-url URL'


def _advised(versions: Mapping[str, str]) -> tuple[str, str]:
    return advised(versions.get("torch", ""), versions.get("torchrec", ""))


def _pip() -> str:
    """Return the command of this interpreter's pip, relative to the current folder if below it."""
    below = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if below.startswith('..') else below)} -m pip"
