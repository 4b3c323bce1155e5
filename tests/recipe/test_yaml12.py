"""YAML as recipes have it: 1.2 scalars, lines for everything, and nothing lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.recipe.load import yaml12
from pdserve.recipe.load.problems import dotted
from tests.recipe.kit import CPU, refused
from tests.tables import each_row


@each_row("text, value", [
    ("true", True), ("False", False), ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("12", 12),
    ("-3", -3), ("012", 12), ("0o17", 15), ("0x1F", 31), ("1_000", "1_000"), ("12:30", "12:30"), ("0.9", 0.9),
    ("1e3", 1000.0), ("1.", 1.0), (".inf", ".inf"), (".nan", ".nan"), ("null", None), ("~", None), ("", None),
    ("2026-01-01", "2026-01-01"), ('"12"', "12"), ("'true'", "true"), ('">=0.26"', ">=0.26"),
])  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    data = yaml12.parse(f"key: {text}\n", "f").data
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


@each_row("text, expected", [
    ("a: 1\nb:\n\tc: 2\n", "f:3: not YAML: while scanning for the next token found character '\\t'"),
    ("a: 1\n---\nb: 2\n", "f:2: not YAML: expected a single document in the stream but found another document"),
    ("a: [1, 2\n", "f:2: not YAML: while parsing a flow sequence"),
    ("a: b: c\n", "f:1: not YAML: mapping values are not allowed here, at column 5"),
    ("a: *nowhere\n", "f:1: not YAML: found undefined alias 'nowhere', at column 4"),
    ("a: &x [*x]\n", "f:1: nested too deeply"),
    ("a: 1\nb: \x07\n", "f:2: not YAML: found U+0007, a control character, at column 4"),
    ("[" * 1000, "nested too deeply"),
])  # fmt: skip
def test_what_is_not_a_document_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        yaml12.parse(text, "f")
    assert expected in caught.value.render()


def test_aliases_that_explode_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    with pytest.raises(RecipeError, match="too many values after its aliases are expanded"):
        yaml12.parse(bomb, "f")


@each_row("text, expected", [
    ("a: 1\nb: 2\na: 3\n", "f:3: a: the key is there twice, first at f:1"),
    ("1: x\n", "f:1: 1: a key must be text, got 1"),
    ("? [a, b]\n: x\n", "f:1: ?: a key must be text, got a list or mapping"),
    ("<<: {a: 1}\n", "f:1: <<: merge keys (<<) are not supported"),
    ("a: !!python/object:os.system x\n", "the tag tag:yaml.org,2002:python/object:os.system is not supported"),
    ("a: !secret x\n", "f:1: a: the tag !secret is not supported"),
    ("a: 1e999\n", "f:1: a: the number is too large"),
    ("a: " + "9" * 5000 + "\n", "f:1: a: the number is too large"),
    ('a: "\\0"\n', "f:1: a: the value contains a NUL character"),
    ('a: "\\uD800"\n', "half of a surrogate pair"),
    ("a: x\u00a0\n", "f:1: a: the value contains the invisible character U+00A0"),
    ("a\u200b: x\n", "f:1: a\\u200b: the key contains the invisible character U+200B"),
])  # fmt: skip
def test_what_would_lose_a_setting_is_reported(text: str, expected: str) -> None:
    parsed = yaml12.parse(text, "f")
    problems = [f"{p.origin}: {dotted(p.path)}: {p.what}" for p in parsed.problems]
    assert any(expected in line for line in problems), problems


def test_all_such_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, CPU + "7: x\nname: again\nprefil: {}\n")
    assert text.startswith("recipe.yaml: 3 problems")
    assert "recipe.yaml:20: 7: a key must be text, got 7" in text
    assert "recipe.yaml:21: name: the key is there twice, first at recipe.yaml:2" in text
    assert "recipe.yaml:22: prefil: unknown key -> did you mean prefill?" in text


@each_row("text, expected", [
    ("", "recipe.yaml: the file is empty"),
    ("- a\n", "recipe.yaml:1: a recipe is a mapping of keys, this is a list"),
    ("hello\n", "recipe.yaml:1: a recipe is a mapping of keys, this is one value"),
])  # fmt: skip
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str, expected: str) -> None:
    assert refused(tmp_path, text).startswith(expected)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(RecipeError, match="not UTF-8 text: byte 6 cannot be read"):
        yaml_load(tmp_path / "recipe.yaml")


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xef\xbb\xbf" + CPU.replace("\n", "\r\n").encode())
    assert yaml_load(tmp_path / "recipe.yaml") == "small"


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(RecipeError, match="larger than 1 MiB"):
        yaml_load(tmp_path / "recipe.yaml")


def yaml_load(path: Path) -> str:
    from pdserve.recipe.load.loader import load_recipe

    return load_recipe(path, environ={}).recipe.name
