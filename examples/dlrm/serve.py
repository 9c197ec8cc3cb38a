"""Predict with a DLRM from its artifacts: no TorchRec, and nothing of the training code.

python examples/dlrm/serve.py RUN/served fp32 int8

writes RUN/served/fp32-logits.safetensors and RUN/served/int8-logits.safetensors.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder served/ of a run of examples/dlrm/main.py")
    parser.add_argument("artifacts", nargs="+", help="names of artifacts in it")
    options = parser.parse_args()
    layers = torch.export.load(options.folder / "layers.pt2").module()
    test = load_file(options.folder / "test.safetensors")
    examples = len(test["dense"])
    features = len(test["lengths"]) // examples
    for name in options.artifacts:
        tables = load_served(options.folder / name)
        with torch.no_grad():
            embedded = tables(test["values"], test["lengths"]).view(examples, features, -1)
            logits = layers(test["dense"], embedded)
        save_file({"logits": logits}, options.folder / f"{name}-logits.safetensors")
    assert "torchrec" not in sys.modules


if __name__ == "__main__":
    main()
