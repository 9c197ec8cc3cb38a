"""One call sparsifies a model in training to the given level, and resumes exactly.

Also: an attached model whose weights, masks or optimizer state are loaded, replaced, squashed or
copied.
"""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, Advanced, DataNormSparsifier, MaskEnforcer, SparseTraining, sparsify
from dist_sparse.schedulers import (
    ConstantDataScheduler,
    CosineDataScheduler,
    ExponentialDataScheduler,
    LinearDataScheduler,
)
from tests.enforcer.test_enforce_dense import (
    DENSE,
    SPARSE,
    Net,
    attached,
    check_zero,
    few,
    live,
    one,
    train,
    watched,
)
from tests.enforcer.test_enforce_errors import hooks
from tests.keywords import nested
from tests.oracle import oracle_blocks
from tests.states import edited


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1)


def run(
    model: Net, optimizer: Any, training: SparseTraining, steps: int
) -> list[dict[str, Tensor]]:
    """The masks after each step; removed weights are zero in each forward."""
    masks: list[dict[str, Tensor]] = []

    def after_step(step: int) -> None:
        training.step()
        masks.append(
            {name: mask.clone() for name, (_, mask) in live(model, training.sparsifier).items()}
        )

    with watched(model, training.sparsifier) as seen:
        train(
            model,
            optimizer if isinstance(optimizer, Sequence) else [optimizer],
            after_step,
            steps=steps,
        )
    assert len(seen) == steps
    return masks


def removed(masks: dict[str, Tensor], blocks: dict[str, tuple[int, int | str]]) -> dict[str, int]:
    """How many blocks are removed, each as a whole."""
    found = {}
    for name, mask in masks.items():
        height, width = blocks[name]
        width = mask.shape[1] if width == ROW else int(width)
        parts = [part for rows in mask.split(height) for part in rows.split(width, dim=1)]
        assert all(part.min() == part.max() for part in parts)
        found[name] = sum(int(part.max() == 0) for part in parts)
    return found


