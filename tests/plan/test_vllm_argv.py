"""The command line of an engine: what a recipe sets in it, and the table of flags that pdserve sets itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pdserve.recipe.flags import ENGINE_FLAGS, SERVER_FLAGS, flag_words
from pdserve.recipe.rules import problems
from tests.plan.kit import on_gpus, plan, recipe, value_of, with_lmcache
from tests.plan.shapes import SHAPES, SPANNING, shape
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


OVERRIDABLE = {
    "enable-prompt-tokens-details",
    "disable-uvicorn-access-log",
    "enable-prefix-caching",
    "session-ttl-seconds",
    "isolated-ipc",
    "download-dir",
    "speculative-config",
}
"""Defaults, which a recipe may override, and what the recipes of the layouts set."""


@each_row("name", SHAPES)
def test_every_flag_on_a_command_line_is_in_the_table_and_given_once(name: str) -> None:
    for process in shape(name).processes:
        if process.is_engine or process.is_lmcache:
            table = ENGINE_FLAGS if process.is_engine else SERVER_FLAGS
            flags = Counter(word.removeprefix("--").removeprefix("no-") for word in process.argv if word[:2] == "--")
            assert flags.keys() - OVERRIDABLE <= table.keys(), process.name
            assert {flag for flag, count in flags.items() if count > 1} <= {"l2-adapter"}, process.name


def test_a_flag_that_is_ours_in_some_recipes_is_refused_in_those_alone() -> None:
    flag = {"engine": {"args": {"distributed-executor-backend": "ray"}}}
    path = ("engine", "args", "distributed-executor-backend")
    assert path not in {problem.path for problem in problems(recipe(on_gpus(8, 8), flag))}
    spanning = {"prefill": {"parallel": SPANNING}}
    assert path in {problem.path for problem in problems(recipe(on_gpus(8, 8), spanning, flag))}
    lazy = with_lmcache(extra_args={"l1-use-lazy": False})
    path = ("lmcache", "extra_args", "l1-use-lazy")
    assert path in {problem.path for problem in problems(recipe(lazy))}
    assert path not in {problem.path for problem in problems(recipe(on_gpus(), lazy))}
