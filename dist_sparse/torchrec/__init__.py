"""TorchRec and FBGEMM: the only package that imports them or knows their private names.

Importing this package imports neither, so that it can report a mix of releases that does not load.
TorchRec 1.n, FBGEMM 1.n and torch 2.(n + 5) are built for each other and no others.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from contextlib import suppress
from typing import Any

# Releases of TorchRec and FBGEMM by that of torch.
_TESTED: dict[Any, tuple[int, int]] = {(2, 12): (1, 7), (2, 13): (1, 8)}


def installed() -> dict[str, str]:
    """Return the version of every installed distribution that matters here, by name."""
    found = {}
    for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton"):
        # Metadata only: importing a broken torch can end the process.
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def fitting(torch_version: str) -> str | None:
    """Return the release of TorchRec and FBGEMM that fits a torch, such as ``"1.8"``; None where
    none is known."""
    found = _TESTED.get(_minor(torch_version))
    return None if found is None else "{}.{}".format(*found)


def advised(torch_version: str, torchrec_version: str) -> tuple[str, str]:
    """Return the releases of torch, and of TorchRec and FBGEMM, to install instead, such as
    ``("2.13", "1.8")``.

    Those that fit the torch; if none is known, those that fit the TorchRec; else the latest.
    """
    torch_of: dict[Any, tuple[int, int]] = {release: base for base, release in _TESTED.items()}
    known = torch_of.get(_minor(torchrec_version), max(_TESTED))
    base: Any = _minor(torch_version) if fitting(torch_version) else known
    return "{}.{}".format(*base), "{}.{}".format(*_TESTED[base])


def check_versions(torch_version: str, torchrec_version: str, fbgemm_version: str) -> None:
    """Refuse a mix of releases that were not built for each other.

    Raises:
        ImportError: two of them don't fit, or TorchRec is older than 1.0; says which part is wrong.
            Unknown (nightly, internal) versions and untested releases only warn.
    """
    versions = torch_version, torchrec_version, fbgemm_version
    found: list[Any] = [*map(_minor, versions)]
    have = "torch {}, torchrec {}, fbgemm-gpu {}".format(*versions)
    if None in found:
        warnings.warn(f"Can't tell whether these fit together: {have}.", stacklevel=2)
        return
    base, rec, gemm = found
    if rec[0] < 1:
        raise ImportError(f"The torchrec is too old: 1.0 or later is needed; installed: {have}.")
    # TorchRec 2 may count otherwise.
    torch = (2, rec[1] + 5) if rec[0] == 1 else base
    for name, release, wanted in (("fbgemm-gpu", gemm, rec), ("torch", base, torch)):
        if release != wanted:
            raise ImportError(
                f"The {name} is wrong: torchrec {torchrec_version} needs"
                f" {wanted[0]}.{wanted[1]}.*; installed: {have}."
            )
    if rec not in _TESTED.values():
        tested = ", ".join("{}.{}".format(*release) for release in _TESTED.values())
        warnings.warn(
            f"dist_sparse reads TorchRec's internals and knows those of {tested}; installed:"
            f" {have}.",
            stacklevel=2,
        )


def _minor(version: str) -> tuple[int, int] | None:
    """(major, minor) of a release; None for nightly and internal builds, whose numbers promise
    nothing."""
    # Not above: a process that serves does not need it.
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return None
    return None if found.is_devrelease else (found.major, found.minor)
