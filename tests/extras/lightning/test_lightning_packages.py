"""Which of Lightning's two packages the callback needs."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported(without: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process where some packages can't be found."""
    absent = f"import sys\nsys.modules.update(dict.fromkeys({without}))\n"
    return subprocess.run(
        [sys.executable, "-c", absent + code], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
class TestPackages:
    def test_with_neither_lightning(self) -> None:
        done = imported(["lightning", "pytorch_lightning"], "import dist_sparse.extras.lightning")
        assert "ImportError: dist_sparse.extras.lightning needs Lightning" in done.stderr
        assert "pip install lightning." in done.stderr

    def test_with_pytorch_lightning_alone(self) -> None:
        code = (
            "import torch, pytorch_lightning as pl\nfrom dist_sparse.extras.lightning import"
            " SparsifyCallback\nclass M(pl.LightningModule):\n    def __init__(self):\n       "
            " super().__init__(); self.bag = torch.nn.EmbeddingBag(20, 4)\n    def"
            " training_step(self, batch, i):\n        return self.bag(batch).square().sum()\n   "
            " def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(),"
            " lr=0.1)\noptions = dict(enable_progress_bar=False, enable_model_summary=False,"
            " logger=False, max_epochs=1)\ncallback = SparsifyCallback(level=0.5, end=2)\ntrainer ="
            " pl.Trainer(**options, enable_checkpointing=False, accelerator='cpu',"
            " callbacks=[callback])\nmodel = M()\ntrainer.fit(model,"
            " torch.utils.data.DataLoader(torch.randint(20, (8, 2)), batch_size=2))\nassert"
            " int((model.bag.weight == 0).all(1).sum()) == 10\n"
        )
        done = imported(["lightning"], code)
        assert done.returncode == 0, done.stderr
