"""What `frontier()` tries by default. Needs no torch: the command line lists it."""

# Fractions of the tables' bytes.
BUDGETS = (0.5, 0.2, 0.1, 0.05)

# Printed name of each method. The order matters: from the simplest on, which
# `Frontier.recommended` prefers.
METHODS = {
    "bits": "bits alone",
    "untouched": "touched rows",
    "small": "small dense",
    "rotated": "rotated columns",
    "rows": "rows",
    "column": "int4 by column",
    "codes": "codes",
}
