"""Links between pages are valid, every page is in an index, and guides name no moved command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.bench.commands import MOVED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings, and those it names itself."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for file, anchor in LINK.findall(text):
        target = page.parent / file if file else page
        assert target.exists(), f"{file} is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{file} has no heading #{anchor}"


@pytest.mark.parametrize(
    ("folder", "index"), [("guides", "index.md"), ("design", "index.md"), ("lab", "lab/README.md")]
)
def test_every_page_is_in_its_index(folder: str, index: str) -> None:
    page = ROOT / "docs" / index
    linked = {(page.parent / file).resolve() for file, _ in LINK.findall(page.read_text())}
    pages = [file for file in sorted((ROOT / "docs" / folder).glob("*.md")) if file != page]
    assert [file.name for file in pages if file.resolve() not in linked] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_guides_name_no_command_that_has_moved(page: Path) -> None:
    if "lab" not in page.parts:  # a lab note has commands as they were typed
        assert not re.search(rf"paceline bench (?:{'|'.join(MOVED)})\b", page.read_text())
