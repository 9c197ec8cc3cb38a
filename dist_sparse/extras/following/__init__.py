"""Tables of a fixed number of rows that the most looked-up ids hold. Needs TorchRec."""

from dist_sparse.extras.following.slots import FollowingTables
from dist_sparse.extras.following.slotted import follow_kept_rows, following

__all__ = ["FollowingTables", "follow_kept_rows", "following"]
