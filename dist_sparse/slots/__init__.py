"""Tables of a fixed number of rows that the most looked-up ids hold. Needs TorchRec."""

from dist_sparse.compaction.following import following
from dist_sparse.slots.tables import FollowingTables

__all__ = ["FollowingTables", "following"]
