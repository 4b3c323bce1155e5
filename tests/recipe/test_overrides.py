"""`--set` and `--unset`."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import CPU, load, refused
from tests.tables import each_row


@each_row("option, path, value", [
    ("prefill.instances=2", ("prefill", "instances"), 2),
    ("engine.args.seed=7", ("engine", "args", "seed"), 7),
    ("engine.env.A='7'", ("engine", "env", "A"), "7"),
    ("lmcache.on=[prefill]", ("lmcache", "on"), ["prefill"]),
    ("description=a=b", ("description",), "a=b"),
    ("prefill.connector.of.0.num_workers=3", ("prefill", "connector", "of", 0, "num_workers"), 3),
    ("engine.args.compilation-config={level: 3}", ("engine", "args", "compilation-config"), {"level": 3}),
    ("engine.args.compilation-config.level=3", ("engine", "args", "compilation-config", "level"), 3),
    (r"engine.args.a\.b=1", ("engine", "args", "a.b"), 1),
])  # fmt: skip
def test_a_value_is_yaml(tmp_path: Path, option: str, path: tuple[str | int, ...], value: object) -> None:
    data: object = load(tmp_path, CPU, option).document
    for part in path:
        assert isinstance(data, dict | list)
        data = data[part]  # type: ignore[index]
    assert data == value


@each_row("option", ["nonsense=", "engine.enviroment=", "prefill.parallel.tpp=null"])
def test_an_unknown_key_is_refused_even_without_a_value(tmp_path: Path, option: str) -> None:
    key = option.partition("=")[0]
    message = refused(tmp_path, CPU, option)
    assert message.startswith(f"--set {option}: {key}: unknown key")


def test_a_variable_without_a_value_is_no_unknown_key(tmp_path: Path) -> None:
    assert load(tmp_path, CPU, "engine.env.ANYTHING=").recipe.engine.env == {}


def test_an_item_can_be_appended_to_a_list(tmp_path: Path) -> None:
    loaded = load(tmp_path, CPU, "engine.args.middleware=[a]", "engine.args.middleware.1=b")
    assert loaded.recipe.engine.args["middleware"] == ["a", "b"]


def test_unset_takes_a_key_away(tmp_path: Path) -> None:
    loaded = load(tmp_path, CPU + "description: x\n", unset=("description",))
    assert loaded.recipe.description == ""
    loaded = load(tmp_path, CPU + "engine: {args: {middleware: [a, b]}}\n", unset=("engine.args.middleware.0",))
    assert loaded.recipe.engine.args["middleware"] == ["b"]


def test_unset_comes_before_set_whatever_the_order_on_the_command_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, CPU, "model.id=org/model", unset=("model.path",))
    assert (loaded.recipe.model.id, loaded.recipe.model.path) == ("org/model", None)
    text = CPU + "verify: {output: exact, output_tokens: 3}\n"
    loaded = load(tmp_path, text, "verify.output_tokens=4", unset=("verify",))
    assert loaded.document["verify"] == {"output_tokens": 4}


def test_an_error_names_the_option_that_made_it(tmp_path: Path) -> None:
    assert refused(tmp_path, CPU, "prefill.instances=x") == (
        '--set prefill.instances=x: prefill.instances: expected a whole number, got "x"\n'
        "  what to do:   write for example `--set prefill.instances=1`"
    )
    assert refused(tmp_path, CPU, "prefil.instances=2").startswith("--set prefil.instances=2: prefil: unknown key")


@each_row("option, expected", [
    ("prefill.instances", "--set prefill.instances has no value"),
    ("=3", "--set =3: no key is in front of the ="),
    ("=hf_abcdefghijklmnopqrstuvwxyz", "--set =...: no key is in front of the ="),
    ("", "--set '': an empty option"),
    ("a..b=3", '--set a..b: "a..b" is not the path of a key'),
    ("extends=x.yaml", "extends is read before the options of the command line"),
    ("name.first=x", 'name is "small", it has no keys'),
    ("prefill.connector.of.9=x", "the list has 2 items, numbered from 0"),
    ("prefill.connector.of.x=x", "the list has 2 items, numbered from 0"),
    ("name=[", "not YAML"),
    ("name={a: 1, a: 2}", "name.a: the key is there twice, first at --set name={a: 1, a: 2}\n"),
])  # fmt: skip
def test_a_set_that_cannot_be_carried_out_is_refused(tmp_path: Path, option: str, expected: str) -> None:
    assert expected in refused(tmp_path, CPU, option)


def test_a_secret_that_is_no_yaml_is_not_repeated(tmp_path: Path) -> None:
    text = refused(tmp_path, CPU, "engine.env.HF_TOKEN=@s3cret")
    assert "--set engine.env.HF_TOKEN=...: not YAML" in text
    assert "s3cret" not in text


@each_row("option, expected", [
    ("prefil", "--unset prefil: prefil is not in the recipe\n  what to do:   did you mean prefill?"),
    ("prefill.instances", "--unset prefill.instances: prefill.instances is not in the recipe"),
    ("prefill.connector.of.2", "the list has 2 items, numbered from 0"),
    ("name.first", 'name is "small", it has no keys'),
    ("", "is not the path of a key"),
])  # fmt: skip
def test_an_unset_of_what_is_not_there_is_refused(tmp_path: Path, option: str, expected: str) -> None:
    assert expected in refused(tmp_path, CPU, unset=(option,))


def test_what_an_unset_leaves_missing_is_reported_with_the_option(tmp_path: Path) -> None:
    text = refused(tmp_path, CPU, unset=("model.served_name",))
    assert text.startswith("--unset model.served_name: model.served_name: missing")
