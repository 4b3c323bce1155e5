"""What the pages show can be typed: commands parse, recipes load and plan, scripts have the options."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.plan.build import build_plan
from pdserve.plan.model import Versions
from pdserve.plan.placement import nodes_for
from pdserve.reach.cluster_file import load_cluster
from pdserve.recipe.load.loader import load_recipe
from tests.docs import markdown
from tests.docs.markdown import PAGES, README, REPOSITORY, Block, Page
from tests.docs.references import root
from tests.tables import each_row

COMMANDS = sorted({(page.name, words) for page in map(Page, PAGES) for words in page.commands("pdserve") if words})
YAML = [block for page in map(Page, PAGES) for block in page.blocks() if block.language == "yaml"]


def of_kind(kind: str) -> list[Block]:
    return [block for block in YAML if kind_of(block) == kind]


def kind_of(block: Block) -> str:
    keys = re.findall(r"^(\w+):", block.text, re.MULTILINE)
    return "cluster" if "hosts" in keys else "recipe" if "schema" in keys else "fragment"


RECIPES, CLUSTERS, FRAGMENTS = of_kind("recipe"), of_kind("cluster"), of_kind("fragment")
SHIPPED = sorted((REPOSITORY / "recipes").glob("*.yaml"))
SCRIPTS = sorted(path.name for path in (REPOSITORY / "scripts").iterdir() if not path.suffix and path.is_file())


@each_row("page, words", COMMANDS)
def test_every_command_parses(page: str, words: tuple[str, ...]) -> None:
    """Raises what the command line would say of a wrong option. A verb alone is a name, not a command."""
    verb, *arguments = words
    if verb.startswith("-"):
        assert verb in {option for parameter in root().params for option in parameter.opts} | {"--help"}
        return
    commands = root().commands
    assert verb in commands, f"{page} shows pdserve {verb}"
    if arguments:
        commands[verb].make_context(verb, arguments)
    for word in words:
        assert not word.endswith(".yaml") or (REPOSITORY / word).is_file(), f"{page}: pdserve {' '.join(words)}"


@each_row("block", RECIPES)
def test_every_recipe_on_a_page_loads_and_plans(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(block.text)
    recipe = load_recipe(file, environ={}).recipe
    plan = build_plan(recipe, nodes_for(recipe), run_dir="run", run_id="docs", versions=Versions())
    assert {"prefill-0", "decode-0", "proxy"} <= set(plan.names())


@each_row("block", FRAGMENTS)
def test_every_part_of_a_recipe_on_a_page_fits_into_one(block: Block, tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(ten_lines().text)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"extends: whole.yaml\n{block.text}")
    recipe = load_recipe(file, environ={}).recipe
    assert build_plan(recipe, nodes_for(recipe), run_dir="run", run_id="docs", versions=Versions()).processes


@each_row("block", CLUSTERS)
def test_every_cluster_file_on_a_page_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(block.text)
    assert load_cluster(file, environ={}).cluster.hosts


def ten_lines() -> Block:
    [block] = [block for block in README.blocks() if block.language == "yaml"]
    return block


@each_row("path", SHIPPED)
def test_every_shipped_recipe_is_in_their_list_with_its_status(path: Path) -> None:
    rows = {row[0]: row for row in markdown.RECIPES.table("recipe")}
    row = rows[f"[{path.stem}]({path.name})"]
    assert row[-1].split(",")[0] == load_recipe(path, environ={}).recipe.status


@each_row("script", SCRIPTS)
def test_options_of_scripts_exist(script: str) -> None:
    text = (REPOSITORY / "scripts" / script).read_text()
    for page in map(Page, PAGES):
        for words in page.commands(script):
            for option in (word for word in words if word.startswith("-")):
                assert f"{option} " in text or f"{option})" in text, f"{page.name}: {script} {option}"
