"""Checks of the self-test that train: masks and weights of small models, in each kind of table,
optimizer and pipeline.

Each compares a model whose enforcer is attached with one whose removed weights are written after
every step, on the same device. No check compares masks of two models that have trained: weights
that differ in the last bit may swap two blocks at a threshold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import EVERY
from dist_sparse.extras.device.trials import (
    BLOCKS,
    SCORES,
    Difference,
    MaskedModel,
    NotRun,
    Sizes,
    compare_runs,
    new_stream,
    random_sums,
    random_tables,
    require_equal_masks,
    sleep,
    synchronize,
    waits,
)
from dist_sparse.sparsifiers.masks import removed_lookups
from dist_sparse.tables.modules import collection_of, collections_of
from dist_sparse.tables.protocols import TableBatch
from dist_sparse.torchrec.trial import TrialTables, pipeline_of, trial_batch

# The default mode, and the most common finer block.
_TRAINED = ("row", "1x4")


def masks_equal_the_cpus(device: torch.device, sizes: Sizes) -> str:
    """Compare the masks of all blocks, of tables cut by rows over the ranks, with the masks that
    one process computes on the CPU."""
    for score, block in product(SCORES, BLOCKS):
        trial = TrialTables(sizes.shapes, optimizer=SCORES[score])
        model = MaskedModel(trial, device, block, score=score)
        tables, sums = random_tables(trial), random_sums(trial, score)
        model.write(tables)
        if score == "norm_accumulator":
            model.write_sums(sums)
        # The second update finds the removed weights tied at 0.
        for level in (0.5, 0.73):
            model.update(level)
            check_masks(f"{block} by {score} at {level}", model, tables, sums)
    return f"{len(BLOCKS)} blocks, {len(SCORES)} scores, 2 updates, bit for bit"


def check_masks(
    what: str, model: MaskedModel, tables: Mapping[str, Tensor], sums: Mapping[str, Tensor]
) -> None:
    """Check that the masks equal the masks of ``tables`` in one process on the CPU, and that
    removed weights are zero.

    Raises:
        Difference: masks differ.
        ValueError: a removed weight is not zero.
    """
    reference = model.reference(sums)
    for name, data in model.located().items():
        reference.add_data(name, tables[name].to(data.dtype))
    reference.step()
    # audit() compares masks with weights, and returns hashes of the masks.
    require_equal_masks(what, model.sparsifier.audit(), reference.fingerprint())


def lookups_are_counted(device: torch.device, sizes: Sizes) -> str:
    """Compare the masks that lookup counts give with counts of the same batches on the CPU."""
    for block in ("row", "1x4"):
        trial = TrialTables(sizes.shapes)
        model = MaskedModel(trial, device, block, score="frequency")
        ranks = torch.distributed.get_world_size()
        counts = {name: torch.zeros(rows) for name, (rows, _) in trial.shapes.items()}
        batches = model.batches()
        for step in range(sizes.steps):
            model.train(batches)
            for rank, (name, total) in product(range(ranks), counts.items()):
                ids = trial_batch(trial, 1 + rank * 1_000 + step)[f"{name}_ids"].values()
                total += torch.bincount(ids, minlength=len(total))
        # Removes rows that were looked up too.
        model.update(0.97)
        tables = {
            name: total[:, None].sqrt().expand(trial.shapes[name]).contiguous()
            for name, total in counts.items()
        }
        check_masks(f"{block} by frequency", model, tables, random_sums(trial, "norm"))
    return f"{sizes.steps} steps, bit for bit"


def lookups_are_sampled(device: torch.device, sizes: Sizes) -> str:
    """Compare the lookups that an enforcer samples, of one forward in :data:`EVERY`, with counts of
    the same batches on the CPU."""
    shapes = {"one": (sizes.small, 64), "other": (sizes.small // 3 + 1, 64)}
    for pooling, block in product(("SUM", "NONE"), _TRAINED):
        trial = TrialTables(shapes, pooling=pooling)
        model = MaskedModel(trial, device, block)
        batches = model.batches()
        # So many that finer blocks remove whole rows too.
        model.update(0.97)
        for _ in range(EVERY + 1):
            model.train(batches)
        sparsifier = model.sparsifier
        found = removed_lookups(sparsifier.masks.tables, "the self-test")
        for name, numbers in found.items():
            is_removed = (sparsifier.full_mask(name) == 0).all(1)
            expected = [0, 0]
            # The first forward and the last one.
            for rank, step in product(range(torch.distributed.get_world_size()), (0, EVERY)):
                ids = trial_batch(trial, 1 + rank * 1_000 + step)[f"{name}_ids"].values()
                expected[0] += len(ids)
                expected[1] += int(is_removed[ids].sum())
            if numbers != expected:
                raise Difference(
                    f"{block} of {pooling}: lookups of {name!r}, and of its removed rows: {numbers}"
                    f" instead of {expected}"
                )
    return f"2 forwards of {EVERY + 1}, {len(_TRAINED)} blocks, bags and sequences"


def ordinary_steps_never_wait(device: torch.device, sizes: Sizes) -> str:
    """Run lookups and backwards of the kernels, without TorchRec's input distribution, which
    waits."""
    for block in _TRAINED:
        model = MaskedModel(TrialTables(sizes.shapes), device, block)
        model.update(0.5)
        [collection] = collections_of(model.model.modules())
        for batch in collection_of(collection).batches():
            _train_without_waits(block, batch, model, sizes.steps)
        model.sparsifier.audit()
    return f'{sizes.steps} steps of 2 blocks under set_sync_debug_mode("error")'


def _train_without_waits(block: str, batch: TableBatch, model: MaskedModel, steps: int) -> None:
    shapes: Any = {str(number): view.shape for number, view in enumerate(batch.weights())}
    local = replace(model.trial, shapes=shapes)
    features = []
    for seed in range(steps):
        features.append(trial_batch(local, seed).to(model.device))
        # Computed from the lengths at the first call: before the steps that may not wait.
        features[-1].offsets()
    # The first steps read the masks, and compile kernels.
    _train_on(batch, features[:3])
    versions = [storage._version for storage in batch.storage()]
    try:
        with waits("error"):
            _train_on(batch, features)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise Difference(f"{block}: the host waits for the device: {error}") from error
    if versions != [storage._version for storage in batch.storage()]:
        # A changed version marks all rows as dirty: every step would zero whole tables.
        raise Difference("FBGEMM's backward changes the version of its weights")


def _train_on(batch: TableBatch, features: Sequence[Any]) -> None:
    for feature in features:
        batch.module(feature).sum().backward()


# Kinds of tables and batches, compared after five steps.
KINDS: dict[str, Any] = {
    "mean": {"pooling": "MEAN"},
    "sequence": {"pooling": "NONE"},
    "weighted": {"weighted": True},
    "int32 ids": {"ids": torch.int32},
    "bfloat16": {"data_type": "BF16", "rounds": False},
    "float16": {"data_type": "FP16", "rounds": False},
    "column-wise": {"sharding": "column_wise"},
    "data-parallel": {"sharding": "data_parallel"},
    "VBE": {"varying": True},
    "fused_uvm": {"kernel": "fused_uvm"},
}


def kind_of_tables(device: torch.device, sizes: Sizes, kind: str) -> str:
    """Compare tables or batches of one kind, with an enforcer and with all removed weights written
    after every step."""
    # Of one width, as an EmbeddingCollection requires. Its columns are cut into multiples of 4.
    shapes = {"one": (sizes.small, 64), "other": (sizes.small // 3 + 1, 64)}
    trial = TrialTables(shapes, **KINDS[kind])
    return "; ".join(_compare_masked(trial, device, block) for block in _TRAINED)


def many_tables(device: torch.device, sizes: Sizes) -> str:
    """Compare a large table beside many small ones."""
    trial = TrialTables({"large": (10 * sizes.small, 128), **sizes.small_tables})
    return "; ".join(_compare_masked(trial, device, block) for block in _TRAINED)


_ON_EVERY_DEVICE = ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"]
# Optimizers that FBGEMM has for CUDA only.
_ON_GPUS = ["ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"]


def fused_optimizers(device: torch.device, sizes: Sizes) -> str:
    """Compare each of FBGEMM's optimizers, for whole rows and finer blocks."""
    done = _ON_EVERY_DEVICE
    more = f"; not run, for they need a GPU: {', '.join(_ON_GPUS)}"
    if device.type == "cuda":
        done, more = _ON_EVERY_DEVICE + _ON_GPUS, ""
    lines = []
    for name in done:
        trial = TrialTables(sizes.shapes, optimizer=name)
        found = "; ".join(_compare_masked(trial, device, block) for block in _TRAINED)
        lines.append(f"{name} {found}")
    return f"{', '.join(lines)}{more}"


