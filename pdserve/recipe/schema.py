"""The JSON Schema of recipes and other strict files, for editors (yaml-language-server), made from the models.

It is a little more lenient than the loader, which has the last word: a recipe that extends another one may leave
keys out, any scalar may be a `${NAME}` reference, and null gives a key its default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pdserve.recipe.model import Recipe

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {"$ref": "#/$defs/Reference"}
_EXTENDS = {
    "description": "A recipe, or a list of them, that this one builds on; paths are relative to this file. Mappings "
    "are merged, lists and single values replace, null gives a key its default.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """Return the schema of recipes as data."""
    made = json_schema_of(Recipe, "pdserve recipe", "One deployment of vLLM, schema 1.")
    return {**made, "properties": {"extends": _EXTENDS, **made["properties"]}}


def json_schema_of(root: type[BaseModel], title: str, about: str) -> dict[str, Any]:
    """Return the schema of a file whose top level is `root`."""
    generated = root.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = {name: _model(model) for name, model in sorted(generated.pop("$defs").items())}
    definitions["Reference"] = {
        "type": "string",
        "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}",
        "description": "${NAME} or ${NAME:-default}: an environment variable.",
    }
    top = _model(generated)
    return {
        "$schema": SCHEMA_ID,
        "title": title,
        "description": about,
        **{key: value for key, value in top.items() if key not in ("title", "description")},
        "$defs": definitions,
    }


def schema_text() -> str:
    """Return the schema as the file schema/recipe.schema.json has it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def write(path: Path) -> None:
    """Write the schema's text to `path`."""
    path.write_text(schema_text(), encoding="utf-8")


def _model(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one model: every property may be null, nothing but the kind of a union's branch is
    required."""
    kept = {k: v for k, v in schema.items() if k not in ("title", "required")}
    properties = {name: _property(value) for name, value in schema.get("properties", {}).items()}
    if properties:
        kept["properties"] = properties
    if "const" in schema.get("properties", {}).get("kind", {}):
        kept["required"] = ["kind"]
        kept["properties"]["kind"] = _without_title(schema["properties"]["kind"])
    elif "secret" in properties:
        kept["required"] = ["secret"]
        kept["properties"]["secret"] = _without_title(schema["properties"]["secret"])
    return kept


def _property(schema: dict[str, Any]) -> dict[str, Any]:
    about = {k: v for k, v in schema.items() if k in ("description", "default")}
    bare = {k: v for k, v in schema.items() if k not in ("description", "default", "title")}
    options = [_value(option) for option in _options(bare)]
    for extra in (*([_REFERENCE] if any(_is_restricted(o) for o in options) else []), {"type": "null"}):
        if extra not in options:
            options.append(extra)
    return {**about, "anyOf": options}


def _options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the branches of a union. One of several connectors is known by `kind`, which every branch requires."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [deeper for option in schema[key] for deeper in _options(option)]
    return [schema]


def _value(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a value that is not a property: items of lists and mappings may be references too."""
    plain = _without_title(schema)
    if "patternProperties" in plain:  # flags and variables: their names are restricted, their values may be null
        plain["patternProperties"] = {k: _property(v) for k, v in plain["patternProperties"].items()}
        plain["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        inner = plain.get(key)
        if isinstance(inner, dict) and inner:
            options = [_value(option) for option in _options(inner)]
            if any(_is_restricted(o) for o in options) and _REFERENCE not in options:
                options.append(_REFERENCE)
            if key == "additionalProperties" and {"type": "null"} not in options:
                # In a recipe that extends another one it takes a key away.
                options.append({"type": "null"})
            plain[key] = options[0] if len(options) == 1 else {"anyOf": options}
    return plain


def _without_title(schema: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != "title"}


def _is_restricted(schema: dict[str, Any]) -> bool:
    """Return whether a scalar that is not just any text is expected."""
    scalar = schema.get("type") in ("integer", "number", "boolean")
    return scalar or "enum" in schema or "const" in schema or (schema.get("type") == "string" and "pattern" in schema)
