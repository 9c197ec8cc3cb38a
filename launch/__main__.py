"""Command line of the launcher in a clone: `python -m launch ...`."""

import sys

from dist_sparse.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