def _compare_masked(trial: TrialTables, device: torch.device, block: str) -> str:
    found, start = train_masked(trial, device, block)
    expected, _ = train_masked(trial, device, block, attach=False)
    return f"{block} {compare_runs(f'{block}, {trial.optimizer}', found, expected, start)}"


def train_masked(
    trial: TrialTables, device: torch.device, block: str, attach: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Check the masks of a model, and after five steps that removed weights are zero. Return its
    weights after and before these steps."""
    model = MaskedModel(trial, device, block, attach=attach)
    tables = random_tables(trial)
    model.write(tables)
    model.update(0.5)
    check_masks(block, model, tables, random_sums(trial, "norm"))
    start = model.weights()
    batches = model.batches()
    for _ in range(5):
        model.train(batches)
        if not attach:
            model.sparsifier.apply_masks()
    return model.weights(), start


def removed_stay_zero(
    device: torch.device, sizes: Sizes, blocks: Sequence[str], **kind: Any
) -> str:
    """Check removed weights where two runs have different numbers, or a reference can't be
    written."""
    for block in blocks:
        trial = TrialTables(sizes.shapes, **kind)
        model = MaskedModel(trial, device, block)
        tables = random_tables(trial)
        model.write(tables)
        model.update(0.3)
        check_masks(block, model, tables, random_sums(trial, "norm"))
        batches = model.batches()
        # Later updates remove rows that were written since, which may be in a cache. Few rows are
        # removed at first, so that cached ones make way for others.
        for level in (0.5, 0.7):
            for _ in range(5):
                model.train(batches)
            model.update(level)
            for _ in range(5):
                model.train(batches)
            # Raises if a removed weight is not zero.
            model.sparsifier.audit()
    return "masks bit for bit, 20 steps, 3 mask updates, removed weights 0"


def bound_to_devices(device: torch.device, sizes: Sizes) -> str:
    """Compare tables over all ranks and on one of them, in a world that is bound to devices: where
    NCCL would split smaller groups off the world's."""
    bound = getattr(torch.distributed.group.WORLD, "bound_device_id", None)
    if bound != device:
        raise Difference(f"the world is bound to {bound} instead of {device}")
    lines = []
    for sharding, block in product(("row_wise", "table_wise"), _TRAINED):
        trial = TrialTables(sizes.shapes, sharding=sharding)
        lines.append(f"{sharding} {_compare_masked(trial, device, block)}")
    return "; ".join(lines)


def pipeline(device: torch.device, sizes: Sizes, kind: str) -> str:
    """Compare a pipeline of TorchRec's, with mask updates between its steps, with a plain loop."""
    lines = []
    for block in _TRAINED:
        piped, tables, levels = _with_known_masks(device, sizes, block)
        progress = pipeline_of(kind, piped.model, piped.optimizer, device).progress
        start = piped.weights()
        found = _with_updates(piped, progress, tables, levels)
        plain, *_ = _with_known_masks(device, sizes, block)
        expected = _with_updates(plain, plain.train, tables, levels)
        lines.append(f"{block} {compare_runs(block, found, expected, start)}")
    return f"12 steps, 2 mask updates: {'; '.join(lines)}"


# Factors of 3 between the norms of classes of blocks. Within a class, norms differ by less than a
# factor of 1.4, and training moves them less: masks that remove whole classes are known beforehand,
# and do not depend on the last bits of weights.
_CLASSES = 4


def _with_known_masks(
    device: torch.device, sizes: Sizes, block: str
) -> tuple[MaskedModel, dict[str, Tensor], list[dict[str, float]]]:
    """Return a model whose first class of blocks is removed, its original weights, and the levels
    that remove the first one, two and three classes, by table."""
    random = torch.Generator().manual_seed(9)
    trial = TrialTables(sizes.shapes)
    tables = {}
    levels: list[dict[str, float]] = [{} for _ in range(_CLASSES - 1)]
    for name, (rows, cols) in trial.shapes.items():
        width = cols if block == "row" else 4
        classes = torch.randint(_CLASSES, (rows, cols // width), generator=random)
        for most, level in enumerate(levels):
            level[name] = int((classes <= most).sum()) / classes.numel()
        sign = torch.randint(2, (rows, cols), generator=random) * 2 - 1
        size = 0.05 * (1 + 0.4 * torch.rand(rows, cols, generator=random))
        tables[name] = sign * size * (3.0**classes).repeat_interleave(width, 1)
    model = MaskedModel(trial, device, block)
    model.write(tables)
    model.update(levels[0])
    return model, tables, levels


def _with_updates(
    model: MaskedModel,
    train: Callable[[Iterator[Any]], object],
    tables: Mapping[str, Tensor],
    levels: Sequence[Mapping[str, float]],
) -> list[Tensor]:
    """Take steps by ``train``, and a mask update after the fourth and the eighth. Return the
    weights."""
    batches = islice(model.batches(), 12)
    for step in range(12):
        train(batches)
        if step in (3, 7):
            model.update(levels[step // 4 + 1])
            # Of the weights before training, which have the same classes.
            reference = model.reference(random_sums(model.trial, "norm"))
            for name, table in tables.items():
                level = levels[step // 4 + 1][name]
                reference.add_data(name, table.clone(), sparsity_level=level)
            reference.step()
            found, expected = model.sparsifier.fingerprint(), reference.fingerprint()
            require_equal_masks(f"after step {step + 1}", found, expected)
    return model.weights()


def streams_are_ordered(device: torch.device, sizes: Sizes) -> str:
    """Look up on a stream of its own, as TrainPipelineFusedSparseDist does, while it or the stream
    of the mask update sleeps.

    Without an event between the two, a late update would be missed by the lookup after it, and a
    late lookup would read the zeros of the update after it.
    """
    for block in _TRAINED:
        _check_streams(MaskedModel(TrialTables(sizes.shapes), device, block), block, sizes.sleep)
    return f"2 blocks, {sizes.sleep:,} cycles late on either stream"


def _check_streams(model: MaskedModel, block: str, cycles: int) -> None:
    model.write(random_tables(model.trial))
    model.update(0.3)
    [collection] = collections_of(model.model.modules())
    batches = list(collection_of(collection).batches())
    if not batches:
        raise NotRun("no table is stored on this rank")
    shapes: Any = {str(number): view.shape for number, view in enumerate(batches[0].weights())}
    features = trial_batch(replace(model.trial, shapes=shapes), 1).to(model.device)
    features.offsets()
    side = new_stream(model.device)

    def look_up() -> Tensor:
        with torch.cuda.stream(side), torch.no_grad():
            found: Tensor = batches[0].module(features)
        return found

    synchronize(model.device)
    before = look_up()
    synchronize(model.device)
    # 1. The lookup is late, and the update after it must wait.
    with torch.cuda.stream(side):
        sleep(cycles)
    late = look_up()
    model.update(0.6)
    if not torch.equal(late, before):
        raise Difference(f"{block}: a mask update did not wait for a lookup on another stream")
    after = look_up()
    synchronize(model.device)
    if torch.equal(after, before):
        raise Difference(f"{block}: the mask update changed nothing that is looked up")
    # 2. The update is late, and the lookup after it must wait. update() would wait for it.
    _zero_late(model.sparsifier, cycles)
    model.set_level(0.9)
    model.sparsifier.step()
    early = look_up()
    synchronize(model.device)
    expected = look_up()
    synchronize(model.device)
    if not torch.equal(early, expected):
        raise Difference(f"{block}: a lookup did not wait for a mask update on another stream")


def _zero_late(sparsifier: Any, cycles: int) -> None:
    """Have the current stream sleep before each mask update zeroes anything: after the update's
    last message and the host's last wait, which would wait for the sleep."""
    selected = sparsifier.selected_masks

    def late(scored: Any) -> Any:
        found = selected(scored)
        sleep(cycles)
        return found

    sparsifier.selected_masks = late
