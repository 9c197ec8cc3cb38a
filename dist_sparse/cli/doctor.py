"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the
commands that fix it.

Reads the metadata of what is installed, and changes nothing. A bad mix of releases can crash the
interpreter or hang, and torch may be missing: torch, TorchRec and FBGEMM are never imported here,
but probed in processes of their own with a time limit.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_sparse.text import printable, wrapped
from dist_sparse.torchrec import advised, check_versions, fitting, installed

_PIP = f"{shlex.quote(sys.executable)} -m pip"
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")

# What TorchRec requires besides torch and FBGEMM.
_OF_TORCHREC = 'iopath numpy pyre-extensions tensordict "torchmetrics==1.0.3" tqdm'

_SECONDS = 120.0

TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda}))
"""

LOOKUP = """
import dist_sparse.torchrec.port, torch, torchrec
config = torchrec.EmbeddingBagConfig(
    name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"]
)
ids = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 3]), torch.tensor([2]))
torchrec.EmbeddingBagCollection(tables=[config])(ids)
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


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
    fix: str


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
        verdict = f"Everything needed to train is here, on {self.device}."
        if names := ", ".join(each.what for each in self.broken):
            verdict = f"TorchRec models can't be trained here: {names}."
        lines = wrapped(verdict)
        for each in self.findings if verbose else self.broken:
            lines += wrapped(f"  {each.what}: {printable(each.says)}", indent="    ")
        # One command may fix several findings.
        for fix in dict.fromkeys(each.fix for each in self.broken):
            lines += ["", "To fix:", f"  {fix}"]
            # pip would take torch for another CUDA version from PyPI.
            if " URL" in fix:
                lines.append("  URL: PyTorch's package index for your CUDA version, or for CPUs.")
        return "\n".join(lines)


def examine(progress: Callable[[str], None]) -> Diagnosis:
    """Run all checks; takes as long as TorchRec needs to load, at most two minutes for each of
    three probes.

    Args:
        progress: called with the name of each check that may take long, before it.
    """
    versions = installed()
    progress("torch")
    fault, printed = probed(TORCH) if "torch" in versions else ("not installed", "")
    # The last line: packages may print when they are imported.
    torch = json.loads(printed.splitlines()[-1]) if fault is None else {"gpus": 0}
    # Which FBGEMM is needed depends on it.
    cuda = torch["gpus"] > 0
    reinstall, install = _fixes(versions, cuda)
    gemms = sorted(versions.keys() & _FBGEMM)
    gemm = " ".join(versions[name] for name in gemms)
    remove = f"{_PIP} uninstall -y {' '.join(gemms)} && " if gemms else ""
    missing = None if "torchrec" in versions else "not installed"
    wrong = _fault_of_fbgemm(gemms, cuda)
    findings = [
        _finding("torch", fault, versions.get("torch", ""), reinstall),
        _finding("torchrec", missing, versions.get("torchrec", ""), install),
        _finding("fbgemm", wrong, gemm, remove + install),
    ]
    # Without one of them, or in a broken mix, a lookup would only fail once more.
    if not any((fault, missing, wrong)):
        misfit = _misfit(versions, gemm)
        says = "torch, torchrec and fbgemm are of one release"
        findings.append(_finding("versions fit", misfit, says, install))
        if misfit is None:
            progress("TorchRec and FBGEMM")
            findings.append(_finding("a lookup", probed(LOOKUP)[0], "works", install))
    if cuda:
        return Diagnosis(tuple(findings), f"{torch['gpus']} GPU(s), CUDA {torch['cuda']}")
    device = "the CPU"
    if fault is None:
        progress("communication")
        # Its usual fault: the host name resolves to an address of no interface.
        fix = "export GLOO_SOCKET_IFNAME=lo"
        findings.append(_finding("gloo", probed(GLOO)[0], "works", fix))
        # It comes with the driver.
        if shutil.which("nvidia-smi") is not None:
            device += f": there is a GPU's driver, but torch {versions['torch']} sees no GPU"
    return Diagnosis(tuple(findings), device)


def _finding(what: str, fault: str | None, says: str, fix: str) -> Finding:
    return Finding(what, fault is None, fault or says, fix)


def _fault_of_fbgemm(gemms: list[str], cuda: bool) -> str | None:
    # The two builds install the same files.
    faults = {
        (): "not installed",
        _FBGEMM: "fbgemm-gpu and fbgemm-gpu-cpu are both installed, one over the other",
    }
    if cuda:
        faults[("fbgemm-gpu-cpu",)] = "fbgemm-gpu-cpu has no CUDA kernels, and there is a GPU"
    return faults.get(tuple(gemms))


def _misfit(versions: Mapping[str, str], gemm: str) -> str | None:
    try:
        check_versions(versions["torch"], versions["torchrec"], gemm)
    except ImportError as error:
        return str(error)
    return None


def _fixes(versions: Mapping[str, str], cuda: bool) -> tuple[str, str]:
    """Return the command that installs the torch that fits the installed distributions, and the
    one that installs TorchRec and FBGEMM for the installed torch, or all three.

    If no release fits the torch, it is that of the installed TorchRec, or the latest.
    """
    here = versions.get("torch", "")
    fitting_torch, release = advised(here, versions.get("torchrec", ""))
    torch = f'"torch=={fitting_torch}.*" --extra-index-url URL'
    # Otherwise the installed torch stays.
    others = _OF_TORCHREC if fitting(here) else f"{torch} {_OF_TORCHREC}"
    pair = f'"{_FBGEMM[not cuda]}=={release}.*" "torchrec=={release}.*"'
    # torchrec requires the CUDA fbgemm-gpu by name: pip must not follow its requirements.
    install = f"{_PIP} install {others} && {_PIP} install --force-reinstall --no-deps {pair}"
    # pip would keep a torch that is broken.
    return f"{_PIP} install --force-reinstall {torch}", install


def probed(code: str) -> tuple[str | None, str]:
    """Run ``code`` in a process of its own; return its error, if any, and its output."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # An empty folder in PYTHONPATH is the current one too.
    path = [str(Path(__file__).parents[2]), *(each for each in others if each not in ("", "."))]
    # -P: without it the current folder comes first on sys.path, and its json.py or torch.py would
    # run.
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_SECONDS:.0f} s", ""
    if done.returncode == 0:
        return None, done.stdout
    # A signal: libraries of another build end in SIGSEGV, not in an error.
    if done.returncode < 0:
        return f"the interpreter was killed by {signal.Signals(-done.returncode).name}", ""
    # A traceback ends with the error.
    return (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1], ""
