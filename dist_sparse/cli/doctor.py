"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the
commands that fix it.

Reads the metadata of what is installed and never imports torch, TorchRec or FBGEMM: what has to be
loaded is loaded in a process of its own (:mod:`dist_sparse.cli.probes`). Changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from dist_sparse.cli.probes import GLOO, LOOKUP, Torch, ask_torch, fails
from dist_sparse.text import printable, wrapped
from dist_sparse.torchrec import advised, check_versions, fitting

_PIP: Final = f"{shlex.quote(sys.executable)} -m pip"
_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OF_TORCHREC: Final = 'iopath numpy pyre-extensions tensordict "torchmetrics==1.0.3" tqdm'
"""What TorchRec requires besides torch and FBGEMM."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        what: what was checked.
        ok: whether it is there and works.
        says: a version, or the problem.
        fix: the command that fixes it.
    """

    what: str
    ok: bool
    says: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Results of all checks, and the device that would train."""

    findings: tuple[Finding, ...]
    device: str

    @property
    def broken(self) -> list[Finding]:
        """What is missing or does not work."""
        return [each for each in self.findings if not each.ok]

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON-able values."""
        return {"can_train": not self.broken, **asdict(self)}

    def text(self, verbose: bool = False) -> str:
        """Return the verdict, and below it what is broken with the commands that fix it; if
        ``verbose`` all findings."""
        names = ", ".join(each.what for each in self.broken)
        wrong = f"TorchRec models can't be trained here: {names}."
        lines = wrapped(
            wrong if names else f"Everything needed to train is here, on {self.device}."
        )
        for each in self.findings if verbose else self.broken:
            lines += wrapped(f"  {each.what}: {printable(each.says)}", indent="    ")
        # One command may fix several findings.
        for fix in dict.fromkeys(each.fix for each in self.broken):
            lines += ["", "To fix:", f"  {fix}"]
            # pip would take torch for another CUDA version from PyPI.
            if " URL" in fix:
                lines.append("  URL: PyTorch's package index for your CUDA version, or for CPUs.")
        return "\n".join(lines)


def installed() -> dict[str, str]:
    """Return the version of every installed distribution that is checked, by name."""
    found = {}
    for name in ("torch", "torchrec", *_FBGEMM):
        # Metadata only: importing a broken torch can end the process.
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def examine(
    versions: Mapping[str, str] | None = None,
    cuda: bool | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Run all checks; takes as long as TorchRec needs to load, at most two minutes for each of
    three probes.

    Args:
        versions: as :func:`installed` returns them, which is the default.
        cuda: whether torch sees a GPU; probed by default.
        progress: called with the name of each check that may take long, before it.
    """
    versions = installed() if versions is None else versions
    progress("torch")
    torch = ask_torch() if "torch" in versions else Torch(fault="not installed")
    # Which FBGEMM is needed depends on it.
    cuda = torch.gpus > 0 if cuda is None else cuda
    advice = _advice(versions, cuda)
    # pip would keep a torch that is broken.
    reinstall = f"{_PIP} install --force-reinstall {_fitting_torch(versions)}"
    findings = [
        Finding("torch", torch.fault is None, torch.fault or versions["torch"], reinstall),
        _package("torchrec", versions, advice),
        _fbgemm(versions, cuda, advice),
    ]
    # Without one of them, or in a broken mix, a lookup would only fail once more.
    if all(each.ok for each in findings):
        findings.append(_fit(versions, advice))
    if all(each.ok for each in findings):
        progress("TorchRec and FBGEMM")
        findings.append(_probe("a lookup", LOOKUP, advice))
    if torch.fault is None and not cuda:
        progress("communication")
        # Its usual fault: the host name resolves to an address of no interface.
        findings.append(_probe("gloo", GLOO, "export GLOO_SOCKET_IFNAME=lo"))
    return Diagnosis(tuple(findings), _device(torch, cuda))


def _package(name: str, versions: Mapping[str, str], fix: str) -> Finding:
    return Finding(name, name in versions, versions.get(name, "not installed"), fix)


def _fbgemm(versions: Mapping[str, str], cuda: bool, fix: str) -> Finding:
    gemms = [name for name in _FBGEMM if name in versions]
    remove = f"{_PIP} uninstall -y {' '.join(gemms)} && {fix}"
    # They install the same files.
    if len(gemms) == 2:
        says = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
        return Finding("fbgemm", False, says, remove)
    if cuda and gemms == ["fbgemm-gpu-cpu"]:
        says = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
        return Finding("fbgemm", False, says, remove)
    says = " ".join(versions[name] for name in gemms)
    return Finding("fbgemm", bool(gemms), says or "not installed", fix)


def _fit(versions: Mapping[str, str], fix: str) -> Finding:
    gemm = versions.get("fbgemm-gpu") or versions["fbgemm-gpu-cpu"]
    try:
        check_versions(versions["torch"], versions["torchrec"], gemm)
    except ImportError as error:
        return Finding("versions fit", False, str(error), fix)
    return Finding("versions fit", True, "torch, torchrec and fbgemm are of one release")


def _probe(what: str, code: str, fix: str) -> Finding:
    fault = fails(code)
    return Finding(what, fault is None, fault or "works", fix)


def _device(torch: Torch, cuda: bool) -> str:
    if cuda:
        return f"{torch.gpus} GPU(s), CUDA {torch.cuda}"
    # It comes with the driver.
    if torch.fault is None and shutil.which("nvidia-smi") is not None:
        return f"the CPU: there is a GPU's driver, but torch {torch.version} sees no GPU"
    return "the CPU"


def _advice(versions: Mapping[str, str], cuda: bool) -> str:
    """Return the command that installs TorchRec and FBGEMM for the installed torch, or all three.

    If no release fits the torch, it is that of the installed TorchRec, or the latest.
    """
    release = _advised(versions)[1]
    pair = f'"{_FBGEMM[not cuda]}=={release}.*" "torchrec=={release}.*"'
    # Otherwise the installed torch stays.
    torch = "" if fitting(versions.get("torch", "")) else f"{_fitting_torch(versions)} "
    # torchrec requires the CUDA fbgemm-gpu by name: pip must not follow its requirements.
    others = f"{_PIP} install {torch}{_OF_TORCHREC}"
    return f"{others} && {_PIP} install --force-reinstall --no-deps {pair}"


def _fitting_torch(versions: Mapping[str, str]) -> str:
    """Return the arguments of pip for the torch that fits the installed distributions."""
    return f'"torch=={_advised(versions)[0]}.*" --extra-index-url URL'


def _advised(versions: Mapping[str, str]) -> tuple[str, str]:
    return advised(versions.get("torch", ""), versions.get("torchrec", ""))
