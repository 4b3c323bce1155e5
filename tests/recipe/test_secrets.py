"""Secrets are named in a recipe and never written there, printed or saved."""

from __future__ import annotations

from pathlib import Path

from pdserve.recipe.base import SecretRef
from pdserve.recipe.load import show
from tests.recipe.kit import CPU, load, refused
from tests.tables import each_row

VALUE = "hunter2-do-not-print"


@each_row("name", [
    "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "secret", "hf-token", "apiKey",
    "REDIS_PASSWD", "PGPASSWORD", "MYSQL_PWD", "DB_PASS",
])  # fmt: skip
def test_names_of_secrets_are_known(name: str) -> None:
    assert show.secret_name(name)


@each_row("name", [
    "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "dbo-decode-token-threshold", "tokenizer", "max-num-batched-tokens",
    "SSL_KEY_FILE", "max_load_batch_keys", "block_keys", "cache_key", "token_count", "num_token", "time_per_token",
    "eos_token", "PWD", "OLDPWD", "fusion_pass", "kv_role", "MONKEY", "KEYBOARD", "KeyError", "TokenException",
])  # fmt: skip
def test_names_that_only_sound_like_secrets_are_not(name: str) -> None:
    assert not show.secret_name(name)


LITERALS = [
    f"engine.env.HF_TOKEN={VALUE}", f"prefill.env.OPENAI_API_KEY={VALUE}", "engine.env.DB_PASSWORD=12345678",
    f"lmcache.env.REDIS_PASSWORD={VALUE}", f"engine.args.hf-token={VALUE}", f"engine.args.api-key={VALUE}",
    f"engine.args.some-config={{nested: {{api_key: {VALUE}}}}}",
    f"engine.args.api-key=[a, {VALUE}]",
    f"lmcache.l2=[{{type: resp, password: {VALUE}}}]",
    f"lmcache.extra_args={{some-secret: {VALUE}}}",
    f"engine.env.PROXY='http://user:{VALUE}@host:80'",
    f"image='https://user:{VALUE}@registry/x'", f"engine.command=[run, --hf-token, {VALUE}]",
    f"engine.command=[run, --api-key={VALUE}]", f"proxy.command=[run, --admin-token, {VALUE}]",
    f"setup=['login --token {VALUE}']", f"setup=[[login, --password={VALUE}]]", f"slurm.options=['--secret={VALUE}']",
    f"engine.command=[env, 'WANDB_API_KEY={VALUE}', vllm, serve]",
    f"setup=['env WANDB_API_KEY={VALUE} pip install x']",
    f"setup=[[bash, -c, 'export WANDB_API_KEY={VALUE}; login']]",
    f"setup=[[bash, -c, 'A=1 WANDB_API_KEY=\"{VALUE}\" login']]",
    f'engine.args.some-config=\'{{"nested": {{"aws_secret_access_key": "{VALUE}"}}}}\'',
    f'engine.args.some-config=\'[{{"secret": "{VALUE}"}}]\'',
    f'engine.args.some-config=\'{{"api_key": "{VALUE}", "api_key": null}}\'',
    f'engine.args.some-config=\'{{"api_keys": ["{VALUE}"]}}\'',
    # In quotes of two, so that no scanner takes them for real ones.
    f"engine.args.some-flag='{'hf_' + 'a' * 30}'", f"setup=['login {'sk-' + 'a1' * 20}']",
    f"description='{'ghp_' + 'b' * 36}'", f"engine.env.OTHER='{'AKIA' + 'C' * 16}'",
]  # fmt: skip


@each_row("option", LITERALS)
def test_a_literal_secret_is_refused_without_being_repeated(tmp_path: Path, option: str) -> None:
    message = refused(tmp_path, CPU, option)
    assert "it would be saved and logged" in message
    assert VALUE not in message
    assert not any(text in message for text in ("12345678", "aaaaaa", "a1a1a1", "bbbbbb", "CCCCCC"))


@each_row("setup", [
    "[bash, -c, 'login --token $HF_TOKEN']", "[login, --token, $HF_TOKEN]", "[login, --token-file, /x]",
    "[run, --tokenizer, hf_internal]", "[run, --no-api-key, --verbose]", "[env, WANDB_API_KEY=$KEY, login]",
    "[bash, -c, 'WANDB_API_KEY=\"$KEY\" SSL_KEY_FILE=/x login']",
    "[bash, -c, 'WANDB_API_KEY=`cat /x` login']",
    "[python, -c, 'print(sorted(x, key=len))']",
])  # fmt: skip
def test_a_command_that_names_a_secret_without_its_value_is_taken(tmp_path: Path, setup: str) -> None:
    assert load(tmp_path, CPU, f"setup=[{setup}]").recipe.setup


