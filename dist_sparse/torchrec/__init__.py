"""TorchRec and FBGEMM: the only package that imports them or reads their private names.

Importing this package imports neither, so that it can report releases that do not load together.
TorchRec 1.n, FBGEMM 1.n and torch 2.(n + 5) are built for each other and no others.
"""

import importlib.metadata
import warnings
from contextlib import suppress

# Tested releases: of torch, and of the TorchRec and FBGEMM built for it. Ascending.
_TESTED = {"2.12": "1.7", "2.13": "1.8"}


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
    return _TESTED.get(_minor(torch_version))


def advised(torch_version: str, torchrec_version: str) -> tuple[str, str]:
    """Return the releases of torch, and of TorchRec and FBGEMM, to install instead, such as
    ``("2.13", "1.8")``: they fit the installed torch; if none is known, the installed TorchRec;
    else they are the latest.
    """
    torch = _minor(torch_version)
    if torch not in _TESTED:
        torch_of = {release: torch for torch, release in _TESTED.items()}
        torch = torch_of.get(_minor(torchrec_version), list(_TESTED)[-1])
    return torch, _TESTED[torch]


def check_versions(torch_version: str, torchrec_version: str, fbgemm_version: str) -> None:
    """Refuse a mix of releases that were not built for each other.

    Raises:
        ImportError: two of them don't fit, or TorchRec is older than 1.0; names the wrong one.
            Unknown (nightly, internal) versions and untested releases only warn.
    """
    have = f"torch {torch_version}, torchrec {torchrec_version}, fbgemm-gpu {fbgemm_version}"
    torch = _minor(torch_version)
    torchrec = _minor(torchrec_version)
    fbgemm = _minor(fbgemm_version)
    if "" in (torch, torchrec, fbgemm):
        warnings.warn(f"Can't tell whether these fit together: {have}.", stacklevel=2)
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
    if torchrec not in _TESTED.values():
        warnings.warn(
            "dist_sparse reads TorchRec's internals and knows those of"
            f" {', '.join(_TESTED.values())}; installed: {have}.",
            stacklevel=2,
        )


def _minor(version: str) -> str:
    """Return ``"MAJOR.MINOR"`` of a release; "" for nightly and internal builds, whose numbers
    promise nothing."""
    # Not above: a process that serves does not need it.
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return ""
    return "" if found.is_devrelease else f"{found.major}.{found.minor}"
