"""Numbers and values as text, for the report alone; what other modules show too is in
:mod:`dist_sparse.text`."""

from dist_sparse.text import count


def shortened(value: object, most: int = 80) -> str:
    """Return ``repr(value)``, in at most ``most`` characters: the middle is left out."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


def amount(value: float) -> str:
    """Return a number with four significant digits, a whole number with all: ``0.6990``,
    ``-1.235e-07``, ``1,385,728``."""
    if float(value).is_integer() and abs(value) < 1e15:
        return count(int(value))
    return f"{value:#.4g}".removesuffix(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def short(value: float) -> str:
    """Return four digits of a number: ``0.5``, ``3,840``, ``1.5M``."""
    for power, prefix in enumerate("EPTGMk"):
        unit = 1000 ** (6 - power)
        # Numbers below 10,000 are written out.
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{prefix}"
    return f"{value:,.4g}"
