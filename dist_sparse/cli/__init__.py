"""The command `dist-sparse`."""
