"""The generated pages are what the code says, and leave nothing out; a published launch differs with a reason."""

from __future__ import annotations

import tomllib
from pathlib import Path

from typer.testing import CliRunner

import pdserve
from pdserve.cli.commands import app
from tests.docs.launches import DATA, KIMI, OTHERS, launch
from tests.docs.markdown import INDEX, PAGES, README, REPOSITORY, Page
from tests.docs.references import MADE, page, root
from tests.tables import each_row


@each_row("name", MADE)
def test_generated_pages_do_not_drift(name: str) -> None:
    assert (REPOSITORY / "docs" / name).read_text() == page(name), "run: python -m tests.regenerate"


def test_every_verb_is_in_the_readme() -> None:
    shown = {words[0] for words in README.commands("pdserve") if words}
    assert set(root().commands) <= shown


def test_every_page_of_the_docs_is_in_their_index_and_the_index_in_the_readme() -> None:
    docs = REPOSITORY / "docs"
    assert {path for path in PAGES if path.is_relative_to(docs)} - {INDEX.path} <= linked(INDEX)
    assert INDEX.path in linked(README)


def linked(page: Page) -> set[Path]:
    return {(page.path.parent / link.partition("#")[0]).resolve() for link in page.links() if "://" not in link}


def test_a_shell_completes_the_verbs() -> None:
    words = {"_PDSERVE_COMPLETE": "complete_bash", "COMP_WORDS": "pdserve va", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, prog_name="pdserve", env=words)
    assert done.output.split() == ["validate"]


def test_the_version_stands_twice_and_is_the_same() -> None:
    assert tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"] == pdserve.__version__


LAUNCHES = (KIMI, *OTHERS)


@each_row("name", LAUNCHES)
def test_a_reason_stands_where_we_differ(name: str) -> None:
    rows = [row for rows in launch(name).parts.values() for row in rows]
    assert [row for row in rows if row.differs != (row.why is not None)] == []


def test_no_table_is_left_out_of_the_pages() -> None:
    assert {path.stem for path in DATA.iterdir()} == set(LAUNCHES)
