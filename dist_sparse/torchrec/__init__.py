"""TorchRec and FBGEMM: the only package that imports them or reads their private names.

Importing this package imports neither, so that it can report releases that do not load together.
TorchRec 1.n, FBGEMM 1.n and torch 2.(n + 5) are built for each other and no others.
"""

import importlib.metadata
import os
import warnings
from contextlib import suppress

# The known releases: of torch, and of the TorchRec and FBGEMM built for it. Ascending. Known means
# that the names in tests/torchrec/contract.py were compared, and that all tests pass.
_KNOWN = {"2.13": "1.8", "2.14": "1.9"}

# An environment variable: set to 1, it lets unknown releases pass.
AT_OWN_RISK = "DIST_SPARSE_UNKNOWN_RELEASES"


def installed() -> dict[str, str]:
    """Return the versions of torch, TorchRec, FBGEMM and Triton that are installed, by name."""
    found = {}
    for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton"):
        # Metadata only: importing a broken torch can end the process.
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def fitting(torch_version: str) -> str | None:
    """Return the release of TorchRec and FBGEMM that fits a torch, such as ``"1.8"``; None where
    none is known."""
    return _KNOWN.get(_minor(torch_version))


def advised(torch_version: str, torchrec_version: str) -> tuple[str, str]:
    """Return the releases of torch, and of TorchRec and FBGEMM, to install instead, such as
    ``("2.13", "1.8")``: they fit the installed torch; if none is known, the installed TorchRec;
    else they are the latest.
    """
    torch = _minor(torch_version)
    if torch not in _KNOWN:
        torch_of = {release: torch for torch, release in _KNOWN.items()}
        torch = torch_of.get(_minor(torchrec_version), list(_KNOWN)[-1])
    return torch, _KNOWN[torch]


def check_versions(torch_version: str, torchrec_version: str, fbgemm_version: str) -> None:
    """Refuse releases that were not built for each other, and releases whose internals are not
    known. The latter pass with a warning if the environment variable :data:`AT_OWN_RISK` is 1.

    Raises:
        ImportError: names the release that is wrong or unknown.
    """
    have = f"torch {torch_version}, torchrec {torchrec_version}, fbgemm-gpu {fbgemm_version}"
    torch = _minor(torch_version)
    torchrec = _minor(torchrec_version)
    fbgemm = _minor(fbgemm_version)
    if "" in (torch, torchrec, fbgemm):
        _refuse_unknown(
            "A prerelease or development build may read and write rows in other ways", have
        )
        return
    major, minor = map(int, torchrec.split("."))
    if major < 1:
        raise ImportError(f"The torchrec is too old: 1.0 or later is needed; installed: {have}.")
    # TorchRec 1.n needs torch 2.(n + 5). TorchRec 2 may count otherwise: any torch passes.
    wanted = f"2.{minor + 5}" if major == 1 else torch
    for name, release, needed in (("fbgemm-gpu", fbgemm, torchrec), ("torch", torch, wanted)):
        if release != needed:
            raise ImportError(
                f"The {name} is wrong: torchrec {torchrec_version} needs {needed}.*;"
                f" installed: {have}."
            )
    if torchrec not in _KNOWN.values():
        known = ", ".join(_KNOWN.values())
        _refuse_unknown(f"dist_sparse reads TorchRec's internals and knows those of {known}", have)


def _refuse_unknown(reason: str, have: str) -> None:
    if os.environ.get(AT_OWN_RISK) != "1":
        raise ImportError(
            f"{reason}; installed: {have}. To go on at your own risk, set {AT_OWN_RISK}=1, and run"
            " the tests and dist-sparse selftest first."
        )
    warnings.warn(f"{reason}; installed: {have}.", stacklevel=3)


def _minor(version: str) -> str:
    """Return ``"MAJOR.MINOR"`` of a release; "" for nightly and internal builds and prereleases
    (``2.14.0a0+git``), whose numbers promise nothing."""
    # Not above: a process that serves does not need it.
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return ""
    return "" if found.is_prerelease else f"{found.major}.{found.minor}"