class TestSparsify:
    @pytest.mark.parametrize("block", [(1, ROW), (1, 4), (1, 1), (4, 4), (3, 5)], ids=str)
    @pytest.mark.parametrize(
        ("level", "begin", "end", "every"), [(0.8, 3, 20, 4), (0.35, 0, 10, 100), (1.0, 5, 5, 1)]
    )
    def test_reaches_the_level_exactly(
        self, block: Any, level: float, begin: int, end: int, every: int
    ) -> None:
        model = Net()
        optimizer = adam(model)
        training = sparsify(
            model, optimizer, level=level, begin=begin, end=end, every=every, block=block
        )
        masks = run(model, optimizer, training, end + 3)
        blocks = {"bag": block, "emb": block}
        counts = [removed(each, blocks) for each in masks]
        shapes = {name: (mask.shape[0], mask.shape[1]) for name, mask in masks[0].items()}
        assert counts[end] == {
            name: round(level * oracle_blocks(shape, block)) for name, shape in shapes.items()
        }
        assert counts[end:] == [counts[end]] * 3, "it stays"
        assert all(counts[step]["bag"] == 0 for step in range(begin))
        moved = {step for step in range(1, end + 3) if counts[step] != counts[step - 1]}
        assert moved <= {*range(begin, end, min(every, end - begin) or 1), end}

    def test_levels_by_glob_and_dense_parameters(self) -> None:
        model = Net()
        optimizers = [
            optim.SGD([model.bag.weight, model.emb.weight], lr=0.1),
            optim.Adam(model.dense),
        ]
        level = {"*": 0.5, "e*": 0.25, "over/*": 0.75}
        training = sparsify(
            model,
            optimizers,
            level=level,
            end=4,
            every=2,
            block=(1, 4),
            advanced=Advanced(dense=["over.*", "scale"]),
        )
        masks = run(model, optimizers, training, 5)[-1]
        counts = removed(masks, dict.fromkeys(masks, (1, 4)))
        assert counts == {"bag": 23, "emb": 8, "scale": 1, "over/weight": 8, "over/bias": 1}

    def test_untouched_rows_need_sums_that_begin_at_0(self) -> None:
        """In float32, 0.1 absorbs small gradients: trained rows would look untouched."""
        model = nn.EmbeddingBag(50, 4)
        optimizer = optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
        with pytest.raises(
            ValueError, match=r"the level 'untouched' has no record.*sums of Adagrad begin at 0\.1"
        ):
            sparsify(
                model, optimizer, level="untouched", end=0, advanced=Advanced(trust_record=True)
            )
        assert not model._forward_pre_hooks

    @pytest.mark.parametrize("rows", [9, 10])
    def test_warns_if_no_row_is_untouched(self, rows: int) -> None:
        model = nn.EmbeddingBag(10, 4)
        optimizer = optim.Adagrad(model.parameters())
        with (
            sparsify(
                model,
                optimizer,
                level="untouched",
                end=1,
                advanced=Advanced(min_rows=0, trust_record=True),
            ) as sparse,
            warnings.catch_warnings(record=True) as warned,
        ):
            for _ in range(4):
                model(torch.arange(rows)[None]).sum().backward()
                optimizer.step()
                sparse.step()
        texts = [str(each.message) for each in warned]
        assert len(texts) == (rows == 10)
        assert all('level="untouched" has removed no row: training has' in text for text in texts)

    @pytest.mark.parametrize("initial", [0.5, 0.1, 0.7])
    @pytest.mark.parametrize("kind", [optim.Adagrad, RowWiseAdagrad])
    def test_scored_by_adagrad_where_it_is_there(self, kind: Any, initial: float) -> None:
        """Rows that no batch has touched are removed first, those with the smallest norm first of
        them."""
        model = nn.EmbeddingBag(50, 4)
        optimizer = kind(model.parameters(), lr=0.1, initial_accumulator_value=initial)
        with sparsify(model, optimizer, level=0.5, begin=1, end=1) as sparse:
            assert sparse.sparsifier.scored_by == "norm_accumulator"
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.arange(0, 30, 2).view(3, 5)).sum().backward()
                optimizer.step()
                before = model.weight.detach().clone()
                sparse.step()
            gone = (sparse.sparsifier.full_mask("weight")[:, 0] == 0).nonzero().flatten().tolist()
        cold = [row for row in range(50) if row % 2 or row >= 30]
        assert gone == sorted(sorted(cold, key=lambda row: float(before[row].square().sum()))[:25])

    @pytest.mark.parametrize(
        "given", [{"block": "1x4"}, {"norm": "L2"}, {"norm": "L1"}, {"score": "norm"}], ids=str
    )
    def test_scored_by_the_norm(self, given: dict[str, Any]) -> None:
        model = Net()
        optimizer = optim.Adagrad(model.parameters(), lr=0.1)
        with sparsify(model, optimizer, **nested(level=0.5, begin=1, end=1, **given)) as sparse:
            assert sparse.sparsifier.scored_by == "norm" and "by norm," in repr(sparse)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"score": "size"}, "score='size'"),
            ({"score": "norm_accumulator", "norm": "L1"}, "norm='L1'"),
            ({"score": "accumulator"}, "'bag': no Adagrad steps it"),
            (
                {"score": "frequency"},
                "'bag': score='frequency' needs a fused optimizer",
            ),
        ],
        ids=str,
    )
    def test_scores_that_are_refused(self, given: dict[str, Any], says: str) -> None:
        model = Net()
        with pytest.raises(ValueError, match=says):
            sparsify(model, adam(model), **nested(level=0.5, end=1, **given))
        sparsify(model, adam(model), level=0.5, end=1).detach()  # nothing was left attached

    def test_a_resumed_run_keeps_its_score(self) -> None:
        plan: dict[str, Any] = {"level": 0.5, "begin": 1, "end": 3, "every": 1}
        model = Net()
        optimizer = optim.Adagrad(model.parameters(), lr=0.1)
        with sparsify(model, optimizer, **nested(score="accumulator", **plan)) as sparse:
            saved = sparse.state_dict()
        with sparsify(model, optimizer, **nested(**plan)) as sparse:
            sparse.load_state_dict(saved)
            assert sparse.sparsifier.scored_by == "accumulator"
            with edited(saved, "schedule") as parts:
                parts["score"] = "frequency"
            with pytest.raises(ValueError, match=r"pass Advanced\(score='frequency'\) to sparsify"):
                sparse.load_state_dict(saved)

    def test_include_and_exclude(self) -> None:
        model = Net()
        assert list(
            sparsify(model, adam(model), level=0.5, end=4, include="b*").sparsifier.data_groups
        ) == ["bag"]
        assert list(
            sparsify(model, adam(model), level=0.5, end=4, exclude="b*").sparsifier.data_groups
        ) == ["emb"]

    @pytest.mark.parametrize(
        "schedule",
        [
            *(
                LinearDataScheduler,
                CosineDataScheduler,
                ExponentialDataScheduler,
                ConstantDataScheduler,
            ),
            partial(LinearDataScheduler, initial=0.25),
        ],
        ids=str,
    )
    def test_other_schedules(self, schedule: Any) -> None:
        model = Net()
        optimizer = adam(model)
        training = sparsify(
            model,
            optimizer,
            level=0.5,
            end=6,
            every=3,
            schedule=schedule,
            advanced=Advanced(norm="L1"),
        )
        masks = run(model, optimizer, training, 7)
        assert training.sparsifier.norm == "L1"
        assert removed(masks[-1], {"bag": (1, ROW), "emb": (1, ROW)}) == {"bag": 12, "emb": 8}

    @pytest.mark.parametrize("cut", [1, 6, 11, 20])
    @pytest.mark.parametrize("state", ["keep", "reset"])
    def test_resumes_in_a_new_object(self, cut: int, state: str) -> None:
        """Through a file, as it would be: the same masks then, and the same as an uninterrupted run
        later."""
        plan: dict[str, Any] = {
            "level": 0.8,
            "begin": 2,
            "end": 15,
            "every": 3,
            "optimizer_state": state,
        }
        model = Net()
        optimizer = adam(model)
        training = sparsify(model, optimizer, **nested(**plan))
        run(model, optimizer, training, cut)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (model, optimizer, training)], file)
        expected = run(model, optimizer, training, 20)

        file.seek(0)
        states = torch.load(file, weights_only=True)
        again = Net()
        with torch.no_grad():
            again.bag.weight.add_(1)
        other = adam(again)
        resumed = sparsify(again, other, **nested(**plan))
        for part, saved in zip((again, other, resumed), states, strict=True):
            part.load_state_dict(saved)
        check_zero(again, resumed.sparsifier)
        assert torch.equal(again.bag.weight, states[0]["bag.weight"])
        assert resumed.scheduler.last_epoch == cut
        found = run(again, other, resumed, 20)
        assert all(
            torch.equal(f[name], e[name])
            for f, e in zip(found, expected, strict=True)
            for name in e
        )
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
        )

    def test_what_few_need_is_not_taken_directly(self) -> None:
        model = Net()
        with pytest.raises(TypeError, match="unexpected keyword argument 'min_rows'"):
            sparsify(model, adam(model), level=0.5, end=2, min_rows=0)  # type: ignore[call-arg]
        with pytest.raises(AttributeError):
            Advanced().min_rows = 0  # type: ignore[misc]

    def test_detach(self) -> None:
        model = Net()
        optimizer = adam(model)
        before = hooks(model, optimizer)
        training = sparsify(model, [optimizer], level=0.5, end=2, every=1)
        run(model, optimizer, training, 4)
        training.detach()
        assert hooks(model, optimizer) == before and not training.enforcer.attached
        gone = model.bag.weight == 0
        few(model, [optimizer])
        assert bool((model.bag.weight[gone] != 0).any())

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"level": 1.5}, r"Invalid level=1\.5: must be a number in \[0, 1\]"),
            ({"level": None}, "Invalid level=None"),
            ({"level": True}, "Invalid level=True"),
            (
                {"level": {"bag": 0.5, "emb": float("nan")}},
                r"Invalid level\['emb'\]=nan: must be a number in \[0, 1\]",
            ),
            ({"level": {}}, r"Invalid level=\{\}"),
            ({"schedule": 3}, "Invalid schedule=3"),
            (
                {"schedule": lambda *_, **plan: None},
                "Invalid schedule=<function .* ready scheduler, and returned None",
            ),
            (
                {"schedule": lambda step: None},
                "Invalid schedule=<function .* ready scheduler of final, begin.* unexpected keyword",
            ),
            (
                {"level": {"nothing": 0.5}},
                r"Invalid level: \['nothing'\] match none of \['bag', 'emb'\]",
            ),
            ({"min_rows": -1}, "Invalid min_rows=-1"),
            ({"advanced": {"min_rows": 0}}, "Invalid advanced=.*: must be a dist_sparse.Advanced"),
            (
                {"min_rows": 20, "level": {"emb": 0.5}},
                r"Invalid level: \['emb'\] match none of.*left dense: 'emb'",
            ),
            (
                {"min_rows": 1000},
                "every table is left dense: 'bag' .23 rows, fewer than min_rows=1000",
            ),
            ({"schedule": "cubik"}, "Invalid schedule='cubik'.*'cosine'.*Did you mean 'cubic'"),
            ({"block": "1x0"}, "Invalid block '1x0'"),
            ({"block": "rows"}, "Invalid block 'rows': must be ROWSxCOLUMNS"),
            ({"block": (1, 2, 3)}, "Invalid sparse_block_shape="),
            ({"block": 4}, "Invalid sparse_block_shape=4 of 'bag'"),
            ({"optimizer": [], "auto_step": True}, "None of the given optimizers steps 'bag'"),
            ({"end": -1}, r"Invalid end=-1"),
            ({"begin": 5, "end": 4}, r"Invalid end=4"),
            ({"end": 4.5}, r"Invalid end=4\.5"),
            ({"every": 0}, r"Invalid every=0"),
            ({"every": -3}, r"Invalid every=-3"),
            ({"every": 2.5}, r"Invalid every=2\.5"),
            ({"block": (0, 4)}, r"Invalid sparse_block_shape=\(0, 4\)"),
            ({"include": "nothing"}, "matches none of the tables"),
            ({"include": 3}, "Invalid include=3"),
            ({"optimizer_state": "drop"}, "Invalid optimizer_state='drop'"),
            ({"optimizer": None}, "Invalid optimizer of type NoneType"),
            ({"optimizer": []}, "None of the given optimizers steps 'bag'"),
            ({"model": "model"}, "must be a torch.nn.Module"),
            ({"norm": "L3"}, r"Invalid norm='L3': must be one of 'L1', 'L2'"),
        ],
        # Addresses of functions differ between workers.
        ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
    )
    def test_bad_arguments(self, wrong: dict[str, Any], message: str) -> None:
        model = Net()
        optimizer = adam(model)
        before = hooks(model, optimizer), copy.deepcopy(model.state_dict())
        given = {"model": model, "optimizer": optimizer, "level": 0.5, "end": 10, **wrong}
        with pytest.raises((ValueError, AssertionError), match=message):
            sparsify(given.pop("model"), given.pop("optimizer"), **nested(**given))
        assert hooks(model, optimizer) == before[0]
        assert all(torch.equal(value, before[1][key]) for key, value in model.state_dict().items())
        sparsify(model, optimizer, level=0.5, end=10)

    def test_states_that_are_no_states(self) -> None:
        model = Net()
        training = sparsify(model, adam(model), level=0.5, end=4)
        for wrong in ({}, {"sparsifier": training.sparsifier.state_dict()}):
            with pytest.raises(ValueError, match="The state lacks"):
                training.load_state_dict(wrong)


