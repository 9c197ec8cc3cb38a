"""Base class of the schedulers: the values written, states, the order of steps. In one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_sparse.schedulers import CubicDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.score import DataNormSparsifier


class Fixed(BaseDataScheduler):
    value: Any = None

    def get_schedule_param(self) -> dict[str, Any]:
        return {"w": self.value}


def scheduled(value: Any, param: str = "sparsity_level") -> Any:
    sparsifier = DataNormSparsifier([("w", torch.randn(8, 4))], sparse_block_shape=(1, 4))
    type("Fixed", (Fixed,), {"value": value})(sparsifier, param)
    return sparsifier


@pytest.mark.parametrize(
    "value, kind",
    [
        (torch.tensor(0.5), float),
        (torch.tensor(0.5, dtype=torch.float64), float),
        (torch.tensor(1), int),
    ],
    ids=["float32", "float64", "int64"],
)
def test_0d_tensors_become_numbers(value: Any, kind: type) -> None:
    sparsifier = scheduled(value)
    assert type(sparsifier.data_groups["w"]["sparsity_level"]) is kind
    sparsifier.step()
    assert int((sparsifier.get_mask("w") == 0).sum()) == 32 * value.item()


def test_numpy_scalars_become_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    sparsifier = scheduled(numpy.float32(0.5))
    assert type(sparsifier.data_groups["w"]["sparsity_level"]) is float
    sparsifier.step()


def test_other_values_are_written_as_they_are() -> None:
    vector = torch.ones(1)
    assert scheduled(vector, "other").data_groups["w"]["other"] is vector


@pytest.mark.parametrize(
    "wrong", [{"last_epoch": "7"}, {"last_epoch": -2}, {"last_epoch": True}, {"_step_count": 1.5}]
)
def test_counters_of_a_state_are_integers(wrong: dict[str, Any]) -> None:
    sparsifier = DataNormSparsifier([("w", torch.randn(8, 4))], sparsity_level=0.5)
    for scheduler in (Fixed(sparsifier, "other"), CubicDataScheduler(sparsifier, final=0.5, end=9)):
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match="must be an int"):
            scheduler.load_state_dict({**before, **wrong})
        assert scheduler.state_dict() == before


def test_a_step_kept_without_its_sparsifier_still_works() -> None:
    weight = torch.rand(8, 4)
    sparsifier = DataNormSparsifier([("w", weight)], sparsity_level=0.5)
    scheduler = Fixed(sparsifier, "other")
    mask, step = sparsifier.get_mask("w"), sparsifier.step
    del sparsifier, scheduler
    step()
    assert int((mask == 0).sum()) == 16


def test_repr_is_short_with_many_tables() -> None:
    sparsifier = DataNormSparsifier(
        [(f"t{i}", torch.ones(4, 4)) for i in range(1000)], sparsity_level=0.5
    )
    scheduler = CubicDataScheduler(sparsifier, final=0.5, end=9)
    assert len(repr(scheduler)) < 200 and "sparsity_level of 1,000 names" in repr(scheduler)


@pytest.mark.filterwarnings("error")
def test_a_wrong_order_is_reported_once_the_step_is_taken() -> None:
    scheduler = CubicDataScheduler(scheduled(0.0), final=0.5, end=2)
    with pytest.raises(UserWarning, match=r"called before `data_sparsifier\.step\(\)`"):
        scheduler.step()
    assert scheduler.last_epoch == 1
