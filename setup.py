"""What pyproject.toml can't say: the description on a package index, where relative links of the
README lead nowhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent


def description() -> str:
    """Return the README with links to the files of this version in the repository."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    at = f"{project['urls']['Repository']}/{{}}/v{project['version']}/"
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    # Pictures first: a code host shows a page for the address of a link.
    relative = r"\]\((?!https?://|#)"
    text = re.sub(rf"(!\[[^\]]*){relative}", rf"\1]({at.format('raw')}", text)
    return re.sub(relative, f"]({at.format('blob')}", text)


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
