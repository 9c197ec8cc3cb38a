"""Predict with a DLRM from its artifacts: no TorchRec, and nothing of the training code.

python examples/dlrm/serve.py RUN/served RUN/dense/served

writes RUN/served/int8-logits.safetensors for the artifact RUN/served/int8, and so on for every
artifact of the folders.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dist_sparse import load_served


def main() -> None:
    """Load the tables of each artifact and the layers above them, and predict the test part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="folders served/ of runs of examples/dlrm/main.py"
    )
    for folder in parser.parse_args().folders:
        serve(folder)
    assert "torchrec" not in sys.modules


def serve(folder: Path) -> None:
    """Predict from every artifact in ``folder``."""
    layers = torch.export.load(folder / "layers.pt2").module()
    test = load_file(folder / "test.safetensors")
    examples = len(test["dense"])
    features = len(test["lengths"]) // examples
    for manifest in sorted(folder.glob("*/manifest.json")):
        artifact = manifest.parent
        tables = load_served(artifact)
        with torch.no_grad():
            embedded = tables(test["values"], test["lengths"]).view(examples, features, -1)
            logits = layers(test["dense"], embedded)
        save_file({"logits": logits}, folder / f"{artifact.name}-logits.safetensors")


if __name__ == "__main__":
    main()
