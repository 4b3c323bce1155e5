"""`${NAME}` and `${NAME:-default}` in values."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import CPU, load, refused
from tests.tables import each_row


@each_row("written, environ, expected", [
    ("${NAME}", {"NAME": "x"}, "x"), ("a-${NAME}-b", {"NAME": "x"}, "a-x-b"),
    ("${A}${B}", {"A": "1", "B": "2"}, "12"),
    ("${NAME:-d}", {}, "d"), ("${NAME:-d}", {"NAME": ""}, "d"), ("${NAME:-d}", {"NAME": "x"}, "x"),
    ("${NAME:-}x", {}, "x"), ("/m/${NAME:-a/b.c}", {}, "/m/a/b.c"), ("$${NAME}", {"NAME": "x"}, "${NAME}"),
    ("$${A}-${A}", {"A": "x"}, "${A}-x"), ("$NAME", {"NAME": "x"}, "$NAME"),
    ("${NAME}", {"NAME": "${OTHER}", "OTHER": "y"}, "${OTHER}"),
])  # fmt: skip
def test_references_are_replaced_once(tmp_path: Path, written: str, environ: dict[str, str], expected: str) -> None:
    loaded = load(tmp_path, CPU.replace("served_name: small", f"served_name: {written}"), environ=environ)
    assert loaded.recipe.model.served_name == expected


@each_row("quotes", ["", '"', "'"])
def test_a_number_is_typed_where_a_number_belongs(tmp_path: Path, quotes: str) -> None:
    text = CPU + f"ports:\n  proxy: {quotes}${{PORT}}{quotes}\n  prefill: {quotes}${{OTHER:-8150}}{quotes}\n"
    loaded = load(tmp_path, text, environ={"PORT": "9000"})
    assert (loaded.recipe.ports.proxy, loaded.recipe.ports.prefill) == (9000, 8150)


def test_a_boolean_is_typed(tmp_path: Path) -> None:
    text = CPU + "engine: {cache_reset_endpoint: '${FLAG}'}\n"
    assert load(tmp_path, text, environ={"FLAG": "true"}).recipe.engine.cache_reset_endpoint is True
    message = refused(tmp_path, text, environ={"FLAG": "yes"})
    assert 'engine.cache_reset_endpoint: expected true or false, got "yes"' in message


def test_where_a_key_takes_both_quotes_make_it_text(tmp_path: Path) -> None:
    text = CPU + 'engine:\n  args:\n    seed: ${N}\n    chat-template: "${N}"\n'
    assert load(tmp_path, text, environ={"N": "7"}).recipe.engine.args == {"seed": 7, "chat-template": "7"}


@each_row("written, environ, expected", [
    ("${NAME}", {}, "the environment variable NAME is not set\n  what to do:   set it, or write ${NAME:-default}"),
    (
        "${NAME}",
        {"NAME": ""},
        "the environment variable NAME is empty\n  what to do:   set it, or write ${NAME:-default}",
    ),
    ("${NAME", {}, "is not a reference"), ("${}", {}, "is not a reference"), ("${1A}", {}, "is not a reference"),
    ("x${A B}", {}, "or $${ for a literal ${"),
    ("${NAME}", {"NAME": "a\0b"}, "the variable contains a NUL character"),
    ("${NAME}", {"NAME": "\udcff"}, "the variable is not UTF-8 text"),
])  # fmt: skip
def test_a_bad_reference_has_its_line(tmp_path: Path, written: str, environ: dict[str, str], expected: str) -> None:
    text = refused(tmp_path, CPU.replace("served_name: small", f"served_name: {written}"), environ=environ)
    assert text.startswith("recipe.yaml:6: model.served_name: ")
    assert expected in text


def test_an_overridden_reference_needs_no_variable(tmp_path: Path) -> None:
    text = CPU.replace("served_name: small", "served_name: ${NAME}")
    assert load(tmp_path, text, "model.served_name=x").recipe.model.served_name == "x"


def test_set_values_may_use_variables_too(tmp_path: Path) -> None:
    assert load(tmp_path, CPU, "ports.proxy=${PORT}", environ={"PORT": "9000"}).recipe.ports.proxy == 9000
