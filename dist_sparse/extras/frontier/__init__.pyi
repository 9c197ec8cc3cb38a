"""Types of the names that ``__init__.py`` loads when they are first used."""

from dist_sparse.extras.frontier.measure import Frontier as Frontier
from dist_sparse.extras.frontier.measure import Trial as Trial
from dist_sparse.extras.frontier.measure import frontier as frontier
from dist_sparse.extras.frontier.methods import BUDGETS as BUDGETS
from dist_sparse.extras.frontier.methods import METHODS as METHODS
from dist_sparse.extras.frontier.trials import serving as serving

__all__: list[str]
