"""Names that are loaded when they are first used. ``__init__.pyi`` of a package has their types."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def loaded_when_used(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        module_of: for each public name, the module in the package that defines it.
    """
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # In the namespace, so that Python asks only once.
        namespace[name] = getattr(import_module(f"{package}.{module_of[name]}"), name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace, *module_of})

    return load, names
