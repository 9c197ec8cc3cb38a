"""Findings of `dist-sparse doctor`: whether this machine can train a TorchRec model, and the
commands that fix it.

It reads the metadata of installed packages, and changes nothing. torch, TorchRec and FBGEMM are
never imported in this process: they may be missing, and a bad mix of releases can crash or hang the
interpreter. They are probed in processes of their own, with a time limit.
"""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from dist_sparse.text import printable, wrapped
from dist_sparse.torchrec import advised, check_versions, fitting, installed

_PIP = f"{shlex.quote(sys.executable)} -m pip"
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")

# What TorchRec requires besides torch and FBGEMM.
_OF_TORCHREC = 'iopath numpy pyre-extensions tensordict "torchmetrics==1.0.3" tqdm'

# Time limit of a probe, far above the time that importing TorchRec takes.
_SECONDS = 120.0

# Programs of the probes.

TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda}))
"""

LOOKUP = """
import dist_sparse.torchrec.port, torch, torchrec
config = torchrec.EmbeddingBagConfig(4, 4, name="t", feature_names=["f"])
ids = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 3]), torch.tensor([2]))
torchrec.EmbeddingBagCollection(tables=[config])(ids)
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""

# Triton reads the source of a kernel from a file.
KERNEL = """
import runpy, tempfile
with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write('''
import torch, triton
from triton import language as tl

@triton.jit
def count(numbers):
    tl.store(numbers + tl.program_id(0), tl.program_id(0))

numbers = torch.full((4,), -1, dtype=torch.int32, device="cuda")
count[(4,)](numbers)
assert numbers.tolist() == [0, 1, 2, 3], numbers
''')
    file.flush()
    runpy.run_path(file.name)
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        what: name of the check.
        ok: whether it is installed and works.
        says: a version, or the problem.
        fix: the command that fixes the problem; "" if there is none.
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
        """Findings of what is missing or does not work."""
        return [finding for finding in self.findings if not finding.ok]

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON-able values."""
        return {"can_train": not self.broken, **asdict(self)}

    def text(self, verbose: bool = False) -> str:
        """Return the verdict, the findings that are broken (all if ``verbose``), and the commands
        that fix them."""
        verdict = f"Everything needed to train is here, on {self.device}."
        if self.broken:
            names = ", ".join(finding.what for finding in self.broken)
            verdict = f"TorchRec models can't be trained here: {names}."
        lines = wrapped(verdict)
        for finding in self.findings if verbose else self.broken:
            lines += wrapped(f"  {finding.what}: {printable(finding.says)}", indent="    ")
        # Each command once: it may fix several findings.
        for fix in dict.fromkeys(finding.fix for finding in self.broken):
            lines += ["", "To fix:", f"  {fix}"]
            # PyPI has torch for one CUDA version only, which may not be the machine's.
            if " URL" in fix:
                lines.append("  URL: PyTorch's package index for your CUDA version, or for CPUs.")
        return "\n".join(lines)


def examine(progress: Callable[[str], None]) -> Diagnosis:
    """Run all checks. This takes as long as TorchRec takes to load, and at most two minutes for
    each of four probes.

    Args:
        progress: called with the name of each slow check, before it.
    """
    versions = installed()
    progress("torch")
    torch_fault, printed = probe(TORCH) if "torch" in versions else ("not installed", "")
    # The last line: packages may print when they are imported.
    torch = json.loads(printed.splitlines()[-1]) if torch_fault is None else {"gpus": 0}
    # With a GPU, FBGEMM must be the CUDA build.
    cuda = torch["gpus"] > 0
    reinstall, install = _fixes(versions, cuda)
    gemms = sorted(versions.keys() & _FBGEMM)
    gemm = " ".join(versions[name] for name in gemms)
    remove = f"{_PIP} uninstall -y {' '.join(gemms)} && " if gemms else ""
    torchrec_fault = None if "torchrec" in versions else "not installed"
    fbgemm_fault = _fault_of_fbgemm(gemms, cuda)
    findings = [
        _finding("torch", torch_fault, versions.get("torch", ""), reinstall),
        _finding("torchrec", torchrec_fault, versions.get("torchrec", ""), install),
        _finding("fbgemm", fbgemm_fault, gemm, remove + install),
    ]
    # If one is missing or wrong, a lookup would only report the same fault again.
    if not any((torch_fault, torchrec_fault, fbgemm_fault)):
        misfit = _misfit(versions, gemm)
        says = "torch, torchrec and fbgemm are of one release"
        findings.append(_finding("versions fit", misfit, says, install))
        if misfit is None:
            progress("TorchRec and FBGEMM")
            findings.append(_finding("a lookup", probe(LOOKUP)[0], "works", install))
    # With GPUs, training uses NCCL: gloo is not checked.
    if cuda:
        findings += _triton(progress)
        return Diagnosis(tuple(findings), f"{torch['gpus']} GPU(s), CUDA {torch['cuda']}")
    device = "the CPU"
    if torch_fault is None:
        progress("communication")
        # The usual fault of gloo: the host name resolves to an address that no interface has.
        fix = "export GLOO_SOCKET_IFNAME=lo"
        findings.append(_finding("gloo", probe(GLOO)[0], "works", fix))
        # nvidia-smi comes with the driver.
        if shutil.which("nvidia-smi") is not None:
            device += f": there is a GPU's driver, but torch {versions['torch']} sees no GPU"
    return Diagnosis(tuple(findings), device)


