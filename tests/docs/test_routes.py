"""Every route of the installed vLLM is passed on, answered, or named in docs/proxy.md with the reason why not."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdserve.pd.requests.dialects import BY_PATH, CANCEL, RETRIEVE
from pdserve.pd.serve.member import create_app
from tests.docs.markdown import REPOSITORY

PAGE = (REPOSITORY / "docs" / "proxy.md").read_text()
METHODS = {"get", "post", "put", "delete", "patch", "head", "api_route", "websocket", "add_api_route", "mount"}
COMPUTED = {"route.path", "app.swagger_ui_oauth2_redirect_url"}
"""Paths that stand elsewhere as text, and a page of the documentation."""


def routes_of_vllm() -> set[str]:
    """Read, not imported: which routers an app gets depends on its model and its environment."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    paths = set()
    for file in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr not in METHODS or not (owner == "app" or owner.endswith("router")):
                continue
            path = node.args[0]
            if isinstance(path, ast.Constant) and isinstance(path.value, str):
                paths.add(path.value)
            else:
                assert ast.unparse(path) in COMPUTED, f"{file}: a route whose path cannot be read"
    return paths


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`(/[^`]*)`", text))


def split_page() -> tuple[str, str]:
    routes, refused = PAGE.split("### Not passed on")
    return routes.split("## Routes")[1], "\n".join(
        line.rsplit("|", 2)[0] for line in refused.split("## Signals")[0].splitlines() if line.startswith("| `")
    )


def offered() -> set[str]:
    own = {str(getattr(route, "path", "")) for route in create_app().routes}
    return own | {path.decode() for path in BY_PATH} | {RETRIEVE.path, CANCEL.path}


def test_every_route_of_vllm_is_offered_or_has_a_reason() -> None:
    routes, refused = routes_of_vllm(), in_backticks(split_page()[1])
    assert len(routes) > 50
    assert routes - offered() - refused == set()
    assert refused - routes == set(), "they are no routes of this vLLM"
    assert refused & offered() <= {"/ready"}
