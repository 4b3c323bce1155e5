"""A proxy of several processes: one port, one view of load and limits, one end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve import procfs
from tests.proxy.deployment import MODEL, REPOSITORY, Deployment, Proxy

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 8}
PROCESSES = 3
SIGNALLED = """
import os, signal, sys
from pdserve.pd import processes

moment, parent, real, calls = sys.argv[1], os.getpid(), getattr(os, sys.argv[1]), []

def signalled(*args):
    if moment == "pipe" and os.getpid() == parent:
        calls.append(1)
        if len(calls) == 4:  # one for itself, two for the first member
            os.kill(parent, signal.SIGTERM)
    answer = real(*args)
    if moment == "fork" and answer and not calls or moment == "waitpid" and answer[0] and not calls:
        calls.append(1)
        os.kill(parent, signal.SIGTERM)
    return answer

def member(index, lines, asks):
    if moment == "waitpid" and index == 1:
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
    signal.sigwait(processes.SIGNALS)
    return 0

setattr(os, moment, signalled)
processes.SHORT_LIFE_SECONDS = 0.0
sys.exit(processes.Processes(3, member, None).run())
"""


def members(deployment: Deployment) -> set[int]:
    return procfs.descendants(deployment.proxy.process.pid)


def ask(deployment: Deployment, **headers: str) -> httpx.Response:
    """Over a connection of its own: the kernel gives it to one of the processes."""
    return httpx.post(f"{deployment.proxy.url}/v1/completions", json=BODY, headers=headers, trust_env=False, timeout=90)


def together(deployment: Deployment, count: int, **headers: str) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: ask(deployment, **headers), range(count)))


def test_all_processes_serve_and_count_on_one_page(deployment: Deployment) -> None:
    deployment.up(2, 2, processes=PROCESSES)
    assert len(members(deployment)) == PROCESSES
    assert {answer.status_code for answer in together(deployment, 24)} == {200}
    wanted = 'pdserve_proxy_requests_total{path="/v1/completions",status="200"} 24.0'
    while wanted not in httpx.get(f"{deployment.proxy.url}/metrics", trust_env=False, timeout=90).text:
        pass  # each process writes its page twice a second


def test_least_loaded_sees_the_load_of_all_processes(deployment: Deployment) -> None:
    deployment.up(1, 2, processes=PROCESSES, decode={"hold": "first"})
    with ThreadPoolExecutor(12) as pool:
        answers = []
        for number in range(12):
            answers.append(pool.submit(ask, deployment))
            # Two that choose in the same moment may both see a decode that is free.
            while sum(decode.state()["received"] for decode in deployment.decodes) <= number:
                pass
        assert [decode.state()["received"] for decode in deployment.decodes] == [6, 6]
        for decode in deployment.decodes:
            decode.script(hold="")
        assert {answer.result().status_code for answer in answers} == {200}


def test_the_limits_of_a_key_and_of_a_pool_hold_over_all_processes(deployment: Deployment, tmp_path: Path) -> None:
    key = "a-client-key"
    line = {"name": "team", "sha256": sha256(key.encode()).hexdigest(), "max_requests": 4}
    (tmp_path / "keys").write_text(json.dumps(line) + "\n")
    deployment.up(processes=PROCESSES, decode={"hold": "first"}, auth={"keys_file": str(tmp_path / "keys")})
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, deployment, authorization=f"Bearer {key}") for _ in range(20)]
        deployment.decodes[0].wait(running=4)
        while sum(answer.done() for answer in answers) < 16:
            pass
        deployment.decodes[0].script(hold="")
        assert Counter(answer.result().status_code for answer in answers) == {429: 16, 200: 4}
    assert deployment.decodes[0].state()["received"] == 4


def test_worker_states_reach_every_process_also_one_that_is_new(deployment: Deployment) -> None:
    deployment.up(1, 2, control=True, processes=PROCESSES)
    deployment.proxy.push("decode-0", "dead")
    for _ in range(PROCESSES - 1):  # `push` has waited for the first to say so
        deployment.proxy.until("decode-0 is dead")
    assert {answer.status_code for answer in together(deployment, 9)} == {200}
    assert deployment.decodes[0].state()["received"] == 0
    deployment.idle()


def test_they_end_together_and_a_stream_is_finished_first(deployment: Deployment) -> None:
    deployment.up(processes=PROCESSES, decode={"hold": "token"})
    body = BODY | {"stream": True, "max_tokens": 20}
    with httpx.stream(
        "POST", f"{deployment.proxy.url}/v1/completions", json=body, trust_env=False, timeout=90
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        deployment.proxy.process.send_signal(signal.SIGTERM)
        deployment.decodes[0].script(hold="")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert deployment.proxy.process.wait() == 0


@pytest.mark.parametrize("early", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_they_start_is_heard_once_they_can(deployment: Deployment, early: signal.Signals) -> None:
    proxy = Proxy(
        deployment.folder / "early.json", deployment.config("mooncake", processes=PROCESSES), key="", control=False
    )
    try:
        while not procfs.descendants(proxy.process.pid):
            assert proxy.process.poll() is None
        proxy.process.send_signal(early)
        if early is signal.SIGHUP:
            for _ in range(PROCESSES):
                proxy.until("serving on")
            proxy.process.terminate()
        assert proxy.process.wait() == 0
    finally:
        proxy.end()


@pytest.mark.parametrize("moment", ["pipe", "fork", "waitpid"])
def test_a_signal_at_any_moment_ends_all(moment: str) -> None:
    """Just before a member is there, just after, and when one that has ended is no longer its PID's owner."""
    ended = subprocess.run([sys.executable, "-c", SIGNALLED, moment], check=False, timeout=90, cwd=REPOSITORY)
    assert ended.returncode == 0


def test_members_die_with_their_parent(deployment: Deployment) -> None:
    deployment.up(processes=PROCESSES)
    before = members(deployment)
    deployment.proxy.process.kill()
    deployment.proxy.process.wait()
    for pid in before:
        # Orphans become children of this process (tests/conftest.py).
        os.waitpid(pid, 0)


def test_a_process_that_ends_at_once_ends_all(deployment: Deployment) -> None:
    deployment.up(processes=PROCESSES, moments={"pdserve.pd.processes.SHORT_LIFE_SECONDS": 60.0})
    os.kill(min(members(deployment)), signal.SIGKILL)
    assert deployment.proxy.process.wait() != 0
