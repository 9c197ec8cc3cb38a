"""Runs `python -m dist_sparse` as the command `dist-sparse`, which imports nothing from the current
folder."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The current folder: a json.py in it would be imported instead of Python's.
        del sys.path[0]
    from dist_sparse.cli.main import main

    sys.exit(main())
