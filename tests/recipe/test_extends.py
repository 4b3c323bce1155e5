"""`extends:`: what is merged, what is replaced, and how a chain that does not work is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.nixl import NixlSection
from pdserve.recipe.load.loader import load_recipe
from tests.recipe.kit import CPU, load, refused
from tests.tables import each_row


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(CPU)
    return tmp_path


def test_mappings_merge_lists_replace_and_the_extending_file_wins(base: Path) -> None:
    (base / "base.yaml").write_text(CPU + "engine: {args: {middleware: [a, b, c], seed: 7}}\n")
    decode = "decode: {instances: 2, connector: {num_workers: 3}}\n"
    own = f"name: mine\n{decode}engine: {{args: {{middleware: [d], seed: null}}}}\n"
    recipe = load(base, f"extends: base.yaml\n{own}").recipe
    assert (recipe.name, recipe.model.served_name) == ("mine", "small")
    assert recipe.decode is not None
    assert recipe.decode.instances == 2
    assert recipe.decode.connector == MooncakeSection(protocol="tcp", num_workers=3)
    assert recipe.engine.args == {"middleware": ["d"], "seed": None}, "null drops a flag, and is data"


def test_another_kind_of_connector_replaces_the_whole_mapping(base: Path) -> None:
    loaded = load(
        base,
        "extends: base.yaml\nlmcache: null\nprefill: {connector: {kind: nixl}}\ndecode: {connector: {kind: nixl}}\n",
    )
    assert loaded.recipe.decode is not None
    assert loaded.recipe.decode.connector == NixlSection()


def test_another_kind_of_proxy_keeps_its_inherited_keys_and_limits(base: Path) -> None:
    """API keys above all: without them the port is open to all."""
    section = "proxy: {host: 0.0.0.0, auth: {keys_file: keys.json}, request_timeout_seconds: 600}\n"
    (base / "base.yaml").write_text(CPU + section)
    for proxy in ("{kind: pdserve, host: 0.0.0.0}", "{kind: pdserve}"):
        made = load(base, f"extends: base.yaml\nproxy: {proxy}\n").recipe.proxy
        assert (made.host, made.auth.keys_file, made.request_timeout_seconds) == ("0.0.0.0", "keys.json", 600)


def test_what_the_other_kind_of_proxy_does_not_take_is_refused_where_it_was_written(base: Path) -> None:
    (base / "base.yaml").write_text(CPU + "proxy: {auth: {keys_file: keys.json}}\n")
    text = refused(base, "extends: base.yaml\nproxy: {kind: vllm-router}\n")
    assert text.startswith("base.yaml:20: proxy.auth: vllm-router has no such setting (proxy.kind at recipe.yaml:2)")


def test_of_several_bases_the_later_wins_and_the_file_itself_wins_over_all(base: Path) -> None:
    (base / "second.yaml").write_text("description: second\nverify: {output_tokens: 4}\n")
    (base / "third.yaml").write_text("description: third\n")
    loaded = load(base, "extends: [base.yaml, second.yaml, third.yaml]\nname: mine\n")
    assert (loaded.recipe.name, loaded.recipe.description, loaded.recipe.verify.output_tokens) == ("mine", "third", 4)


def test_a_base_may_extend_another_one_and_paths_are_relative_to_each_file(base: Path) -> None:
    (base / "sub").mkdir()
    (base / "base.yaml").write_text(CPU.replace("path: model", "path: ../weights/model"))
    (base / "sub" / "middle.yaml").write_text("extends: ../base.yaml\ndescription: middle\n")
    loaded = load(base, "extends: sub/middle.yaml\n")
    assert (loaded.recipe.description, loaded.recipe.model.path) == ("middle", "../weights/model")
    assert loaded.locate("description") == f"{base}/sub/middle.yaml:2"
    assert loaded.locate("platform") == f"{base}/base.yaml:3"


@each_row("written, environ, read", [
    ("${M:-models}/tiny", {}, "sub/models/tiny"), ("${M:-models}/tiny", {"M": "/weights"}, "/weights/tiny"),
    ("models/${M:-a/../b}", {}, "sub/models/b"), ("models/$${M}", {}, "sub/models/${M}"),
])  # fmt: skip
def test_a_path_of_a_variable_is_of_its_file(tmp_path: Path, written: str, environ: dict[str, str], read: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(CPU.replace("path: model", f'path: "{written}"'))
    assert load(tmp_path, "extends: sub/base.yaml\n", environ=environ).recipe.model.path == read


def test_an_error_in_a_base_names_the_base_and_its_line(base: Path) -> None:
    (base / "base.yaml").write_text(CPU + "ports: {proxy: 99999}\n")
    assert refused(base, "extends: base.yaml\n").startswith("base.yaml:20: ports.proxy: expected 1 to 65535, got 99999")
    assert load(base, "extends: base.yaml\nports: {proxy: 9000}\n").recipe.ports.proxy == 9000


def test_a_missing_base_is_reported_at_the_line_that_names_it(base: Path) -> None:
    text = refused(base, "name: x\nextends: bse.yaml\n")
    assert text.startswith("recipe.yaml:2: extends: bse.yaml does not exist (extended by recipe.yaml)")
    assert text.endswith("correct the path")
    assert "is a folder, not a file" in refused(base, "extends: .\n")


def test_a_circle_is_reported_with_its_chain(base: Path) -> None:
    (base / "a.yaml").write_text("extends: b.yaml\n")
    (base / "b.yaml").write_text("extends: recipe.yaml\n")
    text = refused(base, "extends: a.yaml\n")
    assert text.startswith("b.yaml:1: extends runs in a circle: recipe.yaml -> a.yaml -> b.yaml -> recipe.yaml")


def test_extends_takes_paths_only(base: Path) -> None:
    for value in ("7", "{a: b}", "[base.yaml, 7]", '""'):
        assert "extends: expected the path of a recipe" in refused(base, f"extends: {value}\n")


def test_extends_may_use_variables(base: Path) -> None:
    assert load(base, "extends: ${WHICH}.yaml\n", environ={"WHICH": "base"}).recipe.name == "small"
    assert "WHICH is not set" in refused(base, "extends: ${WHICH}.yaml\n")


def test_a_link_to_itself_is_a_circle_and_not_missing(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to("loop.yaml")
    with pytest.raises(RecipeError, match="its links lead in a circle"):
        load_recipe(loop, environ={})
    with pytest.raises(RecipeError, match=r"bas\.yaml does not exist"):
        load_recipe(tmp_path / "bas.yaml", environ={})