@each_row("text", ['{"max_keys": 3}', '{"api_key": null}', "{not JSON", "[" * 100_000])
def test_a_text_under_args_without_a_secret_in_its_json_is_taken(tmp_path: Path, text: str) -> None:
    assert (
        load(tmp_path, CPU + f"engine: {{args: {{some-config: '{text}'}}}}\n").recipe.engine.args["some-config"] == text
    )


@each_row("value", [f"[{VALUE}]", f"{{value: {VALUE}}}", f"{{secret: {VALUE}}}", "1.5", f"{{secret: [{VALUE}]}}"])
def test_a_secret_of_the_wrong_shape_is_not_repeated(tmp_path: Path, value: str) -> None:
    message = refused(tmp_path, CPU + f"engine:\n  env:\n    HF_TOKEN: {value}\n")
    assert VALUE not in message


def test_a_syntax_error_beside_a_secret_does_not_print_the_line(tmp_path: Path) -> None:
    assert VALUE not in refused(tmp_path, CPU + f"engine:\n  env: {{HF_TOKEN: {VALUE}, a: b: c}}\n")


def test_the_error_has_what_to_write_instead(tmp_path: Path) -> None:
    message = refused(tmp_path, CPU + f"engine:\n  env:\n    HF_TOKEN: {VALUE}\n")
    assert message == (
        "recipe.yaml:22: engine.env.HF_TOKEN: looks like a secret with a literal value: it would be saved and logged\n"
        "  what to do:   export HF_TOKEN, of which only the name is saved: write `HF_TOKEN: {secret: HF_TOKEN}`"
    )


def test_a_secret_is_kept_by_name_for_engine_and_role(tmp_path: Path) -> None:
    own = "engine: {env: {HF_TOKEN: {secret: A}}}\n"
    loaded = load(tmp_path, CPU + own, "prefill.env.HF_TOKEN={secret: B}", environ={"A": VALUE})
    assert loaded.recipe.engine.env["HF_TOKEN"] == SecretRef(secret="A")
    assert loaded.recipe.prefill is not None
    assert loaded.recipe.prefill.env["HF_TOKEN"] == SecretRef(secret="B")
    assert VALUE not in loaded.to_yaml()
    assert "secret: A" in loaded.to_yaml()


@each_row("where", ["model.served_name", "engine.env.OTHER", "engine.env.HF_TOKEN", "description"])
def test_a_secret_variable_cannot_be_pulled_in_as_text(tmp_path: Path, where: str) -> None:
    message = refused(tmp_path, CPU, f"{where}=x${{HF_TOKEN}}", environ={"HF_TOKEN": VALUE})
    assert "${HF_TOKEN} looks like a secret" in message
    assert "{secret: HF_TOKEN}" in message
    assert VALUE not in message


def test_lmcache_gets_no_secrets_at_all(tmp_path: Path) -> None:
    message = refused(tmp_path, CPU, "lmcache.env.X={secret: MY_TOKEN}")
    assert "lmcache.env.X: the server prints its environment to any client (/env)" in message


@each_row("change, where, todo", [
    ("engine: {args: {hf-token: {secret: HF}}}", "engine.args.hf-token", "engine.env.HF_TOKEN: {secret: HF}"),
    ("engine: {args: {x: {deep: [{a: {secret: HF}}]}}}", "engine.args.x.deep.0.a", "command lines are readable"),
    ("lmcache: {extra_args: {s3-key: {secret: HF}}}", "lmcache.extra_args.s3-key", "let the L2 adapter read a"),
    ("decode: {connector: {kind: raw, config: {k: {secret: HF}}}}", "decode.connector.config.k", "command lines"),
])  # fmt: skip
def test_a_secret_on_a_command_line_is_refused(tmp_path: Path, change: str, where: str, todo: str) -> None:
    (tmp_path / "base.yaml").write_text(CPU)
    message = refused(tmp_path, f"extends: base.yaml\n{change}\n")
    assert f"recipe.yaml:2: {where}: a secret cannot stand here: it is looked up for env only" in message
    assert todo in message
