"""compact() of models in one process, against the masked model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dist_sparse import Advanced, DataNormSparsifier, MaskEnforcer, compact, expand, sparsify
from dist_sparse.compaction.tables import CompactEmbedding, CompactEmbeddingBag


class Net(nn.Module):
    """Bags and sequences of plain tables."""

    def __init__(self, mode: str = "sum", sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(60, 8, mode=mode, sparse=sparse, padding_idx=3)
        self.words = nn.Embedding(40, 8, sparse=sparse, padding_idx=5)
        self.twice = self.words
        self.over = nn.Linear(8, 1)

    def forward(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (6,), generator=draw)
        offsets = lengths.cumsum(0) - lengths
        bags = self.bags(torch.randint(0, 60, (int(lengths.sum()),), generator=draw), offsets)
        flat = self.bags(torch.randint(0, 60, (6, 3), generator=draw))
        words = self.twice(torch.randint(0, 40, (6, 2), generator=draw)).sum(1)
        return self.over(bags + flat + words).squeeze(1)


def train(net: nn.Module, optimizer: Any, seeds: range) -> list[Tensor]:
    found = []
    for seed in seeds:
        optimizer.zero_grad()
        found.append(net(seed))
        found[-1].square().mean().backward()
        optimizer.step()
    return [each.detach() for each in found]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.05),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9),
    "keyed": lambda net: CombinedOptimizer(
        [
            KeyedOptimizerWrapper(
                dict(net.named_parameters()), lambda p: torch.optim.Adagrad(p, lr=0.05)
            )
        ]
    ),
}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_the_masked_model(mode: str, name: str) -> None:
    runs = []
    for compacts in (False, True):
        net: Any = Net(mode)
        optimizer = OPTIMIZERS[name](net)
        sparse = sparsify(net, optimizer, level=0.7, end=0)
        sparse.step()
        found = train(net, optimizer, range(3))
        found.append(net(99).detach())
        if compacts:
            kept = {key: net.state_dict()[key].any(1) for key in ("bags.weight", "words.weight")}
            assert compact(net, sparse) is net
            assert type(net.bags) is CompactEmbeddingBag and type(
                net.words
            ) is CompactEmbedding is type(net.twice)
            assert net.words is net.twice
            assert len(net.bags.stored_weight) == int(kept["bags.weight"].sum()) == 18
            assert repr(sparse).endswith(", 0 tables, detached)")
        found.append(net(99).detach())
        assert torch.equal(found[-1], found[-2]) or mode == "mean"
        runs.append(found + train(net, optimizer, range(10, 30)))
    for mine, other in zip(*runs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_sparse_gradients() -> None:
    runs: list[Tensor] = []
    for compacts in (False, True):
        net: Any = Net(sparse=True)
        tables = [net.bags.weight, net.words.weight]
        optimizers = [
            torch.optim.SparseAdam(tables, lr=0.05),
            torch.optim.SGD(net.over.parameters(), lr=0.05),
        ]
        sparse = sparsify(net, optimizers, level=0.7, end=0)
        sparse.step()
        both = KeyedOptimizerWrapper({"over": net.over.weight}, lambda _, step=optimizers[1]: step)
        for seed in range(13):
            optimizers[0].zero_grad()
            runs += train(net, both, range(seed, seed + 1))
            optimizers[0].step()
            if compacts and seed == 2:
                compact(net, sparse)
    for mine, other in zip(runs[:13], runs[13:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_twice() -> None:
    """Bitmaps compose: after two rounds the tables hold what both have kept, under the original
    ids."""
    net: Any = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    everything = torch.arange(60).unsqueeze(1)
    for level in (0.5, 0.5):
        sparse = sparsify(net, optimizer, level=level, end=0, advanced=Advanced(min_rows=1))
        sparse.step()
        before = net.bags(everything), net.words(torch.arange(40))
        compact(net, sparse)
        assert torch.equal(net.bags(everything), before[0]) and torch.equal(
            net.words(torch.arange(40)), before[1]
        )
    assert (len(net.bags.stored_weight), net.bags.index.rows, net.bags.index.num_kept) == (
        15,
        60,
        15,
    )
    assert list(net.state_dict())[:3] == [
        "bags.stored_weight",
        "bags.index.words",
        "bags.index.counts",
    ]
    copied = copy.deepcopy(net)
    copied.load_state_dict(net.state_dict())
    assert torch.equal(copied(1), net(1))


def test_nothing_left_and_ids_out_of_range() -> None:
    net: Any = Net("mean")
    sparsifier = DataNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(net)
    sparsifier.step()
    compact(net, sparsifier, optimizer=())
    assert len(net.bags.stored_weight) == 0 and not net.bags(torch.tensor([[1, 2], [3, 59]])).any()
    assert torch.equal(net.words(torch.tensor([[1], [39]])), torch.zeros(2, 1, 8))
    with pytest.raises((IndexError, RuntimeError)):
        net.words(torch.tensor([40]))
    with pytest.raises((IndexError, RuntimeError)):
        net.bags(torch.tensor([[-1]]))
    with pytest.raises(ValueError, match=r"Invalid input of shape \(3,\)"):
        net.bags(torch.tensor([1, 2, 3]))


def test_a_root_that_is_a_table() -> None:
    table = nn.EmbeddingBag(50, 4, mode="sum")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    sparse = sparsify(table, optimizer, level=0.5, end=0)
    sparse.step()
    made = compact(table, sparse)
    assert type(made) is CompactEmbeddingBag and optimizer.param_groups[0]["params"] == [
        made.stored_weight
    ]


def test_unsharded_collection() -> None:
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=30, embedding_dim=4, feature_names=[n])
        for n in ("a", "b")
    ]
    ids = KeyedJaggedTensor(["b", "a"], torch.randint(0, 30, (24,)), lengths=torch.full((12,), 2))
    model: Any = nn.ModuleDict({"bags": EmbeddingBagCollection(tables)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level={"a": 0.8}, end=0)
    model["bags"](ids).values().sum().backward()
    optimizer.step()
    sparse.step()
    before, sums = (
        model["bags"](ids).values(),
        optimizer.state[model["bags"].embedding_bags["b"].weight]["sum"],
    )
    compact(model, sparse)
    assert torch.equal(model["bags"](ids).values(), before)
    inner = model["bags"].inner.embedding_bags
    assert (len(inner["a"].weight), len(inner["b"].weight)) == (6, 30)
    assert torch.equal(optimizer.state[inner["b"].weight]["sum"], sums)

    # A copy that is loaded as often as the model was has maps of its own.
    state = model.state_dict()
    for loads in range(1, 4):
        model.load_state_dict(state)
        model["bags"](ids)
        other = copy.deepcopy(model)
        name = next(key for key in state if key.endswith("words"))
        for _ in range(loads):
            other.load_state_dict(state | {name: torch.zeros_like(state[name])})
            assert not other["bags"](ids)["a"].any()


class Odd(nn.Embedding):
    """A user's own."""


