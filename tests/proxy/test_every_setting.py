"""Every key of a recipe's `proxy:` section is read somewhere: one that nothing reads does nothing. What each does is in
the tests of what it is about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

import pdserve.pd
from pdserve.pd.config.serving import Serving


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for option in get_args(annotation):
        yield from models(option)


def keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """The path of every key below this model, and its name."""
    for name, field in model.model_fields.items():
        yield f"{prefix}.{name}", name
        for inner in models(field.annotation):
            yield from keys(inner, f"{prefix}.{name}")


def test_every_setting_is_used() -> None:
    sources = [path for path in Path(pdserve.pd.__path__[0]).rglob("*.py") if path.name != "settings.py"]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert [path for path, name in keys(Serving, "proxy") if name not in {*used, "kind"}] == []
