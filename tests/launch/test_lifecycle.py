"""The verbs on a running deployment: detach, status, logs, restart, list, down; nothing is thrown away for a typo."""

from __future__ import annotations

import json
import os
import select
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.pd.limits import keys
from pdserve.system import procfs
from tests.launch.deployment import (
    BODY,
    LINE_SECONDS,
    Deployment,
    assert_nothing_left,
    pdserve,
    put,
    read_json,
    recipe,
    serving,
    up,
)
from tests.proxy.test_tls import made

pytestmark = pytest.mark.process


def change(file: Path, key: str, value: object) -> None:
    document = yaml.safe_load(file.read_text())
    put(document, key.split("."), value)
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def test_detach_status_logs_list_down(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path), "--detach")
    assert code == 0, output
    assert "next: pdserve status" in output

    code, output = pdserve("status")
    assert code == 0, output
    assert "fake: ready" in output
    rows = {line.split("\t")[0]: line.split("\t") for line in output.splitlines() if "\t" in line}
    assert {"lmcache-0", "prefill-0", "decode-0", "proxy"} <= set(rows)
    assert "running 0 waiting 0" in rows["decode-0"][-1]
    assert "workers 16" in rows["lmcache-0"][-1]
    assert any("open without key" in line and "bootstrap" in line for line in output.splitlines())

    status = read_json(pdserve("status", "--json")[1])
    assert status["processes"]["prefill-0"]["pid"] > 0
    assert status["processes"]["decode-0"]["engine"]["running"] == 0

    code, output = pdserve("logs", "prefill-0", "-n", "5")
    assert code == 0
    assert 0 < len(output.splitlines()) <= 5
    assert pdserve("logs", "prefil-0")[0] == 8

    assert "fake" in pdserve("list")[1]
    assert json.loads(pdserve("list", "--json")[1])[0]["phase"] == "ready"

    assert pdserve("down")[0] == 0
    assert_nothing_left(Deployment(None, pdserve_home))
    code, output = pdserve("status")
    assert (code, "fake: stopped" in output) == (5, True)
    assert pdserve("down") == (0, "fake: not running")


def test_the_record_is_complete_and_holds_no_secret(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("MY_TOKEN", secret)
    settings: dict[str, Any] = {
        "engine__env": {"HF_TOKEN": {"secret": "MY_TOKEN"}},
        "proxy__auth": {"client_authorization": "forward"},  # engines then see the launcher's own
    }
    with up(recipe(tmp_path, **settings), pdserve_home) as deployment:
        key = serving(deployment).run.read_key()
        held = Path(f"/proc/{deployment.id_of('decode-0').pid}/environ").read_bytes()
        assert f"HF_TOKEN={secret}".encode() in held, "the value reaches the process"
    for path in deployment.run.path.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert secret not in text, path
            assert key not in text, path
    assert not deployment.run.key_file.exists()
    assert {"recipe.yaml", "plan.json", "versions.json", "state.json", "events.jsonl"} <= {
        path.name for path in deployment.run.path.iterdir()
    }
    assert "secret: MY_TOKEN" in deployment.run.recipe.read_text()


def test_a_secret_that_is_not_set_is_named_before_anything_starts(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path, engine__env={"HF_TOKEN": {"secret": "NOT_SET_ANYWHERE"}}))
    assert code == 3
    assert "NOT_SET_ANYWHERE" in output


def test_a_typo_in_the_proxy_section_does_not_cost_the_engines(tmp_path: Path, pdserve_home: Path) -> None:
    file, broken = recipe(tmp_path, proxy__command=[sys.executable, "-c", "import tpyo"]), tmp_path / "broken"
    with up(file, pdserve_home, "--keep-on-failure") as deployment:
        deployment.command.expect("deployment is failed")
        engines = {name: deployment.id_of(name) for name in ("lmcache-0", "prefill-0", "decode-0")}
        assert pdserve("status")[0] == 5
        program = (
            f"import sys, pathlib; pathlib.Path({str(broken)!r}).exists() and sys.exit(7)\n"
            "import pdserve.proxy as p; sys.exit(p.main())"
        )
        change(file, "proxy.command", [sys.executable, "-c", program])
        code, output = pdserve("up", file)
        assert code == 0, output
        assert "started proxy; ready" in output
        assert {name: deployment.id_of(name) for name in engines} == engines
        assert pdserve("up", file)[1].endswith("already up")
        broken.touch()
        code, output = pdserve("restart", "proxy")
        assert code == 4
        assert "the proxy was not replaced: 1.1: it does not start (exit code 7)" in output
        assert deployment.post("/v1/completions", BODY)[0] == 200


