"""The public names of the core that extras import, by module: the doors by which they touch it.

tests/test_extras.py compares them with the code. What no extra imports any more leaves the list.
"""

NAMES_OF_CORE = {
    "dist_sparse": {
        "checks",
    },
    "dist_sparse.checkpoint.checkpoints": {
        "Checkpoints",
        "checkpoint_summary",
    },
    "dist_sparse.checkpoint.host_memory": {
        "refuse_without_memory",
    },
    "dist_sparse.checkpoint.storage": {
        "Staging",
    },
    "dist_sparse.checks": {
        "digest",
        "integer",
        "name_list",
        "number",
        "part_of",
        "plain",
        "refuse_special",
        "refusing",
        "write_whole",
    },
    "dist_sparse.cli.arguments": {
        "budget_argument",
        "existing_path",
        "model_and_evaluate",
    },
    "dist_sparse.cli.commands": {
        "Command",
        "FUNCTION",
        "JSON",
        "ROTATE",
        "option",
        "print_failure",
        "print_result",
        "print_text",
        "show_progress",
        "silence_torchrec",
    },
    "dist_sparse.compaction": {
        "tables",
    },
    "dist_sparse.compaction.compact": {
        "compact",
        "expand",
    },
    "dist_sparse.enforcer": {
        "Hook",
        "Hooks",
    },
    "dist_sparse.enforcer.enforcer": {
        "MaskEnforcer",
        "refuse_masked",
        "settle_all",
    },
    "dist_sparse.enforcer.fused": {
        "lookups_of",
    },
    "dist_sparse.enforcer.rows": {
        "EVERY",
        "outside_as_0",
    },
    "dist_sparse.groups": {
        "Group",
        "group_over",
        "rank_in",
        "warn_on_first_rank",
        "world_group",
        "world_ranks",
    },
    "dist_sparse.lazy": {
        "loaded_when_used",
    },
    "dist_sparse.masking.block_masks": {
        "NewMasks",
    },
    "dist_sparse.masking.device": {
        "Kernels",
        "NO_PLACE",
        "flat_width",
        "kernels_on",
        "on_host",
        "too_large",
        "with_one_retry",
    },
    "dist_sparse.masking.masks": {
        "BlockMask",
        "bit_total",
        "removed_parts",
    },
    "dist_sparse.masking.scores": {
        "ByTotals",
        "HISTOGRAM",
        "Limits",
        "NOT_FINITE",
        "NewBits",
        "Prefixes",
        "RowTotals",
    },
    "dist_sparse.optimizers": {
        "Optimizers",
        "fused_sums",
        "leaves",
    },
    "dist_sparse.planning.candidates": {
        "BY_COLUMN",
        "CODED",
        "Candidate",
        "Choice",
        "Choices",
        "shape_of",
    },
    "dist_sparse.planning.reads": {
        "rows_by_reads",
    },
    "dist_sparse.records": {
        "GuardCheck",
        "LEADING_SHIFT",
        "MaskChange",
        "StepRecord",
        "TINY",
        "TableStats",
        "removed_share",
    },
    "dist_sparse.schedulers": {
        "CurveDataScheduler",
        "ReadyDataScheduler",
    },
    "dist_sparse.schedulers.base": {
        "BaseDataScheduler",
    },
    "dist_sparse.schedulers.curves": {
        "Window",
    },
    "dist_sparse.serving.books": {
        "ENTRIES",
        "LARGEST_HALF",
        "LEAST_ROWS",
        "decode_books",
        "gather_entries",
    },
    "dist_sparse.serving.encodings": {
        "ColumnSpread",
        "Dtype",
        "UNCODED",
        "chunks",
        "decode",
        "encode",
    },
    "dist_sparse.serving.export": {
        "export",
    },
    "dist_sparse.serving.served": {
        "load_served",
    },
    "dist_sparse.serving.sources": {
        "model_lookups",
        "refuse_lookup",
        "refuse_range",
        "sparsifier_or_empty",
    },
    "dist_sparse.sparsifiers.base": {
        "BaseDataSparsifier",
    },
    "dist_sparse.sparsifiers.importance": {
        "ImportanceSparsifier",
        "Sums",
    },
    "dist_sparse.sparsifiers.masks": {
        "Masks",
        "configured_level",
        "knows_removed_rows",
        "removed_lookups",
    },
    "dist_sparse.sparsifiers.packed_store": {
        "TableMasks",
    },
    "dist_sparse.sparsifiers.pieces": {
        "hash_tensor",
    },
    "dist_sparse.sparsifiers.score": {
        "BlockShape",
        "ScoreSparsifier",
    },
    "dist_sparse.tables.bases": {
        "BASIS",
        "TableGroups",
        "rotation_groups",
        "turn_back",
    },
    "dist_sparse.tables.chunked": {
        "ChunkedTensor",
    },
    "dist_sparse.tables.decoded": {
        "DECODERS",
        "refuse_decoded",
        "weights_of",
    },
    "dist_sparse.tables.memory": {
        "ByMemory",
        "local",
        "same_storage",
    },
    "dist_sparse.tables.modules": {
        "ModelTables",
        "check_module",
        "collection_of",
        "collections_of",
        "is_sharded_tensor",
        "modules_by_path",
        "torchrec_port",
    },
    "dist_sparse.tables.protocols": {
        "LookupKernel",
        "TableBatch",
        "TableCollection",
    },
    "dist_sparse.tables.shards": {
        "Block",
        "CACHED",
        "COL",
        "Grid",
        "Located",
        "ROW",
        "Rect",
        "Shard",
        "ShardedData",
        "check_writable",
        "grid_of",
        "resolve_block",
        "sent",
        "steps_in_backward",
    },
    "dist_sparse.text": {
        "block_shape_text",
        "count",
        "duration",
        "number_of",
        "percent",
        "printable",
        "progress",
        "shape_text",
        "size",
        "table_lines",
        "wrapped",
    },
    "dist_sparse.torchrec": {
        "installed",
    },
    "dist_sparse.torchrec.kernels": {
        "auc_and_ne",
        "load_metrics",
    },
    "dist_sparse.torchrec.trial": {
        "TrialTables",
        "layers_optimizer",
        "pipeline_of",
        "trial_batch",
        "trial_model",
    },
    "dist_sparse.training.arguments": {
        "Advanced",
        "Levels",
        "Schedule",
        "SparsifyArgs",
        "UpdateGuard",
        "budget_bytes",
        "dense_bytes",
        "fewest_removed",
        "protected",
    },
    "dist_sparse.training.sparsify": {
        "SparseTraining",
        "sparsify",
    },
    "dist_sparse.whole_rows": {
        "change_rows_",
        "refuse_cut_copies",
        "row_span",
        "whole_rows",
        "within",
    },
}
