"""CONTRIBUTING.md and what stands around it: what it promises is what the tools do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import pdserve
from pdserve.recipe.load import yaml12
from tests.docs.markdown import CONTRIBUTING, REPOSITORY, Page

RECIPES = dict(re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", CONTRIBUTING.text, re.MULTILINE))
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_every_usual_change_has_its_recipe() -> None:
    assert set(RECIPES) == {
        "A recipe key",
        "A CLI verb",
        "A routing policy",
        "A connector",
        "A patch",
        "A known cause of death",
    }


@pytest.mark.parametrize("change", RECIPES)
def test_a_usual_change_takes_at_most_four_files(change: str, tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    page.path.write_text(RECIPES[change])
    files = [file for row in page.table("file") for file in re.findall(r"`([^`]+)`", row[0])]
    assert len(set(files)) == len(files)
    assert 1 <= len(files) <= 4


def test_every_marker_is_explained() -> None:
    named = [line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    assert len(set(named)) == len(named)
    assert sorted(row[0].strip("`") for row in CONTRIBUTING.table("marker")) == sorted([*named, "none"])


def test_every_stage_that_is_named_exists() -> None:
    [stages] = re.findall(r"^stages=\((.+)\)$", (REPOSITORY / "scripts" / "test").read_text(), re.MULTILINE)
    named = {stage for row in CONTRIBUTING.table("marker") for stage in re.findall(r"`(\w+)`", row[-1])}
    assert named <= {*stages.split(), "pure"}


def test_hooks_before_a_commit_are_the_environments_own_tools() -> None:
    data = yaml12.parse((REPOSITORY / ".pre-commit-config.yaml").read_text(), "hooks").data
    assert isinstance(data, dict)
    [repository] = data["repos"]
    assert repository["repo"] == "local"
    tools = [hook["entry"].split()[0] for hook in repository["hooks"]]
    pinned = (REPOSITORY / "requirements" / "dev.txt").read_text()
    for tool in tools:
        folder, _, name = tool.rpartition("/")
        assert folder == ".venv/bin"
        assert re.search(rf"^{name}==", pinned, re.MULTILINE)


def test_the_version_stands_twice_and_is_the_same() -> None:
    assert PYPROJECT["project"]["version"] == pdserve.__version__


@pytest.mark.parametrize("path", sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.md")), ids=lambda p: p.stem)
def test_an_issue_template_has_a_name_and_a_purpose(path: Path) -> None:
    head = path.read_text().split("---\n")[1]
    assert {"name:", "about:"} <= set(re.findall(r"^\w+:", head, re.MULTILINE))
