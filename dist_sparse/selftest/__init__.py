"""``dist-sparse selftest``: what the package does on this machine's devices."""