class OddBags(EmbeddingBagCollection):
    """A user's own."""


def bags_of(kind: type[EmbeddingBagCollection] = EmbeddingBagCollection) -> nn.ModuleDict:
    table = EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["f"])
    return nn.ModuleDict({"bags": kind([table])})


def table_of(made: nn.Module) -> nn.Parameter:
    [weight] = made.parameters()
    return weight


def step_in_backward(made: nn.Module) -> None:
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})


# What a new module or its parameter would not do, and the message.
BEHAVIOR: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a forward hook": (
        lambda made: made["bags"].register_forward_hook(lambda module, args, output: output),
        "at 'bags' has forward hooks, which may change its outputs",
    ),
    "a forward pre-hook": (
        lambda made: made["bags"].register_forward_pre_hook(lambda module, args: None),
        "at 'bags' has forward hooks, which may change its outputs",
    ),
    "a backward hook": (
        lambda made: made["bags"].register_full_backward_hook(lambda module, of, to: None),
        "it has hooks on gradients",
    ),
    "a hook on the gradient": (
        lambda made: table_of(made).register_hook(lambda grad: grad * 0),
        "it has hooks on gradients",
    ),
    "a hook after the gradient": (
        lambda made: table_of(made).register_post_accumulate_grad_hook(lambda weight: None),
        "it has hooks on gradients",
    ),
    "an optimizer in the backward": (step_in_backward, "optimizer .*runs in the backward"),
}


