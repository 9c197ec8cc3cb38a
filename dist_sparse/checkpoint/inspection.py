"""What checkpoints hold, as text: read without a model, every byte verified first. Local."""

from __future__ import annotations

import os
from typing import Any

from dist_sparse.checkpoint.folders import Folders, step_of
from dist_sparse.text import number_of, size, table_lines


def summary(path: str | os.PathLike[str]) -> str:
    """Return the content of the folder of one step, or of a folder that holds such, as text.

    Raises:
        ValueError: there is none, or a file is missing or damaged; names it. Of several
            checkpoints, the markers alone are read.
    """
    if (step := step_of(path)) is not None:
        return _of_step(Folders(os.path.dirname(os.path.abspath(path))), step)
    folders = Folders(path)
    markers = [folders.read(step) for step in folders.steps()]
    rows = [(str(each.step), str(each.world), size(each.bytes)) for each in markers]
    return "\n".join([folders.root, *table_lines(("step", "ranks", "size"), rows, right={0, 1, 2})])


def _of_step(folders: Folders, step: int) -> str:
    # Loads DCP, which torch itself does not.
    from dist_sparse.checkpoint.storage import read_metadata

    if step not in folders.steps():
        raise ValueError(
            f"{folders.root} holds no checkpoint of step {step}; a folder without its marker is of"
            " an unfinished save."
        )
    marker = folders.read(step)
    folders.verify(marker, marker.files)
    metadata: Any = read_metadata(folders.files, folders.path(step), marker.sizes)
    rows = [
        (key, " x ".join(map(str, saved.size)), str(saved.properties.dtype))
        for key, saved in sorted(metadata.state_dict_metadata.items())
    ]
    head = f"step {step}, saved by {number_of(marker.world, 'rank')}, {size(marker.bytes)}: whole"
    lines = table_lines(("tensor", "shape", "dtype"), rows)
    return "\n".join([folders.path(step), head, "", *lines])
