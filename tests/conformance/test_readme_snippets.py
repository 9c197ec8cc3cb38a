"""Code of the ancestors' READMEs runs here, with nothing but the import changed.

The READMEs are those of torch.ao.pruning's data_sparsifier and data_scheduler. Each test is one of
their examples, in the same calls, with the one-line fixes without which they run nowhere (marked
where they are).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.schedulers import ExponentialDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.score import DataNormSparsifier


class ImplementedDataSparsifier(BaseDataSparsifier):
    """What "Write your own data sparsifier" shows: removes what is smaller than a threshold."""

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold=threshold)

    def update_mask(self, name: str, data: Tensor, threshold: float) -> None:  # type: ignore[override]
        mask = self.get_mask(name)
        mask[torch.abs(data) < threshold] = 0.0


class GammaScheduler(BaseDataScheduler):
    """What "Write your own data scheduler" shows: multiplies the level by gamma up to a threshold.

    As printed, gamma is set after super().__init__(), which calls get_schedule_param() already.
    """

    def __init__(
        self, data_sparsifier: BaseDataSparsifier, gamma: float, threshold_sl: float
    ) -> None:
        super().__init__(data_sparsifier, "sparsity_level")
        self.gamma = gamma
        self.threshold_sl = threshold_sl

    def get_schedule_param(self) -> dict[str, float]:
        groups = self.data_sparsifier.data_groups
        if self.last_epoch > 0:
            return {
                name: min(self.threshold_sl, config["sparsity_level"] * self.gamma)
                for name, config in groups.items()
            }
        return dict.fromkeys(groups, 0.0)


class Model(nn.Module):
    def __init__(self, feature_dim: int, emb_dim: int, num_classes: int) -> None:
        super().__init__()  # the README forgets this line: an AttributeError as printed
        self.emb = nn.EmbeddingBag(feature_dim, emb_dim)
        self.linear1 = nn.Linear(emb_dim, 32)
        self.linear2 = nn.Linear(32, num_classes)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.relu(self.linear1(self.emb(x))))
        return out


def test_simple_example() -> None:
    tensor1 = torch.randn(100, 100)
    param1 = nn.Parameter(torch.randn(200, 32))
    before1, before2 = tensor1.clone(), param1.detach().clone()

    my_sparsifier = ImplementedDataSparsifier(threshold=0.2)
    my_sparsifier.add_data(name="tensor1", data=tensor1, threshold=0.5)
    my_sparsifier.add_data(name="param1", data=param1)
    my_sparsifier.step()
    original = my_sparsifier.get_data(name="tensor1", return_original=True)
    sparsified = my_sparsifier.get_data(name="tensor1", return_original=False)
    assert torch.equal(original, before1)
    assert torch.equal(sparsified, torch.where(before1.abs() < 0.5, 0.0, before1))
    my_sparsifier.squash_mask()

    # What the README does not say: the user's own tensors are sparse now.
    assert torch.equal(tensor1, torch.where(before1.abs() < 0.5, 0.0, before1))
    assert torch.equal(param1.detach(), torch.where(before2.abs() < 0.2, 0.0, before2))


def test_model_embeddings() -> None:
    model = Model(100, 32, 10)
    before = model.emb.weight.detach().clone()
    my_sparsifier = ImplementedDataSparsifier(threshold=0.5)
    my_sparsifier.add_data(name="emb", data=model.emb)
    my_sparsifier.step()
    my_sparsifier.squash_mask()
    assert torch.equal(model.emb.weight.detach(), torch.where(before.abs() < 0.5, 0.0, before))
    assert model(torch.randint(100, (4, 3))).shape == (4, 10)


def test_training_data() -> None:
    # Of equal length: the README's loop fails at a short last batch.
    batches = [torch.randn(8, 4) for _ in range(3)]
    data_sparsifier = ImplementedDataSparsifier(threshold=0.2)
    removed = torch.zeros(8, 4, dtype=torch.bool)
    for number, batch in enumerate(batches):
        if number == 0:
            x = data_sparsifier.add_data(name="train_data", data=batch)
        else:
            with pytest.warns(UserWarning):
                x = data_sparsifier.add_data(name="train_data", data=batch)
        assert torch.equal(x, torch.where(removed, 0.0, batch))
        data_sparsifier.step()
        # The example only ever clears, so the reused mask loses more with every batch.
        removed |= batch.abs() < 0.2
        assert torch.equal(data_sparsifier.get_mask("train_data") == 0, removed)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_gamma_scheduler_on_data_added_in_the_loop() -> None:
    data_sparsifier = DataNormSparsifier(sparsity_level=0.2)
    data_scheduler = GammaScheduler(data_sparsifier, gamma=2.0, threshold_sl=0.7)
    levels = []
    for _epoch in range(4):
        for _batch in range(2):
            data_sparsifier.add_data(name="train_data", data=torch.randn(10, 4))
            data_sparsifier.step()
        levels.append(data_sparsifier.data_groups["train_data"]["sparsity_level"])
        assert int((data_sparsifier.get_mask("train_data") == 0).sum()) == 4 * round(
            10 * levels[-1]
        )
        data_scheduler.step()
    assert levels == [0.2, 0.4, 0.7, 0.7]
    assert data_scheduler.get_last_param() == {"train_data": 0.7}


def test_gamma_scheduler_on_data_there_before_stays_at_zero_and_what_to_use_instead() -> None:
    weight = torch.randn(100, 4)
    data_sparsifier = DataNormSparsifier([("w", weight)], sparsity_level=0.2)
    data_scheduler = GammaScheduler(data_sparsifier, gamma=2.0, threshold_sl=0.7)
    for _epoch in range(5):
        data_sparsifier.step()
        data_scheduler.step()
        assert data_scheduler.get_last_param() == {"w": 0.0}

    data_sparsifier = DataNormSparsifier([("w", weight)], sparsity_level=0.2)
    scheduler = ExponentialDataScheduler(data_sparsifier, final=0.7, end=4)
    for _epoch in range(5):
        data_sparsifier.step()
        scheduler.step()
    assert int((data_sparsifier.get_mask("w") == 0).sum()) == 4 * 70
