"""The JSON Schema that editors use: in step with the models, complete, and never stricter than the loader."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from pdserve.recipe import schema
from pdserve.recipe.load import yaml12
from tests.recipe.kit import AGGREGATED, CPU, GPU, RECIPES
from tests.tables import each_row

SCHEMA = RECIPES.parent / "schema" / "recipe.schema.json"
MODELS = {"": schema.json_schema(), **schema.json_schema()["$defs"]}


@cache
def validator() -> Any:
    return importlib.import_module("jsonschema").Draft202012Validator(schema.json_schema())


def valid(text: str) -> bool:
    """Whether an editor would show no error."""
    return bool(validator().is_valid(yaml12.parse(text, "f").data))


def test_the_shipped_schema_is_that_of_the_models() -> None:
    assert SCHEMA.read_text() == schema.schema_text(), "run: pdserve schema > schema/recipe.schema.json"


def test_it_is_a_valid_schema_that_can_be_written(tmp_path: Path) -> None:
    validator().check_schema(schema.json_schema())
    schema.write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == schema.schema_text()


def test_every_key_is_explained() -> None:
    keys = {(model, key): about for model, made in MODELS.items() for key, about in made.get("properties", {}).items()}
    assert [key for key, about in keys.items() if len(about.get("description", "")) <= 8] == []


def test_complete_recipes_are_valid() -> None:
    texts = {path.name: path.read_text() for path in RECIPES.rglob("*.yaml")}
    assert [name for name, text in {**texts, "c": CPU, "g": GPU, "a": AGGREGATED}.items() if not valid(text)] == []


@each_row("text", [
    "extends: other.yaml\n",
    "extends: a.yaml\nlmcache: null\nengine: {args: {enforce-eager: null}, env: {A: null}}\n",
    "ports: {proxy: '${PORT:-8000}'}\nengine: {cache_reset_endpoint: '${FLAG}'}\nplatform: ${P}\n",
    "engine: {env: {A: {secret: B}, C: 1, D: x}}\n",
])  # fmt: skip
def test_what_the_loader_takes_is_valid(text: str) -> None:
    assert valid(text)


@each_row("text", [
    "prefil: {}\n", "prefill: {tp: 4}\n", "platform: gpu\n", "ports: {proxy: x}\n", "ports: {proxy: 70000}\n",
    "lmcache: {l1_size_gb: 0}\n", "lmcache: {on: [prefil]}\n", "engine: {args: {max_model_len: 1}}\n",
    "engine: {env: {A: {secrit: B}}}\n", "engine: {env: {A-B: 1}}\n", "engine: {cache_reset_endpoint: yes}\n",
    "prefill: {connector: {kind: mooncake, backends: [UCX]}}\n",
])  # fmt: skip
def test_what_the_loader_refuses_is_marked(text: str) -> None:
    assert not valid(text)
