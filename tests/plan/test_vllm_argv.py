"""The command line of an engine, beyond what the golden plans show."""

from __future__ import annotations

from typing import Any

from pdserve.recipe.flags import flag_words
from tests.plan.kit import plan, recipe, value_of
from tests.tables import each_row


def test_a_command_of_the_recipe_replaces_the_program_and_keeps_the_flags() -> None:
    argv = plan(recipe({"engine": {"command": ["numactl", "-N", "0", "engine"]}})).process("decode-0").argv
    assert argv[:6] == ("numactl", "-N", "0", "engine", "--model", "/srv/recipes/models/tiny")
    assert "--kv-transfer-config" in argv


def test_a_roles_flags_win_over_the_shared_ones_and_null_drops_a_flag() -> None:
    change = {
        "engine": {"args": {"max-model-len": 4096, "enforce-eager": True, "disable-uvicorn-access-log": None}},
        "decode": {"args": {"max-model-len": 8192, "enforce-eager": None}},
    }
    built = plan(recipe(change))
    prefill, decode = built.process("prefill-0"), built.process("decode-0")
    assert value_of(prefill, "--max-model-len") == "4096"
    assert value_of(decode, "--max-model-len") == "8192"
    assert "--enforce-eager" in prefill.argv
    assert "--enforce-eager" not in decode.argv
    assert "--disable-uvicorn-access-log" not in prefill.argv


@each_row(
    "value, arguments",
    [
        (True, ["--flag"]),
        (False, ["--no-flag"]),
        (None, []),
        (3, ["--flag", "3"]),
        (-1, ["--flag=-1"]),
        (0.9, ["--flag", "0.9"]),
        ("a b; $(c)", ["--flag", "a b; $(c)"]),
        ("-x", ["--flag=-x"]),
        ("", ["--flag", ""]),
        ([1, "b", {"c": True}], ["--flag", "1", "b", '{"c": true}']),
        ({"a": [1, None]}, ["--flag", '{"a": [1, null]}']),
    ],
)
def test_every_type_of_value_has_one_form(value: Any, arguments: list[str]) -> None:
    assert list(flag_words({"flag": value})) == arguments
