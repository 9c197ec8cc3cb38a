"""Bugs put into the code by hand, each with the tests that must fail on it. Not collected by
pytest.

``python -m tests.mutations`` copies the checkout into a temporary folder, applies one mutation at a
time there, runs its tests and expects them to fail; ``-k word`` takes those whose file or text has
the word, ``--check`` only looks whether every text is in the code once. The exit code is 1 if a
mutation survives or a text is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["MUTATIONS", "Mutation", "main"]

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """``old`` in ``dist_sparse/{file}`` becomes ``new``; then ``pytest {tests}`` must fail."""

    file: str
    old: str
    new: str
    tests: str


M = Mutation
# fmt: off
MUTATIONS = [
    # -- masking
    # ---------------------------------------------------------------------------------------------------------
    M("masking/selection.py", "bits[:ties] <= self.bits, bits[ties:]", "bits[: ties - 1] <= self.bits, bits[ties - 1 :]", "tests/dist/test_sharded_tensors.py"),
    M("masking/selection.py", "_histograms_of_ties, group, ", "_histograms_of_ties, Group(), ", "tests/dist/test_sharded_tensors.py -k spread and ties"),
    M("masking/selection.py", "bucket = (upto < wanted)", "bucket = (upto <= wanted)", "tests/masking/test_selection.py"),
    M("masking/selection.py", "counts[:, 1 + (KEPT >> LEADING_SHIFT)] = 0", "pass", "tests/dist/test_sharded_tensors.py"),
    M("masking/selection.py", "if wrong := with_one_retry(lambda: _with_refused(searches, counts)):", "for wrong in ():", "tests/dist/test_bad_values.py -k overflow"),
    M("masking/selection.py", "self.done = self.left == self.inside or shift == 0", "self.done = shift == 0", "tests/dist/test_golden.py -k 2-row_wise"),
    M("masking/scores.py", "(shape[1] - columns * block[1]).clamp_(max=block[1])", "(shape[1] - columns * 0).clamp_(max=block[1])", "tests/masking/test_scores.py"),
    M("masking/scores.py", "-rect.col % width)", "rect.col % width)", "tests/dist/test_sharded_tensors.py"),
    M("masking/scores.py", "blocks.argsort(dim=-1, stable=True)", "blocks.argsort(dim=-1, descending=True, stable=True)", "tests/dist/test_sharded_tensors.py"),
    M("masking/masks.py", "bits[-1] = (1 << grid.blocks % 8) - 1", "pass", "tests/masking/test_masks.py"),
    M("masking/masks.py", "found[found < len(blocks)]", "found", "tests/masking/test_masks.py"),
    M("masking/masks.py", "                mask.apply_(tensor)\n            else", "                pass\n            else", "tests/dist/test_record.py -k another_block"),
    M("masking/masks.py", "max(8, most // max(1, self.grid.cols) // 8 * 8)", "max(8, most // max(1, self.grid.cols))", "tests/masking/test_masks.py -k chunks"),
    M("masking/masks.py", "@dataclass(frozen=True, eq=False)", "@dataclass(eq=False)", "tests/masking/test_masks.py -k frozen"),
    M("masking/block_masks.py", "\"nonzero\" if goal.scores_show_zeros else \"removed\"", "\"nonzero\"", "tests/dist/test_custom.py"),
    M("masking/block_masks.py", "(goal.scores_show_zeros and threshold.bits == 0)", "threshold.bits == 0", "tests/dist/test_custom.py -k score"),
    M("masking/block_masks.py", "counts=shard.rect in table.owned", "counts=True", "tests/dist/test_masks.py -k 2-data_parallel"),
    M("masking/cuts.py", "scores[[i - owned.start for i in slabs]] = KEPT", "pass", "tests/dist/test_sharded_tensors.py -k cross"),
    M("masking/scores.py", "return (bits < 0) | (bits >= NOT_FINITE)", "return bits >= NOT_FINITE", "tests/dist/test_bad_values.py -k negative"),
    M("extras/device/kernels.py", "score_bits(sums / whole)", "score_bits(sums)", "tests/extras/device/simulated/test_parts_of_rows.py -k divided"),
    # -- sparsifiers
    # -----------------------------------------------------------------------------------------------------
    M("sparsifiers/step.py", "            mask.data = old\n", "            pass\n", "tests/dist/test_bad_values.py -k plain_data"),
    M("sparsifiers/masks.py", "in packed.summed(counts).items()", "in counts.items()", "tests/dist/test_record.py -k test_records"),
    M("sparsifiers/step.py", "new_masks[name].append(NewMask(new, ~new.bits))", "new_masks[name].append(NewMask(new, None))", "tests/dist/test_custom.py -k own_update_mask"),
    M("sparsifiers/pieces.py", "= holders[0] == rank_in(data.ranks), len", "= True, len", "tests/dist/test_golden.py -k 2-data_parallel"),
    # -- groups
    # ----------------------------------------------------------------------------------------------------------
    M("groups.py", "[error is not None, digest", "[False, digest", "tests/dist/test_groups.py -k exception"),
    M("groups.py", "if sum([report[3] for report in reports]) % (1 << 64):", "if False:", "tests/dist/test_bad_replicas.py -k drifted"),
    M("groups.py", "        return refused\n    except Lost", "        raise\n    except Lost", "tests/dist/test_groups.py -k small_group"),
    M("groups.py", "weight = digest(name) | 1", "weight = 0", "tests/dist/test_bad_replicas.py -k drifted"),
    # -- schedulers
    # ------------------------------------------------------------------------------------------------------
    M("schedulers/curves.py", "% self.every == 0 or step == self.end", "% self.every == 0", "tests/schedulers"),
    M("schedulers/curves.py", "begin, end)) ** 3)", "begin, end)) ** 2)", "tests/schedulers/test_curves.py"),
    M("schedulers/curves.py", "if fraction in (0.0, 1.0):", "if False:", "tests/schedulers/test_curves.py"),
    M("schedulers/curves.py", "return step - (step - self.begin) % self.every", "return step", "tests/schedulers"),
    M("schedulers/base.py", "if repr(value) != repr(other[name])]", "if value != other[name]]", "tests/dist/test_schedulers.py -k types"),
    M("schedulers/base.py", "if record.stepped == sparsifier.step_count", "if scheduler is self", "tests/schedulers tests/conformance/test_base_data_scheduler.py"),
    M("schedulers/base.py", "            if record.stepped == sparsifier.step_count\n", "", "tests/schedulers tests/conformance/test_base_data_scheduler.py"),
    # -- enforcer
    # --------------------------------------------------------------------------------------------------------
    M("enforcer/fused.py", "            if self._zeroed.any_dirty:\n                self._zeroed.clean_read", "            if False:\n                self._zeroed.clean_read", "tests/dist/test_enforce.py -k batches"),
    M("enforcer/fused.py", "self._kept_ids and lookup.masks_key != self._masked_key[0]", "self._kept_ids and not lookup.masks_key", "tests/enforcer/test_weighing.py -k move"),
    M("enforcer/fused.py", "Hook(self._batch.restore_pooling)", "Hook()", "tests/enforcer/test_weighing.py -k mean-rowwise"),
    M("enforcer/fused.py", "whole_rows if self._batch.keeps_zeros else set()", "whole_rows", "tests/enforcer/test_weighing.py -k no_eps"),
    M("torchrec/collections.py", "        self._batch.flush()\n", "", "tests/enforcer/test_unified_memory.py -k memory_of"),
    M("torchrec/collections.py", "        self._batch.reset_cache_states()\n", "", "tests/enforcer/test_unified_memory.py -k memory_of"),
    M("enforcer/fused.py", "        for reader in self._readers - {stream}:\n", "        for reader in ():\n", "tests/enforcer/test_streams.py"),
    M("enforcer/rows.py", "torch.where(flags, given, 0)", "given", "tests/enforcer/test_weighing.py -k weighted-rowwise"),
    M("torchrec/collections.py", "given = _shares(offsets, ids.numel())", "given = None", "tests/enforcer/test_weighing.py -k mean-rowwise"),
    M("extras/device/row_kernels.py", "tl.atomic_add(samples + 1, before, mask=is_first", "tl.atomic_add(samples + 1, before, mask=is_first & False", "tests/extras/device/simulated/test_training.py -k samples_are"),
    M("extras/device/row_kernels.py", "tl.atomic_add(samples, stop - position, mask=has_mask", "tl.atomic_add(samples, stop - position, mask=has_mask & (cols > 0)", "tests/extras/device/test_rows_triton.py -k lookups_that_clean"),
    M("extras/device/score_kernels.py", "for column in tl.static_range(0, WIDTH, 2 - WIDTH % 2):", "for column in tl.static_range(WIDTH - 2 + WIDTH % 2, -1, WIDTH % 2 - 2):", "tests/extras/device/simulated/test_parts_of_rows.py -k odd"),
    M("enforcer/fused.py", "kept is None or lookup.masks_key != self._masked_key[0]", "kept is None", "tests/extras/device/simulated/test_training.py -k sampled_sequence"),
    M("torchrec/port.py", "weights.masked_select(chosen)", "weights[: len(values)]", "tests/enforcer/test_ids.py"),
    M("sparsifiers/importance.py", 'return self.scored_by == "accumulator"', "return False", "tests/enforcer/test_ids.py"),
    M("enforcer/fused.py", "since the lookup.\n            self._refresh()\n", "since the lookup.\n", "tests/enforcer/test_weighing.py -k move"),
    M("enforcer/rows.py", "return torch.where((ids < 0) | (ids >= rows), 0, ids)\n\n", "return ids.clamp(0, rows - 1)\n\n", "tests/dist/test_enforce.py -k ids_outside"),
    M("enforcer/enforcer.py", "        self.settle()\n        done = sync", "        done = sync", "tests/dist/test_copies.py"),
    M("enforcer/enforcer.py", "        self._loaded = True\n        # Masks", "        # Masks", "tests/dist/test_enforce.py tests/enforcer -k load"),
    M("enforcer/enforcer.py", "[*self._states_before, *self._states_to_reset()]", "self._states_before", "tests/dist/test_enforce_equals.py -k states"),
    M("enforcer/dense.py", "target.clean(step_rows(optimizer, parameter))", "target.clean(torch.zeros(0, dtype=torch.int64))", "tests/dist/test_enforce_replicas.py"),
    # -- optim
    # -----------------------------------------------------------------------------------------------------------
    M("extras/optim/gradients.py", "(norm + 1e-6), max=1.0)", "(norm + 1e-6))", "tests/extras/optim/test_optim_gradients.py"),
    M("extras/optim/scheduler.py", "self.init_lr * min(real_step", "self.init_lr * max(real_step", "tests/extras/optim/test_conformance.py tests/extras/optim"),
    M("extras/optim/gradients.py", "scaler.get_scale() * scaler.get_backoff_factor()", "scaler.get_scale()", "tests/extras/optim/test_optim_ranks.py -k finite"),
    M("extras/optim/gradients.py", "None if p.grad is None else p.grad.clone() for p in parameters", "p.grad for p in parameters", "tests/extras/optim/test_optim_peers.py"),
    M("extras/optim/gradients.py", "        for parameter, grad in saved.items():\n            parameter.grad = grad\n", "        pass\n", "tests/extras/optim/test_optim_peers.py tests/extras/optim/test_optim_ranks.py -k foreign"),
    M("extras/optim/gradients.py", "claim.scaler.get_scale() / scale)", "1.0)", "tests/extras/optim/test_optim_peers.py -k scale"),
    M("extras/optim/gradients.py", "scale = min(losses)", "scale = max(losses)", "tests/extras/optim/test_optim_peers.py -k overruled"),
    M("extras/optim/gradients.py", "torch.zeros_like(parameter) if needs_grad else None", "None", "tests/extras/optim/test_optim_ranks.py -k unused"),
    M("extras/optim/scheduler.py", "if owned.isdisjoint(peer._owned):", "if peer is not self:", "tests/extras/optim"),
    M("extras/optim/scheduler.py", "if accumulated > self._accumulated:", "if False:", "tests/extras/optim/test_optim_peers.py -k common"),
    M("extras/optim/gradients.py", "    finally:\n        optimizer.zero_grad()\n", "", "tests/extras/optim tests/extras/optim/test_optim_ranks.py"),
    # -- training
    # --------------------------------------------------------------------------------------------------------
    M("training/state.py", "        _refuse_other_steps(parts.get(\"levels\"), configs)\n", "", "tests/training"),
    M("training/state.py", "            _check_next_updates(sparsifier, levels, schedule.get(\"final\", {}))\n", "", "tests/training"),
    M("training/state.py", "        vars(sparsifier).update(made_with)\n", "        pass\n", "tests/training"),
    M("training/replicas.py", "        replicas = []\n", "", "tests/dist/test_unwrapped.py"),
    M("training/sparsify.py", "if self._warns and not self.finished and self", "if self._warns and self", "tests/training"),
    # -- report
    # ----------------------------------------------------------------------------------------------------------
    M("groups.py", "row[..., :length] for", "row for", "tests/extras/report/test_run_log_ranks.py -k quality"),
    M("extras/device/trials.py", "if not apart <= _MOST * moved:", "if False:", "tests/extras/device/test_checks_fail.py -k one_row"),
    M("extras/device/code_kernels.py", "return (scaled + _ROUNDS) - _ROUNDS", "return tl.floor(scaled + 0.5)", "tests/extras/device/simulated/test_codes.py -k sums_are"),
    M("extras/device/code_kernels.py", "row = tl.where((row >= 0) & (row < rows), row, 0)", "row = tl.where(row >= 0, row, 0)", "tests/extras/device/simulated/test_codes.py -k lookups_are"),
    M("checkpoint/host_memory.py", "needed[name] += to_copy", "needed[name] = to_copy", "tests/checkpoint/test_host_memory.py -k add_up"),
    # -- compaction
    # ---------------------------------------------------------------------------------------------
    M("compaction/replacing.py", "            put(places, {})\n            raise\n", "            raise\n", "tests/compaction/test_compact_agreed.py"),
    M("compaction/replacing.py", "                drawn[change.site.padding_id] = False\n", "                pass\n", "tests/compaction/test_expand.py tests/compaction/test_initial.py"),
    M("compaction/moving.py", "made[key], there), source.initial(name, key)", "made[key], there), 0.0", "tests/compaction/test_expand.py"),
    M("extras/codes/coded_training.py", "        is_empty = ~books.flatten(1).any(1)\n", "        is_empty = torch.tensor([not self._is_fitted])\n", "tests/extras/codes/test_quantize.py -k zero_at_the_first"),
    M("torchrec/kernels.py", ".clamp(min=0), offsets", ", offsets", "tests/serving/test_targets.py -k negative"),
    M("extras/report/summary.py", "(mean if auc is None else auc) - TOLERANCE", "mean - TOLERANCE", "tests/extras/report/test_comparison.py -k same_seeds"),
    M("planning/plan.py", "            fitting[choice.kind, choice.candidate.dtype] = choice\n", "            fitting.setdefault((choice.kind, choice.candidate.dtype), choice)\n", "tests/planning/test_plan.py -k never_touched"),
    # -- serving
    # ---------------------------------------------------------------------------------------------------------
    M("tables/jagged.py", "fits = fits and least >= 0 and most <= n", "pass", "tests/serving/test_malformed.py -k modules"),
    M("tables/jagged.py", "torch.equal(offsets, offsets.cummax(0)[0])", "True", "tests/serving/test_bags_of_torch.py"),
    M("tables/jagged.py", "bool((offsets[1:] >= offsets[:-1]).all())", "True", "tests/tables/test_jagged.py -k any_number"),
    M("torchrec/port.py", "    check_lengths(values, lengths, len(keys))\n", "", "tests/serving/test_malformed.py -k modules"),
    M("serving/sources.py", "whole.weighted or (\"optional\" if weighs_some else False)", "whole.weighted", "tests/serving/test_weights.py -k weighs_what"),
    M("serving/chain.py", "if opened is None or text != self._text:", "if opened is None:", "tests/serving/test_delta.py -k read_a_delta"),
    M("serving/export.py", "        yield chunks\n", "        yield iter(list(chunks))\n", "tests/serving/test_export_ranks.py -k no_rank_holds"),
    M("serving/export.py", "    check_zero(sparsifier, tables, registered)", "    pass", "tests/serving/test_export.py -k plain_data"),
    M("serving/export.py", "    sparsifier.masks.enforcer.settle()", "    pass", "tests/serving/test_export.py -k settled"),
    M("serving/sources.py", "stored = stored & (torch.arange(len(stored)) < index.stored)", "pass", "tests/serving/test_export_ranks.py -k test_compact_tables"),
    M("serving/artifact.py", "os.rename(self.folder, check_new(self._path))", "os.rename(self.folder, self._path)", "tests/serving/test_artifact.py -k overwritten"),
    M("serving/artifact.py", "if key == \"kept\" and not _is_bitmap_of(table, tensor)", "if False", "tests/serving/test_artifact.py -k bitmap"),
    M("serving/chain.py", "stay = before.words & after.words", "stay = before.words", "tests/serving/test_delta.py -k full_export"),
    M("serving/chain.py", "for first in reversed(spans)", "for first in spans[:0]", "tests/serving/test_delta.py -k full_export"),
    M("serving/chain.py", "if delta.previous != before.hash:", "if delta.base != base:", "tests/serving/test_delta.py -k refusals"),
    M("serving/comparing.py", "self._sums[key] -= sum_of_rows(ids, part)", "pass", "tests/serving/test_delta.py -k full_export"),
    M("serving/artifact.py", "if key in PER_ROW and not rows:", "if not rows:", "tests/serving/test_delta.py -k damaged_bitmap"),
    M("serving/chain.py", "in reversed(self._layers)", "in self._layers", "tests/serving/test_delta.py -k full_export"),
    M("serving/artifact.py", " + ids[part].long() * factors[0]", "", "tests/serving/test_artifact.py -k checksum"),
    M("serving/sources.py", "rows |= ~note.kept[name]", "pass", "tests/serving/test_delta.py -k writes_that"),
    M("serving/chain.py", " | ((weight == 0) & (served != 0))", "", "tests/serving/test_check.py -k exact"),
    M("serving/encodings.py", "torch.ceil(values / unit)", "torch.round(values / unit)", "tests/serving/test_codes.py -k test_rows"),
    # -- codes
    # -----------------------------------------------------------------------------------------------------------
    M("extras/codes/decoding.py", "(output - decoded).mul_(commitment)", "(decoded - output).mul_(commitment)", "tests/extras/codes/test_quantize.py -k commitment"),
    M("optimizers.py", "lookups_only=type(optimizer) is SparseAdam", "lookups_only=True", "tests/planning/test_plan.py -k whole_tables"),
    M("optimizers.py", "    if decay:\n", "    if False:\n", "tests/test_optimizers.py -k reasons"),
    M("optimizers.py", "if not parameter.requires_grad:", "if False:", "tests/test_optimizers.py -k frozen"),
    M("optimizers.py", "for record in known if record.count_steps() != 0]", "for record in known]", "tests/test_optimizers.py -k several_optimizers"),
    M("optimizers.py", "    if len(stepped) == 1:\n", "    if stepped:\n", "tests/test_remove_attacks.py -k several_optimizers"),
    M("optimizers.py", "        if optimizer.state.get(parameter):\n", "        if False:\n", "tests/test_optimizers.py -k another_order"),
    M("tables/initial.py", "        outside |= _is_coarse(values)\n", "        pass\n", "tests/test_remove_attacks.py -k sixteen_bits"),
    M("tables/initial.py", "~((distance >= -half_unit) & (distance <= span + half_unit))", "(distance < -half_unit) | (distance > span + half_unit)", "tests/test_remove_attacks.py -k diverged"),
    M("tables/initial.py", "if not number and on_cuda and", "if False and", "tests/test_remove_attacks.py -k drawn_on_cuda"),
    M("tables/shards.py", " or not read.any()", "", "tests/test_remove_attacks.py -k padding_alone"),
    M("sparsifiers/importance.py", "self._take_record(data)\n        unread", "pass\n        unread", "tests/test_remove_attacks.py -k several_optimizers"),
    M("remove.py", "            facts.replicas |= shared_tensors(of_shards, \"the record of \")\n", "", "tests/dist/test_remove_attacks.py -k optimizers_of_replicas"),
    M("remove.py", "zlib.crc32(bytes_of(read))", "0", "tests/dist/test_remove_attacks.py -k counts_of_other_rows"),
    M("remove.py", "names = [data.name, *others]", "names = [data.name]", "tests/test_remove_attacks.py -k all_features"),
    M("planning/reads.py", "nonzero.get(name, ~rows)", "~rows", "tests/planning/test_plan.py -k whole_tables"),
    M("extras/optim/scheduler.py", "        return NO_SCALER if self._scaler is None else self._scaler\n", "        return NO_SCALER\n", "tests/extras/optim/test_conformance.py -k assigned"),
    M("torchrec/collections.py", "return 1 / ranks", "return 1.0", "tests/extras/codes/test_commitment_ranks.py -k 2-row_wise-average"),
    M("torchrec/collections.py", "if is_cut and get_gradient_division()", "if is_cut", "tests/extras/codes/test_commitment_ranks.py -k 2-row_wise-sum"),
    M("extras/codes/learning.py", "torch.arange(number) * total // number", "torch.arange(number)", "tests/extras/codes/test_quantize.py -k first_books"),
    M("extras/codes/learning.py", "    entries[:, 0] = 0\n", "", "tests/extras/codes/test_quantize.py -k loop"),
    M("extras/codes/coded_training.py", "codes.mul_(weight.any(1, keepdim=True))", "pass", "tests/extras/codes/test_quantize.py -k removed_rows"),
    M("extras/codes/coded_training.py", "codes.copy_(saved_codes)", "pass", "tests/extras/codes/test_quantize.py -k resumed"),
]
# fmt: on


def copied(to: Path) -> None:
    """Copies what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def missing(mutations: Sequence[Mutation]) -> list[Mutation]:
    """Those whose text is not in its file exactly once. An extra may have been deleted."""
    found = []
    for each in mutations:
        file = ROOT / "dist_sparse" / each.file
        if each.file.startswith("extras/") and not file.parent.exists():
            continue
        if not file.exists() or file.read_text().count(each.old) != 1:
            found.append(each)
    return found


def survives(mutation: Mutation, folder: Path) -> str | None:
    """None if the tests fail, as they must; else what pytest printed."""
    file = folder / "dist_sparse" / mutation.file
    text = file.read_text()
    file.write_text(text.replace(mutation.old, mutation.new))
    words, _, keyword = mutation.tests.partition(" -k ")
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                *words.split(),
                *(["-k", keyword] if keyword else []),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    finally:
        file.write_text(text)
    return (
        None
        if done.returncode == 1
        else f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="", help="those whose file or text has this word")
    parser.add_argument(
        "--check", action="store_true", help="only look whether every text is in the code once"
    )
    given = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if given.k in f"{each.file} {each.old} {each.tests}"]
    lost = missing(chosen)
    for each in lost:
        print(f"NOT FOUND  {each.file}: {each.old!r}", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        for each in [] if given.check else [each for each in chosen if each not in lost]:
            output = survives(each, Path(name))
            survivors += output is not None
            print(
                f"{'failed    ' if output is None else 'SURVIVED  '} {each.file}: {each.new!r}",
                flush=True,
            )
            if output is not None:
                print(output, flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived, {len(lost)} not found")
    return 1 if lost or survivors else 0


if __name__ == "__main__":
    sys.exit(main())
