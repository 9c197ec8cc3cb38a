"""Runs `python -m dist_sparse` as the command `dist-sparse`, which imports nothing from the current
folder."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: a json.py in it would be imported instead of Python's
    from dist_sparse.cli.main import main

    sys.exit(main())
