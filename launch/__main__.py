"""How is the launcher called? `python -m launch ...` in a clone, `python -m dist_sparse.launch ...` elsewhere."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(prog=f"python -m {__package__}"))
