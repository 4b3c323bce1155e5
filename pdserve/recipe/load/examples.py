"""Values for keys that have none, or a wrong one: the default, or one value of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from pdserve.recipe.load import yaml12
from pdserve.recipe.load.problems import Line, Path
from pdserve.recipe.load.shape import Shape

EXAMPLES: Mapping[str, Any] = {
    "name": "my-deployment",
    "platform": "cuda",
    "model": {"id": "org/model", "served_name": "my-model"},
    "served_name": "my-model",
    "l1_size_gb": 64,
    "secret": "HF_TOKEN",
    "hosts": [{"name": "gpu1"}, {"name": "gpu2"}],
    "kind": "docker",
    "config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "certificate": "server.crt",
    "key": "server.key",
    "endpoint": "http://collector:4318/v1/traces",
}
"""Of keys without a default: one value of many."""


def missing(path: Path, data: Any, shape: Shape) -> tuple[str | None, Line | None]:
    """What a key that is not there is for, and the line to write."""
    info = shape.field_at(path, data)
    about = info.description.rstrip(".") if info is not None and info.description else None
    key, allowed = str(path[-1]), shape.choices(path, data)
    if len(allowed) == 1:
        return None, Line(path, yaml12.flow(allowed[0]))
    if path[:1] == ("hosts",) and key == "name":
        return about, Line(path, "gpu1", example=True)
    if key not in EXAMPLES or (allowed and EXAMPLES[key] not in allowed):
        return about, None
    return about, Line(path, yaml12.flow(EXAMPLES[key]), example=True)


def value(path: Path, data: Any, shape: Shape) -> Line | None:
    """The default of the key at `path`, or an example of its values."""
    info = shape.field_at(path, data)
    default = None if info is None or info.default is PydanticUndefined else info.default
    if isinstance(default, str | int | float | list) and default not in ("", []):
        whole = int(default) if isinstance(default, float) and default.is_integer() else default
        return Line(path, yaml12.flow(whole), example=True)
    if path and path[-1] in EXAMPLES:
        return Line(path, yaml12.flow(EXAMPLES[str(path[-1])]), example=True)
    return None