def test_detached_and_kept_on_failure(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path, decode__env={"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "the very last words"})
    code, output = pdserve("up", file, "--detach", "--keep-on-failure")
    assert code == 4, output
    assert output.count("| the very last words") == 1
    status = read_json(pdserve("status", "--json")[1])
    assert status["phase"] == "failed"
    assert status["processes"]["prefill-0"]["phase"] in ("ready", "stopped")
    key = Deployment(None, pdserve_home).run.key_file
    assert key.exists()
    assert pdserve("down")[0] == 0
    assert not key.exists()


def test_status_of_nothing(tmp_path: Path, pdserve_home: Path) -> None:
    for verb in ("status", "down", "verify", "logs"):
        code, output = pdserve(verb)
        assert code == 8, output
        assert "nothing was started yet" in output


def test_dry_run_starts_nothing(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("up", recipe(tmp_path), "--dry-run")
    assert code == 0
    assert "kv_producer" in output
    assert not pdserve_home.exists()


def test_restart_proxy_refuses_no_connection_and_breaks_no_stream(tmp_path: Path, pdserve_home: Path) -> None:
    slow = recipe(tmp_path, prefill__env={"FAKE_PREFILL_SECONDS": "4"}, proxy__drain_seconds=60)
    with up(slow, pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        url, stop, broken = deployment.state().endpoint, threading.Event(), list[str]()
        root = deployment.id_of("proxy")
        served = [os.pidfd_open(pid) for pid in procfs.descendants(root.pid)]

        def knock() -> None:
            while not stop.is_set():
                try:
                    answer = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60)
                    broken.extend([] if answer.status_code == 200 else [answer.text])
                except httpx.HTTPError as error:
                    broken.append(repr(error))

        def stream() -> str:
            body = BODY | {"max_tokens": 40, "stream": True}
            return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).text

        with ThreadPoolExecutor() as pool, ExitStack() as stack:
            stack.callback(stop.set)
            knocking, streams = pool.submit(knock), [pool.submit(stream) for _ in range(4)]
            assert pdserve("restart", "proxy") == (0, "proxy is ready")
            assert all(stream.result().endswith("data: [DONE]\n\n") for stream in streams)
            stop.set()
            knocking.result()
        assert broken == []
        assert deployment.id_of("proxy") == root
        assert served
        for old in served:  # they end behind their last requests
            assert select.select([old], [], [], LINE_SECONDS)[0]
            os.close(old)
        assert deployment.events("rolled")


def test_with_tls_and_keys(tmp_path: Path, pdserve_home: Path) -> None:
    pair, file = made(tmp_path, "front"), tmp_path / "keys.jsonl"
    key, line = keys.new_key("team-a")
    file.write_text(line + "\n")
    settings: dict[str, Any] = {
        "proxy__tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
        "proxy__auth": {"keys_file": str(file)},
    }
    with up(recipe(tmp_path, **settings), pdserve_home) as deployment:
        deployment.command.expect("serving fake at https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(pair.certificate))
        with httpx.Client(verify=context, trust_env=False, base_url=str(deployment.state().endpoint)) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 401
            bearer = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=BODY, headers=bearer).status_code == 200
        root = deployment.id_of("proxy")
        assert pdserve("restart", "proxy") == (0, "proxy is ready")
        assert (deployment.id_of("proxy"), len(deployment.events("rolled"))) == (root, 1)
        # It waits until decode has no request left, which it asks the proxy.
        assert pdserve("restart", "decode-0") == (0, "decode-0 is ready")
