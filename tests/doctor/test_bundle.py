"""An archive for an issue: what is in it, and what is not."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from pdserve.cli.look import doctor
from pdserve.doctor import bundle
from pdserve.doctor.bundle import members
from pdserve.doctor.redaction import FORMS, REMOVED, Form, redact, redact_json
from pdserve.errors import StateError
from pdserve.run.directory import RunDir
from tests.doctor import kit
from tests.doctor.kit import TOKEN, died, run_dir
from tests.plan import kit as plan_kit
from tests.tables import each_row

KEY = "d0c70r-engine-key-0123456789"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with secrets; beside its own files there are requests, a link and a file of nobody."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "home"))
    lines = [
        f"INFO key={KEY}",
        "GET https://user:hunter22@hub.example/model",
        "headers: {'Authorization': 'Bearer abcdefgh.ijkl'}",
        f"environment: LMCACHE_TOKEN={KEY}",
        "tokens 17, max_tokens=12, tokenizer=tiny",
    ]
    run = run_dir(tmp_path, events=[died("decode-0", -9)], logs={"decode-0": lines})
    run.save_key(KEY)
    (run.inbox / "1.json").write_text('{"verb": "down"}')
    (run.diagnostics / "decode-0-1.txt").write_text(f"environ VLLM_API_KEY={KEY}\nstack of the main thread\n")
    (run.path / "notes.txt").write_text("private")
    (run.logs / "link.log").symlink_to(run.path / "notes.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.json").write_text("private")
    (run.path / "patches" / "decode-0").symlink_to(tmp_path / "elsewhere")
    return run


def bundled(run: RunDir, target: Path, *, logs: bool = True) -> dict[str, str]:
    """Name -> text of every file of the archive, in its order."""
    with pytest.raises(typer.Exit) as ended:
        doctor(str(run.path), json_=False, bundle=target, logs=logs)
    assert ended.value.exit_code == 10
    with tarfile.open(target) as archive:
        texts = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            texts[member.name.partition("/")[2]] = file.read().decode()
        return texts


def test_logs_are_in_it_on_request_alone(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = bundled(run, tmp_path / "issue.tar.gz", logs=False)
    assert {"doctor.json", "events.jsonl", "plan.json"} <= set(texts)
    assert not any(name.startswith("logs/") for name in texts)
    assert "--logs" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter, match="--bundle"):
        doctor(str(run.path), json_=False, bundle=None, logs=True)


def test_its_list_is_first_and_true(run: RunDir, tmp_path: Path) -> None:
    texts = bundled(run, tmp_path / "issue.tar.gz")
    assert next(iter(texts)) == "CONTENTS.txt"
    assert {"doctor.json", "recipe.yaml", "plan.json", "versions.json", "state.json", "events.jsonl"} <= set(texts)
    assert {line.split()[1] for line in texts["CONTENTS.txt"].splitlines()} == set(texts) - {"CONTENTS.txt"}
    assert any(name.startswith("logs/decode-0@") for name in texts)
    assert json.loads(texts["doctor.json"])["diagnoses"][0]["rule"] == "process-died"


def test_no_secret_of_the_run_is_in_it(run: RunDir, tmp_path: Path) -> None:
    texts = bundled(run, tmp_path / "issue.tar.gz")
    everything = "\n".join(texts.values())
    assert [secret for secret in (KEY, TOKEN, "hunter22", "abcdefgh.ijkl", "private") if secret in everything] == []
    assert "tokens 17, max_tokens=12, tokenizer=tiny" in everything
    assert "stack of the main thread" in everything
    assert not {"logs/link.log", "notes.txt", "inbox/1.json", "key-folder"} & set(texts)
    for document in (
        *(texts[name] for name in ("plan.json", "state.json", "versions.json", "doctor.json")),
        *texts["events.jsonl"].splitlines(),
    ):
        json.loads(document)


def test_it_is_its_users_alone_and_replaces_nothing(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "issue.tar.gz"
    bundled(run, file)
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    with pytest.raises(StateError, match="there already") as refused:
        doctor(str(run.path), json_=False, bundle=file)
    assert "new-issue.tar.gz" in str(refused.value.todo)
    assert file.read_bytes() == before


# --- what is a secret

HIDDEN = [
    ("--api-key=swordfish1 --hf_token b", "--api-key=[removed] --hf_token [removed]"),
    ('["--hf-token", "swordfish1", "--port", "8000"]', '["--hf-token", "[removed]", "--port", "8000"]'),
    ("https://bob:swordfish1@host/x", "https://[removed]@host/x"),
    ("https://bob:sword@fish1@host/x", "https://[removed]@host/x"),
    ("git+https://0123456789abcdef0123@host/x.git", "git+https://[removed]@host/x.git"),
    ("https://operator@host/x", "https://operator@host/x"),
    ('{"url":"http://h:1","to":"a@b"}', '{"url":"http://h:1","to":"a@b"}'),
    ("cookie: a=b; swordfish1\nport: 8", "cookie: [removed]\nport: 8"),
    ("{'x-api-key': 'swordfish1', 'a': 'b'}", "{'x-api-key': '[removed]', 'a': 'b'}"),
    ("(b'authorization', b'Token a'), (b'n', b'b')", "(b'authorization', b'[removed]'), (b'n', b'b')"),
    ("?X-Amz-Signature=swordfish1&a=b c", "?X-Amz-Signature=[removed] c"),
    ('a {\\"api_key\\": \\"sword\\\\\\"fish1\\", \\"n\\": 1}', 'a {\\"api_key\\": \\"[removed]\\", \\"n\\": 1}'),
    ("MASTER_PASSWORD=hunter2&swordfish99 next", "MASTER_PASSWORD=[removed] next"),
    ("token=ab[cd,ef;gh{ij}kl next", "token=[removed] next"),
    ("PASSWORD=it'ssword\"fish next", "PASSWORD=[removed] next"),
    ('{"api_key": "abc,d\\"ef ghi", "port": 8}', '{"api_key": "[removed]", "port": 8}'),
    ('{"a":"x_token=abc","b":["k_secret=d"]}', '{"a":"x_token=[removed]","b":["k_secret=[removed]"]}'),
    ("api_key=b'swordfish1', port=1", "api_key=b'[removed]', port=1"),
    ("Namespace(api_key=['swordfish1', 'b'], port=1)", "Namespace(api_key=[[removed]], port=1)"),
    ("api_key:\npassword: hunter2\n", "api_key:\npassword: [removed]\n"),
    ("\x1b[33mHF_TOKEN\x1b[0m=\x1b[35mswordfish1\x1b[0m next", "HF_TOKEN=[removed] next"),
    (
        "PGPASSWORD=a MYSQL_PWD=b DB_PASS=c auth=d HF_AUTH=e",
        "PGPASSWORD=[removed] MYSQL_PWD=[removed] DB_PASS=[removed] auth=[removed] HF_AUTH=[removed]",
    ),
    ("-----BEGIN RSA PRIVATE KEY-----\nswordfish1, torn", "-----BEGIN RSA PRIVATE KEY-----[removed]"),
    ("a cut\nc3dvcm\nZmlzaA==\n-----END PRIVATE KEY-----\nb", "a cut\n[removed]-----END PRIVATE KEY-----\nb"),
]
KEPT = [
    "max_tokens=12 prompt_tokens=619 tokenizer=tiny",
    '{"SSL_KEY_FILE": "/etc/key.pem", "secrets": {}}',
    "decode-0 at http://10.1.0.1:8000/v1 answers",
    "(Worker_TP0 pid=1) ERROR 11-22 14:54:41 [multiproc_executor.py:1] KeyError: 'layers.0.mlp.w13_weight_scale'",
    '{"secret": null, "api_key": false, "client_authorization": "replace"}',
    "max_tokens: 5, prompt_tokens=7, num_tokens: [1, 2], token_count=3, num_token=9",
    "Avg generation throughput: 412.5 tokens/s, time_per_token: 3, eos_token: '</s>', pad_token=[PAD]",
    "{'tokenizer': ['tiny'], 'tokenizer_mode': 'auto', 'skip_tokenizer_init': False}",
    "kv_role='kv_both', block_keys: ['a', 'b'], cache_key=x7, missing keys: ['a'], missing_keys: ['a']",
    "PWD=/root OLDPWD=/srv fusion_pass: x pass_config={'a': 'b'} author=me",
    "proxy:\n  auth:\n    keys_file: a\n  port: 8",
    '{"auth": {"keys_file": "a"}, "secrets": {}, "name": "port", "value": "8"}',
    "[('HF_HOME', 'x'), ('decode', 'y')] ['HF_TOKEN', 'WANDB_API_KEY'] ['key', 'value']",
    "token:\n\n[2026] next - max_tokens:\n  - 5",
    "eyJ is no token, nor is eyJhbGciOiJIUzI1NiJ9.json",
    "docker run -u 1000:1000 x; curl -o a:b http://c:1/d; a curl of -u alone",
]


@each_row("form", FORMS)
def test_each_form_takes_its_example(form: Form) -> None:
    clean = redact(form.example)
    assert clean.count(REMOVED) == 1
    assert not any(part in clean for part in ("swordfish", "c3dvcm", "aaaa", "a1a1", "CCCC", "bbbb", "1111", "dddd"))


@each_row("text, clean", HIDDEN)
def test_a_secret_is_removed_and_what_stands_around_it_stays(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(redact(text)) == clean


@each_row("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


DOCUMENTS = [
    ({"VLLM_API_KEY": "swordfish1", "port": 8}, {"VLLM_API_KEY": REMOVED, "port": 8}),
    (
        {"password": 12345678, "secret": None, "token": "", "key": False},
        {"password": REMOVED, "secret": None, "token": "", "key": False},
    ),
    ({"api_key": ["", "a", 5, None], "n": 1}, {"api_key": ["", REMOVED, REMOVED, None], "n": 1}),
    ({"argv": ["--hf-token", "a b", "--port", "8"]}, {"argv": ["--hf-token", REMOVED, "--port", "8"]}),
    ({"auth": {"keys_file": "a"}, "secrets": {}}, {"auth": {"keys_file": "a"}, "secrets": {}}),
    (
        {"authorization": "Token a", "client_authorization": "x"},
        {"authorization": REMOVED, "client_authorization": "x"},
    ),
    ({"line": 'x {"key": "a\\"b, c", "n": 1}'}, {"line": 'x {"key": "[removed]", "n": 1}'}),
    (
        ["A_TOKEN=a\n\ud800\\", {"sent to https://a:b@c": 1}],
        ["A_TOKEN=[removed]\n\ud800\\", {"sent to https://[removed]@c": 1}],
    ),
]


@each_row("document, clean", DOCUMENTS)
def test_a_json_document_stays_one(document: Any, clean: Any) -> None:
    assert json.loads(redact_json(json.dumps(document))) == clean


@each_row(
    "piece",
    ["x", "a-", '"', "://a:", "key='", "key:\n", "('KEY', '", "eyJaaaaaaaa.", "QUJD\n"],
)
def test_a_line_without_an_end_takes_no_time_without_an_end(piece: str) -> None:
    """Where the time grew with the square of the length, this would take minutes."""
    began = time.thread_time()
    clean = redact(piece * 10_000 + " TOKEN=swordfish1")
    assert time.thread_time() - began < 2
    assert "swordfish1" not in clean


def test_a_secret_that_is_not_set_here_is_named_before_the_archive_is_written(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {**kit.RECIPE, "decode": {**kit.RECIPE["decode"], "env": {"HF_TOKEN": {"secret": "MY_VALUE"}}}}
    run.write(run.plan, plan_kit.plan(plan_kit.recipe(recipe)).model_dump_json())
    log = next(run.logs.glob("decode-0@*.log"))
    log.write_text("it is swordfish-1, in a sentence\n")
    monkeypatch.delenv("MY_VALUE", raising=False)
    bundled(run, tmp_path / "1.tar.gz")
    shown = capsys.readouterr().err
    assert shown.index("MY_VALUE is not set here") < shown.index("will hold:")
    assert "export MY_VALUE" in shown
    monkeypatch.setenv("MY_VALUE", "swordfish-1")
    assert "swordfish-1" not in bundled(run, tmp_path / "2.tar.gz")[f"logs/{log.name}"]
    assert "not set" not in capsys.readouterr().err


@each_row("inside", [len("HF_TOKEN=sword-"), len("HF_TOKEN=sword-fish-1 d0c70r-eng")])
@each_row("cut", [1000, 8000])
def test_no_half_of_a_secret_is_left_at_the_cut_of_a_long_log(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, inside: int, cut: int
) -> None:
    """Without its name, or as a part of a known value, nothing tells that it is one."""
    monkeypatch.setattr(bundle, "BEGINNING_BYTES", 1000)
    monkeypatch.setattr(bundle, "END_BYTES", 2000)
    log = next(run.logs.glob("decode-0@*.log"))
    before = b"first\n".ljust(cut - inside - 1, b"x") + f"\nHF_TOKEN=sword-fish-1 {KEY}\n".encode()
    log.write_bytes(before.ljust(9994, b"y") + b"\nlast\n")
    [member] = [member for member in members(run, [KEY], logs=True) if member.name == f"logs/{log.name}"]
    assert (member.cut, member.data[:6], member.data[-6:]) == (True, b"first\n", b"\nlast\n")
    for half in (b"sword", b"fish", KEY[:8].encode(), KEY[-8:].encode()):
        assert half not in member.data


def test_a_known_value_is_removed_wherever_it_stands() -> None:
    assert redact("it is swordfish1, in a sentence", ["swordfish1", ""]) == f"it is {REMOVED}, in a sentence"
    assert redact("pw x-pw-y, but not pwd", ["pw"]) == f"{REMOVED} x-{REMOVED}-y, but not pwd"
    secret = 'pä"ss\\word'
    line = json.dumps({"x": f"it is {secret}"})
    clean = [redact(line, [secret]), redact(json.dumps({"x": secret}, ensure_ascii=False), [secret])]
    clean.append(redact_json(json.dumps({"line": line, secret: 1}), [secret]))
    for text in clean:
        json.loads(text)
        assert REMOVED in text
        assert "word" not in text