def _triton(progress: Callable[[str], None]) -> list[Finding]:
    """Return what Triton needs to compile a kernel on a GPU: a C compiler, Python's header and its
    cache. If all are here, launch a kernel. Without Triton, torch's operations run instead."""
    if importlib.util.find_spec("triton") is None:
        return []
    progress("Triton")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    cache = _triton_cache()
    writable = _is_writable(cache)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = [
        _finding(
            "C compiler",
            None if compiler and shutil.which(compiler) else "Triton finds none: gcc, clang or $CC",
            str(compiler),
            "apt-get install gcc, or your system's package of a C compiler",
        ),
        _finding(
            "Python.h",
            None if header.exists() else f"Triton needs {header}, which is not there",
            str(header),
            f"apt-get install {python}-dev, or your system's package of Python's headers",
        ),
        _finding(
            "Triton's cache",
            None if writable else f"Triton can't write to {cache}",
            str(cache),
            "export TRITON_CACHE_DIR=FOLDER, a folder that you can write to",
        ),
    ]
    # Without one of them, a launch would only report the same fault again.
    if all(finding.ok for finding in found):
        version = installed_version("triton")
        fix = "CUDA_LAUNCH_BLOCKING=1 dist-sparse selftest --nproc 1"
        found.append(_finding("a Triton kernel", probe(KERNEL)[0], f"works, {version}", fix))
    return found


def _triton_cache() -> Path:
    """Return the folder of compiled kernels, as Triton chooses it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _is_writable(folder: Path) -> bool:
    """Return whether files can be written to a folder, which may have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _finding(what: str, fault: str | None, says: str, fix: str) -> Finding:
    # A script that runs every fix must not run those of what works.
    return Finding(what, fault is None, fault or says, fix if fault else "")


def _fault_of_fbgemm(gemms: list[str], cuda: bool) -> str | None:
    # The two builds install the same files: the one installed last overwrites the other.
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
    """Return two commands: one that reinstalls torch, and one that installs TorchRec and FBGEMM.

    The second one installs torch too, if no release of TorchRec fits the installed torch. Then the
    release is the one of the installed TorchRec, or the latest.
    """
    here = versions.get("torch", "")
    fitting_torch, release = advised(here, versions.get("torchrec", ""))
    torch = f'"torch=={fitting_torch}.*" --extra-index-url URL'
    # A torch that fits stays installed.
    others = _OF_TORCHREC if fitting(here) else f"{torch} {_OF_TORCHREC}"
    pair = f'"{_FBGEMM[not cuda]}=={release}.*" "torchrec=={release}.*"'
    # --no-deps: torchrec requires fbgemm-gpu, the CUDA build, by name. Its other requirements are
    # in _OF_TORCHREC.
    install = f"{_PIP} install {others} && {_PIP} install --force-reinstall --no-deps {pair}"
    # --force-reinstall: pip keeps a broken torch of the right version.
    return f"{_PIP} install --force-reinstall {torch}", install


def probe(code: str) -> tuple[str | None, str]:
    """Run ``code`` in a process of its own; return its error, if any, and its output."""
    # Nothing is imported from the current folder, whose json.py or torch.py is not Python's: -P
    # keeps it off sys.path, and an empty entry of PYTHONPATH means the same folder.
    path = [str(Path(__file__).parents[2])]
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder not in ("", "."):
            path.append(folder)
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
    # A signal: mixed builds of libraries usually end in SIGSEGV.
    if done.returncode < 0:
        return f"the interpreter was killed by {signal.Signals(-done.returncode).name}", ""
    # The last line of a traceback is the error.
    return (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1], ""
