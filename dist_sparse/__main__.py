"""Runs `python -m dist_sparse` as the command `dist-sparse`."""

import sys

from dist_sparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
