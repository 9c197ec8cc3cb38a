"""What checkpoints hold: read without a model, every byte verified first. Local."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_sparse.checkpoint.folders import Folders, step_of
from dist_sparse.text import number_of, size, table_lines

__all__ = ["Inspection", "inspect_checkpoint", "summary"]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint that is whole.

    Args:
        step: of it.
        path: of its folder.
        world: number of ranks that wrote it.
        bytes: of its files.
        tensors: shape and dtype by key: ``model.<name>``, ``optimizer.<parameter>.<name>``,
            ``sparse.<...>``, ``rng.<device>.<rank>``.
        extra: as passed to ``save``.
    """

    step: int
    path: str
    world: int
    bytes: int
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    extra: Any

    def __str__(self) -> str:
        head = (
            f"step {self.step}, saved by {number_of(self.world, 'rank')}, {size(self.bytes)}: whole"
        )
        rows = [
            (key, " x ".join(map(str, shape)), dtype)
            for key, (shape, dtype) in sorted(self.tensors.items())
        ]
        return "\n".join([self.path, head, "", *table_lines(("tensor", "shape", "dtype"), rows)])


def inspect_checkpoint(folders: Folders, step: int | None = None) -> Inspection:
    """Return what a checkpoint holds: that of ``step``, or the newest.

    Raises:
        ValueError: there is none, or a file is missing or damaged; names it.
    """
    # Loads DCP, which torch itself does not.
    from dist_sparse.checkpoint.storage import read_metadata

    steps = folders.steps()
    if not steps or (step is not None and step not in steps):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ValueError(
            f"{folders.root} holds {what}; a folder without its marker is of an unfinished save."
        )
    step = steps[-1] if step is None else step
    marker = folders.read(step)
    folders.verify(marker, marker.files)
    metadata = read_metadata(folders.files, folders.path(step), marker.sizes)
    found: Mapping[str, Any] = metadata.state_dict_metadata
    return Inspection(
        step=step,
        path=folders.path(step),
        world=marker.world,
        bytes=marker.bytes,
        tensors={key: (tuple(t.size), str(t.properties.dtype)) for key, t in found.items()},
        extra=folders.values(step)["extra"],
    )


def summary(path: str | os.PathLike[str]) -> str:
    """Return the content of the folder of one step, or of a folder that holds such, as text.

    Raises:
        ValueError: as :func:`inspect_checkpoint` does; of several, the markers alone are read.
    """
    if (step := step_of(path)) is not None:
        return str(inspect_checkpoint(Folders(os.path.dirname(os.path.abspath(path))), step))
    folders = Folders(path)
    markers = [folders.read(step) for step in folders.steps()]
    rows = [(str(each.step), str(each.world), size(each.bytes)) for each in markers]
    return "\n".join([folders.root, *table_lines(("step", "ranks", "size"), rows, right={0, 1, 2})])
