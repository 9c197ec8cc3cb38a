"""From weights to masks: scores, exact selection over all ranks, packed masks."""
