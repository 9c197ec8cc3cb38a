"""Artifacts of a run, their bytes and quality, in ``artifacts.json``.

They are added after training, from any process: the log of the run need not be open.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from dist_sparse import checks
from dist_sparse.report.folder import RUN, write_whole
from dist_sparse.text import shortened

_FILE = "artifacts.json"


@dataclass(frozen=True, kw_only=True)
class ArtifactBytes:
    """A served form of a run's model: its name, the bytes of its files, and the AUC with which it
    serves."""

    name: str
    bytes: int
    auc: float


def add_artifact(
    run: str | os.PathLike[str],
    artifact: str | os.PathLike[str],
    *,
    auc: float,
    name: str | None = None,
) -> ArtifactBytes:
    """Add an artifact to a run, for the chart of AUC over bytes in its report. Local: for one rank,
    or any process.

    One of the same name is replaced.

    Args:
        run: folder that a :class:`~dist_sparse.RunLog` wrote.
        artifact: the file or folder that is served; its bytes are read here. It need not be kept.
        auc: with which it serves.
        name: in the report; that of the file or folder by default.

    Raises:
        ValueError: there is no such run or artifact, or an argument is invalid. OSError: it can't
            be written.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import add_artifact
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLog(folder) as log:
        ...     log.step(0, test_auc=0.75)
        >>> _ = (folder / "int8").write_bytes(bytes(1000))
        >>> add_artifact(folder, folder / "int8", auc=0.749)
        ArtifactBytes(name='int8', bytes=1000, auc=0.749)
    """
    run, artifact = Path(run), Path(artifact)
    if not (run / RUN).is_file():
        raise ValueError(f"{run} holds no run: there is no {RUN}, which RunLog writes.")
    files = [*filter(Path.is_file, (artifact, *artifact.rglob("*")))]
    if not files:
        raise ValueError(
            f"Invalid artifact={str(artifact)!r}: there is no such file, nor a folder with files."
        )
    new = ArtifactBytes(
        name=artifact.name if name is None else name,
        bytes=sum(file.stat().st_size for file in files),
        auc=checks.number("auc", auc, least=0, most=1),
    )
    # A run is exported again after more training: the newest counts.
    others = [old for old in read_artifacts(run) if old.name != new.name]
    text = json.dumps([asdict(each) for each in (*others, new)], indent=2, allow_nan=False)
    write_whole(run / _FILE, f"{text}\n".encode())
    return new


def read_artifacts(run: Path) -> tuple[ArtifactBytes, ...]:
    """Return the artifacts of a run, in the order in which they were added.

    Raises:
        ValueError: the file is not one that :func:`add_artifact` writes; names it.
    """
    file = run / _FILE
    if not file.is_file():
        return ()
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return tuple(ArtifactBytes(**entry) for entry in entries)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not one that add_artifact() writes: {shortened(error, most=200)}."
        ) from error
