"""The documentation names what is there: files, links, packages, error codes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from millpond.core.errors import ERRORS

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "deploy", "benchmarks")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files of the tree, and headings that their page has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if heading:
            anchors = {
                re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in linked.read_text().splitlines()
                if line.startswith("#")
            }
            assert heading in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_in_backquotes_exist(page: Path) -> None:
    """`store/tail.py` in a text is a file of the tree, or of src/millpond."""
    for name in re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|toml|lock|md))`", page.read_text()):
        places = [ROOT / name, ROOT / "src" / "millpond" / name, page.parent / name]
        places += [ROOT / part / name for part in ("store", "metadata", "proxy", "requirements")]
        assert any(place.exists() for place in places), name


def test_every_dependency_is_explained() -> None:
    """docs/dependencies.md has each distribution that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = list(project["project"]["dependencies"])
    for group in (project["project"]["optional-dependencies"], project["dependency-groups"]):
        asked += [requirement for requirements in group.values() for requirement in requirements]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    names = {re.split(r"[\[<>=; ]", requirement)[0] for requirement in asked}
    assert not {name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)}


def test_error_codes_in_docs_exist() -> None:
    """docs/http.md names error codes that there are, with their status."""
    for status, codes in re.findall(r"^\| (\d{3}) \| (.*?) \|", (ROOT / "docs" / "http.md").read_text(), re.MULTILINE):
        for code in re.findall(r"`(\w+)`", codes):
            assert str(ERRORS[code].status) == status, code
