"""How does `python -m dist_sparse` run? As the command `dist-sparse`."""

import sys

from dist_sparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
