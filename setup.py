"""How do the launchers, which lie beside the package, get into it? As `dist_sparse.launch`; see pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dist_sparse", "dist_sparse.*"]), "dist_sparse.launch"],
    package_dir={"dist_sparse.launch": "launch"},
)
