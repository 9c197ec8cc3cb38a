"""Command line of the launcher where the package is installed: `python -m dist_sparse.launch
...`."""

import sys

from dist_sparse.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m dist_sparse.launch"))