class TestOptimizerState:
    @pytest.mark.parametrize("state", ["keep", "reset"])
    @pytest.mark.parametrize(
        "kind", [optim.Adam, optim.Adagrad, RowWiseAdagrad, partial(optim.SGD, momentum=0.9)]
    )
    def test_of_what_is_removed(self, kind: Any, state: str) -> None:
        """Zero after attach() and whenever masks have moved, in what was and in what is removed;
        the rest is kept."""
        model = Net()
        block = (1, ROW) if kind is RowWiseAdagrad else (1, 4)  # its state belongs to whole rows
        sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block)
        sparsifier.add_model(model, include="bag")
        sparsifier.step()
        optimizers = [
            kind([model.bag.weight], lr=0.1),
            optim.SGD([model.emb.weight, *model.dense], lr=0.1),
        ]
        few(model, optimizers, 30)
        states = [
            value for value in optimizers[0].state[model.bag.weight].values() if value.ndim == 2
        ]
        assert states and all(bool((value != 0).any(1).all()) for value in states), (
            "every row was trained"
        )

        def check(was: list[Tensor], *masks: Tensor) -> None:
            for value, before in zip(states, was, strict=True):
                gone = torch.stack(masks).any(0)[:, : value.shape[1]]
                assert torch.equal(
                    value, torch.where(gone, 0.0, before) if state == "reset" else before
                )

        was = [value.clone() for value in states]
        first = sparsifier.get_mask("bag") == 0
        MaskEnforcer(sparsifier, state).attach(*optimizers)
        check(was, first)
        few(model, optimizers, 30)
        with torch.no_grad():
            model.bag.weight.copy_(model.bag.weight.flip(0))  # others are the smallest then
        for level in (0.75, 0.25):
            was = [value.clone() for value in states]
            before = sparsifier.get_mask("bag") == 0
            sparsifier.data_groups["bag"]["sparsity_level"] = level
            sparsifier.step()
            after = sparsifier.get_mask("bag") == 0
            assert not torch.equal(before, after)
            check(was, before, after)
            few(model, optimizers, 30)

    def test_that_does_not_begin_at_zero(self) -> None:
        """A regrown block starts afresh: Adagrad's state has its initial value."""
        make = one(optim.Adagrad, initial_accumulator_value=0.5)
        model, sparsifier, (optimizer,), _ = attached(make, register="all_of_it", state="reset")
        value, gone = optimizer.state[model.bag.weight]["sum"], sparsifier.get_mask("bag") == 0
        assert bool(gone.any()) and bool((value[gone] == 0.5).all())


