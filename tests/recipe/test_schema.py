"""The JSON Schema that editors use: in step with the models, complete, and never stricter than the loader."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.recipe import schema
from pdserve.recipe.load import yaml12
from tests.recipe.kit import AGGREGATED, CPU, GPU, RECIPES

SCHEMA = RECIPES.parent / "schema" / "recipe.schema.json"
MODELS = {"": schema.json_schema(), **schema.json_schema()["$defs"]}
FIELDS = [(model, field) for model, definition in MODELS.items() for field in definition.get("properties", {})]


def valid(data: Any) -> bool:
    """Whether an editor would show no error."""
    validator = importlib.import_module("jsonschema").Draft202012Validator(schema.json_schema())
    return bool(validator.is_valid(data))


def test_the_shipped_schema_is_that_of_the_models() -> None:
    assert SCHEMA.read_text() == schema.schema_text(), "run: pdserve schema > schema/recipe.schema.json"


def test_it_is_the_same_text_every_time(tmp_path: Path) -> None:
    schema.write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == schema.schema_text()


def test_it_is_a_valid_schema() -> None:
    importlib.import_module("jsonschema").Draft202012Validator.check_schema(schema.json_schema())


@pytest.mark.parametrize(("model", "field"), FIELDS)
def test_every_key_is_explained(model: str, field: str) -> None:
    assert len(MODELS[model]["properties"][field].get("description", "")) > 8


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert valid(yaml12.parse(path.read_text(), path.name).data)


@pytest.mark.parametrize("text", [CPU, GPU, AGGREGATED])
def test_complete_recipes_are_valid(text: str) -> None:
    assert valid(yaml12.parse(text, "f").data)


@pytest.mark.parametrize(
    "text",
    [
        "extends: other.yaml\n",
        "extends: [a.yaml, b.yaml]\nprefill: {instances: 2}\n",
        "extends: a.yaml\nlmcache: null\nengine: {args: {enforce-eager: null}, env: {A: null}}\n",
        "ports: {proxy: '${PORT:-8000}'}\nengine: {cache_reset_endpoint: '${FLAG}'}\nplatform: ${P}\n",
        "prefill: {devices: ['${A}', 1]}\n",
        "engine: {env: {A: {secret: B}, C: 1, D: x}}\n",
    ],
)
def test_what_the_loader_takes_is_valid(text: str) -> None:
    assert valid(yaml12.parse(text, "f").data)


@pytest.mark.parametrize(
    "text",
    [
        "prefil: {}\n",
        "prefill: {tp: 4}\n",
        "platform: gpu\n",
        "ports: {proxy: x}\n",
        "ports: {proxy: 70000}\n",
        "lmcache: {l1_size_gb: 0}\n",
        "lmcache: {on: [prefil]}\n",
        "engine: {args: {max_model_len: 1}}\n",
        "engine: {env: {A: {secrit: B}}}\n",
        "engine: {env: {A-B: 1}}\n",
        "engine: {cache_reset_endpoint: yes}\n",
        "prefill: {connector: {kind: moncake}}\n",
        "prefill: {connector: {kind: mooncake, backends: [UCX]}}\n",
        "prefill: {connector: {kind: multi, of: [{kind: mooncake}]}}\n",
        "extends: 7\n",
    ],
)
def test_what_the_loader_refuses_is_marked(text: str) -> None:
    assert not valid(yaml12.parse(text, "f").data)
