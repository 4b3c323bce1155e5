"""The generated pages are what the code says, and leave nothing out."""

from __future__ import annotations

import pytest

from pdserve.reach.cluster_file import Cluster
from tests.docs import cli_reference, recipe_reference
from tests.docs.markdown import PAGES, README, REPOSITORY, Page
from tests.docs.regenerate import PAGES as GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_do_not_drift(name: str) -> None:
    assert (REPOSITORY / name).read_text() == GENERATED[name](), "run: python -m tests.docs.regenerate"


def test_every_model_of_a_recipe_and_of_a_cluster_file_has_its_section() -> None:
    reachable = recipe_reference.reachable() | recipe_reference.reachable(Cluster)
    assert recipe_reference.models() == reachable


def test_every_verb_is_in_the_readme() -> None:
    shown = {words[0] for words in README.commands("pdserve") if words}
    assert set(cli_reference.verbs()) <= shown


def test_every_page_of_the_docs_can_be_reached_from_the_readme() -> None:
    linked = {(README.path.parent / link.partition("#")[0]).resolve() for link in README.links() if "://" not in link}
    assert {path for path in PAGES if path.parent.name == "docs"} <= linked


def test_the_changelog_has_room_for_what_comes() -> None:
    assert "unreleased" in Page(REPOSITORY / "CHANGELOG.md").anchors()