class TestWhileAttached:
    """Removed weights are zero in the next forward, whatever has happened to weights, masks and
    optimizers."""

    def check_next(
        self, model: Net, sparsifier: DataNormSparsifier, optimizers: Sequence[Any]
    ) -> None:
        with watched(model, sparsifier) as seen:
            few(model, optimizers)
        assert len(seen) == 3 and min(seen) > 0
        check_zero(model, sparsifier)

    @pytest.mark.parametrize("trained", [0, 2])
    def test_the_model_is_loaded(self, trained: int) -> None:
        model, sparsifier, optimizers, _ = attached(DENSE["adam"], register="all_of_it")
        few(model, optimizers, trained)
        # A load between a backward and the first step is no false alarm.
        model(torch.tensor([[1, 2]])).sum().backward()
        model.load_state_dict(Net().state_dict())
        self.check_next(model, sparsifier, optimizers)

    def test_the_model_is_loaded_by_assignment(self) -> None:
        """Its parameters are others then, which the optimizer does not know: an error that says so,
        or zeros."""
        model, sparsifier, optimizers, _ = attached(DENSE["adam"])
        few(model, optimizers)
        try:
            model.load_state_dict(Net().state_dict(), assign=True)
            self.check_next(model, sparsifier, optimizers)
        except (ValueError, RuntimeError) as error:
            assert "'bag'" in str(error)

    def test_the_sparsifier_is_loaded(self) -> None:
        model, sparsifier, optimizers, _ = attached(SPARSE["sgd"], sparse=True)
        saved = sparsifier.state_dict()
        masks = {name: mask.clone() for name, (_, mask) in live(model, sparsifier).items()}
        few(model, optimizers, 10)
        sparsifier.step()
        sparsifier.load_state_dict(saved)
        assert all(
            torch.equal(mask, masks[name]) for name, (_, mask) in live(model, sparsifier).items()
        )
        check_zero(model, sparsifier)
        self.check_next(model, sparsifier, optimizers)

    def test_the_sparsifier_of_plain_data_is_not_loaded(self) -> None:
        """Copies would take the place of the weights that train: an error, and these stay
        enforced."""
        model, sparsifier, optimizers, enforcer = attached(DENSE["adam"], register="plain_data")
        few(model, optimizers)
        saved = sparsifier.state_dict()
        with pytest.raises(ValueError, match=r"Plain data \['bag', .*detach\(\) the enforcer"):
            sparsifier.load_state_dict(saved)
        assert (
            sparsifier.get_data("bag").data_ptr() == model.bag.weight.data_ptr()
            and enforcer.attached
        )
        self.check_next(model, sparsifier, optimizers)

    @pytest.mark.parametrize("register", ["all_of_it", "plain_data"])
    @pytest.mark.parametrize("leave", [True, False])
    def test_masks_are_squashed(self, leave: bool, register: str) -> None:
        """What is squashed trains on as dense; the rest stays enforced; then nothing is."""
        model, sparsifier, optimizers, enforcer = attached(DENSE["adam"], register=register)
        few(model, optimizers)
        gone = {name: sparsifier.get_mask(name) == 0 for name in ("bag", "emb")}
        sparsifier.squash_mask(leave_parametrized=leave, names=["bag"])
        assert bool((model.bag.weight[gone["bag"]] == 0).all()), (
            "zeros stay until an optimizer moves them"
        )
        few(model, optimizers)
        assert bool((model.bag.weight[gone["bag"]] != 0).any())
        assert bool((model.emb.weight[gone["emb"]] == 0).all())
        sparsifier.squash_mask(leave_parametrized=leave)
        few(model, optimizers)
        assert bool((model.emb.weight[gone["emb"]] != 0).any())
        enforcer.detach()
        assert not any(hooks(model, *optimizers).values())

    def test_weights_are_swapped_behind_the_parameters(self) -> None:
        """As with a moving average, or ``model.to()``: the parameter has another memory."""
        model, sparsifier, optimizers, _ = attached(DENSE["adam"])
        few(model, optimizers)
        was = model.bag.weight.data
        model.bag.weight.data = was + 1
        few(model, optimizers)
        check_zero(model, sparsifier)

    def test_a_frozen_weight_is_given_to_its_optimizer_later(self) -> None:
        model = Net()
        model.bag.weight.requires_grad_(False)
        sparsifier = DataNormSparsifier(sparsity_level=0.5)
        sparsifier.add_model(model)
        sparsifier.step()
        optimizer = optim.SGD([model.emb.weight, *model.dense], lr=0.1)
        with MaskEnforcer(sparsifier).attach(optimizer):
            few(model, [optimizer])
            model.bag.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [model.bag.weight]})
            self.check_next(model, sparsifier, [optimizer])

    def test_weights_are_written_between_forward_and_step(self) -> None:
        """The step writes a few rows, somebody else has written all."""
        model, sparsifier, optimizers, _ = attached(SPARSE["sgd"], sparse=True)
        few(model, optimizers)
        model(torch.tensor([[1, 2]])).sum().backward()
        with torch.no_grad():
            model.bag.weight.add_(1)
        for optimizer in optimizers:
            optimizer.step()
        self.check_next(model, sparsifier, optimizers)

    def test_weights_are_written_and_read(self) -> None:
        model, sparsifier, _, _ = attached(DENSE["adam"], register="plain_data")
        with torch.no_grad():
            model.bag.weight.add_(1)
        assert sparsifier.state_dict()["_container"]["parametrizations.bag.original"] is not None
        check_zero(model, sparsifier)
        with torch.no_grad():
            model.bag.weight.add_(1)
        assert bool((sparsifier.get_data("bag")[sparsifier.get_mask("bag") == 0] == 0).all())

    def test_the_model_is_compiled_for_serving(self) -> None:
        """Hooks are no part of a graph: the way out is named, and works."""
        model, ids = (
            nn.Sequential(nn.EmbeddingBag(40, 4), nn.Linear(4, 1)).eval(),
            torch.randint(40, (4, 3)),
        )
        training = sparsify(model, adam(model), level=0.5, end=0)
        training.step()
        ways: dict[str, Callable[[], Any]] = {
            "TorchScript can't compile": lambda: torch.jit.script(model),
            "torch.export can't trace": lambda: torch.export.export(model, (ids,)),
            "torch.jit.trace can't trace": lambda: torch.jit.trace(model, ids),
        }
        for says, compiled in ways.items():
            with pytest.raises(
                (RuntimeError, AttributeError), match=rf"{says} the hooks .* call detach\(\) first"
            ):
                compiled()
        assert not hasattr(next(iter(model[0]._forward_pre_hooks.values())), "__name__")
        training.detach()
        for compiled in ways.values():
            compiled()

    def test_the_model_is_copied_or_pickled(self) -> None:
        """For a moving average, say. The copy is a model like any other."""
        model, sparsifier, optimizers, _ = attached(DENSE["adam"])
        average = optim.swa_utils.AveragedModel(model)
        few(model, optimizers)
        average.update_parameters(model)
        average(torch.tensor([[1, 2]]))
        torch.save(model, io.BytesIO())
        check_zero(model, sparsifier)

    def test_a_forward_that_writes_weights(self) -> None:
        """``max_norm`` shortens rows in every forward, also before the first step."""
        model, sparsifier, optimizers, _ = attached(DENSE["adam"], max_norm=1.0)
        for _ in range(2):
            model(torch.tensor([[1, 2]]))
        self.check_next(model, sparsifier, optimizers)

    def test_masks_of_plain_data_are_edited(self) -> None:
        model, sparsifier, optimizers, enforcer = attached(DENSE["adam"], register="plain_data")
        sparsifier.get_mask("bag")[3] = 0
        enforcer.renew()
        assert bool((model.bag.weight[3] == 0).all())
        self.check_next(model, sparsifier, optimizers)

    def test_in_inference_mode(self) -> None:
        model, sparsifier, optimizers, _ = attached(DENSE["adam"])
        few(model, optimizers)
        with torch.no_grad():
            model.bag.weight.fill_(1)
        with torch.inference_mode(), watched(model, sparsifier) as seen:
            model(torch.tensor([[1, 2]]))
        assert len(seen) == 1
        sparsifier.step()
        self.check_next(model, sparsifier, optimizers)


def test_a_level_of_1_warns() -> None:
    """All rows are removed, which is hardly what was meant."""
    model = nn.ModuleDict({"user": nn.EmbeddingBag(64, 4), "item": nn.EmbeddingBag(64, 4)})
    with pytest.warns(UserWarning, match=r"level=1.0 removes all weights of \['user'\]"):
        sparsify(model, adam(model), level={"user": 1.0, "item": 0.5}, end=3).detach()


def test_a_warning_that_is_an_error_leaves_nothing_attached() -> None:
    model = nn.ModuleDict({"user": nn.EmbeddingBag(64, 4), "item": nn.EmbeddingBag(64, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match=r"level=1.0 removes all weights"):
            sparsify(model, adam(model), level={"user": 1.0, "item": 0.5}, end=3)
    sparsify(model, adam(model), level=0.5, end=3).detach()
