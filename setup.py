"""The README as a package index shows it; everything else is in pyproject.toml.

An index cannot follow links to files of this repository, and the repository has no public address: such links become
their text, and pictures are left out. Once there is an address, put it before the links here instead.
"""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\]\((?![a-z]+:)[^)\s]+\)"
picture, link = rf"!\[[^\]]*{RELATIVE}\n*", rf"\[([^\]]*){RELATIVE}"
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(link, r"\1", re.sub(picture, "", readme)),
    long_description_content_type="text/markdown",
)
