"""Whatever is typed, loading ends in a recipe or in a RecipeError."""

from __future__ import annotations

import string
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdserve.errors import RecipeError
from pdserve.recipe.load import environment, yaml12
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.recipe.schema import json_schema
from tests.recipe.kit import CPU

KEYS = sorted(
    {key for model in (json_schema(), *json_schema()["$defs"].values()) for key in model.get("properties", {})}
)
WORDS = [
    "mooncake", "nixl", "lmcache-mp", "multi", "raw", "prefill", "decode", "cpu", "yes", "${X}", "$${", "../x", "é",
    "",
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 70000)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.sampled_from(WORDS)
    | st.text(string.printable, max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def attempt(text: str, *set_: str, unset: tuple[str, ...] = ()) -> LoadedRecipe | RecipeError:
    """The recipe or the error; anything else fails the test."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            return load_recipe(path, set_=set_, unset=unset, environ={"X": "1"})
        except RecipeError as error:
            error.render()
            return error


@quick
@given(st.text(max_size=200), st.text(":-[]{}&*!|>'\"#%@`,?\n\t x1", max_size=60))
def test_any_text_is_a_recipe_or_an_error(text: str, punctuation: str) -> None:
    assume(not any(0xD800 <= ord(c) < 0xE000 for c in text))
    for whole in (text, CPU + punctuation):
        assert isinstance(attempt(whole), LoadedRecipe | RecipeError)


@quick
@given(st.lists(st.sampled_from(KEYS) | st.integers(0, 3).map(str), min_size=1, max_size=4).map(".".join), values)
def test_any_set_is_a_recipe_or_an_error(path: str, value: Any) -> None:
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    assert isinstance(attempt(CPU, f"{path}={text}"), LoadedRecipe | RecipeError)


@quick
@given(values)
def test_what_is_dumped_is_read_back(value: Any) -> None:
    data = {"key": value}
    parsed = yaml12.parse(yaml12.dump(data), "f")
    assume(not parsed.problems)
    assert parsed.data == data
    assert [type(x) for x in _flat(parsed.data)] == [type(x) for x in _flat(data)]


@quick
@given(st.text(max_size=30))
def test_an_escaped_text_is_read_back(text: str) -> None:
    assert environment.substitute(str(environment.escape(text)), {}) == text


def _flat(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [data, *(x for value in data.values() for x in _flat(value))]
    if isinstance(data, list):
        return [data, *(x for value in data for x in _flat(value))]
    return [data]
