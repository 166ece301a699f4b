"""Processes without what no part uses: `do_without_pandas`."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class _WithoutPandas(MetaPathFinder):
    """Where pandas is installed, pyarrow imports it at its first conversion of a list: the first message would wait
    a second or more for a module that no part uses, and the process keep its 60 MB."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the parts of Millpond do without pandas", name=name)


def do_without_pandas() -> None:
    """From here on this process does not find it."""
    sys.meta_path.insert(0, _WithoutPandas())
