"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the
commands that fix it.

Reads the metadata of what is installed and never imports torch, TorchRec or FBGEMM: what has to be
loaded is loaded in a process of its own (:mod:`dist_sparse.cli.probes`). Changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
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

_RED, _GREEN = 31, 32

_PIP: Final = f"{shlex.quote(sys.executable)} -m pip"
_FBGEMM: Final = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_OF_TORCHREC: Final = 'iopath numpy pyre-extensions tensordict "torchmetrics==1.0.3" tqdm'
"""What TorchRec requires besides torch and FBGEMM."""
_OPTIONAL: Final = {
    "safetensors": "export() and load_served()",
    "tensorboard": "numbers of a run in TensorBoard",
    "lightning": "callbacks for Lightning",
    "torchx": "launching with torchx, which wants urllib3 older than 1.27",
}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        what: what was checked.
        status: ``missing`` is not installed, ``wrong`` does not work.
        says: a version, or the problem.
        fix: the command that fixes it; None where nothing is to fix, or no command does.
        needed: to train a TorchRec model; the rest is optional.
    """

    what: str
    status: Literal["ok", "missing", "wrong"]
    says: str
    fix: str | None = None
    needed: bool = True

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Results of all checks."""

    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        """Whether everything needed is there and works."""
        return all(each.ok for each in self.findings if each.needed)

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
        if self.can_train:
            return "Everything needed to train is here."
        broken = [each.what for each in self.findings if each.needed and not each.ok]
        # Without TorchRec, tables of plain PyTorch can still be pruned.
        plain = "" if "torch" in broken else " Plain PyTorch models can."
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
    for name in ("torch", "torchrec", *_FBGEMM, *_OPTIONAL):
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
    torch = ask_torch() if "torch" in versions else Torch(fault="torch is not installed")
    # Which packages are needed depends on it.
    cuda = torch.gpus > 0 if cuda is None else cuda
    python = Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    findings = [python, _torch(versions, torch), *_trio(versions, cuda)]
    progress("TorchRec and FBGEMM")
    # With a broken release, or without torch, a lookup would only fail once more.
    if all(each.ok for each in findings):
        findings.append(_lookup(versions, cuda))
    progress("devices and communication")
    if torch.fault is None:
        findings += [_cuda(cuda, torch), _gloo(cuda)]
    optional = [_package(name, versions, use) for name, use in _OPTIONAL.items()]
    findings += [dataclasses.replace(each, needed=False) for each in optional]
    return Diagnosis(findings=tuple(findings))


def _torch(versions: Mapping[str, str], torch: Torch) -> Finding:
    found = _package("torch", versions)
    # Not the newest: it has to fit the TorchRec that is installed, or will be.
    fitting = _fitting_torch(versions)
    if not found.ok:
        return dataclasses.replace(found, fix=f"{_PIP} install {fitting}")
    if torch.fault is None:
        return found
    # pip would keep the broken one.
    fix = f"{_PIP} install --force-reinstall {fitting}"
    return Finding("torch", "wrong", f"does not load: {torch.fault}", fix)


def _trio(versions: Mapping[str, str], cuda: bool) -> list[Finding]:
    """Check that TorchRec and FBGEMM are installed and fit together and to torch."""
    fix = _install_trio(versions, cuda)
    says = "not installed; without it only plain PyTorch models can be sparsified"
    rec, gemm = Finding("torchrec", "missing", says, fix), _fbgemm(versions, cuda, fix)
    if "torchrec" in versions:
        rec = Finding("torchrec", "ok", versions["torchrec"])
    # Without one of the three there is nothing to compare.
    if rec.ok and gemm.ok and "torch" in versions:
        return [rec, gemm, _fit(versions, gemm.says.split()[-1], fix)]
    return [rec, gemm]


def _fbgemm(versions: Mapping[str, str], cuda: bool, fix: str) -> Finding:
    gemms = [name for name in _FBGEMM if name in versions]
    if not gemms:
        return Finding("fbgemm", "missing", "not installed", fix)
    # They install the same files.
    if len(gemms) == 2:
        says = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other"
    elif cuda and gemms == ["fbgemm-gpu-cpu"]:
        says = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
    else:
        return Finding("fbgemm", "ok", f"{gemms[0]} {versions[gemms[0]]}")
    return Finding("fbgemm", "wrong", says, f"{_PIP} uninstall -y {' '.join(gemms)} && {fix}")


def _fit(versions: Mapping[str, str], gemm: str, fix: str) -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_versions(versions["torch"], versions["torchrec"], gemm)
        except ImportError as error:
            return Finding("versions fit", "wrong", str(error), fix)
    # Releases newer than this package are a warning.
    unknown = "; ".join(str(warning.message) for warning in caught)
    says = unknown or "torch, torchrec and fbgemm were built for each other"
    return Finding("versions fit", "ok", says)


def _lookup(versions: Mapping[str, str], cuda: bool) -> Finding:
    fault = fails(LOOKUP)
    if fault is None:
        return Finding("a lookup", "ok", "TorchRec and FBGEMM's operators load and look up a row")
    return Finding("a lookup", "wrong", fault, _install_trio(versions, cuda))


def _cuda(cuda: bool, torch: Torch) -> Finding:
    if cuda:
        return Finding("cuda", "ok", f"{torch.gpus} GPU(s), CUDA {torch.cuda}", needed=False)
    # It comes with the driver.
    if shutil.which("nvidia-smi") is None:
        return Finding("cuda", "missing", "no GPU: trains on the CPU", needed=False)
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPUs"
    says = f"torch {torch.version}, for {build}, sees no GPU, though there is a driver"
    return Finding("cuda", "wrong", says, needed=False)


def _gloo(cuda: bool) -> Finding:
    fault = fails(GLOO)
    if fault is None:
        return Finding("gloo", "ok", "a process group starts and sums", needed=not cuda)
    # Its usual fault: the host name resolves to an address of no interface.
    return Finding("gloo", "wrong", fault, "export GLOO_SOCKET_IFNAME=lo", needed=not cuda)


def _package(name: str, versions: Mapping[str, str], use: str = "training") -> Finding:
    """Check a distribution against the requirements in the package's own metadata."""
    wanted = _wanted().get(name, Requirement(name)).specifier
    version, fix = versions.get(name), f'{_PIP} install "{name}{wanted}"'
    if version is None:
        return Finding(name, "missing", f"not installed; for {use}", fix)
    if not wanted.contains(version, prereleases=True):
        says = f"{version} is too old: {name}{wanted} is required; for {use}"
        return Finding(name, "wrong", says, fix)
    return Finding(name, "ok", version)


def _wanted() -> dict[str, Requirement]:
    """Return the requirements of dist_sparse by name, extras included."""
    # A clone on PYTHONPATH has no metadata: any version will do.
    try:
        texts = importlib.metadata.requires("dist_sparse") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def _install_trio(versions: Mapping[str, str], cuda: bool) -> str:
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