@pytest.mark.parametrize("form", ["table", "collection"])
@pytest.mark.parametrize("case", BEHAVIOR)
def test_behavior_that_would_be_lost_is_refused(case: str, form: str) -> None:
    change, message = BEHAVIOR[case]
    made = nn.ModuleDict({"bags": nn.EmbeddingBag(20, 4)}) if form == "table" else bags_of()
    change(made)
    refused(made, f"weight .*{message}")


def test_a_subclass_of_a_collection_is_refused() -> None:
    refused(bags_of(OddBags), "can't be compacted: the OddBags at 'bags' is a subclass")


@pytest.mark.parametrize("form", ["table", "collection"])
def test_a_compact_model_with_hooks_is_not_expanded(form: str) -> None:
    made: Any = nn.ModuleDict({"bags": nn.EmbeddingBag(20, 4)}) if form == "table" else bags_of()
    sparse = sparsify(made, torch.optim.SGD(made.parameters(), lr=0.1), level=0.5, end=0)
    handle = made["bags"].register_forward_hook(lambda module, args, output: output)
    if form == "collection":
        empty = torch.zeros(1, dtype=torch.int64)
        made["bags"](KeyedJaggedTensor(["f"], empty[:0], lengths=empty))
    sparse.step()
    # Removed hooks are not in the way.
    handle.remove()
    made = compact(made, sparse, optimizer=())
    handle = made["bags"].register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match=r"can't be expanded: .* at 'bags' has forward hooks"):
        expand(made, optimizer=())
    handle.remove()
    expand(made, optimizer=())


def refused(net: nn.Module, words: str, block: Any = (1, "ROW"), **how: Any) -> None:
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block)
    sparsifier.add_model(net)
    sparsifier.step()
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        compact(net, sparsifier, **{"optimizer": (), **how})
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())
    assert sparsifier.data_groups


def test_refused() -> None:
    refused(
        Net(), r"'bags' has masks of blocks \(1, 4\); compact\(\) needs whole rows", block=(1, 4)
    )
    refused(nn.ModuleDict({"own": Odd(20, 4)}), r"own\.weight can't be .* the Odd at 'own' is")
    refused(nn.Sequential(nn.EmbeddingBag(20, 4, mode="max")), r"0\.weight has mode='max'")
    refused(Net(), r"bags\.weight is stepped by a plain optimizer.*optimizer=\(\)", optimizer=None)
    tied = Net()
    tied.other = nn.Linear(8, 40)
    tied.other.weight = tied.words.weight
    refused(tied, r"words\.weight is the weight of other modules too \(\['Linear'\]\)")
    net = Net()
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(net)
    sparsifier.step()
    with pytest.raises(ValueError, match="Nothing is removed yet"):
        compact(net, sparsifier)
    with pytest.raises(ValueError, match=r"Invalid sparse of type Linear"):
        compact(net, nn.Linear(1, 1))  # type: ignore[arg-type]
    sparsifier.data_groups["bags"]["sparsity_level"] = 0.5
    sparsifier.step()
    with pytest.raises(
        ValueError, match=re.escape("['bags'] are not embedding tables of this model")
    ):
        compact(Net(), sparsifier)
    plain = DataNormSparsifier([("w", torch.randn(4, 4))])
    plain.step()
    with pytest.raises(ValueError, match=r"Plain data can't be compacted: \['w'\]"):
        compact(net, plain)


def test_no_module() -> None:
    net = Net()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(net)
    sparsifier.step()
    for model in (None, "net", {"net": net}):
        wrong: Any = model
        with pytest.raises(ValueError, match=r"Invalid model of type \w+: must be a torch"):
            compact(wrong, sparsifier)
        with pytest.raises(ValueError, match=r"Invalid model of type \w+: must be a torch"):
            expand(wrong, optimizer=())
    assert sparsifier.data_groups


def test_a_dense_parameter_is_refused() -> None:
    """Its mask would be lost."""
    net = Net()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(net, dense="over.weight")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    MaskEnforcer(sparsifier).attach(optimizer)
    sparsifier.data_groups["over/weight"]["sparsity_level"] = 1.0
    sparsifier.step()
    with pytest.raises(ValueError, match=r"\['over/weight'\] are not embedding tables"):
        compact(net, sparsifier)
